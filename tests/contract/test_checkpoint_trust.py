"""Checkpoints that somebody made to harm: nothing in them runs, and each is refused in words."""

import io
import json
import os
import pickle
import shutil
from dataclasses import asdict

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
)
from transformers import Qwen3Config

from asyncrl.checkpoint.digests import seal
from asyncrl.checkpoint.store import RunState, render_state
from asyncrl.commands.export import main
from asyncrl.config.model import ModelConfig
from asyncrl.errors import ConfigError
from asyncrl.queue.ledger import LedgerSnapshot
from asyncrl.queue.saved_state import SavedState, load_state, save_state
from asyncrl.trainer.fsdp.sharded_state import save
from asyncrl.trainer.fsdp.stored_state import StoredState
from asyncrl.trainer.fsdp.training_state import FsdpCheckpoint
from asyncrl.types import LedgerCounts

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

WEIGHTS = {"model.a": torch.arange(12.0).reshape(3, 4), "model.b": torch.ones(5, dtype=torch.bfloat16)}


class Harm:
    """Unpickled without restriction, it makes the file."""

    def __init__(self, file):
        self.command = f"touch {file}"

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.fixture
def trainer(tmp_path):
    save(tmp_path / "trainer", dict(WEIGHTS), None)
    return tmp_path / "trainer"


def forge(trainer, change):
    """Changes the metadata as its writer would have written it."""
    metadata = dcp.FileSystemReader(trainer).read_metadata()
    change(metadata)
    (trainer / ".metadata").write_bytes(pickle.dumps(metadata))


def read(trainer):
    Qwen3Config(vocab_size=8, hidden_size=8, num_hidden_layers=1).save_pretrained(trainer.parent / "model")
    return dict(FsdpCheckpoint(trainer).weights(ModelConfig(path=str(trainer.parent / "model"))))


def test_an_honest_one_is_read(trainer):
    found = read(trainer)
    assert list(found) == ["a", "b"]
    assert all(torch.equal(found[name.removeprefix("model.")], tensor) for name, tensor in WEIGHTS.items())


@pytest.mark.parametrize(
    "place",
    [
        lambda harm: harm,
        lambda harm: {"a": [harm]},
        lambda harm: StorageMeta(checkpoint_id=harm),
        lambda harm: MetadataIndex(harm),
    ],
)
def test_a_command_in_the_metadata_does_not_run_and_is_named(trainer, tmp_path, place):
    (trainer / ".metadata").write_bytes(pickle.dumps(place(Harm(tmp_path / "harmed"))))
    with pytest.raises(ConfigError, match=r"found: \.metadata names posix\.system, which no checkpoint needs\ndo: "):
        read(trainer)
    assert not (tmp_path / "harmed").exists()
    pickle.loads((trainer / ".metadata").read_bytes())  # the command is one
    assert (tmp_path / "harmed").exists()


def test_names_that_only_lead_to_code_are_refused(trainer):
    for name in ("builtins.eval", "torch.load", "torch.os", "asyncrl.commands.export.main", "copyreg._reconstructor"):
        module, _, attribute = name.rpartition(".")
        code = b"\x80\x04" + b"".join(b"\x8c%c" % len(w) + w.encode() for w in (module, attribute)) + b"\x93."
        (trainer / ".metadata").write_bytes(code)
        with pytest.raises(ConfigError, match=f"names {name}, which"):
            read(trainer)


def with_harm(trainer, file):
    """Adds a command to the data of the checkpoint; its place there, and its bytes."""
    content = io.BytesIO()
    torch.save(Harm(file), content)
    data = trainer / "__0_0.distcp"
    size = data.stat().st_size
    data.write_bytes(data.read_bytes() + content.getvalue())
    return size, content.getvalue()


def test_an_entry_that_torch_would_unpickle_freely_is_refused(trainer, tmp_path):
    """The planner of torch loads entries that are no tensors with weights_only=False."""
    size, content = with_harm(trainer, tmp_path / "harmed")

    def change(metadata):
        metadata.state_dict_metadata["model.a"] = BytesStorageMetadata()
        [place] = [p for index, p in metadata.storage_data.items() if index.fqn == "model.b"]
        place.offset, place.length = size, len(content)
        metadata.storage_data = {MetadataIndex("model.a", torch.Size([]), 0): place}
        metadata.storage_data[MetadataIndex("model.a")] = place

    forge(trainer, change)
    with pytest.raises(ConfigError, match="BytesStorageMetadata where TensorStorageMetadata is due"):
        read(trainer)
    assert not (tmp_path / "harmed").exists()
    dcp.load({"model.a": 0}, checkpoint_id=trainer, no_dist=True)  # so it would have gone
    assert (tmp_path / "harmed").exists()


def test_a_command_in_the_place_of_a_tensor_does_not_run(trainer, tmp_path):
    size, content = with_harm(trainer, tmp_path / "harmed")

    def change(metadata):
        for place in metadata.storage_data.values():
            place.offset, place.length = size, len(content)

    forge(trainer, change)
    with pytest.raises(ConfigError, match="rank 0: UnpicklingError: Weights only load failed"):
        read(trainer)
    assert not (tmp_path / "harmed").exists()
    torch.load(io.BytesIO(content), weights_only=False)
    assert (tmp_path / "harmed").exists()


def places(metadata):
    return list(metadata.storage_data.values())


