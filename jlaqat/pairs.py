"""What is quadratic in a chunk: products of token pairs under decay, and the inverse of I + A.

A_ij = β_i Σ_K k_i k_j e^(G_i − G_j) for i > j and P_ij = scale Σ_K q_i k_j e^(G_i − G_j) for i ≥ j, forward and
backward, for one gate a head (GDN: G [..., 1]) and one gate a key channel (KDA: G [..., K]). Source of the maths:
arXiv 2412.06464, arXiv 2510.26692.

A decay per channel cannot leave the sum over K, and e^(−G) alone overflows. So KDA quarters the chunk: rows of 16 meet
the columns before them through an anchor, their first row a, as (x_i e^(G_i − G_a)) · (k_j e^(G_a − G_j)); so do rows
of 4 inside their 16; pairs inside 4 rows are summed exactly. All factors are at most 1, so nothing overflows at any
decay, and an anchor depends on no later row, so that a prefix gives the same bits.

Shapes: q, k [..., H, C, K]; G [..., HV, C, 1 or K]; beta [..., HV, C]; A, P [..., HV, C, C]. C is 64.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array
QUARTERS = (16, 4)  # rows that share an anchor, level by level


def matmul(subscripts: str, x: Array, y: Array) -> Array:
    """einsum at full precision: float32 must not fall to TF32 or bfloat16 passes."""
    return jnp.einsum(subscripts, x, y, precision=jax.lax.Precision.HIGHEST)


def product(x: Array | float, y: Array) -> Array:
    """x·y, rounded before anything is added to it. What is not finite becomes NaN.

    Left alone, the compiler contracts a product with an addition that follows where that suits the shapes at hand: a
    shard's bits would differ from the whole's, and a backward's from its forward's. It leaves a select alone.
    """
    z = x * y
    return jnp.where(jnp.isfinite(z), z, jnp.nan)


def total(x: Array) -> Array:
    """Sum over the last axis by one matrix product a head: a reduction's order depends on the other axes' sizes."""
    return matmul("...ck,...k->...c", x, jnp.ones((*x.shape[:-2], x.shape[-1]), x.dtype))


def total_rows(x: Array) -> Array:
    """Sum over the last axis but one, in an order of its own as well."""
    return matmul("...ik,...i->...k", x, jnp.ones(x.shape[:-1], x.dtype))


def per_value_head(x: Array, num_value_heads: int, axis: int = -3) -> Array:
    """Repeat each key head for the value heads that read it. Feed it to elementwise work, which never stores it."""
    axis %= x.ndim
    heads = x.shape[axis]
    if heads == num_value_heads:
        return x
    shape = (*x.shape[: axis + 1], num_value_heads // heads, *x.shape[axis + 1 :])
    repeated = jnp.broadcast_to(jnp.expand_dims(x, axis + 1), shape)
    return repeated.reshape(*x.shape[:axis], num_value_heads, *x.shape[axis + 1 :])


def per_key_head(x: Array, num_heads: int, axis: int = -3) -> Array:
    """Sum over the value heads of each key head: the transpose of `per_value_head`."""
    axis %= x.ndim
    if x.shape[axis] == num_heads:
        return x
    return x.reshape(*x.shape[:axis], num_heads, -1, *x.shape[axis + 1 :]).sum(axis + 1)


def lower(x: Array) -> Array:
    """x_ij where i ≥ j, else 0."""
    return jnp.tril(x)


def strictly_lower(x: Array) -> Array:
    """x_ij where i > j, else 0."""
    return jnp.tril(x, -1)


def pair_products(q: Array, k: Array, G: Array, beta: Array, scale: float) -> tuple[Array, Array]:
    """A and P of a chunk. See the module for shapes."""
    if G.shape[-1] == 1:
        decay, heads = _pair_decay(G), beta.shape[-2]
        A = beta[..., None] * strictly_lower(per_value_head(matmul("...ik,...jk->...ij", k, k), heads) * decay)
        P = scale * (per_value_head(matmul("...ik,...jk->...ij", q, k), heads) * decay)
        return A, P
    return _kda_products(q, k, G, beta, scale)


def pair_products_backward(
    q: Array, k: Array, G: Array, beta: Array, scale: float, dA: Array, dP: Array
) -> tuple[Array, Array, Array, Array]:
    """Gradients (dq, dk, dG, dbeta) of `pair_products`; dA strictly lower, dP lower; dq, dk per key head."""
    if G.shape[-1] == 1:
        return _gdn_backward(q, k, G, beta, scale, dA, dP)
    return _kda_backward(q, k, G, beta, scale, dA, dP)


def _pair_decay(G: Array) -> Array:
    """e^(G_i − G_j) for i ≥ j, else 0."""
    difference = G - G.swapaxes(-1, -2)
    return _exp_where(np.tril(np.ones(difference.shape[-2:], bool)), difference)


def _gdn_backward(q, k, G, beta, scale, dA, dP):
    """One decay a pair: all is [C, C] products, summed over the value heads of a key head before K appears."""
    decay, (heads, value_heads) = _pair_decay(G), (k.shape[-3], beta.shape[-2])
    dP_decayed, dA_decayed = product(scale * dP, decay), product(dA, decay)
    qk = per_value_head(matmul("...ik,...jk->...ij", q, k), value_heads)
    kk = per_value_head(matmul("...ik,...jk->...ij", k, k), value_heads)
    dbeta = total(product(dA_decayed, kk))
    dA_decayed = product(beta[..., None], dA_decayed)
    flow = product(dP_decayed, qk) + product(dA_decayed, kk)  # dM∘M: what each pair's exponent receives
    dG = (total(flow) - total_rows(flow))[..., None]
    dP_k, dA_k = per_key_head(dP_decayed, heads), per_key_head(dA_decayed, heads)
    dq = matmul("...ij,...jk->...ik", dP_k, k)
    dk = matmul("...ij,...jk->...ik", dA_k + dA_k.swapaxes(-1, -2), k) + matmul("...ji,...jk->...ik", dP_k, q)
    return dq, dk, dG, dbeta


def _kda_products(q: Array, k: Array, G: Array, beta: Array, scale: float) -> tuple[Array, Array]:
    row_q, row_k, columns = _kda_operands(q, k, beta, scale)
    decayed = _blocks(columns, QUARTERS[-1])[..., None, :, :] * _exact_decay(G)
    P, A = (product(_blocks(row, QUARTERS[-1])[..., :, None, :], decayed).sum(-1) for row in (row_q, row_k))
    for size in reversed(QUARTERS):
        row_decay, column_decay = _anchored_decay(G, size)
        rows = jnp.concatenate([_later(row_q, size), _later(row_k, size)], axis=-2) * _twice(row_decay)
        before = matmul("...ik,...jk->...ij", rows, _earlier(columns, size) * column_decay)
        P, A = _assemble(P, before[..., :size, :]), _assemble(A, before[..., size:, :])
    return strictly_lower(A[..., 0, :, :]), P[..., 0, :, :]


def _kda_backward(q, k, G, beta, scale, dA, dP):
    row_q, row_k, columns = _kda_operands(q, k, beta, scale)
    d = r = c = jnp.zeros_like(columns)
    dP, dA = dP[..., None, :, :], dA[..., None, :, :]
    for size in QUARTERS:
        (before_P, dP), (before_A, dA) = _take_apart(dP, size), _take_apart(dA, size)
        before = jnp.concatenate([before_P, before_A], axis=-2)
        row_decay, column_decay = _anchored_decay(G, size)
        rows = jnp.concatenate([_later(row_q, size), _later(row_k, size)], axis=-2) * _twice(row_decay)
        drows = matmul("...ij,...jk->...ik", before, _earlier(columns, size) * column_decay)
        d = d + _from_later(product(row_decay, drows[..., :size, :]), columns.shape)
        r = r + _from_later(product(row_decay, drows[..., size:, :]), columns.shape)
        dcolumns = product(column_decay, matmul("...ij,...ik->...jk", before, rows))
        c = c + _from_earlier(dcolumns, columns.shape)

    decay, size = _exact_decay(G), QUARTERS[-1]
    decayed = _blocks(columns, size)[..., None, :, :] * decay
    d = d + product(dP[..., None], decayed).sum(-2).reshape(columns.shape)
    r = r + product(dA[..., None], decayed).sum(-2).reshape(columns.shape)
    into_q, into_k = (
        product(M[..., None], _blocks(row, size)[..., :, None, :]) for M, row in ((dP, row_q), (dA, row_k))
    )
    c = c + product(into_q + into_k, decay).sum(-3).reshape(columns.shape)

    heads = k.shape[-3]
    dk = per_key_head(product(beta[..., None], r) + c, heads)
    dG = product(row_q, d) + product(row_k, r) - product(columns, c)
    return per_key_head(product(scale, d), heads), dk, dG, total(product(r, columns))


def _kda_operands(q: Array, k: Array, beta: Array, scale: float) -> tuple[Array, Array, Array]:
    """scale·q, β·k and k per value head: the rows of P, those of A, and the columns of both."""
    heads = beta.shape[-2]
    columns = per_value_head(k, heads)
    return scale * per_value_head(q, heads), beta[..., None] * columns, columns


def _exact_decay(G: Array) -> Array:
    """e^(G_i − G_j) [..., C / s, s, s, K] for i ≥ j inside the smallest blocks, else 0."""
    size = QUARTERS[-1]
    G = _blocks(G, size)
    below = np.tril(np.ones((size, size), bool))[..., None]
    return _exp_where(below, G[..., :, None, :] - G[..., None, :, :])


def _anchored_decay(G: Array, size: int) -> tuple[Array, Array]:
    """e^(G_i − G_a) for `_later` rows, e^(G_a − G_j) for `_earlier` columns: 0 where a column is not before a."""
    rows, columns = _later(G, size), _earlier(G, size)
    anchor = rows[..., :1, :]
    earlier = np.arange(3 * size) < size * np.arange(1, 4)[:, None]
    return jnp.exp(rows - anchor), _exp_where(earlier[..., None], anchor - columns)


def _exp_where(mask: np.ndarray, exponent: Array) -> Array:
    """exp, 0 outside a mask of the last dimensions. Masked before exp: exponents there are positive and overflow."""
    return jnp.exp(jnp.where(jnp.broadcast_to(mask, exponent.shape), exponent, -jnp.inf))


def _twice(x: Array) -> Array:
    return jnp.concatenate([x, x], axis=-2)


def _blocks(x: Array, size: int) -> Array:
    """[..., C, K] → [..., C / size, size, K]."""
    return x.reshape(*x.shape[:-2], -1, size, x.shape[-1])


def _later(x: Array, size: int) -> Array:
    """[..., C, K] → [..., C / 4 size, 3, size, K]: all but the first quarter of every block."""
    return _blocks(_blocks(x, 4 * size), size)[..., 1:, :, :]


def _earlier(x: Array, size: int) -> Array:
    """[..., C, K] → [..., C / 4 size, 1, 3 size, K]: all but the last quarter of every block."""
    return _blocks(x, 4 * size)[..., None, : 3 * size, :]


def _from_later(x: Array, shape: tuple[int, ...]) -> Array:
    """The transpose of `_later`."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 3) + [(1, 0), (0, 0), (0, 0)]).reshape(shape)


