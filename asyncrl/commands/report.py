"""`asyncrl-report RUN_DIR [RUN_DIR ...]`: one HTML file about a run, finished or not, or about several side by side.

The file needs no network and no server. Exit codes: 2 bad input, 8 the file cannot be written.
"""

from __future__ import annotations

import argparse
import gzip
import html
import json
import re
import sys
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from asyncrl.commands import plain_console, refuse
from asyncrl.errors import AsyncRLError
from asyncrl.json_records import replace_file
from asyncrl.report.page_data import page_data
from asyncrl.report.run_files import read_run, read_spans
from asyncrl.report.trace import chrome_trace


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="asyncrl-report", description=str(__doc__).split("\n")[0])
    add = parser.add_argument
    add("runs", metavar="RUN_DIR", nargs="+", type=Path, help="run directories; the first is shown in full")
    add("--out", type=Path, help="the file to write; RUN_DIR/report.html of the first run when left out")
    timeline = "also write the timeline of the first run for https://ui.perfetto.dev (.json, or .json.gz)"
    add("--trace", metavar="FILE", type=Path, help=timeline)
    options = parser.parse_args(argv)
    try:
        runs = [read_run(path) for path in options.runs]
        out = options.out or runs[0].directory / "report.html"
        data = page_data(runs)
        replace_file(out, page(" and ".join(run.name for run in runs), data).encode())
        if options.trace is not None:
            trace = json.dumps(chrome_trace(runs[0], read_spans(runs[0]))).encode()
            replace_file(options.trace, gzip.compress(trace) if options.trace.suffix == ".gz" else trace)
    except AsyncRLError as error:
        return refuse(f"asyncrl-report: {error}", error)
    say = plain_console().print
    for finding in data["runs"][0]["findings"]:
        say(f"{finding['severity']:8} {finding['title']}: {finding['evidence']}")
    say(data["runs"][0]["helps_most"])
    for path in (out, options.trace) if options.trace else (out,):
        say(f"wrote {path}")
    return 0


# One HTML file with styles, scripts and data inside.


def page(title: str, data: Mapping[str, Any]) -> str:
    """The whole file. Its content security policy forbids network access."""
    parts = {
        "TITLE": html.escape(title),
        "STYLE": _asset("uplot.css") + _asset("page.css"),
        "LIBRARY": _asset("uplot.js"),
        "SCRIPT": _asset("page.js"),
        "DATA": _embedded(data),
    }
    # In one pass: a part may hold the name of another.
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], _asset("page.html"))


def _asset(name: str) -> str:
    return (files("asyncrl.report") / "page" / name).read_text(encoding="utf-8")


def _embedded(data: Mapping[str, Any]) -> str:
    """JSON for a script element; no text inside can end the element."""
    return json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=True).replace("<", "\\u003c")


if __name__ == "__main__":
    sys.exit(main())
