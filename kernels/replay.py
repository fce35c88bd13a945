"""Decoding by replay: the state is kept as it was when it was last rounded, beside a ring of the updates since.

A token that only joins the ring reads the checkpoint C and the entries (k_i, r_i, g_i) and forms no state. With E the
log decay from an entry (or from C) to the token and kd = k∘exp(E),

    Rᵀk = Cᵀ(k∘exp(E_C)) + Σ_i (kd_iᵀk) r_i,   r = β(v − Rᵀk),   o = Cᵀ(q∘exp(E_C)) + Σ_i (kd_iᵀq) r_i + (kᵀq) r

so that C is read in codes: a tile's scale multiplies two sums, not 128 rows. The last token of a window builds the
state, one update after another, goes on as mode "token" does, and rounds.

`replay_step_kernel` decodes one token and changes checkpoint and ring in place: as a rule it appends an entry and
writes nothing else. `replay_forward_kernel` walks many tokens through the same function, so both have the same bits.
A program holds the columns i_v..i_v+BV of one state of one sequence and value head. Contraction is off at launch.

Groups of arguments: ring = (k, r, g) pointers to [N, LENGTH, ...]; call = the same of this call's tokens, where later
entries lie; at = (i_n, row, i_h, i_hv, o_k, o_v), row being the sequence's first token in `call`; window = (cursor,
start), the number of entries and the token that would be the first one, negative while it lies in the ring.

Formulas: docs/decode.md (mode "replay").
"""

import triton
import triton.language as tl

from jlaqat.kernels.kept_state import apply_scale, load_rounded, load_scales, round_state, store_rounded
from jlaqat.kernels.recurrent import load_token, rows_of, store_token_gradients
from jlaqat.kernels.rounding import decode


@triton.jit
def entry(p_ring, p_call, o_i, start, at, LENGTH: tl.constexpr, ROW: tl.constexpr, IN_RING: tl.constexpr):
    """Pointers to the rows of entries o_i, ROW elements each: in the ring, or with the call's tokens."""
    i_n, row, i_h, i_hv, o_k, o_v = at
    p = p_ring + (i_n * LENGTH + o_i) * ROW
    if IN_RING:
        return p
    else:
        return tl.where(start + o_i < 0, p, p_call + (row + start + o_i) * ROW)


@triton.jit
def load_rows(
    p_ring,
    p_call,
    o_i,
    m_i,
    i_head,
    o,  # [width], columns
    start,
    at,
    LENGTH: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    IN_RING: tl.constexpr,
):
    """Columns o < WIDTH of entries o_i where m_i, 0 elsewhere: float32 [len(o_i), len(o)]."""
    p = entry(p_ring, p_call, o_i, start, at, LENGTH, HEADS * WIDTH, IN_RING) + i_head * WIDTH
    m = m_i[:, None] & (o < WIDTH)[None, :]
    return tl.load(p[:, None] + o[None, :], mask=m, other=0.0).to(tl.float32)


