"""The scripts of docs/cluster.md, as far as they can be read without their clusters."""

import re
import shutil
import subprocess
from pathlib import Path

import yaml

from asyncrl.config.load import load_recipe
from asyncrl.driver.cluster.placement import place_run
from tests.make import ROOT

PAGE = (ROOT / "docs" / "cluster.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_script_of_slurm_is_a_script():
    (script,) = (block for block in blocks("bash") if block.startswith("#!"))
    bash = shutil.which("bash")
    subprocess.run([bash, "-n"], input=script, text=True, check=True, timeout=10)
    assert all(line.startswith("timeout ") for line in script.splitlines() if "until " in line), "no wait for ever"
    assert "--mem=0" in script, "a machine's memory, not the default share of it"
    assert "$(hostname)" not in script, "Slurm knows a node by another name"


def test_each_container_of_the_ray_job_finds_the_models_on_its_volume():
    (job,) = (yaml.safe_load(block) for block in blocks("yaml"))
    cluster = job["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for pod in (group["template"]["spec"] for group in groups):
        (container,) = pod["containers"]
        mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        (home,) = (v["value"] for v in container["env"] if v["name"] == "HF_HOME")
        assert str(Path(home).parent) in mounted


def test_what_one_machine_is_shown_with_fits_one_machine():
    page = PAGE[PAGE.index("## One machine") : PAGE.index("### One GPU for both")]
    named = set(re.findall(r"recipes/\w+\.yaml", page))
    assert named
    for name in named:
        recipe = load_recipe(ROOT / name, [])
        assert recipe.ray.address is None
        place_run(recipe, [8])
