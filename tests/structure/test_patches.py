"""The package changes nothing of the libraries that it uses, and uses nothing of them that they call private; what no
public API can do is named here, with the reason."""

import ast
import builtins
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.structure.trees import tree_of

PACKAGE = Path(__file__).resolve().parents[2] / "asyncrl"
OURS = "asyncrl"
DOCUMENTED = {"os._exit", "sys.argv", "sys.stdout"}
"""Names that Python's documentation tells programs to call or to assign."""
REGISTERS = {"torch.library.Library", "torch.library.impl", "torch.library.register_kernel"}
CHANGES = {"update", "setdefault", "pop", "clear"}
"""Methods that change a dict."""
PLAIN_BASES = {"abc", "enum", "typing"}
"""Standard modules whose classes hand no private names to what derives from them."""


@dataclass(frozen=True)
class Exempt:
    """What one file may do, as `patches` words it. `reason`: why no public API does it."""

    file: str
    reason: str
    what: tuple[str, ...]


EXEMPT = (
    Exempt(
        "driver/cluster/ray_session.py",
        "ray.init has no argument, and no variable that is read after Ray's import, by which a Ray of one run listens "
        "on 127.0.0.1 alone, leaves processes out that the run has no use for, and asks for a token of its own.",
        (
            "imports ray._private.node.Node",
            "imports ray._private.ray_constants",
            "imports ray._raylet.AuthenticationTokenLoader",
            "imports ray._raylet.Config",
            "sets ray._private.ray_constants.ENABLE_RAY_CLUSTER",
            "calls setattr(Node, name, _start_nothing)",
        ),
    ),
    Exempt(
        "driver/cluster/placement_groups.py",
        "Which nodes are asked to end, and what each has free, Ray's public calls tell only where its dashboard runs.",
        ("imports ray._private.state",),
    ),
    Exempt(
        "driver/cluster/fork_server.py",
        "Ray starts the `py_executable` of a runtime_env from a script that imports Ray: a second, which a fork saves.",
        ("sets constants.SETUP_WORKER_FILENAME",),
    ),
    Exempt(
        "driver/cluster/fork_server.py",
        "The documented way to forbid an import: Ray reads whose worker it is when it is imported, in the fork.",
        ("sets sys.modules['ray']",),
    ),
    Exempt(
        "driver/cluster/fork_server.py",
        "A fork ends by os._exit, lest it return into the server; the interpreter's own end, which that skips, has no "
        "public name.",
        ("uses atexit._run_exitfuncs", "uses threading._shutdown"),
    ),
    Exempt(
        "inference/vllm/compile_cache.py",
        "vLLM calls a method of what it has loaded that torch's own backend does not give it; its compile options on a "
        "CPU are fixed.",
        (
            "sets torch.compiler.load_compiled_function",
            "calls setattr(function, _FINISH, lambda config: None)",
            "uses loaded._artifacts",
        ),
    ),
    Exempt(
        "inference/vllm/scheduler_counts.py",
        "vLLM tells its preemptions only with all of its statistics, which cost its front end a share of every token.",
        ("uses Counting._preempt_request",),
    ),
    Exempt(
        "kernels/cpu_products.py",
        "torch has no option by which oneDNN makes float32 products on a CPU where MKL is slow.",
        ("registers torch.library.Library('aten', 'IMPL')", "uses torch.ops.mkldnn._linear_pointwise"),
    ),
    Exempt(
        "observability/sinks/wandb.py",
        "W&B has no setting that keeps it from importing pandas for data frames that nobody sends.",
        ("sets wandb.util.pd_available",),
    ),
    Exempt(
        "observability/workspace.py",
        "A workspace is replaced only by its address, which W&B chooses when it saves one, unless its name is set.",
        ("uses made._internal_id", "uses made._internal_name"),
    ),
    Exempt(
        "commands/dashboard.py",
        "wandb_workspaces shows what it would send by no public call.",
        ("uses workspace(entity, project)._to_model",),
    ),
    Exempt(
        "data/chat.py",
        "Compared, not called: a tokenizer that replaces either method decodes by more than its file says.",
        ("uses kind._decode", "uses type(known)._decode"),
    ),
    Exempt(
        "rewards/code/harness.py",
        "The process of one program that is judged: it gives the program modules and builtins of its own, and ends.",
        (
            "calls builtins.__dict__.update",
            "sets sys.modules['__main__']",
            "sets sys.modules[alias]",
            "sets sys.modules[name]",
            "calls setattr(case, name, finished(getattr(case, name)))",
        ),
    ),
    Exempt(
        "trainer/fsdp/lora.py",
        "peft's enable_adapters also clears requires_grad of the adapters, and FSDP would keep that.",
        ("uses layer._disable_adapters",),
    ),
    Exempt(
        "trainer/fsdp/optimizer.py",
        "DTensor.from_local moves a shard to the device of its mesh; this one may lie on the host.",
        ("uses tensor._local_tensor",),
    ),
    Exempt(
        "trainer/host_copies.py",
        "As trainer/fsdp/optimizer.py.",
        ("uses copy._local_tensor",),
    ),
    Exempt(
        "trainer/fsdp/stored_state.py",
        "torch's reader takes the places of tensors in a file in this class alone.",
        ("imports torch.distributed.checkpoint.filesystem._StorageInfo",),
    ),
    Exempt(
        "trainer/megatron/cpu.py",
        "Megatron-core has no path for CPUs: it asks torch.cuda for the device and for streams.",
        (
            "calls setattr(owner, name, value)",
            "sets megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu",
        ),
    ),
    Exempt(
        "trainer/megatron/backend.py",
        "Megatron-core leaves a name unbound without TransformerEngine, which its routers in float32 read.",
        ("sets megatron.core.transformer.moe.moe_utils.te_general_gemm",),
    ),
    Exempt(
        "trainer/megatron/supports.py",
        "The documented way to forbid an import, for as long as Megatron-core is imported.",
        ("sets sys.modules['wandb']",),
    ),
    Exempt(
        "weights/transports/media.py",
        "torch.multiprocessing shares memory of a GPU only through queues to processes that it has started.",
        ("uses storage._share_cuda_", "uses torch.UntypedStorage._new_shared_cuda"),
    ),
    Exempt(
        "weights/transports/process_group.py",
        "torch takes the interface, the threads and the deadline of a group without a default group only by these.",
        (
            "uses torch.distributed.ProcessGroupGloo._Options",
            "uses options._devices",
            "uses options._threads",
            "uses options._timeout",
        ),
    ),
)


