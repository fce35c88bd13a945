"""Calls of the delta rule on meshes of explicit axes: which of their arrays are cut along what, and with what counters.

Where the types of a call's operands say that batch or heads are cut, the call is a shard_map, and its results are cut
in the same way (`shards.over_explicit_mesh`). Shards add to the counters of stochastic rounding what comes before them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jlaqat.chunked import Inputs
from jlaqat.decode_carry import DecodeCarry
from jlaqat.shards import over_explicit_mesh
from jlaqat.spec import QuantArrays

Array = jax.Array


class OperandLayouts:
    """Layouts (see `jlaqat.shards`) of what calls take and return. Packed sequences are cut along heads alone."""

    def __init__(self, inputs: Inputs, packed: bool):
        self.row = "packed" if packed else "b"
        self.head = "h" if inputs.v.shape[2] == inputs.k.shape[2] else "hv"
        self.state = f"{self.row} {self.head} key value"
        self.o = f"{self.row} token {self.head} value"
        query, beta = f"{self.row} token h key", f"{self.row} token {self.head}"
        gate = beta if inputs.g.ndim == 3 else f"{beta} key"
        state = None if inputs.initial_state is None else self.state
        self.inputs: Any = Inputs(*(query, query, self.o, gate, beta, state))  # type: ignore[arg-type]

    def quantizers(self, arrays: QuantArrays) -> QuantArrays:
        """Static scales count value heads first; the rest are scalars."""
        return QuantArrays(*(None if a is None else " ".join([self.head, "x", "y"][: jnp.ndim(a)]) for a in arrays))

    def carry(self, carry: DecodeCarry) -> DecodeCarry:
        """States lead with sequences and value heads, the ring with sequences and entries, counters with sequences."""

        def layout(name: str, x: Any) -> str | None:
            if x is None:
                return None
            words = [self.row, *(f"{name}{axis}" for axis in range(1, x.ndim))]
            if name.startswith("ring"):
                words[2] = "h" if name.startswith("ring_k") else self.head
            elif x.ndim > 1:
                words[1] = self.head
            return " ".join(words)

        leaves = {name: layout(name, x) for name, x in vars(carry).items() if name != "policy"}
        return DecodeCarry(**leaves, policy=carry.policy)  # type: ignore[arg-type]


def on_shards(
    run: Callable[..., Any],
    inputs: Inputs,
    arrays: QuantArrays,
    more: Any,
    *,
    packed: bool,
    layouts: Callable[[OperandLayouts], tuple[Any, Callable[[Any], Any]]],
) -> Any:
    """`run(inputs, arrays, more)`, on shards of batch and heads where types of a mesh of explicit axes ask for it.

    layouts: gives those of `more`, and a function from the shapes of the results to theirs.
    """
    operands = OperandLayouts(inputs, packed)
    of_more, of_results = layouts(operands)

    def local(given: Any, first: Any) -> Any:
        inputs, arrays, more = given
        offsets = {"sequence_offset": ("b", inputs.v.shape[0]), "head_offset": ("h", inputs.v.shape[2])}
        for field, (factor, size) in offsets.items():
            if first(factor) is not None:
                start = jnp.uint32(size) * first(factor).astype(jnp.uint32)
                arrays = arrays._replace(**{field: jnp.asarray(getattr(arrays, field)).astype(jnp.uint32) + start})
        return run(inputs, arrays, more)

    cut = (operands.inputs, operands.quantizers(arrays), of_more)
    return over_explicit_mesh(local, (inputs, arrays, more), cut, of_results)
