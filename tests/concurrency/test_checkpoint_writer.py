"""Checkpoints in the background: training waits for the capture only, failures are counted, the last one must be good.

The store is real; queue, trainers and rollouter are scripted.
"""

import asyncio
from types import SimpleNamespace

import pytest

from asyncrl.checkpoint.digests import FileDigest
from asyncrl.checkpoint.store import CheckpointStore, RunState
from asyncrl.config.run import CheckpointConfig
from asyncrl.driver.checkpoint_writer import CheckpointWriter
from asyncrl.errors import DeadlineExceeded, Process, ProcessDied, StorageError
from asyncrl_testing.local import LocalActor
from tests.waiting import until


class Part:
    """`writing`: set while a save is under way. `go`: lets saves end. `errors`: what the next ones raise."""

    def __init__(self):
        self.captured, self.errors = [], []
        self.go, self.writing = asyncio.Event(), asyncio.Event()
        self.go.set()
        self.silent = None

    async def partials(self, timeout_s):
        return []

    async def capture(self, *args):
        self.captured.append(args)

    async def save(self, directory, timeout_s=None):
        self.writing.set()
        await self.go.wait()
        self.writing.clear()
        if self.errors:
            raise self.errors.pop(0)
        directory.mkdir(parents=True)
        (directory / "state").write_text("state")
        return {"state": FileDigest.of(directory / "state")}

    async def ping(self, timeout_s=None):
        if self.silent is not None:
            raise self.silent
        return 0.0


class Rig:
    def __init__(self, path, **settings):
        self.store = CheckpointStore(path, keep=2)
        self.queue, self.trainers, self.events = Part(), Part(), []
        log = SimpleNamespace(write=lambda event: self.events.append((event.kind, event.step)))
        parts = SimpleNamespace(
            checkpoints=self.store, rollouter=Part(), queue=LocalActor(self.queue), trainers=self.trainers, events=log
        )
        self.writer = CheckpointWriter(CheckpointConfig(**settings), parts)

    async def save(self, step):
        async with asyncio.timeout(20):
            await self.writer.save(state(step))

    async def settled(self, step):
        await self.save(step)
        await self.writer.settle()

    def saved(self):
        return [path.name for path in self.store.all()]


def state(step):
    return RunState(step, 1.0, 4, 4, 2, 0, True, "digest")


async def test_training_goes_on_while_a_checkpoint_is_written_and_the_next_one_waits_for_it(tmp_path):
    rig = Rig(tmp_path)
    rig.trainers.go.clear()
    await rig.save(2)
    await asyncio.wait_for(rig.trainers.writing.wait(), 20)
    assert rig.saved() == []
    second = asyncio.create_task(rig.save(4))
    await asyncio.sleep(0.05)
    assert not second.done()
    assert len(rig.trainers.captured) == 1, "the copy of the first one is still being written"
    rig.trainers.go.set()
    await asyncio.wait_for(second, 20)
    await rig.writer.settle()
    assert rig.saved() == ["step_2", "step_4"]
    assert rig.events == [("checkpoint", 2), ("checkpoint", 4)]


async def test_in_the_foreground_it_is_there_when_save_returns(tmp_path):
    rig = Rig(tmp_path, background=False)
    await rig.save(2)
    assert rig.saved() == ["step_2"]


async def test_failures_are_counted_and_too_many_in_a_row_end_the_run(tmp_path):
    rig = Rig(tmp_path, max_failures=1)
    rig.trainers.errors = [OSError(28, "No space left")]
    await rig.settled(2)
    assert (rig.saved(), rig.events) == ([], [("checkpoint_failed", 2)])
    assert list(tmp_path.iterdir()) == [], "nothing half-written stays"
    await rig.settled(4)  # a good one in between begins the count anew
    rig.trainers.errors = [OSError(28, "No space left")]
    await rig.settled(6)
    rig.queue.errors = [OSError(28, "No space left")]
    await rig.save(8)
    with pytest.raises(StorageError, match=r"(?s)step 8.*2 time.*No space left.*max_failures"):
        await rig.writer.settle()
    with pytest.raises(StorageError):
        await asyncio.wait_for(asyncio.shield(rig.writer.failed), 20)
    assert rig.saved() == ["step_4"]


