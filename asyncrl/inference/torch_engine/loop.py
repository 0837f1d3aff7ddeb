"""The decode loop of the embedded engine: one thread that owns the model, the decode slots and the waiting requests."""

from __future__ import annotations

import itertools
import queue
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from asyncrl.errors import GenerationError, explain
from asyncrl.inference.shared.engine_queue import enqueue
from asyncrl.inference.shared.streams import NO_VERSION, empty_chunk
from asyncrl.inference.torch_engine.runner import ModelRunner, Prefill
from asyncrl.inference.torch_engine.sampling import sample, sample_with_sets
from asyncrl.inference.torch_engine.slots import SlotTable
from asyncrl.types import FinishReason, GenerationRequest, PauseMode, TokenChunk

_IDLE_WAIT_S = 1.0


@dataclass(slots=True)
class _Wave:
    """Requests whose prompts are prefilled together. `requests[i]` lists the requests that share prompt i. Prompts of
    one token need no prefill and are not included."""

    prefill: Prefill
    requests: list[list[GenerationRequest]]

    @property
    def size(self) -> int:
        return sum(map(len, self.requests))


@dataclass(slots=True)
class Counters:
    """Written by the decode thread only; read by other threads."""

    running: int = 0
    version: int | None = None
    busy_s: float = 0.0
    generated_tokens: int = 0
    decode_steps: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class LoopReport:
    """Results since the last report: chunks in sampling order, then the tickets of finished commands."""

    chunks: tuple[TokenChunk, ...] = ()
    tickets: tuple[int, ...] = ()


