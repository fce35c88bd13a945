"""`fake_quantize` against an independent numpy re-computation, its gradients, and what must not change its bits."""

import functools
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractDevice, AbstractMesh, PartitionSpec, use_abstract_mesh

from jlaqat.rounding import dequantize_codes, fake_quantize, quantize_codes, random_bits
from jlaqat.spec import FORMATS, QuantConfigError, QuantSpec

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from rounding_oracle import CODES, blocks_of, numpy_fake_quantize

pytestmark = pytest.mark.usefixtures("strict_promotion")
K, V = 48, 80  # neither is a multiple of every block: the last blocks are shorter

STATE_SPECS = [
    QuantSpec.fp8(),
    QuantSpec.fp8(block_v=32),
    QuantSpec.fp8(granularity="value_row"),
    QuantSpec.fp8_e5m2(granularity="head"),
    QuantSpec.int8(block_v=16),
    QuantSpec.int8(granularity="key_row"),
    QuantSpec.int4(granularity="value_row"),
    QuantSpec.nvfp4(),
    QuantSpec.mxfp8(),
    QuantSpec.mxfp4(),
    QuantSpec.bfloat16(),
    QuantSpec.float16(),
]
W_SPECS = [QuantSpec.fp8(), QuantSpec.int8(), QuantSpec.fp8_e5m2(), QuantSpec.mxfp8(), QuantSpec.mxfp4()]
SITES = [("state", spec) for spec in STATE_SPECS] + [("w", spec) for spec in W_SPECS]
# One of each kind of scale, for tests that compile each anew (eager mode and each way of transforming).
FEW = [("state", STATE_SPECS[0]), ("state", STATE_SPECS[5]), ("state", QuantSpec.nvfp4()), ("w", QuantSpec.mxfp4())]
BITWISE_IDEMPOTENT = [(site, spec) for site, spec in SITES if spec.format != "nvfp4"]


def over_sites(sites):
    return pytest.mark.parametrize(("site", "spec"), sites, ids=lambda v: v if isinstance(v, str) else v.describe())


def assert_same_bits(given, expected):
    given, expected = np.asarray(given), np.asarray(expected)
    assert given.dtype == expected.dtype and given.shape == expected.shape
    differ = (given != expected) & ~(np.isnan(given) & np.isnan(expected))
    differ |= np.signbit(given) != np.signbit(expected)
    differ &= ~np.isnan(expected)
    assert not differ.any() and (np.isnan(given) == np.isnan(expected)).all(), f"{differ.sum()} of {differ.size} differ"


def fake_quantized(site, spec):
    return functools.partial(fake_quantize, spec=spec, site=site)


jitted = {(site, spec): jax.jit(fake_quantized(site, spec)) for site, spec in SITES}


