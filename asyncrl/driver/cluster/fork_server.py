"""Fork server: starts the processes of a run on one CPU machine by forking a process that has imported their modules.

Importing torch, transformers and their dependencies takes 4 s of a core per process, and a run on a laptop has several.
The fork server imports them once, while the driver reads its input and starts Ray. Ray starts its processes through
`fork_worker.py`, which asks the fork server for a fork and exits. The forks share the memory of the imports.

`fork_worker.py` starts a fresh process instead of forking if a start-up variable (`START_PREFIXES`) differs, the server
has exited, or the server has threads. Unset variables in `SHARED` take the server's values, so all processes wait and
use large pages alike. Each process imports Ray itself: on import Ray reads whose worker it is.
There is no fork server on machines with GPUs: a process that has touched CUDA must not fork.

This module imports the standard library only: every process pays for its imports.
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
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

logger = logging.getLogger(__name__)

SOCKET_VARIABLE = "ASYNCRL_FORK_SERVER"
SWITCH = "ASYNCRL_FORK"
"""0: every process is started fresh, never forked."""
WORKER = Path(__file__).with_name("fork_worker.py")
START_PREFIXES = (
    *("PYTHON", "LD_", "GLIBC_", "MALLOC_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "DNNL_", "ONEDNN_"),
    *("TORCH", "PYTORCH_", "ATEN_", "CUDA_", "NVIDIA_", "HF_", "TRANSFORMERS_", "TOKENIZERS_"),
)
"""Variables that are read once, when Python or a library is loaded."""
SHARED = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "GLIBC_TUNABLES")
REQUEST_S = 5.0
"""Longest wait for the request of a connected process."""
_GPUS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


class ForkServer(contextlib.AbstractContextManager["ForkServer"]):
    """The driver's side: starts and stops the server of one run. Does nothing until `start`."""

    def __init__(self) -> None:
        self.run_id = secrets.token_hex(8)
        self._process: subprocess.Popen[bytes] | None = None
        self.directory: Path | None = None
        """Directory of the socket; None without a server."""

    def start(self, environment: Mapping[str, str], modules: Sequence[str], model: str = "") -> None:
        """Starts the server and returns immediately. Does nothing where processes cannot be forked.

        Args:
            environment: of the server; a fork gets the environment of its request.
            modules: imported in this order. A failed import is skipped; the process that needs the module reports it.
            model: a directory; its model class is imported too.
        """
        if sys.platform != "linux" or any(map(os.path.exists, _GPUS)) or os.environ.get(SWITCH) == "0":
            return
        try:
            self.directory = Path(tempfile.mkdtemp(prefix="asyncrl-fork-"))  # 0700: nobody else may ask
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(self.directory / "socket"))
                listener.listen(128)
                self._process = subprocess.Popen(
                    [sys.executable, "-m", __name__, str(listener.fileno()), str(self.directory), model, *modules],
                    env=dict(environment),
                    pass_fds=[listener.fileno()],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C on a terminal reaches the driver, not this
                )
        except OSError as error:  # no room, no processes, or a path that is too long for a socket
            logger.warning("processes are not forked but started anew: %s", error)
            self.close()

    @contextlib.contextmanager
    def asked_by_ray(self, constants: Any) -> Iterator[None]:
        """Context in which a Ray started by this process asks the server for its processes.

        Args:
            constants: the module `ray_constants`.
        """
        if self.directory is None:
            yield
            return
        before = constants.SETUP_WORKER_FILENAME
        constants.SETUP_WORKER_FILENAME = str(WORKER)
        os.environ[SOCKET_VARIABLE] = str(self.directory / "socket")
        try:
            yield
        finally:
            constants.SETUP_WORKER_FILENAME = before
            del os.environ[SOCKET_VARIABLE]

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the server; its forks keep running. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self.directory is not None:
            shutil.rmtree(self.directory, ignore_errors=True)
        self._process = self.directory = None


