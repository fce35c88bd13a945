"""KDA's pairwise decays, one a key channel: how e^(G_i - G_j), i >= j, becomes a row factor times a column factor.

A product over pairs needs e^(G_i - G_a) e^(G_a - G_j) with an anchor row a, which must not lie after row i. Three
levels cover the 64 rows of a chunk:

    level 2: rows of the second 32, columns of the first 32, anchored where the second starts;
    level 1: the same in each half with 16 rows;
    level 0: rows and columns of one 16-row block, anchored at its first row.

At levels 2 and 1 both factors are at most 1. At level 0 the column factor is e^(G_a - G_j) >= 1, which is used only
where no channel decays by more than 2^LIMIT inside the block up to row i: 15 tokens of e^-5 fit for bfloat16 and
float32. Other rows go on halving (fine levels 4 to 0: halves of 8, 4, 2, 1 rows and the row itself), all factors at
most 1, so that any g <= 0 is served. Which way row i takes depends on rows up to i only.

G is kept in base 2 here (log2(e) times the sum of g), since exponentials are of base 2 in the hardware.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
FIRST_FINE = tl.constexpr(4)


@triton.jit
def block_limit(DTYPE: tl.constexpr):
    """Largest decay in a 16-row block, in powers of 2, whose inverse the products of this dtype can hold."""
    return 8.0 if tl.float16 == DTYPE else 110.0


@triton.jit
def level_mask(low, high, BT: tl.constexpr):
    """Pairs i >= j of 16-row blocks whose numbers differ (xor) by low..high-1; diagonal blocks hold pairs i < j too."""
    o_block = tl.arange(0, BT) // 16
    differ = o_block[:, None] ^ o_block[None, :]
    return (differ >= low) & (differ < high) & (o_block[:, None] >= o_block[None, :])


@triton.jit
def fine_mask(level, BT: tl.constexpr):
    """Pairs of a fine level: the highest bit in which i > j differ is bit level - 1; level 0 is i = j."""
    o_t = tl.arange(0, BT)
    differ = 2 * (o_t[:, None] ^ o_t[None, :]) + 1
    return ((differ >> level) == 1) & (o_t[:, None] >= o_t[None, :])


@triton.jit
def load_anchors(p_gsum, row, n_rows, i_hv, i_k, HV: tl.constexpr, K: tl.constexpr, shift, half, BT: tl.constexpr,
                 BK: tl.constexpr):  # fmt: skip
    """Each row's anchor [BT, BK], from memory (the L1 cache): moving rows between warps' registers costs more."""
    o_t = tl.arange(0, BT)
    o_k = (i_k + tl.arange(0, BK))[None, :]
    anchor = (((o_t >> shift) << shift) + half)[:, None]
    m = (anchor < n_rows) & (o_k < K)
    return tl.load(p_gsum + (row * HV + i_hv) * K + anchor * (HV * K) + o_k, mask=m, other=0.0)


@triton.jit
def load_block_edges(p_gsum, row, n_rows, i_hv, i_k, HV: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
                     BT: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """For every 16 rows: G of the first row of the block of BLOCK rows around them [BT / 16, BK], and of its last."""
    o_first = ((tl.arange(0, BT // 16) * 16) // BLOCK * BLOCK)[:, None]
    o_last = tl.minimum(o_first + (BLOCK - 1), n_rows - 1)
    o_k = (i_k + tl.arange(0, BK))[None, :]
    p = p_gsum + (row * HV + i_hv) * K + o_k
    m = (o_first < n_rows) & (o_k < K)
    b_first = tl.load(p + o_first * (HV * K), mask=m, other=0.0)
    return b_first, tl.load(p + o_last * (HV * K), mask=m, other=0.0)


@triton.jit
def least(b):
    return tl.min(tl.min(b, axis=1), axis=0)


@triton.jit
def row_factor(b_gsum, b_anchor):
    """2^-|G - G_a|: both factors of a half, and the row factor of a block."""
    b_d = b_gsum - b_anchor
    return tl.exp2(tl.minimum(b_d, -b_d))


@triton.jit
def column_factor(b_row, b_gsum, b_anchor, is_block, LIMIT: tl.constexpr):
    """The column factor, given the row factor: the same for halves."""
    b_column = b_row
    if is_block:
        b_column = tl.exp2(tl.minimum(b_anchor - b_gsum, LIMIT))
    return b_column


@triton.jit
def sum_rows(b_x, REVERSE: tl.constexpr, DTYPE: tl.constexpr):
    """Cumulative sums of float32 [BT, BK] down the rows (or up): a product with a triangle of ones.

    Three bfloat16 parts of x hold all its bits, and so do the three products of TF32x3; a scan across registers takes
    four times the instructions, and its sums depend on the block's layout.
    """
    BT: tl.constexpr = b_x.shape[0]
    o_t = tl.arange(0, BT)
    if REVERSE:
        m = o_t[:, None] <= o_t[None, :]
    else:
        m = o_t[:, None] >= o_t[None, :]
    if tl.bfloat16 == DTYPE:
        b_one = tl.where(m, 1.0, 0.0).to(tl.bfloat16)
        b_high = b_x.to(tl.bfloat16)
        b_rest = b_x - b_high.to(tl.float32)
        b_middle = b_rest.to(tl.bfloat16)
        b_low = (b_rest - b_middle.to(tl.float32)).to(tl.bfloat16)
        return tl.dot(b_one, b_high) + (tl.dot(b_one, b_middle) + tl.dot(b_one, b_low))
    else:
        return tl.dot(tl.where(m, 1.0, 0.0), b_x, input_precision="tf32x3")
