"""The isolation probe: a sequence has the same log-probabilities alone and packed behind another one."""

from __future__ import annotations

import numpy as np

from asyncrl.errors import ConfigError, explain
from asyncrl.trainer.backend import TrainBackend
from asyncrl.trainer.trainer_spec import TrainerSpec
from asyncrl.types import Lengths, RankPlan, Segment, TrainSequence, Trajectory

_SHORT, _LONG = 16, 256
_BOUNDS_NATS = {"float32": 1e-3, "bfloat16": 0.1}
"""Largest difference of a token that is rounding, by compute dtype."""


def require_isolation(backend: TrainBackend, spec: TrainerSpec) -> None:
    """Packs a short sequence behind a long one and compares it with itself alone; collective, two short forward passes.
    Replayed routers are left out: the replicas' choices are not known yet.

    Raises ConfigError: another sequence of the row changes it, in a model whose layers look beyond a sequence.
    """
    if spec.trainer.router_replay == "rollout":
        return
    rng = np.random.default_rng(0)
    long, short = _sequence(rng, _LONG), _sequence(rng, _SHORT)
    both = backend.logprobs(_plan(long, short), {(0, 0): long, (0, 1): short})[0, 1]
    alone = backend.logprobs(_plan(short), {(0, 0): short})[0, 0]
    apart = float((both - alone).abs().max())
    bound = _BOUNDS_NATS[getattr(spec.trainer, spec.trainer.backend).param_dtype]
    if not apart <= bound:
        asked = f"sequences of {spec.model.path} that are packed in one row and do not see each other"
        found = f"alone and behind {_LONG} other tokens, a log-probability differs by {apart:.3g} nats"
        raise ConfigError(explain(asked, found, "train another model: layers of this one mix the sequences of a row"))


def _sequence(rng: np.random.Generator, length: int) -> Trajectory:
    count = _SHORT - 1
    return Trajectory(
        prompt_ids=rng.integers(0, 32, length - count).astype(np.int32),
        response_ids=rng.integers(0, 32, count).astype(np.int32),
        logprobs=np.zeros(count, np.float32),
        loss_mask=np.ones(count, np.bool_),
        segments=(Segment(0, count, 0, 0),),
        reward=0.0,
    )


def _plan(*sequences: Trajectory) -> RankPlan:
    lengths = [Lengths(len(s.prompt_ids), len(s.response_ids), s.num_trained_tokens) for s in sequences]
    microbatch = tuple(TrainSequence(0, i, 0.0, each, i) for i, each in enumerate(lengths))
    return RankPlan(step=0, updates=((microbatch,),))
