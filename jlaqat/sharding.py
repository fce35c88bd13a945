"""Where a training state and its batches live: a mesh with axes "data" and "model", and rules by parameter name.

Data parallel: batches are cut along "data", parameters are on every device. `fsdp` cuts the parameters (and with them
the optimizer's moments) along "data" as well and gathers them where they are used. Rules cut chosen parameters along
"model". XLA inserts the collectives; nothing here changes what is computed, only where.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jlaqat.naming import matches, named_leaves
from jlaqat.recipes import nearest
from jlaqat.train_step import Batch, TrainState, split_packed

logger = logging.getLogger("jlaqat")

AXES = ("data", "model")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardingRule:
    """Parameters whose dotted name the glob `name` covers are cut by `axes`: "data", "model" or null a dimension."""

    name: str
    axes: tuple[str | None, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", tuple(self.axes))
        unknown = [axis for axis in self.axes if axis not in (None, *AXES)]
        if unknown:
            raise ValueError(
                f"axes={self.axes!r} of rule {self.name!r}: {unknown[0]!r} is not 'data', 'model' or null."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardingConfig:
    """How many devices, and what is cut over them.

    Fields (all keyword-only):
      data: devices along "data"; −1 takes all that "model" leaves.
      model: devices along "model".
      fsdp: cut parameters along "data" too: of each, the largest dimension that divides and that no rule took.
      fsdp_min_size: smaller parameters stay whole.
      rules: by parameter name, the first that matches counts; a rule that matches nothing is an error.
    """

    data: int = 1
    model: int = 1
    fsdp: bool = False
    fsdp_min_size: int = 1024
    rules: tuple[ShardingRule, ...] = ()

    def __post_init__(self) -> None:
        if self.data < 1 and self.data != -1:
            raise ValueError(f"sharding.data={self.data} must be at least 1, or -1 for all devices that are left.")
        if self.model < 1:
            raise ValueError(f"sharding.model={self.model} must be at least 1.")


def make_mesh(config: ShardingConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh [data, model] of `config` over `devices` (all by default; what it does not need stays idle).

    Raises ValueError if there are too few, or if a process of a multi-process run would be left out.
    """
    devices = list(jax.devices() if devices is None else devices)
    data = len(devices) // config.model if config.data == -1 else config.data
    needed = max(data, 1) * config.model
    if needed > len(devices):
        raise ValueError(
            f"sharding.data={config.data} × sharding.model={config.model} needs {needed} devices and there are "
            f"{len(devices)}; lower them."
        )
    used = devices[:needed]
    idle = {d.process_index for d in devices} - {d.process_index for d in used}
    if idle:
        raise ValueError(
            f"the mesh of {needed} devices leaves out process {', '.join(map(str, sorted(idle)))}; "
            f"use sharding.data=-1 to take all {len(devices)} devices."
        )
    if needed < len(devices):
        logger.info("using %d of %d devices; sharding.data=-1 takes them all.", needed, len(devices))
    return Mesh(np.asarray(used).reshape(-1, config.model), AXES, axis_types=(AxisType.Auto, AxisType.Auto))


def param_specs(params: Any, config: ShardingConfig, mesh: Mesh) -> dict[str, PartitionSpec]:
    """The PartitionSpec of every parameter by dotted name.

    Raises ValueError for a rule that matches no parameter, has the wrong number of axes or does not divide.
    """
    named = named_leaves(params)
    for rule in config.rules:
        if not any(matches(name, (rule.name,)) for name in named):
            raise ValueError(f"sharding rule {rule.name!r} matches no parameter{nearest(rule.name, list(named))}")
    return {name: _param_spec(name, leaf.shape, config, mesh) for name, leaf in named.items()}


def _param_spec(name: str, shape: tuple[int, ...], config: ShardingConfig, mesh: Mesh) -> PartitionSpec:
    rule = next((r for r in config.rules if matches(name, (r.name,))), None)
    axes: list[str | None] = list(rule.axes) if rule else [None] * len(shape)
    if len(axes) != len(shape):
        raise ValueError(
            f"sharding rule {rule and rule.name!r} has {len(axes)} axes, but {name} has shape {tuple(shape)}; "
            f"give {len(shape)}."
        )
    for size, axis in zip(shape, axes):
        if axis is not None and size % mesh.shape[axis]:
            raise ValueError(
                f"sharding rule {rule and rule.name!r} cuts a dimension of {size} of {name} {tuple(shape)} over "
                f"{mesh.shape[axis]} devices of {axis!r}, which does not divide."
            )
    if config.fsdp and "data" not in axes and math.prod(shape) >= config.fsdp_min_size:
        free = [i for i, size in enumerate(shape) if axes[i] is None and size % mesh.shape["data"] == 0]
        if free:
            axes[max(free, key=lambda i: shape[i])] = "data"
    return PartitionSpec(*axes)


def state_shardings(state: TrainState, config: ShardingConfig, mesh: Mesh) -> TrainState:
    """The sharding of every array of a train state: parameters by `param_specs`, the optimizer's moments like their
    parameters, all else on every device. `state` may hold values or ShapeDtypeStructs."""
    specs = param_specs(state.params, config, mesh)
    shapes = {name: leaf.shape for name, leaf in named_leaves(state.params).items()}

    def of(name: str, leaf: Any) -> NamedSharding:
        # A moment's name is its parameter's behind the path of the transformation: `1.0.mu.layers.0.mixer.…`.
        words = name.split(".")
        for start in range(len(words)):
            param = ".".join(words[start:])
            if param in specs and shapes[param] == leaf.shape:
                return NamedSharding(mesh, specs[param])
        return NamedSharding(mesh, PartitionSpec())

    def tree(part: Any, *, by_name: bool) -> Any:
        shardings = [
            of(name, leaf) if by_name else NamedSharding(mesh, PartitionSpec())
            for name, leaf in named_leaves(part).items()
        ]
        return jax.tree.unflatten(jax.tree.structure(part), shardings)

    by_name = ("params", "opt_state")
    return TrainState(**{field: tree(getattr(state, field), by_name=field in by_name) for field in TrainState._fields})


def data_rows(batch: Batch, mesh: Mesh, accumulation: int = 1) -> Mapping[str, np.ndarray]:
    """A process's batch, packed ones cut into a row for each of its shards of "data" and micro-batches.

    Raises ValueError where the rows do not divide.
    """
    local = mesh.local_mesh.shape["data"]
    needed = local * accumulation
    if "cu_seqlens" in batch:
        return split_packed(batch, needed) if needed > 1 else batch
    rows = batch["inputs"].shape[0]
    if rows % needed:
        raise ValueError(
            f"a batch of {rows} rows does not divide over {local} devices of the axis 'data' × accumulation="
            f"{accumulation}; use a batch size that is a multiple of {needed}, or fewer devices."
        )
    return batch


def put_batch(batch: Batch, mesh: Mesh, accumulation: int = 1) -> dict[str, jax.Array]:
    """A process's batch as global arrays, rows cut along "data" in order of the processes."""
    rows = data_rows(batch, mesh, accumulation)
    whole = NamedSharding(mesh, PartitionSpec())
    cut = NamedSharding(mesh, PartitionSpec("data"))
    packed_row = "cu_seqlens" in rows and rows["cu_seqlens"].ndim == 1
    return {
        name: jax.make_array_from_process_local_data(whole if packed_row else cut, np.asarray(value))
        for name, value in rows.items()
    }
