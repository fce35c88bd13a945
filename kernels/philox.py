"""Random bits and stochastic rounding: jlaqat.philox and jlaqat.arithmetic's formulas, equal to them bit for bit."""

import triton
import triton.language as tl

from jlaqat.kernels.key_order import keys_of_rows
from jlaqat.kernels.rounding import SHIFT

TOP = tl.constexpr(0x7F800000)
SIGN = tl.constexpr(-2147483648)


@triton.jit
def philox4x32(c0, c1, c2, c3, k0, k1):
    """Four words of Philox4x32-10: uint32 tensors of one shape, the key's of shapes that broadcast."""
    m0, m1 = tl.full(c0.shape, 0xD2511F53, tl.uint32), tl.full(c0.shape, 0xCD9E8D57, tl.uint32)
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(c0, m0), c0 * m0
        high1, low1 = tl.umulhi(c2, m1), c2 * m1
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 += tl.full(k0.shape, 0x9E3779B9, tl.uint32)
        k1 += tl.full(k1.shape, 0xBB67AE85, tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def draw_words(
    round_index,
    layer_and_head,
    sequence,
    step,
    i_v,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    SEED: tl.constexpr,
    BESIDE: tl.constexpr = 1,  # the order of rows, see `key_order`
):
    """uint32 [BK, BV]: the random bits of the columns i_v..i_v+BV of a state [K, V]. All counters are int32 scalars."""
    k0 = tl.full([1, 1], SEED, tl.uint32)
    k1 = tl.full([1, 1], 0, tl.uint32) + step.to(tl.uint32, bitcast=True)
    o_k = keys_of_rows(BK, BESIDE)[:, None]
    if V % 4 == 0:  # a block of four words holds four values of a row
        BLOCKS: tl.constexpr = BV // 4
        block = (o_k * (V // 4) + i_v // 4 + tl.arange(0, BLOCKS)[None, :]).to(tl.uint32)
    else:
        element = o_k * V + i_v + tl.arange(0, BV)[None, :]
        block = (element // 4).to(tl.uint32)
    none = tl.zeros(block.shape, tl.uint32)
    c1 = none + round_index.to(tl.uint32, bitcast=True)
    c2 = none + layer_and_head.to(tl.uint32, bitcast=True)
    c3 = none + sequence.to(tl.uint32, bitcast=True)
    w0, w1, w2, w3 = philox4x32(block, c1, c2, c3, k0, k1)
    if V % 4 == 0:
        return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [BK, BV])
    else:
        word = element % 4
        return tl.where(word == 0, w0, tl.where(word == 1, w1, tl.where(word == 2, w2, w3)))


@triton.jit
def _with_sign_of(value, sign):
    bits = (value.to(tl.int32, bitcast=True) & 0x7FFFFFFF) | (sign.to(tl.int32, bitcast=True) & SIGN)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def round_drawn(x, words, FORMAT: tl.constexpr):
    """x, divided by its scale where the format has one, to its lower or upper neighbour as the words have it."""
    bits = x.to(tl.int32, bitcast=True)
    if FORMAT == "bfloat16":
        rounded = bits + (words & 0xFFFF).to(tl.int32)
        finite = (bits & 0x7FFFFFFF) < TOP
        return tl.where(finite, rounded & -65536, bits).to(tl.float32, bitcast=True)
    else:
        LARGEST: tl.constexpr = 448.0 if FORMAT == "e4m3" else 127.0 if FORMAT == "int8" else 65536.0
        LEAST: tl.constexpr = -6 if FORMAT == "e4m3" else 7 if FORMAT == "int8" else -14
        MANTISSA: tl.constexpr = 3 if FORMAT == "e4m3" else 7 if FORMAT == "int8" else 10
        x = tl.where(x > LARGEST, LARGEST, tl.where(x < -LARGEST, -LARGEST, x))
        exponent = tl.maximum(x.to(tl.int32, bitcast=True) & TOP, (127 + LEAST) << 23)
        step_bits = exponent - (MANTISSA << 23)
        step = step_bits.to(tl.float32, bitcast=True)
        steps = tl.abs(x) * ((254 << 23) - step_bits).to(tl.float32, bitcast=True)  # exact, and so is the fraction
        lower = tl.floor(steps)
        uniform = (words >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08  # 2^-24
        drawn = _with_sign_of((lower + tl.where(uniform < steps - lower, 1.0, 0.0)) * step, x)
        if FORMAT == "float16":
            infinity = _with_sign_of(tl.full(x.shape, float("inf"), tl.float32), x)
            return tl.where(tl.abs(drawn) >= 65536.0, infinity, drawn)
        else:  # what scaling may have moved off the grid counts as on it
            nearest = _with_sign_of((x + SHIFT * step) - SHIFT * step, x)
            return tl.where(tl.abs(x - nearest) <= tl.abs(nearest) * 2.384185791015625e-07, nearest, drawn)  # 2^-22
