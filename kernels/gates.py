"""In-chunk gate sums and pairwise decays, as device functions, and the products that go through them.

GDN has one decay matrix a head, E_ij = e^(G_i - G_j). KDA has one a key channel, which does not factor over a whole
chunk without overflow. It factors over halves: rows i of a second half and j of the first half before it, of 2^l rows
each, meet at the anchor row a where the second half starts, and

    e^(G_i - G_j) = e^(G_i - G_a) * e^(G_a - G_j),    both exponents <= 0 and a <= i.

Six levels l cover all pairs i > j of 64 rows, so every sum over pairs is six full matrix products, never an
exponential of a positive number, and no row depends on a later one.
"""

import triton
import triton.language as tl


@triton.jit
def decay_matrix(b_gsum):
    """GDN: E [BT, BT], zero above the diagonal; subtracted and masked before exp."""
    BT: tl.constexpr = b_gsum.shape[0]
    o_t = tl.arange(0, BT)
    difference = b_gsum[:, None] - b_gsum[None, :]
    return tl.where(o_t[:, None] >= o_t[None, :], tl.exp(tl.where(o_t[:, None] >= o_t[None, :], difference, 0.0)), 0.0)


@triton.jit
def level_factor(b_gsum, p_anchor, STRIDE: tl.constexpr, level, n_rows, n_k):
    """KDA: e^-|G - G_anchor| [BT, BK] of one level: the left factor in second halves, the right one in first halves.

    p_anchor: the first row of b_gsum in memory, STRIDE between rows, n_k columns: anchors are loaded (from the L1
    cache), since moving rows between the registers of different warps costs more.
    """
    BT: tl.constexpr = b_gsum.shape[0]
    BK: tl.constexpr = b_gsum.shape[1]
    o_t = tl.arange(0, BT)
    o_k = tl.arange(0, BK)[None, :]
    anchor = (((o_t >> (level + 1)) << (level + 1)) + (1 << level))[:, None]
    b_anchor = tl.load(p_anchor + anchor * STRIDE + o_k, mask=(anchor < n_rows) & (o_k < n_k), other=0.0)
    return tl.exp(-tl.abs(b_gsum - b_anchor))


@triton.jit
def level_mask(level, BT: tl.constexpr):
    """KDA: the pairs (i, j) of one level: i > j, and the highest bit in which they differ is bit `level`."""
    o_t = tl.arange(0, BT)
    differ = tl.where(o_t[:, None] > o_t[None, :], o_t[:, None] ^ o_t[None, :], 0)
    return (differ >> level) == 1


@triton.jit
def last_row(b_x, n_rows):
    """Row n_rows - 1 of [BT, BK], exactly (a sum of one value and zeros)."""
    BT: tl.constexpr = b_x.shape[0]
    o_t = tl.arange(0, BT)
    return tl.sum(tl.where(o_t[:, None] == n_rows - 1, b_x, 0.0), axis=0)
