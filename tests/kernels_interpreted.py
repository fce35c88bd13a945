"""Every kernel through Triton's interpreter against the float64 oracle.

Run by test_kernels_interpret.py in its own process. float32 and float16 only: the interpreter's bfloat16 product is
garbage, and its E4M3 cast neither rounds to nearest nor saturates, so the hardware path waits for tests/gpu.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(__file__))
os.environ["TRITON_INTERPRET"] = "1"

import kernel_oracle as oracle
import pytest
import torch
import triton
import triton.language as tl
from kernel_checks import cast, check, check_x_in_p, run_both, run_kernels

from jlaqat.kernels import intra_chunk, pipeline, rounding
from jlaqat.kernels.call import Inputs, Options
from jlaqat.kernels.tuning import Knobs, Tuning
from jlaqat.spec import DeltaQuant, QuantSpec
from jlaqat.torch_bridge.autograd import chunk_delta_rule
from jlaqat.torch_bridge.run import poisoned_run

PLAIN = DeltaQuant()
FP8 = DeltaQuant(state=QuantSpec.fp8(block_v=16), w=QuantSpec.fp8())
FP8_WIDE = DeltaQuant(state=QuantSpec.fp8())
INT8 = DeltaQuant(state=QuantSpec.int8(block_v=32))

NARROW = Tuning(state=Knobs(bv=16), reverse=Knobs(bv=16), chunk_backward=Knobs(bk=16, bv=16))
SPLIT = Tuning(split_output=True, decode_w=True)


def inputs_of(**changes):
    sizes = dict(b=1, t=64 + 21, h=1, hv=1, dk=16, dv=32, kda=False)
    return oracle.make_inputs(changes.pop("seed", 1), **(sizes | changes))


GATES = pytest.mark.parametrize("kda", [False, True], ids=["gdn", "kda"])


@pytest.mark.parametrize(
    "kda, quant",
    [(False, PLAIN), (True, PLAIN), (True, FP8), (False, INT8)],
    ids=["gdn-plain", "kda-plain", "kda-fp8", "gdn-int8"],
)
def test_whole_and_partial_chunks(kda, quant):
    inputs = inputs_of(kda=kda, hv=1 if quant is PLAIN else 2)
    check(run_both(inputs, quant, torch.float32, tuning=NARROW), torch.float32)


@pytest.mark.parametrize("kda, block_v", [(False, 16), (True, 16), (False, 128), (True, 128)])
def test_int8_tiles_of_other_widths(kda, block_v):
    """More than one tile, the last one narrower."""
    inputs = inputs_of(kda=kda, t=70, dv=block_v + 20)
    check(run_both(inputs, DeltaQuant(state=QuantSpec.int8(block_v=block_v)), torch.float32), torch.float32)


@GATES
def test_packed_sequences_with_empty_ones_and_a_tail(kda):
    """Lengths 0, 5, 66, 0; rows past the end give zero, and what they hold is never read."""
    cu_seqlens = torch.tensor([0, 0, 5, 71, 71], dtype=torch.int32)
    inputs = inputs_of(kda=kda, t=75, n=4, dv=16)
    for x in inputs[:5]:
        x[:, 71:] = float("nan")
    pairs = run_both(inputs, FP8, torch.float32, cu_seqlens=cu_seqlens)
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert (pairs[name][0][:, 71:] == 0).all(), name
        pairs[name] = tuple(x[:, :71] for x in pairs[name])
    check(pairs, torch.float32)


@pytest.mark.parametrize("kda, dk", [(False, 20), (True, 20), (False, 19)], ids=["gdn", "kda", "gdn-odd"])
def test_sizes_that_are_no_powers_of_two_in_float16(kda, dk):
    inputs = inputs_of(kda=kda, t=30, dk=dk, dv=36)
    check(run_both(inputs, FP8_WIDE, torch.float16), torch.float16)


@GATES
def test_whole_chunks_give_the_bits_that_masked_ones_give(kda):
    """Nothing is masked where T is a multiple of 64; packed, the same tokens are."""
    given = cast(inputs_of(kda=kda, t=128, dv=16), torch.float32)
    results = []
    for cu_seqlens in (None, torch.tensor([0, 128], dtype=torch.int32)):
        out, gradients, *_ = run_kernels(given._replace(cu_seqlens=cu_seqlens), Options(scale=0.25, quant=FP8))
        results.append({"o": out.o, "final_state": out.final_state} | gradients._asdict())
    for name, x in results[0].items():
        assert torch.isfinite(x).all(), name
        assert torch.equal(x.view(torch.uint8), results[1][name].view(torch.uint8)), name


@pytest.mark.parametrize("kda, quant", [(False, FP8), (True, PLAIN)], ids=["gdn-fp8", "kda-plain"])
def test_split_output_and_recomputed_states(kda, quant):
    pairs = run_both(inputs_of(kda=kda), quant, torch.float32, save_states=False, tuning=SPLIT)
    check(pairs, torch.float32)


@GATES
@pytest.mark.filterwarnings("ignore:All-NaN slice")  # NumPy, of a minimum in the interpreter
def test_gates_that_reset_the_state_leave_later_gates_their_digits(kda):
    """-1e30 and -inf give the bits of -88, which are those of the oracle; NaN stays NaN."""
    inputs = list(inputs_of(kda=kda, t=75, dv=16))
    results = {}
    for reset in (-88.0, -1e30, -torch.inf, torch.nan):
        inputs[3] = inputs[3].clone()
        inputs[3][:, [3, 70]] = reset
        if reset == -88.0:
            check(run_both(tuple(inputs), PLAIN, torch.float32), torch.float32)
        out, gradients, _, _ = run_kernels(cast(tuple(inputs), torch.float32), Options(scale=0.25))
        results[reset] = [out.o, out.final_state, *(x for x in gradients if x is not None)]
    for reset in (-1e30, -torch.inf):
        assert all(torch.equal(x, y) for x, y in zip(results[reset], results[-88.0], strict=True))
    assert results[torch.nan][0][:, 3:64].isnan().all() and results[torch.nan][1].isnan().all()


@pytest.mark.parametrize("kda, g_mean", [(False, 0.0), (False, -30.0), (True, -3.0), (True, -1e4)])
def test_decay_from_none_to_all(kda, g_mean):
    """No decay, and decay that underflows within a token: nothing may overflow on the way."""
    inputs = inputs_of(kda=kda, t=75, dv=16, g_mean=g_mean, beta_max=2.0)
    pairs = run_both(inputs, FP8, torch.float32)
    assert all(torch.isfinite(x).all() for x, _ in pairs.values())
    check({name: pairs[name] for name in ("o", "dq", "dk", "dv", "dbeta")}, torch.float32)
    # Gradients of gates and of the initial state shrink with the decay itself, below the resolution of their terms.
    if g_mean == 0.0:
        check(pairs, torch.float32)


def test_the_pytorch_function_is_differentiable():
    """Transposed inputs, a loss that leaves the final state alone, and the oracle's gradients."""
    inputs = inputs_of(t=20, h=1, hv=2, dv=16)
    leaves = [x.float().requires_grad_() for x in inputs]
    q, k, v, *rest, state = leaves
    v_view = v.transpose(1, 2).contiguous().transpose(1, 2)  # the same values, not contiguous
    o, final_state = chunk_delta_rule(q, k, v_view, *rest, initial_state=state)
    assert final_state.shape == state.shape
    grads = torch.autograd.grad(o.square().sum(), leaves)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    ref, _ = oracle.delta_rule(*exact[:5], scale=0.25, initial_state=exact[5], quant=PLAIN)
    expected = torch.autograd.grad(ref.square().sum(), exact)
    for name, x, y in zip(("dq", "dk", "dv", "dg", "dbeta", "dinitial_state"), grads, expected, strict=True):
        assert oracle.error_ratio(x, y) < 1e-4, name
    packed, _ = chunk_delta_rule(*leaves[:5], initial_state=state, cu_seqlens=torch.tensor([0, 20]))
    assert torch.equal(packed, o)


