"""Whatever a run directory holds, who reads it for people says so or reads on."""

import json
import math
import random
import re
from dataclasses import asdict

import pytest

from asyncrl.commands import dashboard, plan, report
from asyncrl.commands.top import Watched
from asyncrl.errors import AsyncRLError
from asyncrl.json_records import read_json, write_json
from asyncrl.report.run_files import read_run
from tests.make import QUICKSTART, quickstart
from tools.make_sick_run import write_run

NUMBERS = [math.nan, math.inf, 1e308, -1e308, 10**18, 2**63, 10**400, -1, 0, 1.5]
JUNK = [None, True, "", "x", "\ud800", "{{DATA}}", [], {}, [None], {"a": None}, [[[]]], {"step": {}}, *NUMBERS]
BYTES = [b"", b"\x00\xff\xfe", b"\xef\xbb\xbf{}", b"[]\n", b"NaN", b"null\n", b"9" * 5000]
BYTES += [b"[" * 100_000, b'{"a":' * 100_000]
DEEP = b'{"name": "x", "recipe": {"run": ' + b'{"a": ' * 900 + b"1" + b"}" * 902
FILES = ("config.json", "metrics.jsonl", "events.jsonl", "samples.jsonl", "spans.jsonl")


@pytest.fixture
def run(tmp_path):
    path = write_run(tmp_path / "run", "healthy", 12)
    config = json.loads((path / "config.json").read_text())
    config["recipe"] = asdict(quickstart("observability.sinks=[tensorboard]"))
    (path / "config.json").write_text(json.dumps(config))
    span = ["trajectory", 1e9, 1e9 + 1, {}], ["request", 1e9, 1e9 + 1, {"replica": 0, "tokens": 5}]
    line = {"ordinal": 0, "attempt": 0, "trajectories": [span]}
    (path / "spans.jsonl").write_text(json.dumps(line) + "\n")
    return path


def read_all(run):
    """The exit codes of all that read it."""
    trace = run / "trace.json"
    codes = [report.main([str(run), "--trace", str(trace)])]
    if codes == [0]:
        json.loads(trace.read_text(), parse_constant=lambda name: pytest.fail(name))
        text = (run / "report.html").read_text()
        assert text.startswith("<!doctype html>") or text.startswith("<!DOCTYPE html>")
    codes.append(plan.main([str(QUICKSTART), "--from-run", str(run), "--steps", "4"]))
    (run / ".lock").unlink(missing_ok=True)  # of the sync before
    codes.append(dashboard.main(["sync", str(run), "--sink", "tensorboard"]))
    try:
        watched = Watched(run)
        watched.look()
        watched.view(0.0)
    except AsyncRLError as error:
        codes.append(error.exit_code)
    return codes


def replaced(value, rng):
    """`value` with one of its parts exchanged for something else, or left out."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        name = rng.choice(sorted(value))
        if rng.random() < 0.2:
            return {n: v for n, v in value.items() if n != name}
        return value | {name: replaced(value[name], rng)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        return [*value[:at], replaced(value[at], rng), *value[at + 1 :]]
    return rng.choice(JUNK)


def test_an_intact_run_is_read(run, capsys):
    report_code, _, sync_code = read_all(run)
    assert (report_code, sync_code) == (0, 0)
    assert "cannot be read" not in capsys.readouterr().out


@pytest.mark.parametrize("name", FILES)
def test_any_bytes_are_read_or_refused(run, name, capsys):
    whole = (run / name).read_bytes()
    for damaged in (*BYTES, DEEP, whole[: len(whole) // 2], whole[:-1] + b"\xff" + whole[-9:], whole + DEEP):
        (run / name).write_bytes(damaged)
        assert set(read_all(run)) <= {0, 2}, damaged[:40]
    (run / name).unlink()
    assert set(read_all(run)) <= {0, 2}
    (run / name).mkdir()
    assert set(read_all(run)) <= {0, 2}
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("name", FILES)
def test_any_value_in_place_of_another_is_read_or_refused(run, name):
    rng = random.Random(name)
    lines = (run / name).read_text().splitlines()
    for _ in range(8):
        changed = list(lines)
        for at in rng.sample(range(len(lines)), min(3, len(lines))):
            changed[at] = json.dumps(replaced(json.loads(lines[at]), rng))
        (run / name).write_text("\n".join(changed) + "\n")
        assert set(read_all(run)) <= {0, 2}, changed


def test_lines_that_are_left_out_are_named_and_a_nan_hides_nothing(run, capsys):
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    samples[-1]["logprobs"] = [math.nan] * len(samples[-1].get("logprobs", [0.0]))
    (run / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    with (run / "events.jsonl").open("a") as file:
        file.write('{"event": "step", "time_s": 1e9, "step": NaN}\n{"event": "nobody"}\n{"event": "gro')
    read = read_run(run)
    assert read.samples[-1]["logprobs"][0] is None
    assert read_all(run)[0] == 0
    assert "2 of events.jsonl" in capsys.readouterr().out, "the last line may be in the making"


@pytest.mark.parametrize("name", ["{{DATA}}", "{{SCRIPT}} {{STYLE}}", "{{NONE}}"])
def test_a_name_like_a_place_of_the_page_is_a_name(run, name):
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"name": name}))
    assert report.main([str(run)]) == 0
    text = (run / "report.html").read_text()
    assert f"<title>{name}" in text
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert json.loads(data)["runs"][0]["name"] == name


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": [math.nan, 1.5], "b": (-math.inf,)}, '{"a": [null, 1.5], "b": [null]}'),
        ([math.nan], "[null]"),
        ({"a": 1}, '{"a": 1}'),
    ],
)
def test_what_json_cannot_express_is_written_as_null(value, text):
    assert write_json(value) == text


def test_half_of_a_character_is_a_question_mark():
    assert read_json('{"\\ud800": ["\\uDfff", "\\ud83d\\ude00", "\\\\ud"]}') == {"?": ["?", "\U0001f600", "\\ud"]}


@pytest.mark.parametrize("text", ["NaN", "-Infinity", "1e999", "-1e101", "9" * 5000, str(2**64)])
def test_what_is_no_measured_number_is_read_as_none(text):
    assert read_json(f"[{text}, 1, 2.5]") == [None, 1, 2.5]
