import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from asyncrl.data.dataset import load_rows
from asyncrl.data.rows import ChatMessage, parse_record
from asyncrl.errors import DataError
from tests.unit.test_data_rows import RECORD

GSM8K = {"question": "What is 6 * 7?", "answer": "6 * 7 = <<6*7=42>>42\n#### 42", "pass_rate": 0.25}
PLAIN = {"prompt": "What is 6 * 7?", "answer": 42, "pass_rate": 0.25}
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


@pytest.mark.parametrize(
    ("record", "schema", "found"),
    [
        ({"text": "x"}, "auto", "the keys text, which no schema has"),
        (GSM8K | {"answer": "42"}, "auto", "answer has no ####"),
        (GSM8K | {"answer": "so ####  "}, "auto", "what follows #### is empty"),
        (GSM8K | {"question": " "}, "auto", "question is empty"),
        (GSM8K | {"answer": 42}, "auto", "answer is int 42 instead of a string"),
        (PLAIN | {"prompt": 3}, "auto", "prompt is int 3"),
        (PLAIN, "gsm8k", "no question"),
        (GSM8K, "prompt_answer", "no prompt"),
        (GSM8K, "verl", "no reward_model"),
    ],
)
def test_a_bad_row_names_place_and_schema(record, schema, found) -> None:
    with pytest.raises(DataError) as error:
        parse_record(record, "data/x.jsonl:12", schema)
    message = str(error.value)
    assert message.startswith("asked: the row at data/x.jsonl:12\n")
    assert found in message.splitlines()[1]
    assert "data.schema=" in message or "these schemas" in message
