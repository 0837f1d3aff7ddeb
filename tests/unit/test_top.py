"""`asyncrl-top` and the table of a step."""

import io
import json
import threading
import time

import pytest
from rich.console import Console

from asyncrl.commands.top import Watched, main
from asyncrl.observability.progress import BAR, step_table
from tools.make_sick_run import write_run


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
    assert main([str(path), "--interval", "0.05"]) == 0
    writer.join()


def test_a_run_without_a_step_and_a_directory_without_a_run(tmp_path, capsys):
    config(tmp_path, 5)
    assert main([str(tmp_path), "--once"]) == 0
    assert "no optimizer step yet" in capsys.readouterr().out
    assert main([str(tmp_path / "none"), "--once"]) == 2
    assert "no such directory" in capsys.readouterr().err


@pytest.mark.parametrize("shares", [(1.0, 0.0), (0.999, 0.001), (1 / 3, 2 / 3), (0.0, 0.0), (0.7, 0.5)])
def test_a_bar_has_its_width(shares):
    record = {"trainer_time/training": shares[0], "trainer_time/publish": shares[1]}
    [line] = [line for line in drawn(step_table(record, None)).splitlines() if line.startswith("trainer's time")]
    assert line.count("█") == round(BAR * min(1.0, sum(shares)))
