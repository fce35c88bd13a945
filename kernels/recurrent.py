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

from jlaqat.kernels.kept_state import (
    apply_scale,
    decay_kept,
    load_codes,
    load_kept,
    load_rounded,
    load_scales,
    round_kept,
    store_rounded,
)
from jlaqat.kernels.key_order import by_rows, keys_of_rows
from jlaqat.kernels.philox import draw_words
from jlaqat.kernels.token_gradients import outer_product_added, reverse_token, sum_over_keys
from jlaqat.kernels.token_operands import load_token, locate_program, rows_of


@triton.jit
def recurrent_forward_kernel(
    p_q,  # [B, T, H, K]
    p_k,  # [B, T, H, K]
    p_v,  # [B, T, HV, V]
    p_g,  # [B, T, HV] or [B, T, HV, K] float32
    p_beta,  # [B, T, HV]
    p_values,  # [N, HV, K, V], the states that enter: codes (uint8), 16-bit floats or float32
    p_scale,  # their scales, see `store_rounded`; any array where there are none
    p_first,  # [N] int32, see `rows_of`; any array where not RAGGED
    p_count,  # [N] int32
    p_counters,  # [N, HV, 4] int32: roundings so far, layer and head, sequence, step; any array where not DRAWN
    p_lost,  # [N, HV, K, V] float32, what the last rounding lost; any array where not FEEDBACK
    p_o,  # out: [B, T, HV, V]; rows of no sequence are not written
    p_values_out,  # out: [N, HV, K, V], the states that leave
    p_scale_out,  # out
    p_saved,  # out: the states after every STRIDE tokens, [N, SLOTS, HV, K, V] or (SHARED_SLOTS) [B, SLOTS, HV, K, V];
    p_saved_scale,  # none where STRIDE is 0. out
    p_lost_out,  # out: [N, HV, K, V] float32
    p_saved_lost,  # out: what was lost with the states that are saved, unless STRIDE is 1
    p_error,  # out: [B, T, HV, V] float32, v - r k of every token, where STRIDE is 1
    scale,
    T,
    PER_ROW,
    SLOTS,
    STRIDE: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    IS_KDA: tl.constexpr,
    SEED: tl.constexpr,
    DRAWN: tl.constexpr,
    FEEDBACK: tl.constexpr,
    SAVE_LOST: tl.constexpr,
    RAGGED: tl.constexpr,
    SHARED_SLOTS: tl.constexpr,
    FORMAT: tl.constexpr,
    GRANULARITY: tl.constexpr,
    READ_STORED: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
    VECTOR: tl.constexpr,
    ROWS: tl.constexpr,  # depth of the sums over keys, see `token_gradients`
    BESIDE: tl.constexpr,  # the order of rows, see `key_order`
):
    i_v, i_hv, i_n, i_h = locate_program(H, HV, V, BV)
    o_k = tl.arange(0, BK)
    o_v = i_v + tl.arange(0, BV)
    state = i_n * HV + i_hv
    b_entering, b_scale = load_kept(
        p_values, p_scale, state, i_v, K, V, BK, BV, FORMAT, GRANULARITY, HARDWARE_FP8, VECTOR, 0, BESIDE
    )
    b_code = b_entering.to(tl.float32)
    i_b, first, count = rows_of(p_first, p_count, i_n, T, PER_ROW, RAGGED)
    o_row = keys_of_rows(BK, BESIDE)
    o_s = o_row[:, None] * V + o_v[None, :]
    m_s = (o_row < K)[:, None] & (o_v < V)[None, :]
    if FEEDBACK:
        b_lost = tl.load(p_lost + state * K * V + o_s, mask=m_s, other=0.0)
    if RAGGED:  # noqa: SIM102 (no branch where the number is known)
        if count == 0:
            store_rounded(
                p_values_out,
                p_scale_out,
                state,
                b_entering,
                b_scale,
                i_v,
                K,
                V,
                FORMAT,
                GRANULARITY,
                HARDWARE_FP8,
                VECTOR,
                BESIDE,
            )
            if FEEDBACK:
                tl.store(p_lost_out + state * K * V + o_s, b_lost, mask=m_s)
    slot = i_n * SLOTS
    if (
        STRIDE and SHARED_SLOTS
    ):  # the slot of a token's state is the token's number by STRIDE: no two sequences have the same
        slot = i_b * SLOTS + (first + STRIDE - 1) // STRIDE
    row = i_b * T + first
    if DRAWN:
        rounds, layer_and_head = tl.load(p_counters + state * 4), tl.load(p_counters + state * 4 + 1)
        sequence, step = tl.load(p_counters + state * 4 + 2), tl.load(p_counters + state * 4 + 3)
    q, k, v, g, beta = load_token(p_q, p_k, p_v, p_g, p_beta, row, i_h, i_hv, o_k, o_v, H, HV, K, V, IS_KDA)
    for t in range(count):
        b_q = by_rows(q.to(tl.float32) * scale, BESIDE)
        b_k = by_rows(k.to(tl.float32), BESIDE)
        b_v = v.to(tl.float32)
        b_beta = beta.to(tl.float32)
        b_decay = tl.exp(g.to(tl.float32))
        if IS_KDA:
            b_decay = by_rows(b_decay, BESIDE)
        ahead = row + tl.minimum(count - 1 - t, 1)
        q, k, v, g, beta = load_token(p_q, p_k, p_v, p_g, p_beta, ahead, i_h, i_hv, o_k, o_v, H, HV, K, V, IS_KDA)
        b_s = decay_kept(b_code, b_scale, b_decay, IS_KDA, FORMAT, GRANULARITY)
        b_error = b_v - sum_over_keys(b_s, b_k, ROWS)
        b_r = b_beta * b_error
        if STRIDE == 1:
            tl.store(p_error + (row * HV + i_hv) * V + o_v, b_error, mask=o_v < V)
        # Not with INT8, whose bytes are packed by four columns side by side, nor on SM80, where it would spill.
        b_s = outer_product_added(b_k, b_r, b_s, ROWS if HARDWARE_FP8 and FORMAT != "int8" else 0)
        if not READ_STORED:
            b_o = sum_over_keys(b_s, b_q, ROWS)
        if FEEDBACK:
            b_s += b_lost
            b_lost = b_s
        if DRAWN:
            words = draw_words(rounds + t + 1, layer_and_head, sequence, step, i_v, V, BK, BV, SEED, BESIDE)
            b_kept, b_code, b_scale = round_kept(b_s, FORMAT, GRANULARITY, HARDWARE_FP8, VECTOR, words, DRAWN)
        else:
            b_kept, b_code, b_scale = round_kept(b_s, FORMAT, GRANULARITY, HARDWARE_FP8, VECTOR)
        if FEEDBACK:
            b_lost -= apply_scale(b_code, b_scale, FORMAT, GRANULARITY)
        if READ_STORED:
            b_o = sum_over_keys(apply_scale(b_code, b_scale, FORMAT, GRANULARITY), b_q, ROWS)
        tl.store(p_o + (row * HV + i_hv) * V + o_v, b_o.to(p_o.dtype.element_ty), mask=o_v < V)
        if STRIDE:  # noqa: SIM102 (no branch where nothing is saved)
            if (t + 1) % STRIDE == 0:
                saved = (slot + (t + 1) // STRIDE - 1) * HV + i_hv
                store_rounded(
                    p_saved,
                    p_saved_scale,
                    saved,
                    b_kept,
                    b_scale,
                    i_v,
                    K,
                    V,
                    FORMAT,
                    GRANULARITY,
                    HARDWARE_FP8,
                    VECTOR,
                    BESIDE,
                )
                if SAVE_LOST:
                    tl.store(p_saved_lost + saved * K * V + o_s, b_lost, mask=m_s)
        if t == count - 1:
            store_rounded(
                p_values_out,
                p_scale_out,
                state,
                b_kept,
                b_scale,
                i_v,
                K,
                V,
                FORMAT,
                GRANULARITY,
                HARDWARE_FP8,
                VECTOR,
                BESIDE,
            )
            if FEEDBACK:
                tl.store(p_lost_out + state * K * V + o_s, b_lost, mask=m_s)
        row += 1


@triton.jit
def recurrent_backward_kernel(
    p_q,  # as in the forward, for all of these
    p_k,
    p_g,
    p_beta,
    p_values,
    p_scale,
    p_first,
    p_count,
    p_saved,  # [B, T, HV, K, V] or (OWN_ROWS) [N, LENGTH, HV, K, V], the states after every token, and their scales
    p_saved_scale,
    p_error,  # [B, T, HV, V] float32, as the forward wrote it
    p_do,  # [B, T, HV, V]
    p_ds,  # [N, HV, K, V] float32, gradient of the states that leave
    p_dq,  # out: [B, T, HV * PROGRAMS_V, K] float32, a part a program, of a value head's q; rows of tokens that no
    p_dk,  # sequence has are not written. out: the same. With OWN_ROWS all five are [N, LENGTH, ...]
    p_dv,  # out: [B, T, HV, V] float32
    p_dg,  # out: [B, T, HV * PROGRAMS_V] or [B, T, HV * PROGRAMS_V, K] float32
    p_dbeta,  # out: [B, T, HV * PROGRAMS_V] float32
    p_ds_in,  # out: [N, HV, K, V] float32, gradient of the states that enter
    scale,
    T,
    PER_ROW,
    LENGTH,
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
    VECTOR: tl.constexpr,
    GROUP: tl.constexpr,  # columns that share a scale, BV or more
    ROWS: tl.constexpr,  # depths of the sums, see `token_gradients`
    COLUMNS: tl.constexpr,
    BESIDE: tl.constexpr,  # neighbouring keys in a thread, see `key_order`
    STAGES: tl.constexpr,
):
    """Straight through every rounding; the decayed states are formed again from the saved ones."""
    PROGRAMS_V: tl.constexpr = (V + BV - 1) // BV
    part = tl.program_id(0) % (PROGRAMS_V * HV)
    i_v, i_hv, i_n, i_h = locate_program(H, HV, V, BV)
    o_k = tl.arange(0, BK)
    o_v = i_v + tl.arange(0, BV)
    o_row = keys_of_rows(BK, BESIDE)
    m_s = (o_row < K)[:, None] & (o_v < V)[None, :]
    o_s = (i_n * HV + i_hv) * K * V + o_row[:, None] * V + o_v[None, :]
    b_ds = tl.load(p_ds + o_s, mask=m_s, other=0.0)
    i_b, first, count = rows_of(p_first, p_count, i_n, T, PER_ROW, RAGGED)
    outputs = (p_dq, p_dk, p_dv, p_dg, p_dbeta)
    dims: tl.constexpr = (HV, K, V, PROGRAMS_V)
    depths: tl.constexpr = (ROWS, COLUMNS, BESIDE)
    last = tl.maximum(count - 1, 0)
    row = i_b * T + first + last
    own = i_n * LENGTH + last if OWN_ROWS else row  # the token's row in states and gradients
    token = load_token(p_q, p_k, p_error, p_g, p_beta, row, i_h, i_hv, o_k, o_v, H, HV, K, V, IS_KDA)
    do = tl.load(p_do + (row * HV + i_hv) * V + o_v, mask=o_v < V, other=0.0)
    b_after = b_ds
    if READ_STORED:
        b_after = load_rounded(
            p_saved,
            p_saved_scale,
            own * HV + i_hv,
            i_v,
            K,
            V,
            BK,
            BV,
            FORMAT,
            GRANULARITY,
            HARDWARE_FP8,
            VECTOR,
            GROUP,
            BESIDE,
        )
    before = tl.maximum(own - 1, 0) * HV + i_hv
    b_scale = load_scales(p_saved_scale, before, i_v, K, V, BK, BV, FORMAT, GRANULARITY, GROUP, BESIDE)
    # All but the first token, from states that were saved; what the next reads is on its way while one is worked on.
    for back in tl.range(0, last, num_stages=STAGES):
        before = (own - back - 1) * HV + i_hv
        b_code = load_codes(p_saved, before, i_v, K, V, BK, BV, FORMAT, HARDWARE_FP8, VECTOR, BESIDE)
        this, this_do, this_scale = token, do, b_scale
        before = tl.maximum(own - back - 2, 0) * HV + i_hv
        b_scale = load_scales(p_saved_scale, before, i_v, K, V, BK, BV, FORMAT, GRANULARITY, GROUP, BESIDE)
        ahead = row - back - 1
        token = load_token(p_q, p_k, p_error, p_g, p_beta, ahead, i_h, i_hv, o_k, o_v, H, HV, K, V, IS_KDA)
        do = tl.load(p_do + (ahead * HV + i_hv) * V + o_v, mask=o_v < V, other=0.0)
        b_ds = reverse_token(
            outputs,
            b_ds,
            b_after,
            b_code,
            this_scale,
            this,
            this_do,
            own - back,
            part,
            i_hv,
            o_k,
            o_v,
            scale,
            dims,
            depths,
            IS_KDA,
            FORMAT,
            GRANULARITY,
            READ_STORED,
        )
        if READ_STORED:
            b_after = apply_scale(b_code, this_scale, FORMAT, GRANULARITY)
    if count > 0:
        b_code, b_scale = load_kept(
            p_values,
            p_scale,
            i_n * HV + i_hv,
            i_v,
            K,
            V,
            BK,
            BV,
            FORMAT,
            GRANULARITY,
            HARDWARE_FP8,
            VECTOR,
            GROUP,
            BESIDE,
        )
        b_ds = reverse_token(
            outputs,
            b_ds,
            b_after,
            b_code,
            b_scale,
            token,
            do,
            own - last,
            part,
            i_hv,
            o_k,
            o_v,
            scale,
            dims,
            depths,
            IS_KDA,
            FORMAT,
            GRANULARITY,
            READ_STORED,
        )
    tl.store(p_ds_in + o_s, b_ds, mask=m_s)


@triton.jit
def place_rows_kernel(
    p_x,  # [N, LENGTH, PARTS, W] float32, rows of a sequence's own
    p_first,  # [N] int32, see `rows_of`
    p_count,
    p_y,  # in place: [B, T, HEADS, W] float32; the rows of the sequences' tokens become sums over the parts of a head
    T,
    PER_ROW,
    LENGTH,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
    BW: tl.constexpr,
):
    pid = tl.program_id(0)
    blocks = tl.cdiv(LENGTH, BLOCK)
    i_h = pid % HEADS
    i_n = (pid // HEADS // blocks).to(tl.int64)
    o_t = (pid // HEADS) % blocks * BLOCK + tl.arange(0, BLOCK)
    o_w = tl.arange(0, BW)
    i_b, first, count = rows_of(p_first, p_count, i_n, T, PER_ROW, True)
    m = (o_t < count)[:, None] & (o_w < W)[None, :]
    b = tl.zeros([BLOCK, BW], tl.float32)
    for i in range(PARTS // HEADS):
        part = i_h * (PARTS // HEADS) + i
        b += tl.load(p_x + ((i_n * LENGTH + o_t)[:, None] * PARTS + part) * W + o_w[None, :], mask=m, other=0.0)
    tl.store(p_y + ((i_b * T + first + o_t)[:, None] * HEADS + i_h) * W + o_w[None, :], b, mask=m)
