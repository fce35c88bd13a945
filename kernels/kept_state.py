"""A state as it is kept between tokens and calls: rounding it, storing and loading its codes and scales."""

import triton
import triton.language as tl

from jlaqat.kernels.key_order import by_keys, by_rows, keys_of_rows
from jlaqat.kernels.philox import round_drawn
from jlaqat.kernels.rounding import (
    INFINITY,
    INTERPRETED,
    SHIFT,
    compute_scale,
    decode,
    encode,
    largest_magnitude,
    low_byte,
    round_code,
)


@triton.jit
def _to_code(b_x, words, FORMAT: tl.constexpr, HARDWARE_FP8: tl.constexpr, DRAWN: tl.constexpr):
    """b_x on the format's grid, float32.

    E4M3 that the hardware rounds is converted again where its bytes are stored: of one conversion for both, what ptxas
    12.8 and 12.9 (Triton's for SM90) make in a loop reads some values of the turn before (tests/stale_e4m3.py).
    """
    if DRAWN:
        return round_drawn(b_x, words, FORMAT)
    elif FORMAT == "bfloat16":
        return b_x.to(tl.bfloat16).to(tl.float32)  # nearest even on every architecture
    elif FORMAT == "float16":
        return b_x.to(tl.float16).to(tl.float32)
    else:
        return round_code(b_x, FORMAT, HARDWARE_FP8)


@triton.jit
def _along(b_scale, GRANULARITY: tl.constexpr):
    """Scales in a shape that broadcasts to the state's."""
    if GRANULARITY == "tile":
        return b_scale
    elif GRANULARITY == "key_row":
        return b_scale[:, None]
    else:
        tl.static_assert(GRANULARITY == "value_row")
        return b_scale[None, :]


