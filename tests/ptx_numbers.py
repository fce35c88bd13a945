"""Numbers of the PTX emulator: conversions and arithmetic on arrays of one number a thread."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

# Small floats: their type here and the NaN that a conversion gives.
FORMATS = {
    "e4m3": (np.dtype(ml_dtypes.float8_e4m3fn), 0x7F),
    "bf16": (np.dtype(ml_dtypes.bfloat16), 0x7FFF),
    "f16": (np.dtype("f2"), 0x7FFF),
}


def encode(x: np.ndarray, name: str, truncated: bool = False) -> np.ndarray:
    """Bits of float32 numbers in a format, to nearest or towards zero; E4M3 saturates."""
    dtype, nan = FORMATS[name]
    x = np.clip(x, -448, 448) if name == "e4m3" else x  # leaves NaN
    bits = x.astype(dtype).view(f"u{dtype.itemsize}")
    if truncated:
        bits = bits - (np.abs(decode(bits, name)) > np.abs(x)).astype(bits.dtype)
    return np.where(np.isnan(x), nan, bits).astype(np.uint32)


def decode(bits: np.ndarray, name: str) -> np.ndarray:
    dtype = FORMATS[name][0]
    return np.ascontiguousarray(bits.astype(f"u{dtype.itemsize}")).view(dtype).astype(np.float32)


def _sum_to_odd(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c of float32 in float64: exact, or odd in the last bit, which keeps the side of every shorter tie."""
    product, c = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)  # exact
    total = product + c
    part = total - product
    lost = (product - (total - part)) + (c - part)  # exact (Knuth's TwoSum)
    move = np.isfinite(total) & (lost != 0) & (total.view(np.int64) & 1 == 0)
    return np.where(move, np.nextafter(total, np.copysign(np.inf, lost)), total)


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c with one rounding."""
    return _sum_to_odd(a, b, c).astype(np.float32)


def _fma_halves(name: str, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c with one rounding, of the 16-bit numbers in a uint16 or, two, in a uint32."""
    bits = _sum_to_odd(*(decode(x.copy().view(np.uint16), name) for x in (a, b, c))).view(np.int64)
    below = bits & (1 << 29) - 1  # float32 has no such bits; any of them makes its last one odd
    single = (bits - below | np.where(below != 0, 1 << 29, 0)).view(np.float64).astype(np.float32)
    return encode(single, name).astype(np.uint16).view(a.dtype)


def _negate_halves(name: str, a: np.ndarray) -> np.ndarray:
    return a ^ a.dtype.type(0x80008000 >> 32 - 8 * a.itemsize)


def _multiply_halves(name: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    minus_zero = _negate_halves(name, np.zeros_like(a))  # leaves the sign of a product that is zero
    return _fma_halves(name, a, b, minus_zero)


HALVES: dict[str, Callable[..., np.ndarray]] = {"fma": _fma_halves, "mul": _multiply_halves, "neg": _negate_halves}


def matrix_product(a: np.ndarray, b: np.ndarray, name: str) -> np.ndarray:
    """A B of mma.m16n8k16 in float64, as each thread holds it: [threads, 4] from uint32 [threads, 4] and [threads, 2].

    A lane holds pairs: of row lane / 4 of A (then of the row 8 further, then of columns 8 further), of column lane / 4
    of B (then of rows 8 further); of the product those of A's rows.
    """
    warps, lane = len(a) // 32, np.arange(32)[:, None]
    row, pair = lane // 4, 2 * (lane % 4)
    i, half = np.arange(8)[None] // 2, np.arange(8)[None] % 2
    left, right = np.zeros((warps, 16, 16)), np.zeros((warps, 16, 8))
    left[:, row + 8 * (i % 2), pair + half + 8 * (i // 2)] = decode(a.view(np.uint16), name).reshape(warps, 32, 8)
    right[:, (pair + half + 8 * i)[:, :4], row] = decode(b.view(np.uint16), name).reshape(warps, 32, 4)
    return (left @ right)[:, (row + 8 * i)[:, :4], (pair + half)[:, :4]].reshape(-1, 4)


def flush(x: np.ndarray) -> np.ndarray:
    """Zero, of the same sign, for what is subnormal in float32."""
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(x.dtype.type(0), x), x)


def neighbour(x: np.ndarray, which: str) -> np.ndarray:
    """The float32 "nearest" to a float64, or the next one "below" or "above" it, which is at most an ulp away."""
    nearest = x.astype(np.float32)
    if which == "nearest":
        return nearest
    side = np.float32(np.inf if which == "above" else -np.inf)
    beyond = nearest > x if which == "above" else nearest < x
    moved = np.nextafter(nearest, side)
    return np.where(beyond | ~np.isfinite(x) | (x == 0), nearest, moved)


def shift_left(a: np.ndarray, bits: np.ndarray) -> np.ndarray:
    last = 8 * a.itemsize - 1
    return np.where(bits > last, 0, a << np.minimum(bits, last).astype(a.dtype))


def shift_right(a: np.ndarray, bits: np.ndarray) -> np.ndarray:
    last = 8 * a.itemsize - 1
    shifted = a >> np.minimum(bits, last).astype(a.dtype)
    return shifted if a.dtype.kind == "i" else np.where(bits > last, 0, shifted)


def extract_bits(a: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
    """bfe, with length ≥ 1 and start + length ≤ 32."""
    whole = a.astype(f"{a.dtype.kind}8")
    above = (64 - start.astype(np.int64) - length).astype(whole.dtype)  # what is shifted out first
    return whole << above >> (64 - length.astype(np.int64)).astype(whole.dtype)


def divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """float32 to nearest, integers towards zero."""
    if a.dtype.kind == "f":
        return (a.astype(np.float64) / b.astype(np.float64)).astype(np.float32)
    quotient = np.abs(a.astype(np.int64)) // np.maximum(np.abs(b.astype(np.int64)), 1)
    return np.where((a < 0) == (b < 0), quotient, -quotient)


UNARY: dict[str, Callable[[Any], Any]] = {
    "abs": np.abs,
    "neg": operator.neg,
    "not": operator.invert,
    "ex2": lambda a: np.exp2(a.astype(np.float64)),
}
BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "max": np.fmax,
    "min": np.fmin,
    "copysign": lambda a, b: np.copysign(b, a),
}
COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}
ROUNDINGS = {"rmi": np.floor, "rpi": np.ceil, "rzi": np.trunc, "rni": np.rint}
