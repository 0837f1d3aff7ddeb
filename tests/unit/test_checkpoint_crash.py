"""A process that is killed while it writes a checkpoint, and a disk that is full: what was there before stays."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.checkpoint.digests import verify
from asyncrl.checkpoint.store import CheckpointStore, RunState, read_state
from asyncrl.errors import StorageError
from tests.make import ROOT

CALLS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "os.listdir", "shutil.rmtree")
"""Audit events of what touches the disk; a flush opens its file first."""


def save(directory, step, content, keep=2):
    store = CheckpointStore(directory, keep)
    temporary = store.begin(step)
    for part in ("trainer", "queue"):
        (temporary / part).mkdir()
        (temporary / part / "file").write_text(content)
    return store.finish(temporary, RunState(step, 1.5, 4, 2, 1, 0, True, "digest"))


def save_and_die(directory, step, content, keep, calls):
    """In a child process that is killed when it makes its `calls`-th call to the disk; True: it came to the end."""
    if (child := os.fork()) == 0:
        left = calls

        def count(event, _):
            nonlocal left
            if event in CALLS:
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        save(directory, step, content, keep)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert os.WIFEXITED(status) or os.WTERMSIG(status) == signal.SIGKILL
    return os.WIFEXITED(status)


def kill_everywhere(root, step, keep):
    """Kills the saving of `step`, over checkpoints of steps 2 and 4, at every call; returns how many there were."""
    ended, calls = False, 0
    while not ended:
        calls += 1
        directory = root / "checkpoints"
        shutil.rmtree(directory, ignore_errors=True)
        for before in (2, 4):
            save(directory, before, f"first {before}", keep)
        CheckpointStore(directory, keep).begin(5)  # an earlier crash
        ended = save_and_die(directory, step, "second", keep, calls)
        latest = CheckpointStore(directory, keep).latest()
        assert latest is not None, calls
        assert verify(latest) is None
        found = read_state(latest).global_steps, (latest / "trainer" / "file").read_text()
        assert found in ((4, "first 4"), (step, "second")), (calls, found)
        assert found[1] == "second" or not ended
        for path in CheckpointStore(directory, keep).all():
            assert verify(path) is None, (calls, path)
        after = save(directory, 8, "third", keep)
        assert CheckpointStore(directory, keep).latest() == after
        assert not list(directory.glob(".*"))
        assert len(list(directory.iterdir())) <= keep
    return calls


def fill(directory):
    """Saves where the disk ends early; returns what was left afterwards."""
    store = CheckpointStore(directory, 2)
    save(directory, 2, "first")
    temporary = store.begin(4)
    with pytest.raises(OSError, match=r"too large|No space"):
        (temporary / "part").write_bytes(bytes(1 << 20))
    store.discard(temporary)
    store.discard(temporary)
    assert sorted(p.name for p in directory.iterdir()) == ["step_2"]
    temporary = store.begin(4)
    for number in range(3000):  # until there is no room for what `finish` adds: a listing of all these
        try:
            (temporary / f"part{number}").write_bytes(b"x")
        except OSError:
            break
    with pytest.raises(StorageError, match="step_4"):
        store.finish(temporary, RunState(4, 1.5, 4, 2, 1, 0, True, "digest"))
    assert sorted(p.name for p in directory.iterdir()) == ["step_2"]
    assert store.latest() == directory / "step_2"
    return save(directory, 6, "again").name


def main(what, directory, step="6", keep="2"):
    if what == "kill":
        return {"calls": kill_everywhere(Path(directory), int(step), int(keep))}
    if what == "limit":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    return {"saved": fill(Path(directory))}


def run(*words, before=""):
    call = f"{before} exec {sys.executable} -m {__name__} {' '.join(words)}"
    words = ["sh", "-c", call] if not before else ["unshare", "--mount", "--map-root-user", "sh", "-c", call]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, cwd=ROOT)


@pytest.mark.parametrize(("step", "keep"), [("6", "2"), ("6", "1"), ("4", "2"), ("4", "1")])
def test_a_kill_at_any_moment_leaves_an_intact_checkpoint(tmp_path, step, keep):
    done = run("kill", str(tmp_path), step, keep)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["calls"] > 20


def test_a_write_that_fails_removes_itself_and_nothing_else(tmp_path):
    done = run("limit", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"saved": "step_6"}


def test_a_full_disk_removes_what_was_being_written_and_nothing_else(tmp_path):
    mount = f"mount -t tmpfs -o size=256k none {tmp_path}"  # seen by the child alone, and gone with it
    if subprocess.run(["unshare", "--mount", "--map-root-user", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("no right to mount a small file system here")
    done = run("full", str(tmp_path), before=f"{mount} &&")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"saved": "step_6"}
    assert not list(tmp_path.iterdir())


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(*sys.argv[1:])))
