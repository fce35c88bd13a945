"""tests/gpu/sanitize.py launches every kernel there is: its runs walked on the CPU, where nothing is launched."""

import pathlib
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")
sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "benchmarks"))
sys.path.insert(0, str(pathlib.Path(__file__).parent / "gpu"))
sys.path.insert(0, str(pathlib.Path(__file__).parent))
import sanitize
import torch
from counters import kernel_names

from jlaqat.kernels import call


def zeros(launch):
    """What a launch would return, but for the numbers."""
    outputs = {name: torch.zeros(x.shape, dtype=getattr(torch, x.dtype)) for name, x in launch.outputs.items()}
    return outputs | {name: launch.inputs[name] for name in launch.in_place}


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_every_kernel_is_launched_by_a_run(tool, monkeypatch):
    monkeypatch.setattr(call, "triton_version", lambda: call.HOPPER_TRITON)  # or those for SM90 are left out
    heads = {name: sanitize.heads_under(tool, name) for name in sanitize.RUNS}
    launched = {name: sanitize.launch_all(name, zeros, "cpu", heads[name]) for name in sanitize.RUNS}
    assert sorted(set().union(*launched.values())) == kernel_names()
    assert not any(name.startswith("hopper") for name in launched["gdn-portable"] | launched["kda-portable"])
