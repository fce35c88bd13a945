"""What is quadratic in a chunk: products of token pairs under decay, and the inverse of I + A.

A_ij = β_i Σ_K k_i k_j e^(G_i − G_j) for i > j and P_ij = scale Σ_K q_i k_j e^(G_i − G_j) for i ≥ j, forward and
backward, for one gate a head (GDN: G [..., 1]) and one gate a key channel (KDA: G [..., K]). Source of the maths:
arXiv 2412.06464, arXiv 2510.26692.

A decay per channel cannot leave the sum over K, and e^(−G) alone overflows. So KDA halves the chunk, and the halves,
down to blocks of 4 tokens: rows of a block's second half meet the columns of its first through an anchor, their first
row a, as (x_i e^(G_i − G_a)) · (k_j e^(G_a − G_j)); pairs inside 4 tokens are summed one by one. All factors are at
most 1, so nothing overflows at any decay, and an anchor depends on no later row, so that a prefix gives the same bits.
P and A share their columns, so their rows lie side by side: token by token, first P's, then A's.

Shapes: q, k [..., H, C, K]; G [..., HV, C, 1 or K]; beta [..., HV, C]; A, P [..., HV, C, C]. C is 64.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array
EXACT = 4  # tokens of the smallest blocks, whose pairs are summed one by one
PAIRS = tuple((i, j) for i in range(EXACT) for j in range(i + 1))  # rows that share an anchor, level by level


def matmul(subscripts: str, x: Array, y: Array) -> Array:
    """einsum at full precision: float32 must not fall to TF32 or bfloat16 passes.

    Written "...ab,...bc->...ac", with equal leading axes. Those of size 1 (one sequence, one chunk) are left out of
    the product: XLA's CPU compiler copies the result of a product that has such an axis.
    """
    leading = x.shape[: x.ndim - subscripts.index(",") + 3]
    kept = tuple(size for size in leading if size != 1)
    x, y = (a.reshape(*kept, *a.shape[len(leading) :]) for a in (x, y))
    z = jnp.einsum(subscripts, x, y, precision=jax.lax.Precision.HIGHEST)
    return z.reshape(*leading, *z.shape[len(kept) :])


def product(x: Array | float, y: Array) -> Array:
    """x·y, rounded before anything is added to it. What is not finite becomes NaN.

    Left alone, the compiler contracts a product with an addition that follows where that suits the shapes at hand: a
    shard's bits would differ from the whole's, and a backward's from its forward's. It leaves a select alone.
    """
    z = x * y
    return jnp.where(jnp.isfinite(z), z, jnp.nan)


def small_matmul(x: Array, y: Array) -> Array:
    """x·y of blocks of a few rows: elementwise, since a matrix product apiece costs more than its arithmetic."""
    return product(x[..., :, :, None], y[..., None, :, :]).sum(-2)


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
    below = np.tril(np.ones((G.shape[-2], G.shape[-2]), bool))
    difference = G - G.swapaxes(-1, -2)
    # Masked before exp: exponents above the diagonal are positive and overflow.
    return jnp.exp(jnp.where(jnp.broadcast_to(below, difference.shape), difference, -jnp.inf))


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
    rows, columns = _kda_operands(q, k, beta, scale)
    M, size = _exact_products(rows, columns, G), EXACT
    while size < G.shape[-2]:
        row_decay, column_decay = _half_decay(G, size)
        later = _merge(_half(rows, 1, size, rank=3) * row_decay[..., None, :])
        M = _join(M, matmul("...ik,...jk->...ij", later, _half(columns, 0, size) * column_decay))
        size *= 2
    M = M.reshape(*M.shape[:-3], *G.shape[-2:-1], 2, -1)
    return strictly_lower(M[..., 1, :]), M[..., 0, :]


def _kda_backward(q, k, G, beta, scale, dA, dP):
    rows, columns = _kda_operands(q, k, beta, scale)
    dM = _merge(jnp.stack([dP, dA], axis=-2))
    drows, dcolumns = _exact_gradients(dM, rows, columns, G)
    size = EXACT
    while size < G.shape[-2]:
        row_decay, column_decay = _half_decay(G, size)
        row_decay, below = row_decay[..., None, :], _below_diagonal(dM, size)
        later = _merge(_half(rows, 1, size, rank=3) * row_decay)
        into_rows = matmul("...ij,...jk->...ik", below, _half(columns, 0, size) * column_decay)
        into_columns = matmul("...ij,...ik->...jk", below, later)
        into_rows = into_rows.reshape(*row_decay.shape[:-2], 2, -1)
        drows = _add_to_half(drows, 1, product(row_decay, into_rows), size, rank=3)
        dcolumns = _add_to_half(dcolumns, 0, product(column_decay, into_columns), size)
        size *= 2

    d, r = drows[..., 0, :], drows[..., 1, :]
    heads = k.shape[-3]
    dk = per_key_head(product(beta[..., None], r) + dcolumns, heads)
    dG = product(rows, drows).sum(-2) - product(columns, dcolumns)
    return per_key_head(product(scale, d), heads), dk, dG, total(product(r, columns))


def _kda_operands(q: Array, k: Array, beta: Array, scale: float) -> tuple[Array, Array]:
    """Rows of P and A side by side, scale·q and β·k [..., HV, C, 2, K], and the columns of both, k [..., HV, C, K]."""
    heads = beta.shape[-2]
    columns = per_value_head(k, heads)
    return jnp.stack([scale * per_value_head(q, heads), beta[..., None] * columns], axis=-2), columns


def _merge(x: Array) -> Array:
    """[..., s, 2, K] → [..., 2 s, K]: rows of P and of A in turn."""
    return x.reshape(*x.shape[:-3], -1, x.shape[-1])


def _half_decay(G: Array, size: int) -> tuple[Array, Array]:
    """e^(G_i − G_a) in the second half of each block, e^(G_a − G_j) in its first; a is the second half's first row."""
    later = _half(G, 1, size)
    anchor = later[..., :1, :]
    return jnp.exp(later - anchor), jnp.exp(anchor - _half(G, 0, size))


