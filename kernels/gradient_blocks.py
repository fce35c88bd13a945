"""The gradient of a recurrence's state by blocks of 16 tokens: the first two launches of a backward of token mode.

The gradient goes straight through every rounding, so its recurrence knows none and is linear. With D_t the gradient of
the state after token t, and G that of the state after a block's last token L,

    D_t = e^(b_L-b_t) G + sum_{s>=t} e^(b_s-b_t) q_s do_s^T - sum_{s>t} e^(b_s-b_t) k_s dv_s^T
    dv_t = beta_t du_t,  du_t = D_t^T k_t

where b sums log decays within the block (KDA has a sum for each key) and q is scaled. Read as equations for a block's
du, these are 16 of them, upper triangular, for every column of the state:

    (I + M_k beta) du = (e^(b_L-b) k) G + M_q do,    M_x[t, s] = k_t . x_s e^(b_s-b_t), s >= t (M_q) or s > t (M_k)

What of that no column knows, X = (I + M_k beta)^-1 and X M_q, is found for all blocks at once (`solve_blocks_kernel`).
Then a program walks the blocks of its columns, last first (`gradient_states_kernel`), and keeps every G for
`token_blocks.py`, which does the rest. q, k and do are bfloat16; what is not is multiplied in two parts of it
(`split_products.py`), 16 bits.
"""

import triton
import triton.language as tl

from jlaqat.kernels.split_products import apart, multiply, side_by_side, times, times_exact, times_parts, two_parts
from jlaqat.kernels.token_operands import locate_program, rows_of

BLOCK = 16  # tokens of a block
TOKENS = tl.constexpr(BLOCK)


@triton.jit
def load_rows(p_x, row, m_t, i_head, HEADS: tl.constexpr, W: tl.constexpr, BW: tl.constexpr, first=0):
    """[TOKENS, BW] of [rows, HEADS, W], columns from `first` on; zero outside."""
    o = first + tl.arange(0, BW)
    p = p_x + ((row + tl.arange(0, TOKENS)) * HEADS + i_head)[:, None] * W + o[None, :]
    return tl.load(p, mask=m_t[:, None] & (o < W)[None, :], other=0.0)


@triton.jit
def load_numbers(p_x, row, m_t, i_head, HEADS: tl.constexpr):
    """[TOKENS] float32 of [rows, HEADS]; zero outside."""
    return tl.load(p_x + (row + tl.arange(0, TOKENS)) * HEADS + i_head, mask=m_t, other=0.0).to(tl.float32)


@triton.jit
def load_decays(p_g, row, m_t, i_hv, i_k, HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, IS_KDA: tl.constexpr):
    """(b, the block's sum): [TOKENS, BK] and [BK] for KDA, keys from i_k on, otherwise [TOKENS, 1] and a number."""
    if IS_KDA:
        b_g = _bound(load_rows(p_g, row, m_t, i_hv, HV, K, BK, i_k))
        return tl.cumsum(b_g, axis=0), tl.sum(b_g, axis=0)
    else:
        b_g = _bound(load_numbers(p_g, row, m_t, i_hv, HV))
        return tl.cumsum(b_g, axis=0)[:, None], tl.sum(b_g, axis=0)


@triton.jit
def _bound(b_g):
    """Differences of -inf would be NaN; e^-128 is zero already."""
    return tl.where(b_g < -128.0, -128.0, b_g)