def some_state(seed=0, *leading):
    """Tiles of very different magnitude, some zero, one too small for a normal scale."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((*leading, K, V)) * np.exp2(rng.uniform(-20, 20, (*leading, 1, V)))
    x[..., :, 16:32] = 0
    x[..., 32:, :16] *= 2.0**-120
    return x.astype(np.float32)


# ---- against numpy ---------------------------------------------------------------------------------------------------


@over_sites(SITES)
def test_equals_numpy(site, spec):
    x = some_state(0, 2, 2)
    assert_same_bits(jitted[site, spec](x), numpy_fake_quantize(x, spec, site))


@over_sites([*FEW, ("state", QuantSpec.float16())])
def test_has_the_same_bits_in_every_setting(run, site, spec):
    """Values and, through a vector-Jacobian product, the straight-through gradient."""
    x, cotangent = some_state(0, 2, 2), some_state(1, 2, 2)

    def both(x, cotangent):
        value, pull = jax.vjp(fake_quantized(site, spec), x)
        return jnp.stack([value, *pull(cotangent)])

    values, gradients = np.moveaxis(np.asarray(run(both)(x, cotangent)), 1, 0)
    assert_same_bits(values, numpy_fake_quantize(x, spec, site))
    assert_same_bits(gradients, cotangent)


@over_sites([("state", s) for s in STATE_SPECS if s.format in ("e4m3", "int8", "nvfp4")] + [("w", W_SPECS[0])])
def test_lowers_to_a_gpu_kernel(site, spec):
    """Inside a compiled Pallas kernel, not only an interpreted one: lowering to Triton needs no GPU."""
    from jax.experimental import pallas as pl

    def kernel(x_ref, o_ref):
        o_ref[...] = fake_quantize(x_ref[...], spec, site=site)

    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="cuda")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        traced = jax.jit(lambda x: pl.pallas_call(kernel, out_shape=x)(x)).trace(x)
        assert "triton" in traced.lower(lowering_platforms=("cuda",)).as_text()


@over_sites(
    [*FEW, ("state", QuantSpec.int8(block_v=16)), ("state", QuantSpec.float16()), ("state", QuantSpec.bfloat16())]
)
def test_consumers_do_not_change_the_bits(site, spec):
    """XLA may contract the last multiplication with an addition that follows, and drop conversions: neither shows."""
    x, y = np.random.default_rng(0).standard_normal((2, 2, 2, K, V)).astype(np.float32)
    rounded = fake_quantized(site, spec)
    fused = jax.jit(lambda x, y: (rounded(x) + y, rounded(x) - x, rounded(x * y)))(x, y)
    expected = np.asarray(jitted[site, spec](x))
    for value, wanted in zip(fused, (expected + y, expected - x, jitted[site, spec](x * y)), strict=True):
        assert_same_bits(value, wanted)


@over_sites([("state", QuantSpec.fp8()), ("w", QuantSpec.fp8()), ("state", QuantSpec.float16())])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_sixteen_bit_inputs_round_to_their_type_last(site, spec, dtype):
    x = np.random.default_rng(0).standard_normal((2, 2, K, V)).astype(dtype)
    given = jax.jit(lambda x: fake_quantize(x, spec, site=site).astype(jnp.float32))(x)
    expected = numpy_fake_quantize(x.astype(np.float32), spec, site).astype(dtype)
    assert_same_bits(given, expected.astype(np.float32))
    assert jax.eval_shape(fake_quantized(site, spec), x).dtype == dtype


def test_float64_is_rounded_to_float32_first(x64):
    x = np.random.default_rng(0).standard_normal((2, K, V))
    x[0, 0, :3] = [448, 1.0625 + 2**-40, 1.1875 - 2**-40]  # ties of E4M3 once they are float32
    for site, spec in [*FEW, ("state", QuantSpec.int4(granularity="value_row"))]:
        result = jax.jit(fake_quantized(site, spec))(x)
        assert result.dtype == jnp.float64
        assert_same_bits(result, numpy_fake_quantize(x.astype(np.float32), spec, site).astype(np.float64))
    result = jax.jit(fake_quantized("state", QuantSpec.fp8(granularity="head")))(x)
    np.testing.assert_array_equal(result[0, 0, :3], [448, 1, 1.25])


# ---- properties -----------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32 - 1), exponent=st.integers(-90, 90), case=st.sampled_from(SITES))
def test_symmetry_and_powers_of_two(seed, exponent, case):
    """Q(−x) = −Q(x), and Q(2^k x) = 2^k Q(x) while nothing leaves the range of normal numbers."""
    x = np.random.default_rng(seed).standard_normal((2, 2, K, V)).astype(np.float32)
    x = np.where(abs(x) < 2**-8, np.float32(0), x)
    result = np.asarray(jitted[case](x))
    assert_same_bits(jitted[case](-x), -result)
    if case[1].format != "float16":  # has no scale, so its range ends
        factor = np.float32(2.0**exponent)
        assert_same_bits(jitted[case](x * factor), result * factor)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), low=st.floats(-126, 120), case=st.sampled_from(BITWISE_IDEMPOTENT))
def test_rounding_twice_changes_nothing(seed, low, case):
    """Bitwise, at any magnitude that float32 has: the scale found again is the scale that was used.

    Save one place: where an MX block's scale is the least normal number, its amax may round down to what the next lower
    scale would hold. That one is subnormal, so it counts as 1 by contract, and the second rounding gives zeros.
    """
    if FORMATS[case[1].format].block:
        low = max(low, -114.0)
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((2, 2, K, V)) * np.exp2(rng.uniform(low, min(low + 60, 124), (2, 2, 1, V)))
    once = np.asarray(jitted[case](np.clip(x, -3e38, 3e38).astype(np.float32)))
    assert_same_bits(jitted[case](once), once)


def test_nvfp4_is_not_idempotent():
    """Its block scales are rounded: that they may move again is a property of the format."""
    case = ("state", next(s for s in STATE_SPECS if s.format == "nvfp4"))
    once = jitted[case](some_state(0, 2, 2))
    assert not np.array_equal(jitted[case](once), once)


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), case=st.sampled_from(SITES))
def test_monotone_within_a_group(seed, case):
    site, spec = case
    x = np.random.default_rng(seed).standard_normal((2, 2, K, V)).astype(np.float32)
    result = np.asarray(jitted[case](x))
    for index in np.ndindex(2, 2):
        for block in blocks_of(x[index], spec, site) if spec.granularity != "none" else [np.s_[:, :]]:
            order = np.argsort(x[index][block], axis=None)
            assert (np.diff(result[index][block].ravel()[order]) >= 0).all()


@over_sites(SITES)
def test_non_finite_elements_come_out(site, spec):
    x = some_state(0, 2, 2)
    x[0, 0, 5, 7], x[0, 1, 5, 7], x[1, 0, 5, 7] = np.nan, np.inf, -np.inf
    result = np.asarray(jitted[site, spec](x))
    if spec.granularity == "none":
        np.testing.assert_array_equal(result[:, :, 5, 7].ravel()[:3], [np.nan, np.inf, -np.inf])
        return
    for index in np.ndindex(2, 2):
        for block in blocks_of(x[index], spec, site):
            if not np.isfinite(x[index][block]).all():
                assert np.isnan(result[index][block]).all()
            elif spec.format != "nvfp4" or index == (1, 1):  # its tensor amax spans the head
                assert np.isfinite(result[index][block]).all()


# ---- static scales and gradients ------------------------------------------------------------------------------------

HV = 3
STATIC = [
    ("state", "tile", (HV, 2)),
    ("state", "value_row", (HV, V)),
    ("state", "key_row", (HV, K, 3)),
    ("state", "head", (HV,)),
    ("w", "row", (HV,)),
]


@pytest.mark.parametrize(("site", "granularity", "shape"), STATIC)
def test_static_scales(site, granularity, shape):
    """amax of the data gives the dynamic result; a smaller one clips; the head's dimension aligns, others broadcast."""
    spec = QuantSpec.fp8(granularity=granularity, scale="static")
    x = np.random.default_rng(0).standard_normal((2, 2, HV, K, V)).astype(np.float32)
    amax = np.random.default_rng(1).uniform(0.5, 1.5, shape).astype(np.float32)
    amax.ravel()[0] = 0  # never calibrated: the scale is 1
    result = np.asarray(jax.jit(lambda x, a: fake_quantize(x, spec, site=site, amax=a))(x, amax))
    for h in range(HV):
        for number, (rows, columns) in enumerate(blocks_of(x[0, 0, h], spec, site)):
            if site == "w":
                a = amax[h]
            elif granularity == "key_row":
                a = amax[h, rows.start, columns.start // 32]
            else:
                a = amax[h].ravel()[number]
            s = np.float32(1) if a == 0 else a / np.float32(448)
            scaled = np.clip(x[..., h, rows, columns] * (np.float32(1) / s), -448, 448).astype(CODES["e4m3"])
            assert_same_bits(result[..., h, rows, columns], scaled.astype(np.float32) * s)


@over_sites(SITES)
def test_derivatives_are_the_identity(site, spec):
    x, other = some_state(0, 2, 2), some_state(1, 2, 2)

    @jax.jit
    def both(x, other):  # the rounding itself is dead code here: this compiles at once
        f = fake_quantized(site, spec)
        return jax.vjp(f, x)[1](other)[0], jax.jvp(f, (x,), (other,))[1]

    for derivative in both(x, other):
        assert_same_bits(derivative, other)


@pytest.mark.parametrize(("site", "granularity", "shape"), [STATIC[0], STATIC[2], STATIC[4]])
def test_clip_gradient_is_zero_outside_the_range(site, granularity, shape):
    spec = QuantSpec.int8(granularity=granularity, scale="static", gradient="clip")
    x = np.random.default_rng(0).standard_normal((2, HV, K, V)).astype(np.float32)
    amax = np.ones(shape, np.float32)
    x[0, 0, 0, :6] = [1, -1, np.nextafter(np.float32(1), 2, dtype=np.float32), -1.0000001, 0, 5]

    @jax.jit
    def gradients(x, amax):
        return jax.grad(lambda x, a: jnp.sum(fake_quantize(x, spec, site=site, amax=a)), argnums=(0, 1))(x, amax)

    dx, damax = gradients(x, amax)
    np.testing.assert_array_equal(dx, abs(x) <= 1)
    np.testing.assert_array_equal(dx[0, 0, 0, :6], [1, 1, 0, 0, 1, 0])
    assert not damax.any()
    dx, _ = gradients(x, np.zeros(shape, np.float32))  # scale 1: the range is the format's
    np.testing.assert_array_equal(dx, np.ones_like(x))
    identity = QuantSpec.int8(granularity=granularity, scale="static")
    dx = jax.grad(lambda x: jnp.sum(fake_quantize(x, identity, site=site, amax=amax)))(x)
    np.testing.assert_array_equal(dx, np.ones_like(x))


# ---- stochastic bits ------------------------------------------------------------------------------------------------

STOCHASTIC = QuantSpec.fp8(rounding="stochastic", seed=7)


def rounded_heads(x, offset):
    """x [heads, K, V], the first head being number `offset` of all."""
    heads = offset + jnp.arange(x.shape[0], dtype=jnp.uint32)
    bits = random_bits((K, V), seed=STOCHASTIC.seed, step=1, layer=2, sequence=3, head=heads, round_index=4)
    return fake_quantize(x, STOCHASTIC, site="state", random_bits=bits)


def test_stochastic_rounding_of_a_shard_draws_the_bits_of_the_whole():
    x = some_state(0, 8)
    whole = jax.jit(rounded_heads)(x, jnp.uint32(0))
    mesh = jax.make_mesh((4,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,))

    def shard(x):
        return rounded_heads(x, jax.lax.axis_index("heads").astype(jnp.uint32) * jnp.uint32(2))

    heads = PartitionSpec("heads")
    assert_same_bits(jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=heads, out_specs=heads))(x), whole)
    alone = jax.jit(rounded_heads)(x[7:], jnp.uint32(7))
    assert_same_bits(alone, whole[7:])
    assert not np.array_equal(jax.jit(rounded_heads)(x[7:], jnp.uint32(6)), alone)


