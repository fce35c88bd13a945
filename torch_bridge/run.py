"""Runs a Launch on torch tensors: on the GPU, or on the CPU through Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import contextlib

import torch
import triton

from jlaqat.kernels.launch import Launch

POISON_BYTE = 0xFF  # NaN in every float format


def torch_run(launch: Launch, *, poison: bool = False) -> dict[str, torch.Tensor]:
    """Allocates the outputs on the inputs' device and launches. `poison` fills them with NaN first, for tests.

    Raises ValueError for inputs that are not contiguous: kernels take offsets from shapes.
    """
    first = next(iter(launch.inputs.values()))
    for name, x in launch.inputs.items():
        if not x.is_contiguous():
            raise ValueError(f"{launch.name}: {name} has strides {x.stride()}; call .contiguous() on it.")
    outputs = {}
    for name, buffer in launch.outputs.items():
        outputs[name] = torch.empty(buffer.shape, dtype=getattr(torch, buffer.dtype), device=first.device)
        if poison:
            outputs[name].view(torch.uint8).fill_(POISON_BYTE)
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages, **launch.compiler_options}
    if triton.knobs.runtime.interpret:  # which has no compiler to take options
        options = {}
    if launch.grid:
        # Triton launches on the current device, and the tensors may be on another.
        with torch.cuda.device(first.device) if first.is_cuda else contextlib.nullcontext():
            launch.kernel[(launch.grid,)](**launch.inputs, **outputs, **launch.constants, **options)
    return outputs | {name: launch.inputs[name] for name in launch.in_place}


def poisoned_run(launch: Launch) -> dict[str, torch.Tensor]:
    """`torch_run` with every output full of NaN beforehand."""
    return torch_run(launch, poison=True)
