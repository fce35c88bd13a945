"""YAML files to nested frozen dataclasses: composition with `base:`, overrides `a.b=c`, and errors that name the path.

Standard library and PyYAML only, and no environment variable is read: a name means the same file on every machine.
A name or path is looked up beside the file that mentions it (for a name from the command line: in the working
directory, if it ends in .yaml), then among the packaged `configs/` and `configs/recipes/`.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

CONFIG_DIR = Path(__file__).parent / "configs"
"""The packaged configs: runs at the top, quantizer recipes in `recipes/`."""

NO_ROUNDING = "none"
"""As a recipe: nothing is rounded."""

Source = str | Path | Mapping[str, Any]


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names the file or the path of the key, and the remedy."""


def load_config[T](cls: type[T], source: Source, overrides: Sequence[str] = ()) -> T:
    """Build the dataclass `cls` from a YAML file (a name, a path) or a mapping.

    `base:` in the file names one config or a list of them to start from: mappings are merged key by key, everything
    else is replaced by the later file. Each override is `key=value` with a dotted key; numbers index lists, and the
    value is YAML (`model.hidden_size=256`, `quant.0.cfg.block_v=32`). Wherever a key is called `quant`, a recipe's name
    stands for its entries, so that overrides reach into them and a saved config needs no other file.

    Raises ConfigError for a file that is not found, an unknown key (with the nearest name), a value of the wrong type,
    a missing required field, and a ValueError of the dataclasses themselves, with the key's path put in front.
    """
    tree = _expand_recipes(_compose(source))
    for override in overrides:
        tree = _expand_recipes(apply_override(tree, override))
    return _build(cls, tree, "", _label(source))


def load_recipe(source: Source | Sequence[Any], overrides: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The ordered quant_cfg list of a recipe, ready for `jlaqat.quantize(model, ...)`.

    A recipe file has the keys `quant` (the entries) and `base` (recipes to start from). Here the entries of the bases
    come first and the file's own are appended, because later entries win. A list is taken as the entries themselves,
    and recipe names in it are replaced by their entries. "none" is the recipe without entries. Overrides as in
    `load_config`: `quant.0.cfg.block_v=32`.

    Raises ConfigError as `load_config` does.
    """
    if isinstance(source, str) and source == NO_ROUNDING:
        source = []
    if isinstance(source, Sequence) and not isinstance(source, str):
        tree: dict[str, Any] = {"quant": _flatten_entries(source)}
    else:
        tree = _compose(source, append=("quant",))
    for override in overrides:
        tree = _expand_recipes(apply_override(tree, override))
    _refuse_unknown(tree, ("quant",), "", _label(source))
    entries = tree.get("quant")
    if not isinstance(entries, list):
        raise ConfigError(
            f"{_label(source)}: 'quant' must be a list of entries, got {entries!r}; see docs/quantizers.md."
        )
    return entries


def read_config(source: Source) -> dict[str, Any]:
    """The mapping of a config, bases merged in and nothing checked yet. Raises ConfigError where it cannot be read."""
    return _compose(source)


def list_configs() -> dict[str, Path]:
    """Name → path of every packaged config; recipes are listed as `recipes/<name>`."""
    return {p.relative_to(CONFIG_DIR).with_suffix("").as_posix(): p for p in sorted(CONFIG_DIR.rglob("*.yaml"))}


def to_dict(config: Any) -> Any:
    """Plain dicts, lists and scalars of a config, for YAML and JSON; `load_config(type(c), to_dict(c)) == c`."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {f.name: to_dict(getattr(config, f.name)) for f in dataclasses.fields(config) if f.init}
    if isinstance(config, Mapping):
        return {key: to_dict(value) for key, value in config.items()}
    if isinstance(config, (list, tuple)):
        return [to_dict(value) for value in config]
    return str(config) if isinstance(config, Path) else config


def nearest(name: str, known: Sequence[str]) -> str:
    """'; did you mean …?' for messages; empty if nothing is near."""
    close = difflib.get_close_matches(name, [str(k) for k in known], n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(repr(c) for c in close)}?" if close else ""


# ── files and composition ──────────────────────────────────────────────────────────────────────────────────────────


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads 1e-3 as a number (YAML 1.1 wants 1.0e-3) and refuses a key given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: list[Any] = []
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=deep)
            if key in keys:
                raise ConfigError(f"line {key_node.start_mark.line + 1}: key {key} is given twice.")
            keys.append(key)
        return super().construct_mapping(node, deep=deep)


