"""Ray for one run or server: joins or starts a cluster, and cleans up afterwards, however it ends.

A cluster started here is private to this machine and run: its servers listen on 127.0.0.1 and require a token (file
mode 0600); sockets and logs are in a directory of mode 0700. A joined cluster is used as configured.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private import ray_constants
from ray._private.node import Node
from ray._raylet import AuthenticationTokenLoader, Config

from asyncrl.config.load import environment_defaults
from asyncrl.driver.cluster.fork_server import ForkServer
from asyncrl.driver.cluster.janitor import RUN_VARIABLE, Janitor
from asyncrl.driver.cluster.placement import joined_address
from asyncrl.errors import ConfigError, explain
from asyncrl.inference.engines import ENGINES, SCRATCH
from asyncrl.observability.logs import HIDDEN_VARIABLE, LOG_PATH_VARIABLE

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Cluster:
    """`run_id`: in the environment of every process of the run, as `janitor.RUN_VARIABLE`. `scratch`: a directory for
    sockets and temporary files on this machine, removed at the end; None where processes may run on other machines."""

    run_id: str
    scratch: Path | None

    def engine_environment(self, engine: str) -> Mapping[str, str]:
        """Environment variables that the processes of a replica need before they import the engine."""
        spec = ENGINES[engine]
        if self.scratch is None:
            return spec.environment
        ours = {name: value.replace(SCRATCH, str(self.scratch)) for name, value in spec.local_environment.items()}
        return {**spec.environment, **{name: os.environ.get(name, value) for name, value in ours.items()}}

    @property
    def crash_outputs(self) -> list[Path]:
        """Files with output of local processes outside of the log, e.g. of C code that crashes. The files vanish with
        the cluster. Empty for a joined cluster."""
        return [] if self.scratch is None else sorted(self.scratch.glob("ray/session_2*/logs/*.err"))


@contextlib.contextmanager
def ray_cluster(
    address: str | None,
    log: Path,
    hidden: Collection[str] = (),
    env: Mapping[str, str] | None = None,
    forks: ForkServer | None = None,
) -> Iterator[Cluster]:
    """Joins the cluster at `address`, or starts one on this machine.

    Without `address`, RAY_ADDRESS counts; Ray sets it for submitted jobs.

    Args:
        log: file of the cluster's processes.
        hidden: environment variables whose values the log hides, in processes that have these variables.
        env: further environment variables of the processes.
        forks: fork server for the processes of a cluster started here; closed with the cluster.
    """
    address = joined_address(address)
    forks = forks or ForkServer()
    run_id = forks.run_id
    janitor = Janitor(run_id)  # before the mark: the janitor must not count as a process of the run
    os.environ[RUN_VARIABLE] = run_id  # Ray's own processes inherit it
    variables = {**environment_defaults(), **_of_hub(), **(env or {}), RUN_VARIABLE: run_id}
    variables |= {LOG_PATH_VARIABLE: str(log), HIDDEN_VARIABLE: " ".join(hidden)}
    with contextlib.ExitStack() as stack:
        # Callbacks run in reverse: Ray shuts down first, the janitor cleans up last.
        stack.callback(janitor.close)
        stack.callback(forks.close)
        if forks.directory is not None:
            janitor.remove_later(forks.directory)
        place: dict[str, Any] = {}
        if address is None:
            stack.enter_context(_own_token(janitor.scratch / "token"))
            variables = _local_interfaces() | variables
            place = {
                "include_dashboard": False,
                "_system_config": {
                    # Otherwise Ray starts one idle process per core that our actors cannot use.
                    "prestart_worker_first_driver": False,
                    # Otherwise Ray records every actor call: 14 MB a minute in a run of small steps.
                    "task_events_report_interval_ms": 0,
                    # Otherwise workers have nice 15, and starve beside any other work of the machine.
                    "worker_niceness": 0,
                },
                "_node_ip_address": LOOPBACK,
                "_temp_dir": str(janitor.scratch / "ray"),
            }
        stack.callback(ray.shutdown)
        with contextlib.ExitStack() as starting:
            if address is None:
                _listen_on_one_machine(starting)
                _start_few_processes(starting)
                starting.enter_context(forks.asked_by_ray(ray_constants))
            try:
                ray.init(
                    address=address or "local",  # with None, Ray would look for somebody else's cluster
                    **place,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    runtime_env={
                        "env_vars": variables,
                        "worker_process_setup_hook": "asyncrl.observability.logs.configure_worker",
                    },
                )
            except ConnectionError as error:
                if address is None:
                    raise
                do = (
                    "start Ray on the machines (ray start --head), set RAY_AUTH_MODE=token if it was started with "
                    "token authentication, or set ray.address=null for a Ray of this run's own"
                )
                found = str(error).partition("\n")[0]
                raise ConfigError(explain(f"to join the Ray cluster at {address}", found, do)) from error
        yield Cluster(run_id, None if address else janitor.scratch)


def _of_hub() -> dict[str, str]:
    """Whether the hub is offline, as the driver found or was told. Processes of a joined cluster do not inherit it, and
    vLLM asks the hub for optional files."""
    return {"HF_HUB_OFFLINE": os.environ["HF_HUB_OFFLINE"]} if "HF_HUB_OFFLINE" in os.environ else {}


def _listen_on_one_machine(starting: contextlib.ExitStack) -> None:
    """Until `starting` ends, Ray keeps 127.0.0.1, and all its servers listen there. Where Ray supports clusters of
    several machines (not on macOS and Windows), it otherwise picks a reachable address and listens on all
    interfaces."""
    starting.callback(setattr, ray_constants, "ENABLE_RAY_CLUSTER", ray_constants.ENABLE_RAY_CLUSTER)
    ray_constants.ENABLE_RAY_CLUSTER = False


def _start_few_processes(starting: contextlib.ExitStack) -> None:
    """Until `starting` ends, a Ray started by this process omits what one machine does not need: the autoscaler, the
    log monitor and the dashboard's server. Each is a Python process that takes over a second of CPU time to start."""
    for name in ("start_monitor", "start_log_monitor", "start_api_server"):
        if hasattr(Node, name):
            starting.callback(setattr, Node, name, getattr(Node, name))
            setattr(Node, name, _start_nothing)


def _start_nothing(*_: Any, **__: Any) -> None:
    pass


@contextlib.contextmanager
def _own_token(path: Path) -> Iterator[None]:
    """Context in which a Ray started by this process requires a token, written to `path`."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    ours = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path), "RAY_AUTH_TOKEN": None}
    theirs = {name: os.environ.get(name) for name in ours}
    try:
        _set_authentication(ours)
        yield
    finally:
        _set_authentication(theirs)


def _set_authentication(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    Config.initialize("")  # Ray read the environment when it was imported
    AuthenticationTokenLoader.instance().reset_cache()


def _local_interfaces() -> dict[str, str]:
    """Interfaces where collectives listen, unless the environment sets them. The default is the address of the host
    name, which other machines may reach."""
    names = [name for name, at in psutil.net_if_addrs().items() if any(a.address == LOOPBACK for a in at)]
    ours = {f"{kind}_SOCKET_IFNAME": name for kind in ("GLOO", "NCCL") for name in names}
    return {name: os.environ.get(name, value) for name, value in ours.items()}
