"""Checks the servers of `rollout.remote.urls` before a run starts."""

from __future__ import annotations

import asyncio

from asyncrl.config.remote_engine import RemoteEngineConfig
from asyncrl.config.rollout import RolloutConfig
from asyncrl.errors import ConfigError, explain
from asyncrl.inference.remote.server_client import Refused, ServerClient, Unanswered, Unreachable, read_key
from asyncrl.inference.remote.server_facts import ask, require_usable
from asyncrl.types import ModelFacts


def check_servers(rollout: RolloutConfig, facts: ModelFacts) -> None:
    """Asks all servers at the same time whether they can be replicas of this model; changes nothing there.

    Raises ConfigError: the first one that does not answer or cannot be used.
    """
    asyncio.run(_check(rollout.remote, facts))


async def _check(remote: RemoteEngineConfig, facts: ModelFacts) -> None:
    key = read_key(remote.api_key_env)
    checks = (_check_one(url, key, remote, facts) for url in remote.urls)
    for failure in await asyncio.gather(*checks, return_exceptions=True):
        if isinstance(failure, BaseException):
            raise failure


async def _check_one(url: str, key: str | None, remote: RemoteEngineConfig, facts: ModelFacts) -> None:
    client = ServerClient(url, key)
    try:
        require_usable(url, await ask(client, remote), remote, facts)
    except (Unreachable, Unanswered, Refused) as error:
        do = "start the server first, or correct rollout.remote.urls; docs/remote.md has the whole command"
        raise ConfigError(explain(f"{url} as a replica", str(error), do)) from error
    finally:
        await client.close()
