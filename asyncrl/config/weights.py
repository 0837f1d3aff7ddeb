from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge

from asyncrl.config.checks import section
from asyncrl.ranges import NonNegativeInt, Positive, PositiveInt


@section("weights.")
class WeightsConfig:
    transport: Literal["ipc", "collective", "disk"] = "ipc"
    """ipc: shared memory or GPU memory of a node; where ranks of backend fsdp are on several, one on each sends.
    collective: torch.distributed broadcast (nccl on GPU, gloo on CPU). disk: safetensors files in a directory that all
    machines reach."""
    disk_directory: str = ""
    """With transport=disk: the directory for publishes, with the same path on every machine; or a URL of object storage
    that fsspec knows (s3://bucket/path, with s3fs installed everywhere). Empty: the system's directory for temporary
    files, which works on one machine only."""
    encoding: Literal["full", "delta"] = "full"
    """full: every publish sends all weights. delta: it sends the lossless, deflated changes since the last publish, and
    all weights to replicas without that. Takes host memory for a copy of the weights in each sending trainer rank and
    each worker of a replica. Every publish is then verified."""
    bucket_bytes: Annotated[int, Ge(4096)] = 4 << 20
    """Size of one unit of transfer. Small buckets stay in the CPU's caches; use 256 MiB and more over NCCL."""
    verify: Literal["off", "first", "always"] = "first"
    """When both sides compute a digest of every tensor: never, at the first and every verify_every-th publish, or
    always."""
    verify_every: PositiveInt = 50
    """With verify=first: publishes between two verified ones."""
    max_retries: NonNegativeInt = 1
    """Retries of a transfer to a replica that got wrong weights, before the replica is replaced; and of a transfer that
    was late or lost a connection although every process answers, before the run stops."""
    overlap: bool | None = None
    """Publish from a copy of the weights while the next step trains. Takes host memory for the weights in the replicas'
    dtype, on the sending ranks. In mode fully_async; null: if ranks compute on CPUs."""
    stage: bool | None = None
    """Replicas receive a publish in host memory while they generate, and pause only to load it. Takes host memory for
    the weights in each worker of a replica. In mode fully_async, with rollout.engine torch or vllm; null: if ranks and
    replicas compute on CPUs."""
    rolling: bool = False
    """Publish to rolling_replicas replicas at a time, while the others generate, from a copy of the weights (as for
    overlap); without overlap the trainer waits for all of them. Read in mode fully_async."""
    rolling_replicas: PositiveInt = 1
    """With rolling: number of replicas updated together."""
    transfer_timeout_s: Positive = 120.0
    """Longest time for sending all weights once."""
    publish_timeout_s: Positive = 300.0
    """Longest time for a whole publish, retries included."""