def test_remat_draws_the_same_bits():
    """Squaring makes the backward pass round again under remat: its gradient shows the bits that it drew."""
    x = some_state(0, 2)
    rounded = jax.jit(rounded_heads)(x, jnp.uint32(0))
    again = jax.checkpoint(lambda x: jnp.sum(rounded_heads(x, jnp.uint32(0)) ** 2))
    assert_same_bits(jax.jit(jax.grad(again))(x), 2 * rounded)
    assert "rem" in str(jax.make_jaxpr(jax.grad(again))(x)) or "checkpoint" in str(jax.make_jaxpr(jax.grad(again))(x))


@pytest.mark.parametrize("fmt", ["e4m3", "int8"])
def test_a_stochastically_rounded_state_stays_when_rounded_again(fmt):
    """s·code·(1/s) misses the code by a little; drawing there would now and then move a state that is handed over."""
    spec = QuantSpec(format=fmt, rounding="stochastic")
    bits = np.random.default_rng(0).integers(0, 2**32, (64, K, V), dtype=np.uint32)
    x = some_state(0, 64)
    draw = jax.jit(lambda x, b: fake_quantize(x, spec, site="state", random_bits=b))
    once = draw(x, bits)
    twice = draw(once, np.zeros_like(bits))  # zeros round up whatever has a fraction
    assert_same_bits(twice, once)
    assert not np.array_equal(once, x)


