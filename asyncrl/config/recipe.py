"""The whole recipe and the checks that span its parts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.algorithm_parts import ADVANTAGES, LOSSES
from asyncrl.config.checks import check_ranges, require
from asyncrl.config.data import DataConfig
from asyncrl.config.environments import JUDGES
from asyncrl.config.model import ModelConfig, ModelPoolConfig
from asyncrl.config.placement import Placement, require_turns, with_sleep
from asyncrl.config.remote_engine import require_takes_publishes
from asyncrl.config.rewards import RewardConfig
from asyncrl.config.rollout import OVERLONG_SHARE, RolloutConfig, response_limit, with_experts, with_lengths
from asyncrl.config.run import (
    BatchConfig,
    CheckpointConfig,
    EvalConfig,
    ObservabilityConfig,
    RayConfig,
    RecoveryConfig,
    RunSection,
    StalenessConfig,
)
from asyncrl.config.trainer import TrainerConfig
from asyncrl.config.weights import WeightsConfig
from asyncrl.errors import ConfigError, explain

JUDGE_PROMPT_TOKENS = 256
"""Tokens of a judge's question without the responses."""

Mode = Literal["sync", "one_step_off", "fully_async"]
Interrupt = Literal["abort_resume", "keep", "drain"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    mode: Mode = "fully_async"
    """sync, one_step_off and fully_async are presets of lag limit and publish behaviour over the same machinery."""
    placement: Placement = "separate"
    """separate: replicas and trainer ranks have devices of their own. colocated, in modes sync and one_step_off: they
    share them and take turns; the engines give their memory back while the trainer has its turn (docs/modes.md)."""
    resume: str = "never"
    """never: refuse a directory that holds a run. auto: resume from its newest intact checkpoint. A path names a
    checkpoint."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The policy, which is trained and served."""
    data: DataConfig = field(default_factory=DataConfig)
    """Where prompts come from."""
    batch: BatchConfig = field(default_factory=BatchConfig)
    """Size of one optimizer step."""
    staleness: StalenessConfig = field(default_factory=StalenessConfig)
    """Largest age of trained tokens, and frequency of publishes."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """How trajectories are generated: replicas, engine, sampling, environment."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    """How responses are judged."""
    teacher: ModelPoolConfig = field(default_factory=ModelPoolConfig)
    """Replicas of the teacher of algorithm.distillation: a model with the policy's tokenizer."""
    judge: ModelPoolConfig = field(default_factory=ModelPoolConfig)
    """Replicas of the judge of reward.judge: a model with any tokenizer."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """The trainer ranks and their optimizer."""
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    """How a publish moves weights from the trainer to the replicas."""
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    """Advantage, loss, corrections and regularisers."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    """Held-out evaluation. It samples without top_p and top_k."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Checkpoints of the whole run."""
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    """How often processes may fail, and how long nothing may happen, before the run stops."""
    observability: ObservabilityConfig = field(default_factory=ObservabilityConfig)
    """Output besides metrics.jsonl and events.jsonl."""
    run: RunSection = field(default_factory=RunSection)
    """Name, place, length and seed of the run."""
    ray: RayConfig = field(default_factory=RayConfig)
    """The Ray cluster, and the health checks of the actors."""

    def __post_init__(self) -> None:
        self._resolve_lengths()
        # Lengths are resolved first: the checks below and the engines read them.
        batch, staleness, data = self.batch, self.staleness, self.data
        if bool(data.train) == bool(data.mixture):
            found = "both name training data" if data.train else "data.train is not set: no training data"
            do = "set data.train=FILE, or data.mixture={name: {path: FILE, weight: 1}}"
            raise ConfigError(explain(f"data.train={data.train!r} and data.mixture={sorted(data.mixture)}", found, do))
        if self.rollout.engine == "vllm":
            of_model = "model.inference_dtype"
            self.rollout.vllm.check_dtype(self.model.inference_dtype, key="rollout.vllm", dtype_key=of_model)
        trajectories = batch.num_trajectories
        if self.eval.leased_replicas >= self.rollout.num_replicas:
            asked = (
                f"eval.leased_replicas={self.eval.leased_replicas} of rollout.num_replicas={self.rollout.num_replicas}"
            )
            do = "lower eval.leased_replicas, or set it to 0: training then waits for evaluations"
            raise ConfigError(explain(asked, "no replica would be left for training", do))
        require(
            trajectories % self.trainer.layout.num_plans == 0,
            asked=f"{batch.groups_per_step} groups x {batch.group_size} trajectories on {self.trainer.num_ranks} ranks",
            found=f"{trajectories} trajectories do not divide evenly over the {self.trainer.layout.num_plans} "
            f"data-parallel ranks of trainer.num_ranks={self.trainer.num_ranks}",
            do=nearest_batches(self),
        )
        if staleness.publish_every_steps > self.max_lag + 1:
            asked = f"staleness.publish_every_steps={staleness.publish_every_steps} in mode {self.mode}"
            found = f"max_lag is {self.max_lag}: nothing trainable could exist before the next publish"
            do = f"set staleness.publish_every_steps to at most {self.max_lag + 1}, or raise staleness.max_lag"
            raise ConfigError(explain(asked, found, do))
        length_key = f"rollout.{self.rollout.engine}.max_model_len"
        longest = self.data.max_prompt_tokens + self.rollout.sampling.max_response_tokens
        if longest > self.rollout.max_model_len:
            asked = (
                f"data.max_prompt_tokens={self.data.max_prompt_tokens} + "
                f"rollout.sampling.max_response_tokens={self.rollout.sampling.max_response_tokens} = {longest} tokens"
            )
            do = f"raise {length_key} to {longest} or leave it out, or lower the other two"
            raise ConfigError(explain(asked, f"{length_key}={self.rollout.max_model_len}", do))
        if longest > self.max_tokens_per_microbatch:
            asked = f"trainer.max_tokens_per_microbatch={self.trainer.max_tokens_per_microbatch}"
            do = f"raise trainer.max_tokens_per_microbatch to {longest}, or leave it out"
            raise ConfigError(explain(asked, f"one trajectory may have {longest} tokens and is never split", do))
        require(
            self.mode != "fully_async"
            or self.rollout.interrupt != "drain"
            or self.weights.publish_timeout_s >= self.rollout.request_timeout_s,
            asked=f"rollout.interrupt=drain with weights.publish_timeout_s={self.weights.publish_timeout_s:g}",
            found=f"a publish waits for responses that may take rollout.request_timeout_s="
            f"{self.rollout.request_timeout_s:g}",
            do="raise weights.publish_timeout_s or lower rollout.request_timeout_s",
        )
        if self.eval.every_steps != 0 and not self.data.eval:
            found = "data.eval names no held-out set"
            do = "set data.eval={held_out: FILE} or eval.every_steps=0"
            raise ConfigError(explain(f"eval.every_steps={self.eval.every_steps}", found, do))
        # Checks across two or more sections; each section has checked itself already.
        self._check_algorithm()
        self._check_branches()
        self._check_pools()
        self._check_rewards()
        self._check_schedule()
        self._check_weights()
        # Derived settings come last, after the checks of the settings as written.
        if self.model.image_directory not in (None, self.data.image_directory):
            found = f"data.image_directory={self.data.image_directory}, which sets it"
            do = "set data.image_directory alone"
            raise ConfigError(explain(f"model.image_directory={self.model.image_directory}", found, do))
        if self.data.image_directory is not None:
            self._check_images()
            object.__setattr__(self, "model", replace(self.model, image_directory=self.data.image_directory))
        if self.is_colocated:
            require_turns(self.mode, self.rollout, self.trainer, self.weights, staleness, self.eval)
            object.__setattr__(self, "rollout", with_sleep(self.rollout))
        replays = self.trainer.router_replay == "rollout"
        asked = "trainer.router_replay=rollout" if replays else "algorithm.router_aux_coefficient"
        require(
            not self.trainer.compile or not (replays or self.algorithm.router_aux_coefficient),
            asked=f"{asked} with trainer.compile",
            found="the choice of experts is read and replaced in layers that are not compiled",
            do="leave trainer.compile out",
        )
        if replays:
            object.__setattr__(self, "rollout", with_experts(self.rollout))

    def _resolve_lengths(self) -> None:
        """Sets every length that the recipe leaves out."""
        rollout, trainer = with_lengths(self.rollout, self.trainer, self.data.max_prompt_tokens)
        object.__setattr__(self, "rollout", rollout)
        object.__setattr__(self, "trainer", trainer)
        if self.algorithm.overlong.buffer_tokens is None:
            overlong = replace(self.algorithm.overlong, buffer_tokens=self.longest_response_tokens // OVERLONG_SHARE)
            object.__setattr__(self, "algorithm", replace(self.algorithm, overlong=overlong))

    def _check_algorithm(self) -> None:
        """Checks the requirements of algorithm and reward on batch and rollout."""
        algorithm, group_size = self.algorithm, self.batch.group_size
        relative = ADVANTAGES[algorithm.advantage].is_relative
        for asked, compares in (
            (f"algorithm.advantage={algorithm.advantage}", relative),
            ("algorithm.dynamic_sampling=true", algorithm.dynamic_sampling),
            ("a pairwise reward", self.reward.compares),
        ):
            if group_size < 2 and compares:
                found = "it compares the trajectories of a group, and one alone has no other to be compared with"
                do = "set batch.group_size to 2 or more"
                raise ConfigError(explain(f"batch.group_size={group_size} with {asked}", found, do))
        if self.rollout.sampling.temperature <= 0 and relative:
            asked = f"rollout.sampling.temperature=0 with algorithm.advantage={algorithm.advantage}"
            found = "greedy trajectories of one prompt are all alike: a group-relative advantage is then 0"
            raise ConfigError(explain(asked, found, "set rollout.sampling.temperature above 0 (1 is usual)"))
        buffer, longest = algorithm.overlong.buffer_tokens or 0, self.longest_response_tokens
        if buffer > longest:
            found = (
                f"a response has at most {longest} tokens (rollout.sampling.max_response_tokens="
                f"{self.rollout.sampling.max_response_tokens}): every response would be penalised"
            )
            do = f"set algorithm.overlong.buffer_tokens to about {max(1, longest // 5)}, or 0 for none"
            raise ConfigError(explain(f"algorithm.overlong.buffer_tokens={buffer}", found, do))
        bounds = AlgorithmConfig.__dataclass_fields__
        require(
            LOSSES[algorithm.loss].scope == "token"
            or (algorithm.clip_low, algorithm.clip_high) != (bounds["clip_low"].default, bounds["clip_high"].default),
            asked=f"algorithm.loss={algorithm.loss} with clip_low={algorithm.clip_low} and "
            f"clip_high={algorithm.clip_high}",
            found="these are bounds for the ratio of one token: the mean over a trajectory never comes near them",
            do="set algorithm.clip_low=3e-4 algorithm.clip_high=4e-4, or algorithm.preset=gspo",
        )

    def _check_branches(self) -> None:
        """Refuses settings that are defined only for one conversation if trajectories have branches."""
        algorithm, asked = self.algorithm, "rollout.agent.train=all_branches with "
        if self.rollout.agent.train != "all_branches":
            return
        if ADVANTAGES[algorithm.advantage].scope != "group":
            found = "it is computed along the tokens of one conversation, and branches have no order"
            do = "set algorithm.advantage to one of a group, such as grpo, or rollout.agent.train=last_branch"
            raise ConfigError(explain(f"{asked}algorithm.advantage={algorithm.advantage}", found, do))
        if self.trainer.router_replay != "off":
            found = "the context that a branch shares with another one would not be replayed"
            do = "set trainer.router_replay=off, or rollout.agent.train=last_branch"
            raise ConfigError(explain(f"{asked}trainer.router_replay={self.trainer.router_replay}", found, do))

    def _check_pools(self) -> None:
        """Checks that teacher and judge exist exactly if used, and that a teacher sees the trained distribution."""
        distillation, sampling = self.algorithm.distillation, self.rollout.sampling
        for key, pool, weight_key, weight in (
            ("teacher", self.teacher, "algorithm.distillation.coefficient", distillation.coefficient),
            ("judge", self.judge, "reward.judge.weight", self.reward.judge.weight),
        ):
            check_ranges(f"{key}.", pool)
            if bool(weight) != (pool.path is not None):
                found = f"there is no {key}" if weight else f"nobody asks the {key}"
                do = "set both, or neither"
                raise ConfigError(explain(f"{key}.path={pool.path} with {weight_key}={weight:g}", found, do))
        if distillation.coefficient and (sampling.temperature, sampling.top_p, sampling.top_k) != (1, 1, 0):
            asked = (
                f"algorithm.distillation with rollout.sampling: temperature={sampling.temperature:g}, "
                f"top_p={sampling.top_p:g}, top_k={sampling.top_k}"
            )
            found = "the teacher's log-probabilities are those at temperature 1 without filters"
            raise ConfigError(explain(asked, found, "leave temperature, top_p and top_k of rollout.sampling out"))
        for key, is_set in (
            ("rollout.sampling.keep_sets", sampling.keep_sets),
            ("algorithm.distillation.top_k", distillation.top_k > 0),
        ):
            if is_set and self.trainer.backend != "fsdp":
                found = "only backend fsdp gives the log-probabilities of other tokens than the sampled one"
                do = f"set trainer.backend=fsdp, or leave {key} out"
                raise ConfigError(explain(f"{key} with trainer.backend={self.trainer.backend}", found, do))
        # The property computes the pools' contexts, which raises if they are too short.
        self.pools  # noqa: B018 - raises ConfigError if a pool cannot take the requests

    def _check_rewards(self) -> None:
        """Checks that something is learned from."""
        reward = self.reward
        own = self.rollout.environment in JUDGES
        if own and reward.names != ("zero",):
            asked = f"rollout.environment={self.rollout.environment} with reward {', '.join(reward.names)}"
            do = "set reward.function=zero"
            raise ConfigError(explain(asked, "this environment gives the reward itself: no other would be asked", do))
        is_custom = ":" in self.rollout.environment  # told apart once it is imported: environments.check_environment
        checks = self.rollout.environment == "agent" and bool(self.rollout.agent.sandbox.check)
        require_taught(self, own or is_custom or checks)

    def _check_schedule(self) -> None:
        """Checks that every warm-up ends before the run does."""
        trainer, critic, steps = self.trainer, self.algorithm.critic, self.run.max_steps
        if self.algorithm.needs_critic and critic.warmup_steps >= steps:
            asked = f"algorithm.critic.warmup_steps={critic.warmup_steps} with run.max_steps={steps}"
            do = "lower algorithm.critic.warmup_steps, or raise run.max_steps"
            raise ConfigError(explain(asked, "the policy would never be trained", do))
        if trainer.schedule != "constant" and trainer.warmup_steps > steps:
            asked = f"trainer.schedule={trainer.schedule} with trainer.warmup_steps={trainer.warmup_steps}"
            found = f"run.max_steps={steps}: the run would end before the learning rate has risen"
            raise ConfigError(explain(asked, found, "lower trainer.warmup_steps, or raise run.max_steps"))

    def _check_images(self) -> None:
        """Checks that all that reads prompts reads images."""
        blind = {
            f"rollout.engine={self.rollout.engine}": self.rollout.engine not in ("torch", "vllm"),
            f"trainer.backend={self.trainer.backend}": self.trainer.backend != "fsdp",
            "trainer.fsdp.context_parallel above 1": self.trainer.fsdp.context_parallel > 1,
            "a critic (advantage gae)": self.algorithm.needs_critic,
            "a teacher": self.teacher.path is not None,
        }
        found = next((name for name, is_blind in blind.items() if is_blind), "")
        if found:
            do = "leave it out, or data.image_directory"
            raise ConfigError(explain(f"data.image_directory with {found}", "it reads no images", do))

    def _check_weights(self) -> None:
        """Checks that waits for a publish (ranks in a collective, requests at replicas' gates) have longer timeouts
        than the publish, and that the other parts support it."""
        waits_s, transfer_s = self.trainer.collective_timeout_s, self.weights.transfer_timeout_s
        if self.trainer.num_ranks != 1 and not self.sends_snapshots and waits_s <= transfer_s:
            asked = f"trainer.collective_timeout_s={waits_s:g} with weights.transfer_timeout_s={transfer_s:g}"
            found = "ranks wait in a collective, which gathers the next tensor, while a rank sends"
            do = f"set trainer.collective_timeout_s above {transfer_s:g}, or lower weights.transfer_timeout_s"
            raise ConfigError(explain(asked, found, do))
        gate_s, publish_s = self.rollout.gate_timeout_s, self.weights.publish_timeout_s
        if not self.empties_queue and gate_s < publish_s:
            asked = f"rollout.gate_timeout_s={gate_s:g} with weights.publish_timeout_s={publish_s:g}"
            do = f"set rollout.gate_timeout_s to at least {publish_s:g}, or lower weights.publish_timeout_s"
            raise ConfigError(explain(asked, "requests that wait for the end of a publish would fail before it", do))
        if self.rollout.settings.gpu_share < 1:
            self._check_shared_gpus()
        if self.rollout.engine == "remote":
            waits_s = self.ray.start_timeout_s
            require_takes_publishes(self.rollout.remote, self.weights, self.trainer, start_timeout_s=waits_s)
        if self.weights.encoding == "delta":
            self._check_delta()

    def _check_shared_gpus(self) -> None:
        """Checks the requirements of GPUs shared by replicas and trainer ranks."""
        key = f"rollout.{self.rollout.engine}.gpu_share={self.rollout.settings.gpu_share:g}"
        if self.weights.transport not in ("ipc", "disk"):
            found = "NCCL refuses two processes on one GPU (Duplicate GPU detected)"
            do = "set weights.transport=ipc; with trainer.backend=megatron on several nodes disk"
            raise ConfigError(explain(f"{key} with weights.transport={self.weights.transport}", found, do))
        if self.trainer.device == "cpu":
            found = "no trainer rank would take the rest of the GPU"
            do = "leave gpu_share out, or set trainer.device=cuda"
            raise ConfigError(explain(f"{key} with trainer.device=cpu", found, do))

    def _check_delta(self) -> None:
        """Checks the requirements of weights.encoding=delta."""
        weights, rank = self.weights, self.trainer.lora.rank
        if weights.verify == "off":
            found = "differences are sent only to replicas whose weights have the trainer's digest"
            do = "set weights.verify to first or always, or weights.encoding=full"
            raise ConfigError(explain("weights.encoding=delta with weights.verify=off", found, do))
        if rank != 0:
            found = "a publish of adapters sends only them, whole: they are small"
            do = "set weights.encoding=full, or trainer.lora.rank=0"
            raise ConfigError(explain(f"weights.encoding=delta with trainer.lora.rank={rank}", found, do))

    @property
    def is_colocated(self) -> bool:
        """True if generation and training take turns on the same devices."""
        return self.placement == "colocated"

    @property
    def max_lag(self) -> int:
        """The lag limit that the mode resolves to, in optimizer steps."""
        return {"sync": 0, "one_step_off": 1, "fully_async": self.staleness.max_lag}[self.mode]

    @property
    def kept_arrays(self) -> tuple[str, ...]:
        """The arrays of `Trajectory.extra` that training needs, and the lengths of their rows if the recipe sets them;
        groups of a checkpoint must have the same."""
        distillation = self.algorithm.distillation
        rows = (f"top_k={distillation.top_k}",) if distillation.top_k else ()
        experts = ("experts",) if self.trainer.router_replay == "rollout" else ()
        sampling = self.rollout.sampling
        kept = ("kept_ids", f"kept_ids of {sampling.top_k}") if sampling.keep_sets else ()
        return (*distillation.token_arrays, *rows, *experts, *kept)

    @property
    def pools(self) -> dict[str, tuple[ModelPoolConfig, RolloutConfig]]:
        """Section -> (pool, settings of its replicas), for the other models of the run. Raises ConfigError: a pool's
        context is too short for its requests."""
        longest, judge = self.rollout.max_model_len, self.reward.judge
        asked = {
            "teacher": longest + 1,  # an engine may insist on sampling one token
            "judge": (1 + judge.pairwise) * longest + JUDGE_PROMPT_TOKENS + judge.max_tokens,
        }
        found = {key: pool for key in asked if (pool := getattr(self, key)).path is not None}
        top = {"teacher": self.algorithm.distillation.top_k}
        # A judge with less than its longest request gives the longest responses its lowest reward.
        least = asked | {"judge": JUDGE_PROMPT_TOKENS + judge.max_tokens * (judge.read == "text")}
        return {
            key: (pool, pool.replicas(asked[key], key=key, least_tokens=least[key], max_logprobs=top.get(key, 0)))
            for key, pool in found.items()
        }

    @property
    def longest_response_tokens(self) -> int:
        """`response_limit`, capped by replicas and trainer."""
        return min(response_limit(self.rollout), self.rollout.max_model_len, self.max_tokens_per_microbatch)

    @property
    def max_tokens_per_microbatch(self) -> int:
        """`trainer.max_tokens_per_microbatch`, set or derived."""
        assert self.trainer.max_tokens_per_microbatch is not None, "it is resolved"
        return self.trainer.max_tokens_per_microbatch

    @property
    def stall_timeout_s(self) -> float:
        """Seconds without progress after which the run stops."""
        if self.recovery.stall_timeout_s is not None:
            return self.recovery.stall_timeout_s
        # Twice the longest single wait, and long enough for all tolerated checkpoint failures in a row.
        longest = 2 * max(
            self.trainer.step_timeout_s,
            self.eval.timeout_s,
            self.staleness.overdue_timeout_s,
            self.weights.publish_timeout_s,
            self.checkpoint.timeout_s,
            self.ray.start_timeout_s,
        )
        return max(longest, self.checkpoint.timeout_s * (2 + self.checkpoint.max_failures))

    @property
    def interrupt(self) -> Interrupt:
        """How a publish treats generations in flight, resolved by mode and placement. Sleeping engines have no
        requests: these were aborted with their tokens so far."""
        if self.mode == "fully_async":
            return self.rollout.interrupt
        return "drain" if self.empties_queue else "abort_resume"

    @property
    def pacing(self) -> Literal["eager", "just_in_time"]:
        """When groups are admitted; modes other than fully_async wait for an empty queue."""
        return self.staleness.pacing if self.mode == "fully_async" else "eager"

    @property
    def empties_queue(self) -> bool:
        """True if a publish waits until no group is running or can be admitted. With colocated one_step_off the trainer
        takes its turn once a step has its groups; other groups continue after the publish."""
        return self.mode == "sync" or (self.mode == "one_step_off" and not self.is_colocated)

    @property
    def overlaps_publish(self) -> bool:
        """True if a publish runs concurrently with the next step; never if it empties the queue."""
        is_wanted = self.mode == "fully_async" if self.weights.overlap is None else self.weights.overlap
        return is_wanted and not self.empties_queue

    def placed(self, *, ranks_on_gpus: bool, replicas_on_gpus: bool, stages: bool) -> Recipe:
        """Returns the recipe with the device-dependent settings resolved (`weights.overlap`, `weights.stage`).
        `stages`: the engine can stage."""
        weights, on_gpus = self.weights, ranks_on_gpus or replicas_on_gpus
        overlap = self.overlaps_publish and not ranks_on_gpus if weights.overlap is None else weights.overlap
        stage = stages and not on_gpus if weights.stage is None else weights.stage
        stage = stage and self.mode == "fully_async"  # in other modes nothing generates during a publish
        return replace(self, weights=replace(weights, overlap=overlap, stage=stage))

    @property
    def rolls_publish(self) -> bool:
        """True if a publish updates some replicas at a time."""
        return self.weights.rolling and self.mode == "fully_async"

    @property
    def sends_snapshots(self) -> bool:
        """True if publishes send a copy of the weights: they overlap the next step, or send several times and would
        gather each time."""
        return self.overlaps_publish or self.rolls_publish

    def publishes_after(self, step: int) -> bool:
        """True if the weights after `step` optimizer steps are published."""
        return step % self.staleness.publish_every_steps == 0 or step >= self.run.max_steps


def require_taught(recipe: Recipe, environment_judges: bool) -> None:
    """Raises ConfigError: nothing would be learned."""
    reward = recipe.reward
    others = reward.judge.weight or reward.group.function or recipe.algorithm.distillation.coefficient
    if reward.names == ("zero",) and not others and not environment_judges:
        found = "nothing else teaches: nothing would be learned"
        do = (
            "set reward.group.function, or reward.judge and judge.path, or choose another reward; an environment of "
            "your own that gives the reward says `judges = True`"
        )
        raise ConfigError(explain(f"reward zero with rollout.environment={recipe.rollout.environment}", found, do))


def trains_branches(recipe: Recipe) -> bool:
    """Whether every reply of an agent is trained, of all of its conversations (`rollout.agent.train`)."""
    whole = ADVANTAGES[recipe.algorithm.advantage].scope == "group" and recipe.trainer.router_replay == "off"
    return recipe.rollout.agent.train == "all_branches" or (recipe.rollout.agent.train == "auto" and whole)


def nearest_batches(recipe: Recipe) -> str:
    """Advice: the nearest settings whose trajectories divide evenly over the data-parallel ranks."""
    batch, trainer = recipe.batch, recipe.trainer
    copies, plans = trainer.num_ranks // trainer.layout.num_plans, trainer.layout.num_plans
    whole = batch.num_trajectories
    unit = plans // math.gcd(plans, batch.group_size)
    ranks = [copies * n for n in range(1, 2 * plans + 1) if whole % n == 0]
    found = {
        "batch.groups_per_step": _around(batch.groups_per_step, range(unit, batch.groups_per_step + unit + 1, unit)),
        "trainer.num_ranks": _around(trainer.num_ranks, ranks),
    }
    return "set " + ", or ".join(f"{key}={' or '.join(map(str, values))}" for key, values in found.items())


def _around(value: int, allowed: Iterable[int]) -> list[int]:
    """The largest allowed number below `value` and the smallest above."""
    allowed = list(allowed)
    below, above = [n for n in allowed if n < value], [n for n in allowed if n > value]
    return [*below[-1:], *above[:1]]
