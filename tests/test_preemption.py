"""SIGTERM, as schedulers send it: the step ends, a checkpoint is written, the run goes on later with equal bits."""

import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest
import yaml

from jlaqat import training
from jlaqat.checkpoint import Checkpointer
from jlaqat.preemption import Preempted, StopSignal
from jlaqat.recipes import load_config, to_dict
from jlaqat.train_config import CheckpointConfig, TrainConfig
from jlaqat.train_log import read_jsonl

pytestmark = pytest.mark.usefixtures("compile_quickly")
ROOT = str(pathlib.Path(sys.modules["jlaqat"].__file__).parents[1])
ENV = {**os.environ, "PYTHONPATH": ROOT, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
RUN = load_config(
    TrainConfig,
    {
        # Attention alone: it compiles in a fraction of the time.
        "model": {"input_size": 9, "output_size": 1, "hidden_size": 16, "num_layers": 1, "pattern": ["attention"]}
        | {"num_heads": 2, "head_dim": 8, "intermediate_size": 16},
        "data": {"task": "regression", "input_dim": 4, "batch_size": 4, "seq_len": 16, "num_threads": 0},
        "steps": 5,
        "checkpoint": {"every": 2},
        "evaluation": {"every": 2, "batches": 1},
        "logging": {"every": 1, "quantizers_every": 0, "tensorboard": False},
    },
)


def start(*command):
    return subprocess.Popen(
        [sys.executable, *map(str, command)], env=ENV, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def signal_at(monkeypatch, batch):
    """This process gets a SIGTERM while the batch of that number is being placed."""
    count, put_batch = [], training.put_batch

    def put(*arguments):
        count.append(1)
        if len(count) == batch:
            os.kill(os.getpid(), signal.SIGTERM)
        return put_batch(*arguments)

    monkeypatch.setattr(training, "put_batch", put)


def saved_steps(directory):
    with Checkpointer(directory / "checkpoints", read_only=True) as checkpointer:
        return checkpointer.all_steps()


@pytest.mark.parametrize("asynchronous", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_step_is_finished_saved_and_gone_on_from(asynchronous, tmp_path, monkeypatch, capfd):
    run = dataclasses.replace(RUN, checkpoint=CheckpointConfig(every=2, asynchronous=asynchronous))
    whole = training.train(run, directory=tmp_path / "whole")
    with monkeypatch.context() as patch:
        signal_at(patch, 3)
        with pytest.raises(Preempted, match="after step 3, saved as .*/checkpoints/3. Start it again") as stopped:
            training.train(run, directory=tmp_path / "stopped")
    assert "a second one stops it now" in capfd.readouterr().err
    assert stopped.value.step == 3 and stopped.value.checkpoint.is_dir() and saved_steps(tmp_path / "stopped") == [2, 3]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    again = training.train(run, directory=tmp_path / "stopped")
    values = [jax.tree.leaves(training.split_model(r.model)[1:]) for r in (whole, again)]
    assert all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in zip(*values, strict=True))
    logs = [
        [(r["kind"], r["step"], r["loss"]) for r in read_jsonl(tmp_path / name / "metrics.jsonl")]
        for name in ("whole", "stopped")
    ]
    assert logs[0] == logs[1]


def test_a_signal_before_the_first_step_and_in_the_last(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(training._Run, "start", lambda self, start=training._Run.start: _signalled(start(self)))
        with pytest.raises(Preempted, match="after step 0, nothing was to be saved yet") as stopped:
            training.train(RUN, directory=tmp_path / "run")
    assert stopped.value.checkpoint is None and not saved_steps(tmp_path / "run")
    signal_at(monkeypatch, RUN.steps)
    assert training.train(RUN, directory=tmp_path / "run").step == RUN.steps  # done: there is nothing to stop


def _signalled(value):
    os.kill(os.getpid(), signal.SIGTERM)
    return value


def test_handlers_of_the_program_and_other_threads_are_left_alone():
    heard = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
    try:
        with StopSignal() as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            assert heard and not stop.asks(1)
    finally:
        signal.signal(signal.SIGTERM, before)

    def elsewhere():
        with StopSignal() as stop:
            heard.append(stop.asks(1))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert heard[-1] is False


def test_a_second_signal_stops_at_once():
    code = "import time\nfrom jlaqat.preemption import StopSignal\n"
    code += "with StopSignal(): print('busy', flush=True); time.sleep(99)"
    process = start("-c", code)
    assert process.stdout.readline() == "busy\n"
    process.send_signal(signal.SIGTERM)
    assert "a second one" in process.stdout.readline() and process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == -signal.SIGTERM


def test_the_command_ends_with_status_75_and_says_how_to_go_on(tmp_path):
    file, run, log = tmp_path / "run.yaml", tmp_path / "run", tmp_path / "run" / "metrics.jsonl"
    file.write_text(
        yaml.safe_dump(to_dict(dataclasses.replace(RUN, steps=10**6, checkpoint=CheckpointConfig(every=0))))
    )
    process = start("-m", "jlaqat.cli", "train", "--config", file, "--directory", run, "evaluation.every=0")
    limit = time.monotonic() + 300
    while not (log.exists() and read_jsonl(log)):
        assert process.poll() is None and time.monotonic() < limit, process.communicate()[0]
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=60)[0]
    (step,) = saved_steps(run)
    assert process.returncode == os.EX_TEMPFAIL == 75, output
    last = output.splitlines()[-1]
    assert last.startswith("jlaqat: stopped: SIGTERM stopped the run after step ")
    assert f"after step {step}, saved as {run}/checkpoints/{step}. Start it again" in last
    assert "same config and directory" in last and "Traceback" not in output
