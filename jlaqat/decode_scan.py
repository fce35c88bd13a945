"""The recurrence of a decoder as one differentiable scan over tokens: the xla backend of `delta_rule_decode`.

`token` is one step, written once: the scan runs it in training, a decoder runs it alone. The scan goes over segments of
64 tokens; the backward keeps the state that enters each and runs a segment again, rounding included, before going
through it in reverse, so that memory grows with T / 64; or it keeps what every token leaves and runs nothing again.
Sums over keys are matrix products a head and products are rounded before they are added, so that a step alone, the scan
and its backward's run get the same bits.
Formulas and what rounds where: docs/decode.md.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jlaqat.chunked import Inputs
from jlaqat.decode_carry import Memory, Ring, round_updates, write
from jlaqat.decode_policy import DecodePolicy
from jlaqat.packing import Layout, States, from_chunks, make_layout, to_chunks
from jlaqat.pairs import matmul, per_key_head, per_value_head, product
from jlaqat.recurrent import token_backward
from jlaqat.shards import vary_over, varying_axes
from jlaqat.sites import Place
from jlaqat.spec import QuantArrays

Array = jax.Array


class Rows(NamedTuple):
    """Operands of one token, heads repeated for their value heads; of a segment with a leading [64]."""

    q: Array  # [b, HV, K], scaled
    k: Array  # [b, HV, K], as the ring keeps it
    v: Array  # [b, HV, V]
    g: Array  # [b, HV, 1 or K]
    beta: Array  # [b, HV, 1]


class Span(NamedTuple):
    """Which tokens are decoded. All fields may be None: every token of a batch."""

    cu_seqlens: Array | None = None  # [N + 1], packed sequences
    start: Array | None = None  # [N] int32, first decoded token of each sequence
    stop: Array | None = None  # [N] int32, one past the last


class Schedule(NamedTuple):
    """Which slots of a segment are decoded."""

    sequence: Array  # [b] int32
    active: Array  # [64, b] bool


class Passed(NamedTuple):
    """What a token leaves for its backward. Unused fields cost nothing under jit."""

    S: Array  # [b, HV, K, V], before the token
    error: Array  # [b, HV, V], v − Rᵀk
    r: Array  # [b, HV, V], β·error as the ring keeps it
    read: Array  # [b, HV, K, V], what the output read


class Residuals(NamedTuple):
    """What the backward keeps from the forward."""

    inputs: Inputs
    memory: Memory  # entering the call
    span: Span
    arrays: QuantArrays
    kept: Any  # (S, residual, position, cursor) entering each segment, leading [n]; or Passed, leading [n, 64]


def token(
    memory: Memory, row: Rows, active: Array, sequence: Array, policy: DecodePolicy, arrays: QuantArrays
) -> tuple[Memory, Array, Passed]:
    """(memory after a token, its output [b, HV, V], what its backward needs). Where not active [b], nothing changes."""
    q, k, v, g, beta = row
    R = product(jnp.exp(g)[..., None], memory.S)
    error = v - matmul("...kv,...k->...v", R, k)
    r = round_updates(beta * error, policy)
    W = R + product(k[..., None], r[..., None, :])
    position, cursor = memory.position + 1, memory.cursor + 1
    ring = None if memory.ring is None else _push(memory.ring, k, r, g, memory.cursor)
    after = memory._replace(S=W, ring=ring, position=position)
    if policy.mode == "token":
        S, stored, residual = write(W, memory.residual, policy, Place(sequence, position), arrays)
        after = after._replace(S=S, stored=stored, residual=residual)
    elif policy.mode == "replay":
        due = active & (cursor == policy.window)

        def flush(after: Memory) -> Memory:
            S, stored, residual = write(W, memory.residual, policy, Place(sequence, position), arrays)
            return _where(due, after._replace(S=S, stored=stored, residual=residual), after)

        after = after._replace(cursor=jnp.where(due, 0, cursor))
        after = jax.lax.cond(jnp.any(due), flush, lambda after: after, after)
    read = W if policy.readout == "working" else after.S
    o = matmul("...kv,...k->...v", read, q)
    return _where(active, after, memory), jnp.where(active[:, None, None], o, 0), Passed(memory.S, error, r, read)


def _push(ring: Ring, k: Array, r: Array, g: Array, cursor: Array) -> Ring:
    """The ring with one more update, at each sequence's cursor [b]."""
    slots = jnp.arange(ring.k.shape[1], dtype=cursor.dtype)
    here = (slots[None, :] == cursor[:, None])[..., None, None]
    return Ring(*(jnp.where(here, new[:, None], old) for old, new in zip(ring, (k, r, g))))


