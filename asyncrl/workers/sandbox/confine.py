"""System calls that take rights away from the calling process: namespaces, Landlock, seccomp, resource limits.

Only the standard library is used: the launcher imports this file in an interpreter without packages. Every function
that the kernel may refuse returns whether it succeeded.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import resource
import signal
import struct
import sys
from collections.abc import Iterable

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 24, 38
_PR_SET_CHILD_SUBREAPER = 36
_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWUSER = 0x00020000, 0x08000000, 0x10000000
_CLONE_NEWPID, _CLONE_NEWNET = 0x20000000, 0x40000000
_CLONE_THREAD = 0x00010000
_CLONE_ANY_NAMESPACE = 0x7E020080
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 8, 0x1000, 0x4000, 1 << 18
_AT_FDCWD, _AT_RECURSIVE, _MOUNT_ATTR_RDONLY = -100, 0x8000, 1
_CAPABILITY_VERSION_3, _LAST_CAPABILITY = 0x20080522, 63
_MOUNT_SETATTR = 442
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_LANDLOCK_PATH, _LANDLOCK_PORT, _LANDLOCK_CONNECT = 1, 2, 2
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 1

_NOBODY = 65534
_DEVICES_READ, _DEVICES_WRITTEN = ("/dev/zero", "/dev/random", "/dev/urandom"), ("/dev/null",)
_DEVICE_LINKS = {"fd": "", "stdin": "/0", "stdout": "/1", "stderr": "/2"}
"""Name in /dev -> entry of /proc/self/fd that it links to."""


def libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Makes Linux send this process a signal when its parent ends. Call it after a change of user or namespace, which
    undoes it."""
    if sys.platform == "linux" and libc().prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def adopt_orphans() -> None:
    """Makes descendants whose parent has ended children of this process, daemons too."""
    libc().prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def hide_from_program() -> None:
    """Prevents other processes of this user from reading or tracing this one: without a process namespace the program
    sees it. An exec undoes this."""
    libc().prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def leave_root(directory: str, needed: Iterable[str]) -> bool:
    """Becomes user nobody, the new owner of `directory`. False if not root, or if `needed` files or the path to
    `directory` are closed to others.

    The kernel does not apply the limit of processes to root.
    """
    if os.geteuid() != 0 or not all(_open_to_others(path) for path in (*needed, os.path.dirname(directory))):
        return False
    try:
        os.chown(directory, _NOBODY, _NOBODY)
        for entry in os.scandir(directory):
            os.chown(entry.path, _NOBODY, _NOBODY)
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    except OSError:
        return False
    libc().prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)  # else /proc/self stays root's
    return True


def _open_to_others(path: str) -> bool:
    real = os.path.realpath(path)
    while real != "/":
        mode = os.stat(real).st_mode
        if not mode & (0o001 if os.path.isdir(real) else 0o004):
            return False
        real = os.path.dirname(real)
    return True


def enter_namespaces() -> bool:
    """Enters new user, network, process, mount and IPC namespaces; the process namespace holds for children.

    False if the kernel refuses (distributions restrict either step); do not use this process further then.
    """
    uid, gid = os.geteuid(), os.getegid()
    flags = _CLONE_NEWUSER | _CLONE_NEWNET | _CLONE_NEWPID | _CLONE_NEWNS | _CLONE_NEWIPC
    if libc().unshare(flags) != 0:
        return False
    for file, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        try:
            with open(f"/proc/self/{file}", "w") as handle:
                handle.write(text)
        except OSError:
            return False
    return True


def raise_loopback() -> None:
    """Inside namespaces: makes 127.0.0.1 usable. Raises OSError."""
    import socket  # programs without network need not wait for it

    with socket.socket() as any_socket:
        name = b"lo".ljust(16, b"\0")
        (flags,) = struct.unpack("16xh14x", fcntl.ioctl(any_socket, _GET_FLAGS, name + bytes(16)))
        fcntl.ioctl(any_socket, _SET_FLAGS, name + struct.pack("h14x", flags | _UP))


