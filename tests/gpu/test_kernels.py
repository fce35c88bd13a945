"""The kernels on a GPU, through the PyTorch runner: the contract's bounds, poisoned outputs, equal bits."""

import kernel_oracle as oracle
import pytest
import torch
from kernel_checks import cast, check, check_x_in_p, hardware_fp8, run_both, run_kernels

from jlaqat.kernels.call import Options
from jlaqat.kernels.tuning import Tuning, choose
from jlaqat.spec import DeltaQuant, QuantSpec

# The first product of a backward thread, in the reference: PyTorch warns that it makes the context itself.
pytestmark = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
DEVICE = "cuda"
HARDWARE = hardware_fp8()
PLAIN = DeltaQuant()
FP8 = DeltaQuant(state=QuantSpec.fp8(), w=QuantSpec.fp8())
STATE = DeltaQuant(state=QuantSpec.fp8())
INT8 = DeltaQuant(state=QuantSpec.int8())
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

SIZES = dict(b=2, t=300, h=2, hv=2, dk=128, dv=128)

# name: (sizes, gate is KDA, quant, dtype)
CASES = {
    "gdn-plain": ({}, False, PLAIN, BF16),
    "gdn-fp8": ({}, False, FP8, BF16),
    "gdn-int8": ({}, False, INT8, BF16),
    "kda-plain": ({}, True, PLAIN, BF16),
    "kda-fp8": ({}, True, FP8, BF16),
    "kda-int8": ({}, True, INT8, BF16),
    "gdn-float32": (dict(t=130), False, STATE, FP32),
    "kda-float32": (dict(t=130), True, STATE, FP32),
    "gdn-float16": ({}, False, STATE, FP16),
    "gdn-grouped-d64": (dict(hv=4, dk=64, dv=64), False, FP8, BF16),
    "kda-grouped-d64": (dict(hv=4, dk=64, dv=64), True, FP8, BF16),
    "gdn-k100-v64": (dict(dk=100, dv=64), False, FP8, BF16),
    "kda-k60-v100": (dict(dk=60, dv=100), True, STATE, BF16),
    "gdn-k256-v256": (dict(b=1, dk=256, dv=256), False, STATE, BF16),
    "kda-k256-v128": (dict(b=1, dk=256, dv=128), True, STATE, BF16),
    "gdn-v512": (dict(b=1, dv=512), False, STATE, BF16),
    "gdn-block16": ({}, False, DeltaQuant(state=QuantSpec.fp8(block_v=16)), BF16),
    "gdn-block128": ({}, False, DeltaQuant(state=QuantSpec.fp8(block_v=128)), BF16),
    "gdn-int8-block16": ({}, False, DeltaQuant(state=QuantSpec.int8(block_v=16)), BF16),
    "gdn-int8-block128": ({}, False, DeltaQuant(state=QuantSpec.int8(block_v=128)), BF16),
    "kda-int8-block16": (dict(dv=100), True, DeltaQuant(state=QuantSpec.int8(block_v=16)), BF16),
    "kda-int8-block128": (dict(dv=200), True, DeltaQuant(state=QuantSpec.int8(block_v=128)), BF16),
    "gdn-no-decay": (dict(g_mean=0.0), False, STATE, BF16),
    "kda-strong-decay": (dict(g_mean=-5.0, t=192), True, FP8, BF16),
    "kda-some-decay": (dict(g_mean=-0.5), True, FP8, BF16),
    "kda-decay-to-nothing": (dict(g_mean=-1e4, t=100), True, PLAIN, BF16),
    "gdn-beta2": (dict(beta_max=2.0), False, PLAIN, BF16),
    "kda-beta2": (dict(beta_max=2.0), True, PLAIN, BF16),
    "gdn-beta2-float16": (dict(beta_max=2.0), False, PLAIN, FP16),
}


@pytest.mark.parametrize("name", CASES)
def test_within_the_contract_s_bounds(name):
    changes, kda, quant, dtype = CASES[name]
    inputs = oracle.make_inputs(1, **(SIZES | changes), kda=kda, device=DEVICE)
    pairs = run_both(inputs, quant, dtype, hardware_fp8=HARDWARE)
    if name == "kda-decay-to-nothing":  # gradients of gates and of the initial state are rounding of nothing
        pairs = {x: pairs[x] for x in ("o", "dq", "dk", "dv", "dbeta")}
    ratios = check(pairs, dtype, strong_writes=changes.get("beta_max", 1) > 1)
    print(name, {key: f"{value:.1e}" for key, value in ratios.items()})