def _where[T](condition: Array, new: T, old: T) -> T:
    """Leaves of `new` where the condition [b] holds, else of `old`."""

    def pick(a: Array, b: Array) -> Array:
        return jnp.where(condition.reshape(-1, *(1,) * (a.ndim - 1)), a, b)

    return jax.tree.map(pick, new, old)


def make_rows(operands: Iterable[Array], scale: float) -> Rows:
    """q, k, v, g and beta of tokens, [..., heads, dims] each, as `token` takes them."""
    q, k, v, g, beta = operands
    heads = v.shape[-2]
    return Rows(
        q=scale * per_value_head(q, heads, axis=-2),
        k=per_value_head(k, heads, axis=-2),
        v=v,
        g=g if g.ndim == v.ndim else g[..., None],
        beta=beta[..., None],
    )


# ---- the scan --------------------------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 6))
def decode_scan(
    policy: DecodePolicy,
    scale: float,
    inputs: Inputs,
    memory: Memory,
    span: Span,
    arrays: QuantArrays,
    keep_all: bool = False,
) -> tuple[Array, Memory]:
    """(o [B, T, HV, V], memory after the tokens of `span`), T ≥ 1.

    inputs: in the dtype of the computation; k and g as the ring keeps them; initial_state: memory.S again, the one
    field of memory that a gradient flows to. o is 0 at tokens that are not decoded. keep_all: what every token leaves
    for the backward is kept, two states a token, and no segment is run again.
    """
    return _forward(policy, scale, inputs, memory, span, arrays, keep_all)[0]


def _forward(policy, scale, inputs: Inputs, memory: Memory, span: Span, arrays: QuantArrays, keep_all: bool):
    layout, rows, schedule = _prepare(inputs, span, scale)
    states = States(layout.packed)
    assert inputs.initial_state is not None
    memory = memory._replace(S=inputs.initial_state)

    def segment(carry: Memory, part: tuple[Rows, Schedule]):
        rows, schedule = part
        entering: Memory = jax.tree.map(lambda x: states.read(x, schedule.sequence), carry)

        def run(memory: Memory):
            leaving, o, passed = _run_segment(memory, rows, schedule, policy, arrays)
            return leaving, o, passed if keep_all else None

        def skip(memory: Memory):
            passed = jax.eval_shape(run, memory)[2]
            return memory, _zeros(rows.v), jax.tree.map(lambda x: _zeros_of(x, rows.v), passed)

        # Segments before the decoded tokens, and those that hold nothing, cost nothing.
        leaving, o, passed = jax.lax.cond(jnp.any(schedule.active), run, skip, entering)
        carry = jax.tree.map(lambda x, y: states.write(x, y, schedule.sequence), carry, leaving)
        kept = passed if keep_all else (entering.S, entering.residual, entering.position, entering.cursor)
        return carry, (o, kept)

    carry, (o, kept) = jax.lax.scan(segment, _spare_row(memory, layout), (rows, schedule))
    result = _restore(o, layout, inputs.v), jax.tree.map(states.finish, carry)
    return result, Residuals(inputs, memory, span, arrays, kept)


def _backward(policy, scale, keep_all: bool, residuals: Residuals, cotangents: tuple[Array, Memory]):
    """Gradients of `Inputs`, straight through every rounding; nothing for the rest."""
    inputs, memory, span, arrays, kept = residuals
    layout, rows, schedule = _prepare(inputs, span, scale)
    states = States(layout.packed)
    do = _by_row(cotangents[0], layout)

    def segment(carry: Array, part):
        rows, schedule, kept, do = part
        dS = states.read(carry, schedule.sequence)

        def run_again() -> Passed:
            # Of stored states and the ring only what the tokens write matters, and that is not read here.
            blank: Memory = jax.tree.map(lambda x: states.read(x, schedule.sequence), memory_rows)
            entering = blank._replace(**dict(zip(("S", "residual", "position", "cursor"), kept)))
            return _run_segment(entering, rows, schedule, policy, arrays)[2]

        def run(dS: Array):
            passed = kept if keep_all else run_again()
            return _segment_backward(dS, do, rows, passed, schedule)

        skip = Rows(*(_zeros(x) for x in rows))
        dS, gradients = jax.lax.cond(jnp.any(schedule.active), run, lambda dS: (dS, skip), dS)
        return states.write(carry, dS, schedule.sequence), gradients

    memory_rows = _spare_row(memory, layout)
    start = _spare_row(cotangents[1].S, layout)
    carry, gradients = jax.lax.scan(segment, start, (rows, schedule, kept, do), reverse=True)
    dq, dk, dv, dg, dbeta = gradients
    heads = inputs.k.shape[2]
    d_inputs = Inputs(
        q=_restore(per_key_head(scale * dq, heads, axis=-2), layout, inputs.q),
        k=_restore(per_key_head(dk, heads, axis=-2), layout, inputs.k),
        v=_restore(dv, layout, inputs.v),
        g=_restore(dg if inputs.g.ndim == 4 else dg[..., 0], layout, inputs.g),
        beta=_restore(dbeta[..., 0], layout, inputs.beta),
        initial_state=states.finish(carry),
    )
    return d_inputs, None, None, None


