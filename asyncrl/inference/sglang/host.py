"""The process that runs SGLang's Engine below a replica.

SGLang ends the process that it runs in, with all that is in it, when a scheduler dies. So that the replica outlives
that, with the tokens that had arrived, SGLang runs here. `python -m asyncrl.inference.sglang.host FD` takes the
replica's end of a socket pair.

Consumes: frames of the replica: (call id, method of `Host`, arguments).
Produces: frames ("answer", call id, result or error) and ("outputs", [Output, ...]), in the order of their making.
Waits for: frames; SGLang's answers.
Stops when: the replica's end closes, or a scheduler process has ended; also while SGLang is still starting.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from asyncrl.inference.sglang.sampling_params import Asked
from asyncrl.inference.sglang.wire import SIZE_BYTES, Output, framed
from asyncrl.inference.shared.orphan_guard import when_closed, when_ended

logger = logging.getLogger(__name__)

_WATCH_S = 0.25
_ABORT_S = 1.0
"""What SGLang may take to answer an abort, before the request is ended without its answer."""
_SETTLE_S = 30.0
"""What the outputs from before a pause may take; more is an error of the call."""
_TURNS = 8
"""Turns of the event loop that a request needs from its task to SGLang's socket, and an output from there on."""


class Host:
    """SGLang's Engine, and the requests that it works on. Public methods are the calls of the replica."""

    def __init__(self, engine: Any, send: Callable[[Any], None]) -> None:
        from asyncrl.inference.sglang.logit_filter import LogitFilter
        from asyncrl.inference.sglang.support import abilities

        self._manager = engine.tokenizer_manager
        self._workers = engine.server_args.tp_size
        self._abilities = abilities()
        self._incremental = bool(getattr(engine.server_args, "incremental_streaming_output", False))
        self._filter = LogitFilter.to_str()
        self._send = send
        self._outputs: list[Output] = []
        self._requests: dict[str, asyncio.Task[None]] = {}
        self._begun: set[str] = set()
        """Requests of which an output has come: SGLang has them."""
        self._frozen = False
        self._order = asyncio.Lock()
        """Of calls that stop, change or start the schedulers: they work in the order of their arrival, also where the
        replica waits no longer for the one before."""

    # -- calls ---------------------------------------------------------------------------------------------------

    async def submit(self, asked: Asked) -> None:
        self._requests[asked.rid] = asyncio.create_task(self._generate(asked), name=asked.rid)

    async def abort(self, rids: list[str]) -> None:
        """Ends these requests; each gets a last output. Unknown ones are ignored: they may just have ended."""
        await self._let_enter(rids)
        tasks = {rid: self._requests[rid] for rid in rids if rid in self._requests}
        for rid in tasks:
            self._manager.abort_request(rid)
        if tasks:
            # A frozen scheduler answers only for the requests in its queue.
            await asyncio.wait(tasks.values(), timeout=0.0 if self._frozen else _ABORT_S)
        for rid, task in tasks.items():
            if not task.done():
                task.cancel()
                self._emit(_ended(rid))

    async def freeze(self, mode: str) -> None:
        """`mode`: in_place, or retract where SGLang computes a step ahead."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        async with self._order:
            await self._let_enter(list(self._requests))
            await self._manager.pause_generation(PauseGenerationReqInput(mode=mode))  # type: ignore[arg-type]
            self._frozen = True
            await self._settle()

    async def unfreeze(self) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        async with self._order:
            self._frozen = False
            await self._manager.continue_generation(ContinueGenerationReqInput())

    async def announce(self, version: str) -> None:
        """Tokens sampled from now on are of this version, for an SGLang that keeps count."""
        if self._abilities.version_spans:
            from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

            async with self._order:
                await self._settle()
                await self._manager.update_weight_version(
                    UpdateWeightVersionReqInput(new_version=version, abort_all_requests=False)
                )

    async def update(self, loader: str, payload: str) -> None:
        """Calls `loader` in every scheduler process, with `payload`, a colon and its tensor-parallel rank. Raises
        RuntimeError: SGLang refused."""
        import torch
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer

        manager = self._manager
        notes = [  # SGLang passes on named tensors only
            MultiprocessingSerializer.serialize([(f"{payload}:{rank}", torch.empty(0))])
            for rank in range(self._workers)
        ]
        request = UpdateWeightsFromTensorReqInput(serialized_named_tensors=notes, load_format=loader, flush_cache=False)
        async with self._order:
            if not self._abilities.update_session:
                _require(await manager.update_weights_from_tensor(request))
                return
            from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput, EndWeightUpdateReqInput

            _require(await manager.begin_weight_update(BeginWeightUpdateReqInput()))
            updated = await manager.update_weights_from_tensor(request)
            ended = await manager.end_weight_update(EndWeightUpdateReqInput())
            _require(updated)
            _require(ended)

    async def sleep(self, tags: list[str] | None) -> None:
        """Without a request of the replica's. Frozen in place, a scheduler still has those that were aborted, and would
        end; retracting drops them."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput, ReleaseMemoryOccupationReqInput

        async with self._order:
            await self._manager.pause_generation(PauseGenerationReqInput(mode="retract"))
            await self._settle()
            await self._manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=tags))

    async def wake_up(self, tags: list[str] | None) -> None:
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        async with self._order:
            await self._manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=tags))

    # -- requests ------------------------------------------------------------------------------------------------

    async def _generate(self, asked: Asked) -> None:
        """Moves what SGLang samples for one request into outputs, until the last."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        rid, sent, params = asked.rid, 0, asked.sampling_params
        if asked.filters is not None:
            params = params | {"custom_params": asked.filters}
        request = GenerateReqInput(
            rid=rid,
            input_ids=asked.input_ids,
            sampling_params=params,
            return_logprob=True,
            stream=True,
            extra_key=asked.extra_key,
            custom_logit_processor=None if asked.filters is None else self._filter,
        )
        try:
            async for out in self._manager.generate_request(request, None):
                output = _output(rid, out, sent, incremental=self._incremental)
                sent += len(output.ids)
                self._begun.add(rid)
                if asked.stops and (at := np.flatnonzero(np.isin(output.ids, list(asked.stops)))).size:
                    until = int(at[0]) + 1
                    self._emit(Output(rid, output.ids[:until], output.logprobs[:until], "stop", output.spans))
                    self._manager.abort_request(rid)
                    return
                self._emit(output)
                if output.reason is not None:
                    return
            self._emit(_ended(rid, error="SGLang ended it without a word"))
        except asyncio.CancelledError:
            raise
        except Exception as error:  # task boundary: it becomes the request's error
            logger.exception("request %s failed", rid)
            self._emit(_ended(rid, error=f"{type(error).__name__}: {error}"))
        finally:
            self._requests.pop(rid, None)
            self._begun.discard(rid)

    def _emit(self, output: Output) -> None:
        if not self._outputs:
            asyncio.get_running_loop().call_soon(self.flush)  # one frame for all outputs of a step
        self._outputs.append(output)

    def flush(self) -> None:
        outputs, self._outputs = self._outputs, []
        if outputs:
            self._send(("outputs", outputs))

    async def _let_enter(self, rids: list[str]) -> None:
        """What is asked of SGLang about a request that its scheduler does not have yet is lost."""
        if any(rid in self._requests and rid not in self._begun for rid in rids):
            for _ in range(_TURNS):
                await asyncio.sleep(0)

    async def _settle(self) -> None:
        """Returns when the scheduler has done all that was asked of it before, and its outputs have been emitted. It
        answers by another socket than the one of the outputs: a second answer leaves these time to arrive, and then
        none may be left to read for as many turns as the last of them takes to be handed on."""
        for _ in range(2):
            await self._manager.get_internal_state()
        async with asyncio.timeout(_SETTLE_S):
            await all_read(self._manager.recv_from_detokenizer, _TURNS + len(self._requests) // _TURNS)
        self.flush()


async def all_read(socket: zmq.Socket[Any], turns: int) -> None:
    """Returns when nothing has been left to read in a socket for so many turns of the event loop."""
    quiet = 0
    while quiet < turns:
        quiet = 0 if int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN else quiet + 1
        await asyncio.sleep(0)


def _output(rid: str, out: dict[str, Any], sent: int, *, incremental: bool) -> Output:
    """One of SGLang's responses. `sent`: tokens that came before. `incremental`: responses hold what is new; otherwise
    all tokens so far. The last response of a request that waited in SGLang's queue repeats tokens in both cases."""
    meta = out["meta_info"]
    first, new = (0 if incremental else sent), meta["completion_tokens"] - sent
    ids = np.asarray(out["output_ids"][first : first + new], np.int32)
    logprobs = meta.get("output_token_logprobs") or []
    values = np.array([entry[0] for entry in logprobs[first : first + new]], np.float32)
    finish = meta.get("finish_reason")
    if len(ids) != new or len(values) != new:
        found = f"{new} new tokens with {len(ids)} ids and {len(values)} log-probabilities"
        raise RuntimeError(f"SGLang answered {found}")
    if finish is None:
        return Output(rid, ids, values)
    spans = meta.get("weight_versions")
    refused = finish["type"] == "abort" and finish.get("status_code") is not None
    return Output(
        rid,
        ids,
        values,
        finish["type"],
        None if spans is None else tuple((span["version"], span["start"]) for span in spans),
        meta.get("cached_tokens", 0),
        str(finish.get("message", "")) if refused else "",
    )


