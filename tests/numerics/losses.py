"""Random tokens for the tests of losses, and derivatives by finite differences."""

from dataclasses import dataclass, replace

import numpy as np
import torch

from asyncrl.algorithms.loss import LossInputs

FLOATS = ("logprobs", "old_logprobs", "behavior_logprobs", "advantages", "weights", "lags", "entropy", "reference")


@dataclass(frozen=True, eq=False)
class Tokens:
    """The fields of `LossInputs` in numpy, [n] each. Advantages are those of trajectories."""

    logprobs: np.ndarray
    old_logprobs: np.ndarray
    behavior_logprobs: np.ndarray
    advantages: np.ndarray
    weights: np.ndarray
    lags: np.ndarray
    entropy: np.ndarray
    reference: np.ndarray
    mask: np.ndarray
    sequences: np.ndarray

    def torch(self, dtype: torch.dtype = torch.float64) -> LossInputs:
        fields = {name: torch.tensor(getattr(self, name), dtype=dtype) for name in FLOATS}
        return LossInputs(
            **{("reference_logprobs" if name == "reference" else name): value for name, value in fields.items()}
            | {"logprobs": fields["logprobs"].requires_grad_(), "entropy": fields["entropy"].requires_grad_()},
            mask=torch.tensor(self.mask),
            sequences=torch.tensor(self.sequences),
        )

    def pick(self, index: np.ndarray) -> "Tokens":
        """The tokens at `index`, with their trajectories numbered anew in that order."""
        picked = {name: getattr(self, name)[index] for name in (*FLOATS, "mask")}
        sequences = self.sequences[index]
        starts = np.append(True, sequences[1:] != sequences[:-1])[: len(sequences)]
        return Tokens(**picked, sequences=np.cumsum(starts) - 1)

    def trajectories(self) -> list[np.ndarray]:
        """Indices of the tokens of each trajectory."""
        return [np.flatnonzero(self.sequences == i) for i in range(int(self.sequences.max()) + 1)]

    def with_(self, **changes) -> "Tokens":
        return replace(self, **changes)


def draw(seed: int, sizes: tuple[int, ...] = (1, 7, 30, 12, 1, 25, 40), spread: float = 0.3, masked: float = 0.3):
    """Trajectories of `sizes` tokens whose log-probabilities differ between policies by about `spread`."""
    rng = np.random.default_rng(seed)
    n = sum(sizes)
    sequences = np.repeat(np.arange(len(sizes)), sizes)
    logprobs = -rng.uniform(0.5, 5, n)
    near = [logprobs + rng.normal(0, spread, n) + rng.normal(0, spread, len(sizes))[sequences] for _ in range(3)]
    near = [np.minimum(x, -1e-3) for x in near]
    return Tokens(
        logprobs=logprobs,
        old_logprobs=near[0],
        behavior_logprobs=near[1],
        reference=near[2],
        advantages=rng.normal(size=len(sizes))[sequences],
        weights=rng.uniform(0.1, 1, n),
        lags=rng.integers(0, 5, n).astype(float),
        entropy=rng.uniform(0, 3, n),
        mask=rng.random(n) >= masked,
        sequences=sequences,
    )


def clipped_surrogate(t: Tokens, logprobs: np.ndarray, low: float = 0.2, high: float = 0.28) -> np.ndarray:
    """PPO eq. 7, negated: -min(r A, clip(r, 1 - low, 1 + high) A) of every token, masked or not."""
    r = np.exp(logprobs - t.old_logprobs)
    return -np.minimum(r * t.advantages, r.clip(1 - low, 1 + high) * t.advantages)


def slopes(value, point: np.ndarray, step: float = 1e-6) -> np.ndarray:
    """The gradient of the scalar function `value` at `point` [n], by central differences."""
    found = np.zeros_like(point)
    for i in range(len(point)):
        up, down = point.copy(), point.copy()
        up[i] += step
        down[i] -= step
        found[i] = (value(up) - value(down)) / (2 * step)
    return found
