"""NeMo Gym as it runs: its agents ask the policy through its own model server, and its verifiers judge.

Source: nemo-gym 0.4. An agent's server takes a row of a dataset by `POST /run` and answers with a verdict. All servers
have one key, therefore the metadata of a row's `responses_create_params`, which agents pass on, name the trajectory.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import yaml

from asyncrl.config.recipe import Recipe
from asyncrl.config.rollout import RolloutConfig
from asyncrl.data.chat import Chat
from asyncrl.environments.agent import AgentEndpoint
from asyncrl.environments.agent_server import KEY_HEADER
from asyncrl.environments.agent_session import TurnLimit
from asyncrl.environments.environment import Session, Task
from asyncrl.errors import ConfigError, GenerationError, explain
from asyncrl.rewards import RewardResult
from asyncrl.types import Trajectory


def agents_of(rollout: RolloutConfig) -> dict[str, str]:
    """The addresses of the agents' servers by their names, from the head server. Raises ConfigError: it does not
    answer, has no such agent as `rollout.nemo_gym.agent`, or could not reach the endpoint."""
    config = rollout.nemo_gym
    if not rollout.agent.port:
        do = "set rollout.agent.port, and NeMo Gym's policy_base_url=http://HOST:PORT/v1"
        raise ConfigError(explain("rollout.environment=nemo_gym", "its model server asks a fixed address", do))
    asked, do = f"rollout.nemo_gym.head={config.head}", "start NeMo Gym (`gym env start`) before the run"
    try:
        text = httpx.get(f"{config.head}/global_config_dict_yaml", timeout=10).raise_for_status().json()
        servers = dict(yaml.safe_load(text))
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise ConfigError(explain(asked, f"{type(error).__name__}: {error}", do)) from error
    kinds = {name: kinds.get("responses_api_agents") for name, kinds in servers.items() if isinstance(kinds, dict)}
    found = {name: next(iter(agents.values())) for name, agents in kinds.items() if agents}
    if not found or (config.agent and config.agent not in found):
        do = "name one of them in rollout.nemo_gym.agent, or start NeMo Gym with the config of an agent"
        raise ConfigError(explain(f"{asked} with agent={config.agent!r}", f"its agents are {sorted(found)}", do))
    return {name: f"http://{agent['host']}:{agent['port']}" for name, agent in found.items()}


class NemoGymEnvironment:
    """Runs an agent of NeMo Gym for each trajectory. Owns the endpoint; NeMo Gym's servers run already.

    The agent is the row's `agent_ref`, else `rollout.nemo_gym.agent`. The reward is the verdict's; its other numbers
    are parts. An agent that fails after a request was refused because of a limit has reward 0 and finish_reason
    "length".
    """

    def __init__(self, recipe: Recipe, chat: Chat) -> None:
        self._rollout = recipe.rollout
        limit = TurnLimit(self._rollout.nemo_gym.max_turns, "rollout.nemo_gym.max_turns")
        self._endpoint = AgentEndpoint(recipe, chat, limit)
        unlimited = httpx.Limits(max_connections=None, max_keepalive_connections=0)  # one for each trajectory
        self._client = httpx.AsyncClient(timeout=None, limits=unlimited)  # which has its own deadline
        self._agents: dict[str, str] = {}

    async def start(self) -> None:
        """Raises ConfigError, DeadlineExceeded, ProcessDied."""
        await self._endpoint.start()
        self._agents = await asyncio.to_thread(agents_of, self._rollout)

    async def close(self) -> None:
        await self._client.aclose()
        await self._endpoint.close()

    async def run(self, task: Task, session: Session) -> Trajectory:
        """Raises GenerationError: the agent failed, or there is none; as `AgentEndpoint.run`."""
        row = task.row.values()
        name = (row.get("agent_ref") or {}).get("name") or self._rollout.nemo_gym.agent
        recorded, verdict = await self._endpoint.run(name, session, lambda _url, key: self._verdict(name, row, key))
        verdict = {"reward": 0.0} if verdict is None else verdict  # it was ended after a limit
        parts = {k: v for k, v in verdict.items() if k not in {*row, "reward"} and isinstance(v, int | float)}
        return recorded.trajectory(RewardResult(float(verdict["reward"]), tuple(parts.items())))

    async def _verdict(self, name: str, row: dict[str, Any], key: str) -> dict[str, Any]:
        asked, params = f"NeMo Gym's agent {name!r}", row["responses_create_params"]
        if name not in self._agents:
            raise GenerationError(explain(asked, f"the agents are {sorted(self._agents)}", "name one in agent_ref"))
        params = params | {"metadata": (params.get("metadata") or {}) | {KEY_HEADER: key}}
        body = row | {"responses_create_params": params}
        try:
            answer = await self._client.post(f"{self._agents[name]}/run", json=body)
        except httpx.HTTPError as error:
            raise GenerationError(explain(asked, f"{type(error).__name__}: {error}", "see its log")) from error
        if answer.is_error:
            raise GenerationError(explain(asked, f"status {answer.status_code}: {answer.text[:500]}", "see its log"))
        verdict = answer.json()
        if not isinstance(verdict, dict) or not isinstance(verdict.get("reward"), int | float):
            raise GenerationError(explain(asked, f"a verdict without a reward: {answer.text[:500]}", "see its log"))
        return verdict
