from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from datetime import date
from typing import Literal

from asyncrl.config.rollout import RolloutConfig, TorchEngineConfig, VllmEngineConfig
from asyncrl.errors import ConfigError, explain
from asyncrl.ranges import Positive, PositiveInt


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    path: str = "???"
    """Directory in Hugging Face format, or a hub name such as Qwen/Qwen2.5-7B."""
    revision: str | None = None
    """Hub revision; None takes the default branch."""
    trust_remote_code: bool = False
    """Run model code that ships with the checkpoint."""
    chat_template: str | None = None
    """Path of a Jinja chat template that replaces the tokenizer's own. none: prompts are the messages' text alone, for
    base models."""
    enable_thinking: bool | None = None
    """Passed to the chat template, as `enable_thinking` and as `thinking`; None leaves it out. The plan says where it
    has no effect."""
    date: str | None = None
    """Date that chat templates write (Llama 3, gpt-oss), as YYYY-MM-DD. None takes the day on which the run starts, and
    keeps it when the run is resumed."""
    inference_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of the replicas' weights and compute, and of publishes."""
    image_directory: str | None = None
    """The model reads the images in this directory. data.image_directory sets it."""

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError(explain("model.path=''", "no model", "set model.path to a directory or hub name"))
        if self.date is not None and not _is_date(self.date):
            raise ConfigError(explain(f"model.date={self.date}", "no date", "write it as 2026-01-31"))


def _is_date(text: str) -> bool:
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPoolConfig:
    """Replicas of a model other than the policy. They serve its files and never get a publish."""

    path: str | None = None
    """Directory in Hugging Face format, or a hub name. None: there is no such pool."""
    revision: str | None = None
    """Hub revision; None takes the default branch."""
    trust_remote_code: bool = False
    """Run model code that ships with the checkpoint."""
    chat_template: str | None = None
    """Path of a Jinja chat template that replaces the tokenizer's own. A teacher reads tokens of the policy, and none
    of its own."""
    enable_thinking: bool | None = None
    """As model.enable_thinking."""
    inference_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Weights and compute of the replicas."""
    num_replicas: PositiveInt = 1
    """Copies of the model; one Ray actor each. Failed replicas are replaced within recovery.max_replica_restarts,
    counted per pool."""
    engine: Literal["torch", "vllm"] = "torch"
    """As rollout.engine."""
    torch: TorchEngineConfig = field(default_factory=TorchEngineConfig)
    """As rollout.torch; max_model_len None takes the pool's longest request."""
    vllm: VllmEngineConfig = field(default_factory=VllmEngineConfig)
    """As rollout.vllm; max_model_len None takes the pool's longest request."""
    request_timeout_s: Positive = 300.0
    """Longest time for one answer over all its attempts, waiting included; the attempt at the group then fails."""

    @property
    def model(self) -> ModelConfig:
        """The model of the pool. `path` is set."""
        assert self.path is not None, "there is such a pool"
        shared = {field.name for field in fields(ModelConfig)} & {field.name for field in fields(self)}
        return ModelConfig(**{name: getattr(self, name) for name in shared})

    def __post_init__(self) -> None:
        if self.vllm.gpu_share != 1:
            found = "only a replica of the policy shares its GPU, with a trainer rank"
            do = "leave it out; engine=torch shares the GPUs that are left"
            raise ConfigError(explain(f"vllm.gpu_share={self.vllm.gpu_share:g} of a teacher or judge", found, do))
        if self.engine == "vllm":
            self.vllm.check_dtype(self.inference_dtype, key="vllm", dtype_key="inference_dtype")

    def replicas(self, context_tokens: int, *, key: str, least_tokens: int, max_logprobs: int = 0) -> RolloutConfig:
        """The settings of the replicas, in the form of the policy's.

        Args:
            context_tokens: of the engine, if `max_model_len` is not set.
            least_tokens: a smaller `max_model_len` is refused.
            key: the section of the recipe, for messages.
            max_logprobs: of engine vllm, at least.

        Raises ConfigError: `max_model_len` is set and smaller.
        """
        engine = self.torch if self.engine == "torch" else self.vllm
        found = engine.max_model_len
        if found is not None and found < least_tokens:
            asked = f"{key}.{self.engine}.max_model_len={found}"
            do = f"raise it to {context_tokens} or leave it out"
            raise ConfigError(explain(asked, f"requests to this pool have {least_tokens} tokens and more", do))
        length = found or context_tokens
        return RolloutConfig(
            num_replicas=self.num_replicas,
            min_replicas=1,
            engine=self.engine,
            torch=replace(self.torch, max_model_len=length),
            vllm=replace(self.vllm, max_model_len=length, max_logprobs=max(self.vllm.max_logprobs, max_logprobs)),
        )
