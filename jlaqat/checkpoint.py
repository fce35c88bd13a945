"""Checkpoints: an Orbax composite of everything a run needs to go on bit for bit, checked before an array is read.

    with Checkpointer("runs/a/checkpoints", max_to_keep=3) as checkpointer:
        checkpointer.save(100, model, opt_state=state.opt_state, data_state=iterator.get_state())
        restored = checkpointer.restore(model, opt_state=state.opt_state)      # into `model`, in place

A step's directory holds the items `params`, `optimizer`, `quantizers`, `variables` (arrays, each readable with plain
Orbax) and `quantizer_metadata`, `data`, `config`, `meta` (JSON); see docs/checkpoints.md. A directory appears under its
final name only when it is complete, so a process killed at any moment leaves the last complete step.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import shutil
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint.checkpoint_managers import preservation_policy as policies

from jlaqat.checkpoint_quantizers import recreate_quantizers
from jlaqat.checkpoint_tree import CheckpointMismatchError as CheckpointMismatchError
from jlaqat.checkpoint_tree import (
    compare,
    describe,
    is_key,
    like,
    nest,
    read_arrays,
    saved_arrays,
    split_model,
    tree_of,
)
from jlaqat.naming import named_leaves
from jlaqat.quantizers import quantizer_metadata

logger = logging.getLogger("jlaqat")

FORMAT_VERSION = 1
# Where Orbax moves steps that retention drops, in one rename; removed from there at leisure. A half-deleted step can
# therefore never pass for a complete one.
_DOOMED = ".deleting"
# Orbax writes under such a name and renames at the end.
_UNFINISHED = ".orbax-checkpoint-tmp"
_LOCK = ".lock"


class Restored(NamedTuple):
    """What a restore hands back beside the values that it wrote into the model."""

    step: int
    opt_state: Any  # the shape of the template given, or None
    data_state: Any  # the iterator state of this process, or None
    config: dict[str, Any] | None
    quantizers: str  # what was done about the quantizers, a sentence for the log
    metrics: dict[str, float]  # as given to save


def find_checkpoints(path: str | Path, step: int | None = None) -> tuple[Path, int | None]:
    """(directory of checkpoints, step) that `path` names: a run's directory, a directory of checkpoints, or one step's.

    step: which one, None for the latest. Raises ValueError where the path is that of another step.
    """
    path = Path(path).absolute()
    if (path / "checkpoints").is_dir():
        return path / "checkpoints", step
    if path.name.isdigit() and (path / "meta").is_dir():
        if step not in (None, int(path.name)):
            raise ValueError(f"step={step} was given, but {path} is step {path.name}; leave one of them out.")
        return path.parent, int(path.name)
    return path, step


class Checkpointer:
    """Saves and restores a model, its optimizer and its place in the data under `directory`/<step>/.

    Args:
      directory: made if it is not there (unless read_only).
      max_to_keep: the latest steps that stay; None keeps all.
      keep_best: steps that stay for their metrics, beside the latest; needs `best_metric`. Steps saved without that
        metric are not ranked.
      best_metric: name of a metric given to `save`; `best_mode` says whether "min" or "max" is best.
      asynchronous: `save` returns once the values are copied to host memory and writes in the background. Off, the step
        is on disk when `save` returns.
      read_only: for evaluation beside a running training: nothing is cleaned, locked or written.

    Opening removes half-written steps. One writer at a time: a second one raises RuntimeError. Every process of a
    multi-process run opens, saves and restores together.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        max_to_keep: int | None = 3,
        keep_best: int = 0,
        best_metric: str | None = None,
        best_mode: str = "min",
        asynchronous: bool = False,
        read_only: bool = False,
    ) -> None:
        if max_to_keep is not None and max_to_keep < 1:
            raise ValueError(f"max_to_keep={max_to_keep} must be at least 1, or None to keep every step.")
        if bool(keep_best) != (best_metric is not None):
            raise ValueError(
                f"keep_best={keep_best} and best_metric={best_metric!r} go together: give both or neither."
            )
        if best_mode not in ("min", "max"):
            raise ValueError(f"best_mode={best_mode!r} is unknown; choose 'min' or 'max'.")
        self.directory = Path(directory).absolute()
        self.read_only, self._best_metric = read_only, best_metric
        self._lock: int | None = None
        if not read_only:
            self._acquire_lock()
            self._remove_unfinished()
            self._remove_doomed()
        elif not self.directory.is_dir():
            raise FileNotFoundError(f"no checkpoints at {self.directory}: there is no such directory.")
        keep: list[Any] = [policies.LatestN(max_to_keep)]
        if keep_best:
            best = policies.BestN(
                get_metric_fn=lambda metrics: metrics.get(best_metric, math.inf if best_mode == "min" else -math.inf),
                reverse=best_mode
                == "min",  # Orbax keeps the end of the order: the largest, or with reverse the smallest
                n=keep_best,
                keep_checkpoints_without_metrics=False,
            )
            keep.append(best)
        self._manager = ocp.CheckpointManager(
            self.directory,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=policies.AnyPreservationPolicy(keep),
                todelete_subdir=_DOOMED,
                enable_async_checkpointing=asynchronous,
                read_only=read_only,
            ),
        )

    # -------------------------------------------------------------- looking

    def all_steps(self) -> list[int]:
        """The complete steps, in order."""
        return sorted(self._manager.all_steps())

    def latest_step(self) -> int | None:
        """The latest complete step, or None."""
        return self._manager.latest_step()

    def step_directory(self, step: int) -> Path:
        return self.directory / str(step)

    def config(self, step: int | None = None) -> dict[str, Any] | None:
        """The config saved with a step (the latest by default), as the dict that was given."""
        return _read_json(self.step_directory(self.find_step(step)) / "config")

    def find_step(self, step: int | None) -> int:
        steps = self.all_steps()
        if not steps:
            raise FileNotFoundError(f"no complete checkpoint at {self.directory}.")
        if step is None:
            return steps[-1]
        if step not in steps:
            raise FileNotFoundError(f"step {step} is not at {self.directory}; it has {', '.join(map(str, steps))}.")
        return step

    # -------------------------------------------------------------- saving

    def save(
        self,
        step: int,
        model: nnx.Module,
        *,
        opt_state: Any = None,
        data_state: Any = None,
        config: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Writes one step: the model as it stands (later edits of its quantizers included), and whatever else is given.

        data_state: JSON, as an iterator's get_state() returns it; every process gives its own. metrics: floats that
        retention ranks by. Raises RuntimeError if read_only, ValueError for a step that is already there.
        """
        if self.read_only:
            raise RuntimeError(f"{self.directory} was opened with read_only=True; open it without to save.")
        if step in self.all_steps():
            raise ValueError(f"step {step} is already at {self.directory}; a saved step is never overwritten.")
        _, params, quantizers, variables = split_model(model)
        trees = {"params": params, "optimizer": opt_state, "quantizers": quantizers, "variables": variables}
        items: dict[str, ocp.args.CheckpointArgs] = {
            name: ocp.args.PyTreeSave(nest(arrays)) for name, tree in trees.items() if (arrays := tree_of(tree))
        }
        keys = {n: str(jax.random.key_impl(x)) for n, x in named_leaves(variables).items() if is_key(x)}
        meta = {"format_version": FORMAT_VERSION, "step": step, "key_impls": keys, "versions": _versions()}
        documents = {
            "meta": meta | {"metrics": dict(metrics or {})},
            "quantizer_metadata": quantizer_metadata(model),
            "data": None if data_state is None else {"processes": _gather(data_state)},
            "config": None if config is None else dict(config),
        }
        items |= {name: ocp.args.JsonSave(doc) for name, doc in documents.items() if doc is not None}
        ranked = metrics and (self._best_metric is None or self._best_metric in metrics)
        self._manager.save(step, args=ocp.args.Composite(**items), metrics=dict(metrics or {}) if ranked else None)
        self._remove_doomed()

    # -------------------------------------------------------------- restoring

    def validate(self, model: nnx.Module, *, opt_state: Any = None, step: int | None = None) -> None:
        """Compares names, shapes and dtypes of a step with the model's (and optimizer's), reading no array.

        Raises CheckpointMismatchError listing both sides.
        """
        step = self.find_step(step)
        path = self.step_directory(step)
        _, params, _, variables = split_model(model)
        wanted = {"params": params, "variables": variables}
        if opt_state is not None:
            wanted["optimizer"] = opt_state
        lines = []
        for item, tree in wanted.items():
            lines += compare(item, describe(saved_arrays(path / item)), describe(tree_of(tree)))
        keys = _read_json(path / "meta")["key_impls"]
        here = {n: str(jax.random.key_impl(x)) for n, x in named_leaves(variables).items() if is_key(x)}
        lines += compare("variables (PRNG keys)", keys, here) if not lines else []
        if lines:
            raise CheckpointMismatchError(
                "\n".join(
                    [
                        f"step {step} at {self.directory} does not fit the model:",
                        *lines,
                        "  Build the model (and optimizer) with the config saved in the checkpoint, or load the "
                        "weights alone into a model of the same parameters with load_weights.",
                    ]
                )
            )

    def restore(
        self, model: nnx.Module, *, opt_state: Any = None, step: int | None = None, quantizers: str = "match"
    ) -> Restored:
        """Writes a step (the latest by default) into `model`, in place, with the shardings that its arrays have now.

        Args:
          opt_state: a template for the optimizer's state (values or ShapeDtypeStructs); None leaves it unread.
          quantizers: "match": the checkpoint's quantizers must be the model's; a checkpoint that has none enabled
            leaves the model's as they are. "checkpoint": the model's quantizers become the checkpoint's. "model": the
            model keeps its own (none, if it is plain) and the checkpoint's are not read.

        Structure is compared first; CheckpointMismatchError lists what differs, and then nothing was changed.
        """
        step = self.find_step(step)
        path = self.step_directory(step)
        self.validate(model, opt_state=opt_state, step=step)
        saved = saved_arrays(path / "quantizers")
        metadata = _read_json(path / "quantizer_metadata")
        sources, words = recreate_quantizers(model, metadata, saved, mode=quantizers, where=str(path))
        _, params, quantizer_state, variables = split_model(model)
        for item, tree in (("params", params), ("variables", variables)):
            nnx.update(model, like(tree, read_arrays(path / item, tree_of(tree))))
        arrays = tree_of(quantizer_state)
        templates = {source: _beside(params, arrays[name]) for name, source in sources.items()}
        read = read_arrays(path / "quantizers", templates)
        arrays |= {name: read[source] for name, source in sources.items()}
        nnx.update(model, like(quantizer_state, arrays))
        if opt_state is not None:
            opt_state = like(opt_state, read_arrays(path / "optimizer", tree_of(opt_state)))
        return Restored(
            step,
            opt_state,
            self._data_state(path),
            _read_json(path / "config"),
            words,
            _read_json(path / "meta")["metrics"],
        )

    def _data_state(self, path: Path) -> Any:
        saved = _read_json(path / "data")
        if saved is None:
            return None
        states = saved["processes"]
        if len(states) == jax.process_count():
            return states[jax.process_index()]
        if all(state == states[0] for state in states):  # jlaqat's datasets: every process stands at the same batch
            return states[0]
        raise CheckpointMismatchError(
            f"{path} has the data positions of {len(states)} processes and they differ, but this run has "
            f"{jax.process_count()}; run with {len(states)} processes, or restore without the data position."
        )

    # -------------------------------------------------------------- housekeeping

    def wait(self) -> None:
        """Returns when an asynchronous save is on disk; raises what went wrong with it."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits for a save under way, and lets another writer in."""
        self._manager.close()
        if not self.read_only:
            self._remove_doomed()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _acquire_lock(self) -> None:
        """Takes the directory's lock, which the kernel releases when the process dies, however it dies."""
        if jax.process_index() != 0:
            return
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.directory / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise OSError(f"{self.directory} cannot be written: {error}; choose another directory.") from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise RuntimeError(
                f"another process writes checkpoints at {self.directory}; stop it, choose another directory, or open "
                "this one with read_only=True."
            ) from None
        except OSError as error:  # file systems without locks
            os.close(handle)
            logger.warning(
                "%s cannot be locked (%s); make sure that one run at a time writes there.", self.directory, error
            )
            return
        self._lock = handle

    def _remove_unfinished(self) -> None:
        """Removes steps that a killed process was writing. Orbax can do so too, but in the background."""
        if jax.process_index() == 0:
            for path in self.directory.glob("*" + _UNFINISHED + "*"):
                logger.info("removing %s, which was never finished.", path)
                shutil.rmtree(path, ignore_errors=True)

    def _remove_doomed(self) -> None:
        if jax.process_index() == 0:
            shutil.rmtree(self.directory / _DOOMED, ignore_errors=True)


