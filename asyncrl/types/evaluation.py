"""The result of an evaluation of one held-out set."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.types.metrics import Metric


@dataclass(frozen=True, slots=True)
class EvalResult:
    """One held-out set. `accuracy` is the share of right responses, over `num_prompts` prompts with `samples` responses
    each (mean@samples); `interval` is its 95% interval; `pass_at` are pairs (k, pass@k), means over the prompts.

    `reward_mean` and `response_tokens_mean` are over the responses that came. One whose environment or reward raised
    counts as not right, and in `num_failed`. `pass_rates`: share of right responses to each prompt, in their order.
    `versions`: policy versions that sampled the tokens, ascending; one, unless every replica was lost in the middle.
    `num_questions`: different ones among the prompts, which are what `interval` counts.
    """

    name: str
    accuracy: float
    reward_mean: float
    response_tokens_mean: float
    num_prompts: int
    num_failed: int
    samples: int = 1
    interval: tuple[float, float] = (0.0, 1.0)
    pass_at: tuple[tuple[int, float], ...] = ()
    pass_rates: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()
    num_questions: int = 0

    def metrics(self) -> dict[str, float]:
        """The metrics of this set, by the names of `metrics.jsonl`."""
        found = {Metric.EVAL_ACCURACY_OF.of(self.name): self.accuracy}
        if self.samples > 1:
            found[Metric.EVAL_MEAN.of(f"{self.samples}/{self.name}")] = self.accuracy
        return found | {Metric.EVAL_PASS.of(f"{k}/{self.name}"): value for k, value in self.pass_at}
