"""The report of a run: what it reads, what it finds, and that its data cannot break out of the page."""

import gzip
import io
import json
import logging
import re
import threading
import time

import pytest
from rich.console import Console

from asyncrl.commands.report import main, page
from asyncrl.commands.top import Watched
from asyncrl.commands.top import main as top_main
from asyncrl.driver.off_policy import LEAST, LiveFindings
from asyncrl.errors import ConfigError
from asyncrl.observability.charts import CHARTS
from asyncrl.observability.progress import BAR, step_table
from asyncrl.report.findings import findings, helps_most
from asyncrl.report.lifetimes import lifetimes
from asyncrl.report.page_data import page_data
from asyncrl.report.run_files import read_run
from asyncrl.types.metrics import Metric
from tools.make_sick_run import KINDS, START_S, write_run

NAMED = {
    "healthy": [],
    "starved": ["Starved trainer"],
    "straggler": ["Overdue stragglers"],
    "slow_reward": ["Slow environment or reward"],
    "fenced": ["Replica 2 is fenced off"],
    "collapsed": ["Collapsed importance ratio"],
    "guarded": ["Stopped by the off-policy guard"],
}


def found_in(path):
    run = read_run(path)
    return findings(run, lifetimes(run.events))


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_sickness_is_named_and_no_other(tmp_path, kind, seed):
    found = found_in(write_run(tmp_path / "run", kind, 60, seed))
    assert [finding.title for finding in found] == NAMED[kind]
    charted = {key for chart in CHARTS for key in chart.keys} | {"staleness/overdue_wait_s"}
    assert all(finding.evidence and finding.remedy and charted & set(finding.metrics) for finding in found)


def test_a_replica_that_came_back_is_no_finding(tmp_path):
    path = write_run(tmp_path / "run", "fenced", 30)
    with (path / "events.jsonl").open("a") as file:
        file.write(json.dumps({"event": "replica_rejoined", "time_s": 1e9, "replica": 2}) + "\n")
    assert found_in(path) == []


def test_a_run_in_progress_and_torn_lines(tmp_path):
    path = write_run(tmp_path / "run", "healthy", 10)
    for name in ("metrics", "events", "samples"):
        file = path / f"{name}.jsonl"
        file.write_text(file.read_text() + '{"step": 11, "rewa')
    (path / "samples.jsonl").unlink()
    run = read_run(path)
    assert len(run.metrics) == 10
    assert run.samples == ()
    assert page_data([run])["runs"][0]["steps"] == list(range(1, 11))


def test_a_step_that_was_trained_again_is_shown_once(tmp_path):
    path = write_run(tmp_path / "run", "healthy", 5)
    with (path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, "reward/mean": 7.0}) + "\n")
    run = read_run(path)
    assert run.series(Metric.STEP) == [1, 2, 3, 4, 5]
    assert run.series(Metric.REWARD_MEAN)[3] == 7.0


def group(at, transition, ordinal, attempt=0, version=3, oldest=2):
    return {
        "event": "group", "time_s": at, "transition": transition, "ordinal": ordinal, "attempt": attempt,
        "trainer_version": version, "version": version, "oldest_version": oldest,
    }  # fmt: skip


def test_lifetimes_follow_requeues_and_releases():
    lives = lifetimes(
        [
            group(1, "admitted", 7), group(2, "requeued", 7, attempt=1), group(3, "reissued", 7, attempt=1),
            group(5, "ready", 7, attempt=1), group(6, "leased", 7, attempt=1), group(7, "released", 7, attempt=1),
            group(8, "leased", 7, attempt=1), group(9, "trained", 7, attempt=1), {"event": "step", "step": 4},
            group(4, "admitted", 8), group(9, "expired", 8),
        ]
    )  # fmt: skip
    first, second, third = lives
    assert (first.end, first.ended) == ("requeued", 2)
    assert (second.admitted, second.ready, second.leased, second.ended) == (3, 5, 8, 9)
    assert (second.step, second.lag, third.end, third.lag) == (4, 1, "expired", None)


