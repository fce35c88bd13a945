"""A runner that compiles instead of running, for any NVIDIA architecture and without a GPU.

    python -m jlaqat.kernels.aot [--architectures 80,90] [--gates gdn,kda]     prints registers, stack and shared memory

Needs a process without TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import os
import re
import subprocess
import sys
import tempfile
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

from jlaqat.kernels import pipeline, recurrent_pipeline, replay_pipeline
from jlaqat.kernels.call import SHARED_MEMORY, Inputs, converts_to_e4m3, options_for
from jlaqat.kernels.launch import Launch, dtype_name
from jlaqat.kernels.tuning import Tuning
from jlaqat.spec import DeltaQuant, QuantSpec

_TYPES = {
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "int32": "i32",
    "uint8": "u8",
}


@dataclasses.dataclass(frozen=True)
class FakeArray:
    """Shape and dtype, enough for a pipeline that only compiles."""

    shape: tuple[int, ...]
    dtype: str

    def reshape(self, *shape: int) -> FakeArray:
        shape = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
        assert math.prod(shape) == math.prod(self.shape), (shape, self.shape)
        return FakeArray(tuple(shape), self.dtype)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler said about one kernel."""

    name: str
    capability: int
    shared: int  # bytes a program
    registers: int  # a thread
    stack: int  # bytes a thread: spills and local arrays
    warps: int


def compile_launch(launch: Launch, capability: int) -> Any:
    """Triton's CompiledKernel of a launch whose arrays need no more than a dtype, for a compute capability.

    `asm` has its texts, `src.signature` its parameters: those that are not "constexpr" are what it is given.
    """
    constexprs = {p.name for p in launch.kernel.params if p.is_constexpr}
    signature, constants, attrs = {}, {}, {}
    for i, name in enumerate(launch.kernel.arg_names):
        if name in constexprs:
            signature[name], constants[name] = "constexpr", launch.constants[name]
        elif launch.constants.get(name) == 1 and not isinstance(launch.constants[name], float):
            signature[name], constants[name] = "constexpr", 1  # as Triton and jax-triton specialize
        elif name in launch.constants:
            value = launch.constants[name]
            signature[name] = "fp32" if isinstance(value, float) else "i32"
            if not isinstance(value, float) and value % 16 == 0:
                attrs[(i,)] = [["tt.divisibility", 16]]
        else:
            array = launch.outputs[name] if name in launch.outputs else launch.inputs[name]
            signature[name] = "*" + _TYPES[dtype_name(array)]
            attrs[(i,)] = [["tt.divisibility", 16]]
    kind = GluonASTSource if isinstance(launch.kernel, GluonJITFunction) else ASTSource
    source = kind(launch.kernel, signature, constants, attrs)
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages, **launch.compiler_options}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


class CompileRun:
    """`run(launch)` for a compute capability (80, 89, 90, 100, 120); appends a `Compiled` to `report`."""

    def __init__(self, capability: int, report: list[Compiled]):
        self.capability = capability
        self.report = report

    def __call__(self, launch: Launch) -> dict[str, FakeArray]:
        kernel = compile_launch(launch, self.capability)
        self.report.append(_describe(launch, kernel, self.capability))
        outputs = {name: FakeArray(tuple(b.shape), b.dtype) for name, b in launch.outputs.items()}
        return outputs | {name: launch.inputs[name] for name in launch.in_place}


def _describe(launch: Launch, kernel: Any, capability: int) -> Compiled:
    """Registers and stack as the cubin records them."""
    folder = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin")
    tool = os.environ.get("TRITON_CUOBJDUMP_PATH", os.path.join(folder, "cuobjdump"))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(kernel.asm["cubin"])
        f.flush()
        text = subprocess.run([tool, "--dump-resource-usage", f.name], capture_output=True, text=True).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+)", text)
    registers, stack = (int(x) for x in usage.groups()) if usage else (-1, -1)
    return Compiled(
        name=launch.name.removesuffix("_kernel"),
        capability=capability,
        shared=kernel.metadata.shared,
        registers=registers,
        stack=stack,
        warps=launch.num_warps,
    )


def compile_pipeline(
    architecture: int,
    gate: str,
    dtype: str,
    quant: DeltaQuant,
    *,
    key_dim: int,
    value_dim: int,
    heads: tuple[int, int],
    batch: int = 1,
    tokens: int = 4096,
    packed: bool = False,
    tuning: Tuning | None = None,
    hopper: bool | None = None,
) -> list[Compiled]:
    """Compiles every kernel of a forward and a backward.

    heads: of q and k, and of v. hopper: the kernels written for SM90, where the table names them; None asks Triton's
    version.
    """
    h, hv = heads
    n, b, t = (5, 1, tokens) if packed else (batch, batch, tokens)
    q, v = FakeArray((b, t, h, key_dim), dtype), FakeArray((b, t, hv, value_dim), dtype)
    g = FakeArray((b, t, hv, key_dim) if gate == "kda" else (b, t, hv), "float32")
    state = FakeArray((n, hv, key_dim, value_dim), "float32")
    beta = FakeArray((b, t, hv), dtype)
    inputs = Inputs(q, q, v, g, beta, state, FakeArray((n + 1,), "int32") if packed else None)
    options = options_for(architecture, scale=key_dim**-0.5, quant=quant, tuning=tuning)
    if hopper is not None:
        options = dataclasses.replace(options, hopper=hopper)
    report: list[Compiled] = []
    run = CompileRun(architecture, report)
    out = pipeline.forward(run, inputs, options)
    pipeline.backward(run, inputs, out.residuals, v, state, options)
    return report


