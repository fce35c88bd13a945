"""Runs a Launch on torch tensors on a CPU, as the PTX that Triton compiles: see ptx_emulator.py for what that shows."""

from __future__ import annotations

import numpy as np
import torch
from ptx_emulator import run_program
from ptx_kernel import Kernel
from ptx_memory import Memory

from jlaqat.kernels.aot import compile_launch
from jlaqat.kernels.launch import Launch
from jlaqat.torch_bridge.run import POISON_BYTE

ALIGNMENT = 256  # of arrays; what lies between them is NaN and belongs to nobody


class EmulatedRun:
    """`run(launch) -> {name: tensor}`, as jlaqat.torch_bridge.run.poisoned_run.

    capability: compute capability to compile for. reciprocal: as run_program takes it. Compiled kernels are kept.

    Raises AssertionError where warps race, NotImplementedError for an instruction that the emulator does not know.
    """

    def __init__(self, capability: int = 90, reciprocal: str = "nearest"):
        self.capability, self.reciprocal = capability, reciprocal
        self.kernels: dict = {}

    def __call__(self, launch: Launch) -> dict[str, torch.Tensor]:
        kernel, names, shared_bytes = self._compiled(launch)
        arrays = dict(launch.inputs)
        for name, buffer in launch.outputs.items():
            arrays[name] = torch.empty(buffer.shape, dtype=getattr(torch, buffer.dtype))
            arrays[name].view(torch.uint8).fill_(POISON_BYTE)
        starts: dict[int, int] = {}  # by where they lie in torch: one array may stand for several parameters
        end = ALIGNMENT
        for x in arrays.values():
            if x.data_ptr() not in starts:
                starts[x.data_ptr()] = end
                end += -(-x.nbytes // ALIGNMENT) * ALIGNMENT + ALIGNMENT
        memory = Memory(end, "global")
        places = {name: slice(starts[x.data_ptr()], starts[x.data_ptr()] + x.nbytes) for name, x in arrays.items()}
        for name, x in arrays.items():
            memory.bytes[places[name]] = bytes_of(x)
        arguments = [places[name].start if name in places else launch.constants[name] for name in names]
        settings = dict(shared_bytes=shared_bytes, warps=launch.num_warps, reciprocal=self.reciprocal)
        for program in range(launch.grid):
            races = run_program(kernel, arguments, program, memory, **settings)
            assert not races, f"{launch.name}, program {program}: " + "; ".join(sorted(races))
        written = {name: arrays[name] for name in (*launch.outputs, *launch.in_place)}
        for name, x in written.items():
            bytes_of(x)[:] = memory.bytes[places[name]]
        for name, x in arrays.items():
            assert np.array_equal(memory.bytes[places[name]], bytes_of(x)), f"{launch.name} changed {name}"
        for place in places.values():
            memory.bytes[place] = POISON_BYTE
        assert (memory.bytes == POISON_BYTE).all(), f"{launch.name} wrote where no array lies"
        return written

    def _compiled(self, launch: Launch) -> tuple[Kernel, list[str], int]:
        """The kernel, the names of what it is given, and its shared memory."""
        arrays = launch.inputs | launch.outputs
        types = tuple((name, str(x.dtype)) for name, x in sorted(arrays.items()))
        constants = tuple(sorted((name, repr(value)) for name, value in launch.constants.items()))
        options = (launch.num_warps, launch.num_stages, str(launch.compiler_options))
        key = (launch.kernel, types, constants, options)
        if key not in self.kernels:
            compiled = compile_launch(launch, self.capability)
            names = [name for name, kind in compiled.src.signature.items() if kind != "constexpr"]
            self.kernels[key] = Kernel(compiled.asm["ptx"]), names, compiled.metadata.shared
        return self.kernels[key]


def bytes_of(x: torch.Tensor) -> np.ndarray:
    """The tensor's own bytes."""
    assert x.is_contiguous()
    return x.reshape(-1).view(torch.uint8).numpy()


emulated_run = EmulatedRun()
