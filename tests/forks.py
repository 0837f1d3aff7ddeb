"""Ray nodes of the tests whose processes are forked, as those of a run on one machine are: each would import for
seconds what the one before it has imported."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator

from ray._private import ray_constants

from asyncrl.cluster.fork_server import ForkServer
from asyncrl.config.load import environment_defaults
from asyncrl.inference.engines import ENGINES

MODULES = (
    *("torch", "transformers", "transformers.models.auto.modeling_auto", "transformers.models.qwen3.modeling_qwen3"),
    *("asyncrl.trainer.fsdp.backend", "asyncrl.trainer.trainer_worker", *ENGINES["torch"].preload),
    *("asyncrl.rollout.rollouter", "asyncrl.queue.message_queue"),
)


@contextlib.contextmanager
def fork_server() -> Iterator[Callable[[], contextlib.AbstractContextManager[None]]]:
    """Within a call of what it gives, Ray nodes are started that fork their processes as long as this is entered.
    Processes of other engines and backends, which need other variables, are started anew."""
    with ForkServer() as server:
        waits = {"GOMP_SPINCOUNT": "1000"}  # as ranks ask for that train alone; others do not mind
        server.start({**os.environ, **environment_defaults(), **ENGINES["torch"].environment, **waits}, MODULES)
        yield functools.partial(server.asked_by_ray, ray_constants)
