"""What is quadratic in a chunk: products of token pairs under decay, and the inverse of I + A.

A_ij = β_i Σ_K k_i k_j e^(G_i − G_j) for i > j and P_ij = scale Σ_K q_i k_j e^(G_i − G_j) for i ≥ j, forward and
backward, for one gate a head (GDN: G [..., 1]) and one gate a key channel (KDA: G [..., K]). Source of the maths:
arXiv 2412.06464, arXiv 2510.26692.

A decay per channel cannot leave the sum over K, and e^(−G) alone overflows, so KDA splits the pairs by halving the
chunk: rows of an upper half meet columns of the lower half through an anchor, the upper half's first row a, as (x_i
e^(G_i − G_a)) · (k_j e^(G_a − G_j)). Both factors are at most 1 at every level, down to single rows, so nothing
overflows at any decay, and an anchor depends on no later row: a prefix gives the same bits.

Shapes: q, k [..., H, C, K]; G [..., HV, C, 1 or K]; beta [..., HV, C]; A, P [..., HV, C, C]. C is a power of two.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

Array = jax.Array


def matmul(subscripts: str, x: Array, y: Array) -> Array:
    """einsum at full precision: float32 must not fall to TF32 or bfloat16 passes."""
    return jnp.einsum(subscripts, x, y, precision=jax.lax.Precision.HIGHEST)


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
    rows, columns = _kda_operands(q, k, beta, scale)
    diagonal = jnp.stack([(rows[0] * columns).sum(-1), jnp.zeros_like(beta)])[
        ..., None, None
    ]  # single rows: [2, ..., C, 1, 1]
    while diagonal.shape[-3] > 1:
        size = diagonal.shape[-1]
        row, column, _, _ = _halves(rows, columns, G, size)
        diagonal = _join(diagonal, matmul("s...ik,...jk->s...ij", row, column))
    P, A = diagonal[..., 0, :, :]
    return A, P


def pair_products_backward(
    q: Array, k: Array, G: Array, beta: Array, scale: float, dA: Array, dP: Array
) -> tuple[Array, Array, Array, Array]:
    """Gradients (dq, dk, dG, dbeta) of `pair_products`; dA strictly lower, dP lower; dq, dk per key head."""
    if G.shape[-1] == 1:
        return _gdn_backward(q, k, G, beta, scale, dA, dP)
    rows, columns = _kda_operands(q, k, beta, scale)
    cotangent = jnp.stack([dP, dA])
    on_diagonal = jnp.diagonal(dP, axis1=-2, axis2=-1)[..., None]
    drows = jnp.stack([on_diagonal * columns, jnp.zeros_like(columns)])
    dcolumns = on_diagonal * rows[0]
    size = 1
    while size < k.shape[-2]:
        row, column, row_decay, column_decay = _halves(rows, columns, G, size)
        block = _off_diagonal(cotangent, size)
        drow = row_decay * matmul("s...ij,...jk->s...ik", block, column)
        dcolumn = column_decay * matmul("s...ij,s...ik->...jk", block, row)
        drows = drows + _upper(drow).reshape(drows.shape)
        dcolumns = dcolumns + _lower(dcolumn).reshape(dcolumns.shape)
        size *= 2
    d, r = drows
    dG = (rows * drows).sum(0) - columns * dcolumns
    dbeta = (r * columns).sum(-1)
    heads = k.shape[-3]
    dq = per_key_head(scale * d, heads)
    dk = per_key_head(beta[..., None] * r + dcolumns, heads)
    return dq, dk, dG, dbeta


def _pair_decay(G: Array) -> Array:
    """e^(G_i − G_j) for i ≥ j, else 0: masked before exp, since the masked exponents are positive and may overflow."""
    difference = G - G.swapaxes(-1, -2)
    below = jnp.tril(jnp.ones(difference.shape[-2:], bool))
    return jnp.exp(jnp.where(below, difference, -jnp.inf))


def _gdn_backward(q, k, G, beta, scale, dA, dP):
    """One decay a pair: all is [C, C] products, summed over the value heads of a key head before K appears."""
    decay, (heads, value_heads) = _pair_decay(G), (k.shape[-3], beta.shape[-2])
    dP_decayed, dA_decayed = scale * dP * decay, dA * decay
    qk = per_value_head(matmul("...ik,...jk->...ij", q, k), value_heads)
    kk = per_value_head(matmul("...ik,...jk->...ij", k, k), value_heads)
    dbeta = (dA_decayed * kk).sum(-1)
    dA_decayed = beta[..., None] * dA_decayed
    flow = dP_decayed * qk + dA_decayed * kk  # dM∘M: what each pair's exponent receives
    dG = (flow.sum(-1) - flow.sum(-2))[..., None]
    dP_k, dA_k = per_key_head(dP_decayed, heads), per_key_head(dA_decayed, heads)
    dq = matmul("...ij,...jk->...ik", dP_k, k)
    dk = matmul("...ij,...jk->...ik", dA_k + dA_k.swapaxes(-1, -2), k) + matmul("...ji,...jk->...ik", dP_k, q)
    return dq, dk, dG, dbeta


def _kda_operands(q: Array, k: Array, beta: Array, scale: float) -> tuple[Array, Array]:
    """rows [2, ..., HV, C, K]: scale·q, then β·k; columns [..., HV, C, K]: k."""
    heads = beta.shape[-2]
    columns = per_value_head(k, heads)
    return jnp.stack([scale * per_value_head(q, heads), beta[..., None] * columns]), columns


def _halves(rows: Array, columns: Array, G: Array, size: int) -> tuple[Array, Array, Array, Array]:
    """Decayed rows of the upper and columns of the lower halves of blocks of 2·size, and their decays (each ≤ 1)."""

    def split(x: Array) -> Array:
        return x.reshape(*x.shape[:-2], -1, 2, size, x.shape[-1])

    G, rows, columns = split(G), split(rows), split(columns)
    anchor = G[..., 1, :1, :]
    row_decay = jnp.exp(G[..., 1, :, :] - anchor)
    column_decay = jnp.exp(anchor - G[..., 0, :, :])
    return rows[..., 1, :, :] * row_decay, columns[..., 0, :, :] * column_decay, row_decay, column_decay


def _upper(x: Array) -> Array:
    """[..., blocks, size, K] → [..., blocks, 2, size, K] with zeros in the lower half."""
    return jnp.stack([jnp.zeros_like(x), x], axis=-3)


def _lower(x: Array) -> Array:
    return jnp.stack([x, jnp.zeros_like(x)], axis=-3)


def _off_diagonal(x: Array, size: int) -> Array:
    """Blocks (upper half, lower half) on the diagonal of x [..., C, C]: [..., C / (2 size), size, size]."""
    blocks = x.shape[-1] // (2 * size)
    tiles = x.reshape(*x.shape[:-2], blocks, 2, size, blocks, 2, size)[..., 1, :, :, 0, :]
    return jnp.moveaxis(jnp.diagonal(tiles, axis1=-4, axis2=-2), -1, -3)


def _join(diagonal: Array, off: Array) -> Array:
    """Diagonal blocks [..., 2n, s, s] and the blocks below them [..., n, s, s] → lower blocks [..., n, 2s, 2s]."""
    size = off.shape[-1]
    pairs = diagonal.reshape(*off.shape[:-2], 2, size, size)
    first, second = pairs[..., 0, :, :], pairs[..., 1, :, :]
    top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([off, second], axis=-1)], axis=-2)


def unit_lower_inverse(A: Array) -> Array:
    """(I + A)⁻¹ of a strictly lower A [..., C, C], by joining inverses of diagonal blocks: 1, 2, 4, … rows.

    [[I+A₁, 0], [B, I+A₂]]⁻¹ = [[X₁, 0], [−X₂ B X₁, X₂]]: no power of A is formed, so correlated keys with β up to 2,
    whose powers explode and cancel, cost no accuracy.
    """
    inverse = jnp.ones((*A.shape[:-1], 1, 1), A.dtype)
    while inverse.shape[-1] < A.shape[-1]:
        size = inverse.shape[-1]
        below = -_off_diagonal(A, size)
        if size > 1:
            pairs = inverse.reshape(*below.shape[:-2], 2, size, size)
            left = matmul("...ij,...jk->...ik", pairs[..., 1, :, :], below)
            below = matmul("...ij,...jk->...ik", left, pairs[..., 0, :, :])
        inverse = _join(inverse, below)
    return inverse[..., 0, :, :]
