"""The shape of the code: one-way imports, heavy packages only where they belong, small rooms, documented keys."""

import ast
import re
import subprocess
import tomllib
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from setuptools import find_packages

from asyncrl.config.algorithm_parts import ADVANTAGES, CORRECTIONS, LOSSES
from asyncrl.config.load import known_keys, load_recipe
from asyncrl.trainer.backends import BACKENDS
from asyncrl.types.events import EVENTS
from asyncrl.types.metrics import FAMILIES, Metric
from tests.processes import ROOT, ran
from tests.structure.trees import tree_of

PACKAGE = ROOT / "asyncrl"
FILES = sorted(PACKAGE.rglob("*.py"))

# A folder may import those that are named, itself and the foundation.
PARTS = {
    "data": set(),
    "workers": set(),
    "kernels": set(),
    "weights": set(),
    "algorithms": set(),
    "checkpoint": set(),
    "observability": set(),
    "rewards": {"data", "workers"},
    "inference": {"weights", "workers", "kernels"},
    "trainer": {"algorithms", "weights", "checkpoint", "kernels"},
    "queue": {"observability"},
    "chat": {"data"},
    "environments": {"data", "rewards", "workers", "chat"},
    "rollout": {"data", "rewards", "environments", "inference", "queue"},
    "serving": {"data", "chat", "inference", "rollout"},
    "report": {"checkpoint", "observability"},
    "plan": {"queue", "report", "rollout"},
    "audit": set(),
}
FOUNDATION = {"types", "errors", "json_records", "ranges", "registry", "remote", "config"}
WITHIN_FOUNDATION = {
    "registry": {"errors"},
    "remote": {"errors"},
    "config": {"errors", "ranges"},
    "types": {"ranges"},
    "json_records": {"errors", "ranges"},
}
TOP = {"driver", "commands", "loop"}
HEAVY = ("torch", "ray", "vllm", "sglang", "megatron", "transformers", "datasets", "wandb")


