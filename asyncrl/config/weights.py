from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge

from asyncrl.config.checks import check_ranges
from asyncrl.ranges import NonNegativeInt, Positive, PositiveInt


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsConfig:
    transport: Literal["ipc", "collective", "disk", "vllm_nccl"] = "ipc"
    """ipc: same node, shared memory or GPU memory. collective: torch.distributed broadcast (nccl on GPU, gloo on CPU).
    disk: safetensors files that all machines see. vllm_nccl: vLLM's own NCCL backend, from GPU to GPU; needs
    rollout.engine=vllm, and verify=off since that backend has no digests."""
    disk_directory: str = ""
    """With transport=disk: where publishes are written, under the same path on every machine. Empty: the system's
    directory for temporary files, which serves one machine."""
    bucket_bytes: Annotated[int, Ge(4096)] = 4 << 20
    """Size of one unit of transfer. Small buckets stay in the CPU's caches; use 256 MiB and more over NCCL."""
    verify: Literal["off", "first", "always"] = "first"
    """When both sides compute a digest of every tensor: never, at the first publish and every verify_every-th one, or
    always."""
    verify_every: PositiveInt = 50
    """With verify=first: publishes between two verified ones."""
    max_retries: NonNegativeInt = 1
    """Times that a replica which got its weights wrong is sent them again before it is replaced."""
    rolling: bool = False
    """Publish to rolling_replicas replicas at a time, so that the others generate meanwhile; the trainer waits for all
    of them. Read in mode fully_async."""
    rolling_replicas: PositiveInt = 1
    """With rolling: replicas that are updated at once."""
    transfer_timeout_s: Positive = 120.0
    """Longest that sending all weights once may take."""
    publish_timeout_s: Positive = 300.0
    """Longest that a whole publish may take, with everything that is sent again."""

    def __post_init__(self) -> None:
        check_ranges("weights.", self)
