"""A mixture of experts, or a hybrid, in one run: trained, published and served, and what samples is what is trained."""

import importlib.util
import json
import shutil

import pytest
import torch
from transformers import AutoTokenizer, FalconH1Config, FalconH1ForCausalLM

from asyncrl.commands import report
from asyncrl_testing.random_model import random_qwen3_moe
from tests.e2e.conftest import ROOT, SMALL, assert_sound
from tests.make import needs_megatron
from tests.processes import ran
from tools import make_tiny_vision

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def mixture(inputs, tmp_path_factory):
    """A mixture with random weights, for the tokenizer of the tiny model."""
    return written(tmp_path_factory.mktemp("mixture") / "model", random_qwen3_moe)


def random_falcon_h1(**sizes):
    """Attention beside a recurrent state, in every layer."""
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    state = {"mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_chunk_size": 16}
    torch.manual_seed(0)
    config = FalconH1Config(**sizes, **shape, **state, num_key_value_heads=1, initializer_range=0.1, mamba_n_groups=1)
    return FalconH1ForCausalLM(config)


def written(path, model_of):
    tiny = ROOT / "runs" / "tiny-qwen3"
    shutil.copytree(tiny, path, ignore=shutil.ignore_patterns("*.safetensors", "tiny_model.json"))
    of_tiny = json.loads((tiny / "config.json").read_text())
    same = {key: of_tiny[key] for key in ("vocab_size", "eos_token_id", "pad_token_id", "max_position_embeddings")}
    model_of(**same).save_pretrained(path)
    return path


ODD_LENGTH = "reward.function=tests.e2e.faulty:odd_length"
FAST = "trainer.lr=0.01", ODD_LENGTH
REPLAYED = *FAST, "trainer.router_replay=rollout", "rollout.num_replicas=1"


def assert_it_samples_as_it_is_trained(run, steps):
    """In sync the ratio of trainer and engine is 1 for each token of each version, unless weights went wrong."""
    assert_sound(run, max_lag=0, steps=steps)
    assert [record["train/ratio_max"] for record in run.metrics] == pytest.approx([1] * steps, abs=1e-3)
    assert [record["train/kl_behavior"] for record in run.metrics] == pytest.approx([0] * steps, abs=1e-5)


def layout(split_by):
    return pytest.param(
        *("quickstart_megatron", ("trainer.megatron.tensor_parallel=1", f"trainer.megatron.{split_by}=2")),
        marks=needs_megatron, id=split_by,
    )  # fmt: skip


BALANCED = ("algorithm.router_aux_coefficient=0.01",)


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        pytest.param("quickstart", BALANCED, id="torch"),
        pytest.param("quickstart_vllm", BALANCED, id="vllm"),
        *map(layout, ("tensor_parallel", "pipeline_parallel", "expert_parallel")),
    ],
)
def test_every_version_samples_as_it_is_trained(mixture, start, recipe, settings):
    """Also with the ranks of Megatron-core: what they publish is what they train."""
    if recipe == "quickstart_vllm":
        pytest.importorskip("vllm", reason="needs the package vllm: make install-vllm", exc_type=ImportError)
    alone = f"model.path={mixture}", "rollout.num_replicas=1", "run.max_steps=4", "mode=sync", "weights.verify=always"
    run = start(*SMALL, *FAST, *alone, *settings, recipe=recipe)
    assert_it_samples_as_it_is_trained(run, steps=4)
    assert all(record["train/grad_norm"] > 0.1 for record in run.metrics), "each version differs from the one before"
    if settings == BALANCED:
        assert all(1.9 < record["train/router_balance"] < 8 for record in run.metrics), "2 of 8 experts: 2 is even"


def test_a_hybrid_samples_through_vllm_as_it_is_trained_in_padded_rows(inputs, start, tmp_path):
    pytest.importorskip("vllm", reason="needs the package vllm: make install-vllm", exc_type=ImportError)
    model = f"model.path={written(tmp_path / 'model', random_falcon_h1)}"
    alone = model, "rollout.num_replicas=1", "run.max_steps=3", "mode=sync", "weights.verify=always"
    run = start(*SMALL, *FAST, *alone, recipe="quickstart_vllm")
    assert_it_samples_as_it_is_trained(run, steps=3)
    assert all(record["train/grad_norm"] > 0.1 for record in run.metrics)
    assert "rows are padded" in run.log + (run.directory / "log.txt").read_text()


