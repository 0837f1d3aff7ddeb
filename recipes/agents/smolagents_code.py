"""CodeAgent of smolagents as the agent: the policy writes Python, which its interpreter runs."""

from __future__ import annotations

import json
import os
import sys

from smolagents import CodeAgent, LogLevel, OpenAIServerModel

if __name__ == "__main__":
    task = json.load(sys.stdin)["messages"][-1]["content"]
    endpoint = {"api_base": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
    # The run limits the time of an answer.
    model = OpenAIServerModel("policy", **endpoint, client_kwargs={"timeout": None})
    print(CodeAgent(tools=[], model=model, max_steps=8, verbosity_level=LogLevel.OFF).run(task))
