"""Recipes: layers, overrides, and errors that say what was asked, what was found and what to do."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import asdict, replace

import pytest

from asyncrl.checkpoint.run_directory import RunDirectory
from asyncrl.commands import train as cli
from asyncrl.config.load import known_keys, load_recipe
from asyncrl.driver import run
from asyncrl.driver.cluster.placement import Demand, place_run
from asyncrl.driver.memory_plan import gpu_bytes
from asyncrl.errors import ConfigError
from asyncrl.trainer.packing import PackingRules
from asyncrl.trainer.planner import StepPlanner
from asyncrl.types import GroupSummary, LeaseManifest, Lengths
from tests.make import QUICKSTART, ROOT, quickstart


def written(directory, text):
    file = directory / "r.yaml"
    file.write_text(f"{text}\n")
    return file


def test_layers_and_overrides_apply_in_order(tmp_path):
    (tmp_path / "base.yaml").write_text("trainer: {lr: 1.0e-3, warmup_steps: 7}\nmodel: {path: a}\n")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("base: base.yaml\ntrainer: {lr: 2.0e-3}\ndata: {train: t}\n")
    loaded = load_recipe(recipe, ["trainer.adam_beta1=0.8", "data.eval={x: y}"])
    assert (loaded.trainer.lr, loaded.trainer.warmup_steps, loaded.trainer.adam_beta1) == (2e-3, 7, 0.8)
    assert loaded.data.eval == {"x": "y"}


@pytest.mark.parametrize(
    ("mode", "max_lag", "interrupt"),
    [("sync", 0, "drain"), ("one_step_off", 1, "drain"), ("fully_async", 2, "abort_resume")],
)
def test_modes_are_presets(mode, max_lag, interrupt):
    recipe = quickstart(f"mode={mode}", "staleness.pacing=just_in_time", "weights.overlap=true")
    assert (recipe.max_lag, recipe.interrupt) == (max_lag, interrupt)
    is_free = mode == "fully_async"
    assert recipe.overlaps_publish == is_free
    assert quickstart(f"mode={mode}").overlaps_publish == is_free, "the default"
    assert not quickstart(f"mode={mode}", "weights.overlap=false").overlaps_publish
    asked = recipe.placed(ranks_on_gpus=True, replicas_on_gpus=True, stages=True)
    assert asked.overlaps_publish == is_free, "as it is asked"
    by_default = quickstart(f"mode={mode}")
    placed = [
        by_default.placed(ranks_on_gpus=ranks, replicas_on_gpus=replicas, stages=True)
        for ranks, replicas in ((False, False), (False, True), (True, False))
    ]
    assert [recipe.overlaps_publish for recipe in placed] == [is_free, is_free, False]
    assert [recipe.weights.stage for recipe in placed] == [is_free, False, False]
    cannot = by_default.placed(ranks_on_gpus=False, replicas_on_gpus=False, stages=False)
    assert not cannot.weights.stage, "an engine that cannot"
    long_publish = ["weights.publish_timeout_s=600", f"mode={mode}"]
    if not is_free:  # no request waits at a gate
        quickstart(*long_publish)
    assert (recipe.pacing == "just_in_time", recipe.empties_queue) == (is_free, not is_free)


def test_a_publish_is_due_every_so_many_steps_and_at_the_end():
    recipe = quickstart("staleness.publish_every_steps=3", "run.max_steps=8")
    assert [step for step in range(1, 9) if recipe.publishes_after(step)] == [3, 6, 8]


@pytest.mark.parametrize(
    ("override", "found", "do"),
    [
        ("trainer.lrr=1", "no such key", "did you mean trainer.lr?"),
        ("rolout.num_replicas=3", "no such key", "did you mean rollout?"),
        ("mode=syn", "expected one of", "choose from ['sync', 'one_step_off', 'fully_async']"),
        ("trainer.lr=abc", "could not be converted to Float", "give it a value of that type"),
        ("nonsense", "not of the form key=value", "trainer.lr=1e-4"),
        ("batch.group_size=1", "no other to be compared with", "2 or more"),
        (
            "trainer.num_ranks=3",
            "do not divide evenly",
            "set batch.groups_per_step=15 or 18, or trainer.num_ranks=2 or 4",
        ),
        ("staleness.max_lag=-1", "at least 0", "set staleness.max_lag to a finite number that is at least 0"),
        ("staleness.publish_every_steps=4", "max_lag is 2", "at most 3"),
        ("rollout.sampling.top_p=0", "above 0 and at most 1", "top_p to a finite number"),
        ("trainer.fsdp.context_parallel=0", "must be at least 1", "context_parallel to a finite number"),
        ("reward.judge.max_tokens=0", "must be at least 1", "max_tokens to a finite number"),
        ("rollout.torch.max_model_len=159", "max_model_len=159", "raise rollout.torch.max_model_len to 160"),
        ("trainer.max_tokens_per_microbatch=100", "never split", "to 160"),
        ("observability.sinks=[wanbd]", "unknown sinks", "choose from"),
        ("rollout.trajectory_timeout_s=60", "rollout.request_timeout_s=1800", "at least 1800, or lower the other"),
        ("weights.publish_timeout_s=400", "would fail before it", "set rollout.gate_timeout_s to at least 400"),
        ("rollout.min_replicas=9", "no start could reach that", "or leave it out"),
        ("ray.env.RAY_ADDRESS=x", "that asyncrl or Ray sets", "remove it"),
        ("data.eval=null", "", ""),
        ("rollout.torch=5", "", ""),
    ],
)
def test_bad_input_says_what_to_do(override, found, do):
    with pytest.raises(ConfigError) as caught:
        quickstart(override)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("asked: ")
    assert lines[1].startswith("found: ")
    assert lines[2].startswith("do:    ")
    assert found in lines[1]
    assert do in lines[2]


TOOLS = ["rollout.environment=tool_use", "rollout.tool_use.max_turns=3", "rollout.agent.max_turns=2"]


@pytest.mark.parametrize(
    ("overrides", "longest"),
    [
        ([], 64),
        (TOOLS, 192),
        ([*TOOLS, "rollout.environment=agent"], 128),
        ([*TOOLS, "rollout.environment=interleaved_tool_use"], 64),
        ([*TOOLS, "rollout.environment=my.module:Game"], 64),
        ([*TOOLS, "rollout.tool_use.max_trajectory_tokens=150"], 150),
        ([*TOOLS, "rollout.torch.max_model_len=170"], 170),
        ([*TOOLS, "trainer.max_tokens_per_microbatch=180"], 180),
    ],
)
def test_the_longest_response_is_that_of_all_turns(overrides, longest):
    """The soft penalty and the divisor of aggregation fixed go by the whole trajectory."""
    recipe = quickstart(*overrides, "algorithm.aggregation=fixed")
    assert recipe.longest_response_tokens == longest
    assert PackingRules.of(recipe).fixed_tokens == longest
    overlong = ["algorithm.overlong.buffer_tokens=20", "algorithm.overlong.penalty=1"]
    penalised = quickstart(*overrides, *overlong)
    plans = StepPlanner(replace(penalised, algorithm=replace(penalised.algorithm, advantage="dr_grpo"))).plan(
        LeaseManifest(0, (group_of(longest - 20, longest - 10, longest),))
    )
    found = {s.index: s.advantage for run in plans[0].microbatches for s in run}
    assert [found[i] for i in range(3)] == pytest.approx([0.5, 0.0, -0.5])


AGENT = "rollout.environment=agent"
SHORT = ["data.max_prompt_tokens=100", "rollout.sampling.max_response_tokens=50"]
LONG = ["data.max_prompt_tokens=2048", "rollout.sampling.max_response_tokens=20480"]


@pytest.mark.parametrize(
    ("overrides", "lengths"),
    [
        (SHORT, (150, 8192, 10)),
        (LONG, (22528, 22528, 4096)),
        ([*LONG, "rollout.engine=vllm"], (22528, 22528, 4096)),
        ([*SHORT, *TOOLS], (250, 8192, 30)),
        ([*LONG, *TOOLS, "rollout.tool_use.max_trajectory_tokens=30000"], (32048, 32048, 6000)),
        ([*SHORT, *TOOLS, AGENT], (512, 8192, 20)),
        ([*SHORT, *TOOLS, "rollout.environment=interleaved_tool_use"], (150, 8192, 10)),
        ([*SHORT, *TOOLS, AGENT, "rollout.engine=vllm"], (4096, 8192, 20)),
        ([*SHORT, "rollout.environment=my.module:Game", "rollout.torch.max_model_len=9000"], (9000, 9000, 10)),
        ([*SHORT, "rollout.torch.max_model_len=9000"], (9000, 8192, 10)),
        ([*LONG, "trainer.max_tokens_per_microbatch=50000"], (22528, 50000, 4096)),
        ([*SHORT, "algorithm.overlong.buffer_tokens=7"], (150, 8192, 7)),
    ],
)
def test_lengths_that_are_not_set_follow_from_the_limits(tmp_path, overrides, lengths):
    """No recipe has to say three times how long a trajectory is; what was resolved is in config.json, and is asked for
    again by whoever reads the recipe there."""
    text = "model: {path: m}\ndata: {train: t}\nalgorithm: {preset: dapo}"
    recipe = load_recipe(written(tmp_path, text), overrides)
    engine, trainer = getattr(recipe.rollout, recipe.rollout.engine), recipe.trainer
    found = (engine.max_model_len, trainer.max_tokens_per_microbatch, recipe.algorithm.overlong.buffer_tokens)
    assert found == lengths
    directory = RunDirectory(tmp_path / "run")
    directory.path.mkdir()
    directory.write_config(recipe, asdict(recipe), "run")
    text = json.dumps(json.loads(directory.config.read_text())["recipe"])
    assert load_recipe(written(tmp_path, text), []) == recipe


@pytest.mark.parametrize("kind", ["population", "sample"])
def test_the_planner_divides_by_the_standard_deviation_of_the_recipe(kind):
    overlong = ["algorithm.overlong.buffer_tokens=64", "algorithm.overlong.penalty=1"]  # rewards that differ
    recipe = quickstart(f"algorithm.group_std={kind}", *overlong)
    (plan,) = StepPlanner(recipe).plan(LeaseManifest(0, (group_of(0, 64),)))
    found = {s.index: s.advantage for run in plan.microbatches for s in run}
    assert found[0] == -found[1] == pytest.approx(1 if kind == "population" else 0.5**0.5, rel=1e-4)


def group_of(*response_tokens):
    lengths = tuple(Lengths(0, n, n) for n in response_tokens)
    return GroupSummary(0, 0, lengths=lengths, rewards=(1.0,) * len(lengths), lags=(), segments=1, interrupted=0)


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_loads(path):
    load_recipe(path, [])


def test_a_ratio_that_is_always_one_is_noted(capsys, monkeypatch):
    """The command that recipes/gspo.yaml gives for GPUs has several updates a step."""
    monkeypatch.chdir(ROOT)
    text = " ".join((ROOT / "recipes" / "gspo.yaml").read_text().replace("#", "").split())
    recipe, *overrides = re.search(r"On GPUs: (\S+) (\S+) (\S+) ", text).groups()
    for number, noted in ((2, False), (1, True)):
        assert cli.main([f"recipes/{recipe}", *overrides[:number], "--dry-run"]) == 0
        assert ("with one update a step" in capsys.readouterr().out) == noted


GIB = 2**30
CARD = 79 * GIB
"""An 80 GB card before NCCL, CUDA and fragmentation."""
ACTIVATIONS = 31.2 * GIB
"""Activations, gathered layers and buffers of one rank for Qwen2.5-32B and 22528 tokens, with checkpointing, by FSDP2's
memory tracker over the project's own `shard` and optimizer. The other recipes have smaller models and fewer tokens."""


