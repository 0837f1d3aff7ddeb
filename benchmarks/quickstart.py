"""The quickstart measured: learning, time, lag and where the CPU goes, for every mode and seed.

    python benchmarks/quickstart.py                       # all modes, 3 seeds: about 30 minutes on 2 cores
    python benchmarks/quickstart.py --modes sync --seeds 1 --steps 20
    python benchmarks/quickstart.py --modes fully_async --engines torch vllm --out benchmarks/results/quickstart_vllm.md

Runs `asyncrl-train recipes/quickstart.yaml` (or quickstart_vllm.yaml) as a user does, one run at a time, and reads what
it leaves behind. Writes benchmarks/results/quickstart.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from asyncrl.checkpoint.run_directory import git_commit, package_versions

ROOT = Path(__file__).resolve().parents[1]
MODES = ("sync", "one_step_off", "fully_async")
RECIPES = {"torch": "recipes/quickstart.yaml", "vllm": "recipes/quickstart_vllm.yaml"}
ROLES = ("coordinator", "queue", "rollouter", "replicas", "trainers")


@dataclass
class Outcome:
    engine: str
    mode: str
    seed: int
    initial: float
    final: float
    steps_to_90: int | None
    start_s: float
    first_step_s: float
    training_s: float
    total_s: float
    samples_per_s: float
    tokens_per_s: float
    lag_mean: float
    lag_max: float
    thrown_away: int
    publish_ms: float
    idle_trainer: float
    idle_rollout: float
    cpu: dict[str, float]
    ray_cpu_s: float


class RayCpu:
    """CPU seconds of Ray's own daemons below a process, sampled because they are gone when it ends."""

    def __init__(self, pid: int) -> None:
        self._pid, self._seconds, self._stop = pid, {}, threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._stop.wait(1.0):
            try:
                for process in psutil.Process(self._pid).children(recursive=True):
                    words = " ".join(process.cmdline()[:3])
                    if not words.startswith("ray::") and "asyncrl" not in words and "VLLM" not in words:
                        times = process.cpu_times()
                        self._seconds[process.pid] = times.user + times.system
            except psutil.Error:
                continue

    def stop(self) -> float:
        self._stop.set()
        self._thread.join()
        return sum(self._seconds.values())


