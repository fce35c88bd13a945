"""Decoding by replay: the state is kept as it was when it was last rounded, beside a ring of the updates since.

A step is `replay_step_kernel`, which reads a checkpoint and appends to its ring, and `replay_flush_kernel`, which finds
nothing to do until a ring is full: the one wants all columns of a state in a program, which share what is read of the
ring, and few registers, the other the columns that share a scale. `replay_forward_kernel` walks many tokens through the
same functions, with the same bits (`replay_token`). A program holds the columns i_v..i_v+BV of one state of one
sequence and value head. Contraction is off at launch. The backward: `replay_backward`.

Formulas: docs/decode.md (mode "replay").
"""

import triton
import triton.language as tl

from jlaqat.kernels.kept_state import load_kept, load_scales, load_values, store_rounded
from jlaqat.kernels.replay_flush import FLUSHED, flush_window, load_counters, load_lost, load_window, store_lost
from jlaqat.kernels.replay_ring import append, keep_key, load_factor_scale, store_ring, store_update
from jlaqat.kernels.replay_token import join_token, load_checkpoint_scales, load_quarters
from jlaqat.kernels.token_operands import load_token, locate_program, rows_of


@triton.jit
def replay_step_kernel(
    p_q,  # [N, 1, H, K]
    p_k,  # [N, 1, H, K], E4M3 codes where the ring has those
    p_k_scale,  # [N, 1, H] float32, of codes; any array without codes
    p_v,  # [N, 1, HV, V]
    p_g,  # [N, 1, HV] or [N, 1, HV, K] float32
    p_beta,  # [N, 1, HV]
    p_values,  # [N, HV, K, V], the checkpoints; codes (uint8), 16-bit floats or float32
    p_scale,  # their scales, see `store_rounded`; any array where there are none
    p_ring_k,  # in place: [N, LENGTH, H, K] float32, bfloat16 or E4M3 codes (uint8)
    p_ring_r,  # in place: [N, LENGTH, HV, V], likewise
    p_ring_g,  # in place: [N, LENGTH, HV] or [N, LENGTH, HV, K] float32
    p_ring_k_scale,  # in place: [N, LENGTH, H] float32, of codes; any array without codes
    p_ring_r_scale,  # in place: [N, LENGTH, HV, programs along V], likewise
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
    SHARED_BY: tl.constexpr,  # columns that share a scale
    HARDWARE_FP8: tl.constexpr,
    VECTOR: tl.constexpr,
    GROUPS: tl.constexpr,
    ROW_DEPTH: tl.constexpr,  # see `join_token`
    ENTRY_DEPTH: tl.constexpr,
    KEY_DEPTH: tl.constexpr,
    EARLY: tl.constexpr,  # quarters of the checkpoint that are asked for before the ring is read
):
    """A token joins the ring. Where it is the last of its window, `replay_flush_kernel` comes next."""
    i_v, i_hv, i_n, i_h = locate_program(H, HV, V, BV)
    o_k = tl.arange(0, BK)
    o_v = i_v + tl.arange(0, BV)
    ring = (p_ring_k, p_ring_r, p_ring_g, p_ring_k_scale, p_ring_r_scale)
    dims: tl.constexpr = (H, HV, K, V, BK, BV, LENGTH, BL, HARDWARE_FP8)
    head = i_n * HV + i_hv
    cursor = tl.load(p_cursor + i_n)
    b_kept = load_quarters(p_values, head, 0, EARLY, i_v, K, V, BK, BV, GROUPS, VECTOR)
    b_scale = load_checkpoint_scales(p_scale, head, i_v, K, V, BK, BV, FORMAT, GRANULARITY, SHARED_BY)
    q, k, _, g, _ = load_token(p_q, p_k, p_v, p_g, p_beta, i_n, i_h, i_hv, o_k, o_v, H, HV, K, V, IS_KDA)
    k_scale = load_factor_scale(p_k, p_k_scale, i_n * H + i_h)
    b_o, b_r, r_scale = join_token(
        b_kept,
        b_scale,
        p_values,
        head,
        p_q + (i_n * H + i_h) * K,
        p_k + (i_n * H + i_h) * K,
        p_v + head * V,
        p_beta + head,
        q,
        k,
        k_scale,
        g,
        scale,
        ring,
        ring,
        (cursor, 0),
        (i_n, i_n),
        i_v,
        i_h,
        i_hv,
        dims,
        IS_KDA,
        FORMAT,
        GRANULARITY,
        VECTOR,
        GROUPS,
        (ROW_DEPTH, ENTRY_DEPTH, KEY_DEPTH),
        True,
    )
    append(ring, i_n * LENGTH + cursor, keep_key(k, p_ring_k), k_scale, b_r, r_scale, g, i_v, i_h, i_hv, dims, IS_KDA)
    tl.store(p_o + head * V + o_v, b_o.to(p_o.dtype.element_ty), mask=o_v < V)
    tl.store(p_cursor_out + i_n, (cursor + 1) % LENGTH, mask=(i_v == 0) & (i_hv == 0))


