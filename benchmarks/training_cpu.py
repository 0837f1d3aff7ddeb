"""What a training step costs on a CPU, by attention's padding, threads and shared prompts; the loss path; the copy of a
checkpoint.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/training_cpu.py [--rounds 7] [--write]

Variants alternate in one process, one rank of FSDP2, so that a disturbance meets all of them. CPU time is that of
the whole process. `--tiny` runs everything once on small inputs: a check of this file, no measurement.
Writes benchmarks/results/training_cpu.md.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar
from unittest import mock

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is loaded; as the trainer's ranks have it
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import torch.distributed as dist

from asyncrl.checkpoint.run_directory import git_commit, package_versions
from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.model import ModelConfig
from asyncrl.config.threads import local_cores
from asyncrl.config.trainer import FsdpConfig, TrainerConfig
from asyncrl.trainer.backend import TrainBackend
from asyncrl.trainer.backends import build_backend
from asyncrl.trainer.host_copies import HostCopies
from asyncrl.trainer.packing import PackingRules, plan_step
from asyncrl.trainer.step import batch
from asyncrl.trainer.token_logprobs import LogitRules, token_logprobs
from asyncrl.trainer.trainer_spec import TrainerSpec
from asyncrl.types import GroupSummary, LeaseManifest, Lengths, RankPlan, Segment, Trajectory, TrajectoryKey
from asyncrl_testing.random_model import write_random_qwen3

Key = TypeVar("Key")
RESULTS = Path(__file__).parent / "results" / "training_cpu.md"
PROMPT_TOKENS, GROUP_SIZE, VOCABULARY = 6, 8, 128
BUDGET = 16384
"""trainer.max_tokens_per_microbatch of configs/cpu.yaml."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Median seconds of one call."""

    wall_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """The batch of a step."""

    name: str
    trajectories: dict[TrajectoryKey, Trajectory]
    manifest: LeaseManifest

    def plan(self, budget: int, *, share_prompts: bool = False) -> RankPlan:
        """For one rank, with random advantages."""
        draw = np.random.default_rng(0)
        advantages = [draw.normal(size=GROUP_SIZE) for _ in self.manifest.groups]
        rules = PackingRules(num_plans=1, max_tokens_per_microbatch=budget, share_prompts=share_prompts)
        return plan_step(self.manifest, advantages, rules)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, local_cores()}), help="of a step")
    parser.add_argument("--tiny", action="store_true", help="small inputs, one round: checks that this file runs")
    parser.add_argument("--write", action="store_true", help="write the results")
    options = parser.parse_args()
    rounds = 1 if options.tiny else options.rounds
    load_average = os.getloadavg()[0]
    with process_group(), tempfile.TemporaryDirectory() as directory:
        layers = {"num_hidden_layers": 1} if options.tiny else {}
        model = write_random_qwen3(Path(directory), vocab_size=VOCABULARY, **layers)
        lines = [
            *step_rows(model, rounds, options.threads, tiny=options.tiny),
            "",
            *prompt_rows(model, rounds, tiny=options.tiny),
            "",
            *loss_rows(rounds, tiny=options.tiny),
        ]
        lines += ["", *capture_rows(rounds, tiny=options.tiny)]
    versions = ", ".join(f"{name} {version}" for name, version in package_versions().items())
    head = [
        "# A training step on a CPU",
        "",
        f"`python benchmarks/training_cpu.py --rounds {rounds}`; medians. Variants alternate in one process.",
        "",
        f"{platform.machine()}, {local_cores()} cores, load average {load_average:.1f} at the start; {versions}; "
        f"commit {git_commit()}",
        "",
    ]
    text = "\n".join([*head, *lines]) + "\n"
    if options.write and not options.tiny:
        RESULTS.write_text(text)
    sys.stdout.write(text)


# -- a step --------------------------------------------------------------------------------------------------------


