"""KDA's gradients inside a chunk: dq, dk, dv, dg and dbeta from do, dv' and the states' gradients.

Since du = dv' and dw = -dv' S^T, the contract's backward shortens to

    y = X^T dv',  dA = -strict_lower(y vt^T),  z = X^T dw = -y S^T,

where vt = X beta (v - (e^G k) S) is v' of an unrounded w: no product of three [64, 64] matrices, and no dw.
`kda_scores_backward` forms y, dv, dA and dP, one program a chunk of a value head; `kda_channels_backward` the rest, one
program a block of channels of that; `kda_dbeta` adds the blocks' parts of dbeta.

A pair's exponent receives what its row gives and its column takes, q_i dq_i - k_j dk_j, formed from two products whose
16-bit roundings differ. For i = j both are the same number and nothing is left, but where decay is strong it would
drown all other pairs: so the diagonal of dP stays out of the products, and joins dq and dk after dg is formed.
"""

import triton
import triton.language as tl

from jlaqat.kernels.chunk_output import load_codes, load_scales
from jlaqat.kernels.chunks import (
    load_rows,
    load_scalars,
    locate_chunk,
    state_mask,
    state_offsets,
    store_rows,
    store_scalars,
)
from jlaqat.kernels.intra_chunk_kda import load_pairs
from jlaqat.kernels.pairs_kda import (
    FIRST_FINE,
    block_limit,
    column_factor,
    fine_mask,
    least,
    level_mask,
    load_anchors,
    load_block_edges,
    row_factor,
    sum_rows,
)


@triton.jit
def load_state_block(
    p_h, p_h_scale, state, i_k, i_v, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    STATE_FORMAT: tl.constexpr, TILE_V: tl.constexpr, HARDWARE_FP8: tl.constexpr,
):  # fmt: skip
    """The saved state [BK, BV], in float32 where it is kept as codes."""
    b_h = load_codes(p_h, state, i_k, i_v, K, V, BK, BV, STATE_FORMAT, HARDWARE_FP8)
    if STATE_FORMAT != "none":
        b_h = b_h * load_scales(p_h_scale, state, i_v, V, BV, STATE_FORMAT, TILE_V)[None, :]
    return b_h


@triton.jit
def add_pair_gradients(b_dq, b_zr, b_dk, b_q, b_k, b_beta, b_row, b_column, b_da, b_dp, PRECISION: tl.constexpr):
    """One level's share of d (in dq), r (in zr) and c (in dk), given its pairs of dA and dP."""
    b_kc = (b_k * b_column).to(b_k.dtype)
    b_zr += b_row * tl.dot(b_da, b_kc, input_precision=PRECISION)
    b_dq += b_row * tl.dot(b_dp, b_kc, input_precision=PRECISION)
    b_kr = (b_k * (b_row * b_beta[:, None])).to(b_k.dtype)
    b_c = tl.dot(tl.trans(b_da), b_kr, input_precision=PRECISION)
    b_qr = (b_q * b_row).to(b_k.dtype)
    b_c = tl.dot(tl.trans(b_dp), b_qr, acc=b_c, input_precision=PRECISION)
    b_dk += b_column * b_c
    return b_dq, b_zr, b_dk


