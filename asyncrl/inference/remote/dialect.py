"""Protocol of one kind of server: its calls and answers. The rest of engine remote is the same for all kinds."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from asyncrl.errors import ConfigError, explain
from asyncrl.inference.remote.server_client import Refused
from asyncrl.inference.shared.stamped_stream import Output
from asyncrl.types import ModelFacts

DOCS = "docs/remote.md has the whole command"
NO_FILTERS = (
    "the server reports log-probabilities before top_p and top_k, and bars no stop token as min_tokens asks",
    f"start it with --enable-custom-logit-processor, asyncrl installed beside it, or ask for none of these; {DOCS}",
)
"""(found, do) of the error if the `filters` of a dialect is False."""
UNAVAILABLE = 503
"""Status of a server whose engine is dead or starting, and of a gateway whose server is down."""
_DATA = "data: "
ASK_S = 60.0
"""Time per answer when a server is asked to describe itself: the first takes seconds."""


@dataclass(frozen=True, slots=True)
class ModelTokens:
    """Facts from the files of the run's model, for servers that do not report them.

    Attributes:
        tied: the output layer shares the embeddings.
        eos: the model's own end tokens.
    """

    vocab_size: int
    tied: bool
    eos: frozenset[int]


class AnswerReader:
    """Reads the streamed answer to one request, a line at a time."""

    over = False
    """The response has ended here, but the server keeps sampling until it gets an abort."""

    def take(self, line: str) -> Output | None:
        """Parses one line; None: no tokens and no end.

        Raises:
            BadRequest: the server refuses the request.
            GenerationError: the server ended the request with an error.
            ForeignWeights: as `Labels.version`.
            ValueError, LookupError, TypeError: malformed line.
        """
        if not line.startswith(_DATA) or line == f"{_DATA}[DONE]":
            return None
        return self._output(json.loads(line.removeprefix(_DATA)))

    def _output(self, held: Any) -> Output | None:
        """`held`: the line's JSON."""
        raise NotImplementedError


def require_same_model(url: str, model: ModelFacts, architecture: str | None, vocab_size: int | None) -> None:
    """Raises ConfigError: the server has a different model. None: not reported."""
    for what, there, here in (
        ("architecture", architecture, model.architecture),
        ("vocabulary", vocab_size, model.vocab_size),
    ):
        if here is not None and there is not None and here != there:
            found = f"the server has the {what} {there}, {model.path} has {here}"
            raise ConfigError(explain(f"{url} as a replica of {model.name}", found, "serve the model that is trained"))


def require_setting(url: str, name: str, here: int, there: int, found: str) -> None:
    """Raises ConfigError: `rollout.remote.<name>` is `here`, and this server needs `there`."""
    if here != there:
        asked = f"{url} with rollout.remote.{name}={here}"
        raise ConfigError(explain(asked, found, f"set rollout.remote.{name}={there}"))


def require_up(error: Refused) -> None:
    """Re-raises the error if the server is not up."""
    if error.status == UNAVAILABLE:
        raise error


def require_key(url: str, version: str, path: str, error: Refused) -> None:
    """As `require_up`; raises ConfigError if the server refuses the key or requires one."""
    require_up(error)
    if error.status in (401, 403):
        do = "set rollout.remote.api_key_env to the environment variable that holds its key"
        raise ConfigError(explain(f"{path} of {url} ({version})", "it refuses the key", do)) from error


# Labels of weights on a server.


class ForeignWeights(Exception):
    """The server has weights that this run did not publish."""


class Labels:
    """The labels of one replica's versions on its server. Another run's labels differ, and a restarted server has none
    of them.

    Args:
        nonce: unique to this start of the replica.
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
        """Salt of a set of weights in the server's prompt cache; never used by an earlier replica."""
        return f"{self._nonce}.{weights}"
