"""The output where the scan left it to a second, parallel kernel, and the gradients that need a chunk's state.

One program holds one chunk of one value head.
"""

import triton
import triton.language as tl

from jlaqat.kernels.chunks import (
    load_gate_sums,
    load_rows,
    load_scalars,
    locate_chunk,
    state_mask,
    state_offsets,
    store_rows,
    store_scalars,
)
from jlaqat.kernels.gates import decay_matrix, last_row, level_factor, level_mask
from jlaqat.kernels.rounding import decode


@triton.jit
def load_codes(
    p_h,
    state,
    i_k,
    i_v,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    STATE_FORMAT: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
):
    """Codes (or plain values) [BK, BV] of a saved state; float32 where they are decoded."""
    p = p_h + state * K * V + state_offsets(i_k, i_v, V, BK, BV)
    b = tl.load(p, mask=state_mask(i_k, i_v, K, V, BK, BV), other=0)
    if STATE_FORMAT == "none":
        return b
    else:
        return decode(b, STATE_FORMAT, HARDWARE_FP8)


@triton.jit
def load_scales(
    p_h_scale, state, i_v, V: tl.constexpr, BV: tl.constexpr, STATE_FORMAT: tl.constexpr, TILE_V: tl.constexpr
):
    """Scales [BV] of a saved state's columns."""
    if STATE_FORMAT == "none":
        return tl.full([BV], 1.0, tl.float32)
    else:
        NV: tl.constexpr = (V + TILE_V - 1) // TILE_V
        o_tile = (i_v + tl.arange(0, BV)) // TILE_V
        return tl.load(p_h_scale + state * NV + o_tile, mask=o_tile < NV, other=1.0)


