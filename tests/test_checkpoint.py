"""Checkpoints: contents, validation, quantizers on restore, retention, half-written steps, devices."""

import json
import logging
import pathlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jlaqat
from jlaqat.checkpoint import Checkpointer, CheckpointMismatchError
from jlaqat.quantizers import QuantizerVariable, find_quantizers, strip_quantizers

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from tiny_checkpoints import FP8, Model, Wider, assert_same, read_plain, restore, saved, values

pytestmark = pytest.mark.usefixtures("compile_quickly")
INT8 = [{"quantizer_name": "*state_quantizer", "cfg": {"num_bits": 8, "narrow_range": True}}]
STATIC = [{"quantizer_name": "*state_quantizer", "cfg": {"num_bits": "e4m3", "type": "static"}}]


@pytest.fixture
def optimizer():
    return optax.adamw(1e-3)


# ------------------------------------------------------------------ round trip


def test_everything_comes_back_bit_for_bit(tmp_path, optimizer):
    model = Model(0, quant=FP8)
    model.drop.rngs()  # advances the stream
    jlaqat.quantizers.set_step(model, 7)
    opt_state = jax.tree.map(lambda x: x + 1, optimizer.init(nnx.state(model, nnx.Param)))
    path = saved(
        tmp_path, model, opt_state=opt_state, data_state={"next_index": 5}, config={"a": [1]}, metrics={"loss": 0.5}
    )

    other = Model(1, quant=FP8)
    template = optimizer.init(nnx.state(other, nnx.Param))
    restored = restore(path, other, opt_state=template)
    assert_same(values(other), values(model))
    jax.tree.map(np.testing.assert_array_equal, restored.opt_state, opt_state)
    assert restored.step == 1 and restored.data_state == {"next_index": 5}
    assert restored.config == {"a": [1]} and restored.metrics == {"loss": 0.5}
    assert other.drop.rngs() == model.drop.rngs()


def test_items_are_plain_orbax(tmp_path, optimizer):
    model = Model(quant=FP8)
    path = saved(tmp_path, model, opt_state=optimizer.init(nnx.state(model, nnx.Param)))
    params = read_plain(path / "1" / "params")
    np.testing.assert_array_equal(params["head"]["bias"], model.head.bias.get_value())
    metadata = json.loads((path / "1" / "quantizer_metadata" / "metadata").read_text())
    assert metadata["quantizers"]["layers.0.gdn_state_quantizer"]["spec"]["format"] == "e4m3"
    meta = json.loads((path / "1" / "meta" / "metadata").read_text())
    assert meta["step"] == 1 and meta["versions"]["jax"] == jax.__version__


def test_later_edits_of_quantizers_are_saved(tmp_path):
    model = Model(quant=FP8)
    jlaqat.quantizers.disable_quantizer(model, "layers.0.*")
    other = Model()
    restore(saved(tmp_path, model), other, quantizers="checkpoint")
    assert {n: q.enabled for n, q in find_quantizers(other).items() if q.spec} == {
        "layers.0.gdn_state_quantizer": False,
        "layers.1.gdn_state_quantizer": True,
    }


def test_an_asynchronous_save_keeps_the_values_of_its_moment(tmp_path):
    """The buffers are donated right after: on the CPU a zero-copy view would then show the new values."""
    model = Model()
    expected = values(model)
    step = jax.jit(lambda s: jax.tree.map(lambda x: x * 2 + 1, s), donate_argnums=0)
    params = nnx.state(model, nnx.Param)
    with Checkpointer(tmp_path / "ck", asynchronous=True) as checkpointer:
        checkpointer.save(1, model)
        for _ in range(3):
            params = step(params)
        jax.block_until_ready(params)
        checkpointer.wait()
    other = Model(1)
    restore(tmp_path / "ck", other)
    assert_same(values(other), expected)


# ------------------------------------------------------------------ validation


