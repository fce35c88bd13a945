"""The delta layers by themselves: initialisation, gates, options, packing, padding, decoding, quantizers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jlaqat.blocks import RMSNorm, ShortConvolution, l2_normalize, linear, token_layout
from jlaqat.layers import GatedDeltaNet, KimiDeltaAttention, bounded_gate, init_decay_rate, init_dt_bias, softplus_gate
from jlaqat.quantizers import disable_quantizer, quantize, strip_quantizers
from jlaqat.testing import assert_close
from jlaqat.weights import fla_state_dict, load_fla_state_dict

pytestmark = pytest.mark.usefixtures("compile_quickly")

D, T = 24, 70  # a whole chunk and a part of one
QUICK = {"xla_backend_optimization_level": 0}  # compiling is what these tests spend their time on
SIZES = {"head_dim": 8, "num_heads": 2, "num_v_heads": 4, "expand_v": 1.5}
LAYERS = {"gdn": GatedDeltaNet, "kda": KimiDeltaAttention}


def make(kind, **options):
    return LAYERS[kind](D, **SIZES | options, rngs=nnx.Rngs(0))


def inputs(batch=2, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((batch, T, D)), jnp.float32)


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK)
def _apply(graph, state, x, cu_seqlens, mask):
    return nnx.merge(graph, state)(x, cu_seqlens=cu_seqlens, mask=mask)


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK)
def _decode(graph, state, x, cache, mask):
    return nnx.merge(graph, state).decode(x, cache, mask=mask)


def apply(layer, x, cu_seqlens=None, mask=None):
    return _apply(*nnx.split(layer), x, cu_seqlens, mask)


def decode(layer, x, cache, mask=None):
    return _decode(*nnx.split(layer), x, cache, mask)


@pytest.fixture(scope="module", params=["gdn", "kda"])
def layer(request):
    return make(request.param)


# ── initialisation ──


def test_decay_rates_are_finite_for_10000_seeds():
    """cases.md 12: log of U(0, 16), which a bfloat16 draw makes −inf every few hundred seeds."""
    draw = jax.jit(jax.vmap(lambda seed: init_decay_rate(jax.random.key(seed), 16, 0.0)))
    a_log = np.asarray(draw(jnp.arange(10_000)))
    assert a_log.dtype == np.float32 and np.isfinite(a_log).all()
    rates = np.exp(a_log)
    assert rates.max() <= 16.0 + 1e-5 and abs(rates.mean() - 8.0) < 0.1  # uniform on (0, 16]
    assert init_decay_rate(jax.random.key(0), 4096, 1.0).min() >= 0.0


def test_decay_rates_survive_a_draw_of_zero(monkeypatch):
    monkeypatch.setattr(jax.random, "uniform", lambda key, shape, dtype: jnp.zeros(shape, dtype))
    assert np.isfinite(np.asarray(init_decay_rate(jax.random.key(0), 4, 0.0))).all()


def test_dt_bias_is_the_inverse_softplus_of_time_steps():
    dt = np.asarray(jax.nn.softplus(init_dt_bias(jax.random.key(0), 4096)))
    assert 0.99e-3 < dt.min() < 1.1e-3 and 0.09 < dt.max() < 0.1001
    assert abs(np.log(dt).mean() - np.log(1e-2)) < 0.1  # log-uniform


def test_decay_parameters_are_float32_in_a_bfloat16_layer():
    layer = nnx.eval_shape(lambda: make("gdn", dtype=jnp.bfloat16, param_dtype=jnp.bfloat16))
    assert layer.A_log.dtype == layer.dt_bias.dtype == jnp.float32
    assert layer.q_proj.kernel.dtype == layer.o_norm.scale.dtype == layer.q_conv1d.kernel.dtype == jnp.bfloat16


def test_safe_gate_starts_at_rate_one():
    layer = make("kda", safe_gate=True, lower_bound=-5.0)
    assert not np.asarray(layer.A_log[...]).any()
    assert np.asarray(make("kda", lower_bound=-5.0).A_log[...]).all()


def test_initializer_range_sets_the_spread():
    layer = linear(64, 32, use_bias=True, initializer_range=0.02, rngs=nnx.Rngs(0))
    assert abs(np.std(layer.kernel[...]) / 0.02 - 1) < 0.1 and not np.asarray(layer.bias[...]).any()
    layer = linear(64, 32, use_bias=True, rngs=nnx.Rngs(0))
    for draws in (layer.kernel[...], layer.bias[...]):
        assert 0.9 / 8 < np.abs(draws).max() <= 1 / 8  # uniform ±1/√64
    kernel = ShortConvolution(64, 4, rngs=nnx.Rngs(0)).kernel[...]
    assert 0.9 / 2 < np.abs(kernel).max() <= 1 / 2  # uniform ±1/√4


# ── parts, against numbers worked out by hand ──


def test_gates_by_hand():
    a, bias = jnp.array([0.5, -2.0]), jnp.array([0.25, 1.0])
    expected = -2.0 * np.log1p(np.exp([0.75, -1.0]))
    np.testing.assert_allclose(softplus_gate(a, jnp.log(jnp.full((2,), 2.0)), bias), expected, rtol=1e-6)
    expected = -4.0 / (1 + np.exp(-3.0 * np.array([0.75, -1.0])))
    np.testing.assert_allclose(bounded_gate(a, jnp.log(jnp.full((2,), 3.0)), bias, -4.0), expected, rtol=1e-6)
    for extreme in (-1e4, 1e4):
        g = bounded_gate(jnp.full((1,), extreme), jnp.zeros(1), jnp.zeros(1), -5.0)
        assert -5.0 <= float(g[0]) <= 0.0
        assert np.isfinite(softplus_gate(jnp.full((1,), extreme), jnp.zeros(1), jnp.zeros(1)))


def test_gates_are_float32_whatever_comes_in():
    x = jnp.ones((2,), jnp.bfloat16)
    assert softplus_gate(x, jnp.zeros(2), jnp.zeros(2)).dtype == jnp.float32
    assert bounded_gate(x, jnp.zeros(2), jnp.zeros(2), -5.0).dtype == jnp.float32


def test_l2_normalize_by_hand():
    x = jnp.array([[3.0, 4.0], [0.0, 0.0]])
    np.testing.assert_allclose(l2_normalize(x), [[0.6, 0.8], [0.0, 0.0]], rtol=1e-6)
    assert l2_normalize(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_rms_norm_by_hand():
    norm = RMSNorm(2, eps=0.5, activation="silu")
    norm.scale[...] = jnp.array([1.0, 2.0])
    x, gate = jnp.array([1.0, -3.0]), jnp.array([0.5, -1.0])
    plain = np.array([1.0, -6.0]) / np.sqrt(5.5)
    np.testing.assert_allclose(norm(x), plain, rtol=1e-6)
    np.testing.assert_allclose(norm(x, gate), plain * np.array([0.5, -1.0]) / (1 + np.exp([-0.5, 1.0])), rtol=1e-6)
    with pytest.raises(ValueError, match="built without an output gate"):
        RMSNorm(2, eps=0.5)(x, gate)
    with pytest.raises(ValueError, match="'relu' is not supported; choose one of 'silu'"):
        RMSNorm(2, eps=0.5, activation="relu")


def convolution_by_loop(x, kernel, bounds):
    """Each sequence's causal convolution and SiLU, tap by tap, in float64."""
    y = np.zeros(x.shape, np.float64)
    for start, stop in zip(bounds[:-1], bounds[1:], strict=True):
        for t in range(start, stop):
            for back in range(min(len(kernel), t - start + 1)):
                y[t] += x[t - back].astype(np.float64) * kernel[len(kernel) - 1 - back]
    return y / (1 + np.exp(-y))


