"""Metric sinks besides `metrics.jsonl`, by name."""

from __future__ import annotations

from pathlib import Path

from asyncrl.config.recipe import Recipe
from asyncrl.observability.metrics import Sink
from asyncrl.observability.sinks.tensorboard import TensorBoardSink
from asyncrl.observability.sinks.wandb import WandbSink

SINKS: dict[str, type[WandbSink] | type[TensorBoardSink]] = {"wandb": WandbSink, "tensorboard": TensorBoardSink}


def build_sinks(recipe: Recipe, name: str, directory: Path) -> list[Sink]:
    """The sinks of the recipe; `preflight.check_packages` has seen that their packages are installed."""
    return [SINKS[sink](recipe, name, directory) for sink in recipe.observability.sinks]
