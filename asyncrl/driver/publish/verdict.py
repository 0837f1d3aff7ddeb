"""What becomes of each replica of a transfer. Pure: no clock, no process, no call.

sender   replica                                    fate
-------  -----------------------------------------  -------------------------------------------------
any      process or engine dead, or out of fleet    lost
any      an error of its own                        wrong, then retry, full, replace or stop (`blamed`)
digest   the same digest                            ok
digest   another digest, or late, or ended          wrong: the sender has noticed nothing
error    late, or ended, or any digest              again: the fault is another process's
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from asyncrl.errors import DeadlineExceeded, GenerationError, ProcessDied, TransferEnded, WeightTransferError

Blame = Literal["retry", "full", "replace", "stop"]
"""retry: it gets the weights again. full: it got differences, so it gets all weights. replace: its retries are spent.
stop: what it replaced had wrong weights too, so the fault is not the replica's."""
Fate = Literal["ok", "again", "wrong", "lost"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """`wrong`: replica -> what it has instead of the weights. `error`: it ends the publish, because nobody else is to
    blame. `is_late`: a deadline was missed, and nobody is to blame."""

    fates: Mapping[int, Fate]
    wrong: Mapping[int, str]
    error: BaseException | None = None
    is_late: bool = False

    @property
    def ok(self) -> set[int]:
        return {i for i, fate in self.fates.items() if fate == "ok"}


def verdict(
    sent: Any, received: Mapping[int, Any], lost: Collection[int], names: Sequence[str], *, late_left: int
) -> Verdict:
    """
    Args:
        sent: the digest of the sender, or its error; None where no digests are compared.
        received: the same of each replica.
        lost: replicas that a health check has found dead or silent.
        names: of the tensors that a digest has numbers for, in that order.
        late_left: late transfers without a culprit that may still be tried again.
    """
    wrong = {
        i: why
        for i, found in received.items()
        if i not in lost and not is_gone(found) and (why := fault(sent, found, names)) is not None
    }
    fates: dict[int, Fate] = {}
    for i, found in received.items():
        if i in lost or is_gone(found):
            fates[i] = "lost"
        elif i in wrong:
            fates[i] = "wrong"
        else:
            fates[i] = "again" if isinstance(sent, BaseException) else "ok"
    if not isinstance(sent, BaseException) or set(fates.values()) != {"again"}:
        return Verdict(fates, wrong)
    is_late = any_late(sent, received)
    return Verdict(fates, wrong, None if is_late and late_left > 0 else sent, is_late)


def blamed(*, is_delta: bool, strikes: int, max_retries: int, is_replacement: bool) -> Blame:
    """What follows for a replica that has wrong weights.

    Args:
        is_delta: differences were sent.
        strikes: wrong transfers of all weights to it in this publish, this one included.
        is_replacement: the one before it was replaced because of wrong weights.
    """
    if is_delta:
        return "full"
    if strikes <= max_retries:
        return "retry"
    return "stop" if is_replacement else "replace"


def fault(sent: Any, received: Any, names: Sequence[str]) -> str | None:
    """The fault of a living replica; None when it has the weights, or failed because of another process."""
    if isinstance(received, DeadlineExceeded | TransferEnded):
        return None if isinstance(sent, BaseException) else str(received)
    if isinstance(received, BaseException):
        return f"{type(received).__name__}: {received}"
    if isinstance(sent, BaseException) or received == sent:
        return None
    pairs = zip(names, sent or (), received or (), strict=False)
    other = [name for name, ours, theirs in pairs if ours != theirs]
    return f"it has other bytes in {', '.join(other[:3]) or 'an unknown tensor'}"


def is_gone(outcome: Any) -> bool:
    """The process or the engine of the replica is dead."""
    return isinstance(outcome, ProcessDied | GenerationError)


def is_trainers(sent: Any) -> bool:
    """The sender failed with what no receiver can cause."""
    return isinstance(sent, BaseException) and not isinstance(sent, WeightTransferError | DeadlineExceeded)


def any_late(sent: Any, received: Mapping[int, Any]) -> bool:
    """A health check has to find the replica that does not answer at all: the others only waited for it."""
    return any(isinstance(outcome, DeadlineExceeded) for outcome in (sent, *received.values()))


def all_late(outcomes: Iterable[Any]) -> bool:
    """Every replica was late with a call: if they pass a health check, the deadline is too short."""
    return all(isinstance(outcome, DeadlineExceeded) for outcome in outcomes)
