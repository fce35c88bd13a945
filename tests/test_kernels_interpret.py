"""Runs tests/kernels_interpreted.py in its own process: TRITON_INTERPRET changes Triton for the whole process."""

import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

ROOT = pathlib.Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("tests", "which"),
    [
        ("kernels_interpreted", ""),
        ("recurrent_interpreted", ""),
        ("token_blocks_interpreted", ""),
        ("decode_interpreted", "not slow"),
        pytest.param("decode_interpreted", "slow", marks=pytest.mark.slow),
        ("replay_interpreted", "not slow"),
        pytest.param("replay_interpreted", "slow", marks=pytest.mark.slow),
    ],
)
def test_kernels_through_the_interpreter(tests, which):
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"tests/{tests}.py", "-m", which]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout, done.stdout[-2000:]
