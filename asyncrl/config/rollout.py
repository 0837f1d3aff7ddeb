from __future__ import annotations

import math
from dataclasses import field, replace
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from asyncrl.config.checks import require_device, require_stop_text, require_temperature, section
from asyncrl.config.environments import (
    AgentConfig,
    GymnasiumConfig,
    InterleavedConfig,
    NemoGymConfig,
    OpenEnvConfig,
    ToolUseConfig,
    VerifiersConfig,
)
from asyncrl.config.remote_engine import EngineSection, RemoteEngineConfig
from asyncrl.config.serving import ServeSection
from asyncrl.config.trainer import TrainerConfig
from asyncrl.errors import ConfigError, explain
from asyncrl.ranges import NonNegativeInt, Positive, PositiveInt, PositiveShare, Share


@section("rollout.sampling.")
class SamplingConfig:
    temperature: float = 1.0
    """0 is greedy."""
    top_p: PositiveShare = 1.0
    """Sample from the likeliest tokens that together have this probability; 1 keeps all. The trainer does not filter,
    so below 1 the ratio compares two different distributions, unless keep_sets is set."""
    top_k: NonNegativeInt = 0
    """Sample from this many likeliest tokens; 0 keeps the whole vocabulary. As for top_p, the trainer does not
    filter."""
    keep_sets: bool = False
    """With top_k: each sampled token carries the token set that top_k and top_p kept (4 top_k bytes), and the trainer
    normalises over this set. Engine torch, backend fsdp."""
    max_response_tokens: PositiveInt = 256
    """Tokens of one response, over all its segments."""
    stop: list[str] = field(default_factory=list)
    """Texts that end a response, in addition to the end-of-sequence tokens. The response ends with the token that
    completes a text; later tokens are dropped. A special token, such as `<|eot_id|>`, ends it only as a token."""

    def __post_init__(self) -> None:
        for text in self.stop:
            require_stop_text("rollout.sampling.stop", text)
        require_temperature("rollout.sampling.temperature", self.temperature)
        if self.keep_sets and (self.top_k <= 0 or self.temperature <= 0):
            asked = f"rollout.sampling.keep_sets=true with top_k={self.top_k}, temperature={self.temperature:g}"
            found = "without top_k nothing bounds the set of a token, and a greedy token has none"
            do = "set top_k (64 to 256 keep nearly all that top_p keeps) and a temperature above 0, or keep_sets=false"
            raise ConfigError(explain(asked, found, do))


Quantization = Literal[
    "fp8_per_tensor", "fp8_per_block", "fp8_per_channel", "mxfp8", "mxfp4", "int8_per_channel_weight_only",
    "nvfp4_per_token",
]  # fmt: skip
DEFAULT_MEMORY_SHARE = 0.85
"""Share of its part of a GPU's memory that a replica takes; the rest covers memory that its engine does not count."""


def _check_gpu_share(section: str, config: VllmEngineConfig | SglangEngineConfig, memory_key: str) -> None:
    """Checks an engine's section for a GPU shared with a trainer rank."""
    share, memory = config.gpu_share, getattr(config, memory_key)
    if share == 1:
        return
    if not 0.05 <= share <= 0.95:
        found = "a trainer rank takes the rest of the GPU, and neither part works with less than a twentieth"
        do = f"set {section}.gpu_share between 0.05 and 0.95, or to 1 for a GPU of its own"
        raise ConfigError(explain(f"{section}.gpu_share={share:g}", found, do))
    if config.tensor_parallel_size != 1:
        asked = f"{section}.gpu_share={share:g} with {section}.tensor_parallel_size={config.tensor_parallel_size}"
        do = f"set {section}.tensor_parallel_size=1, or {section}.gpu_share=1"
        raise ConfigError(explain(asked, "a replica shares one GPU only", do))
    if memory is not None and memory > share:
        found = "the replica would take memory of the trainer rank on its GPU"
        do = f"set {section}.{memory_key} to {share:g} or less, or leave it out"
        raise ConfigError(explain(f"{section}.{memory_key}={memory} with {section}.gpu_share={share:g}", found, do))


