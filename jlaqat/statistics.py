"""What a quantizer saw and did: sums per value head, for calibration and metrics. Pure functions of float32 arrays."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jlaqat.arithmetic import magnitude_bits
from jlaqat.scales import group_amax, scales, spread, static_amax, static_limit
from jlaqat.spec import FORMATS, QuantSpec, amax_shape, fit_to_site

BINS_PER_OCTAVE = 8
LEAST_EXPONENT, GREATEST_EXPONENT = -32, 16
NUM_BINS = (GREATEST_EXPONENT - LEAST_EXPONENT) * BINS_PER_OCTAVE
# Dynamic scales are rounded, so amax itself may land this much (relatively) above M without having been clipped.
_SCALE_ERROR = 2.0**-20


class SiteStats(NamedTuple):
    """Statistics of one quantizer, gathered over any number of roundings. HV counts value heads.

    Only finite elements enter amax, sums, histogram and `saturated`; `nonfinite` counts the others: look at it first.
    """

    amax: jax.Array  # [*groups] largest |x|; groups = `stats_shape`: amax_shape(...), [HV] for blocks and casts
    squared_error: jax.Array  # [HV] Σ (x_q − x)²
    squares: jax.Array  # [HV] Σ x²
    saturated: jax.Array  # [HV] elements clipped (casts: overflowed to infinity)
    count: jax.Array  # type: ignore[assignment]  # [HV] elements seen, the non-finite ones included
    nonfinite: jax.Array  # [HV] elements that were NaN or infinite
    histogram: jax.Array  # [*groups, 384] counts of |x| between `histogram_edges()`


def histogram_edges() -> np.ndarray:
    """float32 [385]: bin i holds edges[i] ≤ |x| < edges[i+1]; the first also all that is smaller, the last the larger.

    Eight bins an octave from 2^-32 to 2^16, equally wide inside their octave.
    """
    octaves = np.arange(LEAST_EXPONENT, GREATEST_EXPONENT, dtype=np.float32)[:, None]
    edges = 2**octaves * (1 + np.arange(BINS_PER_OCTAVE, dtype=np.float32) / BINS_PER_OCTAVE)
    return np.append(edges.ravel(), np.float32(2.0**GREATEST_EXPONENT))


def stats_shape(spec: QuantSpec, site: str, *, num_heads: int, key_dim: int, value_dim: int) -> tuple[int, ...]:
    """Shape of `SiteStats.amax`: a static amax's, or [num_heads] where the format has scales of its own or none."""
    spec = fit_to_site(spec, site)
    return amax_shape(spec, site, num_heads=num_heads, key_dim=key_dim, value_dim=value_dim) or (num_heads,)


def empty_stats(spec: QuantSpec, site: str, *, num_heads: int, key_dim: int, value_dim: int) -> SiteStats:
    """Statistics of nothing: zeros, the neutral element of `merge_stats`."""
    groups = stats_shape(spec, site, num_heads=num_heads, key_dim=key_dim, value_dim=value_dim)
    heads = (num_heads,)
    shapes = (groups, heads, heads, heads, heads, heads, (*groups, NUM_BINS))
    return SiteStats(*(jnp.zeros(shape, jnp.float32) for shape in shapes))


def merge_stats(a: SiteStats, b: SiteStats) -> SiteStats:
    """Statistics of both. Raises ValueError where the shapes differ (another spec or model)."""
    for name, left, right in zip(SiteStats._fields, a, b):
        if left.shape != right.shape:
            raise ValueError(
                f"SiteStats.{name} has shapes {list(left.shape)} and {list(right.shape)}; they must be equal."
            )
    return SiteStats(jnp.maximum(a.amax, b.amax), *(left + right for left, right in zip(a[1:], b[1:])))


