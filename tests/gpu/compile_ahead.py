"""Compiles what the GPU tests launch through PyTorch, on a machine without a GPU, into a Triton cache to take to one.

    TRITON_HOME=~/ahead python tests/gpu/compile_ahead.py 90 tests/gpu/test_replay.py [-n 2 -k ...]     # for SM90

benchmarks/without_gpu.py says which machines such a cache serves. Tests run with asserts left out and outputs of zeros,
so that each goes on to its last launch. A test that needs real numbers before that, or goes through JAX, ends early,
which is no failure here: what it would have launched later is compiled on the GPU machine as ever.
"""

import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]


def pytest_configure(config):
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import torch
    import without_gpu

    from jlaqat.torch_bridge import run

    launched = run.torch_run

    def zeros(launch, *, poison=False):
        """NaN, the poison, would end a test at its first comparison."""
        outputs = launched(launch)
        return {name: x if name in launch.in_place else x.zero_() for name, x in outputs.items()}

    without_gpu.pretend(int(os.environ["JLAQAT_COMPILE_AHEAD"]))
    run.torch_run = zeros
    torch.testing.assert_close = lambda *args, **kwargs: None


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
