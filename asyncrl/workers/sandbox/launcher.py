"""Runs one confined program: `python -I -S launcher.py REQUEST`, started by `asyncrl.workers.sandbox`.

REQUEST is JSON: the resource limits, `directory` (its working directory, which holds program.py), `readable` (paths
that the program may read), `report` (descriptor for the outcome, as JSON) and `level` (the strongest to try). With
namespaces there are three processes: this one, init of the new process namespace (at its end the kernel kills the
rest), and the program. Without namespaces, two.

With `command` in the REQUEST that is run instead of program.py: it may start others, its directory stays on disk, and
it reaches one port of 127.0.0.1. This process then exits as the command did, once all that it started has ended.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import confine

_LOOK_EVERY_S = 0.01
_LOOK_AT_COMMANDS_S = 0.05
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
    if "command" in request:
        sys.exit(_run_command(request))
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


def _wait(child: int, most: int | None, look_every_s: float = _LOOK_EVERY_S) -> tuple[int, str]:
    """Status of the program; reaps its orphans, and ends early at more than `most` processes."""
    while True:
        ended, status = os.waitpid(-1, os.WNOHANG if most is not None else 0)
        if ended == child:
            return status, ""
        if most is not None and ended == 0:
            if _num_inside() > most + _TOO_MANY:
                return 9, "processes"
            time.sleep(look_every_s)


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


# -- commands ----------------------------------------------------------------------------------------------------------


def _run_command(request: dict) -> int:
    """The exit code of the command; 126 if this machine cannot confine it."""
    os.chdir(request["work"])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # to end what was started, without namespaces
    confine.die_with_parent(signal.SIGTERM)
    confine.adopt_orphans()
    if os.getppid() != request["parent"]:
        return 143  # it has died before it could be watched
    try:
        code = _command_in_namespaces(request) if request["level"] == "namespaces" else None
        return _command_alone(request) if code is None else code
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _end_children()


def _command_in_namespaces(request: dict) -> int | None:
    """None if the kernel allows no namespaces; nothing was run."""
    import socket

    here, there = socket.socketpair()
    outside = os.fork()
    if outside:
        there.close()
        entered, listeners, _, _ = socket.recv_fds(here, 1, 1)
        if listeners:
            _relay(socket.socket(fileno=listeners[0]), request["port"])
        code = _code(os.waitpid(outside, 0)[1])
        return code if entered else None
    here.close()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    confine.die_with_parent()
    if not confine.enter_namespaces():
        os._exit(0)
    confine.raise_loopback()
    listeners = [socket.create_server(("127.0.0.1", request["port"]))] if request["port"] else []
    socket.send_fds(there, [b"."], [listener.fileno() for listener in listeners])
    for mine in (there, *listeners):
        mine.close()
    first = os.fork()
    if first:
        os._exit(_code(os.waitpid(first, 0)[1]))
    confine.die_with_parent()
    read_only, own_proc = confine.mount_own(request["directory"], None)
    os.chdir(request["work"])
    child = _fork()
    if child == 0:
        _become_command(request, [*request["readable"], *(["/proc"] if own_proc else [])], read_only, network=True)
    most = request["max_processes"] if own_proc else None
    os._exit(_code(_wait(child, most, _LOOK_AT_COMMANDS_S)[0]))


def _command_alone(request: dict) -> int:
    confine.hide_from_program()  # and no signal of the command's reaches this process: Landlock of Linux 6.12
    child = os.fork()
    if child == 0:
        _become_command(request, request["readable"], False, network=False)
    while True:
        ended, status = os.wait()  # orphans, too
        if ended == child:
            return _code(status)


def _become_command(request: dict, readable: list, read_only: bool, *, network: bool) -> None:
    """`network`: its own, or that of the machine."""
    import resource

    for number in (signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ):  # an exec keeps what is ignored
        signal.signal(number, signal.SIG_DFL)
    if request["level"] != "none":
        for kind, most in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_DATA, request["memory_bytes"])):
            resource.setrlimit(kind, (most, most))
        confine.drop_capabilities()
        where, port, oldest = request["directory"], request["port"], 1 if network else 6
        held = confine.restrict_files(readable, where, network=network, port=port, oldest=oldest)
        if not (held and confine.filter_calls(single=False, alone=False, read_only=read_only, tcp=True)):
            os.write(2, b"neither Landlock and seccomp in namespaces, nor those of Linux 6.12\n")
            os._exit(126)
    try:
        os.execvp(request["command"][0], request["command"])
    except OSError as error:
        os.write(2, f"{request['command'][0]}: {error}\n".encode())
    os._exit(127)


def _relay(listener: socket.socket, port: int) -> None:
    """Connects what is connected inside to the same port outside, in threads."""
    import socket
    import threading

    def pump(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def accept() -> None:
        while True:
            inner, _ = listener.accept()
            with suppress(OSError):
                outer = socket.create_connection(("127.0.0.1", port))
                for pair in ((inner, outer), (outer, inner)):
                    threading.Thread(target=pump, args=pair, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()


def _code(status: int) -> int:
    """As a shell says it: 128 and more for a signal."""
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code


def _end_children() -> None:
    """Ends all descendants, which become children of this process when their parents end."""
    with suppress(ChildProcessError, PermissionError):
        while True:
            with open(f"/proc/self/task/{os.getpid()}/children") as children:
                for child in children.read().split():
                    os.kill(int(child), signal.SIGKILL)
            os.waitpid(-1, os.WNOHANG)
            time.sleep(0.001)


if __name__ == "__main__":
    main()