def compile_recurrent(
    architecture: int,
    gate: str,
    dtype: str,
    state: QuantSpec | None,
    *,
    key_dim: int,
    value_dim: int,
    heads: tuple[int, int],
    batch: int = 8,
    tokens: int = 64,
    read_stored: bool = False,
    packed: bool = False,
    window: int | None = None,
    ring_dtype: str = "bfloat16",
    feedback: bool = False,
) -> list[Compiled]:
    """Compiles the recurrence, forward and backward; with a window that of replay, and its step.

    heads: of q and k, and of v. packed: `batch` sequences in one row. feedback: of errors. ring_dtype: "uint8" for
    codes.
    """
    h, hv = heads
    rows = 1 if packed else batch
    q, v = FakeArray((rows, tokens, h, key_dim), dtype), FakeArray((rows, tokens, hv, value_dim), dtype)
    g = FakeArray((rows, tokens, hv, key_dim) if gate == "kda" else (rows, tokens, hv), "float32")
    k = q if window is None else FakeArray(q.shape, ring_dtype)
    operands = recurrent_pipeline.Tokens(q, k, v, g, FakeArray((rows, tokens, hv), dtype))
    options = recurrent_pipeline.Options(
        scale=key_dim**-0.5, state=state, read_stored=read_stored, hardware_fp8=converts_to_e4m3(architecture)
    )
    report: list[Compiled] = []
    run = CompileRun(architecture, report)
    dtypes = {None: "float32", "bfloat16": "bfloat16", "float16": "float16"}
    values = FakeArray((batch, hv, key_dim, value_dim), dtypes.get(state and state.format, "uint8"))
    entering = recurrent_pipeline.State(values, FakeArray((1,), "float32"))
    d_leaving = FakeArray(values.shape, "float32")
    drawn = state is not None and state.rounding == "stochastic"
    counters = FakeArray((batch, hv, 4), "int32") if drawn else None
    if feedback:
        entering = entering._replace(lost=d_leaving)
    which: dict[str, Any] = {}
    if packed:
        which["bounds"] = recurrent_pipeline.Bounds(*[FakeArray((batch,), "int32")] * 2)
    if window is None:
        if packed:
            shared = {**which, "counters": counters, "stride": 64}
            which["most"] = 64
            recurrent_pipeline.forward(run, operands, entering, options, **shared)
        out = recurrent_pipeline.forward(run, operands, entering, options, counters=counters, stride=1, **which)
        assert out.saved is not None
        if packed:
            each = [FakeArray(x.shape, "float32") for x in operands]
            which["into"] = recurrent_pipeline.Gradients(*each, None)
        recurrent_pipeline.backward(run, operands, entering, out.saved, v, d_leaving, options, **which)
        return report

    def first(x: FakeArray, length: int) -> FakeArray:
        return FakeArray((batch, length, *x.shape[2:]), x.dtype)

    cursor = FakeArray((batch,), "int32")
    entries = (first(k, window), FakeArray((batch, window, hv, value_dim), ring_dtype), first(g, window))
    ring, replayed_tokens = replay_pipeline.Ring(*entries, cursor), replay_pipeline.Tokens(*operands)
    if ring.coded:
        scales = FakeArray((rows, tokens, h), "float32")
        groups = recurrent_pipeline.Call(operands, options).programs_v
        of_r = FakeArray((batch, window, hv, groups), "float32")
        ring = ring._replace(k_scale=first(scales, window), r_scale=of_r)
        replayed_tokens = replayed_tokens._replace(k_scale=scales)
    one = replay_pipeline.Tokens(*(x and first(x, 1) for x in replayed_tokens))
    replay_pipeline.step(run, one, entering, ring, options, counters=counters)
    given = replayed_tokens, entering, ring
    replay_pipeline.forward(run, *given, options, counters=counters, **which)
    replayed = replay_pipeline.forward(run, *given, options, counters=counters, save=True, **which)
    replay_pipeline.backward(run, *given, replayed, v, d_leaving, options, **which)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architectures", default="80,89,90,100,120")
    parser.add_argument("--gates", default="gdn,kda")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--dims", default="64,128,256")
    args = parser.parse_args()
    quants = {
        "plain": DeltaQuant(),
        "state+w fp8": DeltaQuant(state=QuantSpec.fp8(), w=QuantSpec.fp8()),
        "state int8": DeltaQuant(state=QuantSpec.int8()),
    }
    failed = 0
    axes = (args.architectures, args.gates, args.dtypes, args.dims)
    for arch, gate, dtype, dim in itertools.product(*(axis.split(",") for axis in axes)):
        for name, quant in quants.items():
            try:
                sizes = dict(key_dim=int(dim), value_dim=int(dim), heads=(4, 8))
                report = compile_pipeline(int(arch), gate, dtype, quant, **sizes)
            except Exception as error:
                print(f"sm_{arch} {gate} {dtype} D{dim} {name}: {type(error).__name__}: {error}", flush=True)
                failed += 1
                continue
            for k in report:
                over = " DOES NOT FIT" if k.shared > SHARED_MEMORY[int(arch)] * 1024 else ""
                failed += bool(over)
                print(
                    f"sm_{arch} {gate} {dtype} D{dim} {name}: {k.name} warps {k.warps} registers {k.registers} "
                    f"stack {k.stack} shared {k.shared}{over}",
                    flush=True,
                )
    if failed:
        sys.exit(f"{failed} did not compile or fit")


if __name__ == "__main__":
    main()
