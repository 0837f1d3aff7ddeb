"""Checks that an engine's installed package is usable, by its API rather than by its version number."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Collection, Iterable, Mapping
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any

from asyncrl.errors import ConfigError, explain

Needed = Mapping[str, tuple[str, ...]]
"""`module:attribute` -> the parameters that it must accept."""


def check_package(package: str, needed: Needed, *, tested: str, install: str, distributions: tuple[str, ...]) -> None:
    """Imports the package, which takes seconds, and checks it for `needed`.

    Args:
        tested: the versions that the tests run against.
        install: what to do if the package is missing.
        distributions: names that the package may be installed under.

    Raises ConfigError: the package is missing, cannot be imported, or lacks something that the adapter calls.
    """
    asked = f"rollout.engine={package}"
    if find_spec(package) is None:
        raise ConfigError(explain(asked, f"the package {package} is not installed", install))
    found = f"{package} {version_of(distributions)}"
    try:
        missing = [name for target, names in needed.items() for name in lacks(target, names)]
    except (ImportError, RuntimeError) as error:  # a broken torchvision raises RuntimeError from torch's registry
        do = _remedy(package, tested, str(error))
        raise ConfigError(explain(asked, f"{found} cannot be imported: {error}", do)) from error
    if missing:
        do = f"install {package}{tested}; that is the range that the tests run against"
        raise ConfigError(explain(asked, f"{found} lacks {', '.join(missing)}", do))


def version_of(distributions: tuple[str, ...]) -> str:
    """Version of the installed distribution, or "of unknown version"."""
    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "of unknown version"


def require_known(names: Iterable[str], known: Collection[str], *, section: str, package: str, listed: str) -> None:
    """Raises ConfigError: the package has no argument of one of these names of the recipe's `section`. `package`: with
    its version. `listed`: who lists the arguments."""
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3)
            do = f"one of these was meant: {', '.join(near)}" if near else f"remove it; {listed} lists them"
            raise ConfigError(explain(f"{section}.{name}", f"{package} has no argument of that name", do))


def lacks(target: str, names: tuple[str, ...]) -> list[str]:
    """The missing parts of `target` (`module:attribute`): itself, or `target(name)`."""
    module, _, path = target.partition(":")
    try:
        found: Any = import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ModuleNotFoundError, AttributeError) as error:
        package = module.partition(".")[0]
        # A missing dependency is a broken installation, not an older API.
        if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith(package):
            raise
        return [f"{module}.{path}"]
    accepted = inspect.signature(found).parameters
    return [f"{path}({name})" for name in names if name not in accepted]


def _remedy(package: str, tested: str, message: str) -> str:
    beside = [name for name in ("torchvision", "torchaudio", "torchcodec") if name in message]
    if package == "sglang" and beside:  # it imports torchvision whatever it serves
        return f"install {beside[0]} in the version and the build of the installed torch"
    if beside or any(library in message for library in ("libcudart", "libc10_cuda")):
        return "pip uninstall torchvision torchaudio torchcodec: they were built for another torch, and are not needed"
    return f"reinstall {package}{tested} with the torch that it was built for"