def test_off_is_a_word_where_a_key_has_it_among_its_choices(tmp_path):
    assert quickstart("weights.verify=off").weights.verify == "off"
    text = f"base: {QUICKSTART}\nweights: {{verify: off}}\ndata: {{shuffle: off}}"
    loaded = load_recipe(written(tmp_path, text), [])
    assert (loaded.weights.verify, loaded.data.shuffle) == ("off", False)


def test_a_missing_recipe_names_the_closest(tmp_path):
    (tmp_path / "quickstart.yaml").write_text("")
    with pytest.raises(ConfigError, match=r"did you mean .*quickstart\.yaml"):
        load_recipe(tmp_path / "quikstart.yaml", [])


def test_a_key_that_must_be_set_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.path is not set"):
        load_recipe(written(tmp_path, "data: {train: t}"), [])


def test_bases_that_include_each_other_are_refused(tmp_path):
    (tmp_path / "a.yaml").write_text("base: b.yaml\n")
    (tmp_path / "b.yaml").write_text("base: a.yaml\n")
    with pytest.raises(ConfigError, match="include each other"):
        load_recipe(tmp_path / "a.yaml", [])


def test_broken_yaml_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"r\.yaml"):
        load_recipe(written(tmp_path, "trainer: {lr: [}"), [])


