"""Gradients of one token of a recurrence, from the state before it and the gradient of the state after it.

Contraction is off where these run, so fused products are written out: a thread adds the products of its own rows or
columns one after another, each rounded once, and only what is left goes between threads. Halves of a tile are views of
registers as long as a thread holds elements of both; DEPTH counts how often it can be halved so.
"""

import triton
import triton.language as tl

from jlaqat.kernels.halves import halve, join_halves
from jlaqat.kernels.kept_state import decay_kept
from jlaqat.kernels.key_order import by_keys, by_rows


@triton.jit
def outer_product_added(b_x, b_y, b_z, DEPTH: tl.constexpr = 0):
    """z + x yᵀ, for x [BK] or [BK, BV], y [BV] and z [BK, BV].

    Halved as in sums of x's rows, the product takes x as they lie there, and only one order of x is ever made.
    """
    if len(b_x.shape) == 1:
        return outer_product_added(tl.broadcast_to(b_x[:, None], b_z.shape), b_y, b_z, DEPTH)
    elif DEPTH == 0:
        return tl.fma(b_x, tl.broadcast_to(b_y[None, :], b_z.shape), b_z)
    else:
        b_x0, b_x1 = halve(b_x)
        b_z0, b_z1 = halve(b_z)
        b_z0 = outer_product_added(b_x0, b_y, b_z0, DEPTH - 1)
        b_z1 = outer_product_added(b_x1, b_y, b_z1, DEPTH - 1)
        return join_halves(b_z0, b_z1)


@triton.jit
def add_by_rows(b_x, b_y, b_sum, DEPTH: tl.constexpr):
    """b_sum + x∘y, where b_sum has DEPTH times half the rows of x and y: products of a thread's rows are added."""
    if DEPTH == 0:
        return tl.fma(b_x, b_y, b_sum)
    else:
        b_x0, b_x1 = halve(b_x)
        b_y0, b_y1 = halve(b_y)
        return add_by_rows(b_x1, b_y1, add_by_rows(b_x0, b_y0, b_sum, DEPTH - 1), DEPTH - 1)