def mount_own(directory: str, total_bytes: int | None) -> tuple[bool, bool]:
    """Inside namespaces: mounts `directory` in memory (`total_bytes` None: as it is), this namespace's /proc, a /dev of
    harmless devices; makes the rest read-only.

    Returns (outside files are read-only and devices unreachable, /proc is its own).
    """
    c = libc()
    c.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
    place = os.fsencode(directory)
    if total_bytes is None:
        c.mount(place, place, None, _MS_BIND, None)
    else:
        options = f"size={total_bytes},nr_inodes=4096,mode=700".encode()
        c.mount(b"tmpfs", place, b"tmpfs", _MS_NOSUID | _MS_NODEV, options)
    own_proc = c.mount(b"proc", b"/proc", b"proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, None) == 0
    own_dev = _mount_devices(c)
    read_only = struct.pack("QQQQ", _MOUNT_ATTR_RDONLY, 0, 0, 0)
    writable = struct.pack("QQQQ", 0, _MOUNT_ATTR_RDONLY, 0, 0)
    held = c.syscall(_MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, read_only, len(read_only)) == 0
    c.syscall(_MOUNT_SETATTR, _AT_FDCWD, place, 0, writable, len(writable))
    return held and own_dev, own_proc


def _mount_devices(c: ctypes.CDLL) -> bool:
    """Mounts a private /dev: device nodes on a read-only mount can still be written."""
    devices = [path for path in (*_DEVICES_READ, *_DEVICES_WRITTEN) if os.path.exists(path)]
    handles = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in devices}
    if c.mount(b"tmpfs", b"/dev", b"tmpfs", _MS_NOSUID | _MS_NOEXEC, b"size=64k,nr_inodes=64,mode=755") != 0:
        return False
    bound = True
    for path, handle in handles.items():
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o666))
        bound &= c.mount(b"/proc/self/fd/%d" % handle, os.fsencode(path), None, _MS_BIND, None) == 0
        os.close(handle)
    for name, target in _DEVICE_LINKS.items():
        os.symlink(f"/proc/self/fd{target}", f"/dev/{name}")
    return bound


def drop_capabilities() -> None:
    """Drops all capabilities irrevocably, for this process and its children."""
    c = libc()
    c.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    for capability in range(_LAST_CAPABILITY + 1):
        c.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    c.capset(struct.pack("II", _CAPABILITY_VERSION_3, 0), struct.pack("IIIIII", 0, 0, 0, 0, 0, 0))


def restrict_files(
    readable: Iterable[str], directory: str, *, network: bool = False, port: int = 0, oldest: int = 1
) -> bool:
    """Landlock: allows reading and running only below `readable`, writing only below `directory`, and (Linux 6.12) no
    signals to the outside. False if the kernel lacks it.

    Args:
        network: TCP is left alone. Else no connection can be made (Linux 6.7), but for those to `port`.
        oldest: the version of Landlock that is needed; 6 is Linux 6.12.
    """
    c = libc()
    abi = c.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)
    if abi < oldest:
        return False
    files = (1 << {1: 13, 2: 14}.get(abi, 15)) - 1
    read = 0b1101  # execute, read a file, read a directory
    # The ABI version decides which rights exist and how long the structure is.
    attributes = struct.pack("QQQ", files, 3 if abi >= 4 and not network else 0, 3 if abi >= 6 else 0)
    size = 8 if abi < 4 else 16 if abi < 6 else 24
    ruleset = c.syscall(_LANDLOCK_CREATE, attributes, ctypes.c_size_t(size), 0)
    if ruleset < 0:
        return False
    rules = [(path, read) for path in readable] + [(path, 0b100) for path in _DEVICES_READ]
    rules += [(path, 0b110) for path in _DEVICES_WRITTEN] + [(directory, files)]
    for path, access in rules:
        try:
            handle = os.open(path, getattr(os, "O_PATH", 0) | os.O_CLOEXEC)
        except OSError:
            continue  # absent files need no rule
        if not os.path.isdir(path):
            access &= 0b111  # the other rights apply to directories
        c.syscall(_LANDLOCK_ADD, ruleset, _LANDLOCK_PATH, struct.pack("=Qi", access, handle), 0)
        os.close(handle)
    if port and not network:
        c.syscall(_LANDLOCK_ADD, ruleset, _LANDLOCK_PORT, struct.pack("QQ", _LANDLOCK_CONNECT, port), 0)
    c.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    restricted = c.syscall(_LANDLOCK_RESTRICT, ruleset, 0) == 0
    os.close(ruleset)
    return restricted


