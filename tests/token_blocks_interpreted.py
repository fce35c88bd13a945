"""Gradients of token mode by blocks, by Triton's interpreter: run by test_kernels_interpret.py in another process."""

import os
import sys

sys.path.insert(0, os.path.dirname(__file__))
os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch
from recurrent_interpreted import tokens_of
from recurrent_oracle import SPECS, decoded, definition, entering_state, ratio

from jlaqat.kernels import block_pipeline, recurrent_gradients
from jlaqat.kernels import recurrent_pipeline as pipeline
from jlaqat.spec import QuantSpec
from jlaqat.torch_bridge.run import poisoned_run

# 16 bits of two parts, or float16's 11.
BOUNDS = {"q": 5e-4, "k": 5e-4, "g": 5e-4, "v": 1e-4, "beta": 1e-4, "state": 1e-4}


def forward(tokens, state, spec, read_stored=False):
    options = pipeline.Options(scale=0.3, state=spec, read_stored=read_stored)
    entering = entering_state(state, options)
    return options, entering, pipeline.forward(poisoned_run, tokens, entering, options, stride=1).saved


def cotangents(tokens, state):
    gen = torch.Generator().manual_seed(5)
    do = torch.randn(tokens.v.shape, generator=gen).bfloat16()
    return do, torch.randn(state.shape, generator=gen)


def in_float32(tokens, entering, saved, do, ds, options, bounds=None):
    """Gradients before any is rounded to bfloat16."""
    call, out = block_pipeline.launch(
        poisoned_run, pipeline.Call(tokens, options, bounds), entering, saved, do, ds, "float32"
    )
    return recurrent_gradients.gather(poisoned_run, call, out)


def wanted(tokens, entering, saved, do, ds, options):
    """In float64, straight through the kernel's own states."""
    v = tokens.v.shape[3]
    exact = [x.detach().double().requires_grad_() for x in (*tokens, decoded(entering, options, v))]
    states = decoded(saved, options, v).double()
    o, _, final = definition(*exact, states, options.scale, options.read_stored)
    return torch.autograd.grad((o * do.double()).sum() + (final * ds.double()).sum(), exact)


def check(tokens, state, spec, read_stored=False, bounds=BOUNDS):
    options, entering, saved = forward(tokens, state, spec, read_stored)
    do, ds = cotangents(tokens, state)
    got = in_float32(tokens, entering, saved, do, ds, options)
    for name, x, ref in zip(got._fields, got, wanted(tokens, entering, saved, do, ds, options), strict=True):
        assert ratio(x, ref) <= bounds[name], (name, ratio(x, ref))
    return got


@pytest.mark.parametrize("kda", [False, True], ids=["gdn", "kda"])
@pytest.mark.parametrize("name", ["e4m3-tile", "int8-tile", "int8-key_row", "e4m3-value_row"])
def test_gradients(name, kda):
    """Two blocks, the last of five tokens; several scales among a program's columns, or one."""
    tokens, state = tokens_of(kda=kda, dtype=torch.bfloat16, t=21, dk=20, dv=72)
    check(tokens, state, SPECS[name], read_stored=kda == name.startswith("e4m3"))


@pytest.mark.parametrize(
    ("kda", "sizes"),
    [
        (False, dict(t=16, dk=100, dv=60)),
        (True, dict(t=1, dk=16, dv=16)),
        (True, dict(t=17, dk=130, dv=8)),
        (False, dict(b=2, t=18, h=2, hv=2, dk=7, dv=66)),
    ],
)
def test_sizes(kda, sizes):
    """Whole blocks and single tokens, more keys than a program has, widths that are no power of two."""
    tokens, state = tokens_of(kda=kda, dtype=torch.bfloat16, **sizes)
    check(tokens, state, QuantSpec.fp8(block_v=16))


