"""The processes of a run on one CPU machine, forked from one that has imported what they import.

Each process of a run that computes takes 4 s of a core to import torch, transformers and what these import, and a run
on a laptop has several. The fork server imports them once, while the driver reads its input and starts Ray. Ray starts
its processes through `fork_worker.py`, which asks the fork server for a copy of itself and ends. The copies share the
memory of what was imported.

A copy is asked for only where it is the same as a new process: `START_PREFIXES` names the variables that are read when
Python or a library is loaded, and one of another value makes `fork_worker.py` start a new process, as do a server that
is gone, and one that has threads. Those in `SHARED` may be the server's own: how threads wait, and large pages, are
then the same in all processes. Ray is imported by each process itself: when it is loaded, it reads whose worker it is.
There is no server where GPUs are: what has touched CUDA may not be forked.

This module imports the standard library alone: what it imports is in every process.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import logging
import os
import resource
import runpy
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Self

logger = logging.getLogger(__name__)

SOCKET_VARIABLE = "ASYNCRL_FORK_SERVER"
SWITCH = "ASYNCRL_FORK"
"""0: every process is started anew."""
WORKER = Path(__file__).with_name("fork_worker.py")
START_PREFIXES = (
    *("PYTHON", "LD_", "GLIBC_", "MALLOC_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "DNNL_", "ONEDNN_"),
    *("TORCH", "PYTORCH_", "ATEN_", "CUDA_", "NVIDIA_", "HF_", "TRANSFORMERS_", "TOKENIZERS_"),
)
"""Variables that are read once, when Python or a library is loaded."""
SHARED = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "GLIBC_TUNABLES")
REQUEST_S = 5.0
"""Longest wait for what a process that has connected asks for."""
_GPUS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


class ForkServer:
    """The driver's side: a server for one run, and its end. Does nothing until `start`."""

    def __init__(self) -> None:
        self.run_id = secrets.token_hex(8)
        self._process: subprocess.Popen[bytes] | None = None
        self._directory: Path | None = None

    def start(self, environment: Mapping[str, str], modules: Sequence[str], model: str = "") -> None:
        """Starts it; returns at once. Does nothing where processes cannot be forked.

        Args:
            environment: of the process; what it forks gets the environment of whoever asks.
            modules: imported in this order. One that fails is left to whoever imports it next.
            model: a directory; the class of its model is imported too.
        """
        if sys.platform != "linux" or any(map(os.path.exists, _GPUS)) or os.environ.get(SWITCH) == "0":
            return
        try:
            self._start(environment, modules, model)
        except OSError as error:  # no room, no processes, or a path that is too long for a socket
            logger.warning("processes are not forked but started anew: %s", error)
            self.close()

    def _start(self, environment: Mapping[str, str], modules: Sequence[str], model: str) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="asyncrl-fork-"))  # 0700: nobody else may ask
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(self._directory / "socket"))
            listener.listen(128)
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(listener.fileno()), str(self._directory), model, *modules],
                env=dict(environment),
                pass_fds=[listener.fileno()],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C on a terminal reaches the driver, not this
            )

    @property
    def directory(self) -> Path | None:
        """Of its socket, while there is a server."""
        return self._directory

    @contextlib.contextmanager
    def asked_by_ray(self, constants: Any) -> Iterator[None]:
        """Inside, a Ray that this process starts asks the server for its processes.

        Args:
            constants: Ray's module of that name.
        """
        if self._directory is None:
            yield
            return
        before = constants.SETUP_WORKER_FILENAME
        constants.SETUP_WORKER_FILENAME = str(WORKER)
        os.environ[SOCKET_VARIABLE] = str(self._directory / "socket")
        try:
            yield
        finally:
            constants.SETUP_WORKER_FILENAME = before
            del os.environ[SOCKET_VARIABLE]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the server; what it has forked goes on. Twice is once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        self._process = self._directory = None


