"""The Triton backend: kernels.pipeline through jax-triton, under one custom_vjp.

NVIDIA GPUs from SM80 on. `why_not` says, before anything runs, what stands in the way of a call.

What is traced on a machine with a GPU may still be lowered for another platform (a jit on CPU devices, an export). A
portable call therefore holds the xla backend's formulas beside the kernels, and lowering takes one of the two.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import itertools
import string
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jlaqat.chunked import Inputs, delta_rule_chunked
from jlaqat.shards import all_varying_axes, partitioned, vary_over
from jlaqat.spec import DeltaQuant, QuantArrays

Array = jax.Array
MINIMUM_CAPABILITY = 80
_compile_for: list[int] = []


@contextlib.contextmanager
def compile_for(compute_capability: int) -> Iterator[None]:
    """Inside, `delta_rule` is traced for an NVIDIA GPU that this machine need not have: 90 for SM90.

    For lowering and export ahead of time, with `lowering_platforms=("cuda",)` or `jax.export`; docs/kernels.md has an
    example. JAX's caches are cleared on the way in and out: what was traced for one target must not serve another.
    """
    jax.clear_caches()
    _compile_for.append(compute_capability)
    try:
        yield
    finally:
        _compile_for.pop()
        jax.clear_caches()


def why_not(inputs: Inputs, quant: DeltaQuant, compute_capability: int | None = None) -> str | None:
    """The reason why this backend cannot serve a call, as the end of a sentence; None where it can.

    compute_capability: 90 for SM90 and so on; None asks the default device.
    """
    if compute_capability is None:
        compute_capability = target_capability()
    reason = cannot_run(compute_capability)
    if reason is not None:
        return reason
    if compute_capability >= 100 and quant.state is not None and _triton_version() < (3, 9):
        return "Triton before 3.9 cannot compile the rounded state scan for SM100 and newer (pip install 'triton>=3.9')"
    from jlaqat.kernels.call import Call, UnsupportedByKernels

    # How many sequences there are depends on cu_seqlens, and nothing that is asked here depends on it.
    operands = inputs._replace(initial_state=None)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), operands)
    try:
        Call(lambda launch: {}, _operands(shapes, None), _options(quant, 1.0, compute_capability))
    except UnsupportedByKernels as refusal:
        return str(refusal)
    return None


def cannot_run(compute_capability: int | None = None) -> str | None:
    """`why_not` for any kernel at all: what this machine lacks."""
    for package in ("triton", "jax_triton"):
        if importlib.util.find_spec(package) is None:
            return f"the package {package} is not installed (pip install 'jlaqat[cuda13]')"
    if compute_capability is None:
        compute_capability = target_capability()
    if compute_capability == 0:
        return (
            f"JAX runs on {_platform()} here and Triton needs an NVIDIA GPU (to lower for one, see jlaqat.compile_for)"
        )
    if compute_capability < MINIMUM_CAPABILITY:
        return f"the GPU is SM{compute_capability} and the kernels need SM{MINIMUM_CAPABILITY} or newer"
    return None


def _triton_version() -> tuple[int, int]:
    import triton

    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


def _platform() -> str:
    """JAX's platform in quotes, with the device's name where that says more."""
    kind = jax.devices()[0].device_kind
    return repr(jax.default_backend()) if jax.default_backend() == kind else f"{jax.default_backend()!r} ({kind})"


@functools.cache
def device_capability() -> int:
    """Compute capability of the default device, 90 for SM90; 0 where that is no NVIDIA GPU."""
    major, _, minor = str(getattr(jax.devices()[0], "compute_capability", "")).partition(".")
    return 10 * int(major) + int(minor) if major.isdecimal() and minor.isdecimal() else 0


def target_capability() -> int:
    """Compute capability that calls are traced for: that of `compile_for`, or of the default device."""
    return _compile_for[-1] if _compile_for else device_capability()


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
    if compute_capability is None and _compile_for:
        compute_capability = _compile_for[-1]
    target = _Target(compute_capability or device_capability(), compute_capability is not None, portable)
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
    portable: bool
    platform: str = "cuda"

    def run(self, launch: Any) -> dict[str, Array]:
        import jax_triton

        axes = all_varying_axes(dict(launch.inputs))
        inputs = {name: vary_over(x, axes) for name, x in launch.inputs.items()}
        outputs = jax_triton.triton_call(
            kernel=launch.kernel,
            out_type=tuple(jax.ShapeDtypeStruct(b.shape, jnp.dtype(b.dtype)) for b in launch.outputs.values()),
            grid=(launch.grid,),
            name=launch.name,
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
            compute_capability=self.capability if self.ahead_of_time else None,
            backend_options=launch.compiler_options,
            **inputs,
            **launch.constants,
        )
        # jax-triton does not know that what it returns differs between devices as its operands do.
        return {name: vary_over(x, axes) for name, x in zip(launch.outputs, outputs, strict=True)}


def run(launch: Any) -> dict[str, Array]:
    """Runs a Launch on the default device, or for what `compile_for` names."""
    return _Target(target_capability(), bool(_compile_for), portable=False).run(launch)


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


@functools.cache
def _forward(target: _Target, options: Any, with_residuals: bool):
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

    return _with_vmap("delta_rule_forward", target, kernels, elsewhere)


@functools.cache
def _backward(target: _Target, options: Any):
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

    return _with_vmap("delta_rule_backward", target, kernels, elsewhere)


def _on_each_platform(target: _Target, kernels: Any, elsewhere: Any, stacked: bool) -> Any:
    """`kernels` on CUDA, on shards of batch and heads as they lie; `elsewhere` on other platforms if it is portable.

    stacked: for calls stacked along an axis in front, which run one after the other.
    """
    if stacked:
        one, elsewhere = kernels, jax.vmap(elsewhere)

        def kernels(*args: Any):
            return jax.lax.map(lambda args: one(*args), args)

    def run(inputs: Inputs, cu_seqlens: Array | None, *more: Any):
        args = (inputs, cu_seqlens, *more)
        axes = all_varying_axes(args)
        leaves = jax.tree.leaves(args)
        tree: Any = jax.tree.structure(args)
        results = jax.eval_shape(kernels, *args)
        layouts = _Layouts(inputs, cu_seqlens, stacked)
        mapped = partitioned(
            lambda *leaves: jax.tree.leaves(kernels(*tree.unflatten(leaves))),
            jax.tree.leaves(layouts.of_arguments(*args)),
            jax.tree.leaves(layouts.of_results(results)),
        )

        def on_cuda(*leaves: Array):
            return jax.tree.unflatten(jax.tree.structure(results), mapped(*leaves))

        def on_others(*leaves: Array):
            return jax.tree.map(lambda x: vary_over(x, axes), elsewhere(*tree.unflatten(leaves)))

        if not target.portable:
            return on_cuda(*leaves)
        return jax.lax.platform_dependent(*leaves, default=on_others, **{target.platform: on_cuda})

    return run


class _Layouts:
    """How a call's arrays may be cut, see `jlaqat.shards`: along heads, and along sequences unless they are packed.

    Stacked calls are cut along the axis in front.
    """

    def __init__(self, inputs: Inputs, cu_seqlens: Array | None, stacked: bool):
        self.stacked = int(stacked)
        self.sequences = inputs.q.shape[0] if stacked or cu_seqlens is None else None
        self.heads = inputs.q.shape[2 + self.stacked]
        self.names = (f"whole{''.join(letters)}" for letters in itertools.product(string.ascii_lowercase, repeat=2))

    def tokens(self, x: Any) -> str:
        """[B, T, H or HV, ...]"""
        return self._layout(x, 2)

    def rows(self, x: Any) -> str:
        """[sequences, or what they consist of, HV, ...]: states, and everything that the kernels keep."""
        return self._layout(x, 1)

    def of_arguments(self, inputs: Inputs, cu_seqlens: Array | None, *more: Any) -> Any:
        state = None if inputs.initial_state is None else self.rows(inputs.initial_state)
        tokens = [self.tokens(x) for x in inputs[:5]]
        layouts: list[Any] = [tokens, state, None if cu_seqlens is None else self._layout(cu_seqlens, None)]
        if more:
            residuals, do, dfinal = more
            layouts += [jax.tree.map(self.rows, residuals), self.tokens(do), self.rows(dfinal)]
        return layouts

    def of_results(self, results: Any) -> Any:
        """Output: o, states, residuals. Gradients: five like the inputs, and the states'."""
        tokens = 1 if len(results) == 3 else 5
        return [jax.tree.map(self.tokens, results[:tokens]), jax.tree.map(self.rows, results[tokens:])]

    def _layout(self, x: Any, head_axis: int | None) -> str:
        return " ".join(
            self._word(axis, size, head_axis is not None and axis == head_axis + self.stacked)
            for axis, size in enumerate(x.shape)
        )

    def _word(self, axis: int, size: int, is_head: bool) -> str:
        if axis == 0 and self.sequences is not None:
            return "b" if size == self.sequences else f"(b {next(self.names)})"
        if is_head:
            return "h" if size == self.heads else "hv"
        return next(self.names)


