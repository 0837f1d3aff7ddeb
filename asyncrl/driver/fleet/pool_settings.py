"""The settings of a pool of replicas, and its fixed times."""

from __future__ import annotations

import math
from dataclasses import dataclass

AWAY_AFTER = 2
"""Further tries to start a replica that never came up, while others are a quorum."""
ASK_AGAIN_S = 0.2
"""Pause between two health checks of a suspended replica, or between two looks for engines that are awake."""
SLEEP_S = 60.0
"""Longest time that an engine may take to give its memory back before its process is killed."""
EXIT_S = 30.0
"""Longest time for a killed process to exit, where its devices are shared or its place is given back."""
LEAVE_S = 20.0
"""Longest time for the rollout side to hear of a replica that leaves, and for a publish to it to end."""


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """`max_restarts`: replacements within `window_s`; times are seconds, meant as in `ray:` and `recovery:`.

    `rejoin_timeout_s`: how long a late replica may take to answer again; 0 replaces it at once. `restart_delay_s`:
    delay before the start of a replica whose predecessor failed without having served, doubled with each failure in a
    row. The memory and the processes of the predecessor may take a while to disappear.
    """

    max_restarts: int
    start_timeout_s: float
    health_interval_s: float
    health_timeout_s: float
    restart_delay_s: float = 1.0
    window_s: float = math.inf
    rejoin_timeout_s: float = 0.0
    quorum: int | None = None
    """Replicas that have to come up at the start; None: all."""
    serves_at_once: bool = False
    """Replicas load real weights and serve from their start; no publish follows."""
    stop_timeout_s: float = 10.0
    """Longest time for one that leaves to stop before its process is killed."""
    is_resized: bool = False
    """`inference.fleet_size` brings back replicas that left. Otherwise the pool replaces them at once."""
