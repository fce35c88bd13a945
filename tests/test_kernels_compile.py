"""The kernels compiled ahead of time, without a GPU, for every architecture: they build, and they fit.

The variants are a pairwise set, at small widths. `python -m jlaqat.kernels.aot` compiles others at full width.
"""

import math
import pathlib
import re
import sys

import pytest

pytest.importorskip("triton")

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from compiled_variants import CHUNKED_VARIANTS, SIZES, TUNINGS, chunked_quant, name_of

from jlaqat.kernels import aot, call, pipeline
from jlaqat.kernels.aot import CompileRun, FakeArray, compile_pipeline
from jlaqat.kernels.call import SHARED_MEMORY, Inputs, Options, UnsupportedByKernels, options_for, triton_version
from jlaqat.kernels.chunk_output import group_sum_kernel
from jlaqat.kernels.launch import UNUSED, Buffer, Launch
from jlaqat.kernels.tuning import Knobs, Tuning, choose
from jlaqat.spec import DeltaQuant, QuantSpec

FP8 = DeltaQuant(state=QuantSpec.fp8(block_v=16), w=QuantSpec.fp8())
FP8_BLOCK64 = DeltaQuant(state=QuantSpec.fp8(), w=QuantSpec.fp8())
INT8 = DeltaQuant(state=QuantSpec.int8(block_v=32))

OWN_KERNELS = {
    "gdn": {"intra_chunk_forward", "chunk_backward"},
    "kda": {"kda_pairs", "kda_wy", "kda_recompute", "kda_scores_backward", "kda_channels_backward", "kda_dbeta"},
}


@pytest.mark.parametrize("variant", CHUNKED_VARIANTS, ids=name_of)
def test_every_kernel_compiles_and_fits(variant):
    architecture, gate, packed, grouped = (variant[axis] for axis in ("architecture", "gate", "packed", "grouped"))
    k, v, tokens = SIZES[variant["sizes"]]
    quant, tuning = chunked_quant(variant), TUNINGS[variant["tuning"]]
    sizes = dict(key_dim=k, value_dim=v, heads=(1, 2 if grouped else 1), packed=packed, tokens=tokens)
    report = compile_pipeline(architecture, gate, variant["dtype"], quant, tuning=tuning, **sizes)
    names = {r.name for r in report}
    assert {"chunk_state_forward", "chunk_state_backward"} <= names
    assert OWN_KERNELS[gate] <= names
    assert ("wy_recompute" in names) == (gate == "gdn" and None in (quant.state, quant.w))  # else all is saved
    assert ("chunk_output_forward" in names) == (variant["tuning"] == "split")
    assert ("chunk_index" in names) == packed
    assert ("group_sum" in names) == grouped
    for kernel in report:
        assert kernel.shared <= SHARED_MEMORY[architecture] * 1024, kernel


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [80, 90, 100, 120])
def test_float32_compiles_and_fits(architecture):
    sizes = dict(key_dim=32, value_dim=32, heads=(1, 1))
    for kernel in compile_pipeline(architecture, "gdn", "float32", DeltaQuant(), **sizes):
        assert kernel.shared <= SHARED_MEMORY[architecture] * 1024, kernel


@pytest.mark.parametrize("architecture", [80, 90, 100, 120])
def test_a_thread_holds_pairs_of_columns(architecture, monkeypatch):
    """`keep_corner` chooses columns 2j and 2j + 1 at once: a thread must hold them side by side, as of products."""
    texts = []
    compile_one = aot.triton.compile

    def keep_text(*args, **options):
        kernel = compile_one(*args, **options)
        texts.append(kernel.asm["ttgir"])
        return kernel

    monkeypatch.setattr(aot.triton, "compile", keep_text)
    options = options_for(architecture, scale=1.0, tuning=Tuning())
    with pytest.raises(StopIteration):
        pipeline.forward(StopAfterOne(architecture), fake_inputs(), options)
    chosen = re.findall(r"elementwise_inline_asm .*keep.*: tensor<64x64xf32, #(\w+)>", texts[0])
    assert len(chosen) == 5
    for layout in chosen:
        assert re.search(rf"#{layout} = #ttg.(nvidia_mma<|linear<{{register = \[\[0, 1\])", texts[0]), layout


class StopAfterOne(CompileRun):
    """Compiles the first launch, GDN's intra_chunk_forward, and raises StopIteration."""

    def __init__(self, capability):
        super().__init__(capability, [])

    def __call__(self, launch):
        super().__call__(launch)
        raise StopIteration


