"""The ring of replay: updates (k, r, g) since a checkpoint, read in blocks of entries, extended and handed on.

Groups of arguments: ring = (k, r, g, scales of k, scales of r) pointers to [N, LENGTH, ...]; call = the same of this
call's tokens, where later entries lie; at = (i_n, row), row being the sequence's first token in `call`; window =
(cursor, start), the number of entries and the token that would be the first one, negative while it lies in the ring;
dims = (H, HV, K, V, BK, BV, LENGTH, BL, HARDWARE_FP8).

k and r are kept in float32 or bfloat16, and then any arrays stand for the scales; or as E4M3 codes (uint8) with a
float32 scale for a key and one for the BV columns of r that a program has.
"""

import triton
import triton.language as tl

from jlaqat.kernels.rounding import compute_scale, decode, encode, magnitude_bits, round_code


@triton.jit
def read_factor(b, b_scale, HARDWARE_FP8: tl.constexpr):
    """k or r in float32, from what is kept of it."""
    if b.dtype == tl.uint8:
        return decode(b, "e4m3", HARDWARE_FP8) * b_scale
    else:
        return b.to(tl.float32)


@triton.jit
def keep_key(b_k, p_ring):
    """A token's k in the ring's dtype; codes are codes already."""
    return b_k.to(p_ring.dtype.element_ty)


@triton.jit
def keep_update(b_r, p_ring, HARDWARE_FP8: tl.constexpr):
    """(r [BV] in the ring's dtype, its scale)."""
    if p_ring.dtype.element_ty == tl.uint8:
        s, r = compute_scale(tl.max(magnitude_bits(b_r), axis=0).to(tl.float32, bitcast=True), 448.0)
        return encode(round_code(b_r * r, "e4m3", HARDWARE_FP8), "e4m3", HARDWARE_FP8), s
    else:
        return b_r.to(p_ring.dtype.element_ty), 1.0


@triton.jit
def load_factor_scale(p, p_scale, o):
    """The scale beside codes; 1 where there are none."""
    if p.dtype.element_ty == tl.uint8:
        return tl.load(p_scale + o)
    else:
        return 1.0


@triton.jit
def load_either(p_ring, o_ring, p_call, o_call, m, later, IN_RING: tl.constexpr):
    """Entries' elements where m, 0 elsewhere: in the ring, or (later) with the call's tokens.

    Two loads and no choice of pointers, which would hide how they are aligned: the layout is that of the ring alone.
    """
    b = tl.load(p_ring + o_ring, mask=m if IN_RING else m & (later == 0), other=0)
    if IN_RING:
        return b
    else:
        return tl.where(later, tl.load(p_call + o_call, mask=m & later, other=0), b)


@triton.jit
def load_kept_entries(
    p_ring,
    p_call,
    p_scale,
    p_call_scale,
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
    VECTOR: tl.constexpr = 16,  # columns that a thread loads at once, at most
):
    """(columns first.. of entries o_i where m_i, 0 elsewhere, [n, BLOCK]; their scales [n, 1]) as they are kept."""
    cursor, start = window
    i_n, row = at
    GROUPS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    o = first + tl.arange(0, BLOCK)
    o_ring = (i_n * LENGTH + o_i) * HEADS + i_head
    o_call = (row + start + o_i) * HEADS + i_head
    m = m_i[:, None] & (o < WIDTH)[None, :]
    later = start + o_i >= 0
    if p_ring.dtype.element_ty == tl.uint8:
        group = first // BLOCK
        o_scale = o_ring * GROUPS + group
        b_scale = load_either(p_scale, o_scale, p_call_scale, o_call * GROUPS + group, m_i, later, IN_RING)[:, None]
    else:
        b_scale = 1.0
    o_ring = tl.max_contiguous((o_ring * WIDTH)[:, None] + o[None, :], [1, VECTOR])
    o_call = tl.max_contiguous((o_call * WIDTH)[:, None] + o[None, :], [1, VECTOR])
    return load_either(p_ring, o_ring, p_call, o_call, m, later[:, None], IN_RING), b_scale


