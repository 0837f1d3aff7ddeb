"""Damage to a checkpoint is found, whatever file it is in, and a run goes on from the newest intact one."""

import logging
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.checkpoint.digests import FileDigest, seal, verify
from asyncrl.checkpoint.run_directory import RunDirectory
from asyncrl.checkpoint.store import CheckpointStore, RunState
from asyncrl.errors import StorageError


def save(store, step):
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
    return save(CheckpointStore(tmp_path_factory.mktemp("run"), keep=2), 7)


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
    paths = {step: save(store, step) for step in (2, 4, 6, 8)}
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
    again = save(store, 6)
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
    save(store, 2)
    intact = save(store, 4)
    for _ in range(2):  # before the directory is locked, and after
        assert run.resolve_resume("auto", 2, "command") == intact
        assert run.resolve_resume(str(intact), 2, "command") == intact
    assert store.set_aside_corrupt(intact) == []
    assert read == ["step_4"]
    save(store, 4)  # by another process, meanwhile
    assert run.resolve_resume("auto", 2, "command") == intact
    assert read == ["step_4"] * 2


def test_what_cannot_be_looked_at_is_no_reason_to_stop(tmp_path):
    run = RunDirectory(tmp_path)
    store = CheckpointStore(run.checkpoints, keep=2)
    intact = save(store, 2)
    (intact / "trainer" / "gone").symlink_to(tmp_path / "nowhere")
    assert run.resolve_resume("auto", 2, "command") == intact


def test_a_file_that_was_written_elsewhere_or_cut_short_makes_no_checkpoint(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    whole = save(store, 2)
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
        shutil.rmtree(save(store, step) / "queue")
    with pytest.raises(StorageError, match=r"step_4: queue/empty is missing; step_2: queue/empty is missing"):
        store.latest()
