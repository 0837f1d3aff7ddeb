"""Makes the tasks of tool use and of code: sums that a tiny model cannot do in its head, and a tiny Qwen3 that rather
guesses them.

The warm-up studies calls of a calculator (`--task tool`), calls within one response (`--task interleaved`) or programs
that compute (`--task code`), and ends on a mixture in which most results are guessed. What comes out copies a sum into
a call or a program without fault, but seldom does: what reinforcement learning has to find out is that it pays. No
network, about a minute on two cores; a second call returns at once. `--task harness` writes another model, without
training (tools/harness_model.py).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from asyncrl.data.rows import ChatMessage, PromptRow, to_record
from asyncrl.environments.tools.calculator import Calculator
from tools import harness_model, make_tiny_model
from tools.arithmetic import is_held_out
from tools.make_tiny_model import END, MAX_THREADS, Example, Settings, build_model, warm_up

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

RECORD = "tool_task.json"
DATA_SOURCE = "asyncrl_tool_sums"
OPEN, CLOSE = "<calculator>", "</calculator>"
TOKENS = (OPEN, CLOSE, "Compute", "calculator", "expression", "tool", "```python", "print")
"""Eight, so that the vocabulary stays a multiple of eight."""
CHAT_TEMPLATE = (
    "{%- if tools %}{{- '<|im_start|>system\\ntools:' }}"
    "{%- for tool in tools %}{{- ' ' + tool.function.name }}"
    "{%- for key in tool.function.parameters.properties %}{{- ' ' + key }}{%- endfor %}"
    "{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSettings:
    """Everything that decides the outcome."""

    task: Literal["tool", "interleaved", "code", "harness", "swe"] = "tool"
    seed: int = 0
    num_study: int = 8192
    """Sums of which `study_share` are computed, by a call or a program; the others are guessed."""
    num_messy: int = 2048
    """Sums of the final mixture, of which `messy_share` are computed: about the model's share when it samples."""
    study_share: float = 0.7
    messy_share: float = 0.12

    def key(self, *files: str) -> str:
        """`files`: of which the outcome depends, too."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode())
        for file in (__file__, str(make_tiny_model.__file__), str(harness_model.__file__), *files):
            digest.update(Path(file).read_bytes())
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Sum:
    question: str
    expression: str
    answer: int
    guess: int
    """As many digits as the answer has, and another number."""


def make_sums(num: int, seed: int, *, held_out: bool) -> list[Sum]:
    """`num` different sums; held-out and other ones are disjoint, whatever their seeds."""
    rng = random.Random(f"{seed}/{held_out}/sums")
    found: dict[str, Sum] = {}
    while len(found) < num:
        expression = f"{rng.randint(12, 999)}*{rng.randint(12, 99)}{rng.choice('+-')}{rng.randint(10, 99)}"
        question = f"Compute {expression}"
        if is_held_out(question) == held_out:
            answer = int(Calculator().call(expression))
            guess = answer
            while guess == answer:
                guess = rng.randint(10 ** (len(str(answer)) - 1), 10 ** len(str(answer)) - 1)
            found.setdefault(question, Sum(question, expression, answer, guess))
    return list(found.values())


def build_tokenizer() -> PreTrainedTokenizerFast:
    """That of the tiny model, with a token for each tag, as real models have them."""
    tokenizer = make_tiny_model.build_tokenizer()
    tokenizer.add_tokens(list(TOKENS))
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def corpus(tokenizer: PreTrainedTokenizerFast, settings: ToolSettings) -> list[Example]:
    """The examples in the order in which they are trained, each seen once."""
    rng = random.Random(settings.seed)
    sums = make_sums(settings.num_study + settings.num_messy, settings.seed, held_out=False)
    examples = []
    for number, task in enumerate(sums):
        share = settings.study_share if number < settings.num_study else settings.messy_share
        examples.append(_EXAMPLES[settings.task](tokenizer, task, computed=rng.random() < share))
    return examples


def _program(tokenizer: PreTrainedTokenizerFast, task: Sum, *, computed: bool) -> Example:
    """A program that prints the sum, or what is guessed of it."""
    messages = [{"role": "user", "content": task.question}]
    prompt = str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
    response = f"```python\nprint({task.expression if computed else task.guess})\n```{END}"
    return joined(tokenizer, [(prompt, False), (response, True)])


def _conversation(tokenizer: PreTrainedTokenizerFast, task: Sum, *, computed: bool) -> Example:
    """Trained on what the assistant says in it."""
    tools = [{"function": {"name": Calculator.name, "parameters": Calculator.parameters}}]
    messages = [{"role": "user", "content": task.question}]
    parts = [
        (str(tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)), False)
    ]
    if computed:
        parts.append((f"{OPEN}{task.expression}{CLOSE}{END}", True))
        parts.append((f"\n<|im_start|>tool\n{task.answer}<|im_end|>\n<|im_start|>assistant\n", False))
    parts.append((f"Answer: {task.answer if computed else task.guess}{END}", True))
    return joined(tokenizer, parts)


def _interleaved(tokenizer: PreTrainedTokenizerFast, task: Sum, *, computed: bool) -> Example:
    """One response, with the result of a call in it, which is not trained."""
    messages = [{"role": "user", "content": task.question}]
    parts = [(str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)), False)]
    if computed:
        parts.append((f"<tool>{task.expression}</tool>", True))
        parts.append((f"<result>{task.answer}</result>", False))
    parts.append((f"Answer: {task.answer if computed else task.guess}{END}", True))
    return joined(tokenizer, parts)


_EXAMPLES: dict[str, Callable[..., Example]] = {"tool": _conversation, "interleaved": _interleaved, "code": _program}


def joined(tokenizer: PreTrainedTokenizerFast, parts: Sequence[tuple[str, bool]]) -> Example:
    """Texts, and whether they are trained."""
    ids: list[int] = []
    trained: list[bool] = []
    for text, is_trained in parts:
        some = tokenizer(text).input_ids
        ids += some
        trained += [is_trained] * len(some)
    return Example(ids, trained)


def make_model(out: Path, settings: ToolSettings, key: str, make: Making) -> None:
    """`out` appears, or is replaced, only when all of it is done."""
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        if settings.task == "harness":
            harness_model.save(partial, settings.seed)
        else:
            _save_taught(partial, settings, make)
        record = {"key": key, "settings": asdict(settings)}
        (partial / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        if out.exists():
            shutil.rmtree(out)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _save_taught(directory: Path, settings: ToolSettings, make: Making) -> None:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(min(MAX_THREADS, torch.get_num_threads()))
    tokenizer = make.tokenizer()
    tiny = Settings(seed=settings.seed)
    model = build_model(tiny, tokenizer)
    examples = make.corpus(tokenizer, settings)
    print(f"warming up {sum(p.numel() for p in model.parameters())} parameters on {len(examples)} examples", flush=True)
    warm_up(model.train(), examples, tiny)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def write_data(directory: Path, task: str, num_train: int, num_test: int, seed: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for split, num in (("train", num_train), ("test", num_test)):
        rows = [
            PromptRow((ChatMessage("user", s.question),), str(s.answer), DATA_SOURCE, _extra(task, s), f"{split}:{i}")
            for i, s in enumerate(_sums(task, num, seed, held_out=split == "test"))
        ]
        path = directory / f"{task}_{split}.jsonl"
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.write_text("".join(json.dumps(to_record(row)) + "\n" for row in rows), encoding="utf-8")
        partial.replace(path)
        print(f"wrote {path}: {len(rows)} sums")


def _sums(task: str, num: int, seed: int, *, held_out: bool) -> list[Sum]:
    if task == "harness":  # its model knows one sum
        return [Sum(f"What is 2+2? ({held_out + 2 * number})", "2+2", 4, 5) for number in range(num)]
    return make_sums(num, seed, held_out=held_out)


def _extra(task: str, asked: Sum) -> tuple[tuple[str, str], ...]:
    """The tests of a program, as reward code takes them."""
    return (("tests", json.dumps({"inputs": [""], "outputs": [f"{asked.answer}\n"]})),) if task == "code" else ()


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 2 when `--out` holds something else."""
    options = _parse(arguments)
    settings = ToolSettings(task=options.task, seed=options.seed)
    out = options.out or Path(f"runs/tiny-{options.task}-qwen3")
    settings = replace(
        settings,
        num_study=max(1, round(options.share * settings.num_study)),
        num_messy=max(1, round(options.share * settings.num_messy)),
    )
    write_data(options.data, options.task, options.num_train, options.num_test, options.seed)
    return made(out, settings, Making(build_tokenizer, corpus))


