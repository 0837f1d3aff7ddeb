"""openai-agents as the agent: its own loop, with a calculator as a tool."""

from __future__ import annotations

import json
import sys

from agents import Agent, Runner, function_tool, set_default_openai_client, set_tracing_disabled
from calculator import calculated
from openai import AsyncOpenAI


@function_tool
def calculator(expression: str) -> str:
    """Evaluates an arithmetic expression exactly."""
    return calculated(json.dumps({"expression": expression}))


if __name__ == "__main__":
    set_tracing_disabled(True)  # traces go to a host of OpenAI
    set_default_openai_client(AsyncOpenAI(timeout=None))  # the run limits the time of an answer
    agent = Agent(name="assistant", model="policy", tools=[calculator])
    print(Runner.run_sync(agent, json.load(sys.stdin)["messages"], max_turns=100).final_output)