@pytest.mark.parametrize("engine", ["torch", "vllm"])
def test_a_model_that_reads_images_samples_as_it_is_trained(start, tmp_path, engine):
    """Images of rows, and of an environment in each turn. LLaVA in packed rows; vLLM's own names for it are older ones,
    so that there it is Qwen3-VL, in padded rows."""
    if engine == "vllm":
        for package in ("vllm", "torchvision"):
            pytest.importorskip(package, reason=f"needs the package {package}", exc_type=ImportError)
    (tmp_path / "data").mkdir()
    make_tiny_vision.main(["--model", str(tmp_path / "model"), "--data", str(tmp_path / "data"), "--steps", "2"])
    words = [f"model.path={tmp_path / 'model'}", f"data.image_directory={tmp_path / 'images'}", "data.eval={}"]
    if engine == "vllm":
        write_qwen3_vl(tmp_path / "model")
        words += ["trainer.packing=padded", "rollout.engine=vllm"]
    words += [f"data.train={tmp_path / 'data/drawn_numbers_train.parquet'}", "batch.groups_per_step=4"]
    words += ["rollout.environment=gymnasium", "rollout.gymnasium.factory=tests.gymnasium_environments:make_shown"]
    words += ["rollout.gymnasium.kwargs={steps: 3}", "reward.function=zero", f"rollout.{engine}.max_model_len=256"]
    words += ["rollout.sampling.stop=[a,e,i,n,o,s,t,'1','2','3']", "rollout.sampling.max_response_tokens=32"]
    run = start(*words, "mode=sync", "run.max_steps=3", "eval.every_steps=0", "weights.verify=always", recipe="vision")
    assert_it_samples_as_it_is_trained(run, steps=3)
    assert all(record["train/grad_norm"] > 0.01 for record in run.metrics)
    samples = [json.loads(line) for line in (run.directory / "samples.jsonl").read_text().splitlines()]
    assert all("\ufffc" in sample["prompt"] for sample in samples), "the image's reference"
    assert any("\ufffc" in sample["response"] for sample in samples), "of the environment"
    words = [str(run.directory), str(tmp_path / "data/drawn_numbers_test.parquet"), "--trust-run"]
    words += ["--reward", "numeric", "--max-prompts", "3", "rollout.environment=single_turn", "--json"]
    done = ran("-m", "asyncrl.commands.evaluate", *words, "--log-file", run.directory / "eval.txt", timeout_s=300)
    assert json.loads(done.stdout)["num_failed"] == 0, "an export has the files of the processor"
    assert report.main([str(run.directory)]) == 0
    assert (run.directory / "report.html").read_text().count("data:image/png;base64,") > len(samples)


def write_qwen3_vl(path):
    """Random weights, for the tokenizer that is there."""
    from transformers import AutoConfig, Qwen2VLImageProcessor, Qwen3VLForConditionalGeneration, Qwen3VLProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    tokenizer = AutoTokenizer.from_pretrained(path)
    names = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    ids = tokenizer.convert_tokens_to_ids(names)
    tokenizer.image_token, tokenizer.video_token = names[:2]
    mark = "".join((names[2], names[0], names[3]))
    tokenizer.chat_template = tokenizer.chat_template.replace("<image>", mark)
    config = AutoConfig.for_model(**json.loads((ROOT / "tests/families.json").read_text())["qwen3_vl"])
    config.text_config.vocab_size, ends = len(tokenizer), tokenizer.convert_tokens_to_ids("<|im_end|>")
    config.image_token_id, config.video_token_id, config.vision_start_token_id, config.vision_end_token_id = ids
    torch.manual_seed(0)
    model = Qwen3VLForConditionalGeneration(config)
    model.generation_config.eos_token_id = [ends]
    vision = config.vision_config
    sizes = {"patch_size": vision.patch_size, "temporal_patch_size": vision.temporal_patch_size}
    sizes["merge_size"] = vision.spatial_merge_size
    images, videos = Qwen2VLImageProcessor(**sizes, min_pixels=1024, max_pixels=4096), Qwen3VLVideoProcessor(**sizes)
    shutil.rmtree(path)
    model.save_pretrained(path)
    Qwen3VLProcessor(images, tokenizer, videos, chat_template=tokenizer.chat_template).save_pretrained(path)


def test_experts_that_were_chosen_in_sampling_are_replayed_in_training(mixture, start):
    """With publishes under way: every token is trained through the experts of its own version. In sync the ratio is 1
    as without replay; beyond it the run is sound, and its audit has every token."""
    replayed = *SMALL, *REPLAYED, f"model.path={mixture}"
    run = start(*replayed, "mode=sync", "run.max_steps=2")
    assert_it_samples_as_it_is_trained(run, steps=2)
    run = start(*replayed, "mode=fully_async", "run.max_steps=6", name="async")
    assert_sound(run, max_lag=2, steps=6)
    assert all(record["train/grad_norm"] > 0.1 for record in run.metrics)


@pytest.mark.sglang
@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs the package sglang: make test-sglang")
def test_experts_that_sglang_chose_are_replayed_in_training(mixture, start):
    """Publishes abort its requests: those whose experts it had no time to tell are sampled again."""
    keys = f"model.path={mixture}", "mode=fully_async", "run.max_steps=6", "rollout.interrupt=abort_resume"
    run = start(*SMALL, *REPLAYED, *keys, recipe="quickstart_sglang", joined=False)
    assert_sound(run, max_lag=2, steps=6)
    assert all(record["train/grad_norm"] > 0.1 for record in run.metrics)


def test_filtered_sampling_is_trained_among_the_tokens_that_were_kept(start):
    """In sync the ratio is 1 for every token that top_k and top_p let through; without the sets it would be below."""
    filters = "rollout.sampling.top_k=8", "rollout.sampling.top_p=0.9", "rollout.sampling.temperature=0.8"
    alone = "mode=sync", "rollout.num_replicas=1", "run.max_steps=2", ODD_LENGTH
    run = start(*SMALL, *filters, *alone, "rollout.sampling.keep_sets=true")
    assert_it_samples_as_it_is_trained(run, steps=2)