@triton.jit
def chunk_output_forward_kernel(
    p_q,  # GDN: [B*T, HK, K], q; KDA: scale e^G q a value head
    p_p,  # [B*T, HV, 64]
    p_g,  # GDN: [B*T, HV] float32, G
    p_h,  # [SLOTS, HV, K, V] codes or values
    p_h_scale,  # [SLOTS, HV, ceil(V / TILE_V)] float32
    p_v_new,  # [B*T, HV, V]
    p_chunks,
    p_o,  # out: [B*T, HV, V]
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
    STATE_FORMAT: tl.constexpr,
    TILE_V: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
    PRECISION: tl.constexpr,
):
    pid = tl.program_id(0)
    PROGRAMS_V: tl.constexpr = (V + BV - 1) // BV
    i_v = (pid % PROGRAMS_V) * BV
    i_hv = (pid // PROGRAMS_V) % HV
    i_c = pid // (PROGRAMS_V * HV)
    i_k = i_hv // (HV // HK)
    row, n_rows, n_stored = locate_chunk(p_chunks, i_c, T, NT, BT, IS_PACKED)
    if n_stored <= 0:
        return
    if n_rows <= 0:
        store_rows(p_o, tl.zeros([BT, BV], tl.float32), row, n_stored, i_hv, i_v, HV, V)
        return
    b_q = load_rows(p_q, row, n_rows, i_k, 0, HK, K, BT, BK)
    state = i_c.to(tl.int64) * HV + i_hv
    b_h = load_codes(p_h, state, 0, i_v, K, V, BK, BV, STATE_FORMAT, HARDWARE_FP8).to(b_q.dtype)
    b_scale = load_scales(p_h_scale, state, i_v, V, BV, STATE_FORMAT, TILE_V)
    b_o = tl.dot(b_q, b_h, input_precision=PRECISION) * b_scale[None, :]
    if not IS_KDA:
        b_o *= (tl.exp(load_scalars(p_g, row, n_rows, i_hv, HV, BT)) * scale)[:, None]
    b_p = load_rows(p_p, row, n_rows, i_hv, 0, HV, BT, BT, BT)
    b_v = load_rows(p_v_new, row, n_rows, i_hv, i_v, HV, V, BT, BV)
    b_o += tl.dot(b_p, b_v, input_precision=PRECISION)
    store_rows(p_o, b_o, row, n_stored, i_hv, i_v, HV, V)


@triton.jit
def score_gradients_kda(
    b_dq, b_dk, b_dp, b_q, b_k, b_gsum, p_anchor, STRIDE: tl.constexpr, n_rows, n_k, PRECISION: tl.constexpr
):
    """dq and dk with d_i = sum_j dP_ij k_j E_ij and c_j = sum_i dP_ij q_i E_ij added, diagonal included."""
    BT: tl.constexpr = b_k.shape[0]
    o_t = tl.arange(0, BT)
    b_self = tl.sum(tl.where(o_t[:, None] == o_t[None, :], b_dp, 0.0), axis=1)
    b_dq += b_self[:, None] * b_k
    b_dk += b_self[:, None] * b_q
    for level in range(6):  # not unrolled: six copies spill and take a minute to compile
        b_f = level_factor(b_gsum, p_anchor, STRIDE, level, n_rows, n_k)
        b_m = tl.where(level_mask(level, BT), b_dp, 0.0).to(b_k.dtype)
        b_dq += b_f * tl.dot(b_m, (b_k * b_f).to(b_k.dtype), input_precision=PRECISION)
        b_dk += b_f * tl.dot(tl.trans(b_m), (b_q * b_f).to(b_k.dtype), input_precision=PRECISION)
    return b_dq, b_dk


@triton.jit
def chunk_output_backward_kernel(
    p_q,  # [B*T, H, K]
    p_k,  # [B*T, H, K]
    p_gsum,  # like g, float32, G
    p_h,  # [SLOTS, HV, K, V] codes or values
    p_h_scale,  # [SLOTS, HV, ceil(V / TILE_V)] float32
    p_dh,  # [SLOTS, HV, K, V]
    p_v_new,  # [B*T, HV, V]
    p_dv_new,  # [B*T, HV, V]
    p_do,  # [B*T, HV, V]
    p_chunks,
    p_dq,  # out: [B*T, HV, K], one a value head
    p_dk,  # out: [B*T, HV, K]
    p_dw,  # out: [B*T, HV, K]
    p_dgsum,  # out: like g, float32, dG so far
    scale,
    T,
    NT,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    IS_KDA: tl.constexpr,
    IS_PACKED: tl.constexpr,
    STATE_FORMAT: tl.constexpr,
    TILE_V: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
    PRECISION: tl.constexpr,
):
    pid = tl.program_id(0)
    i_c, i_hv = pid // HV, pid % HV
    i_h = i_hv // (HV // H)
    row, n_rows, n_stored = locate_chunk(p_chunks, i_c, T, NT, BT, IS_PACKED)
    if n_stored <= 0:
        return
    if n_rows <= 0:
        for i_k in range(0, K, BK):
            store_rows(p_dq, tl.zeros([BT, BK], tl.float32), row, n_stored, i_hv, i_k, HV, K)
        return
    o_t = tl.arange(0, BT)
    state = i_c.to(tl.int64) * HV + i_hv
    b_dp = tl.zeros([BT, BT], tl.float32)
    for i_v in range(0, V, BV):
        b_do = load_rows(p_do, row, n_rows, i_hv, i_v, HV, V, BT, BV)
        b_v = load_rows(p_v_new, row, n_rows, i_hv, i_v, HV, V, BT, BV)
        b_dp += tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
    b_dp = tl.where(o_t[:, None] >= o_t[None, :], b_dp * scale, 0.0)
    if not IS_KDA:
        b_gsum1, g_last = load_gate_sums(p_gsum, row, n_rows, i_hv, HV, BT)
        b_dp *= decay_matrix(b_gsum1)
        b_dg1 = tl.zeros([BT], tl.float32)
        b_dg_last = tl.zeros([BT], tl.float32)  # its sum belongs to the last row
    for i_k in range(0, K, BK):
        b_dq = tl.zeros([BT, BK], tl.float32)
        b_dk = tl.zeros([BT, BK], tl.float32)
        b_dw = tl.zeros([BT, BK], tl.float32)
        b_last = tl.zeros([BK], tl.float32)
        for i_v in range(0, V, BV):
            b_do = load_rows(p_do, row, n_rows, i_hv, i_v, HV, V, BT, BV)
            b_v = load_rows(p_v_new, row, n_rows, i_hv, i_v, HV, V, BT, BV)
            b_dv = load_rows(p_dv_new, row, n_rows, i_hv, i_v, HV, V, BT, BV)
            b_h = load_codes(p_h, state, i_k, i_v, K, V, BK, BV, STATE_FORMAT, HARDWARE_FP8)
            b_h = b_h * load_scales(p_h_scale, state, i_v, V, BV, STATE_FORMAT, TILE_V)[None, :]
            m_s = state_mask(i_k, i_v, K, V, BK, BV)
            b_dh = tl.load(p_dh + state * K * V + state_offsets(i_k, i_v, V, BK, BV), mask=m_s, other=0.0)
            b_last += tl.sum(b_h * b_dh, axis=1)
            b_h = b_h.to(b_do.dtype)
            b_dq += tl.dot(b_do, tl.trans(b_h), input_precision=PRECISION)
            b_dk += tl.dot(b_v, tl.trans(b_dh), input_precision=PRECISION)
            b_dw -= tl.dot(b_dv, tl.trans(b_h), input_precision=PRECISION)
        store_rows(p_dw, b_dw, row, n_rows, i_hv, i_k, HV, K)
        b_q = load_rows(p_q, row, n_rows, i_h, i_k, H, K, BT, BK)
        b_k = load_rows(p_k, row, n_rows, i_h, i_k, H, K, BT, BK)
        if IS_KDA:
            b_gsum = load_rows(p_gsum, row, n_rows, i_hv, i_k, HV, K, BT, BK)
            b_gl = last_row(b_gsum, n_rows)
            b_dq *= tl.exp(b_gsum) * scale
            b_dk *= tl.exp(b_gl[None, :] - b_gsum)
            b_last = tl.exp(b_gl) * b_last + tl.sum(b_k * b_dk, axis=0)
            p_anchor = p_gsum + (row * HV + i_hv) * K + i_k
            b_dq, b_dk = score_gradients_kda(
                b_dq, b_dk, b_dp, b_q, b_k, b_gsum, p_anchor, HV * K, n_rows, K - i_k, PRECISION
            )
            b_dg = b_q * b_dq - b_k * b_dk
            b_dg += tl.where(o_t[:, None] == n_rows - 1, b_last[None, :], 0.0)
            store_rows(p_dgsum, b_dg, row, n_rows, i_hv, i_k, HV, K)
        else:
            b_dq *= (tl.exp(b_gsum1) * scale)[:, None]
            b_dk *= tl.exp(g_last - b_gsum1)[:, None]
            # Sums to one number go through two axes: Triton 3.7 cannot lower a sum along a single one for SM100.
            b_state = tl.exp(g_last) * tl.sum(b_last[None, :], axis=1)
            b_dg_last += tl.sum(b_k * b_dk, axis=1) + tl.where(o_t == 0, b_state, 0.0)
            b_dpc = b_dp.to(b_k.dtype)
            b_dq += tl.dot(b_dpc, b_k, input_precision=PRECISION)
            b_dk += tl.dot(tl.trans(b_dpc), b_q, input_precision=PRECISION)
            b_dg1 += tl.sum(b_q * b_dq - b_k * b_dk, axis=1)
        store_rows(p_dq, b_dq, row, n_stored, i_hv, i_k, HV, K)
        store_rows(p_dk, b_dk, row, n_rows, i_hv, i_k, HV, K)
    if not IS_KDA:
        b_dg1 += tl.where(o_t == n_rows - 1, tl.sum(b_dg_last[None, :], axis=1), 0.0)
        store_scalars(p_dgsum, b_dg1, row, n_rows, i_hv, HV)


@triton.jit
def group_sum_kernel(
    p_x,  # [ROWS, HV, K], one a value head
    p_y,  # out: [ROWS, H, K]
    ROWS,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    BK: tl.constexpr,
):
    """Sums over the value heads that share a q/k head, in float32."""
    pid = tl.program_id(0)
    i_h = pid % H
    row = (pid // H).to(tl.int64) * BLOCK
    n_rows = tl.minimum(ROWS - row, BLOCK).to(tl.int32)
    b = tl.zeros([BLOCK, BK], tl.float32)
    for i_g in range(HV // H):
        b += load_rows(p_x, row, n_rows, i_h * (HV // H) + i_g, 0, HV, K, BLOCK, BK)
    store_rows(p_y, b, row, n_rows, i_h, 0, H, K)
