"""What clients of `rollout.serve` cost a run, and what `x-request-id` saves.

    python benchmarks/serving_while_training.py                                 # both parts
    python benchmarks/serving_while_training.py --parts throughput --rounds 1 --steps 12 --warm-up 4
    python benchmarks/serving_while_training.py --parts turns --engine vllm --users 8 --turns 4
    ... --write                                                                 # keeps the tables

`throughput`: `asyncrl-train recipes/quickstart.yaml rollout.serve.enabled=true`, in turn without a client and with
clients that are to get `--foreign` of the sampled tokens. They stream answers one after the other, and pause so that
their tokens keep to that share of what a run without clients has sampled. What is compared are the run's own tokens per
second, time per step and publishes, on the lines of metrics.jsonl after the warm-up and the start of the server; ratios
are within a round. The embedded engine of the quickstart has 128 places a replica, of which clients may have 12.

`turns`: `asyncrl-serve` with two replicas, and users who hold conversations at the same time, each turn with the whole
conversation so far. The replica of a turn is chosen at random (by the addresses of the replicas), by the prefix of the
prompt, or by `x-request-id` of the turn before; the share of prompt tokens found in the prefix cache is compared. It
needs an engine with a prefix cache: the embedded one has none.

`--write` keeps what was measured in benchmarks/results/serving_while_training.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from asyncrl.checkpoint.run_directory import git_commit, package_versions

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "serving_while_training.md"
MODEL = "runs/tiny-qwen3"
START_S, RUN_S, ASK_S = 400.0, 3600.0, 120.0
ANSWER_TOKENS = 64
CONTEXT_TOKENS = 1024
"""Of the quickstart's model."""
ROUTES = ("at random", "by prefix", "by x-request-id")


@dataclass(frozen=True)
class RunFigures:
    """Of one run after its warm-up. `own_tokens_per_s`: without those of clients; `share`: theirs of all tokens."""

    own_tokens_per_s: float
    all_tokens_per_s: float
    step_s: float
    share: float
    publish_max_s: float
    answers: int
    refused: float


@dataclass(frozen=True)
class TurnFigures:
    route: str
    hit_rate: float
    first_token_ms: float
    requests: int


# -- throughput --------------------------------------------------------------------------------------------------------


class Clients:
    """Threads that stream one answer after the other, at `tokens_per_s` in all."""

    def __init__(self, address: str, count: int, tokens_per_s: float) -> None:
        self.answers = 0
        self._address, self._interval_s = address, count * ANSWER_TOKENS / tokens_per_s
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(i,), daemon=True) for i in range(count)]
        for thread in self._threads:
            thread.start()

    def _ask(self, seed: int) -> None:
        body = {"prompt": "12+7=", "max_tokens": ANSWER_TOKENS, "ignore_eos": True, "stream": True, "seed": seed}
        with httpx.Client(base_url=self._address, timeout=ASK_S) as http:
            due = time.monotonic() + random.Random(seed).random() * self._interval_s
            while not self._stop.wait(max(0.0, due - time.monotonic())):
                due = max(due + self._interval_s, time.monotonic() - self._interval_s)
                try:
                    with http.stream("POST", "/v1/completions", json=body) as response:
                        for _ in response.iter_bytes():
                            pass
                        self.answers += response.status_code == 200
                except httpx.HTTPError:
                    continue  # the run has ended, or replaces its server

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(ASK_S)


def one_run(steps: int, warm_up: int, clients: Callable[[str], Clients] | None, overrides: list[str]) -> RunFigures:
    """A run that is measured over `steps` steps, once it has done `warm_up` and its server is up, and is then ended.
    Raises SystemExit with its output when it fails."""
    with tempfile.TemporaryDirectory() as scratch:
        directory, output = Path(scratch) / "run", Path(scratch) / "out.txt"
        words = [f"run.dir={directory}", "run.max_steps=100000", "eval.every_steps=0", "rollout.serve.enabled=true"]
        command = [sys.executable, "-m", "asyncrl.commands.train", "recipes/quickstart.yaml", *words, *overrides]
        with output.open("w") as file:
            process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
        asking: Clients | None = None
        begun: int | None = None
        try:
            deadline = time.monotonic() + RUN_S
            while begun is None or len(lines_of(directory)) <= begun + steps:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"the run has ended, or takes over {RUN_S:g} s: {output.read_text()[-2000:]}")
                done, place = len(lines_of(directory)), directory / "serving.json"
                if begun is None and done >= warm_up and place.exists():
                    asking = None if clients is None else clients(json.loads(place.read_text())["address"])
                    begun = done + 1  # the step in which clients begin does not count
                time.sleep(0.2)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.wait(120)
            if asking is not None:
                asking.stop()
        return figures(lines_of(directory)[: begun + steps], begun, 0 if asking is None else asking.answers)