@dataclass(frozen=True, slots=True)
class Making:
    """What a model is made of; `file`: where that is written, if not here."""

    tokenizer: Callable[[], PreTrainedTokenizerFast]
    corpus: Callable[[PreTrainedTokenizerFast, ToolSettings], list[Example]]
    file: str = __file__


def made(out: Path, settings: ToolSettings, make: Making) -> int:
    """Makes the model unless it is there. Returns the exit code: 2 when `out` holds something else."""
    record, key = out / RECORD, settings.key(make.file)
    if out.exists() and not record.is_file():
        print(f"{out} exists and was not written by this tool: name another directory", file=sys.stderr)
        return 2
    if record.is_file() and json.loads(record.read_text(encoding="utf-8"))["key"] == key:
        print(f"{out} is up to date")
        return 0
    started_s = time.monotonic()
    make_model(out, settings, key, make)
    print(f"wrote {out} in {time.monotonic() - started_s:.0f} s")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=str(__doc__).split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--task", choices=("tool", "interleaved", "code", "harness"), default="tool")
    parser.add_argument("--out", type=Path, help="directory of the model (default: runs/tiny-TASK-qwen3)")
    parser.add_argument("--data", type=Path, default=Path("data"), help="directory of TASK_train and TASK_test")
    parser.add_argument("--num-train", type=int, default=2048, help="sums to train on")
    parser.add_argument("--num-test", type=int, default=128, help="held-out sums")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", type=float, default=1.0, help="of the warm-up to run; less makes a worse model")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
