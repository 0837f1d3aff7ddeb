"""How far the log-probabilities of the engines are from the trainer's, by engine and dtype, with equal weights.

    python benchmarks/logprob_mismatch.py                         # both engines, about 3 minutes on 2 cores
    python benchmarks/logprob_mismatch.py --engines torch --model Qwen/Qwen2.5-0.5B
    python benchmarks/logprob_mismatch.py --engines sglang --out benchmarks/results/logprob_mismatch_sglang.md
    python benchmarks/logprob_mismatch.py --mixture --engines torch --out benchmarks/results/logprob_mismatch_mixture.md
    python benchmarks/logprob_mismatch.py --vocabulary 49152 151936 --count 64 --out FILE.md

Every engine loads the model's files and samples responses; the FSDP backend computes the log-probabilities of the same
tokens from the same files. What differs is the arithmetic: kernels, the order of sums, the dtype. Writes
benchmarks/results/logprob_mismatch.md. The model is the quickstart's unless one is named; with --mixture it is a random
mixture of experts with the quickstart's tokenizer, whose tokens the trainer also computes through the experts that the
engine recorded (torch, and sglang) (`trainer.router_replay=rollout`). With --vocabulary it is a random model of so many
tokens, all nearly equally likely: sums over a vocabulary are where engines in float32 differ most.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import itertools
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "benchmarks" / "results" / "logprob_mismatch.md"
DTYPES = ("float32", "bfloat16")


def write_mixture(tiny: Path, directory: Path) -> Path:
    """Saves a mixture of four layers with 32 experts, 4 for each token, for the tokenizer of `tiny`; returns its
    directory."""
    from asyncrl_testing.random_model import random_qwen3_moe

    path = directory / "random-mixture"
    of_tiny = _without_weights(tiny, path)
    same = {key: of_tiny[key] for key in ("vocab_size", "eos_token_id", "pad_token_id", "max_position_embeddings")}
    sizes = {"num_hidden_layers": 4, "num_experts": 32, "num_experts_per_tok": 4, "initializer_range": 0.1}
    random_qwen3_moe(**same, **sizes).save_pretrained(path)
    return path


def write_vocabulary(tiny: Path, directory: Path, num_tokens: int) -> Path:
    """Saves a random model of the architecture of `tiny` with `num_tokens` tokens; returns its directory."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    path = directory / f"{num_tokens} tokens"
    _without_weights(tiny, path)
    config: Any = AutoConfig.from_pretrained(tiny)
    config.vocab_size = num_tokens
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def _without_weights(tiny: Path, path: Path) -> dict[str, Any]:
    """Copies `tiny` without its weights; returns its configuration."""
    shutil.copytree(tiny, path, ignore=shutil.ignore_patterns("*.safetensors", "tiny_model.json"))
    return json.loads((tiny / "config.json").read_text())


def records_experts(engine: str, model: str) -> bool:
    from asyncrl.data.model_files import check_model
    from asyncrl.inference.engines import ENGINES

    spec = ENGINES[engine]
    records = "experts" in spec.records and spec.records_on_cpu
    return records and check_model(model, "--model").num_experts > 0


async def sample(engine_name: str, dtype: str, model: str, count: int) -> None:
    """Prints one JSON object a response: prompt, tokens, log-probabilities, and experts where they are recorded."""
    from asyncrl.config.model import ModelConfig
    from asyncrl.config.rollout import (
        RolloutConfig,
        SamplingConfig,
        SglangEngineConfig,
        TorchEngineConfig,
        VllmEngineConfig,
    )
    from asyncrl.data.dataset import load_rows
    from asyncrl.data.tokenizer import PromptRenderer, load_tokenizer, stop_token_ids
    from asyncrl.inference.engines import build_engine
    from asyncrl.types import GenerationRequest, SamplingParams

    config = ModelConfig(path=model, inference_dtype=dtype)  # type: ignore[arg-type]
    records = records_experts(engine_name, model)
    tokenizer = load_tokenizer(config)
    renderer = PromptRenderer(tokenizer, config)
    rows = load_rows(str(ROOT / "data" / "arithmetic_test.jsonl"))[:count]
    rollout = RolloutConfig(
        engine=engine_name,  # type: ignore[arg-type]
        sampling=SamplingConfig(max_response_tokens=64),
        torch=TorchEngineConfig(num_slots=64, max_model_len=256),
        vllm=VllmEngineConfig(max_model_len=256, max_num_seqs=64, enforce_eager=True, kv_cache_memory_bytes=1 << 26),
        sglang=SglangEngineConfig(
            max_model_len=256, max_running_requests=64, max_total_tokens=1 << 15, record_experts=records
        ),
    )
    engine = build_engine(rollout, config, load_real_weights=True)
    await engine.start()
    stops = stop_token_ids(tokenizer, config, ())
    sampling = SamplingParams(max_tokens=64, stop_token_ids=stops, experts=records)

    async def one(number: int) -> None:
        ids = renderer.prompt_ids(rows[number])
        request = GenerationRequest(f"request-{number}", ids, sampling, seed=number)
        chunks = [chunk async for chunk in engine.generate(request)]
        tokens = [int(t) for c in chunks for t in c.token_ids]
        logprobs = [float(x) for c in chunks for x in c.logprobs]
        experts = [row for c in chunks if records and len(c.token_ids) for row in c.extra["experts"].tolist()]
        said = {"prompt": ids.tolist(), "tokens": tokens, "logprobs": logprobs, "experts": experts}
        print(json.dumps(said), flush=True)

    await asyncio.gather(*(one(number) for number in range(len(rows))))
    await engine.stop()