async def test_the_last_one_must_not_fail_and_is_not_written_twice(tmp_path):
    rig = Rig(tmp_path, max_failures=5)
    await rig.save(2)
    await rig.writer.last(state(2))
    assert rig.events == [("checkpoint", 2)]
    rig.trainers.errors = [OSError(28, "No space left")]
    with pytest.raises(StorageError):
        await rig.writer.last(state(3))


async def test_a_last_one_of_a_step_that_failed_to_be_saved_is_tried_again(tmp_path):
    rig = Rig(tmp_path, max_failures=5)
    rig.trainers.errors = [OSError(28, "No space left")]
    await rig.settled(2)
    await rig.writer.last(state(2))
    assert rig.saved() == ["step_2"]


@pytest.mark.parametrize("kind", [ProcessDied, DeadlineExceeded])
@pytest.mark.parametrize("is_late", [False, True])
async def test_the_loss_of_a_process_is_not_a_failed_checkpoint(tmp_path, kind, is_late):
    """The save fails by it, or is late and the process does not answer when it is asked."""
    rig = Rig(tmp_path, max_failures=5, timeout_s=0.1 if is_late else 60)
    lost = kind("gone").of(Process("trainer rank", 1))
    if is_late:
        rig.trainers.go.clear()
        rig.trainers.silent = lost
    else:
        rig.trainers.errors = [lost]
    await rig.save(2)
    with pytest.raises(kind) as caught:
        await asyncio.wait_for(asyncio.shield(rig.writer.failed), 20)
    assert str(caught.value.process) == "trainer rank 1"
    assert rig.events == []
    with pytest.raises(kind):
        await rig.writer.settle()


async def test_one_that_is_late_counts_as_failed_and_goes_on_while_the_processes_answer(tmp_path):
    rig = Rig(tmp_path, max_failures=3, timeout_s=0.1)
    rig.trainers.go.clear()
    await rig.save(2)
    await until(lambda: len(rig.events) >= 2)
    rig.trainers.go.set()
    await rig.writer.settle()
    assert rig.events == [("checkpoint_late", 2), ("checkpoint_late", 2), ("checkpoint", 2)]
    assert rig.saved() == ["step_2"]
    assert not rig.writer.failed.done()


async def test_one_that_stays_late_ends_the_run_and_never_restarts_it(tmp_path):
    rig = Rig(tmp_path, max_failures=1, timeout_s=0.1)
    rig.trainers.go.clear()
    await rig.save(2)
    with pytest.raises(StorageError, match=r"(?s)step 2.*2 time.*within 0.1 s.*go on writing.*timeout_s"):
        await asyncio.wait_for(asyncio.shield(rig.writer.failed), 20)
    assert rig.saved() == []


@pytest.mark.parametrize("answers", [True, False])
async def test_one_that_is_written_while_the_processes_are_asked_is_good(tmp_path, answers):
    rig = Rig(tmp_path, max_failures=0, timeout_s=0.1)
    rig.trainers.go.clear()

    async def ping(timeout_s):
        rig.trainers.go.set()
        await asyncio.sleep(0.2)
        if not answers:
            raise DeadlineExceeded("late").of(Process("trainer rank", 1))
        return 0.0

    rig.trainers.ping = ping
    await rig.settled(2)
    assert (rig.events, rig.saved()) == ([("checkpoint", 2)], ["step_2"])


async def test_a_failure_of_the_one_before_does_not_count_for_the_last_one(tmp_path):
    rig = Rig(tmp_path, max_failures=1)
    rig.trainers.go.clear()
    await rig.save(2)
    rig.trainers.errors = [OSError(28, "No space left")]
    rig.trainers.go.set()
    await rig.writer.last(state(3))
    assert rig.saved() == ["step_3"]


async def test_close_gives_the_write_up(tmp_path):
    rig = Rig(tmp_path)
    rig.trainers.go.clear()
    await rig.save(2)
    await asyncio.wait_for(rig.trainers.writing.wait(), 20)
    async with asyncio.timeout(20):
        await rig.writer.close()
    assert list(tmp_path.iterdir()) == []
