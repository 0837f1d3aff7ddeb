"""The records that cross module boundaries, by subject. Frozen, slotted, numpy arrays; no dicts.

Runs in: everywhere.
"""

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
    Committed,
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
    TokenLag,
)
from asyncrl.types.models import (
    HOW_TO_TIE,
    UNTIED,
    LayerSizes,
    ModelFacts,
    auto_class,
    decoder_of,
    drop_towers,
    misfit,
    on_meta,
    settle,
)
from asyncrl.types.replicas import (
    FleetReport,
    ReplicaRow,
    ReplicaState,
    ReplicaTable,
    RunServerReport,
    RunServerStats,
)
from asyncrl.types.training import EvalResult, Microbatch, RankPlan, TrainMetrics, TrainSequence, TrajectoryKey
from asyncrl.types.trajectories import FinishReason, Segment, SegmentKind, Trajectory, TrajectoryGroup
from asyncrl.types.weights import (
    Bucket,
    CollectiveSource,
    Digest,
    DigestKind,
    DiskSource,
    EncodedWeights,
    Encoding,
    IpcSource,
    Manifest,
    PartsSource,
    PublishReport,
    SendingRank,
    TensorSlice,
    TensorSpec,
    TransferSource,
)
