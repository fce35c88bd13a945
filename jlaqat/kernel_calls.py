"""Functions made of kernel launches as JAX runs them anywhere: `kernel_call`, and the GPU that launches are traced for.

To JAX a launch is opaque: it cannot be batched, XLA gathers its operands, and it lowers for CUDA alone. `kernel_call`
gives a function of launches the rules that make up for it; gradients are the caller's.

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
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jlaqat import compile_cache
from jlaqat.shards import all_varying_axes, partitioned, vary_over

Array = jax.Array
MINIMUM_CAPABILITY = 80
_compile_for: list[int] = []
HEAD_AXIS = {"tokens": 2, "rows": 1, "sequences": None}
"""What an array of a `kernel_call` is, and where its heads are:

tokens: [B, T, H or HV, ...]; T may count something else, which is kept of several tokens.
rows: [B·n, HV, ...]: states, and everything else that is kept for sequences or parts of them.
sequences: [B·n]: numbers of sequences, such as their bounds.
"""

# ------------------------------------------------------------------ for which GPU


@contextlib.contextmanager
def compile_for(compute_capability: int) -> Iterator[None]:
    """Inside, `delta_rule` and its relatives are traced for an NVIDIA GPU that this machine need not have: 90 for SM90.

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


@dataclasses.dataclass(frozen=True)
class Target:
    """Runs Launches through jax-triton, for one architecture."""

    capability: int
    ahead_of_time: bool
    portable: bool
    platform: str = "cuda"

    def run(self, launch: Any) -> dict[str, Array]:
        axes = all_varying_axes(dict(launch.inputs))
        inputs = {name: vary_over(x, axes) for name, x in launch.inputs.items()}
        shapes = [jax.ShapeDtypeStruct(b.shape, jnp.dtype(b.dtype)) for b in launch.outputs.values()]
        shapes += [jax.ShapeDtypeStruct(inputs[name].shape, inputs[name].dtype) for name in launch.in_place]
        aliases = {launch.operands.index(name): len(launch.outputs) + i for i, name in enumerate(launch.in_place)}
        outputs = _triton_call(
            kernel=launch.kernel,
            out_type=tuple(shapes),
            input_output_aliases=aliases,
            grid=(launch.grid,),
            name=launch.name,
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
            compute_capability=self.capability if self.ahead_of_time else None,
            backend_options=launch.compiler_options,
            **inputs,
            **launch.constants,
        )
        if launch.in_place:
            # In a scan XLA fuses a launch with the stacking of its results, and then leaves out what was changed in
            # place, or launches twice, once on copies; behind a barrier it stacks what the launch has left.
            outputs = jax.lax.optimization_barrier(outputs)
        # jax-triton does not know that what it returns differs between devices as its operands do.
        names = (*launch.outputs, *launch.in_place)
        return {name: vary_over(x, axes) for name, x in zip(names, outputs, strict=True)}


def _triton_call(**arguments: Any) -> tuple[Array, ...]:
    import jax_triton

    compile_cache.install()
    with warnings.catch_warnings():  # it would rather have mutable arrays, which custom_partitioning does not take
        warnings.filterwarnings("ignore", "input_output_aliases", DeprecationWarning)
        return jax_triton.triton_call(**arguments)


def target_of(*, portable: bool, compute_capability: int | None = None) -> Target:
    """The target of a call: an architecture by name, that of `compile_for`, or the default device's."""
    if compute_capability is None and _compile_for:
        compute_capability = _compile_for[-1]
    return Target(compute_capability or device_capability(), compute_capability is not None, portable)


def run(launch: Any) -> dict[str, Array]:
    """Runs a Launch on the default device, or for what `compile_for` names."""
    return target_of(portable=False).run(launch)


# ------------------------------------------------------------------ what JAX may do with a function of launches


