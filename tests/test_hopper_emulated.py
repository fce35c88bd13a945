"""The kernels for SM90 as PTX, wgmma included, emulated, against the float64 oracle."""

import pathlib
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import kernel_checks
import kernel_oracle
import ptx_emulator
import torch
from emulated_run import EmulatedRun
from ptx_wgmma import matrix_units
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma

from jlaqat.kernels.call import HOPPER_TRITON, triton_version
from jlaqat.kernels.hopper_tiles import TILE
from jlaqat.kernels.launch import Buffer, Launch
from jlaqat.kernels.tuning import Knobs, choose
from jlaqat.spec import DeltaQuant, QuantSpec

FP8 = DeltaQuant(state=QuantSpec.fp8(), w=QuantSpec.fp8())
SIZES = dict(b=1, t=80, h=1, hv=1, dk=128, dv=128)  # the second chunk is not whole
# name: (sizes, quant, dtype, bounds of packed sequences, whether products are late)
CASES = {
    "fp8": ({}, FP8, torch.bfloat16, None, False),
    "plain": ({}, DeltaQuant(), torch.bfloat16, None, False),
    "late-plain": ({}, DeltaQuant(), torch.bfloat16, None, True),
    "state": ({}, DeltaQuant(state=QuantSpec.fp8()), torch.float16, None, False),
    "w": ({}, DeltaQuant(w=QuantSpec.fp8()), torch.bfloat16, None, False),
    "int8": ({}, DeltaQuant(state=QuantSpec.int8()), torch.bfloat16, None, True),
    "grouped": (dict(hv=2, t=70), FP8, torch.bfloat16, None, False),
    "packed": (dict(t=150, n=3), FP8, torch.bfloat16, [0, 70, 70, 140], False),
}
if triton_version() >= HOPPER_TRITON:  # older ones leave the reverse scan without a barrier before it decodes w
    CASES["late"] = (dict(t=150), FP8, torch.bfloat16, None, True)
QUICK = ("fp8", "plain")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_within_the_contract_s_bounds(name, monkeypatch):
    changes, quant, dtype, bounds, late = CASES[name]
    launched = set()
    run = EmulatedRun(90)

    def noting(launch):
        launched.add((launch.name, "hopper" in launch.kernel.fn.__module__))
        return run(launch)

    monkeypatch.setattr(kernel_checks, "poisoned_run", noting)
    own = dict(hopper_state=Knobs(4, 3), hopper_reverse=Knobs(8, 2, bv=128), hopper_chunk=Knobs(8, registers=128))
    tuning = choose(90, "gdn", quant.state is not None, "many")._replace(**own)
    inputs = kernel_oracle.make_inputs(1, **(SIZES | changes), kda=False)
    packed = {} if bounds is None else {"cu_seqlens": torch.tensor(bounds, dtype=torch.int32)}
    with matrix_units(late=late):
        pairs = kernel_checks.run_both(inputs, quant, dtype, hardware_fp8=True, hopper=True, tuning=tuning, **packed)
    kernel_checks.check(pairs, dtype)
    assert {("chunk_state_backward_kernel", True), ("chunk_backward_kernel", True)} <= launched
    assert (("chunk_state_forward_kernel", True) in launched) == (quant.state is None)


@gluon.jit
def product_kernel(p_x, p_y):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    o = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))[:, None] * 64
    o += gl.arange(0, 64, layout=gl.SliceLayout(0, layout))[None, :]
    m_x = gl.allocate_shared_memory(gl.bfloat16, [64, 64], TILE, gl.load(p_x + o))
    fence_async_shared()
    b_y = warpgroup_mma(m_x, m_x.permute((1, 0)), gl.zeros([64, 64], gl.float32, layout=sums), use_acc=False)
    gl.store(p_y + o, gl.convert_layout(b_y, layout))


@pytest.mark.parametrize("late", [False, True])
def test_a_product_and_a_missing_fence(late, monkeypatch):
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    launch = Launch(
        kernel=product_kernel, grid=1, inputs={"p_x": x}, outputs={"p_y": Buffer((64, 64), "float32")}, constants={}
    )
    with matrix_units(late=late):
        torch.testing.assert_close(EmulatedRun(90)(launch)["p_y"], x.float() @ x.float().T, rtol=1e-5, atol=1e-5)
        monkeypatch.setitem(ptx_emulator.METHODS, "fence", lambda program, instruction, active: None)
        with pytest.raises(AssertionError, match=r"no fence\.proxy\.async"):
            EmulatedRun(90)(launch)
