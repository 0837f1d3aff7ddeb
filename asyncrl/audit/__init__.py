"""`asyncrl-audit RUN_DIR`: proves from the files of a run that it lost no group and trained none over the lag limit.

Runs in: its own command.

Replays `events.jsonl` over all restarts, with its own rules: it shares no code with the queue that it checks. The run
is proven if there is no finding:
* ordinals are admitted without a gap, every transition is legal, and every admission ends at most once; after
  `expired` an ordinal may be admitted again, any number of times;
* no group was trained with lag (`step - oldest_version`) over the limit, and each step trained exactly its groups;
* each restart undid exactly the events after the restored snapshot, and the counts match the snapshot;
* every version in use was published, with digests if the recipe asks for them, to the replicas that began to serve;
* every snapshot became a checkpoint or a failed one, and every evaluation is of a published version;
* `metrics.jsonl` has one line per step, which balances and agrees with the events;
* `events.jsonl` is unchanged up to its last line: each line carries a hash of all bytes before it;
* the remaining checkpoints agree with the snapshots, group by group, and no line before the newest one was cut.

Exit codes: 0 proven; 1 findings; 2 not a run directory.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from asyncrl.audit.audit_report import AuditReport, Finding, Limits
from asyncrl.audit.log import read_log
from asyncrl.audit.metrics import METRICS, check_metrics
from asyncrl.audit.replay import EVENTS, Audit
from asyncrl.audit.saved import read_saved
from asyncrl.errors import ConfigError, explain
from asyncrl.json_records import from_plain

__all__ = ["Audit", "AuditReport", "Finding", "Limits", "audit_run", "main"]

CONFIG = "config.json"
EXIT_FINDINGS = 1
EXIT_NO_RUN = 2


def audit_run(directory: Path) -> AuditReport:
    """Audits a run directory; the run may still be in progress. Raises ConfigError if it is not a run directory."""
    limits = _limits(directory)
    saved = read_saved(directory / "checkpoints")  # before the events, which a running run still appends to
    audit = Audit(limits, saved)
    try:
        with (directory / EVENTS).open("rb") as file:
            unconfirmed = read_log(file, audit)
    except OSError as error:
        raise _no_run(directory, str(error)) from error
    audit.close()
    findings = [*unconfirmed, *audit.findings, *check_metrics(directory / METRICS, audit)]
    fixed = audit.limits.groups_per_step, audit.limits.max_lag
    if fixed != (limits.groups_per_step, limits.max_lag):
        found = f"groups_per_step {limits.groups_per_step}, max_lag {limits.max_lag}; the run started with {fixed}"
        findings.append(Finding(CONFIG, 0, found))
    return AuditReport(
        directory=str(directory),
        limits=audit.limits,
        events=audit.events,
        step=audit.step,
        outcome=audit.outcome,
        counts=audit.counts,
        unfinished=audit.unfinished,
        starts=audit.starts,
        crashes=audit.crashes,
        torn_lines=audit.num_torn,
        rollbacks=tuple(audit.rollbacks),
        troubles=dict(audit.troubles),
        recoveries=dict(audit.recoveries),
        replaced=dict(audit.replaced),
        checkpoints=tuple(sorted(each.name for each in saved)),
        max_lag=audit.max_lag,
        findings=tuple(findings),
    )


def _limits(directory: Path) -> Limits:
    try:
        config = json.loads((directory / CONFIG).read_bytes())
        recipe = config["recipe"]
        rollout = recipe["rollout"]
        found = {
            "groups_per_step": recipe["batch"]["groups_per_step"],
            "max_lag": config["resolved"]["max_lag"],
            "max_steps": recipe["run"]["max_steps"],
            "replicas": recipe["rollout"]["num_replicas"],
            "verify": recipe["weights"]["verify"],
            "sandboxes": rollout.get("num_rollouters", 1) * rollout.get("agent", {}).get("max_programs", 0),
        }
        return from_plain(Limits, found)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _no_run(directory, f"{CONFIG}: {type(error).__name__}: {error}") from error


def _no_run(directory: Path, found: str) -> ConfigError:
    return ConfigError(explain(f"audit {directory}", found, "name the directory of a run, for example runs/quickstart"))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="asyncrl-audit",
        description="Prove from the logs of a run that no group was lost, ended twice or was trained over the limit.",
        epilog="exit codes: 0 proven, 1 findings, 2 not a run directory",
    )
    parser.add_argument("run_dir", type=Path, help="directory of a run, for example runs/quickstart")
    parser.add_argument("--json", action="store_true", help="write the whole report as one JSON object")
    arguments = parser.parse_args(argv)
    try:
        report = audit_run(arguments.run_dir)
    except ConfigError as error:
        sys.stderr.write(f"asyncrl-audit: {error}\n")
        return EXIT_NO_RUN
    text = json.dumps(report.to_json(), indent=2) + "\n" if arguments.json else report.text()
    sys.stdout.write(text.encode(errors="backslashreplace").decode())  # the files may hold unprintable text
    return 0 if report.clean else EXIT_FINDINGS
