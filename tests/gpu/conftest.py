"""Tests that need an NVIDIA GPU: JAX_PLATFORMS=cuda python3 -m pytest tests/gpu."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))  # kernel_oracle, kernel_checks


def pytest_collection_modifyitems(items):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        for item in items:
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU"))