def huge(metadata):
    entry = metadata.state_dict_metadata["model.a"]
    entry.size = torch.Size([1 << 40, 1 << 20])
    entry.chunks = [ChunkStorageMetadata(torch.Size([0, 0]), entry.size)]


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda m: setattr(places(m)[0], "relative_path", "../../secret"), "is no file beside it"),
        (lambda m: setattr(places(m)[0], "relative_path", "/etc/passwd"), "is no file beside it"),
        (lambda m: setattr(places(m)[0], "relative_path", "gone"), "No such file"),
        (lambda m: setattr(places(m)[0], "transform_descriptors", ["stream.zstd/1"]), "is compressed"),
        (lambda m: setattr(places(m)[0], "length", 1 << 50), "has no"),
        (lambda m: setattr(places(m)[0], "offset", -1), "has no"),
        (lambda m: setattr(places(m)[0], "offset", "0"), "a str where int is due"),
        (huge, r"has \d+ bytes of \d+"),
        (lambda m: setattr(m.state_dict_metadata["model.a"], "size", torch.Size([1 << 40])), "bytes for the shape"),
        (lambda m: m.state_dict_metadata.__setitem__("model.a", 3), "a int where TensorStorageMetadata is due"),
        (lambda m: m.state_dict_metadata.__setitem__(3, m.state_dict_metadata["model.a"]), "int where str is due"),
        (lambda m: setattr(m, "storage_data", None), "NoneType where dict is due"),
        (lambda m: setattr(m, "storage_data", {}), "KeyError"),
        (lambda m: delattr(m, "state_dict_metadata"), "KeyError"),
    ],
)
def test_what_does_not_fit_is_refused_before_it_is_used(trainer, change, found):
    forge(trainer, change)
    with pytest.raises(ConfigError, match=found):
        read(trainer)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_any_bytes_are_read_or_refused(place, data):
    """Damage that its maker has sealed."""
    path = place / ".metadata"
    content = (place / "honest").read_bytes()
    changed = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(changed[: data.draw(st.just(len(content)) | st.integers(0, len(content)))])
    try:
        StoredState(place, "read it").read("model.a")
    except (ConfigError, KeyError) as error:
        assert isinstance(error, ConfigError) or error.args == ("model.a",)  # noqa: PT017 - either is an answer


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    directory = tmp_path_factory.mktemp("fuzzed")
    save(directory, dict(WEIGHTS), None)
    shutil.copy(directory / ".metadata", directory / "honest")
    return directory


def test_the_command_exits_with_2_and_three_lines(trainer, tmp_path, capfd):
    checkpoint = tmp_path / "run/checkpoints/step_3"
    checkpoint.mkdir(parents=True)
    shutil.move(trainer, checkpoint / "trainer")
    (checkpoint / "trainer/.metadata").write_bytes(pickle.dumps(Harm(tmp_path / "harmed")))
    (checkpoint / "state.json").write_text(render_state(RunState(3, 1.0, 1, 2, 1, 0, True, "digest")))
    seal(checkpoint)
    recipe = {"model": asdict(ModelConfig(path=str(tmp_path)))}
    (tmp_path / "run/config.json").write_text(json.dumps({"recipe": recipe}))
    assert main([str(checkpoint), str(tmp_path / "out"), "--adapter"]) == 2
    assert "posix.system" in capfd.readouterr().err
    assert not (tmp_path / "harmed").exists()


# -- the queue -------------------------------------------------------------------------------------------------------


@pytest.fixture
def queue(tmp_path):
    ledger = LedgerSnapshot(0, 0, 0, LedgerCounts(), ())
    save_state(tmp_path, SavedState("0-a", "0f" * 16, ledger, (), (), "", ""))
    return tmp_path


def text(content):
    return lambda path: path.write_text(content)


def instead(old, new):
    return lambda path: path.write_text(path.read_text().replace(old, new))


def arrays(**content):
    return lambda path: np.savez(path, **content)


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("ledger.json", text("")),
        ("ledger.json", text("[" * 100_000)),
        ("ledger.json", text("{}")),
        ("ledger.json", lambda path: path.unlink()),
        ("ledger.json", instead('"put_versions"', '"versions"')),
        (
            "ledger.json",
            instead('"put_versions": []', '"put_versions": [1]'),
        ),
        ("ledger.json", instead('"step": 0', '"step": "0"')),
        ("groups.json", text('[{"ordinal": 1, "attempt": 0, "trajectories": []}]')),
        ("groups.json", text('[{"ordinal": 1}]')),
        ("partials.json", text('{"a": 1}')),
        ("groups.npz", lambda path: path.write_bytes(b"")),
        ("groups.npz", lambda path: path.write_bytes(path.read_bytes()[:60])),
        ("groups.npz", lambda path: np.save(path.open("wb"), np.zeros(3))),
        ("groups.npz", arrays(prompt_ids=np.zeros(0, np.int32))),
        ("partials_done.npz", lambda path: path.unlink()),
        (
            "groups.npz",
            arrays(
                prompt_ids=np.zeros((0, 2), np.int32),
                response_ids=np.zeros(0, np.int32),
                logprobs=np.zeros(0, np.float32),
                loss_mask=np.zeros(0, np.bool_),
            ),
        ),
    ],
)
def test_what_does_not_fit_in_a_queue_is_named(queue, file, change):
    load_state(queue)
    change(queue / file)
    with pytest.raises(ConfigError, match="the message queue of"):
        load_state(queue)


def test_an_array_of_objects_is_not_unpickled(queue, tmp_path):
    names = ("prompt_ids", "response_ids", "logprobs", "loss_mask")
    harm = np.array([Harm(tmp_path / "harmed")], dtype=object)
    np.savez(queue / "groups.npz", allow_pickle=True, **dict.fromkeys(names, harm))
    with pytest.raises(ConfigError, match="Object arrays cannot be loaded"):
        load_state(queue)
    assert not (tmp_path / "harmed").exists()
