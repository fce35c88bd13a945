"""Gradients of q, k, gates and beta in token mode by blocks of 16 tokens: the last launch, after `gradient_blocks.py`.

With Ŝ the state before token t as it was kept, R = e^(g_t) Ŝ, and D, G, du, dv and b as `gradient_blocks.py` has them,

    dq_t = scale (R do_t + k_t (update_t . do_t)), or scale Ŝ do_t of the state after it, if o is read from that
    dk_t = D_t update_t - R dv_t
    dg_t = e^(g_t) sum(e^(b_L-b_t) Ŝ∘G + sum_{s>=t} e^(b_s-b_t) (q_s∘(Ŝ do_s) - k_s∘(Ŝ dv_s)))
    dbeta_t = du_t . (v_t - R^T k_t)

(for KDA a sum over values for each key). So all that a token wants of Ŝ are products with do and dv of its block's
later tokens, one product of matrices, and with the elements of G. Nothing waits for the token before. D_t update_t is a
product of matrices for a block of GDN; KDA's, with decays of its own for each key, is summed up token by token.

The forward's states are multiplied as float16: codes and do are exact in it, dv has 11 bits, as TF32 has, with a power
of two taken out of every token's, and so has a state with several scales along a program's columns.
"""

import triton
import triton.language as tl

from jlaqat.kernels.fragments import as_operand, as_product, keys_in_order_of_loads, row_sums, values_in_order
from jlaqat.kernels.gradient_blocks import TOKENS, load_decays, load_numbers, load_rows
from jlaqat.kernels.rounding import decode
from jlaqat.kernels.split_products import apart, power_of_two_below, side_by_side, times, to_float16, two_parts
from jlaqat.kernels.token_operands import rows_of


