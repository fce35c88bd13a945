"""Training on several devices and in several processes: the losses of one, and states that move between them."""

import dataclasses
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
import yaml
from jax.sharding import PartitionSpec

from jlaqat.checkpoint import Checkpointer
from jlaqat.data import DataConfig
from jlaqat.model import ModelConfig
from jlaqat.naming import named_leaves
from jlaqat.optim import OptimizerConfig, make_optimizer
from jlaqat.recipes import to_dict
from jlaqat.sharding import ShardingConfig, ShardingRule, make_mesh, param_specs, put_batch, state_shardings
from jlaqat.train_config import CheckpointConfig, EvalConfig, LogConfig
from jlaqat.train_log import read_jsonl
from jlaqat.train_step import DistillationConfig, create_train_state, split_model
from jlaqat.training import TrainConfig, build_model, train

pytestmark = pytest.mark.usefixtures("compile_quickly")
CHILD = pathlib.Path(__file__).with_name("training_child.py")
REGRESSION = DataConfig(task="regression", input_dim=4, batch_size=8, seq_len=16, num_threads=0)
ATTENTION = ModelConfig(
    input_size=9, output_size=1, hidden_size=16, num_layers=1, pattern=("attention",), num_heads=2, head_dim=8,
    intermediate_size=16,
)  # fmt: skip
GDN = dataclasses.replace(ATTENTION, pattern=("gdn",))
FP8 = ({"quantizer_name": "*state_quantizer", "cfg": {"num_bits": "e4m3"}},)
TENSOR = (
    ShardingRule(name="*.gate_proj.kernel", axes=(None, "model")),
    ShardingRule(name="*.up_proj.kernel", axes=(None, "model")),
    ShardingRule(name="*.down_proj.kernel", axes=("model", None)),
)


def config(**fields):
    defaults = {
        "model": ATTENTION,
        "data": REGRESSION,
        "steps": 3,
        "optimizer": OptimizerConfig(schedule="constant", learning_rate=0.01),
        "logging": LogConfig(every=1, quantizers_every=0, tensorboard=False),
        "evaluation": EvalConfig(batches=1),
        "checkpoint": CheckpointConfig(every=0),
    }
    return TrainConfig(**defaults | fields)


def losses(directory):
    return [r["loss"] for r in read_jsonl(directory / "metrics.jsonl") if r["kind"] in ("train", "eval")]


# ------------------------------------------------------------------ where things go


def test_meshes_and_their_errors():
    assert dict(make_mesh(ShardingConfig(data=-1, model=2)).shape) == {"data": 4, "model": 2}
    assert dict(make_mesh(ShardingConfig()).shape) == {"data": 1, "model": 1}
    with pytest.raises(ValueError, match="needs 9 devices and there are 8"):
        make_mesh(ShardingConfig(data=9))
    with pytest.raises(ValueError, match="sharding.data=0"):
        ShardingConfig(data=0)
    with pytest.raises(ValueError, match="'rows' is not 'data', 'model' or null"):
        ShardingRule(name="*", axes=("rows",))


def test_rules_come_first_and_fsdp_takes_the_rest():
    sharding = ShardingConfig(data=4, model=2, fsdp=True, fsdp_min_size=64, rules=TENSOR)
    mesh, optimizer = make_mesh(sharding), make_optimizer(OptimizerConfig(), 10)
    shapes = jax.eval_shape(lambda: create_train_state(build_model(config(quant=FP8, model=GDN)), optimizer))
    specs = param_specs(shapes.params, sharding, mesh)
    assert specs["layers.0.mlp.gate_proj.kernel"] == PartitionSpec("data", "model")
    assert specs["layers.0.mlp.down_proj.kernel"] == PartitionSpec("model", "data")
    assert specs["layers.0.mixer.q_proj.kernel"] in (PartitionSpec("data", None), PartitionSpec(None, "data"))
    assert specs["norm.scale"] == PartitionSpec(None)
    # The optimizer's moments go where their parameters go; quantizers and counters are everywhere.
    shardings = state_shardings(shapes, sharding, mesh)
    moments = {n: s.spec for n, s in named_leaves(shardings.opt_state).items()}
    assert moments["1.0.mu.layers.0.mlp.gate_proj.kernel"] == PartitionSpec("data", "model")
    assert all(s.spec == PartitionSpec() for s in jax.tree.leaves((shardings.quantizers, shardings.step)))


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (ShardingRule(name="*.gate_pro.kernel", axes=("model", None)), "matches no parameter.*gate_proj"),
        (ShardingRule(name="*.gate_proj.kernel", axes=("model",)), "has 1 axes, but .* has shape"),
        (
            ShardingRule(name="embed.kernel", axes=("model", None)),
            r"cuts a dimension of 9 .* over 2 devices of 'model'",
        ),
    ],
)
def test_rules_that_cannot_work_are_refused(rule, message):
    sharding = ShardingConfig(model=2, rules=(rule,))
    params = split_model(build_model(config()))[1]
    with pytest.raises(ValueError, match=message):
        param_specs(params, sharding, make_mesh(sharding))