def lines_of(directory: Path) -> list[dict[str, Any]]:
    path = directory / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().rpartition("\n")[0].splitlines()] if path.exists() else []


def figures(lines: list[dict[str, Any]], begun: int, answers: int) -> RunFigures:
    """Of the lines after the first `begun`."""
    before, counted = lines[begun - 1], lines[begun:]
    spent_s = counted[-1]["time_s"] - before["time_s"]
    begins = [before, *counted[:-1]]
    tokens = [
        line["rollout/tokens_per_s"] * (line["time_s"] - begin["time_s"])
        for begin, line in zip(begins, counted, strict=True)
    ]
    theirs = sum(line["serve/tokens"] for line in counted)
    return RunFigures(
        own_tokens_per_s=(sum(tokens) - theirs) / spent_s,
        all_tokens_per_s=sum(tokens) / spent_s,
        step_s=spent_s / len(counted),
        share=theirs / sum(tokens),
        publish_max_s=max(line["weights/publish_s"] for line in counted),
        answers=answers,
        refused=counted[-1]["serve/refused"],
    )


def throughput(arguments: argparse.Namespace) -> list[str]:
    """The table of runs with and without clients."""
    rounds: list[tuple[RunFigures, RunFigures]] = []
    for number in range(arguments.rounds):
        words = [f"run.seed={number}", *arguments.overrides]
        alone = one_run(arguments.steps, arguments.warm_up, None, words)
        print(f"round {number + 1} alone: {alone}", flush=True)
        wanted = alone.all_tokens_per_s * arguments.foreign

        def clients(address: str, wanted: float = wanted) -> Clients:
            return Clients(address, arguments.clients, wanted)

        shared = one_run(arguments.steps, arguments.warm_up, clients, words)
        print(f"round {number + 1} with clients: {shared}", flush=True)
        rounds.append((alone, shared))
    table = [
        f"## What clients cost a run: {arguments.clients} clients that want {arguments.foreign:.0%} of the tokens",
        "",
        "| round | own tokens/s alone | with clients | ratio | s a step alone | with clients | clients' share of the "
        "tokens | longest publish, s: alone | with clients | answers | refused |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for number, (alone, shared) in enumerate(rounds, 1):
        ratio = shared.own_tokens_per_s / alone.own_tokens_per_s
        table.append(
            f"| {number} | {alone.own_tokens_per_s:.0f} | {shared.own_tokens_per_s:.0f} | {ratio:.3f} | "
            f"{alone.step_s:.2f} | {shared.step_s:.2f} | {shared.share:.1%} | {alone.publish_max_s:.2f} | "
            f"{shared.publish_max_s:.2f} | {shared.answers} | {shared.refused:.0f} |"
        )
    lost = [1 - shared.own_tokens_per_s / alone.own_tokens_per_s for alone, shared in rounds]
    return [*table, "", f"Throughput lost: median {statistics.median(lost):.1%} of {len(lost)} round(s)."]


# -- turns -------------------------------------------------------------------------------------------------------------


@contextmanager
def served(engine: str, overrides: list[str]) -> Iterator[dict[str, Any]]:
    """What the discovery file of a fleet of two replicas says. It is new: its caches are empty."""
    with tempfile.TemporaryDirectory() as scratch:
        file, output = Path(scratch) / "fleet.json", Path(scratch) / "out.txt"
        overrides = [f"{engine}.max_model_len={CONTEXT_TOKENS}", *overrides]
        options = ["--engine", engine, "--replicas", "2", "--port", "0", "--discovery-file", str(file)]
        command = [sys.executable, "-m", "asyncrl.commands.serve", MODEL, *options, *overrides]
        with output.open("w") as out:
            process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + START_S
            while not file.exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"no fleet: {output.read_text()[-2000:]}")
                time.sleep(0.2)
            yield json.loads(file.read_text())
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def converse(fleet: dict[str, Any], route: str, user: int, turns: int, found: list[tuple[int, int, float]]) -> None:
    """One conversation; adds (prompt tokens, cached ones, seconds to the answer's head) of each turn but the first."""
    chance = random.Random(user)
    # Users differ from the first words on: only a conversation itself is worth a cache.
    messages = [{"role": "user", "content": f"{user}: " + " ".join(f"{chance.randrange(100)}+1=" for _ in range(10))}]
    headers: dict[str, str] = {}
    with httpx.Client(timeout=ASK_S) as http:
        for turn in range(turns):
            base = chance.choice(fleet["replicas"])["address"] if route == ROUTES[0] else fleet["address"]
            began = time.monotonic()
            body = {"messages": messages, "max_tokens": 16}
            response = http.post(f"{base}/v1/chat/completions", json=body, headers=headers).raise_for_status()
            answer, usage = response.json()["choices"][0]["message"]["content"], response.json()["usage"]
            if turn:
                cached = usage["prompt_tokens_details"]["cached_tokens"]
                found.append((usage["prompt_tokens"], cached, time.monotonic() - began))
            if route == ROUTES[2]:
                headers = {"x-request-id": response.headers["x-request-id"]}
            messages += [
                {"role": "assistant", "content": answer or "-"},
                {"role": "user", "content": " ".join(f"{chance.randrange(100)}+2=" for _ in range(6))},
            ]