def limit_resources(limits: dict[str, int], num_processes: int | None) -> None:
    """`num_processes`: limit for this user in this namespace; None if it would count processes outside."""
    wanted = [
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_CPU, limits["cpu_s"], limits["cpu_s"] + 1),
        (resource.RLIMIT_AS, limits["memory_bytes"], limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"], limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, 64, 64),
    ]
    if num_processes is not None:
        wanted.append((resource.RLIMIT_NPROC, num_processes, num_processes))
    for kind, soft, hard in wanted:
        most = resource.getrlimit(kind)[1]
        if most != resource.RLIM_INFINITY:
            soft, hard = min(soft, most), min(hard, most)
        try:
            resource.setrlimit(kind, (soft, hard))
        except (OSError, ValueError):
            pass  # macOS refuses a limit of the address space (docs/rewards.md)


# -- seccomp -----------------------------------------------------------------------------------------------------------

# name -> number on (x86_64, aarch64); None: that machine does not have it
_NEVER: dict[str, tuple[int | None, int | None]] = {
    "io_uring_setup": (425, 425),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsmount": (432, 432),
    "mount_setattr": (442, 442),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "kexec_load": (246, 104),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    # their memory counts against no process's limit
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
}
_PROCESSES: dict[str, tuple[int | None, int | None]] = {"fork": (57, None), "vfork": (58, None)}
# without a process namespace: no access to processes outside
_OTHERS: dict[str, tuple[int | None, int | None]] = {
    "kill": (62, 129),
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "setsid": (112, 157),
    "setpgid": (109, 154),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
}
# where files outside are not on read-only mounts: Landlock has no right for metadata. These calls succeed and do
# nothing, so that programs which copy or unpack files of their own go on.
_METADATA: dict[str, tuple[int | None, int | None]] = {
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "setxattrat": (463, 463),
    "removexattrat": (466, 466),
    "file_setattr": (469, 469),
}
_SOCKET, _CLONE, _CLONE3 = (41, 198), (56, 220), (435, 435)
_SELF = -1
"""Stands for the process id of the program."""
# (numbers, argument, its allowed values)
_ONLY: list[tuple[tuple[int, int], int, tuple[int, ...]]] = [
    ((302, 261), 0, (0, _SELF)),  # prlimit64: limits of the supervisor would end it
]
_ONLY_ALONE: list[tuple[tuple[int, int], int, tuple[int, ...]]] = [
    ((234, 131), 0, (_SELF,)),  # tgkill
    ((141, 140), 0, (0,)),  # setpriority: of a process, not of a user or group
    ((141, 140), 1, (0, _SELF)),
    ((251, 30), 0, (1,)),  # ioprio_set: the same
    ((251, 30), 1, (0, _SELF)),
    ((142, 118), 0, (0, _SELF)),  # sched_setparam
    ((144, 119), 0, (0, _SELF)),  # sched_setscheduler
    ((203, 122), 0, (0, _SELF)),  # sched_setaffinity
    ((314, 274), 0, (0, _SELF)),  # sched_setattr
]
_ONLY_TCP: list[tuple[tuple[int, int], int, tuple[int, ...]]] = [
    (_SOCKET, 0, (2, 10)),  # AF_INET, AF_INET6
    (_SOCKET, 1, (1, 0x801, 0x80001, 0x80801)),  # SOCK_STREAM, with SOCK_NONBLOCK and SOCK_CLOEXEC
    (_SOCKET, 2, (0, 6)),  # IPPROTO_TCP: Landlock does not see MPTCP and SCTP
]
# (numbers, argument, its forbidden values): the owner of a descriptor is sent a chosen signal; who opens a leased file
# waits for its holder; flags of a file are metadata
_NOT: list[tuple[tuple[int, int], int, tuple[int, ...]]] = [
    ((72, 25), 1, (8, 10, 15, 1024)),  # fcntl: F_SETOWN, F_SETSIG, F_SETOWN_EX, F_SETLEASE
    ((16, 29), 1, (0x8901, 0x8902)),  # ioctl: FIOSETOWN, SIOCSPGRP
    ((16, 29), 1, (0x40086602, 0x401C5820, 0x40087602)),  # FS_IOC_SETFLAGS, FS_IOC_FSSETXATTR, FS_IOC_SETVERSION
]
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

