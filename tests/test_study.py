"""The study: four arms on the same tokens, a record that says what was done, checkpoints that score the same."""

import dataclasses
import hashlib
import itertools
import json
import math

import jax
import numpy as np
import pytest
from flax import nnx

from jlaqat import cli
from jlaqat.checkpoint import Checkpointer
from jlaqat.data import DataConfig, make_dataset, token_hash
from jlaqat.model import DecoderLM, ModelConfig
from jlaqat.optim import OptimizerConfig, make_optimizer
from jlaqat.quantizers import find_quantizers, quantize
from jlaqat.recipes import ConfigError, load_config, to_dict
from jlaqat.spec import FORMATS
from jlaqat.study import ARMS, StudyConfig, load_record, recovery, run_study
from jlaqat.study_arms import stack_values, start_state, train_arm, unstack
from jlaqat.study_config import STATE_CFG, Setting
from jlaqat.study_head import DeltaHead, HeadConfig, _pairs
from jlaqat.study_report import print_report, study_table
from jlaqat.train_step import create_train_state, make_train_step

pytestmark = pytest.mark.usefixtures("compile_quickly")

MODEL = ModelConfig(
    input_size=9,
    output_size=1,
    hidden_size=16,
    num_layers=1,
    num_heads=1,
    head_dim=16,
    use_short_conv=False,
    intermediate_size=16,
)
HEAD = HeadConfig(input_size=9, output_size=1, key_dim=16, value_dim=16, backend="recurrent")
TOY = StudyConfig(
    head=HEAD,
    data=DataConfig(task="regression", input_dim=4, seq_len=12, batch_size=2, seed=3),
    steps=6,
    finetune_steps=4,
    seeds=2,
    formats=("nvfp4",),
    cadences=(1,),
    score_cadences=(64,),
    eval_batches=2,
    eval_batch_size=4,
    score_tail=0.5,
    scan_steps=4,
    optimizer=OptimizerConfig(learning_rate=1e-2),
    finetune_optimizer=OptimizerConfig(learning_rate=1e-2),
)


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """The toy study, run once: (record, directory, what it said)."""
    directory, said = tmp_path_factory.mktemp("study") / "toy", []
    return run_study(TOY, directory, say=said.append), directory, said


def scores(record, arm, setting=None):
    [found] = [s for s in record["scores"] if s["arm"] == arm and s["setting"] == setting]
    return found


# ------------------------------------------------------------------ the run


def test_record_holds_every_arm_of_every_setting(study):
    record, directory, _ = study
    assert record == load_record(directory) == json.loads((directory / "study.json").read_text())
    assert [s["name"] for s in record["settings"]] == ["nvfp4-1", "nvfp4-64"]
    expected = {("float32", None), ("control_float32", None)} | {
        (arm, s) for arm in ("ptq", "qat", "control") for s in ("nvfp4-1", "nvfp4-64")
    }
    assert {(s["arm"], s["setting"]) for s in record["scores"]} == expected
    for score in record["scores"]:
        assert len(score["scores"]) == 2 and all(math.isfinite(x) and x > 0 for x in score["scores"])
        assert score["mean"] == pytest.approx(np.mean(score["scores"]))
        assert score["std"] == pytest.approx(np.std(score["scores"], ddof=1))
        assert len(score["curve"]) == 12
    assert record["seeds"] == [0, 1]
    assert record["score"] == {"name": "mse", "lower_is_better": True}
    assert load_config(StudyConfig, record["config"]) == TOY
    assert record["model"]["parameters"] == sum(
        x.size for x in jax.tree.leaves(nnx.state(DeltaHead(HEAD, rngs=nnx.Rngs(0)), nnx.Param))
    )
    for key in ("code_sha256", "versions", "machine", "seconds", "peak_memory_bytes"):
        assert record[key]
    assert (directory / "study.png").read_bytes().startswith(b"\x89PNG")


