"""The packages that environments of others need: installed only where a recipe names one of them."""

from __future__ import annotations

import importlib.metadata
import importlib.util

from packaging.specifiers import SpecifierSet

from asyncrl.config.checks import require

PACKAGES = {
    "gymnasium": ("rollout.environment=gymnasium", "gymnasium", ">=1.0,<2"),
    "mcp": ("rollout.tool_use.mcp", "mcp", ">=2.0,<3"),
    "openenv": ("rollout.environment=openenv", "openenv", ">=0.4,<1"),
    "verifiers": ("rollout.environment=verifiers", "verifiers", ">=0.4,<0.5"),
}
"""Module, named as its package -> what of a recipe needs it, the extra of asyncrl that installs it, its versions."""


def require_package_of(module: str) -> None:
    """Raises ConfigError: the package is not installed, or in a version that does not fit."""
    asked, extra, versions = PACKAGES[module]
    require(
        importlib.util.find_spec(module) is not None,
        asked=asked,
        found=f"the package {module} is not installed",
        do=f"pip install 'asyncrl[{extra}]'",
    )
    try:
        installed = importlib.metadata.version(module)
    except importlib.metadata.PackageNotFoundError:
        return  # its source is on the path, and no version is known
    require(
        SpecifierSet(versions).contains(installed, prereleases=True),
        asked=asked,
        found=f"{module} {installed}, needed {versions}",
        do=f"pip install 'asyncrl[{extra}]'",
    )
