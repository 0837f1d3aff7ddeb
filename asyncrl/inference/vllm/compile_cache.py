"""vLLM's cache of compiled models, where it does not find what it has stored."""

from __future__ import annotations

import functools
from typing import Any

import torch

_FINISH = "finalize_loading"


def complete_loaded_functions() -> None:
    """Adds the method `finalize_loading` to cached functions that lack it. vLLM calls it on whatever it loads, but on a
    CPU it uses torch's backend, whose functions do not have it; without the method every start recompiles the model, 5
    s for the smallest. There is nothing to finalize. Idempotent."""
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
