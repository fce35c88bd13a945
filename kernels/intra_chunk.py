"""Everything inside one chunk: A, its inverse X, P, w and u, and the gradients that come back through them.

One program holds one chunk of one value head. Names and steps are those of the contract (docs/kernels.md): G the
in-chunk gate sum, A_ij = beta_i k_i.k_j E_ij below the diagonal, X = (I + A)^-1, P_ij = scale q_i.k_j E_ij,
w = X(beta e^G k) rounded, u = X(beta v).
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
from jlaqat.kernels.rounding import decode, fake_quantize_rows


@triton.jit
def unit_lower_inverse(b_a, MERGE_PRECISION: tl.constexpr):
    """(I + b_a)^-1 for a strictly lower [64, 64]: 16-row leaves by substitution, then two exact block merges."""
    o_block = tl.arange(0, 4)
    o_row = tl.arange(0, 16)
    diagonal = o_block[:, None, None, None] == o_block[None, None, :, None]
    b_x = -tl.sum(tl.where(diagonal, tl.reshape(b_a, [4, 16, 4, 16]), 0.0), axis=2)  # [4, 16, 16]
    for i in range(2, 16):
        is_row = (o_row == i)[None, :, None]
        b_row = tl.sum(tl.where(is_row, b_x, 0.0), axis=1)
        b_row += tl.sum(b_row[:, :, None] * b_x, axis=1)
        b_x = tl.where(is_row, b_row[:, None, :], b_x)
    b_x += tl.where(o_row[:, None] == o_row[None, :], 1.0, 0.0)[None, :, :]
    b_x = tl.reshape(tl.where(diagonal, b_x[:, :, None, :], 0.0), [64, 64])
    # [[D0, 0], [L, D1]]^-1 has -D1 L D0 in its corner, so both corners of a level take two products of the whole.
    o_t = tl.arange(0, 64)
    for half in tl.static_range(4, 6):
        same = (o_t[:, None] >> (half + 1)) == (o_t[None, :] >> (half + 1))
        corner = same & ((o_t[:, None] >> half) != (o_t[None, :] >> half))
        b_l = tl.dot(b_x, tl.where(corner, b_a, 0.0), input_precision=MERGE_PRECISION)
        b_x -= tl.dot(b_l, b_x, input_precision=MERGE_PRECISION)
    return b_x


@triton.jit
def pairs_gdn(b_q, b_k, b_gsum, b_beta, scale, PRECISION: tl.constexpr):
    """A and P of one scalar gate."""
    BT: tl.constexpr = b_k.shape[0]
    o_t = tl.arange(0, BT)
    b_e = decay_matrix(b_gsum)
    b_a = tl.dot(b_k, tl.trans(b_k), input_precision=PRECISION) * b_e * b_beta[:, None]
    b_p = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * b_e * scale
    return tl.where(o_t[:, None] > o_t[None, :], b_a, 0.0), b_p


@triton.jit
def pairs_kda(b_a, b_p, b_q, b_k, b_gsum, p_anchor, STRIDE: tl.constexpr, n_rows, n_k, PRECISION: tl.constexpr):
    """A / beta and P / scale with a block of channels added: one product a level, the diagonal of P by itself."""
    BT: tl.constexpr = b_k.shape[0]
    o_t = tl.arange(0, BT)
    b_self = tl.sum(b_q.to(tl.float32) * b_k.to(tl.float32), axis=1)
    b_p += tl.where(o_t[:, None] == o_t[None, :], b_self[:, None], 0.0)
    for level in range(6):  # not unrolled: six copies spill and take a minute to compile
        b_f = level_factor(b_gsum, p_anchor, STRIDE, level, n_rows, n_k)
        b_kf = (b_k * b_f).to(b_k.dtype)
        b_qf = (b_q * b_f).to(b_k.dtype)
        m = level_mask(level, BT)
        b_a += tl.where(m, tl.dot(b_kf, tl.trans(b_kf), input_precision=PRECISION), 0.0)
        b_p += tl.where(m, tl.dot(b_qf, tl.trans(b_kf), input_precision=PRECISION), 0.0)
    return b_a, b_p


@triton.jit
def sum_channel_gates(
    p_g, p_gsum, p_qg, p_kg, p_decay, b_q, b_k, row, n_rows, i_hv, i_k, scale, HV: tl.constexpr, K: tl.constexpr
):
    """KDA: G of a block of channels; stores it, scale e^G q, e^(G_L - G) k and e^(G_L) at p_decay.

    Forward and recomputation call this with equal blocks and warps: how a sum is associated depends on both.
    """
    BT: tl.constexpr = b_k.shape[0]
    BK: tl.constexpr = b_k.shape[1]
    b_gsum = tl.cumsum(load_rows(p_g, row, n_rows, i_hv, i_k, HV, K, BT, BK), axis=0)
    b_last = last_row(b_gsum, n_rows)
    o_k = i_k + tl.arange(0, BK)
    tl.store(p_decay + o_k, tl.exp(b_last), mask=o_k < K)
    store_rows(p_gsum, b_gsum, row, n_rows, i_hv, i_k, HV, K)
    store_rows(p_qg, b_q * tl.exp(b_gsum) * scale, row, n_rows, i_hv, i_k, HV, K)
    store_rows(p_kg, b_k * tl.exp(b_last[None, :] - b_gsum), row, n_rows, i_hv, i_k, HV, K)
    return b_gsum


@triton.jit
def form_w(b_x, b_kg, b_beta, W_FORMAT: tl.constexpr, HARDWARE_FP8: tl.constexpr, PRECISION: tl.constexpr):
    """w = X(beta e^G k), rounded; b_kg is e^G k in float32. In X's dtype."""
    b_w = tl.dot(b_x, (b_kg * b_beta[:, None]).to(b_x.dtype), input_precision=PRECISION)
    if W_FORMAT != "none":
        b_w = fake_quantize_rows(b_w, W_FORMAT, HARDWARE_FP8)
    return b_w.to(b_x.dtype)


