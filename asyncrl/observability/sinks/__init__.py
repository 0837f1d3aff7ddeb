"""Metric sinks besides `metrics.jsonl`, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from asyncrl.config.recipe import Recipe
from asyncrl.observability.sinks.sink_thread import Sink, SinkFeed
from asyncrl.observability.sinks.tensorboard import TensorBoardSink
from asyncrl.observability.sinks.wandb import WandbSink

SINKS: dict[str, Callable[[Path, str, str, Mapping[str, Any]], Sink]] = {
    "wandb": WandbSink,
    "tensorboard": lambda directory, name, project, written: TensorBoardSink(directory / "tensorboard"),
}


def build_sinks(recipe: Recipe, written: Mapping[str, Any], name: str, directory: Path) -> list[SinkFeed]:
    """The sinks of the recipe; `preflight.check_packages` has checked that their packages are installed. Starts
    nothing.

    Args:
        written: the recipe without secrets.

    Raises ConfigError if a sink rejects these settings.
    """
    asked = recipe.observability
    sinks = {sink: SINKS[sink](directory, name, asked.wandb_project, written) for sink in asked.sinks}
    return [SinkFeed(sink, made) for sink, made in sinks.items()]
