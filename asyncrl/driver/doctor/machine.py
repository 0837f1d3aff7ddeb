"""What this machine has: packages, GPUs, memory, shared memory, files, disk, the address of its name."""

from __future__ import annotations

import importlib.util
import os
import re
import resource
import shutil
import socket
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import psutil

from asyncrl.checkpoint.run_directory import package_versions
from asyncrl.config.recipe import Recipe
from asyncrl.driver.cluster.placement import place_run, words
from asyncrl.driver.doctor.observation import Observation, bad, ok, warning

FILES_PER_PROCESS = 512
"""Open files and sockets of one process of a run, generously."""
SHARED_MEMORY_BYTES = 1 << 30
_REQUIREMENT = re.compile(r"^([A-Za-z0-9._-]+)(\[[^\]]*\])?\s*([<>=!~][^;]*)?(?:;\s*(.*))?$")


def check_versions() -> Iterator[Observation]:
    """The packages that are installed, against what asyncrl asks for."""
    from packaging.specifiers import SpecifierSet

    for line in metadata.requires("asyncrl") or ():
        found = _REQUIREMENT.match(line)
        if found is None or "extra ==" in (found[4] or ""):
            continue
        name, wanted = found[1], SpecifierSet((found[3] or "").strip())
        try:
            have = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield bad("versions", f"{name} is not installed", f"pip install '{name}{wanted}'")
            continue
        if not wanted.contains(have, prereleases=True):
            yield bad("versions", f"{name} {have}; asyncrl needs {wanted}", f"pip install '{name}{wanted}'")
    named = ", ".join(f"{name} {version}" for name, version in package_versions().items())
    yield ok("versions", f"Python {sys.version.split()[0]}, {named}")


def check_compiled(package: str = "torch") -> Iterator[Observation]:
    """Python compiles what it imports and keeps the result, unless it may not: then every process compiles it again."""
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


def check_gpus(recipe: Recipe, *, joins: bool) -> Iterator[Observation]:
    """`joins`: the run joins a cluster, which may have other GPUs than this machine."""
    import torch

    count, driver = torch.cuda.device_count(), shutil.which("nvidia-smi") or Path("/dev/nvidia0").exists()
    if not count:
        if driver:
            text = f"this machine has NVIDIA devices, and torch {torch.__version__} finds none"
            yield bad("GPUs", text, "install torch with CUDA, or see CUDA_VISIBLE_DEVICES and the driver")
        else:
            yield ok("GPUs", "none: everything runs on the CPU")
        return
    sizes = [torch.cuda.get_device_properties(i).total_memory for i in range(count)]
    yield ok("GPUs", f"{count} x {torch.cuda.get_device_name(0)}, {min(sizes) / 2**30:.0f} GiB each")
    if not joins:
        yield ok("GPUs", words(place_run(recipe, [count]).bundles))


def check_shared_memory() -> Iterator[Observation]:
    """Weights of transport ipc, Ray's objects and vLLM's and SGLang's processes lie in /dev/shm."""
    place = Path("/dev/shm")
    if not place.is_dir():
        return
    free = shutil.disk_usage(place).free
    text = f"{free / 2**30:.1f} GiB free in /dev/shm"
    if free < SHARED_MEMORY_BYTES:
        do = "give the container more: docker run --shm-size=8g, or an emptyDir of medium Memory"
        yield Observation("shared memory", "bad" if free < 1 << 27 else "warning", text, do)
    else:
        yield ok("shared memory", text)


def check_files(recipe: Recipe) -> Iterator[Observation]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = max(4096, FILES_PER_PROCESS * (recipe.rollout.most_replicas // 8 + 2))
    text = f"{'unlimited' if soft == resource.RLIM_INFINITY else soft} open files a process"
    if soft != resource.RLIM_INFINITY and soft < needed:
        can = (
            ""
            if hard == resource.RLIM_INFINITY or hard >= needed
            else f" (the hard limit is {hard}: ask the administrator)"
        )
        yield warning("open files", text, f"ulimit -n {needed}{can}")
    else:
        yield ok("open files", text)


def check_address() -> Iterator[Observation]:
    """gloo and NCCL find each other by the address of the host's name, unless they are told an interface."""
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


def check_processors(recipe: Recipe) -> Iterator[Observation]:
    cores, processes = os.cpu_count() or 1, recipe.rollout.num_replicas + recipe.trainer.num_ranks + 3
    free = psutil.virtual_memory().available / 2**30
    text = f"{cores} cores, {free:.0f} GiB of memory free; about {processes} processes"
    if processes > 4 * cores:
        yield warning("processors", text, "fewer rollout.num_replicas or trainer.num_ranks would be as fast")
    else:
        yield ok("processors", text)


def check_disk(directory: Path, checkpoint_bytes: int | None, keep: int) -> Iterator[Observation]:
    """`checkpoint_bytes`: size of one; None where it is not known."""
    place = directory.absolute()
    while not place.exists():
        place = place.parent
    if not os.access(place, os.W_OK):
        yield bad("disk", f"{place} cannot be written", "set run.dir to a directory that can")
        return
    free = shutil.disk_usage(place).free
    text = f"{free / 2**30:.1f} GiB free for {directory}"
    if checkpoint_bytes is None:
        yield ok("disk", text)
        return
    needed = checkpoint_bytes * (keep + 1)  # one more while it is written
    text += f"; {keep} checkpoints of {checkpoint_bytes / 2**30:.2f} GiB and one being written"
    if needed > free:
        yield bad("disk", text, "make room, lower checkpoint.keep, or set run.dir to another disk")
    else:
        yield ok("disk", text)
