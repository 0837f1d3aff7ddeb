"""In place of SGLang's kernel package, which has no build for a CPU: SGLang imports names from it at start, and falls
back to plain torch where it would call them. For tests and the quickstart on a machine without a GPU only."""

from typing import Any

__version__ = "0.4.10"


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"sgl_kernel.{name}: this package is a stand-in for machines without a GPU")

    return missing
