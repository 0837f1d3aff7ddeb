"""What an evaluation of one held-out set found: `EvalResult`, and how it comes from single responses. Pure."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from asyncrl.rollout.evaluation.statistics import mean_interval, pass_at_k
from asyncrl.types import EvalResult, Trajectory


@dataclass(frozen=True, slots=True)
class Answer:
    """What counts of one response."""

    correct: bool
    reward: float
    response_tokens: int
    versions: frozenset[int]

    @classmethod
    def of(cls, trajectory: Trajectory) -> Answer:
        return cls(
            is_correct(trajectory),
            trajectory.reward,
            len(trajectory.response_ids),
            frozenset(s.version for s in trajectory.segments if s.kind == "policy"),
        )


def is_correct(trajectory: Trajectory) -> bool:
    """The reward's own part `correct` where it reports one, else a positive reward."""
    return dict(trajectory.reward_parts).get("correct", trajectory.reward) > 0


def summarise(
    name: str,
    answers: Sequence[Sequence[Answer | None]],
    pass_at: Sequence[int] = (),
    questions: Sequence[Hashable] | None = None,
) -> EvalResult:
    """The result of a held-out set.

    Args:
        answers: per prompt the same number of responses; None for one that failed. At least one came.
        pass_at: the k of the pass@k, each at most that number.
        questions: per prompt what it asks, equal for prompts that ask the same; None: each asks its own.
    """
    samples = len(answers[0])
    correct = [sum(a is not None and a.correct for a in prompt) for prompt in answers]
    came = [a for prompt in answers for a in prompt if a is not None]
    prompts = len(answers)
    return EvalResult(
        name=name,
        accuracy=sum(correct) / (prompts * samples),
        reward_mean=math.fsum(a.reward for a in came) / len(came),
        response_tokens_mean=sum(a.response_tokens for a in came) / len(came),
        num_prompts=prompts,
        num_failed=prompts * samples - len(came),
        samples=samples,
        interval=mean_interval(correct, samples, questions),
        pass_at=tuple((k, math.fsum(pass_at_k(samples, c, k) for c in correct) / prompts) for k in pass_at),
        pass_rates=tuple(c / samples for c in correct),
        versions=tuple(sorted(frozenset[int]().union(*(a.versions for a in came)))),
        num_questions=prompts if questions is None else len(set(questions)),
    )
