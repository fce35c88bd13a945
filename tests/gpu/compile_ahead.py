"""Compiles what the GPU tests launch, on a machine without a GPU, into a Triton cache to take to one.

    TRITON_HOME=~/ahead python tests/gpu/compile_ahead.py 90 tests/gpu/test_replay.py [-n 2 -k ...]     # for SM90

benchmarks/without_gpu.py says which machines such a cache serves. Tests run with asserts left out and outputs of zeros,
so that each goes on to its last launch, through PyTorch or JAX. A test that needs real numbers or a real GPU before
that ends early, which is no failure here: what it would have launched later is compiled on the GPU machine as ever.
"""

import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]


def pytest_configure(config):
    capability = int(os.environ["JLAQAT_COMPILE_AHEAD"])
    sys.path.insert(0, str(ROOT / "benchmarks"))
    through_torch(capability)
    through_jax(capability)


def through_torch(capability):
    import torch
    import without_gpu

    from jlaqat.torch_bridge import run

    launched = run.torch_run

    def zeros(launch, *, poison=False):
        """NaN, the poison, would end a test at its first comparison."""
        outputs = launched(launch)
        return {name: x if name in launch.in_place else x.zero_() for name, x in outputs.items()}

    without_gpu.pretend(capability)
    run.torch_run = zeros
    torch.testing.assert_close = lambda *args, **kwargs: None


def through_jax(capability):
    """A launch is lowered for CUDA by itself, when it is traced, and its results are zeros on the CPU."""
    import jax
    import jax.numpy as jnp

    from jlaqat import kernel_calls, testing

    call = kernel_calls._triton_call

    def lowered(*, out_type, **arguments):
        arrays = {name: x for name, x in arguments.items() if isinstance(x, jax.Array)}
        rest = {name: x for name, x in arguments.items() if name not in arrays} | {"compute_capability": capability}
        launch = jax.jit(lambda arrays: call(out_type=out_type, **rest, **arrays))
        shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in arrays.items()}
        launch.trace(shapes).lower(lowering_platforms=("cuda",))
        return tuple(jnp.zeros(x.shape, x.dtype) for x in out_type)

    kernel_calls._triton_call = lowered
    kernel_calls.device_capability = lambda: capability
    testing.assert_close = lambda *args, **kwargs: None


def pytest_runtest_logreport(report):
    if report.failed and report.when == "call":
        print(f"\nended early: {report.nodeid}: {str(report.longrepr).splitlines()[-1]}", flush=True)


def main():
    capability, *arguments = sys.argv[1:]
    os.environ |= {
        "JLAQAT_COMPILE_AHEAD": str(int(capability)),
        "PYTHONOPTIMIZE": "1",  # no asserts
        "PYTHONPATH": f"{pathlib.Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}",
        "JAX_PLATFORMS": "cpu",
    }
    options = ["-q", "-p", "compile_ahead", "--assert=plain", "--tb=no", "-W", "ignore:ASSERTIONS ARE NOT"]
    os.execv(sys.executable, [sys.executable, "-m", "pytest", *options, *arguments])


if __name__ == "__main__":
    main()
