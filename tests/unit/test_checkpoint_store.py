import json
import logging
import re
import shutil
from datetime import date, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.checkpoint.digests import FileDigest, seal, verify
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


# -- damage is found, whatever file it is in, and a run goes on from the newest intact one -----------------------------


def save_files(store, step):
    temporary = store.begin(step)
    (temporary / "trainer").mkdir()
    (temporary / "trainer" / ".metadata").write_bytes(bytes(range(40)))
    (temporary / "trainer" / "__0_0.distcp").write_bytes(b"weights" * 9)
    (temporary / "queue").mkdir()
    (temporary / "queue" / "empty").touch()
    (temporary / "queue" / "ledger.json").write_text('{"next_ordinal": 3}')
    return store.finish(temporary, RunState(step, 1.5, 4, 2, 1, 0, True, "digest"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_files(CheckpointStore(tmp_path_factory.mktemp("run"), keep=2), 7)


def files(checkpoint):
    return sorted(p for p in checkpoint.rglob("*") if p.is_file())


def test_what_was_written_is_intact_and_every_file_is_listed(checkpoint):
    assert verify(checkpoint) is None
    listing = (checkpoint / "files.json").read_text()
    names = [p.relative_to(checkpoint).as_posix() for p in files(checkpoint)]
    assert len(names) == 6
    assert [name for name in names if f'"{name}"' not in listing] == ["files.json"]
    (checkpoint / "notes.txt").write_text("somebody's")  # no damage
    assert verify(checkpoint) is None
    (checkpoint / "notes.txt").unlink()


def test_every_truncation_of_every_file_is_found(checkpoint):
    for path in files(checkpoint):
        content = path.read_bytes()
        name = path.relative_to(checkpoint).as_posix()
        for size in range(len(content)):
            path.write_bytes(content[:size])
            assert name in (verify(checkpoint) or "nothing"), size
        path.write_bytes(content + b"\n")
        assert name in (verify(checkpoint) or "nothing")
        path.unlink()
        assert verify(checkpoint) == f"{name} is missing"
        path.write_bytes(content)
    assert verify(checkpoint) is None


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_changed_bytes_of_any_file_are_found(checkpoint, data):
    path = data.draw(st.sampled_from([p for p in files(checkpoint) if p.stat().st_size]))
    content = path.read_bytes()
    at = data.draw(st.integers(0, len(content) - 1))
    changed = bytearray(content)
    changed[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(changed)
    try:
        assert verify(checkpoint) is not None
    finally:
        path.write_bytes(content)


def test_every_flipped_bit_of_the_listing_is_found(checkpoint):
    path = checkpoint / "files.json"
    content = path.read_bytes()
    unseen = []
    for at in range(len(content)):
        for bit in range(8):
            changed = bytearray(content)
            changed[at] ^= 1 << bit
            path.write_bytes(changed)
            if verify(checkpoint) is None:
                unseen.append((at, bit))
    path.write_bytes(content)
    assert not unseen
    path.write_bytes(content.replace(b"\n", b"\r\n"))  # the same text to a reader of text
    assert verify(checkpoint) is not None
    path.write_bytes(content)


@pytest.mark.parametrize("content", [b"[]", b"3", b'{"a": 1}', b'{"a": {}}', b'{"..": {"bytes": 0}}'])
def test_a_listing_that_is_no_listing_is_damage(tmp_path, content):
    (tmp_path / "files.json").write_bytes(content)
    assert verify(tmp_path) == "files.json is not as it was written"


def test_exchanged_files_are_found(tmp_path):
    (tmp_path / "a").write_text("one")
    (tmp_path / "b").write_text("two")
    seal(tmp_path)
    assert verify(tmp_path) is None
    (tmp_path / "a").write_text("two")
    (tmp_path / "b").write_text("one")
    assert verify(tmp_path) == "a has other content than was written"


def test_the_newest_intact_checkpoint_is_used_and_damaged_ones_are_named_and_set_aside(tmp_path, caplog):
    store = CheckpointStore(tmp_path, keep=4)
    paths = {step: save_files(store, step) for step in (2, 4, 6, 8)}
    (paths[8] / "files.json").unlink()  # as one that was written before there were listings
    (paths[6] / "trainer" / "__0_0.distcp").write_bytes(b"weights" * 8)
    with caplog.at_level(logging.WARNING, logger="asyncrl.checkpoint.store"):
        assert store.latest() == paths[4]
    assert ["step_8" in m and "files.json" in m for m in caplog.messages] == [True, False]
    assert "trainer/__0_0.distcp has 56 bytes of 63" in caplog.messages[1]
    assert [p.name for p in store.all()] == ["step_2", "step_4", "step_6", "step_8"]  # looking changes nothing
    assert [p.name for p in store.set_aside_corrupt(paths[4])] == ["corrupt_step_8", "corrupt_step_6"]
    assert [p.name for p in store.all()] == ["step_2", "step_4"]
    assert store.latest() == paths[4]
    assert store.set_aside_corrupt(paths[2]) == []  # an older one was asked for: newer intact ones stay
    again = save_files(store, 6)
    (again / "state.json").write_text("{}")
    store.set_aside_corrupt(paths[4])  # in place of the earlier one of that name
    assert (tmp_path / "corrupt_step_6" / "state.json").read_text() == "{}"


def test_a_resume_reads_an_intact_checkpoint_once(tmp_path, monkeypatch):
    read = []

    def counted(path):
        read.append(path.name)
        return verify(path)

    for place in ("store", "digests"):
        monkeypatch.setattr(f"asyncrl.checkpoint.{place}.verify", counted)
    run = RunDirectory(tmp_path)
    store = CheckpointStore(run.checkpoints, keep=2)
    save_files(store, 2)
    intact = save_files(store, 4)
    for _ in range(2):  # before the directory is locked, and after
        assert run.resolve_resume("auto", 2, "command") == intact
        assert run.resolve_resume(str(intact), 2, "command") == intact
    assert store.set_aside_corrupt(intact) == []
    assert read == ["step_4"]
    save_files(store, 4)  # by another process, meanwhile
    assert run.resolve_resume("auto", 2, "command") == intact
    assert read == ["step_4"] * 2


def test_what_cannot_be_looked_at_is_no_reason_to_stop(tmp_path):
    run = RunDirectory(tmp_path)
    store = CheckpointStore(run.checkpoints, keep=2)
    intact = save_files(store, 2)
    (intact / "trainer" / "gone").symlink_to(tmp_path / "nowhere")
    assert run.resolve_resume("auto", 2, "command") == intact


def test_a_file_that_was_written_elsewhere_or_cut_short_makes_no_checkpoint(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    whole = save_files(store, 2)
    of_rank = FileDigest.of(whole / "trainer" / "__0_0.distcp")
    state = RunState(4, 1.5, 4, 2, 1, 0, True, "digest")

    def begun():
        temporary = store.begin(4)
        (temporary / "trainer").mkdir()
        (temporary / "trainer" / "__0_0.distcp").write_bytes(b"weights" * 9)
        return temporary

    with pytest.raises(StorageError, match=r"wrote trainer/__1_0\.distcp, and it is not here: .* does not share"):
        store.finish(begun(), state, written={"trainer/__0_0.distcp": of_rank, "trainer/__1_0.distcp": of_rank})
    short = begun()
    (short / "trainer" / "__0_0.distcp").write_bytes(b"weights")
    with pytest.raises(StorageError, match=r"trainer/__0_0\.distcp has 7 bytes here, and 63 where it was written"):
        store.finish(short, state, written={"trainer/__0_0.distcp": of_rank})
    assert store.latest() == whole
    flipped = begun()  # after the rank has read it: found when it is resumed from
    (flipped / "trainer" / "__0_0.distcp").write_bytes(b"weighty" * 9)
    store.finish(flipped, state, written={"trainer/__0_0.distcp": of_rank})
    assert store.latest() == whole


def test_a_run_does_not_silently_begin_anew_when_all_checkpoints_are_damaged(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    assert store.latest() is None
    for step in (2, 4):
        shutil.rmtree(save_files(store, step) / "queue")
    with pytest.raises(StorageError, match=r"step_4: queue/empty is missing; step_2: queue/empty is missing"):
        store.latest()
