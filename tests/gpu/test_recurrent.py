"""Decoding on a GPU: the recurrence kernels against float64, equal bits of steps and calls, of PyTorch and JAX."""

import jax
import jax.numpy as jnp
import kernel_oracle as oracle
import numpy as np
import pytest
import torch
from kernel_checks import hardware_fp8
from recurrent_oracle import SPECS, at_slot, check_call, entering_state, step_by_step

import jlaqat
from jlaqat import DecodePolicy, QuantSpec
from jlaqat.kernels import recurrent_pipeline as pipeline
from jlaqat.testing import assert_close, make_inputs
from jlaqat.torch_bridge.run import poisoned_run

HARDWARE = hardware_fp8()


def tokens_of(kda, dtype=torch.bfloat16, **sizes):
    shapes = dict(b=2, t=70, h=2, hv=4, dk=128, dv=128) | sizes
    q, k, v, g, beta, state = oracle.make_inputs(3, kda=kda, device="cuda", **shapes)
    return pipeline.Tokens(*(x.to(dtype) for x in (q, k, v)), g.float(), beta.to(dtype)), state.float()


@pytest.mark.parametrize("kda", [False, True], ids=["gdn", "kda"])
@pytest.mark.parametrize("name", SPECS)
def test_forward_and_gradients(name, kda):
    tokens, state = tokens_of(kda)
    options = pipeline.Options(scale=0.1, state=SPECS[name], read_stored=kda, hardware_fp8=HARDWARE)
    check_call(tokens, state, options, poisoned_run, bound=0.005, gradient_bound=0.008)


@pytest.mark.parametrize(
    "sizes", [dict(dk=60, dv=100, hv=2), dict(dk=256, dv=64, t=9), dict(dk=16, dv=512, t=9)], ids=str
)
def test_other_sizes_in_float32(sizes):
    tokens, state = tokens_of(False, torch.float32, **sizes)
    options = pipeline.Options(scale=0.1, state=QuantSpec.fp8(block_v=32), hardware_fp8=HARDWARE)
    check_call(tokens, state, options, poisoned_run, bound=1e-5, gradient_bound=1e-4)


@pytest.mark.parametrize("kda", [False, True], ids=["gdn", "kda"])
@pytest.mark.parametrize("name", ["e4m3-tile", "int8-key_row", "e4m3-value_row", "float16", "float32"])
def test_steps_segments_and_arithmetic_give_the_same_bits(name, kda):
    tokens, state = tokens_of(kda)
    options = pipeline.Options(scale=0.1, state=SPECS[name], hardware_fp8=HARDWARE)
    entering = entering_state(state, options)
    whole = pipeline.forward(poisoned_run, tokens, entering, options, stride=32)
    o, last, _ = step_by_step(tokens, entering, options, poisoned_run)
    assert torch.equal(o, whole.o) and torch.equal(last.values, whole.state.values)
    rest = pipeline.Tokens(*(x[:, 64:].contiguous() for x in tokens))
    again = pipeline.forward(poisoned_run, rest, at_slot(whole.saved, 1), options, stride=1)
    assert torch.equal(again.o, whole.o[:, 64:]) and torch.equal(again.state.values, whole.state.values)
    arithmetic = pipeline.Options(scale=0.1, state=SPECS[name], hardware_fp8=False)
    assert torch.equal(pipeline.forward(poisoned_run, tokens, entering, arithmetic).o, whole.o)


POLICIES = {
    "fp8": DecodePolicy(state=QuantSpec.fp8()),
    "int8": DecodePolicy(state=QuantSpec.int8(granularity="key_row"), readout="stored"),
    "float32": DecodePolicy(),
}


@pytest.mark.parametrize("gate", ["gdn", "kda"])
@pytest.mark.parametrize("name", POLICIES)
def test_decode_through_jax(name, gate):
    """Bits of one call and of steps; gradients near the xla backend's, where rounding falls as it may at last bits."""
    x = make_inputs(1, gate=gate, B=2, T=130, H=2, HV=4, K=64, V=64)
    x = {key: jnp.asarray(a) for key, a in x.items()}
    state, policy = x.pop("initial_state"), POLICIES[name]

    def call(x, state, backend):
        o, carry = jlaqat.delta_rule_decode(**x, state=state, quant=policy, backend=backend)
        return o, carry.state()

    def loss(x, state, backend):
        o, final = call(x, state, backend)
        return (o * weights).sum()

    weights = jnp.asarray(np.random.default_rng(0).normal(size=x["v"].shape), jnp.float32)
    run, gradient = jax.jit(call, static_argnums=2), jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)
    o, final = run(x, state, "triton")
    bound = 1e-5 if name == "float32" else 0.05
    for got, wanted in zip((o, final), run(x, state, "xla")):
        assert_close(got, wanted, bound, "forward")
    for got, wanted in zip(*(jax.tree.leaves(gradient(x, state, b)) for b in ("triton", "xla"))):
        assert_close(got, wanted, bound, "gradient")
    step = jax.jit(lambda row, carry: jlaqat.delta_rule_step(*row, carry, quant=policy))
    carry = jlaqat.delta_rule_decode(**{key: a[:, :0] for key, a in x.items()}, state=state, quant=policy)[1]
    for t in range(3):
        row_o, carry = step([x[key][:, t] for key in ("q", "k", "v", "g", "beta")], carry)
        assert np.array_equal(row_o, o[:, t])
    rest = {key: a[:, 3:] for key, a in x.items()}
    o_rest, end = jax.jit(lambda x, c: jlaqat.delta_rule_decode(**x, state=c, quant=policy))(rest, carry)
    assert np.array_equal(o_rest, o[:, 3:]) and np.array_equal(end.state(), final)
