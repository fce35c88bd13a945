"""One optimizer update as a pure, jitted function: losses, distillation, accumulation, and what a step reports.

    model = jlaqat.DecoderLM(config, rngs=nnx.Rngs(0))
    jlaqat.quantize(model, recipe)
    optimizer = make_optimizer(OptimizerConfig(learning_rate=3e-4), steps)
    state = create_train_state(model, optimizer)
    step = make_train_step(model, optimizer, loss="cross_entropy")
    for batch in batches:
        state, metrics = step(state, batch)       # state's buffers are donated: use the new one from here on
    update_model(model, state)                    # the trained values, back in the module

A batch is a dict of arrays with rows first: `inputs` int32 [B, T] tokens or float32 [B, T, D], `targets` [B, T] or
[B, T, D], `weights` float32 [B, T] (optional; 0 where nothing is asked). Packed: `cu_seqlens` int32 [S+1] beside one
row [1, T], or [B, S+1], one for each row (`split_packed` cuts a long row into several). `prefix_lengths` int32, one a
sequence ([B], or packed [S] or [B, S]): where decoding starts, needed under decode policies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jlaqat.checkpoint_tree import split_model as split_model
from jlaqat.quantizers import set_step

Batch = Mapping[str, Any]
Metrics = dict[str, jax.Array]
LossFn = Callable[[jax.Array, Batch], jax.Array]
TrainStep = Callable[["TrainState", Batch], tuple["TrainState", Metrics]]


class TrainState(NamedTuple):
    """Everything that a step changes; a pytree. The module's structure (GraphDef) is static and lives in the step."""

    step: jax.Array  # int32 [], updates applied so far
    params: nnx.State  # nnx.Param: what the optimizer sees
    opt_state: optax.OptState
    quantizers: nnx.State  # QuantizerVariable: static scales, counters of stochastic rounding, statistics
    other: nnx.State  # every other variable: RNG streams, running statistics
    finite: jax.Array  # bool [], False once a loss, gradient or update was not finite; nothing changes from then on


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillationConfig:
    """Quantization-aware distillation: the loss is (1 − weight)·task + weight·distillation.

    Fields (all keyword-only):
      weight: share of the distillation loss, in [0, 1].
      temperature: of both softmaxes; the KL divergence is multiplied by its square so that gradients keep their size
        (Hinton et al. 2015). Not used for continuous outputs, which are matched by squared error.
      teacher: "initial" (the weights at the start of the run, unquantized) or a checkpoint directory.

    Raises ValueError for a weight outside [0, 1] and a temperature that is not positive.
    """

    weight: float = 0.5
    temperature: float = 1.0
    teacher: str = "initial"

    def __post_init__(self) -> None:
        if not 0.0 <= self.weight <= 1.0:
            raise ValueError(f"distillation.weight={self.weight} is out of range; give a share from 0 to 1.")
        if not self.temperature > 0.0:
            raise ValueError(
                f"distillation.temperature={self.temperature} must be positive; 1 leaves the logits as they are."
            )


# ------------------------------------------------------------------ losses, one value a position, float32 maths


def batch_weights(batch: Batch) -> jax.Array:
    """float32 [B, T]: the batch's weights, or ones."""
    targets = batch["targets"]
    weights = batch.get("weights")
    return jnp.ones(targets.shape[:2], jnp.float32) if weights is None else jnp.asarray(weights, jnp.float32)


def _float32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))  # float64 stays


def cross_entropy(logits: jax.Array, batch: Batch) -> jax.Array:
    """−log softmax(logits)[target], float32 [B, T]; logits [B, T, vocab]. Targets of weight 0 may be anything."""
    asked = batch_weights(batch) > 0
    targets = jnp.where(asked, batch["targets"], 0)  # an ignored −100 would otherwise index out of range and give NaN
    return optax.softmax_cross_entropy_with_integer_labels(_float32(logits), targets)