def turns(arguments: argparse.Namespace) -> list[str]:
    """The table of hit rates."""
    if arguments.engine == "torch":
        return ["## What `x-request-id` saves", "", "Not measured: the embedded engine has no prefix cache."]
    rows: list[TurnFigures] = []
    for route in ROUTES:
        found: list[tuple[int, int, float]] = []
        with served(arguments.engine, arguments.overrides) as fleet:
            threads = [
                threading.Thread(target=converse, args=(fleet, route, user, arguments.turns, found), daemon=True)
                for user in range(arguments.users)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(ASK_S * arguments.turns)
        if len(found) != arguments.users * (arguments.turns - 1):
            raise SystemExit(f"{route}: {len(found)} turns were answered; see the output above")
        prompt, cached = sum(f[0] for f in found), sum(f[1] for f in found)
        rows.append(TurnFigures(route, cached / prompt, 1000 * statistics.median(f[2] for f in found), len(found)))
        print(rows[-1], flush=True)
    return [
        f"## What `x-request-id` saves: {arguments.users} conversations of {arguments.turns} turns on two replicas of "
        f"{arguments.engine}",
        "",
        "| replica of a turn | prompt tokens in the cache, from the second turn on | median ms an answer | turns |",
        "|---|---|---|---|",
        *(f"| {r.route} | {r.hit_rate:.1%} | {r.first_token_ms:.0f} | {r.requests} |" for r in rows),
    ]


def hardware() -> str:
    versions = ", ".join(f"{name} {version}" for name, version in package_versions().items())
    return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores; {versions}; commit {git_commit()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=["throughput", "turns"], default=["throughput", "turns"])
    parser.add_argument("--rounds", type=int, default=3, help="of throughput (default %(default)s)")
    parser.add_argument("--steps", type=int, default=40, help="that count of each run (%(default)s)")
    parser.add_argument("--warm-up", type=int, default=10, help="steps before them, at least (default %(default)s)")
    parser.add_argument("--clients", type=int, default=8, help="of throughput (default %(default)s)")
    parser.add_argument("--foreign", type=float, default=0.1, help="share of tokens they want (default %(default)s)")
    parser.add_argument("--engine", choices=["torch", "vllm", "sglang"], default="vllm", help="of turns (%(default)s)")
    parser.add_argument("--users", type=int, default=16, help="of turns (default %(default)s)")
    parser.add_argument("--turns", type=int, default=6, help="of each user (default %(default)s)")
    parser.add_argument("--write", action="store_true", help=f"keep the tables in {RESULTS.relative_to(ROOT)}")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the run, or of asyncrl-serve")
    arguments = parser.parse_args()
    if min(arguments.warm_up, arguments.steps) < 1:
        parser.error("--warm-up and --steps must be at least 1")
    if arguments.overrides and len(arguments.parts) > 1:
        parser.error("key=value means other keys in each part: choose one with --parts")
    parts = {"throughput": throughput, "turns": turns}
    tables = [line for part in arguments.parts for line in (*parts[part](arguments), "")]
    text = "\n".join(["# Serving while training", "", *tables, hardware(), ""])
    print(text)
    if arguments.write:
        RESULTS.write_text(text)


if __name__ == "__main__":
    main()
