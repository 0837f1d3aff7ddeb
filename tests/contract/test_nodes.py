"""What a run checks and fetches on every node before its actors start, on a cluster of two nodes on this machine."""

import os

import pytest

from asyncrl.driver.cluster import nodes
from asyncrl.driver.cluster.nodes import spans, usable_nodes
from tests.processes import ran

PREPARE = """
import os, sys
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

from asyncrl.driver.cluster.nodes import prepare_nodes, smallest_gpu
from asyncrl.driver.cluster.ray_session import ray_cluster
from asyncrl.errors import ConfigError

shared, own = Path(sys.argv[1]), Path(sys.argv[2])


def variables():
    return os.environ["OF_THE_RECIPE"], os.environ["HF_HUB_OFFLINE"]


def refused(*arguments):
    try:
        prepare_nodes(*arguments, 100)
    except ConfigError as error:
        print("refused:", str(error).replace(chr(10), " | "))


cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
cluster.add_node(num_cpus=1)
os.environ["HF_HUB_OFFLINE"] = "1"  # found out by the driver, after the machines have started
with ray_cluster(cluster.address, Path("/nowhere/log.txt"), (), {"OF_THE_RECIPE": "heard"}):
    print("variables:", *ray.get(ray.remote(num_cpus=0)(variables).remote(), timeout=100))
    prepare_nodes(shared, [], 100)
    print("left behind:", sorted(os.listdir(shared)))
    os.chdir(own)
    refused(Path("/proc/self/cwd"), [])  # another directory for each process: not shared
    refused(shared, [("org/none", None)])
    print("smallest GPU:", smallest_gpu(100))
    for size in (80, 24):
        os.environ["SIZE_GIB"] = str(size)
        cluster.add_node(num_cpus=1, num_gpus=1)
    print("smallest GPU:", smallest_gpu(100))
cluster.shutdown()
"""


@pytest.mark.slow
def test_every_node_shares_the_run_directory_and_has_the_models(tmp_path):
    shared, own, cache = (tmp_path / name for name in ("shared", "own", "cache"))
    for directory in (shared, own, cache):
        directory.mkdir()
    program = own / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 0, GPU-a, $((SIZE_GIB * 1024))\n")
    program.chmod(0o755)
    environment = {**os.environ, "HF_HOME": str(cache), "PATH": f"{own}:{os.environ['PATH']}"}
    environment.pop("HF_HUB_OFFLINE", None)
    done = ran("-c", PREPARE, shared, own, env=environment, timeout_s=400)
    assert "variables: heard 1" in done.stdout, "and a log that a node cannot write ends no process"
    assert "left behind: []" in done.stdout
    directory, model = (line for line in done.stdout.splitlines() if line.startswith("refused: "))
    assert "run.dir=/proc/self/cwd on node" in directory
    assert "a file system that all nodes share" in directory
    assert "model org/none on node" in model
    sizes = [line for line in done.stdout.splitlines() if line.startswith("smallest GPU: ")]
    assert sizes == ["smallest GPU: None", f"smallest GPU: {24 << 30}"], "told by the nodes that have GPUs"


def test_a_node_says_what_it_lacks(tmp_path, monkeypatch):
    """The part that runs there, here."""
    import huggingface_hub.constants

    stored = tmp_path / "models--org--model"
    (stored / "snapshots/a").mkdir(parents=True)
    (stored / "refs").mkdir()
    (stored / "refs/main").write_text("a")
    for name in ("config.json", "model.safetensors"):
        (stored / "snapshots/a" / name).write_text("{}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(nodes, "SEEN_S", 0.2)
    shared = tmp_path / "shared"
    shared.mkdir()
    assert nodes.prepare_node(shared, "token", "node", []) is not None, "the driver's file is not there"
    (shared / "token").write_text("token")
    assert nodes.prepare_node(shared, "token", "node", [("org/model", None)]) is None
    assert (shared / "token-node").exists(), "and the driver sees that it can write"
    assert nodes.fetch_model("org/model", None) == stored / "snapshots/a"
    key, found = nodes.prepare_node(None, "", "node", [("org/none", None)]) or ("", "")
    assert key == "model org/none"
    assert found


def test_nodes_without_gpus_are_left_alone_where_others_have_them():
    def node(name, *, alive=True, **resources):
        return {"NodeID": name, "Alive": alive, "Resources": resources}

    found = [node("head", CPU=8), node("gpus", CPU=8, GPU=8.0), node("lost", alive=False, GPU=8.0)]
    assert [n["NodeID"] for n in usable_nodes(found)] == ["gpus"]
    assert [n["NodeID"] for n in usable_nodes(found[:1])] == ["head"]
    assert spans(usable_nodes(found), "head"), "one node, which is not the driver's"
    assert not spans(usable_nodes(found[:1]), "head")