@triton.jit
def load_entries(
    p_ring,
    p_call,
    p_scale,
    p_call_scale,
    o_i,
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
    HARDWARE_FP8: tl.constexpr,
    VECTOR: tl.constexpr = 16,
):
    """The same in float32."""
    b, b_scale = load_kept_entries(
        p_ring,
        p_call,
        p_scale,
        p_call_scale,
        o_i,
        m_i,
        i_head,
        first,
        window,
        at,
        LENGTH,
        HEADS,
        WIDTH,
        BLOCK,
        IN_RING,
        VECTOR,
    )
    return read_factor(b, b_scale, HARDWARE_FP8)


@triton.jit
def load_keys(
    ring,
    call,
    block,
    window,
    at,
    i_h,
    dims: tl.constexpr,
    IN_RING: tl.constexpr,
):
    """k [BL, BK] of entries block * BL and on, 0 where there is none."""
    H: tl.constexpr = dims[0]
    K: tl.constexpr = dims[2]
    BK: tl.constexpr = dims[4]
    LENGTH: tl.constexpr = dims[6]
    BL: tl.constexpr = dims[7]
    FP8: tl.constexpr = dims[8]
    o_i = block * BL + tl.arange(0, BL)
    m_i = o_i < window[0]
    return load_entries(
        ring[0], call[0], ring[3], call[3], o_i, m_i, i_h, 0, window, at, LENGTH, H, K, BK, IN_RING, FP8
    )


@triton.jit
def sum_gates(
    ring,
    call,
    block,
    since,  # log decay from the entries after this block to the token
    window,
    at,
    i_hv,
    dims: tl.constexpr,
    IN_RING: tl.constexpr,
):
    """(log decay from entries block * BL and on to the token, [BL]; that from before them), for GDN.

    Added entry by entry, the newest first, and so with KDA.
    """
    BL: tl.constexpr = dims[7]
    i = tl.arange(0, BL)
    b_log = tl.zeros([BL], tl.float32)
    for back in tl.static_range(BL):
        entry = block * BL + BL - 1 - back
        b_log = tl.where(i == BL - 1 - back, since, b_log)
        since += load_gates(ring, call, entry, entry < window[0], window, at, i_hv, dims, False, IN_RING)
    return b_log, since


@triton.jit
def load_decayed_keys(
    ring,
    call,
    first,
    since,  # log decay from the entries after these to the token, [BK]
    window,
    at,
    i_h,
    i_hv,
    dims: tl.constexpr,
    COUNT: tl.constexpr,
    IN_RING: tl.constexpr,
):
    """(k∘exp(log decay to the token) of COUNT entries from the first on, [BK, COUNT], or [BK] of one; the log decay
    from before them), for KDA. A thread has all entries of a channel, so that nothing passes between threads."""
    if COUNT == 1:
        m = first < window[0]
        b_k = load_key(ring, call, first, m, window, at, i_h, dims, IN_RING)
        b_g = load_gates(ring, call, first, m, window, at, i_hv, dims, True, IN_RING)
        return b_k * tl.exp(since), since + b_g
    else:
        HALF: tl.constexpr = COUNT // 2
        b1, since = load_decayed_keys(ring, call, first + HALF, since, window, at, i_h, i_hv, dims, HALF, IN_RING)
        b0, since = load_decayed_keys(ring, call, first, since, window, at, i_h, i_hv, dims, HALF, IN_RING)
        b = tl.join(b0, b1)
        if HALF > 1:
            b = tl.reshape(tl.permute(b, (0, 2, 1)), [dims[4], COUNT])
        return b, since


@triton.jit
def load_key(ring, call, i, m, window, at, i_h, dims: tl.constexpr, IN_RING: tl.constexpr):
    """k of entry i, [BK] float32; 0 unless m."""
    cursor, start = window
    i_n, row = at
    H: tl.constexpr = dims[0]
    K: tl.constexpr = dims[2]
    LENGTH: tl.constexpr = dims[6]
    FP8: tl.constexpr = dims[8]
    o_k = tl.arange(0, dims[4])
    o_ring, o_call = (i_n * LENGTH + i) * H + i_h, (row + start + i) * H + i_h
    later = start + i >= 0
    b = load_either(ring[0], o_ring * K + o_k, call[0], o_call * K + o_k, m & (o_k < K), later, IN_RING)
    b_scale = 1.0
    if ring[0].dtype.element_ty == tl.uint8:
        b_scale = load_either(ring[3], o_ring, call[3], o_call, m, later, IN_RING)
    return read_factor(b, b_scale, FP8)