def main(arguments: Sequence[str]) -> None:
    """The server's process: exits when the driver exits."""
    descriptor, directory, model, *modules = arguments
    # Phase 1: import. Ray is blocked: each fork must import it itself.
    started_with = dict(os.environ)
    if not sys.flags.safe_path:
        del sys.path[0]  # the working directory: a user's module there must not shadow a package
    sys.modules["ray"] = None  # type: ignore[assignment]
    gc.disable()  # collections over a million permanent objects take a quarter of the import time
    for name in modules:
        with contextlib.suppress(Exception):  # the process that needs the module will report the error
            importlib.import_module(name)
    with contextlib.suppress(Exception):
        _import_model(Path(model))
    del sys.modules["ray"]
    # Phase 2: get ready to fork.
    by_imports = {name: value for name, value in os.environ.items() if started_with.get(name) != value}
    gc.enable()
    gc.collect()
    gc.freeze()  # a collection in a fork would touch, and so copy, the shared pages
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks: without this they stay zombies
    # Phase 3: serve until the driver exits.
    with socket.socket(fileno=int(descriptor)) as listener:
        while True:
            ready, _, _ = select.select([listener, sys.stdin], [], [])
            if sys.stdin in ready:  # the driver closed its end: it has exited
                break
            connection, _ = listener.accept()
            with connection, contextlib.suppress(Exception):  # on an error the requester starts a fresh process
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
    """Forks if the copy would be identical to a fresh process; otherwise sends the reason for refusing.
    `by_imports`: variables that imports have set."""
    connection.settimeout(REQUEST_S)
    connection.sendall(b"?")  # fails if the requester has given up
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 3)
    with contextlib.ExitStack() as stack:
        for descriptor in descriptors:
            stack.callback(os.close, descriptor)
        text, deadline = b"", time.monotonic() + REQUEST_S  # one for the whole request, however slowly it comes
        while not text.endswith(b"\n"):
            connection.settimeout(deadline - time.monotonic())  # after the deadline a ValueError
            if not (more := connection.recv(1 << 16)):
                return
            text += more
        request = json.loads(text)
        connection.settimeout(REQUEST_S)
        if refusal := _refusal(request["environment"], started_with):
            connection.sendall(f"no: {refusal}\n".encode())
        elif os.fork() == 0:
            stack.pop_all()
            listener.close()
            if not _is_heard(connection):  # the requester has given up and starts a fresh process
                os._exit(0)
            connection.close()
            _become(descriptors, request, {**by_imports, **request["environment"]})


def _is_heard(connection: socket.socket) -> bool:
    """Handshake of the fork with its requester: only an acknowledged fork continues."""
    try:
        connection.sendall(b"forked\n")
        return connection.recv(1) == b"!"
    except OSError:
        return False


def _refusal(environment: Mapping[str, str], started_with: Mapping[str, str]) -> str:
    """Why a fork would differ from a fresh process with this environment; empty if it would not."""
    for name in sorted(environment.keys() | started_with.keys()):
        asked, found = environment.get(name), started_with.get(name)
        is_shared = asked is None and name in SHARED
        if name.startswith(START_PREFIXES) and asked != found and not is_shared:
            return f"{name} is {asked!r}, in the fork server {found!r}"
    threads = len(os.listdir("/proc/self/task"))
    return "" if threads == 1 else f"an import has left the fork server with {threads} threads"


def _become(descriptors: Sequence[int], request: Mapping[str, Any], environment: Mapping[str, str]) -> NoReturn:
    """Turns this fork into the requested process: runs its script as the main program, then exits."""
    code = 1
    try:
        # Phase 1: the session, files, limits and environment of the requester.
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
        # Phase 2: the interpreter's state: arguments, module path, random numbers.
        sys.argv = request["arguments"]
        if not sys.flags.safe_path:
            sys.path.insert(0, str(Path(sys.argv[0]).parent))
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()  # else all forks draw the same numbers; `random` reseeds itself
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