@triton.jit
def pairs_between_halves(b_q, b_k, b_b, HALF: tl.constexpr):
    """(k_t . q_s, k_t . k_s), decayed from t to s, for t in the first half of 2 HALF tokens and s in the second.

    By way of the decay up to the first half's end, so that both factors of a decay are at most 1.
    """
    BK: tl.constexpr = b_k.shape[1]
    b_groups = tl.reshape(b_b, [TOKENS // (2 * HALF), 2 * HALF, BK])
    is_end = (tl.arange(0, 2 * HALF) == HALF - 1)[None, :, None]
    b_groups -= tl.sum(tl.where(is_end, b_groups, 0.0), axis=1, keep_dims=True)
    b_factor = tl.exp(-tl.abs(tl.reshape(b_groups, [TOKENS, BK])))
    b_kd = b_k * b_factor
    o_t, o_s = tl.arange(0, TOKENS)[:, None], tl.arange(0, TOKENS)[None, :]
    m = (o_t // (2 * HALF) == o_s // (2 * HALF)) & (o_t // HALF < o_s // HALF)
    b_kq, b_kk = apart(times(b_kd, two_parts(side_by_side(tl.trans(b_q * b_factor), tl.trans(b_kd))), 2))
    return tl.where(m, b_kq, 0.0), tl.where(m, b_kk, 0.0)


@triton.jit
def solve_blocks_kernel(
    p_q,  # [B, T, H, K]
    p_k,  # [B, T, H, K]
    p_g,  # [B, T, HV] or [B, T, HV, K] float32
    p_beta,  # [B, T, HV]
    p_first,  # [N] int32, see `rows_of`
    p_count,
    p_solved,  # out: [N, BLOCKS, HV, 2, 16, 16] float32: X and X M_q, see above
    scale,
    T,
    PER_ROW,
    BLOCKS,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,  # keys at a time
    IS_KDA: tl.constexpr,
    RAGGED: tl.constexpr,
):
    pid = tl.program_id(0)
    i_hv, block = pid % HV, (pid // HV).to(tl.int64)
    i_h, i_n = i_hv // (HV // H), block // BLOCKS
    i_b, first, count = rows_of(p_first, p_count, i_n, T, PER_ROW, RAGGED)
    o_t = tl.arange(0, TOKENS)
    begin = (block % BLOCKS).to(tl.int32) * TOKENS
    m_t = begin + o_t < count
    row = i_b * T + first + begin
    b_mq = tl.zeros([TOKENS, TOKENS], tl.float32)
    b_mk = tl.zeros([TOKENS, TOKENS], tl.float32)
    for i_k in range(0, K, BK):
        q = load_rows(p_q, row, m_t, i_h, H, K, BK, i_k)
        k = load_rows(p_k, row, m_t, i_h, H, K, BK, i_k)
        if IS_KDA:
            b_b, _ = load_decays(p_g, row, m_t, i_hv, i_k, HV, K, BK, IS_KDA)
            b_q, b_k = q.to(tl.float32), k.to(tl.float32)
            b_mq += tl.where(o_t[:, None] == o_t[None, :], tl.sum(b_k * b_q, axis=1)[:, None], 0.0)
            for half in tl.static_range(4):
                b_kq, b_kk = pairs_between_halves(b_q, b_k, b_b, 1 << half)
                b_mq, b_mk = b_mq + b_kq, b_mk + b_kk
        else:
            b_mq += multiply(k, tl.trans(q))
            b_mk += multiply(k, tl.trans(k))
    if not IS_KDA:
        b_b, _ = load_decays(p_g, row, m_t, i_hv, 0, HV, K, BK, IS_KDA)
        b_log = tl.reshape(b_b, [TOKENS])
        b_decay = tl.exp(tl.minimum(b_log[None, :] - b_log[:, None], 0.0))
        b_mq, b_mk = b_mq * b_decay, b_mk * b_decay
    b_mq = tl.where(o_t[:, None] <= o_t[None, :], b_mq * scale, 0.0)
    b_beta = load_numbers(p_beta, row, m_t, i_hv, HV)
    b_mk = tl.where(o_t[:, None] < o_t[None, :], b_mk * b_beta[None, :], 0.0)
    b_x = tl.where(o_t[:, None] == o_t[None, :], 1.0, 0.0)
    for back in range(1, TOKENS):
        is_row = (o_t == TOKENS - 1 - back)[:, None]
        b_row = tl.sum(tl.where(is_row, b_mk, 0.0), axis=0)
        b_x = tl.where(is_row, b_x - tl.sum(b_row[:, None] * b_x, axis=0)[None, :], b_x)
    o = (block * HV + i_hv) * (2 * TOKENS * TOKENS) + o_t[:, None] * TOKENS + o_t[None, :]
    tl.store(p_solved + o, b_x)
    tl.store(p_solved + TOKENS * TOKENS + o, times(b_x, two_parts(b_mq), 2))


@triton.jit
def gradient_states_kernel(
    p_q,  # as `solve_blocks_kernel` has them
    p_k,
    p_g,
    p_beta,
    p_first,
    p_count,
    p_solved,
    p_do,  # [B, T, HV, V]
    p_ds,  # [N, HV, K, V] float32, gradient of the states that leave
    p_dv,  # out: [B, T, HV, V]; rows of tokens that no sequence has are not written. With OWN_ROWS [N, LENGTH, ...]
    p_du,  # out: the same in float32, dv / beta
    p_g_last,  # out: [N, BLOCKS, HV, K, V] float32, G of every block that has tokens
    p_ds_in,  # out: [N, HV, K, V] float32, gradient of the states that enter
    scale,
    T,
    PER_ROW,
    LENGTH,
    BLOCKS,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    IS_KDA: tl.constexpr,
    RAGGED: tl.constexpr,
    OWN_ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    i_v, i_hv, i_n, i_h = locate_program(H, HV, V, BV)
    i_b, first, count = rows_of(p_first, p_count, i_n, T, PER_ROW, RAGGED)
    o_k, o_t = tl.arange(0, BK), tl.arange(0, TOKENS)
    o_v = i_v + tl.arange(0, BV)
    m_s = (o_v < V)[:, None] & (o_k < K)[None, :]
    o_s = o_k[None, :] * V + o_v[:, None]
    b_ds = tl.load(p_ds + (i_n * HV + i_hv) * K * V + o_s, mask=m_s, other=0.0)  # transposed: [BV, BK]
    o_x = o_t[None, :] * TOKENS + o_t[:, None]
    blocks = tl.cdiv(count, TOKENS)
    for back in tl.range(0, blocks, num_stages=STAGES):
        block = i_n * BLOCKS + blocks - 1 - back
        begin = (blocks - 1 - back) * TOKENS
        m_t = begin + o_t < count
        row = i_b * T + first + begin
        own = (i_n * LENGTH + begin if OWN_ROWS else row) + o_t
        p_x = p_solved + (block * HV + i_hv) * (2 * TOKENS * TOKENS) + o_x
        q = load_rows(p_q, row, m_t, i_h, H, K, BK)
        k = load_rows(p_k, row, m_t, i_h, H, K, BK)
        do = tl.trans(load_rows(p_do, row, m_t, i_hv, HV, V, BV, i_v))  # [BV, TOKENS], as all that follows
        b_x, b_xq = tl.load(p_x), tl.load(p_x + TOKENS * TOKENS)  # transposed
        b_beta = load_numbers(p_beta, row, m_t, i_hv, HV)
        b_b, b_all = load_decays(p_g, row, m_t, i_hv, 0, HV, K, BK, IS_KDA)
        tl.store(p_g_last + (block * HV + i_hv) * K * V + o_s, b_ds, mask=m_s)
        if IS_KDA:
            b_kg = times(b_ds, two_parts(tl.trans(k.to(tl.float32) * tl.exp(b_all[None, :] - b_b))), 2)
        else:
            b_log = tl.reshape(b_b, [TOKENS])
            b_kg = times_exact(b_ds, tl.trans(k), 2) * tl.exp(b_all - b_log)[None, :]
        b_du = times(b_kg, two_parts(b_x), 2) + times(do, two_parts(b_xq), 1)
        b_dv = b_beta[None, :] * b_du
        o_own = (own * HV + i_hv)[None, :] * V + o_v[:, None]
        m_own = m_t[None, :] & (o_v < V)[:, None]
        tl.store(p_dv + o_own, b_dv.to(p_dv.dtype.element_ty), mask=m_own)
        tl.store(p_du + o_own, b_du, mask=m_own)
        if IS_KDA:
            b_until = tl.exp(b_b)
            b_ds *= tl.exp(b_all)[None, :]
            b_ds += times_parts(do, q.to(tl.float32) * (b_until * scale))
            b_ds -= times_parts(b_dv, k.to(tl.float32) * b_until)
        else:
            b_until = tl.exp(b_log)[None, :]
            b_ds *= tl.exp(b_all)
            b_ds += times_exact(do.to(tl.float32) * (b_until * scale), q, 2)
            b_ds -= times_exact(b_dv * b_until, k, 2)
    tl.store(p_ds_in + (i_n * HV + i_hv) * K * V + o_s, b_ds, mask=m_s)
