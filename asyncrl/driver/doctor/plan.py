"""What the recipe asks for: memory of each role, what a publish takes, how old tokens will be, data and reward."""

from __future__ import annotations

import asyncio
import math
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from asyncrl.config.recipe import Recipe
from asyncrl.data.rows import PromptRow
from asyncrl.driver.cluster.address import joined_address
from asyncrl.driver.doctor.observation import Observation, bad, ok, warning
from asyncrl.driver.memory_plan import ranks_memory
from asyncrl.driver.preflight import Preflight
from asyncrl.inference.engines import ENGINES
from asyncrl.rewards.reward_pool import RewardPool
from asyncrl.trainer.model_tensors import model_tensors
from asyncrl.types import ModelFacts
from asyncrl.weights.object_store import is_url

GIB = 1 << 30
NETWORKS = Path("/sys/class/net")
"""A card of the machine has a `device` there; a bridge or a container's end of one has none."""
TRIED_ROWS = 4
PROBE_BYTES = 64 << 20
PASSES = {"ipc": 3, "collective": 2, "disk": 2}
"""How often a byte is copied, by transport."""


def trained_bytes(recipe: Recipe, facts: ModelFacts) -> int | None:
    """Weights and optimizer of a whole model, which a checkpoint holds; None where the config does not say."""
    found = ranks_memory(recipe, facts)
    return None if found is None else sum((m.weights + m.optimizer) * recipe.trainer.shard_ranks for m in found[:1])


def check_memory(recipe: Recipe, facts: ModelFacts) -> Iterator[Observation]:
    """Memory of ranks and replicas, against that of a GPU: `ray.gpu_memory_gib`, or this machine's. Without any,
    against this machine's memory. A run that joins a cluster is not compared with this machine."""
    tensors, ranks = model_tensors(facts), ranks_memory(recipe, facts)
    if tensors is None or not ranks:
        yield warning("memory", f"not estimated for {facts.name}", "watch the first steps")
        return
    itemsize = 4 if recipe.model.inference_dtype == "float32" else 2
    weights = sum(math.prod(shape) for shape in tensors.values()) * itemsize
    rollout = recipe.rollout
    weights = 0 if ENGINES[rollout.engine].elsewhere else weights
    replica = weights / rollout.settings.num_workers
    largest = max(memory.peak or memory.total for memory in ranks)
    text = f"a trainer rank {largest / GIB:.2f} GiB{' before activations' if ranks[0].peak is None else ''}, "
    text += f"a replica's worker {replica / GIB:.2f} GiB of weights"
    import torch

    joins, room = joined_address(recipe.ray.address) is not None, (recipe.ray.gpu_memory_gib or 0) * GIB
    if not room and not joins and (count := torch.cuda.device_count()):
        room = min(torch.cuda.get_device_properties(i).total_memory for i in range(count))
    if room:
        worst, whose = max((largest, "a trainer rank"), (replica, "a replica's worker"))
        text += f"; a GPU has {room / GIB:.0f} GiB"
        if worst > 0.9 * room:
            do = "use more ranks (trainer.num_ranks, tensor_parallel), trainer.fsdp.offload_optimizer=true, or LoRA"
            yield bad("memory", f"{text}: {whose} does not fit", do)
            return
    elif joins:
        text += "; not compared with this machine: the run joins a cluster (ray.gpu_memory_gib says what its GPUs have)"
    else:
        room = psutil.virtual_memory().available
        needed = largest * recipe.trainer.num_ranks + weights * rollout.num_replicas
        text += f"; together {needed / GIB:.1f} GiB of {room / GIB:.0f} GiB free"
        if needed > 0.9 * room:
            yield bad("memory", text, "lower rollout.num_replicas, or use a smaller model or LoRA")
            return
    yield ok("memory", text)


def check_publish(recipe: Recipe, facts: ModelFacts) -> Iterator[Observation]:
    """How long a publish takes at least: from the speed of copies on this machine; on a cluster from that of its
    network."""
    tensors, transport = model_tensors(facts), recipe.weights.transport
    if tensors is None or transport not in PASSES or recipe.trainer.lora.rank:
        return
    import torch

    itemsize = 4 if recipe.model.inference_dtype == "float32" else 2
    size = sum(math.prod(shape) for shape in tensors.values()) * itemsize
    if joined_address(recipe.ray.address) is not None and transport == "collective":
        yield _over_network(recipe, size)
        return
    if transport == "disk" and is_url(recipe.weights.disk_directory):
        text = f"{size / GIB:.2f} GiB to the store and from it by each replica, four buckets at a time"
        yield ok("publish", f"{text}: see weights/publish_s")
        return
    if torch.cuda.device_count():
        yield ok("publish", f"by {transport}; its time depends on the links between GPUs: see weights/publish_s")
        return
    speed = _loopback() if transport == "collective" else _copies()
    estimate_s = size * PASSES[transport] * recipe.rollout.most_replicas / speed
    text = f"{size / 2**20:.1f} MiB to each replica by {transport}, about {max(0.001, estimate_s):.3f} s "
    text += f"({speed / 1e9:.1f} GB/s here)"
    if estimate_s > recipe.weights.publish_timeout_s / 2:
        yield bad("publish", text, "raise weights.publish_timeout_s and transfer_timeout_s")
    else:
        yield ok("publish", text)


