"""Reported cases that decode, or that layers own, on a GPU: 4, 12, 15, 17 and 18. The others: test_ops_triton.py."""

import functools
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import kernel_oracle
import numpy as np
import pytest
import recurrent_oracle
from flax import nnx
from kernel_checks import hardware_fp8

import jlaqat
from jlaqat import DecodePolicy, QuantSpec
from jlaqat.kernels.recurrent_pipeline import Options, Tokens
from jlaqat.layers import init_decay_rate
from jlaqat.testing import assert_close, make_inputs
from jlaqat.torch_bridge.run import poisoned_run

BENCHMARKS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import decode_drift  # noqa: E402 (benchmarks are no package)

TOKENS = ("q", "k", "v", "g", "beta")
over_gates = pytest.mark.parametrize("gate", ["gdn", "kda"])


@functools.partial(jax.jit, static_argnums=1)
def decode(x, policy):
    return jlaqat.delta_rule_decode(**x, quant=policy, backend="triton")


@functools.partial(jax.jit, static_argnums=1)
def decode_by_steps(x, policy):
    """(o, the last state) of `delta_rule_step` token after token, in a scan."""

    def step(carry, row):
        o, carry = jlaqat.delta_rule_step(*row, carry, quant=policy)
        return carry, o

    carry = decode({name: a if name == "state" else a[:, :0] for name, a in x.items()}, policy)[1]
    carry, o = jax.lax.scan(step, carry, [jnp.moveaxis(x[name], 1, 0) for name in TOKENS])
    return jnp.moveaxis(o, 0, 1), carry.state()


# ------------------------------------------------------------------ 4: B 2,100 and H 32

MANY = dict(b=2100, t=3, h=32, hv=32, dk=16, dv=16)  # 67,200 programs: an axis y or z of a grid has 65,535


def many_sequences(gate):
    sizes = {name.upper(): size for name, size in MANY.items() if name in "bth"} | dict(K=16, V=16)
    x = {name: jnp.asarray(a) for name, a in make_inputs(4, gate=gate, **sizes).items()}
    return {"state" if name == "initial_state" else name: a for name, a in x.items()}


@over_gates
@pytest.mark.parametrize("spec", [None, QuantSpec.fp8(block_v=16)], ids=["float32", "fp8"])
def test_case_4_token_by_token(gate, spec):
    """Values, roundings and gradients against float64."""
    given = kernel_oracle.make_inputs(4, kda=gate == "kda", device="cuda", **MANY)
    *tokens, state = (x.float() for x in given)
    options = Options(scale=0.25, state=spec, read_stored=gate == "kda", hardware_fp8=hardware_fp8())
    recurrent_oracle.check_call(Tokens(*tokens), state, options, poisoned_run, bound=1e-5, gradient_bound=1e-4)


@over_gates
def test_case_4_replay(gate):
    """Values and gradients near the xla backend's."""
    x, policy = many_sequences(gate), DecodePolicy(mode="replay", window=2)
    weights = jnp.asarray(np.random.default_rng(0).normal(size=x["v"].shape), jnp.float32)

    def loss(x, backend):
        o, carry = jlaqat.delta_rule_decode(**x, quant=policy, backend=backend)
        return (o * weights).sum(), (o, carry.state())

    gradient = jax.jit(jax.grad(loss, has_aux=True), static_argnums=1)
    (got, results), (wanted, exact) = (gradient(x, backend) for backend in ("triton", "xla"))
    for a, b in zip(results, exact, strict=True):
        assert_close(a, b, 1e-5)
    for name in x:
        assert_close(got[name], wanted[name], 1e-4, name)


