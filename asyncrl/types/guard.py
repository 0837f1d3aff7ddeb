"""The state of the off-policy guard between steps, and its actions."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Literal

from asyncrl.ranges import Whole

GuardAction = Literal["tightened", "raised", "stopped", "eased", "relaxed", "resumed"]
"""tightened: a lower limit on the lag. raised: closer bounds of the corrections. stopped: the run ends. eased, relaxed:
undo raised, tightened. resumed: a resumed run starts from the checkpoint's state."""


@dataclass(frozen=True, slots=True)
class GuardState:
    """The state of the guard between two steps; a checkpoint has it.

    Attributes:
        limit: limit on the lag, in optimizer steps; at most `staleness.max_lag`.
        is_raised: the bounds of the corrections are closer than in the recipe.
        sick_steps: steps too far off-policy since the last healthy one, or since the last action.
        healthy_steps: healthy steps in a row since the last action.
        is_trial: the last action was a relaxation, not yet confirmed by healthy steps.
        failed_trials: relaxations that had to be undone; each doubles the patience before the next.
    """

    limit: Whole
    is_raised: bool = False
    sick_steps: Whole = 0
    healthy_steps: Whole = 0
    is_trial: bool = False
    failed_trials: Whole = 0


# Buckets of lags, for metrics.


LAST_OF_BUCKET = (0, 1, 2, 3, 4, 8, 16)
"""The largest lag of each bucket, in optimizer steps; one more bucket holds larger lags."""

LAG_BUCKETS = ("0", "1", "2", "3", "4", "5-8", "9-16", "17+")
"""The names of the buckets, by rising lag."""


def lag_bucket(lag: int) -> int:
    """Index of the lag's bucket in `LAG_BUCKETS`."""
    return bisect_left(LAST_OF_BUCKET, lag)


def lag_buckets_to(max_lag: int) -> tuple[str, ...]:
    """The buckets of lags up to `max_lag`."""
    return LAG_BUCKETS[: lag_bucket(max_lag) + 1]


SUSPECTS = (
    "look at these, in this order: tied embeddings (tie_word_embeddings of config.json against the files), rotary "
    "factors (rope parameters against max_model_len), dropout, rollout.sampling (temperature, top_p), quantisation and "
    "dtypes, the chat template; staleness.parity=warn trains all the same"
)
"""What to look at where replicas and trainer compute different policies from the same weights."""
