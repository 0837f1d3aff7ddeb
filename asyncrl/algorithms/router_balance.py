"""Load-balancing loss of a mixture of experts.

    loss = E / L sum_l sum_e f_{l,e} P_{l,e}
    f_{l,e}: mean over tokens of how many of a token's K experts in layer l are e; sums to K; no gradient
    P_{l,e}: share of expert e in the scores that the router of layer l gives a token, mean over tokens: a probability
             where scores come from a softmax, the P of DeepSeek-V3 (arXiv:2412.19437) where they come from a sigmoid

L layers with E experts each, over all tokens of the update, prompts included, on all ranks. Balance is required of the
update, not of each micro-batch: experts may still specialise, and the loss does not depend on packing or ranks. f is
counted under the weights before the step, which makes the loss a sum over tokens and costs a forward pass. With an even
load the loss is K. Hugging Face's loss (`router_aux_loss_coef`) differs in two ways: it merges the layers before the
product, so one layer can compensate another, and it balances each forward pass separately. For one layer and one pass
the two agree, so their coefficients compare.
Source: Switch Transformer (arXiv:2101.03961) eq. 4 to 6, with top-K counts; over the whole batch: arXiv:2501.11873.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def routing_sums(choices: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Over the tokens of a forward pass: how often each expert is chosen, and its summed share of the scores, [L, E]
    float32 each; the second has a gradient.

    Args:
        choices: of each layer with experts, the scores [tokens, E] float, not negative, and the chosen [tokens, k].
    """
    counts = [torch.bincount(chosen.flatten(), minlength=scores.shape[-1]).float() for scores, chosen in choices]
    shares = [(scores / scores.sum(-1, keepdim=True)).sum(0) for scores, _ in choices]
    return torch.stack(counts), torch.stack(shares)


def balance_weights(fractions: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """[L, E]: factors for the second result of `routing_sums`. The sum of the products is the part of the update's loss
    from these tokens.

    Args:
        fractions: [L, E], f of the update.
        tokens: [], how many tokens the update has.
    """
    layers, experts = fractions.shape
    return experts / layers * fractions / tokens
