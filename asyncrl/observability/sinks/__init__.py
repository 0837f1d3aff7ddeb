"""Metric sinks besides `metrics.jsonl`, by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.config.recipe import Recipe
from asyncrl.observability.sinks.sink_thread import SinkFeed
from asyncrl.observability.sinks.tensorboard import TensorBoardSink
from asyncrl.observability.sinks.wandb import WandbSink

SINKS: dict[str, type[WandbSink] | type[TensorBoardSink]] = {"wandb": WandbSink, "tensorboard": TensorBoardSink}


def build_sinks(recipe: Recipe, written: Mapping[str, Any], name: str, directory: Path) -> list[SinkFeed]:
    """The sinks of the recipe; `preflight.check_packages` has checked that their packages are installed. Starts
    nothing.

    Args:
        written: the recipe as others may read it.

    Raises ConfigError: a sink does not take these settings.
    """
    sinks = {sink: SINKS[sink](recipe, written, name, directory) for sink in recipe.observability.sinks}
    return [SinkFeed(sink, made) for sink, made in sinks.items()]