def test_batches_are_cut_by_rows():
    mesh = make_mesh(ShardingConfig(data=4, model=2))
    batch = {"inputs": np.arange(32).reshape(8, 4), "targets": np.zeros((8, 4))}
    placed = put_batch(batch, mesh)
    assert placed["inputs"].sharding.spec == PartitionSpec("data")
    np.testing.assert_array_equal(placed["inputs"], batch["inputs"])
    with pytest.raises(ValueError, match=r"8 rows does not divide over 4 devices of the axis 'data' × accumulation=4"):
        put_batch(batch, mesh, 4)
    packed = {"inputs": np.zeros((1, 32)), "targets": np.zeros((1, 32)), "cu_seqlens": np.arange(0, 33, 4)}
    placed = put_batch(packed, mesh)
    assert placed["inputs"].shape == (4, 8) and placed["cu_seqlens"].tolist() == [[0, 4, 8]] * 4


# ------------------------------------------------------------------ simulated devices


def test_data_parallel_fsdp_and_tensor_rules_give_the_losses_of_one_device(tmp_path):
    """A quantized model on 4 × 2 devices."""
    common = {"model": GDN, "quant": FP8, "evaluation": EvalConfig(batches=0)}
    train(config(**common), directory=tmp_path / "one")
    sharding = ShardingConfig(data=4, model=2, fsdp=True, fsdp_min_size=64, rules=TENSOR)
    many = train(config(**common, sharding=sharding), directory=tmp_path / "many")
    np.testing.assert_allclose(losses(tmp_path / "many"), losses(tmp_path / "one"), rtol=1e-5)
    kernel = many.model.layers[0].mlp.gate_proj.kernel.get_value()
    assert kernel.sharding.spec == PartitionSpec("data", "model") and kernel.addressable_shards[0].data.shape == (4, 8)


@pytest.mark.slow
def test_packed_text_with_accumulation_and_distillation_on_eight_devices(tmp_path):
    data = DataConfig(task="text", paths=(__file__,), batch_size=16, seq_len=32, packing=True, num_threads=0)
    model = dataclasses.replace(
        GDN, input_size=None, output_size=None, vocab_size=256, pattern=("gdn", "kda"), num_layers=2
    )
    common = {"model": model, "data": data, "quant": FP8, "distillation": DistillationConfig(temperature=2.0)}
    train(config(**common), directory=tmp_path / "one")
    sharding = ShardingConfig(data=8, fsdp=True, fsdp_min_size=64)
    train(config(**common, accumulation=2, sharding=sharding), directory=tmp_path / "many")
    np.testing.assert_allclose(losses(tmp_path / "many"), losses(tmp_path / "one"), rtol=2e-4)


@pytest.mark.slow
def test_a_run_moves_from_eight_devices_to_one_to_four(tmp_path):
    """Each leg goes on from the checkpoint of the one before; the losses are those of a run that stayed on one."""
    for steps, devices in ((2, 8), (4, 1), (6, 4)):
        sharding = ShardingConfig(data=devices, fsdp=True, fsdp_min_size=64)
        train(config(steps=steps, sharding=sharding), directory=tmp_path / "moved")
        train(config(steps=steps), directory=tmp_path / "stayed")
    np.testing.assert_allclose(losses(tmp_path / "moved"), losses(tmp_path / "stayed"), rtol=1e-5)