@section("rollout.torch.")
class TorchEngineConfig(EngineSection):
    default_context = 512
    num_slots: PositiveInt = 64
    """Requests that one replica decodes concurrently; more wait in its queue."""
    max_model_len: Annotated[int, Ge(2)] | None = None
    """Longest prompt plus response, in tokens. None takes data.max_prompt_tokens plus the longest response of a
    trajectory (all turns together). For agents and custom environments, which write their own prompts, it takes at
    least 512."""
    chunk_tokens: PositiveInt = 16
    """Tokens per streamed chunk. A dying replica loses, per request, the chunk in progress and the uncollected
    chunks."""
    device: str = "auto"
    """auto takes cuda if available."""
    num_threads: PositiveInt = 1
    """CPU threads of one replica. More pay off for models larger than the caches."""

    def __post_init__(self) -> None:
        require_device("rollout.torch.device", self.device)

    @property
    def decodes_at_once(self) -> int:
        """Requests that one replica decodes concurrently; more wait."""
        return self.num_slots


OWN_ENGINE_ARGS = frozenset([
    "model", "tokenizer", "revision", "trust_remote_code", "dtype", "load_format", "seed", "tensor_parallel_size",
    "distributed_executor_backend", "max_model_len", "max_num_seqs", "max_num_batched_tokens",
    "enable_chunked_prefill", "gpu_memory_utilization", "kv_cache_memory_bytes", "enable_prefix_caching",
    "stream_interval", "enforce_eager", "enable_sleep_mode", "skip_tokenizer_init", "generation_config",
    "override_generation_config", "logprobs_mode", "max_logprobs", "worker_cls", "worker_extension_cls",
    "weight_transfer_config", "additional_config", "pipeline_parallel_size",
    "decode_context_parallel_size", "nnodes", "enable_lora", "runner", "convert",
    "kv_transfer_config", "disable_log_stats", "prefill_context_parallel_size", "node_rank", "model_weights",
    "quantization", "enable_return_routed_experts", "aux_output_config", "language_model_only",
])  # fmt: skip
"""Arguments of vLLM that the adapter sets, or that it does not work with, as with all names in `data_parallel...` and
`spec...`."""