def imports(path: Path) -> set[str]:
    """Modules that `path` imports anywhere, also inside functions."""
    found = set()
    for node in ast.walk(tree_of(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def part_of(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def test_imports_run_one_way():
    wrong = []
    for path in FILES:
        part = part_of(path)
        used = {m.split(".")[1] for m in imports(path) if m.startswith("asyncrl.")} - {part}
        if part in TOP or part == "__init__":
            allowed = FOUNDATION | set(PARTS) | TOP
            if part != "commands":
                allowed -= {"commands"}
        elif part in FOUNDATION:
            allowed = WITHIN_FOUNDATION.get(part, set())
        else:
            allowed = FOUNDATION | PARTS[part]
        wrong += [f"{path.relative_to(PACKAGE)} imports {sorted(used - allowed)}"] if used - allowed else []
    assert not wrong


LIGHT = {
    # importing these must not load what stands beside them
    "asyncrl.types": HEAVY,
    "asyncrl.errors": HEAVY,
    "asyncrl.config.load": HEAVY,
    "asyncrl.queue.ledger": HEAVY,
    "asyncrl.queue.message_queue": HEAVY,
    "asyncrl.rollout.router": HEAVY,
    "asyncrl.rollout.rollouter": HEAVY,
    "asyncrl.driver.fleet.rollouters": HEAVY,
    "asyncrl.rewards.reward_worker": HEAVY,
    "asyncrl.audit": HEAVY,
    "asyncrl.driver.cluster.janitor": HEAVY,
    "asyncrl.driver.cluster.fork_server": (*HEAVY, "numpy", "asyncrl.config"),
    "asyncrl.driver.preload": HEAVY,
    "asyncrl.environments": HEAVY,
    "asyncrl.environments.tools.tool_worker": (*HEAVY, "numpy", "asyncio"),
    "asyncrl.environments.gymnasium_worker": (*HEAVY, "numpy", "asyncio"),
    "asyncrl.rewards": HEAVY,
    "asyncrl.workers.sandbox": (*HEAVY, "numpy", "asyncio"),
    "asyncrl.data.dataset": HEAVY,
    "asyncrl.data.tokenizer": HEAVY,
    "asyncrl.inference.replica": HEAVY,
    "asyncrl.driver.publish.checkpoint_engine": HEAVY,
    "asyncrl.weights.plan": HEAVY,
    "asyncrl.algorithms": HEAVY,
    "asyncrl.trainer.packing": HEAVY,
    "asyncrl.trainer.backend": HEAVY,
    "asyncrl.trainer.backends": HEAVY,
    "asyncrl.trainer.trainer_worker": HEAVY,
    "asyncrl.driver.preflight": HEAVY,
    "asyncrl.commands.train": HEAVY,
    "asyncrl.commands.plan": HEAVY,
    "asyncrl.commands.serve": HEAVY,
    "asyncrl.serving.app": HEAVY,
    "asyncrl.driver.coordinator": HEAVY,
    "asyncrl.rollout.evaluation": HEAVY,
    "asyncrl.commands.evaluate": HEAVY,
    "asyncrl.commands.export": HEAVY,
    "asyncrl.driver.run": ("torch", "vllm", "sglang", "megatron", "transformers", "wandb"),
    "asyncrl.weights.transports": ("ray", "vllm", "sglang", "megatron", "transformers"),
    "asyncrl.inference.engines": HEAVY,
    "asyncrl.inference.vllm.support": HEAVY,
    "asyncrl.inference.sglang.engine": HEAVY,
    "asyncrl.inference.sglang.support": HEAVY,
    "asyncrl.inference.remote.support": HEAVY,
    "asyncrl.inference.remote.engine": HEAVY,
    "asyncrl.trainer.fsdp.supports": HEAVY,
    "asyncrl.trainer.megatron.supports": HEAVY,
    "asyncrl.trainer.megatron.names": HEAVY,
    "asyncrl.trainer.megatron.training_state": ("ray", "vllm", "sglang", "megatron", "transformers"),
    "asyncrl.inference.torch_engine.engine": ("ray", "vllm", "sglang", "megatron"),
    "asyncrl.trainer.fsdp.backend": ("ray", "vllm", "sglang", "megatron"),
    "asyncrl.loop": ("ray", "vllm", "sglang", "megatron", "omegaconf", "asyncrl.config.recipe", "asyncrl.driver"),
}


def test_heavy_packages_are_imported_only_where_the_folder_says_so():
    """Modules with the same list in one process, one after the other: the first that loads something is named."""
    wrong = []
    for heavy in sorted(set(LIGHT.values())):
        modules = [module for module, listed in LIGHT.items() if listed == heavy]
        script = f"""
import importlib, sys
for module in {modules!r}:
    importlib.import_module(module)
    if found := [name for name in {list(heavy)!r} if name in sys.modules]:
        sys.exit(f"{{module}} loads {{found}}")
"""
        done = ran("-c", script, timeout_s=280, code=None)
        wrong += [done.stderr[-500:]] if done.returncode else []
    assert not wrong


MANY_METHODS = {
    **{"ReplicaPool": 22, "Ledger": 20, "MessageQueue": 19},
    **dict.fromkeys(("TrainerPool", "TrainerWorker"), 18),
}
"""Classes that may have more than 15 public methods: a state with many transitions, the actor in front of one, and a
trainer rank with what stands before it."""


def test_no_room_is_too_large():
    """The aim is 400 lines a file and 60 a function; this holds the tails."""
    offenders = []
    for path in FILES:
        source = path.read_text()
        if (lines := source.count("\n")) > 600:
            offenders.append(f"{path}: {lines} lines")
        for node in ast.walk(tree_of(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > 100:
                    offenders.append(f"{path}:{node.lineno} {node.name}: {length} lines")
            if isinstance(node, ast.ClassDef):
                methods = [n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
                public = [m for m in methods if not m.name.startswith("_")]
                if len(public) > MANY_METHODS.get(node.name, 15):
                    offenders.append(f"{path}:{node.lineno} {node.name}: {len(public)} public methods")
    assert not offenders


def test_a_public_class_name_is_defined_once():
    """A reader who meets a name in a signature or a log needs no import to know which class it is."""
    places: dict[str, list[str]] = {}
    for path in FILES:
        for node in ast.walk(tree_of(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert not {name: found for name, found in places.items() if len(found) > 1}


def test_the_wheel_holds_no_test_code():
    """What is installed knows neither the suites and fakes of `asyncrl_testing` nor pytest."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    packages = find_packages(str(ROOT), **settings)
    assert "asyncrl.driver" in packages
    assert {name.split(".")[0] for name in packages} == {"asyncrl"}
    users = [
        str(p) for p in FILES if {m.split(".")[0] for m in imports(p)} & {"asyncrl_testing", "pytest", "hypothesis"}
    ]
    assert not users


def test_the_root_is_small():
    """Folders are the nouns of the flow; the root keeps what every folder uses, and the algorithm on one page."""
    modules = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}
    assert modules == {"errors", "json_records", "ranges", "registry", "loop"}


def test_imports_have_no_circle():
    """Between modules, imports for type checking included: a circle hides which of two parts is the lower one."""
    dotted = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in FILES}
    of = {name: path for path, name in dotted.items()}
    graph = {name: {m for m in imports(path) if m in of and m != name} for name, path in of.items()}
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def folder_imports(depth: int) -> dict[str, set[str]]:
    """Folder at `depth` below the package -> the other folders at that depth, of the same parent, that it imports."""
    graph: dict[str, set[str]] = {}
    for path in FILES:
        own = path.relative_to(PACKAGE).parts[:-1][:depth]
        if len(own) < depth:
            continue
        users = graph.setdefault("/".join(own), set())
        for module in imports(path):
            other = tuple(module.split(".")[1 : depth + 1])
            same_parent = module.startswith("asyncrl.") and other[:-1] == own[:-1] and other != own
            if same_parent and PACKAGE.joinpath(*other).is_dir():
                users.add("/".join(other))
    return graph


@pytest.mark.parametrize("depth", [1, 2])
def test_folders_have_no_circle(depth):
    """A circle of folders hides which of them is the library and which runs it."""
    try:
        list(TopologicalSorter(folder_imports(depth)).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_the_training_step_knows_no_backend():
    """A second backend copies nothing: what is below `trainer` imports one backend's folder in that folder only."""
    folders = tuple(spec.backend.rpartition(".backend:")[0] for spec in BACKENDS.values())
    users = {
        str(path.relative_to(ROOT))
        for path in FILES
        if any(module.startswith(folders) for module in imports(path))
        and not any(str(path.with_suffix("").relative_to(ROOT)).replace("/", ".").startswith(f) for f in folders)
    }
    assert not users, "go through trainer/backends.py"


def test_a_part_of_an_algorithm_is_one_file_and_one_entry():
    """Only the entries list names, and only they say what a part is: elsewhere a recipe's choice is looked up."""
    names = {*ADVANTAGES, *LOSSES, *CORRECTIONS}
    offenders = []
    for path in FILES:
        if path == PACKAGE / "config" / "algorithm_parts.py":
            continue
        for node in ast.walk(tree_of(path.read_text())):
            listed: list[ast.expr | None] = []
            if isinstance(node, ast.Tuple | ast.List | ast.Set):
                listed = [*node.elts]
            elif isinstance(node, ast.Dict):
                listed = [*node.keys]
            elif isinstance(node, ast.Compare):
                listed = [node.left, *node.comparators]
            elif isinstance(node, ast.MatchValue):
                listed = [node.value]
            found = [item.value for item in listed if isinstance(item, ast.Constant) and item.value in names]
            offenders += [f"{path.relative_to(PACKAGE)}:{node.lineno} names {name}" for name in found]
    assert not offenders


def test_omegaconf_has_one_user():
    users = [p for p in FILES if any(m.split(".")[0] == "omegaconf" for m in imports(p))]
    assert users == [PACKAGE / "config" / "load.py"]


def test_every_wait_on_another_process_has_a_deadline_and_a_name():
    """Answers of actors come through `remote.reply`; nobody awaits a reference itself, or looks an actor up by name."""
    for path in FILES:
        if part_of(path) == "remote":
            continue
        for node in ast.walk(tree_of(path.read_text())):
            where = f"{path.relative_to(PACKAGE)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Await) and isinstance(node.value, ast.Call):
                called = node.value.func
                assert not (isinstance(called, ast.Attribute) and called.attr == "remote"), f"{where} awaits an actor"
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "ray":
                assert node.attr not in ("get", "wait", "get_actor"), f"{where} uses ray.{node.attr}"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "options":
                assert not {k.arg for k in node.keywords} & {"name", "lifetime"}, f"{where} names or detaches an actor"


def test_no_wait_swallows_its_cancellation():
    """`asyncio.wait_for` of Python 3.11 returns instead of raising CancelledError when what it waits for is done in the
    turn in which it is cancelled: whoever cancelled then waits forever."""
    users = {str(p.relative_to(PACKAGE)) for p in FILES if "asyncio.wait_for(" in p.read_text()}
    assert not users, f"use `async with asyncio.timeout(...)` instead: {sorted(users)}"


def test_nobody_joins_a_cluster_by_chance():
    """`ray.init` without an address joins the cluster that was started last on this machine, whoever's it is."""
    for path in (*FILES, *sorted(p for d in ("tests", "tools", "benchmarks") for p in (ROOT / d).rglob("*.py"))):
        for node in ast.walk(tree_of(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "ray.init":
                assert node.args or "address" in {k.arg for k in node.keywords}, f"{path}:{node.lineno}"


def test_the_environment_is_read_in_the_launch_code_only():
    allowed = {"config/load.py", "config/hub.py", "commands/train.py", "commands/doctor.py", "observability/logs.py"}
    allowed |= {"driver/cluster/placement.py", "driver/cluster/ray_session.py"}
    allowed |= {"config/checks.py"}  # whether GPUs are hidden
    allowed |= {"remote/connection.py"}  # whether Ray encrypts, which it takes from nowhere else
    allowed |= {
        "driver/cluster/fork_server.py",
        "driver/cluster/fork_worker.py",
        "driver/preload.py",
    }  # those of other processes
    allowed |= {"kernels/cpu_products.py"}  # what oneDNN takes from nowhere else
    allowed |= {"trainer/trainer_worker.py"}  # whether Ray warns of a wait in a thread
    # what NCCL, gloo and vLLM take from nowhere else
    allowed |= {"weights/transports/process_group.py", "inference/vllm/launch.py", "inference/vllm/scheduler_counts.py"}
    allowed |= {"inference/sglang/host_process.py", "inference/sglang/support.py"}  # that of SGLang's own processes
    allowed |= {"inference/remote/server_client.py"}  # the key of servers, in the process that sends it
    # that of processes which are started here: an agent's program, an MCP server
    allowed |= {"environments/agent_program.py", "environments/sandboxes.py", "environments/tools/mcp_server.py"}
    users = {str(p.relative_to(PACKAGE)) for p in FILES if re.search(r"os\.(environ|getenv)", p.read_text())}
    assert users <= allowed, f"read configuration instead: {sorted(users - allowed)}"


def test_every_key_of_a_recipe_is_documented():
    documented = (ROOT / "docs" / "recipes.md").read_text()
    missing = [key for key in known_keys() if f"`{key}`" not in documented]
    assert not missing, f"run tools/document.py: {missing}"
    listed = set(re.findall(r"^\| `([\w.]+)` \|", documented, re.MULTILINE))
    assert listed == set(known_keys())


def sentences(source: str) -> Iterator[tuple[int, str]]:
    """Line and value of every string with a space in it, f-strings whole, with HOLE for each value; without
    docstrings."""
    tree = tree_of(source)
    skipped = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):  # an f-string comes before its parts
        if isinstance(node, ast.JoinedStr):
            skipped |= {id(part) for part in node.values}
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else HOLE for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            text = node.value
        else:
            continue
        if " " in text:
            yield node.lineno, text


HOLE = "\0"
DOTTED = re.compile(rf"(?<![\w./:{HOLE}])[a-z_]+(?:\.[a-z_0-9]+)+(?!\w|[(/{HOLE}]|\.\w|\.{HOLE})")


def unknown_keys(source: str) -> list[str]:
    """Line and name of what sentences call a key of a recipe, by its section, and is none."""
    keys = known_keys()
    known = {".".join(parts[:n]) for parts in (key.split(".") for key in keys) for n in range(1, len(parts) + 1)}
    named = ((line, name) for line, text in sentences(source) for name in DOTTED.findall(text))
    return [f"{line} {name}" for line, name in named if name.split(".")[0] in known and name not in known]


def test_a_key_that_a_message_names_exists():
    wrong = {str(path.relative_to(PACKAGE)): found for path in FILES if (found := unknown_keys(path.read_text()))}
    assert not wrong


def test_what_counts_as_a_key_that_does_not_exist():
    lines = [
        '"""Docstrings say set weights.nothing."""',
        'do = "raise weights.timeout_s"',
        'do = f"{asked}: set trainer.{backend}.x, weights.{key} or trainer.fsdp.offload={value}"',
        'do = "lower rollout.torch.num_slots, see rollout.torch, data.jsonl/x and model.embed_tokens"',
        'name = "model.embed_tokens.weight"',
    ]
    found = unknown_keys("\n".join(lines))
    assert found == ["2 weights.timeout_s", "3 trainer.fsdp.offload", "4 model.embed_tokens"]


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Line and value of every string of a module, the parts of f-strings included; without docstrings."""
    tree = tree_of(path.read_text())
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
            yield node.lineno, node.value


def test_a_metric_is_spelt_where_it_is_declared_only():
    """Tests and benchmarks read metrics.jsonl as a user does, by its names."""
    groups = {f"{metric.group}/" for metric in Metric if "/" in metric} - {"weights/"}  # a key of the process groups
    spelt = [
        f"{path.relative_to(ROOT)}:{line} {text!r}"
        for folder in (PACKAGE, ROOT / "asyncrl_testing", ROOT / "tools")
        for path in sorted(folder.rglob("*.py"))
        if path != PACKAGE / "types" / "metrics.py"
        for line, text in texts(path)
        if text in set(Metric) - {Metric.STEP, Metric.TIME} or text in groups or text.startswith(FAMILIES)
    ]
    assert not spelt, "use asyncrl.types.metrics"


def test_an_event_is_declared_once_and_written():
    """No other module spells a kind of event; no kind is declared that nothing writes."""
    kinds = {kind for kind in EVENTS if "_" in kind}  # the others are words of other things too
    tools = sorted((ROOT / "tools").rglob("*.py"))
    spelt = [
        f"{path.relative_to(ROOT)}:{line} {text!r}"
        for path in (*FILES, *tools)
        if path != PACKAGE / "types" / "events.py"
        for line, text in texts(path)
        if text in kinds
    ]
    assert not spelt, "use asyncrl.types.events"
    trees = [tree_of(path.read_text()) for path in FILES if part_of(path) != "audit"]
    calls = (node.func for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call))
    made = {ast.unparse(called).removeprefix("events.") for called in calls}
    assert {event.__name__ for event in EVENTS.values()} <= made


def test_the_generated_tables_of_the_documents_are_up_to_date():
    ran("tools/document.py", "--check", timeout_s=300)


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_recipe_loads_and_says_what_it_is(recipe):
    load_recipe(recipe, [])
    assert recipe.read_text().startswith("# ")


def test_the_smallest_recipe_fits_on_a_screen():
    assert len((ROOT / "recipes" / "quickstart.yaml").read_text().splitlines()) <= 30


def test_links_in_the_documents_lead_somewhere():
    broken = []
    for document in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)", document.read_text()):
            if not target.startswith(("http", "mailto:")) and not (document.parent / target).exists():
                broken.append(f"{document.relative_to(ROOT)} -> {target}")
    assert not broken


def test_the_glossary_has_the_words_of_the_types():
    glossary = (ROOT / "docs" / "glossary.md").read_text().lower()
    words = ("global_steps", "policy version", "ordinal", "trajectory", "segment", "group", "lag", "max_lag", "slot")
    missing = [w for w in (*words, "replica", "publish", "ticket", "deadline") if w not in glossary]
    assert not missing


def test_tested_md_names_tests_that_exist():
    tested = "".join((ROOT / "docs" / page).read_text() for page in ("tested.md", "comparison.md"))
    named = set(re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", tested))
    assert named
    gone = [
        f"{file}::{name}" for file, name in named if not (ROOT / file).exists() or name not in (ROOT / file).read_text()
    ]
    assert not gone


def test_no_link_is_part_of_the_repository():
    """A link to a place on somebody's machine breaks every other checkout."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    listed = subprocess.run(["git", "ls-files", "-s"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert not [line for line in listed.splitlines() if line.startswith("120000")]