def _ended(rid: str, error: str = "") -> Output:
    return Output(rid, np.zeros(0, np.int32), np.zeros(0, np.float32), "abort", error=error)


def _require(answer: Any) -> None:
    """SGLang answers (success, message)."""
    success, message = (answer.success, answer.message) if hasattr(answer, "success") else answer[:2]
    if not success:
        raise RuntimeError(message)


# -- the process -------------------------------------------------------------------------------------------------


_ENDING = threading.Lock()


def end(directory: str) -> None:
    """This process leads a group of its own, in which SGLang's processes are."""
    import psutil

    _ENDING.acquire()  # never released: whoever comes second waits until the process is gone
    # The tracker of shared memory and semaphores removes them, and ends, once nobody is left.
    below = [p for p in psutil.Process().children(recursive=True) if not _is_tracker(p)]
    segments = {path for pid in (os.getpid(), *(p.pid for p in below)) for path in _segments(pid)}
    for process in below:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(below, timeout=5.0)
    for path in segments:
        path.unlink(missing_ok=True)
    shutil.rmtree(directory, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGKILL)  # SGLang's exit hooks wait for processes that are gone


def _segments(pid: int) -> set[Path]:
    """SGLang's own files of shared memory that a process maps."""
    try:
        words = Path(f"/proc/{pid}/maps").read_text().split()
    except OSError:  # it has ended
        return set()
    return {Path(word) for word in words if word.startswith(("/dev/shm/sglang", "/dev/shm/sgl_shm"))}


