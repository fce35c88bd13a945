"""A run killed with SIGKILL, in the middle of a save and elsewhere, ends with the bits of one that never was."""

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import yaml

from jlaqat.checkpoint import Checkpointer
from jlaqat.checkpoint_tree import read_arrays, saved_arrays
from jlaqat.train_log import read_jsonl

CHILD = pathlib.Path(__file__).with_name("training_child.py")
TIMEOUT = 900

SMALL = {
    "model": {
        "input_size": 9,
        "output_size": 1,
        "hidden_size": 16,
        "num_layers": 1,
        "pattern": ["attention"],
        "num_heads": 2,
        "head_dim": 8,
        "intermediate_size": 16,
    },
    "data": {"task": "regression", "input_dim": 4, "batch_size": 4, "seq_len": 16, "num_threads": 1},
    "steps": 40,
    "checkpoint": {"every": 7, "max_to_keep": 2},
    "evaluation": {"every": 10, "batches": 1},
    "logging": {"every": 1, "quantizers_every": 0, "tensorboard": False},
}

# Everything that has state: stochastic rounding (counters), distillation (the teacher on disk), packed text in shuffled
# order, accumulation, an asynchronous save.
WHOLE = {
    "model": {
        "vocab_size": 256,
        "hidden_size": 32,
        "num_layers": 2,
        "pattern": ["gdn", "kda"],
        "num_heads": 2,
        "head_dim": 16,
    },
    "data": {"task": "text", "paths": [], "batch_size": 4, "seq_len": 64, "packing": True, "max_documents": 4},
    "quant": [
        {"quantizer_name": "*state_quantizer", "cfg": {"num_bits": "e4m3", "rounding": "stochastic"}},
        {"quantizer_name": "layers.1.*w_quantizer", "cfg": {"num_bits": "e4m3", "axis": [0, 1, 2]}},
    ],
    "distillation": {"weight": 0.5, "temperature": 2.0},
    "accumulation": 2,
    "steps": 30,
    "checkpoint": {"every": 6, "asynchronous": True, "keep_best": 1},
    "evaluation": {"every": 6, "batches": 1},
    "logging": {"every": 1, "quantizers_every": 5},
}


class Run:
    """A run directory, and processes that train in it."""

    def __init__(self, directory, config, cache):
        self.directory = directory
        directory.mkdir()
        file = directory.with_suffix(".yaml")
        file.write_text(yaml.safe_dump(config))
        self.command = [sys.executable, str(CHILD), str(directory), str(file), "--quick", "--cache", str(cache)]

    def start(self):
        root = str(pathlib.Path(sys.modules["jlaqat"].__file__).parents[1])
        env = {**os.environ, "PYTHONPATH": root, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
        return subprocess.Popen(self.command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def finish(self):
        process = self.start()
        try:
            output, _ = process.communicate(timeout=TIMEOUT)
        finally:
            process.kill()
        assert process.returncode == 0, output
        return output

    def kill_when(self, condition):
        """Starts a process and sends it SIGKILL as soon as `condition()` holds."""
        process = self.start()
        limit = time.monotonic() + TIMEOUT
        while not condition():
            assert process.poll() is None, f"ended before it could be killed:\n{process.communicate()[0]}"
            if time.monotonic() > limit:
                process.kill()
                pytest.fail(f"nothing to kill it for within {TIMEOUT} s:\n{process.communicate()[0]}")
            time.sleep(0.0005)
        process.send_signal(signal.SIGKILL)
        process.communicate()

    @property
    def log(self):
        return self.directory / "metrics.jsonl"

    def unfinished(self):
        """Steps that a process was writing when it was killed (or is writing now)."""
        folder = self.directory / "checkpoints"
        return [p.name for p in folder.glob("*.orbax-checkpoint-tmp*")] if folder.exists() else []

    def steps_done(self):
        return max((r["step"] for r in read_jsonl(self.log, "train")), default=0) if self.log.exists() else 0

    def arrays(self):
        """Every array of the last checkpoint, and its documents, by item and name."""
        with Checkpointer(self.directory / "checkpoints", read_only=True) as checkpointer:
            path = checkpointer.step_directory(checkpointer.latest_step())
            found = {}
            for item in ("params", "optimizer", "quantizers", "variables"):
                if names := saved_arrays(path / item):
                    found |= {f"{item}.{n}": np.asarray(x) for n, x in read_arrays(path / item, names).items()}
        documents = {n: (path / n / "metadata").read_text() for n in ("data", "config", "quantizer_metadata", "meta")}
        return path.name, found, documents

    def records(self):
        timings = ("tokens_per_second",)
        return [{k: v for k, v in r.items() if k not in timings} for r in read_jsonl(self.log)]


def assert_same_run(killed, whole):
    (step, arrays, documents), (other_step, other_arrays, other_documents) = killed.arrays(), whole.arrays()
    assert step == other_step and documents == other_documents
    assert list(arrays) == list(other_arrays) and arrays
    for name, value in arrays.items():
        assert value.tobytes() == other_arrays[name].tobytes(), name
    # The log of the killed run has every record once, with the same numbers (order within a step aside).
    lines = [json.loads(line) for line in killed.log.read_text().splitlines()]
    assert len({(r["kind"], r["step"]) for r in lines}) == len(lines)

    def key(record):
        return record["kind"], record["step"]

    assert sorted(killed.records(), key=key) == sorted(whole.records(), key=key)
    assert not killed.unfinished() and not (killed.directory / "checkpoints" / ".deleting").exists()


def test_killed_in_the_middle_of_saves(tmp_path):
    """Once before any checkpoint is complete, and once two checkpoints later, with steps logged since the last one."""
    cache = tmp_path / "cache"
    whole, killed = (Run(tmp_path / name, SMALL, cache) for name in ("whole", "killed"))
    whole.finish()
    killed.kill_when(killed.unfinished)
    assert killed.unfinished() and killed.steps_done() == 7, "the kill came too late to hit the save"
    killed.kill_when(lambda: any(name.startswith("21.") for name in killed.unfinished()))
    assert killed.unfinished() and killed.steps_done() == 21
    killed.finish()
    assert_same_run(killed, whole)


@pytest.mark.slow
def test_killed_at_random_moments_with_everything_on(tmp_path):
    """Six kills, every other one in a save, the rest a random time after new steps appear; then to the end.

    The two runs compile for themselves: that, too, must give the same bits.
    """
    text = tmp_path / "text"
    text.mkdir()
    rng = random.Random(0)
    for i in range(12):
        (text / f"{i}.txt").write_text(" ".join(rng.choice(["state", "decays", "by", "a", "gate"]) for _ in range(200)))
    config = {**WHOLE, "data": {**WHOLE["data"], "paths": [str(text)]}}
    whole, killed = (Run(tmp_path / n, config, tmp_path / f"{n}_cache") for n in ("whole", "killed"))
    whole.finish()
    for kill in range(6):
        before, delay = killed.steps_done(), rng.uniform(0, 1.5)
        if kill % 2:
            killed.kill_when(lambda: killed.unfinished() or killed.steps_done() == 30)
            continue
        since = []

        def due(before=before, delay=delay, since=since):
            if not since and (killed.steps_done() > before or killed.unfinished()):
                since.append(time.monotonic())
            return since and (time.monotonic() - since[0] > delay or killed.steps_done() == 30)

        killed.kill_when(due)
    killed.finish()
    assert_same_run(killed, whole)
