"""Draws reward, held-out accuracy, lag, queue states and speed of a run from its metrics.jsonl.

`python tools/plot_run.py runs/quickstart --out docs/quickstart.png`
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("--out", type=Path, help="picture to write; RUN/curves.png when left out")
    options = parser.parse_args()
    metrics = options.run / "metrics.jsonl"
    if not metrics.exists():
        print(f"asked: a picture of {options.run}\nfound: no metrics.jsonl in it\ndo:    name a run directory")
        return 2
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    out = options.out or options.run / "curves.png"
    draw(records, out, options.run.name)
    print(f"wrote {out}")
    return 0


def draw(records: list[dict[str, Any]], out: Path, title: str) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    steps = [r["step"] for r in records]

    def curve(axis: Any, key: str, label: str, **style: Any) -> None:
        axis.plot(steps, [r[key] for r in records], label=label, **style)

    figure, ((reward, lag), (queue, speed)) = plt.subplots(2, 2, figsize=(10, 6), constrained_layout=True)
    figure.suptitle(title)
    curve(reward, "reward/mean", "reward of trained samples", alpha=0.6)
    evaluated = [(r["step"], r["eval/accuracy"]) for r in records if "eval/accuracy" in r]
    if "eval/initial_accuracy" in records[0]:
        evaluated.insert(0, (0, records[0]["eval/initial_accuracy"]))
    reward.plot(*zip(*evaluated, strict=True), "o-", label="held-out accuracy")
    reward.set(title="learning", ylim=(0, 1.02))
    curve(lag, "staleness/lag_mean", "mean of trained tokens")
    curve(lag, "staleness/lag_max", "maximum", linestyle="--")
    curve(lag, "staleness/lag_in_flight_mean", "mean, arisen in flight")
    lag.set(title="lag, optimizer steps", ylim=(0, None))
    for name in ("running", "ready"):
        curve(queue, f"queue/{name}", name)
    queue.set(title="groups in the queue", xlabel="optimizer step", ylim=(0, None))
    curve(speed, "rollout/tokens_per_s", "sampled")
    curve(speed, "train/tokens_per_s", "trained, while training")
    speed.set(title="tokens per second", xlabel="optimizer step", ylim=(0, None))
    for axis in (reward, lag, queue, speed):
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
