"""The packages that environments of others need: installed only where a recipe names one of them."""

from __future__ import annotations

import importlib.util

from asyncrl.config.checks import require

PACKAGES = {
    "gymnasium": ("rollout.environment=gymnasium", "gymnasium"),
    "mcp": ("rollout.tool_use.mcp", "mcp"),
    "openenv": ("rollout.environment=openenv", "openenv"),
    "verifiers": ("rollout.environment=verifiers", "verifiers"),
}
"""Module -> what of a recipe needs it, and the extra of asyncrl that installs it."""


def require_package_of(module: str) -> None:
    """Raises ConfigError: the package is not installed."""
    asked, extra = PACKAGES[module]
    require(
        importlib.util.find_spec(module) is not None,
        asked=asked,
        found=f"the package {module} is not installed",
        do=f"pip install 'asyncrl[{extra}]'",
    )