def main(arguments: Sequence[str]) -> None:
    """The server's process: ends when the driver has ended."""
    descriptor, directory, model, *modules = arguments
    started_with = dict(os.environ)
    if not sys.flags.safe_path:
        del sys.path[0]  # the working directory: a module of the user's there is not meant
    sys.modules["ray"] = None  # type: ignore[assignment]
    gc.disable()  # collections among a million objects that stay take a quarter of the time
    for name in modules:
        with contextlib.suppress(Exception):  # whoever needs it imports it and says what is wrong
            importlib.import_module(name)
    with contextlib.suppress(Exception):
        _import_model(Path(model))
    del sys.modules["ray"]
    by_imports = {name: value for name, value in os.environ.items() if started_with.get(name) != value}
    gc.enable()
    gc.collect()
    gc.freeze()  # a collection in a copy would touch, and so copy, all that is shared
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for what is forked: it leaves no zombie
    with socket.socket(fileno=int(descriptor)) as listener:
        while True:
            ready, _, _ = select.select([listener, sys.stdin], [], [])
            if sys.stdin in ready:  # its other end is closed: the driver has ended
                break
            connection, _ = listener.accept()
            with connection, contextlib.suppress(Exception):  # whoever asked starts a process of its own
                _answer(connection, listener, started_with, by_imports)
    shutil.rmtree(directory, ignore_errors=True)


def _import_model(directory: Path) -> None:
    if (directory / "config.json").is_file():
        import transformers

        for architecture in json.loads((directory / "config.json").read_text()).get("architectures", ()):
            getattr(transformers, architecture)


def _answer(
    connection: socket.socket,
    listener: socket.socket,
    started_with: Mapping[str, str],
    by_imports: Mapping[str, str],
) -> None:
    """Forks for one that asks, if the copy would be as a new process is, and says which it was. `by_imports`: variables
    that imports have set."""
    connection.settimeout(REQUEST_S)
    connection.sendall(b"?")  # whoever has given up meanwhile asks for nothing
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 3)
    with contextlib.ExitStack() as stack:
        for descriptor in descriptors:
            stack.callback(os.close, descriptor)
        with connection.makefile("rb") as stream:
            request = json.loads(stream.readline())
        if refusal := _refusal(request["environment"], started_with):
            connection.sendall(f"no: {refusal}\n".encode())
        elif os.fork() == 0:
            stack.pop_all()
            listener.close()
            if not _is_heard(connection):  # whoever asked has given up, and starts a process of its own
                os._exit(0)
            connection.close()
            _become(descriptors, request, {**by_imports, **request["environment"]})


def _is_heard(connection: socket.socket) -> bool:
    """The fork's question to whoever asked for it: a fork that goes on is never the server again."""
    try:
        connection.sendall(b"forked\n")
        return connection.recv(1) == b"!"
    except OSError:
        return False


def _refusal(environment: Mapping[str, str], started_with: Mapping[str, str]) -> str:
    """Why a fork would differ from a new process with this environment; empty where it would not."""
    for name in sorted(environment.keys() | started_with.keys()):
        asked, found = environment.get(name), started_with.get(name)
        is_shared = asked is None and name in SHARED
        if name.startswith(START_PREFIXES) and asked != found and not is_shared:
            return f"{name} is {asked!r}, in the fork server {found!r}"
    threads = len(os.listdir("/proc/self/task"))
    return "" if threads == 1 else f"an import has left the fork server with {threads} threads"


def _become(descriptors: Sequence[int], request: Mapping[str, Any], environment: Mapping[str, str]) -> NoReturn:
    """Runs a Python script as the main program of this process, as whoever asked would have."""
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.chdir(request["directory"])
        os.umask(request["umask"])
        resource.setrlimit(resource.RLIMIT_NOFILE, request["open_files"])
        with contextlib.suppress(OSError):  # a system may not allow it
            Path("/proc/self/oom_score_adj").write_text(request["oom_score_adj"])
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = request["arguments"]
        if not sys.flags.safe_path:
            sys.path.insert(0, str(Path(sys.argv[0]).parent))
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()  # else all have the same numbers; Python's own `random` does it itself
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    except BaseException as error:  # noqa: BLE001 - the end of a program: as the interpreter does
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        with contextlib.suppress(Exception):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