@pytest.mark.parametrize("bounds", [[0, 12], [0, 2, 2, 3, 9, 12], [0, 5]])
def test_convolution_never_crosses_a_sequence_start(bounds):
    """Packed, empty sequences and tokens past the last bound included; not even NaN next door is seen."""
    conv = ShortConvolution(3, 4, rngs=nnx.Rngs(0))
    x = np.random.default_rng(0).standard_normal((12, 3)).astype(np.float32)
    layout = token_layout(x[None], jnp.array(bounds))
    whole = bounds if bounds[-1] == 12 else [*bounds, 12]
    expected = convolution_by_loop(x, np.asarray(conv.kernel[...], np.float64), whole)
    np.testing.assert_allclose(conv(x[None], layout)[0], expected, rtol=1e-5, atol=1e-6)

    x[: bounds[1]] = np.nan
    np.testing.assert_allclose(conv(x[None], layout)[0, bounds[1] :], expected[bounds[1] :], rtol=1e-5, atol=1e-6)


# ── options and errors ──


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("gdn", {"num_v_heads": 3}, "num_v_heads=3 is not a multiple of num_heads=2.*choose a multiple"),
        ("gdn", {"num_heads": 0}, "num_heads=0.*must all be positive"),
        ("gdn", {"expand_v": 0.3}, "head_dim=8 × expand_v=0.3 = 2.4 is no positive whole number"),
        ("gdn", {"conv_size": 0}, "conv_size=0 must be at least 1; use_short_conv=False"),
        ("gdn", {"output_gate_activation": "tanh"}, "'tanh' is not supported; choose one of"),
        ("kda", {"lower_bound": -6.0}, r"lower_bound=-6.0 is outside \[-5, 0\)"),
        ("kda", {"lower_bound": 0.0}, r"lower_bound=0.0 is outside \[-5, 0\)"),
        ("kda", {"safe_gate": True}, "safe_gate=True needs a bound: set lower_bound"),
    ],
)
def test_options_that_cannot_work(kind, options, message):
    with pytest.raises(ValueError, match=message):
        make(kind, **options)


