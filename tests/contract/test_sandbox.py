"""The sandbox, with programs that try what they must not. Each ends within its deadline and leaves nothing behind."""

import contextlib
import errno
import os
import shutil
import signal
import socket
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from asyncrl.errors import ConfigError, ProcessDied
from asyncrl.workers.sandbox import SandboxLimits, _result, protection, require_protection, run_python
from tests.processes import assert_gone, ran

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(sys.platform != "linux", reason="the kernel's part of it is Linux's"),
]

LIMITS = SandboxLimits(timeout_s=40.0, cpu_s=1, memory_bytes=1 << 28, file_bytes=1 << 16, output_bytes=1 << 16)
LEVELS = ["namespaces", "seccomp", "basic"]


@pytest.fixture(autouse=True)
def sandboxes(tmp_path_factory, monkeypatch):
    """The sandboxes of a test lie in a directory of its own, in which nothing is left: others may be at work on this
    machine. As open to other users as the system's own, which pytest's are not."""
    tmp_path_factory.getbasetemp()  # made now, or it would lie in there
    place, others = Path(tempfile.mkdtemp(prefix="sandboxes-")), set(psutil.Process().children(recursive=True))
    place.chmod(0o755)
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    yield place
    left = list(place.iterdir())
    shutil.rmtree(place)
    assert not left
    left = set(psutil.Process().children(recursive=True)) - others
    assert not [p for p in left if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("level", LEVELS)
def test_a_program_reads_and_prints(level):
    program = "import sys\nprint(input()[::-1])\nprint('to err', file=sys.stderr)"
    result = run_python(program, "abc\n", LIMITS, level=level)
    assert (result.stdout, result.stderr, result.exit_code, result.limit) == ("cba\n", "to err\n", 0, "")
    assert result.succeeded


@pytest.mark.parametrize("level", LEVELS)
def test_temporary_files_may_lie_where_no_other_user_comes(level, sandboxes):
    sandboxes.chmod(0o700)
    assert run_python("print(open(__file__).read()[:5])", limits=LIMITS, level=level).stdout == "print\n"


def test_what_it_does_not_read_does_not_block():
    assert run_python("print(1)", "x" * (1 << 22), LIMITS).stdout == "1\n"
    echoed = run_python("import sys; sys.stdout.write(sys.stdin.read()[-3:])", "x" * (1 << 22) + "end", LIMITS)
    assert echoed.stdout == "end"


def test_failures_are_told_apart():
    assert run_python("raise SystemExit(3)", limits=LIMITS).exit_code == 3
    failed = run_python("1/0", limits=LIMITS)
    assert (failed.exit_code, failed.limit) == (1, "")
    assert "ZeroDivisionError" in failed.stderr
    assert run_python("import os; os.abort()", limits=LIMITS).exit_code == -6
    assert "SyntaxError" in run_python("def", limits=LIMITS).stderr


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("program", "limit"),
    [
        ("while True: pass", "cpu"),
        ("x = bytearray(1 << 30)", "memory"),
        ("while True: print('x' * 10000)", "output"),
        ("open('x', 'wb').write(b'x' * (1 << 20))", "file"),
    ],
)
def test_a_limit_ends_it_and_is_named(program, limit, level):
    result = run_python(program, limits=LIMITS, level=level)
    assert result.limit == limit
    assert not result.succeeded
    assert len(result.stdout) <= LIMITS.output_bytes


@pytest.mark.parametrize("level", LEVELS)
def test_the_deadline_is_wall_time(level):
    limits = SandboxLimits(timeout_s=0.5)
    result = run_python("import time; print('begun', flush=True); time.sleep(1000)", limits=limits, level=level)
    assert result.limit == "time"
    assert result.exit_code is None


NETWORK = """
import errno
import os
import socket
with socket.socket() as s:
    s.settimeout(2)
    s.connect(("127.0.0.1", {port}))
print("connected")
"""


@pytest.mark.parametrize("level", LEVELS)
def test_it_reaches_no_network(level):
    with socket.create_server(("127.0.0.1", 0)) as server:
        result = run_python(NETWORK.format(port=server.getsockname()[1]), limits=LIMITS, level=level)
    assert "connected" not in result.stdout
    assert "PermissionError" in result.stderr


