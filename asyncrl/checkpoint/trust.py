"""Decides which keys of a run's config.json need the user's trust, for commands that read other people's run
directories.

A recipe names code to import, models to fetch, environment variables to read and machines to contact. Its author is the
author of the run directory; only the user at the command line can say whether to trust that author. Without that, a key
is taken only if it is known to be harmless, or has its default.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from asyncrl.config.load import types_and_defaults
from asyncrl.config.paths import is_hub_model
from asyncrl.errors import ConfigError, explain

POOLS = ("teacher", "judge")
"""Sections of other models. Their keys are those of `model` and of the engines in `rollout`."""
_TAKEN = """
    model.revision model.enable_thinking model.date model.image_directory
    data.system_prompt data.curriculum.key data.drop_duplicates data.shuffle data.continue_final_message
    reward.skip_special_tokens
    rollout.torch.device rollout.vllm.enable_prefix_caching rollout.vllm.enforce_eager rollout.vllm.enable_sleep_mode
    rollout.vllm.record_experts rollout.vllm.structured_outputs rollout.sglang.disable_radix_cache
    rollout.sglang.disable_overlap_schedule rollout.sglang.disable_cuda_graph rollout.sglang.enable_memory_saver
    rollout.sglang.record_experts rollout.sampling.keep_sets rollout.sampling.stop
    rollout.interleaved_tool_use.open rollout.interleaved_tool_use.close rollout.interleaved_tool_use.result_open
    rollout.interleaved_tool_use.result_close rollout.interleaved_tool_use.describe_tools
    rollout.gymnasium.actions rollout.gymnasium.action_pattern rollout.nemo_gym.agent
    rollout.agent.sandbox.solution rollout.openenv.action rollout.openenv.action_tag rollout.openenv.observation
    reward.pattern reward.group.pairwise reward.judge.prompt reward.judge.answers reward.judge.pattern
    reward.judge.pairwise eval.pass_at
    resume data.train data.options data.mixture data.eval run.name run.dir
    rollout.serve.enabled rollout.serve.model_name
    trainer.fsdp.reduce_every_microbatch trainer.fsdp.reshard_after_forward
    trainer.fsdp.offload_parameters trainer.fsdp.offload_optimizer trainer.fsdp.share_prompts
    trainer.megatron.sequence_parallel trainer.megatron.offload_optimizer trainer.device trainer.compile
    trainer.lora.target_modules weights.overlap weights.stage weights.rolling
    algorithm.corrections algorithm.kl.importance_weighted algorithm.kl.path algorithm.gae.whiten algorithm.critic.path
    algorithm.overlong.mask_truncated algorithm.dynamic_sampling
    checkpoint.background observability.sinks observability.wandb_project observability.progress
"""
TAKEN = frozenset(_TAKEN.split())
"""Switches and texts that only say how to render, sample and judge, and, from `resume` on, keys that nothing but
training uses. Numbers, and choices among names that the schema lists, are taken too."""
NAMES = {
    "rollout.gymnasium.id": r"[^:]*",
    **dict.fromkeys(
        ("model.chat_template", "rollout.environment", "rollout.tool_use.tools", "reward.function", "reward.parts"),
        r"[\w-]*",
    ),
    "algorithm.preset": r"[\w-]*",
}
"""Taken where every text in the value fits: a name of our own, no module and no file."""
MODEL_KEYS = ("model.path",)
"""Taken where the model is a directory."""
_CODE, _MACHINE, _FILE = "code to import", "another machine", "a file or place of files"
ASKED = {
    "model.trust_remote_code": "code that ships with the model",
    **dict.fromkeys(("rollout.vllm.engine_args", "rollout.sglang.server_args"), "can name code to import"),
    **dict.fromkeys(("reward.group.function", "rollout.agent.function", "rollout.gymnasium.factory"), _CODE),
    "rollout.gymnasium.kwargs": "arguments of code",
    "rollout.verifiers.env": "packages of environments to import",
    **dict.fromkeys(("rollout.agent.command", "rollout.tool_use.mcp"), "programs to start, or other machines"),
    **dict.fromkeys(("rollout.agent.sandbox.check", "rollout.agent.sandbox.options"), "programs to start"),
    **dict.fromkeys(("rollout.agent.sandbox.backend", "rollout.agent.sandbox.image"), "a protection less, or code"),
    **dict.fromkeys(("rollout.agent.sandbox.files", "rollout.agent.sandbox.readable"), _FILE),
    **dict.fromkeys(("ray.address", "reward.remote.url", "rollout.openenv.url", "rollout.remote.urls"), _MACHINE),
    "rollout.nemo_gym.head": _MACHINE,
    **dict.fromkeys(("rollout.agent.host", "rollout.agent.advertise", "rollout.serve.host"), "an address to listen on"),
    **dict.fromkeys(("ray.env", "rollout.remote.api_key_env"), "environment variables"),
    **dict.fromkeys(("rollout.tool_use.corpus", "weights.disk_directory", "data.image_directory"), _FILE),
    **dict.fromkeys(("reward.code.allow_basic_sandbox", "rollout.tool_use.allow_basic_sandbox"), "a protection less"),
}
"""Taken with the user's word only, unless it has its default: key -> why."""
TRUST_RUN, TRUST_CODE = "--trust-run", "--trust-remote-code"
HELP_RUN = "let the run's config.json name code to import, hub models, environment variables and addresses"
HELP_CODE = "run model code that ships with the model (default: refuse it, whatever the run's config.json says)"


