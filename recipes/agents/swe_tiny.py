"""mini-swe-agent as the agent of recipes/swe_tiny.yaml: it works in the sandbox's working directory, a repository.

It reads the issue from standard input and asks the endpoint of OPENAI_BASE_URL with mini-swe-agent's own loop and
shell. The client is the lightest of mini-swe-agent's, which starts in a tenth of the time of litellm's. The prompts are
short, for a tiny model; those for a real one are in mini-swe-agent's mini.yaml.
"""

from __future__ import annotations

import json
import os
import sys

os.environ["MSWEA_SILENT_STARTUP"] = "1"
os.environ["MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT"] = "1"  # at a limit it would ask ten times, for four minutes

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.openrouter_model import OpenRouterModel


def main() -> None:
    issue = json.load(sys.stdin)["messages"][-1]["content"]
    model = OpenRouterModel(
        model_name="policy", cost_tracking="ignore_errors", observation_template="{{ output.output }}"
    )
    model._api_url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    model._api_key = os.environ["OPENAI_API_KEY"]
    prompts = {"system_template": "Repair", "instance_template": "{{ task }}"}
    print(DefaultAgent(model, LocalEnvironment(), **prompts).run(issue)["exit_status"])


if __name__ == "__main__":
    main()
