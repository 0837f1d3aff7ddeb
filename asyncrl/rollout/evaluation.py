"""The result of an evaluation of one held-out set, computed from single responses. Pure."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from asyncrl.types import EvalResult, Trajectory


@dataclass(frozen=True, slots=True)
class Answer:
    """The figures of one response that enter the result. `correct`: the reward's part of that name is positive, or the
    reward itself if there is no such part."""

    correct: bool
    reward: float
    response_tokens: int
    versions: frozenset[int]

    @classmethod
    def of(cls, trajectory: Trajectory) -> Answer:
        return cls(
            dict(trajectory.reward_parts).get("correct", trajectory.reward) > 0,
            trajectory.reward,
            len(trajectory.response_ids),
            frozenset(s.version for s in trajectory.segments if s.kind == "policy"),
        )


def summarise(
    name: str,
    answers: Sequence[Sequence[Answer | None]],
    pass_at: Sequence[int] = (),
    questions: Sequence[Hashable] | None = None,
) -> EvalResult:
    """The result of a held-out set.

    Args:
        answers: as many responses for each prompt; None for a failed one. At least one is not None.
        pass_at: the values k of pass@k, each at most the number of responses per prompt.
        questions: the question of each prompt, equal for equal questions; None: all differ.
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


# Statistics of judged responses: pass@k, mean@k and their confidence intervals.


NORMAL_95 = 1.959963984540054
"""Two-sided 95% quantile of the standard normal distribution."""


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Probability that at least one of k responses is right, drawn without replacement from `num_samples` of which
    `num_correct` are right. Unbiased.

    Raises ValueError: not 1 <= k <= num_samples, or not 0 <= num_correct <= num_samples.
    Source: Chen et al. 2021 (arXiv:2107.03374) eq. 1, as a product: the binomials overflow.
    """
    if not (1 <= k <= num_samples and 0 <= num_correct <= num_samples):
        raise ValueError(f"pass@{k} of {num_correct} right ones among {num_samples}")
    if num_samples - num_correct < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / n for n in range(num_samples - num_correct + 1, num_samples + 1))


def wilson_interval(rate: float, number: int) -> tuple[float, float]:
    """95% interval of a rate that was seen in `number` independent trials. Never empty, also at 0 and 1.

    Source: Wilson 1927, score interval without continuity correction.
    """
    z2 = NORMAL_95**2
    center = (rate + z2 / (2 * number)) / (1 + z2 / number)
    half = NORMAL_95 / (1 + z2 / number) * math.sqrt(rate * (1 - rate) / number + z2 / (4 * number**2))
    return max(0.0, min(rate, center - half)), min(1.0, max(rate, center + half))


def mean_interval(
    num_correct: Sequence[int], num_samples: int, questions: Sequence[Hashable] | None = None
) -> tuple[float, float]:
    """95% interval of the accuracy, over the choice of questions and the sampling of responses.

    Responses to one question are correlated, so the questions are the independent draws. With C questions, s_c right
    ones of n_c responses to question c, N responses in all and the mean m = sum s_c / N

        standard error^2 = C / (C - 1) * sum_c (s_c - m n_c)^2 / N^2

    and the interval is the normal one, cut to [0, 1]. With one response per question the interval is Wilson's. If all
    questions score equally the formula gives a single point, so Wilson's interval over the questions is used.

    Args:
        num_correct: right responses to each prompt, of `num_samples`.
        questions: [prompts], as in `summarise`.

    Source: Liang and Zeger 1986; Miller 2024 (arXiv:2411.00640), clustered standard errors, without the factor
    C / (C - 1) that corrects for few clusters (Cameron and Miller 2015, sec. VI).
    """
    counted: dict[Hashable, list[int]] = {}
    for question, correct in zip(range(len(num_correct)) if questions is None else questions, num_correct, strict=True):
        of = counted.setdefault(question, [0, 0])
        of[0] += correct
        of[1] += num_samples
    right, total, clusters = sum(num_correct), len(num_correct) * num_samples, len(counted)
    # Whole numbers, so that equal scores compare as equal.
    squares = sum((s * total - right * n) ** 2 for s, n in counted.values())
    mean = right / total
    if squares == 0 or total == clusters:
        return wilson_interval(mean, clusters)
    half = NORMAL_95 * math.sqrt(clusters / (clusters - 1) * squares) / total**2
    return max(0.0, mean - half), min(1.0, mean + half)
