"""One token of replay, in the two ways that there are: it joins the ring, or it is the last of its window.

A token that joins reads the checkpoint C and the entries (k_i, r_i, g_i) and forms no state. With E the log decay from
an entry (or from C) to the token and kd = k∘exp(E),

    Rᵀk = Cᵀ(k∘exp(E_C)) + Σ_i (kd_iᵀk) r_i,   r = β(v − Rᵀk),   o = Cᵀ(q∘exp(E_C)) + Σ_i (kd_iᵀq) r_i + (kᵀq) r

so that C is read in codes: a tile's scale multiplies two vectors, not 128 rows. The last token of a window builds
R = Diag(exp(E_C)) C + Σ_i kd_i r_iᵀ, one entry after another, goes on as mode "token" does, and rounds.

Groups of arguments (ring, call, at, window, dims): see `replay_ring`; counters: see `load_counters`.
"""

import triton
import triton.language as tl

from jlaqat.kernels.kept_state import round_state
from jlaqat.kernels.philox import draw_words
from jlaqat.kernels.replay_ring import keep_key, keep_update, load_block, load_entry, read_factor
from jlaqat.kernels.rounding import decode


@triton.jit
def join_token(
    b_code,  # the checkpoint's, [BK // BL, BL, BV]
    b_scale,
    p_q,  # of the token, [K]
    p_k,
    k_scale,
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
    """(o [BV], r [BV] and its scale as they are kept) of a token that joins the ring."""
    K: tl.constexpr = dims[2]
    BK: tl.constexpr = dims[4]
    BV: tl.constexpr = dims[5]
    LENGTH: tl.constexpr = dims[6]
    BL: tl.constexpr = dims[7]
    FP8: tl.constexpr = dims[8]
    BLOCKS: tl.constexpr = (LENGTH + BL - 1) // BL
    o_k = tl.arange(0, BK)
    # Loaded for every entry, in the layout that their keys have: nothing has to pass between threads.
    everywhere = tl.zeros([BL], tl.int32)[:, None] + o_k[None, :]
    b_q = tl.load(p_q + everywhere, mask=everywhere < K, other=0.0).to(tl.float32)
    b_k = read_factor(keep_key(tl.load(p_k + everywhere, mask=everywhere < K, other=0), ring[0]), k_scale, FP8)
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
    k = read_factor(keep_key(tl.load(p_k + o_k, mask=o_k < K, other=0), ring[0]), k_scale, FP8)
    b_decay = tl.exp(since)
    b_error += read_checkpoint(b_code, b_scale, k * b_decay, GRANULARITY)
    b_out += read_checkpoint(b_code, b_scale, q * b_decay, GRANULARITY)
    b_error, b_out = tl.split(tl.sum(tl.join(b_error, b_out), axis=0))
    b_kept, r_scale = keep_update(beta.to(tl.float32) * (v.to(tl.float32) - b_error), ring[1], FP8)
    b_o = b_out + tl.sum(k * q, axis=0) * read_factor(b_kept, r_scale, FP8)
    return b_o, b_kept, r_scale


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
    """R [BK, BV] of a token, from the checkpoint b_s and the entries, the newest first."""
    LENGTH: tl.constexpr = dims[6]
    cursor, start = window
    since = g  # log decay from the entries already read to the token
    b_entries = tl.zeros([b_s.shape[0], b_s.shape[1]], tl.float32)
    for back in range(cursor):
        b_k, b_r, b_g = load_entry(ring, call, cursor - 1 - back, window, at, i_v, i_h, i_hv, dims, IS_KDA, IN_RING)
        b_kd = b_k * tl.exp(since)
        b_entries = tl.fma(b_kd[:, None], tl.broadcast_to(b_r[None, :], b_s.shape), b_entries)
        since += b_g
    b_decay = tl.exp(since)
    if IS_KDA:
        b_decay = b_decay[:, None]
    if LENGTH > 1:
        return b_s * b_decay + b_entries
    else:
        return b_s * b_decay


@triton.jit
def load_counters(p_counters, state, tokens, DRAWN: tl.constexpr):
    """What bits are drawn by at the rounding after so many of the call's tokens, as `draw_words` takes it."""
    if DRAWN:
        p = p_counters + state * 4
        return tl.load(p) + tokens, tl.load(p + 1), tl.load(p + 2), tl.load(p + 3)
    else:
        return 0, 0, 0, 0


@triton.jit
def load_lost(
    p_lost,
    state,
    i_v,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    FEEDBACK: tl.constexpr,
):
    """What a state's last rounding lost, [BK, BV]; 0 where not FEEDBACK."""
    if FEEDBACK:
        o_k = tl.arange(0, BK)[:, None]
        o_v = i_v + tl.arange(0, BV)[None, :]
        return tl.load(p_lost + state * K * V + (o_k * V + o_v), mask=(o_k < K) & (o_v < V), other=0.0)
    else:
        return 0.0


@triton.jit
def store_lost(p_lost, state, b_lost, i_v, K: tl.constexpr, V: tl.constexpr, FEEDBACK: tl.constexpr):
    if FEEDBACK:
        o_k = tl.arange(0, b_lost.shape[0])[:, None]
        o_v = i_v + tl.arange(0, b_lost.shape[1])[None, :]
        tl.store(p_lost + state * K * V + (o_k * V + o_v), b_lost, mask=(o_k < K) & (o_v < V))


@triton.jit
def flush_token(
    b_s,
    b_lost,
    token,  # (q, k, v, g, beta) as `load_token` has them
    k_scale,
    counters,
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
    DRAWN: tl.constexpr,
    SEED: tl.constexpr,
    FEEDBACK: tl.constexpr,
    IN_RING: tl.constexpr,
):
    """(o [BV], r and its scale as they are kept, the new checkpoint's codes and scales, what was lost) of a window's
    last token.

    b_s: the checkpoint before; b_lost: what its rounding lost.
    """
    V: tl.constexpr = dims[3]
    BK: tl.constexpr = dims[4]
    BV: tl.constexpr = dims[5]
    q, k, v, g, beta = token
    b_q = q.to(tl.float32) * scale
    b_k = read_factor(keep_key(k, ring[0]), k_scale, HARDWARE_FP8)
    b_s = decayed_state(b_s, g, ring, call, window, at, i_v, i_h, i_hv, dims, IS_KDA, IN_RING)
    b_error = v.to(tl.float32) - tl.sum(b_s * b_k[:, None], axis=0)
    b_kept, r_scale = keep_update(beta.to(tl.float32) * b_error, ring[1], HARDWARE_FP8)
    b_r = read_factor(b_kept, r_scale, HARDWARE_FP8)
    b_s = tl.fma(b_k[:, None], tl.broadcast_to(b_r[None, :], b_s.shape), b_s)
    if not READ_STORED:
        b_o = tl.sum(b_s * b_q[:, None], axis=0)
    if FEEDBACK:
        b_s += b_lost
    if DRAWN:
        rounding, layer_and_head, sequence, step = counters
        words = draw_words(rounding, layer_and_head, sequence, step, i_v, V, BK, BV, SEED)
        b_code, b_scale, b_stored = round_state(b_s, FORMAT, GRANULARITY, HARDWARE_FP8, words, DRAWN)
    else:
        b_code, b_scale, b_stored = round_state(b_s, FORMAT, GRANULARITY, HARDWARE_FP8)
    if FEEDBACK:
        b_lost = b_s - b_stored
    if READ_STORED:
        b_o = tl.sum(b_stored * b_q[:, None], axis=0)
    return b_o, b_kept, r_scale, b_code, b_scale, b_lost
