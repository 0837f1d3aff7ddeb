"""Which files of the repository a file depends on, found in its text: nothing is imported."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import PurePosixPath

CODE = ("asyncrl", "asyncrl_testing", "tests", "tools", "benchmarks", "recipes")
"""Folders whose Python files can be imported."""
ENVIRONMENT = ("pyproject.toml", "requirements/cpu.lock", "requirements/cpu-vllm.lock")
"""Every test depends on them."""
_MODULE = re.compile(rf"\b(?:{'|'.join(CODE)})(?:\.\w+)+")
_FIXTURE = re.compile(r"^@pytest[\w.]*\.fixture\b.*\n(?:@.*\n)*(?:async )?def (\w+)", re.MULTILINE)
_FILE = re.compile(r"[\w./-]+")


class ImportGraph:
    """The files of a repository and what each names: modules that it imports anywhere, modules in its strings
    (`asyncrl.x.y:Name`), other files in its strings (`recipes/x.yaml`, or a recipe's name in a test)."""

    def __init__(self, files: Mapping[str, str]) -> None:
        """`files`: path from the root, with slashes -> text; empty where the text does not matter."""
        self._files = files
        self._named: dict[str, set[str]] = {}
        self._by_name: dict[str, list[str]] = defaultdict(list)
        for path in files:
            if not path.endswith("__init__.py"):
                self._by_name[PurePosixPath(path).name].append(path)

    def named_by(self, path: str) -> set[str]:
        """The files that the file at `path` depends on directly."""
        if path not in self._named:
            self._named[path] = self._read(path)
        return self._named[path]

    def _read(self, path: str) -> set[str]:
        found = set()
        if path.endswith(".py"):
            told = set[ast.AST]()  # strings that are read by people: docstrings
            for node in ast.walk(ast.parse(self._files[path])):
                match node:
                    case ast.Expr(value=ast.Constant() as words):
                        told.add(words)
                    case ast.Import(names=names):
                        found |= {file for alias in names for file in self._module(alias.name)}
                    case ast.ImportFrom(module=str(module), names=names):
                        found |= {file for alias in names for file in self._module(f"{module}.{alias.name}")}
                    case ast.Constant(value=str(text)) if node not in told:
                        found |= self._in_text(text, path)
        elif path.endswith((".yaml", ".yml")):
            found |= self._in_text(self._files[path], path)
        if path.startswith("tests/"):
            found |= {*ENVIRONMENT} & self._files.keys()
            for folder in PurePosixPath(path).parents:
                found |= self._by_conftest(f"{folder}/conftest.py", path)
        return found - {path}

    def distances(self, changed: Iterable[str]) -> dict[str, int]:
        """File -> how many steps it is from the nearest changed file; 0 for the changed ones. The others are not
        touched."""
        near = dict.fromkeys(changed, 0)
        edge = list(near)
        while edge:
            touched = {path for target in edge for path in self._users.get(target, ()) if path not in near}
            step = near[edge[0]] + 1
            near |= dict.fromkeys(touched, step)
            edge = list(touched)
        return near

    @cached_property
    def _users(self) -> dict[str, set[str]]:
        users: dict[str, set[str]] = defaultdict(set)
        for path in self._files:
            if path.endswith("/conftest.py"):
                continue  # what it names counts where its fixtures are taken
            for target in self.named_by(path):
                users[target].add(path)
        return users

    def _by_conftest(self, conftest: str, path: str) -> set[str]:
        """What `path` depends on by this conftest.py: the file, and what it names where `path` takes its fixtures."""
        if conftest not in self._files or conftest == path:
            return set()
        names = "|".join(["conftest", *_FIXTURE.findall(self._files[conftest])])
        takes = re.search(rf"\b(?:{names})\b", self._files[path]) is not None
        return {conftest} | (self.named_by(conftest) if takes else set())

    def _module(self, name: str) -> set[str]:
        """The file of the longest beginning of a dotted name that is a module, and of the packages around it."""
        parts = name.split(".")
        if parts[0] not in CODE:
            return set()
        found = set()
        for length in range(1, len(parts) + 1):
            place = "/".join(parts[:length])
            found |= {f"{place}.py", f"{place}/__init__.py"} & self._files.keys()
        return found

    def _in_text(self, text: str, path: str) -> set[str]:
        """What a string of the file at `path` names. The package names tools and recipes only where it tells people."""
        found = {file for name in _MODULE.findall(text) for file in self._module(name)}
        for name in _FILE.findall(text):
            files = self._by_name.get(PurePosixPath(name).name, ())
            found |= {file for file in files if f"/{file}".endswith(f"/{name.lstrip('./')}")}
        if path.startswith("tests/") and text.isidentifier():
            found |= {f"recipes/{text}.yaml"} & self._files.keys()
        return {file for file in found if file.startswith("asyncrl")} if path.startswith("asyncrl") else found