def _beside(params: nnx.State, array: Any) -> Any:
    """A template for a quantizer's array on all devices of the parameters; a restored scale has no place of its own."""
    for leaf in jax.tree.leaves(params):
        if isinstance(sharding := getattr(leaf, "sharding", None), NamedSharding):
            whole = NamedSharding(sharding.mesh, PartitionSpec())
            return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=whole)
    return array


def _read_json(path: Path) -> Any:
    """The JSON that Orbax's handler wrote at item `path`, or None where the item was not saved."""
    file = path / "metadata"
    return json.loads(file.read_text()) if file.is_file() else None


def _versions() -> dict[str, str]:
    names = ("jlaqat", "jax", "flax", "optax", "orbax-checkpoint", "numpy")
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # a bare checkout
            found[name] = "not installed"
    return found


def _gather(data_state: Any) -> list[Any]:
    """The JSON of every process, in order of process index, on every process."""
    text = json.dumps(data_state).encode()
    if jax.process_count() == 1:
        return [json.loads(text)]
    lengths = multihost_utils.process_allgather(np.int32(len(text)))
    padded = np.zeros(int(np.max(lengths)), np.uint8)
    padded[: len(text)] = np.frombuffer(text, np.uint8)
    rows = multihost_utils.process_allgather(padded)
    return [json.loads(bytes(row[:length])) for row, length in zip(np.asarray(rows), np.asarray(lengths))]
