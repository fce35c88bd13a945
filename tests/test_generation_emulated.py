"""Generation by replay on the emulated kernels for SM90: a step's bits are those of the call that training makes.

What the two are given may differ (k once came to a step in the model's dtype and to a call in the ring's), and by that
how it lies in registers. Prefixes run on xla: their kernels' instructions are not all known to the emulator.
"""

import pathlib
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("jax_triton")

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import bridge_oracle
import jax
import jax.numpy as jnp
from emulated_run import emulated_run
from generation_oracle import check_generation
from ptx_wgmma import matrix_units

from jlaqat import kernel_calls, ops


def from_jax(self, launch):
    """`Target.run`, by the emulator."""
    shapes = {name: jax.ShapeDtypeStruct(b.shape, jnp.dtype(b.dtype)) for name, b in launch.outputs.items()}
    for name in launch.in_place:
        x = launch.inputs[name]
        shapes[name] = jax.ShapeDtypeStruct(x.shape, x.dtype)
    names = list(launch.inputs)

    def call(*arrays):
        inputs = {name: bridge_oracle.to_torch(x, "cpu").clone() for name, x in zip(names, arrays, strict=True)}
        outputs = emulated_run(type(launch)(**{**vars(launch), "inputs": inputs}))
        return {name: bridge_oracle.as_bytes(x).view(shapes[name].dtype) for name, x in outputs.items()}

    return jax.pure_callback(call, shapes, *launch.inputs.values())


@pytest.mark.slow
def test_compressed_states_have_the_bits_that_training_emulates(monkeypatch):
    chunked = ops.delta_rule
    monkeypatch.setattr("jlaqat.kernel_calls.Target.run", from_jax)
    monkeypatch.setattr(kernel_calls, "device_capability", lambda: 90)
    monkeypatch.setattr(ops, "delta_rule", lambda *x, **options: chunked(*x, **options | {"backend": "xla"}))
    with matrix_units():
        check_generation("replay", "triton", monkeypatch)
