from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from asyncrl.config.checks import require_at_least, require_positive


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsConfig:
    transport: Literal["ipc", "collective", "disk", "vllm_nccl"] = "ipc"
    """ipc: same node, shared memory or GPU memory. collective: torch.distributed broadcast (nccl on GPU, gloo on CPU).
    disk: safetensors files that all machines see. vllm_nccl: vLLM's own NCCL backend, from GPU to GPU; needs
    rollout.engine=vllm, and verify=off since that backend has no digests."""
    disk_directory: str = ""
    """With transport=disk: where publishes are written, under the same path on every machine. Empty: the system's
    directory for temporary files, which serves one machine."""
    bucket_bytes: int = 4 << 20
    """Size of one unit of transfer. Small buckets stay in the CPU's caches; use 256 MiB and more over NCCL."""
    verify: Literal["off", "first", "always"] = "first"
    """When both sides compute a digest of every tensor: never, at the first publish and every verify_every-th one, or
    always."""
    verify_every: int = 50
    """With verify=first: publishes between two verified ones."""
    max_retries: int = 1
    """Times that a replica which got its weights wrong is sent them again before it is replaced."""
    rolling: bool = False
    """Publish to rolling_replicas replicas at a time, so that the others generate meanwhile; the trainer waits for all
    of them. Read in mode fully_async."""
    rolling_replicas: int = 1
    """With rolling: replicas that are updated at once."""
    transfer_timeout_s: float = 120.0
    """Longest that sending all weights once may take."""
    publish_timeout_s: float = 300.0
    """Longest that a whole publish may take, with everything that is sent again."""

    def __post_init__(self) -> None:
        require_at_least("weights.bucket_bytes", self.bucket_bytes, 4096)
        require_at_least("weights.verify_every", self.verify_every, 1)
        require_at_least("weights.max_retries", self.max_retries, 0)
        require_at_least("weights.rolling_replicas", self.rolling_replicas, 1)
        require_positive("weights.transfer_timeout_s", self.transfer_timeout_s)
        require_positive("weights.publish_timeout_s", self.publish_timeout_s)