@pytest.mark.parametrize("level", LEVELS)
def test_files_outside_cannot_be_written(level, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    for directory in (tmp_path, outside):
        directory.chmod(0o777)
    result = run_python(f"open({str(outside / 'x')!r}, 'w').write('x')", limits=LIMITS, level=level)
    assert result.exit_code == 1
    assert not list(outside.iterdir())
    assert run_python("open('x', 'w').write('ok'); print(open('x').read())", limits=LIMITS, level=level).succeeded


METADATA = """
import ctypes, os, shutil
path, libc = FILE, ctypes.CDLL(None)
handle = os.open(path, os.O_PATH)
directory = os.open(os.path.dirname(path), os.O_PATH)
name = os.path.basename(path)
for change in (
    lambda: os.chmod(path, 0o666),
    lambda: os.chmod(f"/proc/self/fd/{handle}", 0o666),
    lambda: os.chmod(name, 0o666, dir_fd=directory),
    lambda: libc.syscall(452, handle, b"", 0o666, 0x1000),  # fchmodat2
    lambda: os.chmod(os.path.dirname(path), 0),
    lambda: os.chown(path, os.getuid() + 1, -1),
    lambda: os.lchown(path, os.getuid() + 1, -1),
    lambda: os.chown(name, os.getuid() + 1, -1, dir_fd=directory),
    lambda: os.utime(path, (1, 1)),
    lambda: os.utime(name, (1, 1), dir_fd=directory),
    lambda: os.setxattr(path, "user.x", b"x"),
    lambda: os.setxattr(path, "user.x", b"x", follow_symlinks=False),
    lambda: os.removexattr(path, "user.kept"),
):
    try:
        change()
    except OSError:
        pass
open("own", "w").close()
shutil.copy2("own", "copied")
print(os.path.exists("copied"))
"""


@pytest.mark.parametrize("level", ["namespaces", "seccomp"])
def test_modes_owners_times_and_attributes_of_files_outside_stay_and_own_files_are_copied(level, tmp_path):
    """Landlock knows none of these; a policy's program could open a private key to others."""
    if "seccomp" not in protection(level):
        pytest.skip("no filter of system calls here")
    key = tmp_path / "key"
    key.write_text("secret")
    key.chmod(0o600)
    with contextlib.suppress(OSError):  # some file systems have no attributes
        os.setxattr(key, "user.kept", b"kept")
    before = [(s.st_mode, s.st_uid, s.st_mtime_ns, s.st_ctime_ns) for s in (key.stat(), tmp_path.stat())]
    result = run_python(METADATA.replace("FILE", repr(str(key))), limits=LIMITS, level=level)
    assert [(s.st_mode, s.st_uid, s.st_mtime_ns, s.st_ctime_ns) for s in (key.stat(), tmp_path.stat())] == before
    assert result.stdout == "True\n", result


def test_files_outside_cannot_be_read_with_landlock(tmp_path):
    if "landlock" not in protection():
        pytest.skip("this kernel has no Landlock")
    (tmp_path / "answers").write_text("42")
    (tmp_path / "answers").chmod(0o644)
    result = run_python(f"print(open({str(tmp_path / 'answers')!r}).read())", limits=LIMITS)
    assert result.stdout == ""
    assert "PermissionError" in result.stderr


def test_the_environment_is_scrubbed(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "s3cret")
    result = run_python("import os; print(sorted(os.environ))", limits=LIMITS)
    assert result.exit_code == 0
    assert "SECRET_TOKEN" not in result.stdout


OUTCOMES = """
import fcntl, os, resource, socket
own, mate = socket.socketpair()
def tried(what, call, *arguments):
    try:
        call(*arguments)
    except PermissionError:
        pass
    except OSError as error:
        print(what, error)
    else:
        print(what, "was let through")
for command in (8, 10, 15):  # F_SETOWN, F_SETSIG, F_SETOWN_EX
    tried(f"fcntl {command}", fcntl.fcntl, own, command, bytes(8) if command == 15 else 0)
for request in (0x8901, 0x8902):  # FIOSETOWN, SIOCSPGRP
    tried(f"ioctl {request}", fcntl.ioctl, own, request, bytes(4))
library = os.open(os.__file__, os.O_RDONLY)
tried("a lease", fcntl.fcntl, library, fcntl.F_SETLEASE, fcntl.F_RDLCK)
for request in (0x40086602, 0x401C5820):  # FS_IOC_SETFLAGS, FS_IOC_FSSETXATTR
    tried(f"ioctl {request}", fcntl.ioctl, own, request, bytes(28))
tried("prlimit of the supervisor", resource.prlimit, SUPERVISOR, resource.RLIMIT_NOFILE, (0, 0))
"""
OF_OTHERS = """
tried("priority of the user", os.setpriority, os.PRIO_USER, 0, 19)
tried("priority of another", os.setpriority, os.PRIO_PROCESS, SUPERVISOR, 19)
tried("cores of another", os.sched_setaffinity, SUPERVISOR, {0})
tried("policy of another", os.sched_setscheduler, SUPERVISOR, os.SCHED_IDLE, os.sched_param(0))
"""
OF_ITS_OWN = """
before = os.getpriority(os.PRIO_PROCESS, 0)
os.nice(1)
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
os.setpriority(os.PRIO_PROCESS, os.getpid(), before + 3)
resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
fcntl.fcntl(own, fcntl.F_SETFL, os.O_NONBLOCK)
print(os.getpriority(os.PRIO_PROCESS, 0) - before)
"""


@pytest.mark.parametrize("level", ["namespaces", "seccomp"])
def test_it_sends_no_signal_by_a_descriptor_and_changes_nobody_else(level):
    """Before Linux 6.12 Landlock does not see the signals of a descriptor, so the filter refuses to set them up."""
    if "seccomp" not in protection(level):
        pytest.skip("no filter of system calls here")
    supervisor = "1" if level == "namespaces" else "os.getppid()"
    others = OF_OTHERS if level == "seccomp" else ""  # a namespace has no others
    result = run_python((OUTCOMES + others + OF_ITS_OWN).replace("SUPERVISOR", supervisor), limits=LIMITS, level=level)
    assert result.stdout == "3\n", result


def test_the_supervisor_ignores_what_can_be_ignored():
    """Before Linux 6.12 a program can signal the first process of its namespace."""
    if "namespaces" not in protection():
        pytest.skip("no namespaces here")
    lines = run_python("print(open('/proc/1/status').read())", limits=LIMITS).stdout.splitlines()
    (ignored,) = (int(line.split()[1], 16) for line in lines if line.startswith("SigIgn:"))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGXCPU):
        assert ignored & 1 << (number - 1), number


