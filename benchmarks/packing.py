"""Rows of several sequences packed against padded: seconds of a step at three distributions of lengths, on one rank of
FSDP2; and seconds of the proof at load that decides between them.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/packing.py [--rounds 5] [--write]

Both ways alternate in one process, each with the plan that the trainer makes for it. `--tiny` runs everything once on
small inputs. Writes benchmarks/results/packing.md.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from training_cpu import BUDGET, GROUP_SIZE, VOCABULARY, Load, alternate, load, process_group
from transformers import Qwen3Config, Qwen3ForCausalLM

from asyncrl.checkpoint.run_directory import git_commit, package_versions
from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.model import ModelConfig
from asyncrl.config.trainer import FsdpConfig, TrainerConfig
from asyncrl.trainer.backend import TrainBackend
from asyncrl.trainer.backends import build_backend
from asyncrl.trainer.fsdp.attention import PACKED_SDPA
from asyncrl.trainer.fsdp.proof import prove
from asyncrl.trainer.packing import PackingRules, plan_step
from asyncrl.trainer.trainer_spec import TrainerSpec
from asyncrl.types import RankPlan
from asyncrl_testing.random_model import write_random_qwen3

RESULTS = Path(__file__).parent / "results" / "packing.md"


def loads(groups: int) -> list[tuple[str, Load]]:
    draw, count = np.random.default_rng(0), groups * GROUP_SIZE
    tail = draw.integers(8, 48, count)
    tail[draw.random(count) < 0.05] = 256
    lengths = {
        "64 tokens each": [64] * count,
        "8 to 128, uniform": draw.integers(8, 129, count).tolist(),
        "8 to 48, one in 20 has 256": tail.tolist(),
    }
    return [(name, load(name, responses)) for name, responses in lengths.items()]


def build(model: Path, packing: str) -> TrainBackend:
    fsdp = FsdpConfig(reshard_after_forward=False)
    trainer = TrainerConfig(lr=1e-9, device="cpu", fsdp=fsdp, packing=packing, max_tokens_per_microbatch=BUDGET)
    spec = TrainerSpec(model=ModelConfig(path=str(model)), trainer=trainer, algorithm=AlgorithmConfig())
    return build_backend(spec, rank=0, world_size=1, device=torch.device("cpu"))


def planned(one: Load, *, pads: bool) -> RankPlan:
    draw = np.random.default_rng(0)
    advantages = [draw.normal(size=GROUP_SIZE) for _ in one.manifest.groups]
    rules = PackingRules(num_plans=1, max_tokens_per_microbatch=BUDGET, share_prompts=not pads, pads=pads)
    return plan_step(one.manifest, advantages, rules)[0]


def step_rows(model: Path, rounds: int, groups: int) -> list[str]:
    rows = ["| responses | packed, ms | padded, ms | ratio | CPU time, ratio |", "|" + "---|" * 5]
    backends = {packing: build(model, packing) for packing in ("packed", "padded")}
    for name, one in loads(groups):
        plans = {packing: planned(one, pads=packing == "padded") for packing in backends}

        def step(packing: str, one: Load = one, plans: dict[str, RankPlan] = plans) -> None:
            backends[packing].train_step(plans[packing], one.trajectories)

        cost = alternate({packing: lambda packing=packing: step(packing) for packing in backends}, rounds)
        packed, padded = cost["packed"], cost["padded"]
        row = f"| {name} | {packed.wall_s * 1e3:.0f} | {padded.wall_s * 1e3:.0f} | "
        rows.append(f"{row}{padded.wall_s / packed.wall_s:.2f} | {padded.cpu_s / packed.cpu_s:.2f} |")
    return rows


def proof_row(config: Qwen3Config) -> str:
    model = Qwen3ForCausalLM(config)
    began = time.perf_counter()
    way = prove(model, PACKED_SDPA)
    spent = time.perf_counter() - began
    size = sum(p.numel() for p in model.parameters()) / 1e6
    return f"The proof of a Qwen3 of {size:.0f}M parameters in float32: {spent:.1f} s ({way.attention})."


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    average = os.getloadavg()[0]
    half = Qwen3Config(
        vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, head_dim=64, tie_word_embeddings=True,
    )  # fmt: skip
    if options.tiny:
        half = replace_sizes(half)
    with process_group(), tempfile.TemporaryDirectory() as directory:
        model = write_random_qwen3(Path(directory), vocab_size=VOCABULARY)
        rounds, groups = (1, 2) if options.tiny else (options.rounds, 32)
        lines = [*step_rows(model, rounds, groups), "", proof_row(half)]
    versions = ", ".join(f"{name} {version}" for name, version in package_versions().items())
    head = (
        f"# Packed rows against padded ones\n\n`python benchmarks/packing.py --rounds {rounds}`; medians of a step of "
    )
    head += (
        f"{groups * GROUP_SIZE} responses on one rank.\n\n{os.cpu_count()} cores, load average {average:.1f} at the "
    )
    text = f"{head}start; {versions}; commit {git_commit()}\n\n" + "\n".join(lines) + "\n"
    if options.write and not options.tiny:
        RESULTS.write_text(text)
    sys.stdout.write(text)


def replace_sizes(config: Qwen3Config) -> Qwen3Config:
    small = Qwen3Config.from_dict(config.to_dict())
    small.vocab_size, small.num_hidden_layers, small.hidden_size, small.intermediate_size = 99, 1, 32, 64
    small.layer_types = small.layer_types[:1]
    return small


if __name__ == "__main__":
    main()
