"""verl's published table of Qwen2.5-Math-7B on H20s against the planner.

    python benchmarks/verl_table.py              # the table and its sensitivity: about two minutes of CPU
    python benchmarks/verl_table.py --scale 4    # a quarter of the replicas and groups: the same, a little noisier
    python benchmarks/verl_table.py --write      # also writes benchmarks/results/plan_verl.md

The published figures are those of verl's docs/advance/fully_async.md and recipe/fully_async_policy/README.md. Read from
a row are the seconds of training (`update_actor`, in mode sync with `old_log_prob`), and what is left of its step when
`gen`, `old_log_prob` and `update_actor` are taken away, which counts as the publish. Predicted are the seconds that the
trainer waits (`gen`), and with them the step. docs/plan.md says which inputs are not published.

A step of verl is one parameter synchronization: 512 prompts. `trigger_parameter_sync_step=4` makes it four optimizer
steps of 4 * 32 prompts here, with `staleness.publish_every_steps=4`. The (1 + staleness_threshold) * 512 prompts that
verl generates at once are `max_lag + 1` times 128: a threshold of 0 is max_lag 3, and 0.5 is 5. With `on_overdue=mask`,
since verl waits for no prompt in particular.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works from a checkout that is not installed

from asyncrl.config.load import load_recipe
from asyncrl.plan import CostModel, predict, read_costs

ROOT = Path(__file__).resolve().parent
COSTS = ROOT / "plans" / "verl_qwen2.5_math_7b_h20.yaml"
RESPONSE_LIMIT = 28 * 1024
GPUS_PER_REPLICA = 4
SYNCS = 4
"""Optimizer steps of one step of verl, in its modes that are not sync."""
STEPS = 40
"""Optimizer steps that are simulated."""


@dataclass(frozen=True)
class Published:
    """A row of verl's table. Seconds of one step; `gpus`: of rollout and of training, the same ones in mode sync.
    `threshold`: verl's staleness_threshold."""

    name: str
    gpus: tuple[int, int]
    step_s: float
    gen_s: float
    training_s: float
    threshold: float | None = None

    @property
    def rest_s(self) -> float:
        return self.step_s - self.gen_s - self.training_s


ROWS = (
    Published("colocate sync", (128, 128), 356.30, 177.85, 53.92 + 113.81),
    Published("stream off policy", (64, 64), 231.34, 128.47, 98.77, 0.0),
    Published("fully async", (64, 64), 150.63, 33.14, 113.16, 0.5),
    Published("fully async", (32, 32), 189.26, 28.46, 156.98, 0.5),
    Published("fully async", (16, 16), 294.77, 21.26, 269.80, 0.5),
)


@dataclass(frozen=True)
class Predicted:
    step_s: float
    gen_s: float


def costs() -> CostModel:
    return read_costs(COSTS.read_text(), str(COSTS))


def prediction(row: Published, of: CostModel, scale: int = 1, steps: int = STEPS) -> Predicted:
    """`scale`: divides replicas and groups alike, which changes nothing but the noise."""
    syncs = 1 if row.threshold is None else SYNCS
    words = ["mode=sync"]
    if row.threshold is not None:
        max_lag = round((1 + row.threshold) * SYNCS) - 1
        words = ["mode=fully_async", f"staleness.max_lag={max_lag}", "staleness.on_overdue=mask"]
    words += [f"staleness.publish_every_steps={syncs}", "weights.overlap=false", "rollout.torch.num_slots=256"]
    words += [f"batch.groups_per_step={512 // syncs // scale}", f"trainer.num_ranks={row.gpus[1]}"]
    words += [f"rollout.num_replicas={row.gpus[0] // GPUS_PER_REPLICA // scale}"]
    words += [f"rollout.sampling.max_response_tokens={RESPONSE_LIMIT}"]
    recipe = load_recipe(ROOT.parent / "recipes" / "quickstart.yaml", words)
    training = replace(of.training, step_s=row.training_s / syncs, num_ranks=row.gpus[1])
    publish = replace(of.publish, fixed_s=row.rest_s)
    found = predict(recipe, replace(of, training=training, publish=publish), steps // (SYNCS // syncs))
    return Predicted(found.step_s * syncs, found.trainer_idle * found.step_s * syncs)


def with_lengths(of: CostModel, sigma: float, request_s: float, scale: int) -> CostModel:
    """Other assumptions, with the decode step of one request set so that mode sync still generates for as long as it is
    published. The mean length stays about the same.

    Args:
        request_s: seconds that each further request adds to a decode step.
    """
    before = of.generation.lengths
    median = (before.median or 0.0) * math.exp(((before.sigma or 0.0) ** 2 - sigma**2) / 2)
    lengths = replace(before, median=median, sigma=sigma)
    single_s = of.generation.decode_step_s[0][1]
    for _ in range(3):
        points = ((1, single_s), (256, single_s + 255 * request_s))
        of = replace(of, generation=replace(of.generation, lengths=lengths, decode_step_s=points))
        single_s += (ROWS[0].gen_s - prediction(ROWS[0], of, scale).gen_s) / RESPONSE_LIMIT
        if single_s <= 0:
            raise SystemExit(f"sigma {sigma}, {request_s:g} s a request: no decode step makes mode sync fast enough")
    return of


def table(of: CostModel, scale: int) -> list[str]:
    lines = [
        "| mode | GPUs, rollout : training | step s, published | predicted | error | waits for groups s, published "
        "| predicted |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in ROWS:
        found = prediction(row, of, scale)
        lines.append(
            f"| {row.name} | {row.gpus[0]} : {row.gpus[1]} | {row.step_s:.1f} | {found.step_s:.1f} | "
            f"{found.step_s / row.step_s - 1:+.1%} | {row.gen_s:.1f} | {found.gen_s:.1f} |"
        )
    return lines


def sensitivity(of: CostModel, scale: int) -> list[str]:
    """How the steps of the other rows move with what is assumed."""
    lines = [
        "| sigma of the lengths | us a request | decode step of one request, ms | "
        + " | ".join(f"{row.name} {row.gpus[0]} : {row.gpus[1]}" for row in ROWS[1:])
        + " |",
        "|---|---|---|" + "---|" * len(ROWS[1:]),
    ]
    for sigma, request_s in ((1.0, 54e-6), (1.2, 40e-6), (1.2, 54e-6), (1.2, 70e-6), (1.4, 54e-6)):
        other = with_lengths(of, sigma, request_s, scale)
        errors = (f"{prediction(row, other, scale).step_s / row.step_s - 1:+.1%}" for row in ROWS[1:])
        single_ms = 1000 * other.generation.decode_step_s[0][1]
        lines.append(f"| {sigma} | {1e6 * request_s:.0f} | {single_ms:.2f} | " + " | ".join(errors) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=int, default=1, choices=(1, 2, 4))
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/plan_verl.md")
    parser.add_argument("--no-sensitivity", action="store_true")
    options = parser.parse_args()
    of = costs()
    text = ["# verl's table against the planner", "", f"`python benchmarks/verl_table.py --scale {options.scale}`", ""]
    text += table(of, options.scale)
    if not options.no_sensitivity:
        text += ["", "Errors of the predicted steps under other assumptions:", "", *sensitivity(of, options.scale)]
    print("\n".join(text))
    if options.write:
        (ROOT / "results" / "plan_verl.md").write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main()
