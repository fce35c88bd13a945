"""Replay on a GPU: the kernels against float64, equal bits of steps and calls and of token mode, of PyTorch and JAX."""

import dataclasses

import jax
import jax.numpy as jnp
import kernel_oracle
import numpy as np
import pytest
import replay_oracle as oracle
import torch
from kernel_checks import hardware_fp8
from recurrent_oracle import SPECS, entering_state

import jlaqat
from jlaqat import DecodePolicy, QuantSpec
from jlaqat.kernels import recurrent_pipeline
from jlaqat.kernels import replay_pipeline as pipeline
from jlaqat.kernels.recurrent_pipeline import Options
from jlaqat.kernels.replay_pipeline import Tokens
from jlaqat.testing import assert_close, make_inputs
from jlaqat.torch_bridge.run import poisoned_run

HARDWARE = hardware_fp8()


def call(kda, name, length, ring_dtype=torch.bfloat16, read_stored=False, dtype=torch.bfloat16, **sizes):
    """(tokens, state, ring, options): sequences at the start, in the middle and at the end of a window."""
    shapes = dict(b=3, t=40, h=2, hv=4, dk=128, dv=128) | sizes
    q, k, v, g, beta, state = kernel_oracle.make_inputs(3, kda=kda, device="cuda", **shapes)
    coded = ring_dtype == oracle.CODED
    tokens = Tokens(q.to(dtype), k.float() if coded else k.to(ring_dtype), v.to(dtype), g.float(), beta.to(dtype))
    tokens = oracle.with_key_codes(tokens) if coded else tokens
    width = 64 if coded else None
    options = Options(scale=0.1, state=SPECS[name], read_stored=read_stored, hardware_fp8=HARDWARE, width=width)
    cursors = [0, min(2, length - 1), length - 1][: shapes["b"]]
    ring = oracle.make_ring(tokens, length, cursors, ring_dtype, recurrent_pipeline.Call(tokens, options).width)
    return tokens, entering_state(state.float(), options), ring, options


def check(tokens, state, ring, options, bound=0.005, gradient_bound=0.008):
    """Values and gradients; then the same bits a token at a time and cut in two."""
    drawn = options.state is not None and options.state.rounding == "stochastic"
    counters = oracle.make_counters(tokens, len(ring.cursor)) if drawn else None
    given, bounds = (tokens, state, ring, options, poisoned_run), dict(bound=bound, gradient_bound=gradient_bound)
    whole = oracle.check_call(*given, counters=counters, **bounds)
    o, last, entries = oracle.step_by_step(*given, counters)
    with oracle.said_about("a token at a time"):
        oracle.assert_equal("o", o, whole.o)
        oracle.assert_same(last, entries, whole.state, whole.ring)
    head = pipeline.forward(poisoned_run, oracle.cut(tokens, 0, 5), state, ring, options, counters=counters)
    rest, later = oracle.cut(tokens, 5, tokens.q.shape[1]), oracle.after(counters, 5)
    tail = pipeline.forward(poisoned_run, rest, head.state, head.ring, options, counters=later)
    with oracle.said_about("cut in two"):
        oracle.assert_equal("o", torch.cat([head.o, tail.o], 1), whole.o)
        oracle.assert_same(tail.state, tail.ring, whole.state, whole.ring)
    return whole


@pytest.mark.parametrize("kda", [False, True], ids=["gdn", "kda"])
@pytest.mark.parametrize("name", SPECS)
def test_forward_gradients_and_steps(name, kda):
    check(*call(kda, name, 16, read_stored=kda))


def stochastic(options):
    return dataclasses.replace(options, state=dataclasses.replace(options.state, rounding="stochastic", seed=3))


@pytest.mark.parametrize("kda", [False, True], ids=["gdn", "kda"])
@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if spec])
def test_stochastic_rounding(name, kda):
    """What is drawn: `test_replay_through_jax`."""
    tokens, state, ring, options = call(kda, name, 8, read_stored=kda)
    check(tokens, state, ring, stochastic(options))


@pytest.mark.parametrize("kda", [False, True], ids=["gdn", "kda"])
@pytest.mark.parametrize("name", SPECS)
def test_rounded_factors(name, kda):
    check(*call(kda, name, 8, oracle.CODED, read_stored=kda))


@pytest.mark.parametrize("kda", [False, True], ids=["gdn", "kda"])
@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if spec])
def test_error_feedback(name, kda):
    tokens, state, ring, options = call(kda, name, 8, read_stored=kda)
    check(tokens, oracle.with_lost(state), ring, options)


@pytest.mark.parametrize(
    ("name", "length", "ring_dtype", "sizes"),
    [
        ("e4m3-tile", 64, torch.float32, dict(t=80)),
        ("int8-key_row", 8, torch.float32, dict(dk=60, dv=100, hv=2)),
        ("e4m3-value_row", 20, torch.bfloat16, dict(dk=256, dv=256, t=24)),
        ("e4m3-tile", 20, oracle.CODED, dict(dk=60, dv=100, hv=2)),
    ],
    ids=str,
)
def test_other_windows_and_sizes(name, length, ring_dtype, sizes):
    check(*call(False, name, length, ring_dtype, dtype=torch.float32, **sizes), bound=1e-5, gradient_bound=1e-4)


