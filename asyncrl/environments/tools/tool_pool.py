"""Runs tools in worker processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.config.environments import ToolUseConfig
from asyncrl.environments.tools.tool import ToolResult
from asyncrl.errors import DeadlineExceeded, ProcessDied
from asyncrl.workers.messages import WorkerSpec
from asyncrl.workers.worker_pool import WorkerPool


class ToolPool:
    """Owns the tool processes. Errors of a call become text for the policy. `workers` counts killed and dead
    processes."""

    def __init__(self, config: ToolUseConfig, *, start_timeout_s: float = 60.0) -> None:
        self._timeout_s = config.tool_timeout_s
        self.workers = WorkerPool(
            WorkerSpec(
                name="tool process",
                module="asyncrl.environments.tools.tool_worker",
                labels=tuple(config.tools),
                settings=config,
                asked=f"rollout.tool_use.tools={config.tools}",
                answer=ToolResult,
                advice="make the tool end, or raise rollout.tool_use.tool_timeout_s",
                num_workers=config.tool_workers,
                timeout_s=config.tool_timeout_s,
                start_timeout_s=start_timeout_s,
            )
        )

    async def start(self) -> None:
        """Raises ConfigError: a tool cannot be started there; ProcessDied, DeadlineExceeded."""
        await self.workers.start()

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Raises ProcessDied: no process can be had, or the pool was closed."""
        try:
            return await self.workers.call((name, arguments), f"a call of tool {name}")
        except DeadlineExceeded:
            return ToolResult(f"Error: {name} took more than {self._timeout_s:g} s", failed=True)
        except ProcessDied:
            if self.workers.refuses:
                raise
            return ToolResult(f"Error: {name} ended without a result", failed=True)

    async def close(self) -> None:
        """Ends all processes. Idempotent."""
        await self.workers.close()
