"""The models that the algorithm needs, sharded over the same ranks, with their optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Generic

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from transformers import AutoTokenizer, PreTrainedModel

from asyncrl.algorithms.router_balance import routing_sums
from asyncrl.config.model import ModelConfig
from asyncrl.config.trainer import FsdpConfig
from asyncrl.errors import ConfigError, explain
from asyncrl.kernels.images import ImageInputs
from asyncrl.kernels.routers import RouterTaps
from asyncrl.trainer.fsdp import lora
from asyncrl.trainer.fsdp.context import ContextRanks
from asyncrl.trainer.fsdp.model import Kernels, choose_attention, compile_layers, load_model, shard
from asyncrl.trainer.fsdp.optimizer import Update
from asyncrl.trainer.fsdp.proof import Way, agreed, forward_row, of_first_rank, prove_choices, prove_images
from asyncrl.trainer.step.batch import PackedTokens
from asyncrl.trainer.step.model import LossFunction, Output, Part, Routers, StepModels, TokenOutputs, require_experts
from asyncrl.trainer.token_logprobs import LogitRules, among_kept, logprobs_beside, token_logprobs
from asyncrl.trainer.trainer_spec import TrainerSpec
from asyncrl.weights.stored_layout import StoredLayout, stored_layout


class Policy(nn.Module):
    """`causal_lm` is the Hugging Face model; its names are the names of the weights."""

    def __init__(
        self,
        causal_lm: PreTrainedModel,
        *,
        context: ContextRanks | None = None,
        logits: LogitRules | None = None,
        taps: RouterTaps | None = None,
        way: Way | None = None,
        images: ImageInputs | None = None,
    ) -> None:
        """
        Args:
            images: of the tokens; None: they have none.
            way: how rows pass through the model; None: packed.
            context: the ranks that share each row; None: this rank has whole rows.
            logits: how logits are formed; None: the default.
            taps: of `causal_lm`, for router replay and a load-balancing loss; None: neither is requested.
        """
        super().__init__()
        self.causal_lm = causal_lm
        self._context, self._way = context or ContextRanks(), way or Way()
        self._logits = replace(logits or LogitRules(), cap=self._way.cap)
        self._taps, self._images = taps, images
        self._routers = None if taps is None else Routers(len(taps.layers), taps.per_token, taps.num_experts)

    def forward(self, tokens: PackedTokens, temperature: float, *, routing: bool = False) -> tuple[torch.Tensor, ...]:
        """Log-probability and entropy of each predicted token, [n] float32 each; see `token_logprobs`. With `routing`
        also the sums of `routing_sums` over all tokens of the row. If `PackedTokens.others` are requested, their
        log-probabilities, [n, k] float32, come last. The same on all ranks that share the row."""
        part = self._context.part_of(tokens)
        tokens = part.tokens
        if self._images is not None:  # environments may have written images, which nothing predicts
            tokens = replace(tokens, targets=self._images.plain(tokens.targets))
        if self._routers is not None and tokens.experts is not None:
            self._routers.require(tokens.experts)
        hidden, choices = forward_row(self.causal_lm, part, self._way, self._taps, self._images, routing=routing)
        temperature = temperature / self._way.scale
        # Three ways to the log-probabilities: over the kept tokens, with further tokens, or of the targets alone.
        head: Any = self.causal_lm.get_output_embeddings()
        bias = getattr(head, "bias", None)
        of_targets, rules = (hidden, head.weight, bias, tokens.targets), self._logits
        others: tuple[torch.Tensor, ...] = ()
        if tokens.kept is not None:  # never with other tokens: a teacher sees no filters
            kept = tokens.kept.clamp(min=0)
            found = among_kept(
                *logprobs_beside(*of_targets, kept, temperature=temperature, rules=rules), tokens.kept >= 0
            )
        elif tokens.others is not None:
            *found, of_others = logprobs_beside(*of_targets, tokens.others, temperature=temperature, rules=rules)
            others = (of_others,)
        else:
            found = token_logprobs(*of_targets, temperature=temperature, rules=rules)
        # Combine the results of the ranks that share the row.
        sums = routing_sums(choices) if routing else ()
        of_row = tuple(part.of_row(values) for values in (*found, *others))
        return *of_row[:2], *(part.summed(values) for values in sums), *of_row[2:]


class Trained(Generic[Output]):
    """The `Model` of a module and its optimizer.

    Gradients are reduced after every micro-batch, unless `FsdpConfig.reduce_every_microbatch` is false. Reduced
    gradients accumulate as the rank's shard; unreduced ones take the memory of a whole model on every rank. Copies of
    the model average their gradients only after the last micro-batch, since that moves one shard.
    """

    def __init__(
        self,
        module: nn.Module,
        forward: Callable[[PackedTokens], Output],
        update: Update,
        *,
        mesh: DeviceMesh,
        fsdp: FsdpConfig,
    ) -> None:
        """`forward`: a pass through `module`, which is sharded over `mesh`. `update`: its optimizer."""
        self._module, self._forward, self._num_ranks = module, forward, mesh.size()
        self._has_copies, self._reduces_each = mesh.ndim > 1, fsdp.reduce_every_microbatch
        self.clip_gradients, self.update, self.drop_gradients = update.clip, update.step, update.drop

    def train(self, mode: bool) -> None:
        self._module.train(mode)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[PackedTokens]) -> list[Output]:
        return [self._forward(tokens) for tokens in batches]

    def forward_backward(
        self, batches: Sequence[PackedTokens], loss_function: LossFunction[Output], *, learns: Sequence[bool]
    ) -> list[Part]:
        found = []
        for at, tokens in enumerate(batches):
            self._reduce(is_last=at == len(batches) - 1)
            found.append(self._part(at, tokens, loss_function, learns=learns[at]))
        return found

    def _reduce(self, *, is_last: bool) -> None:
        """Sets how the next backward pass reduces its gradients."""
        module = self._module
        assert isinstance(module, FSDPModule), "it was sharded"
        module.set_requires_gradient_sync(is_last or self._reduces_each)
        if self._has_copies:
            module.set_requires_all_reduce(is_last)

    def _part(self, at: int, tokens: PackedTokens, loss_function: LossFunction[Output], *, learns: bool) -> Part:
        with torch.set_grad_enabled(learns):
            output = self._forward(tokens)
            part = loss_function(at, output)
            if tokens.balance is not None:
                assert isinstance(output, TokenOutputs), "only a policy balances its routers"
                assert output.given is not None, "the policy was built with its routing"
                part = replace(part, balance=(tokens.balance * output.given).sum())
        if learns:
            (part.total * self._num_ranks).backward()  # FSDP averages gradients over ranks
        return part.detached()


class Reference:
    """The `FrozenModel` of the reference."""

    def __init__(self, opened: Callable[[], AbstractContextManager[Policy]]) -> None:
        """`opened`: yields the reference model, which may be the policy without its adapters."""
        self._opened = opened

    @torch.no_grad()
    def evaluate(self, batches: Sequence[PackedTokens]) -> list[TokenOutputs]:
        # A reference chooses its own experts and evaluates the sampled tokens only.
        own = [replace(tokens, experts=None, others=None) for tokens in batches]
        with self._opened() as reference:
            return [policy_outputs(reference, tokens) for tokens in own]


def policy_outputs(policy: Policy, tokens: PackedTokens, *, routing: bool = False) -> TokenOutputs:
    """`routing`: include the sums over a mixture's routers."""
    found, others = policy(tokens, tokens.temperature, routing=routing), None
    if tokens.others is not None:
        *found, others = found
    return TokenOutputs(*found, others=others)


