"""Sequences decoded together against the same sequences decoded alone; for the interpreter and for GPUs."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jlaqat import decode_triton
from jlaqat.chunked import Inputs
from jlaqat.decode_carry import Stored
from jlaqat.decode_scan import Span
from jlaqat.decode_triton import Entering
from jlaqat.rounding import quantize_codes
from jlaqat.testing import make_inputs


class Case(NamedTuple):
    """A call whose sequences start and end where they like."""

    cu_seqlens: list[int] | None
    bounds: dict[str, list[int]]  # start and stop, as `Span` has them
    sequences: list[tuple[int, int, int]]  # the row of each, its first token and the end

    @property
    def span(self) -> Span:
        bounds = {name: jnp.asarray(x, jnp.int32) for name, x in self.bounds.items()}
        return Span(None if self.cu_seqlens is None else jnp.asarray(self.cu_seqlens, jnp.int32), **bounds)


def both_directions(run, options, x, entering, span, do, dS, every):
    """(o, codes and scales, gradients) of a call that keeps a state every so many tokens."""
    o, state, saved = decode_triton.launch_forward(run, options, x, entering, span, every)
    return o, state, decode_triton.launch_backward(run, options, x, entering, span, saved, do, dS, every)


def check_bits_alone(call, options, case, *, every, kda, feedback=False, **sizes):
    """Outputs, states and gradients; zeros at tokens that are nobody's; what entered where there are no tokens.

    And the same bits where every state is kept. call: `both_directions` without its first two arguments. feedback:
    something was lost before. sizes: T, H, HV, K, V.
    """
    N, B = len(case.sequences), 1 + max(row for row, _, _ in case.sequences)
    given = make_inputs(1, gate="kda" if kda else "gdn", B=N, **sizes)
    given = {key: jnp.asarray(a) for key, a in given.items()}
    states = given.pop("initial_state")
    x = [given[key][:B] for key in Inputs._fields[:5]]
    lost = 0.01 * jnp.roll(states, 1, -1) if feedback else None
    entering = Entering(Stored(states, None), lost, None)
    if options.state is not None:
        nearest = dataclasses.replace(options.state, rounding="nearest")
        entering = entering._replace(stored=Stored(*quantize_codes(states, nearest, site="state")))
    if options.state is not None and options.state.rounding == "stochastic":
        counters = np.random.default_rng(1).integers(-(2**31), 2**31, (*states.shape[:2], 4))
        entering = entering._replace(counters=jnp.asarray(counters, jnp.int32))
    rng = np.random.default_rng(0)
    do, dS = (jnp.asarray(rng.normal(size=a.shape), jnp.float32) for a in (x[2], states))

    o, state, gradients = call(x, entering, case.span, do, dS, every)
    assert_equal((o, state, gradients), call(x, entering, case.span, do, dS, 1))
    untouched = np.ones((B, sizes["T"]), bool)
    for n, (row, first, stop) in enumerate(case.sequences):
        untouched[row, first:stop] = False
        its, mine = (jax.tree.map(lambda a, n=n: a[n : n + 1], tree) for tree in (entering, (state, gradients[5])))
        if first == stop:
            assert_equal(mine, (its.kept, dS[n : n + 1]))
            continue
        own = [a[row : row + 1, first:stop] for a in (*x, do)]
        alone = call(own[:5], its, Span(), own[5], dS[n : n + 1], every)
        assert_equal(mine, (alone[1], alone[2][5]))
        assert_equal([a[row : row + 1, first:stop] for a in (o, *gradients[:5])], [alone[0], *alone[2][:5]])
    for a in (o, *gradients[:5]):
        assert not np.asarray(a)[untouched].any()


def assert_equal(tree, other):
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        assert np.array_equal(a, b)