def test_hardware_e4m3_serves_where_it_exists_and_rounds_once():
    """Below SM89 asking for it is a compile error, not a wrong number; on SM89 Triton before 3.9 rounds twice."""
    hardware = {capability: options_for(capability, scale=1.0).hardware_fp8 for capability in (80, 89, 90, 100, 120)}
    assert hardware == {80: False, 89: triton_version() >= (3, 9), 90: True, 100: True, 120: True}


def test_launch_names_are_checked():
    operands = dict(inputs={"p_x": None}, outputs={"p_y": Buffer((1, 1, 16), "float32")})
    constants = {"ROWS": 1, "H": 1, "HV": 1, "K": 16, "BLOCK": 16, "BK": 16}
    Launch(kernel=group_sum_kernel, grid=1, **operands, constants=constants)
    with pytest.raises(TypeError, match=r"missing \['BLOCK'\], unknown \['BLOK'\]"):
        wrong = {("BLOK" if name == "BLOCK" else name): value for name, value in constants.items()}
        Launch(kernel=group_sum_kernel, grid=1, **operands, constants=wrong)
    with pytest.raises(TypeError, match=r"given twice \['p_x'\]"):
        Launch(kernel=group_sum_kernel, grid=1, **operands, constants=constants | {"p_x": 1})


@pytest.mark.parametrize(
    "quant, words",
    [
        (DeltaQuant(state=QuantSpec.int4()), "format='int4'"),
        (DeltaQuant(state=QuantSpec.fp8(granularity="head")), "granularity='head'"),
        (DeltaQuant(state=QuantSpec.fp8(rounding="stochastic")), "rounding='stochastic'"),
        (DeltaQuant(state=QuantSpec.fp8(cadence=1)), "cadence=1"),
        (DeltaQuant(w=QuantSpec.int8()), "round w with format='int8'"),
    ],
)
def test_what_the_kernels_do_not_do_is_refused(quant, words):
    inputs = fake_inputs()
    with pytest.raises(UnsupportedByKernels, match=words) as caught:
        pipeline.forward(CompileRun(90, []), inputs, Options(scale=1.0, quant=quant))
    assert "backend='xla'" in str(caught.value)


def test_shapes_and_dtypes_are_checked_before_any_launch():
    inputs = fake_inputs()
    run, options = CompileRun(90, []), Options(scale=1.0)
    with pytest.raises(ValueError, match="beta has shape"):
        pipeline.forward(run, inputs._replace(beta=inputs.q), options)
    with pytest.raises(ValueError, match="g must be float32, given bfloat16"):
        pipeline.forward(run, inputs._replace(g=inputs.beta), options)
    with pytest.raises(UnsupportedByKernels, match="K=8, V=32"):
        pipeline.forward(run, fake_inputs(key_dim=8), options)
    assert run.report == []


def fake_inputs(key_dim=32) -> Inputs:
    q, v = FakeArray((1, 64, 1, key_dim), "bfloat16"), FakeArray((1, 64, 1, 32), "bfloat16")
    return Inputs(q, q, v, FakeArray((1, 64, 1), "float32"), FakeArray((1, 64, 1), "bfloat16"))


@pytest.mark.parametrize("gate", ["gdn", "kda"])
def test_tuned_table_is_read_and_unseen_architectures_take_the_defaults(gate):
    tuned = {size: choose(90, gate, True, size) for size in ("few", "many")}
    assert tuned["few"].reverse != tuned["many"].reverse  # few heads take narrower programs
    assert choose(61, gate, True, "many") == Tuning()


class Names:
    """A runner that only notes whose kernels were asked for."""

    def __init__(self):
        self.own = set()  # kernels written for SM90

    def __call__(self, launch):
        if "hopper" in launch.kernel.fn.__module__:
            self.own.add(launch.name.removesuffix("_kernel"))
        return {name: FakeArray(tuple(b.shape), b.dtype) for name, b in launch.outputs.items()}


BACKWARD = {"chunk_state_backward", "chunk_backward"}
ALL_OWN = {"chunk_state_forward", *BACKWARD}


