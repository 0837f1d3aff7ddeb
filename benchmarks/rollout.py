"""What the embedded engine reaches on one CPU core, beside `model.generate` in the same run.

    OMP_NUM_THREADS=1 python benchmarks/rollout.py [--write]

A random Qwen3 of 0.8M parameters (float32), 64 requests of 16 prompt tokens and 64 sampled ones, one torch thread.
Tokens per CPU-second count the time of the whole process, the asyncio side included; `--write` keeps the table in
benchmarks/results/rollout.md.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import statistics
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import transformers

from asyncrl.config.model import ModelConfig
from asyncrl.config.rollout import TorchEngineConfig
from asyncrl.inference.torch_engine.engine import TorchEngine
from asyncrl.inference.torch_engine.parameter_sink import ParameterSink
from asyncrl.types import GenerationRequest, SamplingParams, TensorSpec
from asyncrl_testing.engine_suite import Client
from asyncrl_testing.random_model import random_qwen3, write_random_qwen3

REQUESTS, GROUP, PROMPT, TOKENS = 64, 8, 16, 64
RESULTS = Path(__file__).parent / "results" / "rollout.md"


@dataclass(frozen=True)
class Speed:
    name: str
    per_cpu_second: float
    per_second: float


def measure(name, run, repeats):
    """The best of `repeats`: the machine's other work only ever adds to a time."""
    cpu, wall = [], []
    for _ in range(repeats):
        cpu_start, wall_start = time.process_time(), time.perf_counter()
        run()
        cpu.append(time.process_time() - cpu_start)
        wall.append(time.perf_counter() - wall_start)
    return Speed(name, REQUESTS * TOKENS / min(cpu), REQUESTS * TOKENS / min(wall))


def requests(tag, **sampling):
    prompts = np.random.default_rng(0).integers(0, 128, (REQUESTS // GROUP, PROMPT)).astype(np.int32)
    params = SamplingParams(max_tokens=TOKENS, **sampling)
    return [GenerationRequest(f"{tag}-{i}", prompts[i // GROUP], params, seed=i) for i in range(REQUESTS)]


async def serve(engine, batch):
    return await asyncio.gather(*(Client(engine, request).done() for request in batch))


def baseline(model, repeats):
    prompts = np.repeat(np.stack([r.prompt_ids for r in requests("")[::GROUP]]), GROUP, axis=0)
    ids = torch.from_numpy(prompts.astype(np.int64))
    mask = torch.ones_like(ids)
    length = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS}

    def run():
        with torch.inference_mode():
            model.generate(ids, attention_mask=mask, do_sample=True, top_k=0, **length)

    run()
    return measure("model.generate (no log-probabilities, no abort, no swap)", run, repeats)


async def abort_times(engine, repeats):
    """Milliseconds in the decode thread, and as the caller waits (a decode step may be in progress)."""
    inside, waited = [], []
    for i in range(repeats):
        clients = [Client(engine, request) for request in requests(f"abort-{i}")]
        await clients[-1].first_tokens()
        start = time.perf_counter()
        await engine.abort(None)
        waited.append((time.perf_counter() - start) * 1e3)
        inside.append(engine._decode.counters.abort_s * 1e3)
        for client in clients:
            await client.done()
    return statistics.median(inside), statistics.median(waited)


def swap_ms(engine, repeats):
    """Milliseconds of CPU time to write every tensor of a publish into the parameters that are being served."""
    fresh = [
        (
            TensorSpec(name, tuple(p.shape), "float32", p.numel() * 4),
            p.contiguous().view(-1).view(torch.uint8),
        )
        for name, p in random_qwen3(seed=1).named_parameters()
    ]
    targets = engine._runner.model.state_dict()
    times = []
    for _ in range(repeats):
        start = time.process_time()
        sink = ParameterSink(targets)
        for spec, data in fresh:
            sink.write(spec, 0, data)
        sink.finish()
        times.append((time.process_time() - start) * 1e3)
    return statistics.median(times)


@torch.no_grad()
def logprob_error(model, clients):
    """Largest distance to the log-probabilities of full float64 forward passes."""
    worst = 0.0
    for client in clients:
        ids = torch.tensor([[*client.request.prompt_ids.tolist(), *client.ids]])
        reference = model(ids).logits[0, PROMPT - 1 : -1].log_softmax(-1)
        chosen = reference.gather(1, torch.tensor(client.ids)[:, None])[:, 0]
        worst = max(worst, (chosen - torch.tensor(client.logprobs)).abs().max().item())
    return worst


async def run(repeats):
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        path = write_random_qwen3(Path(directory))
        engine = TorchEngine(ModelConfig(path=str(path)), TorchEngineConfig(device="cpu"), load_real_weights=True)
        await engine.start()
    clients = await serve(engine, requests("warm"))
    speeds = []
    for name, sampling in [("TorchEngine", {}), ("TorchEngine, top-p 0.9 and top-k 20", {"top_p": 0.9, "top_k": 20})]:
        times = []
        for i in range(repeats):
            start, wall = time.process_time(), time.perf_counter()
            await serve(engine, requests(f"{name}-{i}", **sampling))
            times.append((time.process_time() - start, time.perf_counter() - wall))
        cpu, wall = (min(column) for column in zip(*times, strict=True))
        speeds.append(Speed(name, REQUESTS * TOKENS / cpu, REQUESTS * TOKENS / wall))
    inside, waited = await abort_times(engine, 10)
    error = logprob_error(random_qwen3().double(), clients)
    await engine.pause("abort")
    swap = swap_ms(engine, 30)
    await engine.stop()
    return [*speeds, baseline(random_qwen3(), repeats)], inside, waited, swap, error


def report(speeds, inside, waited, swap, error):
    base = speeds[-1].per_cpu_second
    lines = ["| engine | tokens per CPU-second | tokens per second | against model.generate |", "|---|---|---|---|"]
    lines += [
        f"| {s.name} | {s.per_cpu_second:.0f} | {s.per_second:.0f} | {s.per_cpu_second / base:.2f}x |" for s in speeds
    ]
    lines += ["", "| what | measured |", "|---|---|"]
    lines += [f"| abort of {REQUESTS} running requests, inside the decode thread | {inside:.2f} ms |"]
    lines += [f"| the same, as its caller waits (a decode step may have to end first) | {waited:.2f} ms |"]
    lines += [f"| writing a publish into the parameters (0.8M, float32), CPU time | {swap:.2f} ms |"]
    lines += [f"| largest log-probability error against float64 full forward passes | {error:.1e} |"]
    return "\n".join(lines)


def hardware():
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.processor() or "unknown"


def commit():
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=10,
    )
    return git.stdout.strip() or "uncommitted"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS}")
    arguments = parser.parse_args()
    table = report(*asyncio.run(run(arguments.repeats)))
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}"
    about = (
        "# Rollout on one CPU core\n\n"
        f"`python benchmarks/rollout.py --write`: {REQUESTS} requests of {PROMPT} prompt and {TOKENS} sampled tokens,\n"
        f"groups of {GROUP}; random Qwen3 of 0.8M parameters, float32, one thread, best of {arguments.repeats}.\n\n"
        f"{hardware()}, {os.cpu_count()} cores; {versions}; commit {commit()}.\n"
    )
    print(f"{about}\n{table}")
    if arguments.write:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(f"{about}\n{table}\n")


if __name__ == "__main__":
    main()
