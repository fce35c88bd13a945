"""Exact elementwise arithmetic of the rounding contract: correctly rounded division and rounding to a format's grid.

Everything here gives the same bits eagerly, under jit, vmap, scan and in Pallas kernels. That takes care, because XLA
turns divisions into reciprocal multiplications, contracts a·b + c into one rounding, folds (x + c) − c to x and flushes
subnormals. So quotients are finished in integers, and elements are rounded by steps that no such rewrite can change.
Source of the formulas: docs/rounding.md.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jlaqat.spec import FORMATS, QuantConfigError

SMALLEST_NORMAL = 2.0**-126
_EXPONENT = 0x7F800000  # the exponent's bits of a float32
_MANTISSA = 0x007FFFFF
_SIGN = 0x80000000
_MAGNITUDE = 0x7FFFFFFF


def bits_of(x: jax.Array | float) -> jax.Array:
    """The 32 bits of a float32 as uint32. Python scalars become literals, which Pallas cannot bitcast on GPUs."""
    if isinstance(x, int | float):
        return jnp.uint32(np.float32(x).view(np.uint32))
    return lax.bitcast_convert_type(x, jnp.uint32)


def float_of(bits: jax.Array) -> jax.Array:
    """The float32 that has these 32 bits."""
    return lax.bitcast_convert_type(bits, jnp.float32)


def magnitude_bits(x: jax.Array) -> jax.Array:
    """|x| as uint32, in the order of |x|, with NaN above infinity: a maximum of these never loses a NaN."""
    return bits_of(x) & _u32(_MAGNITUDE)


def materialize(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The same arrays, computed once and written to memory where the code is traced for CPUs.

    XLA would otherwise fuse their computation into the loops that read them: divide anew for every element of a group,
    draw every random word four times, which is several times slower (benchmarks/rounding_speed.py). GPUs keep them in
    registers, and Pallas has no barrier there. No bit depends on it.
    """
    return tuple(lax.optimization_barrier(arrays)) if traced_for_cpu() else arrays


def traced_for_cpu() -> bool:
    """Whether the code is being traced for CPUs: by the mesh in use, else by JAX's default."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return (jax.default_backend() if device is None else device.platform) == "cpu"


def _u32(value: int) -> jax.Array:
    return jnp.uint32(value)


# ---- division --------------------------------------------------------------------------------------------------------


def div_rn(a: jax.Array | float, b: jax.Array | float) -> jax.Array:
    """a / b, correctly rounded to nearest even: numpy's float32 quotient, bit for bit, whatever XLA does to divisions.

    Args:
      a, b: float32 arrays (or Python scalars) of shapes that broadcast.

    Returns float32. Subnormal operands and results are exact; signs of zeros, infinities and NaN follow IEEE 754 (the
    payload of a NaN is not kept).

    An approximate float quotient gives 26 bits of the mantissas' quotient, off by a few units; the remainder, exact in
    wrapping 32-bit integers because it is small, corrects it; what is left of it is the last rounding's sticky bit.
    """
    return _divide_bits(*jnp.broadcast_arrays(bits_of(a), bits_of(b)))


@partial(jax.jit, inline=True)
def _divide_bits(a_bits: jax.Array, b_bits: jax.Array) -> jax.Array:
    sign = (a_bits ^ b_bits) & _u32(_SIGN)
    a_mag, b_mag = a_bits & _u32(_MAGNITUDE), b_bits & _u32(_MAGNITUDE)

    a_exponent, a_mantissa = _normalized(a_mag)
    b_exponent, b_mantissa = _normalized(b_mag)
    smaller = (a_mantissa < b_mantissa).astype(jnp.int32)
    quotient, remainder = _mantissa_quotient(a_mantissa, b_mantissa, 25 + smaller)
    finite = _assemble(a_exponent - b_exponent - smaller + 127, 2 * quotient + (remainder != 0).astype(jnp.int32))

    infinity = _u32(_EXPONENT)
    zero = (a_mag == 0) | (b_mag == infinity)
    infinite = (a_mag == infinity) | (b_mag == 0)
    nan = (zero & infinite) | (a_mag > infinity) | (b_mag > infinity)  # 0/0, ∞/∞ are both zero and infinite here
    magnitude = jnp.where(zero, _u32(0), jnp.where(infinite, infinity, finite))
    return float_of(jnp.where(nan, _u32(0x7FC00000), sign | magnitude))


def _normalized(magnitude: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(biased exponent, mantissa in [2^23, 2^24)), int32, subnormals shifted up; zero and infinity give nonsense."""
    exponent, mantissa = (magnitude >> 23).astype(jnp.int32), (magnitude & _u32(_MANTISSA)).astype(jnp.int32)
    # A mantissa is exact as a float, whose exponent tells its leading bit.
    leading = (bits_of(mantissa.astype(jnp.float32)) >> 23).astype(jnp.int32) - 127
    shift = jnp.clip(23 - leading, 0, 23)
    subnormal = exponent == 0
    return (
        jnp.where(subnormal, 1 - shift, exponent),
        jnp.where(subnormal, mantissa << shift, mantissa | (1 << 23)),
    )


