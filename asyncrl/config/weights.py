from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from asyncrl.config.checks import require_at_least, require_positive


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsConfig:
    transport: Literal["ipc", "collective"] = "ipc"
    """ipc: same node, shared memory. collective: torch.distributed broadcast (nccl on GPU, gloo on CPU)."""
    bucket_bytes: int = 4 << 20
    """Size of one unit of transfer. Small buckets stay in the CPU's caches; use 256 MiB and more over NCCL."""
    verify: Literal["off", "first", "always"] = "first"
    """When both sides compute a digest of every tensor: never, at the first publish and every verify_every-th one, or
    always."""
    verify_every: int = 50
    """With verify=first: publishes between two verified ones."""
    max_retries: int = 1
    """Times that a publish whose digest differs is sent again before the run stops."""
    publish_timeout_s: float = 300.0
    """Longest that a whole publish may take."""

    def __post_init__(self) -> None:
        require_at_least("weights.bucket_bytes", self.bucket_bytes, 4096)
        require_at_least("weights.verify_every", self.verify_every, 1)
        require_at_least("weights.max_retries", self.max_retries, 0)
        require_positive("weights.publish_timeout_s", self.publish_timeout_s)