def test_known_keys_are_complete_paths():
    keys = known_keys()
    assert "rollout.sampling.temperature" in keys
    assert "mode" in keys
    assert "rollout" not in keys
    assert len(keys) == len(set(keys))


def test_bad_input_exits_with_2_and_starts_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    directory = tmp_path / "run"
    for override in ("trainer.lrr=1", "model.path=./nowhere"):
        assert cli.main([str(QUICKSTART), override, f"run.dir={directory}"]) == 2
        assert "do:" in capsys.readouterr().err
    assert not directory.exists()


QWEN_32B = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 5120, "intermediate_size": 27648,
    "num_hidden_layers": 64, "num_attention_heads": 40, "num_key_value_heads": 8, "vocab_size": 152064,
    "rope_theta": 1e6, "tie_word_embeddings": False, "use_sliding_window": False, "sliding_window": 131072,
}  # fmt: skip
QWEN_1_5B = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960,
    "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936,
    "rope_theta": 1e6, "tie_word_embeddings": True, "use_sliding_window": False,
}  # fmt: skip
QWEN_7B = QWEN_32B | {
    "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4,
}  # fmt: skip
QWEN_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "head_dim": 128,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "vocab_size": 151936, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """The configs of three models, and nothing else, in the hub's cache."""
    import huggingface_hub.constants

    small = {"Qwen--Qwen2.5-1.5B-Instruct": QWEN_1_5B, "Qwen--Qwen2.5-7B": QWEN_7B}
    for name, config in {"Qwen--Qwen2.5-32B": QWEN_32B, "Qwen--Qwen3-30B-A3B": QWEN_30B_A3B, **small}.items():
        stored = tmp_path / f"models--{name}"
        (stored / "snapshots/a").mkdir(parents=True)
        (stored / "refs").mkdir()
        (stored / "refs/main").write_text("a")
        (stored / "snapshots/a/config.json").write_text(json.dumps(config))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))


