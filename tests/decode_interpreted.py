"""Spans of tokens through Triton's interpreter, with JAX around it. Run by test_kernels_interpret.py in a process.

A launch leaves JAX for the interpreter and comes back, so everything runs eagerly. Segments have 3 tokens here, not 64.
"""

import dataclasses
import functools
import os
import sys

sys.path.insert(0, os.path.dirname(__file__))
os.environ["TRITON_INTERPRET"] = "1"

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from spans_oracle import Case, both_directions, check_bits_alone

from jlaqat import DecodePolicy, QuantArrays, QuantSpec, decode_triton
from jlaqat.chunked import Inputs
from jlaqat.decode_carry import Memory, write
from jlaqat.decode_counters import counters_of
from jlaqat.decode_scan import Span, decode_scan
from jlaqat.kernels.recurrent_pipeline import Options
from jlaqat.sites import Place
from jlaqat.testing import make_inputs
from jlaqat.torch_bridge.run import poisoned_run


def run(launch):
    """A Launch of JAX arrays; its outputs are full of NaN beforehand."""
    inputs = {name: torch.from_numpy(np.array(x)) for name, x in launch.inputs.items()}
    outputs = poisoned_run(type(launch)(**{**vars(launch), "inputs": inputs}))
    return {name: jnp.asarray(x.numpy()) for name, x in outputs.items()}


TILE, KEY_ROW = QuantSpec.fp8(block_v=16), QuantSpec.int8(granularity="key_row")
FLOAT16 = QuantSpec.float16(rounding="stochastic")
DRAWN = QuantSpec.fp8(block_v=16, rounding="stochastic", seed=5)
CASES = {
    "batch": (1, TILE, False, Case(None, dict(start=[2, 0, 7], stop=[6, 1, 7]), [(0, 2, 6), (1, 0, 1), (2, 7, 7)])),
    "packed": (2, KEY_ROW, True, Case([0, 5, 5, 7], dict(start=[1, 0, 1]), [(0, 1, 5), (0, 5, 5), (0, 6, 7)])),
    "stacked": (1, DRAWN, False, Case([0, 4, 7, 0, 1, 1], {}, [(0, 0, 4), (0, 4, 7), (1, 0, 1), (1, 1, 1)])),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == "packed" else pytest.mark.slow) for n in CASES])
def test_a_sequence_has_the_bits_that_it_has_alone(name):
    heads, spec, kda, case = CASES[name]
    options = Options(scale=0.3, state=spec, read_stored=kda)
    with jax.disable_jit():
        call = functools.partial(both_directions, run, options)
        sizes = dict(T=7, H=1, HV=heads, K=5, V=16)
        check_bits_alone(call, options, case, every=3, kda=kda, feedback=name != "packed", **sizes)


INT8 = QuantSpec.int8(granularity="key_row", rounding="stochastic")


@pytest.mark.parametrize(
    "spec", [DRAWN, *(pytest.param(s, marks=pytest.mark.slow) for s in (INT8, FLOAT16))], ids=lambda spec: spec.format
)
def test_stochastic_rounding_draws_what_the_xla_backend_draws(spec):
    """Codes differ only where sums in another order do; those of rounding to nearest differ often."""
    policy, V = DecodePolicy(state=spec, error_feedback=spec.format == "int8"), 16 if spec is DRAWN else 10
    x = {key: jnp.asarray(a) for key, a in make_inputs(0, B=2, T=3, H=1, HV=2, K=6, V=V).items()}
    arrays = QuantArrays(step=jnp.uint32(2**32 - 2), layer=3, sequence_offset=7, head_offset=5)
    inputs, position = Inputs(**x), jnp.asarray([4, 0], jnp.int32)
    lost = jnp.zeros_like(inputs.initial_state) if policy.error_feedback else None
    S, stored, lost = write(inputs.initial_state, lost, policy, Place(jnp.arange(2), position), arrays)
    memory = Memory(S, stored, None, lost, position, position)
    _, wanted = decode_scan(policy, 0.3, inputs._replace(initial_state=S), memory, Span(), arrays)

    def after(policy, counters):
        entering = decode_triton.Entering(stored, lost, counters)
        options = Options(scale=0.3, state=policy.state)
        state = decode_triton.launch_forward(run, options, inputs[:5], entering, Span(), None)[1]
        return np.asarray(decode_triton.as_stored(state, policy).values, np.float32), state.lost

    drawn, lost_then = after(policy, counters_of(policy, position, 2, arrays))
    nearest, _ = after(DecodePolicy(state=dataclasses.replace(spec, rounding="nearest")), None)
    reference = np.asarray(wanted.stored.values, np.float32)
    same = drawn == reference
    assert same.mean() > 0.99
    if lost is not None:
        np.testing.assert_allclose(np.asarray(lost_then)[same], np.asarray(wanted.residual)[same], atol=1e-6)
    assert (drawn != nearest).mean() > 0.1
