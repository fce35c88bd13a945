"""Calibration of static scales and the metrics of a step: methods against plain numpy, and what must not go silent."""

import dataclasses
import functools
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jlaqat import calibration, ops
from jlaqat.quantizers import (
    QuantizerVariable,
    calibrate,
    enable_quantizer,
    find_quantizers,
    finish_calibration,
    freeze,
    observe,
    quantize,
    quantizer_metrics,
    summary,
)
from jlaqat.rounding import fake_quantize, site_stats
from jlaqat.spec import DeltaQuant, QuantConfigError, QuantSpec

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import tiny_quantized as tiny

pytestmark = pytest.mark.usefixtures("compile_quickly")

FP8 = {"num_bits": "e4m3"}
STATIC = [{"quantizer_name": "*_state_quantizer", "cfg": {**FP8, "type": "static", "block_v": 16}}]
STATE, SECOND = "layers.0.mixer.gdn_state_quantizer", "layers.1.mixer.gdn_state_quantizer"


def forward(model, x):
    return model(x)


@nnx.jit
def metrics_of(model, x):
    return quantizer_metrics(model, lambda model: model(x))


@pytest.fixture
def model():
    return tiny.Unrolled("gdn")


@functools.partial(jax.jit, static_argnums=1)
def stats_of(x, spec):
    return site_stats(x, spec, fake_quantize(x, spec, site="state"), site="state")


def feed(quantizer, x):
    """Give a quantizer statistics of the states x [64, HV, K, V], in two parts, as two calls would."""
    for part in jnp.split(x, 2):
        quantizer.add_stats(stats_of(part, dataclasses.replace(quantizer.spec, scale="dynamic", gradient="identity")))


def heavy_tailed(seed=0, size=64):
    """States with a few large elements."""
    x = np.random.default_rng(seed).standard_t(3, (size, tiny.HV, tiny.K, tiny.V)).astype(np.float32)
    x[:, 1] *= 100
    return jnp.asarray(x)


