"""Checkpoints of any number of ranks as model directories: bit by bit, in shards, adapters merged or alone."""

import datetime
import importlib.util
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from asyncrl.checkpoint.digests import seal
from asyncrl.checkpoint.locate import FoundCheckpoint, find_checkpoint
from asyncrl.checkpoint.run_directory import RunDirectory
from asyncrl.checkpoint.store import RunState, render_state
from asyncrl.commands import evaluate
from asyncrl.commands.export import export, main, model_of
from asyncrl.config.load import load
from asyncrl.config.model import ModelConfig
from asyncrl.errors import ConfigError
from asyncrl.trainer.fsdp.lora import BASE, SCALE
from asyncrl.trainer.fsdp.sharded_state import save
from asyncrl.types import auto_class, drop_towers
from asyncrl_testing.random_model import random_qwen3
from tests.contract.export_ranks import RANKS, rank_main
from tests.processes import ROOT

FAMILIES = json.loads((ROOT / "tests/families.json").read_text())


def trained():
    """The weights that a trainer would have made: other ones than those of the model directory."""
    return random_qwen3(seed=7, hidden_size=64, num_hidden_layers=2, intermediate_size=96, vocab_size=50).state_dict()


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A run with a checkpoint of two ranks, and its model, whose weights are others."""
    root = tmp_path_factory.mktemp("export")
    model = random_qwen3(seed=1, hidden_size=64, num_hidden_layers=2, intermediate_size=96, vocab_size=50)
    model.save_pretrained(root / "model")
    write_tokenizer(root / "model")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([rank_main.__module__])
    whole = {f"model.{name}": tensor for name, tensor in trained().items() if name != "lm_head.weight"}
    torch.save(whole | {"optimizer.model.norm.weight.exp_avg": torch.ones(64)}, root / "weights.pt")
    directory = root / "run/checkpoints/step_3/trainer"
    ranks = [context.Process(target=rank_main, args=(rank, root, directory)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(240)  # two imports of torch
        assert process.exitcode == 0
    complete(root, "step_3", 3)
    return root


def write_tokenizer(directory):
    from tokenizers import Tokenizer, models

    tokenizer = Tokenizer(models.WordLevel({"<end>": 0, "a": 1}, unk_token="a"))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.chat_template = "{{ messages[0].content }}"
    fast.save_pretrained(directory)


def complete(root, name, step):
    """Makes what a trainer wrote below `name` a checkpoint of a run."""
    checkpoint = root / "run/checkpoints" / name
    (checkpoint / "state.json").write_text(render_state(RunState(step, 1.0, 1, 2, 1, 0, True, "digest")))
    seal(checkpoint)
    recipe = {"model": asdict(ModelConfig(path=str(root / "model"), inference_dtype="bfloat16"))}
    (root / "run/config.json").write_text(json.dumps({"recipe": recipe}))


def test_float32_is_the_trainers_weights_bit_by_bit_and_transformers_loads_it(root, tmp_path):
    out = tmp_path / "out"
    assert main([str(root / "run"), str(out), "--dtype", "float32"]) == 0
    written, expected = load_file(out / "model.safetensors"), trained()
    assert set(written) == set(expected) - {"lm_head.weight"}, "a tied tensor is there once"
    assert all(torch.equal(written[name], expected[name]) for name in written)
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert loaded.dtype == torch.float32
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.state_dict().items())
    assert PreTrainedTokenizerFast.from_pretrained(out).chat_template == "{{ messages[0].content }}"
    assert not list(tmp_path.glob(".*")), "nothing else is left"


def test_shards_have_an_index_and_the_dtype_of_the_replicas(root, tmp_path):
    out = tmp_path / "out"
    assert main([str(root / "run/checkpoints/step_3"), str(out), "--max-shard-size", "20KB"]) == 0
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert files == sorted(set(index["weight_map"].values()))
    assert len(files) > 3
    for file in files:
        tensors = load_file(out / file)
        assert {k for k, v in index["weight_map"].items() if v == file} == set(tensors)
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= 20_000
        assert (out / file).stat().st_mode == (out / "config.json").stat().st_mode
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert loaded.dtype == torch.bfloat16, "config.json says so"
    assert all(torch.equal(t, trained()[name].bfloat16()) for name, t in loaded.state_dict().items())


def test_what_training_does_not_see_is_kept_and_what_the_files_keep_exact_stays_exact(root, tmp_path, capfd):
    base, norm = tmp_path / "base", "model.norm.weight"
    shutil.copytree(root / "model", base)
    tensors = {n: t if n == norm else t.bfloat16() for n, t in load_file(base / "model.safetensors").items()}
    ahead = torch.full((3,), 0.1)
    save_file(tensors | {"mtp.norm.weight": ahead.bfloat16()}, base / "model.safetensors", metadata={"format": "pt"})
    assert main([str(root / "run"), str(tmp_path / "out"), "--model", str(base)]) == 0
    written = load_file(tmp_path / "out/model.safetensors")
    assert torch.equal(written["mtp.norm.weight"], ahead.bfloat16())
    assert "kept, since they were not trained: 1 tensors of" in capfd.readouterr().err
    assert {n for n, t in written.items() if t.dtype == torch.float32} == {norm}
    assert torch.equal(written[norm], trained()[norm])


@pytest.fixture(scope="module")
def adapted(root):
    """Another run, with adapters on the query projections, written by one rank."""
    pytest.importorskip("peft")
    generator = torch.Generator().manual_seed(3)
    weights = {
        SCALE: torch.tensor(2.0, dtype=torch.float64),
        BASE: torch.tensor(list(str(root / "model").encode()), dtype=torch.uint8),
    }
    for layer in range(2):
        name = f"model.model.layers.{layer}.self_attn.q_proj.lora"
        weights[f"{name}_A.weight"] = torch.randn(4, 64, generator=generator) * 0.1
        weights[f"{name}_B.weight"] = torch.randn(128, 4, generator=generator) * 0.1
    save(root / "lora/run/checkpoints/step_5/trainer", weights, None)
    (root / "lora/model").symlink_to(root / "model")
    complete(root / "lora", "step_5", 5)
    return root / "lora/run"


def test_the_adapter_alone_and_merged_are_the_same_model(adapted, tmp_path):
    import peft

    assert main([str(adapted), str(tmp_path / "adapter"), "--adapter"]) == 0
    assert main([str(adapted), str(tmp_path / "merged"), "--dtype", "float32"]) == 0
    base = AutoModelForCausalLM.from_pretrained(adapted.parent / "model")
    ids = torch.tensor([[1, 2, 3, 4]])
    before = base(ids).logits
    model = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert model.peft_config["default"].lora_alpha == 8
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(ids).logits
    torch.testing.assert_close(model(ids).logits, merged, atol=1e-4, rtol=1e-4)
    assert (before - merged).abs().max() > 1e-2


def test_a_base_of_the_hub_is_read_at_its_revision(adapted, tmp_path, monkeypatch):
    """From the hub's cache, where the default branch holds other weights."""
    import huggingface_hub.constants
    import transformers.utils.hub

    stored = tmp_path / "cache/models--org--base"
    default = random_qwen3(seed=8, hidden_size=64, num_hidden_layers=2, intermediate_size=96, vocab_size=50)
    default.save_pretrained(stored / "snapshots" / ("a" * 40))
    write_tokenizer(stored / "snapshots" / ("a" * 40))
    shutil.copytree(adapted.parent / "model", stored / "snapshots" / ("b" * 40))
    (stored / "refs").mkdir()
    for name, commit in (("main", "a"), ("pinned", "b")):
        (stored / "refs" / name).write_text(commit * 40)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(transformers.utils.hub, "is_offline_mode", lambda: True)
    run = tmp_path / "run"
    shutil.copytree(adapted, run)
    recipe = {"model": asdict(ModelConfig(path="org/base", revision="pinned"))}
    (run / "config.json").write_text(json.dumps({"recipe": recipe}))
    assert main([str(run), str(tmp_path / "adapter"), "--adapter", "--trust-run"]) == 0
    assert json.loads((tmp_path / "adapter/adapter_config.json").read_text())["revision"] == "pinned"
    assert main([str(run), str(tmp_path / "found"), "--dtype", "float32", "--trust-run"]) == 0
    assert main([str(adapted), str(tmp_path / "expected"), "--dtype", "float32"]) == 0
    found, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("found", "expected"))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ({"model": {"path": "m", "pathh": "m"}}, "model.pathh is unknown"),
        ({"rollout": {}}, "no section model"),
        ({"model": 3}, "no section model"),
    ],
)
def test_a_recipe_that_is_none_is_named(root, tmp_path, recipe, message):
    found = FoundCheckpoint(root / "run/checkpoints/step_3", 3, recipe)
    with pytest.raises(ConfigError, match=re.escape(message)):
        model_of(found, trust_run=True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{run}", "{run}"], "it exists"),
        (["{root}/model", "{tmp}/new"], "no run and no checkpoint"),
        (["{run}", "{tmp}/new", "--adapter"], "trained all weights"),
        (["{run}", "{tmp}/new", "--max-shard-size", "many"], "no size"),
        (["{run}", "{tmp}/new", "--model", "{tmp}/nowhere"], "no such directory"),
    ],
)
def test_bad_input_is_named_and_leaves_nothing(root, tmp_path, capfd, words, message):
    places = {"run": root / "run", "root": root, "tmp": tmp_path}
    assert main([word.format(**places) for word in words]) == 2
    assert message in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_written_is_a_storage_error(root, tmp_path, capfd):
    (tmp_path / "file").write_text("")
    assert main([str(root / "run"), str(tmp_path / "file/out")]) == 8
    assert "file" in capfd.readouterr().err