def test_inputs_that_do_not_fit(layer):
    with pytest.raises(ValueError, match=r"x has shape \(2, 70, 23\).*hidden_size=24"):
        layer(inputs()[..., :-1])
    with pytest.raises(ValueError, match=r"cu_seqlens was given with B=2"):
        layer(inputs(), cu_seqlens=jnp.array([0, T]))
    for bounds in ([0], [1, T], [0, T + 1], [0, 9, 8, T]):
        with pytest.raises(ValueError, match="cu_seqlens"):
            layer(inputs(1), cu_seqlens=jnp.array(bounds))
    with pytest.raises(ValueError, match=r"mask has shape \(2, 3\).*\(2, 70\)"):
        layer(inputs(), mask=jnp.ones((2, 3)))


def test_mask_and_cu_seqlens_together_are_refused(layer):
    """cases.md 15."""
    with pytest.raises(ValueError, match="mask and cu_seqlens were both given"):
        layer(inputs(1), cu_seqlens=jnp.array([0, T]), mask=jnp.ones((1, T)))


# ── packing, padding, decoding ──


def test_packed_sequences_equal_separate_ones(layer):
    x = inputs()
    alone = apply(layer, x)
    packed = apply(layer, x.reshape(1, -1, D), cu_seqlens=jnp.array([0, T, T, 2 * T]))
    assert_close(packed.reshape(2, T, D), alone, 1e-5, "packed")
    # 40 tokens of the first sequence, then 70 of the second; what follows is past the end.
    y = apply(layer, x.reshape(1, -1, D), cu_seqlens=jnp.array([0, 40, 110, 110]))
    assert_close(y[0, :40], alone[0, :40], 1e-5, "first")
    assert not np.asarray(y[0, 110:]).any()


def test_padding_changes_nothing(layer):
    """Left, inside and right padding, holding NaN, against the row without it."""
    x = inputs()
    alone = apply(layer, x)
    mask = np.zeros((2, T), bool)
    mask[0, 6:] = True
    mask[1, :50] = True
    mask[1, 10:13] = False
    padded = np.full((2, T, D), np.nan, np.float32)
    padded[0, 6:] = x[0, : T - 6]
    padded[1, mask[1]] = x[1, :47]
    y = apply(layer, jnp.asarray(padded), mask=jnp.asarray(mask))
    assert_close(y[0, 6:], alone[0, : T - 6], 1e-5, "left-padded")
    assert_close(y[1][mask[1]], alone[1, :47], 1e-5, "right-padded, with a hole")
    assert not np.asarray(y)[~mask].any()


def test_prompt_and_steps_equal_the_whole(layer):
    x = inputs()
    """The prompts are of two lengths, so that the second is padded on the left; one is shorter than the convolution."""
    x = inputs()
    whole = apply(layer, x)
    lengths = (T - 3, 2)
    prompt, mask = np.full((2, T, D), np.nan, np.float32), np.zeros((2, T), bool)
    prompt[0, : lengths[0]], mask[0, : lengths[0]] = x[0, : lengths[0]], True
    prompt[1, -lengths[1] :], mask[1, -lengths[1] :] = x[1, : lengths[1]], True
    y, cache = decode(layer, jnp.asarray(prompt), layer.init_cache(2), mask=jnp.asarray(mask))
    for row, length in enumerate(lengths):
        assert_close(y[row][mask[row]], whole[row, :length], 1e-5, f"prompt {row}")
    for t in range(3):
        y, cache = decode(layer, jnp.stack([x[row, length + t] for row, length in enumerate(lengths)])[:, None], cache)
        for row, length in enumerate(lengths):
            assert_close(y[row, 0], whole[row, length + t], 1e-5, f"token {t} after prompt {row}")