def _from_earlier(x: Array, shape: tuple[int, ...]) -> Array:
    """The transpose of `_earlier`, after the three anchors."""
    x = x.sum(-3)
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, x.shape[-2] // 3), (0, 0)]).reshape(shape)


def _assemble(diagonal: Array, before: Array) -> Array:
    """Blocks [..., 4n, s, s] on the diagonal, [..., n, 3, s, 3s] before them → [..., n, 4s, 4s], zero above."""
    size = diagonal.shape[-1]
    padding = [(0, 0)] * (before.ndim - 3) + [(1, 0), (0, 0), (0, size)]
    tiles = jnp.pad(before, padding).reshape(*before.shape[:-3], 4, size, 4, size)
    diagonal = diagonal.reshape(*before.shape[:-3], 4, size, 1, size)
    on_diagonal = jnp.broadcast_to(np.eye(4, dtype=bool)[:, None, :, None], tiles.shape)
    return jnp.where(on_diagonal, diagonal, tiles).reshape(*before.shape[:-3], 4 * size, 4 * size)


def _take_apart(M: Array, size: int) -> tuple[Array, Array]:
    """The transpose of `_assemble`: (before [..., n, 3, s, 3s], diagonal [..., 4n, s, s]) of M [..., n, 4s, 4s]."""
    tiles = M.reshape(*M.shape[:-2], 4, size, 4, size)
    before = tiles[..., 1:, :, :3, :].reshape(*M.shape[:-2], 3, size, 3 * size)
    diagonal = jnp.stack([tiles[..., i, :, i, :] for i in range(4)], axis=-3)
    return before, diagonal.reshape(*M.shape[:-3], -1, size, size)


