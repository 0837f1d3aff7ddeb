"""Which models an engine and the training backend take, as `asyncrl-train --dry-run` says it; the table of engines."""

import json
from dataclasses import fields
from importlib.util import find_spec
from typing import get_args, get_type_hints

import pytest

from asyncrl.commands.train import main
from asyncrl.config.load import load_recipe
from asyncrl.config.model import ModelConfig
from asyncrl.config.remote_engine import RemoteEngineConfig
from asyncrl.config.rollout import RolloutConfig
from asyncrl.driver.preflight import check_recipe
from asyncrl.errors import ConfigError
from asyncrl.inference.engine import SleepingEngine, StagingEngine
from asyncrl.inference.engines import (
    ENGINES,
    STANDALONE,
    build_engine,
    require_recording,
    require_routers,
    require_runs,
)
from asyncrl.types import ModelFacts
from tests.environments import QWEN, tokenizer_with
from tests.make import QUICKSTART, quickstart

LENGTH = 512
VISION = {"depth": 32, "hidden_size": 1280, "patch_size": 14}


# config.json as the hub has it: the keys that matter, spelt and placed as in the model's own file
def config(model_type, architecture, **keys):
    return {"architectures": [architecture], "model_type": model_type, **keys}


CONFIGS = {
    "llama": config("llama", "LlamaForCausalLM", max_position_embeddings=8192),
    "qwen3": config(
        "qwen3", "Qwen3ForCausalLM", max_position_embeddings=40960, sliding_window=256, use_sliding_window=False
    ),
    "qwen3_moe": config("qwen3_moe", "Qwen3MoeForCausalLM", num_experts=128),
    "mistral_4096": config("mistral", "MistralForCausalLM", sliding_window=4096),
    "mistral_256": config("mistral", "MistralForCausalLM", sliding_window=256),
    "short": config("llama", "LlamaForCausalLM", max_position_embeddings=256),
    "gemma2": config(
        "gemma2", "Gemma2ForCausalLM", attn_logit_softcapping=50.0, final_logit_softcapping=30.0, sliding_window=4096
    ),
    "cohere": config("cohere", "CohereForCausalLM", logit_scale=0.0625),
    "granite": config("granite", "GraniteForCausalLM", logits_scaling=1.0),
    "qwen2_5_vl": config(
        "qwen2_5_vl",
        "Qwen2_5_VLForConditionalGeneration",
        max_position_embeddings=128000,
        vision_config=VISION,
        use_sliding_window=False,
        sliding_window=32768,
    ),
    "gemma3": config(
        "gemma3",
        "Gemma3ForConditionalGeneration",
        text_config={"model_type": "gemma3_text", "sliding_window": 1024, "max_position_embeddings": 131072},
        vision_config=VISION,
    ),
    "jamba": config("jamba", "JambaForCausalLM", attn_layer_period=8, mamba_d_state=16, num_experts=16),
    "falcon_h1": config("falcon_h1", "FalconH1ForCausalLM", mamba_n_heads=24),
    "qwen3_next": config(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        num_experts=512,
    ),
    "llama4": config("llama4_text", "Llama4ForCausalLM", layer_types=["chunked_attention", "full_attention"]),
    "mixtral": config("mixtral", "MixtralForCausalLM", num_local_experts=8),
    "gpt_oss": config(
        "gpt_oss",
        "GptOssForCausalLM",
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=128,
        num_local_experts=32,
    ),
    "t5": config("t5", "T5ForConditionalGeneration", is_encoder_decoder=True),
    "empty": {},
}
RUNS = None
OF_IMAGES = "torchvision" if find_spec("vllm") and not find_spec("torchvision") else RUNS
"""Of engine vllm alone."""
# model: (what the fsdp backend refuses, what engine torch refuses, what engines vllm and sglang refuse); None: it runs
EXPECTED = {
    "llama": (RUNS, RUNS, RUNS),
    "qwen3": (RUNS, RUNS, RUNS),
    "qwen3_moe": (RUNS, RUNS, RUNS),
    "mistral_4096": (RUNS, RUNS, RUNS),
    "mistral_256": (RUNS, RUNS, RUNS),
    "short": (RUNS, "max_position_embeddings=256", "max_position_embeddings=256"),
    "gemma2": (RUNS, RUNS, RUNS),
    "cohere": (RUNS, RUNS, RUNS),
    "granite": (RUNS, RUNS, RUNS),
    "qwen2_5_vl": (RUNS, RUNS, OF_IMAGES),
    "gemma3": (RUNS, RUNS, OF_IMAGES),
    "jamba": (RUNS, RUNS, RUNS),
    "falcon_h1": (RUNS, RUNS, RUNS),
    "qwen3_next": (RUNS, RUNS, RUNS),
    "llama4": (RUNS, "layers of kind chunked_attention", RUNS),
    "mixtral": (RUNS, RUNS, RUNS),
    "gpt_oss": (RUNS, RUNS, RUNS),
    "t5": ("an encoder beside the decoder", "an encoder beside the decoder", "an encoder beside the decoder"),
    "empty": (RUNS, RUNS, RUNS),
}


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    """model_of(name) -> a directory with the config of `CONFIGS[name]`, a tokenizer and a file for weights."""

    def make(name):
        directory = tmp_path_factory.mktemp(name)
        tokenizer_with(QWEN).save_pretrained(directory)
        (directory / "config.json").write_text(json.dumps(CONFIGS[name]))
        (directory / "model.safetensors").write_bytes(b"")
        (directory / "train.jsonl").write_text('{"prompt": "word", "answer": "1"}\n')
        return directory

    return make


