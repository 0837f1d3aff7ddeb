"""The report of an audit: counts, rollbacks, troubles and findings, for people and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from asyncrl.ranges import Whole
from asyncrl.types import LedgerCounts

SHOWN = 50
"""Findings that the readable report prints; the JSON has all of them."""

STATES = ("running", "ready", "leased")
ENDS = ("trained", "filtered", "expired", "failed")
COUNTS = tuple(field.name for field in fields(LedgerCounts))


@dataclass(frozen=True, slots=True)
class Finding:
    """A violation. `line` counts from 1; 0 if no single line is to blame."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}" if self.line else f"{self.file}: {self.text}"


@dataclass(frozen=True, slots=True)
class Rollback:
    """A restart that went back from step `before` to step `after`, undoing `trained` trained groups."""

    line: int
    before: int
    after: int
    trained: int
    transitions: int


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits in the recipe of the run; a resume cannot change the first two. `verify`: which publishes carry
    digests. `sandboxes`: most at the same time; 0: of no environment."""

    groups_per_step: Whole
    max_lag: Whole
    max_steps: Whole
    replicas: Whole
    verify: str
    sandboxes: Whole = 0


@dataclass(frozen=True, slots=True)
class AuditReport:
    """`counts`: groups at the end of the log, by the names of LedgerCounts. `outcome` of the run's last process:
    finished, interrupted, failed (with a named error) or unknown (killed, or still running). `troubles` and
    `recoveries`: events by kind and process. `replaced`: ignored lines by their writer, a message queue that another
    had replaced. `checkpoints`: compared with the events. `max_lag`: of all trained groups,
    including undone ones (-1: none).
    """

    directory: str
    limits: Limits
    events: int
    step: int
    outcome: str
    counts: Mapping[str, int]
    unfinished: tuple[int, ...]
    starts: int
    crashes: int
    torn_lines: int
    rollbacks: tuple[Rollback, ...]
    troubles: Mapping[str, int]
    recoveries: Mapping[str, int]
    replaced: Mapping[str, int]
    checkpoints: tuple[str, ...]
    max_lag: int
    findings: tuple[Finding, ...]

    @property
    def clean(self) -> bool:
        return not self.findings

    def to_json(self) -> dict[str, Any]:
        return {"clean": self.clean, **asdict(self)}

    def text(self) -> str:
        """A dozen lines for people, then the findings."""
        undone = sum(r.trained for r in self.rollbacks)
        back = ", ".join(f"{r.before} -> {r.after}" for r in self.rollbacks[:8])
        lag = "nothing was trained" if self.max_lag < 0 else f"at most {self.max_lag}"
        lines = [
            f"run        {self.directory}",
            f"outcome    {self.outcome} after step {self.step}",
            f"groups     {'  '.join(f'{name} {self.counts[name]}' for name in COUNTS)}",
            f"lag        {lag} (limit {self.limits.max_lag})",
            f"processes  {self.starts} started, {self.crashes} ended without a word, {self.torn_lines} torn lines",
            f"rollbacks  {len(self.rollbacks)}, undoing {undone} trained groups" + (f": steps {back}" if back else ""),
            f"troubles   {_listed(self.troubles)}",
            f"recovered  {_listed(self.recoveries)}",
        ]
        lines.append(f"compared   {', '.join(self.checkpoints) or 'no checkpoint is left'}")
        lines += [
            f"ignored    {count} lines of {writer}, a message queue that a restart had replaced"
            for writer, count in self.replaced.items()
        ]
        if self.unfinished:
            some = ", ".join(map(str, self.unfinished[:8])) + (", ..." if len(self.unfinished) > 8 else "")
            lines.append(f"unfinished {len(self.unfinished)} groups that the run has yet to end: {some}")
        lines.append(f"events     {self.events} replayed")
        lines += [str(finding) for finding in self.findings[:SHOWN]]
        if len(self.findings) > SHOWN:
            lines.append(f"... and {len(self.findings) - SHOWN} more findings (--json lists all)")
        verdict = "CLEAN: every group ended exactly once, none over the limit"
        if self.clean and self.unfinished:
            verdict = "CLEAN: no group was lost, ended twice or was trained over the limit; some have not ended yet"
        lines.append(verdict if self.clean else f"{len(self.findings)} FINDINGS")
        return "\n".join(lines) + "\n"


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"
