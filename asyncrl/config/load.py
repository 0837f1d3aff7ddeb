"""Recipes: YAML with `base:` includes and `key=value` overrides -> a validated `Recipe`. The only user of OmegaConf."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import yaml
from omegaconf import DictConfig, OmegaConf, read_write
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from asyncrl.config.hidden import Hidden, names_in
from asyncrl.config.recipe import Recipe
from asyncrl.errors import AsyncRLError, ConfigError, explain

_UNREADABLE = OmegaConfBaseException, AttributeError, LookupError, OverflowError, RecursionError, TypeError, ValueError
"""OmegaConf's errors, and errors that escape it if a value's shape differs from its section."""
_LARGEST = 2**53
"""The largest allowed integer: exact as a float, and far above any size in bytes."""
_WITHOUT_END = "data.curriculum.min", "data.curriculum.max"
_MAX_BASES = 100
SHIPPED = ("cpu", "gpu")
"""Names of bases that come with the package."""
_TOLD_CHARS = 300


@dataclass(frozen=True, slots=True)
class Loaded:
    """`written`: the recipe by sections, with values from the environment replaced by their interpolations. `hide` does
    the same for other texts. `merged`: what the recipe, its bases and the overrides set."""

    recipe: Recipe
    written: dict[str, Any]
    hide: Hidden
    merged: Any

    def given(self, section: str, key: str) -> Any:
        """The value that was set; None: the default holds."""
        return (self.merged.get(section) or {}).get(key)


def hidden_by(raw: Any) -> Hidden:
    """Hides the environment values that interpolations in `raw` (nested lists and mappings) use."""
    return Hidden.named(names_in(raw), os.environ)


def load(path: Path, overrides: list[str]) -> Loaded:
    """The recipe in `path` over its bases, with `key=value` overrides on top, and its values from the environment.

    Relative paths in a recipe refer to the working directory; under `base:` to the file. Raises ConfigError: unknown or
    misspelt key, impossible value, missing file, broken YAML. The message also hides values from the environment.
    """
    with _readable(path):
        layers = [(layer, str(path)) for layer in _layers(path, ())]
        layers += [(_parse_override(override), f"the override {override!r}") for override in overrides]
        merged = OmegaConf.to_container(OmegaConf.merge(*(layer for layer, _ in layers)), resolve=False)
        hide = hidden_by([OmegaConf.to_container(layer, resolve=False) for layer, _ in layers])
    try:
        with _readable(path):
            recipe = _recipe(path, layers)
            return Loaded(recipe, hide.as_written(merged, asdict(recipe)), hide, merged)
    except ConfigError as e:
        raise type(e)(hide(str(e))) from None


def load_recipe(path: Path, overrides: list[str]) -> Recipe:
    """As `load`."""
    return load(path, overrides).recipe


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Raises ConfigError instead of OmegaConf's errors and errors of the file's shape."""
    try:
        yield
    except _UNREADABLE as e:
        if isinstance(e, AsyncRLError):
            raise
        if isinstance(e.__cause__, AsyncRLError):
            raise e.__cause__ from None
        found = f"{type(e).__name__}: {_first_line(e)}"
        raise ConfigError(explain(f"the recipe {path}", found, "correct this value; see docs/recipes.md")) from e


def _recipe(path: Path, layers: list[tuple[DictConfig, str]]) -> Recipe:
    # The last preset named wins; its layers come first, so that every key of the recipe overrides it.
    named = [name for layer, _ in layers if (name := OmegaConf.select(layer, "algorithm.preset", default=None))]
    if named:
        layers = [(layer, f"the preset {named[-1]}") for layer in _preset(str(named[-1]))] + layers
    merged = deepcopy(_nothing_set())
    unset: set[str] = set()
    for layer, origin in layers:
        # A later layer may set a key that an earlier one marked as missing (???).
        unset = {key for key in unset if OmegaConf.select(layer, key, throw_on_resolution_failure=False) is None}
        unset |= OmegaConf.missing_keys(layer)
        _put_over(merged, layer, origin)
    if unset := unset | OmegaConf.missing_keys(merged):
        key = min(unset)
        do = f"set it in the recipe, or pass {key}=VALUE"
        raise ConfigError(explain(f"the recipe {path}", f"{key} is not set", do))
    recipe = OmegaConf.to_object(merged)
    assert isinstance(recipe, Recipe)
    _check_values(recipe, Recipe)
    return recipe


@cache
def _nothing_set() -> DictConfig:
    """The defaults of every key, cached: copying is faster than building."""
    return OmegaConf.structured(Recipe)