def _exact_products(rows: Array, columns: Array, G: Array) -> Array:
    """The diagonal's blocks of EXACT tokens, [..., C / s, 2 s, s]; above their own diagonal they are zero."""
    row, column, gate = _by_token(rows, 3), _by_token(columns), _by_token(G)
    products = []
    for i, j in PAIRS:
        decayed = column[j] if i == j else column[j] * jnp.exp(gate[i] - gate[j])
        products.append(product(row[i], decayed[..., None, :]))
    sums = total(jnp.stack(products, axis=-3))
    sums = jnp.concatenate([sums, jnp.zeros_like(sums[..., :1, :])], axis=-2)
    position = np.full((EXACT, EXACT), len(PAIRS))  # of each pair in `sums`; of the zero for the others
    position[tuple(np.transpose(PAIRS))] = np.arange(len(PAIRS))
    blocks = sums.swapaxes(-1, -2)[..., position.ravel()].reshape(*sums.shape[:-2], 2, EXACT, EXACT)
    return _merge(blocks.swapaxes(-3, -2))


def _exact_gradients(dM: Array, rows: Array, columns: Array, G: Array) -> tuple[Array, Array]:
    """Gradients of the rows and columns in `_exact_products`."""
    row, column, gate = _by_token(rows, 3), _by_token(columns), _by_token(G)
    dM = _diagonal_blocks(dM, EXACT)
    dM = dM.reshape(*dM.shape[:-2], EXACT, 2, EXACT)
    drows: list[Any] = [0.0] * EXACT
    dcolumns: list[Any] = [0.0] * EXACT
    for i, j in PAIRS:
        d = dM[..., i, :, j, None]
        into_column = product(d, row[i])
        decayed, into_column = column[j], into_column[..., 0, :] + into_column[..., 1, :]
        if i != j:
            decay = jnp.exp(gate[i] - gate[j])
            decayed, into_column = decayed * decay, product(into_column, decay)
        drows[i] += product(d, decayed[..., None, :])
        dcolumns[j] += into_column
    return jnp.stack(drows, axis=-3).reshape(rows.shape), jnp.stack(dcolumns, axis=-2).reshape(columns.shape)