def _with_vmap(name: str, target: _Target, kernels: Any, elsewhere: Any) -> Any:
    """Both platforms' function, traced once a shape, under vmap folded into the batch: arrays count sequences first.

    Calls with cu_seqlens have a batch of one row to themselves; they are stacked, and stacks are folded.
    """

    def make(stacked: bool) -> Any:
        function = _on_each_platform(target, kernels, elsewhere, stacked)
        function.__name__ = f"{name}_of_calls" if stacked else name
        return jax.custom_batching.custom_vmap(jax.jit(function))

    call, calls = make(False), make(True)

    def fold(again: Any, axis_size: int, in_batched: Any, *args: Any) -> Any:
        def stack(x: Array, batched: bool) -> Array:
            return x if batched else jnp.broadcast_to(x, (axis_size, *x.shape))

        args = jax.tree.map(stack, args, tuple(in_batched))
        if again is call and args[1] is not None:
            outputs = calls(*args)
        else:
            outputs = again(*jax.tree.map(lambda x: x.reshape(axis_size * x.shape[1], *x.shape[2:]), args))
            outputs = jax.tree.map(lambda x: x.reshape(axis_size, x.shape[0] // axis_size, *x.shape[1:]), outputs)
        return outputs, jax.tree.map(lambda x: True, outputs)

    for function in (call, calls):
        function.def_vmap(functools.partial(fold, function))
    return call
