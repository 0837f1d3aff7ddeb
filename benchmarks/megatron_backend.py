"""What the Megatron-core backend costs on CPU ranks: steps against FSDP2, the export against a bare gather, loading.

    OMP_NUM_THREADS=1 python benchmarks/megatron_backend.py [--size 0.5B] [--step-size 50M] [--rounds 5] [--write]

Two ranks over gloo, one thread each, float32.

Steps: both backends live in the same ranks and train the same batches in turn; the ratio is that of the medians. Two
ranks of FSDP2 have half of the model each; `dp2` of Megatron-core has whole copies.

Export: walking `named_weights` to the end on both ranks, against moving the same bytes from the rank that has them to
the other, out of and into one contiguous buffer, in the better of two ways (all-gather, broadcasts of a bucket each).
The two take turns. Goal: at least 0.7 of the bare speed.

Loading: seconds to build the backend from files in the page cache, and anonymous memory of a rank above what the
process had before: what it keeps, and the peak. Gradients and moments are zero and on a CPU take no memory before they
are written, so a rank keeps about its shard of the weights. What the peak has beyond that is what loading takes. Goal:
less than a shard, never the model.

Sizes: `tiny` and `0.5B` as in benchmarks/publish.py, `50M` between them. 0.5B takes 14 GB of memory in all. Writes
benchmarks/results/megatron.md with --write.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works from a checkout that is not installed

from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.model import ModelConfig
from asyncrl.config.trainer import MegatronConfig, TrainerConfig
from asyncrl.trainer.backends import build_backend, memory_of
from asyncrl.trainer.model_tensors import model_tensors
from asyncrl.trainer.trainer_spec import TrainerSpec
from asyncrl.types import ModelFacts
from asyncrl_testing.backend_suite import random_lease
from asyncrl_testing.rank_processes import run_ranks
from benchmarks.publish import SIZES, write_model

ALL_SIZES = SIZES | {
    "50M": {"hidden": 512, "heads": 8, "kv_heads": 2, "inner": 1792, "layers": 12, "vocabulary": 16384}
}
LAYOUTS = {
    "dp2": MegatronConfig(),
    "tp2": MegatronConfig(tensor_parallel=2),
    "pp2": MegatronConfig(pipeline_parallel=2),
}
EXPORTED = ("tp2", "pp2")
BUCKET_BYTES = 1 << 27
DEADLINE_S = 900.0
PRELOAD = ["tests.numerics.megatron_ranks", "asyncrl.trainer.fsdp.backend"]
RESULTS = Path(__file__).parent / "results" / "megatron.md"
STATUS = Path("/proc/self/status")


def spec_of(path: str, backend: str, layout: str) -> TrainerSpec:
    trainer = TrainerConfig(backend=backend, num_ranks=2, megatron=LAYOUTS[layout], collective_timeout_s=300)
    return TrainerSpec(model=ModelConfig(path=path), trainer=trainer, algorithm=AlgorithmConfig())


def timed(work: Callable[[], Any]) -> float:
    """Seconds until both ranks have done it."""
    dist.barrier()
    started = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - started


class PeakMemory:
    """The peak of this process's anonymous memory above what it was, sampled each 5 ms. Pages of files do not count."""

    def __enter__(self) -> PeakMemory:
        gc.collect()
        self._before, self.peak, self.kept, self._done = anonymous(), 0, 0, threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *args: object) -> None:
        self._done.set()
        self._thread.join()
        self.kept = anonymous() - self._before
        self.peak = max(self.peak, self.kept)

    def _sample(self) -> None:
        while not self._done.wait(0.005):
            self.peak = max(self.peak, anonymous() - self._before)


