"""Writes the generated parts of the documents: recipe keys, events, metrics, replicas, folders, loops.

    python tools/document.py            # writes them, see PARTS
    python tools/document.py --check    # exit code 1 when one of them is out of date

Each part stands between two marker lines; the prose around it is written by hand. The meaning of a key is the
docstring below its field in asyncrl/config, that of an event the docstring of its record in asyncrl.types.events, that
of a metric its entry in asyncrl.types.metrics. The contract of a loop is in the docstring of its function or class.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import itertools
import json
import re
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from asyncrl.config.recipe import Recipe
from asyncrl.driver.fleet.membership import TRANSITIONS
from asyncrl.observability.charts import SECTIONS
from asyncrl.ranges import bounds_of, range_in_words
from asyncrl.types import ReplicaState
from asyncrl.types.events import EVENTS
from asyncrl.types.metrics import Metric, metric_of

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "asyncrl"
UNSET = "???"
"""OmegaConf's mark of a value that a recipe must set."""
CONTRACT = ("Consumes", "Produces", "Waits for", "Unblocked by", "Stops when")
LOOPS = (
    ("Training loop", "driver", "driver/coordinator.py", "Coordinator._train"),
    ("Run", "driver", "driver/run.py", "_Run._train"),
    ("Checkpoint writer", "driver", "driver/checkpoint_writer.py", "CheckpointWriter"),
    ("Rollouters", "driver", "driver/fleet/rollouters.py", "Rollouters.run"),
    ("Keeper of the server", "driver", "driver/fleet/server_keeper.py", "ServerKeeper"),
    ("Health watch", "driver", "driver/coordinator.py", "Coordinator._watch_health"),
    ("Replica pool", "driver", "driver/fleet/replica_pool.py", "ReplicaPool"),
    ("Number of replicas", "driver", "driver/fleet/fleet_size.py", "FleetSize.watch"),
    ("Requests of asyncrl-scale", "driver", "driver/scale_requests.py", "ScaleDesk.serve"),
    ("Watchdog", "a thread of the driver", "driver/run.py", "Watchdog._watch"),
    ("Janitor", "a process of its own", "driver/cluster/janitor.py", "main"),
    ("Admission loop", "rollouter", "rollout/rollouter.py", "Rollouter._admit"),
    ("Group task", "rollouter, one per ticket", "rollout/rollouter.py", "Rollouter._group"),
    ("Generation client", "rollouter", "rollout/generation.py", "GenerationClient"),
    ("Request task", "replica, one per request", "inference/replica.py", "Replica._serve"),
    ("Watch of a server", "replica", "inference/remote/engine.py", "RemoteEngine._look"),
    ("Decode thread", "replica", "inference/torch_engine/loop.py", "DecodeLoop.run"),
    ("Transfer thread", "replica", "inference/torch_engine/transfer.py", "TorchTransfer"),
    ("Trainer rank", "trainer rank", "trainer/trainer_worker.py", "TrainerWorker"),
)
"""Name, process, module, and the function or class whose docstring has the contract."""


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a recipe; `inner` is the section's dataclass when the key is a section."""

    name: str
    kind: Any
    default: str
    meaning: str
    inner: type | None


def keys_of(schema: type, prefix: str = "") -> Iterator[Key]:
    """The fields of `schema` in their order. Raises SystemExit naming a field without a docstring."""
    meanings = field_docstrings(schema)
    hints = get_type_hints(schema, include_extras=True)
    for field in fields(schema):
        if field.name not in meanings:
            raise SystemExit(f"{schema.__name__}.{field.name} has no docstring below it: say what it means there")
        kind = hints[field.name]
        inner = kind if is_dataclass(kind) else None
        default = "" if inner else render_default(field)
        yield Key(prefix + field.name, kind, default, meanings[field.name], inner if isinstance(inner, type) else None)


def field_docstrings(schema: type) -> dict[str, str]:
    """Field name -> the string literal that stands below the field in the source, in one line."""
    path = inspect.getsourcefile(schema)
    assert path is not None
    body = next(
        node.body
        for node in ast.parse(Path(path).read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == schema.__name__
    )
    found = {}
    for statement, below in itertools.pairwise(body):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
            and isinstance(below.value.value, str)
        ):
            found[statement.target.id] = " ".join(below.value.value.split())
    return found


