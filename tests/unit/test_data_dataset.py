import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.paths import is_place
from asyncrl.config.rewards import RewardConfig
from asyncrl.data.dataset import HubName, load_rows, parse_hub_name, read_hub
from asyncrl.data.rows import ChatMessage
from asyncrl.errors import DataError
from asyncrl.rewards import build_reward
from tests.make import row
from tests.unit.test_data_rows import GSM8K, PLAIN, RECORD
from tools.arithmetic import LEVELS, is_held_out, make_equations, make_problem, make_problems, words


def records(*questions: str) -> list[dict]:
    return [
        {
            "data_source": "test",
            "prompt": [{"content": question, "role": "user"}],
            "reward_model": {"ground_truth": str(number), "style": "rule"},
            "extra_info": {"index": f"i{number}"},
        }
        for number, question in enumerate(questions)
    ]


def write_jsonl(path: Path, *questions: str) -> Path:
    path.write_text("\n".join(json.dumps(record) for record in records(*questions)) + "\n\n")
    return path


def write_parquet(path: Path, *questions: str) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records(*questions)), path, row_group_size=2)
    return path


def test_jsonl(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "train.jsonl", "a", "b")
    rows = load_rows(str(path))
    assert [row.messages for row in rows] == [(ChatMessage("user", "a"),), (ChatMessage("user", "b"),)]
    assert [row.origin for row in rows] == [f"{path}:1", f"{path}:2"]


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path: Path) -> None:
    plain = write_jsonl(tmp_path / "plain.jsonl", "a", "b")
    marked = tmp_path / "marked.jsonl"
    marked.write_text(plain.read_text(), encoding="utf-8-sig")
    assert [row.messages for row in load_rows(str(marked))] == [row.messages for row in load_rows(str(plain))]


def test_parquet_gives_the_same_rows_as_jsonl(tmp_path: Path) -> None:
    names = ["a", "b", "c", "d", "e"]
    from_parquet = load_rows(str(write_parquet(tmp_path / "t.parquet", *names)))
    from_jsonl = load_rows(str(write_jsonl(tmp_path / "t.jsonl", *names)))
    assert [(r.messages, r.ground_truth, r.extra) for r in from_parquet] == [
        (r.messages, r.ground_truth, r.extra) for r in from_jsonl
    ]
    assert from_parquet[3].origin == f"{tmp_path / 't.parquet'}:row 3"


def test_a_directory_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "b.jsonl", "second")
    write_jsonl(tmp_path / "a.jsonl", "first")
    (tmp_path / "README.md").write_text("not data")
    assert [row.messages[0].content for row in load_rows(str(tmp_path))] == ["first", "second"]


def test_a_directory_with_both_formats_is_refused(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", "x")
    write_parquet(tmp_path / "a.parquet", "x")
    with pytest.raises(DataError, match=r"both \.jsonl and \.parquet"):
        load_rows(str(tmp_path))


def test_a_missing_file_names_the_closest_one(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "arithmetic_train.jsonl", "a")
    with pytest.raises(DataError, match=r"(?s)no such file.*holds arithmetic_train\.jsonl.*do: .*arithmetic_train"):
        load_rows(str(tmp_path / "aritmetic_train.jsonl"))
    with pytest.raises(DataError, match=r"do:    name an existing file"):
        load_rows(str(tmp_path / "nowhere" / "x.jsonl"))


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("empty.jsonl", b"\n\n", "it has no rows"),
        ("t.csv", b"a,b", "the suffix .csv"),
        ("t.parquet", b"PAR2 not really", "not parquet"),
        ("latin.jsonl", '{"prompt": "é"}'.encode("latin-1"), "not UTF-8"),
    ],
)
def test_unusable_files(tmp_path: Path, name: str, content: bytes, found: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=found):
        load_rows(str(tmp_path / name))


def test_a_damaged_parquet_file_is_named(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "t.parquet", "a", "b", "c")
    content = bytearray(path.read_bytes())
    content[4:64] = b"\xff" * 60  # the head of the first page; the footer is whole
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"the dataset {path}\nfound: "):
        load_rows(str(path))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").mkdir()
    (tmp_path / "t.jsonl" / "t.jsonl").mkdir()
    with pytest.raises(DataError, match=rf"the dataset {tmp_path}/t\.jsonl/t\.jsonl\nfound: "):
        load_rows(str(tmp_path / "t.jsonl"))


def test_a_directory_without_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no \.jsonl and no \.parquet"):
        load_rows(str(tmp_path))


