"""The models that the algorithm needs, split over the same ranks, with their optimizers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Generic

import torch
from torch import nn

from asyncrl.config.model import ModelConfig
from asyncrl.config.paths import check_path
from asyncrl.errors import ConfigError, explain
from asyncrl.trainer.backend import MOMENTS
from asyncrl.trainer.megatron.model import Groups, build_chunks, transformer_config
from asyncrl.trainer.megatron.names import Block, LocalTensor
from asyncrl.trainer.megatron.optimizer import DistributedUpdate, Share, wrap
from asyncrl.trainer.megatron.routing import WatchedRouters
from asyncrl.trainer.megatron.sizes import ModelSizes
from asyncrl.trainer.megatron.stored_state import MASTER, RankFiles
from asyncrl.trainer.megatron.supports import unsupported
from asyncrl.trainer.megatron.trained import Head, PipelineFrozen, PipelineTrained, PolicyHead, ValueHead, decoder_of
from asyncrl.trainer.step.model import Output, Routers, StepModels, require_experts
from asyncrl.trainer.trainer_spec import TrainerSpec
from asyncrl.types import HOW_TO_TIE, UNTIED, ModelFacts
from asyncrl.weights.encodings.base import open_files

HEAD = "head."
"""Prefix of a critic's head; no pretrained model has it."""


class TrainedModel(Generic[Output]):
    """A model in training: its chunks, their contents and its optimizer.

    Attributes:
        parameters: (name that is unique on this rank, parameter, contents), in the same order at every start.
        update: its optimizer.
    """

    def __init__(
        self, source: PretrainedModel, spec: TrainerSpec, groups: Groups, *, critic: bool, on_cpu: bool
    ) -> None:
        """Builds and loads it; collective."""
        trainer = spec.trainer
        dtype: torch.dtype = getattr(torch, trainer.megatron.param_dtype)
        self.sizes = source.sizes
        self.config = transformer_config(source.sizes, trainer, dtype=dtype, on_cpu=on_cpu)
        chunks = build_chunks(source.sizes, self.config, groups.coordinates, critic=critic)
        self.parameters: list[tuple[str, nn.Parameter, LocalTensor]] = []
        for number, (chunk, contents) in enumerate(chunks):
            named = dict(chunk.named_parameters())
            self.parameters += [(f"{number}.{name}", named[name], contents[name]) for name in contents]
        self.chunks = wrap([chunk for chunk, _ in chunks], self.config)
        norm = spec.algorithm.critic.max_grad_norm if critic else trainer.max_grad_norm
        self.update = DistributedUpdate(self.chunks, trainer, max_grad_norm=norm, bf16=dtype == torch.bfloat16)
        self._shares = {id(parameter): share for parameter, share in self.update.shares()}
        self.load_weights(source)

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
        self.update.set_steps(written.numbers[name])

    def of_step(
        self, head: Head[Output], groups: Groups, *, routing: bool = False, replays: bool = False
    ) -> PipelineTrained[Output]:
        """The model as the training step sees it. `routing`: include the routing sums of a mixture. `replays`: its
        routers take the experts of the packed tokens."""
        sizes, watched = self.sizes, None
        if routing or replays:
            routers = Routers(len(sizes.expert_layers), sizes.experts_per_token, sizes.num_experts)
            watched = WatchedRouters(routers, routing, replays)
            for chunk in self.chunks:
                decoder_of(chunk).watch_routers(sizes)
        return PipelineTrained(self.chunks, self.config, head, groups, self.update, watched)


class MegatronModels:
    """Owns policy, reference and critic; `critic` is None if the algorithm needs none."""

    def __init__(self, spec: TrainerSpec, groups: Groups, *, on_cpu: bool) -> None:
        """Collective. Raises ConfigError: a model cannot be read or trained."""
        self._spec, self._groups, self._on_cpu = spec, groups, on_cpu
        algorithm = spec.algorithm
        source = PretrainedModel(spec.model)
        require_experts(spec, has_some=bool(source.sizes.expert_layers))
        self.policy: TrainedModel[Any] = TrainedModel(source, spec, groups, critic=False, on_cpu=on_cpu)
        self.critic: TrainedModel[Any] | None = None
        if algorithm.needs_critic:
            named = self._named(algorithm.critic.path, "algorithm.critic.path")
            self.critic = TrainedModel(named, spec, groups, critic=True, on_cpu=on_cpu)
        self._reference = self._frozen() if algorithm.needs_reference else None

    def of_step(self) -> StepModels:
        """The models as the training step sees them."""
        head = PolicyHead(self.policy.sizes.vocab_size, self._groups.tensor)
        critic = self.critic.of_step(ValueHead(), self._groups) if self.critic is not None else None
        balanced = self._spec.algorithm.router_aux_coefficient > 0
        replays = self._spec.trainer.router_replay == "rollout"
        policy = self.policy.of_step(head, self._groups, routing=balanced, replays=replays)
        return StepModels(policy, critic, self._reference)

    def trained(self) -> Sequence[tuple[str, TrainedModel[Any]]]:
        """(name in a checkpoint, model)."""
        return [("model", self.policy)] + ([("critic", self.critic)] if self.critic is not None else [])

    def _frozen(self) -> PipelineFrozen[Any]:
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
