"""Tests that need an NVIDIA GPU.

    JAX_PLATFORMS=cuda python3 -m pytest tests/gpu -n 8        # pytest-xdist; most of the time goes into compiling
    SHARD=0/8 JAX_PLATFORMS=cuda python3 -m pytest tests/gpu   # without it: every eighth test, in a process of its own

    python3 -m pytest tests/gpu --record FILE                  # a line a test; again: what has not passed (record.py)
    python3 tests/gpu/compile_ahead.py 90 tests/gpu            # without a GPU: a Triton cache to take to one

Processes share the GPU, so JAX takes memory as it needs it. References run on the CPU, and XLA does not tune products:
what the kernels are compared with then costs less to compile.
"""

import os
import pathlib
import sys

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0"
if os.environ.get("JAX_PLATFORMS") in (None, "", "cuda"):
    os.environ["JAX_PLATFORMS"] = "cuda,cpu"

import jax
import pytest

if jax.config.jax_platforms in (None, "", "cuda"):  # read when tests/conftest.py imported JAX
    jax.config.update("jax_platforms", "cuda,cpu")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[0]))  # record
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))  # kernel_oracle, kernel_checks

import record


def pytest_addoption(parser):
    parser.addoption("--record", help="JSON lines, one a test: those that passed on these sources are not run again")


def pytest_configure(config):
    if path := config.getoption("record", None):
        on_worker = hasattr(config, "workerinput")
        config.pluginmanager.register(record.Record(path, jax.devices()[0].device_kind, writes=not on_worker))
    # What torch says when its backward's thread is the first to use cuBLAS; it then does the right thing.
    config.addinivalue_line("filterwarnings", "ignore:Attempting to run cuBLAS:UserWarning")


def pytest_collection_modifyitems(config, items):
    shard, _, count = os.environ.get("SHARD", "0/1").partition("/")
    chosen = items[int(shard) :: int(count)]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        for item in items:
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU"))
