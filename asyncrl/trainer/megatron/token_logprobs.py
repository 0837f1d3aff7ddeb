"""Log-probabilities of chosen tokens if each tensor-parallel rank holds some rows of the output layer.

As in `fsdp/token_logprobs.py`, output layer and softmax run over chunks of rows in the forward pass and again in the
backward pass, and [tokens, vocabulary] never exists as a whole. The forward pass makes two reductions per chunk, over
the largest logit and over three sums; the backward pass makes none.
Legend: N tokens, C tokens of a chunk, D hidden size, V rows of the vocabulary on this rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

LOGITS_PER_CHUNK = 1 << 26
"""Entries of one [C, V] block: 256 MiB in float32."""


def token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float,
    vocab_size: int,
    group: dist.ProcessGroup,
    logits_per_chunk: int = LOGITS_PER_CHUNK,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`log_softmax(hidden @ W.T / temperature)` at the targets, in float32; W: the rows of all ranks of `group`.

    Args:
        hidden: [N, D], the same on every rank. Its gradient is this rank's share: sum it over the ranks.
        weight: [V, D], the rows from `rank * V` on; rows from `vocab_size` on are padding and ignored.
        targets: [N] int64.

    Returns:
        Log-probabilities [N] float32 and entropies [N] float32 in nats, both differentiable and the same on every rank.
    """
    first = group.rank() * weight.shape[0]
    rows = min(max(vocab_size - first, 0), weight.shape[0])
    chunk = max(1, logits_per_chunk // weight.shape[0])  # not `rows`: all ranks must make the same reductions
    return _TokenLogprobs.apply(hidden, weight, targets, 1.0 / temperature, (first, rows, chunk), group)  # pyright: ignore[reportReturnType]


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        targets_N: torch.Tensor,
        scale: float,
        place: tuple[int, int, int],
        group: dist.ProcessGroup,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        first, rows, chunk = place
        logprobs_N, normalizers_N, entropies_N = (
            torch.empty(len(targets_N), dtype=torch.float32, device=hidden_ND.device) for _ in range(3)
        )
        for start in range(0, len(targets_N), chunk):
            part = slice(start, start + chunk)
            logits_CV = _logits(hidden_ND[part], weight_VD[:rows], scale)
            largest_C = logits_CV.amax(-1) if rows else logits_CV.new_full((len(logits_CV),), -torch.inf)
            dist.all_reduce(largest_C, op=dist.ReduceOp.MAX, group=group)
            own_C, at_C = _own(targets_N[part], first, rows)
            shifted_CV = logits_CV.sub_(largest_C[:, None])
            exp_CV = shifted_CV.exp()
            target_C = shifted_CV.gather(-1, at_C[:, None]).squeeze(-1) * own_C if rows else torch.zeros_like(largest_C)
            sums = torch.stack([exp_CV.sum(-1), torch.linalg.vecdot(exp_CV, shifted_CV), target_C])
            dist.all_reduce(sums, group=group)
            normalizer_C = sums[0].log()
            logprobs_N[part] = sums[2] - normalizer_C
            entropies_N[part] = normalizer_C - sums[1] / sums[0]
            normalizers_N[part] = normalizer_C + largest_C
        ctx.save_for_backward(hidden_ND, weight_VD, targets_N, normalizers_N, entropies_N)
        ctx.scale, ctx.place = scale, place
        ctx.set_materialize_grads(False)
        return logprobs_N, entropies_N

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        grad_N, grad_entropy_N = grads
        hidden_ND, weight_VD, targets_N, normalizers_N, entropies_N = ctx.saved_tensors
        first, rows, chunk = ctx.place
        grad_N = torch.zeros_like(normalizers_N) if grad_N is None else grad_N
        grad_hidden_ND = torch.empty_like(hidden_ND)
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for start in range(0, len(targets_N), chunk):
            part = slice(start, start + chunk)
            logits_CV = _logits(hidden_ND[part], weight_VD[:rows], ctx.scale)
            scaled_C = grad_N[part] * ctx.scale
            # d logprob / d logit = onehot(target) - softmax
            logp_CV = logits_CV.sub_(normalizers_N[part, None])
            if grad_entropy_N is None:
                grad_CV = logp_CV.exp_().mul_(-scaled_C[:, None])
            else:  # d entropy / d logit = - p (log p + entropy)
                weight_CV = (logp_CV + entropies_N[part, None]).mul_(grad_entropy_N[part, None] * ctx.scale)
                grad_CV = weight_CV.add_(scaled_C[:, None]).mul_(logp_CV.exp_()).neg_()
            if rows:
                own_C, at_C = _own(targets_N[part], first, rows)
                grad_CV.scatter_add_(-1, at_C[:, None], (scaled_C * own_C)[:, None])
            grad_CV = grad_CV.to(weight_VD.dtype)
            grad_hidden_ND[part] = grad_CV @ weight_VD[:rows]
            if grad_weight_VD is not None:
                grad_weight_VD[:rows] += grad_CV.T @ hidden_ND[part]
        grad_weight = None if grad_weight_VD is None else grad_weight_VD.to(weight_VD.dtype)
        return grad_hidden_ND, grad_weight, None, None, None, None


def _logits(hidden_CD: torch.Tensor, weight_VD: torch.Tensor, scale: float) -> torch.Tensor:
    """[C, V] float32, safe to overwrite."""
    logits = torch.nn.functional.linear(hidden_CD, weight_VD).float()
    return logits if scale == 1.0 else logits.mul_(scale)


def _own(targets_C: torch.Tensor, first: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """1.0 if the target is one of this rank's rows, else 0.0; and its local row, 0 for the others."""
    own_C = (targets_C >= first) & (targets_C < first + rows)
    return own_C.float(), (targets_C - first).where(own_C, 0)
