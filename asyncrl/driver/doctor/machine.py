"""Checks of this machine: packages, GPUs, memory, shared memory, files, disk, the address of its name."""

from __future__ import annotations

import importlib.util
import os
import resource
import shutil
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import psutil

from asyncrl.checkpoint.run_directory import package_versions
from asyncrl.config.recipe import Recipe
from asyncrl.driver.preflight import sees_gpus
from asyncrl.errors import AsyncRLError

Status = Literal["ok", "warning", "bad"]


@dataclass(frozen=True, slots=True)
class Observation:
    """The finding of one check.

    Attributes:
        area: subject of the check, in one or two words.
        status: bad: the run will not start, or fails; warning: it may fail, or be slower than necessary.
        remedy: what to do; empty if nothing is wrong.
    """

    area: str
    status: Status
    text: str
    remedy: str = ""


def ok(area: str, text: str) -> Observation:
    return Observation(area, "ok", text)


def warning(area: str, text: str, remedy: str) -> Observation:
    return Observation(area, "warning", text, remedy)


def bad(area: str, text: str, remedy: str) -> Observation:
    return Observation(area, "bad", text, remedy)


def guarded(area: str, check: Callable[[], Iterable[Observation] | None]) -> Iterator[Observation]:
    """The findings of a check; a failure of the check becomes a finding."""
    try:
        yield from check() or ()
    except AsyncRLError as error:  # in the words of `explain`
        text, _, remedy = str(error).partition("\ndo:")
        yield bad(area, text.removeprefix("asked: ").replace("\nfound:", ":"), remedy.strip())
    except Exception as error:  # noqa: BLE001 - a doctor reports, whatever a machine is like
        yield warning(area, f"could not be checked: {type(error).__name__}: {error}", "see whether it matters")


GIB = 1 << 30
FILES_PER_PROCESS = 512
"""Open files and sockets of one process, a generous estimate."""


def check_versions() -> Iterator[Observation]:
    """Compares the installed packages with asyncrl's requirements."""
    from packaging.requirements import Requirement

    for wanted in map(Requirement, metadata.requires("asyncrl") or ()):
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        try:
            have = metadata.version(wanted.name)
        except metadata.PackageNotFoundError:
            have = None
        if have is None or not wanted.specifier.contains(have, prereleases=True):
            text = f"{wanted.name} {have or 'is not installed'}; asyncrl needs {wanted.specifier}"
            yield bad("versions", text, f"pip install '{wanted.name}{wanted.specifier}'")
    named = ", ".join(f"{name} {version}" for name, version in package_versions().items())
    yield ok("versions", f"Python {sys.version.split()[0]}, {named}")


def check_compiled(package: str = "torch") -> Iterator[Observation]:
    """Whether Python can keep compiled files; otherwise every process compiles its imports again."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None or Path(importlib.util.cache_from_source(found.origin)).exists():
        return
    place = Path(found.origin).parent
    if sys.dont_write_bytecode:
        reason, do = "PYTHONDONTWRITEBYTECODE is set", "unset PYTHONDONTWRITEBYTECODE"
    elif not os.access(place, os.W_OK):
        reason, do = f"{place} cannot be written", "set PYTHONPYCACHEPREFIX to a directory that can"
    else:
        return
    text = f"no compiled files of {package}, and {reason}: every process takes about three times as long to start"
    yield warning("packages", text, f"{do}, or once: python -m compileall -q {place.parent}")


def check_gpus(recipe: Recipe) -> Iterator[Observation]:
    import torch

    sizes = [torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())]
    if sizes:
        yield ok("GPUs", f"{len(sizes)} x {torch.cuda.get_device_name(0)}, {min(sizes) / GIB:.0f} GiB each")
    elif sees_gpus(recipe):
        text = f"this machine has NVIDIA devices, and torch {torch.__version__} finds none"
        yield bad("GPUs", text, "install torch with CUDA, or see CUDA_VISIBLE_DEVICES and the driver")
    else:
        yield ok("GPUs", "none on this machine")


def check_shared_memory(place: Path = Path("/dev/shm")) -> Iterator[Observation]:
    """Transport ipc, Ray's objects, vLLM and SGLang use shared memory."""
    if not place.is_dir():
        return
    free = shutil.disk_usage(place).free
    text = f"{free / GIB:.1f} GiB free in {place}"
    if free < GIB:
        do = "give the container more: docker run --shm-size=8g, or an emptyDir of medium Memory"
        yield Observation("shared memory", "bad" if free < GIB // 8 else "warning", text, do)
    else:
        yield ok("shared memory", text)


def check_files(recipe: Recipe) -> Iterator[Observation]:
    soft, hard = (
        sys.maxsize if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    needed = max(4096, FILES_PER_PROCESS * (recipe.rollout.most_replicas // 8 + 2))
    if soft < needed:
        do = f"ulimit -n {needed}" + ("" if hard >= needed else f" (the hard limit is {hard}: ask the administrator)")
        yield warning("open files", f"{soft} open files a process", do)
    else:
        yield ok("open files", f"at least {needed} open files a process")


def check_address() -> Iterator[Observation]:
    """gloo and NCCL connect by the address of the host name, unless an interface is set."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
        with socket.socket() as listener:
            listener.bind((address, 0))
    except OSError as error:
        do = f"put '127.0.0.1 {name}' (or the machine's address) into /etc/hosts, or set GLOO_SOCKET_IFNAME"
        yield warning("network", f"the host's name {name} has no address of this machine: {error}", do)
        return
    yield ok("network", f"{name} is {address}; ports can be taken there")


def check_memory(needed: int) -> Observation:
    """`needed`: bytes of the processes of a run that compute on CPUs."""
    room = psutil.virtual_memory().available
    text = f"ranks and replicas together take {needed / GIB:.1f} GiB of {room / GIB:.0f} GiB free"
    if needed > 0.9 * room:
        return bad("memory", text, "lower rollout.num_replicas, or use a smaller model or LoRA")
    return ok("memory", text)


def check_disk(directory: Path, needed: int) -> Observation:
    """`needed`: bytes of the kept checkpoints and one being written; 0 if unknown."""
    place = directory.absolute()
    while not place.exists():
        place = place.parent
    if not os.access(place, os.W_OK):
        return bad("disk", f"{place} cannot be written", "set run.dir to a directory that can")
    free = shutil.disk_usage(place).free
    text = f"{free / GIB:.1f} GiB free for {directory}; checkpoints take {needed / GIB:.2f} GiB"
    if needed > free:
        return bad("disk", text, "make room, lower checkpoint.keep, or set run.dir to another disk")
    return ok("disk", text)
