"""Masking: drops tokens on which trainer and engine disagree. Truncation trains a token over the bound with too small a
weight, trusting an engine that was wrong about the token; masking drops it. With algorithm.ratio=behavior the factor is
1 instead of exp(m_t): see `mismatch.py`."""

from __future__ import annotations

from asyncrl.algorithms.mismatch import KeptWithin


class MaskedIs(KeptWithin):
    """Masked importance sampling: tokens that the trainer finds much likelier than the engine did.

        factor_t = exp(m_t) where exp(m_t) <= high, else 0

    Source: J. Liu, Y. Li et al., "When speed kills stability" (2025), token-level MIS.
    """


class IcePop(KeptWithin):
    """Double-sided masking: in either direction. A token that the trainer finds much less likely than the engine did is
    engine noise too. The paper holds ratios in [0.5, 5].

        factor_t = exp(m_t) where low <= exp(m_t) <= high, else 0

    Source: IcePop, Ring-1T (arXiv:2510.18855) sec. 3, "Small leak can sink a great ship" (2025).
    """
