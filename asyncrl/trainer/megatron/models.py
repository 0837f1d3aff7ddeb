"""The models that the algorithm needs, split over the same ranks, with their optimizers: `FrozenModel` and `Model` of
the training step over Megatron-core's pipeline schedule, with the heads after the last stage's hidden states: the
output layer of a policy, the value head of a critic."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Generic

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from asyncrl.algorithms import by_lag
from asyncrl.algorithms.objective import LossStatistics
from asyncrl.config.model import ModelConfig
from asyncrl.config.paths import check_path
from asyncrl.errors import ConfigError, explain
from asyncrl.trainer.backend import MOMENTS
from asyncrl.trainer.megatron.model import DecoderChunk, Groups, build_chunks, gathered, transformer_config
from asyncrl.trainer.megatron.names import Block, LocalTensor
from asyncrl.trainer.megatron.optimizer import DistributedUpdate, Share, wrap
from asyncrl.trainer.megatron.routing import RoutingSums, RowRouting, WatchedRouters
from asyncrl.trainer.megatron.rows import on_predictors, packed_row
from asyncrl.trainer.megatron.sizes import ModelSizes
from asyncrl.trainer.megatron.stored_state import MASTER, RankFiles
from asyncrl.trainer.megatron.supports import unsupported
from asyncrl.trainer.step.batch import PackedLayout, PackedTokens
from asyncrl.trainer.step.model import LossFunction, Output, Part, Routers, StepModels, TokenOutputs, require_experts
from asyncrl.trainer.token_logprobs import LogitRules, SplitVocabulary, token_logprobs
from asyncrl.trainer.trainer_spec import TrainerSpec
from asyncrl.types import HOW_TO_TIE, UNTIED, ModelFacts
from asyncrl.weights.encodings.base import open_files

HEAD = "head."
"""Prefix of a critic's head; no pretrained model has it."""

LOGITS = LogitRules(per_chunk=1 << 26)
"""Chunks of 256 MiB in float32."""


class Head(Generic[Output]):
    rows: int
    """Number of results per predicted token."""

    def __call__(self, chunk: DecoderChunk, hidden: torch.Tensor, tokens: PackedTokens) -> torch.Tensor:
        """[rows, n] float32, the same on all tensor-parallel ranks; n may be 0. `hidden`: output of `chunk`, the last
        one."""
        raise NotImplementedError

    def output(self, numbers: torch.Tensor, routing: RoutingSums | None = None) -> Output:
        """Packs [rows, n] and, if requested, the routing sums."""
        raise NotImplementedError


class PolicyHead(Head[TokenOutputs]):
    rows = 2

    def __init__(self, vocab_size: int, group: dist.ProcessGroup) -> None:
        """`group`: the tensor-parallel ranks."""
        self._split = SplitVocabulary(group, vocab_size)

    def __call__(self, chunk: DecoderChunk, hidden: torch.Tensor, tokens: PackedTokens) -> torch.Tensor:
        """Log-probability and entropy of each predicted token."""
        weight = chunk.output_weight()
        rows = gathered(hidden, chunk.config, partial_gradients=True).index_select(0, tokens.predictors)
        logits = rows.to(weight.dtype), weight, None, tokens.targets
        found = token_logprobs(*logits, temperature=tokens.temperature, rules=LOGITS, split=self._split)
        return torch.stack(found)

    def output(self, numbers: torch.Tensor, routing: RoutingSums | None = None) -> TokenOutputs:
        sums = () if routing is None else (routing.chosen, routing.given)
        return TokenOutputs(*numbers, *sums)


class ValueHead(Head[torch.Tensor]):
    rows = 1

    def __call__(self, chunk: DecoderChunk, hidden: torch.Tensor, tokens: PackedTokens) -> torch.Tensor:
        """The value of the text before each predicted token, computed in float32 by every tensor-parallel rank."""
        rows = gathered(hidden, chunk.config, partial_gradients=False).index_select(0, tokens.predictors)
        return chunk.value_head(rows.float()).T

    def output(self, numbers: torch.Tensor, routing: RoutingSums | None = None) -> torch.Tensor:
        return numbers[0]


