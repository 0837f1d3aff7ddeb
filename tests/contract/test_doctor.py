"""`asyncrl-doctor` on this machine, on machines that lack something, and on a cluster of two nodes."""

import json
import resource
import socket
import subprocess
import sys
from collections import namedtuple

import pytest
import torch

from asyncrl.commands.doctor import main
from asyncrl.config.load import load_recipe
from asyncrl.data.model_files import check_model
from asyncrl.driver.doctor import Observation, examination, examine, machine, plan
from asyncrl.driver.doctor.observation import guarded
from asyncrl.driver.doctor.plan import check_memory
from tests.conftest import ROOT
from tests.unit.test_recipes import QUICKSTART


def raises(response, row):
    raise ValueError("this reward raises")


pytestmark = [pytest.mark.contract, pytest.mark.timeout(400)]

AREAS = [
    "versions", "recipe", "packages", "GPUs", "processors", "shared memory", "open files", "network", "model and data",
    "data", "reward", "memory", "disk", "publish", "staleness",
]  # fmt: skip


def found(*overrides):
    findings = list(examine(QUICKSTART, [*overrides], use_ray=False))
    return {finding.area: finding for finding in findings}


def test_a_sound_recipe_can_start_and_every_area_is_looked_at(inputs, capsys):
    assert main([str(QUICKSTART), "--json", "--no-ray"]) == 0
    findings = [Observation(**finding) for finding in json.loads(capsys.readouterr().out)]
    assert sorted({finding.area for finding in findings}) == sorted(AREAS)
    assert all(finding.status != "bad" and (finding.remedy or finding.status == "ok") for finding in findings)


@pytest.mark.slow
def test_ray_starts_for_the_examination_and_ends_with_it(inputs):
    command = [sys.executable, "-m", "asyncrl.commands.doctor", str(QUICKSTART)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 node(s)" in done.stdout
    assert "the run can start: 0 bad" in done.stdout


@pytest.mark.parametrize(
    ("overrides", "area", "part"),
    [
        (["trainer.num_ranks=3"], "recipe", "trainer.num_ranks=2 or 4"),
        (["rollout.engine=nonsense"], "recipe", "engine"),
        (["data.train=nowhere.jsonl"], "model and data", "nowhere.jsonl"),
        (["reward.function=tests.contract.test_doctor:raises"], "reward", "raises"),
        (["run.dir=/proc/run"], "disk", "/proc/run"),
        (["weights.publish_timeout_s=0.00001"], "publish", "publish"),
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
    recipe = load_recipe(QUICKSTART, ["rollout.num_replicas=64"])
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 2048))
    (finding,) = machine.check_files(recipe)
    assert (finding.status, "hard limit is 2048" in finding.remedy) == ("warning", True)

    def unknown(name):
        raise socket.gaierror("unknown")

    monkeypatch.setattr(socket, "gethostbyname", unknown)
    (finding,) = machine.check_address()
    assert (finding.status, "/etc/hosts" in finding.remedy) == ("warning", True)
    (finding,) = machine.check_processors(recipe)
    assert finding.status == "warning"


@pytest.mark.parametrize(("speed", "status"), [(100, "warning"), (100_000, "ok"), (0, "ok")])
def test_a_publish_over_a_network_is_compared_with_its_time(inputs, monkeypatch, tmp_path, speed, status):
    """The weights take 0.13 s at 100 Mbit/s."""
    card = namedtuple("card", "isup speed")
    found = {"eth0": card(True, speed), "eth1": card(False, 400_000), "docker0": card(True, 400_000)}
    monkeypatch.setattr(plan.psutil, "net_if_stats", lambda: found)
    monkeypatch.setattr(plan, "NETWORKS", tmp_path)
    for name in ("eth0", "eth1"):
        (tmp_path / name / "device").mkdir(parents=True)
    keys = ["ray.address=10.0.0.1:6379", "weights.transport=collective", "weights.transfer_timeout_s=0.2"]
    recipe = load_recipe(QUICKSTART, keys)
    (finding,) = plan.check_publish(recipe, check_model(recipe.model.path))
    assert finding.status == status, finding
    assert ("through eth0" in finding.text) == (speed > 0)
    assert ("transfer_timeout_s" in finding.remedy) == (status == "warning")


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


def test_gpus_that_torch_does_not_find(monkeypatch):
    monkeypatch.setattr(machine.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    (finding,) = machine.check_gpus(load_recipe(QUICKSTART, []), joins=False)
    assert (finding.status, "torch with CUDA" in finding.remedy) == ("bad", True)


@pytest.mark.parametrize(
    ("overrides", "status", "told"),
    [
        ([], "bad", "GiB free"),
        (["ray.address=10.0.0.1:6379"], "ok", "not compared with this machine: the run joins a cluster"),
        (["ray.address=10.0.0.1:6379", "ray.gpu_memory_gib=24"], "ok", "a GPU has 24 GiB"),
        (["ray.gpu_memory_gib=0.001"], "bad", "a trainer rank does not fit"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_memory_is_compared_with_the_machines_of_the_run(inputs, overrides, status, told):
    """With more replicas than this machine has memory for."""
    recipe = load_recipe(QUICKSTART, ["rollout.num_replicas=1000000000", *overrides])
    (finding,) = check_memory(recipe, check_model(recipe.model.path))
    assert finding.status == status, finding
    assert told in finding.text
    if overrides and status == "bad":
        assert "trainer.fsdp.offload_optimizer" in finding.remedy


def test_a_check_that_breaks_is_a_finding(monkeypatch, inputs):
    def breaks():
        raise RuntimeError("a strange machine")

    (finding,) = guarded("network", breaks)
    assert (finding.status, "a strange machine" in finding.text) == ("warning", True)
    monkeypatch.setattr(examination, "check_address", breaks)
    assert set(AREAS) <= found().keys(), "the others go on"


def test_what_a_recipe_takes_from_the_environment_is_not_told(inputs, monkeypatch):
    monkeypatch.setenv("SECRET_PLACE", "a-very-secret-directory")
    told = found("data.train=${oc.env:SECRET_PLACE}/rows.jsonl")["model and data"]
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
    command = [sys.executable, "-c", CLUSTER, str(QUICKSTART)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 node(s)" in done.stdout
    assert "GB/s to this machine" in done.stdout
    assert "weights.transport=ipc reaches one machine" in done.stdout
    assert "2 bundles without GPUs (a replica), 1 without GPUs (a trainer rank); on one node" in done.stdout