def _over_network(recipe: Recipe, size: int) -> Observation:
    """A collective sends each byte once through the interface of the node that sends, to all replicas."""
    cards = {name: found for name, found in psutil.net_if_stats().items() if (NETWORKS / name / "device").exists()}
    speeds = {name: found.speed for name, found in cards.items() if found.isup and found.speed > 0}
    text = f"{size / GIB:.2f} GiB by collective"
    if not speeds:
        return ok("publish", f"{text}; no network interface of this machine tells its speed: see weights/publish_s")
    name = max(speeds, key=speeds.__getitem__)
    estimate_s, limit_s = 8 * size / (speeds[name] * 1e6), recipe.weights.transfer_timeout_s
    text += f", at least {estimate_s:.1f} s through {name} ({speeds[name] / 1000:g} Gbit/s)"
    if estimate_s > limit_s / 2:
        do = "raise weights.transfer_timeout_s and publish_timeout_s, unless NCCL has a faster way; "
        do += "weights.encoding=delta sends less"
        return warning("publish", f"{text}, of weights.transfer_timeout_s={limit_s:g}", do)
    return ok("publish", text)


def _copies() -> float:
    """Bytes a second that one thread copies."""
    data = bytearray(PROBE_BYTES)
    began = time.perf_counter()
    for _ in range(3):
        bytes(data)
    return 3 * PROBE_BYTES / (time.perf_counter() - began)


def _loopback() -> float:
    """Bytes a second through a socket of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(20)

        def send() -> None:
            with socket.create_connection(server.getsockname(), timeout=20) as out:
                out.sendall(bytes(PROBE_BYTES))

        sender = threading.Thread(target=send, daemon=True)
        sender.start()
        connection, _ = server.accept()
        with connection:
            connection.settimeout(20)
            began, left = time.perf_counter(), PROBE_BYTES
            while left > 0 and (part := connection.recv(1 << 20)):
                left -= len(part)
            return PROBE_BYTES / (time.perf_counter() - began)


def check_staleness(recipe: Recipe) -> Iterator[Observation]:
    limit, every = recipe.max_lag, recipe.staleness.publish_every_steps
    if limit == 0:
        yield ok("staleness", "every token is trained by the weights that sampled it (lag 0)")
        return
    usual = min(limit, every)
    text = f"no token is trained with a lag over {limit}. Most have a lag near {usual} or less"
    if recipe.pacing == "eager":
        text += f" where training is the faster side; else the queue is full, and it is near {limit}"
    yield ok("staleness", text)


def check_data(found: Preflight) -> Iterator[Observation]:
    train = found.train
    if train is None:
        yield warning("data", "the training data comes from the hub and was not read", "call without --offline")
        return
    text = f"{len(train.rows)} prompts; {train.num_duplicates} duplicates and {train.num_dropped} too long were dropped"
    whole = len(train.rows) + train.num_duplicates + train.num_dropped
    if train.num_duplicates + train.num_dropped > whole / 2:
        yield warning("data", text, "see whether data.max_prompt_tokens is meant, and the dataset's version")
    else:
        yield ok("data", text)


def check_reward(recipe: Recipe, found: Preflight) -> Iterator[Observation]:
    """Rewards a right and an empty answer to a few rows, in the processes that the run would use."""
    if found.train is None or not len(found.train.rows):
        return
    rows = [found.train.rows[i] for i in range(min(TRIED_ROWS, len(found.train.rows)))]
    yield asyncio.run(_tried(recipe, rows))


async def _tried(recipe: Recipe, rows: list[PromptRow]) -> Observation:
    names, pool = ", ".join(recipe.reward.names), RewardPool(recipe.reward)
    try:
        await pool.start()
        began, calls, told_apart = time.perf_counter(), 0, 0
        for row in rows:
            truth = str(row.ground_truth)
            empty = (await pool.score("", row)).reward
            paid = [
                (await pool.score(answer, row)).reward for answer in (truth, f"\\boxed{{{truth}}}", f"#### {truth}")
            ]
            told_apart += max(paid) > empty
            calls += 1 + len(paid)
        took_ms = 1000 * (time.perf_counter() - began) / calls
    except Exception as error:  # noqa: BLE001 - whatever a user's reward raises is the finding
        found = f"{names}: {type(error).__name__}: {error}"
        return bad("reward", found, "mend the reward, or the rows that it cannot read")
    finally:
        await pool.close()
    text = f"{names}: {told_apart} of {len(rows)} rows pay their ground truth more than an empty answer; "
    text += f"{took_ms:.1f} ms a call"
    if told_apart:
        return ok("reward", text)
    return warning("reward", text, "see that a right answer of the model's form is paid: docs/rewards.md")
