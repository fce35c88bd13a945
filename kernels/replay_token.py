"""Replay token by token: every token joins the ring. The last of a window then folds it into a new checkpoint
(`replay_flush`).

A token reads the checkpoint C and the entries (k_i, r_i, g_i) and forms no state. With E the log decay from an entry
(or from C) to the token,

    Rᵀk = Cᵀ(k∘exp(E_C)) + Σ_i (k_i∘exp(E_i))ᵀk r_i,   r = β(v − Rᵀk)
    o = Cᵀ(q∘exp(E_C)) + Σ_i (k_i∘exp(E_i))ᵀq r_i + (kᵀq) r

so that C is read in codes: a tile's scale multiplies a sum, not 128 rows.

A step and a longer call have the same bits although their programs have other widths, since the order of their sums is
written down: a sum over K or over entries goes over the rows of each of GROUPS, one after another, then over the
groups. Left to the layout are sums that no width enters, over the channels of keys.

Groups of arguments (ring, call, at, window, dims): see `replay_ring`.
"""

import triton
import triton.language as tl

from jlaqat.kernels.halves import halve
from jlaqat.kernels.kept_state import load_scales
from jlaqat.kernels.replay_ring import (
    keep_key,
    keep_update,
    load_decayed_keys,
    load_keys,
    load_updates,
    read_factor,
    spread,
    sum_gates,
)
from jlaqat.kernels.rounding import decode
from jlaqat.kernels.token_gradients import add_by_columns, add_by_rows


