"""What the fork server of a run imports, and where there is one."""

from __future__ import annotations

import os

from asyncrl.cluster.address import joined_address
from asyncrl.cluster.fork_server import ForkServer
from asyncrl.cluster.janitor import RUN_VARIABLE
from asyncrl.config.recipe import Recipe
from asyncrl.inference.engines import ENGINES, SCRATCH
from asyncrl.trainer.backends import BACKENDS
from asyncrl.trainer.trainer_spec import TrainerSpec


def start_preloading(forks: ForkServer, recipe: Recipe) -> None:
    """Starts the server where the run starts Ray."""
    if joined_address(recipe.ray.address) is not None:
        return
    engine = ENGINES[recipe.rollout.engine]
    modules = ["torch", "transformers", "transformers.models.auto.modeling_auto"]
    modules += [BACKENDS[recipe.trainer.backend].backend.partition(":")[0], "asyncrl.trainer.trainer_worker"]
    modules += [*engine.preload, "asyncrl.rollout.rollouter", "asyncrl.queue.message_queue"]
    local = {n: os.environ.get(n, value) for n, value in engine.local_environment.items() if SCRATCH not in value}
    variables = {**recipe.ray.env, **TrainerSpec.of(recipe).environment, **engine.environment, **local}
    forks.start({**os.environ, **variables, RUN_VARIABLE: forks.run_id}, modules, recipe.model.path)
