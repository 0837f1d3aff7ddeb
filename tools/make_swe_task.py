"""Makes the task of recipes/swe_tiny.yaml: repositories of three modules, of which one computes with the wrong
operator, and a tiny Qwen3 that can repair them in a shell but rather submits at once.

No network, half a minute on two cores; a second call returns at once.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from asyncrl.data.rows import ChatMessage, PromptRow, to_record
from tools import make_tiny_model, make_tool_task
from tools.make_tiny_model import END, Example

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

DATA_SOURCE = "asyncrl_swe_tiny"
TOKENS = ("<bash>", "</bash>", "sed -i s/", "sh submit", "Repair", "command", "tool", ".py")
"""Eight, so that the vocabulary stays a multiple of eight."""
TOOLS = [{"function": {"name": "bash", "parameters": {"properties": {"command": {}}}}}]
OPERATORS = {"+": 10, "-": 4, "*": 21, "%": 1}
"""Operator -> its result for 7 and 3."""
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n"
TESTS = '''"""The modules are run in a process of their own, so that no module decides how the tests end."""

import subprocess
import sys
import unittest

CODE = "from f import f; from g import g; from h import h; print(f(7, 3), g(7, 3), h(7, 3))"


class TestModules(unittest.TestCase):
    def test_they_compute_what_they_should(self):
        ended = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=20)
        self.assertEqual(ended.stdout, "WANTED\\n", ended.stderr)
'''


@dataclass(frozen=True, slots=True)
class Fault:
    """`module` computes with the `wrong` operator; `others`: those of the other modules."""

    module: str
    wrong: str
    right: str
    others: tuple[str, str]

    @property
    def name(self) -> str:
        return "_".join([self.module, *(str(ord(o)) for o in (self.wrong, self.right, *self.others))])

    @property
    def issue(self) -> str:
        return f"Repair {self.module}.py: {self.wrong} must be {self.right}"

    @property
    def repair(self) -> str:
        return f"sed -i s/{self.wrong}/{self.right}/ {self.module}.py"

    def files(self) -> dict[str, str]:
        others = iter(self.others)
        right = {m: self.right if m == self.module else next(others) for m in "fgh"}
        now = right | {self.module: self.wrong}
        files = {f"{m}.py": f"def {m}(a, b):\n    return a {operator} b\n" for m, operator in now.items()}
        wanted = {m: OPERATORS[operator] for m, operator in right.items()}
        tests = TESTS.replace("WANTED", " ".join(str(wanted[module]) for module in "fgh"))
        return files | {"submit": SUBMIT, "tests/test_modules.py": tests}


def faults(seed: int) -> list[Fault]:
    rng = random.Random(seed)
    pairs = itertools.permutations(OPERATORS, 2)
    found = [
        Fault(module, wrong, right, (rng.choice([*OPERATORS]), rng.choice([*OPERATORS])))
        for (wrong, right), module in itertools.product(pairs, "fgh")
    ]
    rng.shuffle(found)
    return found


def build_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = make_tiny_model.build_tokenizer()
    tokenizer.add_tokens(list(TOKENS))
    tokenizer.chat_template = make_tool_task.CHAT_TEMPLATE
    return tokenizer


def corpus(tokenizer: PreTrainedTokenizerFast, settings: make_tool_task.ToolSettings) -> list[Example]:
    rng = random.Random(settings.seed)
    known, examples = faults(settings.seed), []
    for number in range(settings.num_study + settings.num_messy):
        share = settings.study_share if number < settings.num_study else settings.messy_share
        examples.append(conversation(tokenizer, rng.choice(known), repairs=rng.random() < share))
    return examples


def conversation(tokenizer: PreTrainedTokenizerFast, fault: Fault, *, repairs: bool) -> Example:
    """What mini-swe-agent and the policy say, trained on the policy's part."""
    messages: list[Any] = [{"role": "system", "content": "Repair"}, {"role": "user", "content": fault.issue}]
    prompt = tokenizer.apply_chat_template(messages, tools=TOOLS, add_generation_prompt=True, tokenize=False)
    parts = [(str(prompt), False)]
    if repairs:
        parts += [(f"<bash>{fault.repair}</bash>{END}", True)]
        parts += [("\n<|im_start|>tool\n<|im_end|>\n<|im_start|>assistant\n", False)]
    return make_tool_task.joined(tokenizer, [*parts, (f"<bash>sh submit</bash>{END}", True)])


def write_data(directory: Path, seed: int) -> None:
    """The rows, and the repositories that they name. An eighth of the faults is held out."""
    known = faults(seed)
    cut = len(known) // 8
    for split, some in (("train", known[cut:]), ("test", known[:cut])):
        for fault in some:
            for name, text in fault.files().items():
                path = directory / "swe_repositories" / fault.name / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
        rows = [
            PromptRow((ChatMessage("user", f.issue),), "", DATA_SOURCE, (("files", f.name),), f"{split}:{i}")
            for i, f in enumerate(some)
        ]
        path = directory / f"swe_{split}.jsonl"
        path.write_text("".join(json.dumps(to_record(row)) + "\n" for row in rows), encoding="utf-8")
        print(f"wrote {path}: {len(rows)} issues")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 2 when `--out` holds something else."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/tiny-swe-qwen3"), help="directory of the model")
    parser.add_argument("--data", type=Path, default=Path("data"), help="directory of rows and repositories")
    parser.add_argument("--share", type=float, default=1.0, help="of the warm-up to run; less makes a worse model")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    write_data(options.data, options.seed)
    counts = {"num_study": round(4096 * options.share), "num_messy": round(768 * options.share)}
    settings = make_tool_task.ToolSettings(task="swe", seed=options.seed, study_share=0.7, messy_share=0.12, **counts)
    return make_tool_task.made(options.out, settings, make_tool_task.Making(build_tokenizer, corpus, __file__))


if __name__ == "__main__":
    sys.exit(main())
