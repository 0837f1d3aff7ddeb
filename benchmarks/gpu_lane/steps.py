"""What the lane looks at, one function for each step. It prints figures, and raises AssertionError where a mark is
missed."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.gpu_lane.job import Link, Replica, Trainer, figure, peak_gib, trainer, write_model

MIB = 1 << 20
LOST_S = 10.0
"""Deadline of a transfer whose receiver is lost."""
OTHER_HOST = {"NCCL_HOSTID": "replica", "NCCL_SOCKET_IFNAME": "lo"}
"""NCCL then takes one GPU for two."""


@contextmanager
def made(size: str, *, tiny: bool) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory:
        write_model(size, Path(directory), tiny=tiny)
        yield Path(directory)


def _random_responses(tokens: int, count: int) -> list[Any]:
    import numpy as np

    draw = np.random.default_rng(0)
    each = tokens // count
    prompt = min(64, each // 2)
    return [
        (
            draw.integers(0, 256, prompt).tolist(),
            draw.integers(0, 256, each - prompt).tolist(),
            [-5.0] * (each - prompt),
            [0],
        )
        for _ in range(count)
    ]


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


# -- a trainer and an engine on one GPU ------------------------------------------------------------------------------


def pair(transport: str, *, tiny: bool, size: str = "0.6b", buckets: tuple[int, ...] = ()) -> None:
    """Three times publish, generate, compare, train. Digests and stamps are exact; the log-probabilities differ as much
    with every version: a stale or a partial publish differs by more than 0.1. Then publishes with these `buckets`, and
    once into a replica that sees no GPU, through host memory."""
    if transport == "collective":
        os.environ |= {"NCCL_HOSTID": "trainer", "NCCL_SOCKET_IFNAME": "lo"}
    count, tokens, budget = (8, 16, 2048) if tiny else (64, 256 if transport == "ipc" else 64, 16384)
    with made(size, tiny=tiny) as path, trainer(path) as own:
        replica = Replica(path, environment=OTHER_HOST if transport == "collective" else None)
        link, means, speeds = Link(own, replica, transport, 256 * MIB), [], []
        for version in range(3):
            speeds.append(link.publish(version, verify=version == 0))
            responses = replica.generate(count, tokens)
            assert all(r[3] == [version] for r in responses), f"stamps of version {version}"
            plan = own.plan(responses, budget)
            found = own.mismatch(plan, responses)
            figure(version=version, **found)
            means.append(found["mean"])
            own.step(plan, sum(len(r[0]) + len(r[1]) for r in responses))
        publishes(own, replica, buckets)
        replica.stop()
        if buckets:
            hidden = Replica(path, slots=8, length=256, environment={"CUDA_VISIBLE_DEVICES": ""})
            publishes(own, hidden, (64 * MIB,))
            hidden.stop()
    assert max(means) < 1e-2, f"log-probabilities differ by {means} nats"
    assert max(means) < 5 * min(means) + 1e-4, f"one version differs more than the others: {means}"
    if transport == "collective" and not _has_cuda():
        figure(unjudged="NCCL")
    elif transport == "ipc" and (tiny or not _has_cuda()):
        figure(unjudged="the speed")
    elif transport == "ipc" and not link.offers_gpu_memory:
        figure(unjudged="the speed: CUDA IPC is refused here, and publishes went through host memory")
    elif transport == "ipc":
        assert max(speeds) >= 20, f"a publish runs at {max(speeds):.1f} GB/s; 20 are expected"


def publishes(own: Trainer, replica: Replica, buckets: tuple[int, ...]) -> None:
    """Publishes by `ipc`, with digests and without."""
    for number, bucket in enumerate(buckets):
        link = Link(own, replica, "ipc", bucket)
        for version, verify in enumerate((True, False, False)):
            link.publish(100 + 10 * number + version, verify=verify)


# -- a receiver that is lost -----------------------------------------------------------------------------------------


def fault(how: str, *, tiny: bool) -> None:
    """The receiver is killed or stopped in the middle of a transfer by `collective`: after its first acknowledgement,
    before the last bucket is sent. The sender ends within its deadline, lives on, and can open again."""
    os.environ |= {"NCCL_HOSTID": "trainer", "NCCL_SOCKET_IFNAME": "lo"}
    with made("0.6b", tiny=tiny) as path, trainer(path) as own:
        replica = Replica(path, slots=8, length=256, environment=OTHER_HOST)
        link = Link(own, replica, "collective", 4096 if tiny else 64 * MIB)  # many: the first is not the last
        link.publish(0, verify=False)
        manifest, lost = link.begin(1, verify=False, timeout_s=LOST_S), []

        def lose(acknowledged: int) -> None:
            os.kill(replica.process.pid or 0, signal.SIGKILL if how == "kill" else signal.SIGSTOP)
            lost.append((acknowledged, time.monotonic()))

        try:
            link.send(manifest, LOST_S, at_first_ack=lose)
            ended = ""
        except Exception as error:  # noqa: BLE001 - the kind is the figure
            ended = f"{type(error).__name__}: {error}"
        assert lost, f"no bucket was acknowledged before the last one was sent: {ended or 'the send succeeded'}"
        acknowledged, took_s = lost[0][0], time.monotonic() - lost[0][1]
        time.sleep(5)  # torch's watchdog of NCCL looks every 0.1 s and may end this process
        figure(
            how=how, acknowledged=acknowledged, buckets=len(manifest.buckets), ended=ended[:200], ended_s=took_s,
            sender_lives=True,
        )  # fmt: skip
        assert ended, "the send succeeded without its receiver"
        os.kill(replica.process.pid or 0, signal.SIGKILL)
        again = Replica(path, slots=8, length=256, environment=OTHER_HOST)
        Link(own, again, "collective", 256 * MIB).publish(2, verify=True)
        again.stop()
        assert took_s < LOST_S + 10, f"the sender took {took_s:.0f} s of its {LOST_S:g}"


def lonely_communicator(*, tiny: bool) -> None:
    """The first broadcast of a group whose other member never comes: `abort` from another thread ends it."""
    import torch
    import torch.distributed as dist

    if not _has_cuda():
        figure(skipped="NCCL needs a GPU")
        return
    store = dist.HashStore()
    group = dist.ProcessGroupNCCL(store, 0, 2)  # type: ignore[attr-defined]
    ended = threading.Event()

    def first() -> None:
        try:
            group.broadcast([torch.ones(1, device="cuda")], dist.BroadcastOptions()).wait()
        except Exception as error:  # noqa: BLE001 - however it ends
            figure(ended=f"{type(error).__name__}: {error}"[:200])
        ended.set()

    threading.Thread(target=first, daemon=True).start()
    time.sleep(3)
    began = time.monotonic()
    group.abort()
    assert ended.wait(20), "abort does not end the creation of a communicator"
    figure(abort_s=time.monotonic() - began)


# -- a step ----------------------------------------------------------------------------------------------------------


def step(
    size: str,
    *,
    tiny: bool,
    sequences: tuple[int, ...] = (8,),
    offload: tuple[bool, ...] = (False,),
    compiles: bool = False,
    buckets: tuple[int, ...] = (),
) -> None:
    """Time, tokens per second and peak memory of steps of two micro-batches of 16384 tokens, of so many `sequences`
    each, with the optimizer on the GPU or (`offload`) in host memory. Then publishes by `ipc` with these `buckets`."""
    tokens, found = 512 if tiny else 16384, []
    with made(size, tiny=tiny) as path:
        for offloads in offload:
            with trainer(path, compiles=compiles, offload_optimizer=offloads) as own:
                for count in sequences:
                    plan = own.plan(_random_responses(2 * tokens, 2 * count), tokens)
                    figure(sequences=count, offload=offloads, compiles=compiles)
                    for _ in range(3):
                        own.step(plan, 2 * tokens)
                    found.append(_judged(own, plan, tokens, size=size, compiles=compiles))
                if buckets:
                    replica = Replica(path, slots=8, length=256)
                    publishes(own, replica, buckets)
                    replica.stop()
            del own
            _free()  # the next trainer's peak is its own
    assert not any(found), "; ".join(filter(None, found))


def _free() -> None:
    """Frees a trainer that has stopped: FSDP2's hooks hold it in cycles."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _judged(own: Trainer, plan: Any, tokens: int, *, size: str, compiles: bool) -> str:
    """What is not as announced, in words: told at the end, so that the other variants run too."""
    figure(announced_gib=(announced := own.announced_gib(tokens)))
    assert announced > 0, "--dry-run announces no memory for it"
    if not _has_cuda():
        figure(unjudged="memory and kernels")
        return ""
    found, missed = peak_gib(), []
    if not compiles:
        missed.append(_kernels(own, plan, grouped=size == "moe"))
        if not 0.8 < found / announced < 1.1:
            missed.append(f"a rank holds {found:.1f} GiB; {announced:.1f} were announced")
    return "; ".join(filter(None, missed))


