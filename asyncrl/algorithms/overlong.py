"""Soft penalty for responses close to the longest one allowed.

    over    = length - (L_max - buffer)
    penalty = p min(max(over, 0) / buffer, 1),  taken from the reward

Counting a cut-off response simply as wrong makes sound reasoning that is a little too long look like bad reasoning;
here the penalty rises evenly over the buffer. p is in units of the reward. The paper takes p = 1 where right and wrong
responses earn 1 and -1, so a right response of full length stays halfway between them; p = 0.5 is the same where they
earn 1 and 0.
Source: DAPO (arXiv:2503.14476) eq. 13, there with L_max = 20480 and a buffer of 4096.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from asyncrl.config.algorithm import OverlongConfig


def shaped_rewards(
    rewards: Sequence[float], response_tokens: Sequence[int], config: OverlongConfig, longest_response_tokens: int
) -> np.ndarray:
    """[G] float64: the rewards of a group with the penalty taken off.

    Args:
        rewards: [G].
        response_tokens: [G], length of each response, environment tokens included.
        longest_response_tokens: L_max, of a whole trajectory: all its turns and tool results. A recipe refuses a longer
            buffer: every response would be penalised.

    Raises:
        ValueError: lengths differ.
    """
    shaped = np.array(rewards, dtype=np.float64)
    lengths = np.asarray(response_tokens, dtype=np.float64)
    if shaped.shape != lengths.shape:
        raise ValueError(f"{shaped.shape} rewards for {lengths.shape} lengths")
    if config.buffer_tokens == 0:
        return shaped
    assert config.buffer_tokens is not None, "a recipe resolves it"
    over = lengths - (longest_response_tokens - config.buffer_tokens)
    return shaped - config.penalty * (over / config.buffer_tokens).clip(0, 1)