def resolved(values: dict[str, Any]) -> dict[str, Any]:
    """`values` with their interpolations resolved. Raises ConfigError."""
    try:
        found = OmegaConf.to_container(OmegaConf.create(values), resolve=True)
    except OmegaConfBaseException as e:
        raise ConfigError(explain("the interpolations of a recipe", _first_line(e), "set what they name")) from e
    assert isinstance(found, dict)
    return {str(key): value for key, value in found.items()}


def _check_values(value: Any, hint: Any, key: str = "") -> None:
    """Checks what OmegaConf accepts. Raises ConfigError: a list or section as an item of a list or mapping; a NaN,
    infinite or too large number; text with NUL."""
    if is_dataclass(value):
        for name, inner in _hints(type(value)).items():
            _check_values(getattr(value, name), inner, f"{key}.{name}" if key else name)
    elif isinstance(value, dict | list) and (hint is Any or get_origin(hint) in (dict, list)):
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            _check_values(item, Any if hint is Any else get_args(hint)[-1], f"{key}.{name}")
    elif isinstance(value, dict | list):
        raise ConfigError(explain(f"{key}={value}", f"one {hint.__name__} was expected", "write one"))
    elif isinstance(value, int | float) and not abs(value) <= _LARGEST and key not in _WITHOUT_END:
        found = f"a number from {-_LARGEST} to {_LARGEST} was expected"
        raise ConfigError(explain(f"{key}={value}", found, "write one that is meant"))
    elif isinstance(value, str) and "\x00" in value:
        raise ConfigError(explain(f"{key}={value!r}", "it contains the character NUL", "leave that character out"))


@cache
def _hints(schema: type) -> dict[str, Any]:
    return get_type_hints(schema)


@cache
def _keys_with_on_and_off() -> tuple[str, ...]:
    return tuple(key for key in known_keys() if {"on", "off"} & set(_choices(key)))


def known_keys() -> list[str]:
    """Every key that a recipe may set, in full ("rollout.sampling.temperature")."""
    return list(types_and_defaults())


@cache
def types_and_defaults() -> dict[str, tuple[Any, Any]]:
    """Type and default of each key."""
    return dict(_types_and_defaults(Recipe, ""))


def _types_and_defaults(schema: type, prefix: str) -> Iterator[tuple[str, tuple[Any, Any]]]:
    hints = _hints(schema)
    for field in fields(schema):
        inner, key = hints[field.name], prefix + field.name
        if is_dataclass(inner):
            yield from _types_and_defaults(inner, key + ".")  # type: ignore[arg-type]
        else:
            made = field.default if field.default_factory is MISSING else field.default_factory()
            yield key, (inner, made)


def environment_defaults() -> dict[str, str]:
    """Environment variables that the launch code reads or sets for every process of a run on CPU.

    One thread per process: processes that share cores and spin in OpenMP slow each other down tenfold.
    """
    return {"OMP_NUM_THREADS": os.environ.get("ASYNCRL_THREADS_PER_PROCESS", "1")}


def serving_api_key() -> str | None:
    """ASYNCRL_API_KEY: the key of `asyncrl-serve` if the command line, which other users can read, has none."""
    return os.environ.get("ASYNCRL_API_KEY")


def presets() -> list[str]:
    """Names that algorithm.preset may have."""
    return sorted(file.stem for file in (_shipped() / "algorithms").glob("*.yaml"))


def _shipped() -> Path:
    """configs of the checkout, or where an installed package keeps them."""
    checkout = Path(__file__).resolve().parents[2] / "configs"
    return checkout if checkout.is_dir() else Path(sys.prefix) / "share" / "asyncrl"


def _preset(name: str) -> list[DictConfig]:
    known = presets()
    if name not in known:
        close = get_close_matches(name, known, n=1)
        do = f"did you mean {close[0]}?" if close else "choose one, or leave it out and set the keys of algorithm"
        raise ConfigError(explain(f"algorithm.preset={name}", f"the presets are {known}", do))
    return _layers(_shipped() / "algorithms" / f"{name}.yaml", ())


