"""Replay mode of the triton backend of `delta_rule_decode`: kernels.replay_pipeline through jax-triton.

The kernels work on the carry as it lies, codes, scales and ring, and never form the state between two roundings. One
token is a step in place: under jit with the carry donated, or inside a scan, checkpoint and ring are not copied. More
tokens, or a gradient, take the forward kernel; both have the same bits. The backward starts from a checkpoint a window
and every token's r. `decode_triton.why_not` says what the kernels do not take.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jlaqat.chunked import Inputs
from jlaqat.decode_carry import DecodeCarry, Stored, key_codes, pack, unpack
from jlaqat.decode_counters import counted_by, counters_of
from jlaqat.decode_policy import DecodePolicy
from jlaqat.decode_scan import Span, decode_scan
from jlaqat.decode_triton import as_kept, as_stored, bounds_of, options_of, tokens_inside
from jlaqat.kernel_calls import Target, kernel_call, target_of
from jlaqat.rounding import CODE_DTYPES
from jlaqat.spec import QuantArrays

Array = jax.Array


class RingArrays(NamedTuple):
    """The ring as `DecodeCarry` has it."""

    k: Array
    r: Array
    g: Array
    k_scale: Array | None  # under factor_qdq
    r_scale: Array | None


class Kept(NamedTuple):
    """What the kernels take of a carry."""

    stored: Stored
    ring: RingArrays
    cursor: Array  # [N] int32, for which kernels return nothing: it counts sequences, and they vary with heads
    counters: Array | None  # [N, HV, 4] int32, for stochastic rounding: see `decode_counters`
    residual: Array | None  # [N, HV, K, V] float32, with error feedback

    @property
    def state(self) -> Any:
        return as_kept(self.stored)._replace(lost=self.residual)


ROLES: Any = Kept(*("rows", "tokens", "sequences", "rows", "rows"))  # type: ignore[arg-type]  # see kernel_calls.HEAD_AXIS


def kept_of(carry: DecodeCarry, counters: Array | None) -> Kept:
    assert carry.ring_k is not None and carry.ring_r is not None and carry.ring_g is not None
    ring = RingArrays(carry.ring_k, carry.ring_r, carry.ring_g, carry.ring_k_scale, carry.ring_r_scale)
    return Kept(Stored(carry.values, carry.scale), ring, carry.cursor, counters, carry.residual)


def decode_replay(
    policy: DecodePolicy,
    scale: float,
    inputs: Inputs,
    carry: DecodeCarry,
    span: Span,
    arrays: QuantArrays,
    *,
    portable: bool = False,
) -> tuple[Array, DecodeCarry]:
    """(o [B, T, HV, V], 0 where nothing is decoded; the carry after the tokens of `span`). T ≥ 1.

    inputs: float32, k and g as the policy keeps them; initial_state [N, HV, K, V] is the state that the carry stands
    for, for the gradient's sake alone: none flows to the carry. portable: lowered for other platforms than CUDA, run as
    the xla backend does. Composes as `decode_triton` does.
    """
    kept = kept_of(carry, counters_of(policy, carry.position, inputs.v.shape[2], arrays))
    target = target_of(portable=portable)
    kept = jax.lax.stop_gradient(kept)
    o, (values, values_scale), ring, residual = _decode(target, policy, scale, inputs, kept, span)
    bounds = bounds_of(span, *inputs.k.shape[:2])
    count = inputs.k.shape[1] if bounds is None else bounds.count
    position, cursor = carry.position + count, (carry.cursor + count) % policy.ring_length
    after = dict(values=values, scale=values_scale, residual=residual, position=position, cursor=cursor)
    entries = {f"ring_{name}": x for name, x in ring._asdict().items()}
    return o, dataclasses.replace(carry, **after, **entries)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _decode(target: Target, policy: DecodePolicy, scale: float, inputs: Inputs, kept: Kept, span: Span):
    """(o, checkpoints, ring, what roundings lost)"""
    return _forward(target, policy, scale, False)(inputs[:5], kept, span)[:4]


def _decode_fwd(target: Target, policy: DecodePolicy, scale: float, inputs: Inputs, kept: Kept, span: Span):
    *after, saved = _forward(target, policy, scale, True)(inputs[:5], kept, span)
    return tuple(after), (inputs, kept, span, saved)


def _decode_bwd(target: Target, policy: DecodePolicy, scale: float, residuals: Any, cotangents: Any):
    """Gradients of the operands and of the entering state, straight through every rounding."""
    inputs, kept, span, saved = residuals
    gradients = _backward(target, policy, scale)(inputs[:5], kept, span, saved, cotangents[0])
    given: list[Any] = [d.astype(x.dtype) for d, x in zip(gradients, inputs, strict=True)]
    return Inputs(*given), None, None


_decode.defvjp(_decode_fwd, _decode_bwd)


# ------------------------------------------------------------------ the two directions, on whichever platform


@functools.cache
def _forward(target: Target, policy: DecodePolicy, scale: float, with_saved: bool):
    """(tokens, kept, span) -> (o, checkpoints, ring, residual, (r, r_scale, saved) of the forward or None)."""

    def kernels(tokens: Any, kept: Kept, span: Span):
        options = replay_options(target, policy, scale)
        out = launch_forward(target.run, options, tokens, kept, span, with_saved)
        saved = (out.r, out.r_scale, out.saved) if with_saved else None
        return out.o, as_stored(out.state, policy), arrays_of(out.ring), out.state.lost, saved

    def elsewhere(tokens: Any, kept: Kept, span: Span):
        """Nothing saved: the backward starts from the inputs again."""
        saved = jax.eval_shape(kernels, tokens, kept, span)[4]
        saved = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), saved)
        return *_by_scan(policy, scale, tokens, kept, None, span), saved

    return kernel_call(
        "replay_forward",
        target,
        kernels,
        elsewhere,
        arguments=("tokens", ROLES, "sequences"),
        results=("tokens", "rows", "tokens", "rows", "tokens"),
    )


@functools.cache
def _backward(target: Target, policy: DecodePolicy, scale: float):
    """(tokens, kept, span, saved, do) -> gradients of the five operands and of the entering state."""

    def kernels(tokens: Any, kept: Kept, span: Span, saved: Any, do: Array):
        return launch_backward(target.run, replay_options(target, policy, scale), tokens, kept, span, saved, do)

    def elsewhere(tokens: Any, kept: Kept, span: Span, saved: Any, do: Array):
        def run(tokens: Any, S: Array):
            return _by_scan(policy, scale, tokens, kept, S, span)[0]

        d_tokens, d_initial = jax.vjp(run, tokens, _memory(kept, policy).S)[1](do)
        return *d_tokens, d_initial

    return kernel_call(
        "replay_backward",
        target,
        kernels,
        elsewhere,
        arguments=("tokens", ROLES, "sequences", "tokens", "tokens"),
        results=(*["tokens"] * 5, "rows"),
    )


def _by_scan(policy: DecodePolicy, scale: float, tokens: Any, kept: Kept, S: Array | None, span: Span) -> Any:
    """The xla backend from the same operands; S: the state that `kept` stands for, where a gradient flows to it."""
    q, k, v, g, beta = tokens
    memory = _memory(kept, policy)
    inputs = Inputs(q, k, v, g, beta, memory.S if S is None else S)
    arrays = counted_by(kept.counters, kept.cursor.shape[0])[1]
    o, memory = decode_scan(policy, scale, inputs, memory, span, arrays)
    carry = pack(memory, policy, k.shape[2], g.ndim == 4)
    after = kept_of(carry, None)
    return o, after.stored, after.ring, after.residual


def _memory(kept: Kept, policy: DecodePolicy) -> Any:
    (values, scale), entries, cursor, counters, residual = kept
    position = counted_by(counters, cursor.shape[0])[0]
    ring: Any = {f"ring_{name}": x for name, x in entries._asdict().items()} | {"cursor": cursor}
    rest: Any = dict(residual=residual, position=position, policy=policy.signature)
    return unpack(DecodeCarry(values=values, scale=scale, **ring, **rest), policy, jnp.float32)


def _only(bounds: Any, x: Array) -> Array:
    """x [B, T, ...] where some sequence has the token, else 0: there the kernels write nothing."""
    if bounds is None:
        return x
    inside = tokens_inside(bounds, *x.shape[:2])
    return jnp.where(inside.reshape(*inside.shape, *(1,) * (x.ndim - 2)), x, 0)


def _ring(kept: Kept) -> Any:
    """Codes as the bytes that the kernels read."""
    from jlaqat.kernels.replay_pipeline import Ring

    k, r, g, k_scale, r_scale = kept.ring
    if k_scale is not None:
        k, r = (jax.lax.bitcast_convert_type(x, jnp.uint8) for x in (k, r))
    return Ring(k, r, g, kept.cursor, k_scale, r_scale)


def arrays_of(ring: Any) -> RingArrays:
    k, r = ring.k, ring.r
    if ring.coded:
        k, r = (jax.lax.bitcast_convert_type(x, CODE_DTYPES["e4m3"]) for x in (k, r))
    return RingArrays(k, r, ring.g, ring.k_scale, ring.r_scale)


# ------------------------------------------------------------------ launches


def replay_options(target: Target, policy: DecodePolicy, scale: float) -> Any:
    """As token mode has them; under factor_qdq a program has the columns that share a scale of r."""
    options = options_of(target, policy, scale)
    return dataclasses.replace(options, width=policy.factor_block) if policy.factor_qdq else options


def launch_forward(run: Any, options: Any, tokens: Any, kept: Kept, span: Span, save: bool) -> Any:
    """`replay_pipeline.Output`: of a step in place where that is all, otherwise of a forward that may save."""
    from jlaqat.kernels import replay_pipeline as pipeline

    rows = tokens[0].shape[:2]
    bounds, state, ring, counters = bounds_of(span, *rows), kept.state, _ring(kept), kept.counters
    if not save and rows[1] == 1 and bounds is None:
        return pipeline.step(run, _kept_tokens(tokens, ring), state, ring, options, counters=counters)
    operands, which = _kept_tokens(tokens, ring), {"bounds": bounds, "counters": counters, "save": save}
    out = pipeline.forward(run, operands, state, ring, options, **which)
    return out._replace(o=_only(bounds, out.o))


def launch_backward(
    run: Any, options: Any, tokens: Any, kept: Kept, span: Span, saved: Any, do: Array
) -> tuple[Array, ...]:
    """Gradients of the five operands and of the entering states; saved: r, r_scale and checkpoints of the forward."""
    from jlaqat.kernels import replay_pipeline as pipeline

    ring, state, bounds = _ring(kept), kept.state, bounds_of(span, *do.shape[:2])
    out, d_leaving = pipeline.Output(do, state, ring, *saved), jnp.zeros(kept.stored.values.shape, jnp.float32)
    operands = _kept_tokens(tokens, ring)
    gradients = pipeline.backward(run, operands, state, ring, out, do, d_leaving, options, bounds=bounds)
    return *(_only(bounds, d) for d in gradients[:5]), gradients.state


def _kept_tokens(tokens: Any, ring: Any) -> Any:
    """The tokens, k as the ring has it: its values are the same."""
    from jlaqat.kernels.replay_pipeline import Tokens

    q, k, v, g, beta = tokens
    if not ring.coded:
        return Tokens(q, k.astype(ring.k.dtype), v, g, beta)
    codes, scale = key_codes(k)
    return Tokens(q, jax.lax.bitcast_convert_type(codes, jnp.uint8), v, g, beta, scale)
