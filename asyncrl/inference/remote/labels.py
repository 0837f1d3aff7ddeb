"""What a server calls the weights that it samples with."""

from __future__ import annotations


class ForeignWeights(Exception):
    """The server sampled with weights that this run has not published."""


class Labels:
    """The names that the versions of one replica have on its server: those of another run, or of a server that has
    restarted, differ.

    Args:
        nonce: of this start of the replica.
    """

    def __init__(self, nonce: str) -> None:
        self._nonce = nonce

    def of(self, version: int | None) -> str:
        return f"asyncrl-{self._nonce}:{'none' if version is None else version}"

    def version(self, label: str) -> str:
        """The version behind a label, as text. Raises ForeignWeights."""
        prefix = f"asyncrl-{self._nonce}:"
        if not label.startswith(prefix):
            raise ForeignWeights(f"the server calls its weights {label[:80]!r}: it has restarted, or has another user")
        return label.removeprefix(prefix)

    def salt(self, weights: int) -> str:
        """The name of a set of weights for the server's KV cache of prompts: no replica before this one has used it."""
        return f"{self._nonce}.{weights}"