def test_arms_see_the_same_tokens_and_updates(study):
    record, _, _ = study
    base, control, qat = record["training"]
    assert [t["arm"] for t in record["training"]] == ["float32", "control", "qat"]
    assert (base["updates"], control["updates"], qat["updates"]) == (6, 4, 4)
    assert control["token_sha256"] == qat["token_sha256"] != base["token_sha256"]
    assert len(set(base["token_sha256"])) == 2  # each seed reads tokens of its own
    for i in range(2):  # and the hashes are those of the data: batches 0 to 5, then 6 to 9
        batches = list(itertools.islice(iter(make_dataset(TOY.seed_data(i))), 10))
        assert base["token_sha256"][i] == token_hash(batches[:6])
        assert control["token_sha256"][i] == token_hash(batches[6:])
    assert base["tokens"] == 2 * 6 * 2 * 12
    held_out = list(itertools.islice(iter(make_dataset(TOY.eval_data)), 2))
    assert record["data"]["eval_token_sha256"] == token_hash(held_out)
    assert record["data"]["eval_tokens"] == 2 * 4 * 6


def test_rounding_is_in_the_arms_that_claim_it(study):
    record, _, _ = study
    assert scores(record, "ptq", "nvfp4-1")["scores"] != scores(record, "float32")["scores"]
    assert scores(record, "control", "nvfp4-1")["scores"] != scores(record, "control_float32")["scores"]
    assert scores(record, "qat", "nvfp4-1")["scores"] != scores(record, "control", "nvfp4-1")["scores"]
    # A sequence of 12 tokens ends before the first 64-token boundary: nothing that is read was ever rounded.
    assert scores(record, "ptq", "nvfp4-64")["scores"] == pytest.approx(scores(record, "float32")["scores"], rel=1e-5)


def test_restored_checkpoints_score_the_same_bits(study):
    record, directory, _ = study
    [restore] = record["restore"]
    assert restore["setting"] == "nvfp4-1" and restore["equal"]
    assert restore["scores"] == scores(record, "qat", "nvfp4-1")["scores"]
    for i, path in enumerate(restore["checkpoints"]):
        with Checkpointer(directory / path, read_only=True) as checkpointer:
            assert checkpointer.config() == json.loads(json.dumps(to_dict(TOY.checkpoint_config(i, TOY.settings[0]))))