def test_nothing_of_other_packages_is_patched_or_used_against_their_word():
    files = {str(path.relative_to(PACKAGE)): path.read_text() for path in PACKAGE.rglob("*.py")}
    found = {f"{file} {what}" for file, source in files.items() for what in patches(source)}
    allowed = {f"{exempt.file} {what}" for exempt in EXEMPT for what in exempt.what}
    assert sorted(found - allowed) == [], "use the public API; where there is none, say why in EXEMPT"
    assert sorted(allowed - found) == [], "EXEMPT names what is gone"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from unittest import mock", "imports unittest.mock"),
        ("from unittest.mock import patch", "imports unittest.mock.patch"),
        ("def f():\n    import ray._private.node", "imports ray._private.node"),
        ("from ray._raylet import Config", "imports ray._raylet.Config"),
        ("import importlib\nimportlib.import_module('ray._raylet')", "imports ray._raylet"),
        ("import torch\ntorch.compile = print", "sets torch.compile"),
        ("import torch.cuda as c\nc.Stream: object = print", "sets torch.cuda.Stream"),
        ("from ray import Node\ndel Node.start", "sets ray.Node.start"),
        ("import gc\ngc.count += 1", "sets gc.count"),
        ("import gc\ng = gc.get\ng.a, x = 1, 2", "sets gc.get.a"),
        ("import gc\nfor gc.count in range(3): pass", "sets gc.count"),
        ("import importlib\nm = importlib.import_module('vllm')\nm.a = 1", "sets vllm.a"),
        ("def f(constants): constants.LIMIT = 1", "sets constants.LIMIT"),
        ("def f(x): x.__class__ = int", "sets x.__class__"),
        ("def f(x): type(x).run = 1", "sets type(x).run"),
        ("def f(x): setattr(x, 'a', 1)", "calls setattr(x, 'a', 1)"),
        ("def f(x): delattr(x, 'a')", "calls delattr(x, 'a')"),
        ("import sys\nsys.modules['ray'] = None", "sets sys.modules['ray']"),
        ("import torch\ntorch.__dict__.update(a=1)", "calls torch.__dict__.update"),
        ("import torch\nvars(torch)['a'] = 1", "sets vars(torch)['a']"),
        ("import torch\ntorch.library.Library('aten', 'IMPL')", "registers torch.library.Library('aten', 'IMPL')"),
        ("from torch.library import impl\n@impl('aten::mm')\ndef mm(a, b): ...", "registers impl('aten::mm')"),
        ("import asyncio\nasyncio.tasks._unregister_task(1)", "uses asyncio.tasks._unregister_task"),
        ("def f(engine): return engine._state", "uses engine._state"),
        ("def f(engine): return getattr(engine, '_state', None)", "uses engine._state"),
        ("from vllm import S\nclass C(S):\n    def f(self): return self._x", "uses C._x"),
        ("def f(base):\n    class C(base):\n        def _g(self): super()._g()", "uses C._g"),
    ],
)  # fmt: skip
def test_what_counts_as_a_patch(source, found):
    assert patches(source) == {found}


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos._exit(1)\nos.environ['A'] = '1'",
        "import sys\nsys.argv = []\nsys.path[:] = []",
        "from vllm import Params\np = Params()\np.limit = 1",
        "from asyncrl.config import LIMIT, _private\nLIMIT.a = _private",
        "class A:\n    NUMBER = 1\n    _x: int\n    def f(self, other: 'A'): self._y = other._x, other._y, self.NUMBER",
        "class A:\n    def _f(self): ...\nclass B(A):\n    def _f(self): super()._f()",
        "from abc import ABC\nclass A(ABC):\n    def f(self): return self._made_by_others",
        "import torch\ntorch.library.Library('asyncrl', 'DEF')",
        "import torch\nvars(torch).get('float32')",
    ],
)
def test_what_does_not(source):
    assert patches(source) == set()