@triton.jit
def replay_forward_kernel(
    p_q,  # [B, T, H, K]
    p_k,  # [B, T, H, K] in the ring's dtype
    p_k_scale,  # [B, T, H] float32, of codes; any array without codes
    p_v,  # [B, T, HV, V]
    p_g,  # [B, T, HV] or [B, T, HV, K] float32
    p_beta,  # [B, T, HV]
    p_values,  # [N, HV, K, V], the checkpoints that enter, and their scales
    p_scale,
    p_ring_k,  # the ring that enters, as the step has it
    p_ring_r,
    p_ring_g,
    p_ring_k_scale,
    p_ring_r_scale,
    p_cursor,  # [N] int32
    p_counters,  # [N, HV, 4] int32; any array where not DRAWN
    p_lost,  # [N, HV, K, V] float32; any array where not FEEDBACK
    p_first,  # [N] int32, see `rows_of`; any array where not RAGGED
    p_count,  # [N] int32
    p_o,  # out: [B, T, HV, V]; rows of no sequence are not written, as those of p_r
    p_r,  # out: [B, T, HV, V] in the ring's dtype, every token's update
    p_r_scale,  # out: [B, T, HV, programs along V] float32, of codes
    p_values_out,  # out: [N, HV, K, V], the checkpoints that leave, and their scales
    p_scale_out,
    p_ring_k_out,  # out: the ring that leaves; zeros from its cursor on
    p_ring_r_out,
    p_ring_g_out,
    p_ring_k_scale_out,
    p_ring_r_scale_out,
    p_cursor_out,  # out: [N] int32
    p_saved,  # out: [N, SLOTS, HV, K, V], the checkpoints in the order of their roundings; any array where not SAVE
    p_saved_scale,  # out
    p_lost_out,  # out: [N, HV, K, V] float32
    scale,
    T,
    PER_ROW,
    SLOTS,
    SAVE: tl.constexpr,
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
    DRAWN: tl.constexpr,
    SEED: tl.constexpr,
    FEEDBACK: tl.constexpr,
    VECTOR: tl.constexpr,
    READ_VECTOR: tl.constexpr,  # of a token that joins
    GROUPS: tl.constexpr,
    ROW_DEPTH: tl.constexpr,  # see `join_token`
    ENTRY_DEPTH: tl.constexpr,
    KEY_DEPTH: tl.constexpr,
):
    i_v, i_hv, i_n, i_h = locate_program(H, HV, V, BV)
    o_k = tl.arange(0, BK)
    o_v = i_v + tl.arange(0, BV)
    i_b, first, count = rows_of(p_first, p_count, i_n, T, PER_ROW, RAGGED)
    row = i_b * T + first
    at = (i_n, row)
    ring = (p_ring_k, p_ring_r, p_ring_g, p_ring_k_scale, p_ring_r_scale)
    call = (p_k, p_r, p_g, p_k_scale, p_r_scale)
    dims: tl.constexpr = (H, HV, K, V, BK, BV, LENGTH, BL, HARDWARE_FP8)
    FULL: tl.constexpr = (H, HV, K, V, BK, BV, LENGTH, FLUSHED, HARDWARE_FP8)
    head = i_n * HV + i_hv
    cursor = tl.load(p_cursor + i_n)
    start = -cursor
    slot = i_n * SLOTS
    # The checkpoint goes through memory, from one layout to the other; so does what its rounding lost, so that no
    # register holds it between two roundings.
    b_entering, b_entering_scale = load_kept(
        p_values, p_scale, head, i_v, K, V, BK, BV, FORMAT, GRANULARITY, HARDWARE_FP8, VECTOR
    )
    store_rounded(
        p_values_out,
        p_scale_out,
        head,
        b_entering,
        b_entering_scale,
        i_v,
        K,
        V,
        FORMAT,
        GRANULARITY,
        HARDWARE_FP8,
        VECTOR,
    )
    store_lost(p_lost_out, head, load_lost(p_lost, head, i_v, K, V, BK, BV, FEEDBACK), i_v, K, V, FEEDBACK)
    tl.debug_barrier()
    b_kept = load_quarters(p_values_out, head, 0, 4, i_v, K, V, BK, BV, GROUPS, READ_VECTOR)
    b_scale = load_checkpoint_scales(p_scale_out, head, i_v, K, V, BK, BV, FORMAT, GRANULARITY, BV)
    q, k, _, g, _ = load_token(p_q, p_k, p_v, p_g, p_beta, row, i_h, i_hv, o_k, o_v, H, HV, K, V, IS_KDA)
    for t in range(count):
        k_scale = load_factor_scale(p_k, p_k_scale, (row + t) * H + i_h)
        b_o, b_r, r_scale = join_token(
            b_kept,
            b_scale,
            p_values_out,
            head,
            p_q + ((row + t) * H + i_h) * K,
            p_k + ((row + t) * H + i_h) * K,
            p_v + ((row + t) * HV + i_hv) * V,
            p_beta + (row + t) * HV + i_hv,
            q,
            k,
            k_scale,
            g,
            scale,
            ring,
            call,
            (cursor, start),
            at,
            i_v,
            i_h,
            i_hv,
            dims,
            IS_KDA,
            FORMAT,
            GRANULARITY,
            READ_VECTOR,
            GROUPS,
            (ROW_DEPTH, ENTRY_DEPTH, KEY_DEPTH),
            False,
        )
        store_update(p_r, p_r_scale, (row + t) * HV + i_hv, b_r, r_scale, i_v, dims)
        cursor += 1
        tl.debug_barrier()  # r is read as other threads wrote it
        if cursor == LENGTH:
            b_new, b_new_scale, b_lost, b_read = flush_window(
                load_window(ring, call, (cursor, start), at, i_h, i_hv, FULL, IS_KDA, False),
                load_values(p_values_out, head, i_v, K, V, BK, BV, VECTOR),
                load_scales(p_scale_out, head, i_v, K, V, BK, BV, FORMAT, GRANULARITY),
                load_lost(p_lost_out, head, i_v, K, V, BK, BV, FEEDBACK),
                q,
                load_counters(p_counters, head, t + 1, DRAWN),
                scale,
                ring,
                call,
                (cursor, start),
                at,
                i_v,
                i_hv,
                FULL,
                IS_KDA,
                FORMAT,
                GRANULARITY,
                READ_STORED,
                HARDWARE_FP8,
                DRAWN,
                SEED,
                FEEDBACK,
                False,
            )
            if READ_STORED:
                b_o = b_read
            tl.debug_barrier()  # every thread has read what is overwritten
            store_rounded(
                p_values_out,
                p_scale_out,
                head,
                b_new,
                b_new_scale,
                i_v,
                K,
                V,
                FORMAT,
                GRANULARITY,
                HARDWARE_FP8,
                VECTOR,
            )
            store_lost(p_lost_out, head, b_lost, i_v, K, V, FEEDBACK)
            if SAVE:
                saved = slot * HV + i_hv
                store_rounded(
                    p_saved,
                    p_saved_scale,
                    saved,
                    b_new,
                    b_new_scale,
                    i_v,
                    K,
                    V,
                    FORMAT,
                    GRANULARITY,
                    HARDWARE_FP8,
                    VECTOR,
                )
            tl.debug_barrier()
            b_kept = load_quarters(p_values_out, head, 0, 4, i_v, K, V, BK, BV, GROUPS, READ_VECTOR)
            b_scale = load_checkpoint_scales(p_scale_out, head, i_v, K, V, BK, BV, FORMAT, GRANULARITY, BV)
            slot += 1
            cursor = 0
            start = t + 1
        o_row = ((row + t) * HV + i_hv) * V + o_v
        tl.store(p_o + o_row, b_o.to(p_o.dtype.element_ty), mask=o_v < V)
        ahead = row + tl.minimum(t + 1, count - 1)
        q, k, _, g, _ = load_token(p_q, p_k, p_v, p_g, p_beta, ahead, i_h, i_hv, o_k, o_v, H, HV, K, V, IS_KDA)
    leaving = (p_ring_k_out, p_ring_r_out, p_ring_g_out, p_ring_k_scale_out, p_ring_r_scale_out)
    store_ring(leaving, ring, call, (cursor, start), at, i_v, i_h, i_hv, dims, IS_KDA)
    tl.store(p_cursor_out + i_n, cursor, mask=(i_v == 0) & (i_hv == 0))
