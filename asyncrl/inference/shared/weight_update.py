"""A publish as seen by one worker process of an engine, in phases that are the same for every package.

An exception in a worker may kill the engine, and reaches the adapter as text at best. So no phase raises: the first
error is kept until the adapter fetches it (`outcome`).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from threading import Condition
from typing import Any, Protocol

import torch

from asyncrl.config.model import ModelConfig
from asyncrl.errors import AsyncRLError, ConfigError, DeadlineExceeded, WeightTransferError, explain
from asyncrl.inference.shared.staged_weights import Staging
from asyncrl.types import Digest, Manifest, TensorSpec, TransferSource
from asyncrl.weights.assembling_sink import AssemblingSink
from asyncrl.weights.encodings.decoder import Decoder, Scope
from asyncrl.weights.stored_layout import StoredLayout
from asyncrl.weights.transport import HeldReceiver, WeightSink
from asyncrl.weights.transports import build_receiver

logger = logging.getLogger(__name__)

_CLOSE_S = 30.0
"""Time for an abandoned publish to end and its receiver to disconnect."""
_GRACE_S = 5.0
"""Extra time of a receiver beyond its deadline before it is abandoned."""


class WeightLoader(Protocol):
    """Loads checkpoint tensors into one engine's served model. All methods except `check` run in the worker's main
    thread."""

    @property
    def computes_together(self) -> bool:
        """`load` has collective calls: every worker must load every tensor, even after an error."""
        ...

    def check(self, spec: TensorSpec) -> None:
        """Raises WeightTransferError: no such tensor in the model, or a different shape."""
        ...

    def start(self, names: Collection[str] | None) -> None:
        """`names`: the tensors to expect; None: all of the model."""
        ...

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]], names: Collection[str] | None) -> None:
        """Consumes all of `tensors`; `names` as in `start`.

        Raises WeightTransferError naming a missing or refused tensor, and the errors of `tensors`.
        """
        ...

    def finish(self) -> None:
        """Called after everything was loaded."""
        ...

    def abandon(self) -> None:
        """Cleans up after a failure in any phase, so that the next `start` succeeds."""
        ...


def load_named(
    model: torch.nn.Module, tensors: Iterable[tuple[str, torch.Tensor]], package: str
) -> tuple[set[str], Any]:
    """Feeds all of `tensors` to the model's `load_weights`. Returns their names, and what `load_weights` returned.

    Raises WeightTransferError naming the refused tensor, and the errors of `tensors`.
    """
    published: set[str] = set()
    last = "no tensor"

    def watched() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal last
        for name, tensor in tensors:
            published.add(name)
            last = f"tensor {name!r} {tuple(tensor.shape)}"
            yield name, tensor

    try:
        return published, model.load_weights(watched())  # type: ignore[operator]
    except AsyncRLError:
        raise
    except Exception as error:
        found, do = f"{type(error).__name__}: {error}", "train and serve the same model.path"
        raise WeightTransferError(explain(f"{last} into {package}", found, do)) from error


class PublishedNames:
    """The tensors that a publish of the whole model has: the trainer names them by the same layout. Unknown, and
    unchecked, where transformers does not have the model."""

    def __init__(self, model: ModelConfig) -> None:
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._aliases: Mapping[str, str] = {}
        try:
            layout = StoredLayout.of_model(model)
        except ConfigError as error:
            logger.warning("the names and shapes of a publish are not checked before they are loaded: %s", error)
            return
        self._shapes, self._aliases = layout.shapes, layout.aliases

    @property
    def known(self) -> bool:
        return bool(self._shapes)

    def knows(self, name: str) -> bool:
        return name in self._shapes or not self.known

    def check(self, spec: TensorSpec) -> None:
        """Raises WeightTransferError: no such tensor in the model, or a different shape."""
        shape = self._shapes.get(self._aliases.get(spec.name, spec.name))
        if shape == tuple(spec.shape) or not self._shapes:
            return
        found = "the model has no tensor of that name" if shape is None else f"the model's has shape {shape}"
        asked = f"tensor {spec.name!r} {spec.shape} {spec.dtype}"
        raise WeightTransferError(explain(asked, found, "train and serve the same model.path"))

    def require(self, published: Collection[str], wanted: Collection[str] | None) -> None:
        """Raises WeightTransferError naming a missing tensor. `wanted`: the required ones; None: all."""
        missing = [name for name in (self._shapes if wanted is None else wanted) if name not in published]
        if missing:
            found = f"{len(missing)} did not come, the first is {missing[0]!r}"
            raise WeightTransferError(explain("all tensors of the model", found, "publish all of named_weights()"))


class WorkerUpdate:
    """One worker's side of publishes. Calls per publish: `join`, `start`, `receive`, `finish`, `outcome`. A staged
    publish begins with `join`, `stage`, `staged`, and `receive` loads the staged tensors.

    Owns the receiver, which stays joined while the source is the same, and the thread of its sockets.
    """

    def __init__(self, loader: WeightLoader, decoder: Decoder, device: torch.device) -> None:
        self._loader = loader
        self._decoder = decoder
        self._device = device
        self._loaded: Manifest | None = None
        """The publish that is loaded but not finished."""
        self._executor = ThreadPoolExecutor(1, "weight-receiver")  # sockets stay in one thread
        self._source: TransferSource | None = None
        self._receiver = HeldReceiver(partial(build_receiver, device=device))
        self._staging = Staging(device)
        self._staged: Future[tuple[Scope, Digest | None]] | None = None
        """The last staged publish, until it is loaded."""
        self._failure: Exception | None = None
        self._digest: Digest | None = None

    def join(self, source: TransferSource) -> None:
        """`source.receiver` is the number of this worker."""
        if source == self._source:
            return
        self._failure = None
        try:  # an abandoned staging still occupies the thread and ends first
            self._executor.submit(self._receiver.close).result(_CLOSE_S)
        except TimeoutError:
            self._source = None
            self._failure = DeadlineExceeded(
                explain("leave the former sender", f"not done within {_CLOSE_S:g} s", "restart this replica")
            )
            return
        self._source = source

    def start(self) -> None:
        self._digest = self._loaded = None
        if self._source is not None:
            self._failure = None

    def stage(self, manifest: Manifest, timeout_s: float) -> None:
        """Starts to receive a publish while the worker computes; poll `staged` for the end."""
        self.start()
        self._staged = self._executor.submit(self._stage, manifest, timeout_s)

    def staged(self) -> list[Any] | None:
        """Outcome of `stage`, like `outcome`; None while in progress."""
        assert self._staged is not None, "staged before stage"
        if not self._staged.done():
            return None
        failure = self._failure or self._staged.exception()
        return _outcome(failure, None if failure else self._staged.result()[1])

    def receive(self, manifest: Manifest, timeout_s: float) -> None:
        if manifest.is_staged:
            self._attempt(lambda: self._load_staged(manifest))
        else:
            self._attempt(lambda: self._receive(manifest, timeout_s))

    def finish(self) -> None:
        self._attempt(self._finish)
        if self._failure is not None:
            self.forget()
            try:
                self._loader.abandon()
            except Exception:
                logger.exception("the model cannot be made whole after a failed update")

    def forget(self) -> None:
        """The weights no longer match the last publish: the next one must send all tensors."""
        self._decoder.forget()

    def apply(self, source: TransferSource, worker: int, manifest: Manifest, timeout_s: float) -> list[Any]:
        """A whole publish; returns its `outcome`. `worker`: number of this worker behind `source.receiver`."""
        deadline_s = time.monotonic() + timeout_s
        self.join(replace(source, receiver=source.receiver + worker))
        self.start()
        self.receive(manifest, max(0.0, deadline_s - time.monotonic()))
        self.finish()
        return self.outcome()

    def outcome(self) -> list[Any]:
        """Result of the last update, for `publish_calls.agree`."""
        return _outcome(self._failure, self._digest)

    def close(self) -> None:
        self._source = None
        self._executor.submit(self._receiver.close)
        self._executor.shutdown(wait=False)  # the process ends with it

    def _decode(self, manifest: Manifest, scope: Scope, sink: WeightSink, timeout_s: float) -> Digest | None:
        assert self._source is not None, "receive before join"
        return self._decoder.receive(self._receiver.of(self._source), manifest, scope, sink, timeout_s)

    # -- inside --------------------------------------------------------------------------------------------------

    def _attempt(self, step: Callable[[], None]) -> None:
        """Runs `step` unless an earlier step failed; keeps the first failure."""
        if self._failure is not None:
            return
        try:
            step()
        except Exception as error:
            logger.warning("the weight update failed", exc_info=True)
            self._failure = error

    def _finish(self) -> None:
        self._loader.finish()
        if self._loaded is not None:
            self._decoder.applied(self._loaded)

    def _receive(self, manifest: Manifest, timeout_s: float) -> None:
        """The receiver's thread fills the feed; this thread, the engine's, loads from it."""
        scope = self._decoder.scope(manifest)
        names = None if scope.whole else scope.names
        self._loader.start(names)
        # One second longer: the receiver's own deadline error says more.
        feed = Feed(len(scope.names), timeout_s + 1.0, self._device)
        received = self._executor.submit(self._fill, feed, manifest, scope, timeout_s)
        together = self._loader.computes_together and manifest.encoding == "full"
        try:
            self._loader.load(completed(feed, manifest.tensors, self._device) if together else feed, names)
        except Exception as error:
            feed.fail(error)
            with suppress(TimeoutError):  # the loader's error says more
                received.exception(timeout_s + _GRACE_S)
            raise
        feed.finish()
        self._digest = received.result(timeout_s + _GRACE_S)
        self._loaded = manifest

    def _fill(self, feed: Feed, manifest: Manifest, scope: Scope, timeout_s: float) -> Digest | None:
        """Moves one publish into `feed`, in the receiver's thread."""
        sink = AssemblingSink(feed.offer, check=self._loader.check)
        try:
            return self._decode(manifest, scope, sink, timeout_s)
        except BaseException as error:
            feed.fail(error)
            raise

    def _stage(self, manifest: Manifest, timeout_s: float) -> tuple[Scope, Digest | None]:
        """Runs in the receiver's thread."""
        scope = self._decoder.scope(manifest)
        sink = self._staging.sink(self._loader.check)
        return scope, self._decode(manifest, scope, sink, timeout_s)

    def _load_staged(self, manifest: Manifest) -> None:
        staged, self._staged = self._staged, None
        assert staged is not None, "load before stage"
        scope, self._digest = staged.result(0)  # done: the adapter has polled `staged`
        names = None if scope.whole else scope.names
        self._loader.start(names)
        self._loader.load(iter(self._staging), names)
        self._loaded = manifest


