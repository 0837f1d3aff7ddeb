"""Checks the installed SGLang and its optional features.

`python -m asyncrl.inference.sglang.support [--keep] [--experts] [--model ARCHITECTURE] [SERVER_ARGUMENT...]` exits with
0 if SGLang is usable, also for everything asked (--keep: rollout.interrupt=keep, --experts: record_experts), else with
2, after it has written the reason to stdout.
"""

from __future__ import annotations

import argparse
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from asyncrl.config.rollout import RolloutConfig
from asyncrl.errors import ConfigError, explain
from asyncrl.inference.shared.package_probe import check_package, lacks, require_known, version_of
from asyncrl.types import ModelFacts

TESTED = ">=0.5.6"

_IO = "sglang.srt.managers.io_struct"
_MANAGER = "sglang.srt.managers.tokenizer_manager:TokenizerManager"
NEEDED = {
    "sglang.srt.server_args:ServerArgs": (
        "custom_weight_loader", "skip_tokenizer_init", "stream_interval", "enable_custom_logit_processor",
        "disable_overlap_schedule", "max_running_requests", "max_total_tokens", "watchdog_timeout", "sleep_on_idle",
    ),
    "sglang.srt.entrypoints.engine:Engine": (),
    f"{_IO}:GenerateReqInput": ("input_ids", "sampling_params", "rid", "stream", "return_logprob", "extra_key"),
    f"{_IO}:PauseGenerationReqInput": ("mode",),
    f"{_IO}:ContinueGenerationReqInput": (),
    f"{_IO}:UpdateWeightsFromTensorReqInput": ("serialized_named_tensors", "load_format", "flush_cache"),
    f"{_MANAGER}.generate_request": ("obj", "request"),
    f"{_MANAGER}.abort_request": ("rid",),
    f"{_MANAGER}.pause_generation": ("obj",),
    f"{_MANAGER}.continue_generation": ("obj",),
    f"{_MANAGER}.update_weights_from_tensor": ("obj",),
    f"{_MANAGER}.get_internal_state": (),
}  # fmt: skip


_PROBE_S = 300.0
_MODELS = "sglang.srt.models"


@dataclass(frozen=True, slots=True)
class Abilities:
    """Features that only some versions of SGLang have.

    Attributes:
        update_session: weights are updated between `begin_weight_update` and `end_weight_update`.
        version_spans: a finished response reports the version of each token.
        experts: a finished response reports the experts of its tokens.
    """

    update_session: bool
    version_spans: bool
    experts: bool


def abilities() -> Abilities:
    """Imports SGLang."""
    return Abilities(
        update_session=not lacks(f"{_MANAGER}.begin_weight_update", ("obj",)),
        version_spans=not lacks(f"{_MANAGER}.update_weight_version", ("obj",)),
        experts=not lacks(f"{_IO}:GenerateReqInput", ("return_routed_experts", "routed_experts_start_len")),
    )


def check_installed(rollout: RolloutConfig, facts: ModelFacts) -> None:
    """Probes the installed SGLang in a separate process: the import takes seconds and changes the process.

    Raises ConfigError: errors of `check_sglang`, `check_server_args`, `check_keep`, `check_experts` or
    `check_architecture`, or no answer in time.
    """
    asked = "rollout.engine=sglang"
    command = [sys.executable, "-m", "asyncrl.inference.sglang.support", *rollout.sglang.server_args]
    command += ["--keep"] * (rollout.interrupt == "keep") + ["--experts"] * rollout.sglang.record_experts
    if facts.architecture is not None and not facts.has_custom_code:
        command += ["--model", facts.architecture]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_S, check=False)
    except subprocess.TimeoutExpired as error:
        found = f"SGLang was not imported within {_PROBE_S:g} s"
        raise ConfigError(explain(asked, found, "try `python -c 'import sglang'`")) from error
    # 2: the probe's own message. Any other failure: the import itself broke.
    if done.returncode == 2:
        raise ConfigError(done.stdout.strip())
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ConfigError(explain(asked, f"SGLang cannot be imported: {last}", "try `python -c 'import sglang'`"))