class Names(ast.NodeVisitor):
    """What the names of one file stand for.

    Attributes:
        foreign: name -> full name of what other packages have given the file: modules, what it imports from them, and
            other names for these (`load = torch.compiler.load`).
        ours: what the file imports from this package, and its own classes.
        own: attributes that the file's classes have, by their methods, annotations and assignments.
        private: `imports FULL NAME` of each import of a private name, or of `unittest.mock`.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.foreign: dict[str, str] = {}
        self.ours: set[str] = set()
        self.own: set[str] = set()
        self.private: set[str] = set()
        self.visit(tree)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            top = alias.name.split(".")[0]
            self._import(alias.name, alias.asname or top, alias.name if alias.asname else top)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            full = f"{node.module}.{alias.name}" if node.module and not node.level else OURS
            self._import(full, alias.asname or alias.name, full)

    def _import(self, imported: str, name: str, full: str) -> None:
        if imported.split(".")[0] == OURS:
            self.ours.add(name)
            return
        self.foreign[name] = full
        if imported.startswith("unittest.mock") or any(map(_is_private, imported.split("."))):
            self.private.add(f"imports {imported}")

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.ours.add(node.name)
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign | ast.Assign):
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                self.own |= {target.id for target in targets if isinstance(target, ast.Name)}
            elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                self.own.add(statement.name)
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.ctx, ast.Store) and _is_self(node.value):
            self.own.add(node.attr)
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self._bind(target, node.value)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._bind(node.target, node.value)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if any(map(_is_private, (module := self._module(node)).split("."))):
            self.private.add(f"imports {module}")
        self.generic_visit(node)

    def _bind(self, target: ast.expr, value: ast.expr | None) -> None:
        if isinstance(target, ast.Name) and value is not None and (full := self.full_name(value)):
            self.foreign[target.id] = full

    def full_name(self, node: ast.expr) -> str:
        """That of a module or class of others, or of what they have, without a call; "": of anything else."""
        if isinstance(node, ast.Name):
            return self.foreign.get(node.id, "")
        if isinstance(node, ast.Attribute):
            owner = self.full_name(node.value)
            return f"{owner}.{node.attr}" if owner else ""
        if not isinstance(node, ast.Call):
            return ""
        return ast.unparse(node) if ast.unparse(node.func) == "type" and len(node.args) == 1 else self._module(node)

    def _module(self, node: ast.Call) -> str:
        """The module that `importlib.import_module` gives."""
        is_import = self.full_name(node.func) == "importlib.import_module"
        return str(getattr(node.args[0], "value", "")) if is_import and node.args else ""

    def is_namespace(self, node: ast.expr) -> bool:
        """True for the dict of a module or class of others, and for that of all modules."""
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "vars" and node.args:
            return bool(self.full_name(node.args[0]))
        full = self.full_name(node)
        return full == "sys.modules" or full.endswith(".__dict__")

    def is_foreign(self, base: ast.expr) -> bool:
        """True for a base class that neither this package nor Python's builtins have."""
        base = base.value if isinstance(base, ast.Subscript) else base
        name = ast.unparse(base)
        is_known = name.split(".")[0] in self.ours or hasattr(builtins, name)
        return not is_known and self.full_name(base).split(".")[0] not in PLAIN_BASES