@triton.jit
def join_token(
    b_code,  # the checkpoint's, [BK // BL, BL, BV]
    b_scale,
    p_q,  # of the token, [K]
    p_k,
    v,
    g,  # a number, for KDA [BK]
    beta,
    scale,
    i_v,
    ring,
    call,
    window,
    at,
    dims: tl.constexpr,
    BL: tl.constexpr,
    IS_KDA: tl.constexpr,
    GRANULARITY: tl.constexpr,
    IN_RING: tl.constexpr,
):
    """(o [BV], r [BV] as the ring keeps it) of a token that joins the ring."""
    cursor, start = window
    i_n, row, i_h, i_hv, o_k, o_v = at
    H: tl.constexpr = dims[0]
    HV: tl.constexpr = dims[1]
    K: tl.constexpr = dims[2]
    V: tl.constexpr = dims[3]
    LENGTH: tl.constexpr = dims[4]
    BV: tl.constexpr = b_code.shape[2]
    BLOCKS: tl.constexpr = (LENGTH + BL - 1) // BL
    RING: tl.constexpr = ring[1].dtype.element_ty
    # Loaded for every entry, in the layout that their keys have: nothing has to pass between threads.
    everywhere = tl.zeros([BL], tl.int32)[:, None] + o_k[None, :]
    b_q = tl.load(p_q + everywhere, mask=everywhere < K, other=0.0).to(tl.float32)
    b_k = tl.load(p_k + everywhere, mask=everywhere < K, other=0.0).to(RING).to(tl.float32)
    b_error = tl.zeros([BL, BV], tl.float32)
    b_out = tl.zeros([BL, BV], tl.float32)
    since = g  # log decay from the entries already read to the token
    for back in tl.static_range(BLOCKS):
        o_i = (BLOCKS - 1 - back) * BL + tl.arange(0, BL)
        m_i = o_i < cursor
        m_next = (o_i + 1 < cursor) & (tl.arange(0, BL) < BL - 1)  # what decays an entry are the entries after it
        b_keys = load_rows(ring[0], call[0], o_i, m_i, i_h, o_k, start, at, LENGTH, H, K, IN_RING)
        o_r = i_v + tl.arange(0, BV)
        p = entry(ring[1], call[1], o_i, start, at, LENGTH, HV * V, IN_RING) + i_hv * V
        p = p[:, None] + tl.max_contiguous(o_r, 4)[None, :]  # the layout of the checkpoint's sums
        b_r = tl.load(p, mask=m_i[:, None] & (o_r < V)[None, :], other=0.0).to(tl.float32)
        if IS_KDA:
            b_gates = load_rows(ring[2], call[2], o_i, m_i, i_hv, o_k, start, at, LENGTH, HV, K, IN_RING)
            b_next = load_rows(ring[2], call[2], o_i + 1, m_next, i_hv, o_k, start, at, LENGTH, HV, K, IN_RING)
            b_keys *= tl.exp(tl.cumsum(b_next, axis=0, reverse=True) + since[None, :])
            b_write = tl.sum(b_keys * b_k, axis=1)
            b_read = tl.sum(b_keys * b_q, axis=1) * scale
        else:
            p = entry(ring[2], call[2], o_i, start, at, LENGTH, HV, IN_RING) + i_hv
            b_gates = tl.load(p, mask=m_i, other=0.0)
            p = entry(ring[2], call[2], o_i + 1, start, at, LENGTH, HV, IN_RING) + i_hv
            b_next = tl.load(p, mask=m_next, other=0.0)
            b_decay = tl.exp(tl.cumsum(b_next, axis=0, reverse=True) + since)
            b_write = tl.sum(b_keys * b_k, axis=1) * b_decay
            b_read = tl.sum(b_keys * b_q, axis=1) * (b_decay * scale)
        since += tl.sum(b_gates, axis=0)
        b_error += b_write[:, None] * b_r
        b_out += b_read[:, None] * b_r
    # The checkpoint's rows are summed into the entries', and both once over threads.
    q = tl.load(p_q + o_k, mask=o_k < K, other=0.0).to(tl.float32) * scale
    k = tl.load(p_k + o_k, mask=o_k < K, other=0.0).to(RING).to(tl.float32)
    b_decay = tl.exp(since)
    b_error += read_checkpoint(b_code, b_scale, k * b_decay, GRANULARITY)
    b_out += read_checkpoint(b_code, b_scale, q * b_decay, GRANULARITY)
    b_both = tl.sum(tl.join(b_error, b_out), axis=0)
    b_error, b_out = tl.split(b_both)
    b_r = (beta.to(tl.float32) * (v.to(tl.float32) - b_error)).to(RING).to(tl.float32)
    return b_out + tl.sum(k * q, axis=0) * b_r, b_r