def refusal(name, engine):
    found = EXPECTED[name][1 if engine == "torch" else 2]
    return RUNS if found == OF_IMAGES and engine != "vllm" else found


def overrides(directory, engine):
    data = [f"data.{key}={directory}/train.jsonl" for key in ("train", "eval.held_out")]
    lengths = ["data.max_prompt_tokens=450", "rollout.sampling.max_response_tokens=32"]
    engine_settings = [f"rollout.engine={engine}", f"rollout.{engine}.max_model_len={LENGTH}"]
    return [f"model.path={directory}", *data, "eval.every_steps=0", *lengths, *engine_settings]


@pytest.mark.parametrize("engine", sorted(STANDALONE))
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_a_model_that_cannot_run_ends_the_command_before_anything_starts(model_of, capsys, name, engine):
    backend = EXPECTED[name][0]
    refused = backend or refusal(name, engine)
    recipe = str(QUICKSTART)
    code = main([recipe, *overrides(model_of(name), engine), "--dry-run"])
    said = capsys.readouterr().err
    if refused is RUNS:
        assert (code, said) == (0, "")
        return
    assert code == 2
    assert refused in said
    assert all(f"\n{part}:" in said for part in ("asked", "found", "do"))
    if backend:
        assert "trainer.backend=fsdp" in said
        assert "such as Qwen2, Qwen3" in said


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_an_evaluation_asks_the_engine_and_no_backend(name):
    facts = ModelFacts.of_config("m", CONFIGS[name])
    for engine in STANDALONE:
        refused = refusal(name, engine)
        rollout = RolloutConfig(engine=engine, **{engine: type(getattr(RolloutConfig(), engine))(max_model_len=LENGTH)})
        if refused is RUNS:
            require_runs(rollout, facts)
        else:
            with pytest.raises(ConfigError) as raised:
                require_runs(rollout, facts, section="")
            assert refused in str(raised.value)
            assert "rollout." not in str(raised.value)


def test_a_reference_model_is_asked_like_the_policy(model_of):
    strange = model_of("t5")
    changes = [f"algorithm.kl={{coefficient: 0.1, path: {strange}}}"]
    recipe = quickstart(*overrides(model_of("llama"), "torch"), *changes)
    with pytest.raises(ConfigError, match=r"train algorithm\.kl\.path=.*(?s:.)*an encoder beside"):
        check_recipe(recipe, use_hub=False)


def test_weights_are_staged_by_an_engine_that_can(model_of):
    asked, quickstart = "weights.stage=true", QUICKSTART
    torch, sglang = (load_recipe(quickstart, [*overrides(model_of("llama"), e), asked]) for e in ("torch", "sglang"))
    check_recipe(torch, use_hub=False)
    with pytest.raises(ConfigError, match=r"weights\.stage=true with rollout\.engine=sglang(?s:.)*torch or vllm"):
        check_recipe(sglang, use_hub=False)


def test_every_engine_of_a_recipe_has_one_description_and_one_section():
    hints = get_type_hints(RolloutConfig)
    assert set(get_args(hints["engine"])) == ENGINES.keys() <= {field.name for field in fields(RolloutConfig)}
    server = RemoteEngineConfig(urls=["http://127.0.0.1:8000"])
    for name, spec in ENGINES.items():
        rollout = RolloutConfig(engine=name, num_replicas=1, remote=server)
        settings = rollout.settings
        assert settings.num_workers == 1
        known = {field.name for field in fields(settings)}
        assert {key.partition("=")[0] for key in (*spec.serving, "max_model_len")} <= known
        engine = build_engine(rollout, ModelConfig(path="m"), load_real_weights=False)
        assert isinstance(engine, SleepingEngine) != spec.elsewhere
        assert isinstance(engine, StagingEngine) == spec.stages


def test_what_is_recorded_needs_an_engine_that_records_it_and_experts_need_routers():
    cases = {
        ("experts", "trainer.router_replay=rollout"): {True: ("torch", "sglang"), False: ("torch", "vllm", "sglang")},
        ("kept_ids", "rollout.sampling.keep_sets=true"): {True: ("torch",), False: ("torch",)},
    }
    for (array, asked), engines in cases.items():
        for on_cpu, able in engines.items():
            for engine in ENGINES:
                if engine in able:
                    require_recording(engine, array, asked, on_cpu=on_cpu)
                    continue
                names = " or ".join(able)
                with pytest.raises(ConfigError, match=rf"engine {engine} does not report {array}(?s:.*)engine={names}"):
                    require_recording(engine, array, asked, on_cpu=on_cpu)
    require_routers(ModelFacts.of_config("m", CONFIGS["qwen3_moe"]))
    require_routers(ModelFacts("a/name", is_local=False))  # nothing is known yet: the trainer asks again
    with pytest.raises(ConfigError, match=r"it has no experts(?s:.*)router_replay=off"):
        require_routers(ModelFacts.of_config("m", CONFIGS["qwen3"]))


@pytest.mark.parametrize(
    ("name", "changes", "found"),
    [
        (
            "falcon_h1",
            ["trainer.fsdp.context_parallel=2", "trainer.num_ranks=2"],
            "layers of kind mamba: rows are padded",
        ),
        ("llama", ["trainer.packing=padded", "trainer.backend=megatron"], "packed rows only"),
    ],
)
def test_what_needs_packed_rows_is_refused_where_they_are_padded(model_of, name, changes, found):
    recipe = quickstart(*overrides(model_of(name), "vllm"), *changes)
    with pytest.raises(ConfigError, match=found):
        check_recipe(recipe, use_hub=False)
