"""What continuous integration runs: `make test`, what the change touches, and a third of the rest, each day another,
within its time. What was left out is said and never counts as passed.

    python tools/ci_tests.py run                 all of it; the exit status says whether a test failed
    python tools/ci_tests.py record FILE.xml...  writes the seconds of each file of tests, from pytest's --junitxml
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as xml
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.import_graph import ImportGraph

ROOT = Path(__file__).resolve().parents[1]
SECONDS = ROOT / "tests" / "seconds.json"
"""Seconds of the fast and of the slow tests of each file, one after the other on a quiet machine."""
BUDGET_S = 3000.0
"""All of it ends by then, apart from `make test`, which may take until `LATEST_S`."""
LATEST_S = 4800.0
GRACE_S = 60.0
"""A command that was interrupted has so long to end."""
LEAST_S = 90.0
"""Nothing is begun with less time than this: pytest collects the tests first."""
NO_TESTS = 5
"""Pytest's exit status where none was selected."""
WORKERS = 3
AT_A_TIME = 2.0
"""Seconds of the record that pass in one second of that machine, with so many workers on two cores."""
UNKNOWN_S = 20.0
"""Of the slow tests of a file that no record has."""
LANES = {"sglang": ("sglang",), "environments": ("verifiers", "openenv", "reasoning_gym", "harness")}
"""Lane -> words: a file with one of them in its path is tested by this lane alone. `make test-LANE` runs it."""
LANE_SECONDS = {"sglang": 700.0, "environments": 360.0}
"""With one process, and the making of the environment."""
_FAILED = re.compile(r"^(\S+::.*) failed in its (?:setup|call|teardown):$")
"""As `Told` in tests/conftest.py says it, immediately."""
_SUMMARY = re.compile(r"^=* ?(no tests ran|\d+ \w+(?:, \d+ \w+)*) in [\d.]+s\b")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run")
    run.add_argument("--spent", type=float, default=0.0, help="seconds of the budget that are gone")
    commands.add_parser("record").add_argument("junit", type=Path, nargs="+")
    args = parser.parse_args(argv)
    if args.command == "record":
        recorded = recorded_seconds([path.read_text() for path in args.junit], tracked_files())
        SECONDS.write_text(json.dumps(recorded, indent=0, sort_keys=True) + "\n")
        return 0
    return run_all(time.monotonic() - args.spent)


# -- what to run -------------------------------------------------------------------------------------------------------


def units_of(files: Mapping[str, str]) -> list[str]:
    """What `make test` does not run, in the parts that are chosen from: files with slow tests, and lanes.

    Args:
        files: path -> text.
    """
    tests = [path for path in files if is_test(path) and "mark.slow" in files[path]]
    return sorted(path for path in tests if lane_of(path) is None) + sorted(LANES)


def is_test(path: str) -> bool:
    return path.startswith("tests/") and path.rpartition("/")[2].startswith("test_") and path.endswith(".py")


def lane_of(path: str) -> str | None:
    """The lane that alone tests the file at `path`."""
    return next((lane for lane, words in LANES.items() if any(word in path for word in words)), None)


def touched_units(units: Iterable[str], changed: Collection[str], distances: Mapping[str, int]) -> dict[str, int]:
    """Unit -> how far it is from the change; only those that the change touches."""
    found = {unit: distances[unit] for unit in units if unit in distances}
    return found | {lane: 0 for lane in map(lane_of, changed) if lane is not None}


def thirds(units: Iterable[str], seconds: Mapping[str, float]) -> dict[str, int]:
    """Unit -> 0, 1 or 2: parts of about the same time. Only a new record moves a unit that it has to another part."""
    sums, part = [0.0, 0.0, 0.0], {}
    for unit in sorted(seconds, key=lambda unit: (-seconds[unit], unit)):
        part[unit] = sums.index(min(sums))
        sums[part[unit]] += seconds[unit]
    return {unit: part.get(unit, zlib.crc32(unit.encode()) % 3) for unit in units}


@dataclass(frozen=True)
class Choice:
    """`run`: units in the order of their importance. `left_out`: unit -> why."""

    run: list[str]
    left_out: dict[str, str]