def test_two_sequences_of_two_heads_in_the_right_places():
    check(run_both(inputs_of(b=2, t=33, h=2, hv=2, dv=16), FP8, torch.float32), torch.float32)


def test_initial_state_is_rounded_first_and_an_empty_sequence_returns_it():
    from jlaqat.rounding import fake_quantize

    inputs = inputs_of(t=4, n=2, dv=148)
    cu_seqlens = torch.tensor([0, 0, 4], dtype=torch.int32)
    for quant in (INT8, FP8_WIDE, *(DeltaQuant(state=QuantSpec.int8(block_v=block)) for block in (16, 128))):
        q, k, v, g, beta, state = (x.float() for x in inputs)
        options = Options(scale=0.25, quant=quant)
        out = pipeline.forward(poisoned_run, Inputs(q, k, v, g, beta, state, cu_seqlens), options)
        expected = torch.from_dlpack(fake_quantize(state.numpy(), quant.state, site="state"))
        assert torch.equal(out.final_state[0], expected[0])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_nan_and_inf_come_out():
    """A state that is not finite must not come back finite, whatever the format."""
    for quant, bad in ((PLAIN, "nan"), (FP8, "nan"), (FP8, "inf"), (INT8, "nan"), (INT8, "inf")):
        q, k, v, g, beta, state = (x.float() for x in inputs_of(t=3))
        state[0, 0, 3, 5] = float(bad)
        options = Options(scale=0.25, quant=quant)
        out = pipeline.forward(poisoned_run, Inputs(q, k, v, g, beta, state), options)
        assert not torch.isfinite(out.final_state[0, 0, :, 5]).any()
        assert not torch.isfinite(out.o[0, :, 0, 5]).any()


