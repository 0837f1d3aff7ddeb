"""How long an agent waits for a turn beyond the generation itself.

    python benchmarks/agent_latency.py [--turns 40] [--rounds 5] [--write]

One process with the real endpoint, generation client and replica. The engine writes 16 tokens in 16 ms by the clock, so
that a turn has a known length. An agent holds a conversation of 4 turns; its turns go in alternation

- straight to the generation client, with collections 50 ms apart and 5 ms apart (`rollout.poll_interval_s`; the second
  is the default of environments with several turns);
- through the agent endpoint, over HTTP by httpx and by the openai client, with collections 5 ms apart.

A figure is what a turn takes more than the engine alone does for the same request, median and 90th percentile; for one
agent and for 16 at once. What Ray adds to a call (1 to 2 ms) is not in it. Writes benchmarks/results/agent_latency.md.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works from a checkout that is not installed

import httpx
import numpy as np
import openai

from asyncrl.checkpoint.run_directory import git_commit, package_versions
from asyncrl.config.load import load_recipe
from asyncrl.config.model import ModelConfig
from asyncrl.data.chat import Chat
from asyncrl.data.rows import PromptRow
from asyncrl.data.tokenizer import load_tokenizer
from asyncrl.environments.agent import AgentEndpoint
from asyncrl.environments.agent_session import TurnLimit
from asyncrl.inference.replica import Replica
from asyncrl.rewards import RewardResult
from asyncrl.rollout.generation import GenerationClient
from asyncrl.rollout.sessions import RolloutSession, SessionTools
from asyncrl.types import GenerationRequest, SamplingParams
from asyncrl_testing.fake_engine import FakeEngine, FakeScript
from asyncrl_testing.local import LocalReplicaChannel, Rows

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "agent_latency.md"
TOKENS, TICK_S, AGENTS, CONVERSATION = 16, 0.001, 16, 4
SLOW_S, FAST_S = 0.05, 0.005
SAMPLING = SamplingParams(max_tokens=TOKENS)

Ask = Callable[[list[dict[str, str]]], Awaitable[str]]


async def no_reward(response: str, row: PromptRow) -> RewardResult:
    return RewardResult(0.0)


class Bench:
    """One replica, and what reaches it in each of the ways."""

    def __init__(self, chat: Chat) -> None:
        self.chat = chat
        self.engine = FakeEngine(FakeScript(start_version=0, num_slots=64, max_model_len=1 << 16, tick_s=TICK_S))
        self.replica = Replica(0, lambda: self.engine, gate_timeout_s=30, serves_at_once=True)
        self._clients: dict[float, GenerationClient] = {}

    async def start(self, stack: AsyncExitStack) -> None:
        await self.replica.start()
        stack.push_async_callback(self.replica.stop)
        for every_s in (SLOW_S, FAST_S):
            name = f"every-{every_s:g}"
            table = Rows({0: LocalReplicaChannel(self.replica, name)}).table
            client = GenerationClient(name, table, request_timeout_s=60, poll_interval_s=every_s)
            self._clients[every_s] = client
            stack.push_async_callback(client.close)

    def session(self, every_s: float) -> RolloutSession:
        return RolloutSession(SessionTools(self._clients[every_s], self.chat, no_reward), SAMPLING, "", 0)

    async def alone_s(self) -> float:
        """Of the engine for one turn, asked in its own loop."""
        request = GenerationRequest(f"alone-{time.monotonic_ns()}", np.array([7, 8, 9], np.int32), SAMPLING)
        started = time.perf_counter()
        async for _ in self.engine.generate(request):
            pass
        return time.perf_counter() - started


async def converse(ask: Ask, turns: int) -> list[float]:
    """Seconds of each turn, in conversations of a few turns."""
    took: list[float] = []
    while len(took) < turns:
        messages = [{"role": "user", "content": "12+7="}]
        for _ in range(CONVERSATION):
            started = time.perf_counter()
            said = await ask(messages)
            took.append(time.perf_counter() - started)
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "and then?"}]
    return took


async def straight(bench: Bench, every_s: float, turns: int) -> list[float]:
    session = bench.session(every_s)

    async def ask(messages: list[dict[str, str]]) -> str:
        made = await session.generate(bench.chat.prompt(messages))
        return bench.chat.decode(made.token_ids)

    return await converse(ask, turns)


async def over_http(bench: Bench, endpoint: AgentEndpoint, turns: int, kind: str) -> list[float]:
    async def agent(url: str, key: str) -> list[float]:
        if kind == "openai":
            async with openai.AsyncOpenAI(base_url=url, api_key=key) as client:

                async def by_openai(messages: list[dict[str, str]]) -> str:
                    answer = await client.chat.completions.create(model="policy", messages=messages)  # type: ignore[arg-type]
                    return answer.choices[0].message.content or ""

                return await converse(by_openai, turns)
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {key}"}) as client:

            async def by_httpx(messages: list[dict[str, str]]) -> str:
                answer = await client.post(f"{url}/chat/completions", json={"model": "policy", "messages": messages})
                return answer.raise_for_status().json()["choices"][0]["message"]["content"] or ""

            return await converse(by_httpx, turns)

    _, took = await endpoint.run("bench", bench.session(FAST_S), agent)
    assert took is not None
    return took


async def measure(turns: int, rounds: int) -> dict[str, list[float]]:
    """Seconds beyond the engine's own, by row of the table."""
    overrides = ["rollout.environment=agent", "rollout.agent.function=recipes.agents.openai_client:agent"]
    overrides += ["rollout.torch.max_model_len=60000", "rollout.sampling.max_response_tokens=50000"]
    overrides += ["trainer.max_tokens_per_microbatch=60000"]
    recipe = load_recipe(ROOT / "recipes" / "quickstart.yaml", overrides)
    model = ModelConfig(path=str(ROOT / "runs" / "tiny-qwen3"))
    found: dict[str, list[float]] = {}
    async with AsyncExitStack() as stack:
        bench = Bench(Chat(load_tokenizer(model), model))
        await bench.start(stack)
        endpoint = AgentEndpoint(recipe, bench.chat, TurnLimit(10**6, "turns"))
        await endpoint.start()
        stack.push_async_callback(endpoint.close)
        ways: dict[str, Callable[[], Awaitable[list[float]]]] = {
            "generation client, collections 50 ms apart": lambda: straight(bench, SLOW_S, turns),
            "generation client, collections 5 ms apart": lambda: straight(bench, FAST_S, turns),
            "endpoint, httpx": lambda: over_http(bench, endpoint, turns, "httpx"),
            "endpoint, openai client": lambda: over_http(bench, endpoint, turns, "openai"),
        }
        for _ in range(rounds + 1):  # the first round warms up
            alone_s = statistics.median([await bench.alone_s() for _ in range(10)])
            for agents in (1, AGENTS):
                for name, way in ways.items():
                    took = await asyncio.gather(*(way() for _ in range(agents)))
                    found.setdefault(f"{name} | {agents}", []).append(-1.0)  # begins a round
                    found[f"{name} | {agents}"] += [seconds - alone_s for one in took for seconds in one]
    return {name: _without_first_round(samples) for name, samples in found.items()}


def _without_first_round(samples: list[float]) -> list[float]:
    second = samples.index(-1.0, 1)
    return [sample for sample in samples[second:] if sample != -1.0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="write the results too")
    options = parser.parse_args()
    rows = []
    for name, samples in asyncio.run(measure(options.turns, options.rounds)).items():
        p50, p90 = (float(np.percentile(samples, q)) * 1e3 for q in (50, 90))
        rows.append(f"| {name} | {p50:.1f} | {p90:.1f} |")
    versions = ", ".join(f"{name} {version}" for name, version in package_versions().items())
    text = "\n".join(
        [
            "# What an agent's turn takes beyond generation",
            "",
            f"`python benchmarks/agent_latency.py --turns {options.turns} --rounds {options.rounds}`",
            "",
            f"{os.cpu_count()} cores, commit {git_commit()}; {versions}. Turns of {TOKENS} tokens; "
            "agents, endpoint, client and replica share one process.",
            "",
            "| way | agents at once | ms beyond the engine, median | 90th percentile |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )
    if options.write:
        RESULT.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