# ---- codes ----------------------------------------------------------------------------------------------------------


@over_sites([SITES[0], SITES[3], SITES[5], SITES[6], ("w", W_SPECS[1])])  # each format, each granularity but one
def test_codes_give_back_the_rounded_tensor(site, spec):
    x = some_state(0, 2, 2)

    @jax.jit
    def there_and_back(x):
        codes, scale = quantize_codes(x, spec, site=site)
        return codes, scale, dequantize_codes(codes, scale, spec, site=site)

    codes, scale, back = there_and_back(x)
    back, expected = np.asarray(back), np.asarray(jitted[site, spec](x))
    assert_same_bits(back + 0, expected + 0)  # integers have no negative zero
    assert codes.dtype.itemsize == 1 and codes.shape == x.shape and scale.dtype == jnp.float32
    x[0, 0, 5, 7], x[0, 1, 5, 7] = np.nan, np.inf
    back = np.asarray(there_and_back(x)[2])
    assert np.isnan(back[0, :, 5, 7]).all() and np.isfinite(back[1]).all()


# ---- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "message", "kwargs"),
    [
        (ValueError, r"x is int32\[2, 2\]; it must be floating point", {"x": jnp.ones((2, 2), jnp.int32)}),
        (ValueError, r"x is float32\[4\]; .* at least two dimensions", {"x": jnp.ones(4)}),
        (ValueError, r"scale='dynamic' takes it from x; set scale='static'", {"amax": jnp.ones(3)}),
        (ValueError, r"needs amax, a calibrated maximum", {"spec": QuantSpec.fp8(scale="static")}),
        (
            ValueError,
            r"amax has shape \[3, 4\], but granularity 'tile' of a state of shape \[3, 48, 80\] takes \[3, 2\]",
            {"spec": QuantSpec.fp8(scale="static"), "amax": jnp.ones((3, 4))},
        ),
        (
            ValueError,
            r"amax has shape \[2\], .* of a w of shape \[3, 48, 80\] takes \[3\]",
            {"spec": QuantSpec.fp8(scale="static"), "amax": jnp.ones(2), "site": "w"},
        ),
        (QuantConfigError, r"site='u' is not supported; choose one of 'state', 'w'", {"site": "u"}),
        (QuantConfigError, r"'nvfp4' is refused for w", {"spec": QuantSpec.nvfp4(), "site": "w"}),
        (ValueError, r"rounding='stochastic' was given no random_bits", {"spec": STOCHASTIC}),
    ],
)
def test_misuse_is_named(error, message, kwargs):
    arguments = {"x": jnp.ones((3, K, V)), "spec": QuantSpec.fp8(), "site": "state", **kwargs}
    with pytest.raises(error, match=message):
        fake_quantize(arguments.pop("x"), arguments.pop("spec"), **arguments)


def test_codes_need_a_one_byte_format():
    with pytest.raises(ValueError, match=r"format 'nvfp4' has no one-byte codes .* use e4m3, e5m2, int8, int4"):
        quantize_codes(jnp.ones((K, V)), QuantSpec.nvfp4(), site="state")


@pytest.mark.parametrize("shape", [(2, 0, V), (2, K, 0), (0, K, V)])
def test_empty_tensors(shape):
    for site, spec in FEW:
        assert jax.jit(fake_quantized(site, spec))(jnp.zeros(shape)).shape == shape
