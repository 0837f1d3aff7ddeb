"""Every error that asyncrl raises on purpose, with the exit code of a run that it ends.

A message says what was asked, what was found and what to do (`explain`). Each class also inherits the standard
library's type, so that a caller can catch either.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Process:
    """A process that others wait for: its role, e.g. "trainer rank", and its number where a role has several."""

    role: str
    index: int | None = None

    def __str__(self) -> str:
        return self.role if self.index is None else f"{self.role} {self.index}"


class AsyncRLError(Exception):
    """Root of all errors raised on purpose. `exit_code`: of `asyncrl-train` if the error ends the run."""

    exit_code = 1
    process: Process | None = None
    """The process that failed; None if no single process is to blame."""

    def of(self, process: Process) -> Self:
        """This error, with the process that failed."""
        self.process = process
        return self


class ConfigError(AsyncRLError, ValueError):
    """A recipe, a data file or a model cannot be used. Raised before any process starts."""

    exit_code = 2


class DataError(ConfigError):
    """A dataset cannot be read or a row of it is malformed; the message names the file and the line."""


class LedgerError(AsyncRLError, RuntimeError):
    """A transition that the group life-cycle does not allow, or a broken balance of the ledger."""


class DeadlineExceeded(AsyncRLError, TimeoutError):
    """A wait on another process reached its deadline; the message names the wait and the process."""

    exit_code = 4


class NoPlace(DeadlineExceeded):
    """No node had room for a process in time, for example after the loss of its node."""


class ProcessDied(AsyncRLError, RuntimeError):
    """A process that the run needs has died; the message names its role."""

    exit_code = 5


class WeightTransferError(AsyncRLError, RuntimeError):
    """A publish of weights failed: digest mismatch, missing or malformed tensor, lost peer."""

    exit_code = 6


class TransferEnded(WeightTransferError):
    """The other end of a transfer ended it or died; the cause is known only there."""


class GenerationError(AsyncRLError, RuntimeError):
    """A generation request cannot be served (no committed version in time, prompt too long, engine stopped)."""


class BadRequest(GenerationError):
    """A generation request that every replica would refuse: its JSON schema cannot guide a response."""


class RunFailed(AsyncRLError, RuntimeError):
    """The run cannot continue: a failure budget is spent, or the off-policy guard stopped it. The message names the
    failure and the evidence."""

    exit_code = 3


class NoParity(RunFailed):
    """Replicas and trainer compute different policies from the same weights: the model, or how it is served, is not as
    the recipe needs it."""

    exit_code = 2


class Stalled(AsyncRLError, TimeoutError):
    """Nothing in the run made progress for `recovery.stall_timeout_s`; stacks of all processes were written."""

    exit_code = 7


class StorageError(AsyncRLError, OSError):
    """The run directory cannot be written (full disk, for example), or no checkpoint in it can be read."""

    exit_code = 8


def cause(errors: Iterable[BaseException]) -> BaseException:
    """The error that explains other errors which occurred together; the first among equals.

    The order: a process that died (it explains the errors of its peers); errors that name their own cause; missed
    deadlines; ends of transfers, whose cause is elsewhere; errors that were not raised on purpose.
    """

    def rank(error: BaseException) -> int:
        if isinstance(error, ProcessDied):
            return 0
        if isinstance(error, TransferEnded):
            return 3
        if isinstance(error, AsyncRLError):
            return 2 if isinstance(error, TimeoutError) else 1
        return 5 if isinstance(error, TimeoutError) else 4

    return min(errors, key=rank)


def explain(asked: str, found: str, do: str) -> str:
    """The three-part message of user-facing errors, one part a line."""
    return f"asked: {asked}\nfound: {found}\ndo:    {do}"


GO_ON = "make room there; then go on with resume=auto, which leaves out nothing and repeats nothing"


@contextmanager
def writing(what: object, do: str = GO_ON) -> Iterator[None]:
    """Within it an OSError becomes the StorageError of `what`, by default a file of a run, which cannot be written."""
    try:
        yield
    except OSError as error:
        raise StorageError(explain(f"write {what}", str(error), do)) from error
