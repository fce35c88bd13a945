"""Decoding as a policy defines it, for reading and for tests: sequence by sequence, token by token.

Replay is done as it is described: a checkpoint, a list of updates, and at every token the state formed anew from both.
Nothing is shared with the scan but the rounding itself. The dtype of the computation is float32, or float64 for float64
inputs; lengths must be concrete. Source of the maths: docs/decode.md.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jlaqat import reference
from jlaqat.chunked import Inputs, computation_dtype
from jlaqat.decode_carry import (
    DecodeCarry,
    Memory,
    Ring,
    Stored,
    decode,
    empty_ring,
    pack,
    rotate,
    round_keys,
    round_updates,
    unpack,
    write,
)
from jlaqat.decode_policy import DecodePolicy
from jlaqat.rounding import straight_through
from jlaqat.sites import Place
from jlaqat.spec import DeltaQuant, QuantArrays, QuantSpec

Array = jax.Array


class Update(NamedTuple):
    """One entry of the ring, a row for the one sequence."""

    k: Array  # [1, HV, K]
    r: Array  # [1, HV, V]
    g: Array  # [1, HV, 1 or K]


class Kept(NamedTuple):
    """What a decoder keeps of one sequence."""

    checkpoint: Array  # [1, HV, K, V], the state when it was last rounded (token mode: the state)
    stored: Stored  # the same, as it lies in memory
    updates: list[Update]  # since then
    residual: Array | None
    position: int


def decode_reference(
    inputs: Inputs,
    state: DecodeCarry | Array | None,
    quant: DecodePolicy,
    tokens: Any,
    arrays: QuantArrays,
    scale: float,
    w: QuantSpec | None,
) -> tuple[Array, DecodeCarry]:
    """As `decode.delta_rule_decode`, whose arguments come checked; tokens is its `Tokens`, with concrete values."""
    dtype, (B, T) = computation_dtype(inputs.v), inputs.k.shape[:2]
    for x in (tokens.cu_seqlens, tokens.prefix, tokens.lengths):
        if isinstance(x, jax.core.Tracer):
            raise NotImplementedError(
                "backend='reference' cuts sequences in Python, so prefix_lengths, lengths and cu_seqlens must not be "
                "traced; use backend='xla' under jit."
            )
    if tokens.cu_seqlens is None:
        bounds = [(b, 0, T if tokens.lengths is None else int(tokens.lengths[b])) for b in range(B)]
    else:
        cu = np.asarray(tokens.cu_seqlens).tolist()
        bounds = [(0, start, stop) for start, stop in zip(cu[:-1], cu[1:])]
    prefixes = [0] * len(bounds) if tokens.prefix is None else np.asarray(tokens.prefix).tolist()
    carried = unpack(state, quant, dtype) if isinstance(state, DecodeCarry) else None

    outputs = [list(jnp.zeros_like(inputs.v, dtype)[b]) for b in range(B)]  # [T] rows [HV, V] each
    columns = [[x.astype(dtype) for x in jnp.unstack(x, axis=1)] for x in inputs[:5]]
    memories = []
    for n, ((b, start, stop), prefix) in enumerate(zip(bounds, prefixes)):
        if carried is not None:
            kept = _kept(carried, n, quant)
            S = _original(_working(kept), quant)
        else:
            assert inputs.initial_state is not None
            kept, S = None, inputs.initial_state[n : n + 1].astype(dtype)
        if prefix:
            head = [x[b : b + 1, start : start + prefix] for x in inputs[:5]]
            in_prefix = DeltaQuant(state=quant.state if quant.prefill_state_qdq else None, w=w)
            settings: dict[str, Any] = dict(scale=scale, initial_state=S, quant=in_prefix, quant_arrays=arrays)
            o_prefix, S = reference.delta_rule_chunks(*head, **settings)
            outputs[b][start : start + prefix] = list(o_prefix[0].astype(dtype))
        if prefix or kept is None:
            position = prefix if kept is None else kept.position + prefix
            kept = _hand_over(S, None if kept is None else kept.residual, position, n, quant, arrays)
        for t in range(start + prefix, stop):
            row = [column[t][b : b + 1] for column in columns]
            kept, o = _token(kept, row, n, quant, arrays, scale)
            outputs[b][t] = o[0]
        memories.append(_memory(kept, quant, 1 if inputs.g.ndim == 3 else inputs.k.shape[3]))
    memory = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *memories)
    o = jnp.stack([jnp.stack(rows) for rows in outputs]) if T else jnp.zeros_like(inputs.v, dtype)
    return o.astype(inputs.v.dtype), pack(memory, quant, inputs.k.shape[2], inputs.g.ndim == 4)


def _hand_over(S: Array, residual, position: int, n: int, quant: DecodePolicy, arrays: QuantArrays) -> Kept:
    S = rotate(S) if quant.rotated else S
    if residual is None and quant.error_feedback:
        residual = jnp.zeros_like(S)
    if quant.state is None or not quant.quantize_initial:
        return Kept(S, Stored(S, None), [], residual, position)
    S, stored, residual = _write(S, residual, n, position, arrays, quant)
    return Kept(S, stored, [], residual, position)


def _token(kept: Kept, row: list[Array], n: int, quant: DecodePolicy, arrays: QuantArrays, scale: float):
    """(what is kept after a token, its output [1, HV, V])."""
    if quant.encoding == "reencode":
        again = [u._replace(k=round_keys(u.k, quant), r=round_updates(u.r, quant)) for u in kept.updates]
        kept = kept._replace(updates=again)
    W, update = _update(_working(kept), row, quant)
    position = kept.position + 1
    updates = [*kept.updates, update]
    if quant.mode == "handoff" or (quant.mode == "replay" and len(updates) < quant.ring_length):
        after = kept._replace(position=position)
        after = after._replace(checkpoint=W) if quant.mode == "handoff" else after._replace(updates=updates)
        stored = W
    else:
        stored, codes, residual = _write(W, kept.residual, n, position, arrays, quant)
        after = Kept(stored, codes, [], residual, position)
    read = W if quant.readout == "working" else stored
    return after, _read(read, row[0], scale, quant)


@functools.partial(jax.jit, static_argnames="quant")
def _read(S: Array, q: Array, scale: float, quant: DecodePolicy) -> Array:
    o = scale * _einsum("bhkv,bhk->bhv", S, jnp.repeat(q, S.shape[1] // q.shape[1], axis=1))
    return rotate(o) if quant.rotated else o


@functools.partial(jax.jit, static_argnames="quant")
def _update(S: Array, row: list[Array], quant: DecodePolicy) -> tuple[Array, Update]:
    """(W, the update that leads from S to it)."""
    _, k, v, g, beta = row
    v = rotate(v) if quant.rotated else v
    if quant.decay_log_step is not None:
        step = np.float32(quant.decay_log_step)
        g = straight_through(g, (jnp.round(g.astype(jnp.float32) / step) * step).astype(g.dtype))
    k = jnp.repeat(round_keys(k, quant), v.shape[1] // k.shape[1], axis=1)
    g = g if g.ndim == 3 else g[..., None]
    R = jnp.exp(g)[..., None] * S
    r = round_updates(beta[..., None] * (v - _einsum("bhkv,bhk->bhv", R, k)), quant)
    return R + k[..., None] * r[..., None, :], Update(k, r, g)


@jax.jit
def _apply(S: Array, update: Update) -> Array:
    return jnp.exp(update.g)[..., None] * S + update.k[..., None] * update.r[..., None, :]


def _working(kept: Kept) -> Array:
    """The state that the next token sees."""
    return functools.reduce(_apply, kept.updates, kept.checkpoint)


@functools.partial(jax.jit, static_argnames="quant")
def _write(S: Array, residual, n, position, arrays: QuantArrays, quant: DecodePolicy):
    place = Place(jnp.full((1,), n, jnp.int32), jnp.full((1,), position, jnp.int32))
    return write(S, residual, quant, place, arrays)


def _original(S: Array, quant: DecodePolicy) -> Array:
    return rotate(S) if quant.rotated else S


# ---- the shared carry ------------------------------------------------------------------------------------------------


def _kept(memory: Memory, n: int, quant: DecodePolicy) -> Kept:
    """Sequence n of a carry."""
    memory = jax.tree.map(lambda x: x[n : n + 1], memory)
    if memory.ring is None:
        return Kept(memory.S, memory.stored, [], memory.residual, int(memory.position[0]))
    updates = [Update(*(x[:, i] for x in memory.ring)) for i in range(int(memory.cursor[0]))]
    checkpoint = decode(memory.stored, quant, memory.S.dtype)
    return Kept(checkpoint, memory.stored, updates, memory.residual, int(memory.position[0]))


def _memory(kept: Kept, quant: DecodePolicy, gate_dim: int) -> Memory:
    S = _working(kept)
    ring, cursor = empty_ring(quant, S, gate_dim), len(kept.updates)
    if ring is not None and kept.updates:
        filled = [jnp.stack(field, axis=1) for field in zip(*kept.updates)]
        ring = Ring(*(old.at[:, :cursor].set(new) for old, new in zip(ring, filled)))
    counters = (jnp.full((1,), kept.position, jnp.int32), jnp.full((1,), cursor, jnp.int32))
    return Memory(S, kept.stored, ring, kept.residual, *counters)


def _einsum(subscripts: str, *operands: Array) -> Array:
    return jnp.einsum(subscripts, *operands, precision=jax.lax.Precision.HIGHEST)
