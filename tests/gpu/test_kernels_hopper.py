"""The kernels for SM90 on one: the contract's bounds in the places where they serve, and who serves where."""

import kernel_oracle as oracle
import pytest
import torch
from kernel_checks import cast, check, run_both, run_kernels

from jlaqat.kernels.call import Options
from jlaqat.spec import DeltaQuant, QuantSpec

pytestmark = [
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an SM90 GPU"
    ),
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),
]
PLAIN = DeltaQuant()
FP8 = DeltaQuant(state=QuantSpec.fp8(), w=QuantSpec.fp8())
STATE = DeltaQuant(state=QuantSpec.fp8())
W = DeltaQuant(w=QuantSpec.fp8())
INT8 = DeltaQuant(state=QuantSpec.int8())
BF16, FP16 = torch.bfloat16, torch.float16
SIZES = dict(b=2, t=300, h=2, hv=2, dk=128, dv=128)

# name: (sizes, gate is KDA, quant, dtype)
CASES = {
    "gdn-plain": ({}, False, PLAIN, BF16),
    "gdn-fp8": ({}, False, FP8, BF16),
    "gdn-state": ({}, False, STATE, FP16),
    "gdn-w": ({}, False, W, BF16),
    "gdn-int8": ({}, False, INT8, BF16),
    "gdn-block32": ({}, False, DeltaQuant(state=QuantSpec.fp8(block_v=32), w=QuantSpec.fp8()), BF16),
    "gdn-grouped": (dict(hv=4), False, FP8, BF16),
    "gdn-v256": (dict(dv=256), False, FP8, BF16),
    "gdn-one-chunk": (dict(t=17), False, FP8, BF16),
    "gdn-many-heads": (dict(b=5, t=130, h=16, hv=16), False, FP8, BF16),  # the other class of shapes
    "kda-plain": ({}, True, PLAIN, BF16),
    "kda-fp8": ({}, True, FP8, BF16),
    "kda-many-heads": (dict(b=5, t=130, h=16, hv=16), True, FP8, BF16),
}
ON = dict(hardware_fp8=True, hopper=True)


@pytest.mark.parametrize("name", CASES)
def test_within_the_contract_s_bounds(name):
    changes, kda, quant, dtype = CASES[name]
    inputs = oracle.make_inputs(1, **(SIZES | changes), kda=kda, device="cuda")
    pairs = run_both(inputs, quant, dtype, **ON)
    print(name, {key: f"{value:.1e}" for key, value in check(pairs, dtype, 1).items()})


@pytest.mark.parametrize("kda", [False, True], ids=["gdn", "kda"])
@pytest.mark.parametrize("quant", [PLAIN, FP8], ids=["plain", "fp8"])
def test_packed_sequences(kda, quant):
    inputs = oracle.make_inputs(2, **(SIZES | dict(b=1, t=331, n=5)), kda=kda, device="cuda")
    cu_seqlens = torch.tensor([0, 0, 65, 193, 200, 300], dtype=torch.int32, device="cuda")  # and 31 rows of no sequence
    check(run_both(inputs, quant, BF16, cu_seqlens=cu_seqlens, **ON), BF16, 1)


def test_rounded_states_have_the_bits_of_the_portable_kernels():
    given = cast(oracle.make_inputs(3, **SIZES, kda=False, device="cuda"), BF16)
    options = dict(scale=128**-0.5, quant=FP8, hardware_fp8=True)
    ours, portable = (run_kernels(given, Options(**options, hopper=hopper))[0] for hopper in (True, False))
    assert torch.equal(ours.residuals.w, portable.residuals.w)
    differ = (ours.residuals.h != portable.residuals.h).float().mean().item()
    assert differ < 1e-3, differ  # codes at a tie, where float32 sums differ in their last bit
    again = run_kernels(given, Options(**options, hopper=True))
    for x, y in zip((ours.o, ours.final_state), (again[0].o, again[0].final_state), strict=True):
        assert torch.equal(x, y)