def run(engine: str, mode: str, seed: int, steps: int | None, overrides: list[str], directory: Path) -> Outcome:
    words = [f"mode={mode}", f"run.seed={seed}", f"run.dir={directory}", *overrides]
    if steps is not None:
        words.append(f"run.max_steps={steps}")
    started, wall = time.monotonic(), time.time()
    with (directory.parent / f"{directory.name}.out").open("w") as output:
        command = [sys.executable, "-m", "asyncrl.commands.train", RECIPES[engine], *words]
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        ray = RayCpu(process.pid)
        code = process.wait(timeout=3600)
    total_s = time.monotonic() - started
    ray_cpu_s = ray.stop()
    if code:
        raise SystemExit((directory.parent / f"{directory.name}.out").read_text()[-3000:])
    metrics = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    events = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    first, last = metrics[0], metrics[-1]
    begin = next(e["time_s"] for e in events if e["event"] == "start")
    end = next(e["time_s"] for e in events if e["event"] == "end")
    evaluated = [(r["step"], r["eval/accuracy"]) for r in metrics if "eval/accuracy" in r]
    settled = metrics[len(metrics) // 4 :]
    interval = settled[-1]["time_s"] - settled[0]["time_s"] - sum(r.get("eval/time_s", 0) for r in settled[1:])
    groups = settled[-1]["queue/trained"] - settled[0]["queue/trained"]
    config = json.loads((directory / "config.json").read_text())["recipe"]
    samples = groups * config["batch"]["group_size"]

    def mean(key: str) -> float:
        return sum(r[key] for r in settled) / len(settled)

    return Outcome(
        engine=engine,
        mode=mode,
        seed=seed,
        initial=first.get("eval/initial_accuracy", float("nan")),
        final=evaluated[-1][1] if evaluated else float("nan"),
        steps_to_90=next((step for step, accuracy in evaluated if accuracy >= 0.9), None),
        start_s=begin - wall,
        first_step_s=begin - wall + first["time_s"],
        training_s=end - begin,
        total_s=total_s,
        samples_per_s=samples / interval,
        tokens_per_s=mean("rollout/response_tokens_mean") * samples / interval,
        lag_mean=mean("staleness/lag_mean"),
        lag_max=max(r["staleness/lag_max"] for r in metrics),
        thrown_away=int(last["queue/admitted"] - last["queue/trained"]),
        publish_ms=1000 * sorted(r["weights/publish_s"] for r in settled)[len(settled) // 2],
        idle_trainer=mean("idle/trainer_fraction"),
        idle_rollout=mean("idle/rollout_fraction"),
        cpu={role: last.get(f"cpu/{role}_s", float("nan")) for role in ROLES},  # a short run has no health check
        ray_cpu_s=ray_cpu_s,
    )


def report(outcomes: list[Outcome]) -> str:
    lines = [
        "# The quickstart, measured",
        "",
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores; "
        + ", ".join(f"{k} {v}" for k, v in package_versions().items())
        + f"; commit {git_commit()}",
        "",
        "Written by `python benchmarks/quickstart.py`. Start: from the command to the first action of the run, which",
        "includes checking the recipe, Ray and loading the model. Training: from there to the end, evaluations and",
        "checkpoints included. Speeds leave the first quarter of the steps and the evaluations out.",
        "",
        "| engine | mode | seed | accuracy before | after | steps to 0.9 | start s | training s | samples/s "
        "| response tokens/s | lag mean / max | samples thrown away | publish ms (median) "
        "| trainer idle | rollout idle |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for o in outcomes:
        lines.append(
            f"| {o.engine} | {o.mode} | {o.seed} | {o.initial:.3f} | {o.final:.3f} | {o.steps_to_90 or '-'} | "
            f"{o.start_s:.0f} | {o.training_s:.0f} | {o.samples_per_s:.0f} | {o.tokens_per_s:.0f} | "
            f"{o.lag_mean:.2f} / {o.lag_max:.0f} | "
            f"{o.thrown_away} | {o.publish_ms:.0f} | {o.idle_trainer:.0%} | {o.idle_rollout:.0%} |"
        )
    lines += [
        "",
        "## CPU seconds by process",
        "",
        "Of the whole run, imports and start-up included. The share is that of coordinator, queue and rollouter in the",
        "CPU time of all processes of the run; the last column counts Ray's daemons among the processes, too.",
        "",
        "| engine | mode | seed | coordinator | queue | rollouter | replicas | trainers | share "
        "| Ray's daemons | of all |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for o in outcomes:
        control, whole = sum(o.cpu[r] for r in ROLES[:3]), sum(o.cpu.values())
        cells = " | ".join(f"{o.cpu[r]:.1f}" for r in ROLES)
        lines.append(
            f"| {o.engine} | {o.mode} | {o.seed} | {cells} | {control / whole:.1%} | {o.ray_cpu_s:.1f} | "
            f"{control / (whole + o.ray_cpu_s):.1%} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES)
    parser.add_argument("--engines", nargs="+", default=("torch",), choices=tuple(RECIPES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--override", action="append", default=[], help="key=value for every run")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "quickstart.md")
    parser.add_argument("--keep", type=Path, help="keep the run directories here")
    arguments = parser.parse_args()
    outcomes = []
    with tempfile.TemporaryDirectory() as temporary:
        directory = arguments.keep or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        for seed in range(arguments.seeds):
            for engine, mode in itertools.product(arguments.engines, arguments.modes):
                place = directory / f"{engine}-{mode}-{seed}"
                outcomes.append(run(engine, mode, seed, arguments.steps, arguments.override, place))
                text = report(sorted(outcomes, key=lambda o: (o.engine, MODES.index(o.mode), o.seed)))
                arguments.out.write_text(text)
                print(outcomes[-1], flush=True)
    print(text)


if __name__ == "__main__":
    main()
