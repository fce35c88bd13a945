"""The quantizers as a table, as rows and as JSON; restoring them, with both sides named where they differ."""

import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jlaqat import quantizer_report
from jlaqat.calibration import freeze
from jlaqat.quantizers import (
    Quantizer,
    QuantizerVariable,
    apply_quantizer_metadata,
    disable_quantizer,
    find_quantizers,
    observe,
    quantize,
    quantizer_metadata,
    quantizer_table,
    strip_quantizers,
    summary,
)
from jlaqat.recipes import load_recipe
from jlaqat.spec import QuantConfigError

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import tiny_quantized as tiny

FP8 = {"num_bits": "e4m3"}
STATIC = {**FP8, "type": "static", "block_v": 16}
MIXED = [
    {"quantizer_name": "*gdn_state_quantizer", "cfg": STATIC},
    {"quantizer_name": "*kda_state_quantizer", "cfg": {"num_bits": "int8", "narrow_range": True, "key_row": 32}},
]
GDN, KDA = "layers.0.mixer.gdn_state_quantizer", "layers.1.mixer.kda_state_quantizer"


@pytest.fixture
def model():
    return tiny.Unrolled("gdn", "kda")


def fresh():
    return tiny.Unrolled("gdn", "kda", seed=1)


def calibrate_by_hand(model, low=0.5, high=2.0):
    state = find_quantizers(model)[GDN]
    state.amax = QuantizerVariable(jnp.linspace(low, high, 4).reshape(state.scale_shape))


def line(text, start):
    return next(row for row in text.splitlines() if row.startswith(start))


# ── tables ──


def test_summary_lists_every_quantizer_with_setting_source_and_scale(model):
    quantize(model, MIXED)
    text = summary(model)
    assert [row.split()[0] for row in text.splitlines()[1:5]] == list(find_quantizers(model))
    gdn = line(text, GDN)
    assert " on " in gdn and "e4m3, tile K×16 " in gdn and "quant_cfg[0] '*gdn_state_quantizer'" in gdn
    assert "not calibrated" in gdn and f"To calibrate before use: {GDN}." in text
    kda = line(text, KDA)
    assert "int8, key_row×32" in kda and "quant_cfg[1]" in kda and "dynamic" in kda and "experimental" in kda
    off = line(text, "layers.0.mixer.gdn_w_quantizer")
    assert " off " in off and "experimental" not in off
    assert "2 of 4 quantizers on, 1 of them experimental." in text


def test_summary_shows_ranges_and_what_froze_or_observes(model):
    quantize(model, MIXED)
    calibrate_by_hand(model)
    assert "amax 0.5 to 2" in line(summary(model), GDN) and "To calibrate" not in summary(model)
    observe(model, GDN)
    assert line(summary(model), GDN).endswith("observing")
    assert freeze(model) == [GDN]
    assert line(summary(model), GDN).endswith("frozen")
    disable_quantizer(model, "*kda*")
    assert "disable_quantizer '*kda*'" in line(summary(model), KDA)


def test_summary_of_a_traced_model(model):
    quantize(model, MIXED)
    calibrate_by_hand(model)
    shown = []
    nnx.jit(lambda model: shown.append(summary(model)))(model)
    assert "not calibrated" in shown[0], "values under jit are unknown"


def test_table_rows_are_json(model):
    quantize(model, MIXED)
    calibrate_by_hand(model)
    rows = json.loads(json.dumps(quantizer_table(model)))
    assert rows[0] == {
        "name": GDN,
        "enabled": True,
        "setting": "e4m3, tile K×16, scale static",
        "source": "quant_cfg[0] '*gdn_state_quantizer'",
        "site": "state",
        "spec": {
            "format": "e4m3",
            "granularity": "tile",
            "block_v": 16,
            "rounding": "nearest",
            "seed": 0,
            "scale": "static",
            "gradient": "identity",
            "cadence": 64,
            "limit": None,
            "scale_dtype": "float32",
            "basis": "identity",
        },
        "experimental": False,
        "linear_attention": True,
        "scale": {"min": 0.5, "max": 2.0},
        "frozen": False,
        "observing": False,
        "layers": 1,
        "decode": None,
        "decode_source": None,
    }
    assert [row["enabled"] for row in rows] == [True, False, True, False]


