"""What weights.encoding=delta saves and costs in a real run: bytes and seconds of each publish, with it and without.

    make quickstart                                        # once: the model and the data
    python benchmarks/delta_publish.py                     # 4 settings, with and without: about 15 minutes on 2 cores
    python benchmarks/delta_publish.py --steps 3 --settings "bfloat16 1e-6"
    python benchmarks/delta_publish.py --model 56M --steps 50 --settings "bfloat16 1e-6" "bfloat16 5e-4"

Runs `asyncrl-train recipes/quickstart.yaml` over `collective`, one run at a time, and reads its metrics. A setting is
the dtype of what is published and the learning rate; 5e-4 is the quickstart's own. The model of 56M parameters is
random, has small batches of short responses, and is rewarded where it writes a 7. The seconds of a publish hold the
encoding, before replicas pause; those of a transfer hold what replicas make of it. Writes
benchmarks/results/delta_publish.md (delta_publish_56M.md), or the file that --out names, with --write.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works from a checkout that is not installed

from asyncrl.checkpoint.run_directory import git_commit, package_versions
from asyncrl.types import Encoding
from asyncrl.types.metrics import Metric
from tools.make_tiny_model import Settings, build_model, build_tokenizer

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = ("bfloat16 1e-6", "bfloat16 5e-4", "float32 1e-6", "float32 5e-4")
ENCODINGS: tuple[Encoding, ...] = ("full", "delta")
RESULTS = Path(__file__).parent / "results"
TIMEOUT_S = 1800.0
LARGE = Settings(hidden_size=768, num_layers=10)
LARGE_RUN = (
    "batch.groups_per_step=4",
    "batch.group_size=8",
    "rollout.sampling.max_response_tokens=24",
    "rollout.torch.num_slots=16",
    "reward.function=regex",
    "reward.pattern=7",
)


@dataclass(frozen=True)
class Measured:
    """Medians over the publishes after steps, all but the first step's."""

    sent_bytes: float
    share: float
    publish_s: float
    pause_s: float
    transfer_s: float


def write_large(path: Path) -> None:
    """A random model of 56M parameters with the quickstart's tokenizer."""
    tokenizer = build_tokenizer()
    build_model(LARGE, tokenizer).save_pretrained(path)
    tokenizer.save_pretrained(path)


def measure(dtype: str, lr: str, encoding: Encoding, steps: int, more: Sequence[str] = ()) -> Measured:
    """One run, with further overrides. Raises RuntimeError: it failed."""
    with tempfile.TemporaryDirectory() as directory:
        settings = {
            "model.inference_dtype": dtype,
            "trainer.lr": lr,
            "trainer.warmup_steps": 0,
            "weights.encoding": encoding,
            "weights.transport": "collective",
            "weights.verify": "always",
            "run.dir": f"{directory}/run",
            "run.max_steps": steps,
            "eval.every_steps": 0,
            "checkpoint.every_steps": 0,
        }
        overrides = [*(f"{key}={value}" for key, value in settings.items()), *more]
        command = [sys.executable, "-m", "asyncrl.commands.train", "recipes/quickstart.yaml", *overrides]
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr}")
        lines = (Path(directory) / "run" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    published = [record for record in records[1:] if record[Metric.PUBLISH_ATTEMPTS]] or records

    def median(metric: Metric) -> float:
        return statistics.median(record[metric] for record in published)

    return Measured(
        sent_bytes=median(Metric.PUBLISH_BYTES),
        share=median(Metric.PUBLISH_SHARE),
        publish_s=median(Metric.PUBLISH_TIME),
        pause_s=median(Metric.PUBLISH_PAUSE),
        transfer_s=median(Metric.PUBLISH_TRANSFER),
    )


def row(setting: str, encoding: Encoding, found: Measured) -> str:
    times = " | ".join(f"{1e3 * s:.0f}" for s in (found.publish_s, found.pause_s, found.transfer_s))
    return f"| {setting} | {encoding} | {found.sent_bytes / 1e3:.1f} | {found.share:.2%} | {times} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=SETTINGS)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--model", choices=("tiny", "56M"), default="tiny")
    parser.add_argument("--write", action="store_true", help="write the results too")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    load, rows = os.getloadavg()[0], []
    large = options.model == "56M"
    with tempfile.TemporaryDirectory() as scratch:
        if large:
            write_large(Path(scratch))
        more = [f"model.path={scratch}", *LARGE_RUN] if large else []
        for setting in options.settings:
            dtype, lr = setting.split()
            for encoding in ENCODINGS:
                rows.append(row(setting, encoding, measure(dtype, lr, encoding, options.steps, more)))
    versions = ", ".join(f"{name} {version}" for name, version in package_versions().items())
    about = f"{os.cpu_count()} cores, load average {load:.1f} at the start; commit {git_commit()}; {versions}."
    table = [
        "| published, learning rate | encoding | kB sent | of all weights | publish, ms | pause, ms | transfer, ms |",
        "|---|---|---|---|---|---|---|",
        *rows,
    ]
    command = f"`python benchmarks/delta_publish.py --model {options.model} --steps {options.steps}`"
    medians = "Medians over the publishes after the first step; two replicas, `collective` over gloo, digests compared."
    text = "\n".join(["# What publishes of differences save", "", command, "", about, medians, "", *table]) + "\n"
    if options.write:
        (options.out or RESULTS / f"delta_publish{'_56M' if large else ''}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
