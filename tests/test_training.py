"""The training loop on tiny models: what it leaves behind, QAT, QAD, calibration, non-finite values, configs, logs."""

import dataclasses
import json
import logging
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jlaqat.training
from jlaqat.checkpoint import Checkpointer, CheckpointMismatchError
from jlaqat.data import DataConfig, make_dataset
from jlaqat.diagnosis import explain_non_finite, natural_order
from jlaqat.evaluation import evaluate, evaluate_batches, make_eval_step, make_quantizer_report
from jlaqat.export import load_weights
from jlaqat.model import DecoderLM, ModelConfig
from jlaqat.naming import named_leaves
from jlaqat.optim import OptimizerConfig
from jlaqat.quantizers import find_quantizers
from jlaqat.recipes import ConfigError, load_config, to_dict
from jlaqat.sharding import put_batch
from jlaqat.train_config import CheckpointConfig, EvalConfig, LogConfig
from jlaqat.train_log import JsonlLog, TrainLog, read_jsonl
from jlaqat.train_step import DistillationConfig, split_model, split_packed
from jlaqat.training import NonFiniteError, TrainConfig, build_model, train

pytestmark = pytest.mark.usefixtures("compile_quickly")
REGRESSION = DataConfig(task="regression", input_dim=4, batch_size=4, seq_len=16, num_threads=0)
ATTENTION = ModelConfig(
    input_size=9, output_size=1, hidden_size=16, num_layers=1, pattern=("attention",), num_heads=2, head_dim=8,
    intermediate_size=16,
)  # fmt: skip
GDN = dataclasses.replace(ATTENTION, pattern=("gdn",))
LONG = dataclasses.replace(REGRESSION, seq_len=128)  # two chunks: one state is rounded between them
FP8 = ({"quantizer_name": "*state_quantizer", "cfg": {"num_bits": "e4m3"}},)
STATIC = ({"quantizer_name": "*state_quantizer", "cfg": {"num_bits": "e4m3", "type": "static"}},)


def config(**fields):
    quiet = LogConfig(every=1, quantizers_every=0, tensorboard=False)
    defaults = {
        "model": ATTENTION,
        "data": REGRESSION,
        "steps": 4,
        "optimizer": OptimizerConfig(learning_rate=0.02, schedule="constant"),  # the same program for any steps
        "evaluation": EvalConfig(batches=1),
        "logging": quiet,
    }
    return TrainConfig(**defaults | fields)


# ------------------------------------------------------------------ the loop


def test_a_run_leaves_logs_checkpoints_and_its_config(tmp_path):
    run = config(
        steps=6, evaluation=EvalConfig(every=2, batches=1), checkpoint=CheckpointConfig(every=2, max_to_keep=2)
    )
    run = dataclasses.replace(run, logging=LogConfig(every=2, quantizers_every=0))
    result = train(run, directory=tmp_path)
    assert result.step == 6 and result.checkpoint == tmp_path / "checkpoints" / "6"
    records = read_jsonl(tmp_path / "metrics.jsonl", "train")
    assert [r["step"] for r in records] == [2, 4, 6]
    assert records[-1]["loss"] == result.metrics["loss"] and records[-1]["tokens_per_second"] > 0
    assert {"grad_norm", "update_norm", "learning_rate", "weight"} <= set(records[0])
    evaluations = read_jsonl(tmp_path / "metrics.jsonl", "eval")
    assert [r["step"] for r in evaluations] == [2, 4, 6] and evaluations[-1]["loss"] == result.evaluation["loss"]
    assert list((tmp_path / "tensorboard").iterdir())
    assert load_config(TrainConfig, str(tmp_path / "config.yaml")) == run
    with Checkpointer(tmp_path / "checkpoints", read_only=True) as checkpointer:
        assert checkpointer.all_steps() == [4, 6]
        assert load_config(TrainConfig, checkpointer.config()) == run

    # The saved weights are the returned model's, and score the same outside the loop.
    loaded = load_weights(build_model(run), tmp_path)
    jax.tree.map(np.testing.assert_array_equal, split_model(loaded)[1], split_model(result.model)[1])
    scores = evaluate(loaded, run.eval_data, batches=1)
    np.testing.assert_allclose(scores["loss"], result.evaluation["loss"], rtol=1e-6)

    # A second call has nothing to do; another directory is asked for where resuming is not wanted.
    again = train(run, directory=tmp_path)
    assert again.metrics["loss"] == result.metrics["loss"] and again.evaluation == result.evaluation
    assert read_jsonl(tmp_path / "metrics.jsonl", "train") == records
    with pytest.raises(ValueError, match="checkpoints up to step 6 and resume=False"):
        train(run, directory=tmp_path, resume=False)
    with pytest.raises(ValueError, match="at step 6 already and steps=5"):
        train(dataclasses.replace(run, steps=5), directory=tmp_path)


