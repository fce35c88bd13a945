"""Shared set-up: eight simulated CPU devices, and a fixture under which implicit promotion is an error."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import pytest


@pytest.fixture
def strict_promotion():
    """No silent change of dtype or rank inside our own maths (Flax and Optax do not hold to this)."""
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture(scope="module")
def compile_quickly(request, tmp_path_factory):
    """For tests that run a program a few times: compiled without optimisations, and repeated ones from a cache.

    Only in the fast set (`make test`): slow tests are compiled as users' programs are, and so are all tests of the op
    in `make test-slow`.
    """
    if request.config.getoption("-m") != "not slow":
        yield
        return
    from jax.experimental.compilation_cache import compilation_cache

    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("programs")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
    compilation_cache.reset_cache()


@pytest.fixture
def x64():
    """float64 for references and for the op under jax_enable_x64."""
    with jax.enable_x64(True):
        yield


def _by_pallas(f, *arrays):
    """f inside a Pallas kernel (interpreted), on whole arrays."""
    from jax.experimental import pallas as pl

    result = jax.eval_shape(f, *arrays)

    def kernel(*refs):
        refs[-1][...] = f(*(ref[...] for ref in refs[:-1]))

    return pl.pallas_call(kernel, out_shape=result, interpret=True)(*arrays)


def _stacked(f):
    return lambda *arrays: jnp.stack([f(*row) for row in zip(*arrays)])


WAYS = {
    "eager": _stacked,
    "jit": lambda f: jax.jit(_stacked(f)),
    "vmap": lambda f: jax.jit(jax.vmap(f)),
    "scan": lambda f: jax.jit(lambda *arrays: jax.lax.scan(lambda c, row: (c, f(*row)), 0, arrays)[1]),
    "pallas": lambda f: jax.jit(_stacked(lambda *row: _by_pallas(f, *row))),
}


@pytest.fixture(params=WAYS)
def run(request):
    """`run(f)(*arrays)` maps f over the arrays' first axis in one of the settings that must give equal bits."""
    return WAYS[request.param]
