"""Quantizers of a model: names, settings in place, bit-equality of the plain path, toggles, strip, counters, stacks."""

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jlaqat import ops, quantizers
from jlaqat.quantizer import Label
from jlaqat.quantizers import (
    Quantizer,
    QuantizerVariable,
    disable_quantizer,
    enable_quantizer,
    find_quantizers,
    quantize,
    set_step,
    strip_quantizers,
    summary,
)
from jlaqat.recipes import list_configs, load_recipe
from jlaqat.spec import DeltaQuant, QuantConfigError, QuantSpec

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import tiny_quantized as tiny

FP8 = {"num_bits": "e4m3"}
STATES = [{"quantizer_name": "*_state_quantizer", "cfg": FP8}]
BOTH = [*STATES, {"quantizer_name": "*_w_quantizer", "cfg": FP8}]


def never_quantized(model):
    """A copy of the tiny model whose layers never had a handle: the plain kernel on the same weights."""
    copy = tiny.Unrolled(*(layer.mixer.kind for layer in model.layers))
    for layer, plain in zip(model.layers, copy.layers):
        for site in ("state", "w"):
            delattr(plain.mixer, f"{layer.mixer.kind}_{site}_quantizer")
            setattr(plain.mixer, f"{layer.mixer.kind}_{site}_quantizer", None)
        plain.mixer.qkv.set_value(layer.mixer.qkv.get_value())
        plain.mixer.out.set_value(layer.mixer.out.get_value())
    return copy


def equal(a, b):
    return np.array_equal(np.asarray(a).view(np.uint32), np.asarray(b).view(np.uint32))


@pytest.fixture
def model():
    return tiny.Unrolled("gdn", "kda")


def test_names_are_dotted_paths_in_order_of_the_layers():
    names = list(find_quantizers(tiny.Unrolled(*["gdn"] * 11)))
    assert names[4:6] == ["layers.2.mixer.gdn_state_quantizer", "layers.2.mixer.gdn_w_quantizer"]
    assert names[-1] == "layers.10.mixer.gdn_w_quantizer"


def test_everything_starts_disabled_and_equals_the_plain_module_bit_for_bit():
    model, x = tiny.Unrolled("gdn"), tiny.batch()
    assert not any(q.enabled or q.spec for q in find_quantizers(model).values())
    plain = tiny.run(never_quantized(model), x)
    assert np.isfinite(plain).all() and equal(tiny.run(model, x), plain)


def test_disabled_quantizers_leave_the_plain_program(model):
    """GDN and KDA: XLA gets the very same program as for layers that never had handles."""
    plain = tiny.program(never_quantized(model))
    assert tiny.program(model) == plain
    quantize(model, BOTH)
    assert tiny.program(model) != plain
    quantize(model, [*BOTH, {"quantizer_name": "*", "enable": False}])
    assert tiny.program(model) == plain
    enable_quantizer(model, "*")
    assert tiny.program(model) != plain
    disable_quantizer(model, "*")
    assert tiny.program(model) == plain
    assert tiny.program(strip_quantizers(model)) == plain


