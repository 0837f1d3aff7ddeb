"""What learning costs when every token is trained with the same lag: algorithms x lags x seeds, and the real system.

    python benchmarks/learning_under_lag.py steps --workers 2     # an hour on 2 cores; goes on where it stopped
    python benchmarks/learning_under_lag.py wall                  # the real system, one run at a time: an hour
    python benchmarks/learning_under_lag.py report                # table and picture from what has been measured

`steps` holds the lag exactly: in one process the embedded engine generates the groups of step g + lag under version g,
and the FSDP backend trains them when their turn has come, through the queue's own accounting, the planner and the
objective of a real run. `wall` runs `asyncrl-train` with `staleness.max_lag` as a limit, where the lag is what the
machine makes of it. Model and data are those of the quickstart (`make quickstart` makes them). Both add to
benchmarks/results/learning_under_lag.jsonl and go on where they stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import itertools
import json
import math
import multiprocessing
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.checkpoint.run_directory import git_commit, package_versions

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
RECORDS = RESULTS / "learning_under_lag.jsonl"
LAGS = (0, 1, 2, 4, 8, 16)
SEEDS = 5
STEPS = 50
EVAL_STEPS = (25, 50)
WALL_STEPS = 40
WALL_MARKS_S = (4, 6, 12)
WALL_PROMPTS = 128
PROXIMAL = ["algorithm.ratio=proximal"]
ALGORITHMS: dict[str, list[str]] = {
    "uncorrected": PROXIMAL,
    "grpo_clip": ["algorithm.preset=grpo", "algorithm.kl.coefficient=0", "algorithm.aggregation=token_mean"],
    "grpo_clip_kl": ["algorithm.preset=grpo", "algorithm.aggregation=token_mean"],
    "decoupled_ppo": ["algorithm.preset=decoupled_ppo", "algorithm.proximal=log_linear"],
    "tis": [*PROXIMAL, "algorithm.corrections=[{name: truncated_is, high: 2.0}]"],
    "cispo": ["algorithm.preset=cispo"],
}
WHAT_THEY_ARE = """
All have the advantages of GRPO and token_mean. uncorrected: the plain policy gradient, as if every token were new.
grpo_clip: the ratio is to the policy that sampled, and clipped (0.2); grpo_clip_kl: with the KL term of the preset
(k3, 0.04) beside it. decoupled_ppo: the clip holds to the policy before the step (log_linear), and truncated importance
weights (5.0) answer for the rest. tis: such weights (2.0) alone. cispo: weights in [0, 5], and every token keeps its
gradient.
"""
SMALL = ["batch.groups_per_step=8", "batch.group_size=8", "rollout.torch.num_slots=128", "trainer.lr=5e-4"]


def one_run(algorithm: str, lag: int, seed: int, steps: int = STEPS) -> dict[str, Any]:
    """Accuracy by step of one run with every trained token `lag` steps old (fewer during the first `lag` steps)."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store, timeout = dist.HashStore(), datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timeout)
    try:
        return asyncio.run(_run(algorithm, lag, seed, steps))
    finally:
        dist.destroy_process_group()


async def _run(algorithm: str, lag: int, seed: int, steps: int) -> dict[str, Any]:
    import torch

    from asyncrl.config.load import load_recipe
    from asyncrl.inference.torch_engine.engine import TorchEngine
    from asyncrl.preflight import check_recipe
    from asyncrl.queue.masking import StoredGroup, summarize
    from asyncrl.testing.publishing import Publisher
    from asyncrl.trainer.fsdp.backend import FsdpBackend
    from asyncrl.trainer.planner import StepPlanner
    from asyncrl.trainer.spec import TrainerSpec
    from asyncrl.types import LeaseManifest

    overrides = [*SMALL, *ALGORITHMS[algorithm], f"run.seed={seed}", f"run.max_steps={steps}"]
    recipe = load_recipe(ROOT / "recipes" / "quickstart.yaml", overrides)
    found = check_recipe(recipe, use_hub=True)
    spec = TrainerSpec.of(recipe)
    backend = FsdpBackend(spec, rank=0, world_size=1, device=torch.device("cpu"))
    engine = TorchEngine(recipe.model, recipe.rollout.torch, load_real_weights=True)
    await engine.start()
    publisher, planner = Publisher(engine), StepPlanner(recipe)
    policy = Sampler(recipe, found, publisher.client())
    waiting: deque[Any] = deque()
    await publisher.publish(_Weights(backend), 0, "drain")
    accuracy, ratio_max, started = {0: await policy.evaluate()}, 0.0, time.monotonic()
    for step in range(steps):
        waiting.extend(await policy.groups((lag + 1) * recipe.batch.groups_per_step - len(waiting)))
        groups = [waiting.popleft() for _ in range(recipe.batch.groups_per_step)]
        summaries = tuple(summarize(StoredGroup(g, step), g, step=step, max_lag=lag) for g in groups)
        (plan,) = planner.plan(LeaseManifest(step, summaries))
        metrics = backend.train_step(plan, {(g.ordinal, i): t for g in groups for i, t in enumerate(g.trajectories)})
        ratio_max = max(ratio_max, metrics.ratio_max)
        await publisher.publish(_Weights(backend), step + 1, "drain")
        if step + 1 in EVAL_STEPS or step + 1 == steps:
            accuracy[step + 1] = await policy.evaluate()
    took_s = time.monotonic() - started
    await policy.close()
    await publisher.close()
    await engine.stop()
    return {
        "part": "steps",
        "algorithm": algorithm,
        "lag": lag,
        "seed": seed,
        "accuracy": accuracy,
        "ratio_max": ratio_max,
        "seconds": took_s,
    }


