"""Every error that asyncrl raises on purpose.

A message says what was asked, what was found and what to do (`explain`). Each class also inherits the standard
library's type, so that a caller can catch either.
"""


class AsyncRLError(Exception):
    """Root of all errors raised on purpose."""


class ConfigError(AsyncRLError, ValueError):
    """A recipe, a data file or a model cannot be used. Raised before any process starts; exit code 2."""


class DataError(ConfigError):
    """A dataset cannot be read or a row of it is malformed; the message names the file and the line."""


class LedgerError(AsyncRLError, RuntimeError):
    """A transition that the group life-cycle does not allow, or a broken balance of the ledger."""


class DeadlineExceeded(AsyncRLError, TimeoutError):
    """A wait on another process reached its deadline; the message names the wait and the process."""


class ProcessDied(AsyncRLError, RuntimeError):
    """A process that the run needs is gone; the message names its role."""


class WeightTransferError(AsyncRLError, RuntimeError):
    """A publish of weights failed: digest mismatch, missing or malformed tensor, lost peer."""


class TransferEnded(WeightTransferError):
    """The other end of a transfer ended it, or is gone: the cause is known there, not here."""


class GenerationError(AsyncRLError, RuntimeError):
    """A generation request cannot be served (no committed version in time, prompt too long, engine stopped)."""


class RunFailed(AsyncRLError, RuntimeError):
    """The run cannot go on: a failure budget is spent. The message says what failed and where the evidence lies."""


def explain(asked: str, found: str, do: str) -> str:
    """The three-part message that every user-facing error carries, one part a line."""
    return f"asked: {asked}\nfound: {found}\ndo:    {do}"
