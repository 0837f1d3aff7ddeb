"""Tables and picture of benchmarks/learning_under_lag.py, from its records alone."""

from __future__ import annotations

import itertools
import json
import math
import os
import platform
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.checkpoint.run_directory import package_versions

RESULTS = Path(__file__).resolve().parent / "results"
Record = dict[str, Any]
RATE = 5e-4
TARGETS = (0.9, 0.95)
SAMPLED_TARGETS, WINDOW = (0.8, 0.9), 5
REAL, REAL_TARGETS = "quickstart_real", (0.5, 0.6, 0.7)
MARK_S = 12
"""Wall time at which accuracies are compared; no shorter one, where they rise steeply and a second is worth 0.2."""
T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""Student's t for 2 to 10 values."""
ABOUT = """
Written by `python benchmarks/learning_under_lag.py`. Mean and 95 % interval (Student's t) over seeds; "paired" is the
interval of the difference by seed. A model of 0.4M parameters from one start, sums that saturate at 0.98, responses of
at most 64 tokens, 8 groups of 8 a step, 256 held-out prompts (a standard error is 0.009 at 0.98 and 0.025 at 0.8), in
wall runs 128. What holds here need not hold for another model, task or learning rate.

uncorrected: the plain policy gradient, as if every token were new. grpo_clip: the ratio is to the policy that sampled
and is clipped (0.2); _dual: with a dual clip of 3; _kl: with the KL term of preset grpo. opsm: grpo_clip_dual and
off_policy_mask. dppo, m2po, cispo: the presets. a3po: the clip holds to a policy interpolated between the one that
sampled and the one in training (log_linear), and truncated importance weights (5) answer for the rest; decoupled_ppo:
the same with the recomputed policy before the step. tis: truncated weights (2) alone. icepop: such weights, 0 outside
[0.5, 5]. gspo: the preset, with such weights (2) and its aggregation by sequence. All others have token_mean, and all
the advantages of GRPO. With one update a step decoupled_ppo is tis with a bound of 5, and is not among those runs.
"""
EXACT = """
Every token of step g is trained min(g, lag) steps after the version that sampled it: there is no older version in the
first `lag` steps. So the mean lag is below that of the column, and only later steps train samples of the full lag:
"""


