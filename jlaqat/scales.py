"""Which elements share a scale, and what it is: granularities, block scales and the range of static scales.

Scales are computed in a compact shape (one entry a group) and spread over the tensor by broadcasts that XLA fuses into
the rounding. A state is [..., K, V] with contraction axis −2, W is [..., tokens, K] with contraction axis −1.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jlaqat.arithmetic import SMALLEST_NORMAL, bits_of, div_rn, float_of, magnitude_bits, round_to_format
from jlaqat.spec import FORMATS, KEY_ROW_BLOCK, QuantSpec

FLOAT16_SMALLEST_SCALE = 6e-8
"""The least scale that is stored in float16, whose smallest magnitude it rounds to."""

NVFP4_SMALLEST_BLOCK_SCALE = 2.0**-9
"""What an NVFP4 block scale becomes where E4M3 would round it to zero: the smallest E4M3 magnitude."""


def compute_scale(amax: jax.Array, maximum: float) -> tuple[jax.Array, jax.Array]:
    """(s, r): the scale RN(amax / maximum) and its reciprocal RN(1 / s), float32, of amax's shape.

    s is 1 where amax is 0 or the quotient subnormal (XLA on the CPU would flush it); an infinite amax gives (∞, 0), NaN
    gives NaN, and so the rounded tensor is NaN.
    """
    quotient = div_rn(amax, maximum)
    scale = jnp.where(quotient < jnp.float32(SMALLEST_NORMAL), jnp.float32(1.0), quotient)
    return scale, div_rn(1.0, scale)


def scales(x: jax.Array, spec: QuantSpec, site: str, amax: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Compact (s, r) for float32 x: from x itself, or from a static amax. `spec` has its granularity filled in."""
    if spec.scale == "static":
        return compute_scale(static_amax(amax, x.shape, spec, site), spec.max)
    groups = group_amax(x, spec, site)
    if spec.format == "nvfp4":
        return _nvfp4_scales(groups)
    if FORMATS[spec.format].block:
        return _power_of_two_scales(groups, spec.max)
    limit = spec.max if spec.limit is None else spec.limit
    return _float16_scales(div_rn(groups, limit)) if spec.scale_dtype == "float16" else compute_scale(groups, limit)