SLOW_TO_PROTECT = """
import os, signal, time
from asyncrl.workers.sandbox import launcher

protect = launcher._outlive

def slow():
    time.sleep(0.5)
    protect()

launcher._outlive = slow
child = launcher._fork()
if child == 0:
    lines = open(f"/proc/{os.getppid()}/status").read().splitlines()
    (ignored,) = (int(line.split()[1], 16) for line in lines if line.startswith("SigIgn:"))
    own = signal.getsignal(signal.SIGTERM)
    os._exit(0 if ignored & 1 << (signal.SIGTERM - 1) and own == signal.SIG_DFL else 7)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_program_does_not_begin_before_its_supervisor_is_protected():
    ran("-c", SLOW_TO_PROTECT, timeout_s=60)


def test_an_end_without_a_word_is_the_failure_of_a_program_that_had_begun():
    """A program that could end its supervisor must not gain by it: a failed attempt is drawn again."""
    begun = _result((b"", b""), "", {"held": ["landlock", "seccomp"]})
    assert (begun.succeeded, begun.exit_code, begun.limit) == (False, None, "")
    with pytest.raises(ProcessDied, match="its processes ended before it did"):
        _result((b"", b""), "", {})


def test_devices_are_its_own():
    if "namespaces" not in protection():
        pytest.skip("no namespaces here")
    program = """