def unit_lower_inverse(A: Array) -> Array:
    """(I + A)⁻¹ of a strictly lower A [..., C, C], by joining the inverses of diagonal blocks of 4, 8, 16, … rows.

    [[I + A₁, 0], [B, I + A₂]]⁻¹ = [[X₁, 0], [−X₂ B X₁, X₂]]. No power of A beyond a block of 4 is formed, so correlated
    keys with β up to 2, whose powers explode and cancel, cost no accuracy. LAPACK's triangular solve would be as quick,
    but its threads wait for each other in a busy loop, which on busy machines takes seconds.
    """
    size = 4
    N = _diagonal_blocks(A, size)
    identity = jnp.broadcast_to(jnp.eye(size, dtype=A.dtype), N.shape)
    X = matmul("...ij,...jk->...ik", identity - N, identity + matmul("...ij,...jk->...ik", N, N))  # N⁴ = 0
    while size < A.shape[-1]:
        B = _diagonal_blocks(A, 2 * size)[..., size:, :size]
        first, second = X[..., ::2, :, :], X[..., 1::2, :, :]
        below = -matmul("...ij,...jk->...ik", matmul("...ij,...jk->...ik", second, B), first)
        top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        X = jnp.concatenate([top, jnp.concatenate([below, second], axis=-1)], axis=-2)
        size *= 2
    return X[..., 0, :, :]


def _diagonal_blocks(A: Array, size: int) -> Array:
    """[..., C, C] → [..., C / size, size, size]."""
    count = A.shape[-1] // size
    tiles = A.reshape(*A.shape[:-2], count, size, count, size)
    on_diagonal = jnp.broadcast_to(np.eye(count, dtype=bool)[:, None, :, None], tiles.shape)
    return jnp.where(on_diagonal, tiles, 0).sum(-2)
