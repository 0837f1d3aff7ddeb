"""Checks a model directory before any process starts, without importing torch or transformers."""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from asyncrl.config.model import ModelConfig
from asyncrl.config.paths import check_path
from asyncrl.errors import ConfigError, explain
from asyncrl.types import HOW_TO_TIE, UNTIED, ModelFacts

_HEADS, _EMBEDDINGS = ("lm_head.weight", "embed_out.weight"), ("embed_tokens.weight", "wte.weight", "embed_in.weight")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def check_model(path: str, key: str = "model.path") -> ModelFacts:
    """The facts of `path`: a directory in Hugging Face format, or a hub name, which is not looked up.

    Raises ConfigError naming `key`: a directory that does not exist, lacks its config, weights or tokenizer, or holds
    an output layer of its own although its config ties it to the embedding.
    """
    check_path(path, key)
    directory = Path(path).expanduser()
    asked = f"{key}={path}"
    if directory.is_dir():
        facts = _read_config(path, asked, directory / "config.json")
        _check_weights(asked, directory)
        if facts.sizes.tied and _has_own_head(directory):
            raise ConfigError(explain(asked, UNTIED, HOW_TO_TIE))
        if not any((directory / name).is_file() for name in TOKENIZER_FILES):
            found = f"no tokenizer in it (none of {', '.join(TOKENIZER_FILES)})"
            raise ConfigError(explain(asked, found, "save the model's tokenizer into the directory"))
        return facts
    if directory.exists():
        raise ConfigError(explain(asked, "a file", _how_to_convert(directory) or "name the directory with config.json"))
    return ModelFacts(path, is_local=False)


def _how_to_convert(*files: Path) -> str:
    """What makes a directory of the first GGUF file; empty if there is none."""
    found = [file for file in files if file.suffix == ".gguf"]
    return f"make a model of the GGUF file: python tools/convert_gguf.py {found[0]} --out DIRECTORY" if found else ""


def hub_facts(model: ModelConfig) -> ModelFacts:
    """The facts of a hub model; downloads its config.json unless cached. Raises ConfigError."""
    from huggingface_hub import hf_hub_download

    try:
        file = hf_hub_download(model.path, "config.json", revision=model.revision)
    except (OSError, ValueError) as error:
        do = "name a model that this machine can reach or has in its cache"
        raise ConfigError(explain(f"the config of the model {model.path}", str(error).split("\n")[0], do)) from error
    return replace(_read_config(model.path, f"model.path={model.path}", Path(file)), is_local=False)


def cached_facts(model: ModelConfig) -> ModelFacts | None:
    """The facts of a hub model if its config.json is cached, else None. Offline.

    Raises ConfigError: the file is no config.
    """
    from huggingface_hub import try_to_load_from_cache

    try:
        file = try_to_load_from_cache(model.path, "config.json", revision=model.revision)
    except ValueError:  # not a valid hub name: loading the model reports it
        return None
    if not isinstance(file, str):
        return None
    return replace(_read_config(model.path, f"model.path={model.path}", Path(file)), is_local=False)


def _read_config(path: str, asked: str, file: Path) -> ModelFacts:
    if not file.is_file():
        do = _how_to_convert(*file.parent.glob("*.gguf")) or "name a directory in Hugging Face format"
        raise ConfigError(explain(asked, "no config.json in it", do))
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(explain(asked, f"config.json is not JSON: {error}", "save the model again")) from error
    if not isinstance(config, dict):
        raise ConfigError(explain(asked, "config.json is not an object", "save the model again"))
    return ModelFacts.of_config(path, config)


def _check_weights(asked: str, directory: Path) -> None:
    files = {file.name for pattern in ("*.safetensors", "*.bin") for file in directory.glob(pattern)}
    if not files:
        do = "save or download the weights too"
        raise ConfigError(explain(asked, "no weights in it (*.safetensors or *.bin)", do))
    for index in directory.glob("*.index.json"):
        missing = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()) - files)
        if missing:
            found = f"{index.name} names {len(missing)} files that are not there, first {missing[0]}"
            raise ConfigError(explain(asked, found, "finish the download"))


def _has_own_head(directory: Path) -> bool:
    """True if the output layer of the safetensors files differs from the embedding. One in a dtype of another width is
    compared when the model is loaded."""
    bytes_of: dict[str, memoryview] = {}
    for file in directory.glob("*.safetensors"):
        for name, data in _tensors(file):
            if name.endswith(_HEADS):
                bytes_of["head"] = data
            elif name.endswith(_EMBEDDINGS):
                bytes_of["embedding"] = data
    head, embedding = bytes_of.get("head", b""), bytes_of.get("embedding", b"")
    return len(head) == len(embedding) and head != embedding


def _tensors(file: Path) -> Iterator[tuple[str, memoryview]]:
    """Name and bytes of each tensor of a safetensors file (length of a JSON header, header, tensors). Nothing of a
    damaged file, which loading the model reports."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "numpy"):  # checks the header
            pass
    except (SafetensorError, OSError):
        return
    with file.open("rb") as opened:
        data = memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
    begin = 8 + int.from_bytes(data[:8], "little")
    for name, entry in json.loads(bytes(data[8:begin])).items():
        if name != "__metadata__":
            start, stop = entry["data_offsets"]
            yield name, data[begin + start : begin + stop]
