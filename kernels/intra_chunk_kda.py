"""KDA inside one chunk: gate sums, A, its inverse X, P, w and u; and the backward's copy of what the forward dropped.

One program holds one chunk of one value head. The maths is that of `intra_chunk` with a gate a key channel: pairs go
through the levels of `pairs_kda`. A travels through memory, from which the inverse takes blocks in the shapes it needs.
"""

import triton
import triton.language as tl

from jlaqat.kernels.chunk_output import load_codes, load_scales
from jlaqat.kernels.chunks import load_rows, load_scalars, locate_chunk, row_mask, row_offsets, store_rows
from jlaqat.kernels.gates import bound_decay
from jlaqat.kernels.intra_chunk import form_u, form_w
from jlaqat.kernels.pairs_kda import (
    FIRST_FINE,
    LOG2_E,
    block_limit,
    fine_mask,
    least,
    level_mask,
    load_anchors,
    load_block_edges,
    row_factor,
    sum_rows,
)
from jlaqat.kernels.rounding import fake_quantize_rows


@triton.jit
def store_gate_sums(p_g, p_gsum, row, n_rows, i_hv, HV: tl.constexpr, K: tl.constexpr, BT: tl.constexpr,
                    BK: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """G in base 2. Forward and recomputation call this with equal blocks, so that they get equal bits."""
    for i_k in range(0, K, BK):
        b_g = bound_decay(load_rows(p_g, row, n_rows, i_hv, i_k, HV, K, BT, BK))
        store_rows(p_gsum, sum_rows(b_g, False, DTYPE) * LOG2_E, row, n_rows, i_hv, i_k, HV, K)
    tl.debug_barrier()  # they are read back


@triton.jit
def store_decayed(
    p_q, p_k, p_gsum, p_decay, p_qg, p_kg, scale, row, n_rows, i_h, i_hv, state,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Stores scale e^G q, e^(G_L - G) k and e^(G_L); returns e^G k in float32. All channels at once."""
    o_k = tl.arange(0, BK)
    b_gsum = load_rows(p_gsum, row, n_rows, i_hv, 0, HV, K, BT, BK)
    b_last = tl.load(p_gsum + ((row + n_rows - 1) * HV + i_hv) * K + o_k, mask=o_k < K, other=0.0)
    tl.store(p_decay + state * K + o_k, tl.exp2(b_last), mask=o_k < K)
    b_k = load_rows(p_k, row, n_rows, i_h, 0, H, K, BT, BK)
    store_rows(p_kg, b_k * tl.exp2(b_last[None, :] - b_gsum), row, n_rows, i_hv, 0, HV, K)
    b_decay = tl.exp2(b_gsum)
    b_q = load_rows(p_q, row, n_rows, i_h, 0, H, K, BT, BK)
    store_rows(p_qg, b_q * (b_decay * scale), row, n_rows, i_hv, 0, HV, K)
    return b_k * b_decay


@triton.jit
def invert_stored(p_a, row, n_rows, i_hv, HV: tl.constexpr, BT: tl.constexpr, MERGE_PRECISION: tl.constexpr):
    """(I + A)^-1 of A in memory, by exact block merges: those inside 16 rows in TF32x3, a warp each block."""
    LEAVES: tl.constexpr = BT // 16
    o_block = tl.arange(0, LEAVES)[:, None, None]
    o_i = tl.arange(0, 16)[None, :, None]
    o_j = tl.arange(0, 16)[None, None, :]
    p = p_a + (row * HV + i_hv) * BT
    o = (16 * o_block + o_i) * (HV * BT) + 16 * o_block + o_j
    b_a = tl.load(p + o, mask=16 * o_block + o_i < n_rows, other=0.0)
    differ = tl.where(o_i > o_j, o_i ^ o_j, 0)
    # [[D0, 0], [L, D1]]^-1 has -D1 L D0 in its corner, so all corners of a level take two products.
    b_x = tl.where(o_i == o_j, 1.0, 0.0) - tl.where(differ == 1, b_a, 0.0)
    for level in tl.static_range(1, 4):
        b_l = tl.dot(b_x, tl.where((differ >> level) == 1, b_a, 0.0), input_precision="tf32x3")
        b_x -= tl.dot(b_l, b_x, input_precision="tf32x3")
    o_b = tl.arange(0, LEAVES)
    diagonal = o_b[:, None, None, None] == o_b[None, None, :, None]
    b_x = tl.reshape(tl.where(diagonal, b_x[:, :, None, :], 0.0), [BT, BT])
    for level in tl.static_range(1, 3):
        b_l = load_pairs(p_a, level_mask(level, 2 * level, BT), row, n_rows, i_hv, HV, BT)
        b_l = tl.dot(b_x, b_l, input_precision=MERGE_PRECISION)
        b_x -= tl.dot(b_l, b_x, input_precision=MERGE_PRECISION)
    return b_x


@triton.jit
def load_pairs(p, m, row, n_rows, i_hv, HV: tl.constexpr, BT: tl.constexpr):
    """[BT, BT] of p [rows, HV, BT] where m, zero elsewhere."""
    m = m & row_mask(n_rows, 0, BT, BT, BT)
    return tl.load(p + (row * HV + i_hv) * BT + row_offsets(0, BT, HV * BT, BT, BT), mask=m, other=0.0)


@triton.jit
def store_pairs(p, b, m, row, n_rows, i_hv, HV: tl.constexpr):
    """The pairs m of [BT, BT] to p [rows, HV, BT]."""
    BT: tl.constexpr = b.shape[0]
    m = m & row_mask(n_rows, 0, BT, BT, BT)
    tl.store(p + (row * HV + i_hv) * BT + row_offsets(0, BT, HV * BT, BT, BT), b.to(p.dtype.element_ty), mask=m)


@triton.jit
def store_fine_pairs(
    p_q, p_k, p_gsum, p_a, p_p, p_beta, scale, row, n_rows, i_h, i_hv,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, LIMIT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Over level 0's pairs of the rows that decay too much for it: the fine levels."""
    b_least = tl.zeros([BT], tl.float32)
    b_beta = load_scalars(p_beta, row, n_rows, i_hv, HV, BT)
    for i_k in range(0, K, BK):
        b_gsum = load_rows(p_gsum, row, n_rows, i_hv, i_k, HV, K, BT, BK)
        b_anchor = load_anchors(p_gsum, row, n_rows, i_hv, i_k, HV, K, 4, 0, BT, BK)
        b_least = tl.minimum(b_least, tl.min(b_gsum - b_anchor, axis=1))
    m_row = (b_least < -LIMIT)[:, None]
    for done in range(FIRST_FINE + 1):
        level = FIRST_FINE - done
        b_a = tl.zeros([BT, BT], tl.float32)
        b_p = tl.zeros([BT, BT], tl.float32)
        for i_k in range(0, K, BK):
            b_q = load_rows(p_q, row, n_rows, i_h, i_k, H, K, BT, BK)
            b_k = load_rows(p_k, row, n_rows, i_h, i_k, H, K, BT, BK)
            b_gsum = load_rows(p_gsum, row, n_rows, i_hv, i_k, HV, K, BT, BK)
            b_anchor = load_anchors(p_gsum, row, n_rows, i_hv, i_k, HV, K, level, (1 << level) >> 1, BT, BK)
            b_f = row_factor(b_gsum, b_anchor)
            b_kf = (b_k * b_f).to(b_k.dtype)
            b_a = tl.dot(b_kf, tl.trans(b_kf), acc=b_a, input_precision=PRECISION)
            b_p = tl.dot((b_q * b_f).to(b_k.dtype), tl.trans(b_kf), acc=b_p, input_precision=PRECISION)
        m = fine_mask(level, BT) & m_row
        store_pairs(p_a, b_a * b_beta[:, None], m, row, n_rows, i_hv, HV)
        store_pairs(p_p, b_p * scale, m, row, n_rows, i_hv, HV)


# A function of its own in the machine code, so that the usual way gives no registers to it: where APART.
store_fine_pairs_apart = triton.jit(store_fine_pairs.fn, noinline=True)


@triton.jit
def load_at(p, o_row, n_rows, row, i_h, i_k, NH: tl.constexpr, D: tl.constexpr, BK: tl.constexpr):
    """Rows o_row [BLOCKS, M] of the chunk at `row`, columns i_k..i_k+BK: [BLOCKS, M, BK]."""
    o_k = (i_k + tl.arange(0, BK))[None, None, :]
    o_row = o_row[:, :, None]
    return tl.load(p + (row * NH + i_h) * D + o_row * (NH * D) + o_k, mask=(o_row < n_rows) & (o_k < D), other=0.0)


@triton.jit
def add_block_products(
    b_a, b_p, p_q, p_k, p_gsum, row, n_rows, i_h, i_hv, i_k, LEVEL: tl.constexpr,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, LIMIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A / beta and P / scale of one level's blocks [BLOCKS, M, M] with a block of channels added."""
    BLOCKS: tl.constexpr = b_a.shape[0]
    M: tl.constexpr = b_a.shape[1]
    STEP: tl.constexpr = M if LEVEL == 0 else 2 * M
    o_column = tl.arange(0, BLOCKS)[:, None] * STEP + tl.arange(0, M)[None, :]
    o_row = o_column + (STEP - M)
    o_anchor = tl.arange(0, BLOCKS)[:, None] * STEP + (STEP - M)
    b_anchor = load_at(p_gsum, o_anchor, n_rows, row, i_hv, i_k, HV, K, BK)
    b_g = load_at(p_gsum, o_column, n_rows, row, i_hv, i_k, HV, K, BK)
    b_k = load_at(p_k, o_column, n_rows, row, i_h, i_k, H, K, BK)
    b_d = b_anchor - b_g
    if LEVEL == 0:
        b_kc = (b_k * tl.exp2(tl.minimum(b_d, LIMIT))).to(b_k.dtype)
        b_row = tl.exp2(tl.minimum(-b_d, 0.0))
    else:
        b_kc = (b_k * tl.exp2(tl.minimum(b_d, 0.0))).to(b_k.dtype)
        b_g = load_at(p_gsum, o_row, n_rows, row, i_hv, i_k, HV, K, BK)
        b_k = load_at(p_k, o_row, n_rows, row, i_h, i_k, H, K, BK)
        b_row = tl.exp2(tl.minimum(b_g - b_anchor, 0.0))
    b_kr = (b_k * b_row).to(b_k.dtype)
    b_qr = (load_at(p_q, o_row, n_rows, row, i_h, i_k, H, K, BK) * b_row).to(b_k.dtype)
    if BLOCKS == 1:  # a product without a batch shares its rows and columns among all warps
        b_kct = tl.trans(tl.reshape(b_kc, [M, BK]))
        b_a += tl.dot(tl.reshape(b_kr, [M, BK]), b_kct, input_precision=PRECISION)[None, :, :]
        b_p += tl.dot(tl.reshape(b_qr, [M, BK]), b_kct, input_precision=PRECISION)[None, :, :]
    else:
        b_kct = tl.permute(b_kc, [0, 2, 1])
        b_a = tl.dot(b_kr, b_kct, acc=b_a, input_precision=PRECISION)
        b_p = tl.dot(b_qr, b_kct, acc=b_p, input_precision=PRECISION)
    return b_a, b_p


@triton.jit
def store_blocks(
    p_a, p_p, b_a, b_p, p_beta, scale, row, n_rows, i_hv, LEVEL: tl.constexpr, HV: tl.constexpr, BT: tl.constexpr
):
    """A level's blocks to their places; level 0 with zeros above the diagonal of P."""
    BLOCKS: tl.constexpr = b_a.shape[0]
    M: tl.constexpr = b_a.shape[1]
    STEP: tl.constexpr = M if LEVEL == 0 else 2 * M
    o_i = tl.arange(0, M)
    o_block = tl.arange(0, BLOCKS) * STEP
    o_row = (o_block[:, None] + o_i[None, :] + (STEP - M))[:, :, None]
    o_column = (o_block[:, None] + o_i[None, :])[:, None, :]
    b_beta = tl.load(p_beta + row * HV + i_hv + o_row * HV, mask=o_row < n_rows, other=0.0).to(tl.float32)
    b_p *= scale
    if LEVEL == 0:
        b_p = tl.where(o_i[None, :, None] >= o_i[None, None, :], b_p, 0.0)
    o = (row * HV + i_hv) * BT + o_row * (HV * BT) + o_column
    tl.store(p_a + o, b_a * b_beta, mask=o_row < n_rows)
    tl.store(p_p + o, b_p.to(p_p.dtype.element_ty), mask=o_row < n_rows)


@triton.jit
def store_block_pairs(
    p_q, p_k, p_gsum, p_a, p_p, p_beta, scale, row, n_rows, i_h, i_hv, depth,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BKF: tl.constexpr,
    LIMIT: tl.constexpr, PRECISION: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """P, zeros above the diagonal included, and A below it (elsewhere p_a is left undefined)."""
    b_a0 = tl.zeros([4, 16, 16], tl.float32)
    b_p0 = tl.zeros([4, 16, 16], tl.float32)
    b_a1 = tl.zeros([2, 16, 16], tl.float32)
    b_p1 = tl.zeros([2, 16, 16], tl.float32)
    b_a2 = tl.zeros([1, 32, 32], tl.float32)
    b_p2 = tl.zeros([1, 32, 32], tl.float32)
    for i_k in range(0, K, BK):
        b_a0, b_p0 = add_block_products(
            b_a0, b_p0, p_q, p_k, p_gsum, row, n_rows, i_h, i_hv, i_k, 0, H, HV, K, BK, LIMIT, PRECISION
        )
        b_a1, b_p1 = add_block_products(
            b_a1, b_p1, p_q, p_k, p_gsum, row, n_rows, i_h, i_hv, i_k, 1, H, HV, K, BK, LIMIT, PRECISION
        )
        b_a2, b_p2 = add_block_products(
            b_a2, b_p2, p_q, p_k, p_gsum, row, n_rows, i_h, i_hv, i_k, 2, H, HV, K, BK, LIMIT, PRECISION
        )
    store_blocks(p_a, p_p, b_a0, b_p0, p_beta, scale, row, n_rows, i_hv, 0, HV, BT)
    store_blocks(p_a, p_p, b_a1, b_p1, p_beta, scale, row, n_rows, i_hv, 1, HV, BT)
    store_blocks(p_a, p_p, b_a2, b_p2, p_beta, scale, row, n_rows, i_hv, 2, HV, BT)
    o_block = tl.arange(0, BT) // 16
    store_pairs(p_p, tl.zeros([BT, BT], tl.float32), o_block[:, None] < o_block[None, :], row, n_rows, i_hv, HV)
    if depth < -LIMIT:
        tl.debug_barrier()  # other threads may have stored what is stored again
        store_fine: tl.constexpr = store_fine_pairs_apart if APART else store_fine_pairs
        store_fine(
            p_q, p_k, p_gsum, p_a, p_p, p_beta, scale, row, n_rows, i_h, i_hv, H, HV, K, BT, BKF, LIMIT, PRECISION
        )  # fmt: skip


@triton.jit
def kda_pairs_kernel(
    p_q,  # [B*T, H, K]
    p_k,  # [B*T, H, K]
    p_g,  # [B*T, HV, K] float32
    p_beta,  # [B*T, HV]
    p_chunks,  # [SLOTS, 3]
    p_gsum,  # out: [B*T, HV, K] float32, G in base 2
    p_a,  # out: [B*T, HV, 64] float32, A below the diagonal, undefined elsewhere
    p_p,  # out: [B*T, HV, 64], P, zeros above the diagonal included
    scale,
    T,
    NT,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BKG: tl.constexpr,
    IS_PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    APART: tl.constexpr,
):
    pid = tl.program_id(0)
    i_c, i_hv = pid // HV, pid % HV
    i_h = i_hv // (HV // H)
    row, n_rows, _ = locate_chunk(p_chunks, i_c, T, NT, BT, IS_PACKED)
    if n_rows <= 0:
        return
    LIMIT: tl.constexpr = block_limit(p_k.dtype.element_ty)
    store_gate_sums(p_g, p_gsum, row, n_rows, i_hv, HV, K, BT, BKG, p_k.dtype.element_ty)
    depth = 0.0
    for i_k in range(0, K, BKG):
        b_first, b_last = load_block_edges(p_gsum, row, n_rows, i_hv, i_k, HV, K, 16, BT, BKG)
        depth = tl.minimum(depth, least(b_last - b_first))
    store_block_pairs(
        p_q, p_k, p_gsum, p_a, p_p, p_beta, scale, row, n_rows, i_h, i_hv, depth, H, HV, K, BT, BK, BKG, LIMIT,
        PRECISION, APART,
    )  # fmt: skip


@triton.jit
def kda_wy_kernel(
    p_q,  # [B*T, H, K]
    p_k,  # [B*T, H, K]
    p_v,  # [B*T, HV, V]
    p_gsum,  # [B*T, HV, K] float32, G in base 2
    p_beta,  # [B*T, HV]
    p_a,  # [B*T, HV, 64] float32
    p_chunks,  # [SLOTS, 3]
    p_decay,  # out: [SLOTS, HV, K] float32, e^(G_L)
    p_qg,  # out: [B*T, HV, K], scale e^G q
    p_kg,  # out: [B*T, HV, K], e^(G_L - G) k
    p_x,  # out: [B*T, HV, 64]
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
    BV: tl.constexpr,
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
    state = i_c.to(tl.int64) * HV + i_hv
    b_x = invert_stored(p_a, row, n_rows, i_hv, HV, BT, MERGE_PRECISION).to(p_k.dtype.element_ty)
    if SAVE_X:
        store_rows(p_x, b_x, row, n_rows, i_hv, 0, HV, BT)
    b_beta = load_scalars(p_beta, row, n_rows, i_hv, HV, BT)
    for i_v in range(0, V, BV):
        b_v = load_rows(p_v, row, n_rows, i_hv, i_v, HV, V, BT, BV)
        store_rows(p_u, form_u(b_x, b_v, b_beta, PRECISION), row, n_rows, i_hv, i_v, HV, V)
    b_k = store_decayed(
        p_q, p_k, p_gsum, p_decay, p_qg, p_kg, scale, row, n_rows, i_h, i_hv, state, H, HV, K, BT, BK
    )  # fmt: skip
    store_rows(p_w, form_w(b_x, b_k, b_beta, W_FORMAT, HARDWARE_FP8, PRECISION), row, n_rows, i_hv, 0, HV, K)


@triton.jit
def kda_recompute_kernel(
    p_q,
    p_k,
    p_v,
    p_g,
    p_beta,
    p_x,  # [B*T, HV, 64]
    p_h,  # [SLOTS, HV, K, V] the states that enter the chunks, codes or values
    p_h_scale,  # [SLOTS, HV, ceil(V / TILE_V)] float32
    p_chunks,
    p_gsum,  # out: as in the forward
    p_decay,  # out
    p_qg,  # out
    p_kg,  # out
    p_w,  # out: [B*T, HV, K]
    p_u,  # out: [B*T, HV, V], u, or v' where the states are known
    p_v_plain,  # out, with states and a rounded w: [B*T, HV, V], v' of the unrounded w
    scale,
    T,
    NT,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BKG: tl.constexpr,
    BV: tl.constexpr,
    IS_PACKED: tl.constexpr,
    HAS_STATES: tl.constexpr,
    STATE_FORMAT: tl.constexpr,
    TILE_V: tl.constexpr,
    W_FORMAT: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The backward's own copy of G, w, u or v' and the decayed q and k, bit for bit."""
    pid = tl.program_id(0)
    i_c, i_hv = pid // HV, pid % HV
    i_h = i_hv // (HV // H)
    row, n_rows, _ = locate_chunk(p_chunks, i_c, T, NT, BT, IS_PACKED)
    if n_rows <= 0:
        return
    state = i_c.to(tl.int64) * HV + i_hv
    store_gate_sums(p_g, p_gsum, row, n_rows, i_hv, HV, K, BT, BKG, p_k.dtype.element_ty)
    b_beta = load_scalars(p_beta, row, n_rows, i_hv, HV, BT)
    b_x = load_rows(p_x, row, n_rows, i_hv, 0, HV, BT, BT, BT)
    b_k = store_decayed(
        p_q, p_k, p_gsum, p_decay, p_qg, p_kg, scale, row, n_rows, i_h, i_hv, state, H, HV, K, BT, BK
    )  # fmt: skip
    b_w_plain = tl.dot(b_x, (b_k * b_beta[:, None]).to(b_x.dtype), input_precision=PRECISION)
    b_w = b_w_plain
    if W_FORMAT != "none":
        b_w = fake_quantize_rows(b_w_plain, W_FORMAT, HARDWARE_FP8)
    b_w = b_w.to(b_x.dtype)
    store_rows(p_w, b_w, row, n_rows, i_hv, 0, HV, K)
    for i_v in range(0, V, BV):
        b_v = load_rows(p_v, row, n_rows, i_hv, i_v, HV, V, BT, BV)
        b_u = form_u(b_x, b_v, b_beta, PRECISION)
        if HAS_STATES:
            # The forward reads u back in the inputs' dtype.
            b_u = b_u.to(b_x.dtype).to(tl.float32)
            b_code = load_codes(p_h, state, 0, i_v, K, V, BK, BV, STATE_FORMAT, HARDWARE_FP8).to(b_x.dtype)
            b_s = load_scales(p_h_scale, state, i_v, V, BV, STATE_FORMAT, TILE_V)[None, :]
            if W_FORMAT != "none":
                b_plain = b_u - tl.dot(b_w_plain.to(b_x.dtype), b_code, input_precision=PRECISION) * b_s
                store_rows(p_v_plain, b_plain, row, n_rows, i_hv, i_v, HV, V)
            b_u -= tl.dot(b_w, b_code, input_precision=PRECISION) * b_s
        store_rows(p_u, b_u, row, n_rows, i_hv, i_v, HV, V)