def test_a_mismatch_lists_both_sides_and_changes_nothing(tmp_path):
    path = saved(tmp_path, Model(1))
    other = Wider()
    before = values(other)
    with pytest.raises(CheckpointMismatchError) as error:
        restore(path, other)
    text = str(error.value)
    assert "in the checkpoint but not in the model (1):\n    head.bias bfloat16[3]" in text
    assert "in the model but not in the checkpoint (2):\n    extra.bias float32[2]" in text
    assert "head.kernel bfloat16[8,3] in the checkpoint, float32[8,5] in the model" in text
    assert "load_weights" in text
    assert_same(values(other), before)


def test_structure_is_compared_before_any_array_is_read(tmp_path, monkeypatch):
    path = saved(tmp_path, Model(1))

    def read(*_):
        raise AssertionError("read an array")

    monkeypatch.setattr(jlaqat.checkpoint, "read_arrays", read)
    with pytest.raises(CheckpointMismatchError, match="extra.bias"):
        restore(path, Wider())
    with Checkpointer(path, read_only=True) as checkpointer:
        checkpointer.validate(Model())
    with pytest.raises(AssertionError, match="read an array"):
        restore(path, Model())


def test_a_renamed_parameter_is_pointed_out(tmp_path):
    class Renamed(Model):
        def __init__(self):
            super().__init__()
            self.heads, self.head = self.head, None

    with pytest.raises(CheckpointMismatchError, match=r"heads.bias bfloat16\[3\] \(the checkpoint has head.bias\)"):
        restore(saved(tmp_path, Model()), Renamed())


def test_another_optimizer_is_a_mismatch(tmp_path, optimizer):
    model = Model()
    params = nnx.state(model, nnx.Param)
    path = saved(tmp_path, model, opt_state=optimizer.init(params))
    with pytest.raises(CheckpointMismatchError, match=r"optimizer: in the checkpoint but not in the model \(\d+\)"):
        restore(path, model, opt_state=optax.sgd(0.1, momentum=0.9).init(params))


def test_missing_checkpoints_say_what_is_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such directory"):
        Checkpointer(tmp_path / "none", read_only=True)
    path = saved(tmp_path, Model())
    with pytest.raises(FileNotFoundError, match="step 3 is not at .*; it has 1"):
        restore(path, Model(), step=3)
    with Checkpointer(tmp_path / "empty") as checkpointer, pytest.raises(FileNotFoundError, match="no complete"):
        checkpointer.restore(Model())


# ------------------------------------------------------------------ quantizers


def test_an_unquantized_checkpoint_fills_in_a_quantized_model(tmp_path, caplog):
    plain = Model(1)
    path = saved(tmp_path, plain)
    model = Model(quant=STATIC)
    with caplog.at_level(logging.WARNING, "jlaqat"):
        restored = restore(path, model)
    assert "2 of the model are filled in" in restored.quantizers
    assert "not calibrated yet" in restored.quantizers and "layers.0.gdn_state_quantizer" in restored.quantizers
    assert restored.quantizers in caplog.text
    assert all(q.enabled and q.amax is None for n, q in find_quantizers(model).items() if "state" in n)
    np.testing.assert_array_equal(model.head.kernel.get_value(), plain.head.kernel.get_value())


def test_a_stripped_checkpoint_restores_into_a_quantized_model(tmp_path):
    path = saved(tmp_path, strip_quantizers(Model(1, quant=FP8)))
    restored = restore(path, Model(quant=FP8))
    assert "filled in" in restored.quantizers


@pytest.mark.parametrize("strip", [False, True])
def test_a_quantized_checkpoint_restores_into_a_plain_model_on_request_only(tmp_path, strip):
    source = Model(1, quant=FP8)
    path = saved(tmp_path, source)
    model = strip_quantizers(Model()) if strip else Model()
    with pytest.raises(
        CheckpointMismatchError, match='layers.0.gdn_state_quantizer .e4m3.*\n(.*\n)*.*quantizers="model"'
    ):
        restore(path, model)
    restored = restore(path, model, quantizers="model")
    assert "left unread" in restored.quantizers
    assert not any(q.enabled for q in find_quantizers(model).values())
    np.testing.assert_array_equal(model.head.kernel.get_value(), source.head.kernel.get_value())


