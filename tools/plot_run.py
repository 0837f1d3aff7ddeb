"""Draws reward, held-out accuracy, lag, queue states and speed of a run from its metrics.jsonl.

`python tools/plot_run.py runs/quickstart --out docs/quickstart.png`
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from asyncrl.types.metrics import Metric


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

    steps = [r[Metric.STEP] for r in records]

    def curve(axis: Any, key: str, label: str, **style: Any) -> None:
        axis.plot(steps, [r[key] for r in records], label=label, **style)

    figure, ((reward, lag), (queue, speed)) = plt.subplots(2, 2, figsize=(10, 6), constrained_layout=True)
    figure.suptitle(title)
    curve(reward, Metric.REWARD_MEAN, "reward of trained samples", alpha=0.6)
    evaluated = [(r[Metric.STEP], r[Metric.EVAL_ACCURACY]) for r in records if Metric.EVAL_ACCURACY in r]
    if Metric.EVAL_INITIAL_ACCURACY in records[0]:
        evaluated.insert(0, (0, records[0][Metric.EVAL_INITIAL_ACCURACY]))
    reward.plot(*zip(*evaluated, strict=True), "o-", label="held-out accuracy")
    reward.set(title="learning", ylim=(0, 1.02))
    curve(lag, Metric.LAG_MEAN, "mean of trained tokens")
    curve(lag, Metric.LAG_MAX, "maximum", linestyle="--")
    curve(lag, Metric.LAG_IN_FLIGHT, "mean, arisen in flight")
    lag.set(title="lag, optimizer steps", ylim=(0, None))
    curve(queue, Metric.QUEUE_RUNNING, "running")
    curve(queue, Metric.QUEUE_READY, "ready")
    queue.set(title="groups in the queue", xlabel="optimizer step", ylim=(0, None))
    curve(speed, Metric.ROLLOUT_SPEED, "sampled")
    curve(speed, Metric.TRAIN_SPEED, "trained, while training")
    speed.set(title="tokens per second", xlabel="optimizer step", ylim=(0, None))
    for axis in (reward, lag, queue, speed):
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
