"""The Triton backend: kernels.pipeline through jax-triton, under one custom_vjp.

NVIDIA GPUs from SM80 on. `why_not` says, before anything runs, what stands in the way of a call.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jlaqat.chunked import Inputs, delta_rule_chunked
from jlaqat.kernel_calls import Target, cannot_run, kernel_call, target_capability, target_of
from jlaqat.spec import DeltaQuant, QuantArrays

Array = jax.Array


def why_not(inputs: Inputs, quant: DeltaQuant, compute_capability: int | None = None) -> str | None:
    """The reason why this backend cannot serve a call, as the end of a sentence; None where it can.

    compute_capability: 90 for SM90 and so on; None asks the default device.
    """
    if compute_capability is None:
        compute_capability = target_capability()
    reason = cannot_run(compute_capability)
    if reason is not None:
        return reason
    from jlaqat.kernels.call import Call, UnsupportedByKernels

    # How many sequences there are depends on cu_seqlens, and nothing that is asked here depends on it.
    operands = inputs._replace(initial_state=None)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), operands)
    try:
        Call(lambda launch: {}, _operands(shapes, None), _options(quant, 1.0, compute_capability))
    except UnsupportedByKernels as refusal:
        return str(refusal)
    return None


def delta_rule_triton(
    inputs: Inputs,
    cu_seqlens: Array | None,
    quant: DeltaQuant,
    scale: float,
    *,
    compute_capability: int | None = None,
    portable: bool = False,
) -> tuple[Array, Array]:
    """(o [B, T, HV, V] in v's dtype, final_state [N, HV, K, V] float32). `ops.delta_rule` says what arguments must be.

    compute_capability: what to compile for (90 for SM90) where there is no GPU to ask: to lower ahead of time.
    portable: lowered for other platforms than CUDA, run as the xla backend does; otherwise that fails.

    Composes with jit (it runs on shards of batch and heads as they lie), grad, vmap (folded into the batch; with
    cu_seqlens one call after the other), scan, jax.checkpoint, and shard_map over batch and heads. Raises
    kernels.call.UnsupportedByKernels for what only other backends do: see `why_not`.
    """
    target = target_of(portable=portable, compute_capability=compute_capability)
    options = _options(quant, scale, target.capability)
    if cu_seqlens is not None:
        # What the kernels read must lie inside the arrays even where a traced cu_seqlens breaks the rules.
        cu_seqlens = jnp.clip(jax.lax.cummax(cu_seqlens.astype(jnp.int32)), 0, inputs.q.shape[1])
    o, final_state = _delta_rule(target, options, inputs, cu_seqlens)
    return o, final_state


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _delta_rule(target: Target, options: Any, inputs: Inputs, cu_seqlens: Array | None):
    output = _forward(target, options, False)(inputs, cu_seqlens)
    return output[0], output[1]


def _delta_rule_fwd(target: Target, options: Any, inputs: Inputs, cu_seqlens: Array | None):
    o, final_state, residuals = _forward(target, options, True)(inputs, cu_seqlens)
    # In a scan over layers XLA fuses a launch with the stacking of its results. Where the next launch reads them too it
    # keeps the first as well, and so runs it twice (seen on the H200: intra_chunk_forward); copying costs less.
    kept = residuals._replace(h=None, h_scale=None)
    residuals = jax.lax.optimization_barrier(kept)._replace(h=residuals.h, h_scale=residuals.h_scale)
    return (o, final_state), (inputs, cu_seqlens, residuals)


def _delta_rule_bwd(target: Target, options: Any, saved: Any, cotangents: tuple[Array, Array]):
    inputs, cu_seqlens, residuals = saved
    do, dfinal = cotangents
    gradients = _backward(target, options)(inputs, cu_seqlens, residuals, do, dfinal)
    given: list[Any] = [None if x is None else d.astype(x.dtype) for x, d in zip(inputs, gradients, strict=True)]
    return Inputs(*given), None


_delta_rule.defvjp(_delta_rule_fwd, _delta_rule_bwd)


def _options(quant: DeltaQuant, scale: float, capability: int) -> Any:
    from jlaqat.kernels.call import options_for

    return options_for(capability, scale=scale, quant=quant)


def _operands(inputs: Inputs, cu_seqlens: Array | None) -> Any:
    """The kernels' inputs: gates and states in float32 whatever they were given in."""
    from jlaqat.kernels import call

    def as_float32(x: Any, *kept: Any) -> Any:
        if x is None or x.dtype in (jnp.float32, *kept):
            return x
        return (
            jax.ShapeDtypeStruct(x.shape, jnp.float32) if isinstance(x, jax.ShapeDtypeStruct) else x.astype("float32")
        )

    beta = as_float32(inputs.beta, jnp.bfloat16, jnp.float16)
    return call.Inputs(*inputs[:3], as_float32(inputs.g), beta, as_float32(inputs.initial_state), cu_seqlens)


# ------------------------------------------------------------------ the two directions, on whichever platform


_ROLES: tuple[Any, ...] = (*["tokens"] * 5, "rows")
_INPUTS: Any = Inputs(*_ROLES)


@functools.cache
def _forward(target: Target, options: Any, with_residuals: bool):
    """(inputs, cu_seqlens) -> kernels.call.Output, as a plain tuple."""
    from jlaqat.kernels import pipeline

    def kernels(inputs: Inputs, cu_seqlens: Array | None):
        operands = _operands(inputs, cu_seqlens)
        return tuple(pipeline.forward(target.run, operands, options, with_residuals=with_residuals))

    def elsewhere(inputs: Inputs, cu_seqlens: Array | None):
        """No residuals: the backward starts from the inputs again."""
        o, final_state = delta_rule_chunked(inputs, cu_seqlens, options.quant, QuantArrays(), options.scale)
        residuals = jax.eval_shape(kernels, inputs, cu_seqlens)[2]
        return o, final_state, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), residuals)

    return kernel_call(
        "delta_rule_forward",
        target,
        kernels,
        elsewhere,
        arguments=(_INPUTS, "sequences"),
        results=("tokens", "rows", "rows"),
        one_row=_packed,
    )


@functools.cache
def _backward(target: Target, options: Any):
    """(inputs, cu_seqlens, residuals, do, dfinal) -> kernels.call.Gradients, as a plain tuple."""
    from jlaqat.kernels import pipeline

    def kernels(inputs: Inputs, cu_seqlens: Array | None, residuals: Any, do: Array, dfinal: Array):
        operands = _operands(inputs, cu_seqlens)
        return tuple(pipeline.backward(target.run, operands, residuals, do, dfinal, options))

    def elsewhere(inputs: Inputs, cu_seqlens: Array | None, residuals: Any, do: Array, dfinal: Array):
        def run(inputs: Inputs):
            return delta_rule_chunked(inputs, cu_seqlens, options.quant, QuantArrays(), options.scale)

        gradients = jax.vjp(run, inputs)[1]((do, dfinal))[0]
        likes = jax.eval_shape(kernels, inputs, cu_seqlens, residuals, do, dfinal)
        return tuple(
            jnp.zeros(like.shape, like.dtype) if d is None else d.astype(like.dtype)
            for d, like in zip(gradients, likes, strict=True)
        )

    return kernel_call(
        "delta_rule_backward",
        target,
        kernels,
        elsewhere,
        arguments=(_INPUTS, "sequences", "rows", "tokens", "rows"),
        results=_ROLES,
        one_row=_packed,
    )


def _packed(inputs: Inputs, cu_seqlens: Array | None, *more: Any) -> bool:
    return cu_seqlens is not None
