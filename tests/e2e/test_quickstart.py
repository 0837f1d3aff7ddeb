"""The real thing on a CPU: the command that the README names, shortened."""

import json
import shutil
import signal
import time

import psutil
import pytest
import ray

from asyncrl.commands import train as cli
from asyncrl.errors import ConfigError
from asyncrl.types.metrics import REQUIRED
from asyncrl.weights.lock_files import SHARED_MEMORY
from asyncrl_testing.transport_rig import files_in
from tests.e2e.conftest import ROOT, SMALL, assert_sound, events, finish

pytestmark = pytest.mark.timeout(900)


def test_it_learns_bounded_and_lossless_and_goes_on_after_a_signal(start, capsys, monkeypatch):
    """Two thirds of the run come after a signal: what it would have been without is what it is."""
    keys = "run.max_steps=24", "eval.every_steps=12", "rollout.sampling.max_response_tokens=64"
    dry_run(monkeypatch)  # what the refusals below import is there when they are to be quick
    run = start(*keys, joined=False)
    run.wait_for_step(1)
    pids = {p.pid for p in psutil.Process(run.process.pid).children(recursive=True)}
    assert files_in((SHARED_MEMORY,), pids), "weights go through shared memory"
    told = refused(run, monkeypatch, capsys, "resume=auto")
    assert f"process {run.process.pid} is running there" in told, "two runs cannot share a directory"
    run.wait_for_step(5)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait(150) == 128 + signal.SIGTERM, run.log
    reached = run.metrics[-1]["step"]
    assert reached < 20, "it was to end early"
    assert (run.directory / "checkpoints" / f"step_{reached}").is_dir()
    assert not files_in((SHARED_MEMORY,), pids)
    assert "resume=auto" in refused(run, monkeypatch, capsys)

    again = start(*keys, "resume=auto", joined=False)
    assert_sound(again, max_lag=2, steps=24)
    assert sorted(again.transitions("trained")) == list(range(16 * 24)), "the ordinals of an undisturbed run"
    first, last = again.metrics[0], again.metrics[-1]
    assert first["eval/initial_accuracy"] < 0.5
    assert last["eval/accuracy"] > first["eval/initial_accuracy"] + 0.2, (first, last)
    assert all(set(record) >= REQUIRED for record in again.metrics)
    assert last["queue/trained"] == last["queue/admitted"], "nothing is thrown away"
    assert max(r["staleness/lag_max"] for r in again.metrics) >= 1, "it was asynchronous"
    config = json.loads((run.directory / "config.json").read_text())
    assert config["resolved"]["max_lag"] == 2
    assert config["versions"]["torch"]
    samples = run.samples
    assert {"prompt", "response", "reward", "segments"} <= set(samples[0])
    assert (run.directory / "checkpoints" / "step_24" / "state.json").exists()
    log = (run.directory / "log.txt").read_text()
    assert "step 24/24" in log
    assert "there is no line" not in log, "calls went through Ray alone"
    publishes = [e for e in again.events if e["event"] == "publish"]
    versions, since = [p["version"] for p in publishes], 25 - reached
    assert versions[-since:] == list(range(reached, 25))
    assert versions[:-since] in (list(range(reached)), list(range(reached + 1))), "the signal may come before a publish"
    assert publishes[0]["verified"]


def dry_run(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert cli.main(["recipes/quickstart.yaml", "--dry-run"]) == 0


def refused(run, monkeypatch, capsys, *overrides):
    """What another call of the command says that cannot have the directory of `run`."""
    monkeypatch.chdir(ROOT)
    capsys.readouterr()
    assert cli.main(["recipes/quickstart.yaml", f"run.dir={run.directory}", *overrides]) == 2
    return capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "max_lag"),
    [
        (("mode=sync", "weights.transport=collective"), 0),
        (("mode=one_step_off", "trainer.num_ranks=2"), 1),
        (("rollout.interrupt=keep", "staleness.publish_every_steps=2", "weights.verify=always"), 2),
    ],
    ids=["sync-collective", "one_step_off-two-ranks", "keep-publish-every-2"],
)
def test_modes_and_their_lag(start, overrides, max_lag):
    run = start(*SMALL, "run.max_steps=5", *overrides)
    assert_sound(run, max_lag=max_lag, steps=5)
    lags = [(r["staleness/lag_mean"], r["staleness/lag_max"]) for r in run.metrics]
    if "mode=sync" in overrides:
        assert lags == [(0, 0)] * 5
    if "mode=one_step_off" in overrides:
        assert lags == [(0, 0)] + [(1, 1)] * 4, "every token has lag exactly 1 after the first step"


