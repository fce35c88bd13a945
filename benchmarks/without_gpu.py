"""An NVIDIA GPU that is not there, for compiling what a program launches through PyTorch, ahead of time and elsewhere.

    pretend(90)      # SM90: torch's CUDA device is the CPU, and Triton kernels compile and do not run

What a program compiles so goes into Triton's cache on disk. The cache serves a machine that has the GPU, at the same
path (TRITON_HOME), if the two have the same Triton (its files are hashed), sources, `ptxas --version` (or
TRITON_MOCK_PTX_VERSION set to anything, on both) and environment variables that change what Triton compiles. With
TRITON_STORE_BINARY_ONLY=1 it stays small.

Outputs are whatever memory held, so programs that branch on values go astray.
"""

from __future__ import annotations

from typing import Any

# An H200's; they decide which configurations a tuner tries.
PROPERTIES = {"multiprocessor_count": 132, "max_shared_mem": 232448, "warpSize": 32, "max_num_regs": 65536}
NAME = "NVIDIA H200"


class Driver:
    """Triton's driver of an architecture without a device: enough to compile."""

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self.utils = self

    def get_device_properties(self, device: int) -> dict[str, int]:
        return PROPERTIES

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)


def launch_nothing() -> None:
    """For the rest of the process, Triton kernels compile and do not run."""
    from triton.runtime.jit import JITFunction

    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **meta: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=True, **meta)

    JITFunction.run = compile_only


def pretend(capability: int) -> None:
    """For the rest of the process. capability: 90 for SM90. Call before FLA is imported, which asks for the GPU."""
    import torch
    import triton
    from torch.overrides import TorchFunctionMode

    class OnCPU(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            def moved(x: Any) -> Any:
                return torch.device("cpu") if isinstance(x, str | torch.device) and str(x).startswith("cuda") else x

            if function is torch.Tensor.cuda:
                return args[0]
            return function(*map(moved, args), **{key: moved(x) for key, x in (kwargs or {}).items()})

    class Generator(torch.Generator):
        def __new__(cls, device: Any = "cpu") -> Any:
            return super().__new__(cls)

    launch_nothing()
    triton.runtime.driver.set_active(Driver(capability))
    torch.Generator = Generator
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_name = lambda *device: NAME
    torch.cuda.get_device_capability = lambda *device: divmod(capability, 10)
    torch.cuda.synchronize = torch.cuda.empty_cache = lambda *device: None
    OnCPU().__enter__()