@triton.jit
def form_u(b_x, b_v, b_beta, PRECISION: tl.constexpr):
    return tl.dot(b_x, (b_v * b_beta[:, None]).to(b_x.dtype), input_precision=PRECISION)


@triton.jit
def intra_chunk_forward_kernel(
    p_q,  # [B*T, H, K]
    p_k,  # [B*T, H, K]
    p_v,  # [B*T, HV, V]
    p_g,  # [B*T, HV] or [B*T, HV, K] float32
    p_beta,  # [B*T, HV]
    p_chunks,  # [SLOTS, 3]
    p_gsum,  # out: like g, float32, G
    p_decay,  # out, KDA: [SLOTS, HV, K] float32, e^(G_L)
    p_qg,  # out, KDA: [B*T, HV, K], scale e^G q
    p_kg,  # out, KDA: [B*T, HV, K], e^(G_L - G) k
    p_x,  # out: [B*T, HV, 64]
    p_p,  # out: [B*T, HV, 64]
    p_w,  # out: [B*T, HV, K]
    p_u,  # out: [B*T, HV, V]
    scale,
    T,
    NT,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BKI: tl.constexpr,
    BV: tl.constexpr,
    IS_KDA: tl.constexpr,
    IS_PACKED: tl.constexpr,
    SAVE_X: tl.constexpr,
    W_FORMAT: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
    PRECISION: tl.constexpr,
    MERGE_PRECISION: tl.constexpr,
):
    pid = tl.program_id(0)
    i_c, i_hv = pid // HV, pid % HV
    i_h = i_hv // (HV // H)
    row, n_rows, _ = locate_chunk(p_chunks, i_c, T, NT, BT, IS_PACKED)
    if n_rows <= 0:
        return
    b_beta = load_scalars(p_beta, row, n_rows, i_hv, HV, BT)
    if IS_KDA:
        b_a = tl.zeros([BT, BT], tl.float32)
        b_p = tl.zeros([BT, BT], tl.float32)
        p_last = p_decay + (i_c.to(tl.int64) * HV + i_hv) * K
        for i_k in range(0, K, BKI):
            b_qi = load_rows(p_q, row, n_rows, i_h, i_k, H, K, BT, BKI)
            b_ki = load_rows(p_k, row, n_rows, i_h, i_k, H, K, BT, BKI)
            b_gi = sum_channel_gates(p_g, p_gsum, p_qg, p_kg, p_last, b_qi, b_ki, row, n_rows, i_hv, i_k, scale, HV, K)
            tl.debug_barrier()  # the sums just written are read back as anchors
            p_anchor = p_gsum + (row * HV + i_hv) * K + i_k
            b_a, b_p = pairs_kda(b_a, b_p, b_qi, b_ki, b_gi, p_anchor, HV * K, n_rows, K - i_k, PRECISION)
        b_a *= b_beta[:, None]
        b_p *= scale
    else:
        b_q = load_rows(p_q, row, n_rows, i_h, 0, H, K, BT, BK)
        b_k = load_rows(p_k, row, n_rows, i_h, 0, H, K, BT, BK)
        b_gsum = tl.cumsum(load_scalars(p_g, row, n_rows, i_hv, HV, BT), axis=0)
        store_scalars(p_gsum, b_gsum, row, n_rows, i_hv, HV)
        b_a, b_p = pairs_gdn(b_q, b_k, b_gsum, b_beta, scale, PRECISION)
    store_rows(p_p, b_p, row, n_rows, i_hv, 0, HV, BT)
    b_x = unit_lower_inverse(b_a, MERGE_PRECISION).to(p_k.dtype.element_ty)
    if SAVE_X:
        store_rows(p_x, b_x, row, n_rows, i_hv, 0, HV, BT)
    # k and G again, all channels at once, since a row of w is rounded as a whole; holding them meanwhile would spill.
    b_k = load_rows(p_k, row, n_rows, i_h, 0, H, K, BT, BK)
    if IS_KDA:
        b_kdecay = b_k * tl.exp(load_rows(p_gsum, row, n_rows, i_hv, 0, HV, K, BT, BK))
    else:
        b_kdecay = b_k * tl.exp(b_gsum)[:, None]
    b_w = form_w(b_x, b_kdecay, b_beta, W_FORMAT, HARDWARE_FP8, PRECISION)
    store_rows(p_w, b_w, row, n_rows, i_hv, 0, HV, K)
    for i_v in range(0, V, BV):
        b_v = load_rows(p_v, row, n_rows, i_hv, i_v, HV, V, BT, BV)
        store_rows(p_u, form_u(b_x, b_v, b_beta, PRECISION), row, n_rows, i_hv, i_v, HV, V)


