"""Kernels compiled through JAX are kept on disk, and taken from there by the next process."""

import importlib.util
import json
import pathlib

import jax
import jax.numpy as jnp
import pytest

import jlaqat
from jlaqat import compile_cache

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("triton", "jax_triton", "jax_cuda13_plugin")),
    reason="lowering for CUDA needs triton, jax-triton and jax-cuda13-plugin",
)


def lower():
    """A step of decoding, lowered as a new process would; what XLA is given, kernel included."""
    from jlaqat.kernels.recurrent import recurrent_forward_kernel

    getattr(recurrent_forward_kernel, "_jT_kernel_cache", {}).clear()  # jax-triton's, in memory
    q, g = jax.ShapeDtypeStruct((1, 1, 1, 16), jnp.float32), jax.ShapeDtypeStruct((1, 1, 1), jnp.float32)
    with jlaqat.compile_for(90):
        step = jax.jit(lambda q, g: jlaqat.delta_rule_decode(q, q, q, g, g, backend="triton")[0])
        return step.trace(q, g).lower(lowering_platforms=("cuda",)).as_text()


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """The modules that Triton compiled, with an empty cache."""
    from jax_triton import triton_lib

    real, modules = triton_lib.compile_ttir_inplace, []
    real = getattr(real, "uncached", real)

    def counted(module, *rest):
        modules.append(module)
        return real(module, *rest)

    monkeypatch.setattr(triton_lib, "compile_ttir_inplace", counted)
    monkeypatch.setenv("TRITON_HOME", str(tmp_path))
    return modules


def double_in_gluon():
    """A kernel whose threads take one number each; Triton's language would have them take eight."""
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl

    @gluon.jit
    def double_kernel(p_x, p_y):
        o = gl.arange(0, 1024, layout=gl.BlockedLayout([1], [32], [4], [0]))
        gl.store(p_y + o, gl.load(p_x + o) * 2)

    return double_kernel


def kept(tmp_path):
    return list(pathlib.Path(tmp_path).rglob(compile_cache.FILE))


def test_a_kernel_is_compiled_once(compiled, tmp_path):
    first = lower()
    assert len(compiled) == len(kept(tmp_path)) == 1
    assert lower() == first and len(compiled) == 1


def test_what_cannot_be_read_is_compiled_again(compiled, tmp_path):
    first = lower()
    (path,) = kept(tmp_path)
    whole = path.read_text()
    path.write_text(whole[: len(whole) // 2])
    assert lower() == first and len(compiled) == 2
    assert path.read_text() == whole


def test_the_cache_can_be_left_unread(compiled, monkeypatch):
    first = lower()
    monkeypatch.setenv("TRITON_ALWAYS_COMPILE", "1")
    assert lower() == first and len(compiled) == 2


def test_without_a_place_to_write_kernels_compile_and_a_warning_says_so(compiled, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_HOME", str(tmp_path / "file"))
    lower()
    assert len(compiled) == 1 and "cannot be written" in caplog.text


def test_installing_twice_changes_nothing(compiled):
    from jax_triton import triton_lib

    compile_cache.install()
    once = triton_lib.compile_ttir_inplace
    compile_cache.install()
    assert triton_lib.compile_ttir_inplace is once


def test_gluon_is_compiled_with_its_own_passes(compiled, tmp_path):
    from jlaqat.kernel_calls import run
    from jlaqat.kernels.launch import Buffer, Launch

    def double(x):
        outputs = {"p_y": Buffer((1024,), "float16")}
        return run(Launch(kernel=double_in_gluon(), grid=1, inputs={"p_x": x}, outputs=outputs, constants={}))["p_y"]

    with jlaqat.compile_for(90):
        x = jax.ShapeDtypeStruct((1024,), jnp.float16)
        jax.jit(double).trace(x).lower(lowering_platforms=("cuda",))
    assert len(compiled) == 1
    (path,) = kept(tmp_path)
    ptx = json.loads(path.read_text())["binary"]
    assert "ld.global.b16" in ptx and "ld.global.v4" not in ptx
