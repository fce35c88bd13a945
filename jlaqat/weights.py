"""Weights to and from flash-linear-attention (FLA): one parameter here for each of its tensors, renamed and transposed.

    layer = GatedDeltaNet(2048, head_dim=256, num_heads=6, rngs=nnx.Rngs(0))
    load_fla_state_dict(layer, {name: tensor.float().numpy() for name, tensor in fla_layer.state_dict().items()})

| here | FLA (torch) |
|---|---|
| kernel [in, out] of a projection | weight [out, in] |
| kernel [size, dim] of a short convolution | weight [dim, 1, size] |
| scale of a norm, embedding | weight |
| bias, A_log, dt_bias | the same |
| a model's `embed`, `norm` | `model.embeddings`, `model.norm` |
| a model's `layers.{i}.mixer_norm`, `.mixer` | `model.layers.{i}.attn_norm`, `.attn` |
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jlaqat.blocks import ShortConvolution

# Paths of a DecoderLM to those of an FLA causal language model. A layer by itself has FLA's names already.
MODEL_NAMES = (
    (r"^embed\.", "model.embeddings."),
    (r"^layers\.(\d+)\.mixer_norm\.", r"model.layers.\1.attn_norm."),
    (r"^layers\.(\d+)\.mixer\.", r"model.layers.\1.attn."),
    (r"^layers\.", "model.layers."),
    (r"^norm\.", "model.norm."),
)
LEAF_NAMES = {"kernel": "weight", "scale": "weight", "embedding": "weight"}


class _Entry(NamedTuple):
    """One parameter and its tensor in FLA."""

    variable: nnx.Variable
    to_fla: Callable[[np.ndarray], np.ndarray]
    from_fla: Callable[[np.ndarray], np.ndarray]


def fla_state_dict(module: nnx.Module, *, prefix: str = "") -> dict[str, np.ndarray]:
    """The parameters of a layer or a DecoderLM under FLA's names, in torch's layout. `prefix` goes before each name.

    Numpy arrays of the parameters' dtypes and torch's shapes: matrices [out, in], convolutions [channels, 1, width].
    """
    return {
        name: entry.to_fla(np.asarray(entry.variable.get_value())) for name, entry in _entries(module, prefix).items()
    }


def load_fla_state_dict(module: nnx.Module, state_dict: Mapping[str, Any], *, prefix: str = "") -> None:
    """Set the parameters of a layer or a DecoderLM from an FLA state dict, in place, each in its own dtype.

    state_dict: FLA's name → array: numpy, JAX, or a CPU torch tensor of a dtype that numpy has (bfloat16: `.float()`).
    prefix: reads the names that start with it and leaves out the rest, e.g. "model.layers.3.attn.". Of a model with
    tied embeddings, `lm_head.weight` is accepted where it equals the embeddings.

    Raises ValueError, before anything is changed, that lists every missing name, extra name and wrong shape.
    """
    entries = _entries(module, prefix)
    given = {name: np.asarray(value) for name, value in state_dict.items() if name.startswith(prefix)}
    head, embeddings = f"{prefix}lm_head.weight", f"{prefix}model.embeddings.weight"
    if head not in entries and head in given and np.array_equal(given[head], given.get(embeddings, np.nan)):
        del given[head]
    problems = [f"missing {name}" for name in entries if name not in given]
    problems += [f"not a parameter of this {type(module).__name__}: {name}" for name in given if name not in entries]
    for name, entry in entries.items():
        expected = entry.to_fla(np.empty(entry.variable.shape, np.bool_)).shape
        if name in given and given[name].shape != expected:
            problems.append(f"{name} has shape {given[name].shape}, not {expected}")
    if problems:
        raise ValueError(
            f"the state dict does not fit this {type(module).__name__}; check its options and prefix={prefix!r}:\n  "
            + "\n  ".join(problems)
        )
    for name, entry in entries.items():
        entry.variable.set_value(jnp.asarray(entry.from_fla(given[name]), entry.variable.dtype))


def _entries(module: nnx.Module, prefix: str) -> dict[str, _Entry]:
    """FLA's name → parameter, for every parameter of `module`."""
    convolutions = {path for path, part in nnx.iter_modules(module) if isinstance(part, ShortConvolution)}
    is_model = hasattr(module, "embed") and hasattr(module, "layers")
    entries = {}
    for path, variable in nnx.iter_graph(module):
        if not isinstance(variable, nnx.Param):
            continue
        *owner, leaf = path
        name = ".".join(map(str, (*owner, LEAF_NAMES.get(str(leaf), leaf))))
        if is_model:
            for pattern, replacement in MODEL_NAMES:
                name, found = re.subn(pattern, replacement, name)
                if found:
                    break
        if leaf != "kernel":
            entry = _Entry(variable, _same, _same)
        elif tuple(owner) in convolutions:
            entry = _Entry(variable, lambda kernel: kernel.T[:, None, :], lambda weight: weight[:, 0, :].T)
        else:
            entry = _Entry(variable, np.transpose, np.transpose)
        entries[prefix + name] = entry
    return entries


def _same(array: np.ndarray) -> np.ndarray:
    return array
