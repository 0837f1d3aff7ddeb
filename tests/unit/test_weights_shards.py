"""Publishes on disk are what safetensors and Hugging Face's loaders read."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.errors import ConfigError, WeightTransferError
from asyncrl.types import TransferSource
from asyncrl.weights.lock_files import remove_stale_segments
from asyncrl.weights.packing import byte_view, spec_of
from asyncrl.weights.plan import DTYPE_BYTES, make_spec
from asyncrl.weights.transports import TRANSPORTS, build_receiver, build_sender
from asyncrl.weights.transports.disk import PublishDirectory
from asyncrl.weights.transports.shards import INDEX_NAME, ShardReader, ShardWriter, plan_shards
from asyncrl.weights.transports.shared_segment import SharedSegment, attach
from asyncrl_testing.transport_rig import many_weights


def write(directory, weights, shard_bytes):
    plan = plan_shards([spec_of(*w) for w in weights], shard_bytes)
    writer = ShardWriter(directory, plan)
    for number, (_, tensor) in enumerate(weights):
        data = byte_view(tensor)
        for offset in range(0, data.numel(), 1000):
            writer.write(number, offset, data[offset : offset + 1000])
    writer.finish()
    return plan


@pytest.mark.parametrize(("shard_bytes", "num_files"), [(1 << 30, 1), (20_000, 5), (1, 16)])
def test_safetensors_reads_every_kind_of_tensor(tmp_path, shard_bytes, num_files):
    weights = many_weights(3)
    plan = write(tmp_path, weights, shard_bytes)
    assert len(plan.names) == num_files
    index = json.loads((tmp_path / INDEX_NAME).read_text())
    assert list(index["weight_map"]) == [name for name, _ in weights]
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for _, t in weights)
    files = {name: load_file(tmp_path / name) for name in plan.names}
    for name, tensor in weights:
        loaded = files[index["weight_map"][name]][name]
        assert loaded.dtype == tensor.dtype
        assert torch.equal(loaded, tensor)
    assert {p.name for p in tmp_path.iterdir()} == {*plan.names, INDEX_NAME}


def test_each_tensor_begins_at_a_multiple_of_its_element_size():
    weights = many_weights()
    plan = plan_shards([spec_of(*w) for w in weights])
    assert all(start % t.element_size() == 0 for (_, start), (_, t) in zip(plan.places, weights, strict=True))


def test_slices_are_read_back(tmp_path):
    weights = many_weights(1)
    reader = ShardReader(tmp_path, write(tmp_path, weights, 20_000))
    for number, (_, tensor) in enumerate(weights):
        data = byte_view(tensor)
        out = torch.empty(max(0, data.numel() - 3), dtype=torch.uint8)
        if out.numel():
            reader.read(number, 3, out)
            assert torch.equal(out, data[3:])
    reader.close()


@pytest.mark.parametrize("fault", ["gone", "short", "header"])
def test_a_broken_file_is_named(tmp_path, fault):
    weights = many_weights(1)
    plan = write(tmp_path, weights, 1 << 30)
    file = tmp_path / plan.names[0]
    content = file.read_bytes()
    file.unlink()
    if fault == "short":
        file.write_bytes(content[:-1])
    elif fault == "header":
        file.write_bytes(content.replace(b'"scalar"', b'"SCALAR"'))
    reader = ShardReader(tmp_path, plan)
    last = max(range(len(weights)), key=lambda i: plan.places[i][1] * bool(weights[i][1].numel()))
    with pytest.raises(WeightTransferError, match=plan.names[0]):
        reader.read(last, 0, byte_view(torch.empty_like(weights[last][1])))
    reader.close()


def test_every_dtype_that_can_be_published_has_a_name():
    plan = plan_shards([make_spec(dtype, (3,), dtype) for dtype in DTYPE_BYTES])
    assert len(plan.places) == len(DTYPE_BYTES)


def test_no_tensors_are_no_files():
    assert plan_shards([]).names == ()


def test_a_publish_loads_with_from_pretrained(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.Qwen3ForCausalLM(config)
    write(tmp_path, list(model.state_dict().items()), 20_000)
    config.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert all(torch.equal(t, model.state_dict()[name]) for name, t in loaded.state_dict().items())


def test_only_the_newest_complete_publish_stays(tmp_path):
    directory = PublishDirectory(tmp_path)
    for publish_id in (1, 2):
        (directory.begin(publish_id) / "file").touch()
        directory.complete(publish_id)
    (directory.begin(3) / "file").touch()
    assert {p.name for p in directory.path.iterdir()} == {"publish-2", ".publish-3"}
    directory.discard(3)
    (directory.begin(2) / "again").touch()
    directory.complete(2)
    assert {str(p.relative_to(directory.path)) for p in directory.path.rglob("*")} == {"publish-2", "publish-2/again"}
    assert directory.path.stat().st_mode & 0o077 == 0
    directory.close()
    directory.close()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_owner_left_is_removed_and_a_living_one_keeps_its_own(tmp_path):
    code = (
        "import sys, time, pathlib; from asyncrl.weights.transports.disk import PublishDirectory\n"
        "d = PublishDirectory(pathlib.Path(sys.argv[1])); d.begin(1); print(d.path, flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    left = Path(owner.stdout.readline().strip())
    PublishDirectory(tmp_path).close()
    assert left.exists()
    owner.kill()
    owner.wait(10)
    owner.stdout.close()
    PublishDirectory(tmp_path).close()
    assert list(tmp_path.iterdir()) == []


def test_a_root_that_cannot_be_written_is_a_config_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"weights\.disk_directory"):
        PublishDirectory(tmp_path / "file")


# -- shared memory -----------------------------------------------------------------------------------------------------


@pytest.fixture
def segment():
    segment = SharedSegment()
    segment.reserve(8192)
    yield segment
    segment.close()


def test_both_sides_see_one_memory(segment):
    other = attach(str(segment.path))
    segment.data[5] = 77
    other[6] = 78
    assert (other.numel(), other[5].item(), segment.data[6].item()) == (8192, 77, 78)


def test_a_view_outlives_the_owner(segment):
    other = attach(str(segment.path))
    segment.data[5] = 77
    segment.close()
    assert not segment.path.exists()
    assert other[5].item() == 77
    with pytest.raises(WeightTransferError, match="sender is gone"):
        attach(str(segment.path))


def test_only_the_user_may_read_weights(segment):
    assert segment.path.stat().st_mode & 0o077 == 0


def test_what_a_killed_owner_left_is_removed_by_the_next():
    code = (
        "import sys, time; from asyncrl.weights.transports.shared_segment import SharedSegment\n"
        "s = SharedSegment(); s.reserve(4096); s.socket_path.touch(); print(s.path, flush=True); time.sleep(60)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    path = Path(owner.stdout.readline().strip())
    remove_stale_segments()
    assert path.exists()
    owner.send_signal(signal.SIGKILL)
    owner.wait(10)
    owner.stdout.close()
    assert path.exists()
    assert path.with_suffix(".sock").exists()
    SharedSegment().close()
    assert not path.exists()
    assert not path.with_suffix(".sock").exists()


def test_memory_can_be_taken_later():
    segment = SharedSegment()
    assert attach(str(segment.path)).numel() == 0
    segment.reserve(4096)
    segment.reserve(4096)
    segment.data[7] = 9
    assert attach(str(segment.path))[7].item() == 9
    with pytest.raises(ConfigError, match="lower weights"):
        segment.reserve(1 << 50)
    segment.close()
    assert not segment.path.exists()


def test_an_unknown_transport_is_a_config_error():
    with pytest.raises(ConfigError, match=r"carrier-pigeon(?s:.)*ipc, collective, disk"):
        build_sender("carrier-pigeon", 4096, 1)
    with pytest.raises(ConfigError, match=r"TransferSource(?s:.)*ipc, collective, disk"):
        build_receiver(TransferSource(endpoint="", bucket_bytes=4096, num_receivers=1, epoch=0))
    assert set(TRANSPORTS) == {"ipc", "collective", "disk"}


def test_a_device_that_no_backend_serves_is_a_config_error():
    with pytest.raises(ConfigError, match="meta"):
        build_sender("collective", 4096, 1, device=torch.device("meta"))
