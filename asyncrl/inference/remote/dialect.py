"""What one kind of server is asked, and how it answers. Everything else about engine remote is the same for all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self

from asyncrl.config.remote_engine import RemoteEngineConfig
from asyncrl.errors import ConfigError, explain
from asyncrl.inference.remote.server_client import Call, Refused, ServerClient
from asyncrl.inference.shared.publish_calls import PublishCalls
from asyncrl.inference.shared.stamped_stream import Output
from asyncrl.types import GenerationRequest, ModelFacts

DOCS = "docs/remote.md has the whole command"
NO_FILTERS = (
    "the server reports log-probabilities before top_p and top_k, and bars no stop token as min_tokens asks",
    f"start it with --enable-custom-logit-processor, asyncrl installed beside it, or ask for none of these; {DOCS}",
)
"""What is found, and what to do, where `ServerDialect.filters` is not set."""
UNAVAILABLE = 503
"""Status of a server whose engine is dead or starts, and of a gateway whose server is not up."""
ASK_S = 60.0
"""Time for one answer of a server that is asked what it is: the first takes seconds."""


@dataclass(frozen=True, slots=True)
class ModelTokens:
    """What the files of the run's model say, for servers that do not say it of theirs.

    Attributes:
        tied: the output layer uses the embeddings.
        eos: the model's own end tokens.
    """

    vocab_size: int
    tied: bool
    eos: frozenset[int]


class AnswerReader(Protocol):
    """Reads the streamed answer to one request."""

    over: bool
    """The response has ended, and the server goes on with it until it is told to abort it."""

    def take(self, line: str) -> Output | None:
        """What one line says; None: no tokens and no end.

        Raises:
            BadRequest: the server refuses the request.
            GenerationError: the server ended the request with an error.
            ForeignWeights: as `Labels.version`.
            ValueError, LookupError, TypeError: the line has another form.
        """
        ...


class ServerDialect(ABC):
    """One server, as one kind of servers is spoken to. It says what to call; `RemoteEngine` calls, and decides."""

    generate: ClassVar[str]
    """Path that samples, as a stream of lines."""
    alive: ClassVar[str]
    """Path that answers as long as the server lives, also while it loads weights."""
    state: ClassVar[str]
    """Path that answers once the processes which sample have answered."""
    aborts_by_name_only: ClassVar[bool]
    """A request that is not aborted by its name goes on for a while after its connection was closed."""
    needs_model: bool
    """`of_model` has to be called before the server is used."""
    filters: bool
    """top_p, top_k and min_tokens are served, with log-probabilities of what is left."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Tokens that it samples from."""

    @abstractmethod
    def of_model(self, tokens: ModelTokens) -> Self:
        """The same, with what the files of the run's model say."""

    @abstractmethod
    def require_usable(self, url: str, remote: RemoteEngineConfig, model: ModelFacts | None = None) -> None:
        """Raises ConfigError: the server serves another model than `model`, or not as a run needs it."""

    @abstractmethod
    def wake(self, label: str) -> Sequence[Call]:
        """Calls that succeed once it can sample; before, one answers `UNAVAILABLE`. What they set free to sample, of
        another run maybe, gets this label."""

    @abstractmethod
    def take_over(self) -> Sequence[Call]:
        """Calls that end the requests and the pause of a replica before this one."""

    @abstractmethod
    async def prove(self, client: ServerClient, url: str) -> bool:
        """Samples to see what the server does not say of itself; False: its weights do not show it.

        Raises ConfigError: it cannot be used."""

    @abstractmethod
    def freeze(self) -> Sequence[Call]:
        """Calls after which nothing is sampled; requests in flight stay."""

    @abstractmethod
    def unfreeze(self) -> Call: ...

    @abstractmethod
    def relabel(self, label: str) -> Call:
        """Tokens that are sampled after it have this label."""

    @abstractmethod
    def label_in(self, alive: Any, state: Any) -> str:
        """The label in the answers of `alive` and `state`."""

    @abstractmethod
    def aborts(self, rids: Sequence[str]) -> Sequence[Call]:
        """Calls that end these requests; each is answered with its last tokens."""

    @abstractmethod
    def body_of(self, request: GenerationRequest, *, rid: str, cache_salt: str) -> dict[str, Any]:
        """The body of `generate`. Only `stop_token_ids` end a response: the model's own end token counts if it is
        there.

        Args:
            rid: the server's name of this attempt.
            cache_salt: requests with the same one share the KV cache of prompts.
        """

    @abstractmethod
    def reader(self, request: GenerationRequest, labels: Labels) -> AnswerReader: ...

    @abstractmethod
    def publish_calls(self, client: ServerClient, remote: RemoteEngineConfig) -> PublishCalls: ...


def require_same_model(url: str, model: ModelFacts, architecture: str | None, vocab_size: int | None) -> None:
    """Raises ConfigError: the server serves another model. What is None it does not say."""
    for what, there, here in (
        ("architecture", architecture, model.architecture),
        ("vocabulary", vocab_size, model.vocab_size),
    ):
        if here is not None and there is not None and here != there:
            found = f"the server has the {what} {there}, {model.path} has {here}"
            raise ConfigError(explain(f"{url} as a replica of {model.name}", found, "serve the model that is trained"))


def require_up(error: Refused) -> None:
    """Raises the error again, if it says that the server is not up."""
    if error.status == UNAVAILABLE:
        raise error


def require_key(url: str, version: str, path: str, error: Refused) -> None:
    """Raises ConfigError, if the server refuses the key, or wants one."""
    if error.status in (401, 403):
        do = "set rollout.remote.api_key_env to the environment variable that holds its key"
        raise ConfigError(explain(f"{path} of {url} ({version})", "it refuses the key", do)) from error


# What a server calls the weights that it samples with.


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
