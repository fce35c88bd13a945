"""The two scans over chunks: the state forward, rounded at every boundary, and its gradient backward.

One program holds the columns i_v..i_v+BV of one state [K, V] of one sequence and value head and walks the chunks. The
forward scan produces the output on its way (WRITE_O), or leaves the states and v' for `chunk_output` (SAVE_H, SAVE_V).
Where the state is rounded, the register tile is kept as codes and a scale (see rounding.py), and BV is the recipe's
block_v, so no amax crosses programs and a scale is one number.
"""

import triton
import triton.language as tl

from jlaqat.kernels.chunks import (
    join_bytes,
    load_gate_sums,
    load_rows,
    load_scalars,
    load_scores,
    locate_sequence,
    state_mask,
    state_offsets,
    store_rows,
    to_float32,
)
from jlaqat.kernels.rounding import decode, quantize_tile


@triton.jit
def round_state(b_s, DTYPE: tl.constexpr, STATE_FORMAT: tl.constexpr, HARDWARE_FP8: tl.constexpr):
    """(codes float32, their scale, their bytes); the state, 1 and the state in DTYPE where nothing rounds.

    Codes stay float32 in the loop: packed to 16 bits they would be unpacked twice a step.
    """
    if STATE_FORMAT == "none":
        return b_s, tl.full([], 1.0, tl.float32), b_s.to(DTYPE)
    else:
        b_code, b_scale, b_bytes = quantize_tile(b_s, STATE_FORMAT, HARDWARE_FP8)
        return b_code, b_scale, b_bytes