def test_texts_of_a_run_cannot_end_the_script(tmp_path):
    path = write_run(tmp_path / "run", "healthy", 3)
    sample = {"ordinal": 1, "prompt": "</script><script>alert(1)//", "response": "<!-- <b>", "reward": 0}
    (path / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    text = page("<title>&", page_data([read_run(path)]))
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert json.loads(data)["runs"][0]["samples"][0]["prompt"] == sample["prompt"]
    assert "<" not in data
    assert "<title>&lt;title&gt;&amp;</title>" in text
    assert not re.search(r"(src|href)=\"?(https?:)?//", text), "nothing comes from a network"
    assert "default-src 'none'" in text


def test_two_runs_and_what_differs(tmp_path, capsys):
    one, two = write_run(tmp_path / "one", "healthy", 5), write_run(tmp_path / "two", "collapsed", 8)
    data = page_data([read_run(one), read_run(two)])
    assert data["differences"] == [["run.max_steps", "5", "8"]]
    assert main([str(one), str(two)]) == 0
    assert (one / "report.html").is_file()
    assert not list(one.glob(".report*"))
    capsys.readouterr()
    assert main([str(two), "--out", str(tmp_path / "x.html")]) == 0
    assert "Collapsed importance ratio" in capsys.readouterr().out
    assert (tmp_path / "x.html").is_file()


@pytest.mark.parametrize(
    ("make", "found"),
    [
        pytest.param(lambda path: None, "no such directory", id="nothing"),
        pytest.param(lambda path: path.mkdir(), "no config.json there", id="no run"),
        pytest.param(
            lambda path: (write_run(path, "healthy", 3) / "metrics.jsonl").write_text(""),
            "no optimizer step",
            id="no step",
        ),
        pytest.param(
            lambda path: (write_run(path, "healthy", 3) / "config.json").write_text("{"),
            "not that of a run",
            id="torn config",
        ),
    ],
)
def test_what_is_no_run_is_refused(tmp_path, capsys, make, found):
    make(tmp_path / "run")
    with pytest.raises(ConfigError, match=found):
        read_run(tmp_path / "run")
    assert main([str(tmp_path / "run")]) == 2
    assert found in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_an_error_of_storage(tmp_path, capsys):
    path = write_run(tmp_path / "run", "healthy", 3)
    assert main([str(path), "--out", str(tmp_path / "none" / "x.html")]) == 8
    assert "x.html" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("healthy", "more trainer ranks"),
        ("starved", "more replicas"),
        ("slow_reward", "a faster environment or reward"),
        ("straggler", "giving up stragglers"),
    ],
)
def test_one_sentence_says_what_would_help_most(tmp_path, kind, what):
    assert what in helps_most(read_run(write_run(tmp_path / "run", kind, 60)))