@pytest.fixture
def dry_run(capsys, monkeypatch):
    """dry_run(name, *overrides, code=0) -> all that was said, in one line, and ended with this exit code."""
    monkeypatch.chdir(ROOT)

    def call(name, *overrides, code=0):
        assert cli.main([f"recipes/{name}.yaml", *overrides, "--dry-run"]) == code
        return " ".join("".join(capsys.readouterr()).split())

    return call


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("dapo_qwen", ""),
        ("dapo_qwen", "model.path=Qwen/Qwen2.5-7B algorithm.preset=ppo"),
        ("grpo_qwen3_30b_a3b", ""),
        ("grpo_qwen3_30b_a3b", "algorithm.preset=gspo"),
        ("retool_qwen", "model.path=Qwen/Qwen2.5-7B"),
    ],
)
def test_recipes_of_real_size_fit_their_gpus(name, words, hub_cache, dry_run):
    plan = dry_run(name, *words.split())
    assert "the recipe is valid" in plan
    assert "a rank takes up to" in plan, "its sizes are known"


OVER_MEGATRON = [
    "trainer.backend=megatron", "trainer.num_ranks=16", "trainer.megatron.expert_parallel=8",
    "trainer.megatron.pipeline_parallel=2", "trainer.megatron.param_dtype=bfloat16", "trainer.recompute=full",
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "overrides", "parameters", "lines"),
    [
        (
            "dapo_qwen_megatron",
            [],
            32.8e9,
            ["layout tensor 2 x pipeline 4 x 2 copies", "memory stage 0 of 4: 4", "stage 3: "],
        ),
        ("grpo_qwen3_30b_a3b", OVER_MEGATRON, 30.5e9, ["experts over 8 x 1", "memory stage 0 of 2: 4", "stage 1: "]),
    ],
)
def test_a_dry_run_prints_memory_and_buckets(name, overrides, parameters, lines, hub_cache, dry_run):
    plan = dry_run(name, *overrides)
    assert "the recipe is valid" in plan
    for line in lines:
        assert line in plan
    parts = r"(?:each rank|stage \d of \d): ([\d.]+) GiB = .*? \+ optimizer ([\d.]+) GiB"
    used = [(float(all_of_it), float(moments)) for all_of_it, moments in re.findall(parts, plan)]
    offloads = load_recipe(ROOT / f"recipes/{name}.yaml", overrides).trainer.megatron.offload_optimizer
    assert used
    for all_of_it, moments in used:
        assert (all_of_it - offloads * moments) * GIB + ACTIVATIONS < 0.99 * CARD, "it fits its GPUs"
        assert all_of_it * GIB < 0.9 * CARD, "during an update"
    tensors, size, buckets = re.search(r"publish +(\d+) tensors, ([\d.]+) GiB in bfloat16; (\d+) bucket", plan).groups()
    assert float(size) * GIB == pytest.approx(2 * parameters, rel=0.01)
    assert int(buckets) >= 2 * parameters / (1 << 29)
    counted = [int(number) for number in re.findall(r"stage \d: (\d+) tensors", plan)]
    assert not counted or sum(counted) == int(tensors)


