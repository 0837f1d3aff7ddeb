"""How fast weights reach other processes, against what the same machine does without the protocol, in the same run.

    OMP_NUM_THREADS=1 python benchmarks/weight_sync.py [--quick]

The tensors of Qwen2.5-0.5B (494M parameters), in bfloat16 and in float32, go from this process to one, two and four
receiver processes, straight into the parameters of a model as the embedded engine holds it. The sender walks float32
master weights as a trainer of one rank does: it casts to bfloat16 tensor by tensor and yields float32 as it is.

Baselines: memcpy; for `ipc` a two-slot ring in shared memory with 4 MiB slots, one contiguous source and a spinning
flag instead of messages; for `collective` a bare gloo broadcast of one contiguous buffer, in the best of four ways to
cut it, in a group of the same size. Runs of all variants alternate. Writes benchmarks/results/weight_sync.md; `--quick`
takes a minute, an eighth of the weights, and only prints.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import multiprocessing
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from math import prod
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash
import zmq

from asyncrl.inference.torch_engine.parameter_sink import ParameterSink
from asyncrl.types import Manifest, TensorSpec, TransferSource
from asyncrl.weights.digest import copy_with_digest, make_scratch, slice_digest
from asyncrl.weights.plan import make_manifest, make_spec
from asyncrl.weights.transport import WeightReceiver, WeightSender
from asyncrl.weights.transports import TRANSPORTS, build_receiver, build_sender

BUCKET_BYTES = 4 << 20
RECEIVERS = (1, 2, 4)
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
GLOO_CUTS = ((4 << 20, 1), (4 << 20, 2), (64 << 20, 1), (1 << 40, 1))
"""Ways to cut a bare broadcast: bytes of a piece, pieces under way."""
TIMEOUT_S = 120.0
RESULTS = Path(__file__).parent / "results" / "weight_sync.md"


def qwen_specs(dtype: str, fraction: float) -> tuple[TensorSpec, ...]:
    """Qwen2.5-0.5B, or a `fraction` of its layers and of its vocabulary."""
    hidden, kv, inner = 896, 128, 4864
    layer = {
        "self_attn.q_proj.weight": (hidden, hidden),
        "self_attn.q_proj.bias": (hidden,),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.k_proj.bias": (kv,),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.v_proj.bias": (kv,),
        "self_attn.o_proj.weight": (hidden, hidden),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    shapes = {"model.embed_tokens.weight": (int(151936 * fraction), hidden)}
    shapes |= {f"model.layers.{i}.{name}": shape for i in range(round(24 * fraction)) for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    return tuple(make_spec(name, shape, dtype) for name, shape in shapes.items())


def tensors_in(flat: torch.Tensor, specs: tuple[TensorSpec, ...]) -> dict[str, torch.Tensor]:
    """The tensors of `specs`, one after the other in `flat`."""
    tensors, begin = {}, 0
    for spec in specs:
        tensors[spec.name] = flat[begin : begin + spec.nbytes].view(getattr(torch, spec.dtype)).view(spec.shape)
        begin += spec.nbytes
    return tensors


def resident_bytes(field: str) -> int:
    """`VmRSS` (now) or `VmHWM` (the highest since `resident_from_now`) of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def resident_from_now() -> int:
    """Bytes that are resident now, without what was freed; the peak is counted anew."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return resident_bytes("VmRSS")


@dataclass(frozen=True)
class Hold:
    """Make memory for these tensors, touched, in place of what is held."""

    specs: tuple[TensorSpec, ...]


@dataclass(frozen=True)
class RingRead:
    path: str
    receiver: int


@dataclass(frozen=True)
class GlooRead:
    port: int
    world_size: int
    rank: int
    piece_bytes: int
    depth: int


@dataclass(frozen=True)
class Publish:
    source: TransferSource
    manifest: Manifest


@dataclass(frozen=True)
class Load:
    """Writes a publish that is there already into the parameters."""

    manifest: Manifest


class Receiver:
    """A receiver process's work. Every command answers with a number; `Publish` with the bytes of memory it took on top
    of the parameters if it joined a sender for it."""

    def __init__(self) -> None:
        self._receivers: dict[TransferSource, WeightReceiver] = {}
        self._groups: dict[int, dist.ProcessGroupGloo] = {}
        self._flat = torch.zeros(0, dtype=torch.uint8)
        self._targets: dict[str, torch.Tensor] = {}

    def do(self, command: object) -> int:
        if isinstance(command, Hold):
            self._flat = torch.ones(sum(s.nbytes for s in command.specs), dtype=torch.uint8)
            self._targets = tensors_in(self._flat, command.specs)
        elif isinstance(command, Publish):
            return self._receive(command)
        elif isinstance(command, Load):
            self._load(command.manifest)
        elif isinstance(command, RingRead):
            ring_read(command, self._flat)
        elif isinstance(command, GlooRead):
            if command.world_size not in self._groups:
                store = dist.TCPStore("127.0.0.1", command.port, is_master=False)
                self._groups[command.world_size] = gloo_group(store, command.rank, command.world_size)
            gloo_broadcast(self._groups[command.world_size], self._flat, command.piece_bytes, command.depth)
        return 0

    def _receive(self, command: Publish) -> int:
        before = resident_from_now() if command.source not in self._receivers else 0
        if command.source not in self._receivers:
            self._receivers[command.source] = build_receiver(command.source)
        sink = ParameterSink(self._targets)
        self._receivers[command.source].receive(command.manifest, sink, TIMEOUT_S)
        sink.finish()
        return resident_bytes("VmHWM") - before if before else 0

    def _load(self, manifest: Manifest) -> None:
        """From one bucket that stays in the cache, as a ring's does."""
        sink, data = ParameterSink(self._targets), torch.ones(BUCKET_BYTES, dtype=torch.uint8)
        for bucket in manifest.buckets:
            for piece in bucket.slices:
                place = data[piece.bucket_offset : piece.bucket_offset + piece.nbytes]
                sink.write(manifest.tensors[piece.tensor], piece.offset, place)


