"""What a dry run finds and says, over a model that is a tokenizer and no more."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers.utils import import_utils

from asyncrl.config import checks
from asyncrl.config.load import load
from asyncrl.config.model import ModelConfig
from asyncrl.config.rollout import TorchEngineConfig
from asyncrl.config.threads import local_cores
from asyncrl.driver import memory_plan, preflight
from asyncrl.driver.actors import Actors
from asyncrl.driver.preflight import Preflight, advice, check_packages, check_recipe, describe
from asyncrl.errors import ConfigError, DataError
from asyncrl.inference.torch_engine.engine import TorchEngine
from asyncrl.trainer.fsdp.model import Kernels
from asyncrl.trainer.rank_device import resolve_device
from asyncrl.types import ModelFacts
from tests.environments import QWEN, tokenizer_with
from tests.make import QUICKSTART, needs_megatron, quickstart

MISTRAL = QWEN.replace("<tool_call>", "[TOOL_CALLS]")
WITHOUT_CALLS = QWEN.replace("message.tool_calls or []", "[]")


@pytest.fixture
def checked(tmp_path: Path):
    """checked(*overrides, rows=..., held_out=..., template=...) -> the lines that a dry run prints."""

    def call(*overrides: str, rows=("1", "2"), held_out=("3",), template: str = QWEN, config="{}") -> list[str]:
        tokenizer_with(template).save_pretrained(tmp_path)
        (tmp_path / "config.json").write_text(config)
        (tmp_path / "model.safetensors").write_bytes(b"")
        for name, truths in (("train", rows), ("test", held_out)):
            lines = [json.dumps({"prompt": "word " * (200 if t == "long" else 1), "answer": t}) for t in truths]
            (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
        files = [f"data.train={tmp_path}/train.jsonl", f"data.eval.held_out={tmp_path}/test.jsonl"]
        overrides = (f"model.path={tmp_path}", *files, "data.max_prompt_tokens=450", *overrides)
        recipe = quickstart(*overrides)
        return [f"{label:<9} {text}" for label, text in describe(recipe, check_recipe(recipe, use_hub=False))]

    return call


def test_dropout_that_the_files_ask_for_is_named(checked) -> None:
    assert any("trained without resid_pdrop=0.1" in line for line in checked(config='{"resid_pdrop": 0.1}'))
    assert not any("trained without" in line for line in checked(config='{"resid_pdrop": 0.0}'))


def test_a_template_that_does_not_follow_enable_thinking_is_noted(checked) -> None:
    thinks = QWEN + "{%- if add_generation_prompt and not thinking | default(true) %}<think></think>{%- endif %}"
    for template, asked, is_noted in ((QWEN, "false", True), (QWEN, "null", False), (thinks, "true", False)):
        lines = "\n".join(checked(f"model.enable_thinking={asked}", template=template))
        assert (f"model.enable_thinking={asked} has no effect" in lines) == is_noted


SMOL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
"""The sizes of SmolLM2-135M."""


@pytest.mark.parametrize(
    ("free_gib", "override", "tokens", "recompute", "told"),
    [
        (64, "run.max_steps=80", 8192, "none", []),
        (12, "run.max_steps=80", 4096, "none", ["it is 4096, which takes"]),
        (
            12,
            "trainer.max_tokens_per_microbatch=16384",
            16384,
            "selective",
            ["trainer.recompute=selective: a rank takes"],
        ),
        (
            12,
            "trainer.max_tokens_per_microbatch=16384 trainer.recompute=none",
            16384,
            "none",
            ["with 4096: set that, or leave the key out"],
        ),
        (2, "data.max_prompt_tokens=64", 8192, "full", ["trainer.recompute=full", "take a smaller model, or LoRA"]),
    ],
)
def test_a_micro_batch_fits_the_memory_or_the_plan_says_what_would(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    free_gib: int,
    override: str,
    tokens: int,
    recompute: str,
    told: list[str],
) -> None:
    monkeypatch.setattr(memory_plan.psutil, "virtual_memory", lambda: SimpleNamespace(available=free_gib << 30))
    monkeypatch.setattr(memory_plan, "gpu_bytes", lambda recipe: None)
    loaded = load(QUICKSTART, ["rollout.num_replicas=1", "ray.address=null", *override.split()])
    found = Preflight(ModelFacts.of_config("m", SMOL), None, {}, ())
    recipe, found = preflight.with_fitting_batch(loaded.recipe, found, loaded)
    assert recipe.max_tokens_per_microbatch == tokens
    assert recipe.trainer.recompute == recompute
    assert [note in line for note, line in zip(told, found.notes, strict=True)] == [True] * len(told)


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        (["trainer.lr=5e-4"], "usual for all weights of 135M parameters is about 2e-05"),
        (["trainer.lr=1e-6"], "about 2e-05"),
        (["trainer.lr=2e-5"], None),
        (["trainer.lr=4e-4", "trainer.lora.rank=16"], None),
        (["trainer.lr=2e-5", "algorithm.preset=grpo"], "algorithm.kl loads"),
    ],
)
def test_an_unusual_learning_rate_and_a_reference_are_noted(checked, overrides, found) -> None:
    notes = [
        line for line in checked(*overrides, config=json.dumps(SMOL)) if "trainer.lr" in line or "kl loads" in line
    ]
    assert [found in note for note in notes] == [True] * (found is not None)


def test_rows_that_the_reward_cannot_judge_are_named(checked) -> None:
    checked("reward.function=numeric")
    with pytest.raises(DataError, match=r"(?s)train\.jsonl:2.*'many' is no number"):
        checked("reward.function=numeric", rows=("1", "many"))
    with pytest.raises(DataError, match=r"(?s)test\.jsonl:1.*'many' is no number"):
        checked("reward.function=numeric", held_out=("many",))
    with pytest.raises(DataError, match=r"(?s)train\.jsonl:1.*neither inputs nor statements.*reward\.function=code"):
        checked("reward.function=code")


@pytest.mark.parametrize(
    "override",
    ["algorithm.kl={{coefficient: 0.1, path: {path}}}", "algorithm={{preset: ppo, critic: {{path: {path}}}}}"],
)
def test_a_reference_or_a_critic_with_other_tokens_is_refused(checked, tmp_path: Path, override: str) -> None:
    other = tmp_path / "other"
    tokenizer_with(QWEN).save_pretrained(other)
    with pytest.raises(ConfigError, match=rf"algorithm\.(kl|critic)\.path={other}\nfound: no config\.json"):
        checked(override.format(path=other))
    (other / "config.json").write_text("{}")
    (other / "model.safetensors").write_bytes(b"")
    checked(override.format(path=other))
    tokenizer = tokenizer_with(QWEN)
    tokenizer.add_tokens(["another"])
    tokenizer.save_pretrained(other)
    with pytest.raises(ConfigError, match=r"algorithm\.(kl|critic)\.path=.*[\s\S]*other tokens than that of model"):
        checked(override.format(path=other))


def test_a_url_in_place_of_the_directory_of_a_run_is_refused(checked) -> None:
    with pytest.raises(ConfigError, match=r"run\.dir=s3://bucket/x\nfound: a URL"):
        checked("run.dir=s3://bucket/x")


def test_object_storage_for_publishes_is_tried_first(checked, tmp_path: Path) -> None:
    place = tmp_path / "objects"
    checked(f"weights.disk_directory=file://{place}", "weights.transport=disk")
    assert not [path for path in place.rglob("*") if path.is_file()], "the probe is deleted"
    (tmp_path / "file").touch()
    for url, found in (
        ("nobody://bucket/x", "Protocol not known"),
        ("s3://bucket/x", "Install s3fs"),
        (f"file://{tmp_path}/file", "File exists|Not a directory"),
    ):
        with pytest.raises(ConfigError, match=rf"(?s)weights\.disk_directory={url}\nfound:.*({found})"):
            checked(f"weights.disk_directory={url}", "weights.transport=disk")
    checked("weights.disk_directory=s3://bucket/x")  # another transport does not read it


def test_questions_that_ask_for_no_mark_are_told(checked, tmp_path: Path) -> None:
    (tmp_path / "gsm8k.jsonl").write_text(json.dumps({"question": "What is 6 * 7?", "answer": "#### 42"}))
    gsm8k, told = f"data.train={tmp_path}/gsm8k.jsonl", "the questions of gsm8k do not ask for a marked answer"
    assert told in "\n".join(checked(gsm8k))
    assert told not in "\n".join(checked(gsm8k, "data.system_prompt='End with a line Answer: and the number.'"))
    assert told not in "\n".join(checked(gsm8k, "reward.function=numeric"))
    assert told not in "\n".join(checked())


def test_a_dataset_most_of_which_is_dropped_is_told(checked) -> None:
    told = "3 of 4 rows are dropped"
    lines = checked("data.on_long_prompt=drop", rows=("1", "1", "1", "long"))
    assert told in "\n".join(lines)
    assert "are dropped" not in "\n".join(checked("data.on_long_prompt=drop", rows=("1", "long")))


def test_what_an_evaluation_takes_is_told(checked) -> None:
    asked = "responses of up to 64 tokens, every 10 steps, within 1800 s"
    lines = checked("data.on_long_prompt=drop", held_out=("1", "long", "2", "long"))
    assert f"held out  held_out: 2 prompts (2 too long, dropped) x 1 = 2 {asked}" in lines
    sampled = ["eval.samples=4", "eval.temperature=1", "data.eval.hub=org/name"]
    lines = checked(*sampled)
    assert f"held out  held_out: 1 prompts x 4 = 4 {asked}" in lines
    assert f"held out  hub: at most 256 prompts x 4 = 1024 {asked}" in lines
    assert "held out  held_out: 1 prompts" in checked("eval.every_steps=0")


def test_a_held_out_set_that_repeats_its_questions_is_noted(checked) -> None:
    def noted(*truths: str) -> list[str]:
        return [line for line in checked(held_out=truths) if "different questions" in line]

    (line,) = noted("1", "1", "2")  # the questions are all alike here
    assert "held-out set held_out asks 1 different questions, up to 3 times each" in line
    assert not noted("1")


@pytest.mark.parametrize(
    ("overrides", "template", "form", "how"),
    [
        (["rollout.environment=tool_use"], QWEN, "<tool_call>{", "as the chat template writes them"),
        (["rollout.environment=tool_use"], MISTRAL, "[TOOL_CALLS]", "as the chat template writes them"),
        (["rollout.environment=tool_use"], WITHOUT_CALLS, "<tool_call>{", "in words"),
        (["rollout.environment=tool_use", "rollout.tool_use.parser=tagged"], MISTRAL, "<NAME>", "in words"),
    ],
)
def test_the_plan_says_how_tools_are_called(checked, overrides, template, form, how) -> None:
    [told] = [line for line in checked(*overrides, template=template) if "tool calls:" in line]
    assert form in told
    assert how in told


@pytest.mark.parametrize("overrides", [[], ["rollout.environment=interleaved_tool_use"]])
def test_the_plan_says_nothing_of_calls_that_no_template_writes(checked, overrides) -> None:
    assert not any("tool calls:" in line for line in checked(*overrides, template=MISTRAL))


def test_what_confines_programs_is_told_of_the_tool_too(checked) -> None:
    tool = ["rollout.environment=tool_use", "rollout.tool_use.tools=[python]"]
    assert any("tool python: programs are confined by" in line for line in checked(*tool))
    assert not any("confined" in line for line in checked())


def test_a_sandbox_that_cannot_run_is_refused(checked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No directory can be made for the program."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"(?s)rollout\.tool_use.*no program can be run in the sandbox here"):
        checked("rollout.environment=tool_use", "rollout.tool_use.tools=[python]")


def test_the_plan_says_how_many_threads_compute_on_a_cpu(checked) -> None:
    cores = local_cores()
    line = f"threads   on CPUs with {cores} cores: {cores} for each trainer rank, 3 for each replica"
    assert line in checked("mode=sync", "rollout.torch.num_threads=3")
    assert not any(line.startswith("threads") for line in checked("trainer.device=cuda"))


def test_the_plan_says_which_gpus_are_reserved(checked) -> None:
    (line,) = [line for line in checked("trainer.num_ranks=1") if line.startswith("GPUs")]
    assert "2 bundles of 1 GPU (a replica), 1 of 1 GPU (a trainer rank); processes share GPUs" in line
    on_cpus = "trainer.device=cpu", "rollout.torch.device=cpu"
    assert "GPUs      none: everything computes on CPUs" in checked(*on_cpus)


@pytest.mark.parametrize(
    ("overrides", "hidden", "refused"),
    [
        ([], None, True),
        ([], "", False),
        ([], "-1", False),
        (["trainer.device=cpu"], None, True),
        (["trainer.device=cpu", "rollout.torch.device=cpu"], None, False),
        (["ray.address=10.0.0.1:6379"], None, False),
    ],
)
def test_a_torch_without_cuda_beside_gpus_is_refused(monkeypatch, tmp_path, overrides, hidden, refused):
    """Ray would give ranks a GPU that they cannot use."""
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(checks, "DEVICES", tmp_path)
    monkeypatch.setattr(preflight, "_is_cpu_build", lambda: True)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    recipe = quickstart(*overrides)
    if not refused:
        check_packages(recipe)
        return
    with pytest.raises(ConfigError, match=r"(?s)NVIDIA GPUs.*built without CUDA.*CUDA_VISIBLE_DEVICES"):
        check_packages(recipe)
    if recipe.trainer.device == "auto":
        check_packages(quickstart("rollout.torch.device=cpu"), trains=False)


def test_only_a_dry_run_is_for_gpus_that_this_machine_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_is_cpu_build", lambda: True)
    words = "placement=colocated", "mode=sync", "weights.transport=ipc", "rollout.engine=vllm", "ray.gpu_memory_gib=24"
    facts, recipe = ModelFacts.of_config("m", SMOL), quickstart(*words)
    monkeypatch.setattr(preflight.engines, "require_runs", lambda *_: None)
    preflight._check_processes(recipe, facts, trains=True, plans=True)
    with pytest.raises(ConfigError, match="engine=vllm on a CPU"):
        preflight._check_processes(recipe, facts, trains=True, plans=False)


# -- advice ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "cores", "due"),
    [
        ([], 3, []),
        ([], None, []),
        ([], 2, ["rollout.num_replicas=1: 2 replicas and 1 trainer rank(s) share 2 cores"]),
        (["mode=sync"], 2, []),
        (["mode=sync"], 1, ["rollout.num_replicas=1: 2 replicas share 1 cores"]),
        (["trainer.num_threads=3", "rollout.num_replicas=4"], 5, ["rollout.num_replicas=2: 4 replicas and 1"]),
        (["rollout.torch.num_threads=2", "trainer.num_ranks=2"], 6, []),
        (["rollout.torch.num_threads=2", "trainer.num_ranks=2"], 5, ["rollout.num_replicas=1: 2 replicas and 2"]),
        (["batch.groups_per_step=32"], None, ["rollout.torch.num_slots=256 where", "512 responses, and 2 replica(s)"]),
        (["batch.groups_per_step=32", "rollout.torch.num_slots=256"], None, []),
        (
            ["rollout.engine=vllm", "rollout.num_replicas=1", "rollout.vllm.max_num_seqs=100"],
            4,
            ["rollout.vllm.max_num_seqs=256 where", "256 responses, and 1 replica(s) decode 100 at once"],
        ),
    ],
)
def test_numbers_that_make_processes_or_responses_wait_are_named(overrides, cores, due):
    found = " / ".join(advice(quickstart(*overrides), cores=cores))
    assert bool(found) == bool(due), found
    assert all(part in found for part in due), found


# -- GPUs as processes find them ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "hidden", "refused"),
    [
        ("nvidia0", None, True),
        ("nvidia3", "3", True),
        ("nvidia0", "", False),
        ("nvidia0", "-1", False),
        ("nvidia0", "NoDevFiles", False),
        ("nvidiactl", None, False),
    ],
)
def test_auto_is_no_cpu_beside_a_gpu_that_torch_cannot_use(tmp_path, monkeypatch, device, hidden, refused):
    (tmp_path / device).touch()
    monkeypatch.setattr(checks, "DEVICES", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    model = ModelConfig(path="/")
    if not refused:
        assert resolve_device("auto", 0) == torch.device("cpu")
        TorchEngine(model, TorchEngineConfig(), load_real_weights=False)
        return
    with pytest.raises(ConfigError, match=r"trainer\.device=cuda.*(?s:.*)sees no CUDA device here"):
        resolve_device("auto", 0)
    with pytest.raises(ConfigError, match=r"rollout\.torch\.device=cuda"):
        TorchEngine(model, TorchEngineConfig(), load_real_weights=False)


def test_flash_attention_4_alone_is_no_flash_attention_2(tmp_path, monkeypatch):
    """Both packages are called flash_attn."""
    monkeypatch.setattr(import_utils, "is_torch_cuda_available", lambda: True)
    import_utils.is_flash_attn_2_available.cache_clear()
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    (tmp_path / "flash_attn" / "cute" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not Kernels.of(torch.device("cpu")).flash_attn
    import_utils.is_flash_attn_2_available.cache_clear()


@pytest.mark.parametrize(
    ("capability", "sizes", "activated"),
    [
        ((9, 0), {"head_dim": 128}, ["FA4"]),
        ((10, 0), {"hidden_size": 512, "num_attention_heads": 8}, ["FA4"]),
        ((9, 0), {"head_dim": 256}, []),  # it has no kernel for such heads
        ((8, 0), {"head_dim": 128}, []),
    ],
)
def test_flash_attention_4_becomes_the_kernel_where_it_has_one(tmp_path, monkeypatch, capability, sizes, activated):
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    (tmp_path / "flash_attn" / "cute" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    taken = []
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", taken.append)
    kernels = Kernels.of(torch.device("cuda"))
    kernels.activate(SimpleNamespace(**sizes))
    assert taken == activated
    assert kernels.fa4 == (capability[0] > 8)


@needs_megatron
def test_routers_in_float32_run_without_transformer_engine():
    """In a process that has not taken the CPU's way to Megatron-core."""
    code = """
import torch
from asyncrl.trainer.megatron.backend import bind_gemm
bind_gemm()
from megatron.core.transformer.moe import moe_utils
x, w = (torch.randn(n, 8, dtype=torch.bfloat16) for n in (3, 2))
print(moe_utils.router_gating_linear(x, w, None, torch.float32).dtype)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout.splitlines()[-1:] == ["torch.float32"], done.stderr


@pytest.mark.parametrize(
    ("engine", "shared", "begun"),
    [
        ("vllm", True, ["replicas", "training side without them"]),
        ("torch", True, ["training side with them"]),
        ("vllm", False, ["training side with them"]),
    ],
)
async def test_an_engine_that_measures_its_gpu_loads_before_the_rank_beside_it(engine, shared, begun):
    found = []

    async def start():
        found.append("replicas")

    async def training_side(*others):
        found.append(f"training side {'with' if len(others) == 2 else 'without'} them")
        for other in others:
            other.close()

    async def nothing():
        pass

    actors = object.__new__(Actors)
    actors.engines = actors.server = None
    actors._recipe = quickstart(f"rollout.engine={engine}")
    actors._placements = SimpleNamespace(placement=SimpleNamespace(shares_gpus=shared))
    actors.replicas, actors.pools = SimpleNamespace(start=start), SimpleNamespace(start=nothing)
    actors._start_training_side = training_side
    await actors.start()
    assert found == begun