def test_a_longer_run_goes_on_and_says_what_changed(tmp_path, caplog):
    train(config(steps=2), directory=tmp_path / "a")
    with caplog.at_level(logging.INFO, "jlaqat"):
        longer = train(config(steps=4), directory=tmp_path / "a")
    assert "going on from step 2" in caplog.text and "steps: 2 → 4" in caplog.text
    whole = train(config(steps=4), directory=tmp_path / "b")
    jax.tree.map(np.testing.assert_array_equal, split_model(longer.model)[1], split_model(whole.model)[1])


def test_loss_falls(tmp_path):
    train(config(steps=40), directory=tmp_path)
    losses = [r["loss"] for r in read_jsonl(tmp_path / "metrics.jsonl", "train")]
    assert np.mean(losses[-5:]) < 0.9 * np.mean(losses[:5])


def test_init_from_takes_weights_and_nothing_else(tmp_path):
    first = train(config(steps=2), directory=tmp_path / "a")
    train(config(steps=1, seed=5, init_from=str(tmp_path / "a")), directory=tmp_path / "b")
    start = read_jsonl(tmp_path / "b" / "metrics.jsonl", "train")[0]
    assert start["step"] == 1
    np.testing.assert_allclose(start["loss"], evaluate(first.model, REGRESSION, batches=1)["loss"], rtol=1e-6)


def test_qat_reports_each_quantizer_and_qad_keeps_its_teacher(tmp_path):
    run = config(
        model=GDN, quant=FP8, data=LONG, distillation=DistillationConfig(weight=0.5), evaluation=EvalConfig(batches=0),
        logging=LogConfig(every=1, quantizers_every=2, tensorboard=False),
    )  # fmt: skip
    result = train(run, directory=tmp_path)
    reports = read_jsonl(tmp_path / "metrics.jsonl", "quantizers")
    assert [r["step"] for r in reports] == [2, 4]
    quantizer = reports[0]["layers.0.mixer.gdn_state_quantizer"]
    assert 0 < quantizer["relative_rms"] < 0.1 and quantizer["saturated"] == 0 and quantizer["nonfinite"] == 0
    first = read_jsonl(tmp_path / "metrics.jsonl", "train")[0]
    # At the start the teacher has the student's weights: they differ by the rounding alone.
    assert 0 < first["distillation_loss"] < first["task_loss"]
    teacher = load_weights(DecoderLM(GDN, rngs=nnx.Rngs(9)), tmp_path / "teacher")
    start = DecoderLM(GDN, rngs=nnx.Rngs(run.seed))
    jax.tree.map(np.testing.assert_allclose, split_model(teacher)[1], split_model(start)[1])
    assert [n for n, q in find_quantizers(result.model).items() if q.enabled] == ["layers.0.mixer.gdn_state_quantizer"]
    counter = find_quantizers(result.model)["layers.0.mixer.gdn_state_quantizer"].counter.get_value()
    assert int(counter[0]) == 3, "the counter of stochastic rounding holds the last step, from 0"


@pytest.mark.slow
def test_static_scales_are_calibrated_once(tmp_path):
    run = config(model=GDN, quant=STATIC, steps=1, evaluation=EvalConfig(batches=0))
    train(run, directory=tmp_path)
    result = train(dataclasses.replace(run, steps=2), directory=tmp_path)
    scale = find_quantizers(result.model)["layers.0.mixer.gdn_state_quantizer"].amax.get_value()
    assert np.isfinite(scale).all() and (scale > 0).any()


def test_a_plain_run_goes_on_with_rounding_but_not_with_another(tmp_path):
    plain = config(model=GDN, steps=1, evaluation=EvalConfig(batches=0))
    train(plain, directory=tmp_path)
    result = train(dataclasses.replace(plain, steps=2, quant=STATIC), directory=tmp_path)
    (quantizer,) = (q for q in find_quantizers(result.model).values() if q.enabled)
    assert float(quantizer.amax.get_value().min()) > 0
    with pytest.raises(CheckpointMismatchError, match="start a new directory with init_from"):
        train(dataclasses.replace(plain, steps=3, quant=FP8), directory=tmp_path)


@pytest.mark.slow
def test_the_loop_of_ones_own_in_the_docs_runs(capsys):
    page = (pathlib.Path(__file__).parents[1] / "docs" / "training.md").read_text(encoding="utf-8")
    exec(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1], {})
    loss, scores = capsys.readouterr().out.split(" ", 1)
    assert np.isfinite(float(loss)) and "'loss'" in scores


