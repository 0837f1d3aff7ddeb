"""Decides which keys of a run's config.json need the user's trust, for commands that read other people's run
directories.

A recipe names code to import, models to fetch, environment variables to read and machines to contact. Its author is the
author of the run directory; only the user at the command line can say whether to trust that author.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from asyncrl.config.paths import is_hub_model
from asyncrl.errors import ConfigError, explain

CODE_KEYS = (
    "reward.function",
    "reward.group.function",
    "rollout.environment",
    "rollout.tool_use.tools",
    "rollout.agent.function",
    "rollout.gymnasium.id",
    "rollout.gymnasium.factory",
)
"""Keys that may hold `package.module:Name`, in addition to the names in reward.parts."""
MCP_SERVERS = "rollout.tool_use.mcp."
MODEL_KEYS = ("model.path", "teacher.path", "judge.path")
HOST_KEYS = ("ray.address", "reward.remote.url", "rollout.openenv.url")
TRUST_RUN, TRUST_CODE = "--trust-run", "--trust-remote-code"
HELP_RUN = "let the run's config.json name code to import, hub models, environment variables and addresses"
HELP_CODE = "run model code that ships with the model (default: refuse it, whatever the run's config.json says)"


def reaches_out(sections: Mapping[str, Any]) -> dict[str, str]:
    """Recipe keys that name code, hub models, environment variables or other machines, each with the reason."""
    found: dict[str, str] = {}
    for key, value in _leaves(sections):
        if isinstance(value, str) and "${" in value:
            found[key] = f"{value}: read from the environment, or from another key"
        elif key == "base":
            found[key] = f"{value}: another file"
        elif (key in CODE_KEYS and ":" in str(value)) or (key.startswith("reward.parts.") and ":" in key):
            found[key] = f"{value}: code to import"
        elif key == "rollout.agent.command" or (key.startswith(MCP_SERVERS) and key.endswith(".command")):
            found[key] = f"{value}: a program to start"
        elif key.startswith("rollout.verifiers.env."):
            found[key] = f"{value}: packages of environments to import"
        elif key.startswith(MCP_SERVERS) and key.endswith(".url") and value:
            found[key] = f"{value}: another machine"
        elif key in MODEL_KEYS and value and is_hub_model(str(value)):
            found[key] = f"{value}: a model of the hub"
        elif key in HOST_KEYS and value:
            found[key] = f"{value}: another machine"
        elif key.endswith(".trust_remote_code") and value is not False:
            found[key] = f"{value}: code that ships with the model"
        elif key.rpartition(".")[2].startswith("allow_") and value is not False:
            found[key] = f"{value}: a protection less"
    return found


def require_trusted(asked: str, sections: Mapping[str, Any], do: str, *, named: Collection[str] = ()) -> None:
    """Raises ConfigError: `sections` of an untrusted run name code, models, variables or machines.

    Args:
        do: alternatives to `--trust-run`.
        named: keys that the command line sets.
    """
    found = {key: why for key, why in reaches_out(sections).items() if key not in named}
    if found:
        listed = "; ".join(f"{key}={why}" for key, why in found.items())
        do = f"pass {TRUST_RUN} if the run is yours or of somebody that you trust; {do}"
        raise ConfigError(explain(asked, f"its config.json says {listed}", do))


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Values with their dotted keys; items of a list have the list's key."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner, key)
    else:
        yield key, value