# name: (sizes, quant, dtype, options)
X_IN_P = {
    "plain": ({}, PLAIN, torch.float32, {}),
    "fp8-grouped": (dict(h=1, hv=2, t=150), FP8, torch.float32, {}),
    "int8-k60-v100": (dict(b=2, t=70, dk=60, dv=100), INT8, torch.float16, {}),
    "fp8-k100": (dict(dk=100), FP8_WIDE, torch.float16, {}),
    "plain-v256": (dict(t=17, dv=256), PLAIN, torch.float16, {}),
    "fp8-recomputed": ({}, FP8, torch.float32, dict(save_states=False)),
    "fp8-split": ({}, FP8, torch.float32, dict(tuning=SPLIT)),
    "fp8-packed": (dict(t=150, n=4), FP8, torch.float32, {}),
}


@pytest.mark.parametrize("name", X_IN_P)
def test_x_where_p_is_zero_changes_no_bit(name):
    """And lies there as described: the kept array, from poison, is what P and X kept apart make by the description."""
    changes, quant, dtype, options = X_IN_P[name]
    lengths = [5, 66, 0, 70] if "n" in changes else None
    cu_seqlens = lengths and torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    given = cast(inputs_of(**changes), dtype, cu_seqlens)
    apart, both = check_x_in_p(given, Options(**dict(scale=0.25, quant=quant, tuning=NARROW) | options))
    row = 0
    for length in lengths or [given.q.shape[1]] * given.q.shape[0]:
        for start in range(row, row + length, 64):
            rows = slice(start, min(start + 64, row + length))
            for head in range(given.v.shape[2]):
                lies = oracle.x_in_p(apart.p[rows, head], apart.x[rows, head])
                torch.testing.assert_close(both.p[rows, head], lies, rtol=0, atol=0, equal_nan=True)
        row += length


