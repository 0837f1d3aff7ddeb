from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeVar

from annotated_types import Ge, Lt

from asyncrl.config.checks import require, require_device, section
from asyncrl.errors import ConfigError, explain
from asyncrl.ranges import NonNegative, NonNegativeInt, Positive, PositiveInt, Share


@section("trainer.fsdp.")
class FsdpConfig:
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute dtype of forward and backward, and dtype of frozen weights (a reference, the base of adapters). Trained
    weights and optimizer stay float32."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which gradients are reduced."""
    head_dtype: Literal["param", "float32"] = "param"
    """Dtype of the logits. float32: computed from hidden states and output matrix in param_dtype, without rounding the
    sums. Replicas should do the same: with vLLM rollout.vllm.engine_args.hf_overrides={head_dtype: float32}. It has no
    effect with float32 passes."""
    shard_ranks: PositiveInt | None = None
    """Ranks that hold one copy of the model together; the copies average their gradients once an update. With the ranks
    of a node, only that average goes over the network between nodes. It divides num_ranks. None: all ranks hold one."""
    context_parallel: PositiveInt = 1
    """Ranks that share the tokens of each packed row, for sequences too long for one: each holds the activations of its
    part, and attention exchanges tokens for heads (Ulysses). It divides num_ranks and the attention heads, and divides
    the key-value heads or is a multiple of them. A micro-batch then belongs to these ranks together."""
    reduce_every_microbatch: bool = True
    """Reduce gradients to shards after each micro-batch. False reduces them once an update: less traffic, but until
    then each rank holds float32 gradients of the whole model."""
    reshard_after_forward: bool = True
    """Free the gathered parameters after the forward pass and gather them again for the backward pass."""
    offload_parameters: bool = False
    """Keep parameters, gradients and optimizer in host memory, and gather each layer when needed."""
    offload_optimizer: bool = False
    """Keep the optimizer's state in host memory between steps."""
    attention: Literal["auto", "packed_sdpa", "varlen", "flash_attention_2"] = "auto"
    """How packed sequences attend only to themselves. packed_sdpa: torch's attention over padded classes of similar
    length. varlen: torch's kernel for sequences of different lengths; it needs bfloat16 and a GPU of Ampere or later.
    auto takes varlen with FlashAttention 4 if that is installed, else flash_attention_2 if installed, else varlen if
    supported."""
    share_prompts: bool = True
    """Compute the prompt of a group once for all of its trajectories in a micro-batch. The gradient is the same. It
    needs attention packed_sdpa or varlen, and no router loss; otherwise each trajectory has its own prompt. Where
    attention=auto may take another one (bfloat16 on GPUs), groups are not kept together for it: set one of the two."""


@section("trainer.megatron.")
class MegatronConfig:
    tensor_parallel: PositiveInt = 1
    """Ranks that split each matrix. It divides the heads and the feed-forward width."""
    pipeline_parallel: PositiveInt = 1
    """Ranks that hold one stage of the layers each. With chunks_per_stage it divides the layers."""
    chunks_per_stage: PositiveInt = 1
    """Parts of a stage, with parts of other stages between them (virtual pipeline): shorter waits, more transfers."""
    context_parallel: PositiveInt = 1
    """Ranks that split each sequence, for long ones."""
    expert_parallel: PositiveInt = 1
    """Ranks that hold different experts of a mixture. It divides the experts."""
    expert_tensor_parallel: PositiveInt | None = None
    """Ranks that split each expert. None takes tensor_parallel."""
    sequence_parallel: bool = True
    """With tensor_parallel above 1, norms and residuals are split by token too: less memory. A mixture needs it."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the weights in forward and backward; master weights and optimizer are float32."""
    layers: Literal["local", "transformer_engine"] = "local"
    """local: Megatron-core's own layers. transformer_engine: faster ones, which need that package and CUDA."""
    offload_optimizer: bool = False
    """Keep moments, and the master weights of bfloat16 weights, in host memory between steps."""

    @property
    def experts_split_by(self) -> int:
        """`expert_tensor_parallel`, set or derived."""
        return self.tensor_parallel if self.expert_tensor_parallel is None else self.expert_tensor_parallel

    def __post_init__(self) -> None:
        if self.chunks_per_stage != 1 and self.pipeline_parallel <= 1:
            found = "trainer.megatron.pipeline_parallel=1: there are no other stages to interleave with"
            do = "set chunks_per_stage to 1, or pipeline_parallel to 2 or more"
            raise ConfigError(explain(f"trainer.megatron.chunks_per_stage={self.chunks_per_stage}", found, do))


@section("trainer.lora.")
class LoraConfig:
    rank: NonNegativeInt = 0
    """Rank of the adapters; 0 trains all weights."""
    alpha: Positive = 32.0
    """Adapters are scaled by alpha / rank."""
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Share of an adapter's inputs that is dropped in training."""
    target_modules: list[str] = field(default_factory=lambda: ["all-linear"])
    """Modules that get an adapter, by the end of their name; all-linear takes every linear layer except the output. The
    experts of a mixture and their router are not linear layers and get none."""

    def __post_init__(self) -> None:
        if not self.target_modules:
            do = "name some, or all-linear"
            raise ConfigError(explain("trainer.lora.target_modules=[]", "no module would get an adapter", do))


