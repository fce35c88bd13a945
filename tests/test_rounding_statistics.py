"""SiteStats against sums taken in numpy, and the algebra of merging."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jlaqat.rounding import SiteStats, empty_stats, fake_quantize, histogram_edges, merge_stats, site_stats
from jlaqat.scales import NVFP4_SMALLEST_BLOCK_SCALE
from jlaqat.spec import QuantSpec

pytestmark = pytest.mark.usefixtures("strict_promotion")
HV, K, V = 3, 48, 80
ALL = np.ones((2, 1, K, 1), bool)
SIZES = {"num_heads": HV, "key_dim": K, "value_dim": V}
CASES = [
    ("state", QuantSpec.fp8(), (HV, 2)),
    ("state", QuantSpec.int8(granularity="key_row"), (HV, K, 3)),
    ("state", QuantSpec.nvfp4(), (HV,)),
    ("state", QuantSpec.float16(), (HV,)),
    ("w", QuantSpec.fp8(), (HV,)),
    ("w", QuantSpec.mxfp4(), (HV,)),
]
cases = pytest.mark.parametrize(("site", "spec", "groups"), CASES, ids=lambda v: getattr(v, "format", str(v)))


@functools.cache
def gather(site, spec):
    """Jitted: x → (x_q, stats), x [2, HV, K, V] in the role of the site's operand."""

    def both(x, where):
        x_q = fake_quantize(x, spec, site=site)
        return x_q, site_stats(x, spec, x_q, site=site, where=where)

    return jax.jit(both)


def some_x(seed=0):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((2, HV, K, V)) * np.exp2(rng.uniform(-12, 4, (2, HV, K, V)))).astype(np.float32)


def members(x, groups):
    """Magnitudes of each group, by its index: {(head, ...): 1-D array}."""
    for index in np.ndindex(groups):
        head = x[:, index[0]]
        if groups == (HV, 2):
            head = head[..., 64 * index[1] : 64 * index[1] + 64]
        elif len(groups) == 3:
            head = head[:, index[1], 32 * index[2] : 32 * index[2] + 32]
        yield index, abs(head).ravel()


@cases
def test_sums_equal_numpys(site, spec, groups):
    x = some_x()
    x_q, stats = gather(site, spec)(x, ALL)
    x_q = np.asarray(x_q)
    per_head = (0, 2, 3)
    np.testing.assert_allclose(stats.squares, (x.astype(np.float64) ** 2).sum(per_head), rtol=1e-5)
    np.testing.assert_allclose(stats.squared_error, ((x_q - x).astype(np.float64) ** 2).sum(per_head), rtol=1e-4)
    np.testing.assert_array_equal(stats.count, np.full(HV, 2 * K * V))
    np.testing.assert_array_equal(stats.nonfinite, np.zeros(HV))
    assert stats.amax.shape == groups and stats.histogram.shape == (*groups, histogram_edges().size - 1)
    for index, magnitudes in members(x, groups):
        assert stats.amax[index] == magnitudes.max()
        edges = histogram_edges()
        expected = np.histogram(np.clip(magnitudes, edges[0], np.nextafter(edges[-1], np.float32(0))), edges)[0]
        np.testing.assert_array_equal(stats.histogram[index], expected)
    assert all(field.dtype == jnp.float32 for field in stats)


def test_edges_are_eight_an_octave():
    edges = histogram_edges()
    assert edges.dtype == np.float32 and edges[0] == 2.0**-32 and edges[-1] == 2.0**16 and edges.size == 385
    np.testing.assert_array_equal(edges[8:] / edges[:-8], 2)
    assert (np.diff(edges) > 0).all()


@cases
def test_merging_equals_gathering_at_once(site, spec, groups):
    x = some_x()
    whole = gather(site, spec)(x, ALL)[1]
    parts = [
        gather(site, spec)(np.repeat(x[i : i + 1], 2, axis=0), ALL & (np.arange(2).reshape(2, 1, 1, 1) < 1))[1]
        for i in (0, 1)
    ]
    start = empty_stats(spec, site, **SIZES)
    for merged in (merge_stats(merge_stats(start, parts[0]), parts[1]), merge_stats(parts[1], parts[0])):
        for field, given, expected in zip(SiteStats._fields, merged, whole):
            np.testing.assert_allclose(given, expected, rtol=1e-6, err_msg=field)