# ── metadata ──


def test_metadata_goes_through_json_and_rebuilds_settings_and_shapes(model):
    quantize(model, [*MIXED, {"quantizer_name": "*gdn_w_quantizer", "cfg": FP8, "enable": False}])
    calibrate_by_hand(model)
    freeze(model)
    observe(model, KDA)
    saved = json.loads(json.dumps(quantizer_metadata(model)))
    other = fresh()
    apply_quantizer_metadata(other, saved)
    assert quantizer_metadata(other) == saved
    nnx.update(other, nnx.state(model, QuantizerVariable))
    assert summary(other) == summary(model)
    ours, theirs = (nnx.split(m, QuantizerVariable, ...)[1] for m in (model, other))
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), ours, theirs))


def test_later_edits_are_saved_too(model):
    quantize(model, MIXED)
    disable_quantizer(model, "*kda*")
    other = fresh()
    apply_quantizer_metadata(other, quantizer_metadata(model))
    assert not find_quantizers(other)[KDA].enabled and find_quantizers(other)[KDA].spec.format == "int8"
    assert "disable_quantizer '*kda*'" in summary(other)


def test_metadata_applies_to_abstract_models(model):
    quantize(model, MIXED)
    calibrate_by_hand(model)
    abstract = nnx.eval_shape(fresh)
    apply_quantizer_metadata(abstract, quantizer_metadata(model))
    wanted = jax.tree.map(lambda x: (x.shape, x.dtype), nnx.state(model, QuantizerVariable))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), nnx.state(abstract, QuantizerVariable)) == wanted


def test_metadata_of_stacked_layers():
    stacked = quantize(tiny.Stacked(2), [{"quantizer_name": "*state*", "cfg": STATIC}])
    state = find_quantizers(stacked)["layers.gdn_state_quantizer"]
    assert state.scale_shape == (2, tiny.HV, 2)
    state.amax = QuantizerVariable(jnp.ones(state.scale_shape))
    other = tiny.Stacked(2)
    apply_quantizer_metadata(other, quantizer_metadata(stacked))
    assert find_quantizers(other)["layers.gdn_state_quantizer"].amax.get_value().shape == (2, tiny.HV, 2)
    assert find_quantizers(other)["layers.gdn_state_quantizer"].counter.get_value()[:, 1].tolist() == [0, 1]
    with pytest.raises(
        QuantConfigError, match=r"different: layers\.gdn_state_quantizer \(stack: checkpoint \[2\], model \[3\]\)"
    ):
        apply_quantizer_metadata(tiny.Stacked(3), quantizer_metadata(stacked))


def test_scales_survive_where_a_setting_stays(model):
    quantize(model, MIXED)
    calibrate_by_hand(model)
    quantize(model, [{"quantizer_name": "*", "cfg": FP8}, *MIXED])
    assert find_quantizers(model)[GDN].amax is not None
    quantize(model, [{"quantizer_name": "*gdn_state*", "cfg": {**STATIC, "block_v": 32}}])
    assert find_quantizers(model)[GDN].amax is None


def test_new_and_disabled_quantizers_are_filled_in(model):
    """A checkpoint of a version before W had a handle: the model's W quantizers stay as they are, disabled."""
    quantize(model, MIXED)
    saved = quantizer_metadata(model)
    saved["quantizers"] = {name: entry for name, entry in saved["quantizers"].items() if "_w_" not in name}
    other = fresh()
    apply_quantizer_metadata(other, saved)
    assert quantizer_metadata(other) == quantizer_metadata(model)


def test_a_checkpoint_without_quantizers_leaves_a_plain_model_plain(model):
    apply_quantizer_metadata(model, quantizer_metadata(strip_quantizers(fresh())))
    assert not any(q.enabled for q in find_quantizers(model).values())


def test_a_newer_format_is_refused(model):
    with pytest.raises(QuantConfigError, match=r"format_version=3, but this jlaqat reads 2 and older; load it"):
        apply_quantizer_metadata(model, {"format_version": 3, "quantizers": {}})


