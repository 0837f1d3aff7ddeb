"""The facts of a model's config.json that decide whether an engine or a training backend can run the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_LOGIT_TRANSFORMS = (
    "final_logit_softcapping",
    "logits_soft_cap",
    "logit_scale",
    "logits_scaling",
    "lm_head_multiplier",
)
"""Keys of models that change logits after the output layer (Gemma 2, RecurrentGemma, Cohere, Granite, Falcon-H1)."""
_LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Scaling of rotary positions in Llama 3.1 and later, without the factor."""
_OTHER_INPUTS = ("vision_config", "audio_config", "vit_config", "img_processor", "audio_processor", "mm_vision_tower")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_POSITIONS = ("max_position_embeddings", "n_positions")
UNTIED = (
    "config.json ties the output layer to the embedding (tie_word_embeddings), and the files hold another output layer"
)
HOW_TO_TIE = (
    "set tie_word_embeddings to false in config.json if the output layer of the files counts; otherwise save the model "
    "without it"
)
_NOISE = ("dropout", "dropout_prob", "dropout_p", "pdrop", "layerdrop", "jitter_noise")
"""Words in the keys of noise that training code may add: dropout, and jitter of routers."""
_RECURRENT = ("mamba_", "ssm_", "linear_conv_", "lru_", "conv_L_cache", "state_size", "rescale_every")
"""How the keys begin that only models with recurrent layers have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSizes:
    """Sizes for layouts and plans; None if the config lacks them.

    Attributes:
        head_dim: of one attention head; None: the width of the model over its heads.
        ffn, expert_ffn, shared_ffn: widths of the feed-forward block, of an expert and of the expert that every token
            takes.
        expert_layers: numbers of the layers that have experts.
        experts_per_token: how many of a layer's experts a token takes.
        tied: the output layer is the embedding.
    """

    layers: int | None = None
    hidden: int | None = None
    head_dim: int | None = None
    expert_layers: frozenset[int] = frozenset()
    tied: bool = False
    heads: int | None = None
    kv_heads: int | None = None
    ffn: int | None = None
    expert_ffn: int | None = None
    shared_ffn: int | None = None
    experts_per_token: int | None = None


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The facts of `path`; fields after `is_local` are empty if no config was read.

    Attributes:
        architecture: the class name, such as Qwen3ForCausalLM.
        max_position_embeddings: in tokens.
        layer_kinds: as Hugging Face names them: full_attention, sliding_attention, linear_attention, mamba and others.
        changed_logits: `key=value` of each transformation after the output layer.
        changed_attention: the same of attention: soft capping, sinks.
        other_inputs: keys of the parts that read images or sound.
        has_custom_code: the model's class comes with its files.
        unusual: rare variations of a known architecture: another activation, biases, scaled rotary positions.
        quantization: how the weights in the files are quantised, such as fp8 or awq; None: they are not.
        noise: `key=value` of dropout and jitter, which training leaves out (`settle`).
    """

    path: str
    is_local: bool
    architecture: str | None = None
    vocab_size: int | None = None
    max_position_embeddings: int | None = None
    model_type: str | None = None
    layer_kinds: frozenset[str] = frozenset()
    changed_logits: tuple[str, ...] = ()
    changed_attention: tuple[str, ...] = ()
    other_inputs: tuple[str, ...] = ()
    num_experts: int = 0
    is_encoder_decoder: bool = False
    has_custom_code: bool = False
    unusual: tuple[str, ...] = ()
    quantization: str | None = None
    noise: tuple[str, ...] = ()
    sizes: LayerSizes = LayerSizes()

    @property
    def mixing(self) -> str:
        """The layers that carry a state along a packed row, in words; empty without them."""
        kinds = sorted(self.layer_kinds - {"full_attention", "sliding_attention"})
        return f"layers of kind {', '.join(kinds)}" if kinds else ""

    @property
    def padding(self) -> str:
        """Why rows of the model are padded (`trainer/fsdp/proof.py`), in words; empty where that is not known."""
        caps = [f"attention with {change}" for change in self.changed_attention if "capping" in change]
        return ", ".join(filter(None, [self.mixing, *caps]))

    @property
    def name(self) -> str:
        """The model as a message names it."""
        return f"model.path={self.path}" + (f" ({self.architecture})" if self.architecture else "")

    @staticmethod
    def of_config(path: str, config: Mapping[str, Any], *, is_local: bool = True) -> ModelFacts:
        """`config`: the object in config.json."""
        # multimodal models keep the language model's sizes in a section of their own
        text = {**config, **(config.get("text_config") or {})}
        slides = bool(text.get("sliding_window")) and bool(text.get("use_sliding_window", True))
        capping = text.get("attn_logit_softcapping")
        return ModelFacts(
            path,
            is_local,
            architecture=next(iter(config.get("architectures") or ()), None),
            vocab_size=text.get("vocab_size"),
            max_position_embeddings=next((text[key] for key in _POSITIONS if text.get(key)), None),
            model_type=config.get("model_type"),
            layer_kinds=frozenset(_kinds(text, slides=slides)),
            changed_logits=tuple(f"{k}={v}" for k in _LOGIT_TRANSFORMS if (v := text.get(k)) not in (None, 1)),
            changed_attention=(f"attn_logit_softcapping={capping}",) * bool(capping)
            + ("attention sinks",) * (text.get("model_type") == "gpt_oss"),
            other_inputs=tuple(key for key in _OTHER_INPUTS if config.get(key)),
            num_experts=next((text[key] for key in _EXPERTS if text.get(key)), 0),
            is_encoder_decoder=bool(config.get("is_encoder_decoder")),
            has_custom_code=bool(config.get("auto_map")),
            unusual=tuple(_unusual(text)),
            quantization=_quantization(config) or _quantization(text),
            noise=tuple(f"{key}={value:g}" for key, value in sorted(text.items()) if _is_noise(key, value, text)),
            sizes=LayerSizes(
                layers=text.get("num_hidden_layers"),
                hidden=text.get("hidden_size"),
                head_dim=text.get("head_dim"),
                expert_layers=frozenset(expert_layers_of(text)),
                tied=bool(text.get("tie_word_embeddings")),
                heads=text.get("num_attention_heads"),
                kv_heads=text.get("num_key_value_heads") or text.get("num_attention_heads"),
                ffn=text.get("intermediate_size"),
                expert_ffn=text.get("moe_intermediate_size"),
                shared_ffn=text.get("shared_expert_intermediate_size"),
                experts_per_token=text.get("num_experts_per_tok"),
            ),
        )


