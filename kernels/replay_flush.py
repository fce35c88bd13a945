"""Replay's rounding: the last token of a window folds its ring into a new checkpoint.

W = Diag(exp(E_C)) C + Σ_i (k_i∘exp(E_i)) r_iᵀ, with E the log decay from an entry, or from the checkpoint C, to that
token, is rounded. Sums over entries are products of FLUSHED at a time, in this order however wide a program is.

Groups of arguments (ring, call, at, window, dims): see `replay_ring`; counters: see `load_counters`.
"""

import triton
import triton.language as tl

from jlaqat.kernels.kept_state import apply_scale, load_scales, load_values, read_codes, round_state, store_rounded
from jlaqat.kernels.philox import draw_words
from jlaqat.kernels.replay_ring import load_decayed_keys, load_keys, load_updates, sum_gates
from jlaqat.kernels.rounding import INTERPRETED

FLUSHED = tl.constexpr(16)  # entries that a flush adds at a time: a matrix product takes no fewer


@triton.jit
def replay_flush_kernel(
    p_q,  # as in `replay.replay_step_kernel`, for all of these; the ring has all entries where p_cursor is LENGTH - 1
    p_ring_k,
    p_ring_r,
    p_ring_g,
    p_ring_k_scale,
    p_ring_r_scale,
    p_cursor,
    p_counters,  # [N, HV, 4] int32, as `recurrent_forward_kernel` has them; any array where not DRAWN
    p_values,  # in place
    p_scale,  # in place
    p_lost,  # in place: [N, HV, K, V] float32, what the last rounding lost; any array where not FEEDBACK
    p_o,  # in place: [N, 1, HV, V], rows of such tokens; any array where not READ_STORED
    scale,
    HEADS,  # of a sequence that a program has, a divisor of HV
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    LENGTH: tl.constexpr,
    IS_KDA: tl.constexpr,
    FORMAT: tl.constexpr,
    GRANULARITY: tl.constexpr,
    READ_STORED: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
    DRAWN: tl.constexpr,
    SEED: tl.constexpr,
    FEEDBACK: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Rings that are full become checkpoints. As a rule none is: so few programs, each with heads of one sequence."""
    ring = (p_ring_k, p_ring_r, p_ring_g, p_ring_k_scale, p_ring_r_scale)
    dims: tl.constexpr = (H, HV, K, V, BK, BV, LENGTH, FLUSHED, HARDWARE_FP8)
    o_k = tl.arange(0, BK)
    PROGRAMS_V: tl.constexpr = (V + BV - 1) // BV
    parts = HV // HEADS
    i_n = (tl.program_id(0) // parts).to(tl.int64)
    cursor = tl.load(p_cursor + i_n)
    if cursor == LENGTH - 1:
        window, at = (cursor + 1, 0), (i_n, i_n)
        for i in range(HEADS):
            i_hv = tl.program_id(0) % parts * HEADS + i
            i_h = i_hv // (HV // H)
            head = i_n * HV + i_hv
            b_window = load_window(ring, ring, window, at, i_h, i_hv, dims, IS_KDA, True)
            for part in range(PROGRAMS_V):
                i_v = part * BV
                b_code, b_scale, b_lost, b_o = flush_window(
                    b_window,
                    load_values(p_values, head, i_v, K, V, BK, BV, VECTOR),
                    load_scales(p_scale, head, i_v, K, V, BK, BV, FORMAT, GRANULARITY),
                    load_lost(p_lost, head, i_v, K, V, BK, BV, FEEDBACK),
                    tl.load(p_q + (i_n * H + i_h) * K + o_k, mask=o_k < K, other=0.0),
                    load_counters(p_counters, head, 1, DRAWN),
                    scale,
                    ring,
                    ring,
                    window,
                    at,
                    i_v,
                    i_hv,
                    dims,
                    IS_KDA,
                    FORMAT,
                    GRANULARITY,
                    READ_STORED,
                    HARDWARE_FP8,
                    DRAWN,
                    SEED,
                    FEEDBACK,
                    True,
                )
                tl.debug_barrier()  # every thread has read what is overwritten
                store_rounded(
                    p_values, p_scale, head, b_code, b_scale, i_v, K, V, FORMAT, GRANULARITY, HARDWARE_FP8, VECTOR
                )
                store_lost(p_lost, head, b_lost, i_v, K, V, FEEDBACK)
                if READ_STORED:
                    o_v = i_v + tl.arange(0, BV)
                    tl.store(p_o + head * V + o_v, b_o.to(p_o.dtype.element_ty), mask=o_v < V)


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
def split_keys(b_k, BFLOAT16: tl.constexpr):
    """b_k as `add_entries` takes it: where r was bfloat16 in three such parts, which lose nothing."""
    if BFLOAT16:
        b_high = b_k.to(tl.bfloat16)
        b_rest = b_k - b_high.to(tl.float32)
        b_middle = b_rest.to(tl.bfloat16)
        return b_high, b_middle, (b_rest - b_middle.to(tl.float32)).to(tl.bfloat16)
    else:
        return (b_k,)


@triton.jit
def add_entries(b_keys, b_r, b_sum):
    """sum + Σ k_i r_iᵀ. The matrix units multiply parts of k by r in bfloat16."""
    if len(b_keys) == 3:
        b_high, b_middle, b_low = b_keys
        b_r = b_r.to(tl.bfloat16)
        if INTERPRETED:  # which multiplies the integers that it holds bfloat16 in
            b_high, b_middle, b_low = b_high.to(tl.float32), b_middle.to(tl.float32), b_low.to(tl.float32)
            b_r = b_r.to(tl.float32)
        return tl.dot(b_high, b_r, tl.dot(b_middle, b_r, tl.dot(b_low, b_r, b_sum)))
    else:
        return tl.dot(b_keys[0], b_r, b_sum, input_precision="ieee")


@triton.jit
def load_window(ring, call, window, at, i_h, i_hv, dims: tl.constexpr, IS_KDA: tl.constexpr, IN_RING: tl.constexpr):
    """(k∘exp(log decay to the last token) of all entries, for every block, the newest first, as `split_keys` has it
    of [BK, BL]; the log decay from the checkpoint) of a full ring."""
    BK: tl.constexpr = dims[4]
    BL: tl.constexpr = dims[7]
    BLOCKS: tl.constexpr = (dims[6] + BL - 1) // BL
    since = tl.zeros([BK], tl.float32) if IS_KDA else tl.full([], 0.0, tl.float32)
    b_keys = ()
    for back in tl.static_range(BLOCKS):
        block = BLOCKS - 1 - back
        if IS_KDA:
            b_k, since = load_decayed_keys(ring, call, block * BL, since, window, at, i_h, i_hv, dims, BL, IN_RING)
        else:
            b_k = tl.trans(load_keys(ring, call, block, window, at, i_h, dims, IN_RING))
            b_log, since = sum_gates(ring, call, block, since, window, at, i_hv, dims, IN_RING)
            b_k *= tl.exp(b_log)[None, :]
        b_keys += (split_keys(b_k, ring[1].dtype.element_ty == tl.bfloat16),)  # type: ignore[assignment]
    return b_keys, since


@triton.jit
def flush_window(
    b_window,
    b_kept,
    b_scale,
    b_lost,
    q,
    counters,
    scale,
    ring,
    call,
    window,
    at,
    i_v,
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
    """(the new checkpoint's codes and scales, what was lost, o [BV] where READ_STORED) after a window's last token.

    b_window: of `load_window`; b_kept, b_scale: the checkpoint before, see `load_values` and `load_scales`; b_lost:
    what its rounding lost; q: of the last token; window: with all entries.
    """
    V: tl.constexpr = dims[3]
    BK: tl.constexpr = dims[4]
    BV: tl.constexpr = dims[5]
    BL: tl.constexpr = dims[7]
    BLOCKS: tl.constexpr = (dims[6] + BL - 1) // BL
    b_keys, since = b_window
    b_entries = tl.zeros([BK, BV], tl.float32)
    for back in tl.static_range(BLOCKS):
        block = BLOCKS - 1 - back
        b_r = load_updates(ring, call, block, window, at, i_v, i_hv, dims, 1, 16, IN_RING)
        b_entries = add_entries(b_keys[back], b_r, b_entries)
    b_decay = tl.exp(since)
    # Not before: what passes between threads for it would wait for memory, and the ring's loads after that.
    b_s = apply_scale(read_codes(b_kept, FORMAT, HARDWARE_FP8), b_scale, FORMAT, GRANULARITY)
    b_s = b_s * (b_decay[:, None] if IS_KDA else b_decay) + b_entries
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
    b_o = tl.zeros([BV], tl.float32)
    if READ_STORED:
        b_o = tl.sum(b_stored * (q.to(tl.float32) * scale)[:, None], axis=0)
    return b_code, b_scale, b_lost, b_o
