"""Work on shards: types of values inside shard_map, and operations that map themselves over the shards they are given.

The delta rule is independent from sequence to sequence and from key head to key head (with its value heads), so shards
of both can be worked on as they are. XLA does not know that of a custom call and gathers its operands, unless a rule
says so: `partitioned`, for jit over meshes of automatic axes. Where the axes of a mesh are explicit, types say how
values are cut, and `over_explicit_mesh` reads them.

Both take layouts: a word for each dimension of an array. "b" counts sequences, "(b t)" their rows, "h" key heads, "hv"
value heads, which are cut as key heads are. Every other dimension stays whole.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

Array = jax.Array
CUT = {"b": "b", "h": "h", "hv": "h"}  # what may be cut, and together with what


def varying_axes(x: Array) -> frozenset[str]:
    """Mesh axes of an enclosing shard_map over which x differs between devices; empty outside of one."""
    aval = jax.typeof(x)
    # jax 0.11.2 renamed `vma`.
    return frozenset(aval.manual_axis_type.varying if hasattr(aval, "manual_axis_type") else aval.vma)


def all_varying_axes(*trees: Any) -> frozenset[str]:
    """The mesh axes over which some array of the trees varies."""
    return frozenset().union(*(varying_axes(x) for x in jax.tree.leaves(trees)))


def vary_over(x: Array, axes: frozenset[str]) -> Array:
    """x as a value that varies over `axes` too. The transpose sums over the axes that were added."""
    missing = tuple(sorted(axes - varying_axes(x)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


# ------------------------------------------------------------------ layouts


def factors(layout: str) -> list[tuple[str, ...]]:
    """The factors of each dimension, the outermost first: "(b t) hv k" is [("b", "t"), ("hv",), ("k",)]."""
    found: list[tuple[str, ...]] = []
    for i, part in enumerate(layout.replace(")", "(").split("(")):
        found += [tuple(part.split())] if i % 2 else [(word,) for word in part.split()]
    return found


def _cuts(layout: str, sharding: Any) -> Iterable[tuple[str, Any]]:
    """(outermost factor, mesh axes) of each dimension that a NamedSharding cuts; heads of both kinds are "h"."""
    for words, axes in zip(factors(layout), sharding.spec):
        if axes is not None:
            yield CUT.get(words[0], words[0]), axes


def _spec(layout: str, cut: dict[str, Any]) -> PartitionSpec:
    """cut: the mesh axes of "b" and of "h", absent or None where they are whole."""
    return PartitionSpec(*(cut.get(CUT.get(words[0], "")) for words in factors(layout)))


def _names(axes: Any) -> tuple[str, ...]:
    return () if axes is None else axes if isinstance(axes, tuple) else (axes,)


def _pieces(mesh: Any, axes: Any) -> int:
    return math.prod(mesh.shape[axis] for axis in _names(axes))


# ------------------------------------------------------------------ automatic axes


def partitioned(function: Callable[..., Sequence[Array]], operands: Sequence[str], results: Sequence[str]) -> Any:
    """`function(*arrays) -> arrays`, which under jit runs on shards of sequences and of heads as they lie.

    operands, results: their layouts. Operands that are cut otherwise are resharded first. On one device, and in a
    shard_map over all axes of the mesh, this is `function` itself. Neither differentiable nor batched: wrap it.
    """

    def partition(mesh: Any, arguments: Any, _: Any) -> Any:
        cut: dict[str, Any] = {}
        for layout, x in zip(operands, arguments, strict=True):
            for factor, axes in _cuts(layout, x.sharding):
                cut.setdefault(factor, axes)
        for layout, x in zip(operands, arguments, strict=True):
            for (factor, *inner), size in zip(factors(layout), x.shape, strict=True):
                together = CUT.get(factor, "")
                if not inner and cut.get(together) is not None and size % _pieces(mesh, cut[together]):
                    cut[together] = None
        if set(_names(cut.get("b"))) & set(_names(cut.get("h"))):
            cut["h"] = None

        def shardings(layouts: Sequence[str]) -> list[NamedSharding]:
            return [NamedSharding(mesh, _spec(layout, cut)) for layout in layouts]

        return mesh, function, shardings(results), tuple(shardings(operands))

    call = custom_partitioning(function)
    call.def_partition(partition, sharding_rule=functools.partial(_shardy_rule, operands, results))
    return call


def _shardy_rule(operands: Sequence[str], results: Sequence[str], mesh: Any, given: Any, returned: Any) -> Any:
    """The layouts as Shardy takes them: einsum notation, the factors that stay whole, sizes of inner factors."""
    del mesh
    layouts, shapes = [*operands, *results], [tuple(x.shape) for x in (*given, *returned)]
    dimensions = [d for layout, shape in zip(layouts, shapes, strict=True) for d in zip(factors(layout), shape)]
    sizes = {words[0]: size for words, size in dimensions if len(words) == 1}
    inner: dict[str, int] = {}
    for (first, *rest), size in dimensions:
        for factor in rest:
            if factor not in sizes:
                inner[factor] = size // sizes[first]
    whole = dict.fromkeys(factor for words, _ in dimensions for factor in words if factor not in CUT)
    return f"{', '.join(operands)} -> {', '.join(results)}", {"need_replication_factors": tuple(whole), **inner}


# ------------------------------------------------------------------ explicit axes


def over_explicit_mesh(function: Callable[..., Any], operands: Any, layouts: Any, results: Callable[[Any], Any]) -> Any:
    """`function(operands, first)`, on shards where the operands' types say that a mesh of explicit axes cuts them.

    operands: a pytree of arrays; layouts: the same with strings. results: from the shapes of what `function` returns to
    their layouts; it is asked only where there are shards.
    first(factor) is the number of the shard along "b" or "h", None where it is whole.

    Raises ValueError where an operand is cut along something else, or two along the same factor by different axes.
    """
    leaves = jax.tree.leaves(operands)
    tree: Any = jax.tree.structure(operands)
    named = tree.flatten_up_to(layouts)
    cut: dict[str, Any] = {}
    by: dict[str, str] = {}
    mesh = None
    for layout, x in zip(named, leaves, strict=True):
        sharding = jax.typeof(x).sharding
        if not any(kind == AxisType.Explicit for kind in sharding.mesh.axis_types):
            continue
        for factor, axes in _cuts(layout, sharding):
            what, mesh = jax.typeof(x).str_short(), sharding.mesh
            if factor not in CUT:
                raise ValueError(
                    f"an operand {what} is sharded as {sharding.spec}, but only batch and heads can be cut. "
                    "Call jax.sharding.reshard on it first."
                )
            if cut.setdefault(factor, axes) != axes:
                raise ValueError(
                    f"{by[factor]} and {what} are cut by different mesh axes, {cut[factor]!r} and {axes!r}, where "
                    "they must agree. Call jax.sharding.reshard on one of them first."
                )
            by.setdefault(factor, what)
    if mesh is None:
        return function(operands, lambda factor: None)

    def local(operands: Any) -> Any:
        return function(operands, lambda factor: jax.lax.axis_index(cut[factor]) if factor in cut else None)

    shapes = tree.unflatten([jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for x in leaves])
    wanted = results(jax.eval_shape(lambda whole: function(whole, lambda factor: None), shapes))
    out_specs = jax.tree.map(lambda layout: _spec(layout, cut), wanted)
    manual = frozenset(a for a, kind in zip(mesh.axis_names, mesh.axis_types) if kind == AxisType.Explicit)
    in_specs = [_spec(layout, cut) for layout in named]
    call = jax.shard_map(local, mesh=mesh, in_specs=(tree.unflatten(in_specs),), out_specs=out_specs, axis_names=manual)

    def placed(leaves: Any) -> Any:
        on_mesh = [jax.sharding.reshard(x, NamedSharding(mesh, spec)) for x, spec in zip(leaves, in_specs, strict=True)]
        return call(tree.unflatten(on_mesh))

    if jax.sharding.get_abstract_mesh().empty:  # outside of jax.set_mesh; jit takes the devices from the operands
        return jax.jit(placed)(leaves)
    return placed(leaves)
