"""Every family of models that people train, tiny: how it is trained, whether the embedded engine samples from it, and
the names of its tensors. What is found here stands in docs/models.md."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig

from asyncrl.config.model import ModelConfig
from asyncrl.config.rollout import TorchEngineConfig
from asyncrl.errors import ConfigError, GenerationError
from asyncrl.inference.torch_engine.runner import ModelRunner, load_model
from asyncrl.kernels.routers import RouterTaps
from asyncrl.trainer.fsdp.attention import PACKED_SDPA, register_packed_attention
from asyncrl.trainer.fsdp.model import check_supported
from asyncrl.trainer.fsdp.proof import prove, prove_choices
from asyncrl.types import auto_class, decoder_of, drop_towers, settle
from asyncrl.weights.stored_layout import StoredLayout

ROOT = Path(__file__).parents[2]
CONFIGS = json.loads((ROOT / "tests/families.json").read_text())
FOUND = json.loads((ROOT / "benchmarks/results/models.json").read_text())
LENGTH = 256


def model_of(name):
    """Random weights, all perturbed: what is forgotten or misplaced shows."""
    config = AutoConfig.for_model(**CONFIGS[name])
    settle(config, LENGTH)
    torch.manual_seed(0)
    model = auto_class(config).from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, p in model.named_parameters():
            if "A_log" not in key and "conv" not in key:
                p.add_(0.05 * torch.randn(p.shape, generator=draw))
    return model


def trainer_of(model):
    """How rows pass through the model, as docs/models.md says it; or the error."""
    try:
        drop_towers(model)
        check_supported(model)
        way = prove(model, PACKED_SDPA)
        StoredLayout.of(model)
        if (taps := RouterTaps(model)).layers:
            prove_choices(model, way, taps)
            assert replays(model, taps)
    except ConfigError as error:
        return str(error).split("found: ")[1].split("\n")[0]
    return f"padded, {way.attention}" if way.pads else "packed"


def replays(model, taps):
    """Other experts than the model's own are taken, and the routers' gradient flows through their weights."""
    ids = torch.arange(3, 12)[None]
    model.set_attn_implementation("eager")
    with torch.no_grad(), taps.recorded() as own:
        first = decoder_of(model)(input_ids=ids, use_cache=False).last_hidden_state
    taps.experts = torch.stack([(c.experts + 1) % taps.num_experts for c in own], 1)
    taken = []
    for name, module in decoder_of(model).named_modules():
        if name.endswith(".experts"):
            module.register_forward_pre_hook(
                lambda _, args, words: taken.append([*args, *words.values()]), with_kwargs=True
            )
    with taps.recorded() as again:
        other = decoder_of(model)(input_ids=ids, use_cache=False).last_hidden_state
    through, taps.experts = taps.experts, None
    for place, tensors in enumerate(taken):
        named = [t for t in tensors if not t.is_floating_point()]  # Llama 4's experts get weights of all tokens
        assert all(torch.equal(t.view(9, -1).sort(-1).values, through[:, place].sort(-1).values) for t in named)
    (gradient,) = torch.autograd.grad(other.square().sum(), again[0].scores, retain_graph=True, allow_unused=True)
    assert gradient is None or gradient.abs().max() > 0
    return not torch.allclose(first, other, atol=1e-3)


def engine_of(truth, path):
    """Largest difference of the embedded engine's log-probabilities from the model's own; or the error."""
    prompts = [np.arange(3, 3 + n, dtype=np.int32) * 7 % 180 for n in (37, 9)]
    config = ModelConfig(path=str(path))
    served = load_model(config, torch.device("cpu"), max_model_len=LENGTH, real_weights=True, seed=0)
    try:
        runner = ModelRunner(served, TorchEngineConfig(num_slots=2, max_model_len=LENGTH), prefill_tokens=16)
    except GenerationError as error:
        return str(error).split("found: ")[1].split("\n")[0]
    with torch.inference_mode():
        runner.warm_up()
        waves = [[0], [1]] if runner.needs_equal_lengths else [[0, 1]]
        for rows in waves:
            prefill = runner.begin([prompts[row][:-1] for row in rows])
            while not prefill.finished:
                runner.prefill(prefill)
            runner.seat(prefill, list(range(len(rows))), rows)
        last, lengths = np.array([p[-1] for p in prompts], np.int64), np.array([len(p) - 1 for p in prompts])
        texts = [list(prompt) for prompt in prompts]
        worst = 0.0
        for _ in range(3):
            logits = runner.decode(last, lengths)
            for row, text in enumerate(texts):
                own = truth(input_ids=torch.tensor([text], dtype=torch.int64), use_cache=False).logits[0, -1].float()
                worst = max(worst, float((own.log_softmax(-1) - logits[row].log_softmax(-1)).abs().max()))
            last, lengths = logits.argmax(-1).numpy(), lengths + 1
            for text, token in zip(texts, last, strict=True):
                text.append(int(token))
    return worst


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_a_family_is_trained_and_sampled_as_the_documents_say(name, tmp_path):
    register_packed_attention()
    model = model_of(name)
    model.save_pretrained(tmp_path)
    # The embedded engine: refused by name, or the same log-probabilities.
    found = engine_of(model, tmp_path)
    assert FOUND[name]["torch"] == (found if isinstance(found, str) else "yes")
    assert isinstance(found, str) or found < 1e-4
    # The trainer: refused by name, or in a way that was proven, and with the names of the files.
    assert trainer_of(model) == FOUND[name]["trainer"]
    if FOUND[name]["trainer"].startswith(("packed", "padded")):
        stored = {}
        for file in tmp_path.glob("*.safetensors"):
            with safe_open(file, "pt") as tensors:
                stored |= {key: tuple(tensors.get_slice(key).get_shape()) for key in tensors.keys()}  # noqa: SIM118
        shapes = StoredLayout.of(model).shapes
        assert {name: stored.get(name) for name in shapes} == shapes
