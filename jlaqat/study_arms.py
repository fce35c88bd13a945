"""Training and scoring of all seeds of an arm at once: `train_step`'s update under vmap (seeds) and scan (steps)."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jlaqat.data import DataConfig, TokenHash, make_dataset
from jlaqat.evaluation import batch_weights
from jlaqat.train_step import (
    TrainState,
    create_train_state,
    cross_entropy,
    forward,
    get_loss,
    make_train_step,
    split_model,
)

logger = logging.getLogger("jlaqat")

Values = tuple[nnx.State, nnx.State, nnx.State]
"""(params, quantizers, other) of all seeds: every leaf has a leading axis of seeds."""


class ArmRecord(NamedTuple):
    """What training an arm took and saw."""

    updates: int  # optimizer updates of this phase
    tokens: int  # positions with a weight, all seeds
    token_sha256: list[str]  # of every batch, a seed
    losses: np.ndarray  # float32 [seeds, updates], training loss
    seconds: float  # wall time without compilation
    compile_seconds: float
    step_bytes: int | None  # temporary memory of one compiled call, where XLA tells


class Score(NamedTuple):
    """Held-out score of each seed, and how the loss runs along the sequence."""

    values: list[float]  # a seed
    curve: np.ndarray  # float32 [seeds, T], mean loss by position, all positions
    seconds: float


def stack_values(models: Sequence[nnx.Module]) -> Values:
    """The models' variables, stacked along a leading axis of seeds."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *(split_model(m)[1:] for m in models))


def unstack(tree: Any, index: int) -> Any:
    """The values of one seed."""
    return jax.tree.map(lambda x: x[index], tree)


def start_state(values: Values, optimizer: optax.GradientTransformation, models: Sequence[nnx.Module]) -> TrainState:
    """A train state of all seeds at step 0: weights of `values`, quantizers as in `models`, a fresh optimizer."""
    fresh = [create_train_state(model, optimizer) for model in models]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *fresh)
    return stacked._replace(params=jax.tree.map(jnp.copy, values[0]))  # copies, because training donates its state


def batches_of(data: Sequence[DataConfig], skip: int) -> Iterator[list[dict[str, np.ndarray]]]:
    """One batch a seed at a time, from batch `skip` on."""
    iterators = []
    for config in data:
        iterator = iter(make_dataset(config))
        iterator.set_state({**iterator.get_state(), "next_index": skip})
        iterators.append(iterator)
    while True:
        yield [next(iterator) for iterator in iterators]


def train_arm(
    state: TrainState,
    model: nnx.Module,
    optimizer: optax.GradientTransformation,
    data: Sequence[DataConfig],
    *,
    loss: str,
    skip: int,
    steps: int,
    scan_steps: int,
    label: str,
) -> tuple[TrainState, ArmRecord]:
    """`steps` updates of every seed at once, on batches skip, skip + 1, … of each seed's data. `state` is donated.

    model: gives the structure (quantizers as they are set). Raises FloatingPointError if a seed's loss or gradient is
    not finite.
    """
    step = make_train_step(model, optimizer, loss=loss)
    per_call = max(n for n in range(1, scan_steps + 1) if steps % n == 0)

    def update(state: TrainState, batch: Any) -> tuple[TrainState, tuple[jax.Array, jax.Array]]:
        state, metrics = jax.vmap(step)(state, batch)
        return state, (metrics["loss"], metrics["finite"])

    hashes = [TokenHash() for _ in data]
    stream = batches_of(data, skip)

    def chunk() -> dict[str, np.ndarray]:
        """The next `per_call` batches of every seed: [per_call, seeds, …]."""
        rows = [next(stream) for _ in range(per_call)]
        for row in rows:
            for total, batch in zip(hashes, row):
                total.update(batch)
        return {name: np.stack([np.stack([b[name] for b in row]) for row in rows]) for name in rows[0][0]}

    first = chunk()
    began = time.perf_counter()
    compiled = jax.jit(lambda s, b: jax.lax.scan(update, s, b), donate_argnums=0).lower(state, first).compile()
    started = time.perf_counter()
    losses, finite = [], []
    for i in range(steps // per_call):
        state, (loss_values, flags) = compiled(state, first if i == 0 else chunk())
        losses.append(loss_values)
        finite.append(flags)
        # One call behind: the host makes the next batches while the device works on these.
        if i:
            _check_finite(finite[i - 1], label, skip + (i - 1) * per_call)
            logger.info("%s: update %d of %d, loss %.4g", label, i * per_call, steps, np.mean(losses[i - 1]))
    _check_finite(finite[-1], label, skip + steps - per_call)
    history = np.concatenate([np.asarray(x) for x in losses]).T
    ended = time.perf_counter()
    memory = compiled.memory_analysis()
    return state, ArmRecord(
        updates=steps,
        tokens=sum(total.tokens for total in hashes),
        token_sha256=[total.hexdigest() for total in hashes],
        losses=history,
        seconds=ended - started,
        compile_seconds=started - began,
        step_bytes=None if memory is None else int(memory.temp_size_in_bytes),
    )


def _check_finite(flags: jax.Array, label: str, step: int) -> None:
    bad = np.argwhere(~np.asarray(flags))
    if len(bad):
        at, seed = bad[0]
        raise FloatingPointError(
            f"{label}: loss or gradient of run {seed} is not finite at step {step + at}; lower the learning rate."
        )


class Scorer:
    """Scores all seeds of a structure on the study's held-out batches."""

    def __init__(self, model: nnx.Module, batches: Sequence[dict[str, np.ndarray]], *, loss: str, score: str):
        graphdef = split_model(model)[0]
        position_loss = get_loss(loss)
        self.batches, self.score = batches, score

        def sums(values: Values, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
            outputs = forward(nnx.merge(graphdef, *values, copy=True), batch)
            weights, losses = batch_weights(batch), position_loss(outputs, batch)
            found = {"loss": jnp.sum(losses * weights), "weight": jnp.sum(weights), "curve": jnp.mean(losses, axis=0)}
            if position_loss is cross_entropy:
                found["correct"] = jnp.sum((jnp.argmax(outputs, -1) == batch["targets"]) * weights)
            return found

        self._sums = jax.jit(jax.vmap(sums, in_axes=(0, None)))

    def __call__(self, values: Values) -> Score:
        began = time.perf_counter()
        found = [jax.device_get(self._sums(values, batch)) for batch in self.batches]
        # In float64 over batches; each batch's own sum is float32.
        totals = {name: np.sum([np.asarray(f[name], np.float64) for f in found], axis=0) for name in found[0]}
        hits = totals["correct"] if self.score == "accuracy" else totals["loss"]
        return Score(
            values=[float(x) for x in hits / totals["weight"]],
            curve=(totals["curve"] / len(found)).astype(np.float32),
            seconds=time.perf_counter() - began,
        )