def _float16_scales(quotient: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(the scale as float16 stores it, the reciprocal of the float32 scale, which codes are found with)."""
    exact = jnp.where(quotient < jnp.float32(FLOAT16_SMALLEST_SCALE), jnp.float32(FLOAT16_SMALLEST_SCALE), quotient)
    return round_to_format(exact, "float16"), div_rn(1.0, exact)


def _nvfp4_scales(groups: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Block scales E4M3(amax_block / 6t)·t with t = A / (6·448), A the amax over the last two axes."""
    tensor = lax.reduce_max(bits_of(groups), axes=(groups.ndim - 2, groups.ndim - 1))
    t, _ = compute_scale(float_of(tensor), 6.0 * 448.0)
    t = t[..., None, None]
    code = round_to_format(div_rn(groups, t * jnp.float32(6.0)), "e4m3")
    code = jnp.where(code == 0, jnp.float32(NVFP4_SMALLEST_BLOCK_SCALE), code)
    scale = code * t
    scale = jnp.where(scale < jnp.float32(SMALLEST_NORMAL), jnp.float32(1.0), scale)
    return scale, div_rn(1.0, scale)


def _power_of_two_scales(groups: jax.Array, maximum: float) -> tuple[jax.Array, jax.Array]:
    """MX block scales 2^ceil(log2(amax / maximum)), on the bits; 1 where the block is zero or the scale subnormal."""
    mantissa, exponent = math.frexp(maximum)  # maximum = mantissa·2^exponent, mantissa in [0.5, 1)
    # ceil: the exponents' difference, and one more where amax's mantissa exceeds maximum's (the carry of the addition).
    carry = 2**23 - 1 - round((2 * mantissa - 1) * 2**23)
    biased = ((bits_of(groups) + jnp.uint32(carry)) >> 23).astype(jnp.int32) - (exponent - 1)
    biased = jnp.where(biased < 1, 127, biased).astype(jnp.uint32)
    scale, reciprocal = float_of(biased << 23), float_of((jnp.uint32(254) - biased) << 23)
    finite = groups < jnp.inf
    return jnp.where(finite, scale, jnp.nan), jnp.where(finite, reciprocal, jnp.nan)


# ---- groups ----------------------------------------------------------------------------------------------------------


def group_amax(x: jax.Array, spec: QuantSpec, site: str) -> jax.Array:
    """max |x| of each group, float32, compact; NaN where the group holds one.

    Compact shapes for a state: tile [..., ceil(V/block_v)], value_row [..., V], key_row [..., K, ceil(V/32)], head
    [...], block [..., ceil(K/block), V]. For W: row [..., tokens], block [..., tokens, ceil(K/block)].
    """
    magnitudes = magnitude_bits(x)
    return float_of(_group_max(magnitudes, spec, site))


def _group_max(m: jax.Array, spec: QuantSpec, site: str) -> jax.Array:
    keys, values = m.ndim - 2, m.ndim - 1
    match spec.granularity:
        case "tile":
            return _max_in_blocks(lax.reduce_max(m, axes=(keys,)), -1, spec.block_v)
        case "value_row":
            return lax.reduce_max(m, axes=(keys,))
        case "key_row":
            return _max_in_blocks(m, -1, KEY_ROW_BLOCK)
        case "head":
            return lax.reduce_max(lax.reduce_max(m, axes=(keys,)), axes=(keys,))
        case "row":
            return lax.reduce_max(m, axes=(values,))
        case "block":
            return _max_in_blocks(m, -2 if site == "state" else -1, FORMATS[spec.format].block)
    raise AssertionError(f"no groups for granularity {spec.granularity!r}")


def _max_in_blocks(m: jax.Array, axis: int, size: int) -> jax.Array:
    """Maxima of consecutive blocks of `size` along a (negative) axis, the last block possibly shorter."""
    axis += m.ndim
    length = m.shape[axis]
    count = -(-length // size)
    if count * size != length:
        padding = [(0, count * size - length if d == axis else 0) for d in range(m.ndim)]
        m = jnp.pad(m, padding)
    m = m.reshape((*m.shape[:axis], count, size, *m.shape[axis + 1 :]))
    return lax.reduce_max(m, axes=(axis + 1,))


def spread(compact: jax.Array, shape: tuple[int, ...], spec: QuantSpec, site: str) -> jax.Array:
    """A compact array, broadcastable against a tensor of `shape` and of its rank."""
    match spec.granularity:
        case "tile":
            full = _repeat(compact, -1, spec.block_v, shape[-1])[..., None, :]
        case "value_row":
            full = compact[..., None, :]
        case "key_row":
            full = _repeat(compact, -1, KEY_ROW_BLOCK, shape[-1])
        case "head":
            full = compact[..., None, None]
        case "row":
            full = compact[..., None]
        case "block":
            axis = -2 if site == "state" else -1
            full = _repeat(compact, axis, FORMATS[spec.format].block, shape[axis])
        case _:
            raise AssertionError(f"no groups for granularity {spec.granularity!r}")
    return full.reshape((1,) * (len(shape) - full.ndim) + full.shape)


def _repeat(compact: jax.Array, axis: int, size: int, length: int) -> jax.Array:
    """Each entry along a (negative) axis `size` times, cut to `length`."""
    axis += compact.ndim
    shape = compact.shape
    blocks = jnp.broadcast_to(jnp.expand_dims(compact, axis + 1), (*shape[: axis + 1], size, *shape[axis + 1 :]))
    full = blocks.reshape((*shape[:axis], shape[axis] * size, *shape[axis + 1 :]))
    return full if full.shape[axis] == length else lax.slice_in_dim(full, 0, length, axis=axis)


# ---- static scales ---------------------------------------------------------------------------------------------------


def compact_shape(shape: tuple[int, ...], spec: QuantSpec, site: str) -> tuple[int, ...]:
    """The shape of `group_amax` for a tensor of `shape`."""
    return jax.eval_shape(lambda x: group_amax(x, spec, site), jax.ShapeDtypeStruct(shape, jnp.float32)).shape


def static_amax(amax: jax.Array | None, shape: tuple[int, ...], spec: QuantSpec, site: str) -> jax.Array:
    """A static amax (laid out as `QuantArrays` says) checked against the tensor's shape and made compact, float32."""
    if amax is None:
        raise ValueError(f"scale='static' at site {site!r} needs amax, a calibrated maximum; none was given.")
    expected = compact_shape(shape, spec, site)
    compact = lax.stop_gradient(jnp.asarray(amax)).astype(jnp.float32)
    if site == "w":
        compact = compact[..., None]  # one value for all tokens of a head
    try:
        fits = np.broadcast_shapes(compact.shape, expected) == expected
    except ValueError:
        fits = False
    if not fits or (spec.granularity in ("tile", "value_row", "key_row") and compact.shape[-1:] != expected[-1:]):
        wanted = expected[:-1] if site == "w" else expected
        raise ValueError(
            f"amax has shape {list(jnp.shape(amax))}, but granularity {spec.granularity!r} of a {site} of shape "
            f"{list(shape)} takes {list(wanted)} (leading dimensions may be left out or 1)."
        )
    return compact


def static_limit(amax: jax.Array, maximum: float) -> jax.Array:
    """The largest magnitude that a static scale represents: amax, or `maximum` where the scale was replaced by 1."""
    usable = ~(div_rn(amax, maximum) < jnp.float32(SMALLEST_NORMAL))
    return jnp.where(usable, amax, jnp.float32(maximum))
