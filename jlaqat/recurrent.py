"""The delta rule token by token, rounding the state every few tokens: what a decoder with a low-precision state does.

A scan over segments of 64 tokens, each a scan over groups of `cadence` tokens, after which the state is rounded.
Outputs read the state before its rounding, as they do inside a chunk. The hand-written backward keeps the state
entering each segment and runs a segment again, rounding included, before going through it in reverse: memory grows
with T / 64.
Formulas and what rounds where: docs/delta_rule.md.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jlaqat import sites
from jlaqat.chunked import Inputs, computation_dtype, initial_states, no_tokens, num_sequences
from jlaqat.packing import Layout, States, from_chunks, make_layout, to_chunks
from jlaqat.pairs import per_key_head, per_value_head, product
from jlaqat.rounding import SiteStats, merge_stats, site_stats
from jlaqat.spec import CHUNK_SIZE, DeltaQuant, QuantArrays

Array = jax.Array


class Residuals(NamedTuple):
    """What the backward keeps from the forward."""

    inputs: Inputs
    cu_seqlens: Array | None  # [N + 1]
    arrays: QuantArrays
    states: Array  # [n, b, HV, K, V], entering each segment


class Rows(NamedTuple):
    """Operands by token, heads repeated for their value heads. Leading [n, groups, cadence]; a segment has no n."""

    q: Array  # [..., b, HV, K], scaled
    k: Array  # [..., b, HV, K]
    v: Array  # [..., b, HV, V]
    decay: Array  # [..., b, HV, 1 or K], e^g
    beta: Array  # [..., b, HV, 1]


class Schedule(NamedTuple):
    """When and under which counters the state of a segment is rounded. Leading [n] in whole."""

    sequence: Array  # [b] int32
    due: Array  # [groups, b] bool: the group holds a token
    round_index: Array  # [groups, b] int32


class Passed(NamedTuple):
    """What a segment's run leaves for its backward. Unused fields cost nothing under jit."""

    o: Array  # [groups, cadence, b, HV, V]
    S: Array  # [groups, cadence, b, HV, K, V], before each token
    error: Array  # [groups, cadence, b, HV, V], v − Sᵀk
    S_exact: Array  # [groups, b, HV, K, V], at the end of each group before rounding


