"""GDN's in-chunk decays."""

import triton
import triton.language as tl


@triton.jit
def decay_matrix(b_gsum):
    """GDN: E [BT, BT], zero above the diagonal; subtracted and masked before exp."""
    BT: tl.constexpr = b_gsum.shape[0]
    o_t = tl.arange(0, BT)
    difference = b_gsum[:, None] - b_gsum[None, :]
    return tl.where(o_t[:, None] >= o_t[None, :], tl.exp(tl.where(o_t[:, None] >= o_t[None, :], difference, 0.0)), 0.0)
