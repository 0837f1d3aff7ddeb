"""Megatron-core's parallel groups and model. All unstable upstream interfaces are called here and in `optimizer.py`.

The model is built from Megatron-core's own layers ("local"), without TransformerEngine and Apex, with two modules of
ours: torch's RMSNorm, which the local norm refuses under sequence parallelism, and attention over packed sequences.
With `trainer.megatron.layers=transformer_engine` it is built from TransformerEngine's layers, under the same names.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec, get_mlp_module_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from torch import nn

from asyncrl.config.trainer import TrainerConfig
from asyncrl.trainer.megatron.names import Coordinates, LocalTensor, describe
from asyncrl.trainer.megatron.routing import RouterHooks
from asyncrl.trainer.megatron.rows import PackedAttention, RowAngles
from asyncrl.trainer.megatron.sizes import ModelSizes


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """This rank's parallel groups. `tensor`, `context` and `pipeline`: the ranks that share its plan; `data`: one rank
    of each plan."""

    tensor: dist.ProcessGroup
    context: dist.ProcessGroup
    pipeline: dist.ProcessGroup
    data: dist.ProcessGroup
    coordinates: Coordinates


def join_groups(trainer: TrainerConfig) -> Groups:
    """Creates Megatron-core's parallel groups over all ranks, or reuses this process's groups; collective.

    Raises:
        RuntimeError: this process has groups of another layout.
    """
    layout = trainer.megatron
    parallel: Any = parallel_state  # its getters are typed too widely
    chunks = layout.chunks_per_stage if layout.chunks_per_stage > 1 else None
    wanted = (layout.tensor_parallel, layout.pipeline_parallel, layout.expert_parallel, layout.experts_split_by, chunks)
    wanted += (layout.context_parallel,)
    if not parallel.model_parallel_is_initialized():
        parallel.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor_parallel,
            pipeline_model_parallel_size=layout.pipeline_parallel,
            virtual_pipeline_model_parallel_size=chunks,
            expert_model_parallel_size=layout.expert_parallel,
            expert_tensor_parallel_size=layout.experts_split_by,
            context_parallel_size=layout.context_parallel,
            distributed_timeout_minutes=timedelta(seconds=trainer.collective_timeout_s) / timedelta(minutes=1),
            create_gloo_process_groups=False,
        )
        model_parallel_cuda_manual_seed(0, inference_rng_tracker=True)  # dropout is off: a tracker without effect
    # Groups of an earlier model in this process serve again only if the layout is the same.
    found = (
        parallel.get_tensor_model_parallel_world_size(),
        parallel.get_pipeline_model_parallel_world_size(),
        parallel.get_expert_model_parallel_world_size(),
        parallel.get_expert_tensor_parallel_world_size(),
        parallel.get_virtual_pipeline_model_parallel_world_size(),
        parallel.get_context_parallel_world_size(),
    )
    if found != wanted:
        raise RuntimeError(
            f"this process has parallel groups of (TP, PP, EP, ETP, VPP, CP) {found}, asked for {wanted}"
        )
    coordinates = Coordinates(
        tensor=parallel.get_tensor_model_parallel_rank(),
        num_tensor=found[0],
        expert_tensor=parallel.get_expert_tensor_parallel_rank(),
        num_expert_tensor=found[3],
        expert=parallel.get_expert_model_parallel_rank(),
        num_expert=found[2],
    )
    return Groups(
        parallel.get_tensor_model_parallel_group(),
        parallel.get_context_parallel_group(),
        parallel.get_pipeline_model_parallel_group(),
        parallel.get_data_parallel_group(),
        coordinates,
    )


def transformer_config(
    sizes: ModelSizes, trainer: TrainerConfig, *, dtype: torch.dtype, on_cpu: bool, recompute: bool = True
) -> TransformerConfig:
    """Megatron-core's config of a model. `recompute`: as in the recipe; False: never."""
    # Recompute: full keeps only the input of each layer, selective only drops attention's intermediates.
    megatron = trainer.megatron
    again: dict[str, Any] = {}
    if recompute and trainer.recompute == "full":
        again = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    elif recompute and trainer.recompute == "selective":
        again = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    # Megatron-core's own balancing is off: `routing.py` adds the balance of the whole update.
    experts: dict[str, Any] = {}
    if sizes.num_experts:
        experts = {
            "num_moe_experts": sizes.num_experts,
            "moe_ffn_hidden_size": sizes.expert_size,
            "moe_router_topk": sizes.experts_per_token,
            "moe_router_pre_softmax": not sizes.normalizes_experts,
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_router_dtype": "fp32",
            "moe_shared_expert_intermediate_size": sizes.shared_expert_size or None,
            "moe_shared_expert_gate": sizes.shared_expert_size > 0,
        }
    chunks = megatron.chunks_per_stage
    return TransformerConfig(
        num_layers=sizes.num_layers,
        hidden_size=sizes.hidden_size,
        num_attention_heads=sizes.num_heads,
        num_query_groups=sizes.num_kv_heads,
        kv_channels=sizes.head_dim,
        ffn_hidden_size=sizes.ffn_size,
        normalization="RMSNorm",
        layernorm_epsilon=sizes.norm_epsilon,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=sizes.qkv_bias,
        qk_layernorm=sizes.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=on_cpu,
        transformer_impl=megatron.layers,
        perform_initialization=False,
        tensor_model_parallel_size=megatron.tensor_parallel,
        pipeline_model_parallel_size=megatron.pipeline_parallel,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        context_parallel_size=megatron.context_parallel,
        expert_model_parallel_size=megatron.expert_parallel,
        expert_tensor_parallel_size=trainer.megatron.experts_split_by,
        sequence_parallel=megatron.sequence_parallel and megatron.tensor_parallel > 1,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # the only one for rows of any length, with or without experts
        calculate_per_token_loss=True,  # gradients are summed over ranks and never averaged
        batch_p2p_comm=chunks == 1,
        overlap_p2p_comm=chunks > 1,
        batch_p2p_sync=False,
        persist_layer_norm=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        **again,
        **experts,
    )