def test_a_damaged_checkpoint_and_a_run_without_one_are_refused(root, tmp_path):
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.json").write_text(json.dumps({"recipe": {"model": {"path": "m"}}}))
    with pytest.raises(ConfigError, match="it has none"):
        find_checkpoint(str(run))
    damaged = run / "checkpoints/step_1"
    damaged.mkdir()
    (damaged / "state.json").write_text("{}")
    seal(damaged)
    (damaged / "state.json").write_text("[]")
    with pytest.raises(ConfigError, match="not intact"):
        find_checkpoint(str(damaged))
    assert find_checkpoint(str(root / "model")) is None
    assert find_checkpoint("Qwen/Qwen3-0.6B") is None


def test_without_its_run_directory_the_model_has_to_be_named(root, tmp_path):
    found = FoundCheckpoint(root / "run/checkpoints/step_3", 3, None)
    export(found, ModelConfig(path=str(root / "model")), tmp_path / "out", dtype="float32")
    assert (tmp_path / "out/model.safetensors").exists()


def test_a_path_in_config_json_that_was_a_directory_is_never_a_name_of_the_hub(root, tmp_path, monkeypatch, capfd):
    """Neither by asyncrl-export nor by asyncrl-eval, wherever they run; where it still is, they find it."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: {path: org/model}\ndata: {train: t}\n")
    (tmp_path / "org").mkdir()
    (tmp_path / "org/model").symlink_to(root / "model")
    shutil.copytree(root / "run", tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    directory = RunDirectory(tmp_path / "run")
    loaded = load(recipe, [])
    directory.write_config(loaded.recipe, loaded.written, "run")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert main([str(directory.path), str(tmp_path / "out")]) == 0
    written = json.loads(directory.config.read_text())
    written["resolved"]["model_directory"] = str(tmp_path / "moved")
    directory.config.write_text(json.dumps(written))
    for command in (main, evaluate.main):
        assert command([str(directory.path), str(tmp_path / "other.jsonl"), "--trust-run"]) == 2
        assert f"{tmp_path}/moved\nfound: no such directory" in capfd.readouterr().err


def exported(name, root, out):
    """The trained model, of which `out` is the export. The base has other weights; what training does not see of it
    (towers of a VLM) is the base's."""
    config = AutoConfig.for_model(**FAMILIES[name])
    config.use_cache = False
    torch.manual_seed(0)
    model = auto_class(config).from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    model.save_pretrained(root / "model")
    write_tokenizer(root / "model")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    drop_towers(model)
    first = {tensor.data_ptr(): n for n, tensor in reversed(model.state_dict().items())}  # a tied tensor once
    whole = {f"model.{n}": tensor for n, tensor in model.state_dict().items() if first[tensor.data_ptr()] == n}
    save(root / "run/checkpoints/step_1/trainer", whole, None)
    complete(root, "step_1", 1)
    assert main([str(root / "run"), str(out), "--dtype", "float32"]) == 0
    return model