@triton.jit
def _int8_bytes(b_shifted, b_scale, GRANULARITY: tl.constexpr, VECTOR: tl.constexpr):
    """Eight bits of integers to which SHIFT was added, 0 of NaN: then their scale is infinite or NaN.

    Where four neighbours of a thread share a scale, three permutations and one mask are enough for them.
    """
    if INTERPRETED or GRANULARITY == "value_row" or (GRANULARITY == "key_row" and VECTOR < 4):
        return low_byte(b_shifted)
    else:
        keep = tl.where(b_scale < INFINITY, -1, 0)
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 low, high;
            prmt.b32 low, $1, $2, 0x0040;
            prmt.b32 high, $3, $4, 0x0040;
            prmt.b32 low, low, high, 0x5410;
            and.b32 $0, low, $5;
            }""",
            "=r,r,r,r,r,r,r,r,r",
            [b_shifted, tl.broadcast_to(_along(keep, GRANULARITY), b_shifted.shape)],
            dtype=tl.uint8,
            is_pure=True,
            pack=4,
        )


@triton.jit
def round_kept(
    b_s,
    FORMAT: tl.constexpr,
    GRANULARITY: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
    VECTOR: tl.constexpr,
    words=0,
    DRAWN: tl.constexpr = False,
):
    """(what `store_rounded` takes, codes, scales) of [BK, BV]; without codes the rounded values twice and 1.

    Arguments, and what scales there are: as `round_state` has them. VECTOR: columns side by side in a thread.
    """
    if FORMAT == "float32":
        return b_s, b_s, tl.full([], 1.0, tl.float32)
    elif FORMAT == "bfloat16" or FORMAT == "float16":
        b_value = _to_code(b_s, words, FORMAT, HARDWARE_FP8, DRAWN)
        return b_value, b_value, tl.full([], 1.0, tl.float32)
    else:
        AXIS: tl.constexpr = None if GRANULARITY == "tile" else 1 if GRANULARITY == "key_row" else 0
        s, r = compute_scale(largest_magnitude(b_s, AXIS), 448.0 if FORMAT == "e4m3" else 127.0)
        b_x = b_s * _along(r, GRANULARITY)
        if FORMAT == "int8" and not DRAWN:
            b_shifted = b_x + SHIFT
            return _int8_bytes(b_shifted, s, GRANULARITY, VECTOR), b_shifted - SHIFT, s
        else:
            b_code = _to_code(b_x, words, FORMAT, HARDWARE_FP8, DRAWN)
            return b_code, b_code, s


@triton.jit
def round_state(
    b_s,
    FORMAT: tl.constexpr,
    GRANULARITY: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
    words=0,  # uint32 [BK, BV], random bits; for DRAWN
    DRAWN: tl.constexpr = False,
):
    """(codes, scales, the state they stand for) of [BK, BV]; without codes the rounded values, 1 and again the values.

    To nearest, or stochastically (DRAWN). Scales: one for "tile", [BK] for "key_row" (BV is its 32 columns then), [BV]
    for "value_row".
    """
    _, b_code, b_scale = round_kept(b_s, FORMAT, GRANULARITY, HARDWARE_FP8, 1, words, DRAWN)
    return b_code, b_scale, apply_scale(b_code, b_scale, FORMAT, GRANULARITY)


@triton.jit
def store_rounded(
    p_values,
    p_scale,
    state,  # int64, the state's number in p_values
    b_code,
    b_scale,
    i_v,
    K: tl.constexpr,
    V: tl.constexpr,
    FORMAT: tl.constexpr,
    GRANULARITY: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
    VECTOR: tl.constexpr,
    BESIDE: tl.constexpr = 1,  # the order of rows, see `key_order`
):
    """Codes (or their bytes) and scales, or values, as they are kept."""
    BK: tl.constexpr = b_code.shape[0]
    BV: tl.constexpr = b_code.shape[1]
    PROGRAMS_V: tl.constexpr = (V + BV - 1) // BV
    o_k = tl.arange(0, BK)
    o_row = keys_of_rows(BK, BESIDE)
    o_v = i_v + tl.arange(0, BV)
    m = (o_row < K)[:, None] & (o_v < V)[None, :]
    p = p_values + state * K * V + o_row[:, None] * V + tl.max_contiguous(o_v, VECTOR)[None, :]
    if FORMAT == "e4m3" or FORMAT == "int8":
        if b_code.dtype == tl.uint8:
            tl.store(p, b_code, mask=m)
        else:
            tl.store(p, encode(b_code, FORMAT, HARDWARE_FP8), mask=m)
        if GRANULARITY == "tile":
            tl.store(p_scale + state * PROGRAMS_V + i_v // BV, b_scale)
        elif GRANULARITY == "key_row":
            tl.store(p_scale + (state * K + o_k) * PROGRAMS_V + i_v // BV, by_keys(b_scale, BESIDE), mask=o_k < K)
        else:
            tl.store(p_scale + state * V + o_v, b_scale, mask=o_v < V)
    else:
        tl.store(p, b_code.to(p_values.dtype.element_ty), mask=m)


@triton.jit
def load_scales(
    p_scale,
    state,
    i_v,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    FORMAT: tl.constexpr,
    GRANULARITY: tl.constexpr,
    GROUP: tl.constexpr = 0,  # columns that share a scale where those are more than BV
    BESIDE: tl.constexpr = 1,  # the order of rows, see `key_order`
):
    """The scales of a state's columns from i_v on, as `round_state` has them; 1 without codes."""
    SHARED_BY: tl.constexpr = GROUP if GROUP else BV
    GROUPS: tl.constexpr = (V + SHARED_BY - 1) // SHARED_BY
    o_k = tl.arange(0, BK)
    o_v = i_v + tl.arange(0, BV)
    if FORMAT != "e4m3" and FORMAT != "int8":
        return tl.full([], 1.0, tl.float32)
    elif GRANULARITY == "tile":
        return tl.load(p_scale + state * GROUPS + i_v // SHARED_BY)
    elif GRANULARITY == "key_row":
        b_scale = tl.load(p_scale + (state * K + o_k) * GROUPS + i_v // SHARED_BY, mask=o_k < K, other=0.0)
        return by_rows(b_scale, BESIDE)
    else:
        return tl.load(p_scale + state * V + o_v, mask=o_v < V, other=0.0)


@triton.jit
def load_values(
    p_values,
    state,
    i_v,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    VECTOR: tl.constexpr,
    BESIDE: tl.constexpr = 1,
):
    """Codes or values that `store_rounded` wrote, as they lie in memory, zero outside."""
    o_k = keys_of_rows(BK, BESIDE)
    o_v = i_v + tl.arange(0, BV)
    m = (o_k < K)[:, None] & (o_v < V)[None, :]
    p = p_values + state * K * V + o_k[:, None] * V + tl.max_contiguous(o_v, VECTOR)[None, :]
    return tl.load(p, mask=m, other=0)


@triton.jit
def read_codes(b, FORMAT: tl.constexpr, HARDWARE_FP8: tl.constexpr):
    """What `load_values` loaded as `round_state` has codes; without codes the values in float32."""
    if FORMAT == "e4m3" and HARDWARE_FP8:
        return b.to(tl.float8e4nv, bitcast=True)
    elif FORMAT == "e4m3" or FORMAT == "int8":
        return decode(b, FORMAT, HARDWARE_FP8)
    else:
        return b.to(tl.float32)


@triton.jit
def load_codes(
    p_values,
    state,
    i_v,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    FORMAT: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
    VECTOR: tl.constexpr,
    BESIDE: tl.constexpr = 1,
):
    """Codes that `store_rounded` wrote, as `round_state` has them, zero outside; without codes the values, float32."""
    return read_codes(load_values(p_values, state, i_v, K, V, BK, BV, VECTOR, BESIDE), FORMAT, HARDWARE_FP8)


@triton.jit
def load_kept(
    p_values,
    p_scale,
    state,
    i_v,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    FORMAT: tl.constexpr,
    GRANULARITY: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
    VECTOR: tl.constexpr,
    GROUP: tl.constexpr = 0,
    BESIDE: tl.constexpr = 1,
):
    """(codes, scales) that `store_rounded` wrote; without codes the values and 1."""
    b_code = load_codes(p_values, state, i_v, K, V, BK, BV, FORMAT, HARDWARE_FP8, VECTOR, BESIDE)
    return b_code, load_scales(p_scale, state, i_v, K, V, BK, BV, FORMAT, GRANULARITY, GROUP, BESIDE)


@triton.jit
def apply_scale(b_code, b_scale, FORMAT: tl.constexpr, GRANULARITY: tl.constexpr):
    """The state that codes and scales stand for."""
    if FORMAT == "float32" or FORMAT == "bfloat16" or FORMAT == "float16":
        return b_code
    else:
        return b_code.to(tl.float32) * _along(b_scale, GRANULARITY)


@triton.jit
def decay_kept(b_code, b_scale, b_decay, IS_KDA: tl.constexpr, FORMAT: tl.constexpr, GRANULARITY: tl.constexpr):
    """The state that codes and scales stand for, times its decay: [BK] for KDA, one number otherwise.

    Scales and decay are multiplied first where that saves a product an element.
    """
    if IS_KDA and (GRANULARITY == "tile" or GRANULARITY == "key_row"):
        return apply_scale(b_code, b_scale * b_decay, FORMAT, "key_row")
    elif IS_KDA:
        return apply_scale(b_code, b_scale, FORMAT, GRANULARITY) * b_decay[:, None]
    elif GRANULARITY != "none":
        return apply_scale(b_code, b_scale * b_decay, FORMAT, GRANULARITY)
    else:
        return b_code * b_decay


@triton.jit
def load_rounded(
    p_values,
    p_scale,
    state,
    i_v,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    FORMAT: tl.constexpr,
    GRANULARITY: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
    VECTOR: tl.constexpr,
    GROUP: tl.constexpr = 0,
    BESIDE: tl.constexpr = 1,
):
    """The state that `store_rounded` wrote, float32, zero outside."""
    b_code, b_scale = load_kept(
        p_values, p_scale, state, i_v, K, V, BK, BV, FORMAT, GRANULARITY, HARDWARE_FP8, VECTOR, GROUP, BESIDE
    )
    return apply_scale(b_code, b_scale, FORMAT, GRANULARITY)
