"""The recurrence of a decoder, token by token, with the state rounded after every token: forward and backward.

One program holds the columns i_v..i_v+BV of one state [K, V] of one sequence and value head in registers and walks the
tokens. Between calls, and at the checkpoints that the backward starts from, a state is what serving stores: codes and
scales, 16-bit floats, or float32. A decode step is the same kernel over one token, so it gets the bits that training
saw: nothing in the arithmetic depends on how many tokens a call has, products are rounded before they are added
(launches switch contraction off and write `tl.fma` where one is meant), and sums go over the same layout.

Formulas: docs/decode.md (mode "token").
"""

import triton
import triton.language as tl

from jlaqat.kernels.rounding import compute_scale, decode, encode, magnitude_bits, round_code


@triton.jit
def round_state(b_s, FORMAT: tl.constexpr, GRANULARITY: tl.constexpr, HARDWARE_FP8: tl.constexpr):
    """(codes, scales, the state they stand for) of [BK, BV]; without codes the rounded values, 1 and again the values.

    Scales: one for "tile", [BK] for "key_row" (BV is its 32 columns then), [BV] for "value_row".
    """
    if FORMAT == "float32":
        return b_s, tl.full([], 1.0, tl.float32), b_s
    elif FORMAT == "bfloat16":
        b_value = b_s.to(tl.bfloat16).to(tl.float32)  # nearest even on every architecture
        return b_value, tl.full([], 1.0, tl.float32), b_value
    elif FORMAT == "float16":
        b_value = b_s.to(tl.float16).to(tl.float32)
        return b_value, tl.full([], 1.0, tl.float32), b_value
    else:
        LARGEST: tl.constexpr = 448.0 if FORMAT == "e4m3" else 127.0
        bits = magnitude_bits(b_s)
        if GRANULARITY == "tile":
            s, r = compute_scale(tl.max(tl.max(bits, axis=1), axis=0).to(tl.float32, bitcast=True), LARGEST)
            b_code = round_code(b_s * r, FORMAT, HARDWARE_FP8)
            return b_code, s, b_code * s
        elif GRANULARITY == "key_row":
            s, r = compute_scale(tl.max(bits, axis=1).to(tl.float32, bitcast=True), LARGEST)
            b_code = round_code(b_s * r[:, None], FORMAT, HARDWARE_FP8)
            return b_code, s, b_code * s[:, None]
        else:
            tl.static_assert(GRANULARITY == "value_row")
            s, r = compute_scale(tl.max(bits, axis=0).to(tl.float32, bitcast=True), LARGEST)
            b_code = round_code(b_s * r[None, :], FORMAT, HARDWARE_FP8)
            return b_code, s, b_code * s[None, :]


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
):
    """Codes and scales, or values, as they are kept."""
    BK: tl.constexpr = b_code.shape[0]
    BV: tl.constexpr = b_code.shape[1]
    PROGRAMS_V: tl.constexpr = (V + BV - 1) // BV
    o_k = tl.arange(0, BK)
    o_v = i_v + tl.arange(0, BV)
    m = (o_k < K)[:, None] & (o_v < V)[None, :]
    p = p_values + state * K * V + o_k[:, None] * V + o_v[None, :]
    if FORMAT == "e4m3" or FORMAT == "int8":
        tl.store(p, encode(b_code, FORMAT, HARDWARE_FP8), mask=m)
        if GRANULARITY == "tile":
            tl.store(p_scale + state * PROGRAMS_V + i_v // BV, b_scale)
        elif GRANULARITY == "key_row":
            tl.store(p_scale + (state * K + o_k) * PROGRAMS_V + i_v // BV, b_scale, mask=o_k < K)
        else:
            tl.store(p_scale + state * V + o_v, b_scale, mask=o_v < V)
    else:
        tl.store(p, b_code.to(p_values.dtype.element_ty), mask=m)


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
):
    """The state that `store_rounded` wrote, float32, zero outside."""
    PROGRAMS_V: tl.constexpr = (V + BV - 1) // BV
    o_k = tl.arange(0, BK)
    o_v = i_v + tl.arange(0, BV)
    m = (o_k < K)[:, None] & (o_v < V)[None, :]
    b = tl.load(p_values + state * K * V + o_k[:, None] * V + o_v[None, :], mask=m, other=0)
    if FORMAT == "float32" or FORMAT == "bfloat16" or FORMAT == "float16":
        return b.to(tl.float32)
    else:
        b_code = decode(b, FORMAT, HARDWARE_FP8)
        if GRANULARITY == "tile":
            return b_code * tl.load(p_scale + state * PROGRAMS_V + i_v // BV)
        elif GRANULARITY == "key_row":
            s = tl.load(p_scale + (state * K + o_k) * PROGRAMS_V + i_v // BV, mask=o_k < K, other=0.0)
            return b_code * s[:, None]
        else:
            s = tl.load(p_scale + state * V + o_v, mask=o_v < V, other=0.0)
            return b_code * s[None, :]


@triton.jit
def load_token(
    p_q,
    p_k,
    p_v,
    p_g,
    p_beta,
    row,  # int64, the token's row in [rows, heads, ...]
    i_h,
    i_hv,
    o_k,
    o_v,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    IS_KDA: tl.constexpr,
):
    """(q, k, v, g, beta) of a token as they lie in memory. Loaded one token ahead: memory takes longer than a token."""
    b_q = tl.load(p_q + (row * H + i_h) * K + o_k, mask=o_k < K, other=0.0)
    b_k = tl.load(p_k + (row * H + i_h) * K + o_k, mask=o_k < K, other=0.0)
    b_v = tl.load(p_v + (row * HV + i_hv) * V + o_v, mask=o_v < V, other=0.0)
    beta = tl.load(p_beta + row * HV + i_hv)
    if IS_KDA:
        b_g = tl.load(p_g + (row * HV + i_hv) * K + o_k, mask=o_k < K, other=0.0)
    else:
        b_g = tl.load(p_g + row * HV + i_hv)
    return b_q, b_k, b_v, b_g, beta


@triton.jit
def recurrent_forward_kernel(
    p_q,  # [N, T, H, K]
    p_k,  # [N, T, H, K]
    p_v,  # [N, T, HV, V]
    p_g,  # [N, T, HV] or [N, T, HV, K] float32
    p_beta,  # [N, T, HV]
    p_values,  # [N, IN_SLOTS, HV, K, V], the states that enter: codes (uint8), 16-bit floats or float32
    p_scale,  # their scales, see `store_rounded`; any array where there are none
    p_o,  # out: [N, T, HV, V]
    p_values_out,  # out: [N, HV, K, V], the states that leave
    p_scale_out,  # out
    p_saved,  # out: [N, SLOTS, HV, K, V], the states after every STRIDE tokens
    p_saved_scale,  # out
    scale,
    T,
    IN_SLOTS,
    IN_SLOT,
    SLOTS,
    STRIDE,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    IS_KDA: tl.constexpr,
    FORMAT: tl.constexpr,
    GRANULARITY: tl.constexpr,
    READ_STORED: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
):
    pid = tl.program_id(0)
    PROGRAMS_V: tl.constexpr = (V + BV - 1) // BV
    i_v = (pid % PROGRAMS_V) * BV
    i_hv = (pid // PROGRAMS_V) % HV
    i_n = (pid // (PROGRAMS_V * HV)).to(tl.int64)
    i_h = i_hv // (HV // H)
    o_k = tl.arange(0, BK)
    o_v = i_v + tl.arange(0, BV)
    entering = (i_n * IN_SLOTS + IN_SLOT) * HV + i_hv
    b_s = load_rounded(p_values, p_scale, entering, i_v, K, V, BK, BV, FORMAT, GRANULARITY, HARDWARE_FP8)
    row = i_n * T
    q, k, v, g, beta = load_token(p_q, p_k, p_v, p_g, p_beta, row, i_h, i_hv, o_k, o_v, H, HV, K, V, IS_KDA)
    for t in range(T):
        b_q = q.to(tl.float32) * scale
        b_k = k.to(tl.float32)
        b_v = v.to(tl.float32)
        b_beta = beta.to(tl.float32)
        b_decay = tl.exp(g.to(tl.float32))
        ahead = row + tl.minimum(T - 1 - t, 1)
        q, k, v, g, beta = load_token(p_q, p_k, p_v, p_g, p_beta, ahead, i_h, i_hv, o_k, o_v, H, HV, K, V, IS_KDA)
        if IS_KDA:
            b_s = b_s * b_decay[:, None]
        else:
            b_s = b_s * b_decay
        b_r = b_beta * (b_v - tl.sum(b_s * b_k[:, None], axis=0))
        b_s = tl.fma(b_k[:, None], tl.broadcast_to(b_r[None, :], [BK, BV]), b_s)
        if not READ_STORED:
            b_o = tl.sum(b_s * b_q[:, None], axis=0)
        b_code, b_scale, b_s = round_state(b_s, FORMAT, GRANULARITY, HARDWARE_FP8)
        if READ_STORED:
            b_o = tl.sum(b_s * b_q[:, None], axis=0)
        tl.store(p_o + (row * HV + i_hv) * V + o_v, b_o.to(p_o.dtype.element_ty), mask=o_v < V)
        if (t + 1) % STRIDE == 0:
            saved = (i_n * SLOTS + (t + 1) // STRIDE - 1) * HV + i_hv
            store_rounded(p_saved, p_saved_scale, saved, b_code, b_scale, i_v, K, V, FORMAT, GRANULARITY, HARDWARE_FP8)
        if t == T - 1:
            store_rounded(
                p_values_out,
                p_scale_out,
                i_n * HV + i_hv,
                b_code,
                b_scale,
                i_v,
                K,
                V,
                FORMAT,
                GRANULARITY,
                HARDWARE_FP8,
            )
        row += 1


@triton.jit
def recurrent_backward_kernel(
    p_q,  # as in the forward, for all of these
    p_k,
    p_v,
    p_g,
    p_beta,
    p_values,
    p_scale,
    p_saved,  # [N, T, HV, K, V], the states after every token, and their scales
    p_saved_scale,
    p_do,  # [N, T, HV, V]
    p_ds,  # [N, HV, K, V] float32, gradient of the states that leave
    p_dq,  # out: [N, T, HV * PROGRAMS_V, K] float32, a part a program, of a value head's q
    p_dk,  # out: the same
    p_dv,  # out: [N, T, HV, V] float32
    p_dg,  # out: [N, T, HV * PROGRAMS_V] or [N, T, HV * PROGRAMS_V, K] float32
    p_dbeta,  # out: [N, T, HV * PROGRAMS_V] float32
    p_ds_in,  # out: [N, HV, K, V] float32, gradient of the states that enter
    scale,
    T,
    IN_SLOTS,
    IN_SLOT,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    IS_KDA: tl.constexpr,
    FORMAT: tl.constexpr,
    GRANULARITY: tl.constexpr,
    READ_STORED: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
):
    """Straight through every rounding; R, r and the written state are formed again from the saved ones."""
    pid = tl.program_id(0)
    PROGRAMS_V: tl.constexpr = (V + BV - 1) // BV
    part = pid % (PROGRAMS_V * HV)
    i_v = (pid % PROGRAMS_V) * BV
    i_hv = (pid // PROGRAMS_V) % HV
    i_n = (pid // (PROGRAMS_V * HV)).to(tl.int64)
    i_h = i_hv // (HV // H)
    o_k = tl.arange(0, BK)
    o_v = i_v + tl.arange(0, BV)
    m_s = (o_k < K)[:, None] & (o_v < V)[None, :]
    o_s = (i_n * HV + i_hv) * K * V + o_k[:, None] * V + o_v[None, :]
    b_ds = tl.load(p_ds + o_s, mask=m_s, other=0.0)
    if READ_STORED:
        last = (i_n * T + T - 1) * HV + i_hv
        b_read = load_rounded(p_saved, p_saved_scale, last, i_v, K, V, BK, BV, FORMAT, GRANULARITY, HARDWARE_FP8)
    row = i_n * T + T - 1
    q, k, v, g, beta = load_token(p_q, p_k, p_v, p_g, p_beta, row, i_h, i_hv, o_k, o_v, H, HV, K, V, IS_KDA)
    do = tl.load(p_do + (row * HV + i_hv) * V + o_v, mask=o_v < V, other=0.0)
    for back in range(T):
        if back < T - 1:
            before = (row - 1) * HV + i_hv
            b_s = load_rounded(p_saved, p_saved_scale, before, i_v, K, V, BK, BV, FORMAT, GRANULARITY, HARDWARE_FP8)
        else:
            entering = (i_n * IN_SLOTS + IN_SLOT) * HV + i_hv
            b_s = load_rounded(p_values, p_scale, entering, i_v, K, V, BK, BV, FORMAT, GRANULARITY, HARDWARE_FP8)
        b_q = q.to(tl.float32) * scale
        b_k = k.to(tl.float32)
        b_v = v.to(tl.float32)
        b_do = do.to(tl.float32)
        b_beta = beta.to(tl.float32)
        b_decay = tl.exp(g.to(tl.float32))
        if IS_KDA:
            b_decay = b_decay[:, None]
        ahead = row - tl.minimum(T - 1 - back, 1)
        q, k, v, g, beta = load_token(p_q, p_k, p_v, p_g, p_beta, ahead, i_h, i_hv, o_k, o_v, H, HV, K, V, IS_KDA)
        do = tl.load(p_do + (ahead * HV + i_hv) * V + o_v, mask=o_v < V, other=0.0)
        b_r = b_s * b_decay  # the decayed state; the update is beta * error
        b_error = b_v - tl.sum(b_r * b_k[:, None], axis=0)
        b_update = b_beta * b_error
        if not READ_STORED:
            b_read = b_r + b_k[:, None] * b_update[None, :]
        parts = (row * (HV * PROGRAMS_V) + part) * K + o_k
        tl.store(p_dq + parts, tl.sum(b_read * b_do[None, :], axis=1) * scale, mask=o_k < K)
        if READ_STORED:
            b_read = b_s
        b_dw = b_ds + b_q[:, None] * b_do[None, :]
        b_dupdate = tl.sum(b_dw * b_k[:, None], axis=0)
        b_dv = b_beta * b_dupdate
        tl.store(p_dv + (row * HV + i_hv) * V + o_v, b_dv, mask=o_v < V)
        tl.store(p_dbeta + row * (HV * PROGRAMS_V) + part, tl.sum(b_dupdate * b_error, axis=0))
        b_dk = tl.sum(b_dw * b_update[None, :] - b_r * b_dv[None, :], axis=1)
        tl.store(p_dk + parts, b_dk, mask=o_k < K)
        b_dr = b_dw - b_k[:, None] * b_dv[None, :]
        b_dg = tl.sum(b_r * b_dr, axis=1)
        if IS_KDA:
            tl.store(p_dg + parts, b_dg, mask=o_k < K)
        else:
            tl.store(p_dg + row * (HV * PROGRAMS_V) + part, tl.sum(b_dg, axis=0))
        b_ds = b_dr * b_decay
        row -= 1
    tl.store(p_ds_in + o_s, b_ds, mask=m_s)