# ------------------------------------------------------------------ processes


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start_processes(directory, run, count, devices=1):
    """The run in `count` real processes of `devices` CPU devices each."""
    file = directory.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(to_dict(run)))
    root = str(pathlib.Path(sys.modules["jlaqat"].__file__).parents[1])
    flags = f"--xla_force_host_platform_device_count={devices}"
    env = {**os.environ, "PYTHONPATH": root, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(CHILD), str(directory), str(file), "--quick"]
    command += ["--port", str(free_port()), "--processes", str(count)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return [subprocess.Popen([*command, "--index", str(i)], env=env, **pipes) for i in range(count)]


def outputs_of(processes, meanwhile=lambda: None):
    """What the processes print until they end; none outlives the test."""
    try:
        meanwhile()
        return [p.communicate(timeout=300)[0] for p in processes]
    finally:
        for p in processes:
            p.kill()


def run_processes(*arguments, **options):
    processes = start_processes(*arguments, **options)
    outputs = outputs_of(processes)
    assert not any(p.returncode for p in processes), "\n".join(outputs)


@pytest.mark.slow
def test_two_processes_give_the_losses_of_one(tmp_path):
    """Two processes, parameters cut between them, a checkpoint in the middle; one process then goes on alone."""
    sharding = ShardingConfig(data=-1, fsdp=True, fsdp_min_size=64)
    pair = config(sharding=sharding, checkpoint=CheckpointConfig(every=2))
    run_processes(tmp_path / "pair", pair, 2)
    alone = config(steps=5)
    train(alone, directory=tmp_path / "alone")
    np.testing.assert_allclose(losses(tmp_path / "pair")[:3], losses(tmp_path / "alone")[:3], rtol=1e-5)
    lines = read_jsonl(tmp_path / "pair" / "metrics.jsonl", "train")
    assert [r["step"] for r in lines] == [1, 2, 3], "both processes wrote"
    with Checkpointer(tmp_path / "pair" / "checkpoints", read_only=True) as checkpointer:
        assert checkpointer.all_steps() == [2, 3]
    train(alone, directory=tmp_path / "pair")
    np.testing.assert_allclose(losses(tmp_path / "pair")[-3:], losses(tmp_path / "alone")[-3:], rtol=1e-5)


@pytest.mark.slow
def test_two_processes_of_two_devices_resume_a_quantized_run(tmp_path):
    """QAD of a calibrated model: teacher export, calibration and restore all happen across processes."""
    static = ({"quantizer_name": "*state_quantizer", "cfg": {"num_bits": "e4m3", "type": "static"}},)
    common = {"model": GDN, "quant": static, "distillation": DistillationConfig()}
    sharding = ShardingConfig(data=-1, fsdp=True, fsdp_min_size=64)
    for steps in (2, 4):
        run_processes(tmp_path / "pair", config(**common, steps=steps, sharding=sharding), 2, devices=2)
    train(config(**common, steps=4), directory=tmp_path / "alone")
    pair = [r["loss"] for r in read_jsonl(tmp_path / "pair" / "metrics.jsonl", "train")]
    alone = [r["loss"] for r in read_jsonl(tmp_path / "alone" / "metrics.jsonl", "train")]
    np.testing.assert_allclose(pair, alone, rtol=1e-4)


@pytest.mark.slow
def test_two_processes_stop_at_one_step_when_one_hears_sigterm(tmp_path):
    """JAX's preemption service tells the other one, and they agree on a step to save together."""
    endless = config(steps=10**6, sharding=ShardingConfig(data=-1), evaluation=EvalConfig(batches=0))
    processes = start_processes(tmp_path / "pair", endless, 2)
    log, limit = tmp_path / "pair" / "metrics.jsonl", time.monotonic() + 300

    def signal_one():
        while not (log.exists() and read_jsonl(log)):
            assert all(p.poll() is None for p in processes) and time.monotonic() < limit
            time.sleep(0.01)
        processes[1].send_signal(signal.SIGTERM)

    outputs = outputs_of(processes, signal_one)
    with Checkpointer(tmp_path / "pair" / "checkpoints", read_only=True) as checkpointer:
        (step,) = checkpointer.all_steps()
    assert all(f"Preempted: SIGTERM stopped the run after step {step}, saved" in text for text in outputs), outputs
