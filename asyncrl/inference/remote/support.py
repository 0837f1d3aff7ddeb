"""Checks the servers of `rollout.remote.urls` before a run starts."""

from __future__ import annotations

import asyncio

from asyncrl.config.rollout import RolloutConfig
from asyncrl.errors import ConfigError, explain
from asyncrl.inference.remote.detect import ask
from asyncrl.inference.remote.dialect import NO_FILTERS
from asyncrl.inference.remote.server_client import Refused, ServerClient, Unanswered, Unreachable, read_key
from asyncrl.types import ModelFacts


def check_servers(rollout: RolloutConfig, facts: ModelFacts) -> None:
    """Asks all servers at the same time whether they can be replicas of this model; changes nothing there.

    Raises ConfigError: the first one that does not answer or cannot be used.
    """
    asyncio.run(_check(rollout, facts))


async def _check(rollout: RolloutConfig, facts: ModelFacts) -> None:
    key = read_key(rollout.remote.api_key_env)
    checks = (_check_one(url, key, rollout, facts) for url in rollout.remote.urls)
    for failure in await asyncio.gather(*checks, return_exceptions=True):
        if isinstance(failure, BaseException):
            raise failure


async def _check_one(url: str, key: str | None, rollout: RolloutConfig, facts: ModelFacts) -> None:
    client = ServerClient(url, key)
    try:
        dialect = await ask(client, rollout.remote)
        dialect.require_usable(url, rollout.remote, facts)
        sampling = rollout.sampling
        if not dialect.filters and (sampling.top_p < 1 or sampling.top_k):
            asked = f"{url} with rollout.sampling.top_p={sampling.top_p:g} and top_k={sampling.top_k}"
            raise ConfigError(explain(asked, *NO_FILTERS))
    except (Unreachable, Unanswered, Refused) as error:
        do = "start the server first, or correct rollout.remote.urls; docs/remote.md has the whole command"
        raise ConfigError(explain(f"{url} as a replica", str(error), do)) from error
    finally:
        await client.close()
