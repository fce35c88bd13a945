"""Exact arithmetic: division, every grid and the random bits, in every setting (`run`) that must give the same bits."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jlaqat.philox import philox4x32
from jlaqat.rounding import compute_scale, div_rn, random_bits, round_to_format
from jlaqat.spec import FORMATS, QuantConfigError

pytestmark = pytest.mark.usefixtures("strict_promotion")
DTYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "nvfp4": ml_dtypes.float4_e2m1fn,
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
}
GRIDS = [*DTYPES, "int8", "int4"]


def assert_same_bits(given, expected):
    """Equal float32 bit for bit, signs of zeros included; any NaN equals any NaN."""
    given, expected = np.asarray(given), np.asarray(expected)
    assert given.dtype == expected.dtype == np.float32 and given.shape == expected.shape
    differ = (given.view(np.uint32) != expected.view(np.uint32)) & ~(np.isnan(given) & np.isnan(expected))
    assert not differ.any(), f"{differ.sum()} differ, first: {given[differ][:4]} for {expected[differ][:4]}"


def nearest(x, fmt):
    """The oracle: ml_dtypes' (numpy's) float32 conversion of x, saturated as the format saturates."""
    with np.errstate(all="ignore"):
        x = np.clip(x, -FORMATS[fmt].max, FORMATS[fmt].max)
        rounded = np.rint(x) if FORMATS[fmt].kind == "int" else x.astype(DTYPES[fmt]).astype(np.float32)
    return np.where(np.isnan(x), np.float32(np.nan), rounded)  # float4 has no NaN


@functools.cache
def grid(fmt):
    """Every finite non-negative value of a scaled format, ascending."""
    if FORMATS[fmt].kind == "int":
        return np.arange(int(FORMATS[fmt].max) + 1, dtype=np.float32)
    bits = {"nvfp4": 4, "bfloat16": 16, "float16": 16}.get(fmt, 8)
    codes = np.arange(2 ** (bits - 1), dtype=np.uint16 if bits == 16 else np.uint8)  # the sign's bit is clear
    values = codes.view(DTYPES[fmt]).astype(np.float32)
    return values[np.isfinite(values)]


@functools.cache
def float32_classes():
    """[3, 2^20] float32: for every upper 20 bits, lower 12 bits of zero, one and all ones.

    No code and no tie of these grids has any of the lower 12 bits set, so float32 of one upper part with non-zero lower
    bits round alike: these are all float32 there are, NaN and infinities included.
    """
    upper = np.arange(2**20, dtype=np.uint32) << 12
    return np.stack([upper, upper | 1, upper | 0xFFF]).view(np.float32)


# ---- grids -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", GRIDS)
def test_every_float32_rounds_as_ml_dtypes_does(run, fmt):
    x = float32_classes()
    assert_same_bits(run(lambda x: round_to_format(x, fmt))(x), nearest(x, fmt))


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2", "nvfp4", "int8", "int4"])
def test_every_code_and_every_tie(run, fmt):
    values = grid(fmt)
    ties = (values[1:] + values[:-1]) / 2
    beside = [np.nextafter(t, np.float32(d)) for t in (values, ties) for d in (-np.inf, np.inf)]
    x = np.concatenate([values, ties, *beside, [FORMATS[fmt].max * 1.01, 3e38, np.inf, np.nan]]).astype(np.float32)
    x = np.stack([x, -x])
    padded = np.pad(x, [(0, 0), (0, 1024 - x.shape[1])])  # one shape for all formats: eager mode compiles each anew
    result = np.asarray(run(lambda x: round_to_format(x, fmt))(padded))[:, : x.shape[1]]
    assert_same_bits(result, nearest(x, fmt))
    n = len(values)
    assert_same_bits(result[0, :n], values)
    even = np.arange(n - 1) + np.arange(n - 1) % 2  # the neighbour of a tie whose code is even
    assert_same_bits(result[0, n : 2 * n - 1], values[even])
    assert_same_bits(result[:, -2], np.float32([FORMATS[fmt].max, -FORMATS[fmt].max]))
    assert np.isnan(result[:, -1]).all()


@pytest.mark.parametrize(("fmt", "same"), [("mxfp4", "nvfp4"), ("mxfp8", "e4m3")])
def test_mx_formats_use_the_same_grids(fmt, same):
    x = np.linspace(-500, 500, 20001, dtype=np.float32)
    assert_same_bits(round_to_format(x, fmt), round_to_format(x, same))


def test_casts_overflow_to_infinity(run):
    x = np.float32([[65504, 65519.996, 65520, 1e6, np.inf, -65520, -np.inf]])
    expected = np.float32([[65504, 65504, np.inf, np.inf, np.inf, -np.inf, -np.inf]])
    assert_same_bits(run(lambda x: round_to_format(x, "float16"))(x), expected)
    x = np.float32([[3.3895314e38, 3.4e38, -np.inf]])
    assert_same_bits(run(lambda x: round_to_format(x, "bfloat16"))(x), np.float32([[3.3895314e38, np.inf, -np.inf]]))


@pytest.mark.parametrize("fmt", GRIDS)
def test_rounding_a_product_is_not_contracted(run, fmt):
    """a·b is rounded to float32 before the grid sees it, although XLA may contract a product with an addition."""
    a, b = np.random.default_rng(0).standard_normal((2, 2, 50_000)).astype(np.float32)
    assert_same_bits(run(lambda a, b: round_to_format(a * b, fmt))(a, b), nearest(a * b, fmt))


rounded = {fmt: jax.jit(functools.partial(round_to_format, fmt=fmt)) for fmt in GRIDS}
sixteen_floats = hnp.arrays(np.float32, 16, elements=st.floats(width=32, allow_nan=False))


@settings(deadline=None, max_examples=60)
@given(x=sixteen_floats, fmt=st.sampled_from(GRIDS))
def test_rounding_is_odd_idempotent_and_monotone(x, fmt):
    result = np.asarray(rounded[fmt](x))
    assert_same_bits(rounded[fmt](-x), -result)
    assert_same_bits(rounded[fmt](result), result)
    order = np.argsort(x)
    assert (result[order][1:] >= result[order][:-1]).all()


def test_misuse_is_named():
    x = jnp.ones(4)
    with pytest.raises(QuantConfigError, match=r"fmt='fp8' is not a format; choose one of e4m3"):
        round_to_format(x, "fp8")
    with pytest.raises(QuantConfigError, match=r"rounding='up' .* 'nearest', 'half_away' or 'stochastic'"):
        round_to_format(x, "e4m3", rounding="up")
    with pytest.raises(QuantConfigError, match=r"rounding='half_away' is for integers, not 'e4m3'"):
        round_to_format(x, "e4m3", rounding="half_away")
    with pytest.raises(ValueError, match=r"was given no random_bits; pass random_bits"):
        round_to_format(x, "e4m3", rounding="stochastic")
    with pytest.raises(ValueError, match=r"rounding='nearest' was given random_bits"):
        round_to_format(x, "e4m3", random_bits=jnp.zeros(4, jnp.uint32))
    with pytest.raises(ValueError, match=r"random_bits is uint32\[3\]; it must be uint32\[4\]"):
        round_to_format(x, "e4m3", rounding="stochastic", random_bits=jnp.zeros(3, jnp.uint32))


# ---- division --------------------------------------------------------------------------------------------------------


def quotients():
    """[2, n] operands: any bits, the contract's own divisions, quotients next to ties, subnormals, special values."""
    rng = np.random.default_rng(0)

    def any_bits(n):
        return rng.integers(0, 2**32, n, dtype=np.uint32).view(np.float32)

    def subnormal(n):
        return rng.integers(0, 2**23, n, dtype=np.uint32).view(np.float32)

    def positive(n):
        return np.exp2(rng.uniform(-126, 127, n)).astype(np.float32)

    maxima = np.float32([448, 57344, 127, 7, 6, 2688])
    scaled = positive(1_000_000) / maxima[0]
    special = np.float32(
        [0, 1, np.inf, np.nan, 2**-126, 2**-149, 3 * 2**-149, 2**-127, 3.4028235e38, 448, 127, 1.5, 1e-38]
    )
    special = np.concatenate([special, -special, np.nextafter(special, np.float32(0)), maxima * np.float32(2**-126)])
    a, b = np.meshgrid(special, special)
    # The product of b and a number halfway between two float32, rounded, divided by b, is as near to a tie as can be.
    halfway = (2 * rng.integers(2**23, 2**24, 1_000_000) + 1) / 2.0**24
    divisor = rng.uniform(1, 2, halfway.size).astype(np.float32)
    near_tie = (halfway * divisor).astype(np.float32)
    pairs = [
        (any_bits(2_000_000), any_bits(2_000_000)),
        (positive(600_000), np.repeat(maxima, 100_000)),
        (np.ones_like(scaled), scaled),
        (near_tie, divisor),
        (np.nextafter(near_tie, np.float32(0)), divisor),
        (subnormal(500_000), rng.standard_normal(500_000).astype(np.float32)),
        (subnormal(500_000), subnormal(500_000)),
        (any_bits(500_000), subnormal(500_000)),
        (a.ravel(), b.ravel()),
    ]
    return np.stack([np.concatenate(side) for side in zip(*pairs)])


