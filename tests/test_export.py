"""Exports: plain weights out of models and checkpoints, and back into models."""

import pathlib
import sys

import numpy as np
import pytest
from flax import nnx

from jlaqat.checkpoint import CheckpointMismatchError
from jlaqat.export import export_stripped, load_weights
from jlaqat.naming import named_leaves
from jlaqat.quantizers import find_quantizers, strip_quantizers

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from tiny_checkpoints import FP8, Model, Wider, assert_same, read_plain, saved, values

pytestmark = pytest.mark.usefixtures("compile_quickly")


@pytest.mark.parametrize("name", ["plain", "plain.safetensors"])
@pytest.mark.parametrize("from_checkpoint", [False, True])
def test_exports_hold_plain_weights_and_load(tmp_path, name, from_checkpoint):
    source = Model(1, quant=FP8)
    target = tmp_path / name
    export_stripped(saved(tmp_path, source) if from_checkpoint else source, target)
    if target.is_file():
        from safetensors.numpy import load_file

        tensors = load_file(target)
        assert set(tensors) == set(named_leaves(nnx.state(source, nnx.Param)))
        assert not any("quantizer" in n for n in tensors)
    else:
        assert not any("quantizer" in n for n in named_leaves(read_plain(target)))
    model = strip_quantizers(Model())
    load_weights(model, target)
    names = named_leaves(nnx.state(source, nnx.Param))
    assert_same({n: values(model)[n] for n in names}, {n: values(source)[n] for n in names})
    assert find_quantizers(source), "the exported model keeps its quantizers"


def test_exports_refuse_what_is_there_and_what_does_not_fit(tmp_path):
    target = export_stripped(Model(), tmp_path / "w.safetensors")
    with pytest.raises(FileExistsError, match="never overwrite"):
        export_stripped(Model(), target)
    with pytest.raises(CheckpointMismatchError, match=r"head.kernel bfloat16\[8,3\] in the checkpoint, float32\[8,5\]"):
        load_weights(Wider(), target)
    with pytest.raises(ValueError, match="'orbax', 'safetensors'"):
        export_stripped(Model(), tmp_path / "x", format="pickle")
    with pytest.raises(FileNotFoundError):
        load_weights(Model(), tmp_path / "nothing.safetensors")
    (tmp_path / "damaged.safetensors").write_bytes(b"no header")
    with pytest.raises(ValueError, match="damaged.safetensors is no safetensors file, or a damaged one"):
        load_weights(Model(), tmp_path / "damaged.safetensors")


def test_weights_load_from_a_checkpoint_directory(tmp_path):
    source = Model(1)
    path = saved(tmp_path, source)
    step = load_weights(Model(quant=FP8), path / "1")  # the step's own directory
    np.testing.assert_array_equal(step.head.kernel.get_value(), source.head.kernel.get_value())
    model = load_weights(Model(quant=FP8), path)
    np.testing.assert_array_equal(model.head.kernel.get_value(), source.head.kernel.get_value())
    assert any(q.enabled for q in find_quantizers(model).values())
