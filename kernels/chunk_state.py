"""The two scans over chunks: the state forward, rounded at every boundary, and its gradient backward.

One program holds the columns i_v..i_v+BV of one state [K, V] of one sequence and value head and walks the chunks. The
forward scan produces the output on its way (WRITE_O), or leaves the states and v' for `chunk_output` (SAVE_H, SAVE_V).
Where the state is rounded, the register tile is kept as codes and scales (see rounding.py), and BV is a whole number of
the recipe's tiles, so no amax crosses programs.
"""

import triton
import triton.language as tl

from jlaqat.kernels.chunks import (
    load_gate_sums,
    load_rows,
    locate_sequence,
    state_mask,
    state_offsets,
    store_rows,
)
from jlaqat.kernels.rounding import encode, quantize_state


@triton.jit
def round_state(b_s, STATE_FORMAT: tl.constexpr, TILE_V: tl.constexpr, HARDWARE_FP8: tl.constexpr):
    """(rounded state float32, codes float32, scales [BV]); the state itself and ones where nothing rounds."""
    if STATE_FORMAT == "none":
        return b_s, b_s, tl.full([b_s.shape[1]], 1.0, tl.float32)
    else:
        b_code, b_scale = quantize_state(b_s, TILE_V, STATE_FORMAT, HARDWARE_FP8)
        return b_code * b_scale[None, :], b_code, b_scale