def test_paths_and_hub_names_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    for path in ("data", "data/missing", "runs/missing", "x.jsonl", "no/such/x.parquet", "./a", "/a", "~/a"):
        assert is_place(path), path
    for name in ("gsm8k", "gsm8k:test", "BytedTsinghua-SIA/DAPO-Math-17k", "openai/gsm8k/main:test", "org/name:train"):
        assert not is_place(name), name


def test_hub_names() -> None:
    assert parse_hub_name("gsm8k") == HubName("gsm8k", None, "train")
    assert parse_hub_name("org/name:test") == HubName("org/name", None, "test")
    assert parse_hub_name("openai/gsm8k/main:test[:10]") == HubName("openai/gsm8k", "main", "test[:10]")
    for bad in ("a/b/c/d", "a//b", "name:", "/:test"):
        with pytest.raises(DataError, match="neither a file nor a hub name"):
            parse_hub_name(bad)


def test_the_hub_reader_reads_what_the_datasets_library_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # the library reads a local repository folder as it reads a hub one, so no network is needed
    (tmp_path / "org" / "name").mkdir(parents=True)
    write_parquet(tmp_path / "org" / "name" / "train.parquet", "a", "b")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    rows = list(read_hub(HubName("org/name")))
    assert [row.messages[0].content for row in rows] == ["a", "b"]
    assert rows[1].origin == "org/name:train:row 1"
    with pytest.raises(DataError, match=r"asked: the dataset org/name:nosplit from the hub"):
        list(read_hub(HubName("org/name", split="nosplit")))


# -- schemas -----------------------------------------------------------------------------------------------------------


CHAT = {"prompt": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "?"}], "answer": "42"}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("record", "schema", "source", "extra"),
    [
        (RECORD, "verl", "math_dapo", (("index", "a1"), ("level", "3"), ("tags", '["x"]'))),
        (GSM8K, "gsm8k", "gsm8k", (("pass_rate", "0.25"),)),
        (PLAIN, "prompt_answer", "prompt_answer", (("pass_rate", "0.25"),)),
    ],
)
def test_each_schema_is_read_and_recognised(tmp_path: Path, kind, record, schema, source, extra) -> None:
    path = tmp_path / f"t.{kind}"
    if kind == "jsonl":
        path.write_text(json.dumps(record) + "\n")
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([record]), path)
    (row,) = load_rows(str(path))
    assert (row.messages, row.ground_truth) == ((ChatMessage("user", "What is 6 * 7?"),), "42")
    assert (row.data_source, row.extra) == (source, extra)
    assert load_rows(str(path), schema) == [row]


def test_a_system_prompt_stands_before_rows_that_have_none(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(PLAIN) + "\n" + json.dumps(CHAT) + "\n")
    first, second = load_rows(str(path), system_prompt="Think.")
    assert [m.content for m in first.messages] == ["Think.", "What is 6 * 7?"]
    assert [m.content for m in second.messages] == ["Be short.", "?"]


# -- the arithmetic data -----------------------------------------------------------------------------------------------


TOOL = Path(__file__).parents[2] / "tools" / "make_arithmetic_dataset.py"
OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": int.__floordiv__}


@given(st.integers(0, 10**9), st.sampled_from(LEVELS))
def test_the_careful_solution_is_right_step_by_step(seed: int, level: int) -> None:
    problem = make_problem(random.Random(seed), level)
    equations = [re.fullmatch(r"(\d+)([-+*/])(\d+)=(\d+)\.", text) for text in problem.equations]
    assert len(equations) == level
    before = None
    for equation in equations:
        left, operator, right, result = equation.groups()
        assert before in (None, int(left))
        assert OPERATIONS[operator](int(left), int(right)) == int(result)
        assert operator != "/" or int(left) % int(right) == 0
        before = int(result)
    assert before == problem.answer
    assert 2 <= problem.answer <= (999 if level == 3 else 50)
    assert all(text in problem.careful for text in problem.equations)


@given(st.integers(0, 10**9))
def test_bare_equations_are_right_and_in_range(seed: int) -> None:
    equations = make_equations(random.Random(seed), 100)
    assert len(equations) == 100
    for text in equations:
        match = re.fullmatch(r"(\d+)([-+*/])(\d+)=(\d+)\.", text)
        left, operator, right, result = int(match[1]), match[2], int(match[3]), int(match[4])
        assert OPERATIONS[operator](left, right) == result
        assert operator != "/" or left % right == 0
        assert all(2 <= number <= 50 for number in (left, right, result))
    assert {re.sub(r"[\d=.]", "", text) for text in equations} == set(OPERATIONS)


