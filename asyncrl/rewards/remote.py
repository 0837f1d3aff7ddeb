"""The reward that a model behind HTTP gives.

POST of one JSON object {"response", "prompt": [{"role", "content"}, ...], "ground_truth", "data_source", "extra"};
the answer is {"reward": number, "parts": {name: number}}, of which `parts` may be left out.
"""

from __future__ import annotations

import http.client
import json
import sys
import time
import urllib.error
import urllib.request
from typing import Any

from asyncrl.config.rewards import RewardConfig
from asyncrl.data.rows import PromptRow
from asyncrl.errors import DeadlineExceeded, Process, ProcessDied, explain
from asyncrl.rewards.reward import RewardResult

MAX_ANSWER_BYTES = 1 << 20
_TOLD_CHARS = 300
_MARGIN = 0.95
"""Share of `reward.timeout_s` after which the reward raises by itself: a process that is killed cannot report why."""


REWARD_MODEL = Process("reward model")


class _Passing(Exception):
    """A transient failure: a retry may succeed."""


class RemoteReward:
    """Posts one request per reward. Retries it, with a pause that doubles, after a failed connection, a timeout, 429 or
    5xx."""

    def __init__(self, config: RewardConfig) -> None:
        self._config = config.remote
        self._budget_s = _MARGIN * config.timeout_s

    def __call__(self, response: str, row: PromptRow) -> RewardResult:
        """Raises:
        DeadlineExceeded: `reward.timeout_s` left no time for another request.
        ProcessDied: every request failed.
        ValueError: it refused the request, or answered something else.
        """
        config = self._config
        started = time.monotonic()
        body = json.dumps(_request(response, row)).encode()
        asked = f"a reward for {row.origin} from {config.url}"
        for number in range(config.retries + 1):
            left_s = self._budget_s - (time.monotonic() - started)
            try:
                return _reward(self._post(body, min(config.timeout_s, left_s)), asked)
            except _Passing as failure:
                pause_s = config.backoff_s * 2**number
                left_s = self._budget_s - (time.monotonic() - started)
                if number == config.retries:
                    found = f"{number + 1} request(s) failed; the last: {failure}"
                    do = "see that the reward model runs and is reachable from here; raise reward.remote.retries"
                    raise ProcessDied(explain(asked, found, do)).of(REWARD_MODEL) from failure
                if pause_s >= left_s:
                    found = f"{number + 1} request(s) failed and no time is left for another; the last: {failure}"
                    do = "raise reward.timeout_s, or lower reward.remote.timeout_s or backoff_s"
                    raise DeadlineExceeded(explain(asked, found, do)).of(REWARD_MODEL) from failure
                time.sleep(pause_s)
        raise AssertionError("the last request has returned or raised")

    def _post(self, body: bytes, timeout_s: float) -> bytes:
        """The body of a good answer. Raises _Passing; ValueError: the request was refused."""
        url = self._config.url
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"}, method="POST")
        deadline = time.monotonic() + timeout_s
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return _read(answer, deadline)
        except urllib.error.HTTPError as error:
            with error:
                told = error.read(_TOLD_CHARS).decode(errors="replace")
            if error.code == 429 or error.code >= 500:
                raise _Passing(f"HTTP {error.code}: {told}") from error
            do = "see what it expects in docs/rewards.md"
            raise ValueError(explain(f"POST {url}", f"HTTP {error.code}: {told}", do)) from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            late = isinstance(reason, TimeoutError)
            raise _Passing(f"no answer within {timeout_s:.3g} s" if late else repr(reason)) from error


def _read(answer: http.client.HTTPResponse, deadline: float) -> bytes:
    """Reads with a deadline for the whole body: a socket's timeout is per read, and a slow sender never exceeds it."""
    received = bytearray()
    while chunk := answer.read1(1 << 16):
        received += chunk
        if time.monotonic() > deadline:
            raise TimeoutError
        if len(received) > MAX_ANSWER_BYTES:
            found = f"more than {MAX_ANSWER_BYTES} bytes"
            raise ValueError(explain("an answer of the reward model", found, "shorten it"))
    if answer.length:
        raise http.client.IncompleteRead(bytes(received), answer.length)
    return bytes(received)


def _request(response: str, row: PromptRow) -> dict[str, Any]:
    return {
        "response": response,
        "prompt": row.conversation(),
        "ground_truth": row.truth(),
        "data_source": row.data_source,
        "extra": row.values(),
    }


def _reward(answer: bytes, asked: str) -> RewardResult:
    told = answer[:_TOLD_CHARS].decode(errors="replace")
    do = 'let it answer {"reward": 0.5} or {"reward": 0.5, "parts": {"style": 0.1}}'
    try:
        found = json.loads(answer)
        reward = found["reward"]
        parts = found.get("parts") or {}
        numbers = [reward, *parts.values()]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(explain(asked, f"no object with a reward: {told}", do)) from error
    if not all(isinstance(n, int | float) and abs(n) <= sys.float_info.max for n in numbers):
        raise ValueError(explain(asked, f"a reward that is no finite number: {told}", do))
    return RewardResult(float(reward), tuple((str(name), float(value)) for name, value in parts.items()))
