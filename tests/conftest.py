"""Shared set-up: eight simulated CPU devices, and a fixture under which implicit promotion is an error."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax  # noqa: E402
import pytest  # noqa: E402


@pytest.fixture
def strict_promotion():
    """No silent change of dtype or rank inside our own maths (Flax and Optax do not hold to this)."""
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture
def x64():
    """float64 for references and for the op under jax_enable_x64."""
    with jax.enable_x64(True):
        yield
