"""Runs a function on several ranks, each in a process of its own, for tests of training backends."""

from __future__ import annotations

import datetime
import multiprocessing
import pickle
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest


def join(root: Path, rank: int, world_size: int) -> None:
    """Joins the ranks that were started below `root`."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(str(root / "rendezvous"), world_size)
    timeout = datetime.timedelta(seconds=120)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)


def run_ranks(
    function: Callable[..., Any], root: Path, world_size: int, *args: Any, preload: Sequence[str], deadline_s: float
) -> list[Any]:
    """The results of `function(root, rank, world_size, *args)` by rank. Fails the test after `deadline_s`, or when a
    rank raises.

    Args:
        function: at the top of its module.
        root: an empty directory.
        preload: modules that are imported once, by the server that the ranks are forked from.
    """
    root.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    ranks = [
        context.Process(target=_rank_main, args=(function, root, rank, world_size, args), daemon=True)
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    # One deadline for all ranks: a rank that hangs blocks the others in a collective.
    deadline = datetime.datetime.now() + datetime.timedelta(seconds=deadline_s)
    for process in ranks:
        process.join(max(0.0, (deadline - datetime.datetime.now()).total_seconds()))
        if process.is_alive():
            for other in ranks:
                other.kill()
            pytest.fail(f"ranks did not end within {deadline_s} s")
    errors = [(root / f"error{rank}").read_text() for rank in range(world_size) if (root / f"error{rank}").exists()]
    # A rank that crashed has no error file, only an exit code.
    errors += [f"exit codes {[process.exitcode for process in ranks]}"] * any(p.exitcode for p in ranks)
    if errors:
        pytest.fail("\n".join(errors))
    return [pickle.loads((root / f"found{rank}").read_bytes()) for rank in range(world_size)]


def _rank_main(function: Callable[..., Any], root: Path, rank: int, world_size: int, args: tuple[Any, ...]) -> None:
    import torch.distributed as dist

    try:
        join(root, rank, world_size)
        found = function(root, rank, world_size, *args)
    except BaseException:
        (root / f"error{rank}").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        raise
    (root / f"found{rank}").write_bytes(pickle.dumps(found))
    dist.destroy_process_group()