@triton.jit
def save_state(
    p_h,
    p_h_scale,
    b_code,
    b_scale,
    state,
    i_v,
    K: tl.constexpr,
    V: tl.constexpr,
    STATE_FORMAT: tl.constexpr,
    TILE_V: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
):
    BK: tl.constexpr = b_code.shape[0]
    BV: tl.constexpr = b_code.shape[1]
    p = p_h + state * K * V + state_offsets(0, i_v, V, BK, BV)
    m = state_mask(0, i_v, K, V, BK, BV)
    if STATE_FORMAT == "none":
        tl.store(p, b_code.to(p_h.dtype.element_ty), mask=m)
    else:
        tl.store(p, encode(b_code, STATE_FORMAT, HARDWARE_FP8), mask=m)
        o_v = i_v + tl.arange(0, BV)
        NV: tl.constexpr = (V + TILE_V - 1) // TILE_V
        tl.store(p_h_scale + state * NV + o_v // TILE_V, b_scale, mask=(o_v % TILE_V == 0) & (o_v < V))


@triton.jit
def chunk_state_forward_kernel(
    p_q,  # GDN: [B*T, HK, K], q; KDA: scale e^G q a value head
    p_k,  # GDN: [B*T, HK, K], k; KDA: e^(G_L - G) k a value head
    p_w,  # [B*T, HV, K]
    p_u,  # [B*T, HV, V]
    p_p,  # [B*T, HV, 64]
    p_g,  # GDN: [B*T, HV] float32, G; KDA: [SLOTS, HV, K] float32, e^(G_L)
    p_initial,  # [N, HV, K, V] float32
    p_sequences,  # [N + 1, 3]
    p_o,  # out: [B*T, HV, V]
    p_final,  # out: [N, HV, K, V] float32
    p_h,  # out: [SLOTS, HV, K, V], the states that enter the chunks: codes (uint8) or values
    p_h_scale,  # out: [SLOTS, HV, ceil(V / TILE_V)] float32
    p_v_new,  # out: [B*T, HV, V], v'
    scale,
    T,
    NT,
    N,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    IS_KDA: tl.constexpr,
    IS_PACKED: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    WRITE_O: tl.constexpr,
    SAVE_H: tl.constexpr,
    SAVE_V: tl.constexpr,
    STATE_FORMAT: tl.constexpr,
    TILE_V: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
    PRECISION: tl.constexpr,
):
    pid = tl.program_id(0)
    PROGRAMS_V: tl.constexpr = (V + BV - 1) // BV
    i_v = (pid % PROGRAMS_V) * BV
    i_hv = (pid // PROGRAMS_V) % HV
    i_n = pid // (PROGRAMS_V * HV)
    i_k = i_hv // (HV // HK)
    i_c, row, n_total = locate_sequence(p_sequences, i_n, T, NT, IS_PACKED)
    if i_n >= N:  # rows past cu_seqlens
        if WRITE_O:
            for start in range(0, n_total, BT):
                store_rows(p_o, tl.zeros([BT, BV], tl.float32), row + start, n_total - start, i_hv, i_v, HV, V)
        return

    m_s = state_mask(0, i_v, K, V, BK, BV)
    o_s = state_offsets(0, i_v, V, BK, BV)
    if HAS_INITIAL:
        b_s = tl.load(p_initial + (i_n.to(tl.int64) * HV + i_hv) * K * V + o_s, mask=m_s, other=0.0)
    else:
        b_s = tl.zeros([BK, BV], tl.float32)
    b_s, b_code, b_scale = round_state(b_s, STATE_FORMAT, TILE_V, HARDWARE_FP8)
    o_k = tl.arange(0, BK)

    for start in range(0, n_total, BT):
        n_rows = tl.minimum(n_total - start, BT)
        if SAVE_H:
            state = i_c.to(tl.int64) * HV + i_hv
            save_state(p_h, p_h_scale, b_code, b_scale, state, i_v, K, V, STATE_FORMAT, TILE_V, HARDWARE_FP8)
        b_w = load_rows(p_w, row, n_rows, i_hv, 0, HV, K, BT, BK)
        b_u = load_rows(p_u, row, n_rows, i_hv, i_v, HV, V, BT, BV)
        b_h = b_code.to(b_w.dtype)
        b_v = b_u.to(tl.float32) - tl.dot(b_w, b_h, input_precision=PRECISION) * b_scale[None, :]
        if not IS_KDA:
            b_g, g_last = load_gate_sums(p_g, row, n_rows, i_hv, HV, BT)
        if SAVE_V:
            store_rows(p_v_new, b_v, row, n_rows, i_hv, i_v, HV, V)
        if WRITE_O:
            b_q = load_rows(p_q, row, n_rows, i_k, 0, HK, K, BT, BK)
            b_p = load_rows(p_p, row, n_rows, i_hv, 0, HV, BT, BT, BT)
            b_o = tl.dot(b_q, b_h, input_precision=PRECISION) * b_scale[None, :]
            if not IS_KDA:
                b_o *= (tl.exp(b_g) * scale)[:, None]
            b_o += tl.dot(b_p, b_v.to(b_w.dtype), input_precision=PRECISION)
            store_rows(p_o, b_o, row, n_rows, i_hv, i_v, HV, V)
        b_k = load_rows(p_k, row, n_rows, i_k, 0, HK, K, BT, BK)
        if IS_KDA:
            b_decay = tl.load(p_g + (i_c.to(tl.int64) * HV + i_hv) * K + o_k, mask=o_k < K, other=0.0)
            b_s *= b_decay[:, None]
        else:
            b_v *= tl.exp(g_last - b_g)[:, None]
            b_s *= tl.exp(g_last)
        b_s += tl.dot(tl.trans(b_k), b_v.to(b_w.dtype), input_precision=PRECISION)
        b_s, b_code, b_scale = round_state(b_s, STATE_FORMAT, TILE_V, HARDWARE_FP8)
        row += BT
        i_c += 1

    tl.store(p_final + (i_n.to(tl.int64) * HV + i_hv) * K * V + o_s, b_s, mask=m_s)


@triton.jit
def chunk_state_backward_kernel(
    p_q,  # as in the forward
    p_k,
    p_w,
    p_p,
    p_g,
    p_do,  # [B*T, HV, V]
    p_dfinal,  # [N, HV, K, V] float32
    p_sequences,
    p_dh,  # out: [SLOTS, HV, K, V], gradient of the state that leaves each chunk
    p_dv_new,  # out: [B*T, HV, V], gradient of v'
    p_dinitial,  # out: [N, HV, K, V] float32
    scale,
    T,
    NT,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    IS_KDA: tl.constexpr,
    IS_PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    pid = tl.program_id(0)
    PROGRAMS_V: tl.constexpr = (V + BV - 1) // BV
    i_v = (pid % PROGRAMS_V) * BV
    i_hv = (pid // PROGRAMS_V) % HV
    i_n = pid // (PROGRAMS_V * HV)
    i_k = i_hv // (HV // HK)
    i_c, row, n_total = locate_sequence(p_sequences, i_n, T, NT, IS_PACKED)
    m_s = state_mask(0, i_v, K, V, BK, BV)
    o_s = state_offsets(0, i_v, V, BK, BV)
    o_k = tl.arange(0, BK)
    b_ds = tl.load(p_dfinal + (i_n.to(tl.int64) * HV + i_hv) * K * V + o_s, mask=m_s, other=0.0)

    n_chunks = (n_total + BT - 1) // BT
    for done in range(n_chunks):
        i = n_chunks - 1 - done
        i_row = row + i * BT
        n_rows = tl.minimum(n_total - i * BT, BT)
        state = (i_c + i).to(tl.int64) * HV + i_hv
        tl.store(p_dh + state * K * V + o_s, b_ds.to(p_dh.dtype.element_ty), mask=m_s)
        b_do = load_rows(p_do, i_row, n_rows, i_hv, i_v, HV, V, BT, BV)
        b_k = load_rows(p_k, i_row, n_rows, i_k, 0, HK, K, BT, BK)
        b_p = load_rows(p_p, i_row, n_rows, i_hv, 0, HV, BT, BT, BT)
        b_dv = tl.dot(b_k, b_ds.to(b_k.dtype), input_precision=PRECISION)
        b_do_q = b_do
        if IS_KDA:
            b_decay = tl.load(p_g + state * K + o_k, mask=o_k < K, other=0.0)
            b_ds *= b_decay[:, None]
        else:
            b_g, g_last = load_gate_sums(p_g, i_row, n_rows, i_hv, HV, BT)
            b_dv *= tl.exp(g_last - b_g)[:, None]
            b_ds *= tl.exp(g_last)
            b_do_q = (b_do * (tl.exp(b_g) * scale)[:, None]).to(b_do.dtype)
        b_dv += tl.dot(tl.trans(b_p), b_do, input_precision=PRECISION)
        store_rows(p_dv_new, b_dv, i_row, n_rows, i_hv, i_v, HV, V)
        b_q = load_rows(p_q, i_row, n_rows, i_k, 0, HK, K, BT, BK)
        b_w = load_rows(p_w, i_row, n_rows, i_hv, 0, HV, K, BT, BK)
        b_ds += tl.dot(tl.trans(b_q), b_do_q, input_precision=PRECISION)
        b_ds -= tl.dot(tl.trans(b_w), b_dv.to(b_w.dtype), input_precision=PRECISION)

    tl.store(p_dinitial + (i_n.to(tl.int64) * HV + i_hv) * K * V + o_s, b_ds, mask=m_s)
