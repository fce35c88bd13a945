"""Statistics of what quantizers see: calibration of static scales, and the metrics of a training step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jlaqat.quantizer import Quantizer, QuantizerVariable, find_quantizers, matching, per_layer_names
from jlaqat.rounding import SiteStats, histogram_edges, round_to_format
from jlaqat.spec import FORMATS, QuantConfigError

METHODS = ("max", "percentile", "mse")


def calibrate(
    model: nnx.Module,
    forward: Callable[[Any, Any], Any],
    batches: Iterable[Any],
    *,
    method: str = "max",
    percentile: float = 99.99,
) -> list[str]:
    """Set the static scales of every enabled, unfrozen quantizer of `type: static` from data; returns their names.

    `forward(model, batch)` is called, jitted, for each batch of `batches`; what it returns is dropped (the last
    function stays compiled for the next call). Meanwhile the quantizers round with dynamic scales and gather amax and
    histograms. Every scale group (head and tile, row, …) gets
      "max": the largest magnitude seen;
      "percentile": the magnitude below which `percentile` % of the non-zero elements lie;
      "mse": of 8 candidates an octave up to the largest magnitude, the one with the least squared rounding error.
    A new calibration replaces the old one; `freeze` fixes scales for good.

    Raises QuantConfigError if nothing is to be calibrated, and ValueError naming the quantizer that saw no data or met
    NaN or Inf. The model's scales are then as they were before the call.
    """
    check_method(method, percentile)
    targets = _calibrated(model)
    before = {name: quantizer.amax for name, quantizer in targets.items()}
    run = _jitted(forward) if isinstance(forward, Hashable) else _jitted.__wrapped__(forward)
    for quantizer in targets.values():
        quantizer.amax = None
        quantizer.start_observing()
    try:
        for batch in batches:
            run(model, batch)
        return finish_calibration(model, method=method, percentile=percentile)
    except BaseException:
        for name, quantizer in targets.items():
            quantizer.amax = before[name]
            quantizer.stop_observing()
        raise


@functools.lru_cache(maxsize=1)  # a second calibration with the same function need not compile again
def _jitted(forward: Callable[[Any, Any], Any]) -> Callable[[Any, Any], None]:
    return nnx.jit(lambda model, batch: (forward(model, batch), None)[1])


def observe(model: nnx.Module, pattern: str = "*") -> list[str]:
    """Start gathering statistics in the enabled quantizers that match, for a calibration loop of your own.

    Afterwards run the model forward (no gradients while observing) and call `finish_calibration`. Returns the names.
    Raises QuantConfigError if no enabled quantizer matches.
    """
    matched = {name: x for name, x in matching(model, pattern, "observe").items() if x.enabled}
    if not matched:
        raise QuantConfigError(f"observe {pattern!r}: no quantizer that matches is enabled; see jlaqat.summary(model).")
    for quantizer in matched.values():
        quantizer.start_observing()
    return list(matched)


def finish_calibration(model: nnx.Module, *, method: str = "max", percentile: float = 99.99) -> list[str]:
    """Turn the gathered statistics into static scales and stop observing; methods and errors as `calibrate`.

    Returns the names of the quantizers that got scales. Nothing changes if one of them fails.
    """
    check_method(method, percentile)
    targets = {name: x for name, x in _calibrated(model).items() if x.observing}
    if not targets:
        raise QuantConfigError(
            "no quantizer to calibrate is observing; call jlaqat.calibrate, or observe(model) first."
        )
    _check_data(targets)
    scales = {name: _scales(quantizer, method, percentile) for name, quantizer in targets.items()}
    for name, quantizer in targets.items():
        quantizer.amax = QuantizerVariable(jnp.asarray(scales[name], jnp.float32))
    for quantizer in find_quantizers(model).values():
        quantizer.stop_observing()
    return list(targets)


def freeze(model: nnx.Module, pattern: str = "*") -> list[str]:
    """Stop observing and fix the static scales of the quantizers that match: `calibrate` leaves them alone from now on.

    Returns the names of the frozen ones. Raises QuantConfigError if none that matches is static, or one was never
    calibrated. `quantize` with a changed setting thaws.
    """
    matched = matching(model, pattern, "freeze")
    static = {name: x for name, x in matched.items() if x.static}
    if not static:
        raise QuantConfigError(
            f"freeze {pattern!r}: no quantizer that matches has type: static, so no scale can be fixed."
        )
    missing = [name for name, x in static.items() if x.amax is None]
    if missing:
        raise QuantConfigError(f"freeze {pattern!r}: {', '.join(missing)} was never calibrated; call calibrate first.")
    for quantizer in matched.values():
        quantizer.stop_observing()
    for quantizer in static.values():
        quantizer.frozen = True
    return list(static)


def quantizer_metrics(model: nnx.Module, forward: Callable[[Any], Any]) -> dict[str, dict[str, jax.Array]]:
    """What each enabled quantizer does in one forward pass: name → float32 scalars. Works under jit.

    `forward(model)` must run the model that it is given (a copy that observes; `model` itself does not change). Returns
      "relative_rms": RMS of the rounding error over RMS of the values (0 where all values are 0);
      "saturated": share of elements clipped by their scale's range;
      "nonfinite": count of NaN and Inf elements: above 0, this quantizer saw them.
    Quantizers of stacked layers appear once a layer, as `name[i]`. Those of modules with a decode policy, under which
    no statistics are gathered, are left out. Without any other enabled quantizers the dict is empty.

    Raises ValueError naming a quantizer that the forward pass does not reach, or whose static scale is missing.
    """
    copy = nnx.merge(*nnx.split(model), copy=True)
    quantizers = find_quantizers(copy)
    decoding = {name.rpartition(".")[0] for name, x in quantizers.items() if x.decode is not None}
    active = {name: x for name, x in quantizers.items() if x.enabled and name.rpartition(".")[0] not in decoding}
    if not active:
        return {}
    for name, quantizer in active.items():
        if quantizer.static and quantizer.amax is None:
            raise ValueError(f"{name} has a static scale that was never calibrated; call jlaqat.calibrate first.")
        quantizer.start_observing()
    unseen = {name: x.stats.get_value().count for name, x in active.items() if x.stats is not None}
    forward(copy)
    metrics = {}
    for name, quantizer in active.items():
        assert quantizer.stats is not None
        stats = quantizer.stats.get_value()
        if stats.count is unseen[name]:
            raise ValueError(f"{name} saw no data: forward must call the model that it is given, and that layer.")
        for index, label in per_layer_names(name, quantizer):
            metrics[label] = _summary(jax.tree.map(lambda x, index=index: x[index], stats))
    return metrics


def _summary(stats: SiteStats) -> dict[str, jax.Array]:
    error, squares, count = stats.squared_error.sum(), stats.squares.sum(), stats.count.sum()
    return {
        "relative_rms": jnp.sqrt(error / jnp.where(squares > 0, squares, 1.0)),
        "saturated": stats.saturated.sum() / jnp.maximum(count, 1.0),
        "nonfinite": stats.nonfinite.sum(),
    }


# ── from statistics to scales ──────────────────────────────────────────────────────────────────────────────────────


def check_method(method: str, percentile: float = 99.99) -> None:
    """Raises QuantConfigError for what `calibrate` does not take."""
    if method not in METHODS:
        raise QuantConfigError(f"method={method!r} is not supported; choose one of {', '.join(METHODS)}.")
    if not 0 < percentile <= 100:
        raise QuantConfigError(f"percentile={percentile} is out of range; give a number in (0, 100], such as 99.99.")


def _calibrated(model: nnx.Module) -> dict[str, Quantizer]:
    """The quantizers whose scales a calibration sets."""
    enabled = {name: x for name, x in find_quantizers(model).items() if x.enabled}
    static = {name: x for name, x in enabled.items() if x.static}
    targets = {name: x for name, x in static.items() if not x.frozen}
    if not targets:
        why = "all of them are frozen" if static else "all enabled ones are dynamic" if enabled else "none is enabled"
        raise QuantConfigError(
            f"no quantizer to calibrate: {why}; calibration sets scales of quantizers with type: static."
        )
    return targets


def _check_data(targets: Mapping[str, Quantizer]) -> None:
    """Every layer of every quantizer must have seen data, all of it finite."""
    unseen, bad = [], []
    for name, quantizer in targets.items():
        assert quantizer.stats is not None
        stats = jax.tree.map(np.asarray, quantizer.stats.get_value())
        for index, label in per_layer_names(name, quantizer):
            nonfinite = int(stats.nonfinite[index].sum())
            if stats.count[index].sum() == 0:
                unseen.append(label)
            elif nonfinite or not np.isfinite(stats.amax[index]).all():
                heads = ", ".join(map(str, np.flatnonzero(stats.nonfinite[index])))
                bad.append(f"{label} ({nonfinite} elements, value heads {heads})")
    if bad:
        raise ValueError(
            f"calibration met NaN or Inf, first in {bad[0]}" + (f" and then in {', '.join(bad[1:])}" if bad[1:] else "")
            + "; no scale was changed. Look at the inputs and weights before that layer."
        )  # fmt: skip
    if unseen:
        raise ValueError(
            f"{', '.join(unseen)} saw no data; give at least one batch whose forward pass reaches the layer."
        )


def _scales(quantizer: Quantizer, method: str, percentile: float) -> np.ndarray:
    assert quantizer.spec is not None and quantizer.stats is not None
    stats = jax.tree.map(np.asarray, quantizer.stats.get_value())
    if method == "max":
        return stats.amax
    histogram = stats.histogram.astype(np.float64).copy()
    histogram[..., 0] = 0  # zeros (a state before its first write) say nothing about a range
    chosen = (
        _percentile(histogram, percentile) if method == "percentile" else _least_error(histogram, quantizer.spec.format)
    )
    # A histogram's bin reaches past its largest element, and a group of zeros has no choice to make.
    return np.where(histogram.sum(-1) > 0, np.minimum(chosen, stats.amax), stats.amax)


def _percentile(histogram: np.ndarray, percentile: float) -> np.ndarray:
    """Magnitude below which `percentile` % of each group's counts lie; linear inside a bin."""
    edges = histogram_edges().astype(np.float64)
    below = np.cumsum(histogram, axis=-1)
    wanted = below[..., -1:] * (percentile / 100)
    bin_index = np.argmax(below >= wanted, axis=-1)
    inside = np.take_along_axis(histogram, bin_index[..., None], -1)[..., 0]
    before = np.take_along_axis(below, bin_index[..., None], -1)[..., 0] - inside
    share = (wanted[..., 0] - before) / np.maximum(inside, 1)
    return edges[bin_index] + share * (edges[bin_index + 1] - edges[bin_index])


