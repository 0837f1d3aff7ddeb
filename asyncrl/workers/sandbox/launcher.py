"""Runs one confined program: `python -I -S launcher.py REQUEST`, started by `asyncrl.workers.sandbox.run_python`.

REQUEST is JSON: the resource limits, `directory` (its working directory, which holds program.py), `readable` (paths
that the program may read), `report` (descriptor for the outcome, as JSON) and `level` (the strongest to try). With
namespaces there are three processes: this one, init of the new process namespace (at its end the kernel kills the
rest), and the program. Without namespaces, two.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import suppress

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import confine

_LOOK_EVERY_S = 0.01
_NO_NAMESPACES = 77
_TOO_MANY = 3
"""Threads above the limit at which all are killed, if the kernel does not count them."""

# Used if the kernel confines nothing: protects from accidents, not from a program that tries to escape.
_BASIC = """
import runpy, sys
def _refuse(event, args, _d={directory!r}):
    if event.startswith(("socket.__new__", "socket.connect", "socket.bind", "subprocess.", "os.fork", "os.exec",
                         "os.posix_spawn", "os.system", "os.kill", "os.spawn", "ctypes.dlopen", "pty.spawn")):
        raise PermissionError(1, "not permitted in the sandbox: " + event)
    if event == "open" and isinstance(args[0], str) and (args[1] or "r").strip("bt") != "r":
        import os
        if args[0] != "/dev/null" and not os.path.realpath(args[0]).startswith(os.path.realpath(_d)):
            raise PermissionError(1, "not permitted in the sandbox: writing " + args[0])
sys.addaudithook(_refuse)
runpy.run_path("program.py", run_name="__main__")
"""


def main() -> None:
    request = json.loads(sys.argv[1])
    os.set_inheritable(request["report"], False)
    os.chdir(request["directory"])
    confine.die_with_parent()
    # A change of user resets the death signal, so it is set before and after.
    is_nobody = confine.leave_root(request["directory"], request["needed"])
    confine.die_with_parent()
    counts = is_nobody or os.geteuid() != 0
    if request["level"] != "namespaces" or sys.platform != "linux" or not _in_namespaces(request, counts):
        _alone(request)


def _in_namespaces(request: dict, counts: bool) -> bool:
    """False if the kernel allows no namespaces; nothing was run."""
    outside = os.fork()
    if outside:
        return os.waitstatus_to_exitcode(os.waitpid(outside, 0)[1]) != _NO_NAMESPACES
    confine.die_with_parent()
    if not confine.enter_namespaces():
        os._exit(_NO_NAMESPACES)
    first = os.fork()
    if first == 0:
        _first(request, counts)
    else:
        os.waitpid(first, 0)
    os._exit(0)


def _report(request: dict, **outcome: object) -> None:
    os.write(request["report"], json.dumps(outcome).encode() + b"\n")


def _first(request: dict, counts: bool) -> None:
    """The first process of the namespace: waits for the program."""
    confine.die_with_parent()
    release = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
    counts = counts and release >= (5, 14)  # older kernels also count the user's outside processes
    with open("program.py", "rb") as file:
        program = file.read()
    # The mount hides the directory's files, so the program is written again.
    directory = request["directory"]
    read_only, own_proc = confine.mount_own(directory, request["total_bytes"] + len(program))
    os.chdir(directory)
    with open("program.py", "wb") as file:
        file.write(program)
    readable = [*request["readable"], *(["/proc"] if own_proc else [])]
    most = request["max_processes"]
    child = _fork()
    if child == 0:
        # In the child: every step only takes rights away, so none can be undone by the program.
        confine.limit_resources(request, most + 2 if counts else None)
        confine.drop_capabilities()
        held = ["namespaces"]
        held += ["landlock"] if confine.restrict_files(readable, directory) else ["mounts"] if read_only else []
        held += ["seccomp"] if confine.filter_calls(single=not counts, alone=False, read_only=read_only) else []
        _report(request, held=held)
        _become()
    status, limit = _wait(child, most if own_proc and not counts else None)
    _report(request, status=status, limit=limit)


def _wait(child: int, most: int | None) -> tuple[int, str]:
    """Status of the program; reaps its orphans, and ends early at more than `most` processes."""
    while True:
        ended, status = os.waitpid(-1, os.WNOHANG if most is not None else 0)
        if ended == child:
            return status, ""
        if most is not None and ended == 0:
            if _num_inside() > most + _TOO_MANY:
                return 9, "processes"
            time.sleep(_LOOK_EVERY_S)


def _num_inside() -> int:
    """Processes and threads of this namespace, without its init."""
    count = -1
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError):  # it has ended
                count += os.stat(f"/proc/{name}/task").st_nlink - 2
    return count


def _alone(request: dict) -> None:
    child = _fork()
    if child == 0:
        confine.die_with_parent()
        confine.limit_resources(request, None)
        held = []
        if sys.platform == "linux":
            confine.drop_capabilities()
            held += ["landlock"] if confine.restrict_files(request["readable"], request["directory"]) else []
        filtered = request["level"] != "basic" and confine.filter_calls(single=True, alone=True, read_only=False)
        held += ["seccomp"] if filtered else ["basic"]
        _report(request, held=held)
        _become(None if filtered else _BASIC.format(directory=request["directory"]))
    _, status = os.waitpid(child, 0)
    _report(request, status=status)


def _fork() -> int:
    """As os.fork. The child continues once it can neither kill nor read this process."""
    ready, told = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(told)
        if not os.read(ready, 1):
            os._exit(1)  # its parent has died
        os.close(ready)
        return 0
    os.close(ready)
    _outlive()
    with suppress(BrokenPipeError):  # already killed: its status says so
        os.write(told, b".")
    os.close(told)
    return child


def _outlive() -> None:
    """Protects this process, which reports the outcome, from being killed or read by the program."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
        with suppress(OSError):  # reserved by the C library
            signal.signal(number, signal.SIG_IGN)
    confine.hide_from_program()


def _become(program: str | None = None) -> None:
    how = ["program.py"] if program is None else ["-c", program]
    os.execv(sys.executable, [sys.executable, "-I", "-B", *how])


if __name__ == "__main__":
    main()
