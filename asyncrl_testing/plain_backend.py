"""A TrainBackend in plain torch: one process, whole tensors, no process group.

It runs each sequence of a packed row alone through Hugging Face's model: the reference for packing and sharding.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Generic

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from asyncrl.config.trainer import TrainerConfig
from asyncrl.errors import ConfigError, StorageError, explain
from asyncrl.trainer.step.batch import PackedTokens
from asyncrl.trainer.step.loop import TrainingStep
from asyncrl.trainer.step.model import LossFunction, Output, Part, Peers, StepModels, TokenOutputs
from asyncrl.trainer.trainer_spec import TrainerSpec
from asyncrl.types import SendingRank, TensorSpec
from asyncrl.weights.stored_layout import StoredLayout

FILE = "state.pt"


class PlainModel(Generic[Output]):
    """`Model`: a module, its forward pass over a micro-batch, and AdamW."""

    def __init__(
        self, module: nn.Module, forward: Callable[[PackedTokens], Output], config: TrainerConfig, max_norm: float
    ) -> None:
        self.module, self._forward, self._max_norm = module, forward, max_norm
        matrices = [p for p in module.parameters() if p.ndim >= 2]
        others = [p for p in module.parameters() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_eps)
        self.drop_gradients = self.optimizer.zero_grad

    def train(self, mode: bool) -> None:
        self.module.train(mode)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[PackedTokens]) -> list[Output]:
        return [self._forward(tokens) for tokens in batches]

    def forward_backward(
        self, batches: Sequence[PackedTokens], loss_function: LossFunction[Output], *, learns: Sequence[bool]
    ) -> list[Part]:
        parts = []
        for at, tokens in enumerate(batches):
            with torch.set_grad_enabled(learns[at]):
                part = loss_function(at, self._forward(tokens))
            if learns[at]:
                part.loss.backward()
            parts.append(part.detached())
        return parts

    def clip_gradients(self) -> float:
        return float(nn.utils.clip_grad_norm_(self.module.parameters(), self._max_norm or float("inf")))

    def update(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.drop_gradients()

    def state(self) -> dict[str, Any]:
        return {"model": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


class PlainBackend:
    """The only rank. Trains all weights of a dense model, also with a critic, a reference and a proximal policy."""

    def __init__(self, spec: TrainerSpec) -> None:
        """Raises ConfigError: adapters or a load-balancing loss are asked for."""
        algorithm, trainer = spec.algorithm, spec.trainer
        if trainer.lora.rank or algorithm.router_aux_coefficient:
            found = "trainer.lora.rank or algorithm.router_aux_coefficient is set"
            raise ConfigError(explain("train without sharding", found, "set both to 0"))
        torch.manual_seed(spec.seed)
        self._spec = spec
        self._policy = causal_lm = AutoModelForCausalLM.from_pretrained(spec.model.path, dtype=torch.float32)
        self._layout = StoredLayout.of(causal_lm)
        policy = PlainModel(causal_lm, partial(_outputs, causal_lm), trainer, trainer.max_grad_norm)
        critic = reference = None
        if algorithm.needs_critic:
            backbone = copy.deepcopy(causal_lm.base_model)
            value = nn.Linear(causal_lm.config.hidden_size, 1)
            nn.init.zeros_(value.weight)
            nn.init.zeros_(value.bias)
            both = nn.ModuleList([backbone, value])
            critic = PlainModel(both, partial(_values, backbone, value), trainer, algorithm.critic.max_grad_norm)
        if algorithm.needs_reference:
            frozen = copy.deepcopy(causal_lm).requires_grad_(False).eval()
            reference = PlainModel(frozen, partial(_outputs, frozen), trainer, 0.0)
        self._trained = [model for model in (policy, critic) if model is not None]
        models = StepModels(policy, critic, reference)
        self._step = TrainingStep(spec, models, peers=Peers(), device=torch.device("cpu"))
        self.train_step, self.logprobs = self._step.train_step, self._step.logprobs
        self.reference_kl = self._step.reference_kl
        self._captured: dict[str, Any] | None = None

    def weight_specs(self) -> tuple[TensorSpec, ...]:
        dtype = self._spec.model.inference_dtype
        return tuple(TensorSpec(n, tuple(t.shape), dtype, t.nbytes) for n, t in self.named_weights())

    def sending_ranks(self) -> tuple[SendingRank, ...]:
        return (SendingRank(0, 0),)

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._policy.named_parameters():  # a tied tensor comes once
            served = tensor.detach().to(getattr(torch, self._spec.model.inference_dtype))
            yield from self._layout.split(name, served)

    def capture(self) -> None:
        live = {"random": torch.get_rng_state(), "models": [model.state() for model in self._trained]}
        self._captured = copy.deepcopy(live)

    def save(self, directory: Path) -> tuple[str, ...]:
        captured, self._captured = self._captured, None
        if captured is None:
            raise RuntimeError("save was called before capture")
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with (directory / FILE).open("wb") as file:
                torch.save(captured, file)
            return (FILE,)
        except OSError as error:
            raise StorageError(explain(f"write {directory}", str(error), "make room there")) from error

    def load(self, directory: Path) -> None:
        if not (directory / FILE).exists():
            raise ConfigError(explain(f"load {directory}", "no checkpoint there", "name a directory that save wrote"))
        written = torch.load(directory / FILE, weights_only=True)
        for model, state in zip(self._trained, written["models"], strict=True):
            model.restore(state)
        torch.set_rng_state(written["random"])


def _hidden(backbone: Any, tokens: PackedTokens) -> torch.Tensor:
    """[n, hidden size], at the predictor of each predicted token."""
    sequences = tokens.input_ids[0].split(tokens.layout.boundaries.diff().tolist())
    rows = [backbone(input_ids=ids[None], use_cache=False).last_hidden_state[0] for ids in sequences]
    return torch.cat(rows)[tokens.predictors]


def _outputs(causal_lm: Any, tokens: PackedTokens) -> TokenOutputs:
    logits = causal_lm.get_output_embeddings()(_hidden(causal_lm.base_model, tokens)).float() / tokens.temperature
    logp = logits.log_softmax(-1)
    return TokenOutputs(logp.gather(-1, tokens.targets[:, None]).squeeze(-1), -(logp.exp() * logp).sum(-1))


def _values(backbone: nn.Module, value: nn.Linear, tokens: PackedTokens) -> torch.Tensor:
    return value(_hidden(backbone, tokens).float()).squeeze(-1)