def anonymous() -> int:
    """Bytes."""
    fields = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
    return sum(int(fields[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem"))


def step_rank(root: Path, rank: int, world_size: int, path: str, layout: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of each step, by backend."""
    lease = random_lease(1, num_groups=8, group_size=8, max_response=200)
    backends, plans = {}, {}
    for name in ("fsdp", "megatron"):
        spec = spec_of(path, name, layout)
        backends[name] = build_backend(spec, rank=rank, world_size=world_size, device=torch.device("cpu"))
        ranks = spec.trainer.layout
        plans[name] = lease.plans(ranks.num_plans, 1024)[ranks.plan_of(rank)]
    found: dict[str, list[float]] = {name: [] for name in backends}
    for _ in range(rounds + 1):
        for name, backend in backends.items():
            found[name].append(timed(lambda b=backend, p=plans[name]: b.train_step(p, lease.trajectories)))
    return {name: seconds[1:] for name, seconds in found.items()}


def export_rank(root: Path, rank: int, world_size: int, path: str, layout: str, rounds: int) -> dict[str, Any]:
    """Seconds of exports and of bare gathers, seconds and peak bytes of loading."""
    spec = spec_of(path, "megatron", layout)
    with PeakMemory() as memory:
        started = time.perf_counter()
        backend = build_backend(spec, rank=rank, world_size=world_size, device=torch.device("cpu"))
        load_s = time.perf_counter() - started
    specs = backend.weight_specs()
    nbytes = sum(spec.nbytes for spec in specs)
    own = torch.ones(nbytes // 2 // 4)
    whole = torch.empty(2, own.numel())
    ways = {
        "export": lambda: sum(1 for _ in backend.named_weights()),
        "all_gather": lambda: dist.all_gather(list(whole), own),
        "broadcast": lambda: broadcasts(whole, own, rank),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, way in ways.items():
            found[name].append(timed(way))
    assert len(specs) > 10
    return {"bytes": nbytes, "load_s": load_s, "kept": memory.kept, "peak": memory.peak} | {
        k: v[1:] for k, v in found.items()
    }


def broadcasts(whole: torch.Tensor, own: torch.Tensor, rank: int) -> None:
    """Each rank's part to the other, bucket by bucket."""
    for source, row in enumerate(whole):
        for part, mine in zip(row.split(BUCKET_BYTES // 4), own.split(BUCKET_BYTES // 4), strict=True):
            if source == rank:
                part.copy_(mine)
            dist.broadcast(part, src=source)


def step_rows(path: str, size: str, rounds: int, root: Path) -> list[str]:
    rows = []
    for layout in LAYOUTS:
        ranks = run_ranks(
            step_rank, root / f"step-{layout}", 2, path, layout, rounds, preload=PRELOAD, deadline_s=DEADLINE_S
        )
        fsdp, megatron = (statistics.median(ranks[0][name]) for name in ("fsdp", "megatron"))
        rows.append(f"| {size} | {layout} | {fsdp * 1e3:.0f} | {megatron * 1e3:.0f} | {megatron / fsdp:.2f} |")
    return rows


def export_rows(path: str, size: str, rounds: int, root: Path) -> tuple[list[str], list[str]]:
    """Of the export, and of loading."""
    exported, loaded = [], []
    tensors = model_tensors(ModelFacts.of_config(path, json.loads((Path(path) / "config.json").read_text())))
    assert tensors is not None
    for layout in EXPORTED:
        ranks = run_ranks(
            export_rank, root / f"export-{layout}", 2, path, layout, rounds, preload=PRELOAD, deadline_s=DEADLINE_S
        )
        first = ranks[0]
        own = statistics.median(first["export"])
        way, bare = min(((w, statistics.median(first[w])) for w in ("all_gather", "broadcast")), key=lambda w: w[1])
        megabytes = first["bytes"] / 1e6
        exported.append(
            f"| {size} | {layout} | {megabytes:.0f} | {own * 1e3:.0f} | {bare * 1e3:.0f} ({way}) | {bare / own:.2f} |"
        )
        announced = memory_of(spec_of(path, "megatron", layout).trainer, tensors, critic=False, reference=False)
        for rank, found in enumerate(ranks):
            held = announced[rank % len(announced)]
            extra = found["peak"] - found["kept"]
            loaded.append(
                f"| {size} | {layout} | {rank} | {found['load_s']:.1f} | {megabytes:.0f} | {held.weights / 1e6:.0f} | "
                f"{found['kept'] / 1e6:.0f} | {found['peak'] / 1e6:.0f} | {extra / held.weights:.0%} |"
            )
    return exported, loaded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=sorted(ALL_SIZES), default="0.5B", help="of the model that is exported")
    parser.add_argument("--step-size", choices=sorted(ALL_SIZES), default="50M", help="of the model that is trained")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="write the results too")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        paths = {}
        for size in {options.size, options.step_size}:
            (root / size).mkdir()
            write_model(root / size, ALL_SIZES[size])
            paths[size] = str(root / size)
        steps = step_rows(paths[options.step_size], options.step_size, options.rounds, root)
        exported, loaded = export_rows(paths[options.size], options.size, options.rounds, root)
    from asyncrl.checkpoint.run_directory import git_commit, package_versions

    versions = ", ".join(f"{name} {version}" for name, version in package_versions().items())
    command = f"python benchmarks/megatron_backend.py --size {options.size} --step-size {options.step_size}"
    text = "\n".join(
        [
            "# Megatron-core on CPU ranks",
            "",
            f"`{command} --rounds {options.rounds}`",
            "",
            f"{os.cpu_count()} cores, load average {load:.1f} at the start; commit {git_commit()}; {versions}.",
            "",
            "## A step, against FSDP2 on as many ranks",
            "",
            "| model | layout | FSDP2, ms | Megatron-core, ms | ratio |",
            "|---|---|---|---|---|",
            *steps,
            "",
            "## All weights on every rank, against a bare gather",
            "",
            "| model | layout | MB | export, ms | bare, ms | share of the bare speed |",
            "|---|---|---|---|---|---|",
            *exported,
            "",
            "## Loading",
            "",
            "| model | layout | rank | s | whole, MB | shard, MB | kept, MB | peak, MB | loading, of the shard |",
            "|---|---|---|---|---|---|---|---|---|",
            *loaded,
        ]
    )
    if options.write:
        options.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
