"""The rollouter's files for people: samples of trajectories, spans of time, and the prompts whose groups ended
`failed`."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.config.hidden import Hidden
from asyncrl.data.incremental_decoder import IncrementalDecoder
from asyncrl.data.rows import PromptRow
from asyncrl.json_records import append_line, write_json
from asyncrl.rollout.draft import Span
from asyncrl.types import Ticket, Trajectory, TrajectoryGroup

MAX_PROMPT_CHARS = 8000
"""Of what an agent sent, from its end."""
_SHOWN = 40
"""Tokens of the texts at which branches part."""
_TOKENS_AT_ONCE = 32
"""Tokens decoded between two turns of the event loop, each with a few before it: about 1 ms."""


@dataclass(frozen=True, slots=True)
class RolloutFiles:
    """Paths of the rollouter's files: samples, spans and quarantined prompts."""

    samples: Path = Path(os.devnull)
    spans: Path = Path(os.devnull)
    quarantine: Path = Path(os.devnull)


class SampleFile:
    """Writes the first trajectories of each admission version, decoded, one JSON object a line."""

    def __init__(self, path: Path, per_version: int, hide: Hidden) -> None:
        self._path, self._hide = path, hide
        self._per_version = per_version
        self._version, self._written = -1, 0

    async def offer(
        self, group: TrajectoryGroup, ticket: Ticket, row: PromptRow, decode: Callable[[np.ndarray], str]
    ) -> None:
        """Writes the group's trajectories within the quota. Yields to the event loop while it decodes. Raises
        StorageError."""
        # The quota is per admission version; groups of older versions come too late.
        if ticket.version > self._version:
            self._version, self._written = ticket.version, 0
        if ticket.version < self._version:
            return
        trajectories = group.trajectories[: max(0, self._per_version - self._written)]
        self._written += len(trajectories)
        for trajectory in trajectories:
            response = decode(trajectory.response_ids)
            record = {
                "time_s": time.time(),
                "ordinal": group.ordinal,
                "attempt": group.attempt,
                "prompt": row.messages[-1].content,
                "response": response,
                "ground_truth": row.ground_truth,
                "reward": trajectory.reward,
                "finish_reason": trajectory.finish_reason,
                "segments": [[s.start, s.stop, s.version, s.replica_id, s.kind] for s in trajectory.segments],
                "token_ends": None
                if self._hide(response) != response
                else await _token_ends(trajectory, response, decode),
                "logprobs": [round(float(logprob), 4) for logprob in trajectory.logprobs],
                **_of_agent(trajectory, decode),
            }
            append_line(self._path, self._hide(write_json(record)))


def _of_agent(trajectory: Trajectory, decode: Callable[[np.ndarray], str]) -> dict[str, Any]:
    """The end of what an agent sent, and its branches, with the texts at which each leaves the main conversation. Empty
    for other environments."""
    if "agent_requests" not in dict(trajectory.reward_parts):
        return {}
    whole, *others = (np.concatenate([t.prompt_ids, t.response_ids]) for t in (trajectory, *trajectory.branches))
    branches = []
    for branch, ids in zip(trajectory.branches, others, strict=True):
        size = min(len(whole), len(ids))
        at = int(np.argmin(np.append(whole[:size] == ids[:size], False)))
        parting = {"at_token": at, "text": decode(ids[at : at + _SHOWN]), "main_text": decode(whole[at : at + _SHOWN])}
        branches.append({"response": decode(branch.response_ids), "turns": branch.turns, **parting})
    return {"prompt": decode(trajectory.prompt_ids)[-MAX_PROMPT_CHARS:], "branches": branches}


async def _token_ends(trajectory: Trajectory, response: str, decode: Callable[[np.ndarray], str]) -> list[int] | None:
    """End of each token's text in the response; None if the tokens' texts do not add up to the response."""
    decoder = IncrementalDecoder(lambda ids: decode(np.asarray(ids, np.int32)))
    pieces = []
    for i, token in enumerate(trajectory.response_ids):
        pieces.append(decoder.feed([int(token)]))
        if i % _TOKENS_AT_ONCE == 0:
            await asyncio.sleep(0)
    if not pieces:
        return []
    pieces[-1] += decoder.finish()
    return list(itertools.accumulate(map(len, pieces))) if "".join(pieces) == response else None


class SpanFile:
    """Records when the trajectories of every n-th group were generated (by request) and rewarded: one JSON object per
    recorded group."""

    def __init__(self, path: Path, every: int) -> None:
        self._path, self._every = path, every

    def of(self, ticket: Ticket) -> list[Span] | None:
        """A list for the spans of one trajectory; None: the group is not recorded."""
        return [] if self._every and ticket.ordinal % self._every == 0 else None

    def write(self, ticket: Ticket, spans: Sequence[list[Span] | None]) -> None:
        """`spans`: one list per trajectory. Raises StorageError."""
        recorded = [[[kind, round(a, 4), round(b, 4), made] for kind, a, b, made in own] for own in spans if own]
        if recorded:
            line = {"ordinal": ticket.ordinal, "attempt": ticket.attempt, "trajectories": recorded}
            append_line(self._path, write_json(line, separators=(",", ":")))


class QuarantineFile:
    """Records every prompt that spent its attempts, with its last error: one JSON object per line."""

    def __init__(self, path: Path, hide: Hidden) -> None:
        self._path, self._hide = path, hide

    def add(self, ticket: Ticket, row: PromptRow, error: str) -> None:
        """`error`: a traceback. Raises StorageError."""
        record = {
            "time_s": time.time(),
            "ordinal": ticket.ordinal,
            "attempt": ticket.attempt,
            "origin": row.origin,
            "prompt": row.messages[-1].content,
            "ground_truth": row.ground_truth,
            "error": error,
        }
        append_line(self._path, self._hide(write_json(record)))