def _least_error(histogram: np.ndarray, fmt: str) -> np.ndarray:
    """The bin edge that, taken as amax, rounds each group with the least squared error; of equals the largest."""
    expected = histogram @ _rounding_errors(fmt).T
    last = histogram.shape[-1] - 1 - np.argmax(histogram[..., ::-1] > 0, axis=-1)
    beyond = np.arange(1, histogram.shape[-1] + 1) > last[..., None] + 1
    expected = np.where(beyond, np.inf, expected)  # a scale above the largest element only coarsens the grid
    best = expected.shape[-1] - 1 - np.argmin(expected[..., ::-1], axis=-1)
    return histogram_edges()[1:][best].astype(np.float64)


@functools.cache
def _rounding_errors(fmt: str, points: int = 8) -> np.ndarray:
    """float64 [candidates, bins]: mean squared error of a bin's magnitudes, rounded with an upper edge as amax."""
    edges = histogram_edges().astype(np.float64)
    steps = (np.arange(points) + 0.5) / points
    x = (edges[:-1, None] + steps * np.diff(edges)[:, None]).ravel()
    maximum = FORMATS[fmt].max

    @jax.jit
    def rounded(scaled: jax.Array) -> jax.Array:
        return round_to_format(scaled, fmt)

    errors = np.empty((len(edges) - 1, len(edges) - 1))
    for i, candidate in enumerate(edges[1:]):
        scale = candidate / maximum
        scaled = np.clip(x / scale, -maximum, maximum).astype(np.float32)
        error = np.asarray(rounded(scaled), np.float64) * scale - x
        errors[i] = (error**2).reshape(-1, points).mean(-1)
    return errors
