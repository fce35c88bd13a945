"""The kernels of replay through Triton's interpreter. Run by test_kernels_interpret.py in a process of its own."""

import dataclasses
import os
import sys

sys.path.insert(0, os.path.dirname(__file__))
os.environ["TRITON_INTERPRET"] = "1"

import jax
import jax.numpy as jnp
import kernel_oracle
import numpy as np
import pytest
import recurrent_oracle
import replay_oracle as oracle
import torch
from decode_interpreted import run as run_from_jax
from recurrent_oracle import SMALL_SPECS as SPECS

import jlaqat
from jlaqat import DecodePolicy, QuantArrays, QuantSpec
from jlaqat import decode_replay_triton as replay
from jlaqat.decode_carry import round_keys
from jlaqat.decode_counters import counters_of
from jlaqat.decode_scan import Span
from jlaqat.kernel_calls import Target
from jlaqat.kernels import recurrent_pipeline
from jlaqat.kernels import replay_pipeline as pipeline
from jlaqat.kernels.recurrent_pipeline import Options
from jlaqat.kernels.replay_pipeline import Tokens
from jlaqat.testing import assert_close, make_inputs
from jlaqat.torch_bridge.run import poisoned_run

DRAWN = {
    "e4m3-tile": QuantSpec.fp8(block_v=16, rounding="stochastic", seed=5),
    "int8-key_row": QuantSpec.int8(granularity="key_row", rounding="stochastic"),
    "float16": QuantSpec.float16(rounding="stochastic"),
}


def call(kda, name, length, ring_dtype=torch.float32, settings=""):
    """(tokens, state, ring, options): two sequences that stand at different places of their windows."""
    q, k, v, g, beta, state = kernel_oracle.make_inputs(
        3, kda=kda, b=2, t=3, h=1, hv=2, dk=12, dv=12 if length > 16 else 20
    )
    coded = ring_dtype == oracle.CODED
    k = k.float() if coded else k.to(ring_dtype)
    tokens = Tokens(q.float(), k, v.float(), g.float(), beta.float())
    tokens = oracle.with_key_codes(tokens) if coded else tokens
    options = Options(scale=0.3, state=SPECS[name], read_stored="stored" in settings, width=16 if coded else None)
    block = recurrent_pipeline.Call(tokens, options).width
    ring = oracle.make_ring(tokens, length, [min(1, length - 1), length - 1], ring_dtype, block)
    state = recurrent_oracle.entering_state(state.float(), options)
    if "feedback" in settings:
        state = oracle.with_lost(state)
    return tokens, state, ring, dataclasses.replace(options, state=DRAWN[name]) if "drawn" in settings else options