@section("trainer.")
class TrainerConfig:
    num_ranks: PositiveInt = 1
    """Ranks, one process each. Backend fsdp: each, or each fsdp.context_parallel of them, has micro-batches of its own.
    Backend megatron: tensor_parallel x context_parallel x pipeline_parallel of them hold one copy of the model."""
    backend: Literal["fsdp", "megatron"] = "fsdp"
    """fsdp: FSDP2 over torch.distributed. megatron: Megatron-core, for models that need tensor, pipeline or expert
    parallelism (docs/megatron.md)."""
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    """Settings of backend fsdp."""
    megatron: MegatronConfig = field(default_factory=MegatronConfig)
    """Settings of backend megatron."""
    device: str = "auto"
    """auto takes cuda where there is one."""
    num_threads: PositiveInt | None = None
    """CPU threads of a rank; with a GPU they read models, copy weights and step an optimizer in host memory. None takes
    the rank's share of its node's cores: of all cores in mode sync or with placement=colocated, where replicas are
    idle, otherwise of the cores that replicas leave."""
    lr: Positive = 1e-6
    """Peak learning rate of AdamW."""
    warmup_steps: NonNegativeInt = 0
    """The learning rate rises linearly over these steps."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up the learning rate stays constant, or falls to min_lr_fraction of lr by step decay_steps."""
    decay_steps: int | None = None
    """Step at which a falling learning rate reaches its end. None takes run.max_steps: a resumed run with another
    run.max_steps then follows another curve, and the rate jumps (the log says so)."""
    min_lr_fraction: Share = 0.0
    """Final value of a falling learning rate, as a share of lr."""
    recompute: Literal["auto", "none", "selective", "full"] = "auto"
    """Recomputed in the backward pass: nothing; all of a layer but its attention (backend megatron: attention alone);
    each layer. auto: the first of these with which the micro-batch fits into a rank's memory; full where a GPU's memory
    is not known (ray.gpu_memory_gib), or the passes' are not (backend megatron on GPUs)."""
    compile: bool = False
    """Compile each decoder layer with torch.compile."""
    packing: Literal["auto", "packed", "padded"] = "auto"
    """Backend fsdp: how the sequences of a micro-batch pass through the model. packed: in one row. padded: one below
    the other, filled up to the longest. auto: packed where a test at the start shows that they do not see each other,
    else padded. The other two are tested too."""
    router_replay: Literal["off", "rollout"] = "off"
    """Mixtures of experts: the choice of experts in training. off: by the trainer's routers. rollout: as the engine
    chose when it sampled, weighted by the trainer's routers; prompts and the environment's tokens use the trainer's
    choice. Engine torch (docs/algorithms.md)."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Low-rank adapters instead of all weights; a publish then sends the adapters only."""
    weight_decay: NonNegative = 0.0
    """Weight decay of matrices; norms and biases are not decayed."""
    adam_beta1: Annotated[float, Ge(0), Lt(1)] = 0.9
    """Decay of the running mean of gradients."""
    adam_beta2: Annotated[float, Ge(0), Lt(1)] = 0.95
    """Decay of the running mean of squared gradients."""
    adam_eps: Positive = 1e-8
    """Added to the denominator of the update."""
    max_grad_norm: NonNegative = 1.0
    """Gradients are scaled down to this global norm; 0 switches clipping off."""
    max_tokens_per_microbatch: PositiveInt | None = None
    """Token budget (prompt and response) of one forward pass on one rank, or on the ranks that share it
    (context_parallel). None takes 8192, or less where a rank's memory does not hold that; the longest trajectory at
    least."""
    step_timeout_s: Positive = 3600.0
    """Longest time for one optimizer step, and for reading the trainer's part of a checkpoint."""
    collective_timeout_s: Positive = 600.0
    """Longest wait of one torch.distributed operation for a peer. At the start, ranks wait this long for the rank that
    reads the models."""

    @property
    def shard_ranks(self) -> int:
        """`fsdp.shard_ranks`, set or derived."""
        return self.fsdp.shard_ranks or self.num_ranks

    @property
    def layout(self) -> Layout:
        """The parallel layout of the ranks."""
        if self.backend == "fsdp":
            return Layout(self.num_ranks, context=self.fsdp.context_parallel)
        megatron = self.megatron
        return Layout(self.num_ranks, megatron.tensor_parallel, megatron.context_parallel, megatron.pipeline_parallel)

    def __post_init__(self) -> None:
        if self.backend == "megatron":
            self._check_megatron()
        else:
            self._check_context()
        if self.num_ranks % self.shard_ranks != 0:
            found = f"it does not divide trainer.num_ranks={self.num_ranks}"
            do = "set it to the number of ranks of a node, or leave it out"
            raise ConfigError(explain(f"trainer.fsdp.shard_ranks={self.fsdp.shard_ranks}", found, do))
        require_device("trainer.device", self.device)
        if self.decay_steps is not None and self.decay_steps <= self.warmup_steps:
            asked = f"trainer.decay_steps={self.decay_steps} with trainer.warmup_steps={self.warmup_steps}"
            do = "set trainer.decay_steps above trainer.warmup_steps"
            raise ConfigError(explain(asked, "the learning rate would end before it has risen", do))
        if self.decay_steps is not None and self.schedule == "constant":
            asked = f"trainer.decay_steps={self.decay_steps} with trainer.schedule=constant"
            do = "set trainer.schedule=linear or cosine, or leave trainer.decay_steps out"
            raise ConfigError(explain(asked, "a constant learning rate does not fall", do))

    def _check_context(self) -> None:
        """Checks independent of the model; `trainer/fsdp/supports.py` checks the heads."""
        ranks, asked = self.fsdp.context_parallel, f"trainer.fsdp.context_parallel={self.fsdp.context_parallel}"
        if self.num_ranks % ranks != 0:
            do = f"set trainer.num_ranks to a multiple of {ranks}, or context_parallel to a divisor of it"
            raise ConfigError(explain(asked, f"it does not divide trainer.num_ranks={self.num_ranks}", do))
        if ranks != 1 and self.fsdp.attention == "flash_attention_2":
            found = "that attention does not exchange tokens for heads"
            do = "leave trainer.fsdp.attention out, or set it to packed_sdpa or varlen"
            raise ConfigError(explain(f"{asked} with trainer.fsdp.attention=flash_attention_2", found, do))

    def _check_megatron(self) -> None:
        """Checks independent of the model; `trainer/megatron/supports.py` does the rest."""
        nothing = "this backend trains all weights and compiles nothing"
        other, leave = "it is of the other backend", "leave it out, or set trainer.backend=fsdp"
        ranks, dtype = self.fsdp.context_parallel, self.fsdp.head_dtype
        instead = f"set trainer.megatron.context_parallel={ranks} in its place"
        for key, is_set, found, do in (
            ("trainer.lora.rank", self.lora.rank > 0, nothing, leave),
            ("trainer.compile", self.compile, nothing, leave),
            (f"trainer.fsdp.context_parallel={ranks}", ranks > 1, other, instead),
            (f"trainer.fsdp.head_dtype={dtype}", dtype != "param", other, leave),
        ):
            if is_set:
                raise ConfigError(explain(f"{key} with trainer.backend=megatron", found, do))
        if self.megatron.layers != "local" and self.device != "auto" and not self.device.startswith("cuda"):
            asked = f"trainer.megatron.layers=transformer_engine with trainer.device={self.device}"
            do = "set trainer.megatron.layers=local, or trainer.device=cuda"
            raise ConfigError(explain(asked, "TransformerEngine computes on CUDA devices only", do))
        megatron, ranks = self.megatron, self.num_ranks
        of_model = self.layout.num_ranks // self.layout.num_plans
        of_experts = megatron.expert_parallel * megatron.experts_split_by * megatron.pipeline_parallel
        require(
            ranks % of_experts == 0,
            asked=f"trainer.num_ranks={ranks}",
            found=f"the experts take {of_experts} ranks: expert {megatron.expert_parallel} x expert tensor "
            f"{megatron.experts_split_by} x pipeline {megatron.pipeline_parallel}",
            do=f"set trainer.num_ranks to a multiple of {math.lcm(of_model, of_experts)}, or "
            "trainer.megatron.expert_parallel lower",
        )


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Layout:
    """Assigns `num_ranks` trainer ranks to plans: ranks with the same data-parallel index (the tensor-, context- and
    pipeline-parallel parts of one copy of the model) train the same micro-batches.

    Ranks are in Megatron's order: tensor varies fastest, then context, data, pipeline.
    """

    num_ranks: int
    tensor: int = 1
    context: int = 1
    pipeline: int = 1

    def __post_init__(self) -> None:
        copy = self.tensor * self.context * self.pipeline
        if min(self.tensor, self.context, self.pipeline) < 1 or self.num_ranks % copy != 0:
            found = (
                f"a copy of the model takes {copy} ranks: tensor {self.tensor} x context {self.context} x pipeline "
                f"{self.pipeline}"
            )
            do = f"set trainer.num_ranks to a multiple of {copy}"
            raise ConfigError(explain(f"trainer.num_ranks={self.num_ranks}", found, do))

    @property
    def num_plans(self) -> int:
        """Data-parallel size: the number of plans per step."""
        return self.num_ranks // (self.tensor * self.context * self.pipeline)

    def plan_of(self, rank: int) -> int:
        """The rank's data-parallel index."""
        return rank // (self.tensor * self.context) % self.num_plans

    def by_rank(self, plans: Sequence[T]) -> list[T]:
        """The plan of each rank. Raises ValueError: the number of plans is not `num_plans`."""
        if len(plans) != self.num_plans:
            raise ValueError(f"{len(plans)} plans for {self.num_plans} data-parallel indices of trainer ranks")
        return [plans[self.plan_of(rank)] for rank in range(self.num_ranks)]