@given(st.integers(0, 10**9), st.sampled_from(LEVELS))
def test_the_question_holds_the_numbers_that_the_solution_uses(seed: int, level: int) -> None:
    problem = make_problem(random.Random(seed), level)
    asked = sorted(int(number) for number in re.findall(r"\d+", problem.question))
    first, *rest = (re.findall(r"\d+", text) for text in problem.equations)
    assert asked == sorted([int(first[0]), int(first[1]), *(int(numbers[1]) for numbers in rest)])
    in_order = [int(number) for number in re.findall(r"\d+", problem.question)]
    assert problem.hasty_answer == in_order[0] + in_order[1]


@given(st.integers(0, 10**9), st.sampled_from(LEVELS))
def test_the_math_reward_judges_both_solvers(seed: int, level: int) -> None:
    problem, reward = make_problem(random.Random(seed), level), build_reward(RewardConfig())
    asked = row(str(problem.answer), problem.question)
    assert reward(problem.careful, asked).reward == 1.0
    assert reward(problem.hasty, asked).reward == float(problem.hasty_answer == problem.answer)


def test_guessing_is_right_sometimes_but_mostly_not() -> None:
    problems = make_problems(2000, (1, 2), seed=0, held_out=False)
    lucky = sum(problem.answer == problem.hasty_answer for problem in problems) / len(problems)
    assert 0.1 < lucky < 0.3


@given(st.integers(0, 1000), st.integers(0, 1000))
def test_train_and_test_never_share_a_problem(seed: int, other_seed: int) -> None:
    train = {problem.question for problem in make_problems(40, (1, 2), seed, held_out=False)}
    test = {problem.question for problem in make_problems(20, (1, 2), other_seed, held_out=True)}
    assert len(train) == 40
    assert len(test) == 20
    assert not train & test
    assert all(map(is_held_out, test))


def test_problems_depend_on_the_seed_alone_and_levels_take_turns() -> None:
    problems = make_problems(30, LEVELS, seed=5, held_out=False)
    assert problems == make_problems(30, LEVELS, seed=5, held_out=False)
    assert problems != make_problems(30, LEVELS, seed=6, held_out=False)
    assert [problem.level for problem in problems] == [1, 2, 3] * 10


def test_the_word_list_covers_every_text() -> None:
    known = set(words())
    for problem in make_problems(1000, LEVELS, seed=99, held_out=True):
        for text in (problem.question, problem.careful, problem.hasty):
            assert set(re.findall(r" ?[A-Za-z]{2,}", text)) <= known
    assert len(known) < 150


@pytest.mark.parametrize("levels", [(), (4,), (0, 1)])
def test_unknown_levels_are_refused(levels: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="level"):
        make_problems(1, levels, seed=0, held_out=False)


def run_tool(out: Path, *arguments: str) -> str:
    command = [sys.executable, str(TOOL), "--out", str(out), "--num-train", "40", "--num-test", "8", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


@pytest.mark.parametrize(("schema", "called"), [("verl", "arithmetic"), ("gsm8k", "gsm8k")])
def test_the_tool_writes_what_the_loader_reads_the_same_again(tmp_path: Path, schema: str, called: str) -> None:
    printed = run_tool(tmp_path, "--schema", schema, "--format", "both", "--levels", "2,3", "--seed", "3")
    names = [f"{called}_{split}.{suffix}" for split in ("train", "test") for suffix in ("jsonl", "parquet")]
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(names)
    assert all(f"wrote {tmp_path / name}" in printed for name in names)
    train, test = load_rows(str(tmp_path / names[0])), load_rows(str(tmp_path / names[2]))
    assert (len(train), len(test)) == (40, 8)
    assert not {row.messages for row in train} & {row.messages for row in test}
    assert [(r.messages, r.ground_truth, r.extra) for r in load_rows(str(tmp_path / names[1]))] == [
        (r.messages, r.ground_truth, r.extra) for r in train
    ]
    asked = {problem.question: str(problem.answer) for problem in make_problems(40, (2, 3), 3, held_out=False)}
    assert {row.messages[-1].content: row.ground_truth for row in train} == asked
    before = {name: (tmp_path / name).read_bytes() for name in names}
    run_tool(tmp_path, "--format", "both", "--levels", "2,3", "--seed", "3")
    assert {name: (tmp_path / name).read_bytes() for name in names} == before


def test_the_files_have_the_schema_of_dapo_math(tmp_path: Path) -> None:
    run_tool(tmp_path)
    record = json.loads((tmp_path / "arithmetic_train.jsonl").read_text().splitlines()[0])
    assert set(record) == {"data_source", "prompt", "reward_model", "extra_info"}
    assert set(record["reward_model"]) == {"ground_truth", "style"}
    assert set(record["prompt"][0]) == {"role", "content"}
