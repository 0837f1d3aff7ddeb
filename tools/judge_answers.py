r"""Judges the answers of tests/data/math_answers.jsonl with reward math, with math-verify and by DAPO's rule.

python tools/judge_answers.py           writes their judgements beside the human's
python tools/judge_answers.py --check   only compares them, and exits with 1 when one is not what is written
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import sys
from itertools import accumulate
from pathlib import Path
from typing import Any

from asyncrl.config.rewards import RewardConfig
from asyncrl.data.rows import ChatMessage, PromptRow
from asyncrl.rewards import build_reward

ANSWERS = Path(__file__).parents[1] / "tests/data/math_answers.jsonl"
"""One object a line: name, response, truth, `human` (whether a careful human calls it right), the judgements of the
three, and `why` where reward math does not agree with the human."""
_DAPO_DROPS = r"""
square ways integers dollars mph inches hours km units \ldots sue points feet minutes digits cents degrees cm gm pounds
meters meals edges students childrentickets multiples \text{s} \text{.} \text{}^2 \text{}^3 \text{} \mathrm{th} ^\circ
^{\circ} \; ,\! {,} " \dots
"""  # in this order, each wherever it stands, in a word too


def asyncrl(response: str, truth: str) -> bool:
    """Reward math."""
    row = PromptRow((ChatMessage("user", "?"),), truth, "table", (), "math_answers.jsonl")
    return build_reward(RewardConfig(function="math"))(response, row).reward == 1


def math_verify(response: str, truth: str, timeout_s: int = 5) -> bool:
    """math-verify with its defaults, the truth in a box, as verl calls it."""
    import math_verify as package

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # each failure is a warning
    gold, found = (package.parse(text, parsing_timeout=timeout_s) for text in (rf"\boxed{{{truth}}}", response))
    return bool(package.verify(gold, found, timeout_seconds=timeout_s))


def dapo(response: str, truth: str) -> bool:
    """The rule of DAPO's scorer in verl 0.9.1: of the last 300 characters, the line after the last `Answer:` and the
    truth are the same characters when both are stripped of what sets them, blanks, articles and some units. Without
    such a line: the last box of the last 100 characters holds exactly the truth."""
    lines = re.findall(r"answer\s*:\s*([^\n]+)", response[-300:], re.IGNORECASE)
    if lines:
        return _dapo_form(lines[-1]) == _dapo_form(truth)
    _, box, held = response[-100:].rpartition("\\boxed{")
    depths = accumulate((c == "{") - (c == "}") for c in held)
    return bool(box) and any(depth < 0 and held[:at] == truth for at, depth in enumerate(depths))


def _dapo_form(text: str) -> str:
    text = text.rpartition("=")[2]
    for dropped in ("an ", "a ", "\\$", "\\ ", " "):
        text = text.replace(".$", "$") if dropped == "\\$" else text
        text = text.replace(dropped, "")
    text = text.replace("mbox", "text").replace(",\\text{and}", ",").replace("\\text{and}", ",")
    text = text.replace("\\text{m}", "\\text{}")
    for dropped in _DAPO_DROPS.split():
        text = text.replace(dropped, "")
    text = re.sub(r".*?\$(.*?)\$.*", r"$\1$", text)  # the first formula of each line
    for wrapper in ("text", "textbf", "overline"):
        text = re.sub(rf"\\{wrapper}{{(.*?)}}", r"\1", text)
    text = re.sub(r"\\boxed{(.*)}", r"\1", text)
    text = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", text)
    text = re.sub(r"sqrt([^{])", r"sqrt{\1}", text).replace("$", "")
    digits = text.replace(",", "")
    return digits if digits.isdigit() else text.strip()


JUDGES = {"asyncrl": asyncrl, "math_verify": math_verify, "dapo": dapo}


def read_answers() -> list[dict[str, Any]]:
    return [json.loads(line) for line in ANSWERS.read_text().splitlines()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 when a judgement has changed")
    check = parser.parse_args().check
    answers = read_answers()
    judged = [row | {name: judge(row["response"], row["truth"]) for name, judge in JUDGES.items()} for row in answers]
    changed = [row["name"] for row, before in zip(judged, answers, strict=True) if row != before]
    for name in JUDGES:
        agree = sum(row[name] == row["human"] for row in judged)
        lax = sum(row[name] and not row["human"] for row in judged)
        print(f"{name:12} as the human: {agree} of {len(judged)}; right for a wrong answer: {lax}")
    if changed:
        print("changed:", *changed, sep="\n  ")
    if not check:
        lines = (json.dumps(row, ensure_ascii=False) for row in judged)
        ANSWERS.write_text("\n".join(lines) + "\n")
    return int(check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
