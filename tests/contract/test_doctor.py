"""`asyncrl-doctor` on this machine, on machines that lack something, and on a cluster of two nodes."""

import json
import resource
import socket
import subprocess
import sys
from collections import namedtuple
from types import SimpleNamespace

import psutil
import pytest
import torch

from asyncrl.commands.doctor import main
from asyncrl.config import checks
from asyncrl.driver.doctor import examination as machine
from asyncrl.driver.doctor.examination import Observation, examine, guarded
from tests.make import QUICKSTART, quickstart
from tests.processes import ran


def raises(response, row):
    raise ValueError("this reward raises")


pytestmark = pytest.mark.timeout(400)

AREAS = {"versions", "recipe", "GPUs", "shared memory", "open files", "network", "memory", "disk", "reward"}
"""Of the doctor itself; those of the plan come on top."""


def found(*overrides):
    findings = list(examine(QUICKSTART, [*overrides], use_ray=False))
    return {finding.area: finding for finding in findings}


def test_a_sound_recipe_can_start_and_every_area_is_looked_at(inputs, capsys):
    assert main([str(QUICKSTART), "--json", "--no-ray"]) == 0
    findings = [Observation(**finding) for finding in json.loads(capsys.readouterr().out)]
    areas = {finding.area for finding in findings}
    assert {"mode", "rollout", "trainer", "publish", "data", "held out"} | AREAS <= areas
    assert not {"plan", "packages", "note"} & areas, "nothing is wrong with them"
    assert all(finding.status != "bad" and (finding.remedy or finding.status == "ok") for finding in findings)


@pytest.mark.slow
def test_ray_starts_for_the_examination_and_ends_with_it(inputs):
    done = ran("-m", "asyncrl.commands.doctor", QUICKSTART, timeout_s=200)
    assert "1 node(s)" in done.stdout
    assert "the run can start: 0 bad" in done.stdout


@pytest.mark.parametrize(
    ("overrides", "area", "part"),
    [
        (["trainer.num_ranks=3"], "recipe", "trainer.num_ranks=2 or 4"),
        (["rollout.engine=nonsense"], "recipe", "engine"),
        (["data.train=nowhere.jsonl"], "plan", "nowhere.jsonl"),
        (["reward.function=tests.contract.test_doctor:raises"], "reward", "raises"),
        (["run.dir=/proc/run"], "disk", "/proc/run"),
        (["ray.gpu_memory_gib=0.001"], "plan", "trainer.num_ranks=1"),
        (["rollout.serve={enabled: true, host: 192.0.2.1}"], "server", "192.0.2.1"),
    ],
)
def test_what_will_not_work_is_named_with_a_remedy(inputs, overrides, area, part):
    finding = found(*overrides)[area]
    assert finding.status == "bad", finding
    assert finding.remedy
    assert part in finding.text + finding.remedy


def test_a_machine_that_lacks_something(monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: usage(1 << 26, 0, 1 << 26))
    (finding,) = machine.check_shared_memory()
    assert (finding.status, "--shm-size" in finding.remedy) == ("bad", True)
    recipe = quickstart("rollout.num_replicas=64")
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 2048))
    (finding,) = machine.check_files(recipe)
    assert (finding.status, "hard limit is 2048" in finding.remedy) == ("warning", True)

    def unknown(name):
        raise socket.gaierror("unknown")

    monkeypatch.setattr(socket, "gethostbyname", unknown)
    (finding,) = machine.check_address()
    assert (finding.status, "/etc/hosts" in finding.remedy) == ("warning", True)


def test_a_package_that_is_too_old_is_named(monkeypatch):
    have = machine.metadata.version
    monkeypatch.setattr(machine.metadata, "version", lambda name: "1.0" if name == "torch" else have(name))
    bad = [finding for finding in machine.check_versions() if finding.status == "bad"]
    assert [("torch 1.0" in finding.text, "pip install 'torch" in finding.remedy) for finding in bad] == [(True, True)]


def test_a_package_that_every_process_would_compile_again(tmp_path, monkeypatch):
    place = tmp_path / "site" / "often_imported"
    place.mkdir(parents=True)
    (place / "__init__.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(place.parent)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert not list(machine.check_compiled("often_imported")), "the first process compiles it"
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (found,) = machine.check_compiled("often_imported")
    assert (found.status, found.area) == ("warning", "packages")
    assert "unset PYTHONDONTWRITEBYTECODE" in found.remedy
    subprocess.run(found.remedy.partition("or once: ")[2].replace("python", sys.executable).split(), check=True)
    assert not list(machine.check_compiled("often_imported")), "its remedy helps"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_gpus_that_torch_does_not_find(monkeypatch, tmp_path):
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(checks, "DEVICES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (finding,) = machine.check_gpus(quickstart())
    assert (finding.status, "torch with CUDA" in finding.remedy) == ("bad", True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_memory_is_compared_with_the_machine_that_computes(inputs, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=5 << 20))
    here = found()["memory"]
    assert (here.status, "0.0 GiB" in here.text) == ("bad", False)
    assert "of 0 GiB free" in here.text
    elsewhere = found("ray.address=10.0.0.1:6379")["memory"]
    assert (elsewhere.status, "free" in elsewhere.text) == ("ok", False)


def test_a_check_that_breaks_is_a_finding(monkeypatch, inputs):
    def breaks():
        raise RuntimeError("a strange machine")

    (finding,) = guarded("network", breaks)
    assert (finding.status, "a strange machine" in finding.text) == ("warning", True)
    monkeypatch.setattr(machine, "check_address", breaks)
    assert found().keys() >= AREAS, "the others go on"


def test_what_a_recipe_takes_from_the_environment_is_not_told(inputs, monkeypatch):
    monkeypatch.setenv("SECRET_PLACE", "a-very-secret-directory")
    told = found("data.train=${oc.env:SECRET_PLACE}/rows.jsonl")["plan"]
    assert told.status == "bad"
    assert "a-very-secret-directory" not in told.text + told.remedy


CLUSTER = """
import sys
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
cluster.add_node(num_cpus=1)
from asyncrl.commands.doctor import main

code = main([sys.argv[1], f"ray.address={cluster.address}"])
cluster.shutdown()
sys.exit(code)
"""


@pytest.mark.slow
def test_every_node_of_a_cluster_is_asked(inputs):
    done = ran("-c", CLUSTER, QUICKSTART, timeout_s=200)
    assert "2 node(s)" in done.stdout
    assert "GB/s to this machine" in done.stdout
    assert "2 bundles without GPUs (a replica), 1 without GPUs (a trainer rank); on one node" in done.stdout