def check_server_args(names: Sequence[str]) -> None:
    """Raises ConfigError: SGLang lacks one of these arguments. Imports SGLang."""
    from sglang.srt.server_args import ServerArgs

    known, package = inspect.signature(ServerArgs).parameters, f"SGLang {version_of(('sglang',))}"
    section = "rollout.sglang.server_args"
    require_known(names, known, section=section, package=package, listed="SGLang's documentation")


def check_keep() -> None:
    """Raises ConfigError: SGLang does not report the version of each token, so that a wrong stamp would go unnoticed.
    Imports SGLang."""
    if not abilities().version_spans:
        found = f"SGLang {version_of(('sglang',))} keeps no count of the versions that a response was sampled under"
        do = "install sglang>=0.5.19, or set rollout.interrupt=abort_resume"
        raise ConfigError(explain("rollout.interrupt=keep", found, do))


def check_experts() -> None:
    """Raises ConfigError: SGLang does not report experts, or the version of each token, which is needed because experts
    arrive only at the end of a response. Imports SGLang."""
    found = abilities()
    if not (found.experts and found.version_spans):
        told = f"SGLang {version_of(('sglang',))} tells no experts, or no versions, of the tokens of a response"
        do = "install sglang>=0.5.19, or set trainer.router_replay=off"
        raise ConfigError(explain("rollout.sglang.record_experts=true (trainer.router_replay=rollout)", told, do))


def check_architecture(name: str, extra_package: str | None = None) -> None:
    """Looks for a model class. Imports only SGLang's modules that mention it: all of them would take a minute.

    Args:
        extra_package: a package with further models.

    Raises ConfigError: neither SGLang nor transformers has a usable class of this name.
    """
    asked = f"rollout.engine=sglang with a {name}"
    found = f"SGLang {version_of(('sglang',))} has no model of that name, and transformers none that SGLang can use"
    for module in _modules_with(name, [_MODELS, *([extra_package] if extra_package else [])]):
        try:
            entries = getattr(import_module(module), "EntryClass", ())
        except (ImportError, AttributeError, RuntimeError, OSError) as error:  # such as a missing kernel
            found = f"{module} cannot be imported: {type(error).__name__}: {error}"
            continue
        if name in [entry.__name__ for entry in (entries if isinstance(entries, Sequence) else [entries])]:
            return
    import transformers

    # SGLang can also run classes of transformers that support its attention backend.
    other = getattr(transformers, name, None)
    if other is not None and getattr(other, "is_backend_compatible", bool)():
        return
    do = "set rollout.engine=torch or rollout.engine=vllm, or use a model of https://docs.sglang.io"
    raise ConfigError(explain(asked, found, do))


def _modules_with(name: str, packages: Sequence[str]) -> list[str]:
    """Modules whose source contains the word `name`."""
    word = re.compile(rf"\b{re.escape(name)}\b")
    places = [(package, Path(place)) for package in packages for place in import_module(package).__path__]
    files = [(package, file) for package, place in places for file in sorted(place.glob("*.py"))]
    return [f"{package}.{file.stem}" for package, file in files if word.search(file.read_text(encoding="utf-8"))]


def check_sglang() -> None:
    """Imports SGLang and checks `NEEDED`. Raises the ConfigError of `check_package`."""
    install = f"install sglang{TESTED} in an environment of its own, or set rollout.engine=torch"
    check_package("sglang", NEEDED, tested=TESTED, install=install, distributions=("sglang",))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--experts", action="store_true")
    parser.add_argument("--model")
    parser.add_argument("server_args", nargs="*")
    asked = parser.parse_args()
    import torch

    # Must be set before the checks below import SGLang.
    if not torch.cuda.is_available():
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    try:
        check_sglang()
        check_server_args(asked.server_args)
        if asked.keep:
            check_keep()
        if asked.experts:
            check_experts()
        if asked.model is not None:
            check_architecture(asked.model, os.environ.get("SGLANG_EXTERNAL_MODEL_PACKAGE"))
    except ConfigError as error:
        sys.stdout.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