def _kernels(own: Trainer, plan: Any, *, grouped: bool) -> str:
    """Tells the kernels that take most of a step; returns, in words, that attention runs in SDPA's fallback, or experts
    one by one that are to be `grouped`."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        asyncio.run(own.worker.train_step(plan))
    found = sorted(seen.key_averages(), key=lambda e: -e.self_device_time_total)
    total = sum(e.self_device_time_total for e in found) or 1
    figure(kernels=[(e.key[:60], round(e.self_device_time_total / total, 3)) for e in found[:12]])
    names = " ".join(e.key.lower() for e in found).replace("warpgroup", "")  # as kernels for one matrix are named
    fused = "flash" in names or "fmha" in names or "cudnn" in names
    missed = ["attention runs without a fused kernel"] * (not fused)
    return "; ".join(missed + ["experts run without a grouped kernel"] * (grouped and "group" not in names))


# -- what else there is ----------------------------------------------------------------------------------------------


def probe(*, tiny: bool) -> None:
    """Versions, memory of the machine, and how fast host memory is read."""
    import torch

    nccl = ".".join(map(str, torch.cuda.nccl.version())) if _has_cuda() else ""
    figure(
        torch=torch.__version__, cuda=str(torch.version.cuda), nccl=nccl, cores=os.cpu_count(),
        shm_gb=shutil.disk_usage("/dev/shm").total / 1e9,
        gpus=[torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    )  # fmt: skip
    if not _has_cuda():
        return
    size = 64 * MIB if tiny else 1 << 30
    pageable = torch.empty(size, dtype=torch.uint8)
    for name, host in (("pageable", pageable), ("pinned", pageable.pin_memory())):
        there = host.cuda()
        torch.cuda.synchronize()
        began = time.monotonic()
        host.copy_(there)
        torch.cuda.synchronize()
        figure(memory=name, read_gb_per_s=size / 1e9 / (time.monotonic() - began), peak_gib=peak_gib())


def own_tests(*paths: str, tiny: bool, marked: str = "") -> None:
    """The project's own tests, on this machine's devices."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        *paths,
        *(("-m", marked) if marked else ()),
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    summary = done.stdout.strip().splitlines()[-1:]
    figure(tests=list(paths), rc=done.returncode, summary=summary)
    if done.returncode not in (0, 5):  # 5: all of them are for another machine
        print(done.stdout[-6000:])
        raise AssertionError(f"pytest ended with {done.returncode}")
    if " passed" not in "".join(summary):
        figure(skipped="all of its tests are for another machine")