class DecoderChunk(GPTModel):
    """One chunk of a model: its layers, the embedding in the first chunk, the final norm and the head in the last.

    The last chunk returns hidden states: `models.py` applies the head, `output_layer` or `value_head`, to predicted
    tokens only.
    """

    def __init__(self, sizes: ModelSizes, config: TransformerConfig, *, critic: bool, chunk: int) -> None:
        staged = config.virtual_pipeline_model_parallel_size is not None
        stage = chunk if staged else None
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage)
        super().__init__(
            config=config,
            transformer_layer_spec=_block(sizes, config, stage),  # pyright: ignore[reportArgumentType] upstream takes both
            vocab_size=sizes.padded_vocabulary(config.tensor_model_parallel_size),
            max_sequence_length=sizes.max_positions,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=last,
            parallel_output=True,
            share_embeddings_and_output_weights=sizes.tied and not critic,
            position_embedding_type="rope",
            rotary_base=sizes.rope_base,  # pyright: ignore[reportArgumentType] a float works
            rope_scaling=sizes.rope_factor is not None,
            rope_scaling_factor=sizes.rope_factor or 1.0,
            vp_stage=stage,
        )
        if config.transformer_impl == "local":
            self.rotary_pos_emb = RowAngles(self.rotary_pos_emb.inv_freq)  # pyright: ignore[reportArgumentType] a tensor
        self.first_layer = get_transformer_layer_offset(config, stage)
        if critic and last:
            del self.output_layer
            self.value_head = nn.Linear(sizes.hidden_size, 1, device=_device(config))

    def watch_routers(self, sizes: ModelSizes) -> None:
        """Makes the routers of this chunk fill the `routing` of rows and take their `experts`."""
        places = {number: place for place, number in enumerate(sorted(sizes.expert_layers))}
        for number, layer in enumerate(self.decoder.layers, self.first_layer):
            if number in places:
                RouterHooks(places[number], layer)

    def _postprocess(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden_states

    def output_weight(self) -> torch.Tensor:
        """[rows of this rank, hidden size]: of the output layer, possibly the embedding."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight  # pyright: ignore[reportReturnType]


def build_chunks(
    sizes: ModelSizes, config: TransformerConfig, at: Coordinates, *, critic: bool = False
) -> list[tuple[DecoderChunk, dict[str, LocalTensor]]]:
    """This rank's chunks with uninitialised weights on its device, and the contents of each of their parameters."""
    chunks = []
    for number in range(config.virtual_pipeline_model_parallel_size or 1):
        chunk = DecoderChunk(sizes, config, critic=critic, chunk=number)
        if _device(config).type == "cuda":
            chunk.cuda()
        contents = {}
        for name, parameter in chunk.named_parameters():
            found = describe(name, sizes, at, chunk.first_layer)
            contents[name] = found
            # Megatron-core sets these only when it draws the weights; the gradient norm depends on them.
            parameter.tensor_model_parallel = found.is_split  # pyright: ignore[reportAttributeAccessIssue]
            parameter.partition_dim = found.dim if found.is_split else -1  # pyright: ignore[reportAttributeAccessIssue]
            parameter.partition_stride = 1  # pyright: ignore[reportAttributeAccessIssue]
        chunks.append((chunk, contents))
    return chunks


def gathered(hidden: torch.Tensor, config: TransformerConfig, *, partial_gradients: bool) -> torch.Tensor:
    """[N, hidden size]: the rows of all tensor-parallel ranks.

    Args:
        hidden: [N, 1, hidden size], or this rank's part of the rows under sequence parallelism.
        partial_gradients: each rank computes only its share of the result's gradient, and the shares are summed; False:
            each computes all of it.
    """
    if config.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=partial_gradients)
    elif partial_gradients:
        hidden = copy_to_tensor_model_parallel_region(hidden)
    return hidden[:, 0]