def test_a_setting_that_does_not_load_names_its_quantizer(model):
    saved = quantizer_metadata(quantize(model, MIXED))
    saved["quantizers"][KDA]["spec"]["format"] = "fp3"
    with pytest.raises(QuantConfigError, match=rf"the setting of {KDA} does not load: format='fp3'"):
        apply_quantizer_metadata(fresh(), saved)


# ── the complaints of the incumbent's users (spec/quantizers.md, last section) ──


def test_complaint_1_a_pattern_that_matches_nothing_is_an_error_with_the_nearest_names(model):
    message = r"quant_cfg\[1\] '\*gdn\.state_quantiser': no quantizer matches; "
    with pytest.raises(QuantConfigError, match=message + r"nearest: 'layers\.\*\.mixer\.gdn_state_quantizer'"):
        quantize(model, [MIXED[0], {"quantizer_name": "*gdn.state_quantiser", "cfg": FP8}])
    assert not any(q.enabled for q in find_quantizers(model).values()), "half a recipe was applied"


def test_complaint_2_a_dry_run_shows_each_quantizer_its_setting_and_the_entry_that_set_it(model):
    recipe = [*load_recipe("state_fp8"), {"quantizer_name": "*kda_*", "enable": False}]
    text = summary(quantize(model, recipe))
    assert "e4m3, tile K×64" in line(text, GDN) and "quant_cfg[0]" in line(text, GDN)
    assert " off " in line(text, KDA) and "quant_cfg[1] '*kda_*'" in line(text, KDA)


def test_complaint_3_a_restore_that_fails_says_which_quantizers_differ(model):
    saved = quantizer_metadata(quantize(model, MIXED))
    other = quantize(tiny.Unrolled("gdn", "gdn", seed=1), [{"quantizer_name": "layers.1.*state*", "cfg": FP8}])
    find_quantizers(other)["layers.0.mixer.gdn_w_quantizer"].key_dim = 8
    before = quantizer_metadata(other)
    with pytest.raises(QuantConfigError) as error:
        apply_quantizer_metadata(other, saved)
    text = str(error.value)
    assert f"only in the checkpoint: {KDA} (enabled), layers.1.mixer.kda_w_quantizer (disabled)" in text
    assert "only in the model: layers.1.mixer.gdn_state_quantizer (enabled)" in text
    assert "different: layers.0.mixer.gdn_w_quantizer (key_dim: checkpoint 16, model 8)" in text
    assert quantizer_metadata(other) == before


def test_complaint_5_a_wildcard_beyond_linear_attention_is_visible_in_the_summary(model):
    model.conv = nnx.Dict(conv_input_quantizer=Quantizer("w", num_heads=1, key_dim=4, value_dim=4))
    text = summary(quantize(model, [{"quantizer_name": "*", "cfg": FP8}]))
    assert line(text, "conv.conv_input_quantizer").endswith("outside linear attention")
    assert "WARNING: quant_cfg[0] '*' turns on 1 outside linear attention: conv.conv_input_quantizer." in text
    assert [row["name"] for row in quantizer_table(model) if not row["linear_attention"]] == [
        "conv.conv_input_quantizer"
    ]
    assert "WARNING" not in summary(quantize(model, MIXED))


def test_complaint_6_renamed_quantizers_load_through_the_alias_table(model, monkeypatch):
    saved = quantizer_metadata(quantize(model, MIXED))
    old = json.loads(json.dumps(saved).replace('gdn_state_quantizer"', 'gdn_memory_quantizer"'))
    assert set(old["quantizers"]) != set(saved["quantizers"])
    with pytest.raises(QuantConfigError, match=r"only in the checkpoint: layers\.0\.mixer\.gdn_memory_quantizer"):
        apply_quantizer_metadata(fresh(), old)
    monkeypatch.setitem(quantizer_report.ALIASES, "gdn_memory_quantizer", "gdn_state_quantizer")
    other = fresh()
    apply_quantizer_metadata(other, old)
    assert quantizer_metadata(other) == saved
    whole = {"layers.0.mixer.gdn_memory_quantizer": GDN}
    apply_quantizer_metadata(fresh(), old, aliases=whole)
    old["quantizers"][GDN] = old["quantizers"][KDA]
    with pytest.raises(QuantConfigError, match=rf"two of them are now {GDN}"):
        apply_quantizer_metadata(fresh(), old)
