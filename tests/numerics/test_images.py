"""What a model makes of images, in training and in the embedded engine, against its own forward pass."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from asyncrl.config.model import ModelConfig
from asyncrl.config.rollout import TorchEngineConfig
from asyncrl.data.rows import RowReader
from asyncrl.data.tokenizer import PromptRenderer, load_tokenizer
from asyncrl.errors import ConfigError, GenerationError
from asyncrl.inference.torch_engine.engine import TorchEngine
from asyncrl.types import SamplingParams, Segment, Trajectory
from asyncrl.types.images import FIRST_ID, as_model_ids
from asyncrl_testing.engine_suite import Client, make_request
from tests.backends import fsdp_backend, trainer_spec
from tests.engines import running
from tests.make import ROOT
from tests.numerics.one_rank import leased
from tools.make_tiny_model import build_tokenizer
from tools.make_tiny_vision import build, draw

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The model's section, the model, its processor, and drawn numbers."""
    root = tmp_path_factory.mktemp("vision")
    model, processor = build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    model.generation_config.eos_token_id = None
    model.save_pretrained(root / "model")
    processor.save_pretrained(root / "model")
    rng = np.random.default_rng(0)
    images = [draw(number, rng) for number in range(4)]
    return ModelConfig(path=str(root / "model"), image_directory=str(root / "images")), model.eval(), processor, images


def prompts_of(made):
    """Four prompts: one image, two, none, and the first image under another question."""
    named, _, _, images = made
    reader, renderer = RowReader(image_directory=named.image_directory), PromptRenderer(load_tokenizer(named), named)
    asked = [("<image>what?", [0]), ("<image>and<image>", [1, 2]), ("nothing", []), ("and <image> now?", [0])]
    rows = [
        reader.record({"prompt": text, "images": [images[i] for i in shown], "answer": "1"}, "f:1")
        for text, shown in asked
    ]
    return [(renderer.prompt_ids(row), [images[i] for i in shown]) for row, (_, shown) in zip(rows, asked, strict=True)]


@torch.no_grad()
def own_logprobs(made, prompt, images, response):
    """By transformers' own class, from the processor's pixels."""
    _, model, processor, _ = made
    token = model.config.image_token_id
    ids = torch.tensor(as_model_ids(np.concatenate([prompt, response]), token), dtype=torch.int64)[None]
    pixels = processor.image_processor(images=images, return_tensors="pt") if images else {}
    logits = model(input_ids=ids, **pixels, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(response, dtype=torch.int64)[:, None])[:, 0].numpy()


def trajectory(prompt, response, seed):
    n = len(response)
    logprobs = np.random.default_rng(seed).normal(-2, 1, n).astype(np.float32)
    return Trajectory(
        prompt, np.asarray(response, np.int32), logprobs, np.ones(n, bool), (Segment(0, n, 0, 0),), float(seed % 2)
    ).validate()


@pytest.mark.parametrize("packing", ["packed", "padded"])
def test_the_trainer_sees_what_the_model_sees(made, packing):
    """Also where the policy sampled the token of images itself."""
    named, model, _, _ = made
    backend = fsdp_backend(replace(trainer_spec(named.path, packing=packing), model=named))
    rng = np.random.default_rng(3)
    prompts = prompts_of(made)
    made_up = [trajectory(ids, rng.integers(3, 90, 4 + 2 * i), i) for i, (ids, _) in enumerate(prompts)]
    plan, by_key = leased(made_up, 0.0, 4096)
    found = backend.logprobs(plan, by_key)
    for (key, t), (ids, images) in zip(by_key.items(), prompts, strict=True):
        np.testing.assert_allclose(found[key], own_logprobs(made, ids, images, t.response_ids), atol=2e-5)
    assert not any("tower" in name or "projector" in name for name, _ in backend.named_weights())
    # An image's own token in a response is a token; transformers' class would take it for an image.
    sampled = trajectory(prompts[0][0], [5, model.config.image_token_id, 6, 7], 1)
    plan, by_key = leased([sampled], 0.0, 4096)
    (of_sampled,) = backend.logprobs(plan, by_key).values()
    first = own_logprobs(made, prompts[0][0], prompts[0][1], [5])
    assert np.isfinite(of_sampled).all()
    assert abs(float(of_sampled[0]) - float(first[0])) < 2e-5


