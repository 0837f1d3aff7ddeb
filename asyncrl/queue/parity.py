"""The parity gate: whether replicas and trainer compute the same policy. Pure.

The tokens of lag 0 were sampled with the weights that are trained, so over them both give the same log-probabilities up
to rounding. Where they do not, the run trains another policy than the one that it samples, at any lag. Bounds:

    both in float32                 0.001 nats a token, 0.1 % of the ratios outside [1/2, 2]   (measured: 1e-6, none)
    16 bits, or several updates     0.05 nats, 5 %                                             (measured: 0.002, 1 %)
    quantised                       0.3 nats, 20 %

The measurements are in benchmarks/results/logprob_mismatch*.md. "Several updates": all updates of a step but its first
change the policy before they measure it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from asyncrl.config.recipe import Recipe
from asyncrl.types.metrics import Metric


@dataclass(frozen=True, slots=True)
class Parity:
    """Bounds for the tokens of lag 0: of their divergence, and of the share of ratios outside [1/2, 2]."""

    nats: float
    tails: float

    @classmethod
    def of(cls, recipe: Recipe) -> Parity | None:
        """None: no parity is to be expected, as top_p and top_k change the sampled distribution alone."""
        rollout, trainer = recipe.rollout, recipe.trainer
        sampling = rollout.sampling
        if (sampling.top_p < 1 or sampling.top_k > 0) and not sampling.keep_sets:
            return None
        arguments = {**rollout.vllm.engine_args, **rollout.sglang.server_args}
        if rollout.vllm.quantization or any("quant" in name or "kv_cache" in name for name in arguments):
            return cls(0.3, 0.2)
        computed = {recipe.model.inference_dtype, getattr(trainer, trainer.backend).param_dtype}
        is_exact = computed == {"float32"} and recipe.batch.num_minibatches == recipe.batch.num_epochs == 1
        return cls(0.001, 0.001) if is_exact else cls(0.05, 0.05)

    def misfit(self, record: Mapping[str, float]) -> str | None:
        """What is out of bounds in a step's metrics; None: nothing, or no trained token has lag 0."""
        nats, tails = (record.get(family.of("0")) for family in (Metric.LAG_KL, Metric.LAG_TAILS))
        if nats is None or tails is None or (abs(nats) <= self.nats and tails <= self.tails):
            return None
        return (
            f"over the tokens of lag 0 their log-probabilities differ by {nats:.3g} nats a token (at most "
            f"{self.nats:g}), and {tails:.2%} of the ratios are outside [1/2, 2] (at most {self.tails:.1%})"
        )
