"""Where a loss or gradient stopped being finite: batch, parameter, layer, quantizer. Slow, and run only then."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jlaqat.naming import named_leaves
from jlaqat.quantizers import find_quantizers
from jlaqat.train_step import Batch, forward

_SHOWN = 5


class NonFiniteError(FloatingPointError):
    """Training met a NaN or an infinity and stopped before using it. The message says where; the fields say it again.

    step: the step that failed, counted from 1 (the last good state is that of step − 1).
    layer: dotted name of the first module whose output was not finite, else of the layer where the gradient first
      stopped being finite on its way back; None if neither was found again.
    quantizer: name of the first quantizer that was handed something not finite, or None.
    parameters: names of parameters whose gradient was not finite.
    checkpoint: the last step on disk, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        step: int,
        layer: str | None,
        quantizer: str | None,
        parameters: tuple[str, ...],
        checkpoint: int | None,
    ) -> None:
        super().__init__(message)
        self.step, self.layer, self.quantizer = step, layer, quantizer
        self.parameters, self.checkpoint = parameters, checkpoint


def natural_order(name: str) -> list[tuple[int, int, str]]:
    """Sort key that puts `layers.2` before `layers.10`."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"\.", name)]


def explain_non_finite(
    model: nnx.Module, batch: Batch, metrics: Mapping[str, Any], *, step: int, checkpoint: int | None
) -> NonFiniteError:
    """The error to raise for a step whose `metrics["finite"]` was False.

    model: holds the values from before the step. batch, metrics: the step's.
    """
    params = named_leaves(nnx.state(model, nnx.Param))
    bad_inputs = [name for name, value in batch.items() if not _finite(value)]
    bad_params = [name for name, value in params.items() if not _finite(value)]
    flags = np.asarray(metrics["grad_finite"])
    gradients = tuple(sorted((n for n, ok in zip(params, flags) if not ok), key=natural_order))
    modules, quantizers = _trace_forward(model, batch)
    layer = modules[0] if modules else _deepest_layer(gradients)

    loss = float(metrics["loss"])
    norms = f"gradient norm {float(metrics['grad_norm'])}, update norm {float(metrics['update_norm'])}"
    lines = [f"step {step}: loss {loss}, {norms}; training stopped before the update."]
    lines.append(f"  layer: {layer or 'none found'}" + ("" if modules or not layer else " (in the backward pass)"))
    lines.append(f"  quantizer: {quantizers[0] if quantizers else 'none was handed a non-finite value'}")
    if gradients:
        lines.append(f"  gradients not finite in {len(gradients)} of {len(params)} parameters: {_some(gradients)}")
    if bad_params:
        lines.append(f"  parameters not finite before the step: {_some(bad_params)}")
    if bad_inputs:
        lines.append(f"  the batch itself is not finite: {_some(bad_inputs)}")
    kept = "no checkpoint was written yet" if checkpoint is None else f"the last good checkpoint is step {checkpoint}"
    lines.append(f"  {kept}. {_remedy(bad_inputs, bad_params)}")
    return NonFiniteError(
        "\n".join(lines),
        step=step,
        layer=layer,
        quantizer=quantizers[0] if quantizers else None,
        parameters=gradients,
        checkpoint=checkpoint,
    )


def _remedy(bad_inputs: list[str], bad_params: list[str]) -> str:
    if bad_inputs:
        return "Clean the data."
    if bad_params:
        return "Start from weights that are finite."
    return "Lower optimizer.learning_rate or optimizer.clip_norm, warm up longer, or compute in float32."


def _some(names: Any) -> str:
    names = list(names)
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _finite(value: Any) -> bool:
    value = jnp.asarray(value)
    return not jnp.issubdtype(value.dtype, jnp.inexact) or bool(jnp.all(jnp.isfinite(value)))


def _deepest_layer(parameters: tuple[str, ...]) -> str | None:
    """The layer nearest to the loss among those whose gradients are not finite: the backward pass meets it first."""
    layers = [".".join(name.split(".")[:2]) for name in parameters if name.split(".")[0] == "layers"]
    return layers[-1] if layers else (parameters[-1].rpartition(".")[0] if parameters else None)


# ------------------------------------------------------------------ the forward pass again, looking


def _trace_forward(model: nnx.Module, batch: Batch) -> tuple[list[str], list[str]]:
    """Names of modules with non-finite outputs, innermost and earliest first, and of quantizers handed such values."""
    graphdef, state = nnx.split(model)
    copy = nnx.merge(graphdef, state, copy=True)
    _unroll(copy)
    quantizers = {name: q for name, q in find_quantizers(copy).items() if q.enabled}
    for q in quantizers.values():
        q.start_observing()
    with _watch_outputs(copy) as found:
        for row in _calls(batch):
            forward(copy, row)
    seen = [name for name, q in quantizers.items() if q.stats and float(jnp.sum(q.stats.get_value().nonfinite)) > 0]
    return found, seen


def _calls(batch: Batch) -> list[Batch]:
    """The batch as calls without vmap, under which values cannot be looked at: several packed rows one by one."""
    if "cu_seqlens" not in batch or batch["cu_seqlens"].ndim == 1:
        return [batch]
    rows = range(batch["inputs"].shape[0])
    return [{"inputs": batch["inputs"][i : i + 1], "cu_seqlens": batch["cu_seqlens"][i]} for i in rows]


def _unroll(model: nnx.Module) -> None:
    """Scanned or rematerialised layers are traced, and traced values cannot be looked at: run them one by one."""
    config = getattr(model, "config", None)
    if dataclasses.is_dataclass(config) and hasattr(config, "scan_layers") and not isinstance(config, type):
        model.config = dataclasses.replace(config, scan_layers=False, remat=False)  # type: ignore[attr-defined]


@contextlib.contextmanager
def _watch_outputs(model: nnx.Module) -> Iterator[list[str]]:
    """While open, every method call on a submodule is watched; the list names those that returned non-finite values."""
    names = {id(m): ".".join(map(str, path)) for path, m in nnx.iter_modules(model)}
    found: list[str] = []
    patched: list[tuple[type, str, Any]] = []

    def watched(method: Any) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            out = method(self, *args, **kwargs)
            arrays = [
                x for x in jax.tree.leaves(out) if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
            ]
            name = names.get(id(self))
            if name and name not in found and not all(_finite(x) for x in arrays):
                found.append(name)
            return out

        return call

    classes = {cls for _, m in nnx.iter_modules(model) for cls in type(m).__mro__ if _is_own(cls)}
    for cls in classes:
        for attribute, method in list(vars(cls).items()):
            if inspect.isfunction(method) and (attribute == "__call__" or attribute[0] != "_"):
                patched.append((cls, attribute, method))
                setattr(cls, attribute, watched(method))
    try:
        yield found
    finally:
        for cls, attribute, method in patched:
            setattr(cls, attribute, method)


def _is_own(cls: type) -> bool:
    """Module classes with a forward pass; not Flax's base classes, whose methods are machinery."""
    return issubclass(cls, nnx.Module) and cls is not nnx.Module