@section("rollout.vllm.")
class VllmEngineConfig(EngineSection):
    tensor_parallel_size: PositiveInt = 1
    """GPUs of one replica."""
    max_model_len: Annotated[int, Ge(2)] | None = None
    """As rollout.torch.max_model_len, but at least 4096 where that takes at least 512."""
    max_num_seqs: PositiveInt = 256
    """Requests that one replica decodes concurrently. If it is not set, the policy's replicas on GPUs of known memory
    take up to 1024: as many sequences of half the longest length as fit into the KV cache."""
    max_num_batched_tokens: PositiveInt | None = None
    """Tokens that one step computes, prompts and responses together; None leaves it to vLLM."""
    gpu_share: PositiveShare = 1.0
    """Below 1: each replica shares one GPU with a trainer rank, which takes the rest. Needs tensor_parallel_size=1 and
    weights.transport=ipc, or disk."""
    gpu_memory_utilization: PositiveShare | None = None
    """Share of the GPU's memory for vLLM, at most gpu_share. None takes 0.85 of gpu_share."""
    kv_cache_memory_bytes: PositiveInt | None = None
    """Memory of the KV cache per worker; None takes what gpu_memory_utilization leaves, on a CPU twice what
    max_num_seqs requests need, at most 1 GiB."""
    quantization: Quantization | None = None
    """How vLLM quantises weights that it loads, at its start and in every publish; publishes are unquantised. Needs a
    model.inference_dtype of 16 bits. int8_... and nvfp4_...: experts only. None: not at all."""
    enable_prefix_caching: bool = True
    """Keep the KV cache of prompts for later requests with the same prefix, until the weights change."""
    stream_interval: PositiveInt = 8
    """Tokens that are streamed together. A dying replica loses the tokens that it has not streamed."""
    enforce_eager: bool = False
    """Skip CUDA graphs and torch.compile."""
    enable_sleep_mode: bool = False
    """Let the engine release its GPU memory while it is paused. Not on a CPU. placement=colocated sets it."""
    record_experts: bool = False
    """Mixtures of experts: report the routers' choices per token. On GPUs, with enable_prefix_caching.
    trainer.router_replay=rollout sets it."""
    structured_outputs: bool = False
    """Guided decoding for requests with a JSON schema; vLLM then loads the tokenizer. asyncrl-serve sets it."""
    max_logprobs: PositiveInt = 20
    """Tokens per place whose log-probabilities a request may ask for. A teacher's is raised to
    algorithm.distillation.top_k."""
    engine_args: dict[str, Any] = field(default_factory=dict)
    """Other arguments of vLLM's AsyncEngineArgs, by their names in Python, such as kv_cache_dtype or
    enable_expert_parallel."""

    def __post_init__(self) -> None:
        _check_gpu_share("rollout.vllm", self, "gpu_memory_utilization")
        own = sorted(n for n in self.engine_args if n in OWN_ENGINE_ARGS or n.startswith(("data_parallel", "spec")))
        if own:
            found = "asyncrl sets this argument of vLLM itself, or does not work with it"
            do = (
                "remove it; tensor_parallel_size, max_model_len and the others that matter are keys of rollout.vllm; "
                "engines with data parallelism, or on several nodes, are servers of rollout.engine=remote"
            )
            raise ConfigError(explain(f"rollout.vllm.engine_args.{own[0]}", found, do))

    def check_dtype(self, dtype: str, *, key: str, dtype_key: str) -> None:
        """Raises ConfigError: weights of this dtype cannot be quantised. `key`: of this section; `dtype_key`: of the
        dtype."""
        if self.quantization is not None and dtype == "float32":
            found = "vLLM quantises 16 bits only"
            do = f"set {dtype_key}=bfloat16, or leave the quantisation out"
            raise ConfigError(explain(f"{key}.quantization={self.quantization} with {dtype_key}=float32", found, do))

    @property
    def decodes_at_once(self) -> int:
        """As of engine torch."""
        return self.max_num_seqs

    @property
    def memory_share(self) -> float:
        """`gpu_memory_utilization`, set or derived."""
        share = self.gpu_memory_utilization
        return DEFAULT_MEMORY_SHARE * self.gpu_share if share is None else share


OWN_SERVER_ARGS = frozenset([
    "model_path", "revision", "trust_remote_code", "dtype", "load_format", "random_seed", "tp_size",
    "context_length", "max_running_requests", "max_total_tokens", "mem_fraction_static", "stream_interval",
    "disable_radix_cache", "disable_overlap_schedule", "disable_cuda_graph", "enable_memory_saver",
    "enable_weights_cpu_backup", "skip_tokenizer_init", "incremental_streaming_output",
    "enable_custom_logit_processor", "custom_weight_loader", "dp_size", "pp_size", "nnodes",
    "allow_auto_truncate", "disaggregation_mode", "enable_mixed_chunk", "preferred_sampling_params",
    "tokenizer_worker_num", "enable_return_routed_experts",
])  # fmt: skip
"""Arguments of SGLang that the adapter sets, or that it does not work with, as with all names in `speculative...`."""


