"""Megatron-core on a machine without CUDA; imported only there.

Megatron-core asks for CUDA even where it only needs the device of its tensors. `cuda_as_cpu` redirects these requests:
a torch mode, valid for the thread that enters it, moves requests for `cuda` to the CPU, and the `torch.cuda` functions
that Megatron-core calls are replaced until the context ends.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from asyncrl.trainer.megatron.supports import without_wandb

CPU = torch.device("cpu")


def import_megatron() -> None:
    """Imports Megatron-core without its compiled kernels, and replaces a function that needs CUDA's libraries.

    Call it before anything else imports Megatron-core. Idempotent.
    """
    with warnings.catch_warnings(), without_wandb():
        warnings.simplefilter("ignore")  # of GPU packages
        dispatcher: Any = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
        importlib.import_module("megatron.core.models.gpt.gpt_model")
    dispatcher.maybe_move_tensor_to_cpu = _on_host


@contextmanager
def cuda_as_cpu() -> Iterator[None]:
    """Inside, in this thread, Megatron-core computes on the CPU."""
    random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    stream = _Stream()
    answers = (
        (torch.cuda, "current_device", lambda: CPU),
        (torch.cuda, "synchronize", lambda *args, **kwargs: None),
        (torch.cuda, "Stream", _Stream),
        (torch.cuda, "current_stream", lambda *args, **kwargs: stream),
        (torch.cuda, "stream", lambda *args, **kwargs: nullcontext()),
        # dropout is off: recomputing a layer draws no random numbers
        (random, "_get_cuda_rng_state", lambda *args, **kwargs: torch.empty(0, dtype=torch.uint8)),
        (random, "_set_cuda_rng_state", lambda *args, **kwargs: None),
    )
    eager = torch.compiler.set_stance("force_eager")  # otherwise torch compiles functions that Megatron-core decorates
    with eager, _CudaAsCpu(), ExitStack() as replaced:
        for owner, name, value in answers:
            replaced.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield


class _CudaAsCpu(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if device is not None and not isinstance(device, int) and torch.device(device).type == "cuda":
            kwargs = {**kwargs, "device": CPU}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.record_stream:
            return None
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            name = func(args[0])
            return name if "cuda" in name else name.replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)


class _Stream:
    """A stream and an event in one: on a CPU all work is done when a call returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """The arguments of a real stream are ignored."""

    def wait_stream(self, other: _Stream) -> None:
        pass

    def record_event(self) -> _Stream:
        return self

    def synchronize(self) -> None:
        pass


def _on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Replaces `maybe_move_tensor_to_cpu`, which returns a tensor that is already on the CPU without a copy."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
