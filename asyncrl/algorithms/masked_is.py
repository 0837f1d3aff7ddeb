"""Masked importance sampling: drops tokens that the trainer finds much likelier than the engine did.

    factor_t = exp(m_t) where exp(m_t) <= high, else 0

Truncation trains a token over the bound with too small a weight, trusting an engine that was wrong about the token;
masking drops the token. With algorithm.ratio=behavior the factor is 1 instead of exp(m_t): see `mismatch.py`.
Source: J. Liu, Y. Li et al., "When speed kills stability" (2025), token-level MIS.
"""

from __future__ import annotations

from asyncrl.algorithms.mismatch import KeptWithin


class MaskedIs(KeptWithin):
    """The `Correction` of this file."""
