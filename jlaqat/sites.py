"""The two places of a delta rule call that round, and the counters of their stochastic bits.

Both sites are handed what they round together with its `Place`. Counters (see `philox`): a state's round_index counts
the roundings of its sequence, 0 being the initial state's; a row of w has its token's position in the sequence, with
the highest bit set so that no draw is shared with a state.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jlaqat.rounding import fake_quantize, random_bits
from jlaqat.spec import DeltaQuant, QuantArrays, QuantSpec

Array = jax.Array
_W_ROUNDS = np.uint32(1 << 31)


class Place(NamedTuple):
    """Where in its sequences an operand stands. The leading dimensions are the operand's, without its head."""

    sequence: Array  # [..., b] int32
    round_index: Array  # [..., b] int32: which rounding (state), or the position of the first token (w)


def round_state(S: Array, place: Place, quant: DeltaQuant, arrays: QuantArrays) -> Array:
    """S [..., b, HV, K, V] as the state quantizer leaves it, gradient straight through."""
    if quant.state is None:
        return S
    bits = state_bits(S, place, quant.state, arrays)
    return fake_quantize(S, quant.state, site="state", amax=arrays.state_amax, random_bits=bits)


def state_bits(S: Array, place: Place, spec: QuantSpec, arrays: QuantArrays) -> Array | None:
    """Random bits for rounding S [..., b, HV, K, V] as `spec` says; None where it rounds to nearest."""
    return _bits(spec, arrays, S.shape[-2:], place.sequence[..., None], place.round_index[..., None], S.shape[-3])


def round_w(w: Array, place: Place, quant: DeltaQuant, arrays: QuantArrays) -> Array:
    """w [..., b, HV, C, K] as the w quantizer leaves it, gradient straight through."""
    if quant.w is None:
        return w
    bits = None
    if quant.w.rounding == "stochastic":
        rows = jnp.arange(w.shape[-2], dtype=jnp.int32)
        tokens = place.round_index[..., None, None] + rows.reshape((1,) * (w.ndim - 2) + (-1,))
        sequence = place.sequence[..., None, None]
        bits = _bits(
            quant.w, arrays, w.shape[-1:], sequence, tokens.astype(jnp.uint32) | _W_ROUNDS, w.shape[-3], rows=True
        )
    return fake_quantize(w, quant.w, site="w", amax=arrays.w_amax, random_bits=bits)


def state_gradient(S: Array, dS: Array, place: Place, quant: DeltaQuant, arrays: QuantArrays) -> Array:
    """The gradient of `round_state` at S (before rounding): dS itself unless a static range clips it."""
    if quant.state is None or quant.state.gradient == "identity":
        return dS
    return jax.vjp(lambda x: round_state(x, place, quant, arrays), S)[1](dS)[0]


def w_gradient(w: Array, dw: Array, place: Place, quant: DeltaQuant, arrays: QuantArrays) -> Array:
    """The gradient of `round_w` at w (before rounding)."""
    if quant.w is None or quant.w.gradient == "identity":
        return dw
    return jax.vjp(lambda x: round_w(x, place, quant, arrays), w)[1](dw)[0]


def initial_place(num_sequences: int) -> Place:
    """The place of the initial states [N, HV, K, V]."""
    sequence = jnp.arange(num_sequences, dtype=jnp.int32)
    return Place(sequence, jnp.zeros_like(sequence))


def _bits(
    spec: QuantSpec,
    arrays: QuantArrays,
    tile: tuple[int, ...],
    sequence: Array,
    index: Array,
    heads: int,
    rows: bool = False,
) -> Array | None:
    """uint32 [*leading, HV, *tile] for stochastic rounding. sequence and index broadcast against the heads."""
    if spec.rounding != "stochastic":
        return None
    head = jnp.arange(heads, dtype=jnp.uint32)
    head = (head[:, None] if rows else head) + jnp.asarray(arrays.head_offset).astype(jnp.uint32)
    sequence, index = jnp.asarray(sequence), jnp.asarray(index)
    sequence = sequence.astype(jnp.uint32) + jnp.asarray(arrays.sequence_offset).astype(jnp.uint32)
    return random_bits(
        tile, seed=spec.seed, step=arrays.step, layer=arrays.layer, sequence=sequence, head=head, round_index=index
    )
