"""The loop of a worker process; imports only the standard library and this package.

Consumes: frames on the original standard input: `Start`, then requests.
Produces: one frame each on the original standard output: an answer or `Raised`.
Waits for: the next request. Stops when: the pipe ends, or, on Linux immediately, when the parent does.

The called code's prints go to standard error; its standard input is empty.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, BinaryIO

from asyncrl.errors import ConfigError, explain
from asyncrl.workers.messages import LENGTH, Raised, Start, packed
from asyncrl.workers.sandbox.confine import die_with_parent

MAX_ERROR_BYTES = 1 << 20
MAX_TRACE_CHARS = 8000


def serve(build: Callable[[Any], Callable[[Any], object]]) -> None:
    """Builds the function from the settings of the first frame, then answers requests with it."""
    requests, answers = _take_pipes()
    die_with_parent()
    own = os.getpid()
    function: Callable[[Any], object] = _nothing
    while (frame := _read(requests)) is not None:
        began = time.perf_counter()
        try:
            request = pickle.loads(frame)
            if isinstance(request, Start):
                function, result = _build(build, request), None
            else:
                result = function(request)
            answer = packed((time.perf_counter() - began, result))
        except BaseException as error:  # noqa: BLE001 - boundary: whatever the code raised is the caller's to handle
            answer = packed((time.perf_counter() - began, _raised(error)))
        if os.getpid() != own:
            os._exit(1)  # a fork by the called code returned here: the requests belong to its parent
        answers.write(answer)
        answers.flush()


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """The pipes to the parent, moved away from descriptors 0 and 1, which prints and child processes use."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return requests, answers


def _build(build: Callable[[Any], Callable[[Any], object]], start: Start) -> Callable[[Any], object]:
    sys.path[:] = start.path
    try:
        return build(start.settings)
    except ConfigError:
        raise
    except BaseException as error:
        found = f"starting it raised {traceback.format_exception_only(error)[-1].strip()}"
        do = "correct its module or its settings; the traceback follows"
        raise ConfigError(explain(start.asked, found, do)) from error


def _raised(error: BaseException) -> Raised:
    trace = "".join(traceback.format_exception(error))[-MAX_TRACE_CHARS:]
    summary = traceback.format_exception_only(error)[-1].strip()[:MAX_TRACE_CHARS]
    pickled = None
    if isinstance(error, Exception):
        with suppress(Exception):  # pickling runs code of the user
            pickled = pickle.dumps(error)
    return Raised(pickled if pickled is not None and len(pickled) <= MAX_ERROR_BYTES else None, summary, trace)


def _nothing(request: object) -> object:
    raise RuntimeError(f"asked before the first frame: {request!r}")


def _read(pipe: BinaryIO) -> bytes | None:
    """The next frame; None at the end."""
    length = pipe.read(LENGTH.size)
    return pipe.read(LENGTH.unpack(length)[0]) if len(length) == LENGTH.size else None
