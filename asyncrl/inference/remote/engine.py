"""`RemoteEngine`: adapter to a server started by someone else."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace

from asyncrl.config.model import ModelConfig
from asyncrl.config.remote_engine import RemoteEngineConfig
from asyncrl.errors import BadRequest, GenerationError, explain
from asyncrl.inference.remote.dialect import NO_FILTERS, UNAVAILABLE, ForeignWeights, Labels, ModelTokens
from asyncrl.inference.remote.server_client import Call, Refused, ServerClient, Unanswered, Unreachable, read_key
from asyncrl.inference.remote.support import ServerDialect, ask
from asyncrl.inference.shared.process_engine import ProcessEngine
from asyncrl.inference.shared.stamped_stream import StampedStream, end_output
from asyncrl.types import Digest, EngineHealth, GenerationRequest, Manifest, TransferSource

logger = logging.getLogger(__name__)

_TRY_AGAIN_S = 1.0
"""Interval of attempts to reach a server that is not up."""
_LOOK_S = 1.0
"""Interval of health checks of a running server."""
_REFUSALS = 3
"""Consecutive failed connections after which the server counts as lost: a busy server may refuse one."""
_ABORT_S = 1.0
"""Time for the server to answer an abort with the last tokens before the connection is closed."""
_QUIET_S = 0.03
"""A frozen server that has been silent for this long counts as settled. Tokens that arrive even later still get the
right version: `StampedStream.hold`."""
_LEAVE_S = 2.0
"""Time for the final calls, which restore the server's state."""


class RemoteStream(StampedStream):
    """The adapter's record of one request, which has its own connection."""

    package = "the server"
    no_spans = (
        "it was sampled under two versions, and the server does not say which token under which",
        "set rollout.interrupt=abort_resume, or use a newer server",
    )

    def __init__(self, request: GenerationRequest) -> None:
        super().__init__(request)
        self.reading: asyncio.Task[None] | None = None

    def enter(self) -> None:
        super().enter()
        self.entered.set()  # unknown whether the server has it; without a token it starts again


