"""Chooses the modules that the fork server of a run, an evaluation or a fleet imports, and starts it if useful."""

from __future__ import annotations

import os

from asyncrl.config.load import environment_defaults
from asyncrl.config.recipe import Recipe
from asyncrl.driver.cluster.fork_server import ForkServer
from asyncrl.driver.cluster.janitor import RUN_VARIABLE
from asyncrl.driver.cluster.placement import joined_address
from asyncrl.inference.engines import ENGINES, SCRATCH
from asyncrl.trainer.backends import BACKENDS
from asyncrl.trainer.trainer_spec import TrainerSpec

OF_RAY = ("jsonschema", "requests", "msgpack", "uvloop", "google.protobuf")
"""Dependencies of Ray: half of the time of Ray's own import, which stays in each process."""

OF_RANKS = (
    "asyncrl.trainer.trainer_worker",
    "asyncrl.trainer.rank_device",
    "asyncrl.trainer.host_copies",
    "asyncrl.weights.encodings.delta_encoder",
)
"""The class of a trainer rank, and the modules that only its process imports."""


def start_preloading(forks: ForkServer, recipe: Recipe, *, trains: bool = True) -> None:
    """Starts the fork server, unless the run joins a cluster. `trains`: False if there are only replicas."""
    if joined_address(recipe.ray.address) is not None:
        return
    engine = ENGINES[recipe.rollout.engine]
    modules = ["torch", "transformers", "transformers.models.auto.modeling_auto"]
    if trains:
        modules += [BACKENDS[recipe.trainer.backend].backend.partition(":")[0], *OF_RANKS]
    modules += engine.preload
    if trains:
        modules += ["asyncrl.rollout.rollouter", "asyncrl.queue.message_queue"]
    modules += OF_RAY
    local = {n: os.environ.get(n, value) for n, value in engine.local_environment.items() if SCRATCH not in value}
    variables = {**recipe.ray.env, **(TrainerSpec.of(recipe).environment if trains else {})}
    variables |= {**engine.environment, **local, RUN_VARIABLE: forks.run_id}
    forks.start({**os.environ, **environment_defaults(), **variables}, modules, recipe.model.path)
