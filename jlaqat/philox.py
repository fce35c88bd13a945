"""Counter-based random bits for stochastic rounding: Philox4x32-10 (Salmon et al., SC11), in plain uint32 arithmetic.

The bits are a function of a key and a counter alone, never of the order in which they are drawn. So remat draws the
same bits again, a shard draws what it would draw in the whole, and a Triton kernel draws them too.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jlaqat.arithmetic import materialize

ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)  # added to the key after each round


def philox4x32(counter: tuple[jax.Array, ...], key: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Four uint32 words from four counter words and two key words (uint32 arrays of shapes that broadcast)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + jnp.uint32(_WEYL[0]), k1 + jnp.uint32(_WEYL[1])
    return c0, c1, c2, c3


def _multiply(a: jax.Array, multiplier: int) -> tuple[jax.Array, jax.Array]:
    """(high, low) words of the 64-bit product, from 16-bit halves: JAX has no 64-bit integers by default."""
    b_high, b_low = jnp.uint32(multiplier >> 16), jnp.uint32(multiplier & 0xFFFF)
    a_high, a_low = a >> 16, a & jnp.uint32(0xFFFF)
    middle = a_high * b_low + ((a_low * b_low) >> 16)  # below 2^32: (2^16 − 1)² + 2^16 − 1
    carry = a_low * b_high + (middle & jnp.uint32(0xFFFF))
    return a_high * b_high + (middle >> 16) + (carry >> 16), a * jnp.uint32(multiplier)


def random_bits(
    shape: tuple[int, ...], *, seed: Any, step: Any, layer: Any, sequence: Any, head: Any, round_index: Any
) -> jax.Array:
    """Random bits for one rounding of a tile (or of many, by broadcasting).

    Args:
      shape: of one tile, [K, V] for a state and [1, K] or [K] for a token of W.
      seed, step: the key. uint32 scalars; step counts optimizer steps, so that each draws afresh.
      layer: uint32 scalar below 2^16.
      sequence, head: global indices (a shard adds its offsets). Scalars or arrays.
      round_index: which rounding of the tile this is: the chunk or the token. Scalar or array.

    Returns uint32 [*leading, *shape]; the arguments broadcast to `leading` (all scalars: no leading dimensions).
    Element e of a tile in row-major order is output word e mod 4 of the block whose counter is (e // 4, round_index,
    layer·2^16 ^ head, sequence) under the key (seed, step). Works under jit, vmap, scan and in Pallas kernels.
    """
    seed, step, layer, sequence, head, round_index = map(_as_uint32, (seed, step, layer, sequence, head, round_index))
    leading = tuple(np.broadcast_shapes(*(jnp.shape(a) for a in (seed, step, layer, sequence, head, round_index))))
    return _random_bits(tuple(shape), leading, (seed, step), round_index, (layer << 16) ^ head, sequence)


@partial(jax.jit, static_argnums=(0, 1), inline=True)
def _random_bits(
    shape: tuple[int, ...],
    leading: tuple[int, ...],
    key: tuple[jax.Array, jax.Array],
    round_index: jax.Array,
    layer_and_head: jax.Array,
    sequence: jax.Array,
) -> jax.Array:
    size = math.prod(shape)

    def per_block(word: jax.Array) -> jax.Array:
        return jnp.broadcast_to(word, leading)[..., None]

    blocks = jnp.arange(-(-size // 4), dtype=jnp.uint32).reshape((1,) * len(leading) + (-1,))
    counter = (blocks, per_block(round_index), per_block(layer_and_head), per_block(sequence))
    words = philox4x32(counter, (per_block(key[0]), per_block(key[1])))
    w0, w1, w2, w3 = materialize(*jnp.broadcast_arrays(*words))
    pairs = (jnp.stack((w0, w2), axis=-1), jnp.stack((w1, w3), axis=-1))  # by twos, as Pallas can on GPUs
    stream = jnp.stack(pairs, axis=-1).reshape((*leading, -1))
    return stream[..., :size].reshape((*leading, *shape))


def _as_uint32(value: Any) -> jax.Array:
    return (
        jnp.asarray(np.uint32(value)) if isinstance(value, int | np.integer) else jnp.asarray(value).astype(jnp.uint32)
    )