def delta_rule_by_token(inputs: Inputs, cu_seqlens: Array | None, quant: DeltaQuant, arrays: QuantArrays, scale: float):
    """(o [B, T, HV, V] in v's dtype, final_state [N, HV, K, V]). Arguments are taken as valid: see `ops`."""
    if inputs.k.shape[1] == 0:
        return no_tokens(inputs, cu_seqlens, quant, arrays)
    return _by_token(quant, scale, inputs, cu_seqlens, arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _by_token(quant: DeltaQuant, scale: float, inputs: Inputs, cu_seqlens: Array | None, arrays: QuantArrays):
    return forward(quant, scale, inputs, cu_seqlens, arrays)[0]


def forward(quant: DeltaQuant, scale: float, inputs: Inputs, cu_seqlens: Array | None, arrays: QuantArrays):
    """((o, final_state), Residuals)."""
    result, residuals, _ = run(quant, scale, inputs, cu_seqlens, arrays, None)
    return result, residuals


def run(
    quant: DeltaQuant,
    scale: float,
    inputs: Inputs,
    cu_seqlens: Array | None,
    arrays: QuantArrays,
    stats: SiteStats | None,
):
    """`forward`, and `stats` with every rounding after a token added to it."""
    layout, rows, schedule = _prepare(inputs, cu_seqlens, quant, scale)
    states = States(layout.packed)

    def segment(carry, part):
        carry, stats = carry
        rows, schedule = part
        S = states.read(carry, schedule.sequence)
        S_next, stats, passed = _run_segment(S, rows, schedule, quant, arrays, stats)
        return (states.write(carry, S_next, schedule.sequence), stats), (passed.o, S)

    start = states.start(initial_states(inputs, num_sequences(inputs, cu_seqlens), quant, arrays))
    (carry, stats), (o, entering) = jax.lax.scan(segment, (start, stats), (rows, schedule))
    o = _restore(o, layout, inputs.v)
    return (o, states.finish(carry)), Residuals(inputs, cu_seqlens, arrays, entering), stats


def backward(quant: DeltaQuant, scale: float, residuals: Residuals, cotangents: tuple[Array, Array]):
    """Gradients of `Inputs`; nothing for cu_seqlens and the quantizers' arrays. Straight-through at every rounding."""
    inputs, cu_seqlens, arrays, entering = residuals
    layout, rows, schedule = _prepare(inputs, cu_seqlens, quant, scale)
    states = States(layout.packed)
    do = _by_row(cotangents[0].astype(rows.v.dtype), layout, quant)

    def segment(carry, part):
        rows, schedule, S, do = part
        _, _, passed = _run_segment(S, rows, schedule, quant, arrays, None)
        dS = states.read(carry, schedule.sequence)
        dS, gradients = _segment_backward(dS, do, rows, passed, schedule, quant, arrays)
        return states.write(carry, dS, schedule.sequence), gradients

    start = states.start(cotangents[1].astype(rows.v.dtype))
    carry, (dq, dk, dv, dg, dbeta) = jax.lax.scan(segment, start, (rows, schedule, entering, do), reverse=True)
    d_initial = None
    if inputs.initial_state is not None:
        initial, d_initial = inputs.initial_state.astype(carry.dtype), states.finish(carry)
        d_initial = sites.state_gradient(initial, d_initial, sites.initial_place(initial.shape[0]), quant, arrays)
        d_initial = d_initial.astype(inputs.initial_state.dtype)
    heads = inputs.k.shape[2]
    gradients = Inputs(
        q=_restore(per_key_head(scale * dq, heads, axis=-2), layout, inputs.q),
        k=_restore(per_key_head(dk, heads, axis=-2), layout, inputs.k),
        v=_restore(dv, layout, inputs.v),
        g=_restore(dg if inputs.g.ndim == 4 else dg[..., 0], layout, inputs.g),
        beta=_restore(dbeta[..., 0], layout, inputs.beta),
        initial_state=d_initial,
    )
    return gradients, None, None


_by_token.defvjp(forward, backward)


def _run_segment(S, rows: Rows, schedule: Schedule, quant: DeltaQuant, arrays: QuantArrays, stats: SiteStats | None):
    """(state after the segment, statistics, Passed)."""

    def token(S, row):
        q, k, v, decay, beta = row
        # Products by themselves: the backward runs this again and must round to the same codes.
        S_decayed = product(decay[..., None], S)
        error = v - product(S_decayed, k[..., None]).sum(-2)
        S_next = S_decayed + product(k[..., None], (beta * error)[..., None, :])
        return S_next, ((S_next * q[..., None]).sum(-2), S, error)

    def group(carry, part):
        S, stats = carry
        rows, due, round_index = part
        S_exact, (o, S_before, error) = jax.lax.scan(token, S, rows)
        S, due = S_exact, due[:, None, None, None]
        if quant.state is not None:
            rounded = sites.round_state(S, sites.Place(schedule.sequence, round_index), quant, arrays)
            if stats is not None:
                new = site_stats(S, quant.state, rounded, site="state", amax=arrays.state_amax, where=due)
                stats = merge_stats(stats, new)
            S = jnp.where(due, rounded, S)
        return (S, stats), Passed(o, S_before, error, S_exact)

    (S, stats), passed = jax.lax.scan(group, (S, stats), (rows, schedule.due, schedule.round_index))
    return S, stats, passed


def _segment_backward(dS, do, rows: Rows, passed: Passed, schedule: Schedule, quant: DeltaQuant, arrays: QuantArrays):
    """The cotangent of the state entering the segment, and those of q (scaled), k, v, g and beta."""
    clips = quant.state is not None and quant.state.gradient == "clip"

    def token(dS, part):
        (q, k, v, decay, beta), S, error, do = part
        write = beta * error
        S_next = decay[..., None] * S + k[..., None] * write[..., None, :]
        return token_backward(dS, do, q, k, decay, beta, S, error, write, S_next)

    def group(dS, part):
        rows, passed, do, due, round_index = part
        if clips:
            place = sites.Place(schedule.sequence, round_index)
            clipped = sites.state_gradient(passed.S_exact, dS, place, quant, arrays)
            dS = jnp.where(due[:, None, None, None], clipped, dS)
        return jax.lax.scan(token, dS, (rows, passed.S, passed.error, do), reverse=True)

    return jax.lax.scan(group, dS, (rows, passed, do, schedule.due, schedule.round_index), reverse=True)


def token_backward(dS, do, q, k, decay, beta, S, error, write, read):
    """(the cotangent of the state S before a token, those of q (scaled), k, v, g and beta), for [..., HV, dims] each.

    dS is the cotangent of the state after it, decay·S + k writeᵀ with write = β·error, whatever was rounded on the way;
    do that of the output, readᵀq.
    """
    S_decayed = decay[..., None] * S
    dS = dS + q[..., None] * do[..., None, :]
    dq = (read * do[..., None, :]).sum(-1)
    d_write = (dS * k[..., None]).sum(-2)
    dv = beta * d_write
    dk = (dS * write[..., None, :] - S_decayed * dv[..., None, :]).sum(-1)
    dS = dS - k[..., None] * dv[..., None, :]
    dg = (S_decayed * dS).sum(-1)
    dg = dg.sum(-1, keepdims=True) if decay.shape[-1] == 1 else dg
    return decay[..., None] * dS, (dq, dk, dv, dg, (d_write * error).sum(-1, keepdims=True))


def _prepare(
    inputs: Inputs, cu_seqlens: Array | None, quant: DeltaQuant, scale: float
) -> tuple[Layout, Rows, Schedule]:
    layout = make_layout(inputs.k.shape[0], inputs.k.shape[1], cu_seqlens)
    dtype, value_heads = computation_dtype(inputs.v), inputs.v.shape[2]
    q, k, v, g, beta = (_by_row(x.astype(dtype), layout, quant) for x in inputs[:5])
    rows = Rows(
        q=scale * per_value_head(q, value_heads, axis=-2),
        k=per_value_head(k, value_heads, axis=-2),
        v=v,
        decay=jnp.exp(g if inputs.g.ndim == 4 else g[..., None]),
        beta=beta[..., None],
    )
    cadence = _cadence(quant)
    starts = jnp.arange(0, CHUNK_SIZE, cadence, dtype=jnp.int32)
    return (
        layout,
        rows,
        Schedule(
            sequence=layout.sequence,
            due=jnp.moveaxis(layout.valid[:, :, ::cadence], 2, 1),
            round_index=(layout.position[:, None] + starts[None, :, None]) // cadence + 1,
        ),
    )


def _cadence(quant: DeltaQuant) -> int:
    return quant.state.cadence if quant.state is not None else CHUNK_SIZE


def _by_row(x: Array, layout: Layout, quant: DeltaQuant) -> Array:
    """[B, T, H, ...] → [n, groups, cadence, b, H, ...]."""
    x = jnp.moveaxis(to_chunks(x, layout), 3, 1)
    return x.reshape(x.shape[0], -1, _cadence(quant), *x.shape[2:])


def _restore(x: Array, layout: Layout, like: Array) -> Array:
    """[n, groups, cadence, b, H, ...] → [B, T, H, ...] in `like`'s dtype."""
    x = x.reshape(x.shape[0], CHUNK_SIZE, *x.shape[3:])
    return from_chunks(jnp.moveaxis(x, 1, 3), layout, like.shape[1]).astype(like.dtype)
