"""Halves of a tile's rows, and tiles of halves: views of registers where a thread holds rows of both."""

import triton
import triton.language as tl


@triton.jit
def halve(b):
    """(upper, lower) rows of [n, W], [n / 2, W] each; n is even."""
    return tl.split(tl.permute(tl.reshape(b, [2, b.shape[0] // 2, b.shape[1]]), (1, 2, 0)))


@triton.jit
def join_halves(b_upper, b_lower):
    """[2 n, W] of two [n, W]: the inverse of `halve`."""
    b = tl.permute(tl.join(b_upper, b_lower), (2, 0, 1))
    return tl.reshape(b, [2 * b_upper.shape[0], b_upper.shape[1]])