def patches(source: str) -> set[str]:
    """What a file does to other packages, or takes from them against their word, in words."""
    tree = tree_of(source)
    names = Names(tree)
    nodes = list(ast.walk(tree))
    found = (_assigned(node, names) or _registered(node, names) or _used(node, names) for node in nodes)
    inherited = (what for node in nodes if isinstance(node, ast.ClassDef) for what in _inherited(node, names))
    return names.private | {what for what in found if what} | set(inherited)


def _assigned(node: ast.AST, names: Names) -> str:
    """An attribute of a module or class of others that is set. One in capitals counts as such, whoever holds it; so
    does whatever `setattr` and `delattr` are called with."""
    stores = not isinstance(getattr(node, "ctx", ast.Load()), ast.Load)
    if isinstance(node, ast.Attribute) and stores:
        full = names.full_name(node)
        is_class = node.attr == "__class__" or (node.attr.isupper() and not _is_self(node.value))
        return f"sets {full or ast.unparse(node)}" if (full or is_class) and full not in DOCUMENTED else ""
    if isinstance(node, ast.Subscript) and stores and names.is_namespace(node.value):
        return f"sets {ast.unparse(node)}"
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"):
        return f"calls {ast.unparse(node)}"
    if isinstance(node, ast.Attribute) and node.attr in CHANGES and names.is_namespace(node.value):
        return f"calls {ast.unparse(node)}"
    return ""


def _registered(node: ast.AST, names: Names) -> str:
    """An operator in a namespace that is not ours."""
    if not isinstance(node, ast.Call) or names.full_name(node.func) not in REGISTERS:
        return ""
    first = node.args[0] if node.args else None
    is_ours = isinstance(first, ast.Constant) and str(first.value).startswith(OURS)
    return "" if is_ours else f"registers {ast.unparse(node)}"


def _used(node: ast.AST, names: Names) -> str:
    """A private name of others: one that no class of the file has."""
    if isinstance(node, ast.Attribute) and _is_private(node.attr):
        full = names.full_name(node)
        is_own = not full and (_is_self(node.value) or node.attr in names.own)
        return "" if is_own or full in DOCUMENTED else f"uses {full or ast.unparse(node)}"
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
        asked = getattr(node.args[1], "value", None)
        if _is_private(asked) and asked not in names.own:
            return f"uses {ast.unparse(node.args[0])}.{asked}"
    return ""


def _inherited(kind: ast.ClassDef, names: Names) -> Iterator[str]:
    """Private names of a base class of others."""
    if not any(map(names.is_foreign, kind.bases)):
        return
    for node in ast.walk(kind):
        if not isinstance(node, ast.Attribute) or not _is_private(node.attr) or not _is_self(node.value):
            continue
        if node.attr not in names.own or ast.unparse(node.value) == "super()":
            yield f"uses {kind.name}.{node.attr}"


def _is_private(name: object) -> bool:
    return isinstance(name, str) and name.startswith("_") and not name.startswith("__")


def _is_self(node: ast.expr) -> bool:
    return ast.unparse(node) in ("self", "cls", "super()")
