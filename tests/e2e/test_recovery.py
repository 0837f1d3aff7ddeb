"""What the real system mends by itself, and how it ends when it cannot: every row of docs/operations.md."""

import json
import re
import signal

import psutil
import pytest

from asyncrl.errors import DeadlineExceeded, RunFailed, Stalled
from asyncrl.queue.saved_state import load_partials
from tests.contract.wandb_log import history_of
from tests.e2e.conftest import (
    ALERT,
    assert_audited,
    assert_damage_is_found,
    assert_gone,
    assert_sound,
    events,
    finish,
    kill_a_rank,
)
from tests.e2e.conftest import SMALL as SMALL_RUN
from tests.e2e.faulty import ESCAPES
from tests.e2e.test_sick_runs import sicknesses

pytestmark = pytest.mark.timeout(900)

SMALL = (*SMALL_RUN, *ALERT)
NAMES = {"TrainerWorker": "trainer rank 0", "MessageQueue": "message queue"}


@pytest.mark.slow
def test_what_is_lost_is_replaced_one_after_the_other(start):
    """Rollouter, trainer rank and message queue, each killed and stopped, in one run."""
    slow = "rollout.environment=tests.e2e.faulty:Straggles"  # the rollouter has running groups at any moment
    run = start(*SMALL, "run.max_steps=2000", "recovery.max_restarts=10", slow)
    run.wait_for_step(2)
    assert not run.has_a_cluster, "it has joined the one of ray.address"
    for number, how in enumerate(("killed", "stopped"), 1):
        process = lose(run, "Rollouter", how)
        run.wait_for_event("rollouter_restarted", count=number)
        assert not psutil.wait_procs([process], 60)[1], "also one that was only stopped is ended"
    taken_back = [e for e in events(run, "group") if e["transition"] == "requeued"]
    assert taken_back, "its tickets were taken back"
    assert not events(run, "training_failed"), "nothing was rolled back"
    run.wait_for_event("checkpoint")
    lost = [(role, how) for role in ("TrainerWorker", "MessageQueue") for how in ("killed", "stopped")]
    for number, (role, how) in enumerate(lost, 1):
        process = lose(run, role, how)
        run.wait_for_event("training_restarted", count=number)
        assert not psutil.wait_procs([process], 60)[1]
        assert [e["process"] for e in events(run, "training_failed")][number - 1 :] == [NAMES[role]]
        assert events(run, "training_restarted")[-1]["checkpoint"].startswith("step_")
    finish(run)
    assert not events(run, "replica_failed"), "the replicas stayed"


@pytest.mark.slow
def test_of_two_rollouters_one_is_killed_and_the_other_goes_on(start):
    slow = "rollout.environment=tests.e2e.faulty:Straggles"  # each rollouter has running groups at any moment
    run = start(*SMALL, "run.max_steps=2000", "rollout.num_rollouters=2", "rollout.num_replicas=2", slow)
    run.wait_for_step(2)
    before = run.actor_pids("Rollouter")
    assert len(before) == 2
    lose(run, "Rollouter", "killed")
    run.wait_for_event("rollouter_restarted")
    after = run.actor_pids("Rollouter")
    assert len(set(before) & set(after)) == 1, "one of them is the same process"
    taken_back = [e for e in events(run, "group") if e["transition"] == "requeued"]
    assert taken_back, "its tickets were taken back"
    finish(run)
    assert not events(run, "training_failed")


def lose(run, role, how):
    """Kills or stops the first process of this role."""
    victim, *_ = run.actor_pids(role)
    process = psutil.Process(victim)
    process.kill() if how == "killed" else process.suspend()
    return process


@pytest.mark.slow
def test_two_ranks_a_death_before_the_first_checkpoint_and_a_spent_budget(start):
    once = "trainer.num_ranks=2", "checkpoint.every_steps=1000", "recovery.max_restarts=1"
    run = start(*SMALL, "run.max_steps=2000", *once, joined=False)
    run.wait_for_step(2)
    lost = kill_a_rank(run)
    run.wait_for_event("training_restarted")
    (restarted,) = events(run, "training_restarted")
    assert restarted["checkpoint"] is None
    assert events(run, "training_failed")[0]["process"] == lost
    run.wait_for_step(max((r["step"] for r in run.metrics), default=0) + 2)
    tree = psutil.Process(run.process.pid).children(recursive=True)
    lost = kill_a_rank(run)
    assert_audited(run, max_lag=2, code=RunFailed.exit_code, timeout_s=280)
    assert "recovery.max_restarts" in run.log
    report = max((run.directory / "faults").glob("*/report.txt"), key=lambda path: path.stat().st_mtime)
    text = report.read_text()
    assert f"found: {lost} failed" in text
    assert "Processes:" in text
    assert list((report.parent / "stacks").iterdir())
    assert_gone(tree)