import os
print([name for name in ("full", "tty", "kvm", "fuse", "mem", "ttyS0", "shm") if os.path.exists("/dev/" + name)])
open("/dev/null", "w").write("x")
print(len(open("/dev/urandom", "rb").read(8)), open("/dev/stdin").read())
"""
    assert run_python(program, "in", LIMITS).stdout == "[]\n8 in\n"


NESTED = """
import os
for _ in range(1200):  # Python recurses 1000 times
    os.mkdir("d")
    os.chdir("d")
"""
CLOSED = """
import os
os.makedirs("a/b/c")
open("a/b/c/file", "w").close()
os.symlink("/", "a/b/link")
os.chmod("a/b", 0)
os.chmod("a", 0)
os.chmod(".", 0)
"""


@pytest.mark.parametrize("program", [NESTED, CLOSED], ids=["nested", "closed"])
@pytest.mark.parametrize("level", LEVELS)
def test_its_directory_is_removed_whatever_it_made(program, level):
    """The fixture sees that nothing is left."""
    assert run_python(program, limits=LIMITS, level=level).exit_code == 0


ABANDONED = """
import os
from asyncrl.workers import sandbox
with sandbox.locked_directory() as directory:
    open(directory + "/x", "w").close()
    print(directory, flush=True)
    os._exit(9)
"""


def test_what_killed_owners_left_is_swept(sandboxes):
    done = ran("-c", ABANDONED, env={**os.environ, "TMPDIR": str(sandboxes)}, timeout_s=30, code=9)
    left = Path(done.stdout.strip())
    assert (left / "x").exists(), done
    assert run_python("print(1)", limits=LIMITS).succeeded
    assert not left.exists()


def test_less_than_landlock_and_seccomp_is_refused_unless_the_recipe_allows_it():
    if {"landlock", "seccomp"} <= set(protection()):
        require_protection("reward.code", basic_allowed=False)
    require_protection("reward.code", basic_allowed=True, level="basic")
    found = ", ".join(protection("basic"))
    with pytest.raises(ConfigError, match=rf"(?s)reward.code.*confined by {found} alone.*allow_basic_sandbox=true"):
        require_protection("reward.code", basic_allowed=False, level="basic")


BOMB = """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
"""
DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(1000)
    os._exit(0)
print("done")
"""


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("program", [BOMB, DAEMON], ids=["bomb", "daemon"])
def test_processes_end_with_it(program, level, sandboxes):
    """The fixture sees that none is left, whether the level lets it have any or not."""
    run_python(program, limits=SandboxLimits(timeout_s=2.0, cpu_s=1), level=level)
    assert_gone(inside(sandboxes), 30)  # the kernel may still be ending what was killed


def inside(place):
    """Processes of sandboxes below `place`."""
    return [p for p in psutil.process_iter(["environ"]) if str(place) in (p.info["environ"] or {}).get("HOME", "")]


@pytest.mark.parametrize("level", ["namespaces", "seccomp"])
def test_it_signals_nobody(level):
    program = "import os\nfor pid in (os.getppid(), -1, %d):\n  try: os.kill(pid, 9)\n  except OSError: print('no')"
    result = run_python(program % psutil.Process().pid, limits=LIMITS, level=level)
    assert result.stdout == "no\nno\nno\n"


HOARD = """
import ctypes
c = ctypes.CDLL(None, use_errno=True)
made = [c.shmget(0, ctypes.c_size_t(1 << 26), 0o1600), c.msgget(0, 0o1600), c.semget(0, 1, 0o1600)]
made.append(c.syscall({mq_open}, b"q", 0o102, 0o600, None))
print(made, ctypes.get_errno())
"""


@pytest.mark.parametrize("level", ["namespaces", "seccomp"])
def test_it_keeps_nothing_where_no_limit_counts(level):
    """Segments and queues of the kernel are outside of a process's address space."""
    mq_open = {"x86_64": 240, "aarch64": 180}.get(os.uname().machine)
    if mq_open is None or "seccomp" not in protection(level):
        pytest.skip("no filter of system calls here")
    result = run_python(HOARD.format(mq_open=mq_open), limits=LIMITS, level=level)
    assert result.stdout == f"[-1, -1, -1, -1] {errno.EPERM}\n", result