def choose(
    units: Collection[str],
    touched: Mapping[str, int],
    day: int,
    seconds: Mapping[str, float],
    speed: float,
    left_s: float,
) -> Choice:
    """What the change touches, today's third of it first and then by distance, and today's third of the rest, as far as
    the time goes. What there was no time for is not the same three days later. A lane may be cut short.

    Args:
        touched: as of `touched_units`.
        day: its remainder by 3 says which third.
        seconds: of each unit, on the machine of the record.
        speed: seconds that this machine takes for one of those.
        left_s: the time that there is.
    """
    part = thirds(units, seconds)
    todays = [unit for unit in sorted(units) if part[unit] == day % 3]
    rest = [unit for unit in todays if unit not in touched]
    turn = day // 3 % max(1, len(rest))
    wanted = sorted(touched, key=lambda unit: (unit in LANES, unit not in todays, touched[unit], unit))
    wanted += sorted(rest[turn:] + rest[:turn], key=LANES.__contains__)
    chosen, left_out = list[str](), dict[str, str]()
    for unit in wanted:
        takes_s = seconds.get(unit, UNKNOWN_S) * speed / (1 if unit in LANES else AT_A_TIME)
        if takes_s <= left_s or (unit in LANES and takes_s / 3 <= left_s):
            chosen.append(unit)
            left_s = max(0.0, left_s - takes_s)
        else:
            why = "the change touches it" if unit in touched else "of today's third"
            left_out[unit] = f"{why}; no time"
    for unit in sorted(set(units) - set(wanted)):
        left_out[unit] = f"of day {part[unit]} in 3"
    return Choice(chosen, left_out)


# -- seconds -----------------------------------------------------------------------------------------------------------


def seconds_in(junit: str, files: Collection[str]) -> dict[str, dict[str, float]]:
    """ "fast" and "slow" -> file of tests -> seconds, of a report that pytest has written."""
    found: dict[str, dict[str, float]] = {"fast": defaultdict(float), "slow": defaultdict(float)}
    for case in xml.fromstring(junit).iter("testcase"):
        parts = case.get("classname", "").split(".")
        paths = ("/".join(parts[:length]) + ".py" for length in range(len(parts), 0, -1))
        path = next((path for path in paths if path in files), None)
        if path is not None:
            slow = any(entry.get("name") == "slow" for entry in case.iter("property"))
            found["slow" if slow else "fast"][path] += float(case.get("time", 0))
    return found


def recorded_seconds(junits: Iterable[str], files: Collection[str]) -> dict[str, dict[str, float]]:
    """What is kept of these reports: files whose tests take a second, and the lanes."""
    found: dict[str, dict[str, float]] = {"fast": {}, "slow": dict(LANE_SECONDS)}
    for junit in junits:
        for kind, seconds in seconds_in(junit, files).items():
            found[kind] |= {path: round(s, 1) for path, s in seconds.items() if s >= 1 and lane_of(path) is None}
    return found


def speed_of(measured: Mapping[str, float], recorded: Mapping[str, float]) -> float:
    """Seconds that this machine takes for one of the record's, by the files that both have."""
    both = measured.keys() & recorded.keys()
    return sum(measured[path] for path in both) / sum(recorded[path] for path in both) if both else 1.0


# -- the change --------------------------------------------------------------------------------------------------------


def git(*args: str) -> str:
    done = subprocess.run(["git", *args], cwd=ROOT, check=True, capture_output=True, text=True, timeout=60)
    return done.stdout.strip()


def tracked_files() -> list[str]:
    return git("ls-files").splitlines()


def texts_of(paths: Iterable[str]) -> dict[str, str]:
    """As `ImportGraph` takes them."""
    return {path: (ROOT / path).read_text() if path.endswith((".py", ".yaml", ".yml")) else "" for path in paths}


def change() -> tuple[str, list[str]]:
    """The commit before the change, and the files that differ from it. It is CI_BASE, or where the branch left
    origin/main; on main itself the last commit that is a day older than the newest one."""
    base = os.environ.get("CI_BASE", "")
    if not base:
        try:
            base = git("merge-base", "HEAD", "origin/main")
        except subprocess.CalledProcessError:  # there is no such branch
            base = ""
        if base in ("", git("rev-parse", "HEAD")):
            a_day_before = int(git("show", "-s", "--format=%ct", "HEAD")) - 24 * 3600
            base = git("rev-list", "-1", f"--before={a_day_before}", "HEAD")
            base = base or git("rev-list", "--max-parents=0", "HEAD").splitlines()[-1]
    return base, git("diff", "--name-only", "--no-renames", base, "HEAD").splitlines()


