"""One process of `asyncrl-train` with all that it starts, as the chaos harness sees it from outside."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import uuid
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
MARK = "ASYNCRL_CHAOS"
"""In the environment of every process of a driver: its number."""
COMMANDS = {
    "replica": ("ray::Replica",),
    "engine": ("EngineCore", "sglang::scheduler"),
    "rollouter": ("ray::Rollouter",),
    "trainer": ("ray::TrainerWorker",),
    "queue": ("ray::MessageQueue",),
    "reward": ("asyncrl.rewards.reward_worker",),
}
"""Role -> what the command line of its processes contains, one of them."""
FOREIGN = re.compile(r"ray|torchinductor_.*|pymp-.*|vllm.*|sglang.*|tvm-.*")
"""What other packages leave in the directory for temporary files."""


class Driver:
    """One process of `asyncrl-train` and all that it started."""

    def __init__(self, number: int, command: list[str], output: Path) -> None:
        self.mark = f"{uuid.uuid4().hex[:8]}-{number}"
        self.seen: dict[int, psutil.Process] = {}
        self.temporary = Path(tempfile.mkdtemp(prefix="chaos-", dir="/tmp"))  # short: sockets have paths of 107 bytes
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path, MARK: self.mark}
        with output.open("a") as file:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**environment, "TMPDIR": str(self.temporary)},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def look(self) -> list[psutil.Process]:
        """Its living processes. Some of Ray's overwrite their environment: children count, and who counted before."""
        found: dict[int, psutil.Process] = {}
        parents: dict[int, int] = {}
        for process in psutil.process_iter():
            try:
                parents[process.pid] = process.ppid()
                if process.environ().get(MARK) == self.mark or self.seen.get(process.pid) == process:
                    found[process.pid] = process
            except (psutil.Error, OSError):
                continue
        for pid, parent in parents.items():
            ancestor = parent
            while ancestor and ancestor not in found:
                ancestor = parents.get(ancestor, 0)
            if ancestor and pid not in found:
                try:
                    found[pid] = psutil.Process(pid)
                except psutil.Error:
                    continue
        self.seen.update(found)
        return [p for p in found.values() if alive(p)]

    def of(self, role: str) -> list[psutil.Process]:
        if role == "driver":
            return [psutil.Process(self.process.pid)]
        return [p for p in self.look() if any(part in command_of(p) for part in COMMANDS[role])]

    def leftovers(self) -> list[str]:
        """Files that its processes should have removed."""
        found = [str(p) for p in self.temporary.iterdir() if not FOREIGN.fullmatch(p.name)]
        for path in Path("/dev/shm").glob("asyncrl-*"):
            if any(int(number) in self.seen for number in re.findall(r"\d+", path.name)[:1]):
                found.append(str(path))
        return found

    def close(self) -> None:
        """Kills what is left of it, and removes its temporary files."""
        left = self.look()
        for process in left:
            try:
                process.kill()
            except psutil.Error:
                continue
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(30)  # first: it is this process's child, and its exit code is wanted
        psutil.wait_procs(left, timeout=10)  # one that dies later may write its files again
        shutil.rmtree(self.temporary, ignore_errors=True)


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def command_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()) or process.name()
    except psutil.Error:
        return ""
