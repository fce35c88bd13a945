"""The PTX emulator itself: small kernels against torch, and what it must find."""

import pathlib
import sys

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import numpy as np
import torch
import triton
import triton.language as tl
from emulated_run import EmulatedRun, emulated_run
from ptx_emulator import run_program
from ptx_kernel import Kernel
from ptx_memory import Memory

from jlaqat.kernels.call import converts_to_e4m3
from jlaqat.kernels.launch import Buffer, Launch
from jlaqat.kernels.rounding import _reciprocal, compute_scale, encode, round_code

INF, NAN = float("inf"), float("nan")


def launch(kernel, inputs, outputs, grid=1, warps=4, **constants):
    return Launch(kernel=kernel, grid=grid, inputs=inputs, outputs=outputs, constants=constants, num_warps=warps)


@triton.jit
def arithmetic_kernel(p_x, p_y, p_n, p_fma, p_exp, p_max, p_integer, p_bits, scale, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    b_x, b_y, b_n = tl.load(p_x + i), tl.load(p_y + i), tl.load(p_n + i)
    tl.store(p_fma + i, tl.fma(b_x, b_y, scale))
    tl.store(p_exp + i, tl.exp2(b_x))
    tl.store(p_max + i, tl.where(b_x > b_y, tl.abs(b_x), -b_y))
    tl.store(p_integer + i, (b_n // 7 * 3 - (b_n >> 3)) ^ b_n)
    tl.store(
        p_bits + i, tl.umulhi(b_n.to(tl.uint32, bitcast=True), tl.full([BLOCK], 0x9E3779B9, tl.uint32)).to(tl.int32)
    )


def test_arithmetic():
    n = 512
    gen = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, n, generator=gen)
    x[:2] = torch.tensor([3.0, 1 + 2**-12])
    y[:2] = torch.tensor([NAN, 1 + 2**-12])
    numbers = torch.randint(0, 2**31 - 1, (n,), generator=gen, dtype=torch.int32)
    outputs = {f"p_{name}": Buffer((n,), "float32") for name in ("fma", "exp", "max")}
    outputs |= {f"p_{name}": Buffer((n,), "int32") for name in ("integer", "bits")}
    scale = -(2**-24) * (1 + 2**-23)  # the product and it are no float64: one rounding differs from two
    out = emulated_run(launch(arithmetic_kernel, {"p_x": x, "p_y": y, "p_n": numbers}, outputs, scale=scale, BLOCK=n))
    exact = (x.double() * y.double() + scale).float()
    assert torch.equal(out["p_fma"][2:], exact[2:]) and out["p_fma"][0].isnan()
    assert out["p_fma"][1].item() == 1 + 2**-11  # 1 + 2^-11 + 2^-24 - 2^-24 - 2^-47
    torch.testing.assert_close(out["p_exp"], x.double().exp2().float(), rtol=1e-6, atol=0)
    assert torch.equal(out["p_max"][1:], torch.where(x > y, x.abs(), -y)[1:]) and out["p_max"][0].isnan()
    assert torch.equal(out["p_integer"], (numbers // 7 * 3 - (numbers >> 3)) ^ numbers)
    high = (numbers.numpy().astype(np.uint64) * np.uint64(0x9E3779B9)) >> np.uint64(32)
    np.testing.assert_array_equal(out["p_bits"].numpy().view(np.uint32), high.astype(np.uint32))


@triton.jit
def conversions_kernel(p_x, p_byte, p_e4m3, p_bfloat16, p_float16, p_int8, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    b_x = tl.load(p_x + i)
    b_fp8 = b_x.to(tl.float8e4nv)
    tl.store(p_byte + i, b_fp8.to(tl.uint8, bitcast=True))
    tl.store(p_e4m3 + i, b_fp8.to(tl.float32))
    tl.store(p_bfloat16 + i, b_x.to(tl.bfloat16))
    tl.store(p_float16 + i, b_x.to(tl.float16))
    tl.store(p_int8 + i, (tl.load(p_byte + i) + 1).to(tl.int8, bitcast=True).to(tl.float32))


@pytest.mark.parametrize("capability", [c for c in (89, 90, 100, 120) if converts_to_e4m3(c)])
def test_conversions_round_to_nearest(capability):
    codes = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (codes[1:] + codes[:-1]) / 2
    beside = torch.cat([ties.nextafter(torch.tensor(side)) for side in (-INF, INF)])
    gen = torch.Generator().manual_seed(1)
    special = torch.tensor([NAN, INF, 465.0, 1e9, 1 + 2**-8, 1 + 3 * 2**-8, 2049.0, 2051.0, 65520.0, 2**-25, 3e38])
    x = torch.cat([codes, ties, beside, special, 30 * torch.randn(2048, generator=gen)])[:1024]
    x = torch.cat([x, -x])
    names = {"byte": "uint8", "e4m3": "float32", "bfloat16": "bfloat16", "float16": "float16", "int8": "float32"}
    outputs = {f"p_{name}": Buffer((len(x),), dtype) for name, dtype in names.items()}
    out = EmulatedRun(capability)(launch(conversions_kernel, {"p_x": x}, outputs, BLOCK=len(x)))
    wanted = x.clamp(-448, 448).to(torch.float8_e4m3fn)
    finite = ~x.isnan()
    assert torch.equal(out["p_byte"][finite], wanted.view(torch.uint8)[finite])
    assert set((out["p_byte"][~finite] & 0x7F).tolist()) == {0x7F}
    for name, reference in (("e4m3", wanted.float()), ("bfloat16", x.bfloat16()), ("float16", x.half())):
        torch.testing.assert_close(out[f"p_{name}"], reference, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(out["p_int8"], (out["p_byte"] + 1).view(torch.int8).float())


@triton.jit
def reductions_kernel(p_x, p_rows, p_columns, p_all, p_most, p_running, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    i, j = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    b_x = tl.load(p_x + i[:, None] * COLUMNS + j[None, :])
    tl.store(p_rows + i, tl.sum(b_x, 1))
    tl.store(p_columns + j, tl.sum(b_x, 0))
    tl.store(p_all, tl.sum(b_x))
    tl.store(p_most + j, tl.max(b_x, 0))
    tl.store(p_running + j[:, None] * ROWS + i[None, :], tl.trans(tl.cumsum(b_x, 0)))


def reductions(x):
    rows, columns = x.shape
    shapes = {"rows": (rows,), "columns": (columns,), "all": (1,), "most": (columns,), "running": (columns, rows)}
    outputs = {f"p_{name}": Buffer(shape, "float32") for name, shape in shapes.items()}
    return launch(reductions_kernel, {"p_x": x}, outputs, ROWS=rows, COLUMNS=columns)


def small_integers(*shape):  # whose sums are exact in any order
    return torch.randint(-99, 99, shape, generator=torch.Generator().manual_seed(2)).float()


def test_reductions_across_warps():
    x = small_integers(64, 32)
    out = emulated_run(reductions(x))
    wanted = {"rows": x.sum(1), "columns": x.sum(0), "all": x.sum()[None], "most": x.amax(0), "running": x.cumsum(0).T}
    for name, reference in wanted.items():
        assert torch.equal(out[f"p_{name}"], reference), name


def test_shared_memory_without_its_barriers_races():
    """The kernel above, with barriers taken out of what the compiler made."""
    x = small_integers(64, 32)
    run = EmulatedRun()
    run(reductions(x))
    [(kernel, _, _)] = run.kernels.values()
    assert sum(i.name[0] == "bar" for i in kernel.instructions) > 3
    nothing = dict(name=("mov", "b32"), operands=("%r1", "%r1"))  # so that labels stay
    kernel.instructions = [i._replace(**nothing) if i.name[0] == "bar" else i for i in kernel.instructions]
    with pytest.raises(AssertionError, match="read after write in shared memory: ld.shared"):
        run(reductions(x))


@triton.jit
def exchange_kernel(p_x, p_between, p_out, n, BLOCK: tl.constexpr, BARRIER: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    back = tl.program_id(0) * BLOCK + BLOCK - 1 - tl.arange(0, BLOCK)
    tl.store(p_between + i, tl.load(p_x + i, mask=i < n, other=-1.0), mask=i < n)
    if BARRIER:
        tl.debug_barrier()
    tl.store(p_out + i, tl.load(p_between + back, mask=back < n, other=-2.0), mask=i % 3 != 1)


def exchange(barrier, n=500):
    outputs = {"p_between": Buffer((512,), "float32"), "p_out": Buffer((512,), "float32")}
    x = torch.arange(n).float()
    return launch(exchange_kernel, {"p_x": x}, outputs, grid=2, n=n, BLOCK=256, BARRIER=barrier)


def test_masked_loads_and_stores():
    out = emulated_run(exchange(barrier=True))
    assert torch.equal(out["p_between"][:500], torch.arange(500).float())
    assert out["p_between"][500:].isnan().all()  # masked, and so as they were
    i = torch.arange(512)
    back = i // 256 * 256 + 255 - i % 256
    wanted = torch.where(back < 500, back.float(), -2.0)
    assert torch.equal(out["p_out"][i % 3 != 1], wanted[i % 3 != 1])
    assert out["p_out"][i % 3 == 1].isnan().all()


def test_a_store_and_another_warps_load_without_a_barrier_race():
    with pytest.raises(AssertionError, match="program 0: read after write in global memory: .*ld.global"):
        emulated_run(exchange(barrier=False))


def test_a_load_beyond_every_array_is_an_error():
    x = torch.zeros(8)
    with pytest.raises(IndexError, match=r"global memory has \d+ bytes"):
        emulated_run(launch(copy_kernel, {"p_x": x}, {"p_out": Buffer((4096,), "float32")}, BLOCK=4096 * 4))


@triton.jit
def copy_kernel(p_x, p_out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(p_out + i, tl.load(p_x + i))


@triton.jit
def reversed_bits_kernel(p_x, p_out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    b_x = tl.load(p_x + i)
    tl.store(p_out + i, tl.inline_asm_elementwise("brev.b32 $0, $1;", "=r,r", [b_x], tl.int32, is_pure=True, pack=1))


def test_an_unknown_instruction_is_named():
    x = torch.zeros(128, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match=r"does not know: brev\.b32 %r\d+, %r\d+"):
        emulated_run(launch(reversed_bits_kernel, {"p_x": x}, {"p_out": Buffer((128,), "int32")}, BLOCK=128))


ASYNCHRONOUS = """
.visible .entry copy(.param .u64 copy_param_0)
{
    mov.u32 %r1, %tid.x;
    shl.b32 %r2, %r1, 2;
    ld.param.b64 %rd1, [copy_param_0];
    mad.wide.u32 %rd2, %r1, 4, %rd1;
    cp.async.ca.shared.global [ %r2 + 0 ], [ %rd2 + 0 ], 0x4;
    cp.async.commit_group;
    ld.shared.b32 %r3, [%r2];
    st.global.b32 [%rd2+128], %r3;
    cp.async.wait_group 0;
    ld.shared.b32 %r3, [%r2];
    st.global.b32 [%rd2+256], %r3;
    xor.b32 %r4, %r2, 4;
    @!%p1 bra $after;
    trap;
$after:
    ret;
}
"""


def test_an_asynchronous_copy_is_there_when_it_was_waited_for():
    memory = Memory(3 * 128, "global")
    memory.bytes[:128] = np.arange(32, dtype=np.int32).view(np.uint8)
    text = ASYNCHRONOUS.replace("@!%p1", "setp.eq.b32 %p1, %r1, -1;\n@!%p1")
    assert not run_program(Kernel(text), [0], 0, memory, shared_bytes=128, warps=1)
    early, late = memory.bytes[128:].view(np.int32).reshape(2, 32)
    np.testing.assert_array_equal(early, -1)
    np.testing.assert_array_equal(late, np.arange(32))


def test_threads_that_part_are_an_error():
    text = ASYNCHRONOUS.replace("@!%p1", "setp.eq.b32 %p1, %r1, 5;\n@!%p1")
    with pytest.raises(NotImplementedError, match="threads of a program part here: .*bra"):
        run_program(Kernel(text), [0], 0, Memory(3 * 128, "global"), shared_bytes=128, warps=1)


@triton.jit
def halves_kernel(p_a, p_b, p_fma, p_mul, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    b_a, b_b = tl.load(p_a + i), tl.load(p_b + i)
    fma: tl.constexpr = "fma.rn.bf16x2 $0, $1, $2, $3;"
    b_fma = tl.inline_asm_elementwise(fma, "=r,r,r,r", [b_a, b_b, b_a], tl.bfloat16, is_pure=True, pack=2)
    tl.store(p_fma + i, b_fma)
    b_a, b_b = b_a.to(tl.float16), b_b.to(tl.float16)
    mul: tl.constexpr = "{\n.reg .b32 minus;\nneg.f16x2 minus, $1;\nmul.f16x2 $0, minus, $2;\n}"
    tl.store(p_mul + i, tl.inline_asm_elementwise(mul, "=r,r,r", [b_a, b_b], tl.float16, is_pure=True, pack=2))


def test_arithmetic_of_16_bit_pairs():
    a, b = torch.randn(2, 1024, generator=torch.Generator().manual_seed(3)).bfloat16()
    a[:4], b[:4] = 0, 1
    outputs = {"p_fma": Buffer((1024,), "bfloat16"), "p_mul": Buffer((1024,), "float16")}
    out = emulated_run(launch(halves_kernel, {"p_a": a, "p_b": b}, outputs, BLOCK=1024))
    exact = a.double() * b.double() + a.double()
    assert torch.equal(out["p_fma"], exact.bfloat16())
    assert torch.equal(out["p_mul"].view(torch.int16), (-a.half() * b.half()).view(torch.int16))


@triton.jit
def product_kernel(p_a, p_b, p_out, p_sum, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    i, j, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    b_a, b_b = tl.load(p_a + i[:, None] * K + k[None, :]), tl.load(p_b + j[:, None] * K + k[None, :])
    b_product = tl.dot(b_a, tl.trans(b_b))
    tl.store(p_out + i[:, None] * N + j[None, :], b_product)
    tl.store(p_sum + i, tl.sum(b_product, 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_matrix_products_of_sm80(dtype):
    a, b = small_integers(64, 48).T[:32, :].contiguous(), small_integers(32, 64)
    outputs = {"p_out": Buffer((32, 32), "float32"), "p_sum": Buffer((32,), "float32")}
    given = {"p_a": a.to(dtype), "p_b": b.to(dtype)}
    out = EmulatedRun(80)(launch(product_kernel, given, outputs, M=32, N=32, K=64))
    assert torch.equal(out["p_out"], a @ b.T) and torch.equal(out["p_sum"], (a @ b.T).sum(1))


@triton.jit
def scales_kernel(p_x, p_r, p_s, p_inverse, MAXIMUM: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_x = tl.load(p_x + i)
    tl.store(p_r + i, _reciprocal(b_x))
    b_s, b_inverse = compute_scale(b_x, MAXIMUM)
    tl.store(p_s + i, b_s)
    tl.store(p_inverse + i, b_inverse)


def scales(x, maximum, neighbour):
    """(1 / x, x / maximum and its reciprocal) of the kernels' formulas; x [N * 4096] float32."""
    outputs = {name: Buffer((len(x),), "float32") for name in ("p_r", "p_s", "p_inverse")}
    given = launch(
        scales_kernel, {"p_x": torch.from_numpy(x)}, outputs, len(x) // 4096, 16, MAXIMUM=maximum, BLOCK=4096
    )
    given = Launch(**{**vars(given), "fp_fusion": False})
    out = EmulatedRun(reciprocal=neighbour)(given)
    return [out[name].numpy() for name in outputs]


def significands(count):
    """float32 of TINY ≤ s < 2^126, none of whose significand is all ones."""
    bits = np.random.default_rng(0).integers(1 << 23, 253 << 23, count, dtype=np.uint32)
    bits[:512] = np.arange(1, 513) % 252 + 1 << 23  # powers of two, and their neighbours
    bits[512:1024] = bits[:512] + 1
    bits[bits & 0x7FFFFF == 0x7FFFFF] -= 1
    return bits.view(np.float32)


@pytest.mark.parametrize("maximum", [448.0, 127.0])
@pytest.mark.parametrize("neighbour", ["below", "nearest", "above"])
def test_a_reciprocal_an_ulp_off_becomes_the_nearest(neighbour, maximum):
    """1 / s exactly rounded for half a million s each, whichever float32 within an ulp rcp.approx gives."""
    x = significands(1 << 14 if neighbour == "nearest" or maximum == 127 else 1 << 19)
    r, s, inverse = scales(x, maximum, neighbour)
    np.testing.assert_array_equal(r, (1 / x.astype(np.float64)).astype(np.float32))
    wanted = (x.astype(np.float64) / maximum).astype(np.float32)
    wanted = np.where(wanted < np.finfo(np.float32).tiny, np.float32(1), wanted)
    np.testing.assert_array_equal(s, wanted)
    usual = s.view(np.uint32) & 0x7FFFFF != 0x7FFFFF
    np.testing.assert_array_equal(inverse[usual], (1 / s.astype(np.float64)).astype(np.float32)[usual])
    assert usual.mean() > 0.999


@pytest.mark.parametrize(("neighbour", "right"), [("below", False), ("nearest", True), ("above", True)])
def test_a_significand_of_ones_wants_the_upper_neighbour(neighbour, right):
    """The one case that leans on the GPU's rcp.approx; ptxas' own rcp.rn leans on it likewise."""
    exponents = np.resize(np.arange(1, 253, dtype=np.uint32), 4096)
    x = ((exponents << 23) + 0x7FFFFF).view(np.float32)
    r, _, _ = scales(x, 448.0, neighbour)
    assert np.array_equal(r, (1 / x.astype(np.float64)).astype(np.float32)) == right


@triton.jit
def int8_kernel(p_x, p_code, p_byte, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    b_code = round_code(tl.load(p_x + i), "int8", True)
    tl.store(p_code + i, b_code)
    tl.store(p_byte + i, encode(b_code, "int8", True))


def test_int8_codes_of_ties_and_nan():
    ties = torch.arange(-127, 128) / 2
    ties = torch.cat([ties, 2 * ties, ties.nextafter(torch.tensor(INF)), torch.tensor([NAN, -0.0, 0.49999997])])
    x = torch.cat([ties, torch.zeros(1024 - len(ties))])
    outputs = {"p_code": Buffer((1024,), "float32"), "p_byte": Buffer((1024,), "uint8")}
    out = emulated_run(launch(int8_kernel, {"p_x": x}, outputs, BLOCK=1024))
    nan = x.isnan()
    assert torch.equal(out["p_code"][~nan], x.round()[~nan]) and out["p_code"][nan].isnan().all()
    assert torch.equal(out["p_byte"].view(torch.int8), x.round().nan_to_num(0).to(torch.int8))
