"""GDN: the gradients inside one chunk, in one kernel, from those that the reverse scan left.

One program holds one chunk of one value head. v' is formed again from X, k, v and the saved state. With y = X^T dv' the
contract's dA is -y (u - w S)^T below the diagonal, w before its rounding, and its z is -y S^T: neither dX nor dw is
formed, and v', y and the gradients of the pairs never leave the multiprocessor.
"""

import triton
import triton.language as tl

from jlaqat.kernels.chunk_output import load_codes, load_scales
from jlaqat.kernels.chunks import (
    load_gate_sums,
    load_inverse,
    load_rows,
    load_scalars,
    locate_chunk,
    state_mask,
    state_offsets,
    store_rows,
    store_scalars,
)
from jlaqat.kernels.gates import decay_matrix
from jlaqat.kernels.rounding import round_code


@triton.jit
def load_state_values(
    p_h,
    p_h_scale,
    state,
    i_k,
    i_v,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    STATE_FORMAT: tl.constexpr,
    TILE_V: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """[BK, BV] of a saved state, in the dtype of the products."""
    b = load_codes(p_h, state, i_k, i_v, K, V, BK, BV, STATE_FORMAT, HARDWARE_FP8)
    if STATE_FORMAT != "none":
        b = b * load_scales(p_h_scale, state, i_v, V, BV, STATE_FORMAT, TILE_V)[None, :]
    return b.to(DTYPE)


@triton.jit
def store_zeros(p_dq, p_dk, p_dv, p_dbeta, p_dg, row, n_rows, i_hv, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr):
    """The gradients of a chunk past the end of cu_seqlens."""
    b = tl.zeros([64, 64], tl.float32)
    for i_k in range(0, K, 64):
        store_rows(p_dq, b, row, n_rows, i_hv, i_k, HV, K)
        store_rows(p_dk, b, row, n_rows, i_hv, i_k, HV, K)
    for i_v in range(0, V, 64):
        store_rows(p_dv, b, row, n_rows, i_hv, i_v, HV, V)
    store_scalars(p_dbeta, tl.zeros([64], tl.float32), row, n_rows, i_hv, HV)
    store_scalars(p_dg, tl.zeros([64], tl.float32), row, n_rows, i_hv, HV)


@triton.jit
def chunk_backward_kernel(
    p_q,  # [B*T, H, K]
    p_k,  # [B*T, H, K]
    p_v,  # [B*T, HV, V]
    p_gsum,  # [B*T, HV] float32, G
    p_beta,  # [B*T, HV]
    p_x,  # [B*T, HV, X_WIDTH]
    p_w_scale,  # [B*T, HV] float32, where w is rounded
    p_h,  # [SLOTS, HV, K, V] codes or values
    p_h_scale,  # [SLOTS, HV, ceil(V / TILE_V)] float32
    p_dh,  # [SLOTS, HV, K, V]
    p_dv_new,  # [B*T, HV, V]
    p_do,  # [B*T, HV, V]
    p_chunks,
    p_dq,  # out: [B*T, HV, K], one a value head
    p_dk,  # out: [B*T, HV, K], one a value head
    p_dv,  # out: [B*T, HV, V]
    p_dbeta,  # out: [B*T, HV]
    p_dg,  # out: [B*T, HV] float32
    p_v_new,  # out, V > BV: [B*T, HV, V], v', for the second half to read
    p_y,  # out, V > BV: [B*T, HV, V], y, likewise
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
    IS_PACKED: tl.constexpr,
    STATE_FORMAT: tl.constexpr,
    TILE_V: tl.constexpr,
    W_FORMAT: tl.constexpr,
    X_WIDTH: tl.constexpr,
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
        store_zeros(p_dq, p_dk, p_dv, p_dbeta, p_dg, row, n_stored, i_hv, HV, K, V)
        return
    DTYPE: tl.constexpr = p_q.dtype.element_ty
    o_t = tl.arange(0, BT)
    state = i_c.to(tl.int64) * HV + i_hv
    b_g, g_last = load_gate_sums(p_gsum, row, n_rows, i_hv, HV, BT)
    b_beta = load_scalars(p_beta, row, n_rows, i_hv, HV, BT)
    b_x = load_inverse(p_x, row, n_rows, i_hv, HV, X_WIDTH, BT)
    if W_FORMAT != "none":
        b_ws = tl.where(o_t < n_rows, load_scalars(p_w_scale, row, n_rows, i_hv, HV, BT), 1.0)
        b_wr = tl.div_rn(tl.full([BT], 1.0, tl.float32), b_ws)
    b_dp = tl.zeros([BT, BT], tl.float32)
    b_da = tl.zeros([BT, BT], tl.float32)
    b_dbeta = tl.zeros([BT], tl.float32)

    # First half: v' and y and, from them, dv and the gradients of the pairs, a block of columns of V at a time.
    b_y = tl.zeros([BT, BV], DTYPE)
    b_do = tl.zeros([BT, BV], DTYPE)
    b_vn = tl.zeros([BT, BV], DTYPE)
    for i_v in tl.static_range(0, V, BV):
        b_v = load_rows(p_v, row, n_rows, i_hv, i_v, HV, V, BT, BV)
        b_ve = tl.dot(b_x, (b_v * b_beta[:, None]).to(DTYPE), input_precision=PRECISION)  # u, then u - w S
        b_vr = tl.zeros([BT, BV], tl.float32)  # (w - rounded w) S
        for i_k in range(0, K, BK):
            b_k = load_rows(p_k, row, n_rows, i_h, i_k, H, K, BT, BK)
            b_h = load_state_values(
                p_h, p_h_scale, state, i_k, i_v, K, V, BK, BV, STATE_FORMAT, TILE_V, HARDWARE_FP8, DTYPE
            )
            b_kb = (b_k * (tl.exp(b_g) * b_beta)[:, None]).to(DTYPE)
            b_w = tl.dot(b_x, b_kb, input_precision=PRECISION)
            b_ve = tl.dot((-b_w).to(DTYPE), b_h, acc=b_ve, input_precision=PRECISION)
            if W_FORMAT != "none":
                b_w -= round_code(b_w * b_wr[:, None], W_FORMAT, HARDWARE_FP8) * b_ws[:, None]
                b_vr = tl.dot(b_w.to(DTYPE), b_h, acc=b_vr, input_precision=PRECISION)
        b_vn = (b_ve + b_vr).to(DTYPE)
        b_v_exact = b_ve.to(DTYPE)
        b_dv = load_rows(p_dv_new, row, n_rows, i_hv, i_v, HV, V, BT, BV)
        b_yf = tl.dot(tl.trans(b_x), b_dv, input_precision=PRECISION)
        b_v = load_rows(p_v, row, n_rows, i_hv, i_v, HV, V, BT, BV)  # again: holding it costs registers
        b_dbeta += tl.sum(b_yf * b_v, axis=1)
        store_rows(p_dv, b_yf * b_beta[:, None], row, n_rows, i_hv, i_v, HV, V)
        b_y = b_yf.to(DTYPE)
        b_do = load_rows(p_do, row, n_rows, i_hv, i_v, HV, V, BT, BV)
        b_da = tl.dot(b_y, tl.trans(b_v_exact), acc=b_da, input_precision=PRECISION)
        b_dp = tl.dot(b_do, tl.trans(b_vn), acc=b_dp, input_precision=PRECISION)
        if V > BV:
            store_rows(p_v_new, b_vn, row, n_rows, i_hv, i_v, HV, V)
            store_rows(p_y, b_y, row, n_rows, i_hv, i_v, HV, V)
    if V > BV:
        tl.debug_barrier()

    b_e = decay_matrix(b_g)
    b_da = tl.where(o_t[:, None] > o_t[None, :], -b_da * b_e, 0.0)
    b_dab = (b_da * b_beta[:, None]).to(DTYPE)
    b_da = b_da.to(DTYPE)
    b_dp = (b_dp * b_e * scale).to(DTYPE)
    b_dg = tl.zeros([BT], tl.float32)
    b_dg_last = tl.zeros([BT], tl.float32)  # its sum belongs to the last row

    # Second half: dq and dk, a block of columns of K at a time.
    for i_k in range(0, K, BK):
        b_dq = tl.zeros([BT, BK], tl.float32)
        b_z = tl.zeros([BT, BK], tl.float32)  # -z / e^G, then beta (z + r)
        b_dk = tl.zeros([BT, BK], tl.float32)
        b_last = tl.zeros([BK], tl.float32)
        for i_v in tl.static_range(0, V, BV):
            if V > BV:
                b_do = load_rows(p_do, row, n_rows, i_hv, i_v, HV, V, BT, BV)
                b_vn = load_rows(p_v_new, row, n_rows, i_hv, i_v, HV, V, BT, BV)
                b_y = load_rows(p_y, row, n_rows, i_hv, i_v, HV, V, BT, BV)
            b_h = load_state_values(
                p_h, p_h_scale, state, i_k, i_v, K, V, BK, BV, STATE_FORMAT, TILE_V, HARDWARE_FP8, DTYPE
            )
            m_s = state_mask(i_k, i_v, K, V, BK, BV)
            b_dh = tl.load(p_dh + state * K * V + state_offsets(i_k, i_v, V, BK, BV), mask=m_s, other=0.0)
            b_last += tl.sum(b_h.to(tl.float32) * b_dh.to(tl.float32), axis=1)
            b_dq = tl.dot(b_do, tl.trans(b_h), acc=b_dq, input_precision=PRECISION)
            b_z = tl.dot(b_y, tl.trans(b_h), acc=b_z, input_precision=PRECISION)
            b_dk = tl.dot(b_vn, tl.trans(b_dh), acc=b_dk, input_precision=PRECISION)
        b_q = load_rows(p_q, row, n_rows, i_h, i_k, H, K, BT, BK)
        b_k = load_rows(p_k, row, n_rows, i_h, i_k, H, K, BT, BK)
        b_dq *= (tl.exp(b_g) * scale)[:, None]
        b_dq = tl.dot(b_dp, b_k, acc=b_dq, input_precision=PRECISION)
        store_rows(p_dq, b_dq, row, n_rows, i_hv, i_k, HV, K)
        b_dg += tl.sum(b_q * b_dq, axis=1)
        b_z *= -tl.exp(b_g)[:, None]
        b_z = tl.dot(b_da, b_k, acc=b_z, input_precision=PRECISION)
        b_dbeta += tl.sum(b_z * b_k, axis=1)
        b_z *= b_beta[:, None]
        b_dk *= tl.exp(g_last - b_g)[:, None]
        # Sums to one number go through two axes: Triton 3.7 cannot lower a sum along a single one for SM100.
        b_state = tl.exp(g_last) * tl.sum(b_last[None, :], axis=1)
        b_dg_last += tl.sum(b_k * b_dk, axis=1) + tl.where(o_t == 0, b_state, 0.0)
        b_dk = tl.dot(tl.trans(b_dp), b_q, acc=b_dk, input_precision=PRECISION)
        b_dk = tl.dot(tl.trans(b_dab), b_k, acc=b_dk, input_precision=PRECISION)
        b_dg += tl.sum(b_k * (b_z - b_dk), axis=1)
        store_rows(p_dk, b_dk + b_z, row, n_rows, i_hv, i_k, HV, K)
    b_dg += tl.where(o_t == n_rows - 1, tl.sum(b_dg_last[None, :], axis=1), 0.0)
    store_scalars(p_dbeta, b_dbeta, row, n_rows, i_hv, HV)
    store_scalars(p_dg, tl.cumsum(b_dg, axis=0, reverse=True), row, n_rows, i_hv, HV)
