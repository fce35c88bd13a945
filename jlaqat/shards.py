"""Types of values inside shard_map: which mesh axes they vary over."""

from __future__ import annotations

import jax

Array = jax.Array


def varying_axes(x: Array) -> frozenset[str]:
    """Mesh axes of an enclosing shard_map over which x differs between devices; empty outside of one."""
    aval = jax.typeof(x)
    # jax 0.11.2 renamed `vma`.
    return frozenset(aval.manual_axis_type.varying if hasattr(aval, "manual_axis_type") else aval.vma)


def vary_over(x: Array, axes: frozenset[str]) -> Array:
    """x as a value that varies over `axes` too. The transpose sums over the axes that were added."""
    missing = tuple(sorted(axes - varying_axes(x)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x