def _outcome(failure: BaseException | None, digest: Digest | None) -> list[Any]:
    if failure is not None:
        return [type(failure).__name__, str(failure), None]
    return ["", "", None if digest is None else list(digest)]


_CPU = torch.device("cpu")
AHEAD_BYTES = 16 << 20
"""Bytes received ahead of the loader. Reception and loading overlap, small tensors cross threads in batches, and memory
stays bounded."""


class Feed:
    """A bounded buffer for `num_tensors` tensors; an error on one side ends both. Created by the loader: its CUDA
    stream on `device` then waits for the receiver's.

    The receiver's last `offer` returns only after the loader has loaded all tensors, so that the sender sees every
    loader error.
    """

    def __init__(self, num_tensors: int, timeout_s: float, device: torch.device = _CPU) -> None:
        self._left = num_tensors
        self._deadline = time.monotonic() + timeout_s
        self._changed = Condition()
        self._items: deque[tuple[str, torch.Tensor]] = deque()
        self._nbytes = 0
        self._error: BaseException | None = None
        self._loaded = False
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def offer(self, name: str, tensor: torch.Tensor) -> None:
        """Called by the receiver; the loader's work on the tensor is ordered after the work on the current stream.
        Raises the loader's error, DeadlineExceeded."""
        if self._stream is not None and tensor.device.type == "cuda":
            self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
            tensor.record_stream(self._stream)  # else its memory could be reused while the loader still reads
        with self._changed:
            self._wait(lambda: self._nbytes < AHEAD_BYTES, f"the engine to load the tensors before {name}")
            self._items.append((name, tensor))
            self._nbytes += tensor.nbytes
            self._left -= 1
            self._changed.notify_all()
            if self._left == 0:
                self._wait(lambda: self._loaded, "the engine to load the last tensors")

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Called by the loader. Raises the receiver's error, DeadlineExceeded."""
        while True:
            with self._changed:
                self._wait(lambda: bool(self._items) or self._left == 0, "the next tensor of a publish")
                if not self._items:
                    return
                items, self._items, self._nbytes = self._items, deque(), 0
                self._changed.notify_all()
            # Popping each tensor lets its memory be freed as soon as the loader drops it.
            while items:
                yield items.popleft()

    def finish(self) -> None:
        """The loader has loaded everything."""
        with self._changed:
            self._loaded = True
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Ends the other side with this error; the first error counts."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _wait(self, ready: Callable[[], bool], what: str) -> None:
        if not self._changed.wait_for(lambda: self._error is not None or ready(), self._deadline - time.monotonic()):
            do = "raise weights.transfer_timeout_s"
            raise DeadlineExceeded(explain(f"wait for {what}", "the deadline of the transfer", do))
        if self._error is not None:
            raise self._error


def completed(
    tensors: Iterable[tuple[str, torch.Tensor]], specs: Sequence[TensorSpec], device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields `tensors`. On an error, yields zeros for the missing tensors and then raises it. For loaders with
    collective calls, in which the other workers would wait for this one."""
    came: set[str] = set()
    try:
        for name, tensor in tensors:
            came.add(name)
            yield name, tensor
    except Exception:
        for spec in specs:
            if spec.name not in came:
                yield spec.name, torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype), device=device)
        raise