# -- running -----------------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """How one command ended. `cut`: it was interrupted, since its time was over."""

    name: str
    status: int = 0
    cut: bool = False
    summary: str = "it said no summary"
    failures: list[str] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        return bool(self.failures) or not (self.cut or self.status in (0, NO_TESTS))

    def __str__(self) -> str:
        how = "FAILED" if self.failed else "cut short, which is not passed" if self.cut else "passed"
        return f"{self.name}: {how}; {self.summary}"

    def hear(self, line: str) -> None:
        """Takes a line of the output. What fails after an interrupt fails because of it."""
        if (failed := _FAILED.match(line)) and not self.cut:
            self.failures.append(failed[1])
        if summary := _SUMMARY.match(line):
            self.summary = summary[1]


def run_within(name: str, command: list[str], seconds: float, **environment: str) -> Outcome:
    """Runs a command and shows what it says. Interrupts it after `seconds`; pytest then says what it has found."""
    print(f"\n== {name}, at most {seconds:.0f} s: {' '.join(command)}", flush=True)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # of a job in the background; the command would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    outcome = Outcome(name)
    assert process.stdout is not None
    reader = threading.Thread(target=_hear_all, args=(process.stdout, outcome), daemon=True)
    reader.start()
    for patience_s, blow in ((seconds, signal.SIGINT), (GRACE_S, signal.SIGKILL)):
        try:
            outcome.status = process.wait(patience_s)
            break
        except subprocess.TimeoutExpired:
            outcome.cut = True
            os.killpg(process.pid, blow)
    else:
        outcome.status = process.wait()
    reader.join(GRACE_S)  # what the command has left running may hold its output open
    return outcome


def _hear_all(output: IO[str], outcome: Outcome) -> None:
    for line in output:
        print(line, end="", flush=True)
        outcome.hear(line.strip())


def run_all(began: float) -> int:
    """`began`: by the monotonic clock. Returns the exit status."""

    def left_s(until_s: float) -> float:
        return max(0.0, began + until_s - time.monotonic())

    recorded = json.loads(SECONDS.read_text())
    paths = tracked_files()
    with tempfile.TemporaryDirectory() as place:
        junit = Path(place) / "junit.xml"
        addopts = f"--junitxml={junit}"
        tested = run_within("make test", ["make", "test"], left_s(LATEST_S), PYTEST_ADDOPTS=addopts)
        tested.failures += ["it has not ended"] * tested.cut
        measured = seconds_in(junit.read_text(), paths)["fast"] if junit.exists() else {}
    print(f"make test took {LATEST_S - left_s(LATEST_S):.0f} s", flush=True)
    speed = speed_of(measured, recorded["fast"])
    base, changed = change()
    files = texts_of(paths)
    units, day = units_of(files), datetime.datetime.now(datetime.UTC).date().toordinal()
    touched = touched_units(units, changed, ImportGraph(files).distances(changed))
    choice = choose(units, touched, day, recorded["slow"], speed, left_s(BUDGET_S) - LEAST_S)
    outcomes = [tested]
    slow = [unit for unit in choice.run if unit not in LANES]
    if slow:
        pytest = [sys.executable, *f"-m pytest -n {WORKERS} --no-loadscope-reorder --max-worker-restart=2".split()]
        command = [*pytest, "-m", "slow", *slow]
        outcomes.append(run_within("slow tests", command, left_s(BUDGET_S), PYTHONDONTWRITEBYTECODE=""))
    for lane in [unit for unit in choice.run if unit in LANES]:
        if left_s(BUDGET_S) < LEAST_S:
            choice.left_out[lane] = "chosen; no time was left"
        else:
            outcomes.append(run_within(f"make test-{lane}", ["make", f"test-{lane}"], left_s(BUDGET_S)))
    print(f"\n== the change: {len(changed)} files since {base[:12]}; it touches {len(touched)} of {len(units)} parts")
    print(f"== today is day {day % 3} in 3; this machine takes {speed:.2f} s for a second of the record")
    for unit in slow:
        print(f"slow tests of {unit}: {'touched' if unit in touched else 'of the rest'}")
    for unit, why in choice.left_out.items():
        print(f"left out: {unit} ({why})")
    for outcome in outcomes:
        print(outcome)
        for failure in outcome.failures:
            print(f"  {failure}")
    print(f"== {LATEST_S - left_s(LATEST_S):.0f} s in all; {len(choice.left_out)} of {len(units)} parts left out")
    print(f"=== make test: {tested.summary} ===")
    return int(any(outcome.failed for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
