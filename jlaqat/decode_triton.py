"""The triton backend of `delta_rule_decode`: the recurrence kernels through jax-triton, under one custom_vjp.

Mode "token", states in E4M3 or INT8 (by tile, key_row or value_row), bfloat16, float16 or float32, on
NVIDIA GPUs from SM80 on; `why_not` says what stands in the way of a call. The kernels walk the same rows as
`decode_scan` and keep the same codes; sums over keys run in another order, so the two agree as float32 sums do. The
backward wants the state before every token. The forward under a gradient keeps one every `every` tokens, and the
backward runs what lies between two again, with the same kernel, before going through it; with 1 nothing runs twice.

A sequence has the bits that it has alone, wherever its tokens lie: in a row to itself, in a part of one, or packed.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jlaqat.chunked import Inputs
from jlaqat.decode_carry import Memory, Stored, decode
from jlaqat.decode_counters import counted_by, counters_of
from jlaqat.decode_policy import DecodePolicy
from jlaqat.decode_scan import Span, decode_scan
from jlaqat.kernel_calls import Target, cannot_run, kernel_call, target_of
from jlaqat.rounding import CODE_DTYPES
from jlaqat.shards import all_varying_axes, vary_over
from jlaqat.spec import CHUNK_SIZE, QuantArrays

Array = jax.Array


def why_not(policy: DecodePolicy, key_dim: int, dtype: Any) -> str | None:
    """The reason why the kernels cannot decode so, as the end of a sentence; None where they can.

    key_dim: K. dtype: of the inputs.
    """
    return cannot_run() or not_taken(policy, key_dim, dtype)


def not_taken(policy: DecodePolicy, key_dim: int, dtype: Any) -> str | None:
    """`why_not` on a machine that can run kernels, whichever framework launches them."""
    from jlaqat.kernels import recurrent_pipeline

    if dtype == jnp.float64:
        return "the kernels compute in float32 and the inputs are float64"
    if policy.mode == "handoff":
        return "the kernels round after every token or by replay, not in mode='handoff'"
    by_key_row = policy.state is not None and policy.state.granularity == "key_row"
    if policy.factor_qdq and by_key_row and policy.factor_block != recurrent_pipeline.KEY_ROW:
        return (
            f"beside a state by key_row the kernels scale r by {recurrent_pipeline.KEY_ROW} values "
            f"(factor_qdq=True), not by block_v={policy.factor_block}"
        )
    if policy.state is not None and not policy.keeps_codes:
        return "the kernels start from a rounded state (quantize_initial=True)"
    return recurrent_pipeline.why_not(policy.state, key_dim, draws=True)


def decode_triton(
    policy: DecodePolicy,
    scale: float,
    inputs: Inputs,
    memory: Memory,
    span: Span,
    arrays: QuantArrays,
    *,
    every: int = CHUNK_SIZE,
    portable: bool = False,
) -> tuple[Array, Memory]:
    """(o [B, T, HV, V], memory after the tokens of `span`), as `decode_scan` returns them. T ≥ 1.

    inputs: q, k, v and beta in the caller's dtype, which o has too, or in float32; g float32, as the policy keeps it;
    initial_state is memory.S again, the one field of memory that a gradient flows to. o is 0 at tokens that are not
    decoded. every: tokens between two states that are kept for the backward, 1 or counted in blocks of 16. portable:
    lowered for other platforms than CUDA, run as the xla backend does.

    Composes with jit (it runs on shards of batch and heads as they lie), grad, vmap (folded into the batch), scan,
    jax.checkpoint, and shard_map over batch and heads.
    """
    from jlaqat.kernels.block_pipeline import whole_blocks

    counters = counters_of(policy, memory.position, inputs.v.shape[2], arrays)
    entering = Entering(memory.stored, memory.residual, counters)
    how = How(target_of(portable=portable), policy, scale, whole_blocks(every))
    o, S, stored, residual = _decode(how, inputs, entering, span)
    B, T = inputs.k.shape[:2]
    bounds = bounds_of(span, B, T)
    position = memory.position + (T if bounds is None else bounds.count)
    return o, memory._replace(S=S, stored=stored, residual=residual, position=position)


class How(NamedTuple):
    """What is known when a call is traced."""

    target: Target
    policy: DecodePolicy
    scale: float
    every: int  # tokens between two states that are kept for the backward

    @property
    def options(self) -> Any:
        return options_of(self.target, self.policy, self.scale)


class Entering(NamedTuple):
    """What a call starts from."""

    stored: Stored
    residual: Array | None  # [N, HV, K, V] float32, with error feedback
    counters: Array | None  # [N, HV, 4] int32, for stochastic rounding: see recurrent_pipeline.forward

    @property
    def kept(self) -> Any:
        return as_kept(self.stored)._replace(lost=self.residual)

    def after(self, tokens: Array | int) -> Array | None:
        """The counters when every sequence has had so many tokens more."""
        if self.counters is None:
            return None
        return self.counters + jnp.stack([jnp.asarray(tokens, jnp.int32)] + [jnp.zeros((), jnp.int32)] * 3)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _decode(how: How, inputs: Inputs, entering: Entering, span: Span):
    o, stored, residual, _ = _forward(how, False)(inputs[:5], entering, span)
    return o, decode(stored, how.policy, jnp.float32), stored, residual


def _decode_fwd(how: How, inputs: Inputs, entering: Entering, span: Span):
    o, stored, residual, saved = _forward(how, True)(inputs[:5], entering, span)
    return (o, decode(stored, how.policy, jnp.float32), stored, residual), (inputs, entering, span, saved)


def _decode_bwd(how: How, residuals: Any, cotangents: Any):
    """Gradients of the operands and of the entering state, straight through every rounding."""
    inputs, entering, span, saved = residuals
    do, dS, *_ = cotangents
    return Inputs(*_backward(how)(inputs[:5], entering, span, saved, do, dS)), None, None


_decode.defvjp(_decode_fwd, _decode_bwd)


# ------------------------------------------------------------------ which tokens


def bounds_of(span: Span, batch: int, num_tokens: int) -> Any:
    """A span as the kernels take it, None where every sequence has all tokens of a row of its own.

    Inside the arrays even where traced values break the rules. Sequences of several rows, as vmap folds packed ones,
    count their tokens from the start of their row.
    """
    from jlaqat.kernels.recurrent_pipeline import Bounds

    if all(x is None for x in span):
        return None
    if span.cu_seqlens is None:
        begin, stop = jnp.zeros(batch, jnp.int32), jnp.full(batch, num_tokens, jnp.int32)
    else:
        cu = jax.lax.cummax(jnp.clip(span.cu_seqlens.astype(jnp.int32), 0, num_tokens).reshape(batch, -1), axis=1)
        begin, stop = cu[:, :-1].reshape(-1), cu[:, 1:].reshape(-1)
    if span.stop is not None:
        stop = jnp.clip(begin + span.stop, begin, stop)
    first = begin if span.start is None else jnp.clip(begin + span.start, begin, stop)
    return Bounds(first, stop - first)


def tokens_inside(bounds: Any, batch: int, num_tokens: int) -> Array:
    """[B, T] bool: some sequence has the token."""
    t = jnp.arange(num_tokens, dtype=jnp.int32)
    first, count = bounds.first[:, None], bounds.count[:, None]
    return ((t >= first) & (t < first + count)).reshape(batch, -1, num_tokens).any(axis=1)


# ------------------------------------------------------------------ the two directions, on whichever platform


@functools.cache
def _forward(how: How, with_saved: bool):
    """(tokens, entering, span) -> (o, Stored, residual, the states that are saved as the kernels keep them)."""

    def kernels(tokens: Any, entering: Entering, span: Span):
        every = how.every if with_saved else None
        o, state, saved = launch_forward(how.target.run, how.options, tokens, entering, span, every)
        return o, as_stored(state, how.policy), state.lost, saved

    def elsewhere(tokens: Any, entering: Entering, span: Span):
        """Nothing saved: the backward starts from the inputs again."""
        S = decode(entering.stored, how.policy, jnp.float32)
        o, memory = _by_scan(how, tokens, entering, S, span)
        saved = jax.eval_shape(kernels, tokens, entering, span)[3]
        return o, memory.stored, memory.residual, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), saved)

    return kernel_call(
        "decode_forward",
        how.target,
        kernels,
        elsewhere,
        arguments=("tokens", "rows", "sequences"),
        results=("tokens", "rows", "rows", "tokens"),
    )


@functools.cache
def _backward(how: How):
    """(tokens, entering, span, saved, do, dS) -> gradients of the five operands and of the entering state."""

    def kernels(tokens: Any, entering: Entering, span: Span, saved: Any, do: Array, dS: Array):
        options = how.options
        gradients = launch_backward(how.target.run, options, tokens, entering, span, saved, do, dS, how.every)
        return *(d.astype(x.dtype) for d, x in zip(gradients, tokens, strict=False)), gradients[5]

    def elsewhere(tokens: Any, entering: Entering, span: Span, saved: Any, do: Array, dS: Array):
        def run(tokens: Any, S: Array):
            o, memory = _by_scan(how, tokens, entering, S, span)
            return o, memory.S

        d_tokens, d_initial = jax.vjp(run, tokens, decode(entering.stored, how.policy, jnp.float32))[1]((do, dS))
        return *d_tokens, d_initial

    return kernel_call(
        "decode_backward",
        how.target,
        kernels,
        elsewhere,
        arguments=("tokens", "rows", "sequences", "tokens", "tokens", "rows"),
        results=(*["tokens"] * 5, "rows"),
    )


def _by_scan(how: How, tokens: Any, entering: Entering, S: Array, span: Span):
    """(o, the memory after the call) of the xla backend from the same operands."""
    q, k, v, g, beta = (x.astype(jnp.float32) for x in tokens)
    position, arrays = counted_by(entering.counters, S.shape[0])
    memory = Memory(S, entering.stored, None, entering.residual, position, jnp.zeros_like(position))
    o, memory = decode_scan(how.policy, how.scale, Inputs(q, k, v, g, beta, S), memory, span, arrays, how.every == 1)
    return o.astype(tokens[2].dtype), memory


# ------------------------------------------------------------------ launches


def launch_forward(run: Any, options: Any, tokens: Any, entering: Entering, span: Span, every: int | None):
    """(o, the last states, those after every so many tokens or None), states as the kernels keep them."""
    from jlaqat.kernels import recurrent_pipeline as pipeline

    B, T = tokens[0].shape[:2]
    bounds, stride = bounds_of(span, B, T), every if every == 1 or (every and every < T) else None
    which: dict[str, Any] = dict(bounds=bounds, counters=entering.counters, stride=stride)
    out = pipeline.forward(run, pipeline.Tokens(*tokens), entering.kept, options, **which)
    o = out.o if bounds is None else jnp.where(tokens_inside(bounds, B, T)[..., None, None], out.o, 0)
    return o, out.state, out.saved


def launch_backward(
    run: Any, options: Any, tokens: Any, entering: Entering, span: Span, saved: Any, do: Array, dS: Array, every: int
) -> tuple[Array, ...]:
    """Gradients of the five operands and of the entering states; saved: what the forward saved with this `every`."""
    from jlaqat.kernels import recurrent_pipeline as pipeline

    B, T = do.shape[:2]
    bounds, tokens = bounds_of(span, B, T), pipeline.Tokens(*tokens)
    if every > 1 and bounds is None and every >= T:
        saved = pipeline.forward(run, tokens, entering.kept, options, counters=entering.counters, stride=1).saved
        every = 1
    if every > 1:
        return _by_segments(run, options, tokens, entering, bounds, saved, do, dS, min(every, T))
    out = pipeline.backward(run, tokens, entering.kept, saved, do, dS, options, bounds=bounds)
    if bounds is None:
        return tuple(out)
    inside = tokens_inside(bounds, B, T)  # nobody writes gradients of the other tokens
    gradients = (jnp.where(inside.reshape(B, T, *[1] * (x.ndim - 2)), x, 0) for x in out[:5])
    return *gradients, out.state


def _by_segments(
    run: Any, options: Any, tokens: Any, entering: Entering, bounds: Any, saved: Any, do: Array, dS: Array, most: int
) -> tuple[Array, ...]:
    """At most so many tokens of every sequence at a time, last first: run again from a saved state, then reversed."""
    from jlaqat.kernels import recurrent_pipeline as pipeline

    (B, T), N = do.shape[:2], dS.shape[0]
    ragged, row = bounds is not None, jnp.arange(N, dtype=jnp.int32) // (N // B)
    if bounds is None:
        bounds = pipeline.Bounds(jnp.zeros(N, jnp.int32), jnp.full(N, T, jnp.int32))
    segments = -(-jnp.max(bounds.count, initial=0) // most) if ragged else -(-T // most)
    axes = all_varying_axes(tokens, entering, bounds, saved, do, dS)

    def entering_states(segment: Array) -> Any:
        if saved is None:  # one segment
            return entering.kept
        slots = saved.values.shape[1]
        slot = jnp.clip((bounds.first + (most - 1)) // most + segment - 1, 0, slots - 1)

        def pick(first: Array, later: Array) -> Array:
            later = later.reshape(B * slots, *later.shape[2:])[row * slots + slot]
            return jnp.where(segment == 0, first, later)

        return jax.tree.map(pick, entering.kept, saved)

    def body(i: Array, carry: Any):
        dS, gradients = carry
        segment = jnp.asarray(segments - 1 - i, jnp.int32)
        done = most * segment
        window = pipeline.Bounds(bounds.first + done, jnp.clip(bounds.count - done, 0, most))
        state = entering_states(segment)
        which: dict[str, Any] = dict(bounds=window, most=most)
        again = pipeline.forward(run, tokens, state, options, counters=entering.after(done), stride=1, **which)
        assert again.saved is not None
        dq, dk, dv, dg, dbeta = gradients
        into = pipeline.Gradients(dq, dk, dv, dg, dbeta, None)
        out = pipeline.backward(run, tokens, state, again.saved, do, dS, options, into=into, **which)
        return out.state, tuple(out[:5])

    zeros = tuple(vary_over(jnp.zeros(x.shape, jnp.float32), axes) for x in tokens)
    d_initial, gradients = jax.lax.fori_loop(0, segments, body, (vary_over(dS, axes), zeros))
    return *gradients, d_initial


def options_of(target: Target, policy: DecodePolicy, scale: float) -> Any:
    from jlaqat.kernels import recurrent_pipeline
    from jlaqat.kernels.call import converts_to_e4m3

    return recurrent_pipeline.Options(
        scale=scale,
        state=policy.state,
        read_stored=policy.readout == "stored",
        hardware_fp8=converts_to_e4m3(target.capability),
    )


def as_kept(stored: Stored) -> Any:
    """Codes as the bytes that the kernels read."""
    from jlaqat.kernels.recurrent_pipeline import State

    values = stored.values
    return State(values if stored.scale is None else jax.lax.bitcast_convert_type(values, jnp.uint8), stored.scale)


def as_stored(state: Any, policy: DecodePolicy) -> Stored:
    if state.scale is None or policy.state is None:
        return Stored(state.values, None)
    return Stored(jax.lax.bitcast_convert_type(state.values, CODE_DTYPES[policy.state.format]), state.scale)