def settle(config: Any, max_model_len: int | None) -> None:
    """Makes a Hugging Face config describe one function of the tokens, whoever builds the model from it.

    Dropout and jitter become 0, as in sampling. longrope takes its long factors if `max_model_len` is over
    original_max_position_embeddings and its short ones otherwise, as in vLLM; Hugging Face decides by the longest
    position of each pass, so that a sequence would depend on its neighbours in a packed row.

    Args:
        config: changed in place, with its text_config.
        max_model_len: tokens of the longest sequence of the replicas; None leaves longrope as it is.
    """
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        own = part.to_dict()
        part.update({key: 0.0 for key, value in own.items() if _is_noise(key, value, own)})
        found = getattr(part, "rope_parameters", None) or {}
        # one set of parameters, or one for each kind of layer
        for rope in [found, *(value for value in found.values() if isinstance(value, dict))]:
            if rope.get("rope_type") == "longrope" and max_model_len is not None:
                switch = rope.get("original_max_position_embeddings") or part.original_max_position_embeddings
                factors = rope["long_factor" if max_model_len > switch else "short_factor"]
                rope["long_factor"] = rope["short_factor"] = factors


def auto_class(config: Any) -> Any:
    """The class of transformers that builds a model of text from a Hugging Face config: of a causal LM, or of a model
    that reads images too."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    )

    kind = type(config)
    reads_images = kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and kind not in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForImageTextToText if reads_images else AutoModelForCausalLM


def on_meta(config: Any, *, trust_remote_code: bool = False) -> Any:
    """The model of text of a Hugging Face config, on the meta device."""
    import torch

    with torch.device("meta"):
        model = auto_class(config).from_config(config, trust_remote_code=trust_remote_code)
    drop_towers(model)
    return model


def decoder_of(model: Any) -> Any:
    """The layers that text passes: token ids to hidden states."""
    found = model.get_decoder()
    return getattr(model, "model", model) if found is model else found


def drop_towers(model: Any) -> dict[str, Any]:
    """Removes what text never passes, in place: encoders of images and sound, and their projections. Returns the
    removed modules by name."""
    decoder, head = decoder_of(model), model.get_output_embeddings()
    kept = {id(tensor) for part in (decoder, head) if part is not None for tensor in part.parameters()}
    dropped: dict[str, Any] = {}
    for name, module in list(model.named_modules()):
        own = [id(parameter) for parameter in module.parameters()]
        if own and kept.isdisjoint(own) and not name.startswith(tuple(f"{outer}." for outer in dropped)):
            parent, _, last = name.rpartition(".")
            model.get_submodule(parent).register_module(last, None)
            dropped[name] = module
    return dropped


def misfit(model: Any, loaded: Mapping[str, Any]) -> str | None:
    """How the files of a loaded model contradict its config; None if they do not.

    Args:
        model: of Hugging Face.
        loaded: what `from_pretrained` gives with `output_loading_info`.
    """
    missing = sorted(loaded["missing_keys"])
    if missing:
        return f"{len(missing)} of its tensors are in no file, the first is {missing[0]}: they would be random"
    head = model.get_output_embeddings()
    tied = getattr(model.config.get_text_config(), "tie_word_embeddings", False)
    if tied and head is not None and head.weight is not model.get_input_embeddings().weight:
        return UNTIED
    return None


def _is_noise(key: str, value: object, text: Mapping[str, Any]) -> bool:
    if (text.get("model_type"), key) == ("phimoe", "router_jitter_noise"):
        return False  # a threshold of its routers, which sampling has too
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and value != 0 and key.endswith(_NOISE)


def expert_layers_of(text: Mapping[str, Any]) -> list[int]:
    """Numbers of the layers with experts, by Qwen's keys; all layers of other mixtures. `text`: the language model's
    part of config.json."""
    dense, step = set(text.get("mlp_only_layers") or ()), text.get("decoder_sparse_step") or 1
    layers = range(text.get("num_hidden_layers") or 0) if any(text.get(key) for key in _EXPERTS) else ()
    return [layer for layer in layers if layer not in dense and (layer + 1) % step == 0]


def _quantization(text: Mapping[str, Any]) -> str | None:
    found = text.get("quantization_config") or text.get("compression_config")
    return str(found.get("quant_method") or "an unnamed method") if isinstance(found, Mapping) and found else None


def _unusual(text: Mapping[str, Any]) -> Iterator[str]:
    activation = text.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        yield f"hidden_act={activation}"
    yield from (f"{key}=true" for key in ("attention_bias", "mlp_bias") if text.get(key))
    rope = text.get("rope_scaling") or text.get("rope_parameters") or {}  # as in Hugging Face, where both are there
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind != "default" and not (kind == "llama3" and _LLAMA_3.items() <= rope.items()):
        yield f"rotary positions of kind {kind}"
    if any((found.get("partial_rotary_factor") or 1) != 1 for found in (text, rope)):
        yield "rotary positions of a part of each head"


def _kinds(text: Mapping[str, Any], *, slides: bool) -> Iterator[str]:
    """The kinds of layers. Configs of models with one kind do not name it; it follows from a window or keys of
    recurrent layers."""
    # Newer configs name each layer; the keys of recurrent layers differ per family.
    named = text.get("layer_types") or text.get("layers_block_type") or text.get("block_types")
    if named:
        yield from ("full_attention" if kind == "attention" else str(kind) for kind in named)
    elif recurrent := next((key for key, value in text.items() if value and key.startswith(_RECURRENT)), None):
        yield "mamba" if recurrent.startswith(("mamba_", "ssm_", "state_size")) else "recurrent"
    else:
        yield "sliding_attention" if slides else "full_attention"