def write_gemma3(path):
    """Random weights: attention over an image goes both ways."""
    from transformers import AutoConfig, Gemma3ForConditionalGeneration, Gemma3Processor
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    names = {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<soft>"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=build_tokenizer().backend_tokenizer,
        extra_special_tokens=names,
        chat_template="{% for message in messages %}{{ message.content }}{% endfor %}",
    )
    config = AutoConfig.for_model(**json.loads((ROOT / "tests/families.json").read_text())["gemma3"])
    config.text_config.vocab_size, config.mm_tokens_per_image = len(tokenizer), 16
    config.boi_token_index, config.eoi_token_index = tokenizer.boi_token_id, tokenizer.eoi_token_id
    config.image_token_id = tokenizer.image_token_id
    torch.manual_seed(0)
    Gemma3ForConditionalGeneration(config).save_pretrained(path)
    images = Gemma3ImageProcessorPil(size={"height": 56, "width": 56})
    Gemma3Processor(images, tokenizer, tokenizer.chat_template, image_seq_length=16).save_pretrained(path)


@pytest.mark.parametrize("packing", ["packed", "padded"])
async def test_a_model_that_looks_ahead_within_an_image_is_refused_with_the_difference(tmp_path, packing):
    """Its trainer and its embedded engine would agree, and both be another model."""
    write_gemma3(tmp_path / "model")
    named = ModelConfig(path=str(tmp_path / "model"), image_directory=str(tmp_path / "images"))
    differs = r"a text with an image differs by \S+ of the largest value from the model's own class"
    with pytest.raises(ConfigError, match=differs):
        fsdp_backend(replace(trainer_spec(named.path, packing=packing), model=named))
    if packing == "packed":
        settings = TorchEngineConfig(num_slots=3, chunk_tokens=4, max_model_len=128)
        with pytest.raises(GenerationError, match=differs):
            async with running(TorchEngine(named, settings, load_real_weights=True)):
                pass


async def test_the_embedded_engine_samples_and_scores_with_images(made):
    """In one pass, resumed, and for prompts that differ in their image alone."""
    named, _, _, _ = made
    prompts = prompts_of(made)
    settings = TorchEngineConfig(num_slots=3, chunk_tokens=4, max_model_len=128)
    async with running(TorchEngine(named, settings, load_real_weights=True)) as engine:
        asked = [replace(make_request(max_tokens=9, seed=i), prompt_ids=ids) for i, (ids, _) in enumerate(prompts)]
        clients = [await client.done() for client in [Client(engine, request) for request in asked]]
        resumed = [
            replace(
                make_request(max_tokens=1),
                prompt_ids=np.concatenate([ids, np.array(client.ids[:5], np.int32)]),
                sampling=SamplingParams(max_tokens=1, score_from=len(ids)),
            )
            for client, (ids, _) in zip(clients, prompts, strict=True)
        ]
        scores = [await client.done() for client in [Client(engine, request) for request in resumed]]
        # As the check after a resume does: a response in which an environment has shown an image.
        whole = np.concatenate([prompts[2][0], prompts[1][0]])
        sampling = SamplingParams(max_tokens=1, score_from=2)
        turn = await Client(engine, replace(make_request(max_tokens=1), prompt_ids=whole, sampling=sampling)).done()
    plain = as_model_ids(whole, made[1].config.image_token_id)
    expected, texts = own_logprobs(made, whole[:2], prompts[1][1], plain[2:]), np.flatnonzero(whole[2:] < FIRST_ID)
    np.testing.assert_allclose(np.array(turn.logprobs)[texts], expected[texts], atol=1e-4)
    for client, score, (ids, images) in zip(clients, scores, prompts, strict=True):
        expected = own_logprobs(made, ids, images, client.ids)
        np.testing.assert_allclose(client.logprobs, expected, atol=1e-4)
        np.testing.assert_allclose(score.logprobs, expected[:5], atol=1e-4)
    blind = own_logprobs(made, prompts[2][0], [], clients[0].ids)
    assert np.abs(blind - clients[0].logprobs).max() > 0.01
