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

from bridge_oracle import called_back
from emulated_run import emulated_run
from generation_oracle import check_generation
from ptx_wgmma import matrix_units

from jlaqat import kernel_calls, ops


@pytest.mark.slow
def test_compressed_states_have_the_bits_that_training_emulates(monkeypatch):
    chunked = ops.delta_rule
    monkeypatch.setattr("jlaqat.kernel_calls.Target.run", called_back(emulated_run))
    monkeypatch.setattr(kernel_calls, "device_capability", lambda: 90)
    monkeypatch.setattr(ops, "delta_rule", lambda *x, **options: chunked(*x, **options | {"backend": "xla"}))
    with matrix_units():
        check_generation("replay", "triton", monkeypatch)
