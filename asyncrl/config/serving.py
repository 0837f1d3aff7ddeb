from __future__ import annotations

from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Lt

from asyncrl.config.checks import section
from asyncrl.errors import ConfigError, explain
from asyncrl.ranges import Positive, PositiveInt, PositiveShare


@section("rollout.serve.")
class ServeSection:
    enabled: bool = False
    """Serve the newest published weights while they are trained; docs/serving.md says how."""
    host: str = "127.0.0.1"
    """Address to listen on, of the machine of the driver. Addresses other than loopback need a key in
    ASYNCRL_API_KEY."""
    port: Annotated[int, Ge(0), Lt(2**16)] = 0
    """Port to listen on; 0 takes a free one, which serving.json in the run directory names."""
    model_name: str = ""
    """Name by which clients request the model; empty for model.path."""
    share: PositiveShare = 0.1
    """Share of the places of a replica (rollout.torch.num_slots, rollout.vllm.max_num_seqs,
    rollout.sglang.max_running_requests; at least one place) that clients may take, if the run leaves them free."""
    wait_timeout_s: Positive = 30.0
    """Longest wait of a client's request for its first token (place, end of a publish); then status 503 with
    Retry-After."""
    request_timeout_s: Positive = 600.0
    """Longest time for one client's request, from its head to the end of its answer."""
    max_requests: PositiveInt = 256
    """Clients' requests answered or waiting at the same time; more get status 429."""

    def __post_init__(self) -> None:
        if self.wait_timeout_s > self.request_timeout_s:
            found = f"a request may take rollout.serve.request_timeout_s={self.request_timeout_s:g} in all"
            do = f"set rollout.serve.wait_timeout_s to at most {self.request_timeout_s:g}, or raise the other"
            raise ConfigError(explain(f"rollout.serve.wait_timeout_s={self.wait_timeout_s:g}", found, do))


def check_key(key: str | None, *, asked: str, do: str) -> None:
    """Raises ConfigError naming `asked`: no client could send this key. None: no key."""
    if key is not None and not (key.isascii() and key.strip() == key != ""):
        raise ConfigError(explain(asked, "the key is empty, not ASCII, or has blanks around it", do))


@section("--")
class ServingConfig:
    """Settings of `asyncrl-serve`, except its replicas."""

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
    """Time for running requests after SIGINT or SIGTERM; then they are aborted."""
    start_timeout_s: Positive = 600.0
    """Longest time for a replica to load the model."""
    refresh_s: Positive = 2.0
    """Seconds between two health checks of every replica, and between two writes of the discovery file."""

    def __post_init__(self) -> None:
        check_key(
            self.api_key,
            asked="--api-key, or ASYNCRL_API_KEY",
            do="choose a key of ASCII characters; to let everybody in leave out the option and unset the variable",
        )