def _is_tracker(process: Any) -> bool:
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        return "resource_tracker" in " ".join(process.cmdline())
    return False


async def _serve(engine: Any, connection: socket.socket, directory: str) -> None:
    import psutil

    reader, writer = await asyncio.open_connection(sock=connection)

    def send(message: Any) -> None:
        writer.write(framed(message))

    host = Host(engine, send)
    calls: set[asyncio.Task[None]] = set()

    async def call(number: int, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            result, error = await getattr(host, method)(*arguments), ""
        except Exception as failure:  # task boundary: the replica gets it
            logger.exception("%s failed", method)
            result, error = None, f"{type(failure).__name__}: {failure}"
        host.flush()
        send(("answer", number, result, error))

    async def watch() -> None:
        schedulers = [p for p in psutil.Process().children() if not _is_tracker(p)]
        while all(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in schedulers):  # noqa: ASYNC110 - a poll
            await asyncio.sleep(_WATCH_S)
        logger.error("a scheduler process of SGLang has ended")
        end(directory)

    watching = asyncio.create_task(watch())
    # SGLang's own handler, for a scheduler that failed, kills all at once and leaves its files.
    engine.tokenizer_manager.auto_create_handle_loop()
    asyncio.get_running_loop().add_signal_handler(signal.SIGQUIT, end, directory)
    config = engine.tokenizer_manager.model_config
    eos = sorted(getattr(config, "hf_eos_token_id", None) or ())
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    segments = [str(path) for process in processes for path in _segments(process.pid)]
    send(("answer", 0, {"vocab_size": config.vocab_size, "eos": eos, "segments": segments}, ""))
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            size = int.from_bytes(await reader.readexactly(SIZE_BYTES), "little")
            number, method, arguments = pickle.loads(await reader.readexactly(size))  # from the replica
            task = asyncio.create_task(call(number, method, arguments))
            calls.add(task)
            task.add_done_callback(calls.discard)
    watching.cancel()


def main() -> None:
    logging.basicConfig(level=logging.WARNING)
    connection = socket.socket(fileno=int(sys.argv[1]))
    size = int.from_bytes(_exactly(connection, SIZE_BYTES), "little")
    start: dict[str, Any] = pickle.loads(_exactly(connection, size))  # from the replica
    directory = start["directory"]
    when_ended(start["owner_pid"], lambda: end(directory))
    when_closed(connection, lambda: end(directory))
    try:
        from asyncrl.inference.sglang.support import check_sglang

        try:
            check_sglang()
            from sglang.srt.entrypoints.engine import Engine

            engine = Engine(**start["arguments"])
            _check_context(engine, start["arguments"]["context_length"])
        except Exception as error:  # process boundary: the replica gets it
            logger.exception("SGLang does not start")
            connection.sendall(framed(("answer", 0, None, (type(error).__name__, str(error)))))
            return
        asyncio.run(_serve(engine, connection, directory))
    except BaseException:
        logger.exception("SGLang's process ends")
    finally:
        end(directory)


def _check_context(engine: Any, context_length: int) -> None:
    """Raises ConfigError: the KV cache holds less than the longest request. SGLang would cut responses short."""
    from asyncrl.errors import ConfigError, explain
    from asyncrl.inference.sglang.host_process import SPARE_TOKENS

    needed, limit = context_length - SPARE_TOKENS, engine.tokenizer_manager.max_req_input_len
    if limit is not None and limit < needed:
        found = f"SGLang's KV cache has room for requests of {limit}"
        do = "raise rollout.sglang.max_total_tokens or mem_fraction_static, or lower max_model_len"
        raise ConfigError(explain(f"requests of {needed} tokens (rollout.sglang.max_model_len)", found, do))


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise EOFError("the replica has ended")
        data += part
    return data


if __name__ == "__main__":
    main()
