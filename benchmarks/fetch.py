"""What trainer ranks fetch from the queue for a step: the sequences that they train, or the groups that these are of.

    python benchmarks/fetch.py [--groups 64] [--group-size 16] [--ranks 2 8 64] [--rounds 5] [--write]

A real message queue in this process leases groups with long-tailed responses, and the planner balances them over the
ranks. `sequences`: what a rank's plan asks the queue for, pickled, as it travels to an actor, summed over the ranks.
`groups`: the whole groups of these sequences, as asyncrl's first version fetched them. Both relative to the lease, each
of whose sequences is trained once. Seconds are those of answering and pickling for all ranks, medians over the rounds.
Writes benchmarks/results/fetch.md.
"""

from __future__ import annotations

import argparse
import asyncio
import pickle
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works from a checkout that is not installed

from asyncrl.checkpoint.run_directory import git_commit, package_versions
from asyncrl.config.load import load_recipe
from asyncrl.queue.message_queue import MessageQueue, QueueSpec
from asyncrl.trainer.packing import PackingRules, plan_step
from asyncrl.types import LeaseManifest, Segment, Trajectory, TrajectoryGroup, TrajectoryKey

RESULT = Path(__file__).resolve().parent / "results" / "fetch.md"
PROMPT, LONGEST, MICROBATCH = 200, 8192, 16384


def trajectory(draw: np.random.Generator, prompt: np.ndarray) -> Trajectory:
    length = int(min(LONGEST, draw.lognormal(6.5, 0.9)) // 1) or 1
    return Trajectory(
        prompt_ids=prompt,
        response_ids=draw.integers(0, 150_000, length).astype(np.int32),
        logprobs=-draw.random(length).astype(np.float32),
        loss_mask=np.ones(length, bool),
        segments=(Segment(0, length, 0, 0),),
        reward=float(draw.random()),
    )


async def leased(directory: Path, num_groups: int, group_size: int) -> tuple[MessageQueue, LeaseManifest]:
    words = [f"batch.groups_per_step={num_groups}", "run.max_steps=1", "mode=sync"]
    recipe = load_recipe(Path(__file__).resolve().parents[1] / "recipes" / "quickstart.yaml", words)
    queue = MessageQueue(QueueSpec(recipe, directory / "events.jsonl"))
    draw = np.random.default_rng(0)
    for ticket in (await queue.admit(num_groups, 0)).tickets:
        prompt = draw.integers(0, 150_000, PROMPT).astype(np.int32)
        members = tuple(trajectory(draw, prompt) for _ in range(group_size))
        await queue.put(ticket, TrajectoryGroup(ticket.ordinal, ticket.attempt, members))
    lease = await queue.lease(0, 0)
    assert isinstance(lease, LeaseManifest)
    return queue, lease


async def fetched(queue: MessageQueue, by_rank: list[list[TrajectoryKey]]) -> tuple[int, float]:
    """Bytes and seconds of all ranks."""
    began = time.perf_counter()
    nbytes = sum([len(pickle.dumps(await queue.fetch(keys), 5)) for keys in by_rank])
    return nbytes, time.perf_counter() - began


async def measure(options: argparse.Namespace, directory: Path) -> list[str]:
    queue, lease = await leased(directory, options.groups, options.group_size)
    whole, _ = await fetched(queue, [[(g.ordinal, i) for g in lease.groups for i in range(len(g.lengths))]])
    advantages = [np.zeros(len(group.rewards)) for group in lease.groups]
    rows = []
    for ranks in options.ranks:
        rules = PackingRules(num_plans=ranks, max_tokens_per_microbatch=MICROBATCH)
        now = [list(plan.keys) for plan in plan_step(lease, advantages, rules)]
        former = [
            [(ordinal, i) for ordinal in sorted({o for o, _ in keys}) for i in range(options.group_size)]
            for keys in now
        ]
        found: dict[str, list[tuple[int, float]]] = {"groups": [], "sequences": []}
        for number in range(options.rounds):
            turns = [("groups", former), ("sequences", now)]
            for name, keys in turns if number % 2 == 0 else reversed(turns):
                found[name].append(await fetched(queue, keys))
        for name, values in found.items():
            nbytes, seconds = values[0][0], statistics.median(s for _, s in values)
            rows.append(f"| {ranks} | {name} | {nbytes / 1e6:.1f} | {nbytes / whole:.2f} | {seconds * 1000:.1f} |")
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n\n")[0])
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 64])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        rows = asyncio.run(measure(options, Path(directory)))
    versions = ", ".join(f"{name} {version}" for name, version in package_versions().items())
    lines = [
        "# What ranks fetch for a step",
        "",
        f"`python benchmarks/fetch.py --groups {options.groups} --group-size {options.group_size}`: responses of a "
        f"long-tailed length, up to {LONGEST:,} tokens; commit {git_commit()}; {versions}.",
        "",
        "| ranks | each fetches | MB in all | of the lease | ms |",
        "|---|---|---|---|---|",
        *rows,
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if options.write:
        RESULT.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
