"""The receiving side of encodings: turns any publish into tensors of the model."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch

from asyncrl.types import Digest, Manifest, TensorSpec
from asyncrl.weights.assembling_sink import AssemblingSink
from asyncrl.weights.encodings.base import BaseWeights, Merge
from asyncrl.weights.encodings.delta import weight_of
from asyncrl.weights.encodings.kept_weights import KeptWeights
from asyncrl.weights.encodings.lora import adapted
from asyncrl.weights.packing import byte_view, dtype_name
from asyncrl.weights.plan import make_spec
from asyncrl.weights.transport import DirectSink, WeightReceiver, WeightSink

LoadedTogether = Callable[[Collection[str], Collection[str]], Collection[str]]
"""(names to load, names of all weights) -> all names that an engine must load together with them."""


@dataclass(frozen=True, slots=True)
class Scope:
    """Names of the tensors that a publish will write, in order; `whole`: these are all tensors of the model."""

    names: tuple[str, ...]
    whole: bool


class Decoder:
    """Decodes publishes for one receiving process. Owns the base weights of adapters, mapped at the first publish that
    needs them, the names of the weights with merged adapters, and the copy of the weights that differences apply to,
    from the first publish with `is_kept`.

    A publish calls `scope`, `receive`, and `applied` once the engine has loaded everything. Without `applied` the next
    publish writes every tensor.
    """

    def __init__(
        self,
        path: str,
        revision: str | None,
        dtype: torch.dtype,
        *,
        publishes: Callable[[str], bool] = bool,
        loaded_together: LoadedTogether = lambda names, every: names,
    ) -> None:
        """
        Args:
            dtype: of the weights that the engine serves, and of full publishes and deltas.
            publishes: whether a full publish has a tensor of this name. The files may have others: of layers that
                predict several tokens ahead, or the tied ones twice.
        """
        self._path, self._revision, self._dtype, self._publishes = path, revision, dtype, publishes
        self._loaded_together = loaded_together
        self._base: BaseWeights | None = None
        self._kept: KeptWeights | None = None
        self._adapted: frozenset[str] | None = None
        """Weights with a merged adapter; the others are the model's own. None: unknown."""

    def scope(self, manifest: Manifest) -> Scope:
        """The tensors that `receive` will write. Raises WeightTransferError: the model has no safetensors files."""
        if manifest.encoding != "lora":
            return Scope(tuple(weight_of(spec.name) for spec in manifest.tensors), whole=True)
        base = self._base = self._base or BaseWeights(self._path, self._revision)
        names, every = adapted(spec.name for spec in manifest.tensors), tuple(filter(self._publishes, base.names))
        if names != self._adapted:
            return Scope(every, whole=True)
        wanted = set(self._loaded_together(names, every))
        return Scope(tuple(name for name in every if name in wanted), whole=False)

    def receive(
        self, receiver: WeightReceiver, manifest: Manifest, scope: Scope, sink: WeightSink, timeout_s: float
    ) -> Digest | None:
        """As `WeightReceiver.receive`; `sink` gets the tensors of `scope`. The digest covers the sent tensors, or with
        encoding delta the resulting weights. Raises WeightTransferError too: the model lacks an adapter's tensor, or
        the base of a delta differs."""
        # Unknown until `applied`: a receive that fails halfway leaves a mixture in the engine.
        self.forget()
        if manifest.encoding == "delta" or manifest.is_kept:
            kept = self._kept = self._kept or KeptWeights()
            receive = kept.patch if manifest.encoding == "delta" else kept.keep
            return receive(receiver, manifest, sink, timeout_s)
        self._kept = None
        if manifest.encoding == "full":
            return receiver.receive(manifest, sink, timeout_s)
        assert self._base is not None, "the publish was planned"
        factors: dict[str, torch.Tensor] = {}
        digest = receiver.receive(manifest, AssemblingSink(factors.__setitem__), timeout_s)
        self._base.require(adapted(factors))
        # In float32 the merge is computed straight into the sink's memory.
        direct = sink if isinstance(sink, DirectSink) and self._dtype == torch.float32 else None
        for name in scope.names:
            weight = self._base.tensor(name)
            keeps = name in self._base.exact or not weight.is_floating_point()
            dtype = weight.dtype if keeps else self._dtype
            spec = make_spec(name, weight.shape, dtype_name(dtype))
            if (merge := Merge.of(name, weight, factors)) is None:
                sink.write(spec, 0, byte_view(weight.to(dtype)))
            else:
                _write(spec, merge, sink, direct)
        return digest

    def applied(self, manifest: Manifest) -> None:
        """The engine has loaded everything that `receive` wrote."""
        if manifest.encoding == "lora":
            self._adapted = adapted(spec.name for spec in manifest.tensors)

    def forget(self) -> None:
        """The engine's weights are unknown until the next `applied`."""
        self._adapted = None


def _write(spec: TensorSpec, merge: Merge, sink: WeightSink, direct: DirectSink | None) -> None:
    """Writes block by block. `direct`: the sink, if it holds float32, so that the sum is computed in place."""
    row_bytes = spec.nbytes // spec.shape[0]
    for block in merge.blocks():
        offset, nbytes = block.start * row_bytes, (block.stop - block.start) * row_bytes
        place = None if direct is None else direct.destination(spec, offset, nbytes, merge.device)
        if direct is None or place is None:
            sink.write(spec, offset, byte_view(merge.rows(block).to(getattr(torch, spec.dtype))))
        else:
            merge.rows(block, out=place.view(torch.float32).view(-1, spec.shape[1]))
            direct.wrote(spec, offset, nbytes)
