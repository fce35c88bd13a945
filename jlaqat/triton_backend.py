"""The Triton backend: kernels.pipeline through jax-triton, under one custom_vjp.

NVIDIA GPUs from SM80 on. `why_not` says, before anything runs, what stands in the way of a call.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp

from jlaqat.chunked import Inputs
from jlaqat.shards import vary_over, varying_axes
from jlaqat.spec import DeltaQuant

Array = jax.Array
MINIMUM_CAPABILITY = 80


def why_not(inputs: Inputs, quant: DeltaQuant, compute_capability: int | None = None) -> str | None:
    """The reason why this backend cannot serve a call, as the end of a sentence; None where it can.

    compute_capability: 90 for SM90 and so on; None asks the default device.
    """
    for package in ("triton", "jax_triton"):
        if importlib.util.find_spec(package) is None:
            return f"the package {package} is not installed (pip install 'jlaqat[cuda13]')"
    if compute_capability is None:
        if jax.default_backend() != "gpu":
            return f"JAX runs on {jax.default_backend()!r} here and Triton needs an NVIDIA GPU"
        compute_capability = device_capability()
    if compute_capability < MINIMUM_CAPABILITY:
        return f"the GPU is SM{compute_capability} and the kernels need SM{MINIMUM_CAPABILITY} or newer"
    if compute_capability >= 100 and quant.state is not None and _triton_version() < (3, 9):
        return "Triton before 3.9 cannot compile the rounded state scan for SM100 and newer (pip install 'triton>=3.9')"
    from jlaqat.kernels.call import Call, UnsupportedByKernels

    try:
        Call(lambda launch: {}, _operands(inputs, None), _options(quant, 1.0, compute_capability))
    except UnsupportedByKernels as reason:
        return str(reason)
    return None


def _triton_version() -> tuple[int, int]:
    import triton

    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


@functools.cache
def device_capability() -> int:
    """Compute capability of the default device, 90 for SM90; 0 where it has none."""
    text = getattr(jax.devices()[0], "compute_capability", "0")
    major, _, minor = text.partition(".")
    return int(major) * 10 + int(minor or 0)


def delta_rule_triton(
    inputs: Inputs,
    cu_seqlens: Array | None,
    quant: DeltaQuant,
    scale: float,
    *,
    compute_capability: int | None = None,
) -> tuple[Array, Array]:
    """(o [B, T, HV, V] in v's dtype, final_state [N, HV, K, V] float32). `ops.delta_rule` says what arguments must be.

    compute_capability: what to compile for (90 for SM90) where there is no GPU to ask: to lower ahead of time.

    Composes with jit, grad, vmap (folded into the batch; not with cu_seqlens), scan, jax.checkpoint and shard_map over
    batch and heads. Raises kernels.call.UnsupportedByKernels for what only other backends do: see `why_not`.
    """
    target = _Target(compute_capability or device_capability(), ahead_of_time=compute_capability is not None)
    options = _options(quant, scale, target.capability)
    if cu_seqlens is not None:
        # What the kernels read must lie inside the arrays even where a traced cu_seqlens breaks the rules.
        cu_seqlens = jnp.clip(jax.lax.cummax(cu_seqlens.astype(jnp.int32)), 0, inputs.q.shape[1])
    o, final_state = _delta_rule(target, options, inputs, cu_seqlens)
    return o, final_state


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _delta_rule(target: _Target, options: Any, inputs: Inputs, cu_seqlens: Array | None):
    output = _forward(target, options, False)(inputs, cu_seqlens)
    return output[0], output[1]


def _delta_rule_fwd(target: _Target, options: Any, inputs: Inputs, cu_seqlens: Array | None):
    o, final_state, residuals = _forward(target, options, True)(inputs, cu_seqlens)
    return (o, final_state), (inputs, cu_seqlens, residuals)


def _delta_rule_bwd(target: _Target, options: Any, saved: Any, cotangents: tuple[Array, Array]):
    inputs, cu_seqlens, residuals = saved
    do, dfinal = cotangents
    gradients = _backward(target, options)(inputs, cu_seqlens, residuals, do, dfinal)
    given: list[Any] = [None if x is None else d.astype(x.dtype) for x, d in zip(inputs, gradients, strict=True)]
    return Inputs(*given), None


_delta_rule.defvjp(_delta_rule_fwd, _delta_rule_bwd)


@dataclasses.dataclass(frozen=True)
class _Target:
    """Runs Launches through jax-triton, for one architecture."""

    capability: int
    ahead_of_time: bool

    def run(self, launch: Any) -> dict[str, Array]:
        import jax_triton

        axes = frozenset().union(*(varying_axes(x) for x in launch.inputs.values()))
        inputs = {name: vary_over(x, axes) for name, x in launch.inputs.items()}
        outputs = jax_triton.triton_call(
            kernel=launch.kernel,
            out_type=tuple(jax.ShapeDtypeStruct(b.shape, jnp.dtype(b.dtype)) for b in launch.outputs.values()),
            grid=(launch.grid,),
            name=launch.name,
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
            compute_capability=self.capability if self.ahead_of_time else None,
            backend_options={"enable_fp_fusion": True},
            **inputs,
            **launch.constants,
        )
        # jax-triton does not know that what it returns differs between devices as its operands do.
        return {name: vary_over(x, axes) for name, x in zip(launch.outputs, outputs, strict=True)}


def _options(quant: DeltaQuant, scale: float, capability: int) -> Any:
    from jlaqat.kernels.call import options_for

    return options_for(capability, scale=scale, quant=quant)


def _operands(inputs: Inputs, cu_seqlens: Array | None) -> Any:
    from jlaqat.kernels import call

    initial = inputs.initial_state
    return call.Inputs(
        inputs.q,
        inputs.k,
        inputs.v,
        inputs.g if inputs.g.dtype == jnp.float32 else inputs.g.astype(jnp.float32),
        inputs.beta,
        initial if initial is None or initial.dtype == jnp.float32 else initial.astype(jnp.float32),
        cu_seqlens,
    )


@functools.cache
def _forward(target: _Target, options: Any, with_residuals: bool):
    from jlaqat.kernels import pipeline

    def forward(inputs: Inputs, cu_seqlens: Array | None):
        return tuple(
            pipeline.forward(target.run, _operands(inputs, cu_seqlens), options, with_residuals=with_residuals)
        )

    return _folding_vmap(forward)


@functools.cache
def _backward(target: _Target, options: Any):
    from jlaqat.kernels import pipeline

    def backward(inputs: Inputs, cu_seqlens: Array | None, residuals: Any, do: Array, dfinal: Array):
        do, dfinal = do.astype(inputs.v.dtype), dfinal.astype(jnp.float32)
        operands = _operands(inputs, cu_seqlens)
        return tuple(pipeline.backward(target.run, operands, residuals, do, dfinal, options))

    return _folding_vmap(backward)


def _folding_vmap(function: Any) -> Any:
    """`function` with vmap folded into the batch: every array of the pipeline counts sequences or their rows first."""
    call = jax.custom_batching.custom_vmap(function)

    @call.def_vmap
    def rule(axis_size: int, in_batched: Any, *args: Any) -> Any:
        if args[1] is not None:
            raise NotImplementedError(
                "vmap over a call with cu_seqlens is not supported by backend='triton': pack the sequences into one "
                "row instead, or use backend='xla'."
            )

        def fold(x: Array, batched: bool) -> Array:
            x = x if batched else jnp.broadcast_to(x, (axis_size, *x.shape))
            return x.reshape(axis_size * x.shape[1], *x.shape[2:])

        outputs = call(*jax.tree.map(fold, args, tuple(in_batched)))
        unfolded = jax.tree.map(lambda x: x.reshape(axis_size, x.shape[0] // axis_size, *x.shape[1:]), outputs)
        return unfolded, jax.tree.map(lambda x: True, outputs)

    return call
