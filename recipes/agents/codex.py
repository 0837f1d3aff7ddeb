"""Codex (npm install -g @openai/codex) as the agent, in an empty directory that is its home too.

Its own sandbox is off: run it where commands of the policy can do no harm. Standard library alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile

if __name__ == "__main__":
    task = json.load(sys.stdin)["messages"][-1]["content"]
    url = os.environ["OPENAI_BASE_URL"]
    endpoint = f'{{name="asyncrl", base_url="{url}", env_key="OPENAI_API_KEY", wire_api="responses"}}'
    settings = ["model=policy", "model_provider=asyncrl", f"model_providers.asyncrl={endpoint}"]
    settings += ["model_providers.asyncrl.stream_idle_timeout_ms=3600000", "sandbox_mode=danger-full-access"]
    with tempfile.TemporaryDirectory() as home:
        command = ["codex", "exec", "--skip-git-repo-check", *(word for s in settings for word in ("-c", s)), task]
        environment = os.environ | {"HOME": home}
        sys.exit(subprocess.run(command, cwd=home, env=environment, stdin=subprocess.DEVNULL).returncode)