class Models:
    """Owns policy, reference and critic; `critic` is None if the algorithm needs none. `layout`: of the policy without
    adapters."""

    layout: StoredLayout

    def __init__(self, spec: TrainerSpec, mesh: DeviceMesh, context: ContextRanks) -> None:
        """Collective. Raises ConfigError: a model cannot be read or trained."""
        self._spec, self._mesh, self._context = spec, mesh, context
        # The others wait for the rank that reads as long as a start may take, not as long as a collective.
        self._waiting: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=spec.start_timeout_s))
        self._logits = LogitRules(in_float32=spec.trainer.fsdp.head_dtype == "float32")
        self._reference: Policy | None = None
        self.policy = self._policy()
        self.critic = self._critic() if spec.algorithm.needs_critic else None
        if spec.algorithm.needs_reference and not self._reference_is_the_base:
            self._reference = self._frozen_reference()
        update = partial(Update, config=spec.trainer, host_state=spec.trainer.fsdp.offload_optimizer)
        self.update = update(self.policy.causal_lm, max_grad_norm=spec.trainer.max_grad_norm)
        norm = spec.algorithm.critic.max_grad_norm
        self.critic_update = None if self.critic is None else update(self.critic, max_grad_norm=norm)

    def of_step(self) -> StepModels:
        """The models as the training step sees them."""
        algorithm, critic = self._spec.algorithm, None
        trained = partial(Trained, mesh=self._mesh, fsdp=self._spec.trainer.fsdp)
        if self.critic is not None and self.critic_update is not None:
            critic = trained(self.critic, self.critic, self.critic_update)
        outputs = partial(policy_outputs, self.policy, routing=algorithm.router_aux_coefficient > 0)
        reference = Reference(self._opened_reference) if algorithm.needs_reference else None
        return StepModels(trained(self.policy, outputs, self.update), critic, reference)

    @contextmanager
    def _opened_reference(self) -> Iterator[Policy]:
        """The reference model, for passes without gradient."""
        if (reference := self._reference) is not None:
            yield reference
            assert isinstance(reference, FSDPModule), "it was sharded"
            reference.reshard()  # embedding and output layer stay gathered for a backward pass, which never comes
            return
        with lora.adapters_off(self.policy):
            yield self.policy

    def lora_facts(self) -> dict[str, torch.Tensor]:
        """Checkpoint entries of adapters in addition to their tensors: scale, and location of the base weights."""
        if not self._spec.trainer.lora.rank:
            return {}
        path = self._spec.model.path
        base = str(Path(path).expanduser().resolve()) if Path(path).expanduser().is_dir() else path
        scale = torch.tensor(lora.scale_of(self._spec.trainer.lora), dtype=torch.float64)
        return {lora.SCALE: scale, lora.BASE: torch.tensor(list(base.encode()), dtype=torch.uint8)}

    @property
    def _reference_is_the_base(self) -> bool:
        """The policy without its adapters is the reference, so no second model is needed."""
        path = self._spec.algorithm.kl.path
        return bool(self._spec.trainer.lora.rank) and path in (None, self._spec.model.path)

    def _policy(self) -> Policy:
        spec = self._spec
        # Base weights under adapters never change, so they are kept in the dtype of the passes.
        kept = spec.trainer.fsdp.param_dtype if spec.trainer.lora.rank else "float32"
        how = {"dtype": getattr(torch, kept), "recompute": spec.trainer.recompute}
        model, way, images = self._load(spec.model, spec.trainer.fsdp, **how)
        taps = self._taps(model, way)
        find = partial(stored_layout, model, spec.model)
        self.layout = of_first_rank(self._waiting, find, f"name the tensors of a {type(model).__name__}")
        if spec.trainer.lora.rank:
            lora.add_adapters(model, spec.trainer.lora)
        if spec.trainer.compile:
            compile_layers(model)
        policy = Policy(model, context=self._context, logits=self._logits, taps=taps, way=way, images=images)
        shard(policy, model, self._mesh, spec.trainer.fsdp)
        return policy

    def _taps(self, model: PreTrainedModel, way: Way) -> RouterTaps | None:
        """For router replay or a load-balancing loss, proven. Collective."""
        spec = self._spec
        if spec.trainer.router_replay == "off" and not spec.algorithm.router_aux_coefficient:
            return None
        taps = RouterTaps(model)
        require_experts(spec, has_some=bool(taps.layers))
        of_first_rank(
            self._waiting, partial(prove_choices, model, way, taps), f"replay the experts of a {type(model).__name__}"
        )
        return taps

    def _frozen_reference(self) -> Policy:
        spec, path = self._spec, self._spec.algorithm.kl.path
        named = self._named(path)
        fsdp = replace(spec.trainer.fsdp, reshard_after_forward=True)
        key = "algorithm.kl.path" if path else "model.path"
        model, way, images = self._load(named, fsdp, key=key, dtype=getattr(torch, fsdp.param_dtype))
        self._check_vocabulary(model, f"{key}={named.path}")
        frozen = model.requires_grad_(False).eval()
        reference = Policy(frozen, context=self._context, logits=self._logits, way=way, images=images)
        shard(reference, model, self._mesh, fsdp)
        return reference

    def _critic(self) -> Critic:
        spec, path = self._spec, self._spec.algorithm.critic.path
        named = self._named(path)
        key = "algorithm.critic.path" if path else "model.path"
        how = {"key": key, "head": False, "recompute": spec.trainer.recompute}
        backbone, way, _ = self._load(named, spec.trainer.fsdp, **how)
        self._check_vocabulary(backbone, f"{key}={named.path}")
        if spec.trainer.compile:
            compile_layers(backbone)
        critic = Critic(backbone, self._context, way)
        shard(critic, backbone, self._mesh, spec.trainer.fsdp)
        return critic

    def _load(
        self, model: ModelConfig, fsdp: FsdpConfig, **how: Any
    ) -> tuple[PreTrainedModel, Way, ImageInputs | None]:
        found, towers = load_model(model, fsdp, self._mesh, max_model_len=self._spec.max_model_len, **how)
        sinks = any("sink" in name for name, _ in found.named_parameters())
        kernels = Kernels.of(torch.device(self._mesh.device_type))
        kernels.activate(found.config.get_text_config())
        attention = choose_attention(fsdp, kernels, sinks=sinks)
        packing, head = self._spec.trainer.packing, how.get("head", True)
        way = agreed(found, self._waiting, attention, packing, head=head)
        if way.pads and fsdp.context_parallel > 1:
            asked = f"trainer.fsdp.context_parallel={fsdp.context_parallel}"
            do = "set trainer.fsdp.context_parallel to 1"
            raise ConfigError(explain(asked, f"rows of a {type(found).__name__} are padded", do))
        if model.image_directory is None:
            return found, way, None
        rope = getattr(found.config.get_text_config(), "rope_parameters", None) or {}
        if "mrope_section" in rope and not way.pads:
            asked, why = f"images for a {type(found).__name__}", "its positions have three axes, which rows do not tell"
            raise ConfigError(explain(asked, why, "set trainer.packing=padded"))
        images = ImageInputs(found, model, towers)
        asked = f"read an image with a {type(found).__name__}"
        of_first_rank(self._waiting, partial(prove_images, found, way, images), asked)
        images.to(torch.device(self._mesh.device_type), getattr(torch, fsdp.param_dtype))
        if dist.get_world_size() > 1:
            for tower in towers.values():
                for tensor in (*tower.parameters(), *tower.buffers()):
                    dist.broadcast(tensor, src=0)
        return found, way, images

    def _named(self, path: str | None) -> ModelConfig:
        """The model at `path`; `model.revision` applies to `model.path` only."""
        model = self._spec.model
        return model if path in (None, model.path) else replace(model, path=path, revision=None)

    def _check_vocabulary(self, model: PreTrainedModel, asked: str) -> None:
        """Raises ConfigError: the vocabulary of `model` is too small for the policy's tokens. Models of one family may
        differ in unused rows. `preflight` checks that the tokens mean the same."""
        embeddings: list[Any] = [m.get_input_embeddings() for m in (model, self.policy.causal_lm)]
        rows, own = (embedding.weight.shape[0] for embedding in embeddings)
        if rows >= own:
            return
        named = self._spec.model
        trust = named.trust_remote_code
        tokens = len(AutoTokenizer.from_pretrained(named.path, revision=named.revision, trust_remote_code=trust))
        if rows < tokens:
            found = f"its embedding has {rows} rows, and the tokenizer of model.path={named.path} has {tokens} tokens"
            raise ConfigError(explain(asked, found, "name a model of the same vocabulary"))


# The value model of advantage gae: the policy's architecture with one output instead of the vocabulary.


class Critic(nn.Module):
    """`backbone` gives hidden states; `head` computes in float32 and starts at zero, and so do the values."""

    def __init__(self, backbone: PreTrainedModel, context: ContextRanks | None = None, way: Way | None = None) -> None:
        """`context`: the ranks that share each row; None: this rank has whole rows. `way`: of rows; None: packed."""
        super().__init__()
        self._context, self._way = context or ContextRanks(), way or Way()
        self.backbone = backbone
        self.head = nn.Linear(backbone.config.get_text_config().hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, tokens: PackedTokens) -> torch.Tensor:
        """[n] float32: value of the text before each predicted token; the same on all ranks that share the row."""
        part = self._context.part_of(tokens)
        values = self.head(forward_row(self.backbone, part, self._way)[0].float())
        # A tensor of its own: FSDP hooks the returned tensor, and a view may lose the hooks.
        return part.of_row(values.squeeze(-1).clone())