@pytest.mark.parametrize(
    "gate, quant, dtype, key_dim, value_dim, expected",
    [
        ("gdn", FP8_BLOCK64, "bfloat16", 128, 128, BACKWARD),  # the state is rounded
        ("gdn", INT8, "bfloat16", 128, 128, BACKWARD),
        ("gdn", DeltaQuant(), "float16", 128, 128, ALL_OWN),
        ("gdn", DeltaQuant(w=QuantSpec.fp8()), "bfloat16", 128, 256, ALL_OWN - {"chunk_backward"}),
        ("kda", FP8_BLOCK64, "bfloat16", 128, 128, {"chunk_state_backward"}),
        ("kda", DeltaQuant(), "bfloat16", 128, 128, ALL_OWN - {"chunk_backward"}),
        ("gdn", FP8_BLOCK64, "float32", 128, 128, set()),
        ("gdn", FP8_BLOCK64, "bfloat16", 64, 128, set()),
    ],
)
def test_kernels_for_sm90_serve_where_they_can(gate, quant, dtype, key_dim, value_dim, expected):
    b, t, h = 1, 128, 1
    q, v = FakeArray((b, t, h, key_dim), dtype), FakeArray((b, t, h, value_dim), dtype)
    g = FakeArray((b, t, h, key_dim) if gate == "kda" else (b, t, h), "float32")
    inputs = Inputs(q, q, v, g, FakeArray((b, t, h), dtype))
    tuning = Tuning(hopper_state=Knobs(4, 3), hopper_reverse=Knobs(8, 2, bv=128), hopper_chunk=Knobs(8, registers=128))
    for hopper, names in ((True, expected), (False, set())):
        run = Names()
        options = options_for(90, scale=1.0, quant=quant, tuning=tuning, hopper=hopper)
        out = pipeline.forward(run, inputs, options)
        pipeline.backward(run, inputs, out.residuals, v, FakeArray((1, h, key_dim, value_dim), "float32"), options)
        assert run.own == names


@pytest.mark.parametrize(
    "gate, x_in_p, most",
    [("gdn", False, 340e6), ("gdn", True, 290e6), ("kda", False, 269e6), ("kda", True, 269e6)],
)
def test_what_a_forward_keeps(gate, x_in_p, most):
    """Bytes at 8x4096x16, state and w FP8, beyond inputs and outputs. GDN is to stay below 300 MB."""
    b, t, h, d = 8, 4096, 16, 128
    q = FakeArray((b, t, h, d), "bfloat16")
    g = FakeArray((b, t, h, d) if gate == "kda" else (b, t, h), "float32")
    inputs = Inputs(q, q, q, g, FakeArray((b, t, h), "bfloat16"))
    tuning = choose(90, gate, True, "many")._replace(x_in_p=x_in_p)
    options = options_for(90, scale=1.0, quant=FP8_BLOCK64, tuning=tuning)
    residuals = pipeline.forward(Names(), inputs, options).residuals
    size = {"bfloat16": 2, "float32": 4, "uint8": 1}
    kept = sum(math.prod(x.shape) * size[x.dtype] for x in residuals if x is not None)
    assert 0.99 * most < kept <= most


def test_without_gradients_p_is_kept_alone_and_no_x():
    launches = []

    def run(launch):
        launches.append(launch)
        return Names()(launch)

    options = options_for(90, scale=1.0, tuning=Tuning(x_in_p=True))
    pipeline.forward(run, fake_inputs(), options, with_residuals=False)
    intra = next(launch for launch in launches if launch.name == "intra_chunk_forward_kernel")
    assert intra.outputs["p_x"] == UNUSED and not intra.constants["SAVE_X"]
    assert intra.outputs["p_p"].shape == (64, 1, 64) and intra.constants["P_WIDTH"] == 64


def test_kernels_for_sm90_need_triton_3_9(monkeypatch):
    for version, capability, expected in (((3, 9), 90, True), ((3, 7), 90, False), ((3, 9), 100, False)):
        monkeypatch.setattr(call, "triton_version", lambda version=version: version)
        assert options_for(capability, scale=1.0).hopper == expected


@pytest.mark.slow
@pytest.mark.parametrize("x_in_p", [False, True])
@pytest.mark.parametrize("quant", [FP8_BLOCK64, DeltaQuant()], ids=["fp8", "plain"])
def test_kernels_for_sm90_compile_and_fit(quant, x_in_p):
    b, t, h = 8, 4096, 16
    q, g = FakeArray((b, t, h, 128), "bfloat16"), FakeArray((b, t, h), "float32")
    inputs = Inputs(q, q, q, g, FakeArray((b, t, h), "bfloat16"))
    tuning = choose(90, "gdn", quant.state is not None, "many")._replace(x_in_p=x_in_p)
    options = options_for(90, scale=1.0, quant=quant, hopper=True, tuning=tuning)
    report: list = []
    run = CompileRun(90, report)
    out = pipeline.forward(run, inputs, options)
    pipeline.backward(run, inputs, out.residuals, q, FakeArray((b, h, 128, 128), "float32"), options)
    for kernel in report:
        assert kernel.shared <= SHARED_MEMORY[90] * 1024 and kernel.stack <= 512, kernel
    chunk = next(kernel for kernel in report if kernel.name == "chunk_backward")
    assert chunk.registers <= 128 and 2 * (chunk.shared + 1024) <= 228 * 1024  # two programs a multiprocessor
