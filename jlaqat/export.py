"""Plain weights, out and in: exports without quantizers (Orbax or safetensors), and loading them into a model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jlaqat.checkpoint import Checkpointer, find_checkpoints
from jlaqat.checkpoint_tree import (
    CheckpointMismatchError,
    compare,
    describe,
    like,
    nest,
    read_arrays,
    saved_arrays,
    tree_of,
)

FORMATS = ("orbax", "safetensors")


def export_stripped(
    source: nnx.Module | str | Path, path: str | Path, *, format: str | None = None, step: int | None = None
) -> Path:
    """Writes the parameters alone, without any trace of quantizers, to `path`; returns it.

    source: a model; or a run's directory, a directory of checkpoints (its latest step, or `step`) or a step's own,
    which needs no model.
    format: "orbax" (a directory, nested names) or "safetensors" (a file, dotted names, FLA's dtypes kept); None chooses
    by the suffix `.safetensors`. The file or directory appears only when it is complete.

    Raises FileExistsError if `path` is there already, ValueError for an unknown format.
    """
    path = Path(path).absolute()
    format = format or ("safetensors" if path.suffix == ".safetensors" else "orbax")
    if format not in FORMATS:
        raise ValueError(f"format={format!r} is unknown; choose one of {', '.join(map(repr, FORMATS))}.")
    if path.exists():
        raise FileExistsError(f"{path} is there already; exports never overwrite: remove it or choose another path.")
    params = tree_of(nnx.state(source, nnx.Param)) if isinstance(source, nnx.Module) else _read_params(source, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    if format == "orbax":
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as writer:
            writer.save(path, args=ocp.args.PyTreeSave(nest(params)))
        return path
    remote = [name for name, x in params.items() if not x.is_fully_addressable]
    if remote:
        raise ValueError(
            f"{remote[0]} is spread over several processes; save a checkpoint, and export from its directory in "
            "one process."
        )
    temporary = path.with_name(path.name + ".tmp")
    save_file({n: np.ascontiguousarray(x) for n, x in params.items()}, temporary, metadata={"format": "jlaqat"})
    os.replace(temporary, path)
    return path


def load_weights(model: nnx.Module, source: str | Path, *, step: int | None = None) -> nnx.Module:
    """Writes saved parameters into `model`, in place, with the shardings it has; quantizers stay as they are.

    source: a run's directory, a directory of checkpoints (its latest step, or `step`), a step's own directory, or an
    export of either format.
    Raises CheckpointMismatchError, before anything is changed, listing both sides where names, shapes or dtypes differ;
    FileNotFoundError where there are no weights, ValueError for a damaged file.
    """
    params = nnx.state(model, nnx.Param)
    wanted = tree_of(params)
    source = Path(source).absolute()
    if source.suffix == ".safetensors":
        saved = _safetensors_description(source)
    else:
        source = _params_directory(source, step)
        saved = describe(saved_arrays(source))
    lines = compare("params", saved, describe(wanted))
    if lines:
        raise CheckpointMismatchError("\n".join([f"the weights at {source} do not fit the model:", *lines]))
    if source.suffix == ".safetensors":
        with safe_open(source, framework="numpy") as file:
            read = {n: _place(file.get_tensor(n), x) for n, x in wanted.items()}
    else:
        read = read_arrays(source, wanted)
    nnx.update(model, like(params, read))
    return model


def _params_directory(source: Path, step: int | None) -> Path:
    """The Orbax item that holds the parameters: of a run, a checkpoint directory, or the export itself."""
    if (source / "_METADATA").is_file():
        return source
    directory, step = find_checkpoints(source, step)
    with Checkpointer(directory, read_only=True) as checkpointer:
        return checkpointer.step_directory(checkpointer.find_step(step)) / "params"


def _read_params(source: str | Path, step: int | None) -> dict[str, jax.Array]:
    path = _params_directory(Path(source).absolute(), step)
    templates = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in saved_arrays(path).items()}
    return read_arrays(path, templates)


def _safetensors_description(path: Path) -> dict[str, str]:
    if not path.is_file():
        raise FileNotFoundError(f"no weights at {path}: there is no such file.")
    try:
        with safe_open(path, framework="numpy") as file:
            return describe({n: _Slice(file.get_slice(n)) for n in file.keys()})  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is no safetensors file, or a damaged one: {error}.") from error


class _Slice:
    """Shape and dtype of a tensor in a safetensors file, without reading it."""

    DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}

    def __init__(self, tensor: Any) -> None:
        self.shape = tuple(tensor.get_shape())
        self.dtype = jnp.dtype(self.DTYPES.get(tensor.get_dtype(), "int32"))


def _place(value: np.ndarray, template: Any) -> jax.Array:
    return jax.device_put(value, getattr(template, "sharding", None))