# ------------------------------------------------------------------ values that are not finite


def test_a_run_that_meets_nan_names_the_place_and_keeps_the_last_good_checkpoint(tmp_path, monkeypatch):
    seen = []

    def put(batch, *args):
        seen.append(1)
        if len(seen) == 4:
            batch = batch | {"inputs": np.full_like(batch["inputs"], np.nan)}
        return put_batch(batch, *args)

    monkeypatch.setattr(jlaqat.training, "put_batch", put)
    run = config(steps=8, checkpoint=CheckpointConfig(every=2))
    with pytest.raises(NonFiniteError) as error:
        train(dataclasses.replace(run, logging=dataclasses.replace(run.logging, every=5)), directory=tmp_path)
    failed = error.value
    assert failed.step == 4 and failed.checkpoint == 2 and failed.layer == "embed"
    assert "step 4: loss nan" in str(failed) and "the last good checkpoint is step 2" in str(failed)
    with Checkpointer(tmp_path / "checkpoints", read_only=True) as checkpointer:
        assert checkpointer.all_steps() == [2]
    assert "layer: embed" in read_jsonl(tmp_path / "metrics.jsonl", "non_finite")[0]["message"]
    # Whoever mends the data goes on from there.
    assert train(run, directory=tmp_path).step == 8


def test_an_update_that_overflows_stops_before_it_is_applied(tmp_path):
    rate = OptimizerConfig(name="sgd", learning_rate=1e38, schedule="constant", clip_norm=None)
    with pytest.raises(NonFiniteError, match=r"step 1: .* update norm inf(.*\n)*.*no checkpoint was written yet.*rate"):
        train(config(optimizer=rate), directory=tmp_path)


def explain(model, batch, **fields):
    names = split_model(model)[1]
    metrics = {
        "loss": np.float32(np.nan),
        "grad_norm": np.float32(np.nan),
        "update_norm": np.float32(np.nan),
        "grad_finite": np.ones(len(jax.tree.leaves(names)), bool),
    } | fields
    return explain_non_finite(model, batch, metrics, step=3, checkpoint=None)


def regression_batch():
    rng = np.random.default_rng(0)
    return {"inputs": rng.normal(size=(2, 16, 9)).astype(np.float32), "targets": np.zeros((2, 16, 1), np.float32)}


def test_a_bad_weight_names_its_layer_and_the_quantizer_that_saw_it():
    model = build_model(config(model=dataclasses.replace(GDN, num_layers=2, scan_layers=True, remat=True), quant=FP8))
    kernel = model.layers[1].mixer.v_proj.kernel
    kernel.set_value(kernel.get_value().at[0, 0].set(jnp.inf))
    error = explain(model, regression_batch())
    assert error.layer == "layers.1.mixer.v_proj"
    assert error.quantizer == "layers.1.mixer.gdn_state_quantizer"
    assert "parameters not finite before the step: layers.1.mixer.v_proj.kernel" in str(error)


def test_a_bad_batch_is_named():
    batch = regression_batch()
    batch["inputs"][0, 3, 0] = np.nan
    error = explain(build_model(config()), batch)
    assert error.layer == "embed" and "the batch itself is not finite: inputs" in str(error)


def test_a_gradient_that_alone_is_not_finite_names_the_layer_nearest_the_loss():
    model = build_model(config(model=dataclasses.replace(ATTENTION, num_layers=11)))
    names = list(named_leaves(split_model(model)[1]))
    flags = np.array([not name.startswith(("layers.2.", "layers.10.", "embed")) for name in names])
    error = explain(model, regression_batch(), grad_finite=flags)
    assert error.layer == "layers.10" and error.quantizer is None
    assert "in the backward pass" in str(error) and error.parameters[0].startswith("embed")
    assert sorted(["layers.10.a", "layers.2.a"], key=natural_order) == ["layers.2.a", "layers.10.a"]


# ------------------------------------------------------------------ evaluation


