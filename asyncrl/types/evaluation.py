"""The result of an evaluation of one held-out set."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.types.metrics import Metric


@dataclass(frozen=True, slots=True)
class EvalResult:
    """The result of one held-out set. `accuracy` is the share of right responses, over `num_prompts` prompts with
    `samples` responses each (mean@samples); `interval` is its 95% interval; `pass_at` are pairs (k, pass@k), means over
    the prompts.

    `reward_mean` and `response_tokens_mean` are over completed responses; a response whose environment or reward raised
    counts as wrong and in `num_failed`. `pass_rates`: share of right responses per prompt. `versions`: policy versions
    of the tokens, ascending; more than one only if every replica was lost midway. `num_questions`: distinct prompts,
    the sample size of `interval`. `num_asked`: prompts of the set, of which `num_prompts` were answered before the
    deadline; 0: all. `shown`: (prompt, response, reward) of the first few.
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
    num_asked: int = 0
    shown: tuple[tuple[str, str, float], ...] = ()

    def metrics(self) -> dict[str, float]:
        """The metrics of this set, by the names of `metrics.jsonl`."""
        found = {Metric.EVAL_ACCURACY_OF.of(self.name): self.accuracy}
        if self.samples > 1:
            found[Metric.EVAL_MEAN.of(f"{self.samples}/{self.name}")] = self.accuracy
        return found | {Metric.EVAL_PASS.of(f"{k}/{self.name}"): value for k, value in self.pass_at}
