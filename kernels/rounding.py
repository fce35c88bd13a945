"""Device functions that quantize a tile: the formulas of jlaqat.rounding, equal to it bit for bit.

A quantized value is kept as `code` (its position on the format's grid, as a float: exact in bfloat16, float16 and TF32)
and `scale`. Products take the codes, so a rounded state loses nothing on its way through the matrix units, and the
scale is applied to the float32 result.
"""

import triton
import triton.language as tl

TINY = tl.constexpr(1.1754943508222875e-38)  # smallest normal float32
INFINITY = tl.constexpr(float("inf"))
SHIFT = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it leaves an integer's worth of mantissa
BEYOND = tl.constexpr(0x4B800000)  # bits above those of SHIFT and any 8-bit integer, below NaN's; the low byte is 0
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def compute_scale(amax, MAXIMUM: tl.constexpr):
    """(s, r): s = RN(amax / MAXIMUM), 1 where that is zero or subnormal; r = RN(1 / s). amax ≥ 0, MAXIMUM 448 or 127.

    Infinity gives (inf, 0), NaN gives NaN. Divisions would be calls and branches, and the interpreter, where an fma may
    round twice, takes them.
    """
    if INTERPRETED:
        s = tl.div_rn(amax, tl.full(amax.shape, MAXIMUM, tl.float32))
        s = tl.where(s < TINY, 1.0, s)
        return s, tl.div_rn(tl.full(s.shape, 1.0, tl.float32), s)
    else:
        s = _divide_by(amax, MAXIMUM)
        s = tl.where(s < TINY, 1.0, s)
        return s, _reciprocal(s)


@triton.jit
def _divide_by(x, DIVISOR: tl.constexpr):
    """RN(x / DIVISOR) where that is normal, less than TINY where it is not: tests/exact_scales.c tries every x ≥ 0."""
    tl.static_assert(DIVISOR == 448.0 or DIVISOR == 127.0)
    inverse = tl.full(x.shape, 1.0 / DIVISOR, tl.float32)
    quotient = x * inverse
    remainder = tl.fma(tl.full(x.shape, -DIVISOR, tl.float32), quotient, x)  # exact
    return tl.where(x == INFINITY, x, tl.fma(remainder, inverse, quotient))


@triton.jit
def _reciprocal(s):
    """RN(1 / s) of TINY ≤ s < 2^126, of infinity and NaN."""
    if len(s.shape) == 0:
        # One number a program: its branch costs nothing, and without it ptxas lets the scan of KDA spill.
        return tl.inline_asm_elementwise("rcp.rn.f32 $0, $1;", "=f,f", [s], dtype=tl.float32, is_pure=True, pack=1)
    else:
        # The instructions that ptxas makes of rcp.rn for such numbers, without a branch for others.
        r = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [s], dtype=tl.float32, is_pure=True, pack=1)
        error = tl.fma(-s, r, tl.full(s.shape, 1.0, tl.float32))
        return tl.where(s == INFINITY, 0.0, tl.fma(r, error, r))


