"""Losses, schedules, decay masks, distillation, accumulation and the step, on a stand-in model that compiles fast."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jlaqat.naming import named_leaves
from jlaqat.optim import OptimizerConfig, decay_mask, make_optimizer, make_schedule
from jlaqat.quantizers import QuantizerVariable
from jlaqat.train_step import (
    DistillationConfig,
    create_train_state,
    cross_entropy,
    distillation_loss,
    forward,
    make_train_step,
    split_packed,
    squared_error,
    update_model,
)

pytestmark = pytest.mark.usefixtures("compile_quickly")
VOCAB, WIDTH = 16, 8


class Standin(nnx.Module):
    """Tokens mixed by a running sum inside each sequence, so that packing matters; dropout when `noisy`."""

    def __init__(self, seed=0):
        rngs = nnx.Rngs(seed)
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.lm_head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)
        self.scale = QuantizerVariable(jnp.full((1,), 3.0))
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.noisy = False

    def __call__(self, tokens, *, cu_seqlens=None):
        x = self.embed(tokens)
        sums = jnp.cumsum(x, axis=1)
        if cu_seqlens is not None:
            starts = cu_seqlens[jnp.searchsorted(cu_seqlens, jnp.arange(tokens.shape[1]), side="right") - 1]
            before = jnp.concatenate([jnp.zeros_like(sums[:, :1]), sums], axis=1)
            sums = sums - before[:, starts]
        x = self.norm(sums)
        return self.lm_head(self.drop(x) if self.noisy else x)


def batch(rows=8, length=12, seed=0):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCAB, (rows, length)).astype(np.int32)
    weights = (rng.random((rows, length)) > 0.3).astype(np.float32)
    return {"inputs": tokens, "targets": np.roll(tokens, -1, 1), "weights": weights}


def run(steps=3, *, model=None, data=None, optimizer=None, **options):
    model = model or Standin()
    optimizer = optimizer or optax.sgd(0.1)
    state, step = create_train_state(model, optimizer), make_train_step(model, optimizer, **options)
    for _ in range(steps):
        state, metrics = step(state, data or batch())
    return state, metrics


# ------------------------------------------------------------------ losses


def test_cross_entropy_by_hand_and_ignored_targets():
    logits = jnp.array([[[0.0, jnp.log(3.0)], [5.0, 5.0]]])
    data = {"targets": np.array([[1, -100]]), "weights": np.array([[1.0, 0.0]])}
    values = cross_entropy(logits, data)
    np.testing.assert_allclose(values[0, 0], -np.log(0.75), rtol=1e-6)
    assert np.isfinite(values).all()


def test_squared_error_is_a_mean_over_outputs_in_float32():
    outputs = jnp.array([[[1.0, 3.0]]], jnp.bfloat16)
    value = squared_error(outputs, {"targets": np.zeros((1, 1, 2), np.float32)})
    assert value.dtype == jnp.float32 and float(value[0, 0]) == 5.0


def test_distillation_loss_against_numpy():
    rng = np.random.default_rng(0)
    student, teacher = rng.normal(size=(2, 1, 3, 5)).astype(np.float32)
    tau = 2.0
    p = np.exp(teacher / tau) / np.exp(teacher / tau).sum(-1, keepdims=True)
    q = np.exp(student / tau) / np.exp(student / tau).sum(-1, keepdims=True)
    expected = tau**2 * (p * np.log(p / q)).sum(-1)
    np.testing.assert_allclose(distillation_loss(student, teacher, temperature=tau), expected, rtol=1e-5)
    np.testing.assert_allclose(distillation_loss(teacher, teacher), 0, atol=1e-6)


# ------------------------------------------------------------------ optimizers


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_schedules_start_peak_and_end(schedule):
    config = OptimizerConfig(learning_rate=1.0, schedule=schedule, warmup_steps=4, final_fraction=0.1, decay_steps=5)
    rate = make_schedule(config, 20)
    values = [float(rate(i)) for i in range(21)]
    np.testing.assert_allclose(values[:4], [0.25, 0.5, 0.75, 1.0], rtol=1e-6)
    assert values[4] == 1.0 and max(values) <= 1.0
    np.testing.assert_allclose(values[20], 1.0 if schedule == "constant" else 0.1, rtol=1e-6)
    if schedule == "wsd":
        assert values[15] == 1.0 and values[17] < 1.0


def test_a_schedule_that_does_not_fit_says_the_numbers():
    with pytest.raises(ValueError, match=r"needs 15 steps \(warmup_steps=10, decay_steps=5\).*has 12"):
        make_schedule(OptimizerConfig(schedule="wsd", warmup_steps=10, decay_steps=5), 12)


@pytest.mark.parametrize(
    "fields", [{"name": "adamW"}, {"schedule": "cos"}, {"clip_norm": 0.0}, {"name": "sgd", "weight_decay": 0.1}]
)
def test_optimizer_config_refuses(fields):
    with pytest.raises(ValueError, match=f"optimizer.{list(fields)[-1]}"):
        OptimizerConfig(**fields)


def test_weight_decay_reaches_matrices_and_spares_the_named():
    params = nnx.state(Standin(), nnx.Param)
    mask = named_leaves(decay_mask(params, ("*norm*", "*bias*")))
    assert mask == {
        "embed.embedding": True,
        "lm_head.bias": False,
        "lm_head.kernel": True,
        "norm.bias": False,
        "norm.scale": False,
    }
    # With gradients of zero only decay moves anything.
    optimizer = make_optimizer(OptimizerConfig(schedule="constant", learning_rate=0.1, weight_decay=0.5), 10)
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    moved = {name: bool(jnp.any(u != 0)) for name, u in named_leaves(updates).items()}
    assert moved["lm_head.kernel"] and not moved["norm.scale"] and not moved["lm_head.bias"]


@pytest.mark.parametrize("name", ["adamw", "adam", "lion", "sgd"])
def test_every_optimizer_lowers_the_loss(name):
    optimizer = make_optimizer(OptimizerConfig(name=name, learning_rate=0.02, schedule="constant"), 30)
    model = Standin()
    state, step = create_train_state(model, optimizer), make_train_step(model, optimizer)
    losses = []
    for _ in range(30):
        state, metrics = step(state, batch())
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.9 * losses[0]


# ------------------------------------------------------------------ the step


def test_the_step_is_gradient_descent_on_parameters_alone():
    model, data = Standin(), batch()
    params = nnx.state(model, nnx.Param)
    graphdef, rest = nnx.split(model, nnx.Param, ...)[0], nnx.split(model, nnx.Param, ...)[2]

    def loss(params):
        logits = nnx.merge(graphdef, params, rest, copy=True)(data["inputs"])
        values = optax.softmax_cross_entropy_with_integer_labels(logits, data["targets"])
        return jnp.sum(values * data["weights"]) / data["weights"].sum()

    value, grads = jax.value_and_grad(loss)(params)
    state, metrics = run(1, model=model, data=data)
    expected = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), state.params, expected)
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"], optax.global_norm(grads), rtol=1e-5)
    assert float(metrics["weight"]) == data["weights"].sum() and int(state.step) == 1
    assert jax.tree.leaves(state.quantizers)[0] == 3.0


def test_the_model_stays_usable_and_takes_the_trained_values():
    model = Standin()
    before = np.asarray(model.lm_head.kernel.get_value())
    state, _ = run(2, model=model)
    np.testing.assert_array_equal(before, model.lm_head.kernel.get_value())
    update_model(model, state)
    assert not np.array_equal(before, model.lm_head.kernel.get_value())


def test_random_streams_advance_and_repeat():
    model = Standin()
    model.noisy = True
    first, again = run(3, model=model)[0], run(3, model=model)[0]
    counts = [int(v) for n, v in named_leaves(first.other).items() if n.endswith("count")]
    assert counts == [3]
    jax.tree.map(np.testing.assert_array_equal, first.params, again.params)


@pytest.mark.parametrize("distil", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_accumulation_gives_the_gradient_of_the_whole_batch(distil):
    options = {"teacher": Standin(1), "distillation": DistillationConfig(temperature=2.0)} if distil else {}
    whole, whole_metrics = run(2, **options)
    parts, parts_metrics = run(2, accumulation=4, **options)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), parts.params, whole.params)
    for name in ("loss", "task_loss", "grad_norm", "weight"):
        np.testing.assert_allclose(parts_metrics[name], whole_metrics[name], rtol=1e-5)


def test_accumulation_that_does_not_divide_says_so():
    with pytest.raises(ValueError, match="8 rows does not split into accumulation=3"):
        run(1, accumulation=3)


@pytest.mark.slow
def test_bfloat16_gradients_are_summed_in_float32():
    """Sixteen micro-batches: bfloat16 sums would drift by percents."""
    model = Standin()
    nnx.update(model, jax.tree.map(lambda x: x.astype(jnp.bfloat16), nnx.state(model, nnx.Param)))
    data = batch(16)
    whole = run(1, model=model, data=data)[1]["grad_norm"]
    parts = run(1, model=model, data=data, accumulation=16)[1]["grad_norm"]
    np.testing.assert_allclose(parts, whole, rtol=0.01)


def test_distillation_moves_the_student_to_the_teacher():
    teacher = Standin(1)
    options = {"teacher": teacher, "distillation": DistillationConfig(weight=1.0)}
    _, first = run(1, optimizer=optax.adam(0.03), **options)
    _, last = run(60, optimizer=optax.adam(0.03), **options)
    assert float(last["distillation_loss"]) < 0.2 * float(first["distillation_loss"])
    np.testing.assert_allclose(last["loss"], last["distillation_loss"])  # weight 1: the task does not count


def test_distillation_from_equal_weights_starts_at_zero():
    _, metrics = run(1, teacher=Standin(), distillation=DistillationConfig(weight=0.25))
    np.testing.assert_allclose(metrics["distillation_loss"], 0, atol=1e-6)
    np.testing.assert_allclose(metrics["loss"], 0.75 * metrics["task_loss"], rtol=1e-6)


@pytest.mark.parametrize("fields", [{"weight": 1.5}, {"temperature": 0.0}])
def test_distillation_config_refuses(fields):
    with pytest.raises(ValueError, match=f"distillation.{list(fields)[0]}"):
        DistillationConfig(**fields)


def test_a_teacher_without_distillation_is_refused():
    with pytest.raises(ValueError, match="go together"):
        make_train_step(Standin(), optax.sgd(0.1), teacher=Standin())


def test_unknown_loss_lists_the_known():
    with pytest.raises(ValueError, match="'cross_entropy', 'squared_error'"):
        make_train_step(Standin(), optax.sgd(0.1), loss="mse")


def test_a_loss_of_ones_own():
    _, metrics = run(1, loss=lambda outputs, data: jnp.mean(outputs**2, -1))
    assert float(metrics["loss"]) > 0


def test_a_step_that_is_not_finite_changes_nothing_and_stops_all_after_it():
    model, optimizer = Standin(), optax.adam(0.1)
    state, step = create_train_state(model, optimizer), make_train_step(model, optimizer)
    state, _ = step(state, batch())
    good = jax.tree.map(np.asarray, (state.params, state.opt_state, state.step))
    bad = batch()
    bad["weights"][0, 0] = np.nan
    state, metrics = step(state, bad)
    assert not metrics["finite"] and not metrics["grad_finite"].all()
    state, metrics = step(state, batch())
    assert not metrics["finite"] and metrics["grad_finite"].all()
    jax.tree.map(np.testing.assert_array_equal, good, (state.params, state.opt_state, state.step))


def test_a_batch_in_which_nothing_is_asked_has_loss_zero():
    data = batch()
    data["weights"][:] = 0
    _, metrics = run(1, data=data)
    assert float(metrics["loss"]) == 0 and metrics["finite"]


# ------------------------------------------------------------------ packing


def packed(rows=4, length=12):
    """Rows of `length` tokens in three documents each (one may be empty), end to end."""
    data = batch(rows, length)
    cuts = [np.array([5, 9, length]) if i % 2 else np.array([4, 4, length]) for i in range(rows)]
    cu = np.concatenate([[0], *(c + i * length for i, c in enumerate(cuts))]).astype(np.int32)
    return {name: value.reshape(1, -1) for name, value in data.items()} | {"cu_seqlens": cu}


def test_packed_rows_are_cut_where_sequences_end():
    whole = packed()
    rows = split_packed(whole, 4)
    assert rows["inputs"].shape == (4, 12) and rows["cu_seqlens"].tolist() == [[0, 4, 4, 12], [0, 5, 9, 12]] * 2
    with pytest.raises(ValueError, match="does not divide into 5 rows"):
        split_packed(whole, 5)
    crossing = whole | {"cu_seqlens": np.array([0, 20, 30, 48], np.int32)}
    with pytest.raises(ValueError, match="crosses a cut"):
        split_packed(crossing, 3)


def test_packed_batches_whole_in_rows_and_accumulated_agree():
    whole, metrics = run(2, data=packed())
    for accumulation in (1, 2):
        rows, row_metrics = run(2, data=split_packed(packed(), 4), accumulation=accumulation)
        np.testing.assert_allclose(row_metrics["loss"], metrics["loss"], rtol=1e-5)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), rows.params, whole.params)
    plain = {name: value for name, value in packed().items() if name != "cu_seqlens"}
    assert not np.allclose(forward(Standin(), plain), forward(Standin(), packed()), atol=1e-3), "packing says nothing"
