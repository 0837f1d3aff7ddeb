"""Diagnoses a run from its metrics and events: findings in words, worst first. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Literal

from asyncrl.report.lifetimes import Lifetime
from asyncrl.report.run_files import RunFiles
from asyncrl.types import events
from asyncrl.types.guard import SUSPECTS
from asyncrl.types.metrics import Metric

WORTH_IT = 0.15
"""Share of the trainer's time above which a wait is worth shortening before training itself."""
_FLAT_STEPS = 10
Severity = Literal["bad", "warning", "hint"]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One finding for the user.

    Attributes:
        severity: "bad" spoils the run, "warning" costs much of it, "hint" names its bottleneck.
        title: the problem in a few words.
        evidence: the figures that show it.
        remedy: what to change.
        metrics: keys of the charts that show it.
    """

    severity: Severity
    title: str
    evidence: str
    remedy: str
    metrics: tuple[str, ...] = ()


def findings(run: RunFiles, lives: Sequence[Lifetime]) -> list[Diagnosis]:
    """All findings, worst first."""
    order: dict[Severity, int] = {"bad": 0, "warning": 1, "hint": 2}
    rules = (_replicas, _ratio, _guard, _signal, _stuck, _unread)
    found = [*_where_time_goes(run, lives), *(each for rule in rules for each in rule(run))]
    return sorted(found, key=lambda each: order[each.severity])


def helps_most(run: RunFiles) -> str:
    """One sentence: the change that would speed up the run most, and an upper bound, from where its time goes."""
    training = _mean(run, Metric.TRAINER_TRAINING)
    environment, recovering = _mean(run, Metric.REPLICA_ENVIRONMENT), _mean(run, Metric.REPLICA_RECOVERING)
    of_replicas = {  # a run that is too short to tell counts as generating
        "more replicas, or shorter responses": _mean(run, Metric.REPLICA_GENERATING),
        "a faster environment or reward, or more workers for it": environment,
        "replicas that do not fail": recovering,
    }
    waits = {
        max(of_replicas, key=lambda what: of_replicas[what]): Metric.TRAINER_GROUPS,
        "giving up stragglers (staleness.on_overdue) or a higher staleness.max_lag": Metric.TRAINER_OVERDUE,
        "a cheaper publish (weights.transport, staleness.publish_every_steps)": Metric.TRAINER_PUBLISH,
        "fewer checkpoints, or checkpoint.background": Metric.TRAINER_CHECKPOINT,
        "evaluation on leased replicas (eval.leased_replicas), or less often": Metric.TRAINER_EVALUATION,
    }
    share, helps = max((_mean(run, metric), what) for what, metric in waits.items())
    if share >= WORTH_IT:
        gain = f"at most {1 / (1 - share):.1f} times as fast" if share < 1 else "it does nothing else"
        return f"For speed, what would help most is {helps}: {share:.0%} of the trainer's time goes there ({gain})."
    helps = "a faster optimizer step: more trainer ranks (on a CPU: trainer.num_threads)"
    return f"For speed, what would help most is {helps}. It takes {training:.0%} of the trainer's time."


def of_learning(run: RunFiles) -> list[Diagnosis]:
    """The findings on what the policy learns, of a few steps or of a run."""
    return [found for rule in (_ratio, _signal, _stuck) for found in rule(run)]


def _late(run: RunFiles, key: str) -> list[float]:
    """The values of a metric without the first fifth of the steps, in which a run fills up."""
    values = run.series(key)
    return [value for value in values[len(values) // 5 :] if value is not None]


def _mean(run: RunFiles, key: str) -> float:
    return fmean(_late(run, key) or [0.0])


def _where_time_goes(run: RunFiles, lives: Sequence[Lifetime]) -> Iterator[Diagnosis]:
    waits, overdue = _mean(run, Metric.TRAINER_GROUPS), _mean(run, Metric.TRAINER_OVERDUE)
    generating = _mean(run, Metric.REPLICA_GENERATING)
    slots, environment = _mean(run, Metric.REPLICA_SLOTS), _mean(run, Metric.REPLICA_ENVIRONMENT)
    # Generation side: stragglers, then the slowest stage.
    if overdue >= 0.1:
        yield _straggler(overdue, sorted(life.ready - life.admitted for life in lives if life.ready and life.admitted))
    if environment >= 0.25:
        yield Diagnosis(
            "warning",
            "Slow environment or reward",
            f"The replicas have no request for {environment:.0%} of their time, while environments or rewards work on "
            f"trajectories. The trainer waits for groups for {waits:.0%} of its time.",
            "Profile the reward or the environment; raise reward.workers or rollout.tool_use.tool_workers.",
            (Metric.REPLICA_ENVIRONMENT, Metric.TRAINER_GROUPS),
        )
    elif waits >= 0.25:
        yield Diagnosis(
            "warning",
            "Starved trainer",
            f"The trainer waits for groups for {waits:.0%} of its time, and the replicas generate for {generating:.0%} "
            "of theirs: generation bounds this run.",
            "Give more replicas (rollout.num_replicas), or shorter responses; fewer trainer ranks would do as well.",
            (Metric.TRAINER_GROUPS, Metric.REPLICA_GENERATING, Metric.QUEUE_READY),
        )
    # Training side.
    if slots >= 0.25 and waits + overdue < 0.1:
        yield Diagnosis(
            "hint",
            "Training bounds this run",
            f"The replicas have no request for {slots:.0%} of their time, because the limit on the lag, or the "
            "pacing, admits no further group, and the trainer never waits.",
            "Fewer replicas would do as well; more trainer ranks, or on a CPU trainer.num_threads, would be faster.",
            (Metric.REPLICA_SLOTS, Metric.TRAINER_TRAINING),
        )
    for metric, name, do in (
        (Metric.TRAINER_PUBLISH, "publishes", "staleness.publish_every_steps, weights.transport=ipc or collective"),
        (Metric.TRAINER_CHECKPOINT, "checkpoints", "checkpoint.every_steps higher, checkpoint.background=true"),
        (Metric.TRAINER_EVALUATION, "evaluations", "eval.leased_replicas, or eval.every_steps higher"),
    ):
        if (share := _mean(run, metric)) >= 0.2:
            found = f"Training waits for {name} for {share:.0%} of its time."
            yield Diagnosis("warning", f"Training waits for {name}", found, f"Try {do}.", (metric,))


def _straggler(overdue: float, generation_s: Sequence[float]) -> Diagnosis:
    """`generation_s`: of the groups that became ready, shortest first."""
    evidence = (
        f"For {overdue:.0%} of its time the trainer waits only for groups that it must train before they are too old."
    )
    if generation_s:
        typical, longest = median(generation_s), generation_s[int(0.99 * (len(generation_s) - 1))]
        evidence += f" Half of the groups are ready after {typical:.1f} s, one in a hundred takes over {longest:.1f} s."
    return Diagnosis(
        "warning",
        "Overdue stragglers",
        evidence,
        "Set staleness.on_overdue=mask or refill, lower rollout.sampling.max_response_tokens or "
        "rollout.trajectory_timeout_s, or raise staleness.max_lag.",
        (Metric.TRAINER_OVERDUE, Metric.OVERDUE_WAIT, Metric.LAG_MAX),
    )


def _replicas(run: RunFiles) -> Iterator[Diagnosis]:
    out: dict[int, str] = {}
    failures: dict[int, int] = {}
    # `out`: replicas that are out of the run at its end, with their last error.
    for event in run.events:
        kind, replica = event.get("event"), event.get("replica")
        if replica is None:
            continue
        if kind in (events.ReplicaSuspended.kind, events.ReplicaFailed.kind):
            out[replica] = str(event.get("error", "")).strip().splitlines()[-1:][0] if event.get("error") else ""
            failures[replica] = failures.get(replica, 0) + 1
        elif kind in (events.ReplicaServing.kind, events.ReplicaRejoined.kind, events.ReplicaLeft.kind):
            out.pop(replica, None)
            if event.get("why") == "no_place":
                out[replica] = "no node has room for it"
    recovering = _mean(run, Metric.REPLICA_RECOVERING)
    for replica, error in sorted(out.items()):
        yield Diagnosis(
            "bad",
            f"Replica {replica} is fenced off",
            f"It serves no more; replicas are away for {recovering:.0%} of the time. Error: {error[:300] or 'none'}",
            "See the log of its machine and faults/; recovery.max_replica_restarts and ray.health_timeout_s decide "
            "when a replica is replaced.",
            (Metric.PUBLISH_REPLICAS, Metric.REPLICA_RECOVERING),
        )
    for replica, count in sorted(failures.items()):
        if replica not in out and count >= 3:
            yield Diagnosis(
                "warning",
                f"Replica {replica} fails again and again",
                f"It failed {count} times and came back each time.",
                "See faults/ for its stacks; look at the memory and the GPU of its machine.",
                (Metric.PUBLISH_REPLICAS, Metric.REPLICA_RECOVERING),
            )


def _ratio(run: RunFiles) -> Iterator[Diagnosis]:
    # Judge the end of the run: a collapse lasts.
    window = max(3, len(run.metrics) // 5)
    own = [v for v in run.series(Metric.LAG_KL.of("0")) if v is not None]
    settings = run.settings
    is_loose = settings.get("rollout.engine") == "remote" or any(
        value for key, value in settings.items() if key.startswith("rollout.") and ("quant" in key or "kv_cache" in key)
    )
    if own and (apart := median(map(abs, own[:3]))) > (0.3 if is_loose else 0.05):  # the bounds of docs/staleness.md
        yield Diagnosis(
            "bad",
            "Replicas and trainer compute different policies",
            f"Over the tokens of lag 0 of the first steps, which both compute with the same weights, they differ by "
            f"{apart:.2f} nats a token.",
            f"No lag and no learning rate is the cause: {SUSPECTS}.",
            (Metric.LAG_KL.of("0"), Metric.RATIO_MEAN),
        )
        return
    ratio = [v for v in run.series(Metric.RATIO_MEAN)[-window:] if v is not None]
    clipped = [v for v in run.series(Metric.CLIPPED)[-window:] if v is not None]
    kl = [v for v in run.series(Metric.KL_BEHAVIOR)[-window:] if v is not None]
    rewards = [v for v in run.series(Metric.REWARD_MEAN) if v is not None]
    if not ratio:
        return
    effective = [v for v in run.series(Metric.EFFECTIVE_SAMPLES)[-2:] if v is not None]
    # Four signs of drift: ratios far from 1, clipped tokens, policies that diverge, a few tokens with all the weight.
    off = median(abs(value - 1) for value in ratio)
    share, drift = median(clipped or [0.0]), median(map(abs, kl or [0.0]))
    if off >= 0.25 or share >= 0.35 or drift >= 0.5 or max(effective, default=1.0) < 0.5:
        evidence = (
            f"Over the last {window} steps the mean ratio of policy to behaviour probability is {median(ratio):.2f} "
            f"(1 is on-policy), {share:.0%} of the tokens are clipped, and the divergence is {drift:.2f} nats."
        )
        if effective:
            evidence += f" The last tokens weigh as much as {effective[-1]:.0%} of them."
        if len(rewards) > window and (best := _best(rewards, window)) - fmean(rewards[-window:]) > 0.2 * abs(best) > 0:
            evidence += f" The reward fell from {best:.3f} to {fmean(rewards[-window:]):.3f}."
        yield Diagnosis(
            "bad",
            "Collapsed importance ratio",
            evidence,
            "Lower trainer.lr (docs/tuning.md) or staleness.max_lag; use a correction (algorithm.corrections), preset "
            "dppo or m2po.",
            (Metric.RATIO_MEAN, Metric.CLIPPED, Metric.KL_BEHAVIOR, Metric.EFFECTIVE_SAMPLES, Metric.REWARD_MEAN),
        )


def _guard(run: RunFiles) -> Iterator[Diagnosis]:
    changes = run.of_kind(events.GuardChanged.kind)
    if not changes:
        return
    last, lowest = changes[-1], min(event.get("limit", 0) for event in changes)
    actions = ", ".join(f"step {event.get('step')}: {event.get('action')}" for event in changes[-5:])
    evidence = (
        f"It acted {len(changes)} times; the lowest limit on the lag was {lowest}, the last {last.get('limit')}. "
        f"Last actions: {actions}. Reason of the last: {last.get('reason')}."
    )
    metrics = Metric.GUARD_SEVERITY, Metric.GUARD_LIMIT, Metric.EFFECTIVE_SAMPLES, Metric.KL_BEHAVIOR
    remedy = "Lower trainer.lr or staleness.max_lag, or take a loss or a correction that bears more lag (dppo, m2po)."
    if not last.get("acted"):
        title = "The off-policy guard would have acted"
        yield Diagnosis("warning", title, evidence, f"Set staleness.guard=act. {remedy}", metrics)
    elif last.get("action") == "stopped":
        remedy += " Go on from a checkpoint before the first of these steps."
        yield Diagnosis("bad", "Stopped by the off-policy guard", evidence, remedy, metrics)
    else:
        yield Diagnosis("warning", "Held back by the off-policy guard", evidence, remedy, metrics)


def _best(values: Sequence[float], window: int) -> float:
    """The highest mean of a window."""
    return max(fmean(values[at : at + window]) for at in range(len(values) - window + 1))


def _signal(run: RunFiles) -> Iterator[Diagnosis]:
    no_signal = "Most groups carry no signal"
    for metric, limit, title, do in (
        (Metric.FILTERED_SHARE, 0.5, no_signal, "Take prompts of middling difficulty (data curriculum)."),
        (Metric.REWARD_ZERO_SIGNAL, 0.5, no_signal, "Filter them, or take prompts of middling difficulty."),
        (Metric.TRUNCATED, 0.3, "Many responses are cut off", "Raise rollout.sampling.max_response_tokens."),
        (Metric.FAILED_SHARE, 0.05, "Groups fail", "See quarantine.jsonl for their errors."),
        (
            Metric.REWARD_PART.of("judge.unreadable"),
            0.2,
            "Answers of the judge cannot be read",
            "Correct reward.judge.prompt or pattern; raise its max_tokens or the judge's max_model_len.",
        ),
    ):
        if (share := _mean(run, metric)) >= limit:
            meaning = metric.meaning if isinstance(metric, Metric) else "share of the trained trajectories"
            yield Diagnosis("warning", title, f"{meaning}: {share:.0%}.", do, (metric,))
    trained = [v for v in run.series(Metric.REWARD_PART.of("agent_trained_share")) if v is not None]
    if trained and fmean(trained) < 0.9:
        evidence = f"Of the tokens that agents sampled, {fmean(trained):.0%} are trained: their histories part."
        do = "Set rollout.agent.train=all_branches; the log names the first two texts that differ."
        yield Diagnosis("warning", "Sampled tokens are left out", evidence, do)
    missing = [line for line in run.metrics if line.get(Metric.LOSS) is None or line.get(Metric.GRAD_NORM) is None]
    if missing:
        evidence = f"Loss or gradient norm is no number in {len(missing)} steps, first {missing[0][Metric.STEP]:.0f}."
        yield Diagnosis(
            "bad", "Loss is not finite", evidence, "Lower trainer.lr; look at the samples of that step.", (Metric.LOSS,)
        )


def _stuck(run: RunFiles) -> Iterator[Diagnosis]:
    rewards = [value for value in run.series(Metric.REWARD_MEAN) if value is not None][-_FLAT_STEPS:]
    if len(rewards) == _FLAT_STEPS and max(rewards) - min(rewards) < 1e-9:
        yield Diagnosis(
            "warning",
            "The reward does not change",
            f"It has been {rewards[-1]:.3f} for {_FLAT_STEPS} steps.",
            "See samples.jsonl: does the reward find the answers (reward.function), are they cut off "
            "(rollout.sampling.max_response_tokens), are the prompts too hard or too easy?",
            (Metric.REWARD_MEAN,),
        )
    entropy = [value for value in run.series(Metric.ENTROPY) if value is not None]
    if len(entropy) >= _FLAT_STEPS and max(entropy[-3:]) < 0.05 * entropy[0]:
        yield Diagnosis(
            "warning",
            "The entropy is gone",
            f"It fell from {entropy[0]:.3f} to {entropy[-1]:.3f} nats a token: the policy tries nothing new.",
            "Raise algorithm.entropy_coefficient or algorithm.clip_high, or lower trainer.lr.",
            (Metric.ENTROPY,),
        )


def _unread(run: RunFiles) -> Iterator[Diagnosis]:
    if left_out := ", ".join(f"{count} of {file}" for file, count in run.unread.items() if count):
        evidence = f"Lines that hold no record of this version are left out: {left_out}."
        remedy = "See asyncrl-audit for damaged lines of events.jsonl; another version of asyncrl has other records."
        yield Diagnosis("hint", "Some lines cannot be read", evidence, remedy)
