"""What learning costs when tokens are trained late: algorithms, lags, learning rates, updates per step, long responses.

    python benchmarks/learning_under_lag.py rates updates partial --workers 2   # 65 minutes on 2 quiet cores
    python benchmarks/learning_under_lag.py wall                                # 20 minutes, one run at a time
    python benchmarks/learning_under_lag.py real --workers 2                    # a pretrained model: 6 minutes a run
    python benchmarks/learning_under_lag.py real_wall                           # its modes, 6 minutes a run
    python benchmarks/learning_under_lag.py real_rate --steps 10                # ten times its rate: guard, LoRA
    python benchmarks/learning_under_lag.py report                              # tables and picture of what is there

Each part is a list of cells times seeds (`GRIDS`). A run adds one line to benchmarks/results/learning_under_lag.jsonl
when it ends; what stands there is not run again, so a part goes on where it stopped, and --seeds adds more.

In all parts but `wall` the lag is exact, and the same seed gives the same numbers: in one process the embedded engine
generates the groups of step g + lag under version g, and the FSDP backend trains them when their turn has come, through
the queue's own accounting, the planner and the objective of a real run. Before step `lag` there is no version that old:
tokens of step g lag by g. `partial` generates only some tokens of a response between two steps, so that long responses
are of several versions, as in a run that interrupts and resumes them. `wall` runs `asyncrl-train`, where the lag is
what the machine makes of it. Model and data are those of the quickstart (`make quickstart` makes them), in `real*`
those of recipes/quickstart_real.yaml (`make real-model`).
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import itertools
import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from learning_tables import RESULTS, picture, records, report

from asyncrl.checkpoint.run_directory import git_commit

ROOT = Path(__file__).resolve().parents[1]
RECORDS = RESULTS / "learning_under_lag.jsonl"
SEEDS = 4
STEPS, EVAL_STEPS = 50, (25, 50)
WALL_STEPS, WALL_PROMPTS, WALL_EVAL_EVERY = 40, 128, 5
REAL, REAL_RATE, REAL_STEPS, REAL_EVAL_STEPS = "quickstart_real", 2e-5, 20, (5, 10, 20, 30, 40)
REAL_WALL_STEPS, REAL_WALL_EVAL_EVERY = 20, 5
RATE, RATES = 5e-4, (2.5e-4, 5e-4, 1e-3)
PACES, PACE_SHARES = (8, 4, 2, 1), (0.5, 0.25, 0.125, 0.125)
"""Part `partial`: how many tokens a trajectory gets between two steps, and the shares of trajectories with each pace.
Responses have 16 tokens in the mean: the slowest take as many steps, and more than the lag."""
SMALL = ["batch.groups_per_step=8", "batch.group_size=8", "rollout.torch.num_slots=128"]
PROXIMAL = ["algorithm.ratio=proximal"]
CLIP = ["algorithm.preset=grpo", "algorithm.kl.coefficient=0", "algorithm.aggregation=token_mean"]
A3PO = ["algorithm.preset=decoupled_ppo", "algorithm.proximal=log_linear", "algorithm.dual_clip=0"]
ALGORITHMS: dict[str, list[str]] = {
    "uncorrected": PROXIMAL,
    "grpo_clip": [*CLIP, "algorithm.dual_clip=0"],
    "grpo_clip_dual": CLIP,
    "grpo_clip_kl": ["algorithm.preset=grpo", "algorithm.aggregation=token_mean", "algorithm.dual_clip=0"],
    "opsm": [*CLIP, "algorithm.corrections=[{name: off_policy_mask, high: 0.5}]"],
    "dppo": ["algorithm.preset=dppo"],
    "m2po": ["algorithm.preset=m2po"],
    "a3po": A3PO,
    "decoupled_ppo": ["algorithm.preset=decoupled_ppo"],
    "tis": [*PROXIMAL, "algorithm.corrections=[{name: truncated_is, high: 2.0}]"],
    "icepop": [*PROXIMAL, "algorithm.corrections=[{name: icepop, low: 0.5, high: 5.0}]"],
    "cispo": ["algorithm.preset=cispo"],
    "gspo": ["algorithm.preset=gspo"],
}
"""Name -> overrides. decoupled_ppo is not among those with one update a step: it is then tis with a bound of 5."""
ONE_UPDATE = tuple(name for name in ALGORITHMS if name not in ("grpo_clip_kl", "decoupled_ppo"))
AT_SHORT_LAG = ("uncorrected", "grpo_clip", "grpo_clip_dual", "dppo", "a3po", "tis")
SEVERAL_UPDATES = ("grpo_clip_dual", "dppo", "a3po", "decoupled_ppo", "tis", "gspo")
IN_REAL = ("uncorrected", "grpo_clip_dual")
IN_PARTS = ("uncorrected", "grpo_clip_dual", "opsm", "a3po", "tis", "icepop", "cispo")


@dataclass(frozen=True, slots=True)
class Cell:
    """What is measured once per seed. `part`: steps (exact lag) or wall. `lag`: of every token; with `partial` of the
    first token of a response; of a wall run its limit, 0 being mode sync. `more`: overrides of the recipe."""

    part: str
    algorithm: str
    lag: int
    lr: float = RATE
    updates: int = 1
    partial: bool = False
    recipe: str = "quickstart"
    more: str = ""

    @classmethod
    def of(cls, record: dict[str, Any]) -> Cell:
        return cls(**{f.name: record[f.name] for f in fields(cls) if f.name in record})

    def overrides(self) -> list[str]:
        words = [*ALGORITHMS[self.algorithm], f"trainer.lr={self.lr}", f"batch.num_minibatches={self.updates}"]
        return [*([] if self.recipe == REAL else SMALL), *words, *self.more.split()]


# at lag 0 and with one update all of them are the plain policy gradient: one stands for all
GRIDS: dict[str, tuple[Cell, ...]] = {
    "rates": (
        *(Cell("steps", "uncorrected", 0, lr) for lr in RATES),
        *(Cell("steps", name, 8, lr) for lr, name in itertools.product(RATES, ONE_UPDATE)),
        *(Cell("steps", name, 2, RATES[-1]) for name in AT_SHORT_LAG),
    ),
    "updates": tuple(Cell("steps", name, lag, updates=2) for lag, name in itertools.product((0, 8), SEVERAL_UPDATES)),
    "partial": tuple(Cell("steps", name, 8, partial=True) for name in IN_PARTS),
    "real": tuple(
        Cell("steps", name, lag, REAL_RATE, recipe=REAL)
        for lag, names in ((0, IN_REAL[:1]), (2, IN_REAL), (8, IN_REAL))
        for name in names
    ),
    "real_wall": tuple(
        Cell("wall", IN_REAL[1], lag, lr, recipe=REAL, more=more)
        for lag, lr, more in (
            (0, REAL_RATE, ""),
            (1, REAL_RATE, "mode=one_step_off"),
            (2, REAL_RATE, ""),
        )
    ),
    "real_rate": tuple(
        Cell("wall", IN_REAL[1], lag, lr, recipe=REAL, more=more)
        for lag, lr, more in (
            (2, 10 * REAL_RATE, ""),
            (2, 10 * REAL_RATE, "staleness.guard=act"),
            (2, 10 * REAL_RATE, "trainer.lora.rank=16 trainer.lora.alpha=32 trainer.lora.target_modules=[all-linear]"),
        )
    ),
    "wall": tuple(Cell("wall", name, lag) for lag, name in itertools.product((0, 1, 2, 4), ("grpo_clip_dual", "tis"))),
}


def one_run(cell: Cell, seed: int, steps: int) -> dict[str, Any]:
    """The record of one run with an exact lag."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store, timeout = dist.HashStore(), datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timeout)
    try:
        return asyncio.run(_run(cell, seed, steps))
    finally:
        dist.destroy_process_group()


