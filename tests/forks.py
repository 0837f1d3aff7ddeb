"""Ray nodes of the tests whose processes are forked, as those of a run on one machine are: each would import for
seconds what the one before it has imported."""

import contextlib
import functools
from collections.abc import Callable, Iterator

from ray._private import ray_constants

from asyncrl.config.load import load_recipe
from asyncrl.driver.cluster.fork_server import ForkServer
from asyncrl.driver.preload import start_preloading
from tests.processes import QUICKSTART


@contextlib.contextmanager
def fork_server() -> Iterator[Callable[[], contextlib.AbstractContextManager[None]]]:
    """Within a call of what it gives, Ray nodes are started that fork their processes as long as this is entered.
    Processes of other engines and backends, which need other variables, are started anew."""
    with ForkServer() as server:
        # In mode sync ranks ask for a variable more, which is nothing to the processes of other modes.
        start_preloading(server, load_recipe(QUICKSTART, ["mode=sync"]))
        yield functools.partial(server.asked_by_ray, ray_constants)