@triton.jit
def store_state(p, b, i_v, K: tl.constexpr, V: tl.constexpr):
    """One program's columns of a state [K, V], in p's dtype; unmasked where the block fits exactly."""
    BK: tl.constexpr = b.shape[0]
    BV: tl.constexpr = b.shape[1]
    if BK != K or (V // BV) * BV != V:
        m = state_mask(0, i_v, K, V, BK, BV)
        tl.store(p + state_offsets(0, i_v, V, BK, BV), b.to(p.dtype.element_ty), mask=m)
    elif b.dtype == tl.uint8:
        p_pair = p.to(tl.pointer_type(tl.uint16))
        tl.store(p_pair + state_offsets(0, i_v // 2, V // 2, BK, BV // 2), join_bytes(b))
    else:
        tl.store(p + state_offsets(0, i_v, V, BK, BV), b.to(p.dtype.element_ty))


@triton.jit
def load_state(p, i_v, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    return tl.load(p + state_offsets(0, i_v, V, BK, BV), mask=state_mask(0, i_v, K, V, BK, BV), other=0.0)


@triton.jit
def load_w(
    p_w,
    p_w_scale,
    row,
    n_rows,
    i_hv,
    HV: tl.constexpr,
    K: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    W_FORMAT: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """(w or its codes [BT, BK] in DTYPE, the rows' scales [BT], 1 for values)."""
    b_w = load_rows(p_w, row, n_rows, i_hv, 0, HV, K, BT, BK)
    if W_FORMAT == "none":
        return b_w, tl.full([BT], 1.0, tl.float32)
    else:
        b_scale = load_scalars(p_w_scale, row, n_rows, i_hv, HV, BT)
        return decode(b_w, W_FORMAT, HARDWARE_FP8).to(DTYPE), b_scale


@triton.jit
def chunk_state_forward_kernel(
    p_q,  # GDN: [B*T, HK, K], q; KDA: scale e^G q a value head
    p_k,  # GDN: [B*T, HK, K], k; KDA: e^(G_L - G) k a value head
    p_w,  # [B*T, HV, K], values or codes (uint8)
    p_w_scale,  # [B*T, HV] float32, where w is codes
    p_u,  # [B*T, HV, V]
    p_p,  # [B*T, HV, P_WIDTH]
    p_g,  # GDN: [B*T, HV] float32, G; KDA: [SLOTS, HV, K] float32, e^(G_L)
    p_initial,  # [N, HV, K, V] float32
    p_sequences,  # [N + 1, 3]
    p_o,  # out: [B*T, HV, V]
    p_final,  # out: [N, HV, K, V] float32
    p_h,  # out: [SLOTS, HV, K, V], the states that enter the chunks: codes (uint8) or values
    p_h_scale,  # out: [SLOTS, HV, ceil(V / BV)] float32
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
    WHOLE: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    WRITE_O: tl.constexpr,
    SAVE_H: tl.constexpr,
    SAVE_V: tl.constexpr,
    STATE_FORMAT: tl.constexpr,
    W_FORMAT: tl.constexpr,
    P_WIDTH: tl.constexpr,
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

    sequence = (i_n.to(tl.int64) * HV + i_hv) * K * V
    DTYPE: tl.constexpr = p_q.dtype.element_ty
    if HAS_INITIAL:
        b_s = load_state(p_initial + sequence, i_v, K, V, BK, BV)
        b_c, b_scale, b_bytes = round_state(b_s, DTYPE, STATE_FORMAT, HARDWARE_FP8)
    else:
        b_c, b_scale = tl.zeros([BK, BV], tl.float32), tl.full([], 1.0, tl.float32)
        b_bytes = tl.zeros([BK, BV], DTYPE if STATE_FORMAT == "none" else tl.uint8)
    if SAVE_H and n_total > 0:
        state = i_c.to(tl.int64) * HV + i_hv
        store_state(p_h + state * K * V, b_bytes, i_v, K, V)
        if STATE_FORMAT != "none":
            tl.store(p_h_scale + state * PROGRAMS_V + i_v // BV, b_scale)
    o_k = tl.arange(0, BK)

    for start in range(0, n_total, BT):
        n_rows = BT if WHOLE else tl.minimum(n_total - start, BT)
        b_w, b_w_scale = load_w(p_w, p_w_scale, row, n_rows, i_hv, HV, K, BT, BK, W_FORMAT, HARDWARE_FP8, DTYPE)
        b_u = load_rows(p_u, row, n_rows, i_hv, i_v, HV, V, BT, BV)
        b_h = b_c.to(DTYPE)
        b_v = to_float32(b_u) - tl.dot(b_w, b_h, input_precision=PRECISION) * (b_w_scale * b_scale)[:, None]
        if not IS_KDA:
            b_g, g_last = load_gate_sums(p_g, row, n_rows, i_hv, HV, BT)
        if SAVE_V:
            store_rows(p_v_new, b_v, row, n_rows, i_hv, i_v, HV, V)
        if WRITE_O:
            b_q = load_rows(p_q, row, n_rows, i_k, 0, HK, K, BT, BK)
            b_p = load_scores(p_p, row, n_rows, i_hv, HV, P_WIDTH, BT)
            b_o = tl.dot(b_q, b_h, input_precision=PRECISION)
            if IS_KDA:
                b_o *= b_scale
            else:
                b_o *= (tl.exp(b_g) * (scale * b_scale))[:, None]
            b_o += tl.dot(b_p, b_v.to(DTYPE), input_precision=PRECISION)
            store_rows(p_o, b_o, row, n_rows, i_hv, i_v, HV, V)
        b_k = load_rows(p_k, row, n_rows, i_k, 0, HK, K, BT, BK)
        # The scale joins the decay, so that codes become the decayed state by one multiplication.
        if IS_KDA:
            b_decay = tl.load(p_g + (i_c.to(tl.int64) * HV + i_hv) * K + o_k, mask=o_k < K, other=0.0)
            b_s = b_c.to(tl.float32) * (b_decay * b_scale)[:, None]
        else:
            b_v *= tl.exp(g_last - b_g)[:, None]
            b_s = b_c.to(tl.float32) * (tl.exp(g_last) * b_scale)
        b_s = tl.dot(tl.trans(b_k), b_v.to(DTYPE), acc=b_s, input_precision=PRECISION)
        b_c, b_scale, b_bytes = round_state(b_s, DTYPE, STATE_FORMAT, HARDWARE_FP8)
        row += BT
        i_c += 1
        if SAVE_H and start + BT < n_total:
            state = i_c.to(tl.int64) * HV + i_hv
            store_state(p_h + state * K * V, b_bytes, i_v, K, V)
            if STATE_FORMAT != "none":
                tl.store(p_h_scale + state * PROGRAMS_V + i_v // BV, b_scale)

    store_state(p_final + sequence, b_c.to(tl.float32) * b_scale, i_v, K, V)


@triton.jit
def load_decay(p_decay, state, wanted, K: tl.constexpr, BK: tl.constexpr):
    """KDA: e^(G_L) of a chunk."""
    o_k = tl.arange(0, BK)
    return tl.load(p_decay + state * K + o_k, mask=o_k < tl.where(wanted, K, 0), other=0.0)


@triton.jit
def load_gates(p_g, row, n_rows, i_h, NH: tl.constexpr, BT: tl.constexpr):
    """GDN's (G, G, G of the last row) of a chunk. Past the end the first G is 0 and the second -inf.

    Two loads of G on purpose: one layout for rows of products, one for rows of do. A single load would be moved
    between them through shared memory, or repeated where it waits.
    """
    o_t = tl.arange(0, BT)
    p = p_g + row * NH + i_h
    last = tl.load(p + (n_rows - 1) * NH, mask=n_rows > 0, other=0.0)
    b_g = tl.load(p + o_t * NH, mask=o_t < n_rows, other=0.0)
    b_gq = tl.load(p + o_t * NH, mask=o_t < n_rows, other=float("-inf"))
    return b_g, b_gq, last


@triton.jit
def chunk_state_backward_kernel(
    p_q,  # as in the forward
    p_k,
    p_w,
    p_w_scale,
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
    WHOLE: tl.constexpr,
    W_FORMAT: tl.constexpr,
    P_WIDTH: tl.constexpr,
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
    sequence = (i_n.to(tl.int64) * HV + i_hv) * K * V
    b_ds = load_state(p_dfinal + sequence, i_v, K, V, BK, BV)

    n_chunks = (n_total + BT - 1) // BT
    # The compiler prefetches what products read, but not these: they are loaded one chunk ahead, into registers.
    i_row = row + (n_chunks - 1) * BT
    n_rows = BT if WHOLE else tl.minimum(n_total - (n_chunks - 1) * BT, BT)
    if IS_KDA:
        b_decay = load_decay(p_g, (i_c + n_chunks - 1).to(tl.int64) * HV + i_hv, n_chunks > 0, K, BK)
    else:
        b_g, b_gq, g_last = load_gates(p_g, i_row, n_rows, i_hv, HV, BT)
    for done in range(n_chunks):
        i = n_chunks - 1 - done
        i_row = row + i * BT
        n_rows = BT if WHOLE else tl.minimum(n_total - i * BT, BT)
        n_next = tl.where(i > 0, BT, 0)
        state = (i_c + i).to(tl.int64) * HV + i_hv
        if IS_KDA:
            b_decay_next = load_decay(p_g, state - HV, i > 0, K, BK)
        else:
            b_g_next, b_gq_next, g_last_next = load_gates(p_g, i_row - BT, n_next, i_hv, HV, BT)
        store_state(p_dh + state * K * V, b_ds, i_v, K, V)
        b_do = load_rows(p_do, i_row, n_rows, i_hv, i_v, HV, V, BT, BV)
        b_k = load_rows(p_k, i_row, n_rows, i_k, 0, HK, K, BT, BK)
        b_p = load_scores(p_p, i_row, n_rows, i_hv, HV, P_WIDTH, BT)
        b_dv = tl.dot(b_k, b_ds.to(b_k.dtype), input_precision=PRECISION)
        b_do_q = b_do
        if IS_KDA:
            b_ds *= b_decay[:, None]
            b_decay = b_decay_next
        else:
            b_dv *= tl.exp(tl.where(tl.arange(0, BT) < n_rows, g_last - b_g, 0.0))[:, None]
            b_ds *= tl.exp(g_last)
            b_do_q = (b_do * (tl.exp(b_gq) * scale)[:, None]).to(b_do.dtype)
            b_g, b_gq, g_last = b_g_next, b_gq_next, g_last_next
        b_dv = tl.dot(tl.trans(b_p), b_do, acc=b_dv, input_precision=PRECISION)
        store_rows(p_dv_new, b_dv, i_row, n_rows, i_hv, i_v, HV, V)
        b_q = load_rows(p_q, i_row, n_rows, i_k, 0, HK, K, BT, BK)
        b_ds = tl.dot(tl.trans(b_q), b_do_q, acc=b_ds, input_precision=PRECISION)
        b_w, b_w_scale = load_w(p_w, p_w_scale, i_row, n_rows, i_hv, HV, K, BT, BK, W_FORMAT, HARDWARE_FP8, b_k.dtype)
        if W_FORMAT != "none":  # w times its scale rather than dv', which float16 could not hold
            b_w = (b_w * b_w_scale[:, None]).to(b_k.dtype)
        b_ds = tl.dot(tl.trans(b_w), (-b_dv).to(b_w.dtype), acc=b_ds, input_precision=PRECISION)

    store_state(p_dinitial + sequence, b_ds, i_v, K, V)
