"""Thirty runs of the same call give the same bits: no atomics, no race, no sum whose order depends on the schedule."""

import jax
import jax.numpy as jnp
import kernel_oracle as oracle
import numpy as np
import pytest
import torch
from kernel_checks import cast, hardware_fp8, run_kernels
from recurrent_oracle import entering_state
from replay_oracle import make_ring, step_by_step

import jlaqat
from jlaqat.kernels import recurrent_pipeline, replay_pipeline
from jlaqat.kernels.call import Options
from jlaqat.spec import DeltaQuant, QuantSpec
from jlaqat.testing import make_inputs
from jlaqat.torch_bridge.run import poisoned_run

RUNS = 30
HARDWARE = hardware_fp8()
QUANTS = {"plain": DeltaQuant(), "fp8": DeltaQuant(state=QuantSpec.fp8(), w=QuantSpec.fp8())}
# With enough heads to fill the GPU several times over, and with one long sequence of few.
SIZES = {"many": dict(b=8, t=512, h=16, hv=16), "few": dict(b=1, t=4096, h=2, hv=4)}


def bits(arrays):
    return [x.contiguous().view(torch.uint8).clone() for x in arrays if x is not None]


def assert_thirty_equal(run):
    first = [x for x in run() if x is not None]
    assert all(x.isfinite().all() for x in first)  # outputs are full of NaN beforehand
    first = bits(first)
    assert all(x.any() for x in first)
    for i in range(1, RUNS):
        for n, (x, y) in enumerate(zip(first, bits(run()), strict=True)):
            assert torch.equal(x, y), f"run {i}, array {n}: {(x != y).sum().item()} bytes differ"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("kda", [False, True], ids=["gdn", "kda"])
def test_chunked(kda, quant, size):
    given = cast(oracle.make_inputs(3, dk=128, dv=128, kda=kda, device="cuda", **SIZES[size]), torch.bfloat16)
    options = Options(scale=128**-0.5, quant=QUANTS[quant], hardware_fp8=HARDWARE)

    def run():
        out, gradients, *_ = run_kernels(given, options)
        return [out.o, out.final_state, *gradients]

    assert_thirty_equal(run)


def decoding_call(kda):
    """(tokens, entering state, options, cotangents of o and of the leaving state)"""
    q, k, v, g, beta, state = oracle.make_inputs(3, b=4, t=40, h=8, hv=16, dk=128, dv=128, kda=kda, device="cuda")
    tokens = recurrent_pipeline.Tokens(q.bfloat16(), k.bfloat16(), v.bfloat16(), g.float(), beta.bfloat16())
    options = recurrent_pipeline.Options(scale=0.1, state=QuantSpec.fp8(), hardware_fp8=HARDWARE)
    cotangents = torch.randn_like(tokens.v), torch.randn_like(state.float())
    return tokens, entering_state(state.float(), options), options, cotangents


@pytest.mark.parametrize("kda", [False, True], ids=["gdn", "kda"])
def test_decoding(kda):
    tokens, entering, options, cotangents = decoding_call(kda)

    def run():
        out = recurrent_pipeline.forward(poisoned_run, tokens, entering, options, stride=1)
        gradients = recurrent_pipeline.backward(poisoned_run, tokens, entering, out.saved, *cotangents, options)
        return [out.o, out.state.values, out.state.scale, *gradients]

    assert_thirty_equal(run)


@pytest.mark.parametrize("kda", [False, True], ids=["gdn", "kda"])
def test_replay(kda):
    """All tokens at once, forward and backward, and step by step."""
    tokens, entering, options, cotangents = decoding_call(kda)
    tokens = replay_pipeline.Tokens(*tokens)
    ring = make_ring(tokens, 16, [0, 5, 9, 15], torch.bfloat16)

    def kept(state, ring):
        used = (x[n, :cursor] for x in (ring.k, ring.r, ring.g) for n, cursor in enumerate(ring.cursor.tolist()))
        return [state.values, state.scale, ring.cursor, *used]

    def run():
        out = replay_pipeline.forward(poisoned_run, tokens, entering, ring, options, save=True)
        gradients = replay_pipeline.backward(poisoned_run, tokens, entering, ring, out, *cotangents, options)
        o, state, last = step_by_step(tokens, entering, ring, options, poisoned_run)
        return [out.o, out.r, *kept(out.state, out.ring), *gradients, o, *kept(state, last)]

    assert_thirty_equal(run)


@pytest.mark.parametrize("gate", ["gdn", "kda"])
def test_through_jax(gate):
    x = make_inputs(1, gate=gate, B=4, T=512, H=8, HV=16, K=128, V=128, dtype=jnp.bfloat16)
    x = {key: jnp.asarray(a) for key, a in x.items()}

    @jax.jit
    def run(x):
        def loss(x):
            o, final = jlaqat.delta_rule(**x, quant=QUANTS["fp8"], backend="triton")
            return (o.astype(jnp.float32) ** 2).sum() + final.sum(), o

        return jax.grad(loss, has_aux=True)(x)

    first = [np.asarray(a) for a in jax.tree.leaves(run(x))]
    for i in range(1, RUNS):
        for n, (a, b) in enumerate(zip(first, jax.tree.leaves(run(x)), strict=True)):
            assert a.tobytes() == np.asarray(b).tobytes(), f"run {i}, array {n}"
