"""Scales without divisions: the kernels' formula for every float32. On a GPU: tests/gpu/test_scales.py."""

import pathlib
import shutil
import subprocess

import pytest

SOURCE = pathlib.Path(__file__).with_name("exact_scales.c")


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_division_by_the_largest_codes_is_exact(tmp_path):
    program = tmp_path / "exact_scales"
    subprocess.run(["cc", "-O2", "-march=native", "-ffp-contract=off", "-o", program, SOURCE, "-lm"], check=True)
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.stdout.splitlines() == [f"{divisor}: {0x7F800001} tried, 0 differ" for divisor in (448, 127)]
    assert done.returncode == 0
