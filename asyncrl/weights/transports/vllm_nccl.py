"""Weights to vLLM's workers through vLLM's own NCCL backend: its rendezvous, its packed broadcasts, its wire format.

A `VllmNcclSender` is rank 0 of vLLM's group; the worker with number `receiver` is rank `receiver + 1`, in vLLM's own
engine (`inference/vllm/nccl_receiver.py`). Beside the group runs the control channel of the other transports: NCCL
cannot say who is missing, and a worker that refuses the weights has to say so before anybody waits in NCCL:

    receiver: READY (the port of the group that it is in) -> sender: BEGIN (the port of the group that is used)
    -> receiver: ACK 0 (the weights fit) -> vLLM's broadcasts -> receiver: ACK 1 (loaded) -> sender: DONE

Where the manifest asks for it, both sides digest each tensor whole: the sender before it hands it to vLLM, the workers
when vLLM hands it to them, before it is loaded.
"""

from __future__ import annotations

import importlib.util
import secrets
import socket
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

import torch

from asyncrl.errors import ConfigError, DeadlineExceeded, WeightTransferError, explain
from asyncrl.types import Digest, Manifest, VllmNcclSource
from asyncrl.weights.digest import digest_for
from asyncrl.weights.packing import Digester, dtype_name
from asyncrl.weights.transports.blocking import BlockingCalls, HandOver, wait_for
from asyncrl.weights.transports.control_channel import Deadline, Kind, SenderChannel

T = TypeVar("T")

VLLM_NCCL = "vllm_nccl"
FITS, LOADED = 0, 1
"""Values of a receiver's ACK."""
NUM_BUFFERS = 2
"""Broadcasts in transfer at once; both sides of vLLM's protocol must use the same number."""

_EXPLANATION_S = 0.5
"""Once a call of NCCL failed: how long to wait for the process that broke it to say why."""


class Endpoint(Protocol):
    """The sender's end of a group; made, used and closed outside of the sender's thread."""

    def broadcast(self, weights: Iterator[tuple[str, torch.Tensor]], bucket_bytes: int) -> None:
        """Sends all of `weights`; returns when their memory may be used again."""
        ...

    def close(self) -> None:
        """Ends calls of the group that are in progress, in other threads too."""
        ...


OpenEndpoint = Callable[[str, int, int], Endpoint]
"""(host, port, world size) -> rank 0 of the group that meets there; returns when all ranks have come."""


