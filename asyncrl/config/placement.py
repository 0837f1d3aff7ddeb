"""Checks for recipes whose generation and training take turns on the same devices (placement=colocated)."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from asyncrl.config.checks import require
from asyncrl.config.rollout import RolloutConfig
from asyncrl.config.run import EvalConfig, StalenessConfig
from asyncrl.config.trainer import TrainerConfig
from asyncrl.config.weights import WeightsConfig
from asyncrl.errors import ConfigError, explain

Placement = Literal["separate", "colocated"]


def with_sleep(rollout: RolloutConfig) -> RolloutConfig:
    """The section with its engine's sleep mode enabled."""
    settings = {
        "vllm": replace(rollout.vllm, enable_sleep_mode=True),
        "sglang": replace(rollout.sglang, enable_memory_saver=True),
    }.get(rollout.engine)
    return rollout if settings is None else replace(rollout, **{rollout.engine: settings})


def require_turns(
    mode: str,
    rollout: RolloutConfig,
    trainer: TrainerConfig,
    weights: WeightsConfig,
    staleness: StalenessConfig,
    evaluation: EvalConfig,
) -> None:
    """Raises ConfigError: something would generate during the trainer's turn, the publish that wakes the engines does
    not support the settings, or a request times out before it."""
    asked = "placement=colocated"
    if rollout.engine == "remote":
        found = "servers that run elsewhere share no device with the trainer"
        raise ConfigError(explain(f"{asked} with rollout.engine=remote", found, "set placement=separate"))
    if mode == "fully_async":
        found = "this mode generates while it trains, and the engines sleep while the trainer has the devices"
        do = "set mode=sync or mode=one_step_off, or placement=separate"
        raise ConfigError(explain(f"{asked} in mode fully_async", found, do))
    require(
        staleness.publish_every_steps == 1,
        asked=f"{asked} with staleness.publish_every_steps={staleness.publish_every_steps}",
        found="engines drop their weights when they sleep: only a publish can wake them after a step",
        do="set staleness.publish_every_steps=1, or placement=separate",
    )
    if evaluation.leased_replicas != 0:
        found = "an evaluation beside training needs an engine that is awake while the trainer has the devices"
        do = "set eval.leased_replicas=0: evaluations come between a publish and the next step, or placement=separate"
        raise ConfigError(explain(f"{asked} with eval.leased_replicas={evaluation.leased_replicas}", found, do))
    if rollout.most_replicas != rollout.num_replicas:
        found = "each replica shares its devices with a trainer rank: no other device has room for one"
        do = "leave rollout.max_replicas out, or set placement=separate"
        raise ConfigError(explain(f"{asked} with rollout.max_replicas={rollout.max_replicas}", found, do))
    workers = rollout.settings.num_workers
    if workers != 1:
        found = "a replica of several GPUs cannot reserve a part of each"
        do = f"set rollout.{rollout.engine}.tensor_parallel_size=1, or placement=separate"
        raise ConfigError(explain(f"{asked} with rollout.{rollout.engine}.tensor_parallel_size={workers}", found, do))

    for key, is_set in (("overlap", weights.overlap), ("stage", weights.stage), ("rolling", weights.rolling)):
        if is_set:
            found = "nothing generates or trains beside a publish: all engines wake for it, and training waits"
            do = f"set weights.{key}=false, or placement=separate with mode=fully_async"
            raise ConfigError(explain(f"{asked} with weights.{key}=true", found, do))
    if weights.encoding != "full":
        found = "engines drop the weights that differences would apply to when they sleep"
        do = "set weights.encoding=full, or placement=separate"
        raise ConfigError(explain(f"{asked} with weights.encoding={weights.encoding}", found, do))
    on_gpus = trainer.device.startswith("cuda")
    if on_gpus and weights.transport == "collective":
        found = "NCCL connects no two processes of one GPU, and a rank shares its GPU with a replica"
        do = "set weights.transport=ipc (or disk), or placement=separate"
        raise ConfigError(explain(f"{asked} with weights.transport={weights.transport}", found, do))
    turn_s = trainer.step_timeout_s + weights.publish_timeout_s
    for key in ("gate_timeout_s", "request_timeout_s"):
        limit_s = getattr(rollout, key)
        if mode != "sync" and limit_s < turn_s:
            found = (
                f"requests of groups that a step did not need wait for it and its publish, up to "
                f"trainer.step_timeout_s + weights.publish_timeout_s = {turn_s:g}"
            )
            do = f"set rollout.{key} to at least {turn_s:g}, or lower the other two"
            raise ConfigError(explain(f"{asked} in mode one_step_off with rollout.{key}={limit_s:g}", found, do))