@section("rollout.sglang.")
class SglangEngineConfig(EngineSection):
    tensor_parallel_size: PositiveInt = 1
    """GPUs of one replica."""
    max_model_len: Annotated[int, Ge(2)] | None = None
    """As rollout.torch.max_model_len; at least 4096 instead of 512."""
    max_running_requests: PositiveInt = 256
    """Requests that one replica decodes concurrently."""
    gpu_share: PositiveShare = 1.0
    """As rollout.vllm.gpu_share."""
    mem_fraction_static: PositiveShare | None = None
    """Share of the GPU's memory for weights and KV cache, at most gpu_share. None leaves it to SGLang, and on a shared
    GPU takes 0.85 of gpu_share."""
    max_total_tokens: PositiveInt | None = None
    """Tokens that the KV cache holds; None takes what mem_fraction_static leaves, on a CPU 65,536."""
    stream_interval: PositiveInt = 8
    """Tokens that are streamed together. A dying replica loses the tokens that it has not streamed.
    rollout.interrupt=keep needs 1."""
    disable_radix_cache: bool = False
    """Keep no KV cache of prompts for later requests with the same prefix. The cache is valid for one set of
    weights."""
    disable_overlap_schedule: bool = False
    """Prepare no step before the results of the last one. Under rollout.interrupt=keep, requests then continue with
    their KV cache; otherwise SGLang computes it again with the new weights. Always so on a CPU."""
    disable_cuda_graph: bool = False
    """Skip CUDA graphs."""
    enable_memory_saver: bool = False
    """Let the engine release its GPU memory while it is paused. Not on a CPU. placement=colocated sets it."""
    record_experts: bool = False
    """Mixtures of experts: report the routers' choices per token. The tokens of a response then arrive at its
    end, so those of a replica that dies are lost. trainer.router_replay=rollout sets it, and disable_overlap_schedule
    with rollout.interrupt=keep."""
    server_args: dict[str, Any] = field(default_factory=dict)
    """Other arguments of SGLang's ServerArgs, by their names in Python, such as attention_backend or ep_size."""

    def __post_init__(self) -> None:
        _check_gpu_share("rollout.sglang", self, "mem_fraction_static")
        own = sorted(name for name in self.server_args if name in OWN_SERVER_ARGS or name.startswith("speculative"))
        if own:
            found = "asyncrl sets this argument of SGLang itself, or does not work with it"
            do = "remove it; tp_size, context_length and the others that matter are keys of rollout.sglang"
            raise ConfigError(explain(f"rollout.sglang.server_args.{own[0]}", found, do))

    @property
    def decodes_at_once(self) -> int:
        """As of engine torch."""
        return self.max_running_requests

    @property
    def memory_share(self) -> float | None:
        """`mem_fraction_static`, set or derived; None leaves it to SGLang."""
        if self.mem_fraction_static is None and self.gpu_share < 1:
            return DEFAULT_MEMORY_SHARE * self.gpu_share
        return self.mem_fraction_static


MOST_REPLICAS = 10_000
"""No cluster has room for so many; a larger number is a slip of the pen."""
NumReplicas = Annotated[int, Ge(1), Le(MOST_REPLICAS)]
EngineConfig = TorchEngineConfig | VllmEngineConfig | SglangEngineConfig | RemoteEngineConfig


