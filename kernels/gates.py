"""Log decays: their bound, and GDN's decays inside a chunk."""

import triton
import triton.language as tl

from jlaqat.spec import MIN_LOG_DECAY

MIN = tl.constexpr(MIN_LOG_DECAY)


@triton.jit
def bound_decay(b_g):
    """What counts as a log decay, NaN kept: below the bound nothing is left, and sums must outlive it."""
    return tl.maximum(b_g, MIN, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def decay_matrix(b_gsum):
    """GDN: E [BT, BT], zero above the diagonal; subtracted and masked before exp."""
    BT: tl.constexpr = b_gsum.shape[0]
    o_t = tl.arange(0, BT)
    difference = b_gsum[:, None] - b_gsum[None, :]
    return tl.exp(tl.where(o_t[:, None] >= o_t[None, :], difference, float("-inf")))