def test_a_killed_driver_leaves_nothing_and_resumes_from_the_last_intact_checkpoint(start, tmp_path):
    drawn = "data.train=tests.e2e.faulty:Drawn", "observability.samples_per_step=64"
    run = start(*SMALL, *drawn, "run.max_steps=2000", joined=False)
    run.wait_for_event("checkpoint", count=2)
    assert run.has_a_cluster, "without an address it joins none, although one is there"
    tree = psutil.Process(run.process.pid).children(recursive=True)
    run.process.kill()
    run.process.wait(60)
    assert_gone(tree)
    checkpoints = sorted((run.directory / "checkpoints").glob("step_*"), key=lambda p: int(p.name.split("_")[1]))
    torn = checkpoints[-1]
    (weights,) = (torn / "trainer").glob("*.distcp")
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(bytes(data))
    steps = int(torn.name.split("_")[1]) + 3
    again = start(*SMALL, *drawn, f"run.max_steps={steps}", "resume=auto", joined=False)
    assert again.wait() == 0, again.log
    asked = {(s["ordinal"], s["prompt"]) for s in again.samples}
    assert len(asked) == len({ordinal for ordinal, _ in asked}) == len({prompt for _, prompt in asked}) > 16
    assert torn.name in again.log
    assert torn.with_name(f"corrupt_{torn.name}").exists()
    resumed = [e for e in again.events if e["event"] == "resume"][-1]
    assert resumed["checkpoint"] == checkpoints[-2].name
    assert_audited(again, max_lag=2, steps=steps)
    assert assert_damage_is_found(again.directory, tmp_path / "copy") > 100


@pytest.mark.slow
def test_a_replica_that_was_stopped_rejoins_as_it_is(start, cluster, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", cluster)
    slow = "recovery.rejoin_timeout_s=60", "weights.transfer_timeout_s=5"
    run = start(*SMALL, "rollout.num_replicas=2", "run.max_steps=2000", *slow, joined=False)
    run.wait_for_step(2)
    assert not run.has_a_cluster, "it has joined the one of RAY_ADDRESS"
    pids = run.actor_pids("Replica")
    stopped = psutil.Process(pids[0])
    stopped.suspend()
    try:
        run.wait_for_event("replica_suspended")
        reached = run.metrics[-1]["step"]
        run.wait_for_step(reached + 2)
        titles, _ = sicknesses(run)  # while it goes on
        assert any(re.fullmatch(r"Replica \d is fenced off", title) for title in titles)
    finally:
        stopped.resume()
    run.wait_for_event("replica_rejoined")
    run.wait_for_event("replica_serving", count=3)  # both of them did at the start
    assert sorted(run.actor_pids("Replica")) == sorted(pids)
    finish(run)
    assert not [e for e in run.events if e["event"] == "replica_failed"]


def test_a_run_in_which_nothing_moves_is_stopped_with_the_stacks(start):
    run = start(
        *SMALL,
        "run.max_steps=2000",
        "rollout.environment=tests.e2e.faulty:HangsForEver",
        "recovery.stall_timeout_s=8",
        joined=False,  # the mark of a run is in the environment of its own fork server
    )
    assert run.wait(280) == Stalled.exit_code, run.log
    reports = [p.read_text() for p in (run.directory / "faults").glob("*/report.txt")]
    assert any("lease of message queue" in text for text in reports)
    stacks = "".join(p.read_text() for p in (run.directory / "faults").glob("*/stacks/*"))
    assert "asyncrl/driver/run.py" in stacks, "the driver"
    assert "default_worker.py" in stacks, "the actors"


@pytest.mark.slow
def test_an_environment_that_raises_hangs_exits_or_returns_nonsense_fails_its_group_not_the_run(start):
    run = start(
        *SMALL,
        "run.max_steps=3",
        "rollout.environment=tests.e2e.faulty:Misbehaves",
        "rollout.trajectory_timeout_s=4",
        "rollout.request_timeout_s=4",
        "rollout.max_attempts=2",
        "rollout.max_failed_fraction=1",
    )
    assert_sound(run, max_lag=2, steps=3)
    groups = events(run, "group")
    failed = {e["ordinal"]: e["detail"] for e in groups if e["transition"] == "failed"}
    assert {0, 2, 3, 5, 7, 10, *ESCAPES} <= set(failed)
    others = {o: detail for o, detail in failed.items() if o not in (3, *ESCAPES) and o % 5 not in (0, 2)}
    assert all(DeadlineExceeded.__name__ in detail for detail in others.values()), "a machine as slow as that"
    assert "could not convert" in failed[3]
    assert not events(run, "rollouter_failed"), "its event loop went on"
    for ordinal, detail in failed.items():
        if ordinal in ESCAPES:
            assert ESCAPES[ordinal] in detail
            assert "faulty.py" in detail, "its traceback says where"
        elif ordinal % 5 == 0:
            assert "no answer sheet" in detail
            assert "Traceback" in detail
        if ordinal % 5 == 2:
            assert DeadlineExceeded.__name__ in detail
    returned = [e["detail"] for e in groups if e["transition"] == "requeued" and e["ordinal"] == 14]
    assert any("the grader hung up" in detail for detail in returned)
    assert not set(failed) & set(run.transitions("trained"))
    quarantined = [json.loads(line) for line in (run.directory / "quarantine.jsonl").read_text().splitlines()]
    assert {q["ordinal"] for q in quarantined} == set(failed)


@pytest.mark.slow
def test_a_reward_that_hangs_or_kills_its_process_is_killed_counted_and_tried_again(start):
    run = start(
        *SMALL,
        "run.max_steps=3",
        "reward.function=tests.e2e.faulty:moody_reward",
        "reward.timeout_s=2",
        "rollout.max_attempts=2",
        "rollout.max_failed_fraction=1",
    )
    assert_audited(run, max_lag=2, steps=3)
    details = [e["detail"] for e in run.events if e["event"] == "group" and e["transition"] in ("requeued", "failed")]
    assert any("DeadlineExceeded" in d for d in details)
    assert any("ProcessDied" in d for d in details)


@pytest.mark.slow
def test_a_dataset_without_signal_stops_the_run_with_a_message(start):
    run = start(
        *SMALL,
        "run.max_steps=2000",
        "reward.function=tests.e2e.faulty:always_right",
        "algorithm.dynamic_sampling=true",
        "algorithm.filtered_window=32",
    )
    assert_audited(run, max_lag=2, code=RunFailed.exit_code, timeout_s=600)
    assert "32 of the last 32" in run.log


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["refill", "mask"])
def test_stragglers_never_break_the_limit_under_any_policy(start, policy):
    run = start(
        *SMALL,
        "run.max_steps=12",
        f"staleness.on_overdue={policy}",
        "staleness.max_lag=1",
        "rollout.environment=tests.e2e.faulty:Straggles",
        "rollout.max_attempts=2",
    )
    assert_audited(run, max_lag=1, steps=12)
    last = run.metrics[-1]
    if policy == "refill":
        assert last["queue/expired"] > 0
    else:
        assert last["queue/expired"] > 0 or any(r["staleness/masked_tokens_fraction"] > 0 for r in run.metrics)


