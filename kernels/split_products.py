"""Products of float32 matrices on the matrix units: in two parts of bfloat16, 16 of 24 bits, or in float16."""

import triton
import triton.language as tl

from jlaqat.kernels.rounding import INTERPRETED


@triton.jit
def upper_bits(b_x):
    """float32 x cut to what bfloat16 holds; x less it has 16 bits left."""
    return (b_x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def two_parts(b_x):
    """[W, 2 n] bfloat16 of [W, n]: the upper bits of all, then the rest."""
    b_upper = upper_bits(b_x)
    b = tl.join(b_upper.to(tl.bfloat16), (b_x - b_upper).to(tl.bfloat16))
    return tl.reshape(tl.permute(b, (0, 2, 1)), [b_x.shape[0], 2 * b_x.shape[1]])


@triton.jit
def side_by_side(b_x, b_y):
    """[W, 2 n] of two [W, n]"""
    return tl.reshape(tl.permute(tl.join(b_x, b_y), (0, 2, 1)), [b_x.shape[0], 2 * b_x.shape[1]])


@triton.jit
def apart(b):
    """The two [W, n] of [W, 2 n]"""
    return tl.split(tl.permute(tl.reshape(b, [b.shape[0], 2, b.shape[1] // 2]), (0, 2, 1)))


@triton.jit
def times(b_x, b_parts, PARTS: tl.constexpr):
    """x y, float32, for what `two_parts` made of y; x is bfloat16's or has so many parts of it."""
    b_upper, b_rest = apart(times_exact(b_x, b_parts, PARTS))
    return b_upper + b_rest


@triton.jit
def times_exact(b_x, b_y, PARTS: tl.constexpr):
    """x y, float32, of a bfloat16 y and an x that is bfloat16's or has so many parts of it."""
    if PARTS == 1:
        return multiply(b_x.to(tl.bfloat16), b_y)
    else:
        b_upper = upper_bits(b_x)
        return multiply(b_upper.to(tl.bfloat16), b_y) + multiply((b_x - b_upper).to(tl.bfloat16), b_y)


@triton.jit
def multiply(b_x, b_y):
    """A product of bfloat16 matrices, float32."""
    if INTERPRETED:  # which multiplies the integers that it holds bfloat16 in
        return tl.dot(b_x.to(tl.float32), b_y.to(tl.float32))
    else:
        return tl.dot(b_x, b_y)


@triton.jit
def times_parts(b_x, b_y):
    """x y of a bfloat16 or float32 x and a wide float32 y; of the four products of parts the smallest is left out."""
    b_upper = upper_bits(b_y)
    b_rest = (b_y - b_upper).to(tl.bfloat16)
    if b_x.dtype == tl.bfloat16:
        return multiply(b_x, b_upper.to(tl.bfloat16)) + multiply(b_x, b_rest)
    else:
        b_x_upper = upper_bits(b_x)
        b_x_rest = (b_x - b_x_upper).to(tl.bfloat16)
        b = multiply(b_x_upper.to(tl.bfloat16), b_rest) + multiply(b_x_rest, b_upper.to(tl.bfloat16))
        return multiply(b_x_upper.to(tl.bfloat16), b_upper.to(tl.bfloat16)) + b


@triton.jit
def to_float16(b_x):
    """(x / unit in float16, unit [n]) of x [n, W]; a row's unit is a power of two, and its values are at most 2^15."""
    unit, factor = power_of_two_below(tl.max(tl.abs(b_x), axis=1))
    return (b_x * (factor * 8192.0)[:, None]).to(tl.float16), unit * (1.0 / 8192.0)


@triton.jit
def power_of_two_below(x):
    """(2^n ≤ x, 2^-n) of x ≥ 0; n is from -95 to 126, so that both are normal and infinity stays what it is."""
    bits = tl.minimum(tl.maximum(x.to(tl.int32, bitcast=True) & 0x7F800000, 0x10000000), 0x7E800000)
    return bits.to(tl.float32, bitcast=True), (0x7F000000 - bits).to(tl.float32, bitcast=True)
