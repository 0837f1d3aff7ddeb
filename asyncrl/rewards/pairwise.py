"""Scores of a group's members from pairwise comparisons. Pure.

Shape letters: G members. `wins[i, j]` is the share in [0, 1] with which i was found better than j, and
`wins[i, j] + wins[j, i] == 1`; the diagonal is not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

Scores = Literal["win_rate", "bradley_terry"]

PRIOR = 0.5
"""Draws that Bradley-Terry adds to each pair, so that a member that won everything has a finite strength."""
_ROUNDS = 200


def win_rates(wins: np.ndarray) -> np.ndarray:
    """[G] float64 in [0, 1]: mean of `wins[i, j]` over j != i. Raises ValueError: malformed wins."""
    wins = _checked(wins)
    np.fill_diagonal(wins, 0.0)
    return wins.sum(axis=1) / (len(wins) - 1)


def bradley_terry(wins: np.ndarray) -> np.ndarray:
    """[G] float64 in [0, 1]: the chance of each to be better than an average member, by the strengths s that make
    P(i better than j) = s_i / (s_i + s_j) likeliest.

    Differs from the win rate if opponents differ in strength: beating a strong member counts more.
    Source: Bradley and Terry (1952); the iteration of Hunter (2004), "MM algorithms", with `PRIOR` draws a pair.
    Raises ValueError: malformed wins.
    """
    wins = _checked(wins) + PRIOR / 2
    np.fill_diagonal(wins, 0.0)
    games, strength = wins + wins.T, np.ones(len(wins))
    for _ in range(_ROUNDS):
        strength = wins.sum(axis=1) / (games / (strength[:, None] + strength[None, :])).sum(axis=1)
        strength /= np.exp(np.log(strength).mean())
    return strength / (strength + 1)


SCORES = {"win_rate": win_rates, "bradley_terry": bradley_terry}


def scored(shares: np.ndarray | Sequence[Sequence[float]], scores: Scores) -> np.ndarray:
    """[G] float64: the scores of a group whose pairs were compared in both orders.

    Args:
        shares: [G, G], `shares[i, j]`: how much i was preferred when i stood first and j second.
    """
    given = np.asarray(shares, np.float64)
    return SCORES[scores]((given + 1 - given.T) / 2)


def _checked(wins: np.ndarray) -> np.ndarray:
    """A copy [G, G] float64."""
    wins = np.array(wins, np.float64)
    if wins.ndim != 2 or wins.shape[0] != wins.shape[1] or len(wins) < 2:
        raise ValueError(f"wins must be [G, G] with G >= 2; got {wins.shape}")
    beside = ~np.eye(len(wins), dtype=bool)
    if not ((wins >= 0) & (wins <= 1))[beside].all() or not np.allclose((wins + wins.T)[beside], 1):
        raise ValueError(f"wins must be shares in [0, 1] with wins[i, j] + wins[j, i] == 1; got {wins.tolist()}")
    return wins
