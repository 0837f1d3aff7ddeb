"""Double-sided masking: drops tokens on which trainer and engine disagree in either direction.

    factor_t = exp(m_t) where low <= exp(m_t) <= high, else 0

It differs from masked importance sampling in the lower bound: a token that the trainer finds much less likely than the
engine did is engine noise too. The paper holds ratios in [0.5, 5]. With algorithm.ratio=behavior the factor is 1
instead of exp(m_t): see `mismatch.py`.
Source: IcePop, Ring-1T (arXiv:2510.18855) sec. 3, "Small leak can sink a great ship" (2025).
"""

from __future__ import annotations

from asyncrl.algorithms.mismatch import KeptWithin


class IcePop(KeptWithin):
    """The `Correction` of this file."""