_Loader.yaml_implicit_resolvers = {k: list(v) for k, v in yaml.SafeLoader.yaml_implicit_resolvers.items()}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?([0-9][0-9_]*)(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def _label(source: Any) -> str:
    return str(source) if isinstance(source, (str, Path)) else "config"


def _read(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file in UTF-8: {error}") from error
    return _parse(text, str(path))


def _parse(text: str, label: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ConfigError) as error:
        raise ConfigError(f"{label}: not valid YAML: {error}") from error


def find_config(source: str | Path, beside: Path | None = None) -> Path:
    """Path of the config that `source` names; `beside` is the folder of the file that mentions it."""
    given = Path(source)
    with_suffix = given if given.suffix in (".yaml", ".yml") else given.with_name(given.name + ".yaml")
    # A bare name from the command line never picks up a file of the working directory by accident.
    is_path = with_suffix == given or given.is_absolute()
    near = [beside] if beside is not None else [Path.cwd()] if is_path else []
    places = [folder / with_suffix for folder in (*near, CONFIG_DIR, CONFIG_DIR / "recipes")]
    for place in places:
        if place.is_file():
            return place
    known = list_configs()
    names = [*known, *(n.removeprefix("recipes/") for n in known)]
    where = ", ".join(str(p) for p in dict.fromkeys(places))
    raise ConfigError(f"no config {str(source)!r} (looked at {where}){nearest(str(source), names)}")


def _compose(
    source: Source, append: tuple[str, ...] = (), *, beside: Path | None = None, chain: tuple[Path, ...] = ()
) -> dict[str, Any]:
    """The file's mapping merged over its bases', `base` removed. Lists under a top-level key in `append` are joined."""
    if isinstance(source, Mapping):
        tree, folder, label = copy.deepcopy(dict(source)), beside, "config"
    else:
        path = find_config(source, beside).resolve()
        if path in chain:
            raise ConfigError("base: configs include each other: " + " → ".join(p.name for p in (*chain, path)))
        tree, folder, label, chain = (
            _read(path),
            path.parent,
            str(path),
            (*chain, path),
        )
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{label}: expected keys and values at the top, got {type(tree).__name__}.")
    bases = tree.pop("base", [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(b, str) for b in bases):
        raise ConfigError(f"{label}: base={bases!r} must be a name, a path, or a list of them.")
    merged: dict[str, Any] = {}
    for part in [*(_compose(b, append, beside=folder, chain=chain) for b in bases), tree]:
        joined = {
            k: merged[k] + part[k] for k in append if isinstance(merged.get(k), list) and isinstance(part.get(k), list)
        }
        merged = {**_merge(merged, part), **joined}
    return merged


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    out = dict(below)
    for key, value in above.items():
        old = out.get(key)
        out[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return out


def _expand_recipes(tree: Any) -> Any:
    """Replace recipe names under every key `quant` by their entries."""
    if isinstance(tree, dict):
        return {
            k: _flatten_entries([v] if isinstance(v, str) else v)
            if k == "quant" and isinstance(v, (str, list, tuple))
            else _expand_recipes(v)
            for k, v in tree.items()
        }
    if isinstance(tree, list):
        return [_expand_recipes(v) for v in tree]
    return tree


def _flatten_entries(entries: Sequence[Any]) -> list[Any]:
    out: list[Any] = []
    for entry in entries:
        out += load_recipe(entry) if isinstance(entry, str) else [copy.deepcopy(entry)]
    return out


# ── overrides ──────────────────────────────────────────────────────────────────────────────────────────────────────


def apply_override(tree: dict[str, Any], override: str) -> dict[str, Any]:
    """`tree` with one `a.b=c` applied (a copy). Missing mappings on the way are made; list indices must exist."""
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"override {override!r} is not of the form key=value, such as model.hidden_size=256.")
    value = _parse(text, f"override {override!r}") if text.strip() else None
    tree = copy.deepcopy(tree)
    node: Any = tree
    for depth, part in enumerate(parts):
        last = depth == len(parts) - 1
        where = ".".join(parts[:depth]) or "the config"
        if isinstance(node, list):
            if not part.isdigit() or int(part) >= len(node):
                raise ConfigError(
                    f"override {override!r}: {where} is a list; {part!r} is no index below its length {len(node)}."
                )
            slot: Any = int(part)
        elif isinstance(node, dict):
            slot = part
            if not last and node.get(slot) is None:
                node[slot] = {}
        else:
            raise ConfigError(f"override {override!r}: {where} is {node!r}, which has no key {part!r}.")
        if last:
            node[slot] = value
        else:
            node = node[slot]
    return tree


# ── values to dataclasses ──────────────────────────────────────────────────────────────────────────────────────────


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def _refuse_unknown(tree: Mapping[str, Any], known: Sequence[str], path: str, label: str) -> None:
    for key in tree:
        if key not in known:
            listed = ", ".join(known)
            hint = nearest(str(key), known) or "."
            raise ConfigError(f"{label}: unknown key {_join(path, key)!r}{hint} Known here: {listed}.")


def _build(cls: Any, tree: Any, path: str, label: str) -> Any:
    """A `cls` from the mapping `tree`, or an error naming `path`."""
    if isinstance(tree, cls):
        return tree
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{label}: {path or 'the config'} must be keys and values for {cls.__name__}, got {tree!r}.")
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}
    _refuse_unknown(tree, list(fields), path, label)
    hints = typing.get_type_hints(cls)
    values = {name: _convert(hints[name], value, _join(path, name), label) for name, value in tree.items()}
    missing = [
        _join(path, f.name)
        for f in fields.values()
        if f.name not in values and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ConfigError(f"{label}: {', '.join(missing)} must be given ({cls.__name__} has no default for it).")
    try:
        return cls(**values)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{label}: {path + ': ' if path else ''}{error}") from error


def _wrong(kind: Any, value: Any, path: str, label: str) -> ConfigError:
    name = kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))
    return ConfigError(f"{label}: {path} must be {name}, got {value!r} ({type(value).__name__}).")


def _convert(kind: Any, value: Any, path: str, label: str) -> Any:
    """`value` as the annotated type `kind`. Only exact types pass, except int → float and str → Path."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin is typing.Literal:
        if value not in args or type(value) is not type(args[args.index(value)]):
            hint = nearest(value, args) if isinstance(value, str) else ""
            raise ConfigError(f"{label}: {path}={value!r} is not one of {', '.join(map(repr, args))}{hint or '.'}")
        return value
    if origin in (typing.Union, types.UnionType):
        return _convert_union(args, value, path, label)
    if dataclasses.is_dataclass(kind):
        return _build(kind, value, path, label)
    container = origin or kind
    if isinstance(container, type) and container is not str:
        if issubclass(container, (tuple, list)) or container is Sequence:
            return _convert_sequence(container, args, value, path, label)
        if issubclass(container, Mapping):
            if not isinstance(value, Mapping):
                raise _wrong("keys and values", value, path, label)
            inner = args[1] if len(args) == 2 else Any
            return {k: _convert(inner, v, _join(path, k), label) for k, v in value.items()}
    return _convert_scalar(kind, value, path, label)


def _convert_union(args: tuple[Any, ...], value: Any, path: str, label: str) -> Any:
    if value is None and type(None) in args:
        return None
    options = [a for a in args if a is not type(None)]
    # The most specific message is the one of the option whose shape fits: a mapping is meant for the dataclass.
    errors: list[tuple[bool, ConfigError]] = []
    for option in sorted(options, key=lambda a: a is float):  # int before float: 1 stays 1 in int | float
        try:
            return _convert(option, value, path, label)
        except ConfigError as error:
            errors.append((isinstance(value, Mapping) == dataclasses.is_dataclass(option), error))
    simple = all(option in (bool, int, float, str, Path) for option in options)
    if not simple or isinstance(value, (Mapping, list)):
        raise max(errors, key=lambda e: e[0])[1]
    raise _wrong(" or ".join("null" if a is type(None) else a.__name__ for a in args), value, path, label)


def _convert_sequence(container: Any, args: tuple[Any, ...], value: Any, path: str, label: str) -> Any:
    if not isinstance(value, (list, tuple)):
        raise _wrong("a list", value, path, label)
    if not args or (container is tuple and len(args) == 2 and args[1] is Ellipsis) or container is not tuple:
        kinds = [args[0] if args else Any] * len(value)
    elif len(args) != len(value):
        raise ConfigError(f"{label}: {path} must have {len(args)} entries, got {len(value)}: {value!r}.")
    else:
        kinds = list(args)
    items = [_convert(k, v, _join(path, i), label) for i, (k, v) in enumerate(zip(kinds, value))]
    return items if container is list else tuple(items)


def _convert_scalar(kind: Any, value: Any, path: str, label: str) -> Any:
    if kind is float and type(value) is int:
        return float(value)
    if kind is Path and isinstance(value, (str, Path)):
        return Path(value)
    if kind in (bool, int, float, str, type(None)):
        if type(value) is not kind:
            raise _wrong(kind, value, path, label)
        return value
    if isinstance(kind, type) and isinstance(value, kind):
        return value
    raise _wrong(kind, value, path, label)
