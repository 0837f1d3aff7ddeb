"""Checks a model directory before any process starts, without importing torch or transformers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from asyncrl.errors import ConfigError, explain

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_MAKE_TINY = "`python tools/make_tiny_model.py --out runs/tiny-qwen3` builds a small one"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What config.json says of a local model; the fields after `is_local` are None for a hub name.

    `architecture` is the class name, such as Qwen3ForCausalLM; `max_position_embeddings` is in tokens.
    """

    path: str
    is_local: bool
    architecture: str | None = None
    vocab_size: int | None = None
    max_position_embeddings: int | None = None


def check_model(path: str) -> ModelFacts:
    """The facts of `path`: a directory in Hugging Face format, or a hub name, which is not looked up.

    Raises ConfigError: a directory that does not exist or lacks its config, weights or tokenizer.
    """
    directory = Path(path).expanduser()
    if directory.is_dir():
        facts = _read_config(path, directory)
        _check_weights(path, directory)
        if not any((directory / name).is_file() for name in TOKENIZER_FILES):
            found = f"no tokenizer in it (none of {', '.join(TOKENIZER_FILES)})"
            raise _unusable(path, found, "save the model's tokenizer into the directory")
        return facts
    if directory.exists():
        raise _unusable(path, "a file", "name the directory that holds config.json")
    if path.startswith((".", "/", "~")) or path.count("/") > 1 or ("/" in path and directory.parent.is_dir()):
        raise _unusable(path, "no such directory", f"name an existing directory or a hub name; {_MAKE_TINY}")
    return ModelFacts(path, is_local=False)


def _read_config(path: str, directory: Path) -> ModelFacts:
    file = directory / "config.json"
    if not file.is_file():
        raise _unusable(path, "no config.json in it", f"name a directory in Hugging Face format; {_MAKE_TINY}")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _unusable(path, f"config.json is not JSON: {error}", "save the model anew") from error
    if not isinstance(config, dict):
        raise _unusable(path, "config.json is not an object", "save the model anew")
    # multimodal models keep the language model's sizes in a section of their own
    text = config | config.get("text_config", {})
    architecture = next(iter(config.get("architectures") or ()), None)
    return ModelFacts(path, True, architecture, text.get("vocab_size"), text.get("max_position_embeddings"))


def _check_weights(path: str, directory: Path) -> None:
    files = {file.name for pattern in ("*.safetensors", "*.bin") for file in directory.glob(pattern)}
    if not files:
        raise _unusable(path, "no weights in it (*.safetensors or *.bin)", "save or download the weights too")
    for index in directory.glob("*.index.json"):
        missing = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()) - files)
        if missing:
            found = f"{index.name} names {len(missing)} files that are not there, first {missing[0]}"
            raise _unusable(path, found, "finish the download")


def _unusable(path: str, found: str, do: str) -> ConfigError:
    return ConfigError(explain(f"model.path={path}", found, do))