def test_division_is_numpys(run):
    a, b = quotients()
    with np.errstate(all="ignore"):
        expected = a / b
    assert a.size > 7_000_000
    assert_same_bits(run(div_rn)(a[None], b[None]), expected[None])


def test_division_takes_python_scalars_and_broadcasts():
    b = np.float32([[3], [0.1]])
    assert_same_bits(jax.jit(lambda b: div_rn(1.0, b))(b), 1 / b)
    assert_same_bits(jax.jit(div_rn)(np.float32([1, 2, 7]), b[..., 0][:, None]), np.float32([1, 2, 7]) / b)


@pytest.mark.parametrize("maximum", sorted({f.max for f in FORMATS.values() if f.kind != "cast"} | {2688.0}))
def test_scale_is_the_rounded_quotient_or_one(run, maximum):
    tiny = np.float32(2**-126)
    edge = tiny * np.float32(maximum)
    amax = np.random.default_rng(1).uniform(-126, 127.9, 100_000)
    special = [0, 2**-149, tiny, edge, np.nextafter(edge, np.float32(0)), 3.4028235e38, np.inf, np.nan]
    amax = np.concatenate([np.exp2(amax), special]).astype(np.float32)
    quotient = amax / np.float32(maximum)
    expected = np.where(quotient < tiny, np.float32(1), quotient)
    scale, reciprocal = np.moveaxis(
        np.asarray(run(lambda a: jnp.stack(compute_scale(a, maximum)))(amax[None]))[0], 0, 0
    )
    assert_same_bits(scale, expected)
    assert_same_bits(reciprocal, np.float32(1) / expected)
    assert scale[-5] != 1 or scale[-5] == quotient[-5]  # the least normal scale is kept,
    assert scale[-4] == 1  # the next amax below it would make it subnormal


