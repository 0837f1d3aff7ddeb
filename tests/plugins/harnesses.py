"""An agent that plays another program of recipes/agents for each group: its arguments."""

import json
import subprocess
import sys

task = sys.stdin.read()
program = f"recipes/agents/{sys.argv[1:][json.loads(task)['ordinal'] % len(sys.argv[1:])]}.py"
sys.exit(subprocess.run([sys.executable, program], input=task, text=True).returncode)
