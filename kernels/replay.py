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
entries lie; at = (i_n, row), row being the sequence's first token in `call`; window = (cursor, start), the number of
entries and the token that would be the first one, negative while it lies in the ring; dims = (H, HV, K, V, BK, BV,
LENGTH, BL).

Formulas: docs/decode.md (mode "replay").
"""

import triton
import triton.language as tl

from jlaqat.kernels.kept_state import load_kept, load_rounded, load_scales, round_state, store_rounded
from jlaqat.kernels.recurrent import load_token, rows_of, store_token_gradients
from jlaqat.kernels.rounding import decode


@triton.jit
def load_either(p_ring, o_ring, p_call, o_call, m, later, IN_RING: tl.constexpr):
    """Entries' elements where m, 0 elsewhere: in the ring, or (later) with the call's tokens.

    Two loads and no choice of pointers, which would hide how they are aligned: the layout is that of the ring alone.
    """
    b = tl.load(p_ring + o_ring, mask=m if IN_RING else m & (later == 0), other=0.0)
    if IN_RING:
        return b.to(tl.float32)
    else:
        return tl.where(later, tl.load(p_call + o_call, mask=m & later, other=0.0), b).to(tl.float32)


@triton.jit
def load_entries(
    p_ring,
    p_call,
    o_i,  # [n]
    m_i,
    i_head,
    first,
    window,
    at,
    LENGTH: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    IN_RING: tl.constexpr,
):
    """Columns first.. of entries o_i where m_i, 0 elsewhere: float32 [n, BLOCK]."""
    cursor, start = window
    i_n, row = at
    o = first + tl.arange(0, BLOCK)
    o_ring = ((i_n * LENGTH + o_i) * HEADS + i_head) * WIDTH
    o_call = ((row + start + o_i) * HEADS + i_head) * WIDTH
    m = m_i[:, None] & (o < WIDTH)[None, :]
    later = (start + o_i >= 0)[:, None]
    return load_either(p_ring, o_ring[:, None] + o[None, :], p_call, o_call[:, None] + o[None, :], m, later, IN_RING)


@triton.jit
def load_block(
    ring,
    call,
    block,
    since,  # log decay from the entries after this block to the token: a number, for KDA [BK]
    window,
    at,
    i_v,
    i_h,
    i_hv,
    dims: tl.constexpr,
    IS_KDA: tl.constexpr,
    IN_RING: tl.constexpr,
):
    """(kd [BL, BK], r [BL, BV], the log decay from before the block) of entries block * BL and on."""
    cursor, start = window
    i_n, row = at
    H: tl.constexpr = dims[0]
    HV: tl.constexpr = dims[1]
    K: tl.constexpr = dims[2]
    V: tl.constexpr = dims[3]
    BK: tl.constexpr = dims[4]
    BV: tl.constexpr = dims[5]
    LENGTH: tl.constexpr = dims[6]
    BL: tl.constexpr = dims[7]
    i = tl.arange(0, BL)
    o_i = block * BL + i
    m_i = o_i < cursor
    b_k = load_entries(ring[0], call[0], o_i, m_i, i_h, 0, window, at, LENGTH, H, K, BK, IN_RING)
    b_r = load_entries(ring[1], call[1], o_i, m_i, i_hv, i_v, window, at, LENGTH, HV, V, BV, IN_RING)
    after = i[:, None] < i[None, :]  # what decays an entry are the entries after it
    if IS_KDA:
        b_g = load_entries(ring[2], call[2], o_i, m_i, i_hv, 0, window, at, LENGTH, HV, K, BK, IN_RING)
        b_g = tl.where(b_g < -1e30, -1e30, b_g)  # the product below would make NaN of 0 * -inf
        b_log = tl.dot(after.to(tl.float32), b_g, input_precision="tf32x3") + since[None, :]
        return b_k * tl.exp(b_log), b_r, since + tl.sum(b_g, axis=0)
    else:
        o_ring = (i_n * LENGTH + o_i) * HV + i_hv
        o_call = (row + start + o_i) * HV + i_hv
        b_g = load_either(ring[2], o_ring, call[2], o_call, m_i, start + o_i >= 0, IN_RING)
        b_log = tl.sum(tl.where(after, b_g[None, :], 0.0), axis=1) + since
        return b_k * tl.exp(b_log)[:, None], b_r, since + tl.sum(b_g, axis=0)


@triton.jit
def join_token(
    b_code,  # the checkpoint's, [BK // BL, BL, BV]
    b_scale,
    p_q,  # of the token, [K]
    p_k,
    v,
    g,
    beta,
    scale,
    ring,
    call,
    window,
    at,
    i_v,
    i_h,
    i_hv,
    dims: tl.constexpr,
    IS_KDA: tl.constexpr,
    GRANULARITY: tl.constexpr,
    IN_RING: tl.constexpr,
):
    """(o [BV], r [BV] as the ring keeps it) of a token that joins the ring."""
    K: tl.constexpr = dims[2]
    BK: tl.constexpr = dims[4]
    BV: tl.constexpr = dims[5]
    LENGTH: tl.constexpr = dims[6]
    BL: tl.constexpr = dims[7]
    BLOCKS: tl.constexpr = (LENGTH + BL - 1) // BL
    RING: tl.constexpr = ring[1].dtype.element_ty
    o_k = tl.arange(0, BK)
    # Loaded for every entry, in the layout that their keys have: nothing has to pass between threads.
    everywhere = tl.zeros([BL], tl.int32)[:, None] + o_k[None, :]
    b_q = tl.load(p_q + everywhere, mask=everywhere < K, other=0.0).to(tl.float32)
    b_k = tl.load(p_k + everywhere, mask=everywhere < K, other=0.0).to(RING).to(tl.float32)
    b_error = tl.zeros([BL, BV], tl.float32)
    b_out = tl.zeros([BL, BV], tl.float32)
    since = g
    for back in tl.static_range(BLOCKS):
        block = BLOCKS - 1 - back
        b_kd, b_r, since = load_block(ring, call, block, since, window, at, i_v, i_h, i_hv, dims, IS_KDA, IN_RING)
        b_error += tl.sum(b_kd * b_k, axis=1)[:, None] * b_r
        b_out += (tl.sum(b_kd * b_q, axis=1) * scale)[:, None] * b_r
    # The checkpoint's rows are summed into the entries', and both once over threads.
    q = tl.load(p_q + o_k, mask=o_k < K, other=0.0).to(tl.float32) * scale
    k = tl.load(p_k + o_k, mask=o_k < K, other=0.0).to(RING).to(tl.float32)
    b_decay = tl.exp(since)
    b_error += read_checkpoint(b_code, b_scale, k * b_decay, GRANULARITY)
    b_out += read_checkpoint(b_code, b_scale, q * b_decay, GRANULARITY)
    b_error, b_out = tl.split(tl.sum(tl.join(b_error, b_out), axis=0))
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
def decayed_state(
    b_s,
    g,
    ring,
    call,
    window,
    at,
    i_v,
    i_h,
    i_hv,
    dims: tl.constexpr,
    IS_KDA: tl.constexpr,
    IN_RING: tl.constexpr,
):
    """R [BK, BV] of a token, from the checkpoint b_s and the entries."""
    LENGTH: tl.constexpr = dims[6]
    BL: tl.constexpr = dims[7]
    BLOCKS: tl.constexpr = (LENGTH + BL - 1) // BL if LENGTH > 1 else 0
    since = g
    b_entries = tl.zeros([b_s.shape[0], b_s.shape[1]], tl.float32)
    for back in tl.static_range(BLOCKS):
        block = BLOCKS - 1 - back
        b_kd, b_r, since = load_block(ring, call, block, since, window, at, i_v, i_h, i_hv, dims, IS_KDA, IN_RING)
        b_entries = tl.dot(tl.trans(b_kd), b_r, b_entries, input_precision="tf32x3")
    b_decay = tl.exp(since)
    if IS_KDA:
        b_decay = b_decay[:, None]
    if LENGTH > 1:
        return b_s * b_decay + b_entries
    else:
        return b_s * b_decay


@triton.jit
def flush_token(
    b_s,
    token,  # (q, k, v, g, beta) as `load_token` has them
    scale,
    ring,
    call,
    window,
    at,
    i_v,
    i_h,
    i_hv,
    dims: tl.constexpr,
    IS_KDA: tl.constexpr,
    FORMAT: tl.constexpr,
    GRANULARITY: tl.constexpr,
    READ_STORED: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
    IN_RING: tl.constexpr,
):
    """(o [BV], r [BV], codes and scales of the new checkpoint) of a window's last token; b_s: the checkpoint before."""
    q, k, v, g, beta = token
    RING: tl.constexpr = ring[1].dtype.element_ty
    b_q = q.to(tl.float32) * scale
    b_k = k.to(RING).to(tl.float32)
    b_s = decayed_state(b_s, g, ring, call, window, at, i_v, i_h, i_hv, dims, IS_KDA, IN_RING)
    b_r = (beta.to(tl.float32) * (v.to(tl.float32) - tl.sum(b_s * b_k[:, None], axis=0))).to(RING).to(tl.float32)
    b_s = tl.fma(b_k[:, None], tl.broadcast_to(b_r[None, :], b_s.shape), b_s)
    b_code, b_scale, b_stored = round_state(b_s, FORMAT, GRANULARITY, HARDWARE_FP8)
    if READ_STORED:
        b_o = tl.sum(b_stored * b_q[:, None], axis=0)
    else:
        b_o = tl.sum(b_s * b_q[:, None], axis=0)
    return b_o, b_r, b_code, b_scale


