"""Trees of arrays on disk: what is stored under which name, how that differs from what is wanted, and reading it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from flax import nnx

from jlaqat.naming import named_leaves
from jlaqat.quantizers import QuantizerVariable

_SHOWN = 12


class CheckpointMismatchError(ValueError):
    """A checkpoint does not fit the model; the message lists what each side has that the other lacks."""


def split_model(model: nnx.Module) -> tuple[nnx.GraphDef, nnx.State, nnx.State, nnx.State]:
    """(graphdef, params, quantizers, other): the static structure, and the variables by what happens to them."""
    return cast(Any, nnx.split(model, nnx.Param, QuantizerVariable, ...))


def is_key(x: Any) -> bool:
    """Whether x is an array of typed PRNG keys, which Orbax stores as their raw words."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def tree_of(tree: Any) -> dict[str, jax.Array]:
    """The arrays of any pytree by dotted name, PRNG keys as their uint32 words."""
    return {name: jax.random.key_data(leaf) if is_key(leaf) else leaf for name, leaf in named_leaves(tree).items()}


def describe(named: Mapping[str, Any]) -> dict[str, str]:
    """Dtype and shape of each array as text: {"lm_head.kernel": "float32[64,256]"}."""
    return {name: f"{jnp.dtype(x.dtype).name}[{','.join(map(str, x.shape))}]" for name, x in named.items()}


def nest(named: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted names as nested dicts, the layout on disk."""
    out: dict[str, Any] = {}
    for name, value in named.items():
        *parents, last = name.split(".")
        node = out
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return out


def compare(item: str, saved: Mapping[str, str], wanted: Mapping[str, str]) -> list[str]:
    """Lines that say how a saved item differs from the model's, names and text descriptions; empty where they agree."""
    extra = [name for name in saved if name not in wanted]
    missing = [name for name in wanted if name not in saved]
    differing = [name for name in wanted if name in saved and saved[name] != wanted[name]]
    lines = _list(f"{item}: in the checkpoint but not in the model", [f"{n} {saved[n]}" for n in extra])
    near = [difflib.get_close_matches(name, extra, n=1, cutoff=0.8) for name in missing]
    hints = [f" (the checkpoint has {close[0]})" if close else "" for close in near]
    lines += _list(
        f"{item}: in the model but not in the checkpoint", [f"{n} {wanted[n]}{h}" for n, h in zip(missing, hints)]
    )
    return lines + _list(
        f"{item}: differs", [f"{n} {saved[n]} in the checkpoint, {wanted[n]} in the model" for n in differing]
    )


def _list(title: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = [f"    … and {len(names) - _SHOWN} more"] if len(names) > _SHOWN else []
    return [f"  {title} ({len(names)}):", *(f"    {name}" for name in names[:_SHOWN]), *more]


def saved_arrays(path: Path) -> dict[str, Any]:
    """Orbax's metadata (`.shape`, `.dtype`) of the arrays at `path`, by dotted name; {} where nothing was saved."""
    if not path.is_dir():
        return {}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        return named_leaves(reader.metadata(path).item_metadata.tree)


def read_arrays(path: Path, templates: Mapping[str, Any]) -> dict[str, jax.Array]:
    """The arrays of `templates` (shape, dtype, maybe a sharding) at `path`, by dotted name; the rest is not read."""
    if not templates:
        return {}
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    names = list(saved_arrays(path))

    def target(x: Any) -> jax.ShapeDtypeStruct:
        sharding = getattr(x, "sharding", None)  # of a saved array's metadata it is only a description
        return jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=sharding if isinstance(sharding, jax.sharding.Sharding) else here
        )

    targets = {name: target(x) for name, x in templates.items()}
    args = {
        name: ocp.ArrayRestoreArgs(sharding=targets[name].sharding, dtype=targets[name].dtype)
        if name in targets
        else ocp.RestoreArgs()
        for name in names
    }
    wanted = nest({name: targets.get(name, ocp.PLACEHOLDER) for name in names})
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        tree = reader.restore(path, args=ocp.args.PyTreeRestore(wanted, restore_args=nest(args)))
    read = named_leaves(tree)
    return {name: read[name] for name in templates}


def like(template: Any, named: Mapping[str, jax.Array]) -> Any:
    """`template`'s pytree with the values of `named`, raw words made PRNG keys again where the template has keys."""
    leaves = [
        jax.random.wrap_key_data(named[name], impl=jax.random.key_impl(leaf)) if is_key(leaf) else named[name]
        for name, leaf in named_leaves(template).items()
    ]
    return jax.tree.unflatten(jax.tree.structure(template), leaves)