@pytest.mark.parametrize(
    ("kda", "name", "length", "ring_dtype", "settings"),
    [
        pytest.param(False, "e4m3-tile", 2, torch.bfloat16, "stored", marks=pytest.mark.slow),
        (True, "int8-key_row", 2, torch.float32, "feedback"),
        (False, "e4m3-tile", 2, torch.float32, "stored drawn"),
        pytest.param(True, "float32", 3, torch.bfloat16, "stored", marks=pytest.mark.slow),
        pytest.param(False, "e4m3-value_row", 17, torch.float32, "", marks=pytest.mark.slow),  # two blocks of the ring
        pytest.param(True, "int8-key_row", 3, torch.bfloat16, "drawn feedback", marks=pytest.mark.slow),
        pytest.param(False, "float16", 2, torch.float32, "stored feedback", marks=pytest.mark.slow),
        (False, "e4m3-tile", 2, oracle.CODED, "feedback"),
        pytest.param(True, "e4m3-value_row", 3, oracle.CODED, "stored", marks=pytest.mark.slow),
        pytest.param(True, "int8-key_row", 17, oracle.CODED, "drawn", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_forward_gradients_and_steps(kda, name, length, ring_dtype, settings):
    tokens, state, ring, options = call(kda, name, length, ring_dtype, settings)
    counters = oracle.make_counters(tokens, 2) if "drawn" in settings else None
    given = tokens, state, ring, options, poisoned_run
    whole = oracle.check_call(*given, bound=1e-5, gradient_bound=1e-4, counters=counters)
    o, last, entries = oracle.step_by_step(*given, counters)
    oracle.assert_equal("o", o, whole.o)
    oracle.assert_same(last, entries, whole.state, whole.ring)


def test_window_1_is_token_mode():
    tokens, state, ring, options = call(True, "e4m3-tile", 1)
    out = pipeline.forward(poisoned_run, tokens, state, ring, options)
    token_mode = recurrent_pipeline.forward(poisoned_run, recurrent_pipeline.Tokens(*tokens[:5]), state, options)
    assert torch.equal(out.o, token_mode.o)
    assert torch.equal(out.state.values, token_mode.state.values)
    assert torch.equal(out.state.scale, token_mode.state.scale)


def test_packed_sequences_have_the_bits_that_they_have_alone():
    _, state, ring, options = call(False, "e4m3-tile", 2)
    q, k, v, g, beta, _ = kernel_oracle.make_inputs(5, kda=False, b=1, t=5, h=1, hv=2, dk=12, dv=20)
    tokens = Tokens(*(x.float() for x in (q, k, v, g, beta)))
    oracle.check_bits_alone(tokens, state, ring, options, poisoned_run, ([1, 4], [3, 0]))
    drawn, counters = dataclasses.replace(options, state=DRAWN["e4m3-tile"]), oracle.make_counters(tokens, 2)
    for bounds in (([0, 3], [2, 2]), ([1, 5], [3, 0])):
        oracle.check_bits_alone(tokens, oracle.with_lost(state), ring, drawn, poisoned_run, bounds, counters)


def both_backends(policy, x, state, arrays):
    """((Output, gradients) of the kernels, (o, carry, gradients) of xla) of sum(o * o) / 2, through JAX.

    From a carry in which the two sequences stand at different places of their windows.
    """

    def decode(x, state, **settings):
        settings |= dict(scale=0.3, quant=policy, quant_arrays=arrays, backend="xla")
        return jlaqat.delta_rule_decode(**x, state=state, **settings)

    first = {key: a[:, :1] for key, a in x.items()}
    carry = decode(first, state, lengths=jnp.asarray([1, 0]))[1]
    x = {key: a[:, 1:] for key, a in x.items()}
    (o, after), pullback = jax.vjp(lambda x: decode(x, carry), x)
    gradients = pullback((o, jax.tree.map(jnp.zeros_like, after)))[0]
    tokens = (x["q"], round_keys(x["k"], policy), *(x[name] for name in ("v", "g", "beta")))
    kept = replay.kept_of(carry, counters_of(policy, carry.position, x["v"].shape[2], arrays))
    options = replay.replay_options(Target(80, ahead_of_time=False, portable=False), policy, 0.3)
    out = replay.launch_forward(run_from_jax, options, tokens, kept, Span(), True)
    given = tokens, kept, Span(), (out.r, out.r_scale, out.saved), out.o
    return (out, replay.launch_backward(run_from_jax, options, *given)), (o, after, gradients)


@pytest.mark.parametrize("gate", ["gdn", pytest.param("kda", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["e4m3-tile", *(pytest.param(n, marks=pytest.mark.slow) for n in list(DRAWN)[1:])])
def test_what_is_drawn_lost_and_kept_is_as_on_the_xla_backend(name, gate):
    """Codes differ only where sums in another order do; those of rounding to nearest differ often."""
    policy = DecodePolicy(
        state=DRAWN[name],
        mode="replay",
        window=2,
        readout="stored",
        factor_qdq=name == "e4m3-tile",
        error_feedback=name != "float16",
    )
    x = {key: jnp.asarray(a) for key, a in make_inputs(0, gate=gate, B=2, T=4, H=1, HV=2, K=6, V=20).items()}
    state = x.pop("initial_state")
    arrays = QuantArrays(step=jnp.uint32(2**32 - 2), layer=3, sequence_offset=7, head_offset=5)
    (out, gradients), (o, after, wanted) = both_backends(policy, x, state, arrays)
    assert_close(out.o, o, 1e-3, "o")
    for key, gradient in zip(("q", "k", "v", "g", "beta"), gradients):
        assert_close(gradient, wanted[key], 1e-3, f"d{key}")
    same = np.asarray(replay.as_stored(out.state, policy).values) == np.asarray(after.values)
    assert same.mean() > 0.99
    if policy.error_feedback:
        np.testing.assert_allclose(np.asarray(out.state.lost)[same], np.asarray(after.residual)[same], atol=1e-6)
    assert after.cursor.tolist() == [0, 1]
    for field, entries in replay.arrays_of(out.ring)._asdict().items():
        if entries is not None:
            entry, reference = (np.asarray(e[1, :1], np.float32) for e in (entries, getattr(after, f"ring_{field}")))
            assert np.isclose(entry, reference, rtol=1e-5, atol=1e-6).mean() > 0.95, field
    nearest = dataclasses.replace(policy, state=dataclasses.replace(policy.state, rounding="nearest"))
    plain = both_backends(nearest, x, state, arrays)[0][0]
    assert (np.asarray(plain.state.values) != np.asarray(out.state.values)).mean() > 0.1


def test_what_is_refused():
    tokens, state, ring, options = call(False, "e4m3-tile", 3)
    with pytest.raises(ValueError, match="k is float32 and the ring bfloat16"):
        pipeline.forward(poisoned_run, tokens, state, oracle.make_ring(tokens, 3, [0, 0], torch.bfloat16), options)
    with pytest.raises(ValueError, match="k is float32 and the ring bfloat16"):
        first = oracle.cut(tokens, 0, 1)
        pipeline.step(poisoned_run, first, state, oracle.make_ring(tokens, 3, [0, 0], torch.bfloat16), options)
    with pytest.raises(ValueError, match="ring.k has shape"):
        pipeline.forward(poisoned_run, tokens, state, ring._replace(k=ring.k[:, :, :, :8]), options)
    with pytest.raises(ValueError, match="give tokens.k_scale with codes"):
        pipeline.forward(poisoned_run, oracle.with_key_codes(tokens), state, ring, options)
    coded, _, codes, _ = call(False, "e4m3-value_row", 3, oracle.CODED)
    with pytest.raises(ValueError, match="ring.r_scale has shape .*the tokens ask for .2, 3, 2, 1."):
        pipeline.forward(poisoned_run, coded, state, codes, dataclasses.replace(options, state=None, width=32))
    with pytest.raises(ValueError, match="one token"):
        pipeline.step(poisoned_run, tokens, state, ring, options)
    with pytest.raises(ValueError, match="rounding is not stochastic; give counters there"):
        counters = oracle.make_counters(tokens, 2)
        pipeline.forward(poisoned_run, tokens, state, ring, options, counters=counters)
