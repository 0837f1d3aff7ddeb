"""One HTML file from the data of a report: styles, scripts and data are inside."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any


def page(title: str, data: Mapping[str, Any]) -> str:
    """The whole file. It asks for nothing from a network: its policy forbids it."""
    parts = {
        "TITLE": html.escape(title),
        "STYLE": _asset("uplot.css") + _asset("page.css"),
        "LIBRARY": _asset("uplot.js"),
        "SCRIPT": _asset("page.js"),
        "DATA": _embedded(data),
    }
    text = _asset("page.html")
    for name, part in parts.items():
        text = text.replace("{{" + name + "}}", part, 1)
    return text


def _asset(name: str) -> str:
    return (files("asyncrl.report") / "page" / name).read_text(encoding="utf-8")


def _embedded(data: Mapping[str, Any]) -> str:
    """JSON that may stand in a script element, whatever texts it holds: nothing in it ends the element."""
    return json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=True).replace("<", "\\u003c")
