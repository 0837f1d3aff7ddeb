"""Settings of engine remote: servers that run elsewhere, as replicas."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Literal
from urllib.parse import urlsplit

from annotated_types import Ge

from asyncrl.config.checks import section
from asyncrl.config.trainer import TrainerConfig
from asyncrl.config.weights import WeightsConfig
from asyncrl.errors import ConfigError, explain
from asyncrl.ranges import Positive, PositiveInt


class EngineSection:
    """What the sections of all engines say."""

    __slots__ = ()
    default_context = 4096
    max_model_len: int | None
    tensor_parallel_size: int = 1
    gpu_share: float = 1.0
    """Share of a GPU per worker; engines without this key share GPUs evenly if there are fewer than processes."""

    @property
    def context_tokens(self) -> int:
        """`max_model_len`, which a recipe has resolved; `default_context` without a recipe."""
        return self.default_context if self.max_model_len is None else self.max_model_len

    @property
    def num_workers(self) -> int:
        """Processes of one replica that hold weights, each a receiver of every publish."""
        return self.tensor_parallel_size


@section("rollout.remote.")
class RemoteEngineConfig(EngineSection):
    urls: list[str] = field(default_factory=list)
    """Addresses of running servers of vLLM or SGLang, such as http://10.0.0.5:8000. Each is one replica:
    rollout.num_replicas is their number. docs/remote.md says how they are started."""
    weights: Literal["extension", "reload", "native"] = "extension"
    """How a server takes a publish. extension: its workers receive it by weights.transport; asyncrl is installed there,
    and `--worker-extension-cls` names its class. reload: it reads the files of weights.transport=disk with its own
    loader; asyncrl is not needed there, and the loaded weights are not verified. native: vLLM's own sender, in the
    trainer, broadcasts to the server's workers over NCCL, as `--weight-transfer-config` of backend nccl says; asyncrl
    is not needed there, weights.transport is collective, weights.verify off, and parity is judged at every step.
    SGLang's servers support only reload."""
    tensor_parallel_size: PositiveInt = 1
    """Workers of one engine of a server, on one machine or several."""
    data_parallel_size: PositiveInt = 1
    """Engines of one server (vLLM's --data-parallel-size), with or without shared experts."""
    max_model_len: Annotated[int, Ge(2)] | None = None
    """As rollout.torch.max_model_len, but at least 4096 where that takes at least 512; at most that of the servers."""
    max_num_seqs: PositiveInt = 256
    """Concurrent requests to one server; more wait here. Best the servers' own `--max-num-seqs`."""
    api_key_env: str = ""
    """Environment variable that holds the key of the servers, on every machine of the run; empty sends no key."""
    wait_s: Positive = 240.0
    """Longest wait of a replica for its server, at the start and after a loss. At most ray.start_timeout_s."""
    lost_after_s: Positive = 30.0
    """A server without an answer to its health check for this long is lost; a server that refuses connections,
    immediately."""

    def __post_init__(self) -> None:
        for url in self.urls:
            if not _is_address(url):
                found = "no address of a server, or one with a user, a query or a fragment"
                do = "write http://HOST:PORT or https://HOST[:PORT][/PATH]; a key goes into rollout.remote.api_key_env"
                raise ConfigError(explain(f"rollout.remote.urls: {_without_secrets(url)}", found, do))
        twice = sorted({url for url in self.urls if self.urls.count(url) > 1})
        if twice:
            found = "a server is one replica: a second one would change its weights in the middle of a publish"
            do = "name each server once"
            raise ConfigError(explain(f"rollout.remote.urls: {twice[0]} twice", found, do))

    @property
    def decodes_at_once(self) -> int:
        """As of engine torch."""
        return self.max_num_seqs

    @property
    def num_workers(self) -> int:
        """Receivers of a publish in one replica: the workers of its server, or the replica itself."""
        return self.tensor_parallel_size * self.data_parallel_size if self.weights == "extension" else 1


def require_takes_publishes(
    remote: RemoteEngineConfig, weights: WeightsConfig, trainer: TrainerConfig, *, start_timeout_s: float
) -> None:
    """Raises ConfigError: servers cannot take the publishes of the run in the way that was chosen, or the start of a
    replica would end before its wait for the server."""
    if remote.wait_s > start_timeout_s:
        found = f"a start of a replica ends after ray.start_timeout_s={start_timeout_s:g}, whatever it waits for"
        do = f"set rollout.remote.wait_s to at most {start_timeout_s:g}, or raise the other"
        raise ConfigError(explain(f"rollout.remote.wait_s={remote.wait_s:g}", found, do))
    if trainer.lora.rank != 0:
        found = "adapters are merged into the weights that a server was started with, and nobody compares these"
        do = "set trainer.lora.rank=0, or start the replicas yourself (rollout.engine=vllm)"
        raise ConfigError(explain(f"rollout.engine=remote with trainer.lora.rank={trainer.lora.rank}", found, do))
    native = (
        ("weights.transport", weights.transport, "collective", "vLLM's own sender broadcasts over NCCL"),
        ("weights.encoding", weights.encoding, "full", "vLLM's backend nccl takes whole weights, no differences"),
        ("weights.verify", weights.verify, "off", "the servers run nothing that computes digests of their weights"),
        ("trainer.megatron.pipeline_parallel", trainer.layout.pipeline, 1, "a server's workers have one sender"),
        ("trainer.device", trainer.device.partition(":")[0], "cuda", "vLLM's own sender broadcasts over NCCL"),
    )
    place = weights.disk_directory
    own = "the server's own loader reads files"
    reload = (
        ("weights.transport", weights.transport, "disk", own),
        ("weights.disk_directory", place, "/shared/with/the/servers" if "://" in place else place, own),
        ("weights.encoding", weights.encoding, "full", f"{own} of whole weights, no differences"),
    )
    for key, here, needed, found in {"native": native, "reload": reload}.get(remote.weights, ()):
        if here != needed:
            do = f"set {key}={needed}, or rollout.remote.weights=extension"
            raise ConfigError(explain(f"rollout.remote.weights={remote.weights} with {key}={here}", found, do))


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return False
    plain = not (parts.query or parts.fragment or "@" in parts.netloc) and url == url.strip()
    return plain and parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0


def _without_secrets(url: str) -> str:
    """The address without its user part, for messages."""
    before, at, after = url.rpartition("@")
    return f"{before.partition('//')[0]}//...@{after}" if at else url