class VllmNcclSender:
    """Implements `WeightSender`. One thread at a time, except for `interrupt`."""

    def __init__(
        self,
        bucket_bytes: int,
        num_receivers: int,
        *,
        device: str | torch.device = "cpu",
        host: str = "127.0.0.1",
        open_endpoint: OpenEndpoint | None = None,
    ) -> None:
        """
        Args:
            bucket_bytes: a broadcast is sent when it holds more than this many bytes.
            device: where the weights live: a GPU.
            host: an address of this machine that the workers reach.
            open_endpoint: joins the group; by default vLLM's, on this thread's GPU.

        Raises ConfigError: no GPU, or vLLM is not installed here.
        """
        if num_receivers < 1:
            raise ConfigError(explain("a vllm_nccl transfer", f"{num_receivers} receivers", "use at least 1"))
        if open_endpoint is None:
            _require_vllm_on(torch.device(device))
        self._bucket_bytes = bucket_bytes
        self._num_receivers = num_receivers
        self._host = host
        self._device = torch.device(device)
        self._open_endpoint = VllmEndpoint if open_endpoint is None else open_endpoint
        self._channel: SenderChannel | None = None
        self._calls: BlockingCalls | None = None
        self._endpoint: Endpoint | None = None
        self._port = 0

    def open(self) -> VllmNcclSource:
        self.close()
        self._channel = SenderChannel(f"tcp://{self._host}:*", self._num_receivers)
        return VllmNcclSource(
            endpoint=self._channel.endpoint,
            host=self._host,
            bucket_bytes=self._bucket_bytes,
            num_receivers=self._num_receivers,
            epoch=secrets.randbits(63),
            key=self._channel.key,
            digest=digest_for(self._device),
        )

    def send(self, manifest: Manifest, weights: Iterable[tuple[str, torch.Tensor]], timeout_s: float) -> Digest | None:
        """As `WeightSender.send`."""
        if self._channel is None:
            raise WeightTransferError(explain("send weights", "the sender is closed", "call open() first"))
        channel, deadline = self._channel, Deadline(timeout_s)
        digester = Digester(manifest, digest_for(self._device))
        try:
            self._begin(channel, channel.gather(manifest, deadline), deadline)
            self._broadcast(channel, digested(checked_walk(manifest, weights), digester), deadline)
            _wait_acked(channel, LOADED, deadline, "load the weights")
            channel.finish()
        except BaseException as error:
            channel.abort(f"{type(error).__name__}: {error}")
            self._drop_group()
            raise
        return digester.result()

    def interrupt(self) -> None:
        """As `Interruptible.interrupt`."""
        if (channel := self._channel) is not None:
            channel.interrupt()

    def close(self) -> None:
        self._drop_group()
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _begin(self, channel: SenderChannel, ports: tuple[int, ...], deadline: Deadline) -> None:
        """Returns with a group of all receivers: the last one, or a new one where somebody is not in it."""
        if self._endpoint is not None and set(ports) == {self._port}:
            channel.tell(Kind.BEGIN, self._port)
            _wait_acked(channel, FITS, deadline, "find that the weights fit")
            return
        self._drop_group()
        with reserve_port(self._host) as place:
            self._port = place.getsockname()[1]
            channel.tell(Kind.BEGIN, self._port)
            _wait_acked(channel, FITS, deadline, "find that the weights fit")
            self._calls = BlockingCalls("vllm-nccl-sender")
            self._calls.submit(_on_the_gpu_of_this_thread(self._device))
            host, port, world_size = self._host, self._port, self._num_receivers + 1
            joining = self._calls.submit(lambda: self._open_endpoint(host, port, world_size))
            what = f"form vLLM's NCCL group at {host}:{port} with {self._num_receivers} receiver(s)"
            try:
                self._endpoint = self._wait(joining, channel, deadline, what)
            finally:
                if self._endpoint is None:
                    joining.add_done_callback(_close_late)

    def _broadcast(
        self,
        channel: SenderChannel,
        weights: Iterable[tuple[str, torch.Tensor]],
        deadline: Deadline,
    ) -> None:
        """The weights are walked in this thread, where gathering them is collective, and sent from the other."""
        assert self._endpoint is not None, "a transfer has begun"
        assert self._calls is not None, "an endpoint has its thread"
        endpoint, hand_over = self._endpoint, HandOver(deadline)
        what = "broadcast the first tensor"
        sending = self._calls.submit(lambda: endpoint.broadcast(_on_this_stream(hand_over), self._bucket_bytes))
        try:
            for name, tensor in weights:
                what = f"broadcast {name}"
                item = (name, tensor, _ready_event(tensor))
                while not hand_over.offer(item):
                    if sending.done() or not deadline.remaining_s():
                        self._wait(sending, channel, deadline, what)
                        raise WeightTransferError(explain(what, "vLLM took no more tensors", "report this defect"))
                    channel.watch()
            hand_over.end()
        except BaseException as error:
            hand_over.end(error)
            raise
        self._wait(sending, channel, deadline, "end the last broadcasts")

    def _wait(self, future: Future[T], channel: SenderChannel, deadline: Deadline, what: str) -> T:
        """`wait_for`. What broke the call gives way to what a receiver reports as the cause."""
        try:
            return wait_for(future, deadline, what, channel.watch)
        except DeadlineExceeded as error:
            raise DeadlineExceeded(f"{error}\nbehind: {channel.laggards()}") from error
        except WeightTransferError:
            explanation = Deadline(_EXPLANATION_S if future.done() else 0.0)
            while explanation.remaining_s():
                channel.check(explanation.remaining_s())
            raise

    def _drop_group(self) -> None:
        endpoint, self._endpoint = self._endpoint, None
        calls, self._calls = self._calls, None
        if calls is not None:
            calls.close()
        if endpoint is not None:
            endpoint.close()


class VllmEndpoint:
    """The `Endpoint` of vLLM's trainers."""

    def __init__(self, host: str, port: int, world_size: int) -> None:
        """Raises WeightTransferError: vLLM found no NCCL, in which case its broadcasts do nothing."""
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        self._group = trainer_init({"master_address": host, "master_port": port, "world_size": world_size})
        require_nccl(self._group)

    def broadcast(self, weights: Iterator[tuple[str, torch.Tensor]], bucket_bytes: int) -> None:
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        packed_nccl_broadcast_producer(
            iterator=weights,
            group=self._group,
            src=0,
            post_iter_func=lambda item: item[1],
            buffer_size_bytes=bucket_bytes,
            num_buffers=NUM_BUFFERS,
        )

    def close(self) -> None:
        self._group.destroy()