def _layers(path: Path, seen: tuple[Path, ...]) -> list[DictConfig]:
    """The bases of `path`, outermost first, then `path` itself."""
    if path.resolve() in seen:
        found = f"its bases include each other: {' -> '.join(map(str, (*seen, path)))}"
        raise ConfigError(explain(f"the recipe {seen[0]}", found, "break the circle"))
    try:
        content = OmegaConf.load(path)
    except FileNotFoundError as e:
        known = sorted(str(p) for p in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
        close = get_close_matches(str(path), known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"recipes in {path.parent}: {known or 'none'}"
        asked = f"the recipe {path}" if not seen else f"base {path} of {seen[-1]}"
        raise ConfigError(explain(asked, "there is no such file", hint)) from e
    except (OSError, yaml.YAMLError, OmegaConfBaseException, RecursionError, ValueError) as e:
        found = f"it cannot be read: {' '.join(str(e).split())[:_TOLD_CHARS]}"
        raise ConfigError(explain(f"the recipe {path}", found, "correct the file")) from e
    if not isinstance(content, DictConfig):
        do = "see recipes/quickstart.yaml"
        raise ConfigError(explain(f"the recipe {path}", "it is not a mapping of sections", do))
    _restore_words(content)
    bases = content.pop("base", None) or []
    bases = [bases] if isinstance(bases, str) else bases
    if isinstance(bases, DictConfig | int | float) or not all(isinstance(base, str) for base in bases):
        raise ConfigError(explain(f"base of the recipe {path}", f"{bases}", "name cpu, gpu or a file, or several"))
    layers: list[DictConfig] = []
    for base in bases:
        place = _shipped() / f"{base}.yaml" if base in SHIPPED else path.parent / base
        layers += _layers(place, (*seen, path.resolve()))
        if len(layers) > _MAX_BASES:
            found = f"with their own bases they are over {_MAX_BASES} files"
            raise ConfigError(explain(f"base of the recipe {path}", found, "include each file once"))
    return [*layers, content]


def _parse_override(override: str) -> DictConfig:
    key, equals, _ = override.partition("=")
    asked = f"the override {override!r}"
    if not equals or not key or key.startswith("-"):
        raise ConfigError(explain(asked, "it is not of the form key=value", "write for example trainer.lr=1e-4"))
    try:
        parsed = OmegaConf.from_dotlist([override])
        _restore_words(parsed)
        return parsed
    except (yaml.YAMLError, OmegaConfBaseException) as e:
        found = f"it cannot be parsed: {' '.join(str(e).split())[:_TOLD_CHARS]}"
        raise ConfigError(explain(asked, found, "quote the value")) from e


def _restore_words(layer: DictConfig) -> None:
    """Restores the words on and off, which YAML reads as booleans, for keys that have them as choices."""
    for key in _keys_with_on_and_off():
        section, _, name = key.rpartition(".")
        found = OmegaConf.select(layer, section, throw_on_resolution_failure=False)
        value = found.get(name) if isinstance(found, DictConfig) else None
        if isinstance(value, bool) and (word := "on" if value else "off") in _choices(key):
            OmegaConf.update(layer, key, word)


def _put_over(merged: DictConfig, layer: DictConfig, origin: str) -> None:
    """Changes `merged` and takes nodes of `layer`: copies of all of it would take most of the time of a load."""
    try:
        OmegaConf.unsafe_merge(merged, layer)
        for parent, name in _set_to_nothing(OmegaConf.to_container(layer, resolve=False)):
            holder = OmegaConf.select(merged, parent) if parent else merged
            if OmegaConf.get_type(holder, name) is dict:  # not a section
                with read_write(holder):
                    holder[name] = {}
    except ConfigKeyError as e:
        key = str(e.full_key)
        depth = key.count(".") + 1
        siblings = {".".join(known.split(".")[:depth]) for known in known_keys()}
        close = get_close_matches(key, siblings, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]}?" if close else "docs/recipes.md lists every key"
        raise ConfigError(explain(f"{key} in {origin}", "there is no such key", hint)) from e
    except OmegaConfBaseException as e:
        choices = _choices(str(e.full_key))
        do = f"choose from {choices}" if choices else "give it a value of that type"
        raise ConfigError(explain(f"{e.full_key or 'a section'} in {origin}", _first_line(e), do)) from e


def _set_to_nothing(values: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Place and name of the mappings that are `{}`. Merged, that would change nothing."""
    for name, value in values.items():
        if value == {}:
            yield prefix, name
        elif isinstance(value, dict):
            yield from _set_to_nothing(value, f"{prefix}.{name}" if prefix else str(name))


def _choices(key: str) -> list[Any]:
    """The values of a `Literal` key; empty for any other."""
    kind, _ = types_and_defaults().get(key, (None, None))
    return [a for a in get_args(kind) if isinstance(a, str)]


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:_TOLD_CHARS]
