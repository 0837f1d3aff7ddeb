"""Ray's entry script for the processes of a run with a fork server (`fork_server.py`). Asks the server to fork and
exits, or runs Ray's own `setup_worker.py`, which starts a fresh process.

Runs once per process, as a script, and imports the standard library only.
"""

import importlib.util
import json
import os
import pathlib
import resource
import socket
import sys
import time

ANSWER_S = 30.0
"""Longest wait for the server, which may still be importing. Ray waits 60 s for a process to register."""
CONTEXT = "--serialized-runtime-env-context="


def main(arguments: list[str]) -> None:
    if not _forked(arguments):
        package = importlib.util.find_spec("ray")
        if package is None or package.origin is None:
            raise SystemExit("ray is not installed, for whose processes this script is")
        script = os.path.join(os.path.dirname(package.origin), "_private", "workers", "setup_worker.py")
        os.execv(sys.executable, [sys.executable, script, *arguments])


def _forked(arguments: list[str]) -> bool:
    """True if the server has forked the process that these arguments request."""
    end = time.monotonic() + ANSWER_S
    try:
        request = _request(arguments)
        if request is None:
            return False
        with socket.socket(socket.AF_UNIX) as server:
            _wait_until(end, server).connect(os.environ["ASYNCRL_FORK_SERVER"])
            if _wait_until(end, server).recv(1) != b"?":
                return False
            socket.send_fds(_wait_until(end, server), [b"."], [0, 1, 2])
            _wait_until(end, server).sendall(json.dumps(request).encode() + b"\n")
            answer = _wait_until(end, server).makefile("rb").readline().decode()
            if answer == "forked\n":
                server.sendall(b"!")  # the fork waits for this acknowledgement, so nothing starts twice
                return True
            reason = answer.strip() or "the fork server is gone"
    except (OSError, KeyError, ValueError) as error:
        reason = repr(error)
    sys.stderr.write(f"started anew, not forked: {reason}\n")
    return False


def _wait_until(end: float, server: socket.socket) -> socket.socket:
    server.settimeout(max(end - time.monotonic(), 0.001))
    return server


def _request(arguments: list[str]) -> "dict | None":
    """The process to fork; None unless it is a plain Python process of this interpreter."""
    context, rest = {}, []
    for argument in arguments:
        if argument.startswith(CONTEXT):
            context = json.loads(argument.removeprefix(CONTEXT))
        elif not argument.startswith("--language="):
            rest.append(argument)
    if not rest or rest[0].startswith("-"):  # options of the interpreter
        return None
    plain = not context.get("command_prefix") and not context.get("override_worker_entrypoint")
    if "--language=PYTHON" not in arguments or not plain or context.get("py_executable") not in (None, sys.executable):
        return None
    variables = context.get("env_vars", {})
    if any("$" in value for value in variables.values()):  # Ray expands these variables
        return None
    os.umask(umask := os.umask(0o077))
    return {
        "arguments": rest,
        "environment": {**os.environ, **variables},
        "directory": os.getcwd(),
        "umask": umask,
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "oom_score_adj": pathlib.Path("/proc/self/oom_score_adj").read_text(),
    }


if __name__ == "__main__":
    main(sys.argv[1:])