def checked_walk(manifest: Manifest, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights as they come, each against the manifest by which receivers cut the broadcasts.

    Raises WeightTransferError: a tensor is missing, extra, out of order or of another shape or dtype. What is extra is
    known before the last tensor is yielded.
    """
    walk, last = iter(weights), len(manifest.tensors) - 1
    do = "make named_weights() yield what weight_specs() lists, in the same order"
    if last < 0:
        _require_end(walk, 0)
    for number, expected in enumerate(manifest.tensors):
        asked = f"publish tensor {number}: {expected.name}, {expected.dtype} {expected.shape}"
        item = next(walk, None)
        if item is None:
            raise WeightTransferError(explain(asked, "the weights ended before it", do))
        name, tensor = item
        if name != expected.name or dtype_name(tensor.dtype) != expected.dtype or tuple(tensor.shape) != expected.shape:
            found = f"{name}, {dtype_name(tensor.dtype)} {tuple(tensor.shape)}"
            raise WeightTransferError(explain(asked, found, do))
        if number == last:
            _require_end(walk, len(manifest.tensors))
        yield name, tensor.detach()


def _require_end(walk: Iterator[tuple[str, torch.Tensor]], expected: int) -> None:
    if (extra := next(walk, None)) is not None:
        do = "make named_weights() yield what weight_specs() lists"
        raise WeightTransferError(explain(f"publish {expected} tensors", f"one more: {extra[0]}", do))


def digested(weights: Iterable[tuple[str, torch.Tensor]], digester: Digester) -> Iterator[tuple[str, torch.Tensor]]:
    """`weights`, all of a manifest in its order; each is counted before it is passed on."""
    for number, (name, tensor) in enumerate(weights):
        digester.add_whole(number, tensor)
        yield name, tensor


def require_nccl(group: Any) -> None:
    """Raises WeightTransferError: this communicator of vLLM has no NCCL below it, and its calls do nothing."""
    if not group.available or group.disabled:
        found = "vLLM's communicator is disabled: it found no NCCL library, or VLLM_DISABLE_PYNCCL is set"
        do = "install torch with CUDA and its NCCL in this environment, or set weights.transport=collective"
        raise WeightTransferError(explain(f"weights.transport={VLLM_NCCL}", found, do))


def reserve_port(host: str) -> socket.socket:
    """A socket that keeps a port of `host` from others until a server binds it (with SO_REUSEADDR, as vLLM's does)."""
    place = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    place.bind((host, 0))
    return place


def _require_vllm_on(device: torch.device) -> None:
    asked = f"weights.transport={VLLM_NCCL} from a trainer on {device}"
    if device.type != "cuda":
        do = "train on a GPU, or set weights.transport to ipc or collective"
        raise ConfigError(explain(asked, "NCCL moves the memory of GPUs only", do))
    if importlib.util.find_spec("vllm") is None:
        do = "install vllm in the trainer's environment too, or set weights.transport to ipc or collective"
        raise ConfigError(explain(asked, "the package vllm is not installed there", do))


def _wait_acked(channel: SenderChannel, step: int, deadline: Deadline, what: str) -> None:
    """Raises as `SenderChannel.wait_acked`, which speaks of buckets."""
    try:
        channel.wait_acked(step, deadline)
    except DeadlineExceeded as error:
        raise DeadlineExceeded(f"{error}\nwaited for: receivers to {what}") from error


def _on_the_gpu_of_this_thread(device: torch.device) -> Callable[[], None]:
    """A call that makes this thread's GPU that of the thread which runs it: the choice is each thread's own."""
    if device.type != "cuda":
        return lambda: None
    index = torch.cuda.current_device() if device.index is None else device.index
    return lambda: torch.cuda.set_device(index)


def _ready_event(tensor: torch.Tensor) -> torch.cuda.Event | None:
    """Happens when the work that produces `tensor`, queued by this thread, is done."""
    if tensor.device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(tensor.device))
    return event


def _on_this_stream(items: Iterable[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors, ordered for the stream that is current in the consuming thread whenever it takes one."""
    for name, tensor, ready in items:
        if ready is not None:
            stream = torch.cuda.current_stream(tensor.device)
            stream.wait_event(ready)
            tensor.record_stream(stream)  # its memory is used again only after what this stream does with it
        yield name, tensor


def _close_late(joining: Future[Any]) -> None:
    """A group that forms after everybody has left."""
    if joining.exception() is None:
        joining.result().close()