@pytest.mark.parametrize("kda", [False, True], ids=["gdn", "kda"])
def test_packed_sequences(kda):
    cu_seqlens = torch.tensor([0, 0, 64, 64, 130, 131, 280], dtype=torch.int32, device=DEVICE)
    inputs = oracle.make_inputs(2, **(SIZES | dict(b=1)), kda=kda, device=DEVICE, n=6)
    for x in inputs[:5]:
        x[:, 280:] = float("nan")
    pairs = run_both(inputs, FP8, BF16, cu_seqlens=cu_seqlens, hardware_fp8=HARDWARE)
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert (pairs[name][0][:, 280:] == 0).all(), name
        pairs[name] = tuple(x[:, :280] for x in pairs[name])
    check(pairs, BF16)


@pytest.mark.parametrize("kda", [False, True], ids=["gdn", "kda"])
def test_equal_bits(kda):
    """Two runs, states saved or walked again, hardware or arithmetic E4M3: the same bits everywhere."""
    given = cast(oracle.make_inputs(3, **SIZES, kda=kda, device=DEVICE), BF16)
    options = dict(scale=128**-0.5, quant=FP8)
    runs = [
        run_kernels(given, Options(**options, hardware_fp8=HARDWARE)),
        run_kernels(given, Options(**options, hardware_fp8=HARDWARE)),
        run_kernels(given, Options(**options, hardware_fp8=HARDWARE, save_states=False)),
        run_kernels(given, Options(**options, hardware_fp8=False)),
    ]
    first = [*runs[0][0][:2], *runs[0][1]]
    for label, (out, grads, *_) in zip(("again", "recomputed", "arithmetic"), runs[1:], strict=True):
        for i, (x, y) in enumerate(zip(first, [*out[:2], *grads], strict=True)):
            assert torch.equal(x, y), (label, i, oracle.error_ratio(x, y))


@pytest.mark.parametrize("g_mean", [-0.05, -1.0, -5.0])
def test_kda_prefix_gives_equal_bits(g_mean):
    """Which way a row's pairs are summed depends on rows before it only."""
    given = cast(oracle.make_inputs(6, **SIZES, kda=True, device=DEVICE, g_mean=g_mean), BF16)
    prefix = given._replace(**{x: getattr(given, x)[:, :170].contiguous() for x in ("q", "k", "v", "g", "beta")})
    options = Options(scale=128**-0.5, quant=FP8, hardware_fp8=HARDWARE)
    whole, part = run_kernels(given, options)[0], run_kernels(prefix, options)[0]
    assert torch.equal(whole.o[:, :170], part.o)


def test_split_output_agrees():
    inputs = oracle.make_inputs(4, **SIZES, kda=False, device=DEVICE)
    pairs = run_both(inputs, FP8, BF16, hardware_fp8=HARDWARE, tuning=Tuning(split_output=True))
    check(pairs, BF16)


X_IN_P = ["gdn-plain", "gdn-fp8", "gdn-int8", "gdn-float32", "gdn-grouped-d64", "gdn-k100-v64", "gdn-k256-v256"]


@pytest.mark.parametrize("name", X_IN_P)
def test_x_where_p_is_zero_changes_no_bit(name):
    changes, kda, quant, dtype = CASES[name]
    given = cast(oracle.make_inputs(7, **(SIZES | changes), kda=kda, device=DEVICE), dtype)
    tuning = choose(90, "gdn", quant.state is not None, "few")
    check_x_in_p(given, Options(scale=0.1, quant=quant, hardware_fp8=HARDWARE, tuning=tuning))


@pytest.mark.parametrize("quant", [PLAIN, FP8], ids=["plain", "fp8"])
def test_x_where_p_is_zero_packed_split_and_recomputed(quant):
    lengths = torch.tensor([0, 0, 64, 64, 130, 131, 280], dtype=torch.int32, device=DEVICE)
    given = cast(oracle.make_inputs(8, **(SIZES | dict(b=1)), kda=False, device=DEVICE, n=6), BF16, lengths)
    tuning = choose(90, "gdn", quant.state is not None, "many")._replace(split_output=True)
    check_x_in_p(given, Options(scale=0.1, quant=quant, hardware_fp8=HARDWARE, save_states=False, tuning=tuning))


def test_many_short_sequences():
    """More sequences than a grid axis of 65,535 has room for programs."""
    n, t, h = 2050, 16, 32
    given = cast(oracle.make_inputs(5, b=1, t=n * t, h=h, hv=h, dk=16, dv=16, kda=False, device=DEVICE, n=n), BF16)
    packed = given._replace(cu_seqlens=torch.arange(0, n * t + 1, t, dtype=torch.int32, device=DEVICE))
    as_batch = given._replace(
        **{x: getattr(given, x).reshape(n, t, *getattr(given, x).shape[2:]) for x in given._fields[:5]}
    )
    options = Options(scale=0.25, quant=STATE, hardware_fp8=HARDWARE)
    one, two = run_kernels(packed, options), run_kernels(as_batch, options)
    assert torch.equal(one[0].o.flatten(), two[0].o.flatten())
    assert torch.equal(one[0].final_state, two[0].final_state)
    assert torch.isfinite(one[0].o).all()