@triton.jit
def join_token(
    b_kept,  # the checkpoint's first quarters, see `load_quarters`; the others are loaded when the ring has been read
    b_scale,
    p_values,  # of the checkpoint
    head,
    p_q,  # of the token, [K]
    p_k,
    p_v,  # [V]; v and beta are loaded when the ring has been read, for want of registers
    p_beta,
    q,
    k,
    k_scale,
    g,
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
    VECTOR: tl.constexpr,
    GROUPS: tl.constexpr,  # of rows, as many as warps: one has a group to itself
    DEPTHS: tl.constexpr,  # log2 of the rows of a group, of its entries, of the channels that a thread has side by side
    IN_RING: tl.constexpr,
):
    """(o [BV], r [BV] and its scale as they are kept) of a token that joins the ring."""
    K: tl.constexpr = dims[2]
    BK: tl.constexpr = dims[4]
    BV: tl.constexpr = dims[5]
    LENGTH: tl.constexpr = dims[6]
    BL: tl.constexpr = dims[7]
    FP8: tl.constexpr = dims[8]
    BLOCKS: tl.constexpr = (LENGTH + BL - 1) // BL
    WEIGHTS: tl.constexpr = [BL // GROUPS, GROUPS]
    o_k = tl.arange(0, BK)
    everywhere = tl.zeros([BL], tl.int32)[:, None] + o_k[None, :]
    b_error = tl.zeros([1, GROUPS * BV], tl.float32)
    b_out = tl.zeros([1, GROUPS * BV], tl.float32)
    since = g
    for back in tl.static_range(BLOCKS):
        block = BLOCKS - 1 - back
        if block * BL < window[0]:
            b_r = load_updates(ring, call, block, window, at, i_v, i_hv, dims, GROUPS, VECTOR, IN_RING)
            # Loaded for every entry, in the layout that their keys have: nothing has to pass between threads.
            b_q = tl.load(p_q + everywhere, mask=everywhere < K, other=0.0).to(tl.float32)
            b_k = read_factor(keep_key(tl.load(p_k + everywhere, mask=everywhere < K, other=0), ring[0]), k_scale, FP8)
            if IS_KDA:
                b_entry, since = load_decayed_keys(
                    ring, call, block * BL, since, window, at, i_h, i_hv, dims, BL, IN_RING
                )
                b_entry = tl.trans(b_entry)
                with_k, with_q = product_of_keys(b_entry, b_k, DEPTHS[2]), product_of_keys(b_entry, b_q, DEPTHS[2])
            else:
                b_entry = load_keys(ring, call, block, window, at, i_h, dims, IN_RING)
                b_log, since = sum_gates(ring, call, block, since, window, at, i_hv, dims, IN_RING)
                b_decay = tl.exp(b_log)
                with_k = product_of_keys(b_entry, b_k, DEPTHS[2]) * b_decay
                with_q = product_of_keys(b_entry, b_q, DEPTHS[2]) * b_decay
            with_k, with_q = tl.reshape(with_k, WEIGHTS), tl.reshape(with_q * scale, WEIGHTS)
            b_error = add_by_rows(b_r, spread(with_k, GROUPS, BV), b_error, DEPTHS[1])
            b_out = add_by_rows(b_r, spread(with_q, GROUPS, BV), b_out, DEPTHS[1])
    o_v = i_v + tl.arange(0, BV)
    v = tl.load(p_v + o_v, mask=o_v < dims[3], other=0.0).to(tl.float32)
    beta = tl.load(p_beta).to(tl.float32)
    q = q.to(tl.float32) * scale
    k = read_factor(keep_key(k, ring[0]), k_scale, FP8)
    with_itself = tl.sum(k * q, axis=0)
    b_kept += load_quarters(p_values, head, len(b_kept), 4, i_v, K, dims[3], BK, BV, GROUPS, VECTOR)
    b_decay = tl.exp(since)
    b_error, b_out = read_checkpoint(
        b_kept, b_scale, k * b_decay, q * b_decay, b_error, b_out, GROUPS, BV, FORMAT, GRANULARITY, FP8, DEPTHS[0]
    )
    b_error, b_out = add_groups(b_error, b_out, GROUPS, BV)
    b_r, r_scale = keep_update(beta * (v - b_error), ring[1], FP8)
    b_o = b_out + with_itself * read_factor(b_r, r_scale, FP8)
    return b_o, b_r, r_scale


@triton.jit
def product_of_keys(b_x, b_y, DEPTH: tl.constexpr):
    """Σ x∘y over channels, [BL]"""
    b_sum = tl.zeros([b_x.shape[0], b_x.shape[1] >> DEPTH], tl.float32)
    return tl.sum(add_by_columns(b_x, b_y, b_sum, DEPTH), axis=1)


@triton.jit
def add_groups(b_x, b_y, GROUPS: tl.constexpr, BV: tl.constexpr):
    """Sums over the groups of two [1, GROUPS * BV]: [BV] each."""
    b = tl.join(tl.reshape(b_x, [GROUPS, BV]), tl.reshape(b_y, [GROUPS, BV]))
    return tl.split(add_halves(tl.permute(b, (1, 2, 0))))


@triton.jit
def add_halves(b):
    """Sums over the last axis of [BV, 2, n]: of its even and its odd elements, and of those likewise."""
    if b.shape[2] == 1:
        return tl.reshape(b, [b.shape[0], b.shape[1]])
    else:
        b0, b1 = tl.split(tl.reshape(b, [b.shape[0], b.shape[1], b.shape[2] // 2, 2]))
        return add_halves(b0 + b1)


@triton.jit
def load_quarters(
    p_values,
    state,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    i_v,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    GROUPS: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """A checkpoint's quarters FIRST..LAST of four, codes, without codes the values, as they lie in memory: row i of
    every group. Quarters, so that few numbers are decoded at a time."""
    b_kept = ()
    for quarter in tl.static_range(FIRST, LAST):
        b_kept += (load_quarter(p_values, state, quarter, i_v, K, V, BK, BV, GROUPS, VECTOR),)  # type: ignore[assignment]
    return b_kept


@triton.jit
def load_quarter(
    p_values,
    state,
    quarter: tl.constexpr,
    i_v,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    GROUPS: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """[BK // 4, BV]: row i of every group, and then row i + 1."""
    ROWS: tl.constexpr = BK // GROUPS // 4
    o = tl.arange(0, BK // 4)
    o_k = (o % GROUPS * (4 * ROWS) + quarter * ROWS + o // GROUPS)[:, None]
    o_v = i_v + tl.arange(0, BV)[None, :]
    o = tl.max_contiguous(o_k * V + o_v, [1, VECTOR])  # of the sum: the columns may be those of other loads
    return tl.load(p_values + state * K * V + o, mask=(o_k < K) & (o_v < V), other=0)


@triton.jit
def load_checkpoint_scales(
    p_scale,
    state,
    i_v,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    FORMAT: tl.constexpr,
    GRANULARITY: tl.constexpr,
    SHARED_BY: tl.constexpr,  # columns, by tile and key_row
):
    """As `load_scales` has them, but [BV] for a tile and [BK, BV // SHARED_BY] for key rows: a program has several."""
    COLUMNS: tl.constexpr = (V + SHARED_BY - 1) // SHARED_BY
    o_k = tl.arange(0, BK)
    o_v = i_v + tl.arange(0, BV)
    if GRANULARITY == "tile":
        return tl.load(p_scale + state * COLUMNS + o_v // SHARED_BY, mask=o_v < V, other=0.0)
    elif GRANULARITY == "key_row":
        o = i_v // SHARED_BY + tl.arange(0, BV // SHARED_BY)
        m = (o_k < K)[:, None] & (o < COLUMNS)[None, :]
        return tl.load(p_scale + (state * K + o_k)[:, None] * COLUMNS + o[None, :], mask=m, other=0.0)
    else:
        return load_scales(p_scale, state, i_v, K, V, BK, BV, FORMAT, GRANULARITY)


@triton.jit
def read_checkpoint(
    b_kept,
    b_scale,
    b_x,
    b_y,
    b_sum_x,
    b_sum_y,
    GROUPS: tl.constexpr,
    BV: tl.constexpr,
    FORMAT: tl.constexpr,
    GRANULARITY: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """sums + Cᵀx and Cᵀy by groups, [1, GROUPS * BV], the scales multiplied in where they are fewest."""
    ROWS: tl.constexpr = b_x.shape[0] // GROUPS
    if GRANULARITY == "key_row":
        COLUMNS: tl.constexpr = b_scale.shape[1]
        b_x = spread(tl.permute(tl.reshape(b_x[:, None] * b_scale, [GROUPS, ROWS, COLUMNS]), (1, 0, 2)), GROUPS, BV)
        b_y = spread(tl.permute(tl.reshape(b_y[:, None] * b_scale, [GROUPS, ROWS, COLUMNS]), (1, 0, 2)), GROUPS, BV)
    else:
        b_x = spread(tl.permute(tl.reshape(b_x, [GROUPS, ROWS]), (1, 0)), GROUPS, BV)
        b_y = spread(tl.permute(tl.reshape(b_y, [GROUPS, ROWS]), (1, 0)), GROUPS, BV)
    SCALED: tl.constexpr = GRANULARITY == "tile" or GRANULARITY == "value_row"
    if SCALED:
        b_read_x = tl.zeros([1, GROUPS * BV], tl.float32)
        b_read_y = tl.zeros([1, GROUPS * BV], tl.float32)
    else:
        b_read_x, b_read_y = b_sum_x, b_sum_y
    x0, x1 = halve(b_x)
    y0, y1 = halve(b_y)
    x00, x01 = halve(x0)
    x10, x11 = halve(x1)
    y00, y01 = halve(y0)
    y10, y11 = halve(y1)
    b_xs, b_ys = (x00, x01, x10, x11), (y00, y01, y10, y11)
    for i in tl.static_range(4):
        b = decode(b_kept[i], FORMAT, HARDWARE_FP8) if b_kept[i].dtype == tl.uint8 else b_kept[i].to(tl.float32)
        b = tl.reshape(b, [ROWS // 4, GROUPS * BV])
        b_read_x = add_by_rows(b, b_xs[i], b_read_x, DEPTH - 2)
        b_read_y = add_by_rows(b, b_ys[i], b_read_y, DEPTH - 2)
    if SCALED:
        b_scale = tl.reshape(tl.broadcast_to(b_scale[None, None, :], [1, GROUPS, BV]), [1, GROUPS * BV])
        b_read_x, b_read_y = tl.fma(b_read_x, b_scale, b_sum_x), tl.fma(b_read_y, b_scale, b_sum_y)
    return b_read_x, b_read_y
