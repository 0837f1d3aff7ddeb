"""Log-probabilities of chosen tokens from hidden states, without ever holding all of [tokens, vocabulary].

The output layer and the softmax run over chunks of rows, in the forward pass and again in the backward pass, which
recomputes the chunk's logits from the saved log-sum-exp. Extra memory peaks at a few chunks; the price is one more
product with the output matrix.
Legend: N tokens, C tokens of a chunk, D hidden size, V vocabulary, K further tokens per position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from asyncrl.trainer.fsdp.memory import logits_per_chunk

IMPOSSIBLE = -1e4
"""Log-probability of a token outside the vocabulary: finite, and its probability is 0 in float32."""


@dataclass(frozen=True, slots=True)
class LogitRules:
    """How logits are formed.

    Attributes:
        per_chunk: entries of one chunk; None: the device's default.
        in_float32: products of 16-bit numbers are not rounded to 16 bits. The backward pass forms the same logits again
            and rounds their gradients to the dtype of the weight.
    """

    per_chunk: int | None = None
    in_float32: bool = False


def token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    *,
    temperature: float,
    rules: LogitRules = LogitRules(),
) -> tuple[torch.Tensor, torch.Tensor]:
    """`log_softmax((hidden @ weight.T + bias) / temperature)` at the targets, in float32.

    Args:
        hidden: [N, D], weight: [V, D], bias: [V] or None, all of one dtype. Logits are formed in this dtype, as the
            replicas do, or as `rules` say; everything after them is float32.
        targets: [N] int64.

    Returns:
        Log-probabilities [N] float32 and entropies [N] float32 in nats, both differentiable. Unused outputs cost
        nothing in the backward pass.
    """
    none = targets.new_zeros(len(targets), 0)
    found = logprobs_beside(hidden, weight, bias, targets, none, temperature=temperature, rules=rules)
    return found[0], found[1]


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
        hidden, weight, bias, targets, others.clamp(max=rows - 1), 1.0 / temperature, rules
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


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_N: torch.Tensor,
        others_NK: torch.Tensor,
        scale: float,
        rules: LogitRules,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logprobs_N, normalizers_N, entropies_N = (
            torch.empty(len(targets_N), dtype=torch.float32, device=hidden_ND.device) for _ in range(3)
        )
        logprobs_NK = torch.empty(others_NK.shape, dtype=torch.float32, device=hidden_ND.device)
        product = _Product(weight_VD, bias_V, scale, in_float32=rules.in_float32)
        chunk = max(1, (rules.per_chunk or logits_per_chunk(hidden_ND.device.type)) // len(weight_VD))
        # One chunk: logits -> log-probabilities in place -> the three results.
        for start in range(0, len(targets_N), chunk):
            rows = slice(start, start + chunk)
            logits_CV = product(hidden_ND[rows])
            largest_C = logits_CV.amax(-1)
            rest_C = logits_CV.sub_(largest_C[:, None]).exp().sum(-1).log_()  # logsumexp would hold one more chunk
            normalizers_N[rows] = largest_C + rest_C
            logp_CV = logits_CV.sub_(rest_C[:, None])
            logprobs_N[rows] = logp_CV.gather(-1, targets_N[rows, None]).squeeze(-1)
            logprobs_NK[rows] = logp_CV.gather(-1, others_NK[rows])
            entropies_N[rows] = -logp_CV.exp().mul_(logp_CV).sum(-1)
            del logits_CV, logp_CV  # or they would coexist with the next chunk
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, targets_N, others_NK, normalizers_N, entropies_N)
        ctx.scale, ctx.chunk, ctx.in_float32 = scale, chunk, rules.in_float32
        ctx.set_materialize_grads(False)
        return logprobs_N, entropies_N, logprobs_NK

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        grad_N, grad_entropy_N, grad_NK = grads
        hidden_ND, weight_VD, bias_V, targets_N, others_NK, normalizers_N, entropies_N = ctx.saved_tensors
        grad_N = torch.zeros_like(normalizers_N) if grad_N is None else grad_N
        whole_N = grad_N if grad_NK is None else grad_N + grad_NK.sum(-1)
        # A log-probability's gradient reaches all logits through the softmax, so its sum over targets and others
        # counts.
        grad_hidden_ND = torch.empty_like(hidden_ND)
        # float32 sums: bfloat16 would lose the small contributions of late chunks
        _, needs_weight, needs_bias, *_ = ctx.needs_input_grad  # neither if the output layer is frozen
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if needs_weight else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=torch.float32) if needs_bias else None
        product = _Product(weight_VD, bias_V, ctx.scale, in_float32=ctx.in_float32)
        for start in range(0, len(targets_N), ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            logits_CV = product(hidden_ND[rows])
            scaled_C1 = whole_N[rows, None] * ctx.scale
            # d logprob / d logit = onehot(token) - softmax
            logp_CV = logits_CV.sub_(normalizers_N[rows, None])
            if grad_entropy_N is None:
                grad_CV = logp_CV.exp_().mul_(-scaled_C1)
            else:  # d entropy / d logit = - p (log p + entropy)
                weight_CV = (logp_CV + entropies_N[rows, None]).mul_(grad_entropy_N[rows, None] * ctx.scale)
                grad_CV = weight_CV.add_(scaled_C1).mul_(logp_CV.exp_()).neg_()
            grad_CV.scatter_add_(-1, targets_N[rows, None], grad_N[rows, None] * ctx.scale)
            if grad_NK is not None:
                grad_CV.scatter_add_(-1, others_NK[rows], grad_NK[rows] * ctx.scale)
            if grad_bias_V is not None:
                grad_bias_V += grad_CV.sum(0)
            grad_CV = grad_CV.to(weight_VD.dtype)
            grad_hidden_ND[rows] = grad_CV @ weight_VD
            if grad_weight_VD is not None:
                grad_weight_VD += grad_CV.T @ hidden_ND[rows]
            del logits_CV, logp_CV, grad_CV
        grad_weight = None if grad_weight_VD is None else grad_weight_VD.to(weight_VD.dtype)
        grad_bias = None if grad_bias_V is None else grad_bias_V.to(bias_V.dtype)
        return grad_hidden_ND, grad_weight, grad_bias, None, None, None, None


class _Product:
    """The output layer: logits of a chunk of hidden states, [C, V] float32 each, safe to overwrite."""

    def __init__(self, weight_VD: torch.Tensor, bias_V: torch.Tensor | None, scale: float, *, in_float32: bool) -> None:
        self._in_float32 = in_float32 and weight_VD.dtype != torch.float32
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
        return logits if self._scale == 1.0 else logits.mul_(self._scale)
