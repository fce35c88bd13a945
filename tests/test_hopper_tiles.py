"""The copies of P and X by the kernels for SM90, whose functions Gluon cannot interpret: their own code run on NumPy.

Every name that they take from Gluon is given a NumPy meaning. What that leaves out is how threads share the elements:
here each thread's eight must be one piece of 16 bytes, which `cp.async` copies or leaves out whole.
"""

import inspect
import pathlib
import sys
import types

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")
sys.path.insert(0, str(pathlib.Path(__file__).parent))

import kernel_oracle as oracle
import torch

from jlaqat.kernels import hopper_tiles

HEADS, HEAD = 3, 1
VECTOR = 8


class Tile:
    """Shared memory of 16-bit elements, as the copies leave it."""

    shape, dtype = (64, 64), types.SimpleNamespace(primitive_bitwidth=16)

    def __init__(self):
        self.array = np.full(self.shape, np.nan)

    def slice(self, start, length, dim):
        assert dim == 0
        return self.array[start : start + length]


def copies_of(memory, warps):
    """hopper_tiles' functions as Python runs them, pointers being offsets into `memory`."""

    def async_load(tile, offsets, mask):
        offsets, mask = np.broadcast_to(offsets, tile.shape), np.broadcast_to(mask, tile.shape)
        pieces, taken = (x.reshape(-1, VECTOR) for x in (offsets, mask))
        assert (pieces == pieces[:, :1] + np.arange(VECTOR)).all() and (pieces[:, 0] % VECTOR == 0).all()
        assert (taken == taken[:, :1]).all()
        tile[:] = np.where(mask, memory[np.where(mask, offsets, 0)], 0.0)

    def static_assert(holds):
        assert holds

    gl = types.SimpleNamespace(
        arange=lambda start, end, layout: np.arange(start, end),
        where=np.where,
        static_range=range,
        static_assert=static_assert,
        num_warps=lambda: warps,
        BlockedLayout=lambda size, threads, warps, order: types.SimpleNamespace(
            threads_per_warp=threads, warps_per_cta=warps
        ),
        SliceLayout=lambda dim, parent: None,
    )
    names = {"gl": gl, "async_load": async_load}
    for name, function in vars(hopper_tiles).items():
        if inspect.isfunction(getattr(function, "fn", None)):
            names[name] = types.FunctionType(function.fn.__code__, names, name)
    return names


@pytest.mark.parametrize("warps", [4, 8])
@pytest.mark.parametrize("n_rows", [64, 63, 33, 17, 16, 1])
@pytest.mark.parametrize("width", [64, 80])
def test_scores_and_inverse_come_from_where_they_lie(width, n_rows, warps):
    """Of a middle head, at an odd row, from memory that is NaN wherever nothing of them lies."""
    p, x = torch.randn(2, n_rows, 64, generator=torch.Generator().manual_seed(n_rows), dtype=torch.float64).tril()
    row = 5
    kept = {"fetch_scores": p, "fetch_inverse": x}
    for name, expected in kept.items():
        memory = np.full((row + n_rows + 7, HEADS, width), np.nan)
        memory[row : row + n_rows, HEAD] = oracle.x_in_p(p, x) if width == 80 else expected
        tile = Tile()
        copies_of(memory.reshape(-1), warps)[name](tile, 0, row, n_rows, HEAD, HEADS, width)
        np.testing.assert_array_equal(tile.array[:n_rows], expected.numpy(), err_msg=name)
        np.testing.assert_array_equal(tile.array[n_rows:], 0.0, err_msg=name)
