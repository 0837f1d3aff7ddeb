"""The ReAct agent of langgraph as the agent, with a calculator as a tool."""

from __future__ import annotations

import json
import sys

from calculator import calculated
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent


@tool
def calculator(expression: str) -> str:
    """Evaluates an arithmetic expression exactly."""
    return calculated(json.dumps({"expression": expression}))


if __name__ == "__main__":
    agent = create_react_agent(ChatOpenAI(model="policy", timeout=None), [calculator])
    print(agent.invoke({"messages": json.load(sys.stdin)["messages"]})["messages"][-1].content)