@pytest.mark.parametrize("kda", [False, True], ids=["gdn", "kda"])
def test_packed_sequences_have_the_bits_that_they_have_alone(kda):
    _, state, ring, options = call(kda, "e4m3-tile", 8)
    tokens, _, _, _ = call(kda, "e4m3-tile", 8, b=1, t=60)
    oracle.check_bits_alone(tokens, state, ring, options, poisoned_run, ([2, 31, 60], [29, 20, 0]))
    options, counters, state = stochastic(options), oracle.make_counters(tokens, 3), oracle.with_lost(state)
    oracle.check_bits_alone(tokens, state, ring, options, poisoned_run, ([2, 31, 60], [29, 20, 0]), counters)


@pytest.mark.parametrize("kda", [False, True], ids=["gdn", "kda"])
@pytest.mark.parametrize("name", ["e4m3-tile", "int8-key_row", "float32"])
def test_window_1_is_token_mode(name, kda):
    tokens, state, ring, options = call(kda, name, 1, torch.float32)
    out = pipeline.forward(poisoned_run, tokens, state, ring, options)
    token_mode = recurrent_pipeline.forward(poisoned_run, recurrent_pipeline.Tokens(*tokens[:5]), state, options)
    assert torch.equal(out.o, token_mode.o)
    assert torch.equal(out.state.values, token_mode.state.values)
    assert out.state.scale is None or torch.equal(out.state.scale, token_mode.state.scale)


POLICIES = {
    "serving": DecodePolicy.preset("serving"),
    "fp8": DecodePolicy(state=QuantSpec.fp8(), mode="replay", window=16, readout="stored"),
    "float32": DecodePolicy(mode="replay", window=5),
    "drawn": DecodePolicy(state=QuantSpec.fp8(rounding="stochastic", seed=3), mode="replay", window=8),
    "factors": DecodePolicy(state=QuantSpec.fp8(), mode="replay", window=8, factor_qdq=True),
    "feedback": DecodePolicy(state=QuantSpec.int8(block_v=32), mode="replay", window=8, error_feedback=True),
}


@pytest.mark.parametrize("gate", ["gdn", "kda"])
@pytest.mark.parametrize("name", POLICIES)
def test_replay_through_jax(name, gate):
    """Bits of one call and of a scan of steps; gradients near the xla backend's, where rounding falls as it may."""
    x = make_inputs(1, gate=gate, B=2, T=70, H=2, HV=4, K=64, V=64)
    x = {key: jnp.asarray(a) for key, a in x.items()}
    state, policy = x.pop("initial_state"), POLICIES[name]
    weights = jnp.asarray(np.random.default_rng(0).normal(size=x["v"].shape), jnp.float32)

    def call(x, state, backend):
        return jlaqat.delta_rule_decode(**x, state=state, quant=policy, backend=backend)

    def loss(x, state, backend):
        return (call(x, state, backend)[0] * weights).sum()

    run, gradient = jax.jit(call, static_argnums=2), jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)
    o, carry = run(x, state, "triton")
    o_xla, carry_xla = run(x, state, "xla")
    bound = 1e-5 if name == "float32" else 0.05
    assert_close(o, o_xla, bound, "o")
    assert_close(carry.state(), carry_xla.state(), bound, "state")
    assert np.array_equal(carry.cursor, carry_xla.cursor) and np.array_equal(carry.position, carry_xla.position)
    for got, wanted in zip(*(jax.tree.leaves(gradient(x, state, b)) for b in ("triton", "xla"))):
        assert_close(got, wanted, bound, "gradient")

    def step(carry, row):
        o, carry = jlaqat.delta_rule_step(*row, carry, quant=policy)
        return carry, o

    rows = [jnp.moveaxis(x[key], 1, 0) for key in ("q", "k", "v", "g", "beta")]
    start = call({key: a[:, :0] for key, a in x.items()}, state, "triton")[1]
    end, o_steps = jax.jit(lambda start, rows: jax.lax.scan(step, start, rows))(start, rows)
    np.testing.assert_array_equal(jnp.moveaxis(o_steps, 0, 1), o, "o of steps")
    for name, a in vars(end).items():
        if name.startswith("ring") and a is not None:  # past the cursor a ring holds what it may
            used = (jnp.arange(a.shape[1]) < end.cursor[0]).reshape(1, -1, *[1] * (a.ndim - 2))
            a, b = (jnp.where(used, y.astype(jnp.float32), 0) for y in (a, getattr(carry, name)))
            np.testing.assert_array_equal(a, b, name)
        elif name != "policy" and a is not None:
            np.testing.assert_array_equal(a, getattr(carry, name), name)
