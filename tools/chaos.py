"""Kills, stops, starves and corrupts a real run until it has had enough, then proves that nothing was lost.

    python tools/chaos.py --recipe recipes/quickstart.yaml --kills 50 --seed 0 --out benchmarks/results/chaos.md

Runs `asyncrl-train` as a user would, injects faults at random moments, starts it again with resume=auto whenever the
driver has ended, waits after each fault until the run trains again, lets it reach its last step, and audits.

Exit code 0: the audit is clean, every end of the driver was explained by a fault, the run went on in time after each,
and nothing was left behind (processes, shared memory, temporary files). Needs Linux; filling the disk needs the right
to mount a tmpfs.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works from a checkout that is not installed

from asyncrl.checkpoint.run_directory import git_commit
from tools.chaos_faults import ROLES, Fault
from tools.chaos_run import Chaos, ChaosReport, Plan

SHOWN = 30


def markdown(report: ChaosReport) -> str:
    """The report as the benchmarks write theirs."""
    plan, audit = report.plan, report.audit
    machine = f"{os.cpu_count()} cores, {psutil.virtual_memory().total >> 30} GiB, {platform.machine()}"
    lines = [
        "# Chaos",
        "",
        f"`python tools/chaos.py --recipe {plan.recipe} --kills {plan.kills} --seed {plan.seed} --steps {plan.steps}"
        f"{''.join(f' {o}' for o in plan.overrides)}`",
        "",
        f"{datetime.now(UTC):%Y-%m-%d}, {machine}, Python {platform.python_version()}, commit {git_commit()}.",
        "",
        f"**{'Clean' if report.clean else 'NOT CLEAN'}**: {len(report.faults)} faults in {report.seconds:.0f} s, "
        f"{report.drivers} drivers.",
        "",
        "| fault | times | seconds until it trained again, median | max |",
        "|---|---|---|---|",
    ]
    kinds: dict[str, list[Fault]] = defaultdict(list)
    for fault in report.faults:
        kinds[fault.name].append(fault)
    for name, faults in sorted(kinds.items()):
        took = [f.recovery_s for f in faults if f.recovery_s is not None]
        middle, most = (f"{statistics.median(took):.1f}", f"{max(took):.1f}") if took else ("never", "never")
        lines.append(f"| {name} | {len(faults)} | {middle} | {most} |")
    lines.append("")
    if audit is not None:
        undone = sum(r.trained for r in audit.rollbacks)
        ends = ", ".join(f"{name} {audit.counts[name]}" for name in ("trained", "filtered", "expired", "failed"))
        lines += [
            f"- Groups: {audit.counts['admitted']} admitted = {ends} + {len(audit.unfinished)} unfinished.",
            f"- Largest lag {audit.max_lag}, limit {audit.limits.max_lag}, over all {audit.events} events.",
            f"- {len(audit.rollbacks)} rollbacks undid {undone} trained groups, which were trained again: "
            f"{undone / max(1, undone + audit.counts['trained']):.0%} of the work.",
        ]
    if report.accuracy is not None:
        calm = "" if report.calm_accuracy is None else f"; of the same run without faults {report.calm_accuracy:.3f}"
        lines.append(f"- Held-out accuracy at the end {report.accuracy:.3f}{calm}.")
    lines += [f"- Skipped: {text}" for text in report.skipped]
    lines += [f"- FINDING: {text}" for text in report.findings[:SHOWN]]
    if len(report.findings) > SHOWN:
        lines.append(f"- and {len(report.findings) - SHOWN} more findings")
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="recipes/quickstart.yaml")
    parser.add_argument("--kills", type=int, default=20, help="faults to inject")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=40, help="run.max_steps; prolonged until all faults are injected")
    parser.add_argument("--roles", default=",".join(ROLES), help="what may fail, separated by commas; all by default")
    parser.add_argument("--pause", type=float, default=2.0, help="mean seconds from a recovery to the next fault")
    parser.add_argument("--deadline", type=float, default=180.0, help="seconds without a step that count as a hang")
    parser.add_argument("--disk-mb", type=int, default=128, help="size of the file system that is filled")
    parser.add_argument("--compare", action="store_true", help="also run without faults, for its accuracy")
    parser.add_argument("--work", type=Path, help="directory for the run and the evidence; a temporary one otherwise")
    parser.add_argument("--out", type=Path, help="write the report here")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_intermixed_args(argv)
    if unknown := set(arguments.roles.split(",")) - set(ROLES):
        parser.error(f"no such roles: {sorted(unknown)}; there are {', '.join(ROLES)}")
    plan = Plan(
        recipe=arguments.recipe,
        kills=arguments.kills,
        seed=arguments.seed,
        steps=arguments.steps,
        roles=tuple(arguments.roles.split(",")),
        overrides=tuple(arguments.overrides),
        pause_s=arguments.pause,
        deadline_s=arguments.deadline,
        disk_mb=arguments.disk_mb,
        compare=arguments.compare,
    )
    work = arguments.work or Path(tempfile.mkdtemp(prefix="asyncrl-chaos-"))
    report = Chaos(plan, work).run()
    text = markdown(report)
    print(text)
    if report.audit is not None:
        print(report.audit.text())
    if arguments.out is not None:
        arguments.out.write_text(text)
    print(f"evidence: {work}")
    return 0 if report.clean else 1


if __name__ == "__main__":
    sys.exit(main())