def _by_token(x: Array, rank: int = 2) -> list[Array]:
    """[..., C, K] (rank 2) or [..., C, 2, K] (3) → the first, second, … token of all blocks of EXACT."""
    axis = x.ndim - rank
    x = x.reshape(*x.shape[:axis], -1, EXACT, *x.shape[axis + 1 :])
    return [jax.lax.index_in_dim(x, i, axis + 1, keepdims=False) for i in range(EXACT)]


def _half(x: Array, which: int, size: int, rank: int = 2) -> Array:
    """[..., C, K] (rank 2) or [..., C, 2, K] (3) → the first or second half of every 2·size tokens."""
    axis = x.ndim - rank
    x = x.reshape(*x.shape[:axis], -1, 2, size, *x.shape[axis + 1 :])
    return jax.lax.index_in_dim(x, which, axis + 1, keepdims=False)


def _add_to_half(x: Array, which: int, y: Array, size: int, rank: int = 2) -> Array:
    """The transpose of `_half`: x with y added there."""
    halves = [_half(x, 0, size, rank), _half(x, 1, size, rank)]
    halves[which] = halves[which] + y
    return jnp.stack(halves, axis=-1 - rank).reshape(x.shape)


def _join(diagonal: Array, below: Array) -> Array:
    """[[D₁, 0], [below, D₂]] of blocks D [..., 2n, r, s] and below [..., n, r, s]."""
    first, second = diagonal[..., ::2, :, :], diagonal[..., 1::2, :, :]
    top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([below, second], axis=-1)], axis=-2)


def _below_diagonal(M: Array, size: int) -> Array:
    """The transpose of `_join`, to `below`: [..., r C, C] → [..., C / 2s, r s, s]."""
    blocks = _diagonal_blocks(M, 2 * size)
    return blocks[..., blocks.shape[-2] // 2 :, :size]


def unit_lower_inverse(A: Array) -> Array:
    """(I + A)⁻¹ of a strictly lower A [..., C, C], by joining the inverses of diagonal blocks of 4, 8, 16, … rows.

    [[I + A₁, 0], [B, I + A₂]]⁻¹ = [[X₁, 0], [−X₂ B X₁, X₂]]. No power of A beyond a block of 4 is formed, so correlated
    keys with β up to 2, whose powers explode and cancel, cost no accuracy. LAPACK's triangular solve would be as quick,
    but its threads wait for each other in a busy loop, which on busy machines takes seconds.
    """
    size = 4
    N = _diagonal_blocks(A, size)
    identity = jnp.broadcast_to(jnp.eye(size, dtype=A.dtype), N.shape)
    X = small_matmul(identity - N, identity + small_matmul(N, N))  # N⁴ = 0
    while size < A.shape[-1]:
        B = _below_diagonal(A, size)
        multiply = small_matmul if size == 4 else partial(matmul, "...ij,...jk->...ik")
        X = _join(X, -multiply(multiply(X[..., 1::2, :, :], B), X[..., ::2, :, :]))
        size *= 2
    return X[..., 0, :, :]


def _diagonal_blocks(M: Array, size: int) -> Array:
    """[..., r C, C] → the blocks on its diagonal [..., C / size, r size, size].

    A block starts size·(r C + 1) elements after the one before: cut into pieces of that length, all start alike.
    """
    C, rows = M.shape[-1], size * (M.shape[-2] // M.shape[-1])
    flat = jnp.pad(M.reshape(*M.shape[:-2], -1), [(0, 0)] * (M.ndim - 2) + [(0, C)])
    pieces = flat.reshape(*M.shape[:-2], C // size, rows * C + size)[..., : rows * C]
    return pieces.reshape(*pieces.shape[:-1], rows, C)[..., :size]