def test_settings_and_scales_reach_the_op(model, monkeypatch):
    """The op is called with the DeltaQuant and arrays that the settings describe, layer by layer."""
    calls = []

    def spy(q, k, v, g, beta, **options):
        calls.append(options)
        return v, None

    quantize(
        model,
        [
            {"quantizer_name": "*gdn_state_quantizer", "cfg": {**FP8, "block_v": 16, "type": "static"}},
            {"quantizer_name": "*kda_*_quantizer", "cfg": {**FP8, "rounding": "stochastic"}},
        ],
    )
    state = find_quantizers(model)["layers.0.mixer.gdn_state_quantizer"]
    state.amax = QuantizerVariable(jnp.full(state.scale_shape, 2.0))
    with monkeypatch.context() as patch:
        patch.setattr(ops, "delta_rule", spy)
        model(tiny.batch())
    gdn, kda = calls
    assert gdn["quant"] == DeltaQuant(state=QuantSpec.fp8(block_v=16, scale="static"))
    assert gdn["quant_arrays"].state_amax.shape == (tiny.HV, tiny.V // 16) and gdn["quant_arrays"].w_amax is None
    stochastic = QuantSpec.fp8(rounding="stochastic")
    assert kda["quant"] == DeltaQuant(state=stochastic, w=stochastic)
    assert int(kda["quant_arrays"].layer) == 1 and kda["quant_arrays"].state_amax is None
    assert tiny.program(model) != tiny.program(never_quantized(model)), "the op takes them, traced"


def test_settings_compile_and_every_toggle_changes_the_program(model):
    programs = [tiny.program(quantize(model, BOTH))]
    off = disable_quantizer(model, "*w_quantizer")
    assert off == ["layers.0.mixer.gdn_w_quantizer", "layers.1.mixer.kda_w_quantizer"]
    programs.append(tiny.program(model))
    disable_quantizer(model, "*kda*")
    programs.append(tiny.program(model))
    assert len(set(programs)) == 3
    enable_quantizer(model, "*")
    assert tiny.program(model) == programs[0]


def test_gradients_pass_straight_through_to_the_weights():
    model = quantize(tiny.Unrolled("gdn"), BOTH)
    loss = nnx.jit(nnx.grad(lambda model, x: jnp.mean(model(x) ** 2)))
    grads = loss(model, tiny.batch())
    assert len(jax.tree.leaves(grads)) == 2, "something beside the two kernels has a gradient"
    assert all(np.isfinite(g).all() and np.abs(g).max() > 0 for g in jax.tree.leaves(grads))


def test_quantizer_variables_have_a_type_of_their_own(model):
    quantize(model, STATES)
    params, own, rest = nnx.split(model, nnx.Param, QuantizerVariable, ...)[1:]
    assert {path[-1] for path, _ in nnx.to_flat_state(own)} == {"counter"} and not jax.tree.leaves(rest)
    assert {path[-1] for path, _ in nnx.to_flat_state(params)} == {"qkv", "out"}


def test_quantize_starts_from_nothing_each_time(model):
    quantize(model, BOTH)
    assert quantize(model, STATES) is model
    table = {name: q for name, q in find_quantizers(model).items()}
    assert [n for n, q in table.items() if q.enabled] == [n for n in table if "state" in n]
    assert all(q.spec is None for n, q in table.items() if "_w_" in n)
    quantize(model, [])
    assert not any(q.enabled for q in table.values())


def test_a_failed_quantize_changes_nothing(model):
    quantize(model, STATES)
    before = summary(model)
    with pytest.raises(QuantConfigError, match=r"quant_cfg\[1\] '\*gdn_w_quantizer'.*block_v=64"):
        quantize(
            model,
            [
                {"quantizer_name": "*", "cfg": FP8},
                {"quantizer_name": "*gdn_w_quantizer", "cfg": {**FP8, "block_v": 64}},
            ],
        )
    assert summary(model) == before


def test_toggles_need_a_match_and_a_setting(model):
    with pytest.raises(
        QuantConfigError, match=r"enable_quantizer '\*gdn_w_quantizer': layers\.0.* never had a setting"
    ):
        enable_quantizer(model, "*gdn_w_quantizer")
    with pytest.raises(QuantConfigError, match=r"disable_quantizer '\*conv\*': no quantizer matches"):
        disable_quantizer(model, "*conv*")
    quantize(model, [{"quantizer_name": "*gdn_state_quantizer", "cfg": {**FP8, "cadence": 1}}])
    assert enable_quantizer(model, "*") == ["layers.0.mixer.gdn_state_quantizer"]
    w_off = {"quantizer_name": "*gdn_w_quantizer", "cfg": FP8, "enable": False}
    quantize(model, [{"quantizer_name": "*gdn_state_quantizer", "cfg": {**FP8, "cadence": 1}}, w_off])
    with pytest.raises(QuantConfigError, match=r"gdn_w_quantizer: w is formed per chunk"):
        enable_quantizer(model, "*gdn_w_quantizer")
    assert not find_quantizers(model)["layers.0.mixer.gdn_w_quantizer"].enabled


def test_strip_leaves_a_plain_model_with_plain_weights(model):
    quantize(model, BOTH)
    assert strip_quantizers(model) is model
    assert not find_quantizers(model) and not jax.tree.leaves(nnx.state(model, QuantizerVariable))
    assert model.layers[0].mixer.gdn_state_quantizer is None
    assert summary(model) == "The model has no quantizers."
    with pytest.raises(QuantConfigError, match=r"the model has no quantizers.*strip_quantizers removed them"):
        quantize(model, STATES)


def test_a_static_scale_without_calibration_says_so(model):
    quantize(model, load_recipe("state_fp8_static"))
    words = r"layers\.0\.mixer\.gdn_state_quantizer, set by quant_cfg\[0\] .* never calibrated; call jlaqat\.calibrate"
    with pytest.raises(ValueError, match=words):
        model(tiny.batch())


def test_names_keep_no_layers_apart(model):
    """Labels are for messages alone: layers that differ in nothing else are stacked, and compiled once."""
    quantize(model, STATES)
    first, second = (nnx.clone(model.layers[0].mixer.gdn_state_quantizer) for _ in range(2))
    second.label = Label("layers.7.mixer.gdn_state_quantizer")
    assert first.label.text != second.label.text
    assert nnx.graphdef(first) == nnx.graphdef(second) and hash(nnx.graphdef(first)) == hash(nnx.graphdef(second))


@pytest.mark.parametrize("name", [n.removeprefix("recipes/") for n in list_configs() if n.startswith("recipes/")])
def test_every_packaged_recipe_runs_through_the_op(name):
    """Traced, with scales where they are static: no recipe asks for what the op refuses."""
    for kind in ("gdn", "kda"):
        if name.startswith(("gdn_", "kda_")) and not name.startswith(kind):
            continue
        model = quantize(tiny.Unrolled(kind), load_recipe(name))
        for quantizer in find_quantizers(model).values():
            if quantizer.static:
                quantizer.amax = QuantizerVariable(jnp.ones(quantizer.scale_shape))
        assert jax.eval_shape(lambda x, model=model: model(x), tiny.batch()).shape == tiny.batch().shape


# ── stochastic rounding ──

STOCHASTIC = [{"quantizer_name": "*_state_quantizer", "cfg": {"num_bits": "e4m3", "rounding": "stochastic", "seed": 5}}]


@nnx.jit
def run_step(mixer, step, x):
    """One layer at a given step. Layers of one structure and setting share the compiled code."""
    set_step(mixer, step)
    return mixer(x)


def test_set_step_draws_other_bits_and_the_same_ones_again():
    model = quantize(tiny.Unrolled("gdn"), STOCHASTIC)
    outputs = [run_step(model.layers[0].mixer, step, tiny.batch()) for step in (3, 4, 3)]
    assert equal(outputs[0], outputs[2]) and not equal(outputs[0], outputs[1])
    assert [int(q.counter.get_value()[0]) for q in find_quantizers(model).values()] == [3, 3]
    set_step(model, 9)
    assert [int(q.counter.get_value()[0]) for q in find_quantizers(model).values()] == [9, 9]


def test_layers_are_numbered_in_order_and_draw_their_own_bits():
    model = quantize(tiny.Unrolled("gdn", "kda", "gdn"), STOCHASTIC)
    layers = {name: int(q.counter.get_value()[1]) for name, q in find_quantizers(model).items()}
    assert list(layers.values()) == [0, 0, 1, 1, 2, 2], "state and W of a layer share its index"
    first, third = model.layers[0].mixer, model.layers[2].mixer
    third.qkv.set_value(first.qkv.get_value())
    third.out.set_value(first.out.get_value())
    outputs = [run_step(mixer, 3, tiny.batch()) for mixer in (first, third)]
    assert not equal(*outputs), "two layers drew the same bits"


# ── stacked layers ──


def test_stacked_layers_share_a_setting_and_keep_their_own_arrays():
    """Layer by layer, the stack computes and draws what the same layers do one by one."""
    stacked = quantize(tiny.Stacked(2), STOCHASTIC)
    unrolled = quantize(tiny.Unrolled("gdn", "gdn"), STOCHASTIC)
    assert list(find_quantizers(stacked)) == ["layers.gdn_state_quantizer", "layers.gdn_w_quantizer"]
    assert find_quantizers(stacked)["layers.gdn_state_quantizer"].counter.get_value().tolist() == [[0, 0], [0, 1]]
    assert "2 layers" in summary(stacked)
    set_step(stacked, 7)
    x = tiny.batch()
    whole = tiny.run(stacked, x)
    for layer in unrolled.layers:
        x = run_step(layer.mixer, 7, x)
    np.testing.assert_allclose(whole, x, rtol=2e-6, atol=2e-6)


def test_single_layers_of_a_stack_cannot_be_set():
    with pytest.raises(
        QuantConfigError, match=r"layers\.1\.gdn_state_quantizer.*picks single layers.*2 stacked layers.*unroll"
    ):
        quantize(tiny.Stacked(2), [{"quantizer_name": "layers.1.gdn_state_quantizer", "cfg": FP8}])


def test_a_stacked_quantizer_called_outside_its_scan_says_so():
    stacked = quantize(tiny.Stacked(2), STATES)
    with pytest.raises(
        ValueError, match=r"layers\.gdn_state_quantizer, of \(2,\) stacked layers, was called; scan over"
    ):
        find_quantizers(stacked)["layers.gdn_state_quantizer"].rounding()


def test_quantizers_beside_other_modules_and_without_an_owner():
    lone = Quantizer("state", num_heads=1, key_dim=16, value_dim=16)
    holder = nnx.Dict(gdn_state_quantizer=lone, dense=nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    quantize(holder, STATES[:0] + [{"quantizer_name": "gdn_state_quantizer", "cfg": FP8}])
    assert lone.enabled and lone.scale_shape == (1, 1)
    strip_quantizers(holder)
    assert holder.gdn_state_quantizer is None
    with pytest.raises(ValueError, match="site='lhs' is not one of"):
        Quantizer("lhs", num_heads=1, key_dim=1, value_dim=1)


def test_the_public_face_carries_every_helper():
    for name in ("quantize", "calibrate", "freeze", "observe", "quantizer_metrics", "quantizer_metadata", "summary"):
        assert callable(getattr(quantizers, name))