def serve(pipe: Connection) -> None:
    """A receiver process: answers each command when it is done."""
    torch.set_num_threads(1)
    receiver = Receiver()
    while (command := pipe.recv()) is not None:
        pipe.send(receiver.do(command))


def map_ring(path: str) -> torch.Tensor:
    with open(path, "r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)


def ring_write(data: torch.Tensor, flat: torch.Tensor, num_receivers: int) -> None:
    """The bare ring: word 0 counts buckets written, word 1 + r those that receiver r has read."""
    counts = data[:4096].view(torch.int64).numpy()
    slots = data[4096:].split(BUCKET_BYTES)
    for i, piece in enumerate(flat.split(BUCKET_BYTES)):
        spin_until(lambda i=i: counts[1 : 1 + num_receivers].min() >= i - 1)
        slots[i % 2][: piece.numel()].copy_(piece)
        counts[0] = i + 1
    spin_until(lambda: counts[1 : 1 + num_receivers].min() == -(-flat.numel() // BUCKET_BYTES))


def ring_read(command: RingRead, flat: torch.Tensor) -> None:
    data = map_ring(command.path)
    counts = data[:4096].view(torch.int64).numpy()
    slots = data[4096:].split(BUCKET_BYTES)
    for i, piece in enumerate(flat.split(BUCKET_BYTES)):
        spin_until(lambda i=i: counts[0] > i)
        piece.copy_(slots[i % 2][: piece.numel()])
        counts[1 + command.receiver] = i + 1


def spin_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        os.sched_yield()
        assert time.monotonic() < deadline, "the other side of the ring is gone"


def gloo_group(store: dist.Store, rank: int, world_size: int) -> dist.ProcessGroupGloo:
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=TIMEOUT_S)
    options._threads = 2
    return dist.ProcessGroupGloo(dist.PrefixStore(str(world_size), store), rank, world_size, options)


def gloo_broadcast(group: dist.ProcessGroupGloo, flat: torch.Tensor, piece_bytes: int, depth: int) -> None:
    options, under_way = dist.BroadcastOptions(), deque()
    options.rootRank, options.rootTensor, options.asyncOp = 0, 0, True
    for piece in flat.split(piece_bytes):
        if len(under_way) == depth:
            under_way.popleft().wait()
        under_way.append(group.broadcast([piece], options))
    while under_way:
        under_way.popleft().wait()


class Bench:
    """The sending process and its receivers. Methods return seconds."""

    def __init__(self, fraction: float) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes = []
        for _ in range(max(RECEIVERS)):
            ours, theirs = context.Pipe()
            context.Process(target=serve, args=(theirs,), daemon=True).start()
            self._pipes.append(ours)
        self._fraction = fraction
        masters = qwen_specs("float32", fraction)
        self._masters = torch.randn(sum(prod(s.shape) for s in masters))
        self._trained = tensors_in(self._masters.view(torch.uint8), masters)
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._groups: dict[int, dist.ProcessGroupGloo] = {}
        self._senders: dict[tuple[str, int], tuple[WeightSender, TransferSource]] = {}
        self._ring_file = tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="asyncrl-bench-")  # noqa: SIM115 - closed in close
        self._ring_file.truncate(4096 + 2 * BUCKET_BYTES)
        self._ring = map_ring(self._ring_file.name)
        self._publishes = 0

    def use(self, dtype: str, num_receivers: int) -> None:
        """Holds the weights in `dtype`, in this process ("ready") and in the first `num_receivers`."""
        self.specs = qwen_specs(dtype, self._fraction)
        self.flat = self._masters.to(getattr(torch, dtype)).view(torch.uint8)
        self._ready = tensors_in(self.flat, self.specs)
        for number, pipe in enumerate(self._pipes):
            pipe.send(Hold(self.specs if number < num_receivers else ()))
            pipe.recv()

    def walk(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What a trainer's `named_weights` does on one rank."""
        for spec in self.specs:
            yield spec.name, self._trained[spec.name].to(getattr(torch, spec.dtype))

    def walk_alone(self) -> float:
        started = time.perf_counter()
        for _ in self.walk():
            pass
        return time.perf_counter() - started

    def load_alone(self) -> float:
        return self._timed([Load(make_manifest(1, 1, self.specs, BUCKET_BYTES))], lambda: None)[0]

    def memcpy(self) -> float:
        piece = torch.ones_like(self.flat[: self.flat.numel() // 4])
        started = time.perf_counter()
        for source in self.flat.split(piece.numel()):
            piece[: source.numel()].copy_(source)
        return time.perf_counter() - started

    def ring(self, num_receivers: int) -> float:
        self._ring[:4096].zero_()
        commands = [RingRead(self._ring_file.name, r) for r in range(num_receivers)]
        return self._timed(commands, lambda: ring_write(self._ring, self.flat, num_receivers))[0]

    def gloo(self, num_receivers: int, piece_bytes: int, depth: int) -> float:
        world = num_receivers + 1
        commands = [GlooRead(self._store.port, world, r + 1, piece_bytes, depth) for r in range(num_receivers)]

        def broadcast() -> None:
            if world not in self._groups:
                self._groups[world] = gloo_group(self._store, 0, world)
            gloo_broadcast(self._groups[world], self.flat, piece_bytes, depth)

        return self._timed(commands, broadcast)[0]

    def publish(self, transport: str, num_receivers: int, *, verify: bool, walk: bool = False) -> float:
        """`walk`: with the trainer's side; else of tensors that are there."""
        return self._publish(transport, num_receivers, verify=verify, walk=walk)[0]

    def extra_memory(self, transport: str) -> tuple[int, int]:
        """Bytes on top of the weights at the sender and at one receiver, through a transport that is set up anew."""
        self.close_sender(transport, 1)
        before = resident_from_now()
        _, receivers = self._publish(transport, 1, verify=True, walk=True)
        return resident_bytes("VmHWM") - before, max(receivers)

    def _publish(self, transport: str, num_receivers: int, *, verify: bool, walk: bool) -> tuple[float, list[int]]:
        if (transport, num_receivers) not in self._senders:
            sender = build_sender(transport, BUCKET_BYTES, num_receivers)
            self._senders[transport, num_receivers] = sender, sender.open()
        sender, source = self._senders[transport, num_receivers]
        self._publishes += 1
        manifest = make_manifest(self._publishes, self._publishes, self.specs, BUCKET_BYTES, verify=verify)
        commands = [Publish(replace(source, receiver=r), manifest) for r in range(num_receivers)]
        weights = self.walk() if walk else iter(self._ready.items())
        return self._timed(commands, lambda: sender.send(manifest, weights, TIMEOUT_S))

    def close_sender(self, transport: str, num_receivers: int) -> None:
        if (entry := self._senders.pop((transport, num_receivers), None)) is not None:
            entry[0].close()

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for key in list(self._senders):
            self.close_sender(*key)
        self._ring_file.close()

    def _timed(self, commands: list, send: Callable[[], object]) -> tuple[float, list[int]]:
        """Seconds from the moment the receivers wait until all have everything, and what they answered."""
        pipes = self._pipes[: len(commands)]
        for pipe, command in zip(pipes, commands, strict=True):
            pipe.send(command)
        time.sleep(0.02)
        started = time.perf_counter()
        send()
        answers = []
        for pipe in pipes:
            assert pipe.poll(TIMEOUT_S), "a receiver did not answer"
            answers.append(pipe.recv())
        return time.perf_counter() - started, answers


Seconds = dict[str, float]


def medians(runs: dict[str, Callable[[], float]], rounds: int) -> Seconds:
    """The median of each, over rounds that take all in turn; the first, which touches memory, does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 1):
        for name, run in runs.items():
            elapsed = run()
            if turn:
                seconds[name].append(elapsed)
    return {name: statistics.median(values) for name, values in seconds.items()}


def bare_runs(bench: Bench, num_receivers: int) -> dict[str, Callable[[], float]]:
    runs: dict[str, Callable[[], float]] = {f"ring {num_receivers}": lambda: bench.ring(num_receivers)}
    for size, depth in GLOO_CUTS:
        name = f"gloo {num_receivers} {size} {depth}"
        runs[name] = lambda size=size, depth=depth: bench.gloo(num_receivers, size, depth)
    return runs


def publish_runs(bench: Bench, num_receivers: int) -> dict[str, Callable[[], float]]:
    runs: dict[str, Callable[[], float]] = {}
    for t in TRANSPORTS:
        for verify in (False, True):
            name = f"{t} {num_receivers} {'verify' if verify else 'plain'}"
            runs[name] = lambda t=t, verify=verify: bench.publish(t, num_receivers, verify=verify)
    return runs


def baseline(transport: str, num_receivers: int, seconds: Seconds) -> float | None:
    """Of the publish without a digest. `disk` has none."""
    kind = {"ipc": "ring", "collective": "gloo"}.get(transport)
    return min((s for name, s in seconds.items() if name.startswith(f"{kind} {num_receivers}")), default=None)


def one_receiver(bench: Bench, rounds: int) -> list[str]:
    """Two lines of a table per transport, for the dtype in use; and the baselines."""
    runs = {"memcpy": bench.memcpy, "walk": bench.walk_alone, "load": bench.load_alone}
    runs |= bare_runs(bench, 1) | publish_runs(bench, 1)
    runs |= {f"{t} total": lambda t=t: bench.publish(t, 1, verify=True, walk=True) for t in TRANSPORTS}
    seconds, size = medians(runs, rounds), bench.flat.numel()
    lines = [
        f"| transport | trainer's walk | load | transfer and load | GB/s | of the baseline | with digest "
        f"| digest's share | all, with digest |\n{'|---' * 9}|"
    ]
    for t in TRANSPORTS:
        plain, verified, base = seconds[f"{t} 1 plain"], seconds[f"{t} 1 verify"], baseline(t, 1, seconds)
        share = "" if base is None else f"{base / plain:.0%}"
        lines.append(
            f"| {t} | {seconds['walk']:.3f} | {seconds['load']:.3f} | {plain:.3f} | {size / plain / 1e9:.2f} | {share} "
            f"| {verified:.3f} | {1 - plain / verified:.0%} | {seconds[f'{t} total']:.3f} |"
        )
    names = {"memcpy": "memcpy, one thread", "ring 1": "ring of two 4 MiB slots"}
    for cut, depth in GLOO_CUTS:
        pieces = "in one piece" if cut > size else f"pieces of {cut >> 20} MiB, {depth} under way"
        names[f"gloo 1 {cut} {depth}"] = f"gloo broadcast, {pieces}"
    lines += ["", "| baseline | s | GB/s |", "|---|---|---|"]
    lines += [f"| {label} | {seconds[n]:.3f} | {size / seconds[n] / 1e9:.2f} |" for n, label in names.items()]
    return lines


def more_receivers(bench: Bench, rounds: int) -> list[str]:
    runs: dict[str, Callable[[], float]] = {}
    for n in RECEIVERS:
        runs |= bare_runs(bench, n) | publish_runs(bench, n)
    seconds = medians(runs, rounds)
    lines = ["| s, median | " + " | ".join(f"{n} receiver{'s' * (n > 1)}" for n in RECEIVERS) + " |"]
    lines.append("|---" * (len(RECEIVERS) + 1) + "|")
    for t in TRANSPORTS:
        bases = [baseline(t, n, seconds) for n in RECEIVERS]
        if bases[0] is not None:
            label = {"ipc": "bare ring", "collective": "bare gloo, the best cut"}[t]
            lines.append(f"| {label} | " + " | ".join(f"{base:.3f}" for base in bases if base is not None) + " |")
        for verify in ("plain", "verify"):
            values = [seconds[f"{t} {n} {verify}"] for n in RECEIVERS]
            shares = ["" if base is None else f" ({base / v:.0%})" for base, v in zip(bases, values, strict=True)]
            cells = [f"{value:.3f}{share}" for value, share in zip(values, shares, strict=True)]
            lines.append(f"| {t}{', digest' * (verify == 'verify')} | " + " | ".join(cells) + " |")
    return lines


def memory_lines(bench: Bench) -> list[str]:
    lines = ["| transport | sender, MiB | receiver, MiB |", "|---|---|---|"]
    for t in TRANSPORTS:
        sender, receiver = bench.extra_memory(t)
        lines.append(f"| {t} | {sender / 2**20:.1f} | {receiver / 2**20:.1f} |")
    largest = max(s.nbytes for s in bench.specs) / 2**20
    return [*lines, "", f"A bucket has {BUCKET_BYTES >> 20} MiB, the largest tensor {largest:.1f} MiB."]


def digest_lines(bench: Bench, rounds: int) -> list[str]:
    """What one thread digests, from memory, bucket by bucket."""
    pieces, out, scratch = bench.flat.split(BUCKET_BYTES), torch.ones(BUCKET_BYTES, dtype=torch.uint8), make_scratch()

    def timed(work: Callable[[torch.Tensor], object]) -> Callable[[], float]:
        def run() -> float:
            started = time.perf_counter()
            for piece in pieces:
                work(piece)
            return time.perf_counter() - started

        return run

    runs = {
        "copy": timed(lambda p: out[: p.numel()].copy_(p)),
        "copy and xxh3 together": timed(lambda p: copy_with_digest(out[: p.numel()], p, 0)),
        "xxh3": timed(lambda p: slice_digest(p, 0, "xxh3")),
        "words": timed(lambda p: slice_digest(p, 0, "words", scratch)),
    }
    seconds = medians(runs, rounds)
    lines = ["| one thread | ms per GB |", "|---|---|"]
    return lines + [f"| {name} | {1e12 * s / bench.flat.numel():.0f} |" for name, s in seconds.items()]


def hardware() -> str:
    info = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    cpu = next((line.split(":", 1)[1].strip() for line in info if line.startswith("model name")), platform.machine())
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=10"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    return (
        f"{os.cpu_count()} cores {cpu} ({torch.backends.cpu.get_cpu_capability()}), load average "
        f"{os.getloadavg()[0]:.1f} at the start; commit {commit}, Python {platform.python_version()}, torch "
        f"{torch.__version__}, ZeroMQ {zmq.zmq_version()}, xxhash {xxhash.VERSION}; one thread per process. Seconds of "
        "wall time, medians of runs that alternate."
    )


def measure(bench: Bench, rounds: int) -> list[str]:
    lines: list[str] = []
    for label, dtype in DTYPES.items():
        bench.use(dtype, 1)
        lines += [f"## {label}, one receiver, {bench.flat.numel() / 1e9:.2f} GB", "", *one_receiver(bench, rounds), ""]
        lines += [f"Peak memory on top of the weights, {label}:", "", *memory_lines(bench), ""]
        if label == "bf16":
            lines += [*digest_lines(bench, rounds), ""]
    bench.use(DTYPES["bf16"], max(RECEIVERS))
    rounds = max(2, rounds // 2)
    return [*lines, "## Several receivers, bf16", "", *more_receivers(bench, rounds)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="an eighth of the weights, one minute, prints only")
    parser.add_argument("--rounds", type=int, help="measured runs of each variant (default 7; 3 with --quick)")
    options = parser.parse_args()
    rounds = options.rounds or (3 if options.quick else 7)
    torch.set_num_threads(1)
    started, head = time.monotonic(), hardware()
    bench = Bench(1 / 8 if options.quick else 1.0)
    try:
        lines = measure(bench, rounds)
    finally:
        bench.close()
    command = f"python benchmarks/weight_sync.py{' --quick' * options.quick} --rounds {rounds}"
    title = ["# Weight sync between processes", "", f"`{command}`, {time.monotonic() - started:.0f} s.", "", head, ""]
    text = "\n".join([*title, *lines]) + "\n"
    if not options.quick:
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
