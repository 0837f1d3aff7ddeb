"""A taskset of verifiers for tests, with a harness that runs in the process: `{taskset: {id: doubling-taskset}}`.

A top-level module, as installed tasksets are: its folder must be on PYTHONPATH.
"""

import openai
import verifiers.v1 as vf

__all__ = ["Doubling", "DoublingHarness"]


class DoublingData(vf.TaskData):
    number: int = 0


class DoublingTask(vf.Task[DoublingData]):
    @vf.reward
    async def is_double(self, trace) -> float:
        return float(trace.last_reply.strip() == str(2 * self.data.number))

    @vf.reward(weight=0.1)
    async def is_short(self, trace) -> float:
        return 1 / (1 + len(trace.last_reply))

    @vf.metric
    async def turns(self, trace) -> float:
        return float(trace.num_turns)


class Doubling(vf.Taskset[DoublingTask]):
    def load(self):
        for number in range(1, 9):
            yield DoublingTask(DoublingData(prompt=f"{number} + {number} = ?", number=number), self.config.task)


class DoublingHarness(vf.Harness):
    """Asks, and asks again."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            messages = [{"role": "user", "content": data.prompt}]
            if data.number == 8:
                raise LookupError("nobody doubles eight")
            for question in ("Are you sure?", None):
                answer = await client.chat.completions.create(model=ctx.model, messages=messages)
                messages.append({"role": "assistant", "content": answer.choices[0].message.content})
                messages += [{"role": "user", "content": question}] if question else []
        return vf.ProgramResult(0, "", "")