@section("rollout.")
class RolloutConfig:
    num_replicas: NumReplicas = 2
    """Copies of the policy that generate; one Ray actor each. Their places are reserved for the whole run."""
    max_replicas: NumReplicas | None = None
    """Largest number of replicas, at least num_replicas. Replicas beyond num_replicas join during training, each once a
    node has room. None: num_replicas, until asyncrl-scale asks for more."""
    min_replicas: PositiveInt | None = None
    """Replicas that a start needs. Other replicas that fail to start are replaced while these work, and given up after
    three tries. None: three quarters of num_replicas, rounded up."""
    engine: Literal["torch", "vllm", "sglang", "remote"] = "torch"
    """torch: the embedded engine, which needs no other package. vllm, sglang: for models of real size; each needs its
    package. remote: running servers of vLLM or SGLang."""
    torch: TorchEngineConfig = field(default_factory=TorchEngineConfig)
    """Settings of engine torch."""
    vllm: VllmEngineConfig = field(default_factory=VllmEngineConfig)
    """Settings of engine vllm."""
    sglang: SglangEngineConfig = field(default_factory=SglangEngineConfig)
    """Settings of engine sglang."""
    remote: RemoteEngineConfig = field(default_factory=RemoteEngineConfig)
    """Settings of engine remote."""
    interrupt: Literal["abort_resume", "keep", "drain"] = "abort_resume"
    """How a publish treats generations in flight. Modes sync and one_step_off always drain; one_step_off with
    placement=colocated is as abort_resume."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """How the tokens of a rollout are sampled."""
    environment: str = "single_turn"
    """A name from asyncrl.environments, or custom `package.module:Name`."""
    tool_use: ToolUseConfig = field(default_factory=ToolUseConfig)
    """Settings of environment tool_use, and the tools of interleaved_tool_use."""
    interleaved_tool_use: InterleavedConfig = field(default_factory=InterleavedConfig)
    """How calls and results are written in environment interleaved_tool_use."""
    agent: AgentConfig = field(default_factory=AgentConfig)
    """Settings of environment agent."""
    gymnasium: GymnasiumConfig = field(default_factory=GymnasiumConfig)
    """Settings of environment gymnasium."""
    openenv: OpenEnvConfig = field(default_factory=OpenEnvConfig)
    """Settings of environment openenv."""
    verifiers: VerifiersConfig = field(default_factory=VerifiersConfig)
    """Settings of environment verifiers."""
    nemo_gym: NemoGymConfig = field(default_factory=NemoGymConfig)
    """Settings of environment nemo_gym."""
    serve: ServeSection = field(default_factory=ServeSection)
    """An OpenAI-compatible address of the replicas during the run, for external clients."""
    max_attempts: PositiveInt = 3
    """Attempts at a group whose generation, environment or reward raises, before it ends `failed`."""
    max_failed_fraction: Share = 0.1
    """Largest share of `failed` groups among the last failed_window ended groups; above it the run stops."""
    failed_window: PositiveInt = 256
    """Number of last ended groups over which the fraction is computed; it is checked from 32 groups on."""
    gate_timeout_s: Positive = 300.0
    """Longest wait of a request for a replica's first committed version, or for the end of a publish."""
    request_timeout_s: Positive = 1800.0
    """Longest time for one response over all its attempts. Waiting for a place at a replica does not count while the
    replica streams other responses of the same rollouter, up to four times this long; a replica that streams nothing
    for this long fails its waiting requests."""
    trajectory_timeout_s: Positive = 3600.0
    """Longest time for one trajectory, generation included; the attempt then fails. At least request_timeout_s. Waiting
    for a place at a replica does not count, except for answers of environment agent's endpoint, which have the same
    limit."""
    poll_interval_s: Positive | None = None
    """Shortest time between two collections of streamed tokens from a replica. None takes 0.05, or 0.005 for
    trajectories of several turns (every environment except single_turn), whose turns wait for each other. It grows with
    the busy replicas, so that collections take at most a twentieth of a core. Tokens of an unfinished response are
    collected every 40 intervals, at least every two seconds."""
    num_rollouters: PositiveInt = 1
    """Processes that run environments, each with a share of the groups and replicas and its own reward processes. One
    serves about 200 replicas with 64 requests each; if there are more rollouters than replicas, they share replicas."""

    def __post_init__(self) -> None:
        if self.environment == "interleaved_tool_use":
            self.interleaved_tool_use.require_apart(self.sampling.stop)
        servers = len(self.remote.urls)
        if self.engine == "remote" and servers != self.num_replicas:
            asked = f"rollout.engine=remote with rollout.num_replicas={self.num_replicas}"
            found = f"rollout.remote.urls names {servers} server(s), and each is one replica"
            do = f"set rollout.num_replicas={servers}" if servers else "set rollout.remote.urls=[http://HOST:PORT]"
            raise ConfigError(explain(asked, found, do))
        if self.engine == "sglang" and self.interrupt == "keep" and self.sglang.stream_interval != 1:
            asked = f"rollout.interrupt=keep with rollout.sglang.stream_interval={self.sglang.stream_interval}"
            found = "tokens that SGLang has not streamed when a publish comes could not be told from later ones"
            do = "set rollout.sglang.stream_interval=1, or rollout.interrupt=abort_resume"
            raise ConfigError(explain(asked, found, do))
        if self.num_rollouters != 1 and self.agent.port:
            asked = f"rollout.agent.port={self.agent.port} with rollout.num_rollouters={self.num_rollouters}"
            do = "leave rollout.agent.port out"
            raise ConfigError(explain(asked, "rollouters of one machine cannot share a port", do))
        if self.num_rollouters != 1 and self.agent.advertise and "{port}" not in self.agent.advertise:
            asked = f"rollout.agent.advertise={self.agent.advertise} with rollout.num_rollouters={self.num_rollouters}"
            found = "each rollouter has an endpoint of its own, and knows only the keys of its trajectories"
            raise ConfigError(explain(asked, found, "write {host} and {port} in it"))
        if self.trajectory_timeout_s < self.request_timeout_s:
            found = f"one response of a trajectory alone may take rollout.request_timeout_s={self.request_timeout_s:g}"
            do = f"set rollout.trajectory_timeout_s to at least {self.request_timeout_s:g}, or lower the other"
            raise ConfigError(explain(f"rollout.trajectory_timeout_s={self.trajectory_timeout_s:g}", found, do))

        if self.start_quorum > self.num_replicas:
            asked = f"rollout.min_replicas={self.min_replicas} of rollout.num_replicas={self.num_replicas}"
            do = f"set rollout.min_replicas to at most {self.num_replicas}, or leave it out"
            raise ConfigError(explain(asked, "no start could reach that", do))

        if self.max_replicas is not None and self.max_replicas < self.num_replicas:
            asked = f"rollout.max_replicas={self.max_replicas} with rollout.num_replicas={self.num_replicas}"
            found = "the places of rollout.num_replicas replicas are reserved for the whole run"
            do = f"raise rollout.max_replicas to {self.num_replicas} or more, or lower rollout.num_replicas"
            raise ConfigError(explain(asked, found, do))

        if self.max_replicas not in (None, self.num_replicas) and self.engine == "remote":
            asked = f"rollout.max_replicas={self.max_replicas} with rollout.engine=remote"
            found = f"rollout.remote.urls names the {self.num_replicas} servers that are replicas; no other can join"
            raise ConfigError(explain(asked, found, "leave rollout.max_replicas out"))

    @property
    def stop(self) -> tuple[str, ...]:
        """Texts at which a replica stops: ends of a response, and the closing text of a call."""
        interleaved = self.environment == "interleaved_tool_use"
        return (*self.sampling.stop, *([self.interleaved_tool_use.close] if interleaved else []))

    @property
    def most_replicas(self) -> int:
        """Largest number of replicas by the recipe alone."""
        return max(self.num_replicas, self.max_replicas or 0)

    @property
    def start_quorum(self) -> int:
        """`min_replicas`, set or derived."""
        return math.ceil(self.num_replicas * 3 / 4) if self.min_replicas is None else self.min_replicas

    @property
    def poll_every_s(self) -> float:
        """`poll_interval_s`, set or derived."""
        if self.poll_interval_s is not None:
            return self.poll_interval_s
        return 0.05 if self.environment == "single_turn" else 0.005

    @property
    def settings(self) -> EngineConfig:
        """The section of the chosen engine."""
        return getattr(self, self.engine)

    @property
    def is_native(self) -> bool:
        """True if vLLM's own sender publishes, to servers that run none of our code."""
        return self.engine == "remote" and self.remote.weights == "native"

    def of_replica(self, replica_id: int) -> RolloutConfig:
        """The section for one replica; with engine remote, only its server's address."""
        if self.engine != "remote":
            return self
        remote = replace(self.remote, urls=[self.remote.urls[replica_id]])
        return replace(self, remote=remote, num_replicas=1, min_replicas=None, max_replicas=None)

    @property
    def guided_decoding(self) -> bool:
        """True if the chosen engine takes requests with a JSON schema."""
        return self.engine == "vllm" and self.vllm.structured_outputs

    @property
    def max_model_len(self) -> int:
        """`max_model_len` of the chosen engine, in tokens."""
        return self.settings.context_tokens


