"""The recurrence kernels through Triton's interpreter. Run by test_kernels_interpret.py in a process of its own.

The states are compared with an exact replay in float64 that is given the kernel's own rounded states, so that a code
that fell to the other side of a tie does not hide other errors; the rounding itself is compared code by code.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(__file__))
os.environ["TRITON_INTERPRET"] = "1"

import kernel_oracle as oracle
import pytest
import torch
from recurrent_oracle import SMALL_SPECS as SPECS
from recurrent_oracle import at_slot, check_call, entering_state, step_by_step

from jlaqat.kernels import recurrent_pipeline as pipeline
from jlaqat.kernels.call import UnsupportedByKernels
from jlaqat.spec import QuantSpec
from jlaqat.torch_bridge.run import poisoned_run


def tokens_of(kda, seed=3, dtype=torch.float32, **sizes):
    shapes = dict(b=1, t=5, h=1, hv=2, dk=12, dv=40) | sizes
    q, k, v, g, beta, state = oracle.make_inputs(seed, kda=kda, **shapes)
    q, k, v, beta = (x.to(dtype) for x in (q, k, v, beta))
    return pipeline.Tokens(q, k, v, g.float(), beta), state.float()


@pytest.mark.parametrize("name", SPECS)
def test_forward_and_gradients(name):
    tokens, state = tokens_of(kda=name in ("float32", "int8-key_row"))
    options = pipeline.Options(scale=0.3, state=SPECS[name], read_stored=name != "e4m3-tile")
    check_call(tokens, state, options, poisoned_run, bound=1e-5, gradient_bound=1e-4)


@pytest.mark.parametrize("name", ["e4m3-tile", "int8-key_row"])
def test_a_step_at_a_time_gives_the_same_bits(name):
    tokens, state = tokens_of(kda=False)
    options = pipeline.Options(scale=0.3, state=SPECS[name])
    entering = entering_state(state, options)
    whole = pipeline.forward(poisoned_run, tokens, entering, options, stride=2)
    o, last, between = step_by_step(tokens, entering, options, poisoned_run)
    assert torch.equal(o, whole.o)
    assert torch.equal(last.values, whole.state.values) and torch.equal(last.scale, whole.state.scale)
    for saved in range(2):
        assert torch.equal(between[2 * saved + 1].values, whole.saved.values[:, saved])
        assert torch.equal(between[2 * saved + 1].scale, whole.saved.scale[:, saved])
    # A segment from a saved state.
    rest = pipeline.Tokens(*(x[:, 4:].contiguous() for x in tokens))
    again = pipeline.forward(poisoned_run, rest, at_slot(whole.saved, 1), options)
    assert torch.equal(again.o, whole.o[:, 4:]) and torch.equal(again.state.values, whole.state.values)


def test_what_the_kernels_refuse():
    tokens, state = tokens_of(kda=False)
    for spec, word in [
        (QuantSpec.nvfp4(), "nvfp4"),
        (QuantSpec.fp8(granularity="head"), "head"),
        (QuantSpec.int8(rounding="half_away"), "stochastically"),
    ]:
        with pytest.raises(UnsupportedByKernels, match=word):
            pipeline.forward(poisoned_run, tokens, pipeline.State(state, None), pipeline.Options(scale=1.0, state=spec))
    options = pipeline.Options(scale=1.0, state=QuantSpec.fp8(rounding="stochastic"))
    with pytest.raises(ValueError, match="give counters"):
        pipeline.forward(poisoned_run, tokens, pipeline.State(state, None), options)