class PipelineFrozen(Generic[Output]):
    """The `FrozenModel` of the chunks of a model."""

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        config: TransformerConfig,
        head: Head[Output],
        groups: Groups,
    ) -> None:
        """`chunks`: of this rank; `DecoderChunk`s, possibly wrapped."""
        self._chunks, self._config, self._head, self._groups = list(chunks), config, head, groups
        self._watched: WatchedRouters | None = None
        """The routers, if they are hooked."""

    @torch.no_grad()
    def evaluate(self, batches: Sequence[PackedTokens]) -> list[Output]:
        """See `FrozenModel`."""
        if not batches:  # true on all ranks or on none
            return []
        found: dict[int, torch.Tensor] = {}

        def keep(at: int, numbers: torch.Tensor) -> torch.Tensor:
            found[at] = numbers
            return numbers.sum()

        routing = self._run(batches, keep, learns=False)
        counts = [tokens.targets.numel() for tokens in batches]
        ids = batches[0].input_ids
        whole = torch.empty(self._head.rows, sum(counts), dtype=torch.float32, device=ids.device)
        if self._groups.pipeline.rank() == self._groups.pipeline.size() - 1:
            whole = torch.cat([found[at] for at in range(len(batches))], 1).contiguous()
        self._from_last_stage(whole)
        return [self._head.output(*one) for one in zip(whole.split(counts, 1), routing, strict=True)]

    def _run(
        self, batches: Sequence[PackedTokens], use: Callable[[int, torch.Tensor], torch.Tensor], *, learns: bool
    ) -> Sequence[RoutingSums | None]:
        """Runs the schedule; returns the routing sums of each micro-batch, None without watched routers. On the last
        stage `use` gets the index of each micro-batch and the head's results for it, and returns the loss."""
        config, rows = self._config, list(batches)
        stages = self._groups.pipeline.size()
        if len(self._chunks) > 1:  # the interleaved schedule needs whole groups of micro-batches
            rows += [_nothing(rows[0])] * (-len(rows) % stages)
        routings: dict[int, RowRouting] = {}

        def forward(numbers: Iterator[int], chunk: nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
            at = next(numbers)
            ids, positions, row = packed_row(
                rows[at],
                self._groups.coordinates,
                self._groups.context,
                sequence_parallel=config.sequence_parallel,
                by_engine=config.transformer_impl == "transformer_engine",
                watched=self._watched,
            )
            if row.routing is not None:  # shared by all chunks: each adds its layers
                row.routing = routings.setdefault(at, row.routing)
            hidden = chunk(ids, positions, None, packed_seq_params=row)

            def loss(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
                result = on_predictors(
                    rows[at],
                    row,
                    self._groups.context,
                    lambda tokens: self._head(decoder_of(chunk), hidden, tokens),
                )
                # Padding micro-batches run through the head as well, with a loss of 0.
                value = use(at, result) if at < len(batches) else result.sum() * 0.0
                return value, torch.zeros((), dtype=torch.int, device=value.device), None

            return hidden, loss

        chunked = len(self._chunks) > 1
        # The schedule calls `forward` once per chunk and micro-batch, so each chunk counts its own calls.
        numbers = [iter(range(len(rows))) for _ in self._chunks]
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=numbers if chunked else numbers[0],
            model=self._chunks if chunked else self._chunks[0],
            num_microbatches=len(rows),
            seq_length=1,  # ignored: stages exchange the shapes
            micro_batch_size=1,
            forward_only=not learns,
        )
        if not routings:
            return [None] * len(batches)
        split = (self._groups.tensor, self._groups.context, self._groups.pipeline)
        return RoutingSums.of_all_ranks([routings[at] for at in range(len(batches))], split)

    def _from_last_stage(self, values: torch.Tensor) -> None:
        """Replaces `values` by the last stage's. Collective over the stages."""
        group = self._groups.pipeline
        if group.size() > 1:
            dist.broadcast(values, group=group, group_src=group.size() - 1)


class TrainedModel(PipelineFrozen[Output]):
    """A model in training, the `Model` of the training step: its chunks, their contents and its optimizer.

    Attributes:
        parameters: (name that is unique on this rank, parameter, contents), in the same order at every start.
        optimizer: its optimizer.
    """

    def __init__(
        self,
        source: PretrainedModel,
        spec: TrainerSpec,
        groups: Groups,
        head: Head[Output],
        *,
        critic: bool = False,
        on_cpu: bool,
    ) -> None:
        """Builds and loads it; collective."""
        trainer, self.sizes = spec.trainer, source.sizes
        dtype: torch.dtype = getattr(torch, trainer.megatron.param_dtype)
        config = transformer_config(self.sizes, trainer, dtype=dtype, on_cpu=on_cpu)
        chunks = build_chunks(self.sizes, config, groups.coordinates, critic=critic)
        self.parameters: list[tuple[str, nn.Parameter, LocalTensor]] = []
        for number, (chunk, contents) in enumerate(chunks):
            named = dict(chunk.named_parameters())
            self.parameters += [(f"{number}.{name}", named[name], contents[name]) for name in contents]
        self.chunks = wrap([chunk for chunk, _ in chunks], config)
        super().__init__(self.chunks, config, head, groups)
        norm = spec.algorithm.critic.max_grad_norm if critic else trainer.max_grad_norm
        self.optimizer = DistributedUpdate(self.chunks, trainer, max_grad_norm=norm, bf16=dtype == torch.bfloat16)
        self.clip_gradients, self.update = self.optimizer.clip, self.optimizer.step
        self.drop_gradients = self.optimizer.drop
        self._shares = {id(parameter): share for parameter, share in self.optimizer.shares()}
        self.load_weights(source)

    def watch_routers(self, *, balances: bool, replays: bool) -> None:
        """Of a mixture. `balances`: passes include the routing sums. `replays`: its routers take the experts of the
        packed tokens."""
        routers = Routers(len(self.sizes.expert_layers), self.sizes.experts_per_token, self.sizes.num_experts)
        self._watched = WatchedRouters(routers, balances, replays)
        for chunk in self.chunks:
            decoder_of(chunk).watch_routers(self.sizes)

    @torch.no_grad()
    def load_weights(self, source: PretrainedModel) -> None:
        """Loads weights and master weights; a head that the source lacks starts at zero."""
        for _, parameter, contents in self.parameters:
            values = torch.zeros(parameter.shape, dtype=torch.float32)
            if not any(block.name.startswith(HEAD) for block in contents.blocks):
                source.read_into(values, contents)
            self.assign(parameter, values)

    def assign(self, parameter: nn.Parameter, values: torch.Tensor) -> None:
        """`values`: float32, of the parameter's shape; without gradient."""
        parameter.data.copy_(values)
        if share := self._shares.get(id(parameter)):
            share.state[MASTER].copy_(values.flatten()[share.start : share.stop])

    def shares(self) -> Iterator[tuple[str, nn.Parameter, Share, LocalTensor]]:
        """(name, parameter, this rank's share, contents) of each parameter of which this rank has a share."""
        for name, parameter, contents in self.parameters:
            if share := self._shares.get(id(parameter)):
                yield name, parameter, share, contents

    def check_same(self, written: RankFiles, name: str) -> None:
        """Raises ConfigError: the checkpoint's model `name` is another model than this one."""
        there = set(written.names(name))
        if not there:
            do = "keep algorithm.advantage, or start a new run from what asyncrl-export makes of it"
            raise written.unfit(f"it has no {name}", do)
        own = self.sizes.fingerprint()
        then = {size: written.numbers.get(f"{name}.{size}") for size in own}
        if differing := [f"{size}={then[size]}, not {own[size]}" for size in own if then[size] != own[size]]:
            raise written.unfit(f"its {name} is another one: {', '.join(differing)}")
        missing = sorted({b.name for _, _, contents in self.parameters for b in contents.blocks} - there)
        if missing:
            raise written.unfit(f"it is of another model: it has no {missing[0]} ({len(missing)} tensors missing)")

    @torch.no_grad()
    def load_state(self, written: RankFiles, name: str) -> None:
        """Loads weights, master weights, moments and step count of the checkpoint's model `name`."""
        for _, parameter, contents in self.parameters:
            values = torch.empty(parameter.shape, dtype=torch.float32)
            written.read_into(values, contents, name, MASTER)
            self.assign(parameter, values)
            if share := self._shares.get(id(parameter)):
                for kind in MOMENTS:
                    written.read_into(values, contents, name, kind)
                    share.state[kind].copy_(values.flatten()[share.start : share.stop])
        self.optimizer.set_steps(written.numbers[name])

    def train(self, mode: bool) -> None:
        for chunk in self._chunks:
            chunk.train(mode)

    def forward_backward(
        self, batches: Sequence[PackedTokens], loss_function: LossFunction[Output], *, learns: Sequence[bool]
    ) -> list[Part]:
        """See `Model`."""
        found: dict[int, Part] = {}

        def use(at: int, numbers: torch.Tensor) -> torch.Tensor:
            part = loss_function(at, self._head.output(numbers))
            found[at] = part.detached()
            return part.loss

        with torch.set_grad_enabled(any(learns)):
            routing = self._run(batches, use, learns=any(learns))
        parts = self._of_all_stages([found[at] for at in sorted(found)], len(batches), batches[0].input_ids.device)
        return [_with_balance(*one) for one in zip(parts, batches, routing, strict=True)]

    def _of_all_stages(self, parts: list[Part], count: int, device: torch.device) -> list[Part]:
        """The last stage's parts on every stage. Collective over the stages."""
        group = self._groups.pipeline
        if group.size() == 1:
            return parts
        named: list[Any] = [[name for name, _ in parts[0].seen.sums] if parts else None]
        dist.broadcast_object_list(named, group=group, group_src=group.size() - 1, device=device)
        names: list[str] = named[0]
        scalars = 2 + len(names)
        values = torch.empty(count, scalars + math.prod(by_lag.SHAPE), dtype=torch.float64, device=device)
        for at, part in enumerate(parts):
            numbers = (part.loss, part.seen.ratio_max, *(value for _, value in part.seen.sums))
            values[at, :scalars] = torch.stack([number.double() for number in numbers])
            values[at, scalars:] = 0 if part.seen.by_lag is None else part.seen.by_lag.flatten()
        self._from_last_stage(values)
        found = []
        for row in values:
            sums = tuple(zip(names, row[2:scalars], strict=True))
            of_lags = row[scalars:].reshape(by_lag.SHAPE)
            found.append(Part(row[0].float(), LossStatistics(sums, row[1].float(), of_lags)))
        return found


class MegatronModels:
    """Owns policy, reference and critic; `critic` is None if the algorithm needs none."""

    def __init__(self, spec: TrainerSpec, groups: Groups, *, on_cpu: bool) -> None:
        """Collective. Raises ConfigError: a model cannot be read or trained."""
        self._spec, self._groups, self._on_cpu = spec, groups, on_cpu
        algorithm = spec.algorithm
        source = PretrainedModel(spec.model)
        require_experts(spec, has_some=bool(source.sizes.expert_layers))
        head = PolicyHead(source.sizes.vocab_size, groups.tensor)
        self.policy = TrainedModel(source, spec, groups, head, on_cpu=on_cpu)
        balances, replays = algorithm.router_aux_coefficient > 0, spec.trainer.router_replay == "rollout"
        if balances or replays:
            self.policy.watch_routers(balances=balances, replays=replays)
        self.critic: TrainedModel[torch.Tensor] | None = None
        if algorithm.needs_critic:
            named = self._named(algorithm.critic.path, "algorithm.critic.path")
            self.critic = TrainedModel(named, spec, groups, ValueHead(), critic=True, on_cpu=on_cpu)
        self._reference = self._frozen() if algorithm.needs_reference else None

    def of_step(self) -> StepModels:
        """The models as the training step sees them."""
        return StepModels(self.policy, self.critic, self._reference)

    def trained(self) -> Sequence[tuple[str, TrainedModel[Any]]]:
        """(name in a checkpoint, model)."""
        return [("model", self.policy)] + ([("critic", self.critic)] if self.critic is not None else [])

    def _frozen(self) -> PipelineFrozen[TokenOutputs]:
        source = self._named(self._spec.algorithm.kl.path, "algorithm.kl.path")
        trainer = self._spec.trainer
        dtype: torch.dtype = getattr(torch, trainer.megatron.param_dtype)
        config = transformer_config(source.sizes, trainer, dtype=dtype, on_cpu=self._on_cpu, recompute=False)
        chunks = build_chunks(source.sizes, config, self._groups.coordinates)
        with torch.no_grad():
            for chunk, contents in chunks:
                for name, parameter in chunk.named_parameters():
                    source.read_into(parameter, contents[name])
        head = PolicyHead(source.sizes.vocab_size, self._groups.tensor)
        frozen = [chunk.requires_grad_(False).eval() for chunk, _ in chunks]
        return PipelineFrozen(frozen, config, head, self._groups)

    def _named(self, path: str | None, key: str) -> PretrainedModel:
        """The model at `path`; `model.revision` applies to `model.path` only.

        Raises:
            ConfigError: its vocabulary is smaller than the policy's.
        """
        model: ModelConfig = self._spec.model
        if path in (None, model.path):
            return PretrainedModel(model)
        found, own = PretrainedModel(replace(model, path=path, revision=None), key), self.policy.sizes.vocab_size
        if found.sizes.vocab_size < own:
            said = f"its embedding has {found.sizes.vocab_size} rows, that of model.path={model.path} has {own}"
            raise ConfigError(explain(f"{key}={path}", said, "name a model of the same vocabulary"))
        return found


_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class PretrainedModel:
    """The files of `model.path`, mapped while this object lives."""

    def __init__(self, model: ModelConfig, key: str = "model.path") -> None:
        """Reads the config and the headers of the files.

        Args:
            key: the key of the recipe that names the model, for errors.

        Raises:
            ConfigError: the model cannot be read, is not in safetensors files, or is not supported.
        """
        from transformers import AutoConfig

        self._asked = f"train {key}={model.path}"
        check_path(model.path, key)
        try:
            config = AutoConfig.from_pretrained(
                model.path, revision=model.revision, trust_remote_code=model.trust_remote_code
            ).to_dict()
            self._files = open_files(model.path, model.revision)
            if not self._files:
                raise FileNotFoundError("no *.safetensors in it")
        except (OSError, ValueError) as error:
            do = "name a directory or hub name of a causal LM with *.safetensors files"
            raise ConfigError(explain(self._asked, str(error), do)) from error
        if problems := unsupported(ModelFacts.of_config(model.path, config)):
            found = f"the backend does not support {', '.join(problems)}"
            asked = f"{self._asked} with trainer.backend=megatron"
            raise ConfigError(explain(asked, found, "set trainer.backend=fsdp"))
        self.sizes = ModelSizes.of_config(config)
        if self.sizes.tied and _HEAD in self._files and not torch.equal(self._whole(_HEAD), self._whole(_EMBEDDING)):
            raise ConfigError(explain(self._asked, UNTIED, HOW_TO_TIE))

    def read_into(self, target: torch.Tensor, contents: LocalTensor) -> None:
        """Fills `target`, a rank's tensor of any dtype and device, according to `contents`. Raises ConfigError: a
        tensor is missing or has another shape."""
        target.zero_()
        for block in contents.blocks:
            place = target.narrow(block.dim, block.local, block.length)
            values = self._slice(block)
            if values.shape != place.shape:
                found = f"{block.name} has the shape {list(values.shape)} where {list(place.shape)} is due"
                raise self._unfit(found)
            place.copy_(values)

    def _slice(self, block: Block) -> torch.Tensor:
        stored, run = self._stored(block.name), slice(block.start, block.start + block.length)
        return stored[run] if block.dim == 0 else stored[:, run]

    def _whole(self, name: str) -> torch.Tensor:
        """In float32: the files may hold the two in different dtypes."""
        return self._stored(name)[:].float()

    def _stored(self, name: str) -> Any:
        """The tensor `name`, to be sliced. Raises ConfigError."""
        if name not in self._files:
            raise self._unfit(f"it has no tensor {name}")
        return self._files[name].get_slice(name)

    def _unfit(self, found: str) -> ConfigError:
        return ConfigError(explain(self._asked, found, "name a whole model in Hugging Face format"))


def decoder_of(chunk: nn.Module) -> DecoderChunk:
    """The decoder inside an optimizer's wrapper, if there is one."""
    inner = chunk if isinstance(chunk, DecoderChunk) else chunk.module
    assert isinstance(inner, DecoderChunk), "chunks are decoders, wrapped at most once"
    return inner


def _with_balance(part: Part, tokens: PackedTokens, routing: RoutingSums | None) -> Part:
    if routing is None or tokens.balance is None:
        return part
    return replace(part, balance=(tokens.balance * routing.given).sum())


def _nothing(like: PackedTokens) -> PackedTokens:
    """A row of one token."""
    zero = torch.zeros(1, dtype=torch.int64, device=like.input_ids.device)
    layout = PackedLayout.of([1], zero.device)
    return PackedTokens(zero[None], zero[None], layout, zero, zero, like.temperature)