@triton.jit
def store_fine_gradients(
    p_q, p_k, p_gsum, p_beta, p_da, p_dp, p_dq, p_dk, p_dg, p_part, row, n_rows, i_h, i_hv, i_k,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The fine levels' gradients of a block of channels, left where the kernel's own will stand."""
    b_beta = load_scalars(p_beta, row, n_rows, i_hv, HV, BT)
    b_q = load_rows(p_q, row, n_rows, i_h, i_k, H, K, BT, BK)
    b_k = load_rows(p_k, row, n_rows, i_h, i_k, H, K, BT, BK)
    b_gsum = load_rows(p_gsum, row, n_rows, i_hv, i_k, HV, K, BT, BK)
    b_dq = tl.zeros([BT, BK], tl.float32)
    b_zr = tl.zeros([BT, BK], tl.float32)
    b_dk = tl.zeros([BT, BK], tl.float32)
    for level in range(1, FIRST_FINE + 1):  # not 0, the diagonal
        b_anchor = load_anchors(p_gsum, row, n_rows, i_hv, i_k, HV, K, level, (1 << level) >> 1, BT, BK)
        b_row = row_factor(b_gsum, b_anchor)
        b_da = load_pairs(p_da, fine_mask(level, BT), row, n_rows, i_hv, HV, BT)
        b_dp = load_pairs(p_dp, fine_mask(level, BT), row, n_rows, i_hv, HV, BT)
        b_dq, b_zr, b_dk = add_pair_gradients(
            b_dq, b_zr, b_dk, b_q, b_k, b_beta, b_row, b_row, b_da, b_dp, PRECISION
        )  # fmt: skip
    store_scalars(p_part, tl.sum(b_zr * b_k, axis=1), row, n_rows, i_hv, HV)
    b_zr *= b_beta[:, None]
    store_rows(p_dq, b_dq, row, n_rows, i_hv, i_k, HV, K)
    store_rows(p_dk, b_zr + b_dk, row, n_rows, i_hv, i_k, HV, K)
    store_rows(p_dg, b_q * b_dq + b_k * (b_zr - b_dk), row, n_rows, i_hv, i_k, HV, K)


# A function of its own in the machine code, as in `intra_chunk_kda`.
store_fine_gradients_apart = triton.jit(store_fine_gradients.fn, noinline=True)


@triton.jit
def kda_scores_backward_kernel(
    p_v,  # [B*T, HV, V]
    p_beta,  # [B*T, HV]
    p_x,  # [B*T, HV, 64]
    p_v_new,  # [B*T, HV, V], v'
    p_v_plain,  # [B*T, HV, V], v' of the unrounded w
    p_dv_new,  # [B*T, HV, V], gradient of v'
    p_do,  # [B*T, HV, V]
    p_chunks,
    p_y,  # out: [B*T, HV, V]
    p_da,  # out: [B*T, HV, 64], below the diagonal
    p_dp,  # out: [B*T, HV, 64], times scale, below the diagonal
    p_dp_diagonal,  # out: [B*T, HV] float32, times scale
    p_dv,  # out: [B*T, HV, V]
    p_dbeta_v,  # out: [B*T, HV] float32, sum of y v
    scale,
    T,
    NT,
    HV: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BV: tl.constexpr,
    IS_PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    pid = tl.program_id(0)
    i_c, i_hv = pid // HV, pid % HV
    row, n_rows, n_stored = locate_chunk(p_chunks, i_c, T, NT, BT, IS_PACKED)
    if n_stored <= 0:
        return
    if n_rows <= 0:
        for i_v in range(0, V, BV):
            store_rows(p_dv, tl.zeros([BT, BV], tl.float32), row, n_stored, i_hv, i_v, HV, V)
        store_scalars(p_dbeta_v, tl.zeros([BT], tl.float32), row, n_stored, i_hv, HV)
        return
    o_t = tl.arange(0, BT)
    b_beta = load_scalars(p_beta, row, n_rows, i_hv, HV, BT)
    b_dbeta = tl.zeros([BT], tl.float32)
    b_xt = tl.trans(load_rows(p_x, row, n_rows, i_hv, 0, HV, BT, BT, BT))
    b_da = tl.zeros([BT, BT], tl.float32)
    b_dp = tl.zeros([BT, BT], tl.float32)
    for i_v in range(0, V, BV):
        b_dvn = load_rows(p_dv_new, row, n_rows, i_hv, i_v, HV, V, BT, BV)
        b_y = tl.dot(b_xt, b_dvn, input_precision=PRECISION)
        b_do = load_rows(p_do, row, n_rows, i_hv, i_v, HV, V, BT, BV)
        b_vn = load_rows(p_v_new, row, n_rows, i_hv, i_v, HV, V, BT, BV)
        b_dp = tl.dot(b_do, tl.trans(b_vn), acc=b_dp, input_precision=PRECISION)
        b_dbeta += tl.sum(b_y * load_rows(p_v, row, n_rows, i_hv, i_v, HV, V, BT, BV), axis=1)
        store_rows(p_dv, b_y * b_beta[:, None], row, n_rows, i_hv, i_v, HV, V)
        b_y = b_y.to(b_dvn.dtype)
        store_rows(p_y, b_y, row, n_rows, i_hv, i_v, HV, V)
        b_vt = load_rows(p_v_plain, row, n_rows, i_hv, i_v, HV, V, BT, BV)
        b_da = tl.dot(b_y, tl.trans(b_vt), acc=b_da, input_precision=PRECISION)
    m = o_t[:, None] > o_t[None, :]
    store_rows(p_da, tl.where(m, -b_da, 0.0), row, n_rows, i_hv, 0, HV, BT)
    store_rows(p_dp, tl.where(m, b_dp * scale, 0.0), row, n_rows, i_hv, 0, HV, BT)
    b_diagonal = tl.sum(tl.where(o_t[:, None] == o_t[None, :], b_dp, 0.0), axis=1)
    store_scalars(p_dp_diagonal, b_diagonal * scale, row, n_rows, i_hv, HV)
    store_scalars(p_dbeta_v, b_dbeta, row, n_rows, i_hv, HV)


@triton.jit
def kda_channels_backward_kernel(
    p_q,  # [B*T, H, K]
    p_k,  # [B*T, H, K]
    p_gsum,  # [B*T, HV, K] float32, G in base 2
    p_beta,  # [B*T, HV]
    p_h,  # [SLOTS, HV, K, V] codes or values
    p_h_scale,  # [SLOTS, HV, ceil(V / TILE_V)] float32
    p_dh,  # [SLOTS, HV, K, V]
    p_v_new,  # [B*T, HV, V]
    p_do,  # [B*T, HV, V]
    p_y,  # [B*T, HV, V]
    p_da,  # [B*T, HV, 64]
    p_dp,  # [B*T, HV, 64], times scale
    p_dp_diagonal,  # [B*T, HV] float32
    p_chunks,
    p_dq,  # out: [B*T, HV, K], one a value head
    p_dk,  # out: [B*T, HV, K], likewise
    p_dg,  # out: [B*T, HV, K] float32
    p_dbeta_k,  # out: [K / BK, B*T, HV] float32, sums over each block of channels
    scale,
    T,
    NT,
    ROWS,
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
    HARDWARE_FP8: tl.constexpr,
    PRECISION: tl.constexpr,
    APART: tl.constexpr,
):
    pid = tl.program_id(0)
    BLOCKS: tl.constexpr = (K + BK - 1) // BK
    i_block = pid % BLOCKS
    i_k = i_block * BK
    i_c, i_hv = pid // (BLOCKS * HV), (pid // BLOCKS) % HV
    i_h = i_hv // (HV // H)
    row, n_rows, n_stored = locate_chunk(p_chunks, i_c, T, NT, BT, IS_PACKED)
    p_part = p_dbeta_k + i_block.to(tl.int64) * ROWS * HV
    if n_stored <= 0:
        return
    if n_rows <= 0:
        b_zero = tl.zeros([BT, BK], tl.float32)
        store_rows(p_dq, b_zero, row, n_stored, i_hv, i_k, HV, K)
        store_rows(p_dk, b_zero, row, n_stored, i_hv, i_k, HV, K)
        store_rows(p_dg, b_zero, row, n_stored, i_hv, i_k, HV, K)
        store_scalars(p_part, tl.zeros([BT], tl.float32), row, n_stored, i_hv, HV)
        return
    LIMIT: tl.constexpr = block_limit(p_k.dtype.element_ty)
    state = i_c.to(tl.int64) * HV + i_hv
    # Blocks of 2^shift rows, the largest whose decay lets them share an anchor: each doubling saves a level. Gradients
    # depend on later rows anyway, so the choice may look at all of them.
    b_first16, b_last16 = load_block_edges(p_gsum, row, n_rows, i_hv, i_k, HV, K, 16, BT, BK)
    b_first32, b_last32 = load_block_edges(p_gsum, row, n_rows, i_hv, i_k, HV, K, 32, BT, BK)
    b_first64, b_last64 = load_block_edges(p_gsum, row, n_rows, i_hv, i_k, HV, K, 64, BT, BK)
    fits = (least(b_last32 - b_first32) >= -LIMIT).to(tl.int32) + (least(b_last64 - b_first64) >= -LIMIT).to(tl.int32)
    shift = 4 + fits
    too_deep = least(b_last16 - b_first16) < -LIMIT
    if too_deep:
        store_fine: tl.constexpr = store_fine_gradients_apart if APART else store_fine_gradients
        store_fine(
            p_q, p_k, p_gsum, p_beta, p_da, p_dp, p_dq, p_dk, p_dg, p_part, row, n_rows, i_h, i_hv, i_k,
            H, HV, K, BT, BK, PRECISION,
        )  # fmt: skip
        tl.debug_barrier()  # they are read back below
    b_dq = tl.zeros([BT, BK], tl.float32)
    b_zr = tl.zeros([BT, BK], tl.float32)
    b_dk = tl.zeros([BT, BK], tl.float32)
    b_last = tl.zeros([BK], tl.float32)
    for i_v in range(0, V, BV):
        b_h = load_state_block(p_h, p_h_scale, state, i_k, i_v, K, V, BK, BV, STATE_FORMAT, TILE_V, HARDWARE_FP8)
        m_s = state_mask(i_k, i_v, K, V, BK, BV)
        b_dh = tl.load(p_dh + state * K * V + state_offsets(i_k, i_v, V, BK, BV), mask=m_s, other=0.0)
        b_vn = load_rows(p_v_new, row, n_rows, i_hv, i_v, HV, V, BT, BV)
        b_do = load_rows(p_do, row, n_rows, i_hv, i_v, HV, V, BT, BV)
        b_y = load_rows(p_y, row, n_rows, i_hv, i_v, HV, V, BT, BV)
        b_last += tl.sum(b_h.to(tl.float32) * b_dh, axis=1)
        b_ht = tl.trans(b_h.to(b_do.dtype))
        b_dk = tl.dot(b_vn, tl.trans(b_dh), acc=b_dk, input_precision=PRECISION)
        b_dq = tl.dot(b_do, b_ht, acc=b_dq, input_precision=PRECISION)
        b_zr = tl.dot(b_y, b_ht, acc=b_zr, input_precision=PRECISION)
    o_k = i_k + tl.arange(0, BK)
    b_beta = load_scalars(p_beta, row, n_rows, i_hv, HV, BT)
    b_k = load_rows(p_k, row, n_rows, i_h, i_k, H, K, BT, BK)
    b_gsum = load_rows(p_gsum, row, n_rows, i_hv, i_k, HV, K, BT, BK)
    b_gl = tl.load(p_gsum + ((row + n_rows - 1) * HV + i_hv) * K + o_k, mask=o_k < K, other=0.0)
    b_decay = tl.exp2(b_gsum)
    b_dq *= b_decay * scale
    b_zr *= -b_decay
    b_dk *= tl.exp2(b_gl[None, :] - b_gsum)
    b_last = tl.exp2(b_gl) * b_last + tl.sum(b_k * b_dk, axis=0)
    for level in range(shift + too_deep.to(tl.int32), 7):
        is_block = level == shift
        half = tl.where(is_block, 0, (1 << level) >> 1)
        b_anchor = load_anchors(p_gsum, row, n_rows, i_hv, i_k, HV, K, level, half, BT, BK)
        b_gsum = load_rows(p_gsum, row, n_rows, i_hv, i_k, HV, K, BT, BK)
        b_row = row_factor(b_gsum, b_anchor)
        b_column = column_factor(b_row, b_gsum, b_anchor, is_block, LIMIT)
        m = level_mask(half // 16, (1 << level) // 16, BT)
        b_da = load_pairs(p_da, m, row, n_rows, i_hv, HV, BT)
        b_dp = load_pairs(p_dp, m, row, n_rows, i_hv, HV, BT)
        b_q = load_rows(p_q, row, n_rows, i_h, i_k, H, K, BT, BK)
        b_k = load_rows(p_k, row, n_rows, i_h, i_k, H, K, BT, BK)
        b_dq, b_zr, b_dk = add_pair_gradients(
            b_dq, b_zr, b_dk, b_q, b_k, b_beta, b_row, b_column, b_da, b_dp, PRECISION
        )  # fmt: skip
    b_q = load_rows(p_q, row, n_rows, i_h, i_k, H, K, BT, BK)
    b_k = load_rows(p_k, row, n_rows, i_h, i_k, H, K, BT, BK)
    b_dbeta = tl.sum(b_zr * b_k, axis=1)
    b_zr *= b_beta[:, None]
    b_dg = b_q * b_dq + b_k * (b_zr - b_dk)
    b_dk += b_zr
    if too_deep:
        b_dbeta += load_scalars(p_part, row, n_rows, i_hv, HV, BT)
        b_dq += load_rows(p_dq, row, n_rows, i_hv, i_k, HV, K, BT, BK)
        b_dk += load_rows(p_dk, row, n_rows, i_hv, i_k, HV, K, BT, BK)
        b_dg += load_rows(p_dg, row, n_rows, i_hv, i_k, HV, K, BT, BK)
        tl.debug_barrier()  # before they are overwritten
    b_diagonal = load_scalars(p_dp_diagonal, row, n_rows, i_hv, HV, BT)
    b_dq += b_diagonal[:, None] * b_k
    b_dk += b_diagonal[:, None] * b_q
    store_scalars(p_part, b_dbeta, row, n_rows, i_hv, HV)
    store_rows(p_dq, b_dq, row, n_rows, i_hv, i_k, HV, K)
    store_rows(p_dk, b_dk, row, n_rows, i_hv, i_k, HV, K)
    # The state's decay belongs to the last row, hence to every row's sum from below.
    b_dg = sum_rows(b_dg, True, b_k.dtype) + b_last[None, :]
    store_rows(p_dg, b_dg, row, n_rows, i_hv, i_k, HV, K)


@triton.jit
def kda_dbeta_kernel(
    p_dbeta_v,  # [N] float32
    p_dbeta_k,  # [BLOCKS, N] float32
    p_dbeta,  # out: [N]
    N,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds the parts."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m = o < N
    b = tl.load(p_dbeta_v + o, mask=m, other=0.0)
    for i in tl.static_range(BLOCKS):
        b += tl.load(p_dbeta_k + i * N + o, mask=m, other=0.0)
    tl.store(p_dbeta + o, b.to(p_dbeta.dtype.element_ty), mask=m)