class Norm(nn.RMSNorm):
    """torch's RMSNorm with Megatron-core's arguments. Under sequence parallelism its gradient is summed over the
    tensor-parallel ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **kwargs: Any) -> None:
        super().__init__(hidden_size, eps=eps, device=_device(config), dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]


def _block(sizes: ModelSizes, config: TransformerConfig, stage: int | None) -> TransformerBlockSubmodules:
    first, count = get_transformer_layer_offset(config, stage), get_num_layers_to_build(config, stage)
    made, norm = _layer, Norm
    if config.transformer_impl == "transformer_engine":
        from megatron.core.extensions.transformer_engine import TENorm  # its import needs the package

        made, norm = _engine_layer, TENorm
    layers = [made(sizes, experts=number in sizes.expert_layers) for number in range(first, first + count)]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)  # pyright: ignore[reportArgumentType] a module class works


def _engine_layer(sizes: ModelSizes, *, experts: bool) -> ModuleSpec:
    """TransformerEngine's layer, whose attention reads the boundaries of packed rows and splits them over
    context-parallel ranks in the way of `split_row`."""
    return get_gpt_layer_with_transformer_engine_spec(
        num_experts=sizes.num_experts if experts else None, moe_grouped_gemm=False, qk_layernorm=sizes.qk_norm
    )


def _layer(sizes: ModelSizes, *, experts: bool) -> ModuleSpec:
    norm: Any = Norm
    attention: Any = PackedAttention
    add: Any = get_bias_dropout_add
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=ColumnParallelLinear,
                    core_attention=attention,
                    linear_proj=RowParallelLinear,
                    q_layernorm=norm if sizes.qk_norm else IdentityOp,
                    k_layernorm=norm if sizes.qk_norm else IdentityOp,
                ),
            ),
            self_attn_bda=add,
            pre_mlp_layernorm=norm,
            mlp=get_mlp_module_spec(use_te=False, num_experts=sizes.num_experts if experts else None),
            mlp_bda=add,
        ),
    )


def _device(config: TransformerConfig) -> torch.device:
    return torch.device("cpu") if config.use_cpu_initialization else torch.device("cuda", torch.cuda.current_device())
