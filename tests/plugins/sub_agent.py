"""An agent that asks a sub-agent, a conversation of its own, between the two requests of its main conversation."""

import openai


async def agent(base_url, api_key, task):
    question = task.row.messages[-1].content
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=None) as client:

        async def ask(messages, text):
            messages.append({"role": "user", "content": text})
            answer = await client.chat.completions.create(model="policy", messages=messages)
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
            return messages[-1]["content"]

        main, sub = [], []
        await ask(main, question)
        await ask(sub, f"For another one: {question}")
        await ask(sub, "Again.")
        return await ask(main, "Once more.")
