"""Scores of a model on data, and what its quantizers do to a batch. Forward passes only."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jlaqat.data import DataConfig, loss_kind, make_dataset
from jlaqat.quantizers import find_quantizers, quantizer_metrics
from jlaqat.sharding import ShardingConfig, make_mesh, put_batch
from jlaqat.train_step import Batch, LossFn, batch_weights, cross_entropy, forward, get_loss, split_model

EvalStep = Callable[[tuple[nnx.State, nnx.State, nnx.State], Batch], dict[str, jax.Array]]


def make_eval_step(model: nnx.Module, *, loss: str | LossFn = "cross_entropy") -> EvalStep:
    """A jitted `step((params, quantizers, other), batch) -> sums` for the structure that `model` has now.

    Sums, float32 scalars: `loss` (weighted), `weight`, and for cross-entropy `correct` (weighted arg-max hits).
    """
    graphdef = split_model(model)[0]
    position_loss = get_loss(loss)

    @jax.jit
    def step(values: tuple[nnx.State, nnx.State, nnx.State], batch: Batch) -> dict[str, jax.Array]:
        outputs = forward(nnx.merge(graphdef, *values, copy=True), batch)
        weights = batch_weights(batch)
        sums = {"loss": jnp.sum(position_loss(outputs, batch) * weights), "weight": jnp.sum(weights)}
        if position_loss is cross_entropy:
            sums["correct"] = jnp.sum((jnp.argmax(outputs, -1) == batch["targets"]) * weights)
        return sums

    return step


def evaluate_batches(
    step: EvalStep, values: tuple[nnx.State, nnx.State, nnx.State], batches: Iterable[Batch]
) -> dict[str, float]:
    """Weighted means over `batches`: `loss`, for cross-entropy `accuracy`, and `weight`, the sum of weights."""
    totals: dict[str, float] = {}
    for batch in batches:
        for name, value in step(values, batch).items():
            totals[name] = totals.get(name, 0.0) + float(value)  # sums over batches in float64
    weight = totals["weight"]
    means = {"loss": totals["loss"] / weight if weight else float("nan"), "weight": weight}
    if "correct" in totals:
        means["accuracy"] = totals["correct"] / weight if weight else float("nan")
    return means


def evaluate(
    model: nnx.Module, data: DataConfig, *, batches: int = 8, loss: str | LossFn | None = None, mesh: Mesh | None = None
) -> dict[str, float]:
    """The model's scores on the first `batches` batches of `data`, quantizers as they are set.

    Returns `loss` (weighted mean over positions), `accuracy` (cross-entropy only) and `weight` (sum of weights).
    loss: None means what the data ask for. mesh: cuts batches along its axis "data"; None means one device.

    Raises ValueError for batches < 1 or an unknown loss, DataConfigError and FileNotFoundError as `make_dataset` does.
    """
    if batches < 1:
        raise ValueError(f"batches={batches} must be at least 1.")
    mesh = mesh or make_mesh(ShardingConfig())
    step = make_eval_step(model, loss=loss or loss_kind(data))
    return evaluate_batches(step, split_model(model)[1:], eval_batches(data, batches, mesh))


def eval_batches(data: DataConfig, batches: int, mesh: Mesh) -> Iterable[Batch]:
    """The first `batches` batches of `data`, on the mesh."""
    dataset = make_dataset(data, process_index=jax.process_index(), process_count=jax.process_count())
    iterator = iter(dataset)
    for _ in range(batches):
        yield put_batch(next(iterator), mesh)


# ------------------------------------------------------------------ quantizers


def make_quantizer_report(
    model: nnx.Module,
) -> Callable[[Any, Batch], dict[str, dict[str, jax.Array]]] | None:
    """A jitted `report((params, quantizers, other), batch)`: `jlaqat.quantizer_metrics` of the batch, by quantizer.

    None if no quantizer is enabled in `model`. One forward pass in which the quantizers observe; nothing is changed.
    """
    if not any(quantizer.enabled for quantizer in find_quantizers(model).values()):
        return None
    graphdef = split_model(model)[0]

    @jax.jit
    def report(values: Any, batch: Batch) -> dict[str, dict[str, jax.Array]]:
        def one(call: Batch) -> dict[str, dict[str, jax.Array]]:
            observed = nnx.merge(graphdef, *values, copy=True)
            return quantizer_metrics(observed, lambda model: forward(model, call))

        call = {name: batch[name] for name in ("inputs", "cu_seqlens", "prefix_lengths") if name in batch}
        if "cu_seqlens" not in batch or batch["cu_seqlens"].ndim == 1:
            return one(call)
        # Several packed rows: each observed by itself, since statistics cannot leave a vmapped module.
        rows = jax.vmap(one)({**call, "inputs": batch["inputs"][:, None]})
        return {name: _over_rows(metrics) for name, metrics in rows.items()}

    return report


def _over_rows(metrics: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Metrics [rows] as those of the whole batch, rows weighing the same."""
    return {
        "relative_rms": jnp.sqrt(jnp.mean(metrics["relative_rms"] ** 2)),
        "saturated": jnp.mean(metrics["saturated"]),
        "nonfinite": jnp.sum(metrics["nonfinite"]),
    }
