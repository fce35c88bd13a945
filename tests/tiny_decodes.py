"""Small calls of `delta_rule_decode`, and how tests of what it computes and refuses run them."""

import functools

import jax

import jlaqat
from jlaqat.testing import make_inputs

SIZES = dict(H=1, HV=2, K=8, V=32)


def operands(seed=0, **sizes):
    x = make_inputs(seed, **{**SIZES, **sizes})
    return x, x.pop("initial_state")


@functools.partial(jax.jit, static_argnames=("quant", "settings"))
def decode(x, state, quant, settings=(), **traced):
    return jlaqat.delta_rule_decode(**x, state=state, quant=quant, **dict(settings), **traced)