def step_rows(model: Path, rounds: int, threads: Sequence[int], *, tiny: bool) -> list[str]:
    """The toy job and a long-tailed batch, by the way attention pads, the budget of a micro-batch and the threads."""
    draw = np.random.default_rng(0)
    groups = 2 if tiny else 16
    tail = draw.integers(8, 48, 2 * groups * GROUP_SIZE)
    tail[draw.random(len(tail)) < 0.05] = 256
    loads = [load("toy job", [64] * (groups * GROUP_SIZE)), load("long tail", tail.tolist())]
    backend = build(model, share_prompts=False)
    rows = [
        "## A step",
        "",
        "| batch | attention | budget, tokens | threads | ms | CPU-ms per sample |",
        "|" + "---|" * 6,
    ]
    for one in loads:
        variants: dict[tuple[str, int, int], Callable[[], object]] = {
            (padding, budget, count): partial(step, backend, one, one.plan(budget), padding, count)
            for padding in ("to the longest", "by classes")
            for budget in (BUDGET, 2048)
            for count in threads
        }
        for (padding, budget, count), cost in alternate(variants, rounds).items():
            per_sample = cost.cpu_s / len(one.trajectories)
            rows.append(
                f"| {one.name} | {padding} | {budget} | {count} | {cost.wall_s * 1e3:.0f} | {per_sample * 1e3:.2f} |"
            )
    return rows


def prompt_rows(model: Path, rounds: int, *, tiny: bool) -> list[str]:
    """Groups of 8 with prompts that are computed for each trajectory, and once for the group, on one thread."""
    groups = 1 if tiny else 8
    rows = [
        "## Prompts of a group, on one thread",
        "",
        "| prompt, tokens | response, tokens | each its own, ms | shared, ms | ratio |",
        "|" + "---|" * 5,
    ]
    backends = {share: build(model, share_prompts=share) for share in (False, True)}
    for prompt, response in ((6, 64), (12, 6), (128, 128), (512, 64)):
        one = load("", [response] * (groups * GROUP_SIZE), prompt)
        variants = {
            share: partial(step, backends[share], one, one.plan(BUDGET, share_prompts=share), "by classes", 1)
            for share in (False, True)
        }
        cost = alternate(variants, rounds)
        own, shared = cost[False].wall_s, cost[True].wall_s
        rows.append(f"| {prompt} | {response} | {own * 1e3:.0f} | {shared * 1e3:.0f} | {shared / own:.2f} |")
    return rows


def build(model: Path, *, share_prompts: bool) -> TrainBackend:
    fsdp = FsdpConfig(reshard_after_forward=False, share_prompts=share_prompts)
    trainer = TrainerConfig(lr=1e-9, device="cpu", fsdp=fsdp, max_tokens_per_microbatch=BUDGET)
    spec = TrainerSpec(model=ModelConfig(path=str(model)), trainer=trainer, algorithm=AlgorithmConfig())
    return build_backend(spec, rank=0, world_size=1, device=torch.device("cpu"))


def step(backend: TrainBackend, one: Load, plan: RankPlan, padding: str, threads: int) -> None:
    torch.set_num_threads(threads)
    before = mock.patch.object(batch, "length_classes", one_class)  # how attention padded before there were classes
    if padding == "by classes":
        backend.train_step(plan, one.trajectories)
        return
    with before:
        backend.train_step(plan, one.trajectories)


def one_class(lengths: np.ndarray, **limits: object) -> tuple[np.ndarray, ...]:
    return (np.arange(len(lengths)),)