async def _run(cell: Cell, seed: int, steps: int) -> dict[str, Any]:
    import torch

    from asyncrl.config.load import load_recipe
    from asyncrl.driver.preflight import check_recipe
    from asyncrl.inference.torch_engine.engine import TorchEngine
    from asyncrl.queue.masking import StoredGroup, summarize
    from asyncrl.trainer.fsdp.backend import FsdpBackend
    from asyncrl.trainer.planner import StepPlanner
    from asyncrl.trainer.trainer_spec import TrainerSpec
    from asyncrl.types import LeaseManifest
    from asyncrl_testing.publishing import Publisher

    overrides = [*cell.overrides(), f"run.seed={seed}", f"run.max_steps={steps}"]
    recipe = load_recipe(ROOT / "recipes" / f"{cell.recipe}.yaml", overrides)
    found = check_recipe(recipe, use_hub=True)
    backend = FsdpBackend(TrainerSpec.of(recipe), rank=0, world_size=1, device=torch.device("cpu"))
    engine = TorchEngine(recipe.model, recipe.rollout.torch, load_real_weights=True)
    await engine.start()
    publisher, planner = Publisher(engine), StepPlanner(recipe)
    policy = Sampler(recipe, found, publisher.client(), paced=cell.partial)
    size, waiting = recipe.batch.groups_per_step, deque[Any]()
    accuracy, seen, started = {}, [], time.monotonic()
    await publisher.publish(_Weights(backend), 0, "drain")
    for step in range(steps):
        waiting.extend(policy.admit((cell.lag + 1) * size - len(waiting)))
        sampled = await policy.advance(waiting)
        while any(not group.complete for group in itertools.islice(waiting, size)):  # the trainer waits for them
            sampled += await policy.advance(waiting)
        groups = [waiting.popleft().made() for _ in range(size)]
        summaries = tuple(summarize(StoredGroup(g, step), g, step=step, max_lag=cell.lag) for g in groups)
        (plan,) = planner.plan(LeaseManifest(step, summaries))
        metrics = backend.train_step(plan, {(g.ordinal, i): t for g in groups for i, t in enumerate(g.trajectories)})
        tokens = sum(s.trained_tokens for s in summaries)
        seen.append(
            {
                "sampled": float(np.mean(sampled)) if sampled else None,
                "lag_mean": sum(s.lag_sum for s in summaries) / tokens,
                "several_versions": sum(s.interrupted for s in summaries) / recipe.batch.group_size / size,
                "grad_norm": metrics.grad_norm,
                "ratio_max": metrics.ratio_max,
                **{name.removeprefix("train/"): value for name, value in metrics.means if name.startswith("train/")},
            }
        )
        await publisher.publish(_Weights(backend), step + 1, "drain")
        if step + 1 in (REAL_EVAL_STEPS if cell.recipe == REAL else EVAL_STEPS) or step + 1 == steps:
            accuracy[step + 1] = await policy.evaluate()
    took_s = time.monotonic() - started
    await policy.close()
    await publisher.close()
    await engine.stop()
    by_step = {name: [_rounded(entry.get(name)) for entry in seen] for name in ("sampled", "lag_mean")}
    means = {
        name: _rounded(np.mean([e[name] for e in seen])) for name in seen[0] if name not in (*by_step, "ratio_max")
    }
    return {
        **asdict(cell),
        "seed": seed,
        "steps": steps,
        "accuracy": accuracy,
        **by_step,
        "means": means,
        "ratio_max": max(entry["ratio_max"] for entry in seen),
        "seconds": took_s,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


class _Weights:
    """What the publisher takes for a model."""

    def __init__(self, backend: Any) -> None:
        self.named_parameters = backend.named_weights


class _Trajectory:
    """One response on its way: `pace` tokens in each round, None all of them."""

    def __init__(self, row: Any, prompt_ids: np.ndarray, seed: int, pace: int | None) -> None:
        from asyncrl.rollout.draft import Draft

        self.row, self.prompt_ids, self.seed, self.pace = row, prompt_ids, seed, pace
        self.draft, self.made = Draft(), None


class _Group:
    def __init__(self, ordinal: int, trajectories: list[_Trajectory]) -> None:
        self.ordinal, self.trajectories = ordinal, trajectories

    @property
    def complete(self) -> bool:
        return all(t.made is not None for t in self.trajectories)

    def made(self) -> Any:
        from asyncrl.types import TrajectoryGroup

        return TrajectoryGroup(self.ordinal, 0, tuple(t.made for t in self.trajectories)).validate()


class Sampler:
    """Groups of rewarded trajectories from one engine. `paced`: responses take several rounds."""

    def __init__(self, recipe: Any, found: Any, client: Any, *, paced: bool) -> None:
        from asyncrl.data.prompt_stream import PromptStream
        from asyncrl.data.tokenizer import PromptRenderer, load_tokenizer, stop_token_ids
        from asyncrl.rewards import build_reward
        from asyncrl.types import SamplingParams

        self._recipe, self._client, self._paced = recipe, client, paced
        self._train, self._held_out = found.train, next(iter(found.held_out.values()))
        self._tokenizer = load_tokenizer(recipe.model)
        self._renderer = PromptRenderer(self._tokenizer, recipe.model)
        self._stream = PromptStream(len(self._train.rows), recipe.run.seed)
        self._reward = build_reward(recipe.reward)
        self._sampling = SamplingParams(
            max_tokens=recipe.rollout.sampling.max_response_tokens,
            stop_token_ids=stop_token_ids(self._tokenizer, recipe.model, recipe.rollout.sampling.stop),
        )
        self._ordinal = 0
        self._watch = asyncio.create_task(client.watch())

    def admit(self, count: int) -> list[_Group]:
        """New groups, of which nothing is sampled yet."""
        ordinals = range(self._ordinal, self._ordinal + count)
        self._ordinal += count
        return [_Group(ordinal, self._trajectories(ordinal)) for ordinal in ordinals]

    async def advance(self, groups: Iterable[_Group]) -> list[float]:
        """One round of every response that is not complete; the rewards of those that it completed."""
        running = [(t, f"g{g.ordinal}") for g in groups for t in g.trajectories if t.made is None]
        await asyncio.gather(*(self._round(t, self._sampling, session) for t, session in running))
        return [t.made.reward for t, _ in running if t.made is not None]

    async def evaluate(self) -> float:
        """Share of the held-out prompts that greedy decoding answers rightly."""
        pairs = zip(self._held_out.rows, self._held_out.prompt_ids, strict=True)
        asked = [_Trajectory(row, ids, 0, None) for row, ids in pairs]
        greedy = replace(self._sampling, temperature=0.0)
        await asyncio.gather(*(self._round(t, greedy, "eval") for t in asked))
        return float(np.mean([t.made.reward for t in asked]))

    async def close(self) -> None:
        self._watch.cancel()

    def _trajectories(self, ordinal: int) -> list[_Trajectory]:
        index, size = self._stream.row_index(ordinal), self._recipe.batch.group_size
        row = self._train.rows[index]
        ids = self._renderer.prompt_ids(row)
        paces = np.random.default_rng([self._recipe.run.seed, ordinal]).choice(PACES, size, p=PACE_SHARES)
        seeds = [hash((self._recipe.run.seed, ordinal, i)) & ((1 << 62) - 1) for i in range(size)]
        return [_Trajectory(row, ids, s, int(p) if self._paced else None) for s, p in zip(seeds, paces, strict=True)]

    async def _round(self, t: _Trajectory, sampling: Any, session: str) -> None:
        from asyncrl.types import Trajectory

        limit = sampling.max_tokens
        upto = limit if t.pace is None else min(limit, t.draft.num_tokens + t.pace)
        found = await self._client.generate(
            t.prompt_ids, replace(sampling, max_tokens=upto), session_id=session, seed=t.seed, draft=t.draft
        )
        if found.finish_reason == "length" and upto < limit:
            return
        text = self._tokenizer.decode(found.token_ids.tolist(), skip_special_tokens=True)
        t.made = Trajectory(
            prompt_ids=t.prompt_ids,
            response_ids=found.token_ids,
            logprobs=found.logprobs,
            loss_mask=np.ones(len(found.token_ids), bool),
            segments=found.segments,
            reward=self._reward(text, t.row).reward,
            finish_reason=found.finish_reason,
        )


# -- the real system ---------------------------------------------------------------------------------------------


def wall_run(cell: Cell, seed: int, steps: int) -> dict[str, Any]:
    """One `asyncrl-train` of the recipe: accuracy over wall time since the first prompt was admitted. Nothing is
    left out of the time, evaluations included: what is generated during them counts as much as what is not."""
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary) / "run"
        words = [f"staleness.max_lag={cell.lag}", f"run.seed={seed}", f"run.dir={directory}", f"run.max_steps={steps}"]
        every = REAL_WALL_EVAL_EVERY if cell.recipe == REAL else WALL_EVAL_EVERY
        words += [f"eval.every_steps={every}", f"eval.max_prompts={WALL_PROMPTS}"]
        words += ["checkpoint.every_steps=0", "staleness.pacing=eager"]  # as much lag as the limit allows
        words += [*(["mode=sync"] if cell.lag == 0 else []), *cell.overrides()]
        command = [sys.executable, "-m", "asyncrl.commands.train", f"recipes/{cell.recipe}.yaml", *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3600, check=False)
        if done.returncode:
            raise SystemExit(done.stdout[-3000:] + done.stderr[-3000:])
        metrics, events = (
            [json.loads(line) for line in (directory / f"{name}.jsonl").read_text().splitlines()]
            for name in ("metrics", "events")
        )
    began = min(e["monotonic_s"] for e in events if e.get("transition") == "admitted")
    curve = [(e["monotonic_s"] - began, e["accuracy"]) for e in events if e["event"] == "evaluation"]
    return {
        **asdict(cell),
        "clock": "everything",
        "seed": seed,
        "steps": steps,
        "curve": curve,
        "evaluating_s": sum(r["eval/time_s"] for r in metrics if "eval/time_s" in r),
        "lag_mean": float(np.mean([r["staleness/lag_mean"] for r in metrics[len(metrics) // 4 :]])),
        "seconds": curve[-1][0],
    }


def keep(file: Path, record: dict[str, Any]) -> None:
    file.parent.mkdir(exist_ok=True)
    with file.open("a") as lines:
        lines.write(json.dumps(record | {"commit": git_commit()}) + "\n")
    shown = {n: record[n] for n in ("algorithm", "lag", "lr", "updates", "partial", "more", "seed", "seconds")}
    print(shown, record.get("accuracy") or record["curve"][-1], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="+", choices=(*GRIDS, "report"))
    parser.add_argument("--algorithms", nargs="+", default=tuple(ALGORITHMS), choices=tuple(ALGORITHMS))
    parser.add_argument("--lags", nargs="+", type=int)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument(
        "--steps", type=int, help=f"default {STEPS}, and {WALL_STEPS} for wall; others are not kept apart"
    )
    parser.add_argument("--workers", type=int, default=1, help="processes of the parts with an exact lag")
    parser.add_argument("--records", type=Path, default=RECORDS)
    arguments = parser.parse_args()
    known = {(Cell.of(r), r["seed"]) for r in records(arguments.records) if r.get("clock") != "training"}
    cells = [
        cell
        for part in arguments.parts
        for cell in GRIDS.get(part, ())
        if cell.algorithm in arguments.algorithms and (arguments.lags is None or cell.lag in arguments.lags)
    ]
    jobs = [job for seed in range(arguments.seeds) for cell in cells if (job := (cell, seed)) not in known]
    print(f"{len(jobs)} runs to do, {len(cells) * arguments.seeds - len(jobs)} are there", flush=True)
    with ProcessPoolExecutor(arguments.workers, multiprocessing.get_context("spawn")) as pool:
        exact = [
            pool.submit(one_run, cell, seed, arguments.steps or (REAL_STEPS if cell.recipe == REAL else STEPS))
            for cell, seed in jobs
            if cell.part == "steps"
        ]
        for future in as_completed(exact):
            keep(arguments.records, future.result())
    for cell, seed in (job for job in jobs if job[0].part == "wall"):
        steps = REAL_WALL_STEPS if cell.recipe == REAL else WALL_STEPS
        keep(arguments.records, wall_run(cell, seed, arguments.steps or steps))
    if arguments.records == RECORDS or "report" in arguments.parts:
        text = report(records(arguments.records), tuple(ALGORITHMS))
        arguments.records.with_suffix(".md").write_text(text)
        picture(records(arguments.records), tuple(ALGORITHMS), arguments.records.with_suffix(".png"))
        print(text)


if __name__ == "__main__":
    main()
