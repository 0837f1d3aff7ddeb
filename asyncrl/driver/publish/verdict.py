"""Decides the fate of each replica of a transfer. Pure: no clock, no process, no call.

sender   replica                                    fate
-------  -----------------------------------------  -------------------------------------------------
any      process or engine dead, or out of fleet    lost
any      an error of its own                        wrong, then retry, full, replace or stop (`blamed`)
digest   the same digest                            ok
digest   another digest, or late, or ended          wrong: the sender saw no error
error    late, or ended, or any digest              again: the fault lies with another process

If all are again, nobody is to blame. The transfer is then repeated if a deadline was missed or a connection broke,
both of which may pass; any other error of the sender ends the publish.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from asyncrl.errors import DeadlineExceeded, GenerationError, ProcessDied, TransferEnded, WeightTransferError

Blame = Literal["retry", "full", "replace", "stop"]
"""retry: send the weights again. full: differences failed, so send all weights. replace: the retries are spent.
stop: the predecessor had wrong weights too, so the fault is not the replica's."""
Fate = Literal["ok", "again", "wrong", "lost"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """`wrong`: replica -> description of its fault. `error`: ends the publish, because nobody else is to blame.
    `is_transient`: a deadline was missed or a connection broke, and nobody is to blame."""

    fates: Mapping[int, Fate]
    wrong: Mapping[int, str]
    error: BaseException | None = None
    is_transient: bool = False

    @property
    def ok(self) -> set[int]:
        return {i for i, fate in self.fates.items() if fate == "ok"}


def verdict(
    sent: Any, received: Mapping[int, Any], lost: Collection[int], names: Sequence[str], *, retries_left: int
) -> Verdict:
    """
    Args:
        sent: the digest of the sender, or its error; None if digests are not compared.
        received: digest or error of each replica.
        lost: replicas that a health check found dead or silent.
        names: tensor names, in the order of the digest's numbers.
        retries_left: remaining retries of transfers without a culprit.
    """
    fates: dict[int, Fate] = {}
    wrong: dict[int, str] = {}
    for i, found in received.items():
        if i in lost or is_gone(found):
            fates[i] = "lost"
        elif (why := fault(sent, found, names)) is not None:
            fates[i], wrong[i] = "wrong", why
        else:
            fates[i] = "again" if isinstance(sent, BaseException) else "ok"
    if not isinstance(sent, BaseException) or set(fates.values()) != {"again"}:
        return Verdict(fates, wrong)
    is_transient = isinstance(sent, TransferEnded) or any_late(sent, received)
    return Verdict(fates, wrong, None if is_transient and retries_left > 0 else sent, is_transient)


def blamed(*, is_delta: bool, strikes: int, max_retries: int, is_replacement: bool) -> Blame:
    """The reaction to a replica with wrong weights.

    Args:
        is_delta: differences were sent.
        strikes: wrong full transfers to this replica in this publish, including this one.
        is_replacement: its predecessor was replaced because of wrong weights.
    """
    if is_delta:
        return "full"
    if strikes <= max_retries:
        return "retry"
    return "stop" if is_replacement else "replace"


def fault(sent: Any, received: Any, names: Sequence[str]) -> str | None:
    """The fault of a living replica; None if it has the weights, or failed because of another process."""
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
    """True if the process or the engine of the replica is dead."""
    return isinstance(outcome, ProcessDied | GenerationError)


def is_trainers(sent: Any) -> bool:
    """True if the sender failed with an error that no receiver can cause."""
    return isinstance(sent, BaseException) and not isinstance(sent, WeightTransferError | DeadlineExceeded)


def any_late(sent: Any, received: Mapping[int, Any]) -> bool:
    """True if anyone missed a deadline: a health check then has to find the replica that does not answer."""
    return any(isinstance(outcome, DeadlineExceeded) for outcome in (sent, *received.values()))


def all_late(outcomes: Iterable[Any]) -> bool:
    """True if every replica was late: if they pass a health check, the deadline is too short."""
    return all(isinstance(outcome, DeadlineExceeded) for outcome in outcomes)