def tiles(x, block_v=16):
    """|x| by scale group: [HV, tiles, elements]."""
    n, hv, k, v = x.shape
    return (
        np.abs(np.asarray(x))
        .reshape(n, hv, k, v // block_v, block_v)
        .transpose(1, 3, 0, 2, 4)
        .reshape(hv, v // block_v, -1)
    )


# ── methods, from statistics ──


@pytest.mark.parametrize(
    ("method", "percentile"), [("max", 99.99), ("percentile", 99.0), ("percentile", 100), ("mse", 99.99)]
)
@pytest.mark.parametrize("cfg", [FP8, {"num_bits": 4, "narrow_range": True}], ids=["e4m3", "int4"])
def test_methods_choose_what_numpy_chooses(model, method, percentile, cfg):
    quantize(model, [{"quantizer_name": STATE, "cfg": {**cfg, "type": "static", "block_v": 16}}])
    quantizer, x = find_quantizers(model)[STATE], heavy_tailed()
    observe(model)
    feed(quantizer, x)
    assert finish_calibration(model, method=method, percentile=percentile) == [STATE]
    amax, magnitudes = np.asarray(quantizer.amax.get_value()), tiles(x)
    assert amax.shape == (tiny.HV, 2) and amax.dtype == np.float32 and quantizer.stats is None
    if method == "max" or percentile == 100:
        np.testing.assert_array_equal(amax, magnitudes.max(-1))
    elif method == "percentile":
        np.testing.assert_allclose(amax, np.percentile(magnitudes, percentile, axis=-1), rtol=0.03)
    else:
        _check_least_error(amax, magnitudes, quantizer.spec)


def _check_least_error(amax, magnitudes, spec):
    """No amax on a fine grid rounds the data itself with a clearly smaller error than the chosen one."""

    @jax.jit
    def errors(group, scales):
        group = group[None, None, :, None]  # one head for each scale, the elements along the contraction
        rounded = fake_quantize(group + 0 * scales[None, :, None, None], spec, site="state", amax=scales[:, None])
        return ((rounded - group) ** 2).mean((0, 2, 3))

    worst = 0.0
    for head, tile in np.ndindex(amax.shape):
        group = magnitudes[head, tile]
        tried = group.max() * 2 ** np.linspace(-5, 0.5, 45, dtype=np.float32)
        chosen, *others = np.asarray(errors(group, np.append(amax[head, tile], tried).astype(np.float32)))
        worst = max(worst, chosen / min(others))
    # E4M3's error hardly depends on the scale; what is left is where the few largest elements fall on the grid.
    assert worst < (1.05 if spec.format == "int4" else 1.2)
    if spec.format == "int4":
        assert (amax < magnitudes.max(-1) / 2).all(), "seven levels cannot afford the tails"


def test_zeros_have_no_say_in_percentiles_and_empty_groups_keep_a_scale_of_zero(model):
    quantize(model, STATIC)
    x = heavy_tailed().at[16:].set(0.0).at[:, 1].set(0.0)
    observe(model)
    feed(find_quantizers(model)[STATE], x)
    finish_calibration(model, method="percentile", percentile=99.0)
    amax = np.asarray(find_quantizers(model)[STATE].amax.get_value())
    np.testing.assert_allclose(amax[0], np.percentile(tiles(x[:16])[0], 99.0, axis=-1), rtol=0.05)
    assert (amax[1] == 0).all()


def test_arguments_that_make_no_sense(model):
    quantize(model, STATIC)
    with pytest.raises(QuantConfigError, match="method='mean' is not supported; choose one of max, percentile, mse"):
        calibrate(model, forward, [], method="mean")
    with pytest.raises(QuantConfigError, match=r"percentile=0 is out of range; give a number in \(0, 100\]"):
        calibrate(model, forward, [], method="percentile", percentile=0)
    with pytest.raises(QuantConfigError, match="no quantizer to calibrate is observing"):
        finish_calibration(model)
    with pytest.raises(QuantConfigError, match=r"freeze '\*': layers\.0.* was never calibrated"):
        freeze(model)
    quantize(model, [{"quantizer_name": STATE, "cfg": FP8}])
    with pytest.raises(QuantConfigError, match="no quantizer to calibrate: all enabled ones are dynamic"):
        calibrate(model, forward, [])
    with pytest.raises(QuantConfigError, match="no quantizer that matches has type: static"):
        freeze(model)
    quantize(model, [])
    with pytest.raises(QuantConfigError, match="no quantizer to calibrate: none is enabled"):
        calibrate(model, forward, [])
    with pytest.raises(QuantConfigError, match="no quantizer that matches is enabled"):
        observe(model)


# ── through the model ──


def test_calibrate_freeze_and_run(model):
    """Scales are what the states' tiles reach over all batches; frozen ones stay; the model runs with them."""
    quantize(model, STATIC)
    batches = [tiny.batch(seed) for seed in (0, 1)]
    assert calibrate(model, forward, iter(batches)) == [STATE]
    quantizer = find_quantizers(model)[STATE]
    amax = np.asarray(quantizer.amax.get_value())
    assert amax.shape == (tiny.HV, 2) and np.isfinite(amax).all() and (amax > 0).all()
    assert not quantizer.observing and "amax" in summary(model)
    calibrate(model, forward, batches[:1])
    assert (np.asarray(quantizer.amax.get_value()) <= amax).all(), "one batch reaches no further than both"
    calibrate(model, forward, batches)
    np.testing.assert_array_equal(quantizer.amax.get_value(), amax)

    static = metrics_of(model, batches[0])[STATE]
    assert 0 < float(static["relative_rms"]) < 0.04 and float(static["saturated"]) == 0
    quantizer.amax.set_value(quantizer.amax.get_value() / 8)
    clipped = metrics_of(model, batches[0])[STATE]
    assert float(clipped["saturated"]) > 0.01 and clipped["relative_rms"] > static["relative_rms"]
    freeze(model)
    with pytest.raises(QuantConfigError, match="no quantizer to calibrate: all of them are frozen"):
        calibrate(model, forward, batches)


def test_complaint_4_calibration_leaves_no_nan_behind_and_names_the_quantizer(model):
    quantize(model, STATIC)
    quantizer = find_quantizers(model)[STATE]
    quantizer.amax = QuantizerVariable(jnp.full(quantizer.scale_shape, 3.0))
    batches = [tiny.batch(), tiny.batch(1).at[0, 5].set(jnp.nan)]
    with pytest.raises(ValueError, match=rf"NaN or Inf, first in {STATE} \(.*no scale was changed"):
        calibrate(model, forward, batches)
    assert (quantizer.amax.get_value() == 3.0).all() and not quantizer.observing and quantizer.stats is None


def test_the_first_quantizer_that_saw_a_nan_is_named_and_the_later_ones_too():
    model = quantize(tiny.Unrolled("gdn", "gdn", "gdn"), STATIC)
    observe(model)
    for quantizer, value in zip(find_quantizers(model).values(), (1.0, None, jnp.inf, None, jnp.nan)):
        if value is not None:
            feed(quantizer, heavy_tailed().at[0, 1, 3, 3].set(value))
    third = "layers.2.mixer.gdn_state_quantizer"
    message = rf"first in {SECOND} \(1 elements, value heads 1\) and then in {third} \(1 elements, value heads 1\)"
    with pytest.raises(ValueError, match=message):
        finish_calibration(model)
    assert all(quantizer.amax is None for quantizer in find_quantizers(model).values())


def test_a_quantizer_that_saw_no_data_is_named():
    model = quantize(tiny.Unrolled("gdn", "gdn"), STATIC)
    with pytest.raises(ValueError, match=rf"{STATE}, {SECOND} saw no data; give at least one batch"):
        calibrate(model, forward, [])
    observe(model)
    feed(find_quantizers(model)[STATE], heavy_tailed())
    with pytest.raises(ValueError, match=rf"^{SECOND} saw no data"):
        finish_calibration(model)
    assert find_quantizers(model)[STATE].amax is None


def test_an_error_in_the_forward_pass_leaves_the_model_as_it_was(model):
    quantize(model, STATIC)
    before = summary(model)

    def broken(model, x):
        raise RuntimeError("no such batch")

    with pytest.raises(RuntimeError, match="no such batch"):
        calibrate(model, broken, [tiny.batch()])
    assert summary(model) == before


def test_stacked_layers_get_scales_of_their_own():
    model = quantize(tiny.Stacked(2), STATIC)
    calibrate(model, forward, [tiny.batch()])
    amax = np.asarray(find_quantizers(model)["layers.gdn_state_quantizer"].amax.get_value())
    assert amax.shape == (2, tiny.HV, 2) and (amax > 0).all() and not np.array_equal(amax[0], amax[1])
    metrics = jax.eval_shape(lambda: quantizer_metrics(model, lambda model: model(tiny.batch())))
    assert list(metrics) == ["layers.gdn_state_quantizer[0]", "layers.gdn_state_quantizer[1]"]


# ── metrics ──


def test_metrics_match_the_op_and_work_under_jit(model):
    quantize(model, [{"quantizer_name": "*", "cfg": FP8}])
    x, seen = tiny.batch(), []
    original = ops.delta_rule_observe

    def spy(*args, **options):
        seen.append((args, options))
        return original(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "delta_rule_observe", spy)
        metrics = metrics_of(model, x)
    assert seen[0][1]["quant"] == DeltaQuant(state=QuantSpec.fp8(), w=QuantSpec.fp8())
    assert list(metrics) == [STATE, "layers.0.mixer.gdn_w_quantizer"]
    for name, values in metrics.items():
        assert 0.01 < float(values["relative_rms"]) < 0.04, name  # E4M3: a mantissa of 3 bits
        assert float(values["saturated"]) == 0 and float(values["nonfinite"]) == 0
    assert not any(q.observing for q in find_quantizers(model).values()), "the model itself was touched"


def test_metrics_count_nonfinite_values_by_quantizer(model):
    quantize(model, [{"quantizer_name": "*", "cfg": FP8}])
    metrics = metrics_of(model, tiny.batch().at[0, 66].set(jnp.nan))
    assert metrics[STATE]["nonfinite"] > 0 and np.isfinite(metrics[STATE]["relative_rms"])


def test_metrics_need_scales_and_a_forward_pass(model):
    assert quantizer_metrics(model, lambda model: model(tiny.batch())) == {}
    quantize(model, STATIC)
    with pytest.raises(ValueError, match=f"{STATE} has a static scale that was never calibrated"):
        quantizer_metrics(model, lambda model: model(tiny.batch()))
    quantize(model, [{"quantizer_name": STATE, "cfg": FP8}])
    with pytest.raises(ValueError, match=f"{STATE} saw no data: forward must call the model that it is given"):
        quantizer_metrics(model, lambda _: None)


def test_observation_is_a_matter_of_the_call_not_of_the_disabled(model):
    """A quantizer that is off sees nothing, even while its neighbour observes."""
    quantize(model, [{"quantizer_name": "*", "cfg": FP8}, {"quantizer_name": "*w_quantizer", "enable": False}])
    assert list(jax.eval_shape(lambda: quantizer_metrics(model, lambda m: m(tiny.batch())))) == [STATE]
    enable_quantizer(model, "*")
    assert len(jax.eval_shape(lambda: quantizer_metrics(model, lambda m: m(tiny.batch())))) == 2
    assert calibration.METHODS == ("max", "percentile", "mse")


# ── several devices ──


def amax_of(model):
    return {name: np.asarray(x.amax.get_value()) for name, x in find_quantizers(model).items() if x.amax is not None}


@pytest.mark.parametrize("method", ["max", "mse"])
def test_scales_from_sharded_batches_and_parameters_are_those_of_one_device(method):
    """4 × 2 devices: rows of the batch along one axis, columns of every matrix along the other."""
    batches = [tiny.batch(seed, size=8) for seed in (0, 1)]
    whole, cut = (quantize(tiny.Unrolled("gdn", "kda"), STATIC) for _ in range(2))
    calibrate(whole, forward, batches, method=method)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    columns, rows = NamedSharding(mesh, PartitionSpec(None, "model")), NamedSharding(mesh, PartitionSpec("data"))
    nnx.update(cut, jax.tree.map(lambda x: jax.device_put(x, columns), nnx.state(cut, nnx.Param)))
    calibrate(cut, forward, [jax.device_put(x, rows) for x in batches], method=method)
    assert len(cut.layers[0].mixer.qkv.get_value().sharding.device_set) == 8
    assert amax_of(cut).keys() == amax_of(whole).keys() and len(amax_of(whole)) == 2
    for name, amax in amax_of(whole).items():
        np.testing.assert_allclose(amax_of(cut)[name], amax, rtol=1e-5)
        assert amax.min() > 0


def test_static_scales_serve_inside_a_shard_map(model):
    calibrate(quantize(model, STATIC), forward, [tiny.batch(size=4)])
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    local = jax.shard_map(
        lambda x: model(x), mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec("data")
    )
    x = tiny.batch(2, size=4)
    np.testing.assert_allclose(jax.jit(local)(x), tiny.run(model, x), rtol=0, atol=1e-5)


def test_statistics_inside_a_shard_map_around_the_model_are_refused(model):
    quantize(model, STATIC)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    rows = PartitionSpec("data")

    def sharded(model, x):
        return jax.shard_map(lambda x: model(x), mesh=mesh, in_specs=rows, out_specs=rows)(x)

    with pytest.raises(NotImplementedError, match=f"{STATE} gathers statistics, but was called inside.*outside of it"):
        calibrate(model, sharded, [tiny.batch(size=4)])
    assert not find_quantizers(model)[STATE].observing and find_quantizers(model)[STATE].amax is None