@pytest.mark.slow
def test_differences_are_published_where_replicas_have_their_base(start):
    """At a learning rate of RL and in bfloat16. A replica is killed, and its replacement gets all weights."""
    keys = "weights.encoding=delta", "weights.transport=collective", "model.inference_dtype=bfloat16", "trainer.lr=1e-6"
    run = start(*SMALL, *keys, "trainer.warmup_steps=0", "run.max_steps=2000", "ray.health_interval_s=0.5")
    run.wait_for_step(3)
    psutil.Process(run.actor_pids("Replica")[0]).kill()
    run.wait_for_event("replica_serving", count=3)  # both of them did at the start
    finish(run)
    publishes = events(run, "publish")
    assert all(p["verified"] for p in publishes)
    full, whole = publishes[0]["bytes"], [p for p in publishes if p["attempts"] == 1]
    assert sum(p["bytes"] == full for p in whole) >= 2, "the first one, and the one that reached the replacement"
    assert all(p["bytes"] <= 0.03 * full for p in whole if p["bytes"] != full)
    shares = [record["weights/sent_fraction"] for record in run.metrics]
    assert shares[0] == 0, "a step's publish goes on beside the next one"
    assert all(0 < share <= 0.03 for share in shares[1:3]), shares
    assert any(0 < share <= 0.03 for share in shares[-4:]), "differences again after the replacement"


@pytest.mark.slow
def test_a_part_that_cannot_start_ends_the_run_with_its_error(start, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(ROOT / "runs" / "tiny-qwen3", broken)
    (broken / "model.safetensors").write_bytes(b"not a safetensors file")
    run = start("run.max_steps=2", f"model.path={broken}")
    assert run.wait(280) == ConfigError.exit_code, run.log
    assert "the run failed: ConfigError" in run.log
    assert "resume=auto" in run.log


@pytest.mark.slow
def test_a_signal_during_an_evaluation_still_leaves_a_checkpoint(start):
    slow = "eval.every_steps=2", "eval.temperature=1.0", "checkpoint.every_steps=0"
    run = start(*SMALL, "run.max_steps=60", *slow)
    run.wait_for_step(1)
    while not any(e["event"] == "evaluation" and e["step"] == 2 for e in run.events):
        if any(e["event"] == "publish" and e["version"] == 2 for e in run.events):
            break
        assert run.process.poll() is None, run.log
        time.sleep(0.01)
    run.process.send_signal(signal.SIGINT)
    assert run.wait(150) == 128 + signal.SIGINT, run.log
    assert list((run.directory / "checkpoints").glob("step_*"))


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ('{"prompt": [{"role": "user", "content": "1+1?"}]', "bad.jsonl:2"),
        ('{"prompt": [], "data_source": "x", "reward_model": {"ground_truth": "2"}}', "bad.jsonl:2"),
        (json.dumps({"prompt": "9 " * 99, "answer": "2"}), "max"),
    ],
    ids=["broken JSON", "empty prompt", "too long"],
)
def test_a_bad_row_is_named_before_anything_starts(inputs, tmp_path, capsys, monkeypatch, row, found):
    monkeypatch.chdir(ROOT)
    good = (ROOT / "data" / "arithmetic_train.jsonl").read_text().splitlines()[0]
    bad = tmp_path / "bad.jsonl"
    bad.write_text(f"{good}\n{row}\n")
    code = cli.main(["recipes/quickstart.yaml", f"data.train={bad}", f"run.dir={tmp_path / 'run'}"])
    message = capsys.readouterr().err
    assert code == 2
    assert found in message
    assert "bad.jsonl:2" in message
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_cluster_that_is_not_there_is_asked_for_and_the_command_can_be_repeated(inputs, tmp_path, monkeypatch):
    def nothing_runs(**_):
        raise ConnectionError("Could not find any running Ray instance. Please specify the one to connect to.\nMore.")

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(ray, "init", nothing_runs)
    for _ in range(2):
        assert cli.main(["recipes/quickstart.yaml", "ray.address=auto", f"run.dir={tmp_path / 'run'}"]) == 2
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "asked: to join the Ray cluster at auto\nfound: Could not find any running Ray instance" in log
    assert "ray start --head" in log
    assert "RAY_AUTH_MODE=token" in log
    assert not (tmp_path / "run" / "config.json").exists()