@triton.jit
def load_gates(ring, call, i, m, window, at, i_hv, dims: tl.constexpr, IS_KDA: tl.constexpr, IN_RING: tl.constexpr):
    """g of entry i: a number, for KDA [BK]; 0 unless m."""
    cursor, start = window
    i_n, row = at
    HV: tl.constexpr = dims[1]
    K: tl.constexpr = dims[2]
    LENGTH: tl.constexpr = dims[6]
    o_ring, o_call = (i_n * LENGTH + i) * HV + i_hv, (row + start + i) * HV + i_hv
    later = start + i >= 0
    if IS_KDA:
        o_k = tl.arange(0, dims[4])
        m = m & (o_k < K)
        return load_either(ring[2], o_ring * K + o_k, call[2], o_call * K + o_k, m, later, IN_RING)
    else:
        return load_either(ring[2], o_ring, call[2], o_call, m, later, IN_RING)


@triton.jit
def load_updates(
    ring,
    call,
    block,
    window,
    at,
    i_v,
    i_hv,
    dims: tl.constexpr,
    GROUPS: tl.constexpr,
    VECTOR: tl.constexpr,
    IN_RING: tl.constexpr,
):
    """r of entries block * BL and on, 0 where there is none, [BL // GROUPS, GROUPS * BV]: entries that follow one
    another beside one another."""
    cursor, start = window
    i_n, row = at
    HV: tl.constexpr = dims[1]
    V: tl.constexpr = dims[3]
    BV: tl.constexpr = dims[5]
    LENGTH: tl.constexpr = dims[6]
    BL: tl.constexpr = dims[7]
    FP8: tl.constexpr = dims[8]
    ROWS: tl.constexpr = BL // GROUPS
    PARTS: tl.constexpr = (V + BV - 1) // BV
    o = tl.arange(0, GROUPS * BV)
    o_i = (block * BL + tl.arange(0, ROWS) * GROUPS)[:, None] + (o // BV)[None, :]
    o_v = i_v + o % BV
    m = (o_i < cursor) & (o_v < V)[None, :]
    o = tl.max_contiguous(o_i * (HV * V) + o_v[None, :], [1, VECTOR])
    p_ring, p_call = ring[1] + (i_n * LENGTH * HV + i_hv) * V, call[1] + ((row + start) * HV + i_hv) * V
    b = load_either(p_ring, o, p_call, o, m, start + o_i >= 0, IN_RING)
    b_scale = 1.0
    if ring[1].dtype.element_ty == tl.uint8:
        o_i = block * BL + tl.arange(0, ROWS)[:, None] * GROUPS + tl.arange(0, GROUPS)[None, :]
        o_ring, o_call = (i_n * LENGTH + o_i) * HV + i_hv, (row + start + o_i) * HV + i_hv
        o_ring, o_call = o_ring * PARTS + i_v // BV, o_call * PARTS + i_v // BV
        b_scale = load_either(ring[4], o_ring, call[4], o_call, o_i < cursor, start + o_i >= 0, IN_RING)
        b_scale = spread(b_scale, GROUPS, BV)
    return read_factor(b, b_scale, FP8)


@triton.jit
def spread(b_x, GROUPS: tl.constexpr, BV: tl.constexpr):
    """Numbers [rows, GROUPS], or [rows, GROUPS, n] of n parts of the columns, for each column: [rows, GROUPS * BV]."""
    if len(b_x.shape) == 2:
        return tl.reshape(tl.broadcast_to(b_x[:, :, None], [b_x.shape[0], GROUPS, BV]), [b_x.shape[0], GROUPS * BV])
    else:
        SHARED: tl.constexpr = [b_x.shape[0], GROUPS, b_x.shape[2], BV // b_x.shape[2]]
        return tl.reshape(tl.broadcast_to(b_x[:, :, :, None], SHARED), [b_x.shape[0], GROUPS * BV])


@triton.jit
def store_entries(p, p_scale, row, b, b_scale, first, m, WIDTH: tl.constexpr):
    """Rows of k or r as they are kept, [n, BLOCK] and columns first.., where m; row, b_scale and m are [n, 1]."""
    BLOCK: tl.constexpr = b.shape[1]
    GROUPS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    o = first + tl.arange(0, BLOCK)[None, :]
    tl.store(p + (row * WIDTH + o), b, mask=m & (o < WIDTH))
    if p.dtype.element_ty == tl.uint8:
        tl.store(p_scale + (row * GROUPS + first // BLOCK), b_scale, mask=m)


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
    FP8: tl.constexpr = dims[8]
    p_k, p_r, p_g, p_k_scale, p_r_scale = leaving
    o_k = tl.arange(0, BK)[None, :]
    for block in tl.static_range((LENGTH + BL - 1) // BL):
        o_i = block * BL + tl.arange(0, BL)
        m_i = o_i < cursor
        entry = (i_n * LENGTH + o_i)[:, None]
        m = (o_i < LENGTH)[:, None]
        b, b_scale = load_kept_entries(
            ring[1], call[1], ring[4], call[4], o_i, m_i, i_hv, i_v, window, at, LENGTH, HV, V, BV, False
        )
        store_entries(p_r, p_r_scale, entry * HV + i_hv, b, b_scale, i_v, m, V)
        m = m & (i_v == 0)
        b, b_scale = load_kept_entries(
            ring[0], call[0], ring[3], call[3], o_i, m_i, i_h, 0, window, at, LENGTH, H, K, BK, False
        )
        store_entries(p_k, p_k_scale, entry * H + i_h, b, b_scale, 0, m & (i_hv % (HV // H) == 0), K)
        p, p_call = ring[2], call[2]
        if IS_KDA:
            b = load_entries(p, p_call, p, p, o_i, m_i, i_hv, 0, window, at, LENGTH, HV, K, BK, False, FP8)
            tl.store(p_g + (entry * HV + i_hv) * K + o_k, b, mask=m & (o_k < K))
        else:
            b = load_entries(p, p_call, p, p, o_i, m_i, i_hv, 0, window, at, LENGTH, HV, 1, 1, False, FP8)
            tl.store(p_g + entry * HV + i_hv, b, mask=m)


@triton.jit
def append(ring, entry, b_k, k_scale, b_r, r_scale, b_g, i_v, i_h, i_hv, dims: tl.constexpr, IS_KDA: tl.constexpr):
    """An entry, its k and r as they are kept, in row `entry` of [N * LENGTH]."""
    H: tl.constexpr = dims[0]
    HV: tl.constexpr = dims[1]
    K: tl.constexpr = dims[2]
    o_k = tl.arange(0, dims[4])
    first = i_v == 0
    store_update(ring[1], ring[4], entry * HV + i_hv, b_r, r_scale, i_v, dims)
    m = first & (i_hv % (HV // H) == 0)
    tl.store(ring[0] + (entry * H + i_h) * K + o_k, b_k, mask=(o_k < K) & m)
    if ring[0].dtype.element_ty == tl.uint8:
        tl.store(ring[3] + entry * H + i_h, k_scale, mask=m)
    if IS_KDA:
        tl.store(ring[2] + (entry * HV + i_hv) * K + o_k, b_g, mask=(o_k < K) & first)
    else:
        tl.store(ring[2] + entry * HV + i_hv, b_g, mask=first)


@triton.jit
def store_update(p, p_scale, row, b_r, r_scale, i_v, dims: tl.constexpr):
    """A program's columns of r as they are kept, in row `row` of [..., V]."""
    V: tl.constexpr = dims[3]
    BV: tl.constexpr = dims[5]
    o_v = i_v + tl.arange(0, BV)
    tl.store(p + row * V + o_v, b_r, mask=o_v < V)
    if p.dtype.element_ty == tl.uint8:
        tl.store(p_scale + row * ((V + BV - 1) // BV) + i_v // BV, r_scale)