@over_gates
@pytest.mark.parametrize("mode", ["token", "replay"])
def test_case_4_steps_and_the_last_sequences_alone(mode, gate):
    """Through JAX, rounded: the bits of one call of three tokens."""
    window = {"window": 2} if mode == "replay" else {}
    policy = DecodePolicy(state=QuantSpec.fp8(block_v=16), mode=mode, **window)
    x = many_sequences(gate)
    o, carry = decode(x, policy)
    assert jnp.isfinite(o).all() and jnp.isfinite(carry.state()).all()
    for got, wanted in zip(decode_by_steps(x, policy), (o, carry.state()), strict=True):
        assert jnp.array_equal(got, wanted)
    alone, alone_carry = decode({name: a[-3:] for name, a in x.items()}, policy)
    assert jnp.array_equal(alone, o[-3:]) and jnp.array_equal(alone_carry.state(), carry.state()[-3:])


# ------------------------------------------------------------------ 12 and 15: layers


def test_case_12_decay_rates_are_finite_for_10000_seeds():
    draw = jax.jit(jax.vmap(lambda seed: init_decay_rate(jax.random.key(seed), 16, 0.0)))
    a_log = draw(jnp.arange(10_000))
    assert a_log.devices() == {jax.devices()[0]} and jax.devices()[0].platform == "gpu"
    assert a_log.dtype == jnp.float32 and jnp.isfinite(a_log).all()


@pytest.mark.parametrize("layer", ["GatedDeltaNet", "KimiDeltaAttention"])
def test_case_15_a_mask_and_cu_seqlens_together_are_refused(layer):
    made = getattr(jlaqat, layer)(64, head_dim=32, num_heads=2, backend="triton", rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="mask and cu_seqlens were both given"):
        made(jnp.ones((1, 20, 64)), cu_seqlens=jnp.array([0, 20]), mask=jnp.ones((1, 20)))


# ------------------------------------------------------------------ 17: a step by hand


@pytest.mark.parametrize("policy", [DecodePolicy(), DecodePolicy(mode="replay", window=4)], ids=["token", "replay"])
def test_case_17_a_step_by_hand(policy):
    """One channel of 16, the numbers of test_ops_triton.py: S 2 → 1; error 2.5; S 2; o = 0.5·2·4."""
    one, gate = jnp.eye(1, 16)[None], jnp.ones((1, 1))
    state = jnp.zeros((1, 1, 16, 16)).at[0, 0, 0, 0].set(2.0)
    step = jax.jit(lambda *x: jlaqat.delta_rule_step(*x, scale=0.5, quant=policy))
    o, carry = step(4 * one, 0.5 * one, 3 * one, jnp.log(0.5) * gate, 0.8 * gate, state)
    assert np.allclose(o, 4 * one, rtol=1e-5, atol=1e-6)
    assert np.allclose(carry.state(), state, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------ 18: 4,000 steps

DRIFTS = ["E4M3, value rows (vllm_fp8)", "INT8, value rows (vllm_int8)", "INT8, key rows × 32, replay 8 (serving)"]


@pytest.mark.parametrize("name", DRIFTS)
def test_case_18_drift_over_4000_steps(name, record_property):
    """Steps drift as benchmarks/decode_drift.py recorded it on a CPU: each 100 tokens' error within 10 %."""
    policy = decode_drift.POLICIES[name]
    x = {key: jnp.asarray(a) for key, a in decode_drift.inputs("forgets").items()}
    o, final = decode_by_steps(x, policy)
    o_call, carry = decode(x, policy)
    assert jnp.array_equal(o, o_call) and jnp.array_equal(final, carry.state())
    exact = decode(x, DecodePolicy())[0]
    windows = [np.asarray(a, np.float64).reshape(-1, decode_drift.WINDOW, *a.shape[2:]) for a in (o, exact)]
    curve = decode_drift.relative(*windows, axes=(1, 2, 3))
    record_property("drift", [float(f"{e:.4g}") for e in curve])
    print(name, [f"{e:.4g}" for e in curve])
    recorded = json.loads((BENCHMARKS / "results" / "decode_drift.json").read_text())["policies"][name]["forgets"]
    np.testing.assert_allclose(curve, recorded["outputs"], rtol=0.1)
