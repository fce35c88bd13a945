"""The kernels of replay compiled without a GPU: what decides their bits is the same in every form of a call."""

import re

import pytest

pytest.importorskip("triton")

from jlaqat.spec import QuantSpec


def sums(text):
    """What is added up, along which axis and in which layout, of a kernel in Triton's GPU dialect."""
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", text, re.MULTILINE))
    pattern = (
        r'"tt\.(reduce|scan)"\(.*?<\{axis = (\d).*?\n.*?(addf|max).*?\}\) : \((tensor<.*?>)(?:, tensor<.*?>)?\) ->'
    )
    found = re.findall(pattern, text, re.DOTALL)
    assert len(found) == len(re.findall(r'"tt\.(?:reduce|scan)"\(', text))
    return {
        (what, axis, re.sub(r"#\w+", lambda name: layouts.get(name[0], name[0]), operand))
        for what, axis, kind, operand in found
        if kind == "addf"
    }


class DialectRun:
    """`run(launch)` that compiles to Triton's GPU dialect for SM90 and keeps the text by the kernel's name."""

    class Compiled(Exception):
        pass

    def __init__(self, monkeypatch):
        from triton.backends.nvidia.compiler import CUDABackend

        self.texts = {}
        add_stages = CUDABackend.add_stages

        def stages_to_dialect(backend, stages, options, language):
            add_stages(backend, stages, options, language)
            stages["llir"] = lambda module, metadata: self.keep(str(module))

        monkeypatch.setattr(CUDABackend, "add_stages", stages_to_dialect)

    def keep(self, text):
        self.text = text
        raise self.Compiled

    def __call__(self, launch):
        from jlaqat.kernels import aot

        with pytest.raises(self.Compiled):
            aot.compile_launch(launch, 90)
        self.texts[launch.name] = self.text
        outputs = {name: aot.FakeArray(tuple(b.shape), b.dtype) for name, b in launch.outputs.items()}
        return outputs | {name: launch.inputs[name] for name in launch.in_place}


@pytest.mark.parametrize(
    ("gate", "state", "feedback", "ring_dtype"),
    [
        ("gdn", QuantSpec.fp8(), False, "bfloat16"),
        ("gdn", QuantSpec.fp8(), False, "uint8"),
        ("kda", QuantSpec.fp8(rounding="stochastic"), True, "bfloat16"),
        pytest.param("kda", QuantSpec.fp8(), False, "bfloat16", marks=pytest.mark.slow),
        pytest.param("gdn", QuantSpec.int8(granularity="key_row"), True, "bfloat16", marks=pytest.mark.slow),
        pytest.param("kda", QuantSpec.fp8(granularity="value_row"), False, "float32", marks=pytest.mark.slow),
        pytest.param("kda", QuantSpec.fp8(granularity="value_row"), True, "uint8", marks=pytest.mark.slow),
        pytest.param("gdn", None, False, "uint8", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_step_and_every_longer_call_sum_in_one_layout(gate, state, feedback, ring_dtype, monkeypatch):
    """Where a sum's terms lie in registers decides the order in which they are added, and so the bits."""
    from jlaqat.kernels import aot
    from jlaqat.kernels import recurrent_pipeline as recurrent
    from jlaqat.kernels import replay_pipeline as pipeline

    run = DialectRun(monkeypatch)
    n, length, heads, size = 3, 16, 4, 128
    gates = (size,) if gate == "kda" else ()
    x = aot.FakeArray

    def sums_of(launch, tokens, **which):
        entries = [x((n, length, heads, size), ring_dtype)] * 2 + [x((n, length, heads, *gates), "float32")]
        ring = pipeline.Ring(*entries, x((n,), "int32"))
        if ring.coded:
            scales = [x((n, length, heads), "float32"), x((n, length, heads, size // 64), "float32")]
            ring = pipeline.Ring(*ring[:4], *scales)
        operands = [x((n, tokens, heads, size), dtype) for dtype in ("bfloat16", ring_dtype, "bfloat16")]
        operands += [x((n, tokens, heads, *gates), "float32"), x((n, tokens, heads), "bfloat16")]
        operands += [x((n, tokens, heads), "float32")] if ring.coded else []
        values = x((n, heads, size, size), "uint8" if state else "float32")
        entering = recurrent.State(values, x((1,), "float32") if state else None)
        if feedback:
            entering = entering._replace(lost=x(values.shape, "float32"))
        counters = x((n, heads, 4), "int32") if state and state.rounding == "stochastic" else None
        options = recurrent.Options(scale=0.1, state=state, hardware_fp8=True, width=64 if ring.coded else None)
        run.texts.clear()
        launch(run, pipeline.Tokens(*operands), entering, ring, options, counters=counters, **which)
        return set().union(*(sums(text) for text in run.texts.values()))

    bounds = recurrent.Bounds(*[x((n,), "int32")] * 2)
    step = sums_of(pipeline.step, 1)
    assert step
    for tokens, which in [(40, {"save": True}), (5, {}), (64, {"bounds": bounds})]:
        assert sums_of(pipeline.forward, tokens, **which) == step


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "gate", "state", "window", "more"),
    [
        (80, "kda", QuantSpec.fp8(rounding="stochastic"), 8, {"feedback": True}),
        (89, "gdn", QuantSpec.int8(granularity="key_row", rounding="stochastic"), 16, {}),
        (90, "gdn", QuantSpec.fp8(rounding="stochastic"), 16, {"feedback": True, "ring_dtype": "uint8"}),
        (100, "kda", QuantSpec.float16(rounding="stochastic"), 1, {"ring_dtype": "uint8"}),
        (120, "gdn", QuantSpec.fp8(granularity="value_row"), 8, {"feedback": True}),
    ],
    ids=str,
)
def test_other_roundings_compile(architecture, gate, state, window, more):
    """Rounding to nearest: test_recurrent_compile.py, which says why there are spills."""
    from jlaqat.kernels.aot import compile_recurrent

    sizes = dict(key_dim=128, value_dim=128, heads=(4, 8), window=window, **more)
    report = compile_recurrent(architecture, gate, "bfloat16", state, **sizes)
    assert {k.name for k in report} >= {"replay_step", "replay_flush", "replay_forward", "replay_backward"}
    assert [k for k in report if k.stack > 1000] == []
