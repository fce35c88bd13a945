"""Gradients of decoding by replay, token by token from the last. Formulas: `replay_token`; arguments: `replay_ring`."""

import triton
import triton.language as tl

from jlaqat.kernels.kept_state import load_rounded
from jlaqat.kernels.replay_ring import load_either, load_factor_scale, load_gates, read_factor
from jlaqat.kernels.token_gradients import store_token_gradients
from jlaqat.kernels.token_operands import load_token, locate_program, rows_of


@triton.jit
def replay_backward_kernel(
    p_q,  # as in `replay_forward_kernel`, for all of these
    p_k,
    p_k_scale,
    p_v,
    p_g,
    p_beta,
    p_values,
    p_scale,
    p_ring_k,
    p_ring_r,
    p_ring_g,
    p_ring_k_scale,
    p_ring_r_scale,
    p_cursor,
    p_first,
    p_count,
    p_r,  # [B, T, HV, V], what the forward left
    p_r_scale,
    p_saved,  # [N, SLOTS, HV, K, V], likewise
    p_saved_scale,
    p_do,  # [B, T, HV, V]
    p_ds,  # [N, HV, K, V] float32, gradient of the states that leave, checkpoint and ring together
    p_dq,  # out: [B, T, HV * PROGRAMS_V, K] float32, a part a program, of a value head's q
    p_dk,  # out: the same
    p_dv,  # out: [B, T, HV, V] float32
    p_dg,  # out: [B, T, HV * PROGRAMS_V] or [B, T, HV * PROGRAMS_V, K] float32
    p_dbeta,  # out: [B, T, HV * PROGRAMS_V] float32
    p_ds_in,  # out: [N, HV, K, V] float32, gradient of the states that enter
    scale,
    T,
    PER_ROW,
    SLOTS,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    LENGTH: tl.constexpr,
    IS_KDA: tl.constexpr,
    RAGGED: tl.constexpr,
    FORMAT: tl.constexpr,
    GRANULARITY: tl.constexpr,
    READ_STORED: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Straight through every rounding; the state before a token is built from the checkpoint of its window."""
    PROGRAMS_V: tl.constexpr = (V + BV - 1) // BV
    part = tl.program_id(0) % (PROGRAMS_V * HV)
    i_v, i_hv, i_n, i_h = locate_program(H, HV, V, BV)
    o_k = tl.arange(0, BK)
    o_v = i_v + tl.arange(0, BV)
    i_b, first, count = rows_of(p_first, p_count, i_n, T, PER_ROW, RAGGED)
    at = (i_n, i_b * T + first)
    ring = (p_ring_k, p_ring_r, p_ring_g, p_ring_k_scale, p_ring_r_scale)
    call = (p_k, p_r, p_g, p_k_scale, p_r_scale)
    dims: tl.constexpr = (H, HV, K, V, BK, BV, LENGTH, 0, HARDWARE_FP8)
    m_s = (o_k < K)[:, None] & (o_v < V)[None, :]
    o_s = (i_n * HV + i_hv) * K * V + o_k[:, None] * V + o_v[None, :]
    b_ds = tl.load(p_ds + o_s, mask=m_s, other=0.0)
    entered = tl.load(p_cursor + i_n)
    for back in range(count):
        t = count - 1 - back
        window = (entered + t) // LENGTH
        cursor = (entered + t) % LENGTH
        row = i_b * T + first + t
        q, k, v, g, beta = load_token(p_q, p_k, p_v, p_g, p_beta, row, i_h, i_hv, o_k, o_v, H, HV, K, V, IS_KDA)
        o_row = (row * HV + i_hv) * V + o_v
        r_scale = load_factor_scale(p_r, p_r_scale, (row * HV + i_hv) * PROGRAMS_V + i_v // BV)
        b_update = read_factor(tl.load(p_r + o_row, mask=o_v < V, other=0), r_scale, HARDWARE_FP8)
        b_do = tl.load(p_do + o_row, mask=o_v < V, other=0.0).to(tl.float32)
        if window > 0:
            before = (i_n * SLOTS + window - 1) * HV + i_hv
            b_s = load_rounded(
                p_saved, p_saved_scale, before, i_v, K, V, BK, BV, FORMAT, GRANULARITY, HARDWARE_FP8, VECTOR
            )
        else:
            before = i_n * HV + i_hv
            b_s = load_rounded(p_values, p_scale, before, i_v, K, V, BK, BV, FORMAT, GRANULARITY, HARDWARE_FP8, VECTOR)
        b_s = decayed_state(b_s, g, ring, call, (cursor, t - cursor), at, i_v, i_h, i_hv, dims, IS_KDA)
        b_k = read_factor(k, load_factor_scale(p_k, p_k_scale, row * H + i_h), HARDWARE_FP8)
        b_decay = tl.exp(g)
        if IS_KDA:
            b_decay = b_decay[:, None]
        b_error = v.to(tl.float32) - tl.sum(b_s * b_k[:, None], axis=0)
        b_read = b_s + b_k[:, None] * b_update[None, :]
        if READ_STORED:  # noqa: SIM102 (which the compiler knows)
            if cursor == LENGTH - 1:
                after = (i_n * SLOTS + window) * HV + i_hv
                b_read = load_rounded(
                    p_saved, p_saved_scale, after, i_v, K, V, BK, BV, FORMAT, GRANULARITY, HARDWARE_FP8, VECTOR
                )
        b_ds = store_token_gradients(
            p_dq,
            p_dk,
            p_dv,
            p_dg,
            p_dbeta,
            b_ds,
            b_s,
            tl.sum(b_read * b_do[None, :], axis=1) * scale,
            b_error,
            b_update,
            q.to(tl.float32) * scale,
            b_k,
            b_decay,
            beta.to(tl.float32),
            b_do,
            row,
            part,
            i_hv,
            o_k,
            o_v,
            HV,
            K,
            V,
            PROGRAMS_V,
            IS_KDA,
        )
    tl.store(p_ds_in + o_s, b_ds, mask=m_s)


@triton.jit
def decayed_state(
    b_s,
    g,
    ring,
    call,
    window,
    at,
    i_v,
    i_h,
    i_hv,
    dims: tl.constexpr,
    IS_KDA: tl.constexpr,
):
    """R [BK, BV] of a token, from the checkpoint b_s and the entries, the newest first."""
    LENGTH: tl.constexpr = dims[6]
    cursor, start = window
    since = g  # log decay from the entries already read to the token
    b_entries = tl.zeros([b_s.shape[0], b_s.shape[1]], tl.float32)
    for back in range(cursor):
        b_k, b_r, b_g = load_entry(ring, call, cursor - 1 - back, window, at, i_v, i_h, i_hv, dims, IS_KDA)
        b_kd = b_k * tl.exp(since)
        b_entries = tl.fma(b_kd[:, None], tl.broadcast_to(b_r[None, :], b_s.shape), b_entries)
        since += b_g
    b_decay = tl.exp(since)
    if IS_KDA:
        b_decay = b_decay[:, None]
    if LENGTH > 1:
        return b_s * b_decay + b_entries
    else:
        return b_s * b_decay


@triton.jit
def load_entry(
    ring,
    call,
    i,
    window,
    at,
    i_v,
    i_h,
    i_hv,
    dims: tl.constexpr,
    IS_KDA: tl.constexpr,
):
    """(k [BK], r [BV], g: a number, for KDA [BK]) of entry i, which is in use."""
    cursor, start = window
    i_n, row = at
    H: tl.constexpr = dims[0]
    HV: tl.constexpr = dims[1]
    K: tl.constexpr = dims[2]
    V: tl.constexpr = dims[3]
    BV: tl.constexpr = dims[5]
    LENGTH: tl.constexpr = dims[6]
    FP8: tl.constexpr = dims[8]
    GROUPS: tl.constexpr = (V + BV - 1) // BV
    o_k = tl.arange(0, dims[4])
    o_v = i_v + tl.arange(0, BV)
    always = i >= 0
    in_ring = i_n * LENGTH + i
    in_call = row + start + i
    later = start + i >= 0
    m_k = o_k < K
    m_v = o_v < V
    later_k = m_k & later
    later_v = m_v & later
    o_ring, o_call = in_ring * H + i_h, in_call * H + i_h
    b_k = load_either(ring[0], o_ring * K + o_k, call[0], o_call * K + o_k, m_k, later_k, False)
    k_scale = 1.0
    if ring[0].dtype.element_ty == tl.uint8:
        k_scale = load_either(ring[3], o_ring, call[3], o_call, always, later, False)
    o_ring, o_call = in_ring * HV + i_hv, in_call * HV + i_hv
    b_r = load_either(ring[1], o_ring * V + o_v, call[1], o_call * V + o_v, m_v, later_v, False)
    r_scale = 1.0
    if ring[1].dtype.element_ty == tl.uint8:
        group = i_v // BV
        r_scale = load_either(ring[4], o_ring * GROUPS + group, call[4], o_call * GROUPS + group, always, later, False)
    b_g = load_gates(ring, call, i, always, window, at, i_hv, dims, IS_KDA, False)
    return read_factor(b_k, k_scale, FP8), read_factor(b_r, r_scale, FP8), b_g
