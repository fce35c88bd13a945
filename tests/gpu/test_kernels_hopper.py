"""The kernels for SM90 on one: the contract's bounds, wherever they can serve, in the table or not."""

import kernel_oracle as oracle
import pytest
import torch
from kernel_checks import cast, check, check_x_in_p, run_both, run_kernels

from jlaqat.kernels import call
from jlaqat.kernels.call import Options
from jlaqat.kernels.tuning import Knobs, choose
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
    "gdn-one-token": (dict(t=1), False, PLAIN, BF16),  # which Triton makes a constant
    "kda-plain": ({}, True, PLAIN, BF16),
    "kda-fp8": ({}, True, FP8, BF16),
}
WIDTHS = {"wide": Knobs(8, 2, bv=128), "narrow": Knobs(4, 3)}  # of the backward scan


def on(kda, quant, width="wide"):
    tuned = choose(90, "kda" if kda else "gdn", quant.state is not None, "many")
    own = dict(hopper_state=Knobs(4, 3), hopper_reverse=WIDTHS[width], hopper_chunk=Knobs(8, registers=128))
    return dict(hardware_fp8=True, hopper=True, tuning=tuned._replace(**own))


@pytest.mark.parametrize("name", CASES)
def test_within_the_contract_s_bounds(name):
    changes, kda, quant, dtype = CASES[name]
    inputs = oracle.make_inputs(1, **(SIZES | changes), kda=kda, device="cuda")
    width = "narrow" if name in ("gdn-fp8", "kda-plain") else "wide"
    pairs = run_both(inputs, quant, dtype, **on(kda, quant, width))
    print(name, {key: f"{value:.1e}" for key, value in check(pairs, dtype).items()})


@pytest.mark.parametrize("kda", [False, True], ids=["gdn", "kda"])
@pytest.mark.parametrize("quant", [PLAIN, FP8], ids=["plain", "fp8"])
def test_packed_sequences(kda, quant):
    inputs = oracle.make_inputs(2, **(SIZES | dict(b=1, t=331, n=5)), kda=kda, device="cuda")
    cu_seqlens = torch.tensor([0, 0, 65, 193, 200, 300], dtype=torch.int32, device="cuda")  # and 31 rows of no sequence
    check(run_both(inputs, quant, BF16, cu_seqlens=cu_seqlens, **on(kda, quant)), BF16)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case[1]])
def test_x_where_p_is_zero_changes_no_bit(name):
    changes, kda, quant, dtype = CASES[name]
    given = cast(oracle.make_inputs(4, **(SIZES | changes), kda=kda, device="cuda"), dtype)
    for width in WIDTHS:
        check_x_in_p(given, Options(scale=0.1, quant=quant, **on(kda, quant, width)))


@pytest.mark.parametrize("quant", [PLAIN, FP8], ids=["plain", "fp8"])
def test_x_where_p_is_zero_in_packed_sequences(quant):
    cu_seqlens = torch.tensor([0, 0, 65, 193, 200, 300], dtype=torch.int32, device="cuda")  # and 31 rows of no sequence
    given = cast(oracle.make_inputs(5, **(SIZES | dict(b=1, t=331, n=5)), kda=False, device="cuda"), BF16, cu_seqlens)
    check_x_in_p(given, Options(scale=0.1, quant=quant, **on(False, quant)))


def test_two_runs_are_equal_bit_for_bit():
    given = cast(oracle.make_inputs(3, **SIZES, kda=False, device="cuda"), BF16)
    options = Options(scale=128**-0.5, quant=FP8, **on(False, FP8))
    (_, first, *_), (_, second, *_) = (run_kernels(given, options) for _ in range(2))
    for name, x, y in zip(first._fields, first, second, strict=True):
        assert torch.equal(x, y), name


@pytest.mark.parametrize("x_in_p", [False, True], ids=["x-apart", "x-in-p"])
@pytest.mark.parametrize(
    "quant, many", [("none", True), ("none", False), ("state_w_fp8", True)], ids=["plain", "plain-few-heads", "fp8"]
)
def test_jax_and_the_bridge_give_equal_bits(quant, many, x_in_p, monkeypatch):
    """With the table's choice of kernels; jax-triton compiles Gluon by other passes than Triton does."""
    from jlaqat.parity import ParityConfig, compare

    monkeypatch.setattr(call, "choose", lambda *key: choose(*key)._replace(x_in_p=x_in_p))
    sizes = dict(batch=5, heads=16) if many else dict(batch=1, heads=2)
    tokens = 130 + x_in_p  # JAX traces a shape once
    report = compare(ParityConfig(fla=False, tokens=tokens, key_dim=128, quant=quant, **sizes))
    assert report.sides["jax"] == "triton" and report.same_kernels
    assert report.passed, (report.rows, report.missing)
    assert all(row.equal_bits for row in report.rows)