def with_experts(rollout: RolloutConfig) -> RolloutConfig:
    """The section with engine settings that report the experts of tokens.

    Raises ConfigError: the settings contradict that.
    """
    if rollout.engine == "vllm":
        if not rollout.vllm.enable_prefix_caching:
            asked = "trainer.router_replay=rollout with rollout.vllm.enable_prefix_caching=false"
            found = "vLLM keeps the experts of tokens with the blocks of its prefix cache"
            raise ConfigError(explain(asked, found, "set rollout.vllm.enable_prefix_caching=true"))
        return replace(rollout, vllm=replace(rollout.vllm, record_experts=True))
    if rollout.engine == "sglang":
        # Otherwise SGLang would recompute the tokens before a publish and report the experts of the new weights.
        in_place = rollout.sglang.disable_overlap_schedule or rollout.interrupt == "keep"
        settings = replace(rollout.sglang, record_experts=True, disable_overlap_schedule=in_place)
        return replace(rollout, sglang=settings)
    return rollout


# `with_lengths` derives unset lengths from the limits of prompt and response.


MICROBATCH_TOKENS = 8192
"""Default token budget of a micro-batch, unless a trajectory is longer."""
OVERLONG_SHARE = 5
"""The soft penalty covers the last 1/`OVERLONG_SHARE` of the longest response, as in DAPO (4096 of 20480)."""