def trained(model: str, dtype: str, responses: list[dict], *, replays: bool) -> list[np.ndarray]:
    """[T] float64 per response: the trainer's log-probabilities; `replays`: through the recorded experts."""
    import torch
    import torch.distributed as dist

    from asyncrl.config.algorithm import AlgorithmConfig
    from asyncrl.config.model import ModelConfig
    from asyncrl.config.trainer import FsdpConfig, TrainerConfig
    from asyncrl.trainer.fsdp.backend import FsdpBackend
    from asyncrl.trainer.packing import PackingRules, plan_step
    from asyncrl.trainer.trainer_spec import TrainerSpec
    from asyncrl.types import GroupSummary, LeaseManifest, Lengths, Segment, Trajectory

    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    trajectories, groups = {}, []
    for number, r in enumerate(responses):
        n = len(r["tokens"])
        trajectories[number, 0] = Trajectory(
            np.array(r["prompt"], np.int32),
            np.array(r["tokens"], np.int32),
            np.array(r["logprobs"], np.float32),
            np.ones(n, bool),
            (Segment(0, n, 0, 0),),
            0.0,
            extra={"experts": np.array(r["experts"], np.int16)} if replays else {},
        )
        groups.append(GroupSummary(number, 0, (Lengths(len(r["prompt"]), n, n),), (0.0,), (), 1, 0))
    fsdp = FsdpConfig(param_dtype=dtype)  # type: ignore[arg-type]
    trainer = TrainerConfig(fsdp=fsdp, router_replay="rollout" if replays else "off")
    spec = TrainerSpec(model=ModelConfig(path=model), trainer=trainer, algorithm=AlgorithmConfig())
    backend = FsdpBackend(spec, rank=0, world_size=1, device=torch.device("cpu"))
    rules = PackingRules(num_plans=1, max_tokens_per_microbatch=4096)
    (plan,) = plan_step(LeaseManifest(0, tuple(groups)), [np.zeros(1)] * len(groups), rules)
    found = backend.logprobs(plan, trajectories)
    dist.destroy_process_group()
    return [found[number, 0].double().numpy() for number in range(len(responses))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", nargs="+", default=("torch", "vllm"), choices=("torch", "vllm", "sglang"))
    parser.add_argument("--model", default=str(ROOT / "runs" / "tiny-qwen3"))
    parser.add_argument("--count", type=int, default=256, help="responses per engine and dtype")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--mixture", action="store_true", help="a random mixture of experts in place of the model")
    parser.add_argument("--vocabulary", nargs="+", type=int, default=(), help="random models of so many tokens")
    parser.add_argument("--sample", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.sample:
        asyncio.run(sample(*arguments.sample, arguments.model, arguments.count))
        return
    from asyncrl.checkpoint.run_directory import git_commit, package_versions
    from asyncrl.config.load import environment_defaults
    from asyncrl.inference.engines import ENGINES

    scratch = tempfile.TemporaryDirectory()
    if arguments.mixture:
        arguments.model = str(write_mixture(Path(arguments.model), Path(scratch.name)))
    models = [str(write_vocabulary(Path(arguments.model), Path(scratch.name), n)) for n in arguments.vocabulary]
    table = []
    for model, engine in itertools.product(models or [arguments.model], arguments.engines):
        for dtype in DTYPES:
            command = [sys.executable, __file__, "--sample", engine, dtype, "--model", model]
            environment = {**os.environ, **environment_defaults(), **ENGINES[engine].environment}
            done = subprocess.run(
                [*command, "--count", str(arguments.count)],
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            responses = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"prompt"')]
            reported = np.concatenate([r["logprobs"] for r in responses])
            modes = (False, True) if records_experts(engine, model) else (False,)
            for other, replays in itertools.product(DTYPES, modes):
                own = np.concatenate(trained(model, other, responses, replays=replays))
                gap, ratio = np.abs(own - reported), np.exp(own - reported)
                computed = f"{other}, replayed" if replays else other
                named = f"{engine}, {Path(model).name}" if models else engine
                table.append(
                    f"| {named} | {dtype} | {computed} | {len(gap)} | {gap.mean():.2e} | "
                    f"{np.quantile(gap, 0.99):.2e} | {gap.max():.2e} | "
                    f"{np.mean(reported - own):+.1e} | {ratio.min():.4f} - {ratio.max():.4f} |"
                )
                print(table[-1], flush=True)
    words = f"{' --mixture' * arguments.mixture}{' --vocabulary' * bool(models)}"
    told = "random models" if models else Path(arguments.model).name
    lines = [
        "# Log-probabilities: engine against trainer",
        "",
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores; "
        + ", ".join(f"{k} {v}" for k, v in package_versions().items())
        + f"; commit {git_commit()}",
        "",
        f"Written by `python benchmarks/logprob_mismatch.py{words}`: "
        f"{arguments.count} sampled responses of {told}, the same weights on both sides.",
        "Differences per token, in nats; `k1` is the mean of engine minus trainer, an estimate of the divergence; the",
        "last column is the range of the ratio of",
        "trainer to engine, which corrections such as truncated importance sampling look at.",
        "",
        "| engine | its dtype | trainer's dtype | tokens | mean | p99 | max | k1 | ratio |",
        "|---|---|---|---|---|---|---|---|---|",
        *table,
    ]
    arguments.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