class _Weights:
    """What the publisher takes for a model."""

    def __init__(self, backend: Any) -> None:
        self.named_parameters = backend.named_weights


class Sampler:
    """Groups of rewarded trajectories from one engine."""

    def __init__(self, recipe: Any, found: Any, client: Any) -> None:
        from asyncrl.data.prompt_stream import PromptStream
        from asyncrl.data.tokenizer import load_tokenizer, stop_token_ids
        from asyncrl.rewards import build_reward
        from asyncrl.types import SamplingParams

        self._recipe, self._client = recipe, client
        self._train, self._held_out = found.train, next(iter(found.held_out.values()))
        self._tokenizer = load_tokenizer(recipe.model)
        self._stream = PromptStream(len(self._train.rows), recipe.run.seed)
        self._reward = build_reward(recipe.reward)
        self._sampling = SamplingParams(
            max_tokens=recipe.rollout.sampling.max_response_tokens,
            stop_token_ids=stop_token_ids(self._tokenizer, recipe.model, recipe.rollout.sampling.stop),
        )
        self._ordinal = 0
        self._watch = asyncio.create_task(client.watch())

    async def groups(self, count: int) -> list[Any]:
        ordinals = range(self._ordinal, self._ordinal + count)
        self._ordinal += count
        return await asyncio.gather(*(self._group(ordinal) for ordinal in ordinals))

    async def evaluate(self) -> float:
        from dataclasses import replace

        greedy = replace(self._sampling, temperature=0.0)
        pairs = zip(self._held_out.rows, self._held_out.prompt_ids, strict=True)
        made = await asyncio.gather(*(self._trajectory(row, ids, greedy, 0, "eval") for row, ids in pairs))
        return float(np.mean([t.reward for t in made]))

    async def close(self) -> None:
        self._watch.cancel()

    async def _group(self, ordinal: int) -> Any:
        from asyncrl.types import TrajectoryGroup

        index = self._stream.row_index(ordinal)
        row, ids = self._train.rows[index], self._train.prompt_ids[index]
        seeds = [
            hash((self._recipe.run.seed, ordinal, i)) & ((1 << 62) - 1) for i in range(self._recipe.batch.group_size)
        ]
        made = await asyncio.gather(*(self._trajectory(row, ids, self._sampling, s, f"g{ordinal}") for s in seeds))
        return TrajectoryGroup(ordinal, 0, tuple(made)).validate()

    async def _trajectory(self, row: Any, prompt_ids: np.ndarray, sampling: Any, seed: int, session: str) -> Any:
        from asyncrl.types import Trajectory

        made = await self._client.generate(prompt_ids, sampling, session_id=session, seed=seed)
        text = self._tokenizer.decode(made.token_ids.tolist(), skip_special_tokens=True)
        return Trajectory(
            prompt_ids=prompt_ids,
            response_ids=made.token_ids,
            logprobs=made.logprobs,
            loss_mask=np.ones(len(made.token_ids), bool),
            segments=made.segments,
            reward=self._reward(text, row).reward,
            finish_reason=made.finish_reason,
        )


# -- the real system ---------------------------------------------------------------------------------------------


