"""The lock files agree with each other and with what the project asks for."""

import re
import tomllib

import pytest
from packaging.requirements import Requirement

from tests.make import ROOT
from tools.lock import PINS, TORCH

OTHERS = ("harnesses",)
"""Environments without asyncrl."""
LOCKS = sorted(path for path in (ROOT / "requirements").glob("*.lock") if path.stem not in OTHERS)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def locked(path):
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    return {name.lower().replace("_", "-"): version for name, _, version in (line.partition("==") for line in lines)}


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.stem)
def test_a_lock_file_holds_the_pins_and_what_its_extras_ask_for(path):
    versions = locked(path)
    assert {f"{name}=={versions[name]}" for name, _, _ in (pin.partition("==") for pin in (TORCH, *PINS))} == {
        TORCH,
        *PINS,
    }
    extras = re.search(r"\.lock ([\w,-]+)", path.read_text().splitlines()[0])[1].split(",")
    wanted = [*PROJECT["dependencies"], *(line for extra in extras for line in PROJECT["optional-dependencies"][extra])]
    for requirement in map(Requirement, wanted):
        if requirement.name == "asyncrl" or (requirement.marker and not requirement.marker.evaluate()):
            continue
        version = versions.get(requirement.name.lower().replace("_", "-"))
        assert version, f"{requirement.name} is not in it"
        assert requirement.specifier.contains(version, prereleases=True), (requirement, version)


def test_the_image_installs_a_lock_file_that_there_is():
    named = re.findall(r"requirements/[\w.-]+\.lock", (ROOT / "Dockerfile").read_text())
    assert named
    assert {ROOT / name for name in named} <= set(LOCKS)
