"""No kernel, compiled for SM90 by Triton's own ptxas, decodes E4M3 codes that its loop writes only later."""

import pathlib
import sys

import pytest

pytest.importorskip("triton")

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from stale_e4m3 import disassemble, stale

from jlaqat.kernels import aot
from jlaqat.spec import DeltaQuant, QuantSpec

FP8 = QuantSpec.fp8()
# Of recurrent_forward as ptxas 12.9 compiled it with one conversion for both: R31 has what the turn before left there.
MISCOMPILED = """
.L_x_4:
        /*1c40*/                   F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C R20, R59, R50, RZ ;
        /*1d10*/                   F2FP.F16.E4M3.UNPACK_B R31, R31 ;
        /*1e20*/                   F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C R47, R21, R48, R20 ;
        /*1e60*/                   F2FP.F16.E4M3.UNPACK_B R17, R20 ;
        /*1f80*/                   PRMT R31, R47, 0x7610, R31 ;
        /*2010*/               @P0 BRA `(.L_x_4) ;
"""


def test_the_check_finds_what_was_miscompiled():
    assert stale(MISCOMPILED) == ["F2FP.F16.E4M3.UNPACK_B R31, R31"]
    assert stale(MISCOMPILED.replace("R31, R31", "R31, R20")) == []


@pytest.fixture
def cubins(monkeypatch):
    """Machine code by kernel, as it is compiled."""
    compile_launch, found = aot.compile_launch, []

    def keep(launch, capability):
        kernel = compile_launch(launch, capability)
        found.append((launch.name, kernel.asm["cubin"]))
        return kernel

    monkeypatch.setattr(aot, "compile_launch", keep)
    return found


def check(cubins):
    texts = [(name, disassemble(cubin)) for name, cubin in cubins]
    assert any("E4M3.UNPACK_B" in text for _, text in texts), "no kernel decodes: nothing was checked"
    assert {name: stale(text) for name, text in texts if stale(text)} == {}


@pytest.mark.parametrize("state", [FP8, QuantSpec.fp8(block_v=32), QuantSpec.fp8(granularity="value_row")], ids=str)
def test_recurrence(cubins, state):
    aot.compile_recurrent(90, "gdn", "float32", state, key_dim=64, value_dim=64, heads=(2, 2))
    check(cubins)


@pytest.mark.parametrize(
    ("gate", "state", "settings"),
    [
        ("kda", FP8, dict(read_stored=True)),
        ("gdn", QuantSpec.fp8(granularity="value_row"), dict(feedback=True)),
        pytest.param("kda", QuantSpec.fp8(rounding="stochastic"), {}, marks=pytest.mark.slow),
        pytest.param("gdn", FP8, dict(ring_dtype="uint8"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_replay(cubins, gate, state, settings):
    sizes = dict(key_dim=128, value_dim=128, heads=(2, 4))
    aot.compile_recurrent(90, gate, "bfloat16", state, **sizes, window=8, **settings)
    check(cubins)


@pytest.mark.parametrize("gate", ["gdn", pytest.param("kda", marks=pytest.mark.slow)])
@pytest.mark.parametrize("block_v", [32, 64])
def test_chunks(cubins, gate, block_v):
    quant = DeltaQuant(state=QuantSpec.fp8(block_v=block_v), w=FP8)
    aot.compile_pipeline(90, gate, "bfloat16", quant, key_dim=128, value_dim=128, heads=(4, 4))
    check(cubins)
