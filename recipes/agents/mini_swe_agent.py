"""mini-swe-agent as the agent, with its own prompts: the policy works in a shell, in an empty directory."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.update(
    MSWEA_SILENT_STARTUP="1",
    MSWEA_COST_TRACKING="ignore_errors",  # the policy has no price
    LITELLM_LOCAL_MODEL_COST_MAP="True",  # else litellm asks a host for prices at each start
    MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT="2",  # at a limit it would ask ten times, for four minutes
)

import minisweagent
import yaml
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

if __name__ == "__main__":
    task = json.load(sys.stdin)["messages"][-1]["content"]
    config = yaml.safe_load((Path(minisweagent.__file__).parent / "config" / "mini.yaml").read_text())
    prompts = {name: config["agent"][name] for name in ("system_template", "instance_template")}
    model = LitellmModel(model_name="openai/policy", **config["model"])
    with tempfile.TemporaryDirectory() as directory:
        shell = LocalEnvironment(cwd=directory, **config["environment"])
        print(DefaultAgent(model, shell, **prompts, cost_limit=0).run(task)["submission"])