def site_stats(
    x: jax.Array,
    spec: QuantSpec,
    x_q: jax.Array,
    *,
    site: str,
    amax: jax.Array | None = None,
    where: jax.Array | None = None,
) -> SiteStats:
    """Statistics of rounding x to x_q = fake_quantize(x, spec, site=site, amax=amax).

    Args:
      x, x_q: [..., HV, K, V] for site "state", [..., HV, tokens, K] for site "w".
      spec, site, amax: as for `fake_quantize`.
      where: bool, broadcastable to x: elements to count (None: all). Leave padding out with it.

    Returns SiteStats summed over every dimension before the head, and over tokens. Without gradient.
    """
    spec = fit_to_site(spec, site)
    if x.ndim < 3 or x.shape != x_q.shape:
        raise ValueError(
            f"x {list(x.shape)} and x_q {list(x_q.shape)} must have one shape [..., heads, rows, columns]."
        )
    return _site_stats(x, spec, x_q, site, amax, where)


@partial(jax.jit, static_argnames=("spec", "site"), inline=True)
def _site_stats(
    x: jax.Array, spec: QuantSpec, x_q: jax.Array, site: str, amax: jax.Array | None, where: jax.Array | None
) -> SiteStats:
    x, x_q = lax.stop_gradient((x.astype(jnp.float32), x_q.astype(jnp.float32)))
    counted = jnp.ones(x.shape, bool) if where is None else jnp.broadcast_to(where, x.shape)
    finite = counted & jnp.isfinite(x)
    clipped = finite & _beyond_range(x, x_q, spec, site, amax)
    error = jnp.where(finite & jnp.isfinite(x_q), x_q - x, 0.0)
    x = jnp.where(finite, x, 0.0)
    largest, histogram = _amax_and_histogram(x, finite, spec, site)
    return SiteStats(
        amax=largest,
        squared_error=_sum_per_head(error * error),
        squares=_sum_per_head(x * x),
        saturated=_sum_per_head(clipped.astype(jnp.float32)),
        count=_sum_per_head(counted.astype(jnp.float32)),
        nonfinite=_sum_per_head((counted & ~finite).astype(jnp.float32)),
        histogram=histogram,
    )


def _sum_per_head(values: jax.Array) -> jax.Array:
    head = values.ndim - 3
    return jnp.sum(values, axis=tuple(d for d in range(values.ndim) if d != head))


def _beyond_range(x: jax.Array, x_q: jax.Array, spec: QuantSpec, site: str, amax: jax.Array | None) -> jax.Array:
    """Which elements were clipped: outside a static range, in a block whose scale was rounded down, or overflowed."""
    if spec.granularity == "none":
        return jnp.isinf(x_q)
    if spec.scale == "static":
        limit = static_limit(static_amax(amax, x.shape, spec, site), spec.max)
        return jnp.abs(x) > spread(limit, x.shape, spec, site)
    if spec.format == "nvfp4":
        reciprocal = spread(scales(x, spec, site, None)[1], x.shape, spec, site)
        return jnp.abs(x * reciprocal) > jnp.float32(spec.max * (1 + _SCALE_ERROR))
    return jnp.zeros(x.shape, bool)


def _amax_and_histogram(x: jax.Array, counted: jax.Array, spec: QuantSpec, site: str) -> tuple[jax.Array, jax.Array]:
    """Both in the groups of `stats_shape`; x is finite, zero where not counted."""
    x = x.reshape((-1, *x.shape[-3:]))
    head_spec = fit_to_site(QuantSpec(format="e4m3", granularity="head"), "state")
    whole_head = site == "w" or FORMATS[spec.format].block or spec.granularity == "none"
    groups = group_amax(x, head_spec if whole_head else spec, "state" if whole_head else site)
    largest = jnp.max(groups, axis=0)

    members = jnp.arange(largest.size, dtype=jnp.int32).reshape((1, *largest.shape))
    members = spread(members, x.shape, head_spec if whole_head else spec, "state" if whole_head else site)
    # Exponent and the first three bits of the mantissa number the bins.
    bin_index = (magnitude_bits(x) >> 20).astype(jnp.int32) - (127 + LEAST_EXPONENT) * BINS_PER_OCTAVE
    bin_index = jnp.clip(bin_index, 0, NUM_BINS - 1)
    flat = jnp.zeros((largest.size * NUM_BINS,), jnp.float32)
    index = (members * NUM_BINS + bin_index).ravel()
    flat = flat.at[index].add(counted.reshape(-1).astype(jnp.float32))
    return largest, flat.reshape((*largest.shape, NUM_BINS))
