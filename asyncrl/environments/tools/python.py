"""Runs the policy's Python in the sandbox."""

from __future__ import annotations

from typing import Any

from asyncrl.workers.sandbox import SandboxLimits, require_protection, run_python

_SHARE_OF_DEADLINE = 0.8
"""Of the call's deadline; what is left is for starting and clearing the sandbox."""


class Python:
    """Each call is a program of its own: nothing is kept between calls, and
    `asyncrl.workers.sandbox` confines it.

    Args:
        timeout_s: deadline of the whole call; the program gets less, so that the policy reads what it had printed.
        allow_basic_sandbox: run it also where less than Landlock and seccomp confines it.
    """

    name = "python"
    description = "Runs a Python program and returns what it prints. Nothing is kept between calls."
    parameters: dict[str, Any] = {  # noqa: RUF012 - a constant
        "type": "object",
        "properties": {"code": {"type": "string", "description": "the program; print what you want to see"}},
        "required": ["code"],
    }

    def __init__(self, timeout_s: float, *, allow_basic_sandbox: bool = False) -> None:
        self._basic_allowed = allow_basic_sandbox
        wall_s = _SHARE_OF_DEADLINE * timeout_s
        self._limits = SandboxLimits(timeout_s=wall_s, cpu_s=max(1, round(wall_s)))

    def start(self) -> None:
        """Raises ConfigError: programs would be confined by less than the recipe allows."""
        require_protection("rollout.tool_use", basic_allowed=self._basic_allowed)

    def call(self, code: str) -> str:
        """What it printed. Raises RuntimeError with its standard error where it failed, and the limit that it met."""
        ended = run_python(str(code), limits=self._limits)
        if ended.succeeded:
            return ended.stdout.rstrip() or "(it printed nothing)"
        why = f"it met its limit of {ended.limit}" if ended.limit else f"exit code {ended.exit_code}"
        raise RuntimeError("\n".join(part for part in (why, ended.stdout.rstrip(), ended.stderr.rstrip()) if part))
