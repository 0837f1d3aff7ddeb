"""Custom weight loader that SGLang calls in its scheduler processes for a publish."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch

from asyncrl.errors import WeightTransferError, explain
from asyncrl.inference.sglang.weight_channel import PublishOrder, read_order, write_outcome
from asyncrl.inference.shared.weight_update import PublishedNames, WorkerUpdate, load_named
from asyncrl.weights.encodings.decoder import Decoder

logger = logging.getLogger(__name__)

_UPDATES: WeakKeyDictionary[torch.nn.Module, WorkerUpdate] = WeakKeyDictionary()


def load(model: torch.nn.Module, named_tensors: list[tuple[str, Any]]) -> None:
    """Receives one publish into `model`. Never raises: an exception would kill the scheduler."""
    name, _, number = named_tensors[0][0].partition(":")
    rank = int(number)
    try:
        order = read_order(name)
        update = _UPDATES.get(model)
        if update is None:
            update = _UPDATES[model] = _make_update(model, order)
        if order.after_failure:
            update.forget()
        left_s = max(0.0, order.deadline_s - time.monotonic())
        outcome = update.apply(order.source, rank, order.manifest, left_s)
    except Exception as error:  # process boundary: the replica reads it
        logger.exception("the publish failed")
        outcome = [type(error).__name__, str(error), None]
    write_outcome(name, rank, outcome)


def _make_update(model: torch.nn.Module, order: PublishOrder) -> WorkerUpdate:
    parameter = next(model.parameters())
    loader = SglangLoader(model, order)
    decoder = Decoder(order.model.path, order.model.revision, parameter.dtype, publishes=loader.names.knows)
    return WorkerUpdate(loader, decoder, parameter.device)


class SglangLoader:
    """A `WeightLoader` over the model's `load_weights`, which takes checkpoint tensors one by one."""

    computes_together = False

    def __init__(self, model: torch.nn.Module, order: PublishOrder) -> None:
        self._model = model
        self.names = PublishedNames(order.model)
        self.check = self.names.check

    def start(self, names: Collection[str] | None) -> None:
        """Nothing to do: the host calls SGLang's begin_weight_update."""

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]], names: Collection[str] | None) -> None:
        # A partial publish leaves most parameters unwritten, so marks would prove nothing.
        probes = _Probes(self._model) if names is None else None
        with torch.no_grad():
            published, _ = load_named(self._model, tensors, "SGLang")
        self.names.require(published, names)
        if probes is not None and (untouched := probes.untouched()):
            found = f"SGLang took nothing of it for {len(untouched)} of its parameters, the first is {untouched[0]!r}"
            do = "report this: SGLang and transformers name the tensors of this model in different ways"
            raise WeightTransferError(explain("load a publish of the whole model", found, do))

    def finish(self) -> None:
        """Nothing to do: the host calls SGLang's end_weight_update."""

    def abandon(self) -> None:
        """Nothing to do: the next publish sends all tensors."""


class _Probes:
    """NaN marks in every parameter that reveal parameters not written by a publish of the whole model: SGLang silently
    skips unknown names."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._marked = []
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point() and parameter.numel() > 1 and parameter.is_contiguous():
                flat = parameter.data.view(-1)
                last = len(flat) - 1
                at = torch.tensor([0, last // 3, 2 * last // 3, last], device=flat.device)
                self._marked.append((name, flat, at, flat[at]))
                flat[at] = torch.nan

    def untouched(self) -> list[str]:
        """Names of parameters with all marks intact. Restores the values under the remaining marks."""
        names = []
        for name, flat, at, before in self._marked:
            gone = flat[at].isnan()
            if gone.all():
                names.append(name)
            flat[at] = torch.where(gone, before, flat[at])
        return names