def test_only_what_where_selects_is_counted():
    site, spec, _ = CASES[4]
    x = some_x()
    x[:, :, 40:] = 1e30  # padding tokens
    stats = gather(site, spec)(x, ALL & (np.arange(K) < 40)[:, None])[1]
    np.testing.assert_array_equal(stats.count, np.full(HV, 2 * 40 * V))
    assert stats.amax.max() < 1e3 and stats.squares.max() < 1e8
    np.testing.assert_array_equal(stats.histogram.sum(-1), stats.count)


@cases
def test_non_finite_elements_are_counted_and_left_out(site, spec, groups):
    x = some_x()
    x[0, 1, 2, 3], x[1, 1, 0, 0], x[1, 2, 0, 0] = np.nan, np.inf, -np.inf
    stats = gather(site, spec)(x, ALL)[1]
    np.testing.assert_array_equal(stats.nonfinite, [0, 2, 1])
    np.testing.assert_array_equal(stats.count, np.full(HV, 2 * K * V))
    assert all(np.isfinite(field).all() for field in stats)
    assert stats.histogram.sum() == 2 * HV * K * V - 3


def test_saturated_counts_what_a_static_range_clips():
    spec = QuantSpec.int8(granularity="head", scale="static")
    x, amax = some_x(), np.float32([0.5, 100, 1e6])
    x_q = fake_quantize(x, spec, site="state", amax=amax)
    stats = site_stats(x, spec, x_q, site="state", amax=amax)
    np.testing.assert_array_equal(stats.saturated, (abs(x) > amax[:, None, None]).sum((0, 2, 3)))
    assert stats.saturated[0] > 100 and stats.saturated[2] == 0


def test_saturated_is_zero_for_dynamic_scales_and_counts_overflowing_casts():
    x = some_x()
    assert not gather("state", QuantSpec.fp8())(x, ALL)[1].saturated.any()
    x[0, 0, 0, :5] = 1e6
    np.testing.assert_array_equal(gather("state", QuantSpec.float16())(x, ALL)[1].saturated, [5, 0, 0])


def test_saturated_counts_nvfp4_blocks_whose_scale_was_rounded_down():
    """A block whose amax is 6t·17 has the E4M3 scale 16 (a tie, to even): its amax is clipped from 6.375 to 6."""
    x = np.zeros((1, 1, 32, 1), np.float32)
    x[0, 0, 0], x[0, 0, 16], x[0, 0, 17] = 2688, 6 * 17, 6 * 16  # t = 1, blocks scales 448 and 16
    spec = QuantSpec.nvfp4()
    x_q = fake_quantize(x, spec, site="state")
    np.testing.assert_array_equal(np.asarray(x_q)[0, 0, [0, 16, 17], 0], [2688, 96, 96])
    assert site_stats(x, spec, x_q, site="state").saturated[0] == 1


def test_nvfp4_block_scale_never_underflows_to_zero():
    """Beside a block 2^20 times as large E4M3 would give 0, and 0/0 after it: the smallest E4M3 stands in."""
    x = np.zeros((1, 32, 1), np.float32)
    x[0, 0], x[0, 16], x[0, 17] = 2688, 6 * NVFP4_SMALLEST_BLOCK_SCALE * 0.25, 2.0**-20
    x_q = np.asarray(fake_quantize(x, QuantSpec.nvfp4(), site="state"))
    np.testing.assert_array_equal(x_q[0, [0, 16, 17], 0], [2688, 1.5 * NVFP4_SMALLEST_BLOCK_SCALE, 0])


def test_misuse_is_named():
    a = empty_stats(QuantSpec.fp8(), "state", **SIZES)
    b = empty_stats(QuantSpec.fp8(block_v=32), "state", **SIZES)
    with pytest.raises(ValueError, match=r"SiteStats.amax has shapes \[3, 2\] and \[3, 3\]; they must be equal"):
        merge_stats(a, b)
    with pytest.raises(ValueError, match=r"must have one shape \[..., heads, rows, columns\]"):
        site_stats(jnp.ones((3, 4, 4)), QuantSpec.fp8(), jnp.ones((4, 4)), site="state")
