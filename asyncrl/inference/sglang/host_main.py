"""The process that runs SGLang's Engine below a replica.

SGLang kills its own process when a scheduler dies. It runs in a separate process so that the replica survives, with the
tokens received so far. `python -m asyncrl.inference.sglang.host_main FD`; FD is one end of a socket pair.

Consumes: frames of the replica: (call id, method of `Host`, arguments).
Produces: frames ("answer", call id, result or error) and ("outputs", [Output, ...]), in the order of their making.
Waits for: frames; SGLang's answers.
Stops when: the replica's end closes, or a scheduler process ends, even while SGLang is starting.
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
from pathlib import Path
from typing import Any

import psutil

from asyncrl.inference.sglang.host import Host
from asyncrl.inference.shared.orphan_watch import when_closed, when_ended
from asyncrl.remote.tasks import kept
from asyncrl.workers.messages import LENGTH, packed

logger = logging.getLogger(__name__)

_WATCH_S = 0.25
_ENDING = threading.Lock()


def end(directory: str) -> None:
    """Kills all of SGLang's processes, removes its files, and kills this process."""
    _ENDING.acquire()  # never released: a second caller waits until the process is gone
    below = _suspended()  # running processes could map more segments
    segments = {path for pid in (os.getpid(), *(p.pid for p in below)) for path in _segments(pid)}
    for process in below:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(below, timeout=5.0)
    for path in segments:
        path.unlink(missing_ok=True)
    shutil.rmtree(directory, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGKILL)  # SGLang's exit hooks wait for processes that are gone


def _suspended() -> list[psutil.Process]:
    """Suspends and returns all descendants, except the resource tracker, which removes shared memory and semaphores and
    exits once all others are gone."""
    below: list[psutil.Process] = []
    # Repeat until no new process appears: a process may fork until it is suspended.
    while new := [p for p in psutil.Process().children(recursive=True) if p not in below and not _is_tracker(p)]:
        for process in new:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
        below += new
    return below


def _segments(pid: int) -> set[Path]:
    """SGLang's shared-memory files mapped by a process."""
    try:
        words = Path(f"/proc/{pid}/maps").read_text().split()
    except OSError:  # it has ended
        return set()
    return {Path(word) for word in words if word.startswith(("/dev/shm/sglang", "/dev/shm/sgl_shm"))}


def _is_tracker(process: Any) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return "resource_tracker" in " ".join(process.cmdline())
    return False


async def _serve(engine: Any, connection: socket.socket, directory: str) -> None:
    reader, writer = await asyncio.open_connection(sock=connection)

    def send(message: Any) -> None:
        writer.write(packed(message))

    host = Host(engine, send)
    calls: set[asyncio.Task[None]] = set()

    async def call(number: int, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            result, error = await getattr(host, method)(*arguments), ""
        except Exception as failure:  # task boundary: the replica gets it
            logger.exception("%s failed", method)
            result, error = None, f"{type(failure).__name__}: {failure}"
        # Outputs made before the answer must be sent before it.
        host.flush()
        send(("answer", number, result, error))

    async def watch() -> None:
        schedulers = [p for p in psutil.Process().children() if not _is_tracker(p)]
        while all(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in schedulers):  # noqa: ASYNC110 - a poll
            await asyncio.sleep(_WATCH_S)
        logger.error("a scheduler process of SGLang has ended")
        end(directory)

    watching = asyncio.create_task(watch())
    # Replaces SGLang's handler for a failed scheduler, which would kill everything and leave files behind.
    engine.tokenizer_manager.auto_create_handle_loop()
    asyncio.get_running_loop().add_signal_handler(signal.SIGQUIT, end, directory)
    config = engine.tokenizer_manager.model_config
    eos = sorted(getattr(config, "hf_eos_token_id", None) or ())
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    segments = [str(path) for process in processes for path in _segments(process.pid)]
    facts = {"vocab_size": config.vocab_size, "eos": eos, "segments": segments}
    send(("answer", 0, facts, ""))
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
            number, method, arguments = pickle.loads(await reader.readexactly(size))  # from the replica
            kept(calls, call(number, method, arguments), method)
    watching.cancel()


def main() -> None:
    logging.basicConfig(level=logging.WARNING)
    connection = socket.socket(fileno=int(sys.argv[1]))
    (size,) = LENGTH.unpack(_exactly(connection, LENGTH.size))
    start: dict[str, Any] = pickle.loads(_exactly(connection, size))  # from the replica
    directory = start["directory"]
    # Armed before the slow start of SGLang: the replica may die during it.
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
            connection.sendall(packed(("answer", 0, None, (type(error).__name__, str(error)))))
            return
        asyncio.run(_serve(engine, connection, directory))
    except BaseException:
        logger.exception("SGLang's process ends")
    finally:
        end(directory)


def _check_context(engine: Any, context_length: int) -> None:
    """Raises ConfigError: the KV cache is smaller than the longest request. SGLang would truncate responses."""
    from asyncrl.errors import ConfigError, explain
    from asyncrl.inference.sglang.host_process import SPARE_TOKENS

    needed, limit = context_length - SPARE_TOKENS, engine.tokenizer_manager.max_req_input_len
    if limit is not None and limit < needed:
        found = f"SGLang's KV cache has room for requests of {limit}"
        do = "raise rollout.sglang.max_total_tokens or mem_fraction_static, or lower max_model_len"
        raise ConfigError(explain(f"requests of {needed} tokens (rollout.sglang.max_model_len)", found, do))


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = connection.recv(size, socket.MSG_WAITALL)
    if len(data) < size:
        raise EOFError("the replica has ended")
    return data


if __name__ == "__main__":
    main()
