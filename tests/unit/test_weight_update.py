"""Publishes in workers: staged ones, and ones that fail where layers are computed together, as the scale of a quantised
layer is."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import torch

from asyncrl.errors import WeightTransferError
from asyncrl.inference.shared.weight_update import WorkerUpdate
from asyncrl.types import DiskSource
from asyncrl.weights.encodings.decoder import Scope
from asyncrl.weights.packing import byte_view, spec_of
from asyncrl.weights.plan import make_manifest
from asyncrl.weights.transport import HeldReceiver

WEIGHTS = [(f"layers.{i}.weight", torch.full((3, 2), float(i + 1))) for i in range(6)]
MANIFEST = make_manifest(1, 1, [spec_of(*item) for item in WEIGHTS], 4096, verify=False)


class Loader:
    """Adds up each tensor over the workers."""

    def __init__(self, together: threading.Barrier, *, computes_together: bool) -> None:
        self.computes_together = computes_together
        self._together = together
        self.loaded: list[tuple[str, float]] = []
        self.abandoned = False

    def check(self, spec):
        pass

    def start(self, names):
        pass

    def load(self, tensors, names):
        for name, tensor in tensors:
            assert tensor.shape == (3, 2)
            self._together.wait(5.0)
            self.loaded.append((name, float(tensor[0, 0])))

    def finish(self):
        pass

    def abandon(self):
        self.abandoned = True


class Receives:
    """A decoder whose publish breaks after some tensors."""

    def __init__(self, breaks_after: int) -> None:
        self.breaks_after = breaks_after

    def scope(self, manifest):
        return Scope(tuple(spec.name for spec in manifest.tensors), whole=True)

    def receive(self, receiver, manifest, scope, sink, timeout_s):
        for spec, (_, tensor) in list(zip(manifest.tensors, WEIGHTS, strict=True))[: self.breaks_after]:
            sink.write(spec, 0, byte_view(tensor))
        if self.breaks_after < len(WEIGHTS):
            raise WeightTransferError(f"it broke after {self.breaks_after}")

    def applied(self, manifest):
        pass

    def forget(self):
        pass


SOURCE = DiskSource(endpoint="", bucket_bytes=1, num_receivers=1, epoch=0, directory="")


def update_of(loader, decoder):
    update = WorkerUpdate(loader, decoder, torch.device("cpu"))
    update._receiver = HeldReceiver(lambda source: SimpleNamespace(close=lambda: None))
    return update


def publish(breaks_after, *, computes_together=True):
    """What the workers loaded, and their outcomes."""
    together = threading.Barrier(len(breaks_after))
    loaders = [Loader(together, computes_together=computes_together) for _ in breaks_after]

    def run(loader, number):
        update = update_of(loader, Receives(number))
        update.join(SOURCE)
        update.start()
        update.receive(MANIFEST, 20.0)
        update.finish()
        return update.outcome()

    with ThreadPoolExecutor(len(loaders)) as pool:
        outcomes = list(pool.map(run, loaders, breaks_after))
    return loaders, outcomes


def test_workers_that_fail_at_different_tensors_wait_for_each_other_to_the_end():
    loaders, outcomes = publish([2, 4])
    assert [message for _, message, _ in outcomes] == ["it broke after 2", "it broke after 4"]
    for loader in loaders:
        assert [name for name, _ in loader.loaded] == [name for name, _ in WEIGHTS]
        assert loader.loaded[-1][1] == 0, "zeros stand for what did not come"
        assert loader.abandoned


def test_a_worker_that_has_everything_waits_for_one_that_fails():
    loaders, outcomes = publish([6, 1])
    assert [kind for kind, _, _ in outcomes] == ["", "WeightTransferError"]
    assert [value for _, value in loaders[0].loaded] == [1, 2, 3, 4, 5, 6]


def test_a_loader_of_its_own_ends_with_the_failure():
    (loader,), ((kind, _, _),) = publish([3], computes_together=False)
    assert (kind, len(loader.loaded) <= 3) == ("WeightTransferError", True)


def staged(update, manifest=MANIFEST):
    """The outcome of a publish that is staged now."""
    update.stage(manifest, 20.0)
    deadline = time.monotonic() + 20.0
    while (outcome := update.staged()) is None and time.monotonic() < deadline:
        time.sleep(0.001)
    return outcome


def adopted(update):
    """The outcome of loading what was staged last."""
    update.start()
    update.receive(replace(MANIFEST, is_staged=True), 20.0)
    update.finish()
    return update.outcome()


def staging_update(breaks_after):
    loader, decoder = Loader(threading.Barrier(1), computes_together=False), Receives(breaks_after)
    update = update_of(loader, decoder)
    update.join(SOURCE)
    return update, loader, decoder


def test_what_is_staged_is_loaded_once_it_is_adopted():
    update, loader, _ = staging_update(6)
    for turn in (1, 2):
        assert staged(update) == ["", "", None]
        assert len(loader.loaded) == 6 * (turn - 1)
        assert adopted(update) == ["", "", None]
        assert loader.loaded == turn * [(name, float(tensor[0, 0])) for name, tensor in WEIGHTS]
    assert not loader.abandoned


def test_one_that_breaks_while_it_is_staged_is_never_loaded_and_the_next_one_is():
    update, loader, decoder = staging_update(3)
    assert staged(update) == ["WeightTransferError", "it broke after 3", None]
    assert loader.loaded == []
    decoder.breaks_after = 6
    assert staged(update) == ["", "", None]
    assert adopted(update) == ["", "", None]
    assert len(loader.loaded) == 6


def test_another_source_is_joined_once_what_is_being_staged_has_ended():
    update, _, decoder = staging_update(6)
    begun, goes_on, ends = threading.Event(), threading.Event(), []

    def receive(*args):
        begun.set()
        goes_on.wait(20.0)
        ends.append("staged")

    decoder.receive = receive
    update.stage(MANIFEST, 20.0)
    assert begun.wait(20.0)
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(update.join, object())
        joined.add_done_callback(lambda _: ends.append("joined"))
        assert not joined.done()
        goes_on.set()
        joined.result(20.0)
    assert ends == ["staged", "joined"]
    assert update.staged() == ["", "", None]
