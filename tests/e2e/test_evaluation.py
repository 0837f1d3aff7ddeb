"""A real run evaluates on a leased replica while it trains; `asyncrl-eval` evaluates its checkpoint."""

import json

import pytest

from asyncrl.audit import audit_run
from asyncrl.data.dataset import load_rows
from tests.e2e.conftest import MODEL
from tests.processes import ran

pytestmark = pytest.mark.slow

KEYS = (
    "batch.groups_per_step=4",
    "batch.group_size=4",
    "rollout.sampling.max_response_tokens=32",
    "eval.every_steps=2",
    "eval.leased_replicas=1",
    "eval.samples=2",
    "eval.temperature=1",
    "eval.pass_at=[1,2]",
    "eval.max_prompts=64",
    "rollout.torch.num_slots=16",
    "run.max_steps=6",
    "checkpoint.every_steps=0",
)


def test_steps_go_on_while_one_leased_replica_answers_with_one_version(start):
    run = start(*KEYS)
    assert run.wait() == 0, run.log
    assert not audit_run(run.directory).findings
    metrics, events = run.metrics, run.events
    assert [m["step"] for m in metrics] == list(range(1, 7))
    assert all(m["staleness/lag_max"] <= 2 for m in metrics)

    begun = [e for e in events if e["event"] == "evaluation_started"]
    told = [e for e in events if e["event"] == "evaluation"]
    assert begun
    assert not [e for e in events if e["event"] in ("evaluation_failed", "replica_failed")]
    beside = [e for e in told if 0 < e["step"] < 6]
    assert [e["version"] for e in beside] == [e["version"] for e in begun], (
        "every one was answered by its version alone"
    )
    assert told[0]["version"] == 0
    assert told[-1]["version"] == 6
    started, returned = (
        [i for i, e in enumerate(events) if e["event"] == kind] for kind in ("evaluation_started", "replica_returned")
    )
    assert len(returned) == len(begun)
    pinned = [e for i, j in zip(started, returned, strict=True) for e in events[i:j] if e["event"] == "publish"]
    assert pinned, "training goes on beside an evaluation"
    assert all(e["replicas"] == 1 for e in pinned), "no publish reaches the pinned replica"
    assert any(e["event"] == "replica_serving" for e in events[returned[0] :]), "it serves groups again"

    lines = [m for m in metrics if "eval/accuracy" in m]
    assert lines[-1]["eval/version"] == 6
    for line in lines:
        assert line["eval/mean@2/held_out"] == line["eval/accuracy/held_out"] == line["eval/accuracy"]
        assert line["eval/pass@1/held_out"] == pytest.approx(line["eval/accuracy"])
        assert line["eval/pass@2/held_out"] >= line["eval/accuracy"]
    for e in told:
        assert e["interval"][0] <= e["accuracy"] <= e["interval"][1]

    rows = run.directory / "rows.jsonl"
    options = ["--max-prompts", "16", "--rows", str(rows), "--json", "--trust-run"]
    words = [str(run.directory), "data/arithmetic_test.jsonl", *options]
    done = ran("-m", "asyncrl.commands.evaluate", *words, "--log-file", run.directory / "eval.txt", timeout_s=200)
    report = json.loads(done.stdout)
    assert (report["version"], report["num_prompts"], report["samples"], report["num_failed"]) == (6, 16, 2, 0)
    assert report["pass_at"].keys() == {"1", "2"}, "as the run evaluates"
    rates = [float(dict(row.extra)["pass_rate"]) for row in load_rows(str(rows))]
    assert sum(rates) / len(rates) == pytest.approx(report["accuracy"])


def test_the_deadline_leaves_the_sets_before_it_and_a_partial_one(inputs, tmp_path):
    """Exit code 4, and each row is judged or missing."""
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1), "data_source": "quick"} for n in range(6)]
    sets = {"quick": rows, "late": [*rows, {"prompt": "9+9=", "answer": "late", "data_source": "late"}]}
    for name, held in sets.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, held)) + "\n")
    files = [str(tmp_path / f"{name}.jsonl") for name in (*sets, "quick")]
    words = [MODEL, *files, "--reward", "tests.e2e.faulty:late", "--timeout", "20", "--json"]
    words += ["rollout.sampling.max_response_tokens=4", "reward.workers=2", "--log-file", str(tmp_path / "log.txt")]
    done = ran("-m", "asyncrl.commands.evaluate", *words, timeout_s=200, code=4)
    whole, partial = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    assert (whole["num_prompts"], whole["num_asked"], whole["accuracy"]) == (6, 0, 1.0)
    assert (partial["num_prompts"], partial["num_asked"]) == (6, 7)
    assert "PARTIAL: of 7" in done.stderr
    assert "the evaluation within 20 s" in done.stderr, "the third set was not begun"
