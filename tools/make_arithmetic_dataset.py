"""Writes the built-in arithmetic task as dataset files, in the schema of DAPO-Math-17k or of GSM8K.

The two files, `arithmetic_train.*` and `arithmetic_test.*` or `gsm8k_train.*` and `gsm8k_test.*`, share no problem,
whatever their sizes and seeds. The same options write the same bytes again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works from a checkout that is not installed

from asyncrl.data.rows import ChatMessage, PromptRow, to_record
from tools.arithmetic import LEVELS, Problem, make_problems

DATA_SOURCE = "asyncrl_arithmetic"


def to_row(problem: Problem, index: int, split: str) -> PromptRow:
    return PromptRow(
        messages=(ChatMessage("user", problem.question),),
        ground_truth=str(problem.answer),
        data_source=DATA_SOURCE,
        extra=(("index", f"{split}-{index}"), ("level", str(problem.level)), ("split", split)),
        origin=f"{split}:{index}",
    )


def verl_record(problem: Problem, index: int, split: str) -> dict[str, object]:
    return dict(to_record(to_row(problem, index, split)))


def gsm8k_record(problem: Problem, index: int, split: str) -> dict[str, object]:
    """The two columns of GSM8K: its answers are a solution and, after `####`, the number."""
    return {"question": problem.question, "answer": "\n".join((*problem.equations, f"#### {problem.answer}"))}


def write_jsonl(records: Sequence[Mapping[str, object]], path: Path) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def write_parquet(records: Sequence[Mapping[str, object]], path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(records)), path)


WRITERS = {"jsonl": write_jsonl, "parquet": write_parquet}
SCHEMAS = {"verl": ("arithmetic", verl_record), "gsm8k": ("gsm8k", gsm8k_record)}
"""Schema -> what its files are called, and the record of a problem."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parse(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    formats = list(WRITERS) if options.format == "both" else [options.format]
    for split, num in (("train", options.num_train), ("test", options.num_test)):
        problems = make_problems(num, options.levels, options.seed, held_out=split == "test")
        called, record_of = SCHEMAS[options.schema]
        records = [record_of(problem, index, split) for index, problem in enumerate(problems)]
        for name in formats:
            path = options.out / f"{called}_{split}.{name}"
            partial = path.with_name(f".{path.name}.{os.getpid()}")
            WRITERS[name](records, partial)
            partial.replace(path)
            print(f"wrote {path}: {len(records)} problems of levels {','.join(map(str, options.levels))}")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=str(__doc__).split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("data"), help="directory to write into")
    parser.add_argument("--schema", choices=sorted(SCHEMAS), default="verl", help="columns of the rows")
    parser.add_argument("--format", choices=(*WRITERS, "both"), default="jsonl")
    parser.add_argument("--num-train", type=_count, default=4096, help="problems to train on")
    parser.add_argument("--num-test", type=_count, default=256, help="held-out problems")
    parser.add_argument("--levels", type=parse_levels, default=(1, 2), help="operations per problem, from 1,2,3")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def _count(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return int(text)


def parse_levels(text: str) -> tuple[int, ...]:
    """(1, 2) for "1,2". Raises argparse.ArgumentTypeError: not levels of the task."""
    levels = tuple(int(part) for part in text.split(",") if part.strip().isdigit())
    if not levels or len(levels) != text.count(",") + 1 or not set(levels) <= set(LEVELS):
        raise argparse.ArgumentTypeError(f"{text!r} is not a comma-separated choice from {LEVELS}")
    return levels


if __name__ == "__main__":
    main()
