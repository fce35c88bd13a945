"""Tiles of [BK, BV] elements that the matrix units take from registers just as threads have loaded them."""

import triton
import triton.language as tl

from jlaqat.kernels.gradient_blocks import TOKENS
from jlaqat.kernels.split_products import apart, multiply


@triton.jit
def as_product(b_x):
    """xᵀ of [TOKENS, W] bfloat16: as a product, so that it lies in registers as products do."""
    o = tl.arange(0, TOKENS)
    return multiply(tl.trans(b_x), tl.where(o[:, None] == o[None, :], 1.0, 0.0).to(tl.bfloat16))


@triton.jit
def keys_in_order_of_loads(BK: tl.constexpr, WARPS: tl.constexpr):
    """The key of each row of a tile that `as_operand` is to bring into order."""
    o = tl.arange(0, BK)
    half, warp = o // (8 * WARPS) % 2, o // 8 % WARPS
    return o // (16 * WARPS) * (16 * WARPS) + warp * 16 + half * 8 + o % 8


@triton.jit
def as_operand(b, WARPS: tl.constexpr):
    """[BK, BV] whose rows are `keys_in_order_of_loads` → rows in order and columns in that of `values_in_order`.

    A thread loads a row's neighbours, BV / 4 of them. The matrix units want of it four of every 16 columns, in two rows
    that are 8 apart: with columns renamed, and rows loaded so, what a thread has loaded is what it multiplies.
    """
    BK: tl.constexpr = b.shape[0]
    b = tl.reshape(b, [BK // (16 * WARPS), 2, WARPS, 8, b.shape[1]])
    return values_in_order(tl.reshape(tl.permute(b, (0, 2, 1, 3, 4)), [BK, b.shape[4]]))


@triton.jit
def values_in_order(b):
    """Columns of a tile in the order of those that are multiplied."""
    BV: tl.constexpr = b.shape[1]
    return tl.reshape(tl.permute(tl.reshape(b, [b.shape[0], 4, BV // 16, 2, 2]), (0, 2, 3, 1, 4)), [b.shape[0], BV])


@triton.jit
def row_sums(b_x, b_y):
    """[BK], sums of x∘y over values: products of a thread's columns are added one after another."""
    return tl.sum(add_columns(b_x, b_y, tl.zeros([b_x.shape[0], 8], tl.float32)), axis=1)


@triton.jit
def add_columns(b_x, b_y, b_sum):
    if b_x.shape[1] == b_sum.shape[1]:
        return tl.fma(b_x, b_y, b_sum)
    else:
        b_x0, b_x1 = apart(b_x)
        b_y0, b_y1 = apart(b_y)
        return add_columns(b_x1, b_y1, add_columns(b_x0, b_y0, b_sum))
