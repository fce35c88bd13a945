"""What the decoding kernels draw their random bits by: the words that `sites.state_bits` counts, a row a state."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jlaqat.decode_policy import DecodePolicy
from jlaqat.spec import QuantArrays

Array = jax.Array


def counters_of(policy: DecodePolicy, position: Array, heads: int, arrays: QuantArrays) -> Array | None:
    """int32 [N, HV, 4]: position [N], layer·2^16 ^ head, sequence, step; None where nothing is drawn."""
    if policy.state is None or policy.state.rounding != "stochastic":
        return None

    def word(x: Any) -> Array:
        return jax.lax.bitcast_convert_type(jnp.asarray(x).astype(jnp.uint32), jnp.int32)

    count = position.shape[0]
    head = jnp.arange(heads, dtype=jnp.uint32) + jnp.asarray(arrays.head_offset).astype(jnp.uint32)
    sequence = jnp.arange(count, dtype=jnp.uint32) + jnp.asarray(arrays.sequence_offset).astype(jnp.uint32)
    layer_and_head = (jnp.asarray(arrays.layer).astype(jnp.uint32) << 16) ^ head
    words = (position[:, None], layer_and_head[None, :], sequence[:, None], jnp.asarray(arrays.step)[None, None])
    return jnp.stack([jnp.broadcast_to(word(x), (count, heads)) for x in words], axis=-1)


def counted_by(counters: Array | None, sequences: int) -> tuple[Array, QuantArrays]:
    """(position [N], arrays) that `counters_of` had, or a shard's part of them; zeros where nothing is drawn."""
    if counters is None:
        return jnp.zeros(sequences, jnp.int32), QuantArrays()
    _, layer_and_head, sequence, step = jax.lax.bitcast_convert_type(counters[0, 0], jnp.uint32)
    layer, head = layer_and_head >> 16, layer_and_head & jnp.uint32(0xFFFF)  # heads are below 2^16
    return counters[:, 0, 0], QuantArrays(step=step, layer=layer, sequence_offset=sequence, head_offset=head)
