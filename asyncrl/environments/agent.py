"""Environments that are agents written against an OpenAI client: the policy answers their requests, which are recorded.

An agent is `async def agent(base_url: str, api_key: str, task: Task) -> str | None`, or a program (`AgentProgram`). The
reward judges its result; None stands for the text of the last reply.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import shutil
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from asyncrl.config.environments import AgentConfig
from asyncrl.config.recipe import Recipe, trains_branches
from asyncrl.data.chat import Chat
from asyncrl.data.tool_calls import CallParser, parser_for
from asyncrl.environments.agent_program import MAX_ANSWER_BYTES, AgentProgram, addresses, task_json
from asyncrl.environments.agent_session import AgentSession, TurnLimit
from asyncrl.environments.environment import Session, Task, limits_of
from asyncrl.environments.sandboxes import Sandbox, SandboxPool, check_sandbox
from asyncrl.errors import ConfigError, explain
from asyncrl.registry import resolve
from asyncrl.remote.tasks import cancel
from asyncrl.rewards import RewardResult
from asyncrl.types import Trajectory

if TYPE_CHECKING:
    from asyncrl.environments.agent_server import AgentServer

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_CONNECTIONS = 4096
"""Open connections of all agents together. Idle ones are closed first."""

Agent = Callable[[str, str, Task], Awaitable[str | None]]


def load_agent(config: AgentConfig) -> Agent:
    """Raises ConfigError: neither a function nor a command is set, the function cannot be imported or has another form,
    or the program is not on this machine."""
    if config.sandbox.backend != "none":
        check_sandbox(config)
    if config.command:
        asked = f"rollout.agent.command={config.command}"
        if config.sandbox.backend in ("none", "local") and shutil.which(config.command[0]) is None:
            do = "write its path, or install it where the rollouters run"
            raise ConfigError(explain(asked, f"there is no program {config.command[0]} here", do))
        return AgentProgram(config.command, config.max_programs)
    do = "name `package.module:function`, async def agent(base_url, api_key, task)"
    asked = f"rollout.agent.function={config.function}"
    if not config.function:
        raise ConfigError(explain(asked, "environment agent without an agent", do))
    function = resolve("rollout.agent.function", config.function, {})
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(explain(asked, "it is no async function", do))
    try:
        inspect.signature(function).bind("", "", None)
    except TypeError as error:
        raise ConfigError(explain(asked, f"it cannot be called so: {error}", do)) from error
    return function


class AgentEndpoint:
    """Owns the endpoint of the agents, and records the requests of each agent."""

    def __init__(self, recipe: Recipe, chat: Chat, max_turns: TurnLimit) -> None:
        self._config, self._all_branches = recipe.rollout.agent, trains_branches(recipe)
        self._trajectory_timeout_s = recipe.rollout.trajectory_timeout_s
        self._max_turns, self._names_in_bodies = max_turns, recipe.rollout.environment == "nemo_gym"
        self._limits = limits_of(recipe)
        self._parser: CallParser = parser_for(recipe.rollout.tool_use.parser, chat.template)
        self._server: AgentServer | None = None

    async def start(self) -> None:
        """Returns once the endpoint listens. Raises ConfigError, DeadlineExceeded, ProcessDied."""
        from asyncrl.chat.connection_limits import ConnectionLimits, connections_that_fit
        from asyncrl.environments.agent_server import AgentServer

        connections, timeout_s = connections_that_fit(MAX_CONNECTIONS), self._trajectory_timeout_s
        limits = ConnectionLimits(max_connections=connections, response_timeout_s=timeout_s)
        self._server = AgentServer(self._config, limits, names_in_bodies=self._names_in_bodies)
        await self._server.start()

    async def close(self) -> None:
        if self._server is not None:
            await self._server.close()

    async def run(
        self, name: str, session: Session, agent: Callable[[str, str], Awaitable[T]], grace_s: float | None = None
    ) -> tuple[AgentSession, T | None]:
        """The agent's recorded requests and its result; None also if it raised, or was ended, after a limit was
        reached.

        Args:
            name: of the agent, for messages.
            agent: called with the base URL and the key of the trajectory.
            grace_s: the time that it has from there; None: any.
        Raises:
            GenerationError: a generation failed, even if the agent handled the error.
            ValueError: no request of the agent was answered.
            Exception: the agent's error.
        """
        assert self._server is not None, "start comes first"
        every, exact = self._all_branches, self._config.match == "exact"
        recorded = AgentSession(session, self._limits, self._max_turns, self._parser, every, exact)
        with self._server.open(recorded) as key:
            work = asyncio.create_task(_outcome(agent(self._server.url, key)))
            over = asyncio.create_task(recorded.limit_reached.wait())
            try:
                await asyncio.wait({work, over}, return_when=asyncio.FIRST_COMPLETED)
                is_busy = True
                while is_busy and not work.done():  # once more after the last answer of requests below the limit
                    is_busy = recorded.is_busy
                    await asyncio.wait({work}, timeout=grace_s)
                ended = not work.done()
            finally:
                # From here on, requests of tasks that the agent left running are refused.
                recorded.close()
                await cancel(work, over)
        # A failed generation takes precedence over the agent's own error, which it likely caused.
        returned, error = work.result()
        failure = recorded.failure or (None if recorded.limit_reached.is_set() else error)
        if failure is not None:
            failure.add_note(f"The agent {name} {recorded.told}")
            raise failure
        if ended:
            logger.info("the agent %s was ended %g s after a limit", name, grace_s)
        if not recorded.nodes:
            raise ValueError(f"the agent {name} made no request that was answered")
        return recorded, returned


async def _outcome(work: Awaitable[T]) -> tuple[T | None, BaseException | None]:
    """The result or the error: an exit in a task would end the event loop."""
    try:
        return await work, None
    except BaseException as error:  # noqa: BLE001 - its reader raises it
        return None, error


class AgentEnvironment:
    """Runs agents that are functions concurrently in the rollouter's event loop, which they must not block.

    The trajectory is the branch of the agent's last request, plus the others as its branches if all are trained. Its
    parts `agent_requests` and `agent_branches` count both. An agent that raises fails the attempt, unless it had been
    refused a request because of a limit of turns or length: such a trajectory has finish_reason "length".
    """

    def __init__(self, recipe: Recipe, chat: Chat) -> None:
        config = recipe.rollout.agent
        self._agent = load_agent(config)
        self._name, self._grace_s = config.function or str(config.command), config.grace_s
        self._endpoint = AgentEndpoint(recipe, chat, TurnLimit(config.max_turns, "rollout.agent.max_turns"))
        self._pool = None if config.sandbox.backend == "none" else SandboxPool(config)
        self._checks, self._code_decides = bool(config.sandbox.check), recipe.reward.names == ("zero",)

    @property
    def sandboxes(self) -> Mapping[str, int]:
        """As `SandboxPool.counts`."""
        return {} if self._pool is None else self._pool.counts

    async def start(self) -> None:
        """Starts the endpoint. Raises ConfigError, DeadlineExceeded, ProcessDied."""
        await self._endpoint.start()

    async def close(self) -> None:
        if isinstance(self._agent, AgentProgram):
            await self._agent.close()
        if self._pool is not None:
            await self._pool.close()
        await self._endpoint.close()

    async def run(self, task: Task, session: Session) -> Trajectory:
        """Raises what `AgentEndpoint.run` raises; ProcessDied: a sandbox is lost."""
        if self._pool is not None:
            return await self._run_in_sandbox(self._pool, task, session)
        recorded, said = await self._endpoint.run(
            self._name, session, lambda url, key: self._agent(url, key, task), self._grace_s
        )
        result = await session.reward(recorded.judged_text(None if said is None else str(said)), task.row)
        return recorded.trajectory(result)

    async def _run_in_sandbox(self, pool: SandboxPool, task: Task, session: Session) -> Trajectory:
        program = self._agent
        assert isinstance(program, AgentProgram), "check_sandbox has seen it"

        async def said_inside(sandbox: Sandbox, url: str, key: str) -> str | None:
            ended = await sandbox.run(pool.command, task_json(task), addresses(url, key))
            return program.answer(ended.exit_code, ended.stdout[-MAX_ANSWER_BYTES:], ended.stderr)

        async with pool.lease(task.row) as sandbox:
            inside = partial(said_inside, sandbox)
            recorded, said = await self._endpoint.run(self._name, session, inside, self._grace_s)
            ended = await pool.check(sandbox, task.row) if self._checks else None
        if self._checks and self._code_decides:
            passed = float(ended is not None and ended.exit_code == 0)
            return recorded.trajectory(RewardResult(passed, (("correct", passed),)))
        judged = "" if ended is None else ended.stdout.decode(errors="replace")
        judged = judged if self._checks else recorded.judged_text(said)
        return recorded.trajectory(await session.reward(judged, task.row))