# ---- stochastic rounding ---------------------------------------------------------------------------------------------

N = 2**16
drawn = {fmt: jax.jit(functools.partial(round_to_format, fmt=fmt, rounding="stochastic")) for fmt in GRIDS}

# Random123's known answers for philox4x32, 10 rounds: counter, key, result.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text):
    return tuple(jnp.uint32(int(w, 16)) for w in text.split())


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_philox_gives_the_known_answers(counter, key, answer):
    assert philox4x32(words(counter), words(key)) == words(answer)


def test_random_bits_follow_the_documented_counter():
    bits = random_bits((3, 5), seed=2**32 - 1, step=3, layer=7, sequence=11, head=13, round_index=17)
    blocks = jnp.arange(4, dtype=jnp.uint32)
    expected = philox4x32((blocks, *map(jnp.uint32, (17, (7 << 16) ^ 13, 11))), (jnp.uint32(2**32 - 1), jnp.uint32(3)))
    np.testing.assert_array_equal(bits, np.stack(expected, axis=-1).ravel()[:15].reshape(3, 5))


@jax.jit
def draw_alone(step, sequence, head, index):
    return random_bits((4, 6), seed=5, step=step, layer=2, sequence=sequence, head=head, round_index=index)


def test_random_bits_are_the_same_in_every_setting(run):
    def draw(step, sequence, head, index):
        heads = head + jnp.arange(3, dtype=jnp.uint32)
        return random_bits((4, 6), seed=5, step=step, layer=2, sequence=sequence, head=heads, round_index=index)

    args = [jnp.array(row, jnp.uint32) for row in ([0, 9, 2**31], [1, 0, 4], [0, 3, 500], [8, 8, 70000])]
    result = np.asarray(run(draw)(*args))
    assert result.shape == (3, 3, 4, 6)
    for row in range(3):
        step, sequence, head, index = (np.uint32(a[row]) for a in args)
        for h in range(3):
            np.testing.assert_array_equal(result[row, h], draw_alone(step, sequence, head + np.uint32(h), index))
    assert len(np.unique(result)) == result.size  # different tiles, different bits