def records(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half of its 95 % interval."""
    if len(values) < 2:
        return float(np.mean(values)), math.nan
    t = T95[len(values) - 2] if len(values) - 2 < len(T95) else 1.96
    return float(np.mean(values)), t * float(np.std(values, ddof=1)) / math.sqrt(len(values))


def cell(values: Sequence[float | None], digits: int = 3) -> str:
    """Mean and interval; of values that some runs never have (None) how many have one, and their mean."""
    there = [v for v in values if v is not None]
    if not there:
        return f"0 of {len(values)}" if values else "-"
    mean, half = interval(there)
    if len(there) < len(values):
        return f"{len(there)} of {len(values)}: {mean:.{digits}f}"
    return f"{mean:.{digits}f}" + (f" ± {half:.{digits}f}" if math.isfinite(half) else "")


def reached(curve: Iterable[tuple[float, float | None]], target: float) -> float | None:
    """Where the curve first comes to the target, linear between its points; None where it never does."""
    points = [(x, y) for x, y in curve if y is not None]
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if y0 < target <= y1:
            return x0 + (x1 - x0) * (target - y0) / (y1 - y0)
    return None


def smoothed(sampled: Sequence[float | None]) -> list[tuple[float, float]]:
    """(policy version, mean reward of what it and its neighbours sampled)."""
    values = [(v, y) for v, y in enumerate(sampled) if y is not None]
    return [
        (float(np.mean([v for v, _ in part])), float(np.mean([y for _, y in part])))
        for part in (values[i : i + WINDOW] for i in range(len(values) - WINDOW + 1))
    ]


def table(rows: Iterable[tuple[str, Sequence[str]]], head: Sequence[str]) -> list[str]:
    """A Markdown table; rows without a value are left out."""
    kept = [f"| {name} | " + " | ".join(cells) + " |" for name, cells in rows if set(cells) - {"-"}]
    return ["", "| " + " | ".join(head) + " |", "|---" * len(head) + "|", *kept] if kept else []


def setting(r: Record) -> tuple[float, int, bool]:
    return r.get("lr", RATE), r.get("updates", 1), r.get("partial", False)


def pick(runs: Iterable[Record], algorithm: str, lag: int, value: Callable[[Record], Any]) -> dict[int, Any]:
    """Seed -> value, without NaN."""
    found = {r["seed"]: value(r) for r in runs if r["algorithm"] == algorithm and r["lag"] == lag}
    return {seed: v for seed, v in found.items() if v is None or not math.isnan(v)}


def after(step: int) -> Callable[[Record], Any]:
    """The accuracy of a record after `step` steps; NaN where the run was shorter or was not asked then."""
    return lambda r: r["accuracy"].get(str(step), math.nan)


def of_part(found: Sequence[Record], part: str, recipe: str = "quickstart") -> list[Record]:
    return [r for r in found if r["part"] == part and r.get("recipe", "quickstart") == recipe]


def report(found: Sequence[Record], names: Sequence[str]) -> str:
    steps, wall = of_part(found, "steps"), of_part(found, "wall")
    packages = ", ".join(f"{k} {v}" for k, v in package_versions().items())
    commits = ", ".join(sorted({r["commit"][:7] for r in found}))
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores; {packages}; measured at {commits}"
    lines = ["# Learning under lag", "", machine, ABOUT.rstrip(), "", "## Every token of the same lag", EXACT.rstrip()]
    plain = [r for r in steps if setting(r) == (RATE, 1, False)]
    lags = sorted({r["lag"] for r in plain})
    head = ["", *(f"lag {lag}" for lag in lags)]
    rows = [
        (what.format(n), [of(n, lag) for lag in lags])
        for n in (25, 50)
        for what, of in (
            ("mean lag of {} steps", lambda n, lag: f"{np.mean([min(g, lag) for g in range(n)]):.1f}"),
            ("steps of {} at the full lag", lambda n, lag: f"{max(n - lag, 0)}"),
        )
    ]
    lines += table(rows, head)
    for n in (25, 50):
        lines += ["", f"Held-out greedy accuracy after {n} steps at a learning rate of {RATE:g}:"]
        rows = [(a, [cell(list(pick(plain, a, lag, after(n)).values())) for lag in lags]) for a in names]
        lines += table(rows, head)
    lines += ["", "Difference from grpo_clip, paired, after 25 and after 50 steps:"]
    late = [lag for lag in lags if lag]
    rows = [(a, [_paired(plain, a, "grpo_clip", lag) for lag in late]) for a in names if a != "grpo_clip"]
    lines += table(rows, ["", *(f"lag {lag}" for lag in late)])
    if steps:
        before = [r["accuracy"]["0"] for r in steps if "0" in r["accuracy"]]
        lines += ["", f"{len(steps)} runs; before the first step {cell(before)}."]
        lines += ["", "![accuracy over lag](learning_under_lag.png)"]
    lines += _rates(steps, names) + _other(steps, names, "Two updates a step", 2, partial=False)
    lines += _other(steps, names, "Long responses of several versions", 1, partial=True) + _watched(steps, names)
    for clock in ("everything", "training"):
        lines += _wall([r for r in wall if r.get("clock", "training") == clock], names, clock)
    lines += _real(of_part(found, "steps", REAL), of_part(found, "wall", REAL), names)
    return "\n".join(lines) + "\n"


def _paired(runs: Sequence[Record], name: str, base: str, lag: int) -> str:
    found = []
    for n in (25, 50):
        ours, theirs = (pick(runs, a, lag, after(n)) for a in (name, base))
        both = sorted(ours.keys() & theirs.keys())
        found.append(
            "-" if len(both) < 2 else "{:+.3f} ± {:.3f}".format(*interval([ours[s] - theirs[s] for s in both]))
        )
    return "-" if set(found) == {"-"} else "; ".join(found)


def _rates(steps: Sequence[Record], names: Sequence[str]) -> list[str]:
    """Accuracy after 50 steps, and versions to the targets of what is sampled, by learning rate."""
    ours = [r for r in steps if setting(r)[1:] == (1, False)]
    columns = [
        (lag, lr) for lag in (2, 8) for lr in sorted({setting(r)[0] for r in ours if r["lag"] == lag and "lr" in r})
    ]
    if not columns:
        return []
    head = ["", *(f"lag {lag}, {lr:g}" for lag, lr in columns)]
    lines = ["", "## Learning rates", "", "Held-out greedy accuracy after 50 steps. Without lag:"]
    control = [f"{lr:g}: {cell(_at(ours, 'uncorrected', 0, lr, after(50)))}" for lr in sorted({c[1] for c in columns})]
    lines[-1] += " " + "; ".join(control) + "."
    lines += table([(a, [cell(_at(ours, a, lag, lr, after(50))) for lag, lr in columns]) for a in names], head)
    for target in SAMPLED_TARGETS:
        lines += [
            "",
            f"Steps until the policy samples right responses at a rate of {target} (mean of {WINDOW} versions):",
        ]
        rows = [(a, [cell(_at(ours, a, lag, lr, _versions_to(target)), 1) for lag, lr in columns]) for a in names]
        lines += table(rows, head)
    return lines


def _at(runs: Sequence[Record], name: str, lag: int, lr: float, value: Callable[[Record], Any]) -> list[Any]:
    return list(pick([r for r in runs if setting(r)[0] == lr], name, lag, value).values())


def _versions_to(target: float) -> Callable[[Record], Any]:
    return lambda r: reached(smoothed(r["sampled"]), target) if "sampled" in r else math.nan


def _other(steps: Sequence[Record], names: Sequence[str], title: str, updates: int, *, partial: bool) -> list[str]:
    ours = [r for r in steps if setting(r) == (RATE, updates, partial)]
    if not ours:
        return []
    lags = sorted({r["lag"] for r in ours})
    lines = ["", f"## {title}", "", "Held-out greedy accuracy after 25 and after 50 steps"]
    if partial:
        versions = cell([r["means"]["several_versions"] for r in ours], 2)
        lag = cell([float(np.mean(r["lag_mean"])) for r in ours], 2)
        lines[-1] += (
            ". Between two steps a trajectory gets 8, 4, 2 or 1 tokens (half, a quarter, an eighth and an eighth of "
            "them): its first token has the full lag, later ones of slow and long responses less. Share of "
            f"trajectories of several versions {versions}; mean lag {lag}"
        )
    lines[-1] += ":"
    head = ["", *(f"lag {lag}, {n} steps" for lag in lags for n in (25, 50))]
    rows = [(a, [cell(list(pick(ours, a, lag, after(n)).values())) for lag in lags for n in (25, 50)]) for a in names]
    return lines + table(rows, head)


def _watched(steps: Sequence[Record], names: Sequence[str]) -> list[str]:
    """What the updates saw, at lag 8."""
    ours = [r for r in steps if r["lag"] == 8 and "means" in r and setting(r) == (RATE, 1, False)]
    kinds = ("clip_fraction_positive", "clip_fraction_negative", "kl_behavior", "entropy", "grad_norm")
    rows = [
        (a, [
            *(cell(list(pick(ours, a, 8, lambda r, k=k: r["means"][k]).values())) for k in kinds),
            cell(list(pick(ours, a, 8, lambda r: r["ratio_max"]).values()), 1),
        ])
        for a in names
    ]  # fmt: skip
    made = table(rows, ["", *kinds, "largest ratio"])
    return ["", "## What the updates see at lag 8", "", "Means over the steps of a run.", *made] if made else []


def _wall(wall: Sequence[Record], names: Sequence[str], clock: str) -> list[str]:
    """Seconds to each target, accuracy at MARK_S, and what `max_lag` does to speed and lag."""
    if not wall:
        return []
    if clock == "everything":
        what = "Seconds since the first prompt was admitted; nothing is left out, evaluations (every 5 steps) included."
    else:
        what = (
            "Seconds since training began, the time of evaluations (every 5 steps) left out. The replicas go on "
            "generating during them, in sync too: 13 to 18 % of all groups became ready in time that is not counted, "
            "and 0.8 steps' worth (sync) to 5 (max_lag 8) before the first second."
        )
    lags = sorted({r["lag"] for r in wall})
    head = ["", *(f"max_lag {lag}" for lag in lags)]
    lines = ["", f"## The real system, {'all time counted' if clock == 'everything' else 'evaluations left out'}", ""]
    lines += [f"`asyncrl-train`, one run at a time, max_lag 0 in mode sync. {what} Linear between evaluations."]
    for target in TARGETS:
        lines += ["", f"Seconds to a held-out accuracy of {target} (where some runs never reach it: how many do):"]
        value = lambda r, target=target: reached(r["curve"], target)  # noqa: E731
        lines += table([(a, [cell(list(pick(wall, a, lag, value).values()), 1) for lag in lags]) for a in names], head)
        lines += ["", "Difference from max_lag 0, paired:"]
        lines += table(
            [(a, [_sooner(wall, a, lag, value) for lag in lags if lag]) for a in names], [*head[:1], *head[2:]]
        )
    lines += ["", f"Held-out accuracy after {MARK_S} s:"]
    rows = [(a, [cell(list(pick(wall, a, lag, _after_seconds).values())) for lag in lags]) for a in names]
    lines += table(rows, head)
    speed = {lag: [r["seconds"] / r["steps"] for r in wall if r["lag"] == lag] for lag in lags}
    rows = [
        ("seconds a step", [cell(speed[lag]) for lag in lags]),
        ("of sync", [f"{np.mean(speed[lag]) / np.mean(speed[0]):.2f}" if 0 in speed else "-" for lag in lags]),
        (
            "mean lag of trained tokens",
            [f"{np.mean([r['lag_mean'] for r in wall if r['lag'] == lag]):.2f}" for lag in lags],
        ),
        ("runs", [str(len(speed[lag])) for lag in lags]),
    ]
    return lines + table(rows, head)


def _real(steps: Sequence[Record], wall: Sequence[Record], names: Sequence[str]) -> list[str]:
    """The pretrained model: accuracy under an exact lag, and real runs."""
    lines = ["", "## A pretrained model", "", "SmolLM2-135M-Instruct and the sums of recipes/quickstart_real.yaml."]
    lags = sorted({r["lag"] for r in steps})
    lines += ["", "Held-out greedy accuracy (100 questions) after 10; 20 steps, every token of the same lag:"]
    rows = [
        (a, ["; ".join(cell(list(pick(steps, a, lag, after(n)).values())) for n in (10, 20)) for lag in lags])
        for a in names
    ]
    lines += table([(a, ["-" if set(cells) == set("-; ") else cells for cells in row]) for a, row in rows],
                   ["", *(f"lag {lag}" for lag in lags)])  # fmt: skip
    kinds = sorted({(r["lag"], r["lr"], r["more"]) for r in wall})
    rows = []
    for lag, lr, more in kinds:
        ours = [r for r in wall if (r["lag"], r["lr"], r["more"]) == (lag, lr, more)]
        values = [
            *(cell([reached(r["curve"], target) for r in ours], 0) for target in REAL_TARGETS),
            cell([r["curve"][-1][1] for r in ours]),
            cell([max(y for _, y in r["curve"]) for r in ours]),
            cell([r["seconds"] / r["steps"] for r in ours], 1),
            f"{np.mean([r['lag_mean'] for r in ours]):.2f}",
            str(len(ours)),
        ]
        rows.append((f"{'sync' if not lag else f'max_lag {lag}'}, {lr:g} {more}".strip(), values))
    head = ["real runs", *(f"seconds to {target}" for target in REAL_TARGETS)]
    lines += table(rows, [*head, "last", "best", "seconds a step", "mean lag", "runs"])
    return lines if steps or wall else []


def _sooner(wall: Sequence[Record], name: str, lag: int, value: Callable[[Record], Any]) -> str:
    ours, sync = (pick(wall, name, at, value) for at in (lag, 0))
    both = [s for s in sorted(ours.keys() & sync.keys()) if None not in (ours[s], sync[s])]
    return (
        "-"
        if len(both) < max(2, len(ours))
        else "{:+.1f} ± {:.1f}".format(*interval([ours[s] - sync[s] for s in both]))
    )


def _after_seconds(r: Record) -> float:
    return float(np.interp(MARK_S, *zip(*r["curve"], strict=True)))


def picture(found: Sequence[Record], names: Sequence[str], path: Path) -> None:
    """Accuracy over lag after 25 and 50 steps, and the time to 0.9 over `max_lag`."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    steps = [r for r in of_part(found, "steps") if setting(r) == (RATE, 1, False)]
    wall = of_part(found, "wall")
    clock = "everything" if any(r.get("clock") == "everything" for r in wall) else "training"
    wall = [r for r in wall if r.get("clock", "training") == clock]
    panels = [(f"after {n} steps", "lag of every token, steps", "held-out accuracy", steps, after(n)) for n in (25, 50)]
    to_90 = lambda r: reached(r["curve"], TARGETS[0])  # noqa: E731
    panels.append((f"time to {TARGETS[0]}", "max_lag, steps", "seconds", wall, to_90))
    figure, axes = plt.subplots(1, len(panels), figsize=(3.6 * len(panels), 3.4), squeeze=False)
    for (title, label, unit, runs, value), axis in zip(panels, axes[0], strict=True):
        lags = sorted({r["lag"] for r in runs})
        for place, name in enumerate(names):
            values = {lag: list(pick(runs, name, lag, value).values()) for lag in lags}
            points = [(lag, *np.nan_to_num(interval(v))) for lag, v in values.items() if v and None not in v]
            if points:
                at, mean, half = zip(*points, strict=True)
                x = [(lag + 1) * (1 + 0.03 * (place - len(names) / 2)) for lag in at]
                style = "-" if place < 10 else "--"
                axis.errorbar(
                    x, mean, yerr=half, color=f"C{place % 10}", ls=style, marker="o", ms=4, capsize=2, label=name
                )
        axis.set_xscale("log", base=2)
        axis.set_xticks([lag + 1 for lag in lags], [str(lag) for lag in lags])
        axis.set(title=title, xlabel=label, ylabel=unit)
    axes[0][0].set_ylim(0, 1.05)
    axes[0][1].set_ylim(0, 1.05)
    axes[0][0].legend(fontsize=6, loc="lower left")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
