"""vLLM's cache of compiled models, where it does not find what it has stored."""

from __future__ import annotations

import functools
from typing import Any

import torch

_FINISH = "finalize_loading"


def complete_loaded_functions() -> None:
    """On a CPU vLLM compiles by torch's own backend, and asks what it loads for a method that only its own backend's
    functions have: without it every start compiles the model again, five seconds for the smallest. Functions that lack
    the method get one that does nothing: there is nothing to finish. Idempotent."""
    load: Any = torch.compiler.load_compiled_function
    if getattr(load, "completes", False):
        return

    @functools.wraps(load)
    def completing(*args: Any, **kwargs: Any) -> Any:
        loaded = load(*args, **kwargs)
        function = loaded._artifacts.compiled_fn
        if not hasattr(function, _FINISH):
            setattr(function, _FINISH, lambda config: None)
        return loaded

    completing.completes = True  # type: ignore[attr-defined]
    torch.compiler.load_compiled_function = completing
