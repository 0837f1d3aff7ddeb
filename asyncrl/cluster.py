"""Ray for the time of one run or server: joined or started, and everything of it gone afterwards, however it ends."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import ray

from asyncrl.config.load import engine_environment, environment_defaults
from asyncrl.janitor import RUN_VARIABLE, Janitor
from asyncrl.observability.logs import LOG_PATH_VARIABLE


@dataclass(frozen=True, slots=True)
class Cluster:
    """`run_id`: in the environment of every process of the run, as `janitor.RUN_VARIABLE`. `scratch`: a directory for
    sockets and temporary files on this machine, removed at the end; None where processes may run on other machines."""

    run_id: str
    scratch: Path | None

    def engine_environment(self, engine: str) -> Mapping[str, str]:
        """Environment variables that the processes of a replica need before its engine is imported."""
        return engine_environment(engine, self.scratch)


@contextlib.contextmanager
def ray_cluster(address: str | None, log: Path) -> Iterator[Cluster]:
    """Joins the cluster at `address`, or starts one on this machine. `log`: where its processes write their log.

    Without an address, that of RAY_ADDRESS counts, which Ray sets for what it is given to run."""
    address = address or os.environ.get("RAY_ADDRESS")
    run_id = secrets.token_hex(8)
    janitor = Janitor(run_id)  # before the mark: it is not a process of the run
    os.environ[RUN_VARIABLE] = run_id  # Ray's own processes inherit it
    try:
        context = ray.init(
            address=address or "local",  # without one, ray looks for a cluster that somebody else has started
            include_dashboard=None if address else False,
            # else one idle process for each core, that no actor of ours can use
            _system_config=None if address else {"prestart_worker_first_driver": False},
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env={
                "env_vars": {**environment_defaults(), RUN_VARIABLE: run_id, LOG_PATH_VARIABLE: str(log)},
                "worker_process_setup_hook": "asyncrl.observability.logs.configure_worker",
            },
        )
        if address is None:
            janitor.remove_later(Path(context.address_info["session_dir"]) / "sockets")
        yield Cluster(run_id, None if address else janitor.scratch)
    finally:
        ray.shutdown()
        janitor.close()
