"""`asyncrl-scale RUN_DIR [replicas=N]`: asks a run in progress for another number of replicas, or shows its fleet.

Replicas that join start while training goes on, and serve from their first publish on. The requests of leaving replicas
resume elsewhere with their tokens.

Exit codes: 0 the run does as asked; 2 bad input, or the run cannot have this number; 4 no answer, or with --wait the
number was not reached in time.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from asyncrl.checkpoint.run_directory import RunDirectory
from asyncrl.commands import plain_console, refuse
from asyncrl.config.rollout import MOST_REPLICAS
from asyncrl.driver.scale_requests import ask, asked
from asyncrl.errors import AsyncRLError, ConfigError, DeadlineExceeded, StorageError, explain
from asyncrl.types import FleetReport

ANSWER_S = 30.0
"""Longest time for an answer: a driver that is restarting its training side answers late."""
ELSEWHERE_S = 10.0
"""Longest time for an answer of a run that is not seen on this machine: it runs elsewhere, or was killed."""
AGAIN_S = 1.0
"""With --wait, pause between two looks."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="asyncrl-scale",
        description=str(__doc__).split("\n")[0],
        epilog="exit codes: 0 the run does as asked, 2 bad input, too many or too few, 4 no answer, or not in time",
    )
    parser.add_argument("run", metavar="RUN_DIR", type=Path)
    parser.add_argument("target", metavar="replicas=N", nargs="?", help="how many; without it the fleet is shown")
    parser.add_argument("--wait", type=float, metavar="SECONDS", help="until so many serve, at most this long")
    options = parser.parse_args(argv)
    try:
        directory = _running(options.run)
        replicas = None if options.target is None else _number(options.target)
        fleet = _ask(directory, replicas)
        if options.wait is not None:
            fleet = _reached(directory, fleet, options.wait)
        plain_console().print(describe(fleet))
    except AsyncRLError as error:
        return refuse(f"asyncrl-scale: {error}", error)
    except KeyboardInterrupt:
        return 130
    return 0


def describe(fleet: FleetReport) -> str:
    """The fleet in a few lines."""
    lines = [f"wanted {fleet.target} (from {fleet.least} to {fleet.most}), there {len(fleet.states)}"]
    lines += [f"  replica {i}: {state}" for i, state in sorted(fleet.states.items())]
    for i, found in sorted(fleet.waiting.items()):
        told = found.replace("\n", " ") or "it has begun to look"
        lines.append(f"  replica {i}: waits for a place: {told}")
    return "\n".join(lines)


def _running(path: Path) -> RunDirectory:
    """Raises ConfigError if no run is in progress, DeadlineExceeded if it does not train yet."""
    directory = RunDirectory(path)
    directory.read_config(f"the fleet of {path}")
    deadline = time.monotonic() + ANSWER_S
    while not directory.scale.is_dir():
        if not directory.is_locked:
            found, do = "no run is in progress there", "set rollout.num_replicas or max_replicas, and resume=auto"
            raise ConfigError(explain(f"the fleet of {path}", found, do))
        if time.monotonic() > deadline:
            found, do = "the run is starting, or restarting its training side", "ask again when it trains"
            raise DeadlineExceeded(explain(f"the fleet of {path}", found, do))
        time.sleep(AGAIN_S)
    return directory


def _number(target: str) -> int:
    """Raises ConfigError if the target is not of the form replicas=N."""
    key, _, number = target.partition("=")
    if key != "replicas" or not number.isascii() or not number.isdigit() or not number.strip("0"):
        raise ConfigError(explain(f"{target:.60}", "it is not of the form replicas=N", "write for example replicas=6"))
    if len(number.lstrip("0")) > len(f"{MOST_REPLICAS}"):
        found, do = f"no run has more than {MOST_REPLICAS} replicas", "write for example replicas=6"
        raise ConfigError(explain(f"{target:.60}", found, do))
    return int(number.lstrip("0"))


def _ask(directory: RunDirectory, replicas: int | None) -> FleetReport:
    try:
        return ask(directory.scale, replicas, ANSWER_S if directory.is_locked else ELSEWHERE_S)
    except DeadlineExceeded as error:  # before OSError, of which it is a subclass
        if directory.is_locked:
            raise
        found, do = "no run is in progress on this machine, and none elsewhere answers", "see its log.txt"
        raise ConfigError(explain(f"the fleet of {directory.path}", found, do)) from error
    except FileNotFoundError as error:
        found, do = "it has just ended, or restarts its training side", "see its log.txt, and ask again"
        raise DeadlineExceeded(explain(f"the fleet of {directory.path}", found, do)) from error
    except OSError as error:
        do = "run asyncrl-scale as the user of the run, and make room there"
        raise StorageError(explain(f"write {directory.scale}", str(error), do)) from error


def _reached(directory: RunDirectory, fleet: FleetReport, wait_s: float) -> FleetReport:
    """The fleet, once the wanted number of replicas serves. Raises DeadlineExceeded."""
    deadline = time.monotonic() + wait_s
    while not fleet.is_reached:
        if time.monotonic() > deadline:
            do = "see the log of the run for replicas that fail, or add nodes; the run tries on"
            raise DeadlineExceeded(explain(asked(fleet.target), f"after {wait_s:g} s {describe(fleet)}", do))
        time.sleep(AGAIN_S)
        try:
            fleet = _ask(_running(directory.path), None)
        except DeadlineExceeded:
            continue  # the training side restarts; the replicas stay
    return fleet


if __name__ == "__main__":
    sys.exit(main())
