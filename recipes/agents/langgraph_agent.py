"""A graph of langgraph as the agent, with a calculator as a tool."""

from __future__ import annotations

import json
import sys

from calculator import calculated
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


@tool
def calculator(expression: str) -> str:
    """Evaluates an arithmetic expression exactly."""
    return calculated(json.dumps({"expression": expression}))


def policy(state: MessagesState) -> MessagesState:
    return {"messages": [model.invoke(state["messages"])]}


if __name__ == "__main__":
    model = ChatOpenAI(model="policy", timeout=None).bind_tools([calculator])  # the run limits the time of an answer
    graph = StateGraph(MessagesState).add_node(policy).add_node("tools", ToolNode([calculator]))
    graph.add_edge(START, "policy").add_conditional_edges("policy", tools_condition).add_edge("tools", "policy")
    print(graph.compile().invoke({"messages": json.load(sys.stdin)["messages"]})["messages"][-1].content)