decode_scan.defvjp(_forward, _backward)


def _run_segment(memory: Memory, rows: Rows, schedule: Schedule, policy: DecodePolicy, arrays: QuantArrays):
    """(memory after the segment, o [64, b, HV, V], Passed [64, ...])."""

    def step(memory: Memory, part: tuple[Rows, Array]):
        row, active = part
        memory, o, passed = token(memory, row, active, schedule.sequence, policy, arrays)
        return memory, (o, passed)

    memory, (o, passed) = jax.lax.scan(step, memory, (rows, schedule.active))
    return memory, o, passed


def _segment_backward(dS: Array, do: Array, rows: Rows, passed: Passed, schedule: Schedule) -> tuple[Array, Rows]:
    """The cotangent of the state entering the segment, and those of its rows."""

    def step(dS: Array, part):
        (q, k, _, g, beta), (S, error, r, read), do, active = part
        before, gradients = token_backward(dS, do, q, k, jnp.exp(g), beta, S, error, r, read)
        zeros = jax.tree.map(jnp.zeros_like, gradients)
        return _where(active, before, dS), Rows(*_where(active, gradients, zeros))

    return jax.lax.scan(step, dS, (rows, passed, do, schedule.active), reverse=True)


# ---- layout ----------------------------------------------------------------------------------------------------------


def _prepare(inputs: Inputs, span: Span, scale: float) -> tuple[Layout, Rows, Schedule]:
    layout = make_layout(inputs.k.shape[0], inputs.k.shape[1], span.cu_seqlens)
    rows = make_rows((_by_row(x, layout) for x in inputs[:5]), scale)
    index = layout.position[..., None] + jnp.arange(layout.valid.shape[-1], dtype=jnp.int32)[None, None]  # [n, b, 64]
    active = layout.valid
    if span.start is not None:
        active = active & (index >= _of_sequence(span.start, layout))
    if span.stop is not None:
        active = active & (index < _of_sequence(span.stop, layout))
    return layout, rows, Schedule(layout.sequence, jnp.moveaxis(active, 2, 1))


def _spare_row[T](tree: T, layout: Layout) -> T:
    """Arrays [N, ...] as `States` carries them: packed ones get a row for the chunks that hold nothing."""
    if not layout.packed:
        return tree
    return jax.tree.map(lambda x: jnp.pad(x, ((0, 1), *((0, 0),) * (x.ndim - 1))), tree)


def _of_sequence(x: Array, layout: Layout) -> Array:
    """x [N] at the sequences of each chunk, [n, b, 1]; chunks that hold nothing take the last."""
    return jnp.take(x, layout.sequence, mode="clip")[..., None]


def _zeros(like: Array) -> Array:
    return _zeros_of(like, like)


def _zeros_of(shape: Any, like: Array) -> Array:
    """Zeros of the shape and dtype of one, over the mesh axes that the other varies over."""
    return vary_over(jnp.zeros(shape.shape, shape.dtype), varying_axes(like))


def _by_row(x: Array, layout: Layout) -> Array:
    """[B, T, H, ...] → [n, 64, b, H, ...]."""
    return jnp.moveaxis(to_chunks(x, layout), 3, 1)


def _restore(x: Array, layout: Layout, like: Array) -> Array:
    """[n, 64, b, H, ...] → [B, T, H, ...] in `like`'s dtype."""
    return from_chunks(jnp.moveaxis(x, 1, 3), layout, like.shape[1]).astype(like.dtype)