@pytest.mark.parametrize("kda", [False, True], ids=["gdn", "kda"])
def test_gates_of_any_depth(kda):
    """Among them a state that is forgotten whole: log decays of -inf, and steps too deep for float32."""
    tokens, state = tokens_of(kda=kda, dtype=torch.bfloat16, t=35, dk=16, dv=16)
    g = tokens.g.clone()
    g[:, 5], g[:, 11], g[:, 20:23] = -float("inf"), -300.0, -90.0
    tokens = tokens._replace(g=g)
    options, entering, saved = forward(tokens, state, QuantSpec.fp8(block_v=16))
    do, ds = cotangents(tokens, state)
    got = in_float32(tokens, entering, saved, do, ds, options)
    finite = tokens._replace(g=g.clamp_min(-400.0))  # the reference's own gradient is NaN at -inf
    for name, x, ref in zip(got._fields, got, wanted(finite, entering, saved, do, ds, options), strict=True):
        assert ratio(x, ref) <= BOUNDS[name], (name, ratio(x, ref))


def test_cotangents_of_any_size():
    """A power of two is taken out of each token's before it is multiplied in float16."""
    tokens, state = tokens_of(kda=False, dtype=torch.bfloat16, t=20, dk=16, dv=16)
    options, entering, saved = forward(tokens, state, QuantSpec.int8())
    do, ds = cotangents(tokens, state)
    for factor in (1e-20, 1e20):
        given = (do.float() * factor).bfloat16(), ds * factor
        got = in_float32(tokens, entering, saved, *given, options)
        for name, x, ref in zip(got._fields, got, wanted(tokens, entering, saved, *given, options), strict=True):
            assert ratio(x / factor, ref / factor) <= BOUNDS[name], (name, factor)


def test_nan_stays_nan():
    tokens, state = tokens_of(kda=False, dtype=torch.bfloat16, t=20, dk=16, dv=16)
    options, entering, saved = forward(tokens, state, QuantSpec.fp8(block_v=16))
    do, ds = cotangents(tokens, state)
    do[0, 3, 0, 2] = float("nan")
    got = in_float32(tokens, entering, saved, do, ds, options)
    assert got.q[0, 3].isnan().all() and not got.q[0, 4:].isnan().any()  # nothing flows to later tokens
    assert got.k[0, :3].isnan().any() and got.v[0, :4, 0, 2].isnan().all() and got.state[0, 0, :, 2].isnan().all()
    assert not got.state[0, 1].isnan().any()  # another value head


@pytest.mark.parametrize("kda", [False, True], ids=["gdn", "kda"])
def test_segments_change_no_bit(kda):
    """Sequences of several lengths, one of them empty, all at once and by segments of two blocks, last first."""
    tokens, state = tokens_of(kda=kda, dtype=torch.bfloat16, t=60, dk=16, dv=24)
    first, count = (torch.tensor(x, dtype=torch.int32) for x in ([3, 24, 24], [20, 0, 36]))
    state = state.expand(3, -1, -1, -1) * torch.tensor([1.0, 2.0, 3.0])[:, None, None, None]
    options = pipeline.Options(scale=0.3, state=QuantSpec.int8(block_v=16))
    entering = entering_state(state.contiguous(), options)
    bounds = pipeline.Bounds(first, count)
    inside = torch.zeros(60, dtype=torch.bool)
    inside[3:23] = inside[24:60] = True
    do, ds = cotangents(tokens, state)

    saved = pipeline.forward(poisoned_run, tokens, entering, options, bounds=bounds, stride=1).saved
    whole = in_float32(tokens, entering, saved, do, ds, options, bounds)
    gradients = [torch.zeros(x.shape) for x in tokens]
    for done in (32, 0):
        window = pipeline.Bounds(first + done, (count - done).clamp(0, 32))
        if done:
            ended = pipeline.Bounds(first, count.clamp(max=done))
            start = pipeline.forward(poisoned_run, tokens, entering, options, bounds=ended).state
        else:
            start = entering
        which = dict(bounds=window, most=32)
        again = pipeline.forward(poisoned_run, tokens, start, options, stride=1, **which).saved
        into = pipeline.Gradients(*gradients, None)
        *gradients, ds = pipeline.backward(poisoned_run, tokens, start, again, do, ds, options, into=into, **which)
    for name, x, y in zip(whole._fields, whole, gradients, strict=False):
        assert torch.equal(x[:, inside], y[:, inside]), name
    assert torch.equal(whole.state, ds)