class RemoteEngine(ProcessEngine[RemoteStream]):
    """An `InferenceEngine` over a server that someone else starts and restarts.

    A restarted server no longer has the last publish. To detect this, each version has a label on the server that is
    unique to this start of the replica. The engine polls the label and checks the labels of every response. Once the
    label is gone, the engine is dead; its successor waits for the server and starts over.

    Sampling is not deterministic, because the servers' is not.
    """

    package = "the server"
    key = "remote"

    def __init__(self, model: ModelConfig, settings: RemoteEngineConfig, *, load_real_weights: bool) -> None:
        """`settings.urls`: one address. `load_real_weights`: the server's weights count as version 0; otherwise nothing
        is sampled before the first publish."""
        super().__init__(model, settings, load_real_weights=load_real_weights)
        self._settings = settings
        (self._url,) = settings.urls
        self._labels = Labels(secrets.token_hex(8))
        self._label: str | None = None
        """Current label of the server's weights; None while it changes."""
        self._client: ServerClient | None = None
        self._dialect: ServerDialect | None = None
        self._proven = False
        """`VllmDialect.prove` has succeeded; otherwise it is repeated once a publish has arrived."""
        self._receiving = False
        self._loads = 0
        """Number of publishes sent to the server."""
        self._lost: str | None = None
        self._arrived_s = 0.0

    def health(self) -> EngineHealth:
        """Counts tokens as they arrive, including held ones."""
        found = super().health()
        held = sum(stream.num_sampled - stream.num_tokens for stream in self._queue.running)
        return replace(found, generated_tokens=found.generated_tokens + held)

    # -- what `ProcessEngine` asks for ---------------------------------------------------------------------------

    async def _launch(self) -> None:
        settings = self._settings
        client = self._client = ServerClient(self._url, read_key(settings.api_key_env))
        deadline = time.monotonic() + settings.wait_s
        dialect = await self._wait_for_server(client, deadline)
        if dialect.needs_model:
            dialect = dialect.of_model(await asyncio.to_thread(_tokens_of, self._model))
        self._dialect = dialect
        dialect.require_usable(self._url, settings)
        # Requests and a pause of a former replica may be left on the server.
        for call in dialect.take_over():
            await client.send(call, max(1.0, deadline - time.monotonic()))
        await self._set_label(self._labels.of(None))
        self._proven = await dialect.prove(client, self._url)
        self._publishes = dialect.publish_calls(client, settings)
        self._spawn(self._look(client), "remote-look")

    async def _shut_down(self) -> None:
        client, self._client = self._client, None
        if client is None:
            return
        if self._dialect is not None and self._lost is None:
            # A restarted server, or one that another replica took over, must not be resumed.
            with contextlib.suppress(Unreachable, Unanswered, Refused, ForeignWeights, TimeoutError):
                async with asyncio.timeout(_LEAVE_S):
                    await self._check_server(client)
                    await client.send(self._dialect.unfreeze(), _LEAVE_S)
        await client.close()

    def _death(self) -> str | None:
        return self._lost

    def _vocab_size(self) -> int:
        return self._spoken.vocab_size

    def _check(self, request: GenerationRequest) -> None:
        super()._check(request)
        sampling = request.sampling
        filtered = sampling.temperature and (sampling.top_p < 1 or sampling.top_k)
        if (filtered or sampling.min_tokens) and not self._spoken.filters:
            raise GenerationError(explain(f"generate {request.request_id!r}", *NO_FILTERS))

    def _new_stream(self, request: GenerationRequest) -> RemoteStream:
        return RemoteStream(request)

    async def _sample(self, stream: RemoteStream) -> None:
        stream.enter()
        # A commit is changing the label, so the version of the first tokens is unknown.
        if self._label is None:
            stream.hold()
        reading = stream.reading = asyncio.create_task(self._read(stream), name=f"read {stream.rid}")
        try:
            if stream.fate is not None:
                reading.cancel()
            await asyncio.wait((reading,))
        finally:
            reading.cancel()
        if not reading.cancelled():
            try:
                reading.result()
                return
            except Unreachable as error:
                await self._examine(str(error))
                if self._lost is not None:
                    raise
                logger.warning("request %s is cut off and will resume: %s", stream.request.request_id, error)
        # The connection ended without a last output: end the request as aborted, and it resumes.
        if not stream.ended.is_set():
            stream.drop_held()
            self._hand_over(stream, stream.take(end_output(), self._version), is_last=True)

    async def _abort_inside(self, streams: list[RemoteStream]) -> None:
        """Requests with tokens are aborted by name, so that their last tokens arrive; closing the connection ends the
        others."""
        dialect = self._spoken
        # A requeued request has no tokens, so its last output is not awaited.
        begun = [s for s in streams if s.num_tokens and s.fate == "abort" and s.reading is not None]
        if self._lost is None:
            await self._abort_at_server([s.rid for s in (streams if dialect.aborts_by_name_only else begun)])
            if begun:
                await asyncio.wait([s.reading for s in begun if s.reading is not None], timeout=_ABORT_S)
        for stream in streams:
            if stream.reading is not None:
                stream.reading.cancel()

    async def _abort_at_server(self, rids: list[str]) -> bool:
        """Returns whether the server answered; callers proceed either way."""

        async def send(call: Call) -> bool:
            try:
                await self._calls().send(call, _ABORT_S)
            except (Unreachable, Unanswered, Refused):
                return False
            return True

        return not rids or all(await asyncio.gather(*map(send, self._spoken.aborts(rids))))

    async def _freeze_inside(self) -> None:
        await self._send_all(self._spoken.freeze())

    async def _unfreeze_inside(self) -> None:
        await self._send_all([self._spoken.unfreeze()])
        if not self._proven and self._version is not None:
            self._proven = await self._spoken.prove(self._calls(), self._url)

    async def _settle(self) -> None:
        """Returns after `_QUIET_S` without output. Labels identify tokens that arrive later."""
        began_s = time.monotonic()
        while self._queue.running:
            self._require_alive()
            leaving = any(stream.fate is not None for stream in self._queue.running)
            if not leaving and time.monotonic() - max(began_s, self._arrived_s) >= _QUIET_S:
                return
            await asyncio.sleep(_QUIET_S / 10)

    async def _announce(self, version: int) -> None:
        for stream in self._queue.running:
            stream.hold()
        await self._set_label(self._labels.of(version))

    async def _receive(self, manifest: Manifest, source: TransferSource, timeout_s: float) -> Digest | None:
        self._receiving = True
        self._loads += 1
        try:
            return await super()._receive(manifest, source, timeout_s)
        finally:
            self._receiving = False

    # -- requests ------------------------------------------------------------------------------------------------

    async def _read(self, stream: RemoteStream) -> None:
        """Reads the server's answer to one request into its stream. Raises Unreachable: the connection broke."""
        dialect, asked = self._spoken, stream.request
        reader, told = dialect.reader(asked, self._labels), False
        body = dialect.body_of(asked, rid=stream.rid, cache_salt=self._labels.salt(self._salt))
        try:
            async for line in self._calls().lines(dialect.generate, body):
                self._arrived_s = time.monotonic()
                output = reader.take(line)
                if output is not None:
                    is_last = output.reason is not None
                    self._hand_over(stream, stream.take(output, self._version), is_last=is_last)
                    if is_last:
                        return
                # The response was cut here; the server does not know and would keep sampling.
                if reader.over and not told:
                    told = await self._abort_at_server([stream.rid])
        except ForeignWeights as error:
            self._lost = f"{self._url}: {error}"
            raise
        except Refused as error:
            if error.status in (400, 422):
                do = "look at the log of the server"
                raise BadRequest(explain(f"generate {asked.request_id!r}", str(error), do)) from error
            await self._examine(str(error))
            raise
        raise Unreachable("the answer ended in the middle")

    # -- the server ----------------------------------------------------------------------------------------------

    @property
    def _spoken(self) -> ServerDialect:
        assert self._dialect is not None, "the engine was started"
        return self._dialect

    def _calls(self) -> ServerClient:
        assert self._client is not None, "the engine was started"
        return self._client

    async def _wait_for_server(self, client: ServerClient, deadline: float) -> ServerDialect:
        """Raises the ConfigError of `ask`; GenerationError: the server did not come up."""
        while True:
            try:
                async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                    dialect = await ask(client, self._settings)
                    for call in dialect.wake(self._labels.of(None)):
                        await client.send(call, max(0.0, deadline - time.monotonic()))
                    return dialect
            except (Unreachable, Unanswered, Refused, TimeoutError) as error:
                # A refusal other than "not up" will not go away by waiting.
                if isinstance(error, Refused) and error.status != UNAVAILABLE:
                    raise
                if time.monotonic() + _TRY_AGAIN_S >= deadline:
                    asked = f"{self._url} as a replica, within rollout.remote.wait_s={self._settings.wait_s:g}"
                    do = "start the server, or see its log; docs/remote.md has the whole command"
                    raise GenerationError(explain(asked, f"it is not up: {error or 'no answer'}", do)) from error
            await asyncio.sleep(_TRY_AGAIN_S)

    async def _set_label(self, label: str) -> None:
        self._label = None
        await self._send_all([self._spoken.relabel(label)])
        self._label = label

    async def _send_all(self, calls: Sequence[Call]) -> None:
        """Sends short, idempotent calls. Retries once if the connection broke but the server is well. Raises
        Unreachable, Unanswered, Refused; the server may then be lost."""
        client, timeout_s = self._calls(), self._settings.lost_after_s
        for call in calls:
            try:
                await client.send(call, timeout_s)
                continue
            except (Unreachable, Unanswered) as error:
                await self._examine(str(error))
                if self._lost is not None or isinstance(error, Unanswered):
                    raise
            await client.send(call, timeout_s)

    async def _look(self, client: ServerClient) -> None:
        """Ends the engine when its server is lost.

        Consumes: the server's answers about its health and the label of its weights, every `_LOOK_S`.
        Produces: the end of the engine, with the reason.
        Waits for: each answer, at most `lost_after_s`.
        Unblocked by: the server, or the deadline.
        Stops when: the engine ends.
        """
        refusals, answered_s = 0, time.monotonic()
        # A connection refused once may be a busy server; an answer that takes too long has its own limit.
        while self._lost is None:
            await asyncio.sleep(_LOOK_S)
            try:
                await self._check_server(client)
            except Unreachable as error:
                refusals += 1
                if refusals >= _REFUSALS:
                    self._lose(str(error))
            except Unanswered as error:
                if time.monotonic() - answered_s >= self._settings.lost_after_s:
                    self._lose(str(error))
            except (Refused, ForeignWeights) as error:
                self._lose(str(error))
            else:
                refusals, answered_s = 0, time.monotonic()

    async def _examine(self, why: str) -> None:
        """Checks immediately that the server is alive and has the current label; sets `_lost` otherwise. `why`: the
        reason for the check."""
        # Only broken connections are retried; every other outcome is conclusive.
        for attempt in range(_REFUSALS):
            try:
                await self._check_server(self._calls())
                return
            except (Unreachable, Unanswered, Refused, ForeignWeights) as error:
                if attempt + 1 == _REFUSALS or not isinstance(error, Unreachable):
                    self._lose(f"{why}; {error}")
                    return
            await asyncio.sleep(_LOOK_S / 10)

    async def _check_server(self, client: ServerClient) -> None:
        """Raises Unreachable, Unanswered, Refused; ForeignWeights: the server does not have the last publish."""
        dialect, timeout_s = self._spoken, self._settings.lost_after_s
        alive = await client.get(dialect.alive, timeout_s=timeout_s)
        expected = self._label
        if expected is None or self._receiving:  # a server that loads weights only answers `alive`
            return
        loads = self._loads
        try:
            state = await client.get(dialect.state, timeout_s=timeout_s)
        except Unanswered:
            if self._receiving or self._loads != loads:
                return  # a publish started during the call
            raise
        # Compare only if no commit changed the label during the calls.
        if self._label == expected:
            self._labels.version(dialect.label_in(alive, state))

    def _lose(self, why: str) -> None:
        if self._lost is None:
            self._lost = f"the server {self._url} is lost: {why}"


def _tokens_of(model: ModelConfig) -> ModelTokens:
    from transformers import AutoConfig, GenerationConfig

    common = {"revision": model.revision, "trust_remote_code": model.trust_remote_code}
    text = AutoConfig.from_pretrained(model.path, **common).get_text_config()
    ends = [text.eos_token_id]
    with contextlib.suppress(OSError):  # there is no such file
        ends.append(GenerationConfig.from_pretrained(model.path, revision=model.revision or "main").eos_token_id)
    eos = {i for each in ends if each is not None for i in (each if isinstance(each, list) else [each])}
    return ModelTokens(text.vocab_size, bool(text.tie_word_embeddings), frozenset(eos))
