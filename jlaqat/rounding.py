"""Quantize and dequantize a state or a W factor, with the straight-through gradient built in.

The contract, for every format with a scale and largest magnitude M: s = RN(amax/M), r = RN(1/s), and each element
becomes s · round_to_format(clamp(x·r, ±M)). All maths is float32 and gives the same bits eagerly, under jit, vmap, scan
and inside Pallas kernels (docs/rounding.md explains formats, granularities, random bits and what NaN does).
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jlaqat.arithmetic import div_rn as div_rn
from jlaqat.arithmetic import materialize, to_dtype
from jlaqat.arithmetic import round_to_format as round_to_format
from jlaqat.philox import random_bits as random_bits
from jlaqat.scales import compute_scale as compute_scale
from jlaqat.scales import group_amax, scales, spread, static_amax, static_limit
from jlaqat.spec import FORMATS, QuantSpec, fit_to_site
from jlaqat.statistics import SiteStats as SiteStats
from jlaqat.statistics import empty_stats as empty_stats
from jlaqat.statistics import histogram_edges as histogram_edges
from jlaqat.statistics import merge_stats as merge_stats
from jlaqat.statistics import site_stats as site_stats


def fake_quantize(
    x: jax.Array,
    spec: QuantSpec,
    *,
    site: str,
    amax: jax.Array | None = None,
    random_bits: jax.Array | None = None,
) -> jax.Array:
    """x rounded as `spec` says and scaled back; its gradient passes straight through.

    Args:
      x: floating point, [..., K, V] for site "state" (a head's contraction runs over K, axis −2) or [..., tokens, K]
        for site "w" (contraction over K, axis −1). Dimension −3, if there is one, is the value head.
      spec: format, granularity, rounding and the rest; see `QuantSpec`.
      site: "state" or "w".
      amax: for scale="static" only. Shaped as `QuantArrays` says ([HV, ...], the head aligned with x's dimension
        −3); any dimensions of x before the head broadcast. No gradient flows to it.
      random_bits: for rounding="stochastic" only: uint32 of x's shape, from `random_bits`.

    Returns an array of x's shape and dtype. The arithmetic is float32: float64 is rounded to float32 first, and 16-bit
    results are rounded to their type last. An element that is NaN or ±∞ becomes NaN, and so does all of the group whose
    dynamic scale it enters (casts keep ±∞). Magnitudes below 2^-126 count as zero.

    The gradient with respect to x is the identity; with gradient="clip" it is zero where |x| exceeds the static amax.

    Raises QuantConfigError for a spec that the site refuses, and ValueError for x, amax or random_bits that do not fit.
    """
    spec = fit_to_site(spec, site)
    _check(x, spec, amax)
    return _fake_quantize(x, spec, site, amax, random_bits)


@partial(jax.jit, static_argnames=("spec", "site"), inline=True)
def _fake_quantize(
    x: jax.Array, spec: QuantSpec, site: str, amax: jax.Array | None, random_bits: jax.Array | None
) -> jax.Array:
    exact = lax.stop_gradient(x).astype(jnp.float32)
    if spec.granularity == "none":
        rounded = round_to_format(exact, spec.format, rounding=spec.rounding, random_bits=random_bits)
        if FORMATS[spec.format].kind != "cast":  # FP8 has no infinity to pass on
            rounded = jnp.where(jnp.isfinite(exact), rounded, jnp.float32(jnp.nan))
        return straight_through(x, to_dtype(rounded, x.dtype))
    codes, scale = _quantize(exact, spec, site, amax, random_bits)
    rounded = _dequantize(codes, spread(scale, x.shape, spec, site), jnp.isfinite(exact))
    if spec.gradient == "clip":
        limit = spread(static_limit(static_amax(amax, x.shape, spec, site), spec.max), x.shape, spec, site)
        x = jnp.where(jnp.abs(exact) > limit, lax.stop_gradient(x), x)
    return straight_through(x, to_dtype(rounded, x.dtype))


CODE_DTYPES = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2, "int8": jnp.int8, "int4": jnp.int8}
"""Formats that `quantize_codes` can store, and the element type of their codes."""


def quantize_codes(
    x: jax.Array,
    spec: QuantSpec,
    *,
    site: str,
    amax: jax.Array | None = None,
    random_bits: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(codes, scale): what `fake_quantize` rounds to, in one byte an element, and the scale of each group.

    Arguments as for `fake_quantize`; formats E4M3, E5M2, INT8 and INT4 only. No gradient.

    Returns codes of x's shape in `CODE_DTYPES[spec.format]` and float32 scales, one a group: for a state tile [...,
    ceil(V/block_v)], value_row [..., V], key_row [..., K, ceil(V/32)] or head [...], for W [..., tokens]. A non-finite
    element becomes a NaN code, or, as integers have none, makes the scale of its group NaN. `dequantize_codes` gives
    back the bits of `fake_quantize` on finite x.
    """
    spec = fit_to_site(spec, site)
    _check(x, spec, amax)
    if spec.format not in CODE_DTYPES:
        raise ValueError(
            f"format {spec.format!r} has no one-byte codes with a float32 scale; use {', '.join(CODE_DTYPES)}."
        )
    return _quantize_codes(x, spec, site, amax, random_bits)


@partial(jax.jit, static_argnames=("spec", "site"), inline=True)
def _quantize_codes(
    x: jax.Array, spec: QuantSpec, site: str, amax: jax.Array | None, random_bits: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    exact = lax.stop_gradient(x).astype(jnp.float32)
    values, scale = _quantize(exact, spec, site, amax, random_bits)
    largest = group_amax(exact, spec, site)
    scale = jnp.broadcast_to(scale, largest.shape)
    if FORMATS[spec.format].kind == "float":
        values = jnp.where(jnp.isfinite(exact), values, jnp.float32(jnp.nan))
    else:
        scale = jnp.where(largest < jnp.inf, scale, jnp.float32(jnp.nan))
        values = jnp.where(jnp.isnan(values), jnp.float32(0.0), values)
    return values.astype(CODE_DTYPES[spec.format]), scale


def dequantize_codes(codes: jax.Array, scale: jax.Array, spec: QuantSpec, *, site: str) -> jax.Array:
    """float32 values of `quantize_codes`' result, of the codes' shape."""
    spec = fit_to_site(spec, site)
    values = codes.astype(jnp.float32)
    return _dequantize(values, spread(scale, codes.shape, spec, site), jnp.isfinite(values))


def _check(x: jax.Array, spec: QuantSpec, amax: jax.Array | None) -> None:
    if x.ndim < 2 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x is {x.dtype}{list(x.shape)}; it must be floating point with at least two dimensions.")
    if amax is not None and spec.scale != "static":
        raise ValueError("amax was given, but scale='dynamic' takes it from x; set scale='static' or leave amax out.")


def _quantize(
    exact: jax.Array, spec: QuantSpec, site: str, amax: jax.Array | None, random_bits: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """(values on the format's grid, float32 of x's shape; compact scales)."""
    scale, reciprocal = materialize(*scales(exact, spec, site, amax))
    scaled = exact * spread(reciprocal, exact.shape, spec, site)
    return round_to_format(scaled, spec.format, rounding=spec.rounding, random_bits=random_bits), scale


def _dequantize(codes: jax.Array, scale: jax.Array, finite: jax.Array) -> jax.Array:
    # The select also keeps XLA from contracting the product with an addition that follows it.
    return jnp.where(finite, codes * scale, jnp.float32(jnp.nan))


@jax.custom_jvp
def straight_through(x: jax.Array, rounded: jax.Array) -> jax.Array:
    """`rounded`, with the derivative of `x`."""
    del x
    return rounded


@straight_through.defjvp
def _straight_through_jvp(primals, tangents):
    return primals[1], tangents[0]