@triton.jit
def apply_scales(
    b_code,  # [BK, BV] float32, as `as_operand` has it
    p_scale,
    state,
    o_k,
    i_v,
    K: tl.constexpr,
    V: tl.constexpr,
    GRANULARITY: tl.constexpr,
    GROUP: tl.constexpr,
):
    """(s / unit, unit [BK]) of the state that codes stand for, where several scales are along its columns.

    A unit is a power of two, so that a row's values are at most twice a code and fit float16.
    """
    BK: tl.constexpr = b_code.shape[0]
    BV: tl.constexpr = b_code.shape[1]
    if GRANULARITY == "value_row":
        o_v = i_v + tl.arange(0, BV)
        b_scale = tl.load(p_scale + state * V + o_v, mask=o_v < V, other=0.0)[None, :]
        unit, factor = power_of_two_below(tl.max(b_scale, axis=1))
        b_s = b_code * values_in_order(b_scale * factor[:, None])
    else:
        GROUPS: tl.constexpr = (V + GROUP - 1) // GROUP
        RUN: tl.constexpr = BV // 4
        i_group = (i_v + tl.arange(0, 4) * RUN) // GROUP
        if GRANULARITY == "tile":
            b_scale = tl.load(p_scale + state * GROUPS + i_group, mask=i_group < GROUPS, other=0.0)[None, :]
        else:
            p = p_scale + (state * K + o_k)[:, None] * GROUPS + i_group[None, :]
            b_scale = tl.load(p, mask=(o_k < K)[:, None] & (i_group < GROUPS)[None, :], other=0.0)
        unit, factor = power_of_two_below(tl.max(b_scale, axis=1))
        b_scale = (b_scale * factor[:, None])[:, None, :, None]
        b_s = tl.reshape(tl.reshape(b_code, [BK, RUN // 2, 4, 2]) * b_scale, [BK, BV])
    return b_s, tl.broadcast_to(unit, [BK])


@triton.jit
def load_scales_of_block(
    p_scale,  # one pointer or [TOKENS]
    state,  # [TOKENS] int64, states' numbers
    m_t,
    o_k,
    i_v,
    K: tl.constexpr,
    V: tl.constexpr,
    GRANULARITY: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Scales of the columns from i_v on, which share one: [1, TOKENS] by tile, [BK, TOKENS] by key_row."""
    GROUPS: tl.constexpr = (V + GROUP - 1) // GROUP
    if GRANULARITY == "tile":
        return tl.load(p_scale + state * GROUPS + i_v // GROUP, mask=m_t, other=0.0)[None, :]
    else:
        p = p_scale + state * (K * GROUPS) + i_v // GROUP
        return tl.load(p[None, :] + o_k[:, None] * GROUPS, mask=m_t[None, :] & (o_k < K)[:, None], other=0.0)


@triton.jit
def token_blocks_kernel(
    p_q,  # as `gradient_states_kernel` has them, for all of these
    p_k,
    p_g,
    p_beta,
    p_values,  # [N, HV, K, V], the states that enter, and their scales
    p_scale,
    p_first,
    p_count,
    p_saved,  # [B, T, HV, K, V] or (OWN_ROWS) [N, LENGTH, HV, K, V], the states after every token, and their scales
    p_saved_scale,
    p_error,  # [B, T, HV, V] float32, as the forward wrote it
    p_do,
    p_du,
    p_g_last,
    p_rows,  # scratch of KDA: [programs, 2, 16, 16] float32
    p_dq,  # out: [B, T, HV * PROGRAMS_V, K] float32, a part a program, of a value head's q; rows of tokens that no
    p_dk,  # sequence has are not written. out: the same. With OWN_ROWS all four are [N, LENGTH, ...]
    p_dg,  # out: [B, T, HV * PROGRAMS_V * PROGRAMS_K] or [B, T, HV * PROGRAMS_V, K] float32
    p_dbeta,  # out: [B, T, HV * PROGRAMS_V] float32
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
    FORMAT: tl.constexpr,
    GRANULARITY: tl.constexpr,
    READ_STORED: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
    GROUP: tl.constexpr,  # columns that share a scale; any number by value_row
    WARPS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A program has a block of one sequence and value head, and BK keys and BV values of its states."""
    PROGRAMS_K: tl.constexpr = (K + BK - 1) // BK
    PROGRAMS_V: tl.constexpr = (V + BV - 1) // BV
    ONE_SCALE: tl.constexpr = GRANULARITY != "value_row" and GROUP >= BV  # for all of a program's values
    pid = tl.program_id(0)
    i_k, part = pid % PROGRAMS_K * BK, pid // PROGRAMS_K % (PROGRAMS_V * HV)
    i_v, i_hv, i_h = part % PROGRAMS_V * BV, part // PROGRAMS_V, part // PROGRAMS_V // (HV // H)
    block = (pid // (PROGRAMS_K * PROGRAMS_V * HV)).to(tl.int64)
    i_n = block // BLOCKS
    i_b, first, count = rows_of(p_first, p_count, i_n, T, PER_ROW, RAGGED)
    begin = (block % BLOCKS).to(tl.int32) * TOKENS
    inside = tl.minimum(count - begin, TOKENS)
    o_k, o_t = i_k + tl.arange(0, BK), tl.arange(0, TOKENS)
    o_v = i_v + tl.arange(0, BV)
    m_t = o_t < inside
    row = i_b * T + first + begin
    own = i_n * LENGTH + begin if OWN_ROWS else row

    # All loads first.
    q = load_rows(p_q, row, m_t, i_h, H, K, BK, i_k)
    k = load_rows(p_k, row, m_t, i_h, H, K, BK, i_k)
    do = load_rows(p_do, row, m_t, i_hv, HV, V, BV, i_v)  # [TOKENS, BV]
    b_du = load_rows(p_du, own, m_t, i_hv, HV, V, BV, i_v)
    b_error = load_rows(p_error, row, m_t, i_hv, HV, V, BV, i_v)
    b_beta = load_numbers(p_beta, row, m_t, i_hv, HV)
    b_b, b_all = load_decays(p_g, row, m_t, i_hv, i_k, HV, K, BK, IS_KDA)
    o_row = i_k + keys_in_order_of_loads(BK, WARPS)
    m_s = (o_row < K)[:, None] & (o_v < V)[None, :]
    p_last = p_g_last + (block * HV + i_hv) * K * V + o_row[:, None] * V + o_v[None, :]
    b_last = as_operand(tl.load(p_last, mask=m_s & (inside > 0), other=0.0), WARPS)

    o_part = (own + o_t) * (HV * PROGRAMS_V) + part
    tl.store(p_dbeta + o_part, tl.sum(b_du * b_error, axis=1), mask=m_t & (i_k == 0))
    b_q, b_k = as_product(q) * scale, as_product(k)  # [BK, TOKENS]
    b_do = values_in_order(do.to(tl.float32))
    b_dv = values_in_order(b_beta[:, None] * b_du)
    b_update = two_parts(tl.trans(values_in_order(b_beta[:, None] * b_error)))  # [BV, 2 TOKENS]
    b_do_short, b_do_unit = to_float16(b_do)
    b_dv_short, b_dv_unit = to_float16(b_dv)
    b_both = side_by_side(tl.trans(b_do_short), tl.trans(b_dv_short))  # [BV, 2 TOKENS]
    b_dw = times(b_last, b_update, 2)  # [BK, TOKENS], G update_t
    b_do_update = times(b_do, b_update, 1)  # [s, t]
    b_dv_update = times(b_dv, b_update, 2)
    b_read = tl.sum(tl.where(o_t[:, None] == o_t[None, :], b_do_update, 0.0), axis=0)
    b_do_update = tl.where(o_t[:, None] >= o_t[None, :], b_do_update, 0.0)
    b_dv_update = tl.where(o_t[:, None] > o_t[None, :], b_dv_update, 0.0)
    if IS_KDA:
        b_dw *= tl.trans(tl.exp(b_all[None, :] - b_b))
        p_row = p_rows + pid.to(tl.int64) * (2 * TOKENS * TOKENS)
        tl.store(p_row + o_t[None, :] * TOKENS + o_t[:, None], b_do_update)
        tl.store(p_row + TOKENS * TOKENS + o_t[None, :] * TOKENS + o_t[:, None], b_dv_update)
        tl.debug_barrier()
    else:
        b_log = tl.reshape(b_b, [TOKENS])
        b_decay = tl.exp(tl.minimum(b_log[:, None] - b_log[None, :], 0.0))
        b_dw = b_dw * tl.exp(b_all - b_log)[None, :]
        b_dw += times(tl.trans(q), two_parts(b_do_update * b_decay), 1) * scale
        b_dw -= times(tl.trans(k), two_parts(b_dv_update * b_decay), 1)

    b_q_read, b_k_read = b_q * b_do_unit[None, :], b_k * b_dv_unit[None, :]
    # From the last token on. b_since: decay from the token to those after it, zero of those before.
    b_dq = tl.zeros([BK, TOKENS], tl.float32)
    b_rdv = tl.zeros([BK, TOKENS], tl.float32)
    b_dg = tl.zeros([BK, TOKENS], tl.float32)
    LATER: tl.constexpr = 1 if READ_STORED else 0  # one state more: the last token's o was read after its rounding
    if IS_KDA:
        b_since = tl.zeros([BK, TOKENS], tl.float32)
        b_until_last = tl.full([BK], 1.0, tl.float32)
    else:
        b_decays = tl.exp(load_numbers(p_g, row, m_t, i_hv, HV))[None, :]
    for back in tl.range(0, tl.maximum(inside + LATER, 0), num_stages=STAGES):
        i = inside - 1 + LATER - back
        entering = begin + i == 0
        state = tl.where(entering, i_n, own + i - 1) * HV + i_hv
        p_before = tl.where(entering, p_values, p_saved)
        p = p_before + state * K * V + o_row[:, None] * V + tl.max_contiguous(o_v, BV // 4)[None, :]
        b_code = decode(as_operand(tl.load(p, mask=m_s, other=0), WARPS), FORMAT, HARDWARE_FP8)
        if ONE_SCALE:
            b_sdo, b_sdv = apart(tl.dot(b_code.to(tl.float16), b_both))
            b_sg = row_sums(b_code, b_last)
        else:
            p_before_scale = tl.where(entering, p_scale, p_saved_scale)
            b_s, b_unit = apply_scales(b_code, p_before_scale, state, o_k, i_v, K, V, GRANULARITY, GROUP)
            b_sdo, b_sdv = apart(tl.dot(b_s.to(tl.float16), b_both) * b_unit[:, None])
            b_sg = row_sums(b_s, b_last) * b_unit
        column = (o_t == i)[None, :]
        b_dq = tl.where((o_t == i - LATER)[None, :], b_sdo, b_dq)
        b_rdv = tl.where(column, b_sdv, b_rdv)
        b_later = tl.fma(b_q_read, b_sdo, -b_k_read * b_sdv)
        if IS_KDA:
            b_since = tl.where(column, 1.0, b_since)
            b_dg_row = b_sg * b_until_last + row_sums(b_later, b_since)
            o_later = p_row + i * TOKENS + o_t
            b_do_row = tl.load(o_later, mask=m_t & (i < inside), other=0.0)
            b_dv_row = tl.load(o_later + TOKENS * TOKENS, mask=m_t & (i < inside), other=0.0)
            b_sum = tl.fma(b_q, tl.broadcast_to(b_do_row[None, :], b_q.shape), -b_k * b_dv_row[None, :])
            b_dw = tl.where(column, b_dw + row_sums(b_sum, b_since)[:, None], b_dw)
            o_g = ((row + i) * HV + i_hv) * K + o_k
            decay = tl.exp(tl.load(p_g + o_g, mask=(o_k < K) & (i < inside), other=0.0))
            b_since *= decay[:, None]
            b_until_last *= decay
        else:
            log = tl.sum(tl.where(o_t == i, b_log, 0.0), axis=0)
            b_since = tl.where(o_t >= i, tl.exp(tl.minimum(b_log - log, 0.0)), 0.0)
            b_dg_row = b_sg * tl.exp(b_all - log)
            b_dg_row += row_sums(b_later, tl.broadcast_to(b_since[None, :], b_later.shape))
        b_dg = tl.where(column, b_dg_row[:, None], b_dg)

    if ONE_SCALE:
        p_before_scale = tl.where(begin + o_t == 0, p_scale, p_saved_scale)
        state = tl.where(begin + o_t == 0, i_n, own + o_t - 1) * HV + i_hv
        b_scale = load_scales_of_block(p_before_scale, state, m_t, o_k, i_v, K, V, GRANULARITY, GROUP)
        b_dg, b_rdv = b_dg * b_scale, b_rdv * b_scale
        if READ_STORED:
            state = (own + o_t) * HV + i_hv
            b_scale = load_scales_of_block(p_saved_scale, state, m_t, o_k, i_v, K, V, GRANULARITY, GROUP)
        b_dq *= b_scale
    b_dq, b_rdv = b_dq * b_do_unit[None, :], b_rdv * b_dv_unit[None, :]
    o_kt = o_part[None, :] * K + o_k[:, None]
    m_kt = m_t[None, :] & (o_k < K)[:, None]
    if IS_KDA:
        b_decays = tl.trans(tl.exp(load_rows(p_g, row, m_t, i_hv, HV, K, BK, i_k)))
        tl.store(p_dg + o_kt, b_dg * b_decays, mask=m_kt)
    else:
        tl.store(p_dg + o_part * PROGRAMS_K + i_k // BK, tl.sum(b_dg * b_decays, axis=0), mask=m_t)
    if not READ_STORED:
        b_dq = b_dq * b_decays + b_k * b_read[None, :]
    tl.store(p_dq + o_kt, b_dq * scale, mask=m_kt)
    tl.store(p_dk + o_kt, b_dw - b_rdv * b_decays, mask=m_kt)
