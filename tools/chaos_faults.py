"""What the chaos harness does to a run, and how it takes it back."""

from __future__ import annotations

import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tools.chaos_driver import COMMANDS, Driver

ROLES = (*COMMANDS, "driver", "disk", "checkpoint")
STOPPED = ("replica", "rollouter", "trainer", "queue")
LONGEST_STOP_S = 12.0
LONGEST_WAKE_S = 6.0
"""A process that Ray was asked to kill while it is stopped lives about so long."""
LONGEST_FULL_S = 8.0


@dataclass(slots=True)
class Fault:
    """One injected fault. `recovery_s`: until the run trained again with the loss repaired; None while it has not."""

    number: int
    role: str
    how: str
    at_s: float
    step: int
    detail: str = ""
    recovery_s: float | None = None
    lasts_s: float = 0.0
    """Seconds from `at_s` on in which the fault is taken back; 0 for one that is done at once."""
    ends: list[int] = field(default_factory=list)
    """Exit codes of drivers that ended since."""

    @property
    def name(self) -> str:
        return f"{self.how} {self.role}"


class Saboteur:
    """Args:
    roles: what may fail, of `ROLES`.
    work: directory for the run; on a small file system of its own below it when that is to be filled.
    """

    def __init__(self, roles: tuple[str, ...], work: Path, *, seed: int, disk_mb: int) -> None:
        self.skipped: list[str] = []
        self.corrupted = ""
        """The checkpoint that was spoiled last, until the run has gone on from another one."""
        self._roles, self._work, self._disk_mb = roles, work, disk_mb
        self._rng = random.Random(seed)
        self._wakes: list[tuple[float, psutil.Process]] = []
        self._wakes_when_lost: list[tuple[str, psutil.Process]] = []
        """Stopped until the run has noticed it; they wake while it replaces them."""
        self._ballast: Path | None = None
        self._free_at = 0.0
        self._mount: Path | None = None
        self.run_dir = work / "run"
        if "disk" in roles:
            self._mount_disk()

    @property
    def disk_is_full(self) -> bool:
        return self._ballast is not None

    @property
    def holds(self) -> bool:
        """Something is stopped or full that will be taken back."""
        return self.disk_is_full or bool(self._wakes or self._wakes_when_lost)

    def faults(self, driver: Callable[[], Driver], step: Callable[[], int]) -> Iterator[Fault]:
        """Faults, injected as they are drawn: every kind once in random order, then again. Ends when none can be."""
        kinds = [(role, "kill") for role in (*COMMANDS, "driver") if role in self._roles]
        kinds += [(role, how) for role in STOPPED if role in self._roles for how in ("stop", "hang", "wake")]
        files = (("disk", "fill"), ("checkpoint", "corrupt"))
        kinds += [(role, how) for role, how in files if role in self._roles]
        number = 0
        while True:
            before = number
            deck = [(kind, 0) for kind in self._rng.sample(kinds, len(kinds))]
            while deck:
                (role, how), refused = deck.pop(0)
                fault = Fault(number + 1, role, how, time.time(), step())
                if self._inject(fault, driver()):
                    number += 1
                    yield fault
                elif refused < 3 and deck:
                    deck.append(((role, how), refused + 1))  # perhaps later
                else:
                    self.skipped.append(f"{how} {role}: nothing to do it to")
            if number == before:
                return

    def noticed(self, *roles: str) -> None:
        """The run replaces what it has lost: those that were stopped for it wake at some moment from now on."""
        for role, process in [w for w in self._wakes_when_lost if w[0] in roles]:
            self._wakes_when_lost.remove((role, process))
            self._wakes.append((time.monotonic() + self._rng.uniform(0, LONGEST_WAKE_S), process))

    def take_back(self, *, all_of_it: bool = False) -> None:
        """Wakes what has slept long enough and frees the disk when it was full long enough."""
        if all_of_it:
            self.noticed(*ROLES)
        now = time.monotonic()
        for due in [w for w in self._wakes if all_of_it or w[0] <= now]:
            self._wakes.remove(due)
            try:
                due[1].resume()
            except psutil.NoSuchProcess:
                continue  # it was given up and killed
        if self._ballast is not None and (all_of_it or now >= self._free_at):
            self._ballast.unlink(missing_ok=True)
            self._ballast = None

    def close(self) -> None:
        """Takes everything back; the run directory is moved off its own file system."""
        self.take_back(all_of_it=True)
        if self._mount is None:
            return
        kept = self._work / "run"
        try:
            if self.run_dir.exists():
                shutil.rmtree(kept, ignore_errors=True)
                shutil.copytree(self.run_dir, kept)
        finally:
            subprocess.run(["umount", "-l", str(self._mount)], check=False, timeout=60)
            self.run_dir, self._mount = kept, None

    # -- inside ------------------------------------------------------------------------------------------------------

    def _inject(self, fault: Fault, driver: Driver) -> bool:
        """False when there is nothing now to do it to."""
        if fault.role == "disk":
            return self._fill_disk(fault)
        if fault.role == "checkpoint":
            return self._corrupt(fault, driver)
        victims = driver.of(fault.role)
        if not victims:
            return False
        victim = self._rng.choice(victims)
        try:
            fault.detail = f"pid {victim.pid}"
            if fault.how == "kill":
                victim.kill()
            else:
                victim.suspend()
        except psutil.NoSuchProcess:
            return False
        if fault.how == "stop":
            asleep_s = self._rng.uniform(0.3, LONGEST_STOP_S)
            fault.detail += f", for {asleep_s:.1f} s"
            fault.lasts_s = asleep_s
            self._wakes.append((time.monotonic() + asleep_s, victim))
        elif fault.how == "wake":
            self._wakes_when_lost.append((fault.role, victim))
        return True

    def _mount_disk(self) -> None:
        disk = self._work / "disk"
        disk.mkdir(exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={self._disk_mb}m", "chaos", str(disk)]
        done = subprocess.run(command, capture_output=True, check=False)
        if done.returncode:
            self.skipped.append(f"fill disk: no tmpfs can be mounted here ({done.stderr.decode().strip()})")
            return
        self._mount, self.run_dir = disk, disk / "run"

    def _fill_disk(self, fault: Fault) -> bool:
        if self._mount is None:
            return False
        self._ballast = self._mount / "ballast"
        try:
            with self._ballast.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(1 << 16))
        except OSError:
            pass  # it is full now
        full_s = self._rng.uniform(1.0, LONGEST_FULL_S)
        self._free_at = time.monotonic() + full_s
        fault.detail = f"for {full_s:.1f} s"
        fault.lasts_s = full_s
        return True

    def _corrupt(self, fault: Fault, driver: Driver) -> bool:
        """Kills the driver, then spoils a file of the newest checkpoint: the one before it has to do."""
        folder = self.run_dir / "checkpoints"
        if len(checkpoints_in(folder)) < 2:
            return False
        driver.process.kill()
        driver.process.wait(30)
        newest = checkpoints_in(folder)[-1]
        file = self._rng.choice(sorted(p for p in newest.rglob("*") if p.is_file() and p.stat().st_size))
        data = bytearray(file.read_bytes())
        if self._rng.random() < 0.5:
            del data[self._rng.randrange(len(data)) :]
        else:
            for _ in range(self._rng.randint(1, 8)):
                data[self._rng.randrange(len(data))] ^= 1 << self._rng.randrange(8)
            data[0] ^= 0xFF  # flips may undo each other
        file.write_bytes(bytes(data))
        self.corrupted = newest.name
        fault.detail = f"{file.relative_to(folder)}"
        return True


def checkpoints_in(folder: Path) -> list[Path]:
    found = [p for p in folder.glob("step_*") if p.name.removeprefix("step_").isdigit()] if folder.exists() else []
    return sorted(found, key=lambda p: int(p.name.removeprefix("step_")))