def test_other_settings_are_listed_from_both_sides(tmp_path):
    path = saved(tmp_path, Model(quant=FP8))
    with pytest.raises(CheckpointMismatchError) as error:
        restore(path, Model(quant=INT8))
    assert "layers.1.gdn_state_quantizer (e4m3, tile K×64) in the checkpoint, (int8, tile K×64) in the model" in str(
        error.value
    )
    model = Model(quant=INT8)
    restore(path, model, quantizers="checkpoint")
    assert {q.spec.format for q in find_quantizers(model).values() if q.enabled} == {"e4m3"}
    model = Model(quant=INT8)
    restore(path, model, quantizers="model")
    assert {q.spec.format for q in find_quantizers(model).values() if q.enabled} == {"int8"}


def test_static_scales_come_back_into_a_fresh_model(tmp_path):
    source = Model(1, quant=STATIC)
    for i, q in enumerate(q for q in find_quantizers(source).values() if q.enabled):
        q.amax = QuantizerVariable(jnp.full(q.scale_shape, 1.5 + i))
    jlaqat.quantizers.freeze(source)
    model = Model(quant=STATIC)
    restore(saved(tmp_path, source), model)
    assert [float(q.amax.get_value().max()) for q in find_quantizers(model).values() if q.enabled] == [1.5, 2.5]
    assert all(q.frozen for q in find_quantizers(model).values() if q.enabled)
    assert_same(values(model), values(source))


def test_renamed_quantizers_load_under_their_new_name(tmp_path, monkeypatch):
    source = Model(1, quant=STATIC)
    for q in find_quantizers(source).values():
        if q.enabled:
            q.amax = QuantizerVariable(jnp.full(q.scale_shape, 2.5))
    path = saved(tmp_path, source)
    document = path / "1" / "quantizer_metadata" / "metadata"
    document.write_text(document.read_text().replace("gdn_state_quantizer", "old_handle"))
    # The arrays carry the old name as well.
    other = tmp_path / "renamed"
    arrays = read_plain(path / "1" / "quantizers")
    for layer in arrays["layers"].values():
        layer["old_handle"] = layer.pop("gdn_state_quantizer")
    ocp.PyTreeCheckpointer().save(other, arrays)
    shutil.rmtree(path / "1" / "quantizers")
    shutil.copytree(other, path / "1" / "quantizers")
    monkeypatch.setitem(jlaqat.quantizer_report.ALIASES, "old_handle", "gdn_state_quantizer")
    model = Model(quant=STATIC)
    restore(path, model)
    assert [float(q.amax.get_value().max()) for q in find_quantizers(model).values() if q.enabled] == [2.5, 2.5]


def test_unknown_mode_is_refused(tmp_path):
    with pytest.raises(ValueError, match="'match', 'checkpoint', 'model'"):
        restore(saved(tmp_path, Model()), Model(), quantizers="ignore")


# ------------------------------------------------------------------ retention, kills, locks


def small():
    return nnx.Linear(2, 2, rngs=nnx.Rngs(0))


def test_latest_and_best_steps_stay(tmp_path):
    with Checkpointer(tmp_path, max_to_keep=2, keep_best=1, best_metric="eval_loss") as checkpointer:
        for step, loss in enumerate([5.0, 1.0, 3.0, 4.0, None], start=1):
            checkpointer.save(step, small(), metrics={} if loss is None else {"eval_loss": loss})
        assert checkpointer.all_steps() == [2, 4, 5]
    assert sorted(p.name for p in tmp_path.iterdir() if p.name[0] != ".") == ["2", "4", "5"]
    assert not (tmp_path / ".deleting").exists()


def test_steps_without_the_metric_are_not_ranked(tmp_path):
    """A run saves between its evaluations as well, and where SIGTERM came."""
    with Checkpointer(tmp_path, max_to_keep=1, keep_best=1, best_metric="eval_loss") as checkpointer:
        for step, metrics in enumerate(({"loss": 3.0}, {"eval_loss": 2.0}, {"loss": 1.0}, {"eval_loss": 2.5}, None), 1):
            checkpointer.save(step, small(), metrics=metrics)
        assert checkpointer.all_steps() == [2, 5]
    with Checkpointer(tmp_path / "unranked", max_to_keep=None) as checkpointer:
        checkpointer.save(1, small(), metrics={"loss": 3.0})
    with Checkpointer(tmp_path / "unranked", max_to_keep=1, keep_best=1, best_metric="eval_loss") as checkpointer:
        for step, metrics in ((2, {"eval_loss": 2.0}), (3, {"loss": 1.0})):
            checkpointer.save(step, small(), metrics=metrics)
        assert checkpointer.all_steps() == [2, 3]


