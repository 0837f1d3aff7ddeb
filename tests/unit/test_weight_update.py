"""A publish that fails in workers whose layers are computed together, as the scale of a quantised layer is."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from asyncrl.errors import WeightTransferError
from asyncrl.inference.shared.weight_update import WorkerUpdate
from asyncrl.types import DiskSource
from asyncrl.weights.encodings.decoder import Plan
from asyncrl.weights.packing import byte_view, spec_of
from asyncrl.weights.plan import make_manifest

pytestmark = pytest.mark.unit
WEIGHTS = [(f"layers.{i}.weight", torch.full((3, 2), float(i + 1))) for i in range(6)]
MANIFEST = make_manifest(1, 1, [spec_of(*item) for item in WEIGHTS], 4096, verify=False)


class Loader:
    """Adds up each tensor over the workers."""

    take = None

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
        self._breaks_after = breaks_after

    def plan(self, manifest):
        return Plan(tuple(spec.name for spec in manifest.tensors), whole=True)

    def receive(self, receiver, manifest, plan, sink, timeout_s):
        for spec, (_, tensor) in list(zip(manifest.tensors, WEIGHTS, strict=True))[: self._breaks_after]:
            sink.write(spec, 0, byte_view(tensor))
        if self._breaks_after < len(WEIGHTS):
            raise WeightTransferError(f"it broke after {self._breaks_after}")

    def applied(self, manifest):
        pass

    def forget(self):
        pass


class Update(WorkerUpdate):
    beside = None

    def _build_beside(self):
        return self.beside

    def _build_receiver(self, source):
        return SimpleNamespace(close=lambda: None)


def publish(breaks_after, *, computes_together=True):
    """What the workers loaded, and their outcomes."""
    together = threading.Barrier(len(breaks_after))
    loaders = [Loader(together, computes_together=computes_together) for _ in breaks_after]

    def run(loader, number):
        update = Update(loader, Receives(number), torch.device("cpu"))
        update.join(DiskSource.__new__(DiskSource))
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


class Beside(Loader):
    """Has what it loaded served, by `exchange`."""

    def __init__(self) -> None:
        super().__init__(threading.Barrier(1), computes_together=False)
        self.served: list[str] = []
        self.finished = 0

    def start(self, names):
        self.loaded = []

    def finish(self):
        self.finished += 1

    def exchange(self):
        self.served += [name for name, _ in self.loaded]


def staged(update, manifest=MANIFEST):
    """The outcome of a publish that is staged now."""
    update.stage(manifest, 20.0)
    deadline = time.monotonic() + 20.0
    while (outcome := update.staged()) is None and time.monotonic() < deadline:
        time.sleep(0.001)
    return outcome


def update_beside(breaks_after):
    unused, beside = Loader(threading.Barrier(1), computes_together=False), Beside()
    update = Update(unused, Receives(breaks_after), torch.device("cpu"))
    update.beside = beside
    update.join(DiskSource.__new__(DiskSource))
    return update, beside, unused


def test_what_is_staged_beside_the_model_is_served_once_it_came_whole():
    update, beside, unused = update_beside(6)
    for turn in (1, 2):
        assert staged(update) == ["", "", None]
        assert len(beside.served) == 6 * (turn - 1)
        update.start()
        update.receive(replace(MANIFEST, is_staged=True), 20.0)
        update.finish()
        assert update.outcome() == ["", "", None]
        assert beside.served == turn * [name for name, _ in WEIGHTS]
    assert (beside.abandoned, beside.finished, unused.loaded) == (False, 2, [])


def test_one_that_breaks_is_never_served_and_the_next_one_is_loaded():
    update, beside, _ = update_beside(3)
    assert staged(update) == ["WeightTransferError", "it broke after 3", None]
    assert (beside.abandoned, beside.finished, beside.served) == (True, 0, [])
    update._decoder._breaks_after = 6
    assert staged(update) == ["", "", None]
    assert (beside.finished, beside.served) == (1, [])


def test_another_source_is_joined_once_what_was_staged_has_ended():
    update, beside, _ = update_beside(6)
    goes_on = threading.Event()
    beside.start = lambda names: goes_on.wait(20.0)
    update.stage(MANIFEST, 20.0)
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(update.join, object())
        time.sleep(0.05)
        assert not joined.done()
        goes_on.set()
        joined.result(20.0)
    assert update.staged() == ["", "", None]
