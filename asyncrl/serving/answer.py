"""The choices of one request, generated concurrently."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter

import numpy as np

from asyncrl.chat.fields import ApiError
from asyncrl.data.call_splitter import CallFormat, joined_parts
from asyncrl.data.rows import Thinking
from asyncrl.errors import AsyncRLError, BadRequest
from asyncrl.remote.tasks import cancel
from asyncrl.serving.choice import Choice, ChoiceForm, Delta, Finished
from asyncrl.serving.fleet import Fleet
from asyncrl.serving.model_text import ModelText
from asyncrl.serving.protocol import Options
from asyncrl.types import SamplingParams, TokenChunk

logger = logging.getLogger(__name__)

Event = Delta | Finished

_SEED_STEP = 0x9E3779B97F4A7C15
"""Difference between the seeds of two choices; makes their random streams independent."""


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """Prompts ([P] int32 each) that fit the model, and how to continue them. Choice `i` belongs to prompt `i //
    options.n`. `calls`: how the reply may call tools. `thinking`: marks of its thoughts, if they leave apart from the
    text. `json_schema`: guides the reply. `near`: the replica of the previous turn. `only`: no other replica may
    answer."""

    prompts: tuple[np.ndarray, ...]
    options: Options
    session_id: str = ""
    request_id: str = ""
    near: int | None = None
    only: int | None = None
    calls: CallFormat | None = None
    thinking: Thinking | None = None
    json_schema: str | None = None

    def within(self, max_model_len: int) -> Question:
        """The question, asking for at most the tokens that the model has room for."""
        room = max_model_len - len(self.prompts[0])
        if room < 1 or (self.options.longest or 0) <= room:
            return self
        return replace(self, options=self.options.model_copy(update={"max_tokens": room}))

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.options.n


def sampling_of(
    options: Options, prompt_tokens: int, text: ModelText, json_schema: str | None = None
) -> SamplingParams:
    """Raises ApiError: prompt and answer do not fit the model."""
    room = text.max_model_len - prompt_tokens
    if room < 1 or (options.longest or 1) > room:
        asked = f" and max_tokens={options.longest}" if options.longest is not None else ""
        found = f"the prompt has {prompt_tokens} tokens{asked}, the model's context holds {text.max_model_len}"
        do = "shorten the prompt" if room < 1 else f"shorten the prompt or ask for at most {room} tokens"
        raise ApiError(400, f"{found}; {do}", param="max_tokens" if room > 0 else None, code="context_length_exceeded")
    eos = () if options.ignore_eos else text.stop_token_ids
    return SamplingParams(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        max_tokens=options.longest or room,
        min_tokens=min(options.min_tokens, room),
        stop_token_ids=tuple(sorted({*eos, *options.stop_token_ids})),
        json_schema=json_schema,
    )


async def answer(
    question: Question, fleet: Fleet, text: ModelText, *, deadline: float, start_by: float = math.inf
) -> AsyncGenerator[Event, None]:
    """Generates all choices of a question.

    Consumes: tokens that the fleet streams.
    Produces: `Delta`s, as soon as their text is certain, and one `Finished` per choice.
    Waits for: the fleet, until the request's deadline; for the first token also at most until `start_by`.
    Unblocked by: chunks of tokens.
    Stops when: every choice has ended, one has failed, or the caller closes the generator; running choices are then
    aborted.

    Args:
            deadline: on the clock of the running loop; also limits a slow reader.
            start_by: on the same clock.

        Raises ApiError: the question does not fit, a replica refused it, none serves, no token came by `start_by`, or
        the deadline passed.
    """
    options, loop = question.options, asyncio.get_running_loop()
    form = ChoiceForm(text, options, question.calls, question.thinking)
    samplings = [sampling_of(options, len(p), text, question.json_schema) for p in question.prompts]
    seed = secrets.randbits(63) if options.seed is None else options.seed
    events: asyncio.Queue[Event | BaseException] = asyncio.Queue()

    async def run(index: int) -> None:
        prompt_ids, sampling = question.prompts[index // options.n], samplings[index // options.n]
        choice: Choice

        def on_chunk(chunk: TokenChunk, replica_id: int) -> bool:
            try:
                events.put_nowait(choice.feed(chunk, replica_id))
            except Exception as e:  # noqa: BLE001 - task boundary: else it would end the collection of all requests
                events.put_nowait(e)
                return True
            return choice.stopped

        try:
            choice = Choice(index, prompt_ids, text, form, sampling.stop_token_ids)
            done = await fleet.generate(
                prompt_ids,
                sampling,
                session_id=question.session_id,
                near=question.near,
                only=question.only,
                seed=(seed + index * _SEED_STEP) % 2**63,
                on_chunk=on_chunk,
            )
            cached = min(done.cached_tokens, len(prompt_ids))
            events.put_nowait(choice.finish(done.finish_reason, cached_tokens=cached, interruptions=done.interruptions))
        except Exception as e:  # noqa: BLE001 - task boundary: raised by the consumer of the events
            events.put_nowait(e)

    # Each choice puts its events into one queue, so pieces of all choices are interleaved as they arrive.
    tasks = [asyncio.create_task(run(i), name=f"choice {i}") for i in range(question.num_choices)]
    try:
        left = len(tasks)
        while left:
            try:
                async with asyncio.timeout_at(min(deadline, start_by)):
                    event = await events.get()
                    if loop.time() >= deadline:
                        raise TimeoutError
            except TimeoutError:
                if loop.time() < deadline:
                    raise _no_place(fleet, question) from None
                found = "the answer was not finished in the longest time that a request may take"
                raise ApiError(504, f"{found}; ask for fewer tokens", code="deadline_exceeded") from None
            if isinstance(event, BaseException):
                raise _explained(event, fleet, question) from event
            left -= isinstance(event, Finished)
            # `start_by` limits only the first event; from then on the deadline does.
            start_by = math.inf
            yield event
    finally:
        await cancel(*tasks)


def _no_place(fleet: Fleet, question: Question) -> ApiError:
    reason = fleet.not_serving(question.only) or "every place for requests like this one is taken"
    return ApiError(503, f"no token came in time: {reason}; send it later", code="no_place")


def _explained(error: BaseException, fleet: Fleet, question: Question) -> ApiError:
    """The ApiError for an error of the fleet. The request was already checked, so a replica's refusal is an error of
    the service, unless it concerns the JSON schema, which only the engine can judge."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, BadRequest):
        param = "response_format" if question.calls is None else "tools"
        return ApiError(400, f"{param}: {error}", param=param, code="invalid_value")
    if isinstance(error, AsyncRLError):
        reason = fleet.not_serving(question.only)
        message = f"{error}; {reason}" if reason is not None and reason not in str(error) else str(error)
        return ApiError(503, message, code="not_serving")
    logger.error("an answer failed", exc_info=error)
    return ApiError(500, f"{type(error).__name__}: {error}", code="internal_error")


@dataclass(frozen=True, slots=True)
class WholeChoice:
    """A choice from its first token to its end: `delta` joins its pieces."""

    delta: Delta
    finished: Finished
    replica_ids: tuple[int, ...]


def whole_choices(events: Iterable[Event]) -> list[WholeChoice]:
    """The choices of an answer, in order of their index. Every choice must have ended."""
    of_choice = attrgetter("index")
    return [_whole_choice(list(own)) for _, own in groupby(sorted(events, key=of_choice), of_choice)]


def _whole_choice(events: list[Event]) -> WholeChoice:
    deltas = [event for event in events if isinstance(event, Delta)]
    (finished,) = (event for event in events if isinstance(event, Finished))
    last = deltas[-1] if deltas else Delta(finished.index, (), (), (), -1, -1)
    joined = replace(
        last,
        parts=joined_parts([part for event in events for part in event.parts]),
        token_ids=tuple(i for d in deltas for i in d.token_ids),
        sampled=tuple(s for d in deltas for s in d.sampled),
    )
    return WholeChoice(joined, finished, tuple(dict.fromkeys(d.replica_id for d in deltas)))
