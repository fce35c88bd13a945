"""The order of a tile's rows in which the rows that a thread holds are neighbours: keys, or entries of a ring.

A compiler gives a warp rows that lie apart. With neighbouring keys in a thread, a warp's are neighbours as well, and so
they are where vectors over keys are loaded and stored, an element a thread: nothing has to go from warp to warp.
BESIDE says how many rows a thread has; with 1 rows are keys.
"""

import triton
import triton.language as tl


@triton.jit
def keys_of_rows(BK: tl.constexpr, BESIDE: tl.constexpr):
    """The key of every row of a tile in which a thread's BESIDE rows lie BK // BESIDE apart."""
    o_row = tl.arange(0, BK)
    return o_row % (BK // BESIDE) * BESIDE + o_row // (BK // BESIDE)


@triton.jit
def by_rows(b_x, BESIDE: tl.constexpr):
    """[BK] in the order of keys → in that of the rows."""
    BK: tl.constexpr = b_x.shape[0]
    return tl.reshape(tl.permute(tl.reshape(b_x, [BK // BESIDE, BESIDE]), (1, 0)), [BK])


@triton.jit
def by_keys(b_x, BESIDE: tl.constexpr):
    """The inverse of `by_rows`."""
    BK: tl.constexpr = b_x.shape[0]
    return tl.reshape(tl.permute(tl.reshape(b_x, [BESIDE, BK // BESIDE]), (1, 0)), [BK])
