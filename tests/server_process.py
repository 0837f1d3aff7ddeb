"""A server of an inference engine as somebody would start it for `rollout.engine=remote`, on a CPU."""

import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from tests.processes import killed

START_S = 300.0


def free_port() -> int:
    """Of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@contextmanager
def listening(*command: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A process that listens on the port that is its last argument, and that port."""
    port, deadline = free_port(), time.monotonic() + 100
    process = subprocess.Popen([*command, str(port)])
    with killed(process):
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
                break
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield process, port


class ServerProcess:
    """One server and all of its processes. It may be started again after it was killed, at the same address.

    Args:
        command: without the address, which `--host` and `--port` give.
        ready: a path that answers 200 once it serves.
    """

    def __init__(self, command: list[str], log: Path, environment: dict[str, str], *, ready: str = "/health") -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = log
        self._command = [*command, "--host", "127.0.0.1", "--port", str(self.port)]
        self._environment = environment
        self._ready = ready
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        self.spawn()
        self.wait()
        return self

    def spawn(self) -> None:
        """Starts it, and does not wait."""
        environment = {**os.environ, **self._environment}
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command, env=environment, stdout=output, stderr=output, start_new_session=True
            )

    def wait(self, timeout_s: float = START_S) -> None:
        """Returns when it serves; fails when it ends before."""
        deadline = time.monotonic() + timeout_s
        while True:
            assert self._process is not None
            assert self._process.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            with suppress(OSError), urllib.request.urlopen(f"{self.url}{self._ready}", timeout=5) as answer:
                if answer.status == 200:
                    return
            time.sleep(0.2)

    def kill(self) -> None:
        """All of its processes, in the middle of whatever they do."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(30)
            self._process = None

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")[-8000:]
