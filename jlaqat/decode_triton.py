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

from jlaqat import triton_backend
from jlaqat.chunked import Inputs
from jlaqat.decode_carry import Memory, Stored, decode
from jlaqat.decode_policy import DecodePolicy
from jlaqat.decode_scan import Span
from jlaqat.rounding import CODE_DTYPES
from jlaqat.spec import CHUNK_SIZE

Array = jax.Array


def why_not(policy: DecodePolicy, key_dim: int, span: Span, dtype: Any) -> str | None:
    """The reason why the kernels cannot decode so, as the end of a sentence; None where they can.

    key_dim: K. span: which tokens are decoded; all None where sequences start and end together. dtype: of the inputs.
    """
    reason = triton_backend.cannot_run()
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


def decode_triton(policy: DecodePolicy, scale: float, inputs: Inputs, memory: Memory) -> tuple[Array, Memory]:
    """(o [B, T, HV, V], memory after all tokens), as `decode_scan` returns them. T ≥ 1.

    inputs: float32, k and g as the policy keeps them; initial_state is memory.S again, the one field of memory that a
    gradient flows to.
    """
    o, S, values, codes_scale = _decode(policy, scale, inputs, memory.stored)
    stored = Stored(values, codes_scale)
    return o, memory._replace(S=S, stored=stored, position=memory.position + inputs.k.shape[1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _decode(policy: DecodePolicy, scale: float, inputs: Inputs, entering: Stored):
    return _forward(policy, scale, inputs, entering)[0]


def _forward(policy: DecodePolicy, scale: float, inputs: Inputs, entering: Stored):
    from jlaqat.kernels import recurrent_pipeline

    long = inputs.k.shape[1] > CHUNK_SIZE
    out = recurrent_pipeline.forward(
        triton_backend.run,
        recurrent_pipeline.Tokens(*inputs[:5]),
        _as_kept(entering),
        _options(policy, scale),
        stride=CHUNK_SIZE if long else None,
    )
    stored = _as_stored(out.state, policy)
    S = decode(stored, policy, jnp.float32)
    return (out.o, S, *stored), (inputs, entering, out.saved)


def _backward(policy: DecodePolicy, scale: float, residuals: Any, cotangents: Any):
    """Gradients of the operands and of the entering state, straight through every rounding."""
    from jlaqat.kernels import recurrent_pipeline
    from jlaqat.kernels.recurrent_pipeline import State, Tokens

    inputs, entering, saved = residuals
    do, dS, *_ = cotangents
    T, options = inputs.k.shape[1], _options(policy, scale)
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

    kept = _as_kept(entering)
    states = State(
        starts(kept.values, None if saved is None else saved.values),
        None if kept.scale is None else starts(kept.scale, None if saved is None else saved.scale),
    )

    def segment(dS: Array, part: Any):
        tokens, state, do = part
        again = recurrent_pipeline.forward(triton_backend.run, tokens, state, options, stride=1)
        assert again.saved is not None
        gradients = recurrent_pipeline.backward(triton_backend.run, tokens, state, again.saved, do, dS, options)
        return gradients.state, gradients[:5]

    parts = (Tokens(*map(cut, inputs[:5])), states, cut(do))
    if segments == 1:
        d_initial, gradients = segment(dS, jax.tree.map(lambda x: x[0], parts))
    else:
        d_initial, gradients = jax.lax.scan(segment, dS, parts, reverse=True)
        gradients = tuple(
            jnp.moveaxis(x, 0, 1).reshape(x.shape[1], segments * length, *x.shape[3:])[:, :T] for x in gradients
        )
    given = [d.astype(x.dtype) for d, x in zip((*gradients, d_initial), inputs)]
    return Inputs(*given), None


_decode.defvjp(_forward, _backward)


def _options(policy: DecodePolicy, scale: float) -> Any:
    from jlaqat.kernels import recurrent_pipeline

    return recurrent_pipeline.Options(
        scale=scale,
        state=policy.state,
        read_stored=policy.readout == "stored",
        hardware_fp8=triton_backend.target_capability() >= 89,
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