@triton.jit
def magnitude_bits(x):
    """|x| as an integer of the same order, NaN above Inf: a float maximum may drop NaN, an integer one cannot."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _larger(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest_magnitude(x, axis: tl.constexpr = None):
    """max |x| along an axis, or of all; NaN where there is one.

    A maximum that keeps NaN takes |x| as it is, an instruction an element; the interpreter has none.
    """
    if INTERPRETED:
        return tl.max(magnitude_bits(x), axis=axis).to(tl.float32, bitcast=True)
    else:
        return tl.reduce(tl.abs(x), axis, _larger)


@triton.jit
def round_e4m3(x, HARDWARE_FP8: tl.constexpr):
    """To the nearest E4M3 value, ties to even; |x| is at most 448 (up to the last bit) or NaN."""
    if HARDWARE_FP8:
        return x.to(tl.float8e4nv).to(tl.float32)
    bits = x.to(tl.int32, bitcast=True)
    magnitude = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    exponent = tl.maximum((bits >> 23) & 0xFF, 121)  # subnormals share the step of 2^-6
    step = ((exponent - 3) << 23).to(tl.float32, bitcast=True)
    rounded = (magnitude + SHIFT * step) - SHIFT * step
    sign = bits & -2147483648
    return (rounded.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def scale_down(x, r, FORMAT: tl.constexpr):
    """x * r, rounded before it is rounded to a code, also where the compiler may contract products and sums."""
    if FORMAT == "int8" and not INTERPRETED:  # no other format adds to it
        return tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=f,f,f", [x, r], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return x * r


@triton.jit
def round_code(x, FORMAT: tl.constexpr, HARDWARE_FP8: tl.constexpr):
    if FORMAT == "e4m3":
        return round_e4m3(x, HARDWARE_FP8)
    else:
        tl.static_assert(FORMAT == "int8")
        return (x + SHIFT) - SHIFT


@triton.jit
def low_byte(b_shifted):
    """Eight bits of an integer to which SHIFT was added; 0 of NaN."""
    return tl.minimum(b_shifted.to(tl.uint32, bitcast=True), BEYOND).to(tl.uint8)


@triton.jit
def quantize_tile(b_s, FORMAT: tl.constexpr, HARDWARE_FP8: tl.constexpr):
    """(codes float32, the one scale, bytes that `decode` reads) of a tile."""
    # A thread's own numbers by largest_magnitude, an instruction each; as integers, which one instruction compares
    # across a warp, only what is left: one of eight columns.
    b_most = largest_magnitude(tl.reshape(b_s, [b_s.shape[0], b_s.shape[1] // 8, 8]), 1)
    amax = tl.max(magnitude_bits(b_most)).to(tl.float32, bitcast=True)
    s, r = compute_scale(amax, 448.0 if FORMAT == "e4m3" else 127.0)
    if FORMAT == "e4m3" and HARDWARE_FP8:
        b_fp8 = (b_s * r).to(tl.float8e4nv)  # once: the compiler would convert back for the bytes
        return b_fp8.to(tl.float32), s, b_fp8.to(tl.uint8, bitcast=True)
    elif FORMAT == "int8":
        b_shifted = scale_down(b_s, r, FORMAT) + SHIFT  # as round_code has it, and its low byte is the code's
        return b_shifted - SHIFT, s, low_byte(b_shifted)
    else:
        b_code = round_code(scale_down(b_s, r, FORMAT), FORMAT, HARDWARE_FP8)
        return b_code, s, encode(b_code, FORMAT, HARDWARE_FP8)


@triton.jit
def fake_quantize_rows(b_x, FORMAT: tl.constexpr, HARDWARE_FP8: tl.constexpr):
    """Quantize-dequantized rows of [BT, BK]: one scale a row."""
    amax = largest_magnitude(b_x, 1)
    s, r = compute_scale(amax, 448.0 if FORMAT == "e4m3" else 127.0)
    return round_code(b_x * r[:, None], FORMAT, HARDWARE_FP8) * s[:, None]


@triton.jit
def encode_rows(b_x, FORMAT: tl.constexpr, HARDWARE_FP8: tl.constexpr):
    """(bytes that `decode` reads, scales [BT]) of rows of [BT, BK]."""
    amax = largest_magnitude(b_x, 1)
    s, r = compute_scale(amax, 448.0 if FORMAT == "e4m3" else 127.0)
    if FORMAT == "e4m3" and HARDWARE_FP8:
        return (b_x * r[:, None]).to(tl.float8e4nv).to(tl.uint8, bitcast=True), s
    else:
        return encode(round_code(b_x * r[:, None], FORMAT, HARDWARE_FP8), FORMAT, HARDWARE_FP8), s


@triton.jit
def encode(code, FORMAT: tl.constexpr, HARDWARE_FP8: tl.constexpr):
    """Eight bits of a code, as uint8: E4M3's own bits, or two's complement (NaN becomes 0: its scale is NaN or inf).

    code: float32, or in float8e4nv already.
    """
    if code.dtype == tl.float8e4nv:
        return code.to(tl.uint8, bitcast=True)
    elif FORMAT == "int8":
        return low_byte(code + SHIFT)
    elif HARDWARE_FP8:
        return code.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = code.to(tl.int32, bitcast=True)
        exponent = (bits >> 23) & 0xFF
        subnormal = tl.where(exponent < 121, tl.abs(code) * 512.0, 0.0).to(tl.int32)
        normal = ((exponent - 120) << 3) | ((bits >> 20) & 7)
        low = tl.where(exponent < 121, subnormal, normal)
        low = tl.where(code == code, low, 0x7F)
        return (low | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def decode(byte, FORMAT: tl.constexpr, HARDWARE_FP8: tl.constexpr):
    """The code that `encode` stored, as float32."""
    if FORMAT == "int8":
        return byte.to(tl.int8, bitcast=True).to(tl.float32)
    elif HARDWARE_FP8:
        return byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        low = byte.to(tl.int32)
        mantissa = low & 7
        exponent = (low >> 3) & 15
        normal = (((exponent + 120) << 23) | (mantissa << 20)).to(tl.float32, bitcast=True)
        value = tl.where(exponent == 0, mantissa.to(tl.float32) * 0.001953125, normal)
        value = tl.where((low & 0x7F) == 0x7F, float("nan"), value)
        return tl.where(low >= 128, -value, value)