def response_limit(rollout: RolloutConfig) -> int:
    """Tokens of the longest response of one trajectory: all turns, tool results and observations together. For a custom
    environment, whose limits are unknown, the limit of one turn."""
    turn = rollout.sampling.max_response_tokens
    turns, shown = {
        "tool_use": (rollout.tool_use.max_turns, 0),
        "agent": (rollout.agent.max_turns, 0),
        "verifiers": (rollout.verifiers.max_turns, 0),
        "nemo_gym": (rollout.nemo_gym.max_turns, 0),
        "openenv": (rollout.openenv.max_turns, rollout.openenv.max_observation_tokens),
        "gymnasium": (rollout.gymnasium.max_turns, rollout.gymnasium.max_observation_tokens),
    }.get(rollout.environment, (0, 0))
    return rollout.tool_use.max_trajectory_tokens or (turn + shown) * turns if turns else turn


def with_lengths(
    rollout: RolloutConfig, trainer: TrainerConfig, max_prompt_tokens: int
) -> tuple[RolloutConfig, TrainerConfig]:
    """Both sections with `max_model_len` of the chosen engine and `max_tokens_per_microbatch`, set or derived so that
    the longest prompt and response fit.

    Agents and custom or external environments write their own prompts: the engine then takes at least its default, and
    a micro-batch as much as the engine.
    """
    # The engine's length first; a micro-batch never needs more than the engine takes.
    engine = rollout.settings
    if engine.max_model_len is None:
        longest = max_prompt_tokens + response_limit(rollout)
        length = max(longest, engine.context_tokens) if _writes_prompts(rollout) else longest
        rollout = replace(rollout, **{rollout.engine: replace(engine, max_model_len=length)})
    if trainer.max_tokens_per_microbatch is None:
        length = longest_sequence(rollout, max_prompt_tokens)
        trainer = replace(trainer, max_tokens_per_microbatch=max(MICROBATCH_TOKENS, length))
    return rollout, trainer


def longest_sequence(rollout: RolloutConfig, max_prompt_tokens: int) -> int:
    """Tokens of the longest trajectory, of an engine whose `max_model_len` is known."""
    longest = max_prompt_tokens + response_limit(rollout)
    return rollout.max_model_len if _writes_prompts(rollout) else min(longest, rollout.max_model_len)


def _writes_prompts(rollout: RolloutConfig) -> bool:
    return rollout.environment not in ("single_turn", "tool_use", "interleaved_tool_use")
