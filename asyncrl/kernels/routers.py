"""The experts that the routers of a Hugging Face mixture choose: recorded, replayed, balanced.

A router scores all experts of its layer and takes the best with `torch.topk`. The choice is read and replaced at this
call, so what precedes and follows it (softmax or sigmoid, a bias, groups, gathering, normalising, scaling) is the
model's own code, and needs no formula here.

Router replay: in training, a token takes the experts that the engine chose when it sampled the token. Engine and
trainer round differently, and the trainer's weights may be newer. Where two experts are nearly equally likely, the two
choose different experts, and the token's log-probability jumps. With the recorded experts the trainer differentiates
the function that sampled. The router's gradient flows through the experts' weights; the choice has no gradient in
either case.

Source: Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers (arXiv:2510.11370), whose R3
also replays the experts of prompts; here prompts take the trainer's own experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from asyncrl.types import decoder_of, on_meta

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)(?:\.|$)")
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
_PER_TOKEN = ("num_experts_per_tok", "top_k_experts")
"""Of transformers' configs, which map the other spellings of the files to the first."""


class RouterChoice(NamedTuple):
    """Of one layer, in the order of the pass.

    Attributes:
        scores: [tokens, E] float, of all experts, not negative; carries the gradient.
        experts: [tokens, k] int64, the router's own choice, also where another one was replayed.
    """

    scores: torch.Tensor
    experts: torch.Tensor


def expert_layers(config: Mapping[str, Any]) -> list[int]:
    """Numbers of the layers with experts. `config`: as in config.json. Imports transformers."""
    from transformers import AutoConfig

    return list(_blocks(on_meta(AutoConfig.for_model(**config))))


class RouterTaps:
    """The routers of one model, and hooks around the blocks that choose. Without `recorded` or `experts` they do
    nothing.

    Attributes:
        layers: numbers of the layers with experts; empty where the model is no mixture.
        per_token: k, experts per token in each of them.
        num_experts: E, in each of them.
        experts: [tokens of the pass, len(layers), k] int64, taken instead of the routers' choice in this pass and in
            its recomputation; -1: the router chooses. None: the routers choose everywhere.
    """

    def __init__(self, model: Any) -> None:
        text, blocks = model.config.get_text_config(), _blocks(model)
        self.layers = tuple(blocks)
        self.per_token, count = (next((getattr(text, n, 0) for n in names if getattr(text, n, 0)), 0)
                                 for names in (_PER_TOKEN, _COUNTS))  # fmt: skip
        self.num_experts = count + (getattr(text, "zero_expert_num", 0) or 0)  # LongCat's, which do nothing
        self.experts: torch.Tensor | None = None
        self._seen: dict[int, RouterChoice] | None = None
        self._open: list[_Watched] = []
        for place, block in enumerate(blocks.values()):
            block.register_forward_pre_hook(partial(self._enter, place))
            block.register_forward_hook(self._leave, always_call=True)  # recomputation leaves a block by an exception

    @contextmanager
    def recorded(self) -> Iterator[list[RouterChoice]]:
        """The choices of one forward pass, in the order of `layers`; filled at the end. Raises ValueError: a layer
        chose otherwise than by `torch.topk` over all its experts."""
        self._seen, found = {}, []
        try:
            yield found
            missing = [layer for place, layer in enumerate(self.layers) if place not in self._seen]
            if missing:
                raise ValueError(f"layer {missing[0]} does not choose {self.per_token} of {self.num_experts} by topk")
            found += [self._seen[place] for place in range(len(self.layers))]
        finally:
            self._seen = None

    def _enter(self, place: int, block: nn.Module, args: Any) -> None:
        if self._seen is not None or self.experts is not None:
            self._open.append(_Watched(self, place))
            self._open[-1].__enter__()

    def _leave(self, block: nn.Module, args: Any, output: Any) -> None:
        if self._open:
            self._open.pop().__exit__(None, None, None)

    def see(self, place: int, choice: RouterChoice) -> None:
        """A layer has chosen."""
        if self._seen is not None:
            self._seen[place] = choice


class _Watched(TorchFunctionMode):
    """One block's forward pass."""

    def __init__(self, taps: RouterTaps, place: int) -> None:
        super().__init__()
        self._taps, self._place = taps, place
        self._scores: torch.Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name, taps = getattr(func, "__name__", ""), self._taps
        if name in ("softmax", "sigmoid") and found.shape[-1] == taps.num_experts:
            self._scores = found.flatten(0, -2)
        if name != "topk" or found.indices.ndim != 2:
            return found
        asked = args[0] if args else kwargs["input"]
        replayed = None if taps.experts is None else taps.experts[:, self._place]
        if asked.shape[-1] == taps.num_experts and found.indices.shape[-1] == taps.per_token:
            scores = asked.float().softmax(-1) if self._scores is None else self._scores.float()
            taps.see(self._place, RouterChoice(scores, found.indices))
            through = None if replayed is None else torch.where(replayed >= 0, replayed, found.indices)
        elif replayed is None or taps.num_experts % asked.shape[-1]:
            return found
        else:  # groups of experts, among which alone is chosen: those of the recorded experts
            through = _groups(replayed, found.indices, taps.num_experts // asked.shape[-1])
        return found if through is None else torch.return_types.topk((asked.gather(-1, through), through))


def _groups(experts: torch.Tensor, own: torch.Tensor, size: int) -> torch.Tensor:
    """[tokens, k + groups per token]: the groups of the recorded `experts`, or the router's `own` ones, each of them at
    least once."""
    recorded = experts.div(size, rounding_mode="floor")
    filled = torch.cat([recorded, recorded[:, :1].expand_as(own)], -1)
    return torch.where(experts[:, :1] >= 0, filled, torch.cat([own, own[:, :1].expand_as(recorded)], -1))


def _blocks(model: Any) -> dict[int, nn.Module]:
    """Layer number -> what contains its experts and their router."""
    named = decoder_of(model).named_modules()
    return {int(found[1]): m for n, m in named if (found := _LAYER.search(n)) and "experts" in dict(m.named_children())}
