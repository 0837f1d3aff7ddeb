"""Writes the directory of a run that never was, healthy or with one sickness: for the tests of the report, and for
people who want to see what a sickness looks like.

    python tools/make_sick_run.py starved runs/starved --steps 200

The figures are drawn at random around what such a run shows; nothing is trained.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.types.events import GuardChanged, ReplicaServing, ReplicaSuspended
from asyncrl.types.metrics import REQUIRED, Metric

GROUPS, REPLICAS, MAX_LAG = 8, 4, 2
START_S = 1_700_000_000.0


@dataclass(frozen=True)
class Kind:
    """What differs from a healthy run. Shares of the trainer's and of the replicas' time; the rest is training, and
    generating."""

    meaning: str
    waiting: float = 0.02
    overdue: float = 0.0
    slots: float = 0.10
    environment: float = 0.02
    straggler_s: float = 0.0
    """Extra time of one group in twelve."""
    is_fenced: bool = False
    collapses: bool = False
    is_guarded: bool = False
    """Its guard lowers the limit on the lag, and stops it at the end."""


KINDS = {
    "healthy": Kind("nothing ails it"),
    "starved": Kind("one replica too few: the trainer waits for groups", waiting=0.55, slots=0.0),
    "straggler": Kind("a few responses take very long", overdue=0.4, slots=0.3, straggler_s=12.0),
    "slow_reward": Kind("the reward takes most of the time", waiting=0.5, slots=0.0, environment=0.6),
    "fenced": Kind("a replica answers no more", is_fenced=True),
    "collapsed": Kind("the learning rate is far too high for the lag", collapses=True),
    "guarded": Kind("the off-policy guard stops it", is_guarded=True),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n\n")[0])
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.out.exists():
        print(f"asked: a new run in {options.out}\nfound: it exists\ndo:    name another directory")
        return 2
    write_run(options.out, options.kind, options.steps, options.seed)
    print(f"wrote {options.out}: {KINDS[options.kind].meaning}")
    return 0


def write_run(out: Path, name: str, steps: int = 120, seed: int = 0) -> Path:
    """Writes `config.json`, `metrics.jsonl`, `events.jsonl` and `samples.jsonl`; returns `out`."""
    kind, rng = KINDS[name], random.Random(seed)
    out.mkdir(parents=True)
    recipe = {"mode": "fully_async", "run": {"max_steps": steps, "seed": seed}, "trainer": {"lr": 1e-6}}
    config = {"name": name, "recipe": recipe, "resolved": {"max_lag": MAX_LAG}}
    (out / "config.json").write_text(json.dumps(config))
    now, metrics, samples = START_S, [], []
    events: list[dict[str, Any]] = [
        {
            **{"event": "start", "time_s": now, "name": name, "resumed": False, "replicas": REPLICAS, "pid": 1},
            **{"groups_per_step": GROUPS, "max_lag": MAX_LAG, "max_steps": steps, "verify": "first"},
        },
        *({"event": ReplicaServing.kind, "time_s": now, "replica": replica} for replica in range(REPLICAS)),
    ]
    for step in range(1, steps + 1):
        train_s = rng.uniform(0.9, 1.1)
        wall_s = train_s / max(0.1, 1 - kind.waiting - kind.overdue - 0.05)
        now += wall_s
        is_fenced = kind.is_fenced and step > steps // 3
        if kind.is_fenced and step == steps // 3 + 1:
            error = "DeadlineExceeded: replica 2 does not answer within 20 s"
            events.append({"event": ReplicaSuspended.kind, "time_s": now - 0.5, "replica": 2, "error": error})
        metrics.append(_line(kind, step, steps, now - START_S, wall_s, train_s, rng, is_fenced))
        events += _step(kind, step, now, wall_s, train_s, rng)
        samples.append(_sample(step, now, rng))
    if kind.is_guarded:
        reason = "KL 0.21 nats (at most 0.1), too far off-policy in 2 steps"
        for step, action, limit in ((steps // 2, "tightened", 1), (steps, "stopped", 1)):
            done = {"step": step, "action": action, "limit": limit, "acted": True, "reason": reason}
            events.append({"event": GuardChanged.kind, "time_s": now, **done})
    elif not kind.is_fenced:
        events.append({"event": "end", "time_s": now, "outcome": "finished", "step": steps})
    for file, lines in (("metrics", metrics), ("events", events), ("samples", samples)):
        (out / f"{file}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return out


def _line(
    kind: Kind,
    step: int,
    steps: int,
    at_s: float,
    wall_s: float,
    train_s: float,
    rng: random.Random,
    is_fenced: bool,
) -> dict[str, float]:
    done = step / steps
    sick = max(0.0, 2 * done - 1) if kind.collapses else 0.0
    reward = 0.2 + 0.6 * done - 0.9 * sick + rng.gauss(0, 0.02)
    recovering = 1 / REPLICAS if is_fenced else 0.0
    generating = 1 - recovering - kind.slots - kind.environment
    publish = 0.03
    lag = MAX_LAG * (1 - kind.waiting)
    line = {str(key): 0.0 for key in REQUIRED} | {
        Metric.STEP: step, Metric.TIME: at_s, Metric.REWARD_MEAN: reward, Metric.REWARD_STD: 0.4,
        Metric.LAG_MAX: MAX_LAG, Metric.LAG_MEAN: lag, Metric.LAG_IN_FLIGHT: lag / 3, Metric.LAG_IN_QUEUE: 2 * lag / 3,
        Metric.OVERDUE_WAIT: kind.overdue * wall_s, Metric.ROLLOUT_SPEED: 1000 * generating + rng.gauss(0, 20),
        Metric.EFFECTIVE_SAMPLES: 0.98 - 0.5 * sick, Metric.RATIO_TAILS: 0.01 + 0.4 * sick,
        Metric.SLOTS: 0.3 + 0.6 * (kind.waiting < 0.1), Metric.SEGMENTS: 1.4, Metric.VERSION_SPAN: 0.3,
        Metric.INTERRUPTED: 0.3, Metric.TRUNCATED: 0.02, Metric.RESPONSE_TOKENS: 300 + 100 * done,
        Metric.QUEUE_ADMITTED: GROUPS * (step + MAX_LAG), Metric.QUEUE_RUNNING: GROUPS,
        Metric.QUEUE_TRAINED: GROUPS * step,
        Metric.QUEUE_READY: GROUPS * (0.1 if kind.waiting > 0.1 else 1.0), Metric.PUBLISH_TIME: publish * wall_s,
        Metric.PUBLISH_TRANSFER: 0.6 * publish * wall_s, Metric.PUBLISH_REST: 0.4 * publish * wall_s,
        Metric.PUBLISH_REPLICAS: REPLICAS - is_fenced,
        Metric.LOSS: 0.01 + sick, Metric.GRAD_NORM: 0.5 + 40 * sick, Metric.LEARNING_RATE: 1e-6,
        Metric.TRAIN_SPEED: 9000 / train_s, Metric.TRAIN_TIME: train_s, Metric.CLIPPED: 0.02 + 0.5 * sick,
        Metric.CLIPPED_POSITIVE: 0.01 + 0.3 * sick, Metric.CLIPPED_NEGATIVE: 0.01 + 0.2 * sick,
        Metric.RATIO_MEAN: 1 - 0.6 * sick + rng.gauss(0, 0.01), Metric.RATIO_MAX: 3 + 200 * sick,
        Metric.KL_BEHAVIOR: 0.01 + 1.5 * sick, Metric.ENTROPY: 1.5 - 0.5 * done,
        Metric.TRAINER_GROUPS: kind.waiting, Metric.TRAINER_OVERDUE: kind.overdue, Metric.TRAINER_PUBLISH: publish,
        Metric.TRAINER_PLANNING: 0.02, Metric.TRAINER_TRAINING: 1 - kind.waiting - kind.overdue - publish - 0.02,
        Metric.REPLICA_GENERATING: generating - 0.02, Metric.REPLICA_GATE: 0.02, Metric.REPLICA_SLOTS: kind.slots,
        Metric.REPLICA_ENVIRONMENT: kind.environment, Metric.REPLICA_RECOVERING: recovering,
        Metric.REPLICA_EVALUATION: 0.0, Metric.SPARE_REPLICAS: REPLICAS * kind.slots,
    }  # fmt: skip
    for bucket, share in (("0", 0.25), ("1", 0.5), ("2", 0.25)) if kind.waiting < 0.1 else (("0", 0.7), ("1", 0.3)):
        aged = sick * int(bucket)
        line |= {
            Metric.LAG_TOKENS.of(bucket): share, Metric.LAG_GROUPS.of(bucket): share,
            Metric.LAG_GAINED_IN_FLIGHT.of(bucket): share, Metric.LAG_GAINED_IN_QUEUE.of(bucket): share,
            Metric.LAG_RATIO.of(bucket): 1 - 0.3 * aged, Metric.LAG_EFFECTIVE.of(bucket): 0.98 - 0.4 * aged,
            Metric.LAG_TAILS.of(bucket): 0.01 + 0.3 * aged,
            Metric.LAG_CLIPPED_POSITIVE.of(bucket): 0.01 + 0.2 * aged, Metric.LAG_KL.of(bucket): 0.01 + 0.8 * aged,
            Metric.LAG_CLIPPED_NEGATIVE.of(bucket): 0.01 + 0.1 * aged, Metric.LAG_REWARD.of(bucket): reward,
        }  # fmt: skip
    if step % 20 == 0:
        line[Metric.EVAL_ACCURACY] = max(0.0, reward - 0.05)
    return line


def _step(kind: Kind, step: int, now: float, wall_s: float, train_s: float, rng: random.Random) -> list[dict[str, Any]]:
    """Its groups, from admission to training, and its publish."""
    events = []

    def group(at: float, transition: str, ordinal: int, lag: int) -> None:
        fields = {"ordinal": ordinal, "attempt": 0, "trainer_version": step - 1, "version": step - 1}
        events.append(
            {
                "event": "group",
                "time_s": at,
                "transition": transition,
                "oldest_version": max(0, step - 1 - lag),
                "detail": "",
            }
            | fields
        )

    ordinals = range((step - 1) * GROUPS, step * GROUPS)
    for ordinal in ordinals:
        lag = rng.choice((0, 1, 1, 2)) if kind.waiting < 0.1 else rng.choice((0, 0, 1))
        generated = rng.uniform(0.6, 1.2) * wall_s + (kind.straggler_s if rng.random() < 1 / 12 else 0.0)
        leased = now - train_s
        ready = leased - rng.uniform(0.0, 0.5) * wall_s
        group(ready - generated, "admitted", ordinal, lag)
        group(ready, "ready", ordinal, lag)
        group(leased, "leased", ordinal, lag)
        group(now, "trained", ordinal, lag)
    events.append({"event": "step", "time_s": now, "step": step, "ordinals": list(ordinals), "lag_max": MAX_LAG})
    seconds = {"publish_s": 0.03 * wall_s, "pause_s": 0.01 * wall_s, "transfer_s": 0.02 * wall_s}
    rest = {"version": step, "bytes": 1000, "verified": step == 1, "attempts": 1, "replicas": REPLICAS}
    events.append({"event": "publish", "time_s": now + 0.03 * wall_s} | seconds | rest)
    return events


def _sample(step: int, now: float, rng: random.Random) -> dict[str, Any]:
    words = [f"{rng.choice(('so', 'then', 'add', 'carry', 'the', 'sum', 'is'))} " for _ in range(40)]
    ends = [sum(map(len, words[: i + 1])) for i in range(len(words))]
    first = max(0, step - 2)
    return {
        "time_s": now, "ordinal": step * GROUPS, "attempt": 0, "prompt": f"What is {step}+7?",
        "response": "".join(words), "ground_truth": str(step + 7), "reward": 1.0, "finish_reason": "stop",
        "segments": [[0, 15, first, 0, "policy"], [15, 22, first, 0, "environment"], [22, 40, step, 1, "policy"]],
        "token_ends": ends, "logprobs": [round(-rng.expovariate(2), 4) for _ in words],
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
