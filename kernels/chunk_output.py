"""The output where the scan left it to a second, parallel kernel; saved states read back; sums over grouped heads."""

import triton
import triton.language as tl

from jlaqat.kernels.chunks import (
    load_rows,
    load_scalars,
    load_scores,
    locate_chunk,
    state_mask,
    state_offsets,
    store_rows,
)
from jlaqat.kernels.rounding import decode


@triton.jit
def load_codes(
    p_h,
    state,
    i_k,
    i_v,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    STATE_FORMAT: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
):
    """Codes (or plain values) [BK, BV] of a saved state; float32 where they are decoded."""
    p = p_h + state * K * V + state_offsets(i_k, i_v, V, BK, BV)
    b = tl.load(p, mask=state_mask(i_k, i_v, K, V, BK, BV), other=0)
    if STATE_FORMAT == "none":
        return b
    else:
        return decode(b, STATE_FORMAT, HARDWARE_FP8)


@triton.jit
def load_scales(
    p_h_scale, state, i_v, V: tl.constexpr, BV: tl.constexpr, STATE_FORMAT: tl.constexpr, TILE_V: tl.constexpr
):
    """Scales [BV] of a saved state's columns."""
    if STATE_FORMAT == "none":
        return tl.full([BV], 1.0, tl.float32)
    else:
        NV: tl.constexpr = (V + TILE_V - 1) // TILE_V
        o_tile = (i_v + tl.arange(0, BV)) // TILE_V
        return tl.load(p_h_scale + state * NV + o_tile, mask=o_tile < NV, other=1.0)


@triton.jit
def chunk_output_forward_kernel(
    p_q,  # GDN: [B*T, HK, K], q; KDA: scale e^G q a value head
    p_p,  # [B*T, HV, P_WIDTH]
    p_g,  # GDN: [B*T, HV] float32, G
    p_h,  # [SLOTS, HV, K, V] codes or values
    p_h_scale,  # [SLOTS, HV, ceil(V / TILE_V)] float32
    p_v_new,  # [B*T, HV, V]
    p_chunks,
    p_o,  # out: [B*T, HV, V]
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
    STATE_FORMAT: tl.constexpr,
    TILE_V: tl.constexpr,
    P_WIDTH: tl.constexpr,
    HARDWARE_FP8: tl.constexpr,
    PRECISION: tl.constexpr,
):
    pid = tl.program_id(0)
    PROGRAMS_V: tl.constexpr = (V + BV - 1) // BV
    i_v = (pid % PROGRAMS_V) * BV
    i_hv = (pid // PROGRAMS_V) % HV
    i_c = pid // (PROGRAMS_V * HV)
    i_k = i_hv // (HV // HK)
    row, n_rows, n_stored = locate_chunk(p_chunks, i_c, T, NT, BT, IS_PACKED)
    if n_stored <= 0:
        return
    if n_rows <= 0:
        store_rows(p_o, tl.zeros([BT, BV], tl.float32), row, n_stored, i_hv, i_v, HV, V)
        return
    b_q = load_rows(p_q, row, n_rows, i_k, 0, HK, K, BT, BK)
    state = i_c.to(tl.int64) * HV + i_hv
    b_h = load_codes(p_h, state, 0, i_v, K, V, BK, BV, STATE_FORMAT, HARDWARE_FP8).to(b_q.dtype)
    b_scale = load_scales(p_h_scale, state, i_v, V, BV, STATE_FORMAT, TILE_V)
    b_o = tl.dot(b_q, b_h, input_precision=PRECISION) * b_scale[None, :]
    if not IS_KDA:
        b_o *= (tl.exp(load_scalars(p_g, row, n_rows, i_hv, HV, BT)) * scale)[:, None]
    b_p = load_scores(p_p, row, n_rows, i_hv, HV, P_WIDTH, BT)
    b_v = load_rows(p_v_new, row, n_rows, i_hv, i_v, HV, V, BT, BV)
    b_o += tl.dot(b_p, b_v, input_precision=PRECISION)
    store_rows(p_o, b_o, row, n_stored, i_hv, i_v, HV, V)


@triton.jit
def group_sum_kernel(
    p_x,  # [ROWS, HV, K], one a value head
    p_y,  # out: [ROWS, H, K]
    ROWS,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    BK: tl.constexpr,
):
    """Sums over the value heads that share a q/k head, in float32."""
    pid = tl.program_id(0)
    i_h = pid % H
    row = (pid // H).to(tl.int64) * BLOCK
    n_rows = tl.minimum(ROWS - row, BLOCK).to(tl.int32)
    b = tl.zeros([BLOCK, BK], tl.float32)
    for i_g in range(HV // H):
        b += load_rows(p_x, row, n_rows, i_h * (HV // H) + i_g, 0, HV, K, BLOCK, BK)
    store_rows(p_y, b, row, n_rows, i_h, 0, H, K)
