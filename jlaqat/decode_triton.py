"""The triton backend of `delta_rule_decode`: the recurrence kernels through jax-triton, under one custom_vjp.

Mode "token", states in E4M3 or INT8 (by tile, key_row or value_row), bfloat16, float16 or float32, to nearest, on
NVIDIA GPUs from SM80 on; `why_not` says what stands in the way of a call. The kernels walk the same rows as
`decode_scan` and keep the same codes; sums over keys run in another order, so the two agree as float32 sums do. The
backward keeps the state after every 64 tokens and runs a segment again, with the same kernel, before going through it.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jlaqat.chunked import Inputs
from jlaqat.decode_carry import Memory, Stored, decode
from jlaqat.decode_policy import DecodePolicy
from jlaqat.decode_scan import Span, decode_scan
from jlaqat.kernel_calls import Target, cannot_run, kernel_call, target_of
from jlaqat.rounding import CODE_DTYPES
from jlaqat.spec import CHUNK_SIZE, QuantArrays

Array = jax.Array


def why_not(policy: DecodePolicy, key_dim: int, span: Span, dtype: Any) -> str | None:
    """The reason why the kernels cannot decode so, as the end of a sentence; None where they can.

    key_dim: K. span: which tokens are decoded; all None where sequences start and end together. dtype: of the inputs.
    """
    reason = cannot_run()
    if reason is not None:
        return reason
    if dtype == jnp.float64:
        return "the kernels compute in float32 and the inputs are float64"
    if policy.mode != "token":
        return f"the kernels round after every token (mode='token'), not in mode={policy.mode!r}"
    if policy.error_feedback:
        return "the kernels keep no error feedback"
    if policy.state is not None and not policy.keeps_codes:
        return "the kernels start from a rounded state (quantize_initial=True)"
    if any(x is not None for x in span):
        return "the kernels decode batches whose sequences start and end together, without cu_seqlens"
    from jlaqat.kernels import recurrent_pipeline

    return recurrent_pipeline.why_not(policy.state, key_dim)


def decode_triton(
    policy: DecodePolicy, scale: float, inputs: Inputs, memory: Memory, *, portable: bool = False
) -> tuple[Array, Memory]:
    """(o [B, T, HV, V], memory after all tokens), as `decode_scan` returns them. T ≥ 1.

    inputs: float32, k and g as the policy keeps them; initial_state is memory.S again, the one field of memory that a
    gradient flows to. portable: lowered for other platforms than CUDA, run as the xla backend does.

    Composes with jit (it runs on shards of batch and heads as they lie), grad, vmap (folded into the batch), scan,
    jax.checkpoint, and shard_map over batch and heads.
    """
    o, S, values, codes_scale = _decode(target_of(portable=portable), policy, scale, inputs, memory.stored)
    stored = Stored(values, codes_scale)
    return o, memory._replace(S=S, stored=stored, position=memory.position + inputs.k.shape[1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _decode(target: Target, policy: DecodePolicy, scale: float, inputs: Inputs, entering: Stored):
    o, stored, _ = _forward(target, policy, scale, False)(inputs[:5], entering)
    return o, decode(stored, policy, jnp.float32), *stored


def _decode_fwd(target: Target, policy: DecodePolicy, scale: float, inputs: Inputs, entering: Stored):
    o, stored, saved = _forward(target, policy, scale, True)(inputs[:5], entering)
    return (o, decode(stored, policy, jnp.float32), *stored), (inputs, entering, saved)


def _decode_bwd(target: Target, policy: DecodePolicy, scale: float, residuals: Any, cotangents: Any):
    """Gradients of the operands and of the entering state, straight through every rounding."""
    inputs, entering, saved = residuals
    do, dS, *_ = cotangents
    gradients = _backward(target, policy, scale)(inputs[:5], entering, saved, do, dS)
    given: list[Any] = [d.astype(x.dtype) for d, x in zip(gradients, inputs, strict=True)]
    return Inputs(*given), None


_decode.defvjp(_decode_fwd, _decode_bwd)


# ------------------------------------------------------------------ the two directions, on whichever platform


@functools.cache
def _forward(target: Target, policy: DecodePolicy, scale: float, with_saved: bool):
    """(tokens, entering) -> (o, Stored, the states after every 64 tokens as the kernels keep them, or None)."""
    from jlaqat.kernels import recurrent_pipeline

    def kernels(tokens: Any, entering: Stored):
        out = recurrent_pipeline.forward(
            target.run,
            recurrent_pipeline.Tokens(*tokens),
            _as_kept(entering),
            _options(target, policy, scale),
            stride=CHUNK_SIZE if with_saved and tokens[0].shape[1] > CHUNK_SIZE else None,
        )
        return out.o, _as_stored(out.state, policy), out.saved

    def elsewhere(tokens: Any, entering: Stored):
        """Nothing saved: the backward starts from the inputs again."""
        o, memory = _by_scan(policy, scale, tokens, entering, decode(entering, policy, jnp.float32))
        saved = jax.eval_shape(kernels, tokens, entering)[2]
        return o, memory.stored, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), saved)

    return kernel_call(
        "decode_forward",
        target,
        kernels,
        elsewhere,
        arguments=("tokens", "rows"),
        results=("tokens", "rows", "tokens"),
    )


@functools.cache
def _backward(target: Target, policy: DecodePolicy, scale: float):
    """(tokens, entering, saved, do, dS) -> gradients of the five operands and of the entering state."""

    def kernels(tokens: Any, entering: Stored, saved: Any, do: Array, dS: Array):
        options = _options(target, policy, scale)
        return _backward_by_segments(target.run, options, tokens, _as_kept(entering), saved, do, dS)

    def elsewhere(tokens: Any, entering: Stored, saved: Any, do: Array, dS: Array):
        def run(tokens: Any, S: Array):
            o, memory = _by_scan(policy, scale, tokens, entering, S)
            return o, memory.S

        d_tokens, d_initial = jax.vjp(run, tokens, decode(entering, policy, jnp.float32))[1]((do, dS))
        return *d_tokens, d_initial

    return kernel_call(
        "decode_backward",
        target,
        kernels,
        elsewhere,
        arguments=("tokens", "rows", "tokens", "tokens", "rows"),
        results=(*["tokens"] * 5, "rows"),
    )


def _by_scan(policy: DecodePolicy, scale: float, tokens: Any, entering: Stored, S: Array) -> tuple[Array, Memory]:
    """The xla backend from the same operands."""
    none = jnp.zeros(S.shape[0], jnp.int32)
    memory = Memory(S, entering, None, None, none, none)
    q, k, v, g, beta = tokens
    return decode_scan(policy, scale, Inputs(q, k, v, g, beta, S), memory, Span(), QuantArrays())


def _backward_by_segments(run: Any, options: Any, tokens: Any, entering: Any, saved: Any, do: Array, dS: Array):
    """A segment of 64 tokens at a time, from the last: run again from its saved state, then gone through."""
    from jlaqat.kernels import recurrent_pipeline
    from jlaqat.kernels.recurrent_pipeline import State, Tokens

    T = do.shape[1]
    segments = -(-T // CHUNK_SIZE)
    length = CHUNK_SIZE if segments > 1 else T

    def cut(x: Array) -> Array:
        """[N, T, ...] → [segments, N, length, ...]; filled up by tokens that neither write nor decay."""
        x = jnp.pad(x, ((0, 0), (0, segments * length - T)) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(x.shape[0], segments, length, *x.shape[2:]), 1, 0)

    def starts(first: Array, later: Array | None) -> Array:
        """[segments, N, ...]: what enters each segment."""
        if later is None:
            return first[None]
        return jnp.concatenate([first[None], jnp.moveaxis(later, 1, 0)[: segments - 1]])

    states = State(
        starts(entering.values, None if saved is None else saved.values),
        None if entering.scale is None else starts(entering.scale, None if saved is None else saved.scale),
    )

    def segment(dS: Array, part: Any):
        tokens, state, do = part
        again = recurrent_pipeline.forward(run, tokens, state, options, stride=1)
        assert again.saved is not None
        gradients = recurrent_pipeline.backward(run, tokens, state, again.saved, do, dS, options)
        return gradients.state, gradients[:5]

    parts = (Tokens(*map(cut, tokens)), states, cut(do))
    if segments == 1:
        d_initial, gradients = segment(dS, jax.tree.map(lambda x: x[0], parts))
    else:
        d_initial, gradients = jax.lax.scan(segment, dS, parts, reverse=True)
        gradients = tuple(
            jnp.moveaxis(x, 0, 1).reshape(x.shape[1], segments * length, *x.shape[3:])[:, :T] for x in gradients
        )
    return *gradients, d_initial


def _options(target: Target, policy: DecodePolicy, scale: float) -> Any:
    from jlaqat.kernels import recurrent_pipeline

    return recurrent_pipeline.Options(
        scale=scale,
        state=policy.state,
        read_stored=policy.readout == "stored",
        hardware_fp8=target.capability >= 89,
    )


def _as_kept(stored: Stored) -> Any:
    """Codes as the bytes that the kernels read."""
    from jlaqat.kernels.recurrent_pipeline import State

    values = stored.values
    return State(values if stored.scale is None else jax.lax.bitcast_convert_type(values, jnp.uint8), stored.scale)


def _as_stored(state: Any, policy: DecodePolicy) -> Stored:
    if state.scale is None or policy.state is None:
        return Stored(state.values, None)
    return Stored(jax.lax.bitcast_convert_type(state.values, CODE_DTYPES[policy.state.format]), state.scale)
