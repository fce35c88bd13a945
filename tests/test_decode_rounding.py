"""What only decoding rounds with, against numpy: limits, unscaled casts, half away, float16 scales, the basis."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jlaqat import DecodePolicy, QuantArrays, QuantSpec
from jlaqat.decode_carry import decode, encode, rotate
from jlaqat.rounding import fake_quantize, round_to_format
from jlaqat.sites import Place

FLOAT32 = np.float32


@pytest.fixture(scope="module")
def state():
    """[1, 2, 8, 64], groups of very different sizes, one of them zeros."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, 2, 8, 64)) * 10.0 ** rng.integers(-6, 3, (1, 2, 8, 1))
    x[:, 1, 3] = 0
    return x.astype(FLOAT32)


def rounded(x, spec):
    """By fake_quantize, jitted and not, and by codes: all of the same bits."""
    eager = np.asarray(fake_quantize(jnp.asarray(x), spec, site="state"))
    assert np.array_equal(jax.jit(lambda x: fake_quantize(x, spec, site="state"))(x), eager, equal_nan=True)
    policy = DecodePolicy(state=spec)
    place = Place(jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32))
    stored = jax.jit(lambda x: encode(x, policy, place, QuantArrays()))(x)
    assert np.array_equal(jax.jit(lambda s: decode(s, policy, jnp.float32))(stored), eager, equal_nan=True)
    return eager, stored


def test_halves_go_away_from_zero():
    x = np.array([0.5, 1.5, 2.5, -0.5, -2.5, 0.49999997, 126.5, 127.5, -300.0, 1e-30, -0.0], FLOAT32)
    wanted = np.array([1, 2, 3, -1, -3, 0, 127, 127, -127, 0, -0.0], FLOAT32)
    got = np.asarray(round_to_format(jnp.asarray(x), "int8", rounding="half_away"))
    assert got.tobytes() == wanted.tobytes()
    assert np.isnan(round_to_format(jnp.float32(np.nan)[None], "int8", rounding="half_away")).all()


def test_a_limit_is_what_amax_is_scaled_to(state):
    got, stored = rounded(state, QuantSpec.fp8(block_v=32, limit=240.0))
    tiles = state.reshape(1, 2, 8, 2, 32)
    scale = np.abs(tiles).max((2, 4)) / FLOAT32(240)
    assert np.array_equal(stored.scale, scale)
    spread = scale[:, :, None, :, None]
    codes = (tiles * (FLOAT32(1) / spread)).astype(ml_dtypes.float8_e4m3fn).astype(FLOAT32)
    assert np.array_equal(got, (codes * spread).reshape(state.shape))
    assert np.abs(codes).max() == 240


@pytest.mark.parametrize(
    ("spec", "dtype", "largest"),
    [
        (QuantSpec.fp8(granularity="none"), ml_dtypes.float8_e4m3fn, 448),
        (QuantSpec.fp8_e5m2(granularity="none"), ml_dtypes.float8_e5m2, 57344),
    ],
    ids=["e4m3", "e5m2"],
)
def test_unscaled_casts_saturate(state, spec, dtype, largest):
    x = np.concatenate([state, 1e6 * state], axis=2)
    got, stored = rounded(x, spec)
    assert np.array_equal(got, np.clip(x, -largest, largest).astype(dtype).astype(FLOAT32))
    assert stored.scale is None and stored.values.dtype == dtype
    hidden = rounded(np.where(x == x.max(), FLOAT32(np.inf), x), spec)[0]
    assert np.isnan(hidden[x == x.max()]).all() and np.isfinite(hidden[x != x.max()]).all()


def test_float16_scales(state):
    got, stored = rounded(state, QuantSpec.int8_hadamard32())
    groups = state.reshape(1, 2, 8, 2, 32)
    exact = np.maximum(np.abs(groups).max(-1) / FLOAT32(127), FLOAT32(6e-8))
    assert stored.scale.dtype == jnp.float16 and np.array_equal(stored.scale, exact.astype(np.float16))
    scaled = groups * (FLOAT32(1) / exact)[..., None]
    codes = np.clip(np.sign(scaled) * np.floor(np.abs(scaled).astype(np.float64) + 0.5), -127, 127).astype(FLOAT32)
    assert np.array_equal(stored.values, codes.reshape(state.shape).astype(np.int8))
    assert np.array_equal(got, (codes * exact.astype(np.float16).astype(FLOAT32)[..., None]).reshape(state.shape))


def test_the_basis_is_sylvesters_hadamard_matrix():
    matrix = np.ones((1, 1))
    while len(matrix) < 32:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    matrix /= np.sqrt(32)
    x = np.random.default_rng(1).standard_normal((3, 64)).astype(FLOAT32)
    wanted = (x.astype(np.float64).reshape(3, 2, 32) @ matrix).reshape(3, 64)
    assert np.allclose(rotate(jnp.asarray(x)), wanted, atol=1e-6)
    assert np.allclose(rotate(rotate(jnp.asarray(x))), x, atol=1e-6)
    assert np.array_equal(jax.jit(rotate)(x), rotate(jnp.asarray(x)))
    gradient = jax.grad(lambda x: (rotate(x) * wanted.astype(FLOAT32)).sum())(jnp.asarray(x))
    assert np.allclose(gradient, x, atol=1e-6)  # the transpose is the inverse