def _mantissa_quotient(a: jax.Array, b: jax.Array, shift: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(floor(a·2^shift / b), remainder), int32, for a and b in [2^23, 2^24) and a quotient in [2^25, 2^26)."""
    a_float, b_float = a.astype(jnp.float32), b.astype(jnp.float32)
    power = float_of((127 + shift).astype(jnp.uint32) << 23)
    quotient = (a_float / b_float * power).astype(jnp.int32)  # approximate: right to a few units of the last place
    remainder = (a << shift) - quotient * b  # wraps, exact: the true value is a small multiple of b
    correction = jnp.floor(remainder.astype(jnp.float32) / b_float).astype(jnp.int32)  # at most one off
    quotient, remainder = quotient + correction, remainder - correction * b
    off = (remainder >= b).astype(jnp.int32) - (remainder < 0).astype(jnp.int32)
    return quotient + off, remainder - off * b


def _assemble(exponent: jax.Array, significand: jax.Array) -> jax.Array:
    """Bits of significand·2^(exponent−127−26), nearest even; significand in [2^26, 2^27), its last bit sticky."""
    # Three bits are dropped from a normal result, one more for each step below the exponents of normal numbers.
    dropped = jnp.clip(3 + 1 - exponent, 3, 29)
    odd = (significand >> dropped) & 1
    rounded = (significand + (1 << (dropped - 1)) - 1 + odd) >> dropped
    bits = (jnp.maximum(exponent - 1, 0) << 23) + rounded  # the leading bit adds one to the exponent, a carry another
    return jnp.where(exponent >= 255, _u32(_EXPONENT), jnp.minimum(bits, _EXPONENT).astype(jnp.uint32))


# ---- rounding to a grid ----------------------------------------------------------------------------------------------


def round_to_format(
    x: jax.Array, fmt: str, *, rounding: str = "nearest", random_bits: jax.Array | None = None
) -> jax.Array:
    """Rounds each element to the grid of an unscaled format, saturating at its largest magnitude.

    Args:
      x: float32, already divided by its scale.
      fmt: a key of `jlaqat.spec.FORMATS`; "nvfp4" and "mxfp4" mean E2M1, "mxfp8" means E4M3.
      rounding: "nearest" (ties to even), "stochastic" (the lower or upper neighbour, with probability by distance), or
        for integers "half_away" (nearest, ties away from zero).
      random_bits: uint32 of x's shape, for "stochastic" only; the upper 24 bits decide (bfloat16: the lower 16).

    Returns float32 of x's shape. NaN stays NaN, ±∞ saturates like any large value; the casts "float16" and "bfloat16"
    overflow to ±∞ instead. A value on the grid keeps its bits, the sign of zero included. Under "stochastic", a value
    within a relative 2^-22 of a scaled format's grid counts as on it: scaling loses as much, and so a rounded tensor
    that is rounded again does not change.

    Raises ValueError for an unknown format or rounding, and for random bits that are missing or given needlessly.
    """
    if fmt not in FORMATS:
        raise QuantConfigError(f"fmt={fmt!r} is not a format; choose one of {', '.join(FORMATS)}.")
    if rounding not in ("nearest", "half_away", "stochastic"):
        raise QuantConfigError(
            f"rounding={rounding!r} is not supported; choose 'nearest', 'half_away' or 'stochastic'."
        )
    if rounding == "half_away" and FORMATS[fmt].kind != "int":
        raise QuantConfigError(f"rounding='half_away' is for integers, not {fmt!r}; choose 'nearest'.")
    if (rounding == "stochastic") != (random_bits is not None):
        given = "no random_bits" if random_bits is None else "random_bits"
        raise ValueError(f"rounding={rounding!r} was given {given}; pass random_bits with rounding='stochastic' only.")
    if random_bits is not None and (random_bits.dtype != jnp.uint32 or random_bits.shape != x.shape):
        raise ValueError(
            f"random_bits is {random_bits.dtype}{list(random_bits.shape)}; it must be uint32{list(x.shape)}, x's shape."
        )
    if rounding == "half_away":
        return _round_half_away(x, FORMATS[fmt].max)
    return _round_to_format(x, fmt, random_bits)


@partial(jax.jit, static_argnames="maximum", inline=True)
def _round_half_away(x: jax.Array, maximum: float) -> jax.Array:
    """To an integer within ±maximum, halves away from zero. The comparison sees the exact fraction."""
    magnitude = jnp.abs(clamp(x, maximum))
    lower = jnp.floor(magnitude)
    return _with_sign_of(lower + (magnitude - lower >= 0.5).astype(jnp.float32), x)


@partial(jax.jit, static_argnames="fmt", inline=True)
def _round_to_format(x: jax.Array, fmt: str, random_bits: jax.Array | None) -> jax.Array:
    if fmt == "bfloat16":
        return _round_to_bfloat16(x, random_bits)
    if fmt == "float16":
        return _round_to_float16(x, random_bits)
    description = FORMATS[fmt]
    least_exponent, mantissa_bits = 2 - 2 ** (description.exponent_bits - 1), description.mantissa_bits
    if description.kind == "int":
        # Integers are the subnormals of a float format whose mantissa holds them all: the step is 1 throughout.
        least_exponent = mantissa_bits = int(description.max).bit_length()
    return _round_to_grid(clamp(x, description.max), least_exponent, mantissa_bits, random_bits, snap=True)


def clamp(x: jax.Array, maximum: float) -> jax.Array:
    """x limited to ±maximum; NaN stays. Two selects, since a minimum drops NaN on some backends.

    The selects also stand between the multiplication by 1/scale and the additions of the rounding, which must not fuse.
    """
    low, high = jnp.float32(-maximum), jnp.float32(maximum)
    return jnp.where(x > high, high, jnp.where(x < low, low, x))


def _round_to_grid(
    x: jax.Array, least_exponent: int, mantissa_bits: int, random_bits: jax.Array | None, *, snap: bool
) -> jax.Array:
    """To a multiple of the grid's step at x: 2^(exponent of x − mantissa bits), constant below the least exponent."""
    exponent = jnp.maximum(bits_of(x) & _u32(_EXPONENT), _u32((127 + least_exponent) << 23))
    step_bits = exponent - _u32(mantissa_bits << 23)
    # Adding 1.5·2^23 steps pushes the fraction out of the mantissa, rounding half to even. The addend is formed from
    # x's own exponent: XLA folds (x + c) − c to x for a literal c (it did).
    addend = float_of(step_bits + _u32((23 << 23) | (1 << 22)))
    nearest = _with_sign_of((x + addend) - addend, x)
    if random_bits is None:
        return nearest
    steps = jnp.abs(x) * float_of(_u32(254 << 23) - step_bits)  # exact, and so is the fraction below
    lower = jnp.floor(steps)
    uniform = (random_bits >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)  # in [0, 1): a fraction of 0 stays
    drawn = _with_sign_of((lower + (uniform < steps - lower).astype(jnp.float32)) * float_of(step_bits), x)
    if not snap:
        return drawn
    return jnp.where(jnp.abs(x - nearest) <= jnp.abs(nearest) * jnp.float32(2.0**-22), nearest, drawn)


def _round_to_float16(x: jax.Array, random_bits: jax.Array | None) -> jax.Array:
    """A cast to float16 and back: overflows to infinity where the grid's next value, 65536, would be."""
    rounded = _round_to_grid(clamp(x, 65536.0), -14, 10, random_bits, snap=False)
    return jnp.where(jnp.abs(rounded) >= 65536.0, float_of(_u32(_EXPONENT) | (bits_of(x) & _u32(_SIGN))), rounded)


def _with_sign_of(value: jax.Array, sign: jax.Array) -> jax.Array:
    """`value` or −`value`, whichever has the sign bit of `sign` (zeros too)."""
    return float_of(magnitude_bits(value) | (bits_of(sign) & _u32(_SIGN)))


def _round_to_bfloat16(x: jax.Array, random_bits: jax.Array | None) -> jax.Array:
    """A cast to bfloat16 and back, on the bits: XLA may remove such a pair of conversions (excess precision)."""
    bits = bits_of(x)
    increment = ((bits >> 16) & _u32(1)) + _u32(0x7FFF) if random_bits is None else random_bits & _u32(0xFFFF)
    finite = magnitude_bits(x) < _u32(_EXPONENT)
    return float_of(jnp.where(finite, (bits + increment) & _u32(0xFFFF0000), bits))


def to_dtype(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """float32 → dtype, nearest even. 16-bit results are rounded first, so that an elided conversion changes nothing."""
    if dtype == jnp.bfloat16:
        x = _round_to_bfloat16(x, None)
    elif dtype == jnp.float16:
        x = _round_to_float16(x, None)
    return x.astype(dtype)
