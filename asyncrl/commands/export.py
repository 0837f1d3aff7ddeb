"""`asyncrl-export CHECKPOINT OUT`: writes a checkpoint of a run as a model in Hugging Face format. With `--to BACKEND`
it converts the checkpoint for another training backend: the run continues in a new run directory.

Any number of trainer ranks may have written CHECKPOINT; reading it needs none. OUT exists only once it is complete.
Exit codes: 1 program error, 2 bad input, 8 OUT cannot be written.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.checkpoint.locate import FoundCheckpoint, find_checkpoint
from asyncrl.checkpoint.run_directory import RunDirectory
from asyncrl.checkpoint.store import CheckpointStore, read_state
from asyncrl.checkpoint.trust import HELP_CODE, HELP_RUN, TRUST_CODE, TRUST_RUN, require_trusted
from asyncrl.commands import plain_console, refuse
from asyncrl.config.hub import use_cache_if_unreachable
from asyncrl.config.load import resolved
from asyncrl.config.model import ModelConfig
from asyncrl.config.paths import check_path, is_hub_model
from asyncrl.data.tokenizer import file_of, load_tokenizer
from asyncrl.errors import AsyncRLError, ConfigError, WeightTransferError, explain, writing
from asyncrl.json_records import from_plain
from asyncrl.trainer.backend import MODELS, CheckpointReader
from asyncrl.trainer.backends import (
    BACKENDS,
    open_checkpoint,
    open_training_state,
    require_trains,
    write_training_state,
    written_by,
)
from asyncrl.types import ModelFacts

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

    from asyncrl.trainer.backend import TrainingState


DTYPES = ("float32", "bfloat16", "float16")
MAX_SHARD_BYTES = 5 * 10**9
_OF_PROCESSORS = "processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # intended: one process reads
    try:
        out = Path(arguments.out)
        require_new(out)
        found = find_checkpoint(arguments.checkpoint)
        if found is None:
            do = "name runs/NAME, or runs/NAME/checkpoints/step_N"
            raise ConfigError(explain(f"export {arguments.checkpoint}", "no run and no checkpoint of one", do))
        model = model_of(found, arguments.model, trust_run=arguments.trust_run, trust_code=arguments.trust_remote_code)
        use_cache_if_unreachable(filter(is_hub_model, [model.path]))
        if arguments.to is not None:
            _require_alone(arguments)
            text = convert(found, model, out, arguments.to, trust_run=arguments.trust_run)
        elif arguments.adapter:
            export_adapter(found, out, base=arguments.model, revision=model.revision)
            text = "adapter"
        else:
            dtype = arguments.dtype or model.inference_dtype
            total = export(found, model, out, dtype=dtype, max_shard_bytes=_bytes(arguments.max_shard_size))
            text = f"{total} parameters in {dtype}"
    except AsyncRLError as e:
        return refuse(f"asyncrl-export: {e}", e)
    plain_console().print(f"{found.directory.name} of global_steps {found.global_steps} -> {out}: {text}")
    return 0


def export(
    found: FoundCheckpoint, model: ModelConfig, out: Path, *, dtype: str, max_shard_bytes: int = MAX_SHARD_BYTES
) -> int:
    """Writes weights (adapters merged), config, tokenizer and generation config; returns the number of parameters.

    Holds one shard of the weights in memory.

    Args:
        model: of the run; the source of config and tokenizer.
        dtype: of the weights; float32 keeps the trainer's weights bit by bit.

    Raises:
        ConfigError: `out` exists, or the weights or the model's files cannot be read.
        StorageError: `out` cannot be written.
    """
    import torch

    require_new(out)
    check_path(model.path, f"the run of {found.directory} trained model.path")
    with new_directory(out) as directory:
        _write_description(model, directory, getattr(torch, dtype))
        return _write_weights(found, model, directory, getattr(torch, dtype), max_shard_bytes)


def export_adapter(found: FoundCheckpoint, out: Path, *, base: str | None = None, revision: str | None = None) -> None:
    """Writes the trained adapters of a LoRA run in peft's format. `revision`: of the base model on the hub.

    Raises:
        ConfigError: `out` exists, or the checkpoint has no adapters.
        StorageError: `out` cannot be written.
    """
    import safetensors.torch

    require_new(out)
    adapter = _reader(found).adapter()
    if adapter is None:
        why = "it has none: the run trained all weights"
        raise ConfigError(explain(f"the adapter of {found.directory}", why, "leave --adapter out"))
    rank = next(tensor.shape[0] for name, tensor in adapter.tensors.items() if ".lora_A." in name)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or adapter.base,
        "revision": revision,
        "r": rank,
        "lora_alpha": adapter.scale * rank,
        "target_modules": sorted({name.split(".lora_")[0].rpartition(".")[2] for name in adapter.tensors}),
        "bias": "none",
        "lora_dropout": 0.0,
        "inference_mode": True,
    }
    with new_directory(out) as directory:
        (directory / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
        named = {f"base_model.model.{name}": tensor.contiguous() for name, tensor in adapter.tensors.items()}
        safetensors.torch.save_file(named, directory / "adapter_model.safetensors", metadata=_metadata(found))
        shutil.copymode(directory / "adapter_config.json", directory / "adapter_model.safetensors")


def model_of(
    found: FoundCheckpoint, path: str | None = None, *, trust_run: bool = False, trust_code: bool = False
) -> ModelConfig:
    """The model section of the run's recipe; `path` overrides its path.

    Args:
        trust_run: the run may name a model on the hub, code that ships with the model, and environment variables.
        trust_code: code that ships with the model may run.

    Raises:
        ConfigError: section and path are both missing, the section is invalid, or it names something untrusted.
    """
    asked = f"the model of {found.directory}"
    section = {} if found.recipe is None else found.recipe.get("model")
    if not isinstance(section, dict):
        do = "repair the run's config.json, or move it away and pass --model DIRECTORY"
        raise ConfigError(explain(asked, "the recipe in the run's config.json has no section model", do))
    section = dict(section)
    if path is not None:
        section["path"] = path
    if trust_code:
        section["trust_remote_code"] = True
    if "path" not in section:
        missing = "its run directory, with config.json, is not there"
        raise ConfigError(explain(asked, missing, "pass --model DIRECTORY, the model that was trained"))
    # Keys named on the command line are the caller's own and need no trust in the run.
    if not trust_run:
        named = ["model.path"] * (path is not None) + ["model.trust_remote_code"] * trust_code
        do = f"else name the model with --model DIRECTORY, and allow its own code with {TRUST_CODE}"
        require_trusted(asked, {"model": section}, do, named=named)
    try:
        return from_plain(ModelConfig, resolved(section), "model")
    except ValueError as error:
        raise ConfigError(explain(asked, str(error), "repair the run's config.json, or move it away")) from error


def _reader(found: FoundCheckpoint) -> CheckpointReader:
    """The reader of the backend that the run's recipe names."""
    trainer = (found.recipe or {}).get("trainer")
    return open_checkpoint(found.directory / "trainer", trainer.get("backend") if isinstance(trainer, dict) else None)