_LOAD, _JUMP_ALWAYS, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _JUMP_ANY_BIT, _RETURN = 0x20, 0x05, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _ARGUMENT_BYTES = 0, 4, 16, 8


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _filter(column: int, architecture: int, single: bool, alone: bool, read_only: bool, tcp: bool) -> bytes:
    """The BPF program. Jumps count instructions to skip."""
    refuse, absent, pretend = _ERRNO | errno.EPERM, _ERRNO | errno.ENOSYS, _ERRNO
    program = [
        _instruction(_LOAD, _ARCHITECTURE),
        _instruction(_JUMP_EQUAL, architecture, 1, 0),
        _instruction(_RETURN, _KILL),
        _instruction(_LOAD, _NUMBER),
        _instruction(_JUMP_GREATER_EQUAL, 0x40000000, 0, 1),  # the second table of x86_64
        _instruction(_RETURN, _KILL),
    ]
    # Phase 1: calls that are refused whatever their arguments.
    never = [*_NEVER.values(), *(_PROCESSES.values() if single else ()), *(_OTHERS.values() if alone else ())]
    never += [] if tcp else [_SOCKET]
    metadata = () if read_only else _METADATA.values()
    for answer, calls in ((refuse, never), (pretend, metadata)):
        for numbers in calls:
            if (number := numbers[column]) is not None:
                program += [_instruction(_JUMP_EQUAL, number, 0, 1), _instruction(_RETURN, answer)]
    # clone3's flags are in memory, which a filter cannot read: on ENOSYS the C library uses clone
    program += [_instruction(_JUMP_EQUAL, _CLONE3[column], 0, 1), _instruction(_RETURN, absent)]
    program += [_instruction(_JUMP_EQUAL, _CLONE[column], 0, 5 if single else 4), _instruction(_LOAD, _FIRST_ARGUMENT)]
    program += [_instruction(_JUMP_ANY_BIT, _CLONE_ANY_NAMESPACE, 1 if single else 0, 0 if single else 1)]
    if single:
        program += [_instruction(_JUMP_ANY_BIT, _CLONE_THREAD, 1, 0)]
    program += [_instruction(_RETURN, refuse), _instruction(_RETURN, _ALLOW)]
    # Phase 2: calls that are refused by an argument.
    for numbers, argument, values in (*_ONLY, *(_ONLY_ALONE if alone else ()), *(_ONLY_TCP if tcp else ())):
        pids = [os.getpid() if value == _SELF else value for value in values]
        checks = [_instruction(_JUMP_EQUAL, value, len(pids) - i, 0) for i, value in enumerate(pids)]
        program += _of_call(numbers[column], argument, [*checks, _instruction(_RETURN, refuse)])
    for numbers, argument, values in _NOT:
        checks = [_instruction(_JUMP_EQUAL, value, len(values) - i, 0) for i, value in enumerate(values)]
        checks += [_instruction(_JUMP_ALWAYS, 1), _instruction(_RETURN, refuse)]
        program += _of_call(numbers[column], argument, checks)
    program.append(_instruction(_RETURN, _ALLOW))
    return b"".join(program)


def _of_call(number: int, argument: int, checks: list[bytes]) -> list[bytes]:
    """Applies `checks` to the lower half of one call's argument, then reloads the call's number."""
    load = _instruction(_LOAD, _FIRST_ARGUMENT + argument * _ARGUMENT_BYTES)
    skip = _instruction(_JUMP_EQUAL, number, 0, len(checks) + 2)
    return [skip, load, *checks, _instruction(_LOAD, _NUMBER)]


def filter_calls(*, single: bool, alone: bool, read_only: bool, tcp: bool = False) -> bool:
    """Irrevocably refuses calls that reach the network or rarely used parts of the kernel.

    Args:
        single: also refuse new processes, but not threads.
        alone: there is no process namespace: also refuse signals to others. Call it in the process that becomes the
            program.
        read_only: files outside are on read-only mounts. Else modes, owners, times and attributes stay as they are.
        tcp: allow sockets of TCP.

    Returns False if this machine or its kernel has no such filter.
    """
    known = _ARCHITECTURES.get(os.uname().machine) if sys.platform == "linux" else None
    if known is None:
        return False
    program = _filter(*known, single, alone, read_only, tcp)
    code = ctypes.create_string_buffer(program, len(program))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    head = Program(len(program) // 8, ctypes.cast(code, ctypes.c_void_p))
    c = libc()
    c.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    return c.prctl(_PR_SET_SECCOMP, 2, ctypes.byref(head), 0, 0) == 0
