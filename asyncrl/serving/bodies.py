"""Answers as JSON for OpenAI's clients, with vLLM's names for token ids, and our weight versions."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from asyncrl.chat.fields import ApiError
from asyncrl.chat.http import frame
from asyncrl.chat.messages import said_message
from asyncrl.chat.reply import (
    DONE,
    LEAST_LOGPROB,
    PING_S,
    End,
    Event,
    Reply,
    call_body,
    call_id,
    head,
    logprob_of,
    made_call,
    ping_of,
    usage,
    written_parts,
)
from asyncrl.data.call_splitter import Part, text_in, thought_in
from asyncrl.data.tool_calls import ToolCall
from asyncrl.serving.answer import Question, WholeChoice
from asyncrl.serving.choice import Delta, Finished, SampledToken


class Bodies(ABC):
    """Writes one answer, as one body or as frames of server-sent events."""

    kind: str
    stream_kind: str

    def __init__(self, question: Question, model: str, prefix: str) -> None:
        self._question = question
        self._options = question.options
        self._whole_head = head(prefix, self.kind, model, question.request_id)
        self._head = self._whole_head | {"object": self.stream_kind}
        self._begun: set[int] = set()
        self._num_calls: Counter[int] = Counter()

    def whole(self, choices: Sequence[WholeChoice]) -> dict[str, Any]:
        body = {
            **self._whole_head,
            "choices": [self._whole_choice(c) for c in choices],
            "usage": self._usage([c.finished for c in choices]),
            "weight_version": _latest([c.finished for c in choices]),
        }
        return body | self._prompt_of_request()

    def frames(self, event: Delta | Finished) -> Iterator[str]:
        if isinstance(event, Finished):
            yield frame(self.finished(event))
        elif event.token_ids:
            yield frame(self.delta(event))

    def last(self, finished: Sequence[Finished]) -> Iterator[str]:
        """The frames after the end of all choices."""
        if self._options.include_usage:
            yield frame({**self._head, "choices": [], "usage": self._usage(finished)})
        yield DONE

    def failed(self, error: ApiError) -> str:
        return frame(error.body())

    def delta(self, delta: Delta) -> dict[str, Any]:
        """One streamed piece."""
        first = delta.index not in self._begun
        self._begun.add(delta.index)
        choice = {"index": delta.index, "finish_reason": None}
        choice |= self._piece(delta.index, delta.parts, first)
        choice["logprobs"] = self._logprobs(delta.sampled) if delta.sampled else None
        if self._options.return_token_ids:
            choice["token_ids"] = list(delta.token_ids)
            if first:
                choice |= self._prompt_of_choice(delta.index)
        body = {**self._head, "choices": [choice], "weight_version": delta.version}
        if first and len(self._begun) == 1:
            body |= self._prompt_of_request()
        return self._with_usage(body)

    def finished(self, finished: Finished) -> dict[str, Any]:
        """The last piece of a choice."""
        first = finished.index not in self._begun
        choice = _end_of(finished) | self._piece(finished.index, finished.parts, first) | {"logprobs": None}
        return self._with_usage({**self._head, "choices": [choice], "weight_version": _latest([finished])})

    def _usage(self, finished: Sequence[Finished]) -> dict[str, Any]:
        """Each prompt counts once for all its choices, with the cached tokens of its first choice."""
        prompt_tokens = sum(len(p) for p in self._question.prompts)
        cached = sum(f.cached_tokens for f in finished if f.index % self._options.n == 0)
        made = usage(prompt_tokens, sum(f.num_tokens for f in finished))
        return made | {"prompt_tokens_details": {"cached_tokens": cached}}

    def _with_usage(self, body: dict[str, Any]) -> dict[str, Any]:
        return body | {"usage": None} if self._options.include_usage else body

    def _whole_choice(self, choice: WholeChoice) -> dict[str, Any]:
        body = _end_of(choice.finished) | self._content(choice.delta.parts)
        body["logprobs"] = self._logprobs(choice.delta.sampled) if self._options.logprobs else None
        if self._options.return_token_ids:
            body["token_ids"] = list(choice.delta.token_ids)
            body |= self._prompt_of_choice(choice.delta.index)
        return body

    @abstractmethod
    def _content(self, parts: Sequence[Part]) -> dict[str, Any]: ...

    @abstractmethod
    def _piece(self, index: int, parts: Sequence[Part], first: bool) -> dict[str, Any]: ...

    @abstractmethod
    def _logprobs(self, sampled: Sequence[SampledToken]) -> dict[str, Any]: ...

    def _prompt_of_choice(self, index: int) -> dict[str, Any]:
        return {}

    def _prompt_of_request(self) -> dict[str, Any]:
        return {}


class ChatBodies(Bodies):
    kind = "chat.completion"
    stream_kind = "chat.completion.chunk"

    def _content(self, parts: Sequence[Part]) -> dict[str, Any]:
        calls = [call_body(made_call(part, call_id())) for part in parts if isinstance(part, ToolCall)]
        return {"message": said_message(parts, calls)}

    def _piece(self, index: int, parts: Sequence[Part], first: bool) -> dict[str, Any]:
        text = text_in(parts)
        delta: dict[str, Any] = {"role": "assistant", "content": text} if first else {"content": text} if text else {}
        if thought := thought_in(parts):
            delta["reasoning_content"] = thought
        if calls := [part for part in parts if isinstance(part, ToolCall)]:
            begun = self._num_calls[index]
            self._num_calls[index] += len(calls)
            delta["tool_calls"] = [
                {"index": i, **call_body(made_call(c, call_id()))} for i, c in enumerate(calls, begun)
            ]
        return {"delta": delta}

    def _logprobs(self, sampled: Sequence[SampledToken]) -> dict[str, Any]:
        return {"content": [logprob_of(s.text, s.logprob) for s in sampled], "refusal": None}

    def _prompt_of_request(self) -> dict[str, Any]:
        return {"prompt_token_ids": self._question.prompts[0].tolist()} if self._options.return_token_ids else {}


class CompletionBodies(Bodies):
    kind = stream_kind = "text_completion"

    def _content(self, parts: Sequence[Part]) -> dict[str, Any]:
        return {"text": text_in(parts)}

    def _piece(self, index: int, parts: Sequence[Part], first: bool) -> dict[str, Any]:
        return self._content(parts)

    def _logprobs(self, sampled: Sequence[SampledToken]) -> dict[str, Any]:
        return {
            "tokens": [s.text for s in sampled],
            "token_logprobs": [max(s.logprob, LEAST_LOGPROB) for s in sampled],
            "text_offset": [s.offset for s in sampled],
            "top_logprobs": None,
        }

    def _prompt_of_choice(self, index: int) -> dict[str, Any]:
        return {"prompt_token_ids": self._question.prompts[index // self._options.n].tolist()}


class DialectBodies:
    """As `Bodies`, for the single reply to a question in a dialect. Sends pings while the model generates a call, since
    the stream is silent then.

    Args:
        clock: in seconds, for the intervals between pings.
    """

    def __init__(self, question: Question, reply: Reply, clock: Callable[[], float] = time.monotonic) -> None:
        self._reply = reply
        self._clock = clock
        self._sent_at = clock()
        self._prompt_tokens = len(question.prompts[0])
        self._begun = False

    def whole(self, choices: Sequence[WholeChoice]) -> dict[str, Any]:
        (choice,) = choices
        self._reply.begin(self._prompt_tokens)
        self._parts(choice.delta.parts)
        self._reply.end(self._end(choice.finished))
        return self._reply.whole()

    def frames(self, event: Delta | Finished) -> Iterator[str]:
        events = [] if self._begun else self._reply.begin(self._prompt_tokens)
        self._begun = True
        events += self._parts(event.parts)
        if isinstance(event, Finished):
            events += self._reply.end(self._end(event))
        # No event while a call is generated: a ping keeps proxies from closing the connection.
        now = self._clock()
        frames = [frame(data, name) for name, data in events]
        if not frames and now - self._sent_at >= PING_S:
            frames = [ping_of(self._reply)]
        if frames:
            self._sent_at = now
        return iter(frames)

    def last(self, finished: Sequence[Finished]) -> Iterator[str]:
        del finished  # the reply's end has all of it
        return iter(())

    def failed(self, error: ApiError) -> str:
        name, data = self._reply.failed(error)
        return frame(data, name)

    def _parts(self, parts: Sequence[Part]) -> list[Event]:
        return written_parts(self._reply, [made_call(p, call_id()) if isinstance(p, ToolCall) else p for p in parts])

    def _end(self, finished: Finished) -> End:
        stop = finished.stop_reason if isinstance(finished.stop_reason, str) else None
        reason, version, cached = finished.finish_reason, _latest([finished]), finished.cached_tokens
        return End(reason, self._prompt_tokens, finished.num_tokens, version, cached, stop)


def _latest(finished: Sequence[Finished]) -> int | None:
    """The newest version that wrote a token of these choices."""
    return max((span.version for f in finished for span in f.versions), default=None)


def _end_of(finished: Finished) -> dict[str, Any]:
    return {
        "index": finished.index,
        "finish_reason": finished.finish_reason,
        "stop_reason": finished.stop_reason,
        "weight_versions": [asdict(span) for span in finished.versions],
    }
