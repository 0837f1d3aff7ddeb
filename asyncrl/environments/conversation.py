"""The tokens of a multi-turn trajectory, written alternately by the policy and the environment."""

from __future__ import annotations

import time
from collections.abc import Mapping
from copy import copy

import numpy as np

from asyncrl.rewards import RewardResult
from asyncrl.types import FinishReason, Generation, Segment, Trajectory
from asyncrl.types.trajectories import TOKEN_ARRAYS


class Conversation:
    """An append-only conversation: each prompt is a prefix of the next one.

    Args:
        prompt_ids: [P] int32.
    """

    def __init__(self, prompt_ids: np.ndarray) -> None:
        self.started_s = time.time()
        self.num_turns = 0
        self._prompt_ids = np.asarray(prompt_ids, np.int32)
        self._ids: list[np.ndarray] = []
        self._logprobs: list[np.ndarray] = []
        self._segments: list[Segment] = []
        self._extra: list[tuple[int, Mapping[str, np.ndarray] | None]] = []
        """Number of tokens and further arrays of each turn; None: a turn of the environment."""
        self._finish_reason: FinishReason = "stop"
        self.num_response_tokens = 0

    @property
    def token_ids(self) -> np.ndarray:
        """[P + T] int32: prompt and all turns so far, the prompt of the next response."""
        return np.concatenate([self._prompt_ids, *self._ids])

    def fork(self) -> Conversation:
        """A copy that continues independently from here."""
        made = copy(self)
        made._ids, made._logprobs, made._segments = [*self._ids], [*self._logprobs], [*self._segments]
        made._extra = [*self._extra]
        return made

    def add_response(self, made: Generation) -> None:
        """Appends a turn of the policy."""
        at = self.num_response_tokens
        self._segments += [Segment(s.start + at, s.stop + at, s.version, s.replica_id) for s in made.segments]
        self._extend(made.token_ids, made.logprobs, made.extra)
        self._finish_reason = made.finish_reason
        self.num_turns += 1

    def add_environment(self, token_ids: np.ndarray) -> None:
        """Appends text of the environment; must follow a turn of the policy."""
        if len(token_ids) == 0:
            return
        last = self._segments[-1]
        at = self.num_response_tokens
        self._segments.append(Segment(at, at + len(token_ids), last.version, last.replica_id, "environment"))
        self._extend(token_ids, np.zeros(len(token_ids), np.float32))

    def trajectory(
        self, result: RewardResult, *, parts: tuple[tuple[str, float], ...] = (), cut: bool = False
    ) -> Trajectory:
        """The complete trajectory. `parts`: numbers in addition to the reward's. `cut`: it ended at a limit."""
        loss_mask = np.zeros(self.num_response_tokens, np.bool_)
        for segment in self._segments:
            loss_mask[segment.start : segment.stop] = segment.kind == "policy"
        return Trajectory(
            prompt_ids=self._prompt_ids,
            response_ids=np.concatenate([np.zeros(0, np.int32), *self._ids]),
            logprobs=np.concatenate([np.zeros(0, np.float32), *self._logprobs]),
            loss_mask=loss_mask,
            segments=tuple(self._segments),
            reward=result.reward,
            reward_parts=(*result.parts, *parts),
            finish_reason="length" if cut else self._finish_reason,
            turns=self.num_turns,
            started_s=self.started_s,
            finished_s=time.time(),
            extra=self._joined_extra(),
        )

    def _joined_extra(self) -> dict[str, np.ndarray]:
        """The further arrays that every turn of the policy has; texts of the environment may lack them."""
        made = [extra for count, extra in self._extra if count and extra is not None]
        names = [name for name in TOKEN_ARRAYS if made and all(name in extra for extra in made)]
        return {
            name: np.concatenate([_rows(count, extra, name, made[0][name]) for count, extra in self._extra if count])
            for name in names
            if TOKEN_ARRAYS[name].absent is not None or all(extra is not None for _, extra in self._extra)
        }

    def _extend(
        self, token_ids: np.ndarray, logprobs: np.ndarray, extra: Mapping[str, np.ndarray] | None = None
    ) -> None:
        self._ids.append(np.asarray(token_ids, np.int32))
        self._logprobs.append(np.asarray(logprobs, np.float32))
        self._extra.append((len(token_ids), extra))
        self.num_response_tokens += len(token_ids)


def _rows(count: int, extra: Mapping[str, np.ndarray] | None, name: str, like: np.ndarray) -> np.ndarray:
    """The rows of `count` tokens. `like`: an array whose rows have the same shape."""
    return np.full((count, *like.shape[1:]), TOKEN_ARRAYS[name].absent, like.dtype) if extra is None else extra[name]