def squared_error(outputs: jax.Array, batch: Batch) -> jax.Array:
    """Mean over the last axis of (output − target)², float32 [B, T]; outputs [B, T, D]."""
    difference = _float32(outputs) - _float32(jnp.asarray(batch["targets"]))
    return jnp.mean(difference * difference, axis=-1)


LOSSES: dict[str, LossFn] = {"cross_entropy": cross_entropy, "squared_error": squared_error}


def get_loss(loss: str | LossFn) -> LossFn:
    """The loss of a name, or `loss` itself if it is a function (outputs, batch) -> float32 [B, T]."""
    if callable(loss):
        return loss
    if loss not in LOSSES:
        raise ValueError(
            f"loss={loss!r} is unknown; choose one of {', '.join(map(repr, LOSSES))}, "
            "or give a function (outputs, batch) -> float32 [B, T]."
        )
    return LOSSES[loss]


def distillation_loss(student: jax.Array, teacher: jax.Array, *, temperature: float = 1.0) -> jax.Array:
    """τ² · KL(softmax(teacher/τ) ‖ softmax(student/τ)), float32 [B, T]; logits [B, T, vocab], τ the temperature."""
    log_p = jax.nn.log_softmax(_float32(teacher) / temperature)
    log_q = jax.nn.log_softmax(_float32(student) / temperature)
    return temperature**2 * jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)


def output_matching_loss(student: jax.Array, teacher: jax.Array) -> jax.Array:
    """Distillation of continuous outputs: mean over the last axis of (student − teacher)², float32 [B, T]."""
    return squared_error(student, {"targets": teacher})


# ------------------------------------------------------------------ forward


def forward(model: Callable, batch: Batch) -> jax.Array:
    """The model's outputs for a batch [B, T, …]: one call, or one call a row (vmapped) for several packed rows."""
    inputs = jnp.asarray(batch["inputs"])
    bounds = {name: batch[name] for name in ("cu_seqlens", "prefix_lengths") if name in batch}
    if "cu_seqlens" not in bounds or bounds["cu_seqlens"].ndim == 1:
        return model(inputs, **bounds)
    if inputs.shape[0] == 1:
        return model(inputs, **{name: x[0] for name, x in bounds.items()})
    return jax.vmap(lambda row, bounds: model(row[None], **bounds)[0])(inputs, bounds)


def split_packed(batch: Mapping[str, np.ndarray], rows: int) -> dict[str, np.ndarray]:
    """A packed batch [1, T] with cu_seqlens [S+1] as `rows` rows [rows, T/rows] with cu_seqlens [rows, S/rows + 1].

    For data parallelism and gradient accumulation, which deal in rows. Sequences must not cross the cuts (batches of
    `make_dataset` are laid out so when `rows` divides batch_size). Raises ValueError where they do.
    """
    cu = np.asarray(batch["cu_seqlens"])
    total, documents = batch["inputs"].shape[1], len(cu) - 1
    if total % rows or documents % rows:
        raise ValueError(
            f"a packed batch of {total} tokens in {documents} sequences does not divide into {rows} rows; "
            f"choose batch_size as a multiple of data-parallel devices × accumulation."
        )
    length, per_row = total // rows, documents // rows
    starts = cu[::per_row]
    if not np.array_equal(starts, np.arange(rows + 1) * length):
        raise ValueError(
            f"cu_seqlens[::{per_row}] is {starts.tolist()}: a sequence crosses a cut at a multiple of {length} tokens."
        )
    split = {
        name: np.reshape(value, (rows, length, *value.shape[2:]))
        for name, value in batch.items()
        if name not in ("cu_seqlens", "prefix_lengths")
    }
    if "prefix_lengths" in batch:
        split["prefix_lengths"] = np.reshape(batch["prefix_lengths"], (rows, per_row))
    split["cu_seqlens"] = np.stack([cu[i * per_row : (i + 1) * per_row + 1] - i * length for i in range(rows)])
    return split