def test_random_bits_are_uniform():
    bits = np.asarray(some_bits())
    ones = np.unpackbits(bits.view(np.uint8).reshape(-1, 4), axis=-1).mean(axis=0)
    assert (abs(ones - 0.5) < 5 * 0.5 / 256).all()  # five standard deviations of 65536 coin flips
    counts = np.histogram(bits, bins=64, range=(0, 2**32))[0]
    assert ((counts - 1024) ** 2 / 1024).sum() < 63 + 6 * np.sqrt(2 * 63)


@functools.cache
def some_bits(seed=0):
    """uint32 [N]."""
    draw = jax.jit(lambda seed: random_bits((N,), seed=seed, step=0, layer=0, sequence=0, head=0, round_index=0))
    return draw(jnp.uint32(seed))


@pytest.mark.parametrize("fmt", GRIDS)
def test_stochastic_rounding_lands_on_a_neighbour(run, fmt):
    limit = grid(fmt)[-1] * (0.99 if fmt == "bfloat16" else 1.1)  # 1.1 times it would overflow float32
    x = (np.random.default_rng(0).uniform(-1, 1, (2, N)) ** 5 * limit).astype(np.float32)
    bits = jnp.stack([some_bits(0), some_bits(1)])
    result = np.asarray(run(lambda x, b: round_to_format(x, fmt, rounding="stochastic", random_bits=b))(x, bits))
    eager = round_to_format(x, fmt, rounding="stochastic", random_bits=bits)
    assert_same_bits(result, np.asarray(eager))
    values = np.append(grid(fmt), np.inf) if FORMATS[fmt].kind == "cast" else grid(fmt)
    magnitude = np.minimum(abs(x), np.float32(FORMATS[fmt].max))
    above = np.minimum(np.searchsorted(values, magnitude), values.size - 1)
    below = np.where(values[above] == magnitude, above, above - 1)
    assert ((abs(result) == values[above]) | (abs(result) == values[below])).all()
    np.testing.assert_array_equal(np.signbit(result), np.signbit(x))
    moved = abs(result) == values[above]
    assert moved.any() and not moved.all()


@pytest.mark.parametrize("fmt", GRIDS)
def test_stochastic_rounding_keeps_grid_values_and_nan(run, fmt):
    values = np.resize(np.append(grid(fmt), np.nan).astype(np.float32), N)  # repeats them
    x = np.stack([values, -values])
    bits = jnp.stack([some_bits(), jnp.full(N, 2**32 - 1, jnp.uint32)])
    assert_same_bits(run(lambda x, b: round_to_format(x, fmt, rounding="stochastic", random_bits=b))(x, bits), x)


@pytest.mark.parametrize("fraction", [1 / 1024, 0.1, 0.5, 0.75, 1023 / 1024])
@pytest.mark.parametrize("fmt", GRIDS)
def test_stochastic_rounding_is_unbiased(fmt, fraction):
    """The share rounded up lies within five standard deviations of the distance, among normals and subnormals alike."""
    values = grid(fmt)
    for low in (3.0, 1.0) if fmt == "bfloat16" else (3.0, 0.0):  # bfloat16's subnormals are float32's
        high = values[np.searchsorted(values, low, side="right")]
        x = np.float32(low + fraction * (high - low))
        up = np.asarray(drawn[fmt](np.full(N, x), random_bits=some_bits(round(low)))) == high
        probability = (float(x) - low) / (float(high) - low)
        assert abs(up.mean() - probability) < 5 * np.sqrt(probability * (1 - probability) / N)


def test_biased_bits_would_be_noticed():
    """The bound above can fail: bits whose highest is always clear give twice the share."""
    bits = some_bits() & jnp.uint32(0x7FFFFFFF)
    up = np.asarray(drawn["int8"](np.full(N, np.float32(3.1)), random_bits=bits)) == 4
    assert abs(up.mean() - 0.1) > 5 * np.sqrt(0.1 * 0.9 / N)