def reaches_out(sections: Mapping[str, Any]) -> dict[str, str]:
    """Keys of a recipe that need the user's word, each with the reason."""
    found: dict[str, str] = {}
    for key, value in _values(sections):
        known, name = types_and_defaults().get(key), _of_policy(key)
        texts = [text for text in _texts(value) if text]
        if any("${" in text for text in texts):
            why = "read from the environment, or from another key"
        elif known is None:
            why = "another file, or a key that this version does not know"
        elif value == known[1] or is_number_or_choice(known[0]) or _is_harmless(name, value, texts):
            continue
        else:
            why = ASKED.get(name, "a model of the hub" if name in MODEL_KEYS else "code to import, or a file")
        found[key] = f"{value!s:.200}: {why}"
    return found


def is_number_or_choice(kind: Any) -> bool:
    """A value of this type names nothing that the schema does not list."""
    if get_origin(kind) is Annotated:
        return is_number_or_choice(get_args(kind)[0])
    if get_origin(kind) is Literal or kind in (int, float, NoneType):
        return True
    return NoneType in get_args(kind) and all(map(is_number_or_choice, get_args(kind)))


def _is_harmless(name: str, value: Any, texts: Collection[str]) -> bool:
    if name in NAMES:
        return all(re.fullmatch(NAMES[name], text) for text in texts)
    return name in TAKEN or (name in MODEL_KEYS and not is_hub_model(str(value)))


def require_trusted(asked: str, sections: Mapping[str, Any], do: str, *, named: Collection[str] = ()) -> None:
    """Raises ConfigError: `sections` of an untrusted run have keys that are not known to be harmless.

    Args:
        do: alternatives to `--trust-run`.
        named: keys whose values are those of the command line.
    """
    found = {key: why for key, why in reaches_out(sections).items() if key not in named}
    if found:
        listed = "; ".join(f"{key}={why}" for key, why in found.items())
        do = f"pass {TRUST_RUN} if the run is yours or of somebody that you trust; {do}"
        raise ConfigError(explain(asked, f"its config.json says {listed}", do))


def _values(sections: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """The value of each key of the schema, and whatever else is there."""
    if isinstance(sections, Mapping) and key not in types_and_defaults():
        for name, inner in sections.items():
            yield from _values(inner, f"{key}.{name}" if key else str(name))
    else:
        yield key, sections


def _of_policy(key: str) -> str:
    """The key of the policy's model or engine that has the same meaning."""
    section, _, rest = key.partition(".")
    return key if section not in POOLS else f"{'rollout' if '.' in rest else 'model'}.{rest}"


def _texts(value: Any) -> Iterator[str]:
    """Every text in a value, names of a mapping included."""
    if isinstance(value, Mapping):
        yield from map(str, value)
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from _texts(inner)
    elif isinstance(value, str):
        yield value
