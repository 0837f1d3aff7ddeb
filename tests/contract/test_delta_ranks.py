"""Trainer ranks that publish differences after optimizer steps: one that sends with the help of another (FSDP2), and
two pipeline stages that send a part each (Megatron-core)."""

import asyncio
import threading
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from asyncrl.config.trainer import MegatronConfig
from asyncrl.config.weights import WeightsConfig
from asyncrl.trainer.trainer_worker import TrainerWorker
from asyncrl.types import EncodedWeights, PartsSource
from asyncrl.weights.assembling_sink import AssemblingSink
from asyncrl.weights.encodings.decoder import Decoder
from asyncrl.weights.packing import byte_view
from asyncrl.weights.plan import make_manifest
from asyncrl.weights.transports import build_receiver
from asyncrl_testing.backend_suite import random_lease, write_model
from asyncrl_testing.rank_processes import run_ranks
from tests.backends import trainer_spec
from tests.make import needs_megatron
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(600)

RANKS, START_S, BUCKET_BYTES = 2, 240.0, 1 << 16


def started(root, rank, path, backend, beside):
    """This rank, as an actor would hold it."""
    lease = random_lease(0)
    groups = {g.ordinal: g for g in lease.groups}
    settings = {"lr": 1e-6, "warmup_steps": 0, "backend": backend, "collective_timeout_s": 120}
    if backend == "megatron":
        settings["megatron"] = MegatronConfig(pipeline_parallel=RANKS)
    spec = trainer_spec(path, dtype="bfloat16", num_ranks=RANKS, sends_snapshots=beside, **settings)
    fetch = lambda keys: [groups[o].sequences[i] for o, i in keys]  # noqa: E731
    worker = TrainerWorker(spec, rank, fetch, lambda keys: {}, lambda: "127.0.0.1")
    dist.destroy_process_group()  # the worker forms its own
    place = root / "address"
    if rank == 0:
        host, port = asyncio.run(worker.open_rendezvous())
        (root / "half").write_text(f"{host}:{port}")
        (root / "half").rename(place)
    wait_until(place.exists, "rank 0", START_S)
    host, port = place.read_text().split(":")
    asyncio.run(worker.start(host, int(port), START_S))
    plans = lease.plans(num_plans=spec.trainer.layout.num_plans)
    return worker, spec.trainer.layout.by_rank(plans)[rank]


def gathered(value):
    found = [None] * RANKS
    dist.all_gather_object(found, value)
    return found


def publish_on_a_rank(root, rank, world_size, path, backend, beside):
    """A full publish and three of differences. Rank 0 receives too. With `beside` snapshots are sent, after one step
    more. Returns bytes of the differences and of all weights."""
    worker, plan = started(root, rank, path, backend, beside)
    senders = asyncio.run(worker.sending_ranks())
    places = [s.rank for s in senders]
    sends = rank in places
    source = asyncio.run(worker.open_weights(WeightsConfig(bucket_bytes=BUCKET_BYTES), 1)) if sends else None
    sources = [s for s in gathered(source) if s is not None]
    source = sources[0] if len(sources) == 1 else PartsSource.of(sources, [s.first_tensor for s in senders])
    specs, decoder, receiver = asyncio.run(worker.weight_specs()), Decoder(str(path), None, torch.bfloat16), None
    sizes = []
    for number in range(1, 5):
        if number > 1:
            asyncio.run(worker.train_step(plan))
        own = {name: tensor.clone() for name, tensor in worker._backend.named_weights()}
        if beside:
            asyncio.run(worker.snapshot_weights())
            asyncio.run(worker.train_step(plan))
        encoded = EncodedWeights.joined(
            [part for part in gathered(asyncio.run(worker.encode_weights())) if part is not None]
        )
        if number == 1:
            assert encoded.base_digest is None
            manifest = replace(make_manifest(1, 1, specs, BUCKET_BYTES), is_kept=True)
        else:
            manifest = make_manifest(
                number, number, encoded.tensors, BUCKET_BYTES, encoding="delta", base_digest=encoded.base_digest
            )
            sizes.append(manifest.nbytes)
        tensors, found = {}, []

        def receive(manifest=manifest, tensors=tensors, found=found):
            nonlocal receiver
            receiver = receiver or build_receiver(source)
            sink = AssemblingSink(tensors.__setitem__)
            found.append(decoder.receive(receiver, manifest, decoder.scope(manifest), sink, 120.0))

        receiving = threading.Thread(target=receive)
        if rank == 0:
            receiving.start()
        digests = gathered(asyncio.run(worker.send_weights(manifest, 120.0)))
        if rank == 0:
            receiving.join(130)
            sent = tuple(d for place in places for d in digests[place])
            assert found == [sent]
            assert number == 1 or sent == encoded.digest
        whole = {name: tensor for part in gathered(own) for name, tensor in part.items()}
        if rank == 0:
            assert list(tensors) == [spec.name for spec in specs]
            for name, tensor in tensors.items():
                assert torch.equal(byte_view(tensor), byte_view(whole[name])), name
        dist.barrier()
    asyncio.run(worker.close_weights())
    return sizes, sum(spec.nbytes for spec in specs)


@pytest.mark.parametrize(
    ("backend", "beside"),
    [
        ("fsdp", False),
        ("fsdp", True),
        pytest.param("megatron", False, marks=needs_megatron),
    ],
)
def test_differences_after_steps_make_the_weights_of_all_ranks(tmp_path, backend, beside):
    args = write_model(tmp_path / "model"), backend, beside
    ranks = run_ranks(publish_on_a_rank, tmp_path / "ranks", RANKS, *args, preload=[__name__], deadline_s=500)
    for sizes, nbytes in ranks:
        assert len(sizes) == 3
        assert all(0 < size <= 0.05 * nbytes for size in sizes), (sizes, nbytes)
