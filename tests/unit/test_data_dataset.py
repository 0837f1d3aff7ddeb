import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from asyncrl.config.paths import is_place
from asyncrl.data.dataset import HubName, load_rows, parse_hub_name, read_hub
from asyncrl.data.rows import ChatMessage
from asyncrl.errors import DataError
from tests.unit.test_data_rows import GSM8K, PLAIN, RECORD


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