# ------------------------------------------------------------------ state


def create_train_state(model: nnx.Module, optimizer: optax.GradientTransformation) -> TrainState:
    """A fresh state at step 0 with copies of the model's values: donating it leaves the model usable."""
    params, quantizers, other = jax.tree.map(jnp.copy, split_model(model)[1:])
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), quantizers, other, jnp.ones((), bool))


def update_model(model: nnx.Module, state: TrainState) -> nnx.Module:
    """Writes the state's values into `model`, of the state's structure, in place; returns it."""
    nnx.update(model, state.params, state.quantizers, state.other)
    return model


# ------------------------------------------------------------------ the step


class _LossAux(NamedTuple):
    """What the loss of one micro-batch hands out beside its value; sums are already divided by the batch's weight."""

    task: jax.Array  # float32 []
    distillation: jax.Array  # float32 []
    quantizers: nnx.State
    other: nnx.State


def make_train_step(
    model: nnx.Module,
    optimizer: optax.GradientTransformation,
    *,
    loss: str | LossFn = "cross_entropy",
    accumulation: int = 1,
    teacher: nnx.Module | None = None,
    distillation: DistillationConfig | None = None,
    state_shardings: TrainState | None = None,
) -> TrainStep:
    """A jitted `step(state, batch) -> (state, metrics)` for the structure that `model` has now.

    Call it again after a change of structure (quantize, enable, disable, freeze, strip). The loss is the weighted mean
    over the batch's positions. `accumulation` cuts the batch into that many micro-batches (rows a, a+A, a+2A, …), one
    after the other in less memory: the same gradient up to the order of a sum.

    Args:
      optimizer: an Optax transformation; it sees the `nnx.Param` variables alone.
      loss: "cross_entropy", "squared_error", or a function (outputs, batch) -> float32 [B, T].
      accumulation: micro-batches a step; must divide B.
      teacher: unquantized model to distil from (QAD); give `distillation` too.
      state_shardings: shardings of the state (see `jlaqat.sharding`), kept from step to step.

    Metrics, float32 scalars unless said: `loss`, `task_loss`, `distillation_loss` (with a teacher), `grad_norm` (before
    clipping), `update_norm`, `weight` (sum of weights), `finite` (bool), `grad_finite` (bool [number of parameters], in
    the order of `named_leaves(state.params)`; a sum of squares that overflows counts as not finite). A step whose loss,
    gradient or update is not finite changes nothing but `state.finite`, and neither do those after it.

    The state is donated. Raises ValueError for a loss, teacher or accumulation that does not fit.
    """
    if (teacher is None) != (distillation is None):
        raise ValueError("teacher and distillation go together: give both (QAD) or neither (QAT).")
    if accumulation < 1:
        raise ValueError(f"accumulation={accumulation} must be at least 1.")
    graphdef = split_model(model)[0]
    teacher_graphdef, teacher_state = (None, None) if teacher is None else nnx.split(teacher)
    position_loss = get_loss(loss)
    continuous = position_loss is squared_error

    def loss_fn(params, quantizers, other, teacher_state, batch, total, counter):
        student = nnx.merge(graphdef, params, quantizers, other, copy=True)
        set_step(student, counter)
        outputs = forward(student, batch)
        share = batch_weights(batch) / total

        def mean(values):
            return jnp.sum(values * share).astype(jnp.float32)

        value = task = mean(position_loss(outputs, batch))
        matched = jnp.zeros((), jnp.float32)
        if distillation is not None and teacher_graphdef is not None:
            wanted = jax.lax.stop_gradient(forward(nnx.merge(teacher_graphdef, teacher_state, copy=True), batch))
            matched = mean(
                output_matching_loss(outputs, wanted)
                if continuous
                else distillation_loss(outputs, wanted, temperature=distillation.temperature)
            )
            value = (1 - distillation.weight) * task + distillation.weight * matched
        _, _, quantizers, other = split_model(student)
        return value, _LossAux(task, matched, quantizers, other)

    grad_fn = jax.value_and_grad(loss_fn, has_aux=True)

    def gradients(state: TrainState, teacher_state: Any, batch: Batch):
        """(loss, aux, gradients) of the whole batch, micro-batch by micro-batch."""
        # max: a batch in which nothing is asked has loss 0, not NaN.
        total = jnp.maximum(jnp.sum(batch_weights(batch)), jnp.finfo(jnp.float32).tiny)
        first = state.step.astype(jnp.uint32) * np.uint32(accumulation)
        if accumulation == 1:
            (value, aux), grads = grad_fn(
                state.params, state.quantizers, state.other, teacher_state, batch, total, first
            )
            return value, aux, grads

        def body(carry, xs):
            value, aux, grads = carry
            micro, i = xs
            (more, new), g = grad_fn(state.params, aux.quantizers, aux.other, teacher_state, micro, total, first + i)
            aux = _LossAux(aux.task + new.task, aux.distillation + new.distillation, new.quantizers, new.other)
            return (value + more, aux, jax.tree.map(lambda a, b: a + b.astype(a.dtype), grads, g)), None

        # Sums in float32 at least: bfloat16 gradients would lose the later micro-batches.
        sums = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.promote_types(p.dtype, jnp.float32)), state.params)
        zero = jnp.zeros((), jnp.float32)
        start = (zero, _LossAux(zero, zero, state.quantizers, state.other), sums)
        micros = (_micro_batches(batch, accumulation), jnp.arange(accumulation, dtype=jnp.uint32))
        (value, aux, grads), _ = jax.lax.scan(body, start, micros)
        return value, aux, jax.tree.map(lambda g, p: g.astype(p.dtype), grads, state.params)

    def step(state: TrainState, teacher_state: Any, batch: Batch):
        value, aux, grads = gradients(state, teacher_state, batch)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        squares = jnp.stack([jnp.sum(jnp.square(_float32(g))) for g in jax.tree.leaves(grads)])
        grad_norm, update_norm = jnp.sqrt(jnp.sum(squares)), optax.global_norm(updates)
        finite = state.finite & jnp.isfinite(value) & jnp.isfinite(grad_norm) & jnp.isfinite(update_norm)
        params = optax.apply_updates(state.params, updates)
        new = TrainState(state.step + 1, params, opt_state, aux.quantizers, aux.other, finite)
        kept = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, state)._replace(finite=finite)
        metrics = {
            "loss": value,
            "task_loss": aux.task,
            "grad_norm": grad_norm,
            "update_norm": update_norm,
            "weight": jnp.sum(batch_weights(batch)),
            "finite": finite,
            "grad_finite": jnp.isfinite(squares),
        }
        if distillation is not None:
            metrics["distillation_loss"] = aux.distillation
        return kept, metrics

    out_shardings = None if state_shardings is None else (state_shardings, None)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=out_shardings)
    return lambda state, batch: jitted(state, teacher_state, dict(batch))


def _micro_batches(batch: Batch, accumulation: int) -> Batch:
    """[B, …] as [A, B/A, …], micro-batch a holding rows a, a+A, …: a data-sharded row axis stays where it is."""
    rows = batch["inputs"].shape[0]
    if rows % accumulation or batch.get("cu_seqlens", batch["inputs"]).shape[0] != rows:
        raise ValueError(
            f"a batch of {rows} rows does not split into accumulation={accumulation} micro-batches; use a batch size "
            "that is a multiple of it, and split_packed(batch, rows) for packed batches."
        )
    return jax.tree.map(
        lambda x: jnp.swapaxes(x.reshape(rows // accumulation, accumulation, *x.shape[1:]), 0, 1), dict(batch)
    )