@triton.jit
def wy_recompute_kernel(
    p_q,
    p_k,
    p_v,
    p_g,  # GDN: [B*T, HV] float32, G itself; KDA: [B*T, HV, K] float32, g
    p_beta,
    p_x,  # [B*T, HV, 64]
    p_h,  # [SLOTS, HV, K, V] uint8 codes of the states that enter the chunks
    p_h_scale,  # [SLOTS, HV, ceil(V / TILE_V)] float32
    p_chunks,
    p_gsum,  # out, KDA: [B*T, HV, K] float32, G
    p_decay,  # out, KDA
    p_qg,  # out, KDA
    p_kg,  # out, KDA
    p_w,  # out: [B*T, HV, K]
    p_u,  # out: [B*T, HV, V], u, or v' where the states are known
    scale,
    T,
    NT,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BKI: tl.constexpr,
    BV: tl.constexpr,
    IS_KDA: tl.constexpr,
    IS_PACKED: tl.constexpr,
    HAS_STATES: tl.constexpr,
    STATE_FORMAT: tl.constexpr,
    TILE_V: tl.constexpr,
    W_FORMAT: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The backward's own copy of what the forward dropped: w, u or v', and for KDA the decayed q and k, bit for bit."""
    pid = tl.program_id(0)
    i_c, i_hv = pid // HV, pid % HV
    i_h = i_hv // (HV // H)
    row, n_rows, _ = locate_chunk(p_chunks, i_c, T, NT, BT, IS_PACKED)
    if n_rows <= 0:
        return
    b_k = load_rows(p_k, row, n_rows, i_h, 0, H, K, BT, BK)
    b_beta = load_scalars(p_beta, row, n_rows, i_hv, HV, BT)
    b_x = load_rows(p_x, row, n_rows, i_hv, 0, HV, BT, BT, BT)
    if IS_KDA:
        p_last = p_decay + (i_c.to(tl.int64) * HV + i_hv) * K
        for i_k in range(0, K, BKI):
            b_qi = load_rows(p_q, row, n_rows, i_h, i_k, H, K, BT, BKI)
            b_ki = load_rows(p_k, row, n_rows, i_h, i_k, H, K, BT, BKI)
            sum_channel_gates(p_g, p_gsum, p_qg, p_kg, p_last, b_qi, b_ki, row, n_rows, i_hv, i_k, scale, HV, K)
        tl.debug_barrier()  # the sums just written are read back
        b_kdecay = b_k * tl.exp(load_rows(p_gsum, row, n_rows, i_hv, 0, HV, K, BT, BK))
    else:
        b_kdecay = b_k * tl.exp(load_scalars(p_g, row, n_rows, i_hv, HV, BT))[:, None]
    b_w = form_w(b_x, b_kdecay, b_beta, W_FORMAT, HARDWARE_FP8, PRECISION)
    store_rows(p_w, b_w, row, n_rows, i_hv, 0, HV, K)
    state = i_c.to(tl.int64) * HV + i_hv
    for i_v in range(0, V, BV):
        b_v = load_rows(p_v, row, n_rows, i_hv, i_v, HV, V, BT, BV)
        b_u = form_u(b_x, b_v, b_beta, PRECISION)
        if HAS_STATES:
            m = state_mask(0, i_v, K, V, BK, BV)
            b_code = tl.load(p_h + state * K * V + state_offsets(0, i_v, V, BK, BV), mask=m, other=0)
            b_code = decode(b_code, STATE_FORMAT, HARDWARE_FP8).to(b_x.dtype)
            o_tile = (i_v + tl.arange(0, BV)) // TILE_V
            NV: tl.constexpr = (V + TILE_V - 1) // TILE_V
            b_s = tl.load(p_h_scale + state * NV + o_tile, mask=o_tile < NV, other=1.0)
            # The forward reads u back in the inputs' dtype.
            b_u = b_u.to(b_x.dtype).to(tl.float32) - tl.dot(b_w, b_code, input_precision=PRECISION) * b_s[None, :]
        store_rows(p_u, b_u, row, n_rows, i_hv, i_v, HV, V)


@triton.jit
def pair_gradients_gdn(b_z, b_m, b_beta, b_k, PRECISION: tl.constexpr):
    """z + r and c: r_i = sum_j dA_ij E_ij k_j, c_j = sum_i dA_ij E_ij beta_i k_i, with b_m = dA * E."""
    b_z += tl.dot(b_m.to(b_k.dtype), b_k, input_precision=PRECISION)
    b_c = tl.dot(tl.trans((b_m * b_beta[:, None]).to(b_k.dtype)), b_k, input_precision=PRECISION)
    return b_z, b_c


@triton.jit
def pair_gradients_kda(
    b_z, b_da, b_beta, b_k, b_gsum, p_anchor, STRIDE: tl.constexpr, n_rows, n_k, PRECISION: tl.constexpr
):
    """The same through the levels of per-channel gates."""
    BT: tl.constexpr = b_k.shape[0]
    BK: tl.constexpr = b_k.shape[1]
    b_c = tl.zeros([BT, BK], tl.float32)
    for level in range(6):  # not unrolled: six copies spill and take a minute to compile
        b_f = level_factor(b_gsum, p_anchor, STRIDE, level, n_rows, n_k)
        b_kf = (b_k * b_f).to(b_k.dtype)
        b_m = tl.where(level_mask(level, BT), b_da, 0.0)
        b_z += b_f * tl.dot(b_m.to(b_k.dtype), b_kf, input_precision=PRECISION)
        b_mt = tl.trans((b_m * b_beta[:, None]).to(b_k.dtype))
        b_c += b_f * tl.dot(b_mt, b_kf, input_precision=PRECISION)
    return b_z, b_c


@triton.jit
def intra_chunk_backward_kernel(
    p_k,  # [B*T, H, K]
    p_v,  # [B*T, HV, V]
    p_gsum,  # like g, float32, G
    p_beta,  # [B*T, HV]
    p_x,  # [B*T, HV, 64]
    p_dw,  # [B*T, HV, K]
    p_dv_new,  # [B*T, HV, V]: du
    p_dk_outer,  # [B*T, HV, K]: what chunk_output's backward found
    p_dgsum,  # like g, float32: the same for dG
    p_chunks,
    p_dk,  # out: [B*T, HV, K], one a value head
    p_dv,  # out: [B*T, HV, V]
    p_dbeta,  # out: [B*T, HV]
    p_dg,  # out: like g
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
    PRECISION: tl.constexpr,
):
    pid = tl.program_id(0)
    i_c, i_hv = pid // HV, pid % HV
    i_h = i_hv // (HV // H)
    row, n_rows, n_stored = locate_chunk(p_chunks, i_c, T, NT, BT, IS_PACKED)
    if n_stored <= 0:
        return
    o_t = tl.arange(0, BT)
    below = o_t[:, None] > o_t[None, :]
    b_beta = load_scalars(p_beta, row, n_rows, i_hv, HV, BT)
    b_x = load_rows(p_x, row, n_rows, i_hv, 0, HV, BT, BT, BT)
    b_xt = tl.trans(b_x)
    b_dx = tl.zeros([BT, BT], tl.float32)
    b_dbeta = tl.zeros([BT], tl.float32)
    for i_v in range(0, V, BV):
        b_v = load_rows(p_v, row, n_rows, i_hv, i_v, HV, V, BT, BV)
        b_du = load_rows(p_dv_new, row, n_rows, i_hv, i_v, HV, V, BT, BV)
        b_vb = (b_v * b_beta[:, None]).to(b_x.dtype)
        b_dx += tl.dot(b_du, tl.trans(b_vb), input_precision=PRECISION)
        b_y = tl.dot(b_xt, b_du, input_precision=PRECISION)
        b_dbeta += tl.sum(b_y * b_v, axis=1)
        store_rows(p_dv, b_y * b_beta[:, None], row, n_stored, i_hv, i_v, HV, V)
    if not IS_KDA:
        # A chunk past the end of cu_seqlens has no last row to read; its sums are zero like everything else of it.
        b_gsum1 = tl.zeros([BT], tl.float32)
        if n_rows > 0:
            b_gsum1, _ = load_gate_sums(p_gsum, row, n_rows, i_hv, HV, BT)
    for i_k in range(0, K, BK):
        b_dw = load_rows(p_dw, row, n_rows, i_hv, i_k, HV, K, BT, BK)
        b_k = load_rows(p_k, row, n_rows, i_h, i_k, H, K, BT, BK)
        if IS_KDA:
            b_gsum = load_rows(p_gsum, row, n_rows, i_hv, i_k, HV, K, BT, BK)
            b_kb = (b_k * tl.exp(b_gsum) * b_beta[:, None]).to(b_x.dtype)
        else:
            b_kb = (b_k * tl.exp(b_gsum1)[:, None] * b_beta[:, None]).to(b_x.dtype)
        b_dx += tl.dot(b_dw, tl.trans(b_kb), input_precision=PRECISION)
    b_dx = tl.dot(b_dx.to(b_x.dtype), b_xt, input_precision=PRECISION)
    b_da = tl.dot(b_xt, b_dx.to(b_x.dtype), input_precision=PRECISION)
    b_da = tl.where(below, -b_da, 0.0)
    if not IS_KDA:
        b_da *= decay_matrix(b_gsum1)
        b_dg1 = load_scalars(p_dgsum, row, n_rows, i_hv, HV, BT)
    for i_k in range(0, K, BK):
        b_dw = load_rows(p_dw, row, n_rows, i_hv, i_k, HV, K, BT, BK)
        b_k = load_rows(p_k, row, n_rows, i_h, i_k, H, K, BT, BK)
        b_dk = load_rows(p_dk_outer, row, n_rows, i_hv, i_k, HV, K, BT, BK).to(tl.float32)
        b_z = tl.dot(b_xt, b_dw, input_precision=PRECISION)
        if IS_KDA:
            b_gsum = load_rows(p_gsum, row, n_rows, i_hv, i_k, HV, K, BT, BK)
            b_z *= tl.exp(b_gsum)
            p_anchor = p_gsum + (row * HV + i_hv) * K + i_k
            b_zr, b_c = pair_gradients_kda(b_z, b_da, b_beta, b_k, b_gsum, p_anchor, HV * K, n_rows, K - i_k, PRECISION)
        else:
            b_z *= tl.exp(b_gsum1)[:, None]
            b_zr, b_c = pair_gradients_gdn(b_z, b_da, b_beta, b_k, PRECISION)
        b_dbeta += tl.sum(b_zr * b_k, axis=1)
        b_zr *= b_beta[:, None]
        store_rows(p_dk, b_dk + b_zr + b_c, row, n_stored, i_hv, i_k, HV, K)
        if IS_KDA:
            b_dg = load_rows(p_dgsum, row, n_rows, i_hv, i_k, HV, K, BT, BK)
            b_dg = tl.cumsum(b_dg + (b_zr - b_c) * b_k, axis=0, reverse=True)
            store_rows(p_dg, b_dg, row, n_stored, i_hv, i_k, HV, K)
        else:
            b_dg1 += tl.sum((b_zr - b_c) * b_k, axis=1)
    store_scalars(p_dbeta, b_dbeta, row, n_stored, i_hv, HV)
    if not IS_KDA:
        store_scalars(p_dg, tl.cumsum(b_dg1, axis=0, reverse=True), row, n_stored, i_hv, HV)
