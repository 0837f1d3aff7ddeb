"""The whole loop on a fixed load: 16 prompts x 8 samples a step, exactly 64 new tokens each, a random Qwen3 of 0.8M.

    python benchmarks/toy_job.py [--steps 40]

The load on which other systems were measured on this kind of machine (two busy cores, real vLLM on the CPU): TRL 1.16
synchronous 30 samples/s and 56 s to the first step; TRL asynchronous 15 samples/s, 78 to 82 s, about as many samples
dropped as trained; verl 0.9.1 fully_async 24 samples/s. Those runs are not repeated here: compare orders of magnitude.
Writes benchmarks/results/toy_job.md.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from asyncrl.checkpoint.run_directory import git_commit, package_versions
from benchmarks.quickstart import MODES, ROLES, ROOT, run
from tools.make_tiny_model import Settings, build_model, build_tokenizer


def make_model(directory: Path) -> None:
    """Never ends a response by itself: its end-of-sequence token is one that the model does not have."""
    tokenizer = build_tokenizer()
    model = build_model(Settings(num_layers=4), tokenizer)
    tokenizer.add_special_tokens({"eos_token": "<|never|>"})
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = None
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES)
    arguments = parser.parse_args()
    lines = [
        "# The whole loop on a fixed load",
        "",
        f"`python benchmarks/toy_job.py --steps {arguments.steps}`: 16 prompts x 8 samples a step, 64 new tokens each,",
        "random Qwen3 of 0.8M parameters in float32, two replicas of the embedded engine, one trainer rank.",
        "",
        f"{platform.machine()}, {os.cpu_count()} cores; "
        + ", ".join(f"{k} {v}" for k, v in package_versions().items())
        + f"; commit {git_commit()}",
        "",
        "| mode | samples trained/s | response tokens/s | start to first step, s | samples thrown away | lag max "
        "| control share of CPU |",
        "|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as temporary:
        model = Path(temporary) / "model"
        make_model(model)
        load = [f"model.path={model}", "batch.group_size=8", "eval.every_steps=0", "trainer.lr=1.0e-9"]
        for mode in arguments.modes:
            o = run(mode, 0, arguments.steps, load, Path(temporary) / mode)
            share = sum(o.cpu[r] for r in ROLES[:3]) / sum(o.cpu.values())
            lines.append(
                f"| {mode} | {o.samples_per_s:.0f} | {o.tokens_per_s:.0f} | {o.first_step_s:.0f} | {o.thrown_away} "
                f"| {o.lag_max:.0f} | {share:.1%} |"
            )
            print(lines[-1], flush=True)
    (ROOT / "benchmarks" / "results" / "toy_job.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
