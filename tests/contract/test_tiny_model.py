"""The tiny model as a directory that every Hugging Face reader, and every backend, must be able to use."""

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.config.model import ModelConfig
from asyncrl.data.model_files import check_model
from asyncrl.data.tokenizer import PromptRenderer, load_tokenizer, stop_token_ids
from tests.make import row
from tools import make_tiny_model
from tools.arithmetic import LEVELS, make_problems


def run_tool(*arguments: str) -> CompletedProcess[str]:
    with redirect_stdout(io.StringIO()) as output, redirect_stderr(io.StringIO()) as errors:
        code = make_tiny_model.main(arguments)
    return CompletedProcess(arguments, code, output.getvalue(), errors.getvalue())


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("model") / "runs" / "tiny"
    done = run_tool("--out", str(out), "--share", "0.02")
    assert done.returncode == 0, done.stderr
    assert f"wrote {out}" in done.stdout
    return out


@pytest.fixture(scope="module")
def model(directory: Path) -> ModelConfig:
    return ModelConfig(path=str(directory))


def test_the_directory_is_complete_and_nothing_is_left_beside_it(directory: Path) -> None:
    facts = check_model(str(directory))
    assert facts.is_local
    assert facts.architecture == "Qwen3ForCausalLM"
    assert facts.max_position_embeddings is not None
    assert facts.max_position_embeddings >= 512
    assert [entry.name for entry in directory.parent.iterdir()] == [directory.name]


def test_the_model_loads_with_tied_float32_weights_that_shard_by_two(directory: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert 300_000 < sum(p.numel() for p in model.parameters()) < 1_000_000
    config = model.config
    assert all(size % 2 == 0 for p in model.parameters() for size in p.shape)
    assert config.num_attention_heads % 2 == config.num_key_value_heads % 2 == config.head_dim % 2 == 0


def test_the_tokenizer_is_small_and_exact(directory: Path, model: ModelConfig) -> None:
    tokenizer = load_tokenizer(model)
    assert len(tokenizer) == AutoModelForCausalLM.from_pretrained(directory).config.vocab_size < 256
    assert tokenizer.encode("1905.") == [tokenizer.convert_tokens_to_ids(c) for c in "1905."]
    for problem in make_problems(300, LEVELS, seed=11, held_out=True):
        for text in (problem.question, problem.careful, problem.hasty):
            ids = tokenizer.encode(text)
            assert tokenizer.decode(ids) == text
            assert tokenizer.unk_token_id not in ids
            assert len(ids) <= 64
    ascii_text = "".join(map(chr, range(32, 127))) + "\n"
    assert tokenizer.decode(tokenizer.encode(ascii_text)) == ascii_text
    assert tokenizer.encode("ü") == [tokenizer.unk_token_id] * len("ü".encode())


def test_prompts_follow_chatml_and_end_at_the_end_of_a_turn(model: ModelConfig) -> None:
    tokenizer = load_tokenizer(model)
    prompt = PromptRenderer(tokenizer, model).prompt_ids(row("1", "2+3?"))
    assert prompt.dtype == np.int32
    assert tokenizer.decode(prompt) == "<|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n"
    assert stop_token_ids(tokenizer, model, []) == (tokenizer.convert_tokens_to_ids("<|im_end|>"),)
    assert tokenizer.pad_token_id not in (None, tokenizer.eos_token_id)
    assert tokenizer.decode([tokenizer.eos_token_id, tokenizer.pad_token_id], skip_special_tokens=True) == ""


def test_generation_stops_by_the_saved_generation_config(directory: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(directory)
    end = AutoTokenizer.from_pretrained(directory).eos_token_id
    assert model.generation_config.eos_token_id == [end]
    with torch.no_grad():  # empty layers repeat the last token: the end of a turn can only be followed by itself
        for parameter in model.model.layers.parameters():
            parameter.zero_()
        model.model.embed_tokens.weight.fill_(-1)
        model.model.embed_tokens.weight[end] = 1
    assert model.generate(torch.tensor([[5, end]]), max_new_tokens=8).tolist() == [[5, end, end]]


def test_a_second_call_returns_at_once_and_other_settings_do_not(directory: Path) -> None:
    before = (directory / "model.safetensors").stat().st_mtime_ns
    again = run_tool("--out", str(directory), "--share", "0.02")
    assert again.returncode == 0
    assert "is up to date" in again.stdout
    assert (directory / "model.safetensors").stat().st_mtime_ns == before
    record = json.loads((directory / "tiny_model.json").read_text())
    assert record["settings"]["seed"] == 0
    assert set(record["accuracy"]) == {"greedy", "sampled", "careful"}
    (directory / "model.safetensors").unlink()  # a file was lost: the record alone proves nothing
    assert f"wrote {directory}" in run_tool("--out", str(directory), "--share", "0.02").stdout


@pytest.mark.slow
def test_other_settings_and_force_make_it_anew(tmp_path: Path) -> None:
    out = tmp_path / "tiny"
    weights = []
    for arguments in (["--seed", "1"], ["--seed", "2"], ["--seed", "2", "--force"]):
        done = run_tool("--out", str(out), "--share", "0.001", *arguments)
        assert f"wrote {out}" in done.stdout, done.stderr
        weights.append((out / "model.safetensors").read_bytes())
    assert weights[0] != weights[1] == weights[2]


def test_a_directory_of_something_else_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    done = run_tool("--out", str(tmp_path), "--share", "0.001", "--force")
    assert done.returncode == 2
    assert "is not a tiny model" in done.stderr
    assert (tmp_path / "precious.txt").read_text() == "mine"


def test_the_warm_up_needs_no_instructions_for_bfloat16(directory: Path) -> None:
    """torch.optim.Muon multiplies in bfloat16: without AVX-512 the model took eleven minutes in place of one."""
    settings = make_tiny_model.Settings(num_drill=4, num_study=4, num_messy=4)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    dtypes = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            dtypes.update(x.dtype for x in tree_leaves(result) if isinstance(x, torch.Tensor))
            return result

    model = make_tiny_model.build_model(settings, tokenizer)
    with Watch():
        make_tiny_model.warm_up(model, make_tiny_model.corpus(tokenizer, settings), settings)
    assert torch.float32 in dtypes
    assert dtypes.isdisjoint({torch.bfloat16, torch.float16})


@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 8, 24), (2, 24, 8)])
def test_directions_of_the_warm_up_are_nearly_orthogonal(shape: tuple[int, ...]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(5)) * 100
    values = torch.linalg.svdvals(make_tiny_model.orthogonalize(matrices))
    assert values.shape == (shape[0], 8 if 8 in shape[1:] else 16)
    assert values[:, : values.shape[1] // 2].min() > 0.6
    assert values.max() < 1.3
    left, _, right = torch.linalg.svd(matrices, full_matrices=False)
    found = make_tiny_model.orthogonalize(matrices)
    alike = (found * (left @ right)).sum(dim=(1, 2)) / found.norm(dim=(1, 2)) / (left @ right).norm(dim=(1, 2))
    assert alike.min() > 0.9
