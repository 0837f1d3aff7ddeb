"""An agent as a program: it offers a calculator to the policy and answers its calls. Standard library alone, so that it
runs in any image with Python.

It reads its task from standard input, asks the endpoint of OPENAI_BASE_URL with the key of OPENAI_API_KEY, and writes
the answer to standard output. It knows nothing of training; recipes/agent_program.yaml trains the policy behind it.
"""

from __future__ import annotations

import ast
import json
import operator
import os
import sys
import urllib.request
from typing import Any

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluates an arithmetic expression exactly.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}


def main() -> int:
    messages = json.load(sys.stdin)["messages"]
    while True:
        answer = ask(messages)
        if not answer.get("tool_calls"):
            print(answer["content"] or "")
            return 0
        messages.append({name: value for name, value in answer.items() if value is not None})
        for call in answer["tool_calls"]:
            result = calculated(call["function"]["arguments"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})


def ask(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The message of the policy. Raises HTTPError: a limit of the trajectory is reached; the program ends then."""
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "policy", "messages": messages, "tools": [TOOL]}).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:  # the run ends the program, should an answer take too long
        return json.load(response)["choices"][0]["message"]


def calculated(arguments: str) -> str:
    try:
        return str(value(ast.parse(json.loads(arguments)["expression"], mode="eval").body))
    except (KeyError, TypeError, ValueError, SyntaxError) as error:
        return f"Error: {error}"


def value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](value(node.left), value(node.right))
    raise ValueError("only integers, + - * and parentheses are known")


if __name__ == "__main__":
    sys.exit(main())