@torch.no_grad()
def logprobs_of(model, ids):
    found = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
    return found[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*FAMILIES} - {"hrm_text"}))  # which no trainer takes
def test_an_export_of_every_family_is_what_was_trained_in_transformers(name, tmp_path):
    model = exported(name, tmp_path, tmp_path / "out")
    loaded, told = type(model).from_pretrained(tmp_path / "out", output_loading_info=True, attn_implementation="eager")
    assert not told["missing_keys"]
    assert not told["mismatched_keys"]
    ids = list(range(3, 33))
    torch.testing.assert_close(logprobs_of(loaded.eval(), ids), logprobs_of(model, ids), atol=1e-5, rtol=0)


IN_VLLM = sorted(
    name
    for name, found in json.loads((ROOT / "benchmarks/results/models.json").read_text()).items()
    if re.fullmatch(r"\de-\d+", found.get("vllm", "")) and "vision_config" not in FAMILIES[name]
)
"""Those that vLLM's build for CPUs runs in float32. Images would need torchvision. The 40 tokens below keep longrope in
its short factors, which vLLM chooses by the longest sequence that there could be."""
OF_TODAY = IN_VLLM[datetime.date.today().toordinal() % len(IN_VLLM)]
SCORE = """
import json, os, sys
from vllm import LLM, SamplingParams
path, ids = sys.argv[1], json.loads(sys.argv[2])
llm = LLM(model=path, dtype="float32", enforce_eager=True, max_model_len=40, enable_prefix_caching=False,
          compilation_config={"custom_ops": ["-rotary_embedding"]})  # that of CPUs turns interleaved heads wrongly
asked = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
(found,) = llm.generate({"prompt_token_ids": ids}, asked, use_tqdm=False)
print(json.dumps([entry[token].logprob for token, entry in zip(ids[1:], found.prompt_logprobs[1:])]), flush=True)
os._exit(0)  # vLLM's threads may abort at the end of the interpreter
"""


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm")
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == OF_TODAY else pytest.mark.slow) for n in IN_VLLM])
def test_an_export_is_what_was_trained_in_plain_vllm(name, tmp_path):
    """One family a day, and all in the slow tests."""
    model, ids = exported(name, tmp_path, tmp_path / "out"), list(range(3, 33))
    alone = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    environment = os.environ | alone
    words = [sys.executable, "-c", SCORE, str(tmp_path / "out"), json.dumps(ids)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = torch.tensor(json.loads(done.stdout.splitlines()[-1]))
    torch.testing.assert_close(found, logprobs_of(model, ids), atol=1e-2, rtol=0)