class DecodeLoop:
    """Owns the slots, the waiting requests and the pause state. All methods run in the decode thread: others send a
    `Command`. A `ticket` identifies a command that gets an answer."""

    def __init__(
        self,
        runner: ModelRunner,
        commands: queue.SimpleQueue[Command],
        report: Callable[[LoopReport], None],
        *,
        num_slots: int,
        chunk_tokens: int,
        version: int | None,
    ) -> None:
        self.runner = runner
        self._commands = commands
        self._report = report
        self._slots = SlotTable(num_slots, chunk_tokens, runner.expert_row)
        self._waiting: deque[GenerationRequest] = deque()
        self._scoring: deque[GenerationRequest] = deque()
        """Requests that only score given tokens (`score_from`); they take no slot."""
        self._wave: _Wave | None = None
        self._paused = False
        self._drain_tickets: list[int] = []
        self._chunks: list[TokenChunk] = []
        self._tickets: list[int] = []
        self._stopped = False
        self.counters = Counters(version=version)

    @torch.inference_mode()
    def run(self) -> None:
        """Serves commands and decodes.

        Consumes: commands (submit, abort, pause, resume, commit, sleep, wake, stop).
        Produces: one report per round, with the chunks and acknowledgements of all requests.
        Waits for: a command, while nothing may be sampled.
        Unblocked by: commands.
        Stops when: `stop` is called, or at the first error, which the thread's owner turns into failed requests.
        """
        while self._serve_commands():
            self._flush_report()  # an abort is answered before the next step, not after it
            if self._active:
                started = time.perf_counter()
                self._round()
                self.counters.busy_s += time.perf_counter() - started
                self._flush_report()

    @property
    def _running(self) -> int:
        return self._slots.n + (self._wave.size if self._wave else 0)

    @property
    def _draining(self) -> bool:
        return bool(self._drain_tickets)

    @property
    def _active(self) -> bool:
        """Whether a round has work to do. Without a version the weights are dummies and nothing is sampled."""
        if self._paused or self.counters.version is None:
            return False
        waits = bool(self._waiting or self._scoring)
        return self._running > 0 or waits or self._draining  # the last round of a drain ends it

    def _serve_commands(self) -> bool:
        """Serves all queued commands; waits for one if there is nothing to decode. Returns False after `stop`."""
        # Idle: block until a command comes, so that the thread takes no CPU time.
        if not self._active:
            try:
                self._commands.get(timeout=_IDLE_WAIT_S)(self)
            except queue.Empty:
                # An empty report detects a closed event loop of the owner, which sends a `stop`.
                self._report(LoopReport())
                return True
        while not self._stopped and not self._commands.empty():
            self._commands.get_nowait()(self)
        self.counters.running = self._running
        return not self._stopped

    # -- commands ------------------------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest) -> None:
        scores = request.sampling.score_from is not None
        enqueue(self._scoring if scores else self._waiting, request, lambda r: r.first_position > 0)

    def pause(self, mode: PauseMode, ticket: int) -> None:
        if mode == "drain" and not self._paused and self._running > 0:
            self._drain_tickets.append(ticket)
            return
        if mode == "abort":
            # A second pause must not abort requests that were queued after the first.
            self.abort(self._running_ids() if self._paused else None)
        self._emit_buffered()
        self._paused = True
        self._tickets += [*self._drain_tickets, ticket]
        self._drain_tickets.clear()

    def resume(self, ticket: int) -> None:
        self._paused = False
        self._drain_tickets.clear()
        self._tickets.append(ticket)

    def sleep(self, ticket: int) -> None:
        self.counters.version = None  # the weights are dropped: only a commit may sample again
        self.runner.release()
        self._tickets.append(ticket)

    def wake(self, parts: Collection[str], ticket: int) -> None:
        """`parts`: as `SleepingEngine.wake_up` names them."""
        self.runner.restore(parts)
        self._tickets.append(ticket)

    def stop(self) -> None:
        self._stopped = True

    def commit(self, version: int | None, ticket: int) -> None:
        self._emit_buffered()
        if version is not None:
            self.counters.version = version
        if self._wave:  # a prompt prefilled by two versions matches neither: start over
            self._wave.prefill = self.runner.begin(self._wave.prefill.prompts)
        self._tickets.append(ticket)

    def _running_ids(self) -> tuple[str, ...]:
        in_wave = [r.request_id for same in (self._wave.requests if self._wave else ()) for r in same]
        return (*self._slots.request_ids, *in_wave)

    def abort(self, request_ids: Sequence[str] | None, ticket: int | None = None) -> None:
        """`request_ids` None: all. `ticket` None: no answer is needed."""
        slots = self._slots
        ids = None if request_ids is None else frozenset(request_ids)
        self._finish_each([(np.arange(slots.n) if ids is None else slots.rows_of(list(ids)), "abort")])
        self._waiting = deque(self._without(self._waiting, ids))
        self._scoring = deque(self._without(self._scoring, ids))
        if self._wave:
            # Places stay in the wave even if empty: they index its prompts.
            self._wave.requests = [self._without(same, ids) for same in self._wave.requests]
            if self._wave.size == 0:
                self._wave = None
        if ticket is not None:
            self._tickets.append(ticket)

    def _without(self, queued: Iterable[GenerationRequest], ids: frozenset[str] | None) -> list[GenerationRequest]:
        """Ends the queued requests in `ids` (None: all) and returns the others."""
        kept = []
        for request in queued:
            if ids is None or request.request_id in ids:
                self._chunks.append(empty_chunk(request, self.counters.version, "abort"))
            else:
                kept.append(request)
        return kept

    def _round(self) -> None:
        """One scoring batch and one prefill pass, if any wait, then one decode step."""
        if self._scoring and not self._draining:
            self._score()
        if self._wave is None and not self._draining:
            self._wave = self._admit()
        if self._wave:
            self.runner.prefill(self._wave.prefill)
            if self._wave.prefill.finished:
                self._seat(self._wave)
                self._wave = None
        if self._slots.n:
            self._step()
        self.counters.running = self._running
        # A drain ends with its last running request; queued requests wait for `resume`.
        if self._draining and self._running == 0:
            self._paused = True
            self._tickets += self._drain_tickets
            self._drain_tickets.clear()

    def _score(self) -> None:
        """Answers the oldest scoring requests that fit into one prefill pass together, at least one."""
        taken = [self._scoring.popleft()]
        width = len(taken[0].prompt_ids)
        # Padding counts: the pass computes len(taken) * width tokens.
        while self._scoring:
            width = max(width, len(self._scoring[0].prompt_ids))
            if not self._joins(self._scoring[0], taken, width):
                break
            taken.append(self._scoring.popleft())
        starts = [request.sampling.score_from or 1 for request in taken]
        tops = [request.sampling.score_top for request in taken]
        scored = self.runner.score([request.prompt_ids for request in taken], starts, tops)
        for request, start, (logprobs, extra) in zip(taken, starts, scored, strict=True):
            self._require_finite(logprobs)
            self._emit(request.request_id, request.prompt_ids[start:].astype(np.int32), logprobs, "stop", extra)

    def _admit(self) -> _Wave | None:
        """Selects requests for the free slots and one prefill pass: the oldest request and the ones closest to it in
        prompt length. A pass pads all prompts to the longest, and after a publish under abort_resume responses of every
        length restart together.

        Prompts that differ only in their last token are prefilled once: the decode step always feeds the last token, so
        the first sampled token is computed like any other.
        """
        free = self._slots.num_slots - self._slots.n
        # Phase 1: group the candidates by prompt, without the last token.
        prompts: dict[bytes, list[GenerationRequest]] = {}
        for request in itertools.islice(self._waiting, free):
            cached = request.prompt_ids[:-1].astype(np.int32, copy=False)  # one dtype: equal prompts, equal bytes
            prompts.setdefault(cached.tobytes(), []).append(request)
        taken = prompts.pop(b"", [])  # nothing to prefill
        self.runner.clear([self._slots.add(request) for request in taken])
        # Phase 2: fill the pass, nearest prompt lengths first, up to `prefill_tokens` with padding.
        wave, width = [], 0
        first = len(next(iter(prompts), b""))
        for same in (prompts[key] for key in sorted(prompts, key=lambda key: abs(len(key) - first))):
            width = max(width, len(same[0].prompt_ids) - 1)
            if wave and not self._joins(same[0], [others[0] for others in wave], width):
                break
            wave.append(same)
            taken = [*taken, *same]
        # Phase 3: put the candidates that were not taken back at the front, in order.
        ids = {request.request_id for request in taken}
        seen = [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]
        self._waiting.extendleft(request for request in reversed(seen) if request.request_id not in ids)
        return _Wave(self.runner.begin([same[0].prompt_ids[:-1] for same in wave]), wave) if wave else None

    def _joins(self, request: GenerationRequest, taken: Sequence[GenerationRequest], width: int) -> bool:
        """True if the request fits into one pass with those `taken`: padding to `width` counts, and recurrent layers
        take none."""
        equal = len(request.prompt_ids) == len(taken[0].prompt_ids)
        fits = (len(taken) + 1) * width <= self.runner.prefill_tokens
        return fits and (equal or not self.runner.needs_equal_lengths)

    def _seat(self, wave: _Wave) -> None:
        places: list[int] = []
        rows: list[int] = []
        for place, same in enumerate(wave.requests):
            for request in same:
                places.append(place)
                rows.append(self._slots.add(request))
        self.runner.seat(wave.prefill, places, rows)

    def _step(self) -> None:
        slots = self._slots
        experts = None
        if slots.records:
            # The hooks copy the experts of every layer, so they run only on request.
            logits, experts = self.runner.decode_and_record(slots.tokens, slots.lengths)
        else:
            logits = self.runner.decode(slots.tokens, slots.lengths)
        kept = None
        if most := slots.most_kept:
            drawn, drawn_logprobs, sets = sample_with_sets(logits, slots.sampling(), most)
            kept = sets.cpu().numpy()
        else:
            drawn, drawn_logprobs = sample(logits, slots.sampling())
        tokens, logprobs = drawn.cpu().numpy(), drawn_logprobs.cpu().numpy()
        self._require_finite(logprobs)
        self.counters.generated_tokens += slots.n
        self.counters.decode_steps += 1
        # Rows that need a chunk or have ended; all others cost no Python work.
        due = slots.advance(tokens, logprobs, experts, kept)
        for row in due.full.tolist():
            self._emit_row(row, None)
        if len(due.stopped) or len(due.exhausted):
            self._finish_each([(due.stopped, "stop"), (due.exhausted, "length")])

    def _require_finite(self, logprobs: np.ndarray) -> None:
        """Raises GenerationError, which ends the engine: its weights are unusable."""
        if not np.isfinite(logprobs).all():
            found = "log-probabilities that are not finite: the weights or the activations overflow"
            do = "look at train/grad_norm of the steps before it; float16 overflows where bfloat16 does not"
            raise GenerationError(explain(f"a token by version {self.counters.version}", found, do))

    def _finish_each(self, ends: list[tuple[np.ndarray, FinishReason]]) -> None:
        for rows, reason in ends:
            for row in rows.tolist():
                self._emit_row(row, reason)
        self.runner.move(self._slots.remove(np.concatenate([rows for rows, _ in ends])))

    def _emit_buffered(self) -> None:
        """Emits all buffered tokens: a chunk has one version, and a paused engine must not hold tokens that a client
        could lose."""
        for row in self._slots.buffered_rows().tolist():
            self._emit_row(row, None)

    def _emit_row(self, row: int, reason: FinishReason | None) -> None:
        extra = self._slots.extra(row)
        self._emit(self._slots.request_ids[row], *self._slots.take(row), reason, extra)

    def _emit(
        self,
        request_id: str,
        ids: np.ndarray,
        logprobs: np.ndarray,
        reason: FinishReason | None,
        extra: Mapping[str, np.ndarray],
    ) -> None:
        version = self.counters.version
        stamp = NO_VERSION if version is None else version
        self._chunks.append(TokenChunk(request_id, ids, logprobs, stamp, reason, extra=extra))

    def _flush_report(self) -> None:
        if self._chunks or self._tickets:
            self._report(LoopReport(tuple(self._chunks), tuple(self._tickets)))
            self._chunks.clear()
            self._tickets.clear()


Command = Callable[[DecodeLoop], None]
"""A call of the loop's thread."""
