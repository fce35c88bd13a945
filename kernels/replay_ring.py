"""The ring of replay: updates (k, r, g) since a checkpoint, read in blocks of entries, extended and handed on.

Groups of arguments: ring = (k, r, g) pointers to [N, LENGTH, ...]; call = the same of this call's tokens, where later
entries lie; at = (i_n, row), row being the sequence's first token in `call`; window = (cursor, start), the number of
entries and the token that would be the first one, negative while it lies in the ring; dims = (H, HV, K, V, BK, BV,
LENGTH, BL).
"""

import triton
import triton.language as tl


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
    m_next = (o_i + 1 < cursor) & (i < BL - 1)  # what decays an entry are the entries after it
    if IS_KDA:
        b_g = load_entries(ring[2], call[2], o_i, m_i, i_hv, 0, window, at, LENGTH, HV, K, BK, IN_RING)
        b_next = load_entries(ring[2], call[2], o_i + 1, m_next, i_hv, 0, window, at, LENGTH, HV, K, BK, IN_RING)
        b_log = tl.cumsum(b_next, axis=0, reverse=True) + since[None, :]
        return b_k * tl.exp(b_log), b_r, since + tl.sum(b_g, axis=0)
    else:
        o_ring = (i_n * LENGTH + o_i) * HV + i_hv
        o_call = (row + start + o_i) * HV + i_hv
        later = start + o_i >= 0
        b_g = load_either(ring[2], o_ring, call[2], o_call, m_i, later, IN_RING)
        later = start + o_i + 1 >= 0
        b_next = load_either(ring[2], o_ring + HV, call[2], o_call + HV, m_next, later, IN_RING)
        b_log = tl.cumsum(b_next, axis=0, reverse=True) + since
        return b_k * tl.exp(b_log)[:, None], b_r, since + tl.sum(b_g, axis=0)


@triton.jit
def load_entry(
    ring,
    call,
    i,
    window,
    at,
    i_v,
    i_h,
    i_hv,
    dims: tl.constexpr,
    IS_KDA: tl.constexpr,
    IN_RING: tl.constexpr,
):
    """(k [BK], r [BV], g: a number, for KDA [BK]) of entry i, which is in use."""
    cursor, start = window
    i_n, row = at
    H: tl.constexpr = dims[0]
    HV: tl.constexpr = dims[1]
    K: tl.constexpr = dims[2]
    V: tl.constexpr = dims[3]
    LENGTH: tl.constexpr = dims[6]
    o_k = tl.arange(0, dims[4])
    o_v = i_v + tl.arange(0, dims[5])
    in_ring = i_n * LENGTH + i
    in_call = row + start + i
    later = start + i >= 0
    m_k = o_k < K
    m_v = o_v < V
    later_k = m_k & later
    later_v = m_v & later
    o_ring = (in_ring * H + i_h) * K + o_k
    b_k = load_either(ring[0], o_ring, call[0], (in_call * H + i_h) * K + o_k, m_k, later_k, IN_RING)
    o_ring = (in_ring * HV + i_hv) * V + o_v
    b_r = load_either(ring[1], o_ring, call[1], (in_call * HV + i_hv) * V + o_v, m_v, later_v, IN_RING)
    if IS_KDA:
        o_ring = (in_ring * HV + i_hv) * K + o_k
        b_g = load_either(ring[2], o_ring, call[2], (in_call * HV + i_hv) * K + o_k, m_k, later_k, IN_RING)
    else:
        always = i >= 0
        b_g = load_either(ring[2], in_ring * HV + i_hv, call[2], in_call * HV + i_hv, always, later, IN_RING)
    return b_k, b_r, b_g


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