def render_default(field: Field[Any]) -> str:
    """The default as it would be written in a recipe."""
    value = field.default_factory() if field.default_factory is not MISSING else field.default
    if value == UNSET:
        return "must be set"
    if value is None:
        return "`null`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value}`"


def render_kind(kind: Any) -> str:
    """The type in words with its range, or the choices."""
    if get_origin(kind) is Annotated:
        return f"{render_kind(get_args(kind)[0])} {range_in_words(bounds_of(kind))}"
    if get_origin(kind) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(kind))
    if get_origin(kind) in (types.UnionType, Union):
        return " or ".join(render_kind(part) for part in get_args(kind))
    if get_origin(kind) is list:
        return f"list of {render_kind(get_args(kind)[0])}"
    if get_origin(kind) is dict:
        return "mapping of {} to {}".format(*(render_kind(part) for part in get_args(kind)))
    return "null" if kind is type(None) else kind.__name__


def escape(text: str) -> str:
    return text.replace("|", "\\|")


def recipe_keys() -> str:
    """Sections in the order of the recipe: a heading, what the section is for, and a table."""
    top = list(keys_of(Recipe))
    parts = ["### The recipe as a whole", "", *_table(key for key in top if key.inner is None)]
    for section in top:
        if section.inner is not None:
            parts += ["", f"### `{section.name}`", "", section.meaning, "", *_table(_leaves(section))]
    return "\n".join(parts)


def _leaves(section: Key) -> Iterator[Key]:
    assert section.inner is not None
    for key in keys_of(section.inner, section.name + "."):
        if key.inner is None:
            yield key
        else:
            yield from _leaves(key)


def _table(keys: Iterator[Key]) -> list[str]:
    rows = [f"| `{k.name}` | {render_kind(k.kind)} | {k.default} | {escape(k.meaning)} |" for k in keys]
    return ["| key | type or choices | default | meaning |", "|---|---|---|---|", *rows]


def metric_keys() -> str:
    """A heading for each group, what its charts show, and a table."""
    parts = []
    for group in dict.fromkeys(metric.group for metric in Metric):
        title = f"`{group}/`" if group != "run" else "The run as a whole"
        parts += [
            f"### {title}",
            "",
            "| key | unit | better | over steps | required | meaning |",
            "|---|---|---|---|---|---|",
        ]
        for metric in (metric for metric in Metric if metric.group == group):
            required, better = "yes" if metric.is_required else "", "" if metric.better == "none" else metric.better
            reduction, meaning = metric.reduction, escape(metric.meaning)
            parts.append(f"| `{metric}` | {metric.unit} | {better} | {reduction} | {required} | {meaning} |")
        parts.append("")
    return "\n".join(parts).rstrip()


def charts() -> str:
    """The charts of the report and of the W&B workspace, by section."""
    parts = []
    for title, of_section in SECTIONS.items():
        parts += [f"**{title}**", ""]
        for chart in of_section:
            families = dict.fromkeys(str(metric_of(key)) for key in chart.keys)
            kind = {"lines": "lines", "stack": "stacked"}[chart.kind]
            parts.append(f"* {chart.title} ({kind}): {', '.join(f'`{key}`' for key in families)}")
        parts.append("")
    return "\n".join(parts).rstrip()


def event_kinds() -> str:
    rows = []
    for kind, event in EVENTS.items():
        names = ", ".join(f"`{field.name}`" for field in fields(event))
        rows.append(f"| `{kind}` | {names} | {escape(' '.join(str(event.__doc__).split()))} |")
    return "\n".join(["| event | fields | meaning |", "|---|---|---|", *rows])


def replica_transitions() -> str:
    """A row for each state, a column for each event."""
    rows = []
    for state in get_args(ReplicaState):
        cells = [follows.get(state, "") for follows in TRANSITIONS.values()]
        rows.append(f"| {' | '.join((f'**{state}**', *cells))} |")
    head = ["state", *(event.replace("_", " ") for event in TRANSITIONS)]
    return "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *rows])