@pytest.mark.parametrize(
    ("overrides", "sent", "staged"),
    [
        ([], False, False),
        (["weights.stage=true", "weights.overlap=true"], True, True),
        (["trainer.device=cpu", "weights.overlap=null"], True, False),  # vLLM's replicas have GPUs
        (["trainer.device=cpu", "rollout.engine=torch", "rollout.torch.device=cpu"], False, True),
    ],
)
def test_a_dry_run_says_what_copies_a_publish_takes(overrides, sent, staged, hub_cache, dry_run):
    plan = dry_run("dapo_qwen", *overrides)
    assert ("sent from a copy in host memory" in plan, "staged in host memory" in plan) == (sent, staged)


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        (
            "dapo_qwen",
            "trainer.fsdp.offload_optimizer=false",
            r"ranks=8 for model.path=Qwen/Qwen2.5-32B .*of the 80 GiB .*offload_optimizer=true \(.* or .*ranks=16 \(",
        ),
        ("dapo_qwen", "ray.gpu_memory_gib=48", r"micro-batches of 22528 tokens .*of the 48 GiB .*num_ranks=32 \("),
        ("dapo_qwen", "ray.gpu_memory_gib=24", r"needs about 62 GiB.*of the 24 GiB.*context_parallel=8 \("),
        ("dapo_qwen", "ray.gpu_memory_gib=12", "needs about 62 GiB.*of the 12 GiB.*train a smaller model"),
        (
            "dapo_qwen",
            "trainer.backend=megatron trainer.megatron.tensor_parallel=1",
            r"GiB before activations, and has.*of the 80 GiB.*set trainer\.megatron\.tensor_parallel=",
        ),
        (
            "dapo_qwen",
            "rollout.vllm.tensor_parallel_size=1 rollout.num_replicas=8 ray.gpu_memory_gib=70",
            r"a replica of.*61 GiB for weights.*rollout\.vllm\.tensor_parallel_size=2",
        ),
        ("dapo_qwen", "--on 8xH100", "nodes with 8 GPUs: 8 of 16"),
        ("gsm8k_qwen", "--on 2xRTX4090", "of the 24 GiB of its GPU"),
        ("gsm8k_qwen", "--on 2xV100", "known are A100-40GB"),
        # layouts that experts forbid are passed over
        (
            "grpo_qwen3_30b_a3b",
            "trainer.backend=megatron trainer.num_ranks=8 trainer.megatron.expert_parallel=8 ray.gpu_memory_gib=20",
            r"GiB before activations, and has.*set trainer\.num_ranks=",
        ),
        # more ranks are advised without more copies
        (
            "dapo_qwen",
            "trainer.num_ranks=16 trainer.fsdp.shard_ranks=4",
            r"trainer\.num_ranks=32 trainer\.fsdp\.shard_ranks=null \(",
        ),
        # what does not divide the model
        (
            "dapo_qwen_megatron",
            "trainer.megatron.tensor_parallel=16 trainer.megatron.pipeline_parallel=1",
            "40, the attention heads",
        ),
        ("dapo_qwen", "trainer.num_ranks=64 trainer.fsdp.context_parallel=16", "40 attention heads and 8 key-value"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_layout_that_does(name, words, said, hub_cache, dry_run):
    assert re.search(said, dry_run(name, *words.split(), code=2))


@pytest.mark.parametrize(
    ("name", "gib", "recompute"),
    [
        ("gsm8k_qwen", 80, "none"),
        ("gsm8k_qwen", 40, "selective"),
        ("dapo_qwen", 80, "full"),
        ("dapo_qwen", 141, "selective"),
        ("dapo_qwen_8gpu", 141, "selective"),
    ],
)
def test_a_layer_is_recomputed_only_where_memory_asks_for_it(name, gib, recompute, hub_cache, dry_run):
    plan = dry_run(name, f"ray.gpu_memory_gib={gib}")
    assert f"tokens with trainer.recompute={recompute} take" in plan
    assert ("a rank takes up to" in plan) == (recompute != "none")


@pytest.mark.parametrize(
    ("name", "words", "places"),
    [
        ("gsm8k_qwen", "ray.gpu_memory_gib=80", 1024),
        ("dapo_qwen", "ray.gpu_memory_gib=141", None),  # 64 layers x 22,528 tokens
        ("grpo_qwen3_30b_a3b", "ray.gpu_memory_gib=141", 448),
        ("gsm8k_qwen", "ray.gpu_memory_gib=80 rollout.vllm.max_num_seqs=128", None),
        ("gsm8k_qwen", "placement=colocated mode=sync weights.transport=ipc ray.gpu_memory_gib=40", 384),
    ],
)
def test_a_replica_decodes_as_many_requests_as_its_cache_holds(name, words, places, hub_cache, dry_run):
    found = re.findall(r"rollout.vllm.max_num_seqs=(\d+): the KV cache holds", dry_run(name, *words.split()))
    assert [int(number) for number in found] == [places] * (places is not None)


def test_a_dry_run_for_named_machines_says_what_a_step_takes(hub_cache, dry_run):
    plan = dry_run("grpo_qwen3_30b_a3b", "--on", "2x8xH100", "--mean-response", "6000")
    assert "trainer.recompute=selective: a rank takes up to" in plan, "GPUs of 80 GB"
    seconds = re.search(r"expected a step of (\d+) s: generation (\d+), training (\d+), concurrently", plan).groups()
    assert max(map(int, seconds[1:])) <= int(seconds[0]) < sum(map(int, seconds[1:]))
    assert "responses (--mean-response) of 6000 tokens" in plan
    assert "one after the other" in dry_run("gsm8k_qwen", "mode=sync", "--on", "2xA100")


COLOCATED = "placement=colocated", "mode=sync", "weights.transport=ipc"


@pytest.mark.parametrize(
    ("overrides", "kept"),
    [
        ("trainer.fsdp.offload_optimizer=true", 12),
        ("trainer.fsdp.offload_parameters=true", 6),
        ("trainer.lora.rank=16 trainer.lr=1e-5", 9),
        ("trainer.backend=megatron", 29),
        ("trainer.backend=megatron trainer.megatron.offload_optimizer=true", 18),
    ],
)
def test_what_a_rank_keeps_follows_what_it_offloads(overrides, kept, hub_cache, dry_run):
    """In GiB, of which 6 are reserves and the buckets."""
    words = *COLOCATED, "ray.gpu_memory_gib=80", "algorithm.kl.coefficient=0", *overrides.split()
    found = re.search(r"a rank keeps (\d+) of 80 GiB", dry_run("gsm8k_qwen", *words))
    assert int(found[1]) == pytest.approx(kept, abs=1.1)


def test_where_sizes_are_unknown_the_plan_says_so(hub_cache, dry_run, monkeypatch):
    monkeypatch.setattr("asyncrl.driver.memory_plan.gpu_bytes", lambda recipe: None)
    monkeypatch.setattr("asyncrl.driver.preflight._is_cpu_build", lambda: False)
    plan = dry_run("gsm8k_qwen", *COLOCATED)
    assert "gpu_memory_utilization is 0.85: the GPU's memory (ray.gpu_memory_gib) is not known" in plan


def test_a_share_that_a_rank_does_not_leave_is_refused_whatever_the_cache_is(hub_cache, dry_run):
    words = *COLOCATED, "ray.gpu_memory_gib=40", "rollout.vllm.engine_args={kv_cache_dtype: fp8}"
    refused = dry_run("gsm8k_qwen", *words, "rollout.vllm.gpu_memory_utilization=0.85", code=2)
    assert "trainer.fsdp.offload_optimizer=true" in refused
    assert "tensor_parallel_size" not in refused


@pytest.mark.parametrize("gib", [40, 80, 140])
def test_a_colocated_engine_takes_what_a_rank_leaves(gib, hub_cache, dry_run):
    """Weights and moments of the rank stay on the GPU while the engine is awake."""
    words = *COLOCATED, f"ray.gpu_memory_gib={gib}"
    plan = dry_run("gsm8k_qwen", *words)
    (share, kept, taken) = re.search(
        r"gpu_memory_utilization=([\d.]+): a rank keeps (\d+) of \d+ GiB between steps, with reserves, and the engine "
        r"takes (\d+)",
        plan,
    ).groups()
    assert 20 < int(kept) < 28
    assert int(taken) == round(float(share) * gib)
    assert int(kept) + int(taken) <= gib
    refused = dry_run("gsm8k_qwen", *words, "rollout.vllm.gpu_memory_utilization=0.85", code=2)
    assert "gpu_memory_utilization=0.85 with placement=colocated" in refused
    assert f"leave it out, which takes {share}" in refused
    assert "the engine takes" not in dry_run("gsm8k_qwen", *words, f"rollout.vllm.gpu_memory_utilization={share}")


@pytest.mark.parametrize(
    ("name", "gpus", "gib"),
    [
        ("dapo_qwen_8gpu", 8, 80),
        ("dapo_qwen_8gpu", 8, 40),
        ("lora_24gb", 1, 24),
        ("dapo_qwen", 8, 140),
        ("grpo_qwen3_30b_a3b", 8, 140),
    ],
)
def test_recipes_fit_one_machine(name, gpus, gib, hub_cache, dry_run):
    """With the words of their comments for that machine."""
    text = (ROOT / "recipes" / f"{name}.yaml").read_text()
    (line, *_) = [*re.findall(rf"^# .*?:  (.*ray\.gpu_memory_gib={gib}.*)$", text, re.MULTILINE), ""]
    recipe = load_recipe(ROOT / "recipes" / f"{name}.yaml", line.split())
    assert recipe.ray.gpu_memory_gib == gib
    placement = place_run(recipe, [gpus])
    assert sum(bundle.gpus for bundle in placement.bundles) == gpus
    assert "the recipe is valid" in dry_run(name, *line.split())


@pytest.mark.parametrize("name", ["dapo_qwen", "grpo_qwen3_30b_a3b"])
def test_a_machine_that_is_too_small_is_told_what_would_fit_it(name):
    with pytest.raises(ConfigError, match=r"8 of 16\n.*rollout.num_replicas=1 trainer.num_ranks=4, if a rank's memory"):
        place_run(load_recipe(ROOT / "recipes" / f"{name}.yaml", []), [8])


def test_ranks_that_share_rows_are_announced_and_placed_together(hub_cache, dry_run):
    shares = "trainer.fsdp.context_parallel=4"
    plan = dry_run("dapo_qwen", shares)
    assert "4 ranks share the tokens of a micro-batch, 2 micro-batches at once" in plan
    for shards, together in (("2", 4), ("8", 8)):
        recipe = load_recipe(ROOT / "recipes" / "dapo_qwen.yaml", [shares, f"trainer.fsdp.shard_ranks={shards}"])
        assert Demand.of(recipe).ranks_together == together


def test_a_colocated_engine_takes_what_a_rank_leaves_of_gpus_that_only_the_cluster_knows(hub_cache, monkeypatch):
    words = *COLOCATED, "ray.address=10.0.0.1:6379"
    recipe = load_recipe(ROOT / "recipes" / "gsm8k_qwen.yaml", [*words])
    monkeypatch.setattr(run, "smallest_gpu", lambda _timeout_s: None)
    assert run.with_measured_share(recipe) is recipe, "no node tells"
    monkeypatch.setattr(run, "smallest_gpu", lambda _timeout_s: 40 * GIB)
    share = run.with_measured_share(recipe).rollout.vllm.gpu_memory_utilization
    assert 0 < share < recipe.rollout.vllm.memory_share


def test_the_share_of_an_engine_that_decides_itself_is_its_usual_one(hub_cache, dry_run):
    dry_run(
        "dapo_qwen", "rollout.engine=sglang", "rollout.interrupt=abort_resume", "rollout.sglang.tensor_parallel_size=4"
    )


def test_only_gpus_that_may_be_seen_count(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '0, GPU-small, 8192'\necho '1, GPU-large, 81920'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    recipe = quickstart()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu_bytes(recipe) == 8 * GIB
    for named in ("1", "GPU-large"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
        assert gpu_bytes(recipe) == 80 * GIB
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu_bytes(recipe) is None


@pytest.mark.parametrize("name", ["dapo_qwen", "dapo_qwen_megatron", "grpo_qwen3_30b_a3b", "retool_qwen", "gsm8k_qwen"])
def test_recipes_of_real_size_pass_a_dry_run(name, dry_run, tmp_path):
    """Without a GPU, the packages of one, or the hub."""
    plan = dry_run(name, f"run.dir={tmp_path / 'run'}")
    assert "the recipe is valid" in plan
    assert load_recipe(ROOT / "recipes" / f"{name}.yaml", []).mode in plan
    assert "nothing was started" in plan
    assert not (tmp_path / "run").exists()


def test_experts_are_replayed_by_the_backend_that_can():
    assert quickstart("trainer.router_replay=rollout").kept_arrays == ("experts",)
    quickstart("trainer.router_replay=rollout", "trainer.backend=megatron")
    sglang = ["trainer.router_replay=rollout", "rollout.engine=sglang", "rollout.sglang.stream_interval=1"]
    for interrupt in ("keep", "abort_resume"):
        settings = quickstart(*sglang, f"rollout.interrupt={interrupt}").rollout.sglang
        assert (settings.record_experts, settings.disable_overlap_schedule) == (True, interrupt == "keep")
    assert quickstart("trainer.router_replay=rollout", "rollout.engine=vllm").rollout.vllm.record_experts


def test_sets_are_kept_where_they_are_bounded():
    recipe = quickstart("rollout.sampling.keep_sets=true", "rollout.sampling.top_p=0.9", "rollout.sampling.top_k=64")
    assert recipe.kept_arrays == ("kept_ids", "kept_ids of 64")


def test_a_mapping_or_list_that_is_set_to_nothing_is_emptied(tmp_path):
    (tmp_path / "base.yaml").write_text(
        f"base: {QUICKSTART.resolve()}\nrollout: {{vllm: {{engine_args: {{a: 1, hf_overrides: {{b: 2}}}}}}}}\n"
        "reward: {parts: {math: 1.0}}\nobservability: {sinks: [wandb]}\n"
    )
    (tmp_path / "mine.yaml").write_text(
        "base: base.yaml\ndata: {eval: {}}\neval: {every_steps: 0}\nrollout: {sampling: {}}\n"
    )
    overrides = ["rollout.vllm.engine_args.hf_overrides={}", "reward.parts={}", "observability.sinks=[]"]
    recipe = load_recipe(tmp_path / "mine.yaml", overrides)
    assert (recipe.data.eval, recipe.reward.parts, recipe.observability.sinks) == ({}, {}, [])
    assert recipe.rollout.vllm.engine_args == {"a": 1, "hf_overrides": {}}
    inherited = load_recipe(QUICKSTART, [])
    assert recipe.rollout.sampling == inherited.rollout.sampling, "a section has its keys still"
    again = load_recipe(tmp_path / "mine.yaml", ["data.eval.one=data/arithmetic_test.jsonl"])
    assert again.data.eval == {"one": "data/arithmetic_test.jsonl"}


def test_an_installed_package_knows_the_shipped_bases_and_presets(tmp_path):
    """Without the checkout: its configs lie where pyproject.toml puts them below the prefix."""
    shutil.copytree(ROOT / "asyncrl", tmp_path / "installed" / "asyncrl", ignore=shutil.ignore_patterns("__pycache__"))
    data = tmp_path / "prefix"
    for place, patterns in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"][
        "data-files"
    ].items():
        (data / place).mkdir(parents=True, exist_ok=True)
        for file in (file for pattern in patterns for file in ROOT.glob(pattern)):
            shutil.copy(file, data / place)
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("base: cpu\nalgorithm: {preset: dapo}\nmodel: {path: ./m}\ndata: {train: t.jsonl}\n")
    program = (
        f"import sys; sys.prefix = {str(data)!r}\nfrom pathlib import Path\n"
        f"from asyncrl.config.load import load_recipe\nprint(load_recipe(Path({str(recipe)!r}), []).rollout.engine)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(tmp_path / "installed")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.returncode) == ("torch\n", 0), done.stderr
