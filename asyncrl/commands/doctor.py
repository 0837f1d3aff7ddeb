"""`asyncrl-doctor RECIPE.yaml [key=value ...]`: examines this machine and the recipe before a run.

Exit codes: 0 nothing is bad; 2 something is bad: the run would not start, or would fail.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.text import Text

from asyncrl.config.load import environment_defaults
from asyncrl.driver.doctor.examination import Observation, examine
from asyncrl.registry import make_importable

MARKS = {"ok": ("ok", "green"), "warning": ("warning", "yellow"), "bad": ("BAD", "bold red")}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="asyncrl-doctor", description=str(__doc__).split("\n")[0])
    parser.add_argument("recipe", type=Path, help="recipe in YAML, for example recipes/quickstart.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override a key, for example run.max_steps=5")
    parser.add_argument("--json", action="store_true", help="print the findings as a JSON list, and nothing else")
    parser.add_argument("--offline", action="store_true", help="look nothing up on the hub")
    parser.add_argument("--no-ray", action="store_true", help="do not start or join Ray")
    options = parser.parse_intermixed_args(argv)
    for name, value in environment_defaults().items():
        os.environ.setdefault(name, value)
    make_importable()
    console, found = Console(), list[Observation]()
    for finding in examine(options.recipe, options.overrides, use_hub=not options.offline, use_ray=not options.no_ray):
        found.append(finding)
        if not options.json:
            _show(console, finding)
    bad, warnings = (sum(f.status == status for f in found) for status in ("bad", "warning"))
    if options.json:
        sys.stdout.write(json.dumps([asdict(finding) for finding in found], indent=2) + "\n")
    else:
        said = "the run would fail" if bad else "the run can start"
        console.print(f"{said}: {bad} bad, {warnings} warnings", style="bold", highlight=False)
    return 2 if bad else 0


def _show(console: Console, finding: Observation) -> None:
    mark, style = MARKS[finding.status]
    line = Text(f"{mark:8}", style) + Text(f"{finding.area:15}", "bold") + Text(finding.text)
    console.print(line, soft_wrap=True)
    if finding.remedy:
        console.print(Text(" " * 23 + f"do: {finding.remedy}"), soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
