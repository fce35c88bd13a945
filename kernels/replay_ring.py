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

from jlaqat.kernels.halves import halve, join_halves
from jlaqat.kernels.key_order import keys_of_rows
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
    since,  # log decay from the entries after this block to the token: a number, for KDA [BK]
    window,
    at,
    i_h,
    i_hv,
    dims: tl.constexpr,
    GROUPS: tl.constexpr,  # see `order_of_entries`; 1 for GDN
    IS_KDA: tl.constexpr,
    IN_RING: tl.constexpr,
):
    """(k [BL, BK], log decay to the token [BL] or [BL, BK], the log decay from before the block) of entries
    block * BL and on; k is 0 where there is none."""
    cursor, start = window
    i_n, row = at
    H: tl.constexpr = dims[0]
    HV: tl.constexpr = dims[1]
    K: tl.constexpr = dims[2]
    BK: tl.constexpr = dims[4]
    LENGTH: tl.constexpr = dims[6]
    BL: tl.constexpr = dims[7]
    FP8: tl.constexpr = dims[8]
    i = order_of_entries(BL, GROUPS)
    o_i = block * BL + i
    m_i = o_i < cursor
    b_k = load_entries(ring[0], call[0], ring[3], call[3], o_i, m_i, i_h, 0, window, at, LENGTH, H, K, BK, IN_RING, FP8)
    m_next = (o_i + 1 < cursor) & (i < BL - 1)  # what decays an entry are the entries after it
    p, p_call = ring[2], call[2]
    first = load_gates(ring, call, block * BL, block * BL < cursor, window, at, i_hv, dims, IS_KDA, IN_RING)
    if IS_KDA:
        b_next = load_entries(p, p_call, p, p, o_i + 1, m_next, i_hv, 0, window, at, LENGTH, HV, K, BK, IN_RING, FP8)
        b_log, b_all = sum_from_entries(b_next, GROUPS)
        return b_k, b_log + since[None, :], since + first + b_all
    else:
        o_ring = (i_n * LENGTH + o_i + 1) * HV + i_hv
        o_call = (row + start + o_i + 1) * HV + i_hv
        later = start + o_i + 1 >= 0
        b_next = load_either(p, o_ring, p_call, o_call, m_next, later, IN_RING)
        return b_k, tl.cumsum(b_next, axis=0, reverse=True) + since, since + first + tl.sum(b_next, axis=0)


@triton.jit
def order_of_entries(BL: tl.constexpr, GROUPS: tl.constexpr):
    """Entries [BL] of a block in the order in which they lie: a group's, which follow one another, are GROUPS apart."""
    return keys_of_rows(BL, BL // GROUPS)


@triton.jit
def sum_from_entries(b, GROUPS: tl.constexpr):
    """(Σ of each entry's and all later entries' rows, [BL, W]; of all, [W]), for rows as `order_of_entries` has them.

    In the order that is written here, whatever the layout: entry by entry in a group, then over the groups.
    """
    W: tl.constexpr = b.shape[1]
    b, b_group = _sum_from_rows(tl.reshape(b, [b.shape[0] // GROUPS, GROUPS * W]))
    b_later, b_all = _sum_after_columns(tl.permute(tl.reshape(b_group, [GROUPS, W]), (1, 0)))
    b += tl.reshape(tl.permute(b_later, (1, 0)), [1, GROUPS * W])
    return tl.reshape(b, [b.shape[0] * GROUPS, W]), tl.reshape(b_all, [W])


@triton.jit
def _sum_from_rows(b):
    """(sums of each row and all after it; of all rows, [1, W])"""
    if b.shape[0] == 1:
        return b, b
    else:
        b0, b1 = halve(b)
        b0, b_first = _sum_from_rows(b0)
        b1, b_second = _sum_from_rows(b1)
        return join_halves(b0 + b_second, b1), b_first + b_second


@triton.jit
def _sum_after_columns(b):
    """(sums of all columns after each; of all columns, [W, 1])"""
    N: tl.constexpr = b.shape[1]
    if N == 1:
        return tl.zeros(b.shape, tl.float32), b
    else:
        b0, b1 = tl.split(tl.permute(tl.reshape(b, [b.shape[0], 2, N // 2]), (0, 2, 1)))
        b0, b_first = _sum_after_columns(b0)
        b1, b_second = _sum_after_columns(b1)
        return tl.reshape(tl.permute(tl.join(b0 + b_second, b1), (0, 2, 1)), b.shape), b_first + b_second


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
    """r [BL, BV] of entries block * BL and on, 0 where there is none."""
    cursor, start = window
    HV: tl.constexpr = dims[1]
    V: tl.constexpr = dims[3]
    BV: tl.constexpr = dims[5]
    LENGTH: tl.constexpr = dims[6]
    BL: tl.constexpr = dims[7]
    FP8: tl.constexpr = dims[8]
    o_i = block * BL + order_of_entries(BL, GROUPS)
    return load_entries(
        ring[1],
        call[1],
        ring[4],
        call[4],
        o_i,
        o_i < cursor,
        i_hv,
        i_v,
        window,
        at,
        LENGTH,
        HV,
        V,
        BV,
        IN_RING,
        FP8,
        VECTOR,
    )


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
