"""Which kind of server answers at an address."""

from __future__ import annotations

from asyncrl.config.remote_engine import RemoteEngineConfig
from asyncrl.errors import ConfigError, explain
from asyncrl.inference.remote.dialect import ASK_S, ServerDialect, require_key, require_up
from asyncrl.inference.remote.server_client import Refused, ServerClient
from asyncrl.inference.remote.sglang_dialect import SglangDialect
from asyncrl.inference.remote.sglang_facts import MODEL, ask_sglang
from asyncrl.inference.remote.vllm_dialect import VllmDialect
from asyncrl.inference.remote.vllm_facts import ask_vllm


async def ask(client: ServerClient, remote: RemoteEngineConfig) -> ServerDialect:
    """Asks the server what it is, and for all that a run needs of it; changes nothing there.

    Raises:
        ConfigError: it is a server of neither kind, lacks a route or the extension, or refuses the key.
        Unreachable, Unanswered: it does not answer.
        Refused: it is starting, or its engine is dead.
    """
    told = []
    for path, name in (("/version", "version"), (MODEL, "weight_version")):
        try:
            answer = await client.get(path, timeout_s=ASK_S)
        except Refused as error:
            require_up(error)
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
