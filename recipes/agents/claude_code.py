"""Claude Code (npm install -g @anthropic-ai/claude-code) as the agent, in an empty directory that is its home too.

It reads ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY. Its first prompt has some 75,000 characters. Standard library alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile

SETTINGS = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",  # updates, telemetry, reports
    "DISABLE_AUTOUPDATER": "1",
    "API_TIMEOUT_MS": "3600000",  # the run ends the program, should an answer take too long
}

if __name__ == "__main__":
    task = json.load(sys.stdin)["messages"][-1]["content"]
    with tempfile.TemporaryDirectory() as home:
        command = ["claude", "-p", task, "--model", "policy", "--allowedTools", "Bash,Read,Edit,Write"]
        environment = os.environ | SETTINGS | {"HOME": home}
        sys.exit(subprocess.run(command, cwd=home, env=environment, stdin=subprocess.DEVNULL).returncode)
