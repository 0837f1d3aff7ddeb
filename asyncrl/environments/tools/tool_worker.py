"""A tool process: `python -m asyncrl.environments.tools.tool_worker`. Answers calls until its standard input ends.

Consumes: frames on the original standard input: `Start`, then `CallFrame`s.
Produces: one `ToolResult` each on the original standard output.
Waits for: the next call. Stops when: that pipe ends, or, on Linux at once, when its parent does.

What a tool prints goes to standard error; what it reads from standard input is empty.
"""

from __future__ import annotations

import inspect
import os
import pickle
import signal
import sys
import traceback
from typing import Any, BinaryIO

from asyncrl.environments.tools import Tool, build_tools
from asyncrl.environments.tools.frames import LENGTH, CallFrame, Start, ToolResult, packed
from asyncrl.errors import ConfigError

MAX_RESULT_CHARS = 1 << 20
_PR_SET_PDEATHSIG = 1


def main() -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    own = os.getpid()
    tools: dict[str, Tool] = {}
    while (frame := _read(requests)) is not None:
        answer = _start(frame, tools) if isinstance(frame, Start) else call(tools, frame)
        if os.getpid() != own:
            os._exit(1)  # a child that a tool forked and that came back here
        answers.write(packed(answer))
        answers.flush()


def _start(frame: Start, tools: dict[str, Tool]) -> ToolResult:
    sys.path[:] = frame.path
    try:
        for tool in build_tools(frame.config):
            start = getattr(tool, "start", None)
            if start is not None:
                start()
            tools[tool.name] = tool
    except ConfigError as error:
        return ToolResult(str(error), failed=True)
    except BaseException:  # noqa: BLE001 - boundary: whatever a tool's start raised is the owner's to report
        return ToolResult(traceback.format_exc()[-8000:], failed=True)
    return ToolResult("")


def call(tools: dict[str, Tool], asked: CallFrame) -> ToolResult:
    """One call; whatever goes wrong is text for the policy."""
    tool = tools.get(asked.tool)
    if tool is None:
        return ToolResult(f"Error: there is no tool {asked.tool!r}; the tools are {', '.join(sorted(tools))}", True)
    try:
        inspect.signature(tool.call).bind(**asked.arguments)
    except TypeError as error:
        return ToolResult(f"Error: {tool.name} takes {_takes(tool)}: {error}", True)
    try:
        result: Any = tool.call(**asked.arguments)
    except BaseException as error:  # noqa: BLE001 - boundary: the policy reads what its call raised
        return ToolResult(f"Error: {type(error).__name__}: {error}"[:MAX_RESULT_CHARS], True)
    return ToolResult(str(result)[:MAX_RESULT_CHARS])


def _takes(tool: Tool) -> str:
    return ", ".join(tool.parameters.get("properties", {})) or "no arguments"


def _read(pipe: BinaryIO) -> Start | CallFrame | None:
    length = pipe.read(LENGTH.size)
    if len(length) < LENGTH.size:
        return None
    return pickle.loads(pipe.read(LENGTH.unpack(length)[0]))


if __name__ == "__main__":
    main()