@pytest.mark.slow
def test_a_rolling_publish_keeps_the_fleet_generating(start):
    # training waits for generation, and a publish of many small buckets takes as long as some tokens do
    busy = "batch.group_size=16", "rollout.torch.num_slots=1", "weights.bucket_bytes=4096"
    run = start(*SMALL, *busy, "run.max_steps=6", "weights.rolling=true", "rollout.num_replicas=3")
    assert_audited(run, max_lag=2, steps=6)
    published = run.metrics[1:]  # a step's publish goes on beside the next one
    assert all(r["weights/replicas"] == 3 for r in published)
    assert all(r["weights/attempts"] >= 3 for r in published), "one transfer for each replica"
    assert any(r["weights/publish_tokens_fraction"] > 0 for r in run.metrics)


@pytest.mark.slow
def test_publishes_beside_training_and_a_replica_that_is_killed_meanwhile(start):
    run = start(*SMALL, "run.max_steps=12", "weights.overlap=true", "weights.bucket_bytes=4096")
    run.wait_for_step(3)
    psutil.Process(run.actor_pids("Replica")[0]).kill()
    assert_audited(run, max_lag=2, steps=12)
    assert any(e["event"] == "replica_failed" for e in run.events)
    versions = [e["version"] for e in run.events if e["event"] == "publish"]
    assert sorted(set(versions)) == list(range(13))


@pytest.mark.slow
def test_partial_trajectories_and_sinks_survive_a_signal(start, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    slow = (*SMALL, "rollout.environment=tests.e2e.faulty:Straggles", "observability.sinks=[wandb,tensorboard]")
    run = start(*slow, "run.max_steps=2000")
    run.wait_for_step(3)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait(150) == 143, run.log
    step = run.metrics[-1]["step"]
    kept = load_partials(run.directory / "checkpoints" / f"step_{step}" / "queue")
    assert kept, "stragglers were being generated"
    versions = {
        group.ticket.ordinal: min(s.version for t in group.trajectories for c in t.calls for s in c.segments)
        for group in kept
        if any(t.calls for t in group.trajectories)
    }
    assert versions
    again = start(*slow, f"run.max_steps={step + 4}", "resume=auto")
    assert_audited(again, max_lag=2, steps=step + 4)
    events = again.events
    resumed = max(i for i, e in enumerate(events) if e["event"] == "resume")
    ready = {e["ordinal"]: e for e in events[resumed:] if e["event"] == "group" and e["transition"] == "ready"}
    oldest = {ordinal: ready[ordinal]["oldest_version"] for ordinal in versions}
    assert oldest == versions, "they went on from the tokens that they had"
    assert min(oldest.values()) < step, "which would be newer if they had begun anew"
    assert "Traceback" not in again.log, "of both calls"
    assert {r["sinks/failed_records"] for r in again.metrics} == {0}
    logs = sorted(run.directory.glob("wandb/offline-run-*/*.wandb"), key=lambda log: log.stat().st_mtime)
    rows = {row["step"]: row for log in logs for row in history_of(log) if "train/loss" in row}
    assert len(logs) == 2
    assert list(rows) == [record["step"] for record in again.metrics]
    for record in again.metrics:
        assert {key: rows[record["step"]][key] for key in record} == record
    assert len(list(run.directory.glob("tensorboard/events.*"))) == 2
