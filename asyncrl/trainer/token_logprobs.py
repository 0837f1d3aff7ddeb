"""Log-probabilities of chosen tokens from hidden states, without ever holding all of [tokens, vocabulary].

The output layer and the softmax run over chunks of rows, in the forward pass and again in the backward pass, which
recomputes the chunk's logits from the saved log-sum-exp. Extra memory peaks at a few chunks; the price is one more
product with the output matrix. Where tensor-parallel ranks split the output layer (`SplitVocabulary`), the forward pass
makes two reductions per chunk, over the largest logit and over three sums; the backward pass makes none.
Legend: N tokens, C tokens of a chunk, D hidden size, V rows of the vocabulary on this rank, K further tokens per
position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from asyncrl.trainer.model_tensors import logits_per_chunk
from asyncrl.trainer.step.model import Peers

IMPOSSIBLE = -1e4
"""Log-probability of a token outside the vocabulary: finite, and its probability is 0 in float32."""


@dataclass(frozen=True, slots=True)
class LogitRules:
    """How logits are formed.

    Attributes:
        per_chunk: entries of one chunk; None: the device's default.
        in_float32: products of 16-bit numbers are not rounded to 16 bits. The backward pass forms the same logits again
            and rounds their gradients to the dtype of the weight.
        cap: logits are cap tanh(logit / cap), before the temperature (Gemma 2); 0: they are as they are.
    """

    per_chunk: int | None = None
    in_float32: bool = False
    cap: float = 0.0


@dataclass(frozen=True, slots=True)
class SplitVocabulary:
    """An output layer of which each rank of `group` holds as many rows, in the order of the ranks; rows from `size` on
    are padding and ignored."""

    group: dist.ProcessGroup
    size: int


def token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    *,
    temperature: float,
    rules: LogitRules = LogitRules(),
    split: SplitVocabulary | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`log_softmax((hidden @ weight.T + bias) / temperature)` at the targets, in float32.

    Args:
        hidden: [N, D], weight: [V, D], bias: [V] or None, all of one dtype. Logits are formed in this dtype, as the
            replicas do, or as `rules` say; everything after them is float32.
        targets: [N] int64.
        split: `weight` holds this rank's rows, `hidden` is the same on every rank, and its gradient is this rank's
            share: sum it over the ranks. Without a bias. Collective. None: `weight` holds the whole vocabulary.

    Returns:
        Log-probabilities [N] float32 and entropies [N] float32 in nats, both differentiable, the same on every rank.
        Unused outputs cost nothing in the backward pass.
    """
    none = targets.new_zeros(len(targets), 0)
    found = _TokenLogprobs.apply(hidden, weight, bias, targets, none, _Rows.of(weight, temperature, rules, split))
    return found[0], found[1]  # pyright: ignore[reportIndexIssue, reportOptionalSubscript]