def load(name: str, responses: Sequence[int], prompt_tokens: int = PROMPT_TOKENS) -> Load:
    """Groups of GROUP_SIZE with responses of these lengths."""
    draw = np.random.default_rng(1)
    trajectories: dict[TrajectoryKey, Trajectory] = {}
    groups = []
    for ordinal in range(len(responses) // GROUP_SIZE):
        prompt = draw.integers(0, VOCABULARY, prompt_tokens).astype(np.int32)
        sizes = responses[ordinal * GROUP_SIZE : (ordinal + 1) * GROUP_SIZE]
        for index, size in enumerate(sizes):
            trajectories[ordinal, index] = Trajectory(
                prompt_ids=prompt,
                response_ids=draw.integers(0, VOCABULARY, size).astype(np.int32),
                logprobs=np.full(size, -np.log(VOCABULARY), np.float32),
                loss_mask=np.ones(size, bool),
                segments=(Segment(0, size, 0, 0),),
                reward=0.0,
            )
        lengths = tuple(Lengths(prompt_tokens, size, size) for size in sizes)
        rewards = (0.0,) * GROUP_SIZE
        groups.append(GroupSummary(ordinal, 0, lengths, rewards, lags=(), segments=GROUP_SIZE, interrupted=0))
    return Load(name, trajectories, LeaseManifest(0, tuple(groups)))


# -- the loss path -------------------------------------------------------------------------------------------------


def loss_rows(rounds: int, *, tiny: bool) -> list[str]:
    """Log-probabilities forward and backward, by the size of a block of logits."""
    rows = ["## Log-probabilities, forward and backward, on one thread", ""]
    rows += ["| vocabulary | tokens | hidden size | entries of a block | ms |", "|" + "---|" * 5]
    torch.set_num_threads(1)
    for vocabulary, tokens, size in ((128, 8192, 128), (32768, 512, 512), (151936, 256, 1024)):
        if tiny:
            vocabulary, tokens, size = 128, 16, 8
        hidden = torch.randn(tokens, size, requires_grad=True)
        weight = torch.randn(vocabulary, size, requires_grad=True)
        targets = torch.randint(vocabulary, (tokens,))

        def both(entries: int, hidden=hidden, weight=weight, targets=targets) -> None:
            found, _ = token_logprobs(hidden, weight, None, targets, temperature=1.0, rules=LogitRules(entries))
            torch.autograd.grad(found.sum(), (hidden, weight))

        sizes = (1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26)  # two rows of the vocabulary, at least
        blocks = {entries: partial(both, entries) for entries in sizes if entries >= 2 * vocabulary}
        for entries, cost in alternate(blocks, rounds).items():
            rows.append(
                f"| {vocabulary} | {tokens} | {size} | 2^{entries.bit_length() - 1} | {cost.wall_s * 1e3:.1f} |"
            )
    return rows


# -- the copy of a checkpoint --------------------------------------------------------------------------------------


def capture_rows(rounds: int, *, tiny: bool) -> list[str]:
    """A copy of 1.5 GB of state, into memory that the system must provide and into that of the former copy."""
    entries = 1 << (10 if tiny else 24)
    live = {f"tensor {number}": torch.randn(entries) for number in range(24)}
    kept, fresh = HostCopies(), HostCopies()

    def again() -> None:
        kept.give_back(kept.copy(live.items()))

    costs = alternate({"new memory": lambda: fresh.copy(live.items()), "kept memory": again}, rounds)
    rows = ["## The copy of a checkpoint", "", "| into | GB | ms |", "|---|---|---|"]
    size = 24 * entries * 4 / 1e9
    return [*rows, *(f"| {name} | {size:.2f} | {cost.wall_s * 1e3:.0f} |" for name, cost in costs.items())]


def alternate(variants: dict[Key, Callable[[], object]], rounds: int) -> dict[Key, Cost]:
    """Runs all of them once in each round, after one round that does not count."""
    found: dict[Key, list[tuple[float, float]]] = {key: [] for key in variants}
    for number in range(rounds + 1):
        for key, work in variants.items():
            wall, cpu = time.perf_counter(), time.process_time()
            work()
            if number:
                found[key].append((time.perf_counter() - wall, time.process_time() - cpu))
    return {key: Cost(*(statistics.median(part) for part in zip(*costs, strict=True))) for key, costs in found.items()}


@contextmanager
def process_group() -> Iterator[None]:
    """Of this process alone."""
    dist.init_process_group(
        "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=datetime.timedelta(seconds=60)
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