def spans_of(ordinal, start):
    """Two trajectories, each with a request, a reward and itself."""
    return {
        "ordinal": ordinal,
        "attempt": 0,
        "trajectories": [
            [
                ["request", start, start + 1.0, {"replica": 0, "tokens": 7}],
                ["reward", start + 1.0, start + 1.5, {}],
                ["trajectory", start - 0.1, start + 1.6 + i, {}],
            ]
            for i in range(2)
        ],
    }


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace_has_every_step_and_group_and_lanes_without_overlap(tmp_path, name):
    path = write_run(tmp_path / "run", "straggler", 30)
    (path / "spans.jsonl").write_text("".join(json.dumps(spans_of(i, START_S + i / 3)) + "\n" for i in range(40)))
    assert main([str(path), "--trace", str(tmp_path / name)]) == 0
    content = (tmp_path / name).read_bytes()
    events = json.loads(gzip.decompress(content) if name.endswith("gz") else content)["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert all(e.keys() >= {"name", "ts", "dur", "pid", "tid"} and e["dur"] >= 0 for e in spans)
    assert sum(e["name"].startswith("step ") for e in spans) == 30
    assert sum(e["name"].endswith(" generated") for e in spans) == 240, "every group"
    assert sum(e["pid"] == 10 for e in spans) == 80, "every recorded request, in the rows of its replica"
    headed = {e["pid"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    assert {e["pid"] for e in spans} <= headed
    lanes = {}
    for e in sorted(spans, key=lambda e: (e["ts"], -e["dur"])):
        open_until = lanes.setdefault((e["pid"], e["tid"]), [])
        while open_until and open_until[-1] <= e["ts"] + 1:
            open_until.pop()
        assert e["pid"] == 1 or not open_until or e["ts"] + e["dur"] <= open_until[-1] + 1, "inside, or after"
        open_until.append(e["ts"] + e["dur"])


# -- while it learns ---------------------------------------------------------------------------------------------------


HEALTHY = {
    Metric.REWARD_MEAN: 0.3,
    Metric.RATIO_MEAN: 1.0,
    Metric.CLIPPED: 0.01,
    Metric.KL_BEHAVIOR: 0.001,
    Metric.EFFECTIVE_SAMPLES: 0.98,
    Metric.ENTROPY: 0.5,
    Metric.TRUNCATED: 0.0,
    Metric.LOSS: 0.1,
    Metric.GRAD_NORM: 1.0,
}


def told(caplog, *changes, steps=12):
    """The warnings of `steps` steps, each with the last changes."""
    seen = LiveFindings({})
    with caplog.at_level(logging.WARNING):
        for step in range(steps):
            change = changes[min(step, len(changes) - 1)] if changes else {}
            seen.stepped(HEALTHY | {Metric.STEP: step, Metric.REWARD_MEAN: 0.3 + 0.01 * step} | change)
    return [record.getMessage() for record in caplog.records]


def test_a_healthy_run_says_nothing(caplog):
    assert told(caplog) == []


@pytest.mark.parametrize(
    ("change", "found", "key"),
    [
        ({Metric.EFFECTIVE_SAMPLES: 0.08}, "Collapsed importance ratio", "trainer.lr"),
        ({Metric.TRUNCATED: 1.0}, "Many responses are cut off", "max_response_tokens"),
        ({Metric.REWARD_MEAN: 0.0}, "The reward does not change", "reward.function"),
        ({Metric.REWARD_PART.of("agent_trained_share"): 0.2}, "Sampled tokens are left out", "all_branches"),
        ({Metric.REWARD_ZERO_SIGNAL: 0.9}, "Most groups carry no signal", "middling difficulty"),
        ({Metric.RATIO_MEAN: 9.0}, "Collapsed importance ratio", "staleness.max_lag"),
    ],
)
def test_a_run_that_goes_wrong_says_it_once_with_the_key(caplog, change, found, key):
    (message,) = told(caplog, change)
    assert message.startswith(found)
    assert key in message


def test_an_entropy_that_is_gone_is_told(caplog):
    falls = [{Metric.ENTROPY: 0.5 * 0.5**step} for step in range(12)]
    assert [message.partition(".")[0] for message in told(caplog, *falls)] == ["The entropy is gone"]


def test_the_first_steps_are_not_judged(caplog):
    assert told(caplog, {Metric.EFFECTIVE_SAMPLES: 0.01}, steps=LEAST - 1) == []


# -- `asyncrl-top` and the table of a step -----------------------------------------------------------------------------


def drawn(what):
    console = Console(width=200, file=io.StringIO())
    console.print(what)
    return console.file.getvalue()


def shown(watched):
    return drawn(watched.view(time.time()))


def config(path, steps):
    (path / "config.json").write_text(json.dumps({"name": "run", "recipe": {"run": {"max_steps": steps}}}))


def test_the_newest_step_is_shown_with_its_causes_lags_and_faults(tmp_path):
    watched = Watched(write_run(tmp_path / "run", "fenced", 60))
    watched.look()
    text = shown(watched)
    for part in ("step 60 of 60", "tokens by lag", "recovering 25%", "replica_suspended", "does not answer"):
        assert part in text
    assert watched.ended == "", "a run that hangs has not ended"


def test_it_follows_a_run_through_a_torn_line_and_a_resume_to_its_end(tmp_path):
    path = write_run(tmp_path / "run", "healthy", 20)
    metrics, events = path / "metrics.jsonl", path / "events.jsonl"
    lines, ends = metrics.read_text(), events.read_text()
    whole = lines.splitlines(keepends=True)
    metrics.write_text("".join(whole[:10]) + whole[10][:40])
    events.write_text("")
    watched = Watched(path)
    watched.look()
    assert "step 10 of 20" in shown(watched)
    metrics.write_text("".join(whole[:4]))
    watched.look()
    assert "step 4 of 20" in shown(watched)
    metrics.write_text(lines)
    watched.look()
    assert "step 20 of 20" in shown(watched)

    def finish():
        time.sleep(0.2)
        events.write_text(ends)

    writer = threading.Thread(target=finish)
    writer.start()
    assert top_main([str(path), "--interval", "0.05"]) == 0
    writer.join()


def test_a_run_without_a_step_and_a_directory_without_a_run(tmp_path, capsys):
    config(tmp_path, 5)
    assert top_main([str(tmp_path), "--once"]) == 0
    assert "no optimizer step yet" in capsys.readouterr().out
    assert top_main([str(tmp_path / "none"), "--once"]) == 2
    assert "no such directory" in capsys.readouterr().err


@pytest.mark.parametrize("shares", [(1.0, 0.0), (0.999, 0.001), (1 / 3, 2 / 3), (0.0, 0.0), (0.7, 0.5)])
def test_a_bar_has_its_width(shares):
    record = {"trainer_time/training": shares[0], "trainer_time/publish": shares[1]}
    [line] = [line for line in drawn(step_table(record, None)).splitlines() if line.startswith("trainer's time")]
    assert line.count("█") == round(BAR * min(1.0, sum(shares)))