@triton.jit
def add_by_columns(b_x, b_y, b_sum, DEPTH: tl.constexpr):
    """The same along columns."""
    if DEPTH == 0:
        return tl.fma(b_x, b_y, b_sum)
    else:
        HALF: tl.constexpr = [b_x.shape[0], b_x.shape[1] // 2, 2]
        b_x0, b_x1 = tl.split(tl.reshape(b_x, HALF))
        b_y0, b_y1 = tl.split(tl.reshape(b_y, HALF))
        return add_by_columns(b_x1, b_y1, add_by_columns(b_x0, b_y0, b_sum, DEPTH - 1), DEPTH - 1)


@triton.jit
def sum_over_keys(b_x, b_k, DEPTH: tl.constexpr):
    """xᵀk [BV]"""
    b_sum = tl.zeros([b_x.shape[0] >> DEPTH, b_x.shape[1]], tl.float32)
    return tl.sum(add_by_rows(b_x, tl.broadcast_to(b_k[:, None], b_x.shape), b_sum, DEPTH), axis=0)


@triton.jit
def sum_over_values(b_x, b_v, DEPTH: tl.constexpr):
    """x v [BK]"""
    b_sum = tl.zeros([b_x.shape[0], b_x.shape[1] >> DEPTH], tl.float32)
    return tl.sum(add_by_columns(b_x, tl.broadcast_to(b_v[None, :], b_x.shape), b_sum, DEPTH), axis=1)


@triton.jit
def store_token_gradients(
    p_dq,  # as `recurrent_backward_kernel` has them
    p_dk,
    p_dv,
    p_dg,
    p_dbeta,
    b_ds,  # [BK, BV], gradient of the state after the token
    b_r,  # [BK, BV], the decayed state
    b_dq,  # [BK]
    b_error,  # [BV], v - r k; the update is beta * error as it was rounded
    b_update,
    b_q,
    b_k,
    b_decay,
    b_beta,
    b_do,
    row,
    part,
    i_hv,
    o_k,
    o_v,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    PROGRAMS_V: tl.constexpr,
    IS_KDA: tl.constexpr,
    ROWS: tl.constexpr = 0,  # depths of the sums
    COLUMNS: tl.constexpr = 0,
    BESIDE: tl.constexpr = 1,  # see `key_order`: of all that is [BK]
):
    """Stores a program's part of a token's gradients; returns that of the state before the token."""
    parts = (row * (HV * PROGRAMS_V) + part) * K + o_k
    tl.store(p_dq + parts, by_keys(b_dq, BESIDE), mask=o_k < K)
    b_k_rows = tl.broadcast_to(b_k[:, None], b_ds.shape)
    b_dw = outer_product_added(b_q, b_do, b_ds)
    b_none = tl.zeros([b_dw.shape[0] >> ROWS, b_dw.shape[1]], tl.float32)
    b_dupdate = tl.sum(add_by_rows(b_dw, b_k_rows, b_none, ROWS), axis=0)
    b_dv = b_beta * b_dupdate
    tl.store(p_dv + (row * HV + i_hv) * V + o_v, b_dv, mask=o_v < V)
    tl.store(p_dbeta + row * (HV * PROGRAMS_V) + part, tl.sum(b_dupdate * b_error, axis=0))
    b_dk = tl.zeros([b_dw.shape[0], b_dw.shape[1] >> COLUMNS], tl.float32)
    b_dk = add_by_columns(b_dw, tl.broadcast_to(b_update[None, :], b_dw.shape), b_dk, COLUMNS)
    b_dk = add_by_columns(b_r, tl.broadcast_to(-b_dv[None, :], b_dw.shape), b_dk, COLUMNS)
    tl.store(p_dk + parts, by_keys(tl.sum(b_dk, axis=1), BESIDE), mask=o_k < K)
    b_dr = outer_product_added(b_k, -b_dv, b_dw, 0 if IS_KDA else ROWS)  # KDA's would spill with Triton 3.7
    if IS_KDA:
        b_dg = tl.zeros([b_r.shape[0], b_r.shape[1] >> COLUMNS], tl.float32)
        b_dg = add_by_columns(b_r, b_dr, b_dg, COLUMNS)
        tl.store(p_dg + parts, by_keys(tl.sum(b_dg, axis=1), BESIDE), mask=o_k < K)
    else:
        tl.store(p_dg + row * (HV * PROGRAMS_V) + part, tl.sum(add_by_rows(b_r, b_dr, b_none, ROWS)))
    return b_dr * b_decay


@triton.jit
def reverse_token(
    outputs,  # p_dq, p_dk, p_dv, p_dg, p_dbeta, as `recurrent_backward_kernel` has them
    b_ds,  # [BK, BV], gradient of the state after the token
    b_after,  # [BK, BV], the state after it; read where READ_STORED
    b_code,  # [BK, BV], the state before it, and its scales
    b_scale,
    token,  # (q, k, error, g, beta) as `load_token` has them
    do,
    row,
    part,
    i_hv,
    o_k,
    o_v,
    scale,
    dims: tl.constexpr,  # (HV, K, V, programs along V)
    depths: tl.constexpr,  # of the sums over rows and columns, see above; keys side by side, see `key_order`
    IS_KDA: tl.constexpr,
    FORMAT: tl.constexpr,
    GRANULARITY: tl.constexpr,
    READ_STORED: tl.constexpr,
):
    """Stores a program's part of a token's gradients; returns that of the state before the token."""
    p_dq, p_dk, p_dv, p_dg, p_dbeta = outputs
    q, k, b_error, g, beta = token
    BESIDE: tl.constexpr = depths[2]
    b_q, b_k = by_rows(q.to(tl.float32) * scale, BESIDE), by_rows(k.to(tl.float32), BESIDE)
    b_do, b_beta = do.to(tl.float32), beta.to(tl.float32)
    b_decay = tl.exp(g.to(tl.float32))
    if IS_KDA:
        b_decay = by_rows(b_decay, BESIDE)
    b_r = decay_kept(b_code, b_scale, b_decay, IS_KDA, FORMAT, GRANULARITY)
    if IS_KDA:
        b_decay = b_decay[:, None]
    b_update = b_beta * b_error
    if READ_STORED:
        b_dq = sum_over_values(b_after, b_do, depths[1])
    else:  # of r + k updateᵀ, which need not be formed
        b_dq = sum_over_values(b_r, b_do, depths[1]) + b_k * tl.sum(b_update * b_do, axis=0)
    return store_token_gradients(
        p_dq,
        p_dk,
        p_dv,
        p_dg,
        p_dbeta,
        b_ds,
        b_r,
        b_dq * scale,
        b_error,
        b_update,
        b_q,
        b_k,
        b_decay,
        b_beta,
        b_do,
        row,
        part,
        i_hv,
        o_k,
        o_v,
        dims[0],
        dims[1],
        dims[2],
        dims[3],
        IS_KDA,
        depths[0],
        depths[1],
        BESIDE,
    )
