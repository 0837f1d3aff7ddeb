"""A reward process: `python -m asyncrl.rewards.reward_worker NAME...`. Answers requests until its standard input ends.
The names are for people who look at the list of processes.

Consumes: frames on the original standard input: first (`sys.path` of the parent, RewardConfig), then (response, row),
all pickled.
Produces: one frame each on the original standard output: `Ready`, `Scored` or `Raised` of asyncrl.rewards.messages.
Waits for: the next request. Stops when: that pipe ends, or, on Linux at once, when the parent does.

What the reward prints goes to standard error; what it reads from standard input is empty.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import traceback
from typing import BinaryIO

from asyncrl.config.rewards import RewardConfig
from asyncrl.errors import ConfigError, explain
from asyncrl.rewards import RewardFunction, build_reward
from asyncrl.rewards.messages import LENGTH, Answer, Raised, Ready, Scored

MAX_ERROR_BYTES = 1 << 20
MAX_TRACE_CHARS = 8000
_PR_SET_PDEATHSIG = 1


def main() -> None:
    requests, answers = _take_pipes()
    _die_with_parent()
    own = os.getpid()
    first = _read(requests)
    if first is None:
        return
    sys.path[:], config = pickle.loads(first)
    built = _build(config)
    _write(answers, built if isinstance(built, Raised) else Ready())
    while not isinstance(built, Raised) and (request := _read(requests)) is not None:
        answer = _answer(built, request)
        if os.getpid() != own:
            os._exit(1)  # a child that the reward forked and that came back here: the requests are not its own
        _write(answers, answer)


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """The pipes to the parent, out of reach of what the reward prints and of processes that it starts."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return requests, answers


def _die_with_parent() -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _build(config: RewardConfig) -> RewardFunction | Raised:
    try:
        try:
            return build_reward(config)
        except ConfigError:
            raise
        except BaseException as error:
            found = f"importing it raised {traceback.format_exception_only(error)[-1].strip()}"
            raise ConfigError(explain(config.asked, found, "make the module importable")) from error
    except ConfigError as error:
        return _raised(error)


def _answer(reward: RewardFunction, request: bytes) -> Scored | Raised:
    try:
        response, row = pickle.loads(request)
        result = reward(response, row)
        return Scored(float(result.reward), tuple((str(name), float(value)) for name, value in result.parts))
    except BaseException as error:  # noqa: BLE001 - boundary: whatever the reward raised is the caller's to handle
        return _raised(error)


def _raised(error: BaseException) -> Raised:
    trace = "".join(traceback.format_exception(error))[-MAX_TRACE_CHARS:]
    summary = traceback.format_exception_only(error)[-1].strip()[:MAX_TRACE_CHARS]
    pickled = None
    if isinstance(error, Exception):
        try:
            pickled = pickle.dumps(error)
        except Exception:  # noqa: BLE001 - any exception may come of pickling one that a user defined
            pickled = None
    return Raised(pickled if pickled is not None and len(pickled) <= MAX_ERROR_BYTES else None, summary, trace)


def _read(pipe: BinaryIO) -> bytes | None:
    """The next frame; None at the end."""
    length = pipe.read(LENGTH.size)
    return pipe.read(LENGTH.unpack(length)[0]) if len(length) == LENGTH.size else None


def _write(pipe: BinaryIO, answer: Answer) -> None:
    frame = pickle.dumps(answer)
    pipe.write(LENGTH.pack(len(frame)) + frame)
    pipe.flush()


if __name__ == "__main__":
    main()