@triton.jit
def round_kernel(p_x, p_y, p_bytes, p_back, FORMAT: tl.constexpr, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    code = rounding.round_code(tl.load(p_x + o), FORMAT, False)
    byte = rounding.encode(code, FORMAT, False)
    tl.store(p_y + o, code)
    tl.store(p_bytes + o, byte)
    tl.store(p_back + o, rounding.decode(byte, FORMAT, False))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NaN passes through numpy
@pytest.mark.parametrize("fmt", ["e4m3", "int8"])
def test_rounding_and_codes_match_the_contract_bit_for_bit(fmt):
    from jlaqat.rounding import round_to_format

    limit = {"e4m3": 448.0, "int8": 127.0}[fmt]
    gen = torch.Generator().manual_seed(0)
    grid = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num(0.0).sort().values
    ties = (grid[1:] + grid[:-1]) / 2
    small = torch.randn(1024, generator=gen) * 2.0 ** torch.randint(-14, 8, (1024,), generator=gen)
    x = torch.cat([grid, ties, torch.nextafter(ties, ties + 1), small, torch.arange(-127.5, 128, 0.5)]).clamp(
        -limit, limit
    )
    x = torch.cat([x, torch.full((1,), float("nan")), torch.zeros(-(x.numel() + 1) % 256)])
    y, back, raw = torch.empty_like(x), torch.empty_like(x), torch.empty(x.shape, dtype=torch.uint8)
    round_kernel[(x.numel() // 256,)](x, y, raw, back, FORMAT=fmt, BLOCK=256)
    expected = torch.from_dlpack(round_to_format(x.numpy(), fmt))
    finite = x == x
    assert torch.equal(y[finite], expected[finite])
    assert torch.isnan(y[~finite]).all()
    assert torch.equal(back[finite], y[finite])
    if fmt == "e4m3":
        assert torch.equal(raw[finite], y[finite].to(torch.float8_e4m3fn).view(torch.uint8))
        assert torch.isnan(back[~finite]).all()


@triton.jit
def inverse_kernel(p_a, p_x, PRECISION: tl.constexpr):
    o = tl.arange(0, 64)[:, None] * 64 + tl.arange(0, 64)[None, :]
    tl.store(p_x + o, intra_chunk.unit_lower_inverse(tl.load(p_a + o), PRECISION))


@pytest.mark.parametrize("precision, bound", [("ieee", 1e-5), ("tf32", 1e-5), ("float16", 4e-3)])
@pytest.mark.parametrize("beta", [0.5, 1.0, 1.9])
def test_inverse_with_correlated_keys(beta, precision, bound):
    """Nearly equal keys and strong writes, where powers of A blow up and a series for the inverse fails.

    The interpreter's TF32 is exact, so it tests the joins from single rows on; float16 rounds like TF32 on a GPU.
    """
    gen = torch.Generator().manual_seed(1)
    k = torch.nn.functional.normalize(torch.randn(1, 32, generator=gen) + 0.3 * torch.randn(64, 32, generator=gen))
    a = (beta * k @ k.T).tril(-1).contiguous()
    x = torch.full((64, 64), float("nan"))
    inverse_kernel[(1,)](a, x, PRECISION=precision)
    exact = torch.linalg.inv(torch.eye(64, dtype=torch.float64) + a.double())
    assert oracle.error_ratio(x, exact) < bound
    assert (x.triu(1) == 0).all()


@GATES
def test_gate_gradients_under_strong_decay(kda):
    """At e^-5 a token a gate's gradient is a thousandth of the terms that cancel in it if i = j is not left out."""
    q, k, v, g, beta, state = inputs_of(kda=kda, t=32)
    inputs = (q, k, v, torch.full_like(g, -5.0), beta, state)
    check(run_both(inputs, PLAIN, torch.float16, tuning=NARROW), torch.float16)