def kernel_call(
    name: str,
    target: Target,
    kernels: Callable[..., Any],
    elsewhere: Callable[..., Any],
    arguments: tuple[Any, ...],
    results: tuple[Any, ...],
    *,
    one_row: Callable[..., bool] = lambda *args: False,
) -> Callable[..., Any]:
    """`kernels(*args) -> tuple`, a function of launches through `target.run`, as a function that JAX can transform.

    Traced once a shape. Under jit it runs on shards of sequences and heads as they lie; vmap folds calls into axis 0 of
    all arrays. Not differentiable.

    elsewhere: the same in plain JAX, for other platforms than CUDA where the target is portable; it sees one call,
      and JAX vmaps it.
    arguments, results: what the arrays are, a key of HEAD_AXIS for each argument or a pytree of such keys. The first
      array of all is [B, T, H, ...].
    one_row(*args): the kernels take one row of tokens for all sequences (B = 1), so that there is no batch to fold
      into: calls under vmap run one after the other, on the devices that their rows lie on.
    """

    @functools.cache
    def of_calls(calls: int, stacked: bool) -> Any:
        """The function of so many calls, folded into one, or stacked along an axis in front."""
        here, there = _of_stacked(kernels, elsewhere) if stacked else (kernels, _of_folded(elsewhere, calls))
        function = _on_each_platform(target, here, there, (arguments, results), one_row, stacked)
        function.__name__ = name if calls == 1 else f"{name}_of_calls"
        mapped = jax.custom_batching.custom_vmap(jax.jit(function))
        mapped.def_vmap(functools.partial(fold, calls, stacked))
        return mapped

    def fold(calls: int, stacked: bool, axis_size: int, in_batched: Any, *args: Any) -> Any:
        def stack(x: Array, batched: bool) -> Array:
            return x if batched else jnp.broadcast_to(x, (axis_size, *x.shape))

        args = jax.tree.map(stack, args, tuple(in_batched))
        if not stacked and one_row(*args):
            outputs = of_calls(axis_size, True)(*args)
        else:
            args = jax.tree.map(lambda x: x.reshape(axis_size * x.shape[1], *x.shape[2:]), args)
            outputs = of_calls(calls * axis_size, stacked)(*args)
            outputs = _unfold(outputs, axis_size)
        return outputs, jax.tree.map(lambda x: True, outputs)

    return of_calls(1, False)


def _unfold(tree: Any, calls: int) -> Any:
    """[calls · n, ...] → [calls, n, ...] for all arrays."""
    return jax.tree.map(lambda x: x.reshape(calls, x.shape[0] // calls, *x.shape[1:]), tree)


def _of_folded(function: Any, calls: int) -> Any:
    """`function` of one call for arguments and results of many, folded."""
    if calls == 1:
        return function

    def run(*args: Any):
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), jax.vmap(function)(*_unfold(args, calls)))

    return run


def _of_stacked(kernels: Any, elsewhere: Any) -> tuple[Any, Any]:
    """Both for calls along an axis in front: those of kernels run one after the other."""

    def run(*args: Any):
        return jax.lax.map(lambda args: kernels(*args), args)

    return run, jax.vmap(elsewhere)


def _on_each_platform(
    target: Target, kernels: Any, elsewhere: Any, roles: Any, one_row: Callable[..., bool], stacked: bool
) -> Any:
    """`kernels` on CUDA, on shards of batch and heads as they lie; `elsewhere` on other platforms if it is portable.

    stacked: for calls stacked along an axis in front.
    """

    def run(*args: Any):
        axes = all_varying_axes(args)
        leaves = jax.tree.leaves(args)
        tree: Any = jax.tree.structure(args)
        results = jax.eval_shape(kernels, *args)
        layouts = _Layouts(leaves[0], cut_batch=stacked or not one_row(*args), stacked=stacked)
        mapped = partitioned(
            lambda *leaves: jax.tree.leaves(kernels(*tree.unflatten(leaves))),
            layouts.of(roles[0], args),
            layouts.of(roles[1], results),
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
    """How a call's arrays may be cut, see `jlaqat.shards`: along heads, and along the batch where there is one.

    Stacked calls are cut along the axis in front.
    """

    def __init__(self, q: Array, *, cut_batch: bool, stacked: bool):
        self.stacked = int(stacked)
        self.batch = q.shape[0] if cut_batch else None
        self.heads = q.shape[2 + self.stacked]
        self.names = (f"whole{''.join(letters)}" for letters in itertools.product(string.ascii_lowercase, repeat=2))

    def of(self, roles: Any, arrays: Any) -> list[str]:
        """Layouts of the leaves; roles: keys of HEAD_AXIS, as a prefix of the tree."""
        roles = jax.tree.leaves(jax.tree.broadcast(roles, arrays))
        return [self._layout(x, HEAD_AXIS[role]) for role, x in zip(roles, jax.tree.leaves(arrays), strict=True)]

    def _layout(self, x: Any, head_axis: int | None) -> str:
        return " ".join(
            self._word(axis, size, head_axis is not None and axis == head_axis + self.stacked)
            for axis, size in enumerate(x.shape)
        )

    def _word(self, axis: int, size: int, is_head: bool) -> str:
        if axis == 0 and self.batch is not None:
            return "b" if size == self.batch else f"(b {next(self.names)})"
        if is_head:
            return "h" if size == self.heads else "hv"
        return next(self.names)
