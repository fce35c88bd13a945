"""Scales and INT8 codes as a GPU computes them, without divisions: the bits of the contract, for all mantissas."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from jlaqat.kernels import rounding

TINY = np.float32(2.0**-126)
EVERY_MANTISSA = np.arange(1 << 23, dtype=np.uint32)
EDGES = np.array([0, 1, 2**-149, TINY, 448 * TINY, 127 * TINY, 2**127, 3.4028235e38, np.inf, np.nan], np.float32)
BLOCK = 1024
CONTRACTED = {"enable_fp_fusion": True}  # as the chunked kernels are launched


@triton.jit
def scale_kernel(p_amax, p_s, p_r, N, MAXIMUM: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK amax a program, or the one amax of a tile."""
    if BLOCK == 1:
        o, m = tl.program_id(0), tl.program_id(0) < N
    else:
        o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        m = o < N
    s, r = rounding.compute_scale(tl.load(p_amax + o, mask=m, other=1.0), MAXIMUM)
    tl.store(p_s + o, s, mask=m)
    tl.store(p_r + o, r, mask=m)


@triton.jit
def reciprocal_kernel(p_x, p_y, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(p_y + o, rounding._reciprocal(tl.load(p_x + o)))


@triton.jit
def int8_kernel(p_x, p_r, p_code, p_byte, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    code = rounding.round_code(rounding.scale_down(tl.load(p_x + o), tl.load(p_r + o), "int8"), "int8", False)
    tl.store(p_code + o, code)
    tl.store(p_byte + o, rounding.encode(code, "int8", False))


@triton.jit
def amax_kernel(p_x, p_rows, p_columns, p_all, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    o_r, o_c = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    b_x = tl.load(p_x + o_r[:, None] * COLUMNS + o_c[None, :])
    tl.store(p_rows + o_r, rounding.largest_magnitude(b_x, 1))
    tl.store(p_columns + o_c, rounding.largest_magnitude(b_x, 0))
    tl.store(p_all, rounding.largest_magnitude(b_x))


def on_gpu(x):
    return torch.from_numpy(x).cuda()


def assert_bits(got, wanted):
    """The same bits; any NaN for a NaN."""
    got = got.cpu().numpy()
    differ = (got.view(np.uint32) != wanted.view(np.uint32)) & ~(np.isnan(got) & np.isnan(wanted))
    assert not differ.any(), (got[differ][:4], wanted[differ][:4])


@pytest.mark.parametrize("block", [BLOCK, 1], ids=["vector", "scalar"])
@pytest.mark.parametrize("maximum", [448.0, 127.0])
def test_scales_are_those_of_correctly_rounded_divisions(maximum, block):
    """At the smallest normal scales, of ordinary size, and the largest."""
    some = EVERY_MANTISSA if block > 1 else EVERY_MANTISSA[::257]
    for exponent in (0, 7, 8, 9, 10, 126, 127, 254):
        amax = np.concatenate([(np.uint32(exponent << 23) | some).view(np.float32), EDGES])
        s, r = (torch.full((len(amax),), torch.nan, device="cuda") for _ in range(2))
        programs = triton.cdiv(len(amax), block)
        scale_kernel[(programs,)](on_gpu(amax), s, r, len(amax), maximum, block, **CONTRACTED)
        wanted = amax / np.float32(maximum)
        wanted = np.where(wanted < TINY, np.float32(1), wanted)
        assert_bits(s, wanted)
        assert_bits(r, np.float32(1) / wanted)


@pytest.mark.parametrize("exponent", [1, 2, 126, 127, 128, 247, 252])
def test_reciprocals_are_correctly_rounded(exponent):
    x = (np.uint32(exponent << 23) | EVERY_MANTISSA).view(np.float32)
    y = torch.full((len(x),), torch.nan, device="cuda")
    reciprocal_kernel[(len(x) // BLOCK,)](on_gpu(x), y, BLOCK, **CONTRACTED)
    assert_bits(y, np.float32(1) / x)


def test_int8_codes_round_twice_as_the_contract_does_and_nan_is_0():
    """x·r first, then the integer: a contracted product would round once, and differ at what the first made a tie."""
    rng = np.random.default_rng(0)
    x, r = (rng.uniform(1, 11, 1 << 22).astype(np.float32) for _ in range(2))
    x[:4] = [np.nan, np.inf, -np.inf, -11]
    r[:4] = [1, 0, np.nan, 11]
    with np.errstate(invalid="ignore"):
        product, exact = x * r, x.astype(np.float64) * r
    once = np.rint(exact)
    assert (once != np.rint(product))[4:].any()
    code, byte = torch.full((len(x),), torch.nan, device="cuda"), torch.full((len(x),), 9, dtype=torch.uint8).cuda()
    int8_kernel[(len(x) // BLOCK,)](on_gpu(x), on_gpu(r), code, byte, BLOCK, **CONTRACTED)
    wanted = np.rint(product)
    assert_bits(code, wanted)
    assert np.array_equal(byte.cpu().numpy().view(np.int8), np.nan_to_num(wanted, nan=0).astype(np.int8))


@pytest.mark.parametrize("planted", [None, np.nan, -np.nan, np.inf, -np.inf, -0.0, 2**-149])
def test_the_largest_magnitude_keeps_nan(planted):
    x = np.random.default_rng(0).normal(size=(128, 64)).astype(np.float32)
    if planted is not None:
        x[77, 5] = planted
        x[3], x[:, 9] = -0.0, 2**-140  # a row and a column of next to nothing
    rows, columns, whole = (torch.full((n,), -1.0, device="cuda") for n in (128, 64, 1))
    amax_kernel[(1,)](on_gpu(x), rows, columns, whole, 128, 64, **CONTRACTED)
    assert_bits(rows, np.abs(x).max(1))
    assert_bits(columns, np.abs(x).max(0))
    assert_bits(whole, np.abs(x).max(keepdims=True).reshape(1))