def test_half_written_and_half_deleted_steps_are_ignored_and_cleaned(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, small())
        checkpointer.save(2, small())
    (tmp_path / "2").rename(tmp_path / "3.orbax-checkpoint-tmp")
    (tmp_path / ".deleting").mkdir()
    (tmp_path / ".deleting" / "0").mkdir()
    with Checkpointer(tmp_path, read_only=True) as checkpointer:
        assert checkpointer.all_steps() == [1]
    assert (tmp_path / "3.orbax-checkpoint-tmp").exists()  # a reader leaves a writer's work alone
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.latest_step() == 1
        assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "1"]
        checkpointer.save(3, small())
        assert checkpointer.all_steps() == [1, 3]


def test_a_second_writer_is_refused_and_a_dead_one_forgotten(tmp_path):
    take = f"f = open({str(tmp_path / '.lock')!r}, 'w'); fcntl.flock(f, fcntl.LOCK_EX)"
    hold = f"import fcntl, time; {take}; print('held', flush=True); time.sleep(60)"
    holder = subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(RuntimeError, match="another process writes checkpoints.*read_only=True"):
            Checkpointer(tmp_path)
    finally:
        holder.kill()
        holder.wait()
    Checkpointer(tmp_path).close()


def test_a_step_is_never_overwritten_and_readers_never_write(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, small())
        with pytest.raises(ValueError, match="step 1 is already"):
            checkpointer.save(1, small())
    with Checkpointer(tmp_path, read_only=True) as checkpointer, pytest.raises(RuntimeError, match="read_only"):
        checkpointer.save(2, small())


@pytest.mark.parametrize("options", [{"max_to_keep": 0}, {"keep_best": 1}, {"best_mode": "most"}])
def test_options_are_checked(tmp_path, options):
    with pytest.raises(ValueError, match=list(options)[0]):
        Checkpointer(tmp_path, **options)


# ------------------------------------------------------------------ devices


def mesh_of(count):
    return Mesh(np.array(jax.devices()[:count]), ("data",), axis_types=(AxisType.Auto,))


def sharded(model, count):
    """The model with matrices cut over `count` devices."""
    mesh = mesh_of(count)

    def place(x):
        cut = x.ndim == 2 and x.shape[0] % count == 0
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec("data") if cut else PartitionSpec()))

    nnx.update(model, jax.tree.map(place, nnx.split(model)[1]))
    return model


def test_restores_onto_other_numbers_of_devices(tmp_path):
    """Saved on 8 devices, read on 1, saved there, read on 4: the same bits, in the reader's shardings."""
    source = sharded(Model(1, quant=FP8), 8)
    assert len(source.head.kernel.get_value().sharding.device_set) == 8
    one = Model(quant=FP8)
    restore(saved(tmp_path / "a", source), one)
    assert_same(values(one), values(source))
    assert len(one.head.kernel.get_value().sharding.device_set) == 1
    four = sharded(Model(2, quant=FP8), 4)
    restore(saved(tmp_path / "b", one), four)
    assert_same(values(four), values(source))
    kernel = four.head.kernel.get_value()
    assert len(kernel.sharding.device_set) == 4 and kernel.sharding.spec == PartitionSpec("data")


def test_static_scales_land_on_the_devices_of_the_parameters(tmp_path):
    source = Model(1, quant=STATIC)
    for q in find_quantizers(source).values():
        q.amax = QuantizerVariable(jnp.full(q.scale_shape, 1.5)) if q.enabled else None
    model = sharded(Model(quant=STATIC), 4)
    restore(saved(tmp_path, source), model)
    amax = find_quantizers(model)["layers.0.gdn_state_quantizer"].amax.get_value()
    assert len(amax.sharding.device_set) == 4 and float(amax.max()) == 1.5
