"""The reaction to each failure of a process, as a pure function. A test compares it to the table in
docs/operations.md."""

from __future__ import annotations

import time
from collections import deque
from enum import Enum

from asyncrl.errors import DeadlineExceeded, Process, ProcessDied


class FailureAction(Enum):
    SUSPEND_REPLICA = "the replica is suspended"
    REPLACE_REPLICA = "the replica is replaced"
    RESTART_ROLLOUTER = "the rollouter is replaced"
    RESTART_TRAINING_SIDE = "the training side restarts from the newest intact checkpoint"
    STOP_RUN = "the run stops"


OF_TRAINING_SIDE = ("message queue", "trainer rank")
"""Roles that restart together: the queue's ledger and the trainer's step must come from the same checkpoint."""


def failure_action(
    process: Process | None, error: BaseException | str, *, restarts_left: bool, may_rejoin: bool = False
) -> FailureAction:
    """
    Args:
        process: the process that failed; None if no single process is to blame.
        error: the error of its caller, or a description of a replica's misbehavior.
        restarts_left: True when the budget of this kind of process allows another restart.
        may_rejoin: a started replica that is late may answer again within `recovery.rejoin_timeout_s`.
    """
    role = None if process is None else process.role
    if role == "replica":
        if isinstance(error, DeadlineExceeded) and may_rejoin:
            return FailureAction.SUSPEND_REPLICA
        return FailureAction.REPLACE_REPLICA if restarts_left else FailureAction.STOP_RUN
    if restarts_left and isinstance(error, ProcessDied | DeadlineExceeded):
        if role == "rollouter":
            return FailureAction.RESTART_ROLLOUTER
        if role in OF_TRAINING_SIDE:
            return FailureAction.RESTART_TRAINING_SIDE
    return FailureAction.STOP_RUN


# Limits how often a kind of process may be restarted.


class RestartBudget:
    """Counts restarts: at most `max_restarts` within any `window_s` seconds."""

    def __init__(self, max_restarts: int, window_s: float) -> None:
        self._max_restarts = max_restarts
        self._window_s = window_s
        self._times: deque[float] = deque()
        self.total = 0

    def take(self) -> bool:
        """Counts one restart; returns False without counting if the budget is spent."""
        now = time.monotonic()
        while self._times and now - self._times[0] > self._window_s:
            self._times.popleft()
        if len(self._times) >= self._max_restarts:
            return False
        self._times.append(now)
        self.total += 1
        return True

    def __str__(self) -> str:
        return f"{len(self._times)} restart(s) within {self._window_s:g} s"
