"""Checks the servers of `rollout.remote.urls` before a run starts."""

from __future__ import annotations

import asyncio

from asyncrl.config.remote_engine import RemoteEngineConfig
from asyncrl.config.rollout import RolloutConfig
from asyncrl.errors import ConfigError, explain
from asyncrl.inference.remote.dialect import ASK_S, NO_FILTERS, require_key
from asyncrl.inference.remote.server_client import Refused, ServerClient, Unanswered, Unreachable, read_key
from asyncrl.inference.remote.sglang_dialect import SglangDialect
from asyncrl.inference.remote.sglang_facts import MODEL, ask_sglang
from asyncrl.inference.remote.vllm_dialect import VllmDialect
from asyncrl.inference.remote.vllm_facts import ask_vllm
from asyncrl.types import ModelFacts

ServerDialect = VllmDialect | SglangDialect


def check_servers(rollout: RolloutConfig, facts: ModelFacts) -> None:
    """Checks concurrently that all servers can be replicas of this model; read-only.

    Raises ConfigError for the first server that does not answer or cannot be used.
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


# Detection of the kind of server.


async def ask(client: ServerClient, remote: RemoteEngineConfig) -> ServerDialect:
    """Detects the kind of server and asks for its facts; read-only.

    Raises:
        ConfigError: neither vLLM nor SGLang, a missing route or extension, or a refused key.
        Unreachable, Unanswered: no answer.
        Refused: the server is starting, or its engine is dead.
    """
    told = []
    # The first path that answers with its key decides.
    for path, name in (("/version", "version"), (MODEL, "weight_version")):
        try:
            answer = await client.get(path, timeout_s=ASK_S)
        except Refused as error:
            require_key(client.url, "a server", path, error)
            told.append(str(error))
            continue
        if not isinstance(answer, dict) or name not in answer:
            told.append(f"{path} answers {str(answer)[:200]}")
        elif path == MODEL:
            return SglangDialect(await ask_sglang(client, answer))
        else:
            return VllmDialect(await ask_vllm(client, remote, str(answer["version"])))
    do = "name the address of `vllm serve` or of `python -m sglang.launch_server`; other servers are not used"
    raise ConfigError(explain(f"{client.url} as a server of vLLM or SGLang", "; ".join(told), do))