def test_cache_has_no_convolution_rows_without_convolution():
    cache = make("kda", use_short_conv=False).init_cache(3)
    assert cache.state.shape == (3, 4, 8, 12) and cache.state.dtype == jnp.float32
    assert cache.q_tail.shape == (3, 0, 16) and cache.v_tail.shape == (3, 0, 48)
    assert make("kda", dtype=jnp.bfloat16).init_cache(3).k_tail.dtype == jnp.bfloat16


def test_bfloat16_computation_with_float32_parameters():
    x = inputs()
    exact = make("gdn")
    layer = make("gdn", dtype=jnp.bfloat16)
    assert layer.q_proj.kernel.dtype == jnp.float32
    y = apply(layer, x)
    assert y.dtype == jnp.bfloat16
    assert_close(y.astype(jnp.float32), apply(exact, x), 0.03, "bfloat16")


# ── quantizers ──


def test_handles_are_named_by_kind_and_disabled():
    for kind in LAYERS:
        layer = make(kind)
        for site in ("state", "w"):
            quantizer = getattr(layer, f"{kind}_{site}_quantizer")
            assert (quantizer.site, quantizer.num_heads, quantizer.key_dim, quantizer.value_dim) == (site, 4, 8, 12)
            assert not quantizer.enabled


def test_state_rounding_changes_the_output_and_decoding_refuses_it():
    layer = make("gdn")
    x = inputs()
    plain = apply(layer, x)
    quantize(
        layer,
        [
            {
                "quantizer_name": "*state_quantizer",
                "cfg": {"num_bits": "e4m3", "type": "dynamic", "axis": [0, 1], "block_v": 64},
            }
        ],
    )
    rounded = apply(layer, x)
    np.testing.assert_array_equal(rounded[:, :64], plain[:, :64])  # the first chunk reads a zero state
    assert np.any(np.asarray(rounded[:, 64:]) != np.asarray(plain[:, 64:]))
    with pytest.raises(
        NotImplementedError, match=r"gdn_state_quantizer is enabled \(e4m3.*disable_quantizer\(model, '\*'\)"
    ):
        layer.decode(x, layer.init_cache(2))
    disable_quantizer(layer, "*")
    y, _ = decode(layer, x[:, :1], layer.init_cache(2))
    assert_close(y, plain[:, :1], 1e-5, "disabled")
    strip_quantizers(layer)
    y, _ = decode(layer, x[:, :1], layer.init_cache(2))
    assert_close(y, plain[:, :1], 1e-5, "stripped")


# ── weights ──


def test_state_dict_problems_are_listed_together_and_nothing_is_changed():
    layer = make("gdn")
    before = fla_state_dict(layer)
    state = {f"attn.{name}": np.zeros_like(array) for name, array in before.items()}
    del state["attn.b_proj.weight"]
    state["attn.q_proj.weight"] = state["attn.q_proj.weight"].T
    state["attn.f_proj.0.weight"] = np.zeros(1)
    state["other.weight"] = np.zeros(1)
    with pytest.raises(ValueError) as caught:
        load_fla_state_dict(layer, state, prefix="attn.")
    for line in (
        "missing attn.b_proj.weight",
        "not a parameter of this GatedDeltaNet: attn.f_proj.0.weight",
        "attn.q_proj.weight has shape (24, 16), not (16, 24)",
        "prefix='attn.'",
    ):
        assert line in str(caught.value)
    assert "other.weight" not in str(caught.value)
    for name, array in fla_state_dict(layer).items():
        np.testing.assert_array_equal(array, before[name])


def test_loaded_weights_keep_the_parameters_dtype():
    source, target = make("kda"), nnx.eval_shape(lambda: make("kda", param_dtype=jnp.bfloat16))
    load_fla_state_dict(target, fla_state_dict(source))
    assert target.q_proj.kernel.dtype == jnp.bfloat16
    assert_close(target.q_proj.kernel[...].astype(jnp.float32), source.q_proj.kernel[...], 0.01, "q_proj")