def _write_description(model: ModelConfig, directory: Path, dtype: torch.dtype) -> None:
    """Writes everything in a model directory except the weights. Raises ConfigError."""
    import transformers

    config = read_config(model.path, model, f"the config of {model.path}")
    tokenizer = load_tokenizer(model)
    config.dtype = dtype
    config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    try:
        revision = model.revision or "main"
        transformers.GenerationConfig.from_pretrained(model.path, revision=revision).save_pretrained(directory)
    except OSError:
        pass  # the file is optional
    for name in _OF_PROCESSORS:
        if (file := file_of(model, name)) is not None:
            shutil.copy(file, directory)
    if model.trust_remote_code and Path(model.path).is_dir():
        for file in Path(model.path).glob("*.py"):
            shutil.copy(file, directory)


def _write_weights(
    found: FoundCheckpoint, model: ModelConfig, directory: Path, dtype: torch.dtype, max_shard_bytes: int
) -> int:
    """Writes safetensors of at most `max_shard_bytes` (or a single larger tensor), and their index."""
    import safetensors.torch

    from asyncrl.weights.plan import runs_of

    shards: list[list[str]] = []
    parameters = nbytes = 0
    whole = ((name, t.contiguous()) for name, t in _whole(_reader(found).weights(model), model, dtype))
    for shard in map(dict, runs_of(whole, lambda named: named[1].nbytes, max_shard_bytes)):
        safetensors.torch.save_file(shard, directory / f"part-{len(shards)}", metadata=_metadata(found))
        shards.append(list(shard))
        parameters += sum(t.numel() for t in shard.values())
        nbytes += sum(t.nbytes for t in shard.values())
    # The number of shards, which is part of their names, is known only now.
    for part in directory.glob("part-*"):
        shutil.copymode(directory / "config.json", part)  # safetensors creates files readable by the owner only
    if len(shards) == 1:
        (directory / "part-0").rename(directory / "model.safetensors")
        return parameters
    names = [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
    for number, name in enumerate(names):
        (directory / f"part-{number}").rename(directory / name)
    index = {
        "metadata": {"total_parameters": parameters, "total_size": nbytes},
        "weight_map": {key: name for name, keys in zip(names, shards, strict=True) for key in keys},
    }
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return parameters


def _whole(
    weights: Iterator[tuple[str, torch.Tensor]], model: ModelConfig, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """`weights` in `dtype`, or in float32 where the files at `model.path` keep that among 16-bit tensors; then the
    tensors of the files that training does not see (layers that predict several tokens ahead)."""
    from asyncrl.weights.encodings.base import BaseWeights
    from asyncrl.weights.stored_layout import StoredLayout

    try:
        base = BaseWeights(model.path, model.revision)
    except WeightTransferError:  # no safetensors files
        yield from ((name, tensor.to(dtype)) for name, tensor in weights)
        return
    layout, written = StoredLayout.of_model(model), set[str]()
    for name, tensor in weights:
        written.add(name)
        yield name, tensor if name in base.exact else tensor.to(dtype)
    unseen = [name for name in base.names if name not in written and name not in layout.aliases]
    if not unseen:
        return
    named, text = f"{len(unseen)} tensors of {model.path}, the first is {unseen[0]}", plain_console(stderr=True).print
    if not (written.issuperset(layout.shapes) and layout.shapes.keys() <= set(base.names)):
        text(f"left out, since the files name the trained ones otherwise: {named}")
        return
    text(f"kept, since they were not trained: {named}")
    yield from ((name, base.tensor(name)) for name in unseen)


def _metadata(found: FoundCheckpoint) -> dict[str, str]:
    return {"format": "pt", "global_steps": str(found.global_steps)}


def _require_alone(arguments: argparse.Namespace) -> None:
    """Raises ConfigError if --to comes with an option for a model in Hugging Face format."""
    if arguments.adapter or arguments.dtype is not None:
        option = "--adapter" if arguments.adapter else "--dtype"
        found = "a checkpoint keeps all that was trained, in float32"
        raise ConfigError(explain(f"--to with {option}", found, f"leave one of them out: {option} is for a model"))


def _bytes(text: str) -> int:
    """Raises ConfigError."""
    match = re.fullmatch(r"(\d+)\s*(|KB|MB|GB)", text.strip().upper())
    if match is None or int(match[1]) == 0:
        raise ConfigError(explain(f"--max-shard-size {text}", "no size", "write for example 5GB or 500MB"))
    return int(match[1]) * _UNITS[match[2]]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="asyncrl-export",
        description="Write a checkpoint of a run as a model in Hugging Face format.",
        epilog="exit codes: 0 done, 1 program error, 2 bad input, 8 OUT cannot be written",
    )
    add = parser.add_argument
    add("checkpoint", help="run directory (its newest checkpoint), or runs/NAME/checkpoints/step_N")
    add("out", help="directory to write, which must not exist")
    add("--dtype", choices=DTYPES, help="of the weights (default: that of the run's replicas, model.inference_dtype)")
    add("--to", choices=sorted(BACKENDS), help="a run for this training backend: OUT is its run directory, to resume")
    add("--adapter", action="store_true", help="of a LoRA run: the adapter alone, for peft")
    add("--model", metavar="DIR", help="where config, tokenizer and base weights are now (default: as in the recipe)")
    add(TRUST_RUN, action="store_true", help=HELP_RUN)
    add(TRUST_CODE, action="store_true", help=HELP_CODE)
    add("--max-shard-size", default="5GB", metavar="SIZE", help="largest file of weights (default %(default)s)")
    return parser


RECORD = "converted.json"
"""File in a converted checkpoint: its origin, and what was converted."""


def convert(found: FoundCheckpoint, model: ModelConfig, out: Path, to: str, *, trust_run: bool = False) -> str:
    """Writes a run directory for `trainer.backend=to` with `found` as its only checkpoint; describes the result.

    Weights, optimizer moments and steps, the queue and the run's progress are preserved bit by bit. Random states of
    the ranks are not. The run's logs and config are copied, so that its history stays whole.

    Args:
        model: of the run; its config decides how backend `to` lays out the weights.
        trust_run: the run may name a critic on the hub.

    Raises:
        ConfigError: `out` exists, the checkpoint is of `to` or has only adapters, or `to` cannot train the model.
        StorageError: `out` cannot be written.
    """
    require_new(out)
    source = found.directory / "trainer"
    written, asked = written_by(source), f"convert {found.directory} to trainer.backend={to}"
    if written == to:
        raise ConfigError(explain(asked, "it is of that backend", f"resume it with trainer.backend={to} as it is"))
    config_of = lru_cache(partial(_config, found, model, to, trust_run))
    state = open_training_state(source, config_of)
    configs = _configs(found, model, state, config_of)
    said = f"{written} to {to}: {' and '.join(configs)} with both moments; random states start as in a new run"
    record = {"checkpoint": str(found.directory.resolve()), "from": written, "to": to, "what": said}
    progress = read_state(found.directory)
    # The new run has one checkpoint at the same step, and the old run's history.
    with new_directory(out) as directory:
        store = CheckpointStore(directory / "checkpoints", keep=1)
        temporary = store.begin(progress.global_steps)
        write_training_state(to, temporary / "trainer", state, configs)
        shutil.copytree(found.directory / "queue", temporary / "queue")
        (temporary / RECORD).write_text(json.dumps(record, indent=2) + "\n")
        store.finish(temporary, progress)
        if found.recipe is not None:
            _copy_run(RunDirectory(found.directory.resolve().parent.parent), RunDirectory(directory), to)
    return f"{said}; go on with: asyncrl-train RECIPE trainer.backend={to} run.dir={out} resume=auto"


def _copy_run(run: RunDirectory, new: RunDirectory, to: str) -> None:
    """Copies the logs of a run, and its config with the new backend."""
    for old, copy in ((run.events, new.events), (run.metrics, new.metrics)):
        if old.exists():
            shutil.copy(old, copy)
    config = json.loads(run.config.read_text(encoding="utf-8"))
    trainer = config["recipe"].get("trainer")
    config["recipe"]["trainer"] = (trainer if isinstance(trainer, dict) else {}) | {"backend": to}
    new.config.write_text(json.dumps(config, indent=2) + "\n")


def _config(found: FoundCheckpoint, model: ModelConfig, to: str, trust_run: bool, name: str) -> Mapping[str, Any]:
    """The Hugging Face config of a model in the checkpoint. Raises ConfigError if `to` cannot train it."""
    path = model.path if name == "model" else _critic_path(found) or model.path
    asked = f"convert the {name} of {found.directory}"
    if name == "critic" and path != model.path and is_hub_model(path) and not trust_run:
        said = f"its config.json says algorithm.critic.path={path}: a model of the hub"
        raise ConfigError(explain(asked, said, f"pass {TRUST_RUN} if the run is yours or of somebody you trust"))
    config = read_config(path, model, asked).to_dict()
    require_trains(to, ModelFacts.of_config(path, config))
    return config


def _configs(
    found: FoundCheckpoint, model: ModelConfig, state: TrainingState, config_of: Callable[[str], Mapping[str, Any]]
) -> dict[str, Mapping[str, Any]]:
    """The config of each model in the checkpoint. Raises ConfigError if it does not match the weights."""
    configs = {}
    for name in MODELS:
        if not (shapes := state.shapes(name)):
            continue
        config = configs[name] = config_of(name)
        rows = shapes.get("model.embed_tokens.weight", ())
        here = (config.get("vocab_size"), config.get("hidden_size"))
        if rows != here:
            path = model.path if name == "model" else _critic_path(found) or model.path
            said = f"the embedding in the checkpoint is {list(rows)}, that of {path} {list(here)}"
            do, asked = "pass --model DIRECTORY, the model that was trained", f"convert the {name} of {found.directory}"
            raise ConfigError(explain(asked, said, do))
    if "model" not in configs:
        raise ConfigError(explain(f"convert {found.directory}", "it has no weights", "name another checkpoint"))
    return configs


def _critic_path(found: FoundCheckpoint) -> str | None:
    section: Any = found.recipe or {}
    for key in ("algorithm", "critic", "path"):
        section = section.get(key) if isinstance(section, dict) else None
    return section if isinstance(section, str) else None


def read_config(path: str, model: ModelConfig, asked: str) -> PretrainedConfig:
    """The config of `model`, or of another one at `path`. Raises ConfigError: it cannot be read."""
    from transformers import AutoConfig

    revision = model.revision if path == model.path else None
    try:
        return AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError) as error:
        do = "name a directory in Hugging Face format, or a hub name that this machine can reach, with --model"
        raise ConfigError(explain(asked, str(error), do)) from error


# A directory that exists only when it is complete.


def require_new(out: Path) -> None:
    """Raises ConfigError if `out` exists."""
    if out.exists() or out.is_symlink():
        raise ConfigError(explain(f"export to {out}", "it exists", "name a directory that does not exist yet"))


@contextlib.contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """A directory that becomes `out` if the block does not raise. Raises StorageError."""
    temporary = out.with_name(f".{out.name}.tmp")
    try:
        with writing(out, "make room there, or name another directory"):
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            yield temporary
            temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
