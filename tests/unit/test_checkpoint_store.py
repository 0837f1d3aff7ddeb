import json
import re
from datetime import date, timedelta

import pytest

from asyncrl.checkpoint.locate import date_of, find_checkpoint
from asyncrl.checkpoint.run_directory import RunDirectory
from asyncrl.checkpoint.store import FORMAT, CheckpointStore, RunState, check_resumable, read_state, render_state
from asyncrl.config.load import load
from asyncrl.errors import ConfigError, StorageError
from asyncrl.types.guard import GuardState
from tests.make import QUICKSTART, quickstart


def save(store, step, recipe=None):
    temporary = store.begin(step)
    (temporary / "part").write_text(str(step))
    state = RunState.of(recipe or quickstart(), "digest", global_steps=step, elapsed_s=1.5)
    return store.finish(temporary, state)


def test_the_newest_are_kept_and_an_unfinished_one_is_invisible(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    for step in (2, 4, 10):
        save(store, step)
    store.begin(12)
    assert [p.name for p in store.all()] == ["step_4", "step_10"]
    assert store.latest() == tmp_path / "step_10"
    assert read_state(tmp_path / "step_10").global_steps == 10


def test_the_same_step_can_be_saved_again(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    save(store, 3)
    save(store, 4)
    inode = save(store, 4).stat().st_ino
    assert store.latest().stat().st_ino == inode
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_3", "step_4"]


def test_going_on_from_an_older_checkpoint_sets_the_later_ones_aside(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    for step in (20, 30):
        save(store, step)
    store.set_aside_after(20)
    save(store, 25)
    assert [p.name for p in store.all()] == ["step_20", "step_25"]
    assert (tmp_path / "abandoned_step_30" / "part").read_text() == "30"


def test_what_the_ledger_depends_on_cannot_change_on_resume(tmp_path):
    path = save(CheckpointStore(tmp_path, keep=2), 5)
    check_resumable(quickstart("run.max_steps=500", "trainer.lr=1e-3"), "digest", path)
    with pytest.raises(ConfigError, match=r"run\.seed"):
        check_resumable(quickstart("run.seed=7"), "digest", path)
    with pytest.raises(ConfigError, match=r"staleness\.max_lag"):
        check_resumable(quickstart("mode=sync"), "digest", path)
    with pytest.raises(ConfigError, match="rendered prompts"):
        check_resumable(quickstart(), "other rows", path)


def test_a_run_whose_groups_have_branches_goes_on_with_them(tmp_path):
    every = ["rollout.agent.train=all_branches"]
    path = save(CheckpointStore(tmp_path, keep=2), 3, quickstart(*every))
    check_resumable(quickstart(*every), "digest", path)
    with pytest.raises(ConfigError, match=r"train=last_branch(?s:.*)may have branches"):
        check_resumable(quickstart("rollout.agent.train=last_branch"), "digest", path)
    check_resumable(quickstart(), "digest", path)
    without = save(CheckpointStore(tmp_path, keep=2), 4, quickstart("rollout.agent.train=last_branch"))
    check_resumable(quickstart(*every), "digest", without)


def test_ready_groups_that_lack_what_the_recipe_trains_with_are_refused(tmp_path):
    teacher = ["teacher.path=t", "algorithm.distillation.coefficient=1", "algorithm.dynamic_sampling=false"]
    top = [*teacher, "algorithm.distillation.top_k=8"]
    path = save(CheckpointStore(tmp_path, keep=2), 3, quickstart(*top))
    for keys in (top, teacher, []):
        check_resumable(quickstart(*keys), "digest", path)
    with pytest.raises(ConfigError, match="without top_k=9"):
        check_resumable(quickstart(*teacher, "algorithm.distillation.top_k=9"), "digest", path)


STATE = json.loads(render_state(RunState(3, 1.5, 4, 2, 1, 0, True, "digest")))


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (None, "No such file"),
        ("{torn", "not a complete checkpoint"),
        ("[" * 100_000, "not a complete checkpoint"),
        ("3", "state.json is a int"),
        ("{}", "its format is unknown"),
        (STATE | {"format": FORMAT + 1}, f"its format is {FORMAT + 1}; this asyncrl reads {FORMAT}"),
        ({k: v for k, v in STATE.items() if k != "seed"}, "state.json.seed is missing"),
        (STATE | {"global_steps": "three"}, "state.json.global_steps is a str"),
        (STATE | {"shuffle": 1}, "state.json.shuffle is a int"),
    ],
)
def test_what_is_not_a_checkpoint_is_named(tmp_path, content, found):
    if content is not None:
        (tmp_path / "state.json").write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ConfigError, match=re.escape(found)):
        read_state(tmp_path)


