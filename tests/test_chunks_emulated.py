"""GDN's chunked kernels as PTX with matrix instructions of SM80, emulated, against the float64 oracle in bfloat16.

SM90 multiplies with wgmma, and KDA's kernels call functions: the emulator has neither.
"""

import pathlib
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import kernel_checks
import kernel_oracle
import torch
from emulated_run import EmulatedRun

from jlaqat.kernels.call import converts_to_e4m3
from jlaqat.kernels.tuning import Tuning
from jlaqat.spec import DeltaQuant, QuantSpec

FP8 = DeltaQuant(state=QuantSpec.fp8(), w=QuantSpec.fp8())
INT8 = DeltaQuant(state=QuantSpec.int8(block_v=32))


@pytest.mark.parametrize(
    ("capability", "quant", "tokens"),
    [
        (80, DeltaQuant(), 128),
        pytest.param(80, FP8, 100, marks=pytest.mark.slow),  # the last chunk is not whole
        pytest.param(80, INT8, 128, marks=pytest.mark.slow),
        pytest.param(89, FP8, 128, marks=pytest.mark.slow),  # hardware E4M3
    ],
    ids=["plain", "fp8", "int8", "hardware-fp8"],
)
def test_two_chunks_forward_and_backward(capability, quant, tokens, monkeypatch):
    monkeypatch.setattr(kernel_checks, "poisoned_run", EmulatedRun(capability))
    inputs = kernel_oracle.make_inputs(3, kda=False, b=1, t=tokens, h=1, hv=1, dk=64, dv=64)
    pairs = kernel_checks.run_both(
        inputs, quant, torch.bfloat16, hardware_fp8=converts_to_e4m3(capability), tuning=Tuning()
    )
    kernel_checks.check(pairs, torch.bfloat16)
