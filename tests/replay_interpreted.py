"""The kernels of replay through Triton's interpreter. Run by test_kernels_interpret.py in a process of its own."""

import os
import sys

sys.path.insert(0, os.path.dirname(__file__))
os.environ["TRITON_INTERPRET"] = "1"

import kernel_oracle
import pytest
import recurrent_oracle
import replay_oracle as oracle
import torch
from recurrent_oracle import SMALL_SPECS as SPECS

from jlaqat.kernels import recurrent_pipeline
from jlaqat.kernels import replay_pipeline as pipeline
from jlaqat.kernels.recurrent_pipeline import Options, Tokens
from jlaqat.torch_bridge.run import poisoned_run


def call(kda, name, length, ring_dtype=torch.float32, read_stored=False):
    """(tokens, state, ring, options): two sequences that stand at different places of their windows."""
    q, k, v, g, beta, state = kernel_oracle.make_inputs(
        3, kda=kda, b=2, t=3, h=1, hv=2, dk=12, dv=12 if length > 16 else 20
    )
    tokens = Tokens(q.float(), k.to(ring_dtype), v.float(), g.float(), beta.float())
    options = Options(scale=0.3, state=SPECS[name], read_stored=read_stored)
    ring = oracle.make_ring(tokens, length, [min(1, length - 1), length - 1], ring_dtype)
    return tokens, recurrent_oracle.entering_state(state.float(), options), ring, options


@pytest.mark.parametrize(
    ("kda", "name", "length", "ring_dtype", "read_stored"),
    [
        pytest.param(False, "e4m3-tile", 2, torch.bfloat16, True, marks=pytest.mark.slow),
        (True, "int8-key_row", 2, torch.float32, False),
        pytest.param(True, "float32", 3, torch.bfloat16, True, marks=pytest.mark.slow),
        pytest.param(
            False, "e4m3-value_row", 17, torch.float32, False, marks=pytest.mark.slow
        ),  # two blocks of the ring
    ],
    ids=str,
)
def test_forward_gradients_and_steps(kda, name, length, ring_dtype, read_stored):
    tokens, state, ring, options = call(kda, name, length, ring_dtype, read_stored)
    whole = oracle.check_call(tokens, state, ring, options, poisoned_run, bound=1e-5, gradient_bound=1e-4)
    o, last, entries = oracle.step_by_step(tokens, state, ring, options, poisoned_run)
    assert torch.equal(o, whole.o)
    oracle.assert_same(last, entries, whole.state, whole.ring)


def test_window_1_is_token_mode():
    tokens, state, ring, options = call(True, "e4m3-tile", 1)
    out = pipeline.forward(poisoned_run, tokens, state, ring, options)
    token_mode = recurrent_pipeline.forward(poisoned_run, tokens, state, options)
    assert torch.equal(out.o, token_mode.o)
    assert torch.equal(out.state.values, token_mode.state.values)
    assert torch.equal(out.state.scale, token_mode.state.scale)


def test_packed_sequences_have_the_bits_that_they_have_alone():
    _, state, ring, options = call(False, "e4m3-tile", 2)
    q, k, v, g, beta, _ = kernel_oracle.make_inputs(5, kda=False, b=1, t=5, h=1, hv=2, dk=12, dv=20)
    tokens = Tokens(*(x.float() for x in (q, k, v, g, beta)))
    oracle.check_bits_alone(tokens, state, ring, options, poisoned_run, ([1, 4], [3, 0]))
    oracle.check_bits_alone(tokens, state, ring, options, poisoned_run, ([0, 3], [2, 2]))


def test_what_is_refused():
    tokens, state, ring, options = call(False, "e4m3-tile", 3)
    with pytest.raises(ValueError, match="k is float32 and the ring bfloat16"):
        pipeline.forward(poisoned_run, tokens, state, oracle.make_ring(tokens, 3, [0, 0], torch.bfloat16), options)
    with pytest.raises(ValueError, match="ring.k has shape"):
        pipeline.forward(poisoned_run, tokens, state, ring._replace(k=ring.k[:, :, :, :8]), options)
    with pytest.raises(ValueError, match="one token"):
        pipeline.step(poisoned_run, tokens, state, ring, options)
