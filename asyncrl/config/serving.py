from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Lt

from asyncrl.config.checks import check_ranges, require
from asyncrl.ranges import Positive, PositiveInt


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingConfig:
    """Settings of `asyncrl-serve`, apart from those of its replicas."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 lets other machines in."""
    port: Annotated[int, Ge(0), Lt(2**16)] = 8000
    """Port to listen on; 0 takes a free one."""
    api_key: str | None = None
    """Clients must send it as `Authorization: Bearer KEY`; None requires no key."""
    model_name: str = ""
    """Name by which clients request the model; empty for the path or hub name that the server was started with."""
    discovery_file: Path | None = None
    """JSON file with the address and state of the fleet; removed when the server stops."""
    log_file: Path | None = None
    """Logs of all processes; None makes a file in the directory for temporary files."""
    max_requests: PositiveInt = 1024
    """Requests answered at the same time, until their clients have received the answer; more get status 429."""
    request_timeout_s: Positive = 600.0
    """Longest time for one request, from its head to the end of its answer."""
    stop_timeout_s: Positive = 10.0
    """How long requests may still run after SIGINT or SIGTERM before they are aborted."""
    start_timeout_s: Positive = 600.0
    """Longest time for a replica to load the model."""
    refresh_s: Positive = 2.0
    """Seconds between two health checks of every replica, and between two writes of the discovery file."""

    def __post_init__(self) -> None:
        check_ranges("--", self)
        require(
            self.api_key is None or (self.api_key.isascii() and self.api_key.strip() == self.api_key != ""),
            asked="--api-key, or ASYNCRL_API_KEY",
            found="the key is empty, not ASCII, or has blanks around it",
            do="choose a key of ASCII characters; to let everybody in leave out the option and unset the variable",
        )
