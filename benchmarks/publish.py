"""What a publish costs an engine: all weights by each transport, and adapters.

    OMP_NUM_THREADS=1 python benchmarks/publish.py [--engines torch vllm sglang] [--sizes tiny 0.5B] [--rounds 5]

One engine receives, buckets of 4 MiB, no digest, float32: from the pause to the resume, nothing in flight. The sender
is a thread of this process and its tensors are there already, so the trainer's own walk is not in the figures. Adapters
go by `ipc`. Sizes: `tiny` has the shapes of runs/tiny-qwen3, `0.5B` those of Qwen2.5-0.5B (494M parameters); weights
are random. Adapters have rank 16, on all linear layers (the default of a recipe) or on the attention's. "first" is the
publish after other weights, which merges and loads the whole model; "next" the median of those that follow. Of
weights that are staged the pause begins when they have come. Writes
benchmarks/results/publish.md, or the file that --out names, with --write.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from asyncrl.config.model import ModelConfig
from asyncrl.config.rollout import RolloutConfig, SglangEngineConfig, TorchEngineConfig, VllmEngineConfig
from asyncrl.inference.engine import InferenceEngine, StagingEngine
from asyncrl.inference.engines import ENGINES, build_engine
from asyncrl.types import Encoding, Manifest
from asyncrl.weights.packing import spec_of
from asyncrl.weights.plan import make_manifest
from asyncrl.weights.transports import build_sender

BUCKET_BYTES, TIMEOUT_S, RANK = 4 << 20, 300.0, 16
SIZES = {
    "tiny": {"hidden": 128, "heads": 4, "kv_heads": 2, "inner": 384, "layers": 4, "vocabulary": 192},
    "0.5B": {"hidden": 896, "heads": 14, "kv_heads": 2, "inner": 4864, "layers": 24, "vocabulary": 151936},
}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
TRANSPORTS = ("ipc", "collective", "disk")
RESULTS = Path(__file__).parent / "results" / "publish.md"

NUMBERS = itertools.count(1)

Tensors = dict[str, torch.Tensor]


def write_model(directory: Path, size: Mapping[str, int]) -> Tensors:
    """A Qwen2 of this size with random weights, as files; returns its tensors."""
    hidden, inner, head = size["hidden"], size["inner"], size["hidden"] // size["heads"]
    kv = size["kv_heads"] * head
    linear = {"self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden)}
    linear |= {"self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden)}
    linear["mlp.down_proj"] = (hidden, inner)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (size["vocabulary"], hidden)}
    for i in range(size["layers"]):
        layer = f"model.layers.{i}."
        shapes |= {f"{layer}{name}.weight": shape for name, shape in linear.items()}
        shapes |= {f"{layer}{name}.bias": shape[:1] for name, shape in linear.items() if name[-6] in "qkv"}
        shapes |= {f"{layer}{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    shapes["model.norm.weight"] = (hidden,)
    tensors = {name: torch.randn(shape) * 0.02 for name, shape in shapes.items()}
    save_file(tensors, directory / "model.safetensors")
    config = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": hidden}
    config |= {"num_attention_heads": size["heads"], "num_key_value_heads": size["kv_heads"], "hidden_act": "silu"}
    config |= {"intermediate_size": inner, "num_hidden_layers": size["layers"], "vocab_size": size["vocabulary"]}
    config |= {"max_position_embeddings": 1024, "tie_word_embeddings": True, "rms_norm_eps": 1e-6}
    (directory / "config.json").write_text(json.dumps(config))
    return tensors


def adapters_of(tensors: Tensors, names: tuple[str, ...]) -> Tensors:
    found: Tensors = {}
    for name, tensor in tensors.items():
        stem = name.removesuffix(".weight")
        if name.endswith("proj.weight") and stem.endswith(names):
            found[f"{stem}.lora_A.weight"] = torch.randn(RANK, tensor.shape[1]) * 0.02
            found[f"{stem}.lora_B.weight"] = torch.randn(tensor.shape[0], RANK) * 0.02
    return found


class Publishes:
    """The sending side, in a thread of its own."""

    def __init__(self, engine: InferenceEngine, transport: str, directory: str) -> None:
        self._engine = engine
        self._thread = ThreadPoolExecutor(1)
        self._sender = build_sender(transport, BUCKET_BYTES, 1, directory=directory)
        self._source = self._thread.submit(self._sender.open).result()

    async def timed(self, tensors: Tensors, encoding: Encoding, *, staged: bool = False) -> float:
        """Seconds from the pause to the resume. `staged`: the weights come before the pause."""
        number = next(NUMBERS)
        specs = [spec_of(*item) for item in tensors.items()]
        manifest = make_manifest(number, number, specs, BUCKET_BYTES, verify=False, encoding=encoding)
        manifest = replace(manifest, is_staged=staged)
        if staged:
            assert isinstance(self._engine, StagingEngine), "chosen by main"
            await self._sent(manifest, tensors, self._engine.stage_weights)
        started = time.perf_counter()
        await self._engine.pause("abort")
        if staged:
            await self._engine.load_staged(TIMEOUT_S)
        else:
            await self._sent(manifest, tensors, self._engine.load_weights)
        await self._engine.commit(number)
        await self._engine.resume()
        return time.perf_counter() - started

    async def _sent(self, manifest: Manifest, tensors: Tensors, receive: Callable[..., Awaitable[Any]]) -> None:
        send = asyncio.get_running_loop().run_in_executor(
            self._thread, self._sender.send, manifest, iter(tensors.items()), TIMEOUT_S
        )
        await asyncio.gather(send, receive(manifest, self._source, TIMEOUT_S))

    def close(self) -> None:
        self._thread.submit(self._sender.close).result()
        self._thread.shutdown()


async def measure(engine_name: str, size: str, rounds: int) -> list[str]:
    """Rows of the table."""
    settings = {
        "torch": TorchEngineConfig(num_slots=4, max_model_len=128, device="cpu"),
        "vllm": VllmEngineConfig(max_model_len=128, max_num_seqs=4, kv_cache_memory_bytes=64 << 20, enforce_eager=True),
        "sglang": SglangEngineConfig(max_model_len=128, max_running_requests=4, max_total_tokens=1 << 12),
    }
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        full = write_model(Path(directory), SIZES[size])
        rollout = RolloutConfig(engine=engine_name, **{engine_name: settings[engine_name]})  # type: ignore[arg-type]
        engine = build_engine(rollout, ModelConfig(path=directory), load_real_weights=False)
        await engine.start()
        base = 0.0
        for transport in TRANSPORTS:
            publishes = Publishes(engine, transport, str(Path(directory) / "published"))
            for staged in (False, True) if isinstance(engine, StagingEngine) else (False,):
                took = [await publishes.timed(full, "full", staged=staged) for _ in range(rounds + 1)]
                median = statistics.median(took[1:])
                base = base or median  # by the first transport
                label = f"all weights, {transport}{', staged' * staged}"
                rows.append(row(engine_name, size, label, full, None, median, base))
            publishes.close()
        publishes = Publishes(engine, TRANSPORTS[0], "")
        try:
            await publishes.timed(full, "full")
            for label, names in (("adapters of all linear layers", ("proj",)), ("adapters of attention", ATTENTION)):
                sent = adapters_of(full, names)
                first, *others = [await publishes.timed(sent, "lora") for _ in range(rounds + 1)]
                rows.append(row(engine_name, size, label, sent, first, statistics.median(others), base))
                await publishes.timed(full, "full")
        finally:
            publishes.close()
            await engine.stop()
    return rows


def row(engine: str, size: str, what: str, sent: Tensors, first: float | None, later: float, base: float) -> str:
    megabytes = sum(tensor.nbytes for tensor in sent.values()) / 1e6
    begin = "" if first is None else f"{first * 1e3:.0f}"
    return f"| {engine} | {size} | {what} | {megabytes:.1f} | {begin} | {later * 1e3:.0f} | {later / base:.0%} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=sorted(ENGINES), default=["torch"])
    parser.add_argument("--sizes", nargs="+", choices=sorted(SIZES), default=["tiny", "0.5B"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="write the results too")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    rows = []
    for engine in options.engines:
        os.environ.update(ENGINES[engine].environment)
        for size in options.sizes:
            rows += asyncio.run(measure(engine, size, options.rounds))
    from asyncrl.checkpoint.run_directory import git_commit, package_versions

    versions = ", ".join(f"{name} {version}" for name, version in package_versions().items())
    about = f"{os.cpu_count()} cores, load average {load:.1f} at the start; commit {git_commit()}; {versions}"
    table = [
        "| engine | model | sent | MB | first, ms | next, ms | of all weights by ipc |",
        "|---|---|---|---|---|---|---|",
    ]
    command = f"python benchmarks/publish.py --engines {' '.join(options.engines)} --rounds {options.rounds}"
    text = (
        "\n".join(["# What a publish costs an engine", "", f"`{command}`", "", about + ".", "", *table, *rows]) + "\n"
    )
    if options.write:
        options.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