@pytest.mark.slow
def test_packed_rows_score_and_report_like_one_long_row():
    data = DataConfig(task="text", paths=(__file__,), batch_size=2, seq_len=64, packing=True, num_threads=0)
    model_config = dataclasses.replace(GDN, input_size=None, output_size=None, vocab_size=256)
    model = build_model(config(model=model_config, data=data, quant=FP8))
    batch = next(iter(make_dataset(data)))
    values, step = split_model(model)[1:], make_eval_step(model)
    whole, rows = (evaluate_batches(step, values, [b]) for b in (batch, split_packed(batch, 2)))
    np.testing.assert_allclose(rows["loss"], whole["loss"], rtol=1e-5)
    assert rows["accuracy"] == pytest.approx(whole["accuracy"]) and rows["weight"] == whole["weight"]
    report = make_quantizer_report(model)
    for name, metrics in report(values, split_packed(batch, 2)).items():
        reference = report(values, batch)[name]
        np.testing.assert_allclose(metrics["relative_rms"], reference["relative_rms"], rtol=0.2)


def test_no_report_without_quantizers():
    assert make_quantizer_report(build_model(config())) is None


# ------------------------------------------------------------------ configs


def test_configs_load_from_yaml_with_overrides(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: {vocab_size: 256, hidden_size: 64}\ndata: {task: text, paths: [stdlib]}\nquant: state_fp8\n"
        "optimizer: {learning_rate: 1e-3, no_decay: ['*bias*']}\ndistillation: {temperature: 2.0}\n"
        "sharding: {rules: [{name: '*.kernel', axes: [null, model]}]}\n"
    )
    run = load_config(TrainConfig, str(file), ["steps=7", "model.pattern=[kda]", "checkpoint.max_to_keep=null"])
    assert run.steps == 7 and run.model.pattern == ("kda",) and run.distillation.temperature == 2.0
    assert run.checkpoint.max_to_keep is None and run.sharding.rules[0].axes == (None, "model")
    assert run.loss_name == "cross_entropy" and run.quant[0]["quantizer_name"]
    assert load_config(TrainConfig, to_dict(run)) == run
    with pytest.raises(ConfigError, match="warmup_step.*warmup_steps"):
        load_config(TrainConfig, str(file), ["optimizer.warmup_step=3"])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"steps": 0}, "steps=0 must be at least 1"),
        ({"loss": "mse"}, "'cross_entropy', 'squared_error'"),
        ({"accumulation": 3}, "batch_size=4 does not divide into accumulation=3"),
        ({"evaluation": EvalConfig(batches=0), "checkpoint": CheckpointConfig(keep_best=1)}, "evaluation.batches=0"),
        ({"optimizer": OptimizerConfig(warmup_steps=9)}, "warmup_steps=9.*has 4"),
    ],
)
def test_configs_that_cannot_work_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        config(**fields)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LogConfig(every=0), "logging.every=0"),
        (lambda: CheckpointConfig(max_to_keep=0), "checkpoint.max_to_keep=0"),
        (lambda: EvalConfig(every=-1), "evaluation.every=-1"),
    ],
)
def test_sections_name_their_field(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# ------------------------------------------------------------------ logs


def test_jsonl_takes_each_step_once_and_survives_a_cut_line(tmp_path, caplog):
    file = tmp_path / "metrics.jsonl"
    log = JsonlLog(file)
    assert log.write("train", 1, {"loss": 0.1, "tokens_per_second": 5.0})
    assert log.write("eval", 1, {"loss": 0.3})
    log.close()
    with file.open("a") as f:
        f.write('{"kind": "train", "step": 2, "lo')  # killed while writing
    assert [r["step"] for r in read_jsonl(file, "train")] == [1]
    log = JsonlLog(file)
    assert not log.write("train", 1, {"loss": 0.1, "tokens_per_second": 9.0}) and not caplog.text
    assert log.write("train", 2, {"loss": float("nan")})
    assert not log.write("train", 2, {"loss": 0.5})
    assert "logged before with other values (loss" in caplog.text
    log.close()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(r["kind"], r["step"]) for r in lines] == [("train", 1), ("eval", 1), ("train", 2)]
    assert lines[2]["loss"] == "nan", "JSON has no NaN"
    file.write_bytes(file.read_bytes().replace(b'"kind"', b"\0\0\xff", 1))  # as a power failure may leave it
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 1 is no record of a run.*Remove the line, or move"):
        JsonlLog(file)


def test_other_processes_write_nothing(tmp_path):
    with TrainLog(tmp_path, total=3, active=False) as log:
        log.write("train", 1, {"loss": 1.0})
        log.advance(1, "loss 1.0")
    assert not list(tmp_path.iterdir())


def test_the_progress_bar_shows_on_a_terminal_only(tmp_path, monkeypatch, capsys):
    for terminal in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal)
        with TrainLog(tmp_path, total=3, jsonl=False, tensorboard=False) as log:
            log.advance(2, "loss 1.25")
        shown = capsys.readouterr().err
        assert ("loss 1.25" in shown and "2/3" in shown) == terminal