@triton.jit
def store_ring(leaving, ring, call, window, at, i_v, i_h, i_hv, dims: tl.constexpr, IS_KDA: tl.constexpr):
    """The entries in use after a call, zeros behind them; k by the first program of a key head, g by a value head's."""
    cursor, start = window
    i_n, row = at
    H: tl.constexpr = dims[0]
    HV: tl.constexpr = dims[1]
    K: tl.constexpr = dims[2]
    V: tl.constexpr = dims[3]
    BK: tl.constexpr = dims[4]
    BV: tl.constexpr = dims[5]
    LENGTH: tl.constexpr = dims[6]
    BL: tl.constexpr = dims[7]
    p_k, p_r, p_g = leaving
    o_k = tl.arange(0, BK)[None, :]
    o_v = i_v + tl.arange(0, BV)[None, :]
    for block in tl.static_range((LENGTH + BL - 1) // BL):
        o_i = block * BL + tl.arange(0, BL)
        m_i = o_i < cursor
        entry = (i_n * LENGTH + o_i)[:, None]
        m = (o_i < LENGTH)[:, None]
        b = load_entries(ring[1], call[1], o_i, m_i, i_hv, i_v, window, at, LENGTH, HV, V, BV, False)
        tl.store(p_r + (entry * HV + i_hv) * V + o_v, b.to(p_r.dtype.element_ty), mask=m & (o_v < V))
        m = m & (i_v == 0)
        b = load_entries(ring[0], call[0], o_i, m_i, i_h, 0, window, at, LENGTH, H, K, BK, False)
        m_k = m & (o_k < K) & (i_hv % (HV // H) == 0)
        tl.store(p_k + (entry * H + i_h) * K + o_k, b.to(p_k.dtype.element_ty), mask=m_k)
        if IS_KDA:
            b = load_entries(ring[2], call[2], o_i, m_i, i_hv, 0, window, at, LENGTH, HV, K, BK, False)
            tl.store(p_g + (entry * HV + i_hv) * K + o_k, b, mask=m & (o_k < K))
        else:
            b = load_entries(ring[2], call[2], o_i, m_i, i_hv, 0, window, at, LENGTH, HV, 1, 1, False)
            tl.store(p_g + entry * HV + i_hv, b, mask=m)


@triton.jit
def append(ring, entry, b_k, b_r, b_g, i_v, i_h, i_hv, dims: tl.constexpr, IS_KDA: tl.constexpr):
    """An entry, in row `entry` of [N * LENGTH]."""
    H: tl.constexpr = dims[0]
    HV: tl.constexpr = dims[1]
    K: tl.constexpr = dims[2]
    V: tl.constexpr = dims[3]
    p_k, p_r, p_g = ring
    o_k = tl.arange(0, dims[4])
    o_v = i_v + tl.arange(0, dims[5])
    first = i_v == 0
    tl.store(p_r + (entry * HV + i_hv) * V + o_v, b_r.to(p_r.dtype.element_ty), mask=o_v < V)
    m_k = (o_k < K) & first & (i_hv % (HV // H) == 0)
    tl.store(p_k + (entry * H + i_h) * K + o_k, b_k.to(p_k.dtype.element_ty), mask=m_k)
    if IS_KDA:
        tl.store(p_g + (entry * HV + i_hv) * K + o_k, b_g, mask=(o_k < K) & first)
    else:
        tl.store(p_g + entry * HV + i_hv, b_g, mask=first)


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
    at = (i_n, i_n)
    ring = (p_ring_k, p_ring_r, p_ring_g)
    dims: tl.constexpr = (H, HV, K, V, BK, BV, LENGTH, BL)
    head = i_n * HV + i_hv
    cursor = tl.load(p_cursor + i_n)
    window = (cursor, 0)
    q, k, v, g, beta = load_token(p_q, p_k, p_v, p_g, p_beta, i_n, i_h, i_hv, o_k, o_v, H, HV, K, V, IS_KDA)
    if cursor == LENGTH - 1:
        b_s = load_rounded(p_values, p_scale, head, i_v, K, V, BK, BV, FORMAT, GRANULARITY, HARDWARE_FP8, VECTOR)
        b_o, b_r, b_code, b_scale = flush_token(
            b_s,
            (q, k, v, g, beta),
            scale,
            ring,
            ring,
            window,
            at,
            i_v,
            i_h,
            i_hv,
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
            ring,
            ring,
            window,
            at,
            i_v,
            i_h,
            i_hv,
            dims,
            IS_KDA,
            GRANULARITY,
            True,
        )
        append(ring, i_n * LENGTH + cursor, k, b_r, g, i_v, i_h, i_hv, dims, IS_KDA)
        tl.store(p_o + head * V + o_v, b_o.to(p_o.dtype.element_ty), mask=o_v < V)
    tl.store(p_cursor_out + i_n, (cursor + 1) % LENGTH, mask=(i_v == 0) & (i_hv == 0))


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
    at = (i_n, row)
    ring = (p_ring_k, p_ring_r, p_ring_g)
    call = (p_k, p_r, p_g)
    dims: tl.constexpr = (H, HV, K, V, BK, BV, LENGTH, BL)
    head = i_n * HV + i_hv
    cursor = tl.load(p_cursor + i_n)
    start = -cursor
    slot = i_n * SLOTS
    # The checkpoint goes through memory, so that what is read of it lies in registers as it does in a step.
    b_code, b_scale = load_kept(p_values, p_scale, head, i_v, K, V, BK, BV, FORMAT, GRANULARITY, HARDWARE_FP8, VECTOR)
    store_rounded(
        p_values_out, p_scale_out, head, b_code, b_scale, i_v, K, V, FORMAT, GRANULARITY, HARDWARE_FP8, VECTOR
    )
    tl.debug_barrier()
    b_part = load_parts(p_values_out, head, i_v, K, V, BK, BV, BL, FORMAT, HARDWARE_FP8, VECTOR)
    b_part_scale = load_scales(p_scale_out, head, i_v, K, V, BK, BV, FORMAT, GRANULARITY)
    q, k, v, g, beta = load_token(p_q, p_k, p_v, p_g, p_beta, row, i_h, i_hv, o_k, o_v, H, HV, K, V, IS_KDA)
    for t in range(count):
        window = (cursor, start)
        if cursor == LENGTH - 1:
            b_s = load_rounded(
                p_values_out, p_scale_out, head, i_v, K, V, BK, BV, FORMAT, GRANULARITY, HARDWARE_FP8, VECTOR
            )
            b_o, b_r, b_code, b_scale = flush_token(
                b_s,
                (q, k, v, g, beta),
                scale,
                ring,
                call,
                window,
                at,
                i_v,
                i_h,
                i_hv,
                dims,
                IS_KDA,
                FORMAT,
                GRANULARITY,
                READ_STORED,
                HARDWARE_FP8,
                False,
            )
            store_rounded(
                p_values_out, p_scale_out, head, b_code, b_scale, i_v, K, V, FORMAT, GRANULARITY, HARDWARE_FP8, VECTOR
            )
            if SLOTS > 0:
                saved = slot * HV + i_hv
                store_rounded(
                    p_saved, p_saved_scale, saved, b_code, b_scale, i_v, K, V, FORMAT, GRANULARITY, HARDWARE_FP8, VECTOR
                )
            tl.debug_barrier()
            b_part = load_parts(p_values_out, head, i_v, K, V, BK, BV, BL, FORMAT, HARDWARE_FP8, VECTOR)
            b_part_scale = load_scales(p_scale_out, head, i_v, K, V, BK, BV, FORMAT, GRANULARITY)
        else:
            b_o, b_r = join_token(
                b_part,
                b_part_scale,
                p_q + ((row + t) * H + i_h) * K,
                p_k + ((row + t) * H + i_h) * K,
                v,
                g,
                beta,
                scale,
                ring,
                call,
                window,
                at,
                i_v,
                i_h,
                i_hv,
                dims,
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
    leaving = (p_ring_k_out, p_ring_r_out, p_ring_g_out)
    store_ring(leaving, ring, call, (cursor, start), at, i_v, i_h, i_hv, dims, IS_KDA)
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
    BL: tl.constexpr,
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
    at = (i_n, i_b * T + first)
    ring = (p_ring_k, p_ring_r, p_ring_g)
    call = (p_k, p_r, p_g)
    dims: tl.constexpr = (H, HV, K, V, BK, BV, LENGTH, BL)
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
        b_s = decayed_state(b_s, g, ring, call, (cursor, t - cursor), at, i_v, i_h, i_hv, dims, IS_KDA, False)
        b_k = k.to(tl.float32)
        b_decay = tl.exp(g)
        if IS_KDA:
            b_decay = b_decay[:, None]
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
