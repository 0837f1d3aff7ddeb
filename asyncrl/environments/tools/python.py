"""Runs the policy's Python in the sandbox."""

from __future__ import annotations

from asyncrl.environments.tools.tool import one_text
from asyncrl.workers.sandbox import SandboxLimits, require_protection, run_python

_SHARE_OF_DEADLINE = 0.8
"""Share of the call's deadline for the program; the rest is for starting and clearing the sandbox."""


class Python:
    """Each call is a separate program without shared state, confined by `asyncrl.workers.sandbox`.

    Args:
        timeout_s: deadline of the whole call. The program gets less, so that the policy can read its output.
        allow_basic_sandbox: run even if the sandbox is weaker than Landlock and seccomp.
    """

    name = "python"
    description = "Runs a Python program and returns what it prints. Nothing is kept between calls."
    parameters = one_text("code", "the program; print what you want to see")

    def __init__(self, timeout_s: float, *, allow_basic_sandbox: bool = False) -> None:
        self._basic_allowed = allow_basic_sandbox
        wall_s = _SHARE_OF_DEADLINE * timeout_s
        self._limits = SandboxLimits(timeout_s=wall_s, cpu_s=max(1, round(wall_s)))

    def start(self) -> None:
        """Raises ConfigError: the sandbox is weaker than the recipe allows."""
        require_protection("rollout.tool_use", basic_allowed=self._basic_allowed)

    def call(self, code: str) -> str:
        """The program's output. Raises RuntimeError with its standard error if it failed, and the limit it exceeded."""
        ended = run_python(str(code), limits=self._limits)
        if ended.succeeded:
            return ended.stdout.rstrip() or "(it printed nothing)"
        why = f"it met its limit of {ended.limit}" if ended.limit else f"exit code {ended.exit_code}"
        raise RuntimeError("\n".join(part for part in (why, ended.stdout.rstrip(), ended.stderr.rstrip()) if part))
