"""The metrics of an optimizer step. No other module spells a name of `metrics.jsonl`."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Literal

Better = Literal["higher", "lower", "none"]
Reduction = Literal["mean", "max", "last"]
HIGHER: Better = "higher"
LOWER: Better = "lower"
NONE: Better = "none"


class Metric(StrEnum):
    """A member is the key itself and has the metric's `unit`, `better` (the direction of improvement), `meaning`, `group`
    and `reduction`.

    A member whose key ends with "/" or "@" is a family: `of` makes the keys of its metrics.
    """

    unit: str
    better: Better
    meaning: str

    def __new__(cls, key: str, unit: str, better: Better, meaning: str) -> Metric:
        self = str.__new__(cls, key)
        self._value_ = key
        self.unit, self.better, self.meaning = unit, better, meaning
        return self

    @property
    def group(self) -> str:
        """The part of the key before the slash; "run" for keys without one."""
        group, slash, _ = self.partition("/")
        return group if slash else "run"

    @property
    def reduction(self) -> Reduction:
        """How many steps are summarised: the last value of counts since the start, the largest of bounds, else the
        mean."""
        counts = (Metric.STEP, Metric.TIME, Metric.REPREFILLED, Metric.SERVE_REFUSED, Metric.SERVE_RESTARTS)
        if self in counts or self.group in ("queue", "cpu", "sinks", "eval", "sandboxes"):
            return "mean" if self in (Metric.FILTERED_SHARE, Metric.FAILED_SHARE) else "last"
        return "max" if self.endswith(("_max", "longest_s", "deadline_used")) else "mean"

    @property
    def is_family(self) -> bool:
        return self.endswith(("/", "@"))

    @property
    def is_required(self) -> bool:
        """Every line of `metrics.jsonl` has it."""
        return (
            not self.is_family
            and self.group not in ("eval", "cpu", "critic", "replica_time", "guard", "sleep", "serve")
            and self not in _SOMETIMES
        )

    def of(self, name: object) -> str:
        """The key of the family's metric for this set, part, correction or count."""
        return f"{self}{name}"

    # fmt: off
    # ruff: noqa: E501 - a table: one metric a line
    STEP = "step", "steps", NONE, "optimizer steps completed, this one included (`global_steps`)"
    TIME = "time_s", "s", NONE, "time since the run began, over all restarts, without the time between them"

    REWARD_MEAN = "reward/mean", "reward", HIGHER, "mean reward of the trained trajectories"
    REWARD_STD = "reward/std", "reward", NONE, "standard deviation of the rewards of the trained trajectories"
    REWARD_ZERO_SIGNAL = "reward/zero_signal_fraction", "share", LOWER, "trained groups whose rewards are all equal"
    REWARD_PART = "reward/part/", "reward", HIGHER, "with a part's name: its mean over the trained trajectories"

    EVAL_ACCURACY = "eval/accuracy", "share", HIGHER, "correct held-out responses of `eval/version`, mean over the sets; where it became known"
    EVAL_ACCURACY_OF = "eval/accuracy/", "share", HIGHER, "with a set's name: `eval/accuracy` of that set"
    EVAL_PASS = "eval/pass@", "share", HIGHER, "with k and a set's name: estimate of the prompts that one of k responses gets right"
    EVAL_MEAN = "eval/mean@", "share", HIGHER, "with k and a set's name: mean share of right responses to a prompt, of k"
    EVAL_INITIAL_ACCURACY = "eval/initial_accuracy", "share", HIGHER, "`eval/accuracy` before the first optimizer step; on the line of step 1"
    EVAL_VERSION = "eval/version", "version", NONE, "policy version that was evaluated; with leased replicas that of an earlier step"
    EVAL_FAILED = "eval/failed", "flag", LOWER, "1 where an evaluation (step 1: or the one before it) failed: a set has no answer in time"
    EVAL_RESPONSE_TOKENS = "eval/response_tokens_mean", "tokens", NONE, "mean length of the held-out responses"
    EVAL_TIME = "eval/time_s", "s", LOWER, "duration of the evaluation"

    LAG_MAX = "staleness/lag_max", "steps", LOWER, "largest lag of a token trained in this step"
    LAG_MEAN = "staleness/lag_mean", "steps", LOWER, "mean lag of the tokens trained in this step"
    LAG_IN_FLIGHT = "staleness/lag_in_flight_mean", "steps", LOWER, "part of `lag_mean` that arose while the group was being generated"
    LAG_IN_QUEUE = "staleness/lag_in_queue_mean", "steps", LOWER, "part of `lag_mean` that arose while the group was ready"
    OVERDUE_WAIT = "staleness/overdue_wait_s", "s", LOWER, "time that the step waited only for groups that it had to train"
    SLOTS = "staleness/slots_used", "share", NONE, "groups that are not yet trained, of those that the limit on the lag admits"
    MASKED_TOKENS = "staleness/masked_tokens_fraction", "share", LOWER, "tokens of the step that were masked for being over the limit"

    LAG_TOKENS = "lag/tokens/", "share", NONE, "with a bucket of lags: trained tokens of the step that had this lag"
    LAG_GROUPS = "lag/groups/", "share", NONE, "with a bucket: groups whose oldest trained token had this lag"
    LAG_GAINED_IN_FLIGHT = "lag/in_flight/", "share", NONE, "with a bucket: trained tokens that aged so much while their group was being generated"
    LAG_GAINED_IN_QUEUE = "lag/in_queue/", "share", NONE, "with a bucket: trained tokens that aged so much while their group was ready"
    LAG_REWARD = "lag/reward/", "reward", HIGHER, "with a bucket: mean reward of the trajectories whose oldest trained token had this lag"
    LAG_RATIO = "lag/ratio/", "ratio", NONE, "with a bucket: `train/ratio_mean` of the tokens of this lag"
    LAG_EFFECTIVE = "lag/effective_samples/", "share", HIGHER, "with a bucket: `train/effective_samples` of the tokens of this lag"
    LAG_TAILS = "lag/ratio_tails/", "share", LOWER, "with a bucket: `train/ratio_tails` of the tokens of this lag"
    LAG_CLIPPED_POSITIVE = "lag/clip_positive/", "share", NONE, "with a bucket: `train/clip_fraction_positive` of the tokens of this lag"
    LAG_CLIPPED_NEGATIVE = "lag/clip_negative/", "share", NONE, "with a bucket: `train/clip_fraction_negative` of the tokens of this lag"
    LAG_KL = "lag/kl/", "nats", NONE, "with a bucket: `train/kl_behavior` of the tokens of this lag"

    ROLLOUT_SPEED = "rollout/tokens_per_s", "tokens/s", HIGHER, "tokens sampled by all replicas, those for clients of rollout.serve included, per wall time"
    DECODE_BATCH = "rollout/decode_batch_mean", "requests", HIGHER, "tokens that a decode step of a replica samples, mean over those of this step; of engines torch and vllm"
    PREEMPTIONS = "rollout/preemptions", "requests", LOWER, "requests that engines took out of a full KV cache in this step, to compute them again; of engine vllm"
    SEGMENTS = "rollout/segments_mean", "segments", NONE, "mean number of segments of a trained trajectory"
    INTERRUPTED = "rollout/interrupted_fraction", "share", NONE, "trained trajectories with tokens of more than one version"
    VERSION_SPAN = "rollout/version_span_mean", "versions", LOWER, "newest minus oldest version of a trained trajectory's tokens, mean"
    STALE_CACHE = "rollout/stale_cache_fraction", "share", LOWER, "trained tokens sampled on a KV cache that older weights have computed (rollout.interrupt=keep)"
    TRUNCATED = "rollout/truncated_fraction", "share", LOWER, "trained trajectories that were cut off at their token limit"
    RESPONSE_TOKENS = "rollout/response_tokens_mean", "tokens", NONE, "mean length of a trained response; of an agent, over all branches that are trained"
    REPREFILLED = "rollout/reprefilled_tokens", "tokens", LOWER, "sent again after interruptions since the rollouter started, at the last health check"

    SPARE_REPLICAS = "rollout/spare_replicas", "replicas", LOWER, "replicas that could be given back: their number times `replica_time/slots_exhausted`"

    SANDBOXES = "sandboxes/", "sandboxes", NONE, "of agents, by state, at the last health check: live now; since the rollouters started opened, closed, and failed ones, whose trajectories are tried again in others"

    SERVE_UP = "serve/up", "flag", HIGHER, "1 while the server of rollout.serve answers"
    SERVE_RUNNING = "serve/running", "requests", NONE, "clients' requests whose answer has begun, at the last health check of the server"
    SERVE_WAITING = "serve/waiting", "requests", LOWER, "clients' requests without a token so far, at the same time"
    SERVE_REFUSED = "serve/refused", "requests", LOWER, "clients' requests that were sent away for later (status 429 or 503) since this process of the run began"
    SERVE_RESTARTS = "serve/restarts", "restarts", LOWER, "of the server since this process of the run began"
    SERVE_TOKENS = "serve/tokens", "tokens", NONE, "sampled for clients since the line before"
    SERVE_SHARE = "serve/token_share", "share", NONE, "`serve/tokens` of all tokens that the replicas sampled in that time"

    QUEUE_ADMITTED = "queue/admitted", "groups", NONE, "admitted since the run began"
    QUEUE_RUNNING = "queue/running", "groups", NONE, "being generated"
    QUEUE_READY = "queue/ready", "groups", NONE, "complete, waiting to be trained"
    QUEUE_LEASED = "queue/leased", "groups", NONE, "leased to a step"
    QUEUE_TRAINED = "queue/trained", "groups", HIGHER, "trained since the run began"
    QUEUE_FILTERED = "queue/filtered", "groups", LOWER, "without learning signal since the run began"
    QUEUE_EXPIRED = "queue/expired", "groups", LOWER, "expired because they were overdue, since the run began"
    QUEUE_FAILED = "queue/failed", "groups", LOWER, "out of retries since the run began"
    FILTERED_SHARE = "queue/filtered_fraction", "share", LOWER, "filtered among the last `algorithm.filtered_window` ended groups"
    FAILED_SHARE = "queue/failed_fraction", "share", LOWER, "failed among the last `rollout.failed_window` ended groups"

    GUARD_LIMIT = "guard/limit", "steps", NONE, "limit on the lag from this step on that the off-policy guard has set; with staleness.guard=watch: would have set"
    GUARD_STATE = "guard/state", "level", LOWER, "0: the guard holds nothing; 1: it has lowered the limit; 2: raised corrections too; 3: it ends the run"
    GUARD_SEVERITY = "guard/severity", "1", LOWER, "largest signal of the step over its threshold: from 1 on the step is too far off-policy, up to 1/2 it is healthy; at most 1000"

    PUBLISH_TIME = "weights/publish_s", "s", LOWER, "the publishes that ended in this step: the one after it, or with weights.overlap the one after the step before; 0 without any"
    PUBLISH_PAUSE = "weights/pause_s", "s", LOWER, "from pause to commit, of each transfer times the share of the fleet that it held up; of staged weights the longest among its replicas"
    PUBLISH_TRANSFER = "weights/transfer_s", "s", LOWER, "transfer of the publish"
    PUBLISH_REST = "weights/rest_s", "s", LOWER, "the publish without its transfer: requests that end or are aborted, preparation, commit"
    PUBLISH_BYTES = "weights/bytes", "bytes", LOWER, "sent to each replica"
    PUBLISH_SHARE = "weights/sent_fraction", "share", LOWER, "bytes sent to each replica, of the bytes of all weights; below 1 with weights.encoding=delta; 0 when no publish followed"
    PUBLISH_ATTEMPTS = "weights/attempts", "transfers", LOWER, "times that the weights were sent"
    PUBLISH_REPLICAS = "weights/replicas", "replicas", NONE, "replicas that took this publish"
    PUBLISH_TOKENS = "weights/publish_tokens_fraction", "share", HIGHER, "sampled tokens of the step that were sampled during its publishes"

    LOSS = "train/loss", "loss", NONE, "loss over the global batch"
    GRAD_NORM = "train/grad_norm", "norm", NONE, "global gradient norm before clipping"
    LEARNING_RATE = "train/lr", "1", NONE, "learning rate"
    TRAIN_SPEED = "train/tokens_per_s", "tokens/s", HIGHER, "packed tokens (prompts too) per time of the optimizer step"
    TRAIN_TIME = "train/step_s", "s", LOWER, "duration of the optimizer step"
    TRAINED_TOKENS = "train/trained_tokens", "tokens", NONE, "tokens in the loss"
    CLIPPED = "train/clip_fraction", "share", NONE, "trained tokens whose ratio was clipped"
    CLIPPED_POSITIVE = "train/clip_fraction_positive", "share", NONE, "part of `clip_fraction` with positive advantage: at the upper bound"
    CLIPPED_NEGATIVE = "train/clip_fraction_negative", "share", NONE, "part of `clip_fraction` with negative advantage: at the lower bound, or over dual_clip"
    RATIO_MEAN = "train/ratio_mean", "ratio", NONE, "mean ratio of policy to behaviour probability over the trained tokens"
    RATIO_MAX = "train/ratio_max", "ratio", LOWER, "largest ratio of policy to behaviour probability"
    EFFECTIVE_SAMPLES = "train/effective_samples", "share", HIGHER, "effective sample size over the trained tokens, of the ratios: 1 where the policy is the behaviour policy"
    RATIO_TAILS = "train/ratio_tails", "share", LOWER, "trained tokens whose ratio of policy to behaviour probability is outside [1/2, 2]"
    SKIPPED_UPDATES = "train/skipped_updates", "updates", LOWER, "updates of the step without a trained token on any rank, which moved nothing"
    KL_BEHAVIOR = "train/kl_behavior", "nats", NONE, "mean of behaviour minus policy log-probability (k1)"
    ENTROPY = "train/entropy", "nats", NONE, "mean entropy of the policy at the trained tokens"
    KL_REFERENCE = "train/kl_reference", "nats", NONE, "mean divergence of the policy from the reference model (k3), per trained token"
    KL_TEACHER = "train/kl_teacher", "nats", LOWER, "mean of policy minus teacher log-probability (k1 of the reverse KL) at the trained tokens, with algorithm.distillation"
    KL_TEACHER_TOP = "train/kl_teacher_top", "nats", LOWER, "mean reverse KL to the teacher over its top_k likeliest tokens and all others as one, with algorithm.distillation.top_k"
    ROUTER_BALANCE = "train/router_balance", "experts", LOWER, "load-balancing loss of a mixture's routers; experts per token where the load is even"
    ADVANTAGE_MEAN = "train/advantage_mean", "reward", NONE, "mean token advantage before whitening, with advantage gae or reinforce_plus_plus"
    TOUCHED = "train/touched_fraction/", "share", NONE, "with a correction's name: trained tokens that it weighed down or dropped"

    CRITIC_LOSS = "critic/loss", "loss", LOWER, "loss of the critic over the update"
    CRITIC_GRAD_NORM = "critic/grad_norm", "norm", NONE, "gradient norm of the critic before clipping"
    CRITIC_VALUE = "critic/value_mean", "reward", NONE, "mean value over the trained tokens, before the update"
    CRITIC_EXPLAINED = "critic/explained_variance", "share", HIGHER, "variance of the returns that the values explain"
    CRITIC_CLIPPED = "critic/clip_fraction", "share", NONE, "trained tokens whose value was clipped"

    WAITS_LONGEST = "waits/longest_s", "s", LOWER, "longest wait of the driver on another process that ended in this step"
    WAITS_DEADLINE = "waits/deadline_used", "share", LOWER, "largest share of its deadline that such a wait used; 1: it was missed"
    IDLE_TRAINER = "idle/trainer_fraction", "share", LOWER, "wall time of the step in which the trainer waited for groups"
    IDLE_ROLLOUT = "idle/rollout_fraction", "share", LOWER, "wall time of the step in which replicas decoded nothing, mean over replicas"
    TRAINER_TRAINING = "trainer_time/training", "share", HIGHER, "wall time since the line before: the optimizer step"
    TRAINER_GROUPS = "trainer_time/waiting_for_groups", "share", LOWER, "wall time: the step's groups are not complete; in sync and one_step_off also running groups before a publish"
    TRAINER_OVERDUE = "trainer_time/overdue_wait", "share", LOWER, "wall time: all groups but those that the step must train, for their lag, are there"
    TRAINER_PUBLISH = "trainer_time/publish", "share", LOWER, "wall time: a publish; beside training the commit and the copy of the weights, and the rest of a publish that takes longer than the step"
    TRAINER_SLEEP = "trainer_time/sleep", "share", LOWER, "wall time: engines give their memory back; only with placement=colocated above 0"
    TRAINER_CHECKPOINT = "trainer_time/checkpoint", "share", LOWER, "wall time: training waits for a checkpoint"
    TRAINER_EVALUATION = "trainer_time/evaluation", "share", LOWER, "wall time: training waits for an evaluation"
    TRAINER_PLANNING = "trainer_time/planning", "share", LOWER, "wall time: the plan of the step, and what of its commit and its record is not beside a copy of the weights or training"
    REPLICA_GENERATING = "replica_time/generating", "share", HIGHER, "time of all replicas between the last two health checks: they have requests"
    REPLICA_GATE = "replica_time/gate_closed", "share", LOWER, "the same: a publish holds them up"
    REPLICA_SLOTS = "replica_time/slots_exhausted", "share", LOWER, "the same: no request, because the limit on the lag, or the pacing, admits no further group"
    REPLICA_ENVIRONMENT = "replica_time/environment", "share", LOWER, "the same: no request, and environments or rewards work on trajectories"
    REPLICA_EVALUATION = "replica_time/evaluation", "share", NONE, "the same: leased to an evaluation"
    REPLICA_ASLEEP = "replica_time/asleep", "share", NONE, "the same: asleep while the trainer has the devices; only with placement=colocated above 0"
    REPLICA_RECOVERING = "replica_time/recovering", "share", LOWER, "the same: they start, are late or have died"
    SLEEP_BEGIN = "sleep/begin_s", "s", LOWER, "with placement=colocated: time until every engine had given its memory back and the step could begin"
    SLEEP_ASLEEP = "sleep/asleep_s", "s", NONE, "the same: time that engines slept since the line before, mean over replicas"
    SLEEP_WAKING = "sleep/waking_s", "s", LOWER, "the same: time that the slowest replica took to take its memory back, in the publish"
    SINKS_FAILED = "sinks/failed_records", "records", LOWER, "records that `observability.sinks` have not taken since the run began or resumed"
    CPU_COORDINATOR = "cpu/coordinator_s", "s", LOWER, "CPU time of the driver since it started"
    CPU_QUEUE = "cpu/queue_s", "s", LOWER, "CPU time of the message queue since it started, at the last health check"
    CPU_ROLLOUTER = "cpu/rollouter_s", "s", LOWER, "CPU time of the rollouter since it started, at the last health check"
    CPU_WORKERS = "cpu/workers_s", "s", LOWER, "CPU time of the rollouter's processes for rewards, environments and other code of the user since they started, at the last health check"
    CPU_REPLICAS = "cpu/replicas_s", "s", LOWER, "CPU time of all replicas since they started"
    CPU_TRAINERS = "cpu/trainers_s", "s", LOWER, "CPU time of all trainer ranks since they started, at the last check"
    # fmt: on


_SOMETIMES = (
    *(Metric.REWARD_ZERO_SIGNAL, Metric.REPREFILLED, Metric.KL_REFERENCE, Metric.ADVANTAGE_MEAN),
    *(Metric.ROUTER_BALANCE, Metric.SPARE_REPLICAS, Metric.KL_TEACHER, Metric.KL_TEACHER_TOP),
    *(Metric.DECODE_BATCH, Metric.PREEMPTIONS),
)
REQUIRED = frozenset(metric for metric in Metric if metric.is_required)
FAMILIES = tuple(metric for metric in Metric if metric.is_family)

REPLICA_TIME = {metric.partition("/")[2]: metric for metric in Metric if metric.group == "replica_time"}
"""The cause, as `rollout.replica_time` names it -> the metric."""

QUEUE_METRICS = {metric.partition("/")[2]: metric for metric in Metric if metric.group == "queue"}
"""The part of the key after "queue/", which is a field of `LedgerCounts` where it counts groups -> the metric."""


def metric_of(key: str) -> Metric | None:
    """The metric, or the family, that has this key."""
    return next((metric for metric in Metric if key == metric or (metric.is_family and key.startswith(metric))), None)


Record = Mapping[str, float]
"""The metrics of one step by their keys."""