def test_jlaqat_eval_scores_a_study_checkpoint(study, capsys):
    """The checkpoint alone brings config, weights and quantizers."""
    record, directory, _ = study
    path = directory / record["restore"][0]["checkpoints"][1]
    assert cli.main(["eval", "--checkpoint", str(path)]) == 0
    saved = json.loads(capsys.readouterr().out)
    assert saved["loss"] == pytest.approx(scores(record, "qat", "nvfp4-1")["scores"][1], rel=1e-5)
    assert cli.main(["eval", "--checkpoint", str(path), "--quant", "none"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert abs(plain["loss"] / saved["loss"] - 1) > 1e-4  # the rounding was on


def test_report_reads_the_record_alone(study, capsys):
    record, directory, said = study
    print_report(load_record(directory), directory)
    text = capsys.readouterr().out
    for words in (
        "PTQ",
        "QAT",
        "control",
        "NVFP4 every token",
        "NVFP4 every 64 tokens *",
        "trained for cadence 1",
        "last bit",
        "2 seeds",
    ):
        assert words in text, text
    assert f"{scores(record, 'ptq', 'nvfp4-1')['mean']:.4f}" in text
    assert len(study_table(record).rows) == 2
    assert any("QAT, NVFP4 every token" in line for line in said)


def test_a_directory_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(ValueError, match="no study.yaml"):
        run_study(TOY, tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "precious"


# ------------------------------------------------------------------ training all seeds at once


@pytest.mark.slow
def test_vmapped_scan_equals_the_plain_loop():
    """An update of all seeds inside vmap and scan is `make_train_step`'s, seed by seed."""
    optimizer = make_optimizer(TOY.optimizer, 4)
    models = [TOY.build(seed) for seed in (0, 1)]
    data = [TOY.seed_data(i) for i in range(2)]
    state, record = train_arm(
        start_state(stack_values(models), optimizer, models),
        models[0],
        optimizer,
        data,
        loss="squared_error",
        skip=2,
        steps=4,
        scan_steps=3,  # two calls of two steps
        label="test",
    )
    assert int(state.step[0]) == 4 and record.losses.shape == (2, 4)
    step = make_train_step(models[1], optimizer, loss="squared_error")
    alone, losses = create_train_state(models[1], optimizer), []
    batches = list(itertools.islice(iter(make_dataset(data[1])), 2, 6))
    for batch in batches:
        alone, metrics = step(alone, batch)
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(record.losses[1], losses, rtol=1e-4)
    for mine, theirs in zip(jax.tree.leaves(unstack(state, 1).params), jax.tree.leaves(alone.params)):
        np.testing.assert_allclose(mine, theirs, rtol=1e-2, atol=1e-4)


# ------------------------------------------------------------------ arithmetic and settings


def made_scores(base, ptq, qat, control):
    arms = {"float32": base, "ptq": ptq, "qat": qat, "control": control}
    return [
        {"arm": a, "setting": None if a == "float32" else "nvfp4-1", "scores": v, "mean": float(np.mean(v))}
        for a, v in arms.items()
    ]


def test_recovery_is_the_share_won_back():
    setting = Setting(format="nvfp4", rounding="nearest", cadence=1, trained_cadence=1)
    shares = recovery(made_scores([1.0, 1.2], [3.0, 3.2], [1.5, 1.7], [3.5, 3.7]), setting)
    assert shares["cost"] == pytest.approx(2.0) and shares["cost_std"] == pytest.approx(0.0, abs=1e-12)
    assert shares["qat"] == pytest.approx(0.75) and shares["control"] == pytest.approx(-0.25)
    # Higher is better: the same formula, both signs turned.
    assert recovery(made_scores([0.8], [0.7], [0.75], [0.72]), setting)["qat"] == pytest.approx(0.5)
    # A cost within its spread over seeds has no shares: they would be ratios of noises.
    noise = recovery(made_scores([1.0, 1.2], [1.1, 1.15], [0.9, 1.1], [0.9, 1.1]), setting)
    assert noise["qat"] is None and noise["control"] is None


@pytest.mark.parametrize("name", STATE_CFG)
@pytest.mark.parametrize("cadence", [1, 64])
def test_settings_set_the_quantizers_they_name(name, cadence):
    model = DecoderLM(MODEL, rngs=nnx.Rngs(0))
    quantize(model, Setting(format=name, rounding="nearest", cadence=cadence, trained_cadence=1).quant_cfg())
    enabled = {n: q.spec for n, q in find_quantizers(model).items() if q.enabled}
    [spec] = enabled.values()
    assert (spec.format, spec.cadence, spec.rounding, spec.scale) == (name, cadence, "nearest", "dynamic")


def test_every_format_can_be_studied():
    assert set(STATE_CFG) == set(FORMATS)
    assert ARMS == ("float32", "ptq", "qat", "control")


def test_settings_are_formats_by_roundings_by_cadences():
    config = dataclasses.replace(TOY, formats=("int8", "e4m3"), roundings=("nearest", "stochastic"), cadences=(1, 16))
    assert [s.name for s in config.settings][:6] == [
        "int8-1",
        "int8-16",
        "int8-64",
        "int8-stochastic-1",
        "int8-stochastic-16",
        "int8-stochastic-64",
    ]
    assert [s.trained for s in config.settings[:3]] == [True, True, False]
    assert config.settings[-1].title == "FP8 stochastic every 64 tokens"


@pytest.mark.parametrize(
    "given,words",
    [
        (dict(seeds=0), "seeds=0 must be at least 1"),
        (dict(formats=()), r"formats=\[\] must name one or more of 'e4m3'"),
        (dict(formats=("fp3",)), r"formats=\['fp3'\].*'nvfp4'"),
        (dict(cadences=(1, 1)), r"cadences=\[1, 1\].*once"),
        (dict(cadences=(8,)), r"cadences=\[8\].*1, 16, 64"),
        (dict(score_cadences=(2,)), r"score_cadences=\[2\].*1, 16, 64"),
        (dict(score_tail=0.0), "score_tail=0.0"),
        (dict(roundings=("up",)), r"roundings=\['up'\].*'stochastic'"),
        (dict(head=None, model=dataclasses.replace(MODEL, pattern=("attention",))), "no gdn or kda layer"),
        (dict(head=None, model=dataclasses.replace(MODEL, input_size=8)), "set model.input_size=9"),
        (dict(head=None), "neither is given"),
        (dict(head=HeadConfig(vocab_size=6)), "set model.input_size=9"),
        (dict(model=MODEL), "both are given"),
        (dict(finetune_steps=2, finetune_optimizer=OptimizerConfig(warmup_steps=5)), "warmup_steps=5"),
    ],
)
def test_bad_settings_say_what_to_do(given, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(TOY, **given)


def test_a_head_reads_tokens_in_pairs():
    """With a vocabulary, a token is read together with the one before it, and with none after it."""
    config = HeadConfig(vocab_size=6, key_dim=4, value_dim=4, backend="recurrent")
    head = DeltaHead(config, rngs=nnx.Rngs(0))
    tokens = np.array([[0, 1, 2, 3]], np.int32)
    pairs = _pairs(tokens, 6)
    assert pairs.shape == (1, 4, 12) and not pairs[0, 0, :6].any()
    assert pairs[0, 1:, :6].argmax(-1).tolist() == [0, 1, 2] and pairs[0, :, 6:].argmax(-1).tolist() == [0, 1, 2, 3]
    run = nnx.jit(lambda head, tokens: head(tokens))
    logits, changed = run(head, tokens), run(head, tokens + np.array([[0, 0, 3, 0]], np.int32))
    assert logits.shape == (1, 4, 6)
    np.testing.assert_array_equal(logits[:, :2], changed[:, :2])
    assert np.abs(logits - changed)[0, 2:].max(axis=-1).min() > 1e-5
    with pytest.raises(ValueError, match=r"takes integers \[batch, tokens\]"):
        head(tokens.astype(np.float32))
    recall = DataConfig(task="recall", num_pairs=2, num_values=2, num_rounds=1, seq_len=8, batch_size=2)
    assert dataclasses.replace(TOY, head=config, data=recall, score_tail=1.0).score_name == "accuracy"


def test_text_is_scored_whole():
    text = DataConfig(task="text", paths=("stdlib",), seq_len=32, batch_size=2)
    model = ModelConfig(vocab_size=256, hidden_size=16, num_layers=1, num_heads=1, head_dim=16)
    config = dataclasses.replace(TOY, data=text, model=model, head=None, score_tail=1.0)
    assert config.score_name == "loss" and config.eval_data.split == "eval"
    with pytest.raises(ValueError, match="score_tail=0.5 applies to synthetic tasks"):
        dataclasses.replace(config, score_tail=0.5)


PACKAGED = ["demo", "decoder", "recall", "state_tracking", "slow_writes", "text", "decode_regression", "decode_recall"]


@pytest.mark.parametrize("name", PACKAGED)
def test_packaged_studies_load(name):
    config = load_config(StudyConfig, f"study/{name}")
    assert config.seeds >= 3
    with pytest.raises(ConfigError, match="unknown key 'seedz'; did you mean .*'seeds'"):
        load_config(StudyConfig, f"study/{name}", ["seedz=4"])


def test_records_of_another_version_are_refused(tmp_path):
    (tmp_path / "study.json").write_text('{"record_version": 999}')
    with pytest.raises(ValueError, match="record_version 999"):
        load_record(tmp_path)


def test_code_hash_follows_the_code():
    from jlaqat import study

    root = study.Path(study.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.glob("*.py")):
        digest.update(f"{path.name}\0".encode() + path.read_bytes() + b"\0")
    assert study.code_hash() == digest.hexdigest()


@pytest.mark.parametrize("quant", ["none", "e4m3-64"])
def test_backend_of_the_demo_is_the_chunked_one_up_to_the_order_of_sums(quant):
    """`backend: recurrent` is there for speed alone."""
    entries = (
        []
        if quant == "none"
        else Setting(format="e4m3", rounding="nearest", cadence=64, trained_cadence=64).quant_cfg()
    )
    x = np.random.default_rng(0).standard_normal((2, 70, 9), np.float32)
    outputs = []
    for backend in ("xla", "recurrent"):
        model = dataclasses.replace(TOY, head=dataclasses.replace(HEAD, backend=backend)).build(0, entries)
        outputs.append(nnx.jit(lambda m, x: m(x))(model, x))
    np.testing.assert_allclose(outputs[0], outputs[1], rtol=2e-3, atol=2e-4)


def test_settings_with_error_feedback_round_when_those_without_do():
    """A policy of "every 16 tokens" that keeps no remainder is the cadence of 16: the arms differ in one thing."""
    plain, fed = (
        Setting(format="int4", rounding="nearest", cadence=16, trained_cadence=16, error_feedback=x).quant_cfg()
        for x in (False, True)
    )
    fed_nothing = [fed[0], {**fed[1], "cfg": {**fed[1]["cfg"], "error_feedback": False}}]
    x = np.random.default_rng(0).standard_normal((2, 40, 9), np.float32)
    run = nnx.jit(lambda m, x: m(x, prefix_lengths=np.zeros(2, np.int32)))
    outputs = [run(TOY.build(0, entries), x) for entries in (plain, fed_nothing, fed, [])]
    scale = np.abs(outputs[3]).max()
    np.testing.assert_allclose(outputs[0], outputs[1], atol=2e-6 * scale)
    for other in (outputs[2], outputs[3]):  # the rounding is there, and so is the feedback
        assert np.abs(outputs[0] - other).max() > 0.01 * scale


@pytest.mark.slow
def test_decoders_are_studied_too(tmp_path, capsys):
    """The other model, end to end with one update a phase: build, save, restore, `jlaqat eval`."""
    config = dataclasses.replace(
        TOY,
        model=MODEL,
        head=None,
        formats=("e4m3",),
        score_cadences=(),
        steps=1,
        finetune_steps=1,
        seeds=1,
        eval_batches=1,
    )
    record = run_study(config, tmp_path / "study")
    assert record["restore"][0]["equal"] and scores(record, "qat", "e4m3-1")["std"] is None
    assert cli.main(["eval", "--checkpoint", str(tmp_path / "study/checkpoints/e4m3-1/seed0")]) == 0
    saved = json.loads(capsys.readouterr().out)["loss"]
    assert saved == pytest.approx(scores(record, "qat", "e4m3-1")["mean"], rel=1e-5)


@pytest.mark.parametrize(
    "given,words",
    [
        ({}, "give vocab_size for tokens, or both"),
        (dict(vocab_size=6, input_size=9, output_size=1), "give vocab_size for tokens, or both"),
        (dict(input_size=9), "give vocab_size for tokens, or both"),
        (dict(vocab_size=0), "head.vocab_size=0 must be at least 1"),
    ],
)
def test_a_head_is_of_tokens_or_of_vectors(given, words):
    with pytest.raises(ValueError, match=words):
        HeadConfig(**given)