def run_of_the_quickstart(*keys: str, tiny: bool, needs_cuda: bool = False) -> None:
    """The quickstart with Ray and these keys of its recipe, a replica killed in the middle; on a GPU both sides compute
    in bfloat16."""
    if needs_cuda and not _has_cuda():
        figure(skipped="it needs a GPU")
        return
    root = Path(__file__).parents[2]
    with tempfile.TemporaryDirectory() as directory:
        overrides = [f"run.dir={directory}/run", "rollout.num_replicas=1", f"run.max_steps={4 if tiny else 40}", *keys]
        if _has_cuda():
            overrides += ["model.inference_dtype=bfloat16", "trainer.fsdp.param_dtype=bfloat16"]
        for tool in ("make_tiny_model.py", "make_arithmetic_dataset.py"):
            subprocess.run([sys.executable, f"tools/{tool}"], cwd=root, check=True, stdout=subprocess.DEVNULL)
        command = [sys.executable, "-m", "asyncrl.commands.train", "recipes/quickstart.yaml", *overrides]
        metrics, log = Path(directory) / "run" / "metrics.jsonl", Path(directory) / "log.txt"
        with log.open("w") as out:
            run = subprocess.Popen(command, cwd=root, stdout=out, stderr=subprocess.STDOUT)
        try:
            while run.poll() is None and _num_lines(metrics) < 2:
                time.sleep(0.5)
            killed = run.poll() is None and _kill_replica(run.pid)
            run.wait(timeout=500)
        finally:
            if run.poll() is None:
                run.terminate()
                run.wait(60)
            figure(rc=run.returncode, steps=_num_lines(metrics))
            print(log.read_text()[-4000:])
        assert run.returncode == 0, "the run failed"
        assert killed, "no replica was found to kill"


def _num_lines(file: Path) -> int:
    return len(file.read_text().splitlines()) if file.exists() else 0


def _kill_replica(pid: int) -> bool:
    import psutil

    for process in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.Error):
            if "ray::Replica" in " ".join(process.cmdline()):
                process.kill()
                figure(killed=process.pid)
                return True
    return False
