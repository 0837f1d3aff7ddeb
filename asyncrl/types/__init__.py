"""The records that cross module boundaries, by subject. Frozen, slotted, numpy arrays; no dicts.

Runs in: everywhere.
"""

from asyncrl.types.evaluation import EvalResult
from asyncrl.types.generation import (
    EngineHealth,
    Generation,
    GenerationRequest,
    PauseMode,
    ReplicaStats,
    SamplingParams,
    TokenChunk,
)
from asyncrl.types.groups import (
    Admission,
    EndShares,
    GroupSummary,
    LeaseManifest,
    LeaseWait,
    LedgerCounts,
    Lengths,
    PartialGroup,
    PartialTrajectory,
    RolloutStats,
    Ticket,
)
from asyncrl.types.models import LayerSizes, ModelFacts
from asyncrl.types.replicas import ReplicaHandle, ReplicaRow, ReplicaState, ReplicaTable
from asyncrl.types.training import Microbatch, RankPlan, TrainMetrics, TrainSequence, TrajectoryKey
from asyncrl.types.trajectories import FinishReason, Segment, SegmentKind, Trajectory, TrajectoryGroup
from asyncrl.types.weights import (
    Bucket,
    CollectiveSource,
    Digest,
    DigestKind,
    DiskSource,
    Encoding,
    IpcSource,
    Manifest,
    PublishReport,
    TensorSlice,
    TensorSpec,
    TransferSource,
    VllmNcclSource,
)

__all__ = [
    "Admission",
    "Bucket",
    "CollectiveSource",
    "Digest",
    "DigestKind",
    "DiskSource",
    "Encoding",
    "EndShares",
    "EngineHealth",
    "EvalResult",
    "FinishReason",
    "Generation",
    "GenerationRequest",
    "GroupSummary",
    "IpcSource",
    "LayerSizes",
    "LeaseManifest",
    "LeaseWait",
    "LedgerCounts",
    "Lengths",
    "Manifest",
    "Microbatch",
    "ModelFacts",
    "PartialGroup",
    "PartialTrajectory",
    "PauseMode",
    "PublishReport",
    "RankPlan",
    "ReplicaHandle",
    "ReplicaRow",
    "ReplicaState",
    "ReplicaStats",
    "ReplicaTable",
    "RolloutStats",
    "SamplingParams",
    "Segment",
    "SegmentKind",
    "TensorSlice",
    "TensorSpec",
    "Ticket",
    "TokenChunk",
    "TrainMetrics",
    "TrainSequence",
    "Trajectory",
    "TrajectoryGroup",
    "TrajectoryKey",
    "TransferSource",
    "VllmNcclSource",
]