def logprobs_beside(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    others: torch.Tensor,
    *,
    temperature: float,
    rules: LogitRules = LogitRules(),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `token_logprobs`, plus log-probabilities of further tokens at the same positions, from the same logits.

    Args:
        others: [N, K] int64, at least 0. Tokens from V on are of a larger vocabulary and have probability 0 here.

    Returns:
        As `token_logprobs`, then [N, K] float32, differentiable; `IMPOSSIBLE` for tokens from V on.
    """
    rows = weight.shape[0]
    logprobs, entropy, of_others = _TokenLogprobs.apply(  # pyright: ignore[reportGeneralTypeIssues]
        hidden, weight, bias, targets, others.clamp(max=rows - 1), _Rows.of(weight, temperature, rules, None)
    )
    return logprobs, entropy, of_others.masked_fill(others >= rows, IMPOSSIBLE)


def among_kept(
    logprobs: torch.Tensor, entropy: torch.Tensor, of_kept: torch.Tensor, kept: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies [N] float32 of the distribution over the kept tokens alone.

    Args:
        logprobs, entropy: [N] float32, over the vocabulary.
        of_kept: [N, K] float32, log-probabilities of the kept tokens over the vocabulary.
        kept: [N, K] bool, which entries are tokens. Rows without tokens stay as they are.
    """
    has_some = kept.any(-1)
    within = of_kept.masked_fill(~kept & has_some[:, None], float("-inf"))
    normalizer = within.logsumexp(-1)
    share = (within - normalizer[:, None]).masked_fill(~kept, 0.0)
    own_entropy = -(share.exp() * share).sum(-1)
    return torch.where(has_some, logprobs - normalizer, logprobs), torch.where(has_some, own_entropy, entropy)


@dataclass(frozen=True, slots=True)
class _Rows:
    """This rank's rows of the vocabulary, `[first, first + count)`, and how their logits are formed: in chunks of
    `chunk` tokens, capped, multiplied by `scale`. `group` None: the rank holds all rows."""

    first: int
    count: int
    peers: Peers
    chunk: int
    scale: float
    rules: LogitRules

    @classmethod
    def of(cls, weight: torch.Tensor, temperature: float, rules: LogitRules, split: SplitVocabulary | None) -> _Rows:
        held, group, first = weight.shape[0], None, 0
        count = held
        if split is not None:
            group, first = split.group, split.group.rank() * held
            count = min(max(split.size - first, 0), held)
        # By the rows held, not by `count`: all ranks must make the same reductions.
        chunk = max(1, (rules.per_chunk or logits_per_chunk(weight.device.type)) // held)
        return cls(first, count, Peers(group), chunk, 1.0 / temperature, rules)

    def own(self, targets_C: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """1.0 if the target is one of this rank's rows, else 0.0; and its local row, 0 for the others."""
        if self.peers.group is None:
            return torch.ones_like(targets_C, dtype=torch.float32), targets_C
        own_C = (targets_C >= self.first) & (targets_C < self.first + self.count)
        return own_C.float(), (targets_C - self.first).where(own_C, 0)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_N: torch.Tensor,
        others_NK: torch.Tensor,
        rows: _Rows,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logprobs_N, normalizers_N, entropies_N = (
            torch.empty(len(targets_N), dtype=torch.float32, device=hidden_ND.device) for _ in range(3)
        )
        logprobs_NK = torch.empty(others_NK.shape, dtype=torch.float32, device=hidden_ND.device)
        product = _Product(weight_VD[: rows.count], bias_V, rows.scale, rows.rules)
        for start in range(0, len(targets_N), rows.chunk):
            part = slice(start, start + rows.chunk)
            logits_CV = product(hidden_ND[part])
            largest_C = logits_CV.amax(-1) if rows.count else logits_CV.new_full((len(logits_CV),), -torch.inf)
            shifted_CV = logits_CV.sub_(rows.peers.largest(largest_C)[:, None])
            target_C, at_C = rows.own(targets_N[part])
            if rows.count:
                target_C = target_C * shifted_CV.gather(-1, at_C[:, None]).squeeze(-1)
            exp_CV = shifted_CV.exp()
            sums = torch.stack([exp_CV.sum(-1), exp_CV.mul_(shifted_CV).sum(-1), target_C])  # in this order: in place
            total_C, weighted_C, target_C = rows.peers.add_up(sums)
            rest_C = total_C.log()
            logprobs_N[part] = target_C - rest_C
            logprobs_NK[part] = shifted_CV.gather(-1, others_NK[part]) - rest_C[:, None]
            entropies_N[part] = rest_C - weighted_C / total_C
            normalizers_N[part] = rest_C + largest_C
            del logits_CV, shifted_CV, exp_CV  # or they would coexist with the next chunk
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, targets_N, others_NK, normalizers_N, entropies_N)
        ctx.rows = rows
        ctx.set_materialize_grads(False)
        return logprobs_N, entropies_N, logprobs_NK

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        grad_N, grad_entropy_N, grad_NK = grads
        hidden_ND, weight_VD, bias_V, targets_N, others_NK, normalizers_N, entropies_N = ctx.saved_tensors
        rows: _Rows = ctx.rows
        grad_N = torch.zeros_like(normalizers_N) if grad_N is None else grad_N
        whole_N = grad_N if grad_NK is None else grad_N + grad_NK.sum(-1)
        # A log-probability's gradient reaches all logits through the softmax, so its sum over targets and others
        # counts.
        grad_hidden_ND = torch.empty_like(hidden_ND)
        # float32 sums: bfloat16 would lose the small contributions of late chunks
        _, needs_weight, needs_bias, *_ = ctx.needs_input_grad  # neither if the output layer is frozen
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if needs_weight else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=torch.float32) if needs_bias else None
        product = _Product(weight_VD[: rows.count], bias_V, rows.scale, rows.rules)
        for start in range(0, len(targets_N), rows.chunk):
            part = slice(start, start + rows.chunk)
            logits_CV = product(hidden_ND[part])
            slope_CV = product.slope(logits_CV)
            scaled_C1 = whole_N[part, None] * rows.scale
            # d logprob / d logit = onehot(token) - softmax
            logp_CV = logits_CV.sub_(normalizers_N[part, None])
            if grad_entropy_N is None:
                grad_CV = logp_CV.exp_().mul_(-scaled_C1)
            else:  # d entropy / d logit = - p (log p + entropy)
                weight_CV = (logp_CV + entropies_N[part, None]).mul_(grad_entropy_N[part, None] * rows.scale)
                grad_CV = weight_CV.add_(scaled_C1).mul_(logp_CV.exp_()).neg_()
            own_C, at_C = rows.own(targets_N[part])
            if rows.count:
                grad_CV.scatter_add_(-1, at_C[:, None], (grad_N[part] * own_C * rows.scale)[:, None])
            if grad_NK is not None:
                grad_CV.scatter_add_(-1, others_NK[part], grad_NK[part] * rows.scale)
            if slope_CV is not None:
                grad_CV.mul_(slope_CV)
            if grad_bias_V is not None:
                grad_bias_V += grad_CV.sum(0)
            grad_CV = grad_CV.to(weight_VD.dtype)
            grad_hidden_ND[part] = grad_CV @ weight_VD[: rows.count]
            if grad_weight_VD is not None:
                grad_weight_VD[: rows.count] += grad_CV.T @ hidden_ND[part]
            del logits_CV, logp_CV, grad_CV, slope_CV
        grad_weight = None if grad_weight_VD is None else grad_weight_VD.to(weight_VD.dtype)
        grad_bias = None if grad_bias_V is None else grad_bias_V.to(bias_V.dtype)
        return grad_hidden_ND, grad_weight, grad_bias, None, None, None


class _Product:
    """The output layer: logits of a chunk of hidden states, [C, V] float32 each, safe to overwrite."""

    def __init__(self, weight_VD: torch.Tensor, bias_V: torch.Tensor | None, scale: float, rules: LogitRules) -> None:
        self._cap, self._in_float32 = rules.cap, rules.in_float32 and weight_VD.dtype != torch.float32
        # a GPU multiplies 16-bit numbers and accumulates in float32; elsewhere the weights are widened once
        self._widens = self._in_float32 and weight_VD.device.type != "cuda"
        self._weight, self._bias, self._scale = weight_VD.float() if self._widens else weight_VD, bias_V, scale

    def __call__(self, hidden_CD: torch.Tensor) -> torch.Tensor:
        if not self._in_float32:
            logits = torch.nn.functional.linear(hidden_CD, self._weight, self._bias).float()
        else:
            if self._widens:
                logits = hidden_CD.float() @ self._weight.T
            else:
                logits = torch.mm(hidden_CD, self._weight.T, out_dtype=torch.float32)
            if self._bias is not None:
                logits += self._bias
        if self._cap:
            logits.div_(self._cap).tanh_().mul_(self._cap)
        return logits if self._scale == 1.0 else logits.mul_(self._scale)

    def slope(self, logits_CV: torch.Tensor) -> torch.Tensor | None:
        """Derivative of the capped logits, found again from the result; None without a cap."""
        return 1 - (logits_CV / (self._cap * self._scale)).square_() if self._cap else None