@pytest.mark.parametrize("guard", [None, GuardState(3, is_raised=True, healthy_steps=4, failed_trials=1)])
def test_the_state_of_the_guard_is_kept_and_older_checkpoints_have_none(tmp_path, guard):
    state = RunState(3, 1.5, 4, 2, 1, 0, True, "digest", guard)
    (tmp_path / "state.json").write_text(render_state(state))
    assert read_state(tmp_path) == state
    (tmp_path / "state.json").write_text(json.dumps({k: v for k, v in STATE.items() if k != "guard"}))
    assert read_state(tmp_path).guard is None


def test_a_directory_that_holds_a_run_is_refused_or_resumed(tmp_path):
    directory = RunDirectory(tmp_path)
    assert directory.resolve_resume("never", 2, "command") is None
    loaded = load(QUICKSTART, [])
    directory.write_config(loaded.recipe, loaded.written, "name")
    with pytest.raises(ConfigError, match="command resume=auto"):
        directory.resolve_resume("never", 2, "command")
    assert directory.resolve_resume("auto", 2, "command") is None
    saved = save(CheckpointStore(directory.checkpoints, 2), 4)
    assert directory.resolve_resume("auto", 2, "command") == saved
    assert directory.resolve_resume(str(saved), 2, "command") == saved
    (saved / "part").write_text("5")
    with pytest.raises(ConfigError, match="step_4") as refused:
        directory.resolve_resume("never", 2, "command")  # a new run is refused whatever the checkpoint is worth
    assert "resume=auto" in str(refused.value)
    with pytest.raises(ConfigError, match="part has other content"):
        directory.resolve_resume(str(saved), 2, "command")
    with pytest.raises(StorageError, match="step_4: part has other content"):
        directory.resolve_resume("auto", 2, "command")
    with pytest.raises(ConfigError, match=r"files\.json is missing"):
        directory.resolve_resume(str(tmp_path / "absent"), 2, "command")
    assert sorted(p.name for p in directory.checkpoints.iterdir()) == ["step_4"]  # nothing was written


def test_a_resumed_run_keeps_the_date_of_its_templates_and_a_new_one_has_todays(tmp_path):
    directory = RunDirectory(tmp_path)
    today = date_of(None)
    assert abs(date.fromisoformat(today) - date.today()) <= timedelta(1)
    loaded = load(QUICKSTART, ["model.date=2020-02-03"])
    saved = save(CheckpointStore(directory.checkpoints, 2), 4)
    for written in ("2020-02-03", None):  # a recipe may leave the date to the run
        loaded.written["model"]["date"] = written
        directory.write_config(loaded.recipe, loaded.written, "name")
        assert date_of(saved) == "2020-02-03"
        assert find_checkpoint(str(tmp_path)).recipe["model"]["date"] == "2020-02-03", "an evaluation asks as it did"
    for damaged in ("no JSON", "[]", "{}"):
        directory.config.write_text(damaged)
        assert date_of(saved) == today


@pytest.mark.parametrize("trained", ["nothing", "a step", "a checkpoint"])
def test_a_directory_in_which_nothing_was_trained_takes_another_run(tmp_path, trained):
    directory = RunDirectory(tmp_path)
    directory.config.write_text("{}")
    directory.metrics.write_text("" if trained == "nothing" else "{}\n")
    if trained == "a checkpoint":
        directory.metrics.unlink()
        (directory.checkpoints / "step_1").mkdir(parents=True)
        (directory.checkpoints / "step_1" / "state.json").write_text("{}")
    assert directory.disown() is (trained == "nothing")
    assert directory.config.exists() is (trained != "nothing")
