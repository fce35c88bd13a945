"""A runner that compiles instead of running, for any NVIDIA architecture and without a GPU.

    report = []
    forward(CompileRun(90, report), fake_inputs(...), options)

Needs a process without TRITON_INTERPRET. Used by the compile tests and by `python -m jlaqat.kernels.aot`.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import subprocess
import tempfile
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from jlaqat.kernels.launch import Launch, dtype_name

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
    spill_stores: int  # bytes
    warps: int


class CompileRun:
    """`run(launch)` for a compute capability (80, 89, 90, 100, 120); appends a `Compiled` to `report`."""

    def __init__(self, capability: int, report: list[Compiled]):
        self.target = GPUTarget("cuda", capability, 32)
        self.report = report

    def __call__(self, launch: Launch) -> dict[str, FakeArray]:
        outputs = {name: FakeArray(tuple(b.shape), b.dtype) for name, b in launch.outputs.items()}
        constexprs = {p.name for p in launch.kernel.params if p.is_constexpr}
        signature, constants, attrs = {}, {}, {}
        for i, name in enumerate(launch.kernel.arg_names):
            if name in constexprs:
                signature[name], constants[name] = "constexpr", launch.constants[name]
            elif name in launch.constants:
                value = launch.constants[name]
                signature[name] = "fp32" if isinstance(value, float) else "i32"
                if not isinstance(value, float) and value % 16 == 0:
                    attrs[(i,)] = [["tt.divisibility", 16]]
            else:
                array = launch.inputs.get(name) or outputs[name]
                signature[name] = "*" + _TYPES[dtype_name(array)]
                attrs[(i,)] = [["tt.divisibility", 16]]
        source = ASTSource(launch.kernel, signature, constants, attrs)
        options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages, "enable_fp_fusion": True}
        kernel = triton.compile(source, target=self.target, options=options)
        self.report.append(_describe(launch, kernel, self.target.arch))
        return outputs


def _describe(launch: Launch, kernel: Any, capability: int) -> Compiled:
    """Registers and stack from the cubin, spills from assembling the PTX once more with ptxas -v."""
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
        spill_stores=stack,
        warps=launch.num_warps,
    )
