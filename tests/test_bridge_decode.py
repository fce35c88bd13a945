"""Decoding from PyTorch: tests/bridge_decode_interpreted.py in a process of its own, and what needs no interpreter."""

import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("jax_triton")

ROOT = pathlib.Path(__file__).resolve().parents[1]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}


@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_through_the_interpreter(which):
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += ["tests/bridge_decode_interpreted.py", "-m", which]
    environment = ENVIRONMENT | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout, done.stdout[-2000:]


def test_without_a_gpu_or_the_interpreter_the_remedy_is_named(monkeypatch):
    import torch

    from jlaqat.torch_bridge import delta_rule_decode

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # wherever the test runs
    q, gate = torch.zeros(1, 2, 1, 16), torch.zeros(1, 2, 1)
    with pytest.raises(RuntimeError, match="q is on cpu and there is no NVIDIA GPU.*TRITON_INTERPRET=1"):
        delta_rule_decode(q, q, q, gate, gate)


def test_the_package_is_light():
    """PyTorch and Triton come with the first name that is used; all names are there."""
    code = (
        "import sys, jlaqat.torch_bridge as b; print('torch' in sys.modules, 'triton' in sys.modules);"
        "print(all(callable(getattr(b, name)) and name in dir(b) for name in b.__all__), len(b.__all__))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.stdout.split() == ["False", "False", "True", "4"], done.stdout + done.stderr
