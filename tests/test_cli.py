"""The command line as a user meets it: help that teaches, one-line errors with exit status 2, a run that resumes."""

import json
import os
import pathlib
import subprocess
import sys
from importlib import metadata

import pytest

import jlaqat as package
from jlaqat import cli
from jlaqat.recipes import list_configs, load_config
from jlaqat.study_config import StudyConfig
from jlaqat.training import TrainConfig

ROOT = pathlib.Path(__file__).resolve().parents[1]
TINY = """
# Attention alone: it compiles in a fraction of the time, and what is tested here is the command line.
model: {vocab_size: 256, hidden_size: 16, num_layers: 1, pattern: [attention], num_heads: 1, intermediate_size: 16}
data: {task: text, paths: [TEXT], seq_len: 16, batch_size: 2}
steps: 4
evaluation: {every: 2, batches: 1}
logging: {every: 1, quantizers_every: 0, tensorboard: false, progress: false}
checkpoint: {every: 2}
"""


@pytest.fixture
def tiny(tmp_path):
    """Path of a training config that takes seconds, on text of its own."""
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 40)
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY.replace("TEXT", str(text)))
    return path


def jlaqat(*arguments, **environment):
    """The command in a process of its own."""
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "COLUMNS": "160", **environment}
    env.pop("XLA_FLAGS", None)
    command = [sys.executable, "-m", "jlaqat.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)


def run_here(capsys, *arguments):
    """(status, stdout, stderr) of the command in this process, which has JAX loaded already."""
    try:
        status = cli.main(list(map(str, arguments)))
    except SystemExit as exit:
        status = exit.code or 0
    out, err = capsys.readouterr()
    return status, out, err


# ------------------------------------------------------------------ help


def test_help_shows_the_commands_and_the_configs(capsys):
    status, out, _ = run_here(capsys, "--help")
    assert status == 0
    for command in ("train", "eval", "study", "summary"):
        assert f"jlaqat {command}" in out
    for name in list_configs():
        assert (name in out) != name.startswith("recipes/")
    assert run_here(capsys)[0] == 2  # no command is no success


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_of_each_command_has_examples_that_hold(command, capsys):
    status, out, _ = run_here(capsys, command, "--help")
    assert status == 0
    examples = [line.split() for line in out.splitlines() if line.startswith("$ jlaqat")]
    assert len(examples) >= 3
    for _, _, name, *arguments in examples:
        assert name == command
        for flag, value in zip(arguments, arguments[1:]):
            if flag == "--config" and "/" in value:  # a packaged config: it must load with the example's overrides
                kind = StudyConfig if value.startswith("study/") else TrainConfig
                load_config(kind, value, [a for a in arguments if "=" in a])


def test_help_needs_no_jax():
    code = "import sys; from jlaqat import cli; print('jax' in sys.modules)"
    lean = "import sys, types; p = types.ModuleType('jlaqat'); p.__path__ = ['jlaqat']; sys.modules['jlaqat'] = p; "
    done = subprocess.run([sys.executable, "-c", lean + code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# ------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    "arguments,words",
    [
        (["trian"], ["no command 'trian'", "did you mean 'train'"]),
        (
            ["train", "--config", "train/stdlib_hybrid_fp9", "--directory", "D"],
            ["no config 'train/stdlib_hybrid_fp9'", "did you mean 'train/stdlib_hybrid_fp8'"],
        ),
        (["train", "--config", "TINY", "--directory", "D", "modle.num_layers=2"], ["unknown key 'modle'", "'model'"]),
        (["train", "--config", "TINY", "--directory", "D", "steps=many"], ["steps must be int", "'many'"]),
        (["train", "--config", "TINY", "--directory", "D", "steps"], ["'steps' is not of the form key=value"]),
        (["train", "--config", "TINY", "--directory", "D", "quant=state_fp9"], ["no config 'state_fp9'", "state_fp8"]),
        (
            ["train", "--config", "TINY", "--directory", "D", "data.paths=[nowhere.txt]"],
            ["nowhere.txt", "no such file"],
        ),
        (["train", "--config", "TINY", "--directory", "D", "data.seq_len=9999"], ["seq_len=9999 is too long"]),
        (["summary", "--config", "TINY", "model.vocab_size=100"], ["vocab_size=100 does not fit", "256"]),
        (["train", "--config", "TINY", "--directory", "D", "model.vocab_size=100"], ["vocab_size=100 does not fit"]),
        (
            ["summary", "--config", "TINY", "evaluation.data.seq_len=8"],
            ["do not fit evaluation.data.task='regression'"],
        ),
        (["summary", "--config", "TINY", "quant=true"], ["quant=True must be a recipe's name", '"none"']),
        (["summary", "--config", "TINY", "quant={quantizer_name: '*'}"], ["must be a recipe's name, or a list"]),
        (["summary", "--config", "TINY", "calibration.method=mean"], ["method='mean'", "max, percentile, mse"]),
        (["summary", "--config", "TINY", "optimizer.learning_rate=.nan"], ["learning_rate=nan must be finite"]),
        (["train", "--config", "TINY", "--directory", "BINARY"], ["checkpoints cannot be written", "Not a directory"]),
        (["summary", "--config", "BINARY"], ["binary.yaml: not a text file in UTF-8"]),
        (["summary", "--config", "BROKEN"], ["broken.yaml: not valid YAML"]),
        (["study", "--config", "study/demo", "--directory", "D", "formats=[fp3]"], ["formats=['fp3']", "'nvfp4'"]),
        (["eval", "--checkpoint", "D/nothing"], ["no checkpoints at", "no such directory"]),
    ],
)
def test_mistakes_end_with_one_line_and_status_2(arguments, words, tiny, tmp_path, capsys):
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe")
    (tmp_path / "broken.yaml").write_text("model: ]")
    places = {"TINY": str(tiny), "D": str(tmp_path / "run"), "D/nothing": str(tmp_path / "nothing")}
    places |= {name: str(tmp_path / f"{name.lower()}.yaml") for name in ("BINARY", "BROKEN")}
    status, _, err = run_here(capsys, *(places.get(a, a) for a in arguments))
    last = err[err.index("jlaqat: error:") :]
    assert status == 2 and last.count("\n") == (5 if "BROKEN" in arguments else 1), err
    assert all(word in last for word in words), last
    assert "Traceback" not in err


def test_missing_options_are_named(capsys):
    status, out, err = run_here(capsys, "train", "--config", "train/stdlib_hybrid_fp8")
    assert status == 2 and "--directory" in out + err


def test_a_bug_keeps_its_traceback(monkeypatch, tiny):
    """Errors from elsewhere are not dressed up as the user's."""
    monkeypatch.setattr(cli.Summary, "run", lambda self: json.loads("{"))
    with pytest.raises(ValueError):
        cli.main(["summary", "--config", str(tiny)])


# ------------------------------------------------------------------ commands


def test_summary_builds_nothing_and_tells_all(capsys):
    status, out, _ = run_here(capsys, "summary", "--config", "train/stdlib_hybrid_fp8", "model.hidden_size=2048")
    assert status == 0
    for words in ("layers.0.mixer", "attention", "total", "gdn_state_quantizer", "e4m3", "quant_cfg[0]", "states:"):
        assert words in out, out
    status, out, _ = run_here(capsys, "summary", "--config", "demo", "formats=[int8]")
    assert status == 0 and "INT8 every token" in out and "every 1 token" in out


@pytest.mark.parametrize("nothing", ["none", "[]", "null", ""])
def test_summary_without_rounding(nothing, capsys):
    status, out, err = run_here(capsys, "summary", "--config", "train/stdlib_hybrid_fp8", f"quant={nothing}")
    assert status == 0 and "0 of 6 quantizers on" in out, out + err


def test_a_config_based_on_a_study_is_a_study(tmp_path, capsys):
    file = tmp_path / "mine.yaml"
    file.write_text("base: study/demo\ndata: {seed: 3}\n")
    status, out, err = run_here(capsys, "summary", "--config", file)
    assert status == 0 and "NVFP4 every token" in out, err


def test_the_version(capsys):
    status, out, _ = run_here(capsys, "--version")
    assert status == 0 and out.strip() == f"jlaqat {metadata.version('jlaqat')}" == f"jlaqat {package.__version__}"


def test_train_and_resume_in_real_processes(tiny, tmp_path, capsys):
    run = tmp_path / "run"
    first = jlaqat("train", "--config", tiny, "--directory", run, "steps=2")
    assert first.returncode == 0, first.stderr
    assert "step 2" in first.stdout and (run / "checkpoints" / "2").is_dir()
    second = jlaqat("train", "--config", tiny, "--directory", run)
    assert second.returncode == 0, second.stderr
    assert "going on from step 2" in second.stderr and "step 4" in second.stdout
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = [r for r in records if "loss" in r and "learning_rate" in r]
    assert [r["step"] for r in trained] == [1, 2, 3, 4]
    status, _, err = run_here(capsys, "train", "--config", tiny, "--directory", run, "--no-resume")
    assert status == 2 and "has checkpoints up to step 4" in err


@pytest.mark.slow
def test_eval_scores_the_held_out_data(tiny, tmp_path, capsys):
    run = tmp_path / "run"
    assert run_here(capsys, "train", "--config", tiny, "--directory", run, "steps=2")[0] == 0
    saved = json.loads(run_here(capsys, "eval", "--checkpoint", run)[1])
    assert saved["step"] == 2 and saved["batches"] == 1 and 0 < saved["loss"] < 10
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = [r for r in records if r.get("kind", r.get("event")) == "eval"][-1]
    assert saved["loss"] == pytest.approx(last["loss"], rel=1e-6)
    one = json.loads(run_here(capsys, "eval", "--checkpoint", run / "checkpoints" / "2")[1])  # as train prints it
    assert one == saved
    status, _, err = run_here(capsys, "eval", "--checkpoint", run / "checkpoints" / "2", "--step", "1")
    assert status == 2 and "is step 2; leave one of them out" in err
    plain = json.loads(run_here(capsys, "eval", "--checkpoint", run, "--quant", "none", "--batches", "2")[1])
    assert plain["batches"] == 2 and plain["weight"] > saved["weight"]
    longer = json.loads(run_here(capsys, "eval", "--checkpoint", run, "data.seq_len=8")[1])
    assert longer["weight"] == 2 * 8