def wall_run(algorithm: str, lag: int, seed: int, steps: int) -> dict[str, Any]:
    """One `asyncrl-train` of the quickstart with this lag limit: accuracy over wall time."""
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary) / "run"
        words = [f"staleness.max_lag={lag}", f"run.seed={seed}", f"run.dir={directory}", f"run.max_steps={steps}"]
        words += [*SMALL, *ALGORITHMS[algorithm], "eval.every_steps=5", f"eval.max_prompts={WALL_PROMPTS}"]
        words += ["checkpoint.every_steps=0"]
        words += ["mode=sync"] if lag == 0 else []
        command = [sys.executable, "-m", "asyncrl.cli", "recipes/quickstart.yaml", *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800, check=False)
        if done.returncode:
            raise SystemExit(done.stdout[-3000:] + done.stderr[-3000:])
        metrics, events = (
            [json.loads(line) for line in (directory / f"{name}.jsonl").read_text().splitlines()]
            for name in ("metrics", "events")
        )
    ended = {e["step"]: e["monotonic_s"] for e in events if e["event"] == "evaluation"}
    curve, evaluating_s = [(0.0, metrics[0]["eval/initial_accuracy"])], 0.0
    for r in metrics:
        if "eval/accuracy" in r:  # training stands still for evaluations: their time is not the algorithm's
            evaluating_s += r["eval/time_s"]
            curve.append((ended[r["step"]] - ended[0] - evaluating_s, r["eval/accuracy"]))
    return {
        "part": "wall",
        "algorithm": algorithm,
        "lag": lag,
        "seed": seed,
        "curve": curve,
        "lag_mean": float(np.mean([r["staleness/lag_mean"] for r in metrics[len(metrics) // 4 :]])),
        "seconds": curve[-1][0],
        "steps": steps,
    }


# -- records, report ---------------------------------------------------------------------------------------------


def records(part: str) -> list[dict[str, Any]]:
    if not RECORDS.exists():
        return []
    return [r for line in RECORDS.read_text().splitlines() if (r := json.loads(line))["part"] == part]


def keep(record: dict[str, Any]) -> None:
    RESULTS.mkdir(exist_ok=True)
    with RECORDS.open("a") as file:
        file.write(json.dumps(record | {"commit": git_commit()}) + "\n")
    print(record, flush=True)


def interval(values: list[float]) -> tuple[float, float]:
    """Mean, and half of its 95% interval by Student's t."""
    t95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}
    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, math.nan
    return mean, t95.get(len(values), 1.96) * float(np.std(values, ddof=1)) / math.sqrt(len(values))


def cell(values: list[float]) -> str:
    if not values:
        return "-"
    mean, half = interval(values)
    return f"{mean:.3f}" + (f" ± {half:.3f}" if math.isfinite(half) else "")


def report() -> str:
    packages = ", ".join(f"{k} {v}" for k, v in package_versions().items())
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores; {packages}"
    steps = records("steps")
    commits = sorted({r["commit"][:7] for r in steps + records("wall")})
    lines = [
        "# Learning under lag",
        "",
        f"{machine}; measured at {', '.join(commits)}",
        "",
        "Written by `python benchmarks/learning_under_lag.py`. Held-out greedy accuracy of the quickstart's model,",
        "mean and 95% interval over seeds. The lag is exact: every token is trained that many steps after the version",
        f"that sampled it. Each step trains 8 groups of 8: {' '.join(SMALL)}.",
        WHAT_THEY_ARE.rstrip(),
    ]
    done = sorted({int(s) for r in steps for s in r["accuracy"] if int(s) > 0})
    for at in done:
        lines += ["", f"## After {at} steps", "", "| algorithm | " + " | ".join(f"lag {lag}" for lag in LAGS) + " |"]
        lines.append("|---" * (len(LAGS) + 1) + "|")
        for name in ALGORITHMS:
            cells = [
                cell([r["accuracy"][str(at)] for r in steps if r["algorithm"] == name and r["lag"] == lag])
                for lag in LAGS
            ]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    if steps:
        lines += ["", f"{len(steps)} runs; before the first step {cell([r['accuracy']['0'] for r in steps])}."]
        lines += ["", "![accuracy over lag](learning_under_lag.png)"]
    if wall := records("wall"):
        lines += wall_tables(wall)
    return "\n".join(lines) + "\n"


def wall_tables(wall: list[dict[str, Any]]) -> list[str]:
    """Accuracy by algorithm and lag at each of WALL_MARKS_S; then what the lag limit does to speed and to the lag."""
    lines = [
        "",
        "## The real system: after a fixed wall time",
        "",
        "`asyncrl-train` with this `staleness.max_lag` (0: mode sync), the same batch. Seconds since training began,",
        "evaluations left out; one run at a time. Evaluated every 5 steps, linear in between; on",
        f"{WALL_PROMPTS} prompts.",
    ]
    names = [name for name in ALGORITHMS if any(r["algorithm"] == name for r in wall)]

    def of(name: str, lag: int) -> list[dict[str, Any]]:
        return [r for r in wall if r["algorithm"] == name and r["lag"] == lag]

    for mark in WALL_MARKS_S:
        lines += ["", f"### After {mark} s", "", "| algorithm | " + " | ".join(f"max_lag {lag}" for lag in LAGS) + " |"]
        lines.append("|---" * (len(LAGS) + 1) + "|")
        for name in names:
            cells = [cell([_at(r["curve"], mark) for r in of(name, lag)]) for lag in LAGS]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["", "### Speed and lag", "", "| max_lag | s a step | of sync | mean lag of trained tokens | runs |"]
    lines.append("|---|---|---|---|---|")
    speed = {lag: [r["seconds"] / r["steps"] for r in wall if r["lag"] == lag] for lag in LAGS}
    for lag in LAGS:
        if speed[lag]:
            of_sync = f"{np.mean(speed[lag]) / np.mean(speed[0]):.2f}" if speed[0] else "-"
            mean_lag = np.mean([r["lag_mean"] for r in wall if r["lag"] == lag])
            lines.append(f"| {lag} | {cell(speed[lag])} | {of_sync} | {mean_lag:.2f} | {len(speed[lag])} |")
    return lines


def _at(curve: list[tuple[float, float]], seconds: float) -> float:
    """Accuracy at that moment, linear between the two evaluations around it."""
    return float(np.interp(seconds, *zip(*curve, strict=True)))


def picture() -> None:
    """One panel for each number of steps, and for each moment but the first."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    steps, wall = records("steps"), records("wall")
    panels: list[tuple[str, str, list[dict[str, Any]], Callable[[dict[str, Any]], float]]] = []
    for at in sorted({int(s) for r in steps for s in r["accuracy"] if int(s) > 0}):
        panels.append(
            (f"after {at} steps", "lag of every token, steps", steps, lambda r, at=at: r["accuracy"][str(at)])
        )
    for mark in WALL_MARKS_S[1:] if wall else ():
        panels.append((f"after {mark} s", "max_lag, steps", wall, lambda r, mark=mark: _at(r["curve"], mark)))
    figure, axes = plt.subplots(1, len(panels), figsize=(3.3 * len(panels), 3.4), sharey=True, squeeze=False)
    for (title, label, runs, accuracy), axis in zip(panels, axes[0], strict=True):
        for place, name in enumerate(ALGORITHMS):
            points, aside = [], 1 + 0.03 * (place - (len(ALGORITHMS) - 1) / 2)
            for lag in LAGS:
                values = [accuracy(r) for r in runs if r["algorithm"] == name and r["lag"] == lag]
                if values:
                    points.append(((lag + 1) * aside, *np.nan_to_num(interval(values))))
            if points:
                x, mean, half = zip(*points, strict=True)
                axis.errorbar(x, mean, yerr=half, color=f"C{place}", marker="o", ms=4, capsize=2, label=name)
        axis.set_xscale("log", base=2)
        axis.set_xticks([lag + 1 for lag in LAGS], [str(lag) for lag in LAGS])
        axis.set_title(title)
        axis.set_xlabel(label)
    axes[0][0].set_ylabel("held-out accuracy")
    axes[0][0].set_ylim(0, 1.05)
    axes[0][0].legend(fontsize=7, loc="lower left")
    figure.tight_layout()
    figure.savefig(RESULTS / "learning_under_lag.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=("steps", "wall", "report"))
    parser.add_argument("--algorithms", nargs="+", default=tuple(ALGORITHMS), choices=tuple(ALGORITHMS))
    parser.add_argument("--lags", nargs="+", type=int, default=LAGS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--steps", type=int, help=f"default {STEPS}, and {WALL_STEPS} for wall")
    parser.add_argument("--workers", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.part == "steps":
        known = {(r["algorithm"], r["lag"], r["seed"]) for r in records("steps")}
        wanted = itertools.product(range(arguments.seeds), arguments.lags, arguments.algorithms)
        jobs = [(a, lag, seed) for seed, lag, a in wanted if (a, lag, seed) not in known]
        with ProcessPoolExecutor(arguments.workers, multiprocessing.get_context("spawn")) as pool:
            for future in as_completed([pool.submit(one_run, *job, arguments.steps or STEPS) for job in jobs]):
                keep(future.result())
    elif arguments.part == "wall":
        known = {(r["algorithm"], r["lag"], r["seed"]) for r in records("wall")}
        for seed, lag, name in itertools.product(range(arguments.seeds), arguments.lags, arguments.algorithms):
            if (name, lag, seed) not in known:
                keep(wall_run(name, lag, seed, arguments.steps or WALL_STEPS))
    text = report()
    (RESULTS / "learning_under_lag.md").write_text(text)
    picture()
    print(text)


if __name__ == "__main__":
    main()
