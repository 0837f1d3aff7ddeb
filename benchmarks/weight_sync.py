"""How fast weights reach another process, against what the same machine does without the protocol, in the same run.

    OMP_NUM_THREADS=1 python benchmarks/weight_sync.py [--gigabytes 1.0] [--rounds 7]

Weights of Qwen2.5-0.5B (bfloat16, 988 MB) go from this process to one or two receiver processes, which copy them into
memory of their own. Baselines: for `ipc` a two-slot ring in shared memory with 4 MiB slots, one contiguous source and a
spinning flag instead of messages; for `collective` a bare gloo broadcast between contiguous buffers. The latter leaves
out what a transfer of weights needs, to collect tensors at one end and to place them at the other: "gloo and copies"
does both, without overlap. Runs of all variants alternate. Writes benchmarks/results/weight_sync.md.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
import zmq

from asyncrl.types import Manifest, TensorSpec
from asyncrl.weights.digest import make_scratch, slice_digest
from asyncrl.weights.packing import spec_of
from asyncrl.weights.plan import make_manifest
from asyncrl.weights.transport import TransferSource, WeightSender
from asyncrl.weights.transports import build_receiver, build_sender
from asyncrl.weights.transports.segment import Segment, attach

BUCKET_BYTES = 4 << 20
GLOO_BYTES = (4 << 20, 64 << 20)
"""Pieces of the bare broadcast; the faster one is the baseline."""
TIMEOUT_S = 120.0
RESULTS = Path(__file__).parent / "results" / "weight_sync.md"

Weights = list[tuple[str, torch.Tensor]]


def qwen_weights(num_bytes: int) -> Weights:
    """The tensors of Qwen2.5-0.5B in bfloat16, cut off after `num_bytes`; the embedding in proportion."""
    hidden, kv, inner = 896, 128, 4864
    layer = {
        "self_attn.q_proj.weight": (hidden, hidden),
        "self_attn.q_proj.bias": (hidden,),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.k_proj.bias": (kv,),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.v_proj.bias": (kv,),
        "self_attn.o_proj.weight": (hidden, hidden),
    }
    vocab = max(1, int(151936 * min(1.0, num_bytes / 988e6)))
    return _model(24, vocab, hidden, inner, layer, torch.bfloat16, num_bytes)


def tiny_weights() -> Weights:
    """A Qwen3 of 0.8M parameters in float32: 4 layers, 46 tensors."""
    hidden = 128
    layer = {
        "self_attn.q_proj.weight": (hidden, hidden),
        "self_attn.k_proj.weight": (hidden // 2, hidden),
        "self_attn.v_proj.weight": (hidden // 2, hidden),
        "self_attn.o_proj.weight": (hidden, hidden),
        "self_attn.q_norm.weight": (32,),
        "self_attn.k_norm.weight": (32,),
    }
    return _model(4, 64, hidden, 384, layer, torch.float32, 1 << 40)


def _model(
    layers: int,
    vocab: int,
    hidden: int,
    inner: int,
    attention: dict[str, tuple[int, ...]],
    dtype: torch.dtype,
    num_bytes: int,
) -> Weights:
    block = attention | {
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    shapes: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (vocab, hidden))]
    shapes += [(f"model.layers.{i}.{name}", shape) for i in range(layers) for name, shape in block.items()]
    shapes.append(("model.norm.weight", (hidden,)))
    return _take(shapes, dtype, num_bytes)


def _take(shapes: list[tuple[str, tuple[int, ...]]], dtype: torch.dtype, num_bytes: int) -> Weights:
    weights, total = [], 0
    for name, shape in shapes:
        if total >= num_bytes:
            break
        tensor = torch.randn(shape, dtype=torch.float32).to(dtype)
        weights.append((name, tensor))
        total += tensor.nbytes
    return weights


class CopySink:
    """Copies every slice into its place in memory that was touched before: what an engine does at least."""

    def __init__(self, tensors: tuple[TensorSpec, ...]) -> None:
        self._places = {t.name: torch.zeros(t.nbytes, dtype=torch.uint8) for t in tensors}

    def write(self, spec: TensorSpec, offset: int, data: torch.Tensor) -> None:
        self._places[spec.name][offset : offset + data.numel()].copy_(data)


@dataclass(frozen=True)
class RingRead:
    path: str
    num_bytes: int
    receiver: int


@dataclass(frozen=True)
class GlooRead:
    port: int
    world_size: int
    rank: int
    num_bytes: int
    piece_bytes: int
    copies: bool


@dataclass(frozen=True)
class Publish:
    source: TransferSource
    manifest: Manifest


def serve(pipe: Connection) -> None:
    """A receiver process: answers each command when it is done."""
    torch.set_num_threads(1)
    receivers, sinks, groups, flat = {}, {}, {}, torch.zeros(0, dtype=torch.uint8)
    while (command := pipe.recv()) is not None:
        if isinstance(command, Publish):
            if command.source not in receivers:
                receivers[command.source] = build_receiver(command.source)
            if command.manifest.tensors not in sinks:
                sinks.clear()
                sinks[command.manifest.tensors] = CopySink(command.manifest.tensors)
            receivers[command.source].receive(command.manifest, sinks[command.manifest.tensors], TIMEOUT_S)
        else:
            if flat.numel() != command.num_bytes:
                flat = torch.zeros(command.num_bytes, dtype=torch.uint8)
            if isinstance(command, RingRead):
                ring_read(command, flat)
            else:
                key = (command.port, command.world_size)
                if key not in groups:
                    store = dist.TCPStore("127.0.0.1", command.port, is_master=False)
                    groups[key] = gloo_group(store, command.rank, command.world_size)
                gloo_broadcast(groups[key], flat, command.piece_bytes, copies=command.copies)
        pipe.send(True)


def ring_write(segment: Segment, flat: torch.Tensor, num_receivers: int) -> None:
    """The bare ring: word 0 counts buckets written, word 1 + r those that receiver r has read."""
    counts = segment.data[:4096].view(torch.int64).numpy()
    slots = segment.data[4096:].split(BUCKET_BYTES)
    for i, piece in enumerate(flat.split(BUCKET_BYTES)):
        spin_until(lambda i=i: counts[1 : 1 + num_receivers].min() >= i - 1)
        slots[i % 2][: piece.numel()].copy_(piece)
        counts[0] = i + 1
    spin_until(lambda: counts[1 : 1 + num_receivers].min() == -(-flat.numel() // BUCKET_BYTES))


def spin_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        os.sched_yield()
        assert time.monotonic() < deadline, "the other side of the ring is gone"


def ring_read(command: RingRead, flat: torch.Tensor) -> None:
    data = attach(command.path)
    counts = data[:4096].view(torch.int64).numpy()
    slots = data[4096:].split(BUCKET_BYTES)
    for i, piece in enumerate(flat.split(BUCKET_BYTES)):
        spin_until(lambda i=i: counts[0] > i)
        piece.copy_(slots[i % 2][: piece.numel()])
        counts[1 + command.receiver] = i + 1


def gloo_group(store: dist.Store, rank: int, world_size: int) -> dist.ProcessGroupGloo:
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=TIMEOUT_S)
    return dist.ProcessGroupGloo(dist.PrefixStore(str(world_size), store), rank, world_size, options)


def gloo_broadcast(group: dist.ProcessGroupGloo, flat: torch.Tensor, piece_bytes: int, *, copies: bool) -> None:
    """`copies`: through a buffer at each end, one step after the other."""
    buffer = torch.empty(piece_bytes, dtype=torch.uint8)
    for piece in flat.split(piece_bytes):
        if not copies:
            group.broadcast(piece, 0).wait()
            continue
        staged = buffer[: piece.numel()]
        if group.rank() == 0:
            staged.copy_(piece)
        group.broadcast(staged, 0).wait()
        if group.rank() != 0:
            piece.copy_(staged)


class Bench:
    """The sending process and two receivers."""

    def __init__(self, weights: Weights) -> None:
        context = multiprocessing.get_context("spawn")
        self.weights = weights
        self.flat = torch.cat([t.view(-1).view(torch.uint8) for _, t in weights])
        self._pipes = []
        for _ in range(2):
            ours, theirs = context.Pipe()
            context.Process(target=serve, args=(theirs,), daemon=True).start()
            self._pipes.append(ours)
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._groups: dict[int, dist.ProcessGroupGloo] = {}
        self._senders: dict[tuple[str, int], tuple[WeightSender, TransferSource]] = {}
        self._ring = Segment(4096 + 2 * BUCKET_BYTES)
        self._publishes = 0

    def ring(self, num_receivers: int) -> float:
        self._ring.data[:4096].zero_()
        size = self.flat.numel()
        commands = [RingRead(str(self._ring.path), size, r) for r in range(num_receivers)]
        return self._timed(commands, lambda: ring_write(self._ring, self.flat, num_receivers))

    def gloo(self, num_receivers: int, piece_bytes: int, *, copies: bool = False) -> float:
        world, size = num_receivers + 1, self.flat.numel()
        commands = [GlooRead(self._store.port, world, r + 1, size, piece_bytes, copies) for r in range(num_receivers)]

        def broadcast() -> None:
            if world not in self._groups:
                self._groups[world] = gloo_group(self._store, 0, world)
            gloo_broadcast(self._groups[world], self.flat, piece_bytes, copies=copies)

        return self._timed(commands, broadcast)

    def transport(self, name: str, num_receivers: int, *, verify: bool, weights: Weights | None = None) -> float:
        weights = self.weights if weights is None else weights
        key = (name, num_receivers)
        if key not in self._senders:
            sender = build_sender(name, BUCKET_BYTES, num_receivers)
            self._senders[key] = (sender, sender.open())
        sender, source = self._senders[key]
        self._publishes += 1
        specs = [spec_of(n, t) for n, t in weights]
        manifest = make_manifest(self._publishes, self._publishes, specs, BUCKET_BYTES, verify=verify)
        commands = [Publish(replace(source, receiver=r), manifest) for r in range(num_receivers)]
        return self._timed(commands, lambda: sender.send(manifest, iter(weights), TIMEOUT_S))

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for sender, _ in self._senders.values():
            sender.close()
        self._ring.close()

    def _timed(self, commands: list[RingRead] | list[GlooRead] | list[Publish], send: Callable[[], object]) -> float:
        """Seconds from the moment the receivers wait until all have everything."""
        pipes = self._pipes[: len(commands)]
        for pipe, command in zip(pipes, commands, strict=True):
            pipe.send(command)
        time.sleep(0.02)
        started = time.perf_counter()
        send()
        for pipe in pipes:
            assert pipe.poll(TIMEOUT_S), "a receiver did not answer"
            pipe.recv()
        return time.perf_counter() - started


@dataclass(frozen=True)
class Variant:
    name: str
    baseline: str | None
    run: Callable[[], float]


def variants(bench: Bench) -> Iterator[Variant]:
    for n in (1, 2):
        yield Variant(f"bare ring, {n} receiver(s)", None, lambda n=n: bench.ring(n))
        for digest in (False, True):
            yield Variant(
                f"ipc, {n} receiver(s)" + ", digest" * digest,
                f"bare ring, {n} receiver(s)",
                lambda n=n, digest=digest: bench.transport("ipc", n, verify=digest),
            )
        for size in GLOO_BYTES:
            yield Variant(
                f"bare gloo, {n} receiver(s), pieces of {size >> 20} MiB", None, lambda n=n, s=size: bench.gloo(n, s)
            )
        yield Variant(
            f"gloo and copies, {n} receiver(s), pieces of {BUCKET_BYTES >> 20} MiB",
            f"bare gloo, {n} receiver(s)",
            lambda n=n: bench.gloo(n, BUCKET_BYTES, copies=True),
        )
        for digest in (False, True):
            yield Variant(
                f"collective, {n} receiver(s)" + ", digest" * digest,
                f"bare gloo, {n} receiver(s)",
                lambda n=n, digest=digest: bench.transport("collective", n, verify=digest),
            )


def digest_speed() -> float:
    """Bytes per CPU-second of the digest of a 4 MiB bucket in cache, best of 50."""
    data, scratch = torch.randint(0, 256, (BUCKET_BYTES,), dtype=torch.uint8), make_scratch()
    best = float("inf")
    for _ in range(50):
        started = time.process_time()
        slice_digest(data, 0, scratch)
        best = min(best, time.process_time() - started)
    return BUCKET_BYTES / best


def measure(bench: Bench, rounds: int) -> list[str]:
    """The table, one line per variant."""
    chosen = list(variants(bench))
    seconds: dict[str, list[float]] = {v.name: [] for v in chosen}
    for turn in range(rounds + 1):
        for variant in chosen:
            elapsed = variant.run()
            if turn:  # the first round touches memory and forms groups
                seconds[variant.name].append(elapsed)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    lines = ["| variant | s, median (best) | GB/s | of the baseline |", "|---|---|---|---|"]
    for variant in chosen:
        median, best = medians[variant.name], min(seconds[variant.name])
        share = ""
        if variant.baseline is not None:
            base = min(value for name, value in medians.items() if name.startswith(variant.baseline))
            share = f"{base / median:.0%}"
        rate = bench.flat.numel() / median / 1e9
        lines.append(f"| {variant.name} | {median:.3f} ({best:.3f}) | {rate:.2f} | {share} |")
    return lines


def tiny_lines(bench: Bench, repeats: int = 60) -> list[str]:
    tiny = tiny_weights()
    lines = ["| tiny model (fp32) | ms, median | ms, best |", "|---|---|---|"]
    for name in ("ipc", "collective"):
        for digest in (False, True):
            values = [1e3 * bench.transport(name, 1, verify=digest, weights=tiny) for _ in range(repeats)]
            label = name + ", digest" * digest
            lines.append(f"| {label} | {statistics.median(values):.2f} | {min(values):.2f} |")
    count, total = len(tiny), sum(t.numel() for _, t in tiny)
    return [*lines, "", f"{count} tensors, {total / 1e6:.2f}M parameters."]


def cpu_name() -> str:
    info = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":", 1)[1].strip() for line in info if line.startswith("model name")), platform.machine())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the weights (default 1.0)")
    parser.add_argument("--rounds", type=int, default=7, help="measured runs of each variant (default 7)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    bench = Bench(qwen_weights(int(options.gigabytes * 1e9)))
    try:
        lines = [
            "# Weight sync between processes",
            "",
            f"`python benchmarks/weight_sync.py --gigabytes {options.gigabytes} --rounds {options.rounds}`: "
            f"{len(bench.weights)} tensors, {bench.flat.numel() / 1e9:.3f} GB, buckets of {BUCKET_BYTES >> 20} MiB.",
            "",
            f"{os.cpu_count()} cores {cpu_name()} ({torch.backends.cpu.get_cpu_capability()}), load average "
            f"{os.getloadavg()[0]:.1f} at the start; Python {platform.python_version()}, torch {torch.__version__}, "
            f"ZeroMQ {zmq.zmq_version()}, one thread per process. Wall time.",
            "",
            *measure(bench, options.rounds),
            "",
            "The share compares medians of runs that alternate; for gloo with the faster of the two piece sizes.",
            "",
            *tiny_lines(bench),
            "",
            f"Digest: {digest_speed() / 1e9:.1f} GB per CPU-second on a 4 MiB bucket in cache, one thread.",
        ]
    finally:
        bench.close()
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
