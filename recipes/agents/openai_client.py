"""An example agent for the OpenAI client: it offers a calculator and answers its calls.

It does not know about training. recipes/agent.yaml trains the policy behind it.
"""

from __future__ import annotations

import json
from typing import Any

from asyncrl.environments.environment import Task
from asyncrl.environments.tools.calculator import Calculator
from asyncrl.environments.tools.tool import schema_of


async def agent(base_url: str, api_key: str, task: Task) -> str | None:
    """Returns the text of the first reply without calls. Needs the package openai."""
    import openai

    calculator = Calculator()
    messages: list[Any] = task.row.conversation()
    tools: list[Any] = [schema_of(calculator)]
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=None) as client:
        while True:
            answer = await client.chat.completions.create(model="policy", messages=messages, tools=tools)
            message = answer.choices[0].message
            if not message.tool_calls:
                return message.content
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls:
                result = _called(calculator, call)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def _called(calculator: Calculator, call: Any) -> str:
    try:
        return calculator.call(**json.loads(call.function.arguments))
    except (TypeError, ValueError, ArithmeticError) as error:
        return f"Error: {error}"