@triton.jit
def load_parts(
    p_values,
    state,
    i_v,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BL: tl.constexpr,
    FORMAT: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """A checkpoint's codes as [BK // BL, BL, BV], without codes its values: a thread has the rows of an axis 0."""
    o_k = tl.arange(0, BK // BL)[:, None, None] * BL + tl.arange(0, BL)[None, :, None]
    o_v = tl.max_contiguous(i_v + tl.arange(0, BV), VECTOR)[None, None, :]
    b = tl.load(p_values + state * K * V + (o_k * V + o_v), mask=(o_k < K) & (o_v < V), other=0)
    if FORMAT == "e4m3" or FORMAT == "int8":
        return decode(b, FORMAT, HARDWARE_FP8)
    else:
        return b.to(tl.float32)


@triton.jit
def read_checkpoint(b_code, b_scale, b_x, GRANULARITY: tl.constexpr):
    """Cᵀx in parts, [BL, BV], the scales multiplied in where they are fewest."""
    if GRANULARITY == "tile" or GRANULARITY == "key_row":
        b_x = b_x * b_scale
    b_part = tl.sum(b_code * tl.reshape(b_x, [b_code.shape[0], b_code.shape[1]])[:, :, None], axis=0)
    if GRANULARITY == "value_row":
        return b_part * b_scale[None, :]
    else:
        return b_part


@triton.jit
def rebuild(b_s, ring, call, window, at, dims: tl.constexpr, IS_KDA: tl.constexpr, IN_RING: tl.constexpr):
    """The state after the entries, from the checkpoint b_s [BK, BV]: one update after another."""
    cursor, start = window
    i_n, row, i_h, i_hv, o_k, o_v = at
    H: tl.constexpr = dims[0]
    HV: tl.constexpr = dims[1]
    K: tl.constexpr = dims[2]
    V: tl.constexpr = dims[3]
    LENGTH: tl.constexpr = dims[4]
    for i in range(cursor):
        p = entry(ring[0], call[0], i, start, at, LENGTH, H * K, IN_RING) + i_h * K
        b_k = tl.load(p + o_k, mask=o_k < K, other=0.0).to(tl.float32)
        p = entry(ring[1], call[1], i, start, at, LENGTH, HV * V, IN_RING) + i_hv * V
        b_r = tl.load(p + o_v, mask=o_v < V, other=0.0).to(tl.float32)
        if IS_KDA:
            p = entry(ring[2], call[2], i, start, at, LENGTH, HV * K, IN_RING) + i_hv * K
            b_s = b_s * tl.exp(tl.load(p + o_k, mask=o_k < K, other=0.0))[:, None]
        else:
            b_s = b_s * tl.exp(tl.load(entry(ring[2], call[2], i, start, at, LENGTH, HV, IN_RING) + i_hv))
        b_s = tl.fma(b_k[:, None], tl.broadcast_to(b_r[None, :], b_s.shape), b_s)
    return b_s


@triton.jit
def flush_token(
    b_s,
    q,
    k,
    v,
    g,
    beta,
    scale,
    ring,
    call,
    window,
    at,
    dims: tl.constexpr,
    IS_KDA: tl.constexpr,
    FORMAT: tl.constexpr,
    GRANULARITY: tl.constexpr,
    READ_STORED: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
    IN_RING: tl.constexpr,
):
    """(o [BV], r [BV], codes and scales of the new checkpoint) of a window's last token; b_s: the checkpoint before."""
    RING: tl.constexpr = ring[1].dtype.element_ty
    b_q = q.to(tl.float32) * scale
    b_k = k.to(RING).to(tl.float32)
    b_s = rebuild(b_s, ring, call, window, at, dims, IS_KDA, IN_RING)
    if IS_KDA:
        b_s = b_s * tl.exp(g)[:, None]
    else:
        b_s = b_s * tl.exp(g)
    b_r = (beta.to(tl.float32) * (v.to(tl.float32) - tl.sum(b_s * b_k[:, None], axis=0))).to(RING).to(tl.float32)
    b_s = tl.fma(b_k[:, None], tl.broadcast_to(b_r[None, :], b_s.shape), b_s)
    b_code, b_scale, b_stored = round_state(b_s, FORMAT, GRANULARITY, HARDWARE_FP8)
    if READ_STORED:
        b_o = tl.sum(b_stored * b_q[:, None], axis=0)
    else:
        b_o = tl.sum(b_s * b_q[:, None], axis=0)
    return b_o, b_r, b_code, b_scale


@triton.jit
def store_entry(ring, entry_row, b_k, b_r, b_g, i_v, at, dims: tl.constexpr, IS_KDA: tl.constexpr):
    """An entry, in row entry_row of [N * LENGTH]; k by the first program of a key head, g by that of a value head."""
    i_n, row, i_h, i_hv, o_k, o_v = at
    H: tl.constexpr = dims[0]
    HV: tl.constexpr = dims[1]
    K: tl.constexpr = dims[2]
    V: tl.constexpr = dims[3]
    p_k, p_r, p_g = ring
    first = i_v == 0
    tl.store(p_r + (entry_row * HV + i_hv) * V + o_v, b_r.to(p_r.dtype.element_ty), mask=o_v < V)
    m_k = (o_k < K) & first & (i_hv % (HV // H) == 0)
    tl.store(p_k + (entry_row * H + i_h) * K + o_k, b_k.to(p_k.dtype.element_ty), mask=m_k)
    if IS_KDA:
        tl.store(p_g + (entry_row * HV + i_hv) * K + o_k, b_g, mask=(o_k < K) & first)
    else:
        tl.store(p_g + entry_row * HV + i_hv, b_g, mask=first)


@triton.jit
def replay_step_kernel(
    p_q,  # [N, 1, H, K]
    p_k,  # [N, 1, H, K]
    p_v,  # [N, 1, HV, V]
    p_g,  # [N, 1, HV] or [N, 1, HV, K] float32
    p_beta,  # [N, 1, HV]
    p_values,  # in place: [N, HV, K, V], the checkpoints; codes (uint8), 16-bit floats or float32
    p_scale,  # in place: their scales, see `store_rounded`; any array where there are none
    p_ring_k,  # in place: [N, LENGTH, H, K] float32 or bfloat16
    p_ring_r,  # in place: [N, LENGTH, HV, V], likewise
    p_ring_g,  # in place: [N, LENGTH, HV] or [N, LENGTH, HV, K] float32
    p_cursor,  # [N] int32, entries in the ring
    p_o,  # out: [N, 1, HV, V]
    p_cursor_out,  # out: [N] int32
    scale,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    LENGTH: tl.constexpr,
    BL: tl.constexpr,
    IS_KDA: tl.constexpr,
    FORMAT: tl.constexpr,
    GRANULARITY: tl.constexpr,
    READ_STORED: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
    VECTOR: tl.constexpr,
):
    pid = tl.program_id(0)
    PROGRAMS_V: tl.constexpr = (V + BV - 1) // BV
    i_v = (pid % PROGRAMS_V) * BV
    i_hv = (pid // PROGRAMS_V) % HV
    i_n = (pid // (PROGRAMS_V * HV)).to(tl.int64)
    i_h = i_hv // (HV // H)
    o_k = tl.arange(0, BK)
    o_v = i_v + tl.arange(0, BV)
    at = (i_n, i_n, i_h, i_hv, o_k, o_v)
    ring = (p_ring_k, p_ring_r, p_ring_g)
    dims: tl.constexpr = (H, HV, K, V, LENGTH)
    head = i_n * HV + i_hv
    window = (tl.load(p_cursor + i_n), 0)
    q, k, v, g, beta = load_token(p_q, p_k, p_v, p_g, p_beta, i_n, i_h, i_hv, o_k, o_v, H, HV, K, V, IS_KDA)
    if window[0] == LENGTH - 1:
        b_s = load_rounded(p_values, p_scale, head, i_v, K, V, BK, BV, FORMAT, GRANULARITY, HARDWARE_FP8, VECTOR)
        b_o, b_r, b_code, b_scale = flush_token(
            b_s,
            q,
            k,
            v,
            g,
            beta,
            scale,
            ring,
            ring,
            window,
            at,
            dims,
            IS_KDA,
            FORMAT,
            GRANULARITY,
            READ_STORED,
            HARDWARE_FP8,
            True,
        )
        store_rounded(p_values, p_scale, head, b_code, b_scale, i_v, K, V, FORMAT, GRANULARITY, HARDWARE_FP8, VECTOR)
        tl.store(p_o + head * V + o_v, b_o.to(p_o.dtype.element_ty), mask=o_v < V)
    else:
        b_o, b_r = join_token(
            load_parts(p_values, head, i_v, K, V, BK, BV, BL, FORMAT, HARDWARE_FP8, VECTOR),
            load_scales(p_scale, head, i_v, K, V, BK, BV, FORMAT, GRANULARITY),
            p_q + (i_n * H + i_h) * K,
            p_k + (i_n * H + i_h) * K,
            v,
            g,
            beta,
            scale,
            i_v,
            ring,
            ring,
            window,
            at,
            dims,
            BL,
            IS_KDA,
            GRANULARITY,
            True,
        )
        store_entry(ring, i_n * LENGTH + window[0], k, b_r, g, i_v, at, dims, IS_KDA)
        tl.store(p_o + head * V + o_v, b_o.to(p_o.dtype.element_ty), mask=o_v < V)
    tl.store(p_cursor_out + i_n, (window[0] + 1) % LENGTH, mask=(i_v == 0) & (i_hv == 0))


@triton.jit
def replay_forward_kernel(
    p_q,  # [B, T, H, K]
    p_k,  # [B, T, H, K] in the ring's dtype
    p_v,  # [B, T, HV, V]
    p_g,  # [B, T, HV] or [B, T, HV, K] float32
    p_beta,  # [B, T, HV]
    p_values,  # [N, HV, K, V], the checkpoints that enter, and their scales
    p_scale,
    p_ring_k,  # [N, LENGTH, H, K] float32 or bfloat16, the ring that enters
    p_ring_r,  # [N, LENGTH, HV, V]
    p_ring_g,  # [N, LENGTH, HV] or [N, LENGTH, HV, K] float32
    p_cursor,  # [N] int32
    p_first,  # [N] int32, see `rows_of`; any array where not RAGGED
    p_count,  # [N] int32
    p_o,  # out: [B, T, HV, V]; rows of no sequence are not written, as those of p_r
    p_r,  # out: [B, T, HV, V] in the ring's dtype, every token's update
    p_values_out,  # out: [N, HV, K, V], the checkpoints that leave, and their scales
    p_scale_out,
    p_ring_k_out,  # out: the ring that leaves; zeros from its cursor on
    p_ring_r_out,
    p_ring_g_out,
    p_cursor_out,  # out: [N] int32
    p_saved,  # out: [N, SLOTS, HV, K, V], the checkpoints in the order of their roundings; SLOTS may be 0
    p_saved_scale,  # out
    scale,
    T,
    PER_ROW,
    SLOTS,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    LENGTH: tl.constexpr,
    BL: tl.constexpr,
    IS_KDA: tl.constexpr,
    RAGGED: tl.constexpr,
    FORMAT: tl.constexpr,
    GRANULARITY: tl.constexpr,
    READ_STORED: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
    VECTOR: tl.constexpr,
):
    pid = tl.program_id(0)
    PROGRAMS_V: tl.constexpr = (V + BV - 1) // BV
    i_v = (pid % PROGRAMS_V) * BV
    i_hv = (pid // PROGRAMS_V) % HV
    i_n = (pid // (PROGRAMS_V * HV)).to(tl.int64)
    i_h = i_hv // (HV // H)
    o_k = tl.arange(0, BK)
    o_v = i_v + tl.arange(0, BV)
    i_b, first, count = rows_of(p_first, p_count, i_n, T, PER_ROW, RAGGED)
    row = i_b * T + first
    at = (i_n, row, i_h, i_hv, o_k, o_v)
    ring = (p_ring_k, p_ring_r, p_ring_g)
    call = (p_k, p_r, p_g)
    dims: tl.constexpr = (H, HV, K, V, LENGTH)
    head = i_n * HV + i_hv
    cursor = tl.load(p_cursor + i_n)
    start = -cursor
    slot = i_n * SLOTS
    b_code = load_parts(p_values, head, i_v, K, V, BK, BV, BL, FORMAT, HARDWARE_FP8, VECTOR)
    b_scale = load_scales(p_scale, head, i_v, K, V, BK, BV, FORMAT, GRANULARITY)
    q, k, v, g, beta = load_token(p_q, p_k, p_v, p_g, p_beta, row, i_h, i_hv, o_k, o_v, H, HV, K, V, IS_KDA)
    for t in range(count):
        window = (cursor, start)
        if cursor == LENGTH - 1:
            b_o, b_r, b_new, b_scale = flush_token(
                apply_scale(tl.reshape(b_code, [BK, BV]), b_scale, FORMAT, GRANULARITY),
                q,
                k,
                v,
                g,
                beta,
                scale,
                ring,
                call,
                window,
                at,
                dims,
                IS_KDA,
                FORMAT,
                GRANULARITY,
                READ_STORED,
                HARDWARE_FP8,
                False,
            )
            b_code = tl.reshape(b_new, [BK // BL, BL, BV])
            if SLOTS > 0:
                saved = slot * HV + i_hv
                store_rounded(
                    p_saved, p_saved_scale, saved, b_new, b_scale, i_v, K, V, FORMAT, GRANULARITY, HARDWARE_FP8, VECTOR
                )
        else:
            b_o, b_r = join_token(
                b_code,
                b_scale,
                p_q + ((row + t) * H + i_h) * K,
                p_k + ((row + t) * H + i_h) * K,
                v,
                g,
                beta,
                scale,
                i_v,
                ring,
                call,
                window,
                at,
                dims,
                BL,
                IS_KDA,
                GRANULARITY,
                False,
            )
        o_row = ((row + t) * HV + i_hv) * V + o_v
        tl.store(p_o + o_row, b_o.to(p_o.dtype.element_ty), mask=o_v < V)
        tl.store(p_r + o_row, b_r.to(p_r.dtype.element_ty), mask=o_v < V)
        ahead = row + tl.minimum(t + 1, count - 1)
        q, k, v, g, beta = load_token(p_q, p_k, p_v, p_g, p_beta, ahead, i_h, i_hv, o_k, o_v, H, HV, K, V, IS_KDA)
        cursor += 1
        if cursor == LENGTH:
            slot += 1
            cursor = 0
            start = t + 1
        tl.debug_barrier()  # the next token reads r as other threads wrote it
    b_new = tl.reshape(b_code, [BK, BV])
    store_rounded(p_values_out, p_scale_out, head, b_new, b_scale, i_v, K, V, FORMAT, GRANULARITY, HARDWARE_FP8, VECTOR)
    for i in range(LENGTH):
        used = i < cursor
        p = entry(p_ring_k, p_k, i, start, at, LENGTH, H * K, False) + i_h * K
        b_k = tl.load(p + o_k, mask=(o_k < K) & used, other=0.0)
        p = entry(p_ring_r, p_r, i, start, at, LENGTH, HV * V, False) + i_hv * V
        b_r = tl.load(p + o_v, mask=(o_v < V) & used, other=0.0)
        if IS_KDA:
            p = entry(p_ring_g, p_g, i, start, at, LENGTH, HV * K, False) + i_hv * K
            b_g = tl.load(p + o_k, mask=(o_k < K) & used, other=0.0)
        else:
            p = entry(p_ring_g, p_g, i, start, at, LENGTH, HV, False) + i_hv
            b_g = tl.load(p, mask=used, other=0.0)
        leaving = (p_ring_k_out, p_ring_r_out, p_ring_g_out)
        store_entry(leaving, i_n * LENGTH + i, b_k, b_r, b_g, i_v, at, dims, IS_KDA)
    tl.store(p_cursor_out + i_n, cursor, mask=(i_v == 0) & (i_hv == 0))


@triton.jit
def replay_backward_kernel(
    p_q,  # as in the forward, for all of these
    p_k,
    p_v,
    p_g,
    p_beta,
    p_values,
    p_scale,
    p_ring_k,
    p_ring_r,
    p_ring_g,
    p_cursor,
    p_first,
    p_count,
    p_r,  # [B, T, HV, V], what the forward left
    p_saved,  # [N, SLOTS, HV, K, V], likewise
    p_saved_scale,
    p_do,  # [B, T, HV, V]
    p_ds,  # [N, HV, K, V] float32, gradient of the states that leave, checkpoint and ring together
    p_dq,  # out: [B, T, HV * PROGRAMS_V, K] float32, a part a program, of a value head's q
    p_dk,  # out: the same
    p_dv,  # out: [B, T, HV, V] float32
    p_dg,  # out: [B, T, HV * PROGRAMS_V] or [B, T, HV * PROGRAMS_V, K] float32
    p_dbeta,  # out: [B, T, HV * PROGRAMS_V] float32
    p_ds_in,  # out: [N, HV, K, V] float32, gradient of the states that enter
    scale,
    T,
    PER_ROW,
    SLOTS,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    LENGTH: tl.constexpr,
    IS_KDA: tl.constexpr,
    RAGGED: tl.constexpr,
    FORMAT: tl.constexpr,
    GRANULARITY: tl.constexpr,
    READ_STORED: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Straight through every rounding; the state before a token is built from the checkpoint of its window."""
    pid = tl.program_id(0)
    PROGRAMS_V: tl.constexpr = (V + BV - 1) // BV
    part = pid % (PROGRAMS_V * HV)
    i_v = (pid % PROGRAMS_V) * BV
    i_hv = (pid // PROGRAMS_V) % HV
    i_n = (pid // (PROGRAMS_V * HV)).to(tl.int64)
    i_h = i_hv // (HV // H)
    o_k = tl.arange(0, BK)
    o_v = i_v + tl.arange(0, BV)
    i_b, first, count = rows_of(p_first, p_count, i_n, T, PER_ROW, RAGGED)
    at = (i_n, i_b * T + first, i_h, i_hv, o_k, o_v)
    ring = (p_ring_k, p_ring_r, p_ring_g)
    call = (p_k, p_r, p_g)
    dims: tl.constexpr = (H, HV, K, V, LENGTH)
    m_s = (o_k < K)[:, None] & (o_v < V)[None, :]
    o_s = (i_n * HV + i_hv) * K * V + o_k[:, None] * V + o_v[None, :]
    b_ds = tl.load(p_ds + o_s, mask=m_s, other=0.0)
    entered = tl.load(p_cursor + i_n)
    for back in range(count):
        t = count - 1 - back
        window = (entered + t) // LENGTH
        cursor = (entered + t) % LENGTH
        row = i_b * T + first + t
        q, k, v, g, beta = load_token(p_q, p_k, p_v, p_g, p_beta, row, i_h, i_hv, o_k, o_v, H, HV, K, V, IS_KDA)
        o_row = (row * HV + i_hv) * V + o_v
        b_update = tl.load(p_r + o_row, mask=o_v < V, other=0.0).to(tl.float32)
        b_do = tl.load(p_do + o_row, mask=o_v < V, other=0.0).to(tl.float32)
        if window > 0:
            before = (i_n * SLOTS + window - 1) * HV + i_hv
            b_s = load_rounded(
                p_saved, p_saved_scale, before, i_v, K, V, BK, BV, FORMAT, GRANULARITY, HARDWARE_FP8, VECTOR
            )
        else:
            before = i_n * HV + i_hv
            b_s = load_rounded(p_values, p_scale, before, i_v, K, V, BK, BV, FORMAT, GRANULARITY, HARDWARE_FP8, VECTOR)
        b_s = rebuild(b_s, ring, call, (cursor, t - cursor), at, dims, IS_KDA, False)
        b_k = k.to(tl.float32)
        b_decay = tl.exp(g)
        if IS_KDA:
            b_decay = b_decay[:, None]
        b_s = b_s * b_decay
        b_error = v.to(tl.float32) - tl.sum(b_s * b_k[:, None], axis=0)
        b_read = b_s + b_k[:, None] * b_update[None, :]
        if READ_STORED:  # noqa: SIM102 (which the compiler knows)
            if cursor == LENGTH - 1:
                after = (i_n * SLOTS + window) * HV + i_hv
                b_read = load_rounded(
                    p_saved, p_saved_scale, after, i_v, K, V, BK, BV, FORMAT, GRANULARITY, HARDWARE_FP8, VECTOR
                )
        b_ds = store_token_gradients(
            p_dq,
            p_dk,
            p_dv,
            p_dg,
            p_dbeta,
            b_ds,
            b_s,
            tl.sum(b_read * b_do[None, :], axis=1) * scale,
            b_error,
            b_update,
            q.to(tl.float32) * scale,
            b_k,
            b_decay,
            beta.to(tl.float32),
            b_do,
            row,
            part,
            i_hv,
            o_k,
            o_v,
            HV,
            K,
            V,
            PROGRAMS_V,
            IS_KDA,
        )
    tl.store(p_ds_in + o_s, b_ds, mask=m_s)
