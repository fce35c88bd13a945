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


def encode(x: np.ndarray, name: str) -> np.ndarray:
    """Bits of float32 numbers in a format, to nearest; E4M3 saturates."""
    dtype, nan = FORMATS[name]
    x = np.clip(x, -448, 448) if name == "e4m3" else x  # leaves NaN
    bits = x.astype(dtype).view(f"u{dtype.itemsize}")
    return np.where(np.isnan(x), nan, bits).astype(np.uint32)


def decode(bits: np.ndarray, name: str) -> np.ndarray:
    dtype = FORMATS[name][0]
    return np.ascontiguousarray(bits.astype(f"u{dtype.itemsize}")).view(dtype).astype(np.float32)


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c with one rounding.

    The product is exact in float64; the sum is rounded to odd there, so that the rounding to float32 sees on which side
    of a tie it lies.
    """
    product, c = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + c
    part = total - product
    lost = (product - (total - part)) + (c - part)  # exact (Knuth's TwoSum)
    move = np.isfinite(total) & (lost != 0) & (total.view(np.int64) & 1 == 0)
    return np.where(move, np.nextafter(total, np.copysign(np.inf, lost)), total).astype(np.float32)


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