def rooms() -> str:
    """A row for each folder of the package: the first paragraph of its docstring, where it runs, what it imports."""
    rows = []
    for path in sorted([*PACKAGE.glob("*/__init__.py"), *PACKAGE.glob("driver/*/__init__.py")]):
        what, where, *_ = [*(ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n"), ""]
        if not where.startswith("Runs in: "):
            raise SystemExit(f"{path}: its docstring needs a first paragraph, and a second one `Runs in: ...`")
        others = ", ".join(sorted(imported_rooms(path.parent)))
        rows.append(
            f"| `{path.parent.relative_to(PACKAGE)}/` | {' '.join(what.split())} | {where[9:].rstrip('.')} | {others} |"
        )
    return "\n".join(["| folder | what it is | runs in | imports |", "|---|---|---|---|", *rows])


def imported_rooms(room: Path) -> set[str]:
    """The folders that the modules of this one import anywhere, without those that all may import."""
    names = set()
    for path in room.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names |= {module.split(".")[1] for module in modules if module.startswith("asyncrl.")}
    return {name for name in names if (PACKAGE / name).is_dir()} - {
        room.relative_to(PACKAGE).parts[0],
        "types",
        "config",
        "remote",
    }


def loops() -> str:
    """A heading and a list for each loop: the contract that stands on it."""
    parts = []
    for title, process, module, name in LOOPS:
        node: Any = ast.parse((PACKAGE / module).read_text())
        for each in name.split("."):
            node = next((inner for inner in node.body if getattr(inner, "name", None) == each), None)
            if node is None:
                raise SystemExit(f"{module}: it has no {name}, which LOOPS of tools/document.py names")
        contract = contract_of(ast.get_docstring(node) or "")
        if tuple(contract) != CONTRACT:
            raise SystemExit(f"{module}: the docstring of {name} needs a line for each of {', '.join(CONTRACT)}")
        lines = (f"* {label.lower()}: {text.rstrip('.')}" for label, text in contract.items())
        parts.append("\n".join([f"**{title}** (`{module}`, {process})", "", *lines]))
    return "\n\n".join(parts)


def families() -> str:
    """A row for each family of tests/families.json, and the types of models that are not among them."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    configs = json.loads((ROOT / "tests/families.json").read_text())
    found = json.loads((ROOT / "benchmarks/results/models.json").read_text())
    lines = ["| family | trainer | embedded engine | vLLM: nats a token at lag 0 |", "|---|---|---|---|"]
    for name, row in found.items():
        kind = configs[name]["model_type"]
        family = f"{name} ({kind})" if kind != name else name
        lines.append(f"| {family} | {row['trainer']} | {row['torch']} | {escape(row.get('vllm', 'not tried'))} |")
    others = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - {config["model_type"] for config in configs.values()})
    return "\n".join([*lines, "", f"Not yet tried: {', '.join(others)}."])


def contract_of(docstring: str) -> dict[str, str]:
    """Label -> text, in the order of the docstring; a text ends at the next label or at an empty line."""
    labels = "|".join(CONTRACT)
    found = re.findall(rf"^({labels}): (.*?)(?=\n(?:{labels}): |\n\n|\Z)", docstring, re.MULTILINE | re.DOTALL)
    return {label: " ".join(text.split()) for label, text in found}


PARTS: tuple[tuple[str, str, Callable[[], str]], ...] = (
    ("docs/recipes.md", "recipe keys", recipe_keys),
    ("docs/run_directory.md", "events", event_kinds),
    ("docs/metrics.md", "metric keys", metric_keys),
    ("docs/metrics.md", "charts", charts),
    ("docs/replicas.md", "replica transitions", replica_transitions),
    ("docs/architecture.md", "rooms", rooms),
    ("docs/dataflow.md", "loops", loops),
    ("docs/models.md", "families", families),
)


def rewritten(path: Path, part: str, content: str) -> str:
    """The text of `path` with its generated part replaced. Raises SystemExit: its markers are not there once each."""
    begin, end = f"<!-- {part}: written by tools/document.py -->", f"<!-- {part}: end -->"
    text = path.read_text()
    if text.count(begin) != 1 or text.count(end) != 1:
        raise SystemExit(f"{path}: it must have each of these lines once:\n{begin}\n{end}")
    head, rest = text.split(begin)
    return f"{head}{begin}\n\n{content}\n\n{end}{rest.split(end)[1]}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the generated tables of the documents.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when a document is out of date")
    check = parser.parse_args().check
    stale = 0
    for name, part, render in PARTS:
        path = ROOT / name
        text = rewritten(path, part, render())
        if text == path.read_text():
            continue
        stale += 1
        if not check:
            path.write_text(text)
        print(f"{name}: {'out of date, run python tools/document.py' if check else 'written'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
