"""The oracle against itself: token by token, chunk by chunk, automatic differentiation and the backward by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jlaqat import reference
from jlaqat.rounding import fake_quantize
from jlaqat.spec import DeltaQuant, QuantArrays, QuantSpec
from jlaqat.testing import assert_close, error_ratio, make_inputs

pytestmark = pytest.mark.usefixtures("compile_quickly")

NAMES = ("q", "k", "v", "g", "beta", "initial_state")
PACKED = np.array([0, 64, 64, 75], np.int32)
LAYOUTS = {
    "batch": (None, dict(B=1, T=75)),
    "packed": (PACKED, dict(T=80, num_sequences=3)),
}


def make(gate, layout, dtype=np.float64):
    cu_seqlens, sizes = LAYOUTS[layout]
    x = make_inputs(3, H=1, HV=2, K=6, V=5, gate=gate, correlation=0.5, max_beta=2.0, dtype=dtype, **sizes)
    rng = np.random.default_rng(4)
    cotangents = rng.normal(size=x["v"].shape).astype(dtype), rng.normal(size=x["initial_state"].shape).astype(dtype)
    return {name: jnp.asarray(a) for name, a in x.items()}, cotangents, cu_seqlens


def differentiate(function, x, cotangents):
    @jax.jit
    def run(x, cotangents):
        results, pullback = jax.vjp(lambda x: function(**x), x)
        return results, pullback(cotangents)[0]

    return run(x, tuple(map(jnp.asarray, cotangents)))


@pytest.mark.parametrize(("gate", "layout"), [("gdn", "packed"), ("kda", "batch")])
def test_tokens_chunks_and_backward_agree_in_float64(gate, layout, x64):
    x, cotangents, cu = make(gate, layout)
    by_token, token_gradients = differentiate(
        lambda **x: reference.delta_rule_tokens(**x, cu_seqlens=cu), x, cotangents
    )
    by_chunk = reference.delta_rule_chunks(**x, cu_seqlens=cu)
    by_hand = reference.delta_rule_chunks_backward(*map(jnp.asarray, cotangents), **x, cu_seqlens=cu)
    for got, wanted in zip(by_chunk, by_token):
        assert_close(got, wanted, 1e-13)
    for name, gradient in zip(NAMES, by_hand):
        assert_close(gradient, token_gradients[name], 1e-13, f"d{name}")
    if layout == "packed":
        assert not np.any(by_chunk[0][:, PACKED[-1] :])
        assert not np.any(by_hand[0][:, PACKED[-1] :])


@pytest.mark.parametrize("gate", ["gdn", pytest.param("kda", marks=pytest.mark.slow)])
def test_backward_by_hand_equals_autodiff_with_rounding(gate, x64):
    """Straight-through in both: with the same rounded values the formulas hold to the last digits."""
    x, cotangents, cu = make(gate, "batch")
    quant = DeltaQuant(state=QuantSpec.fp8(block_v=16), w=QuantSpec.fp8())
    _, by_autodiff = differentiate(lambda **x: reference.delta_rule_chunks(**x, quant=quant), x, cotangents)
    by_hand = reference.delta_rule_chunks_backward(*map(jnp.asarray, cotangents), **x, quant=quant)
    for name, gradient in zip(NAMES, by_hand):
        assert_close(gradient, by_autodiff[name], 1e-13, f"d{name}")


@pytest.mark.parametrize("gate", [pytest.param("gdn", marks=pytest.mark.slow), "kda"])
def test_float32_is_close_to_float64(gate):
    x, cotangents, cu = make(gate, "batch", np.float32)
    o, final_state, gradients = reference.oracle(x, *cotangents)
    got = reference.delta_rule_chunks(**x)
    assert got[0].dtype == got[1].dtype == jnp.float32
    assert_close(got[0], o, 1e-6)
    assert_close(got[1], final_state, 1e-6)
    by_hand = reference.delta_rule_chunks_backward(*map(jnp.asarray, cotangents), **x)
    for name, gradient in zip(NAMES, by_hand):
        assert_close(gradient, gradients[name], 1e-5, f"d{name}")


def test_replayed_states_and_w_are_used_as_they_are():
    x, _, _ = make("gdn", "batch", np.float32)
    quant = DeltaQuant(state=QuantSpec.int8(), w=QuantSpec.fp8())
    rng = np.random.default_rng(0)
    states = jnp.asarray(rng.normal(size=(1, 2, 3, 6, 5)), jnp.float32)
    w = jnp.asarray(rng.normal(size=(1, 2, 75, 6)), jnp.float32)
    _, final_state = reference.delta_rule_chunks(**x, quant=quant, replay=reference.Replay([states], [w]))
    assert_close(final_state, states[:, :, 2], 1e-6)
    changed = reference.Replay([states], [w.at[:, :, 64:].set(0)])
    same, _ = reference.delta_rule_chunks(**x, quant=quant, replay=changed)
    other, _ = reference.delta_rule_chunks(**x, quant=quant, replay=reference.Replay([states], [w]))
    assert np.array_equal(same[:, :64], other[:, :64])
    assert error_ratio(same[:, 64:], other[:, 64:]) > 0.01


def test_token_cadence_rounds_when_it_says():
    """Every 16 tokens, at the end of the sequence, and on entry: by hand with one rounding after another."""
    x, _, _ = make("gdn", "batch", np.float32)
    quant = DeltaQuant(state=QuantSpec.fp8(cadence=16))
    o, final_state = reference.delta_rule_tokens(**x, quant=quant)
    S = fake_quantize(x["initial_state"], quant.state, site="state")
    pieces = []
    for start in range(0, 75, 16):
        rows = {name: a[:, start : start + 16] for name, a in x.items() if name != "initial_state"}
        out, S = reference.delta_rule_tokens(**rows, initial_state=S)
        S = fake_quantize(S, quant.state, site="state")
        pieces.append(out)
    assert_close(o, np.concatenate(pieces, axis=1), 1e-6)
    assert_close(final_state, S, 1e-6)


def test_quant_arrays_reach_the_rounding():
    x, _, _ = make("gdn", "batch", np.float32)
    quant = DeltaQuant(state=QuantSpec.fp8(scale="static"))
    small = reference.delta_rule_chunks(**x, quant=quant, quant_arrays=QuantArrays(state_amax=jnp.full((2, 1), 0.1)))
    assert np.abs(small[1]).max() <= 0.1 + 1e-6
