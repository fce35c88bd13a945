"""The Triton backend's op on several devices, simulated: launches fall into shards. And lowering ahead of time.

tests/cuda_lowering.py, in its own process, lowers and exports for CUDA.
"""

import importlib.util
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

pytest.importorskip("triton")
pytest.importorskip("jax_triton")

sys.path.insert(0, os.path.dirname(__file__))

from kernel_launches import BACKWARD, FORWARD, FP8, as_dict, collectives, kernel_names, op_loss, shapes

from jlaqat import triton_backend
from jlaqat.chunked import Inputs
from jlaqat.kernel_calls import compile_for
from jlaqat.kernels import pipeline
from jlaqat.kernels.call import Gradients, Output, Residuals
from jlaqat.spec import DeltaQuant
from jlaqat.testing import make_inputs
from jlaqat.triton_backend import delta_rule_triton


def stand_in_forward(run, inputs, options, with_residuals=True):
    """Shapes and independence of the pipeline's, in a few jnp operations that XLA does not see into here."""
    q, k, v, g, beta, state, _ = inputs
    (b, t, h, K), hv = q.shape, v.shape[2]
    seen.append(q.shape[:3] + v.shape[2:3])
    repeated = jnp.repeat(q * k, hv // h, 2)
    decay = jnp.exp(g if g.ndim == 4 else g[..., None])
    o = v * (repeated * decay).sum(-1)[..., None] * beta[..., None]
    final_state = state * decay.sum((1, 3))[..., None, None]
    rows = repeated.reshape(b * t, hv, K)
    codes = jnp.zeros((b * -(-t // 64), hv, K, v.shape[3]), jnp.uint8)
    return Output(o, final_state, Residuals(rows, rows, None, codes, None) if with_residuals else None)


def stand_in_backward(run, inputs, residuals, do, dfinal, options):
    q, k, v, g, beta, state, _ = inputs
    (b, t, h, K), hv = q.shape, v.shape[2]
    rows = residuals.x.reshape(b, t, h, hv // h, K).sum(3)
    by_head = do.sum(-1)
    dg = g * by_head.reshape(by_head.shape + (1,) * (g.ndim - 3))
    return Gradients(rows * 2, k * rows, do * v, dg, beta + dfinal.sum((2, 3))[:, None], dfinal * state)


@pytest.fixture
def stand_in(monkeypatch):
    """The stand-in for the kernels, and no trace of it afterwards."""
    monkeypatch.setattr(pipeline, "forward", stand_in_forward)
    monkeypatch.setattr(pipeline, "backward", stand_in_backward)
    triton_backend._forward.cache_clear()
    triton_backend._backward.cache_clear()
    seen.clear()
    yield
    triton_backend._forward.cache_clear()
    triton_backend._backward.cache_clear()


seen: list[tuple[int, ...]] = []


@pytest.mark.parametrize("gate", ["gdn", "kda"])
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_jit_with_sharded_operands_launches_on_shards(gate, packed, stand_in):
    """A launch is opaque to XLA, which would gather its operands; the op's own rule keeps batch and heads cut."""
    sizes = dict(B=1, num_sequences=3) if packed else dict(B=4)
    x = make_inputs(1, gate=gate, T=70, H=2, HV=4, K=16, V=16, **sizes)
    cu = np.array([0, 3, 70, 70], np.int32) if packed else None
    b, tokens = (None, (1, 70, 1, 2)) if packed else ("b", (1, 70, 1, 2))
    mesh = jax.make_mesh((4, 2), ("b", "h"), axis_types=(AxisType.Auto,) * 2)
    specs = {name: P(b, None, "h") for name in x} | {"initial_state": P(b, "h")}
    placed = {name: jax.device_put(a, NamedSharding(mesh, specs[name])) for name, a in x.items()}

    def run(x, cu):
        def loss(x):
            if packed:  # the stand-in scales states by rows
                x = x | {"initial_state": x["initial_state"][:1]}
            o, final_state = delta_rule_triton(Inputs(**x), cu, FP8, 0.2, compute_capability=90)
            return jnp.sum(o**2) + jnp.sum(final_state**2), (o, final_state)

        return jax.grad(loss, has_aux=True)(x)

    whole = jax.jit(run)(x, cu)
    seen.clear()
    compiled = jax.jit(run).lower(placed, cu).compile()
    assert tokens in seen
    assert not collectives(compiled)
    got = compiled(placed, cu)
    for a, c in zip(jax.tree.leaves(got), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(a, c, rtol=1e-5, atol=1e-6)
    assert got[1][0].sharding.spec == specs["v"]


@pytest.mark.parametrize("kda", [False, True], ids=["gdn", "kda"])
@pytest.mark.parametrize("quant", [DeltaQuant(), FP8], ids=["plain", "fp8"])
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_what_the_kernels_keep_fits_the_rule(kda, quant, packed):
    """The real pipeline, lowered for CUDA on 8 devices: Shardy takes the rule of either direction."""
    inputs = shapes(B=1 if packed else 4, T=70, H=2, HV=4)
    if kda:
        inputs = inputs._replace(g=jax.ShapeDtypeStruct((*inputs.g.shape, 32), jnp.float32))
    mesh = jax.make_mesh((4, 2), ("b", "h"), axis_types=(AxisType.Auto,) * 2)
    b = None if packed else "b"
    specs = Inputs(*[P(b, None, "h")] * 5, P(b, "h"))
    placed = jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)), inputs, specs
    )
    cu_seqlens = jnp.array([0, 70], jnp.int32) if packed else None

    def run(inputs):
        o, final_state = delta_rule_triton(inputs, cu_seqlens, quant, 0.2, compute_capability=90)
        return jnp.sum(o.astype(jnp.float32) ** 2) + jnp.sum(final_state)

    text = jax.jit(jax.grad(run)).trace(placed).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@CustomSPMDPartitioning") == 2
    assert text.count("sdy.sharding_rule") == 2


def test_rows_of_packed_tokens_stay_on_their_devices(stand_in):
    """Data parallelism over packed rows: a vmap over rows that lie on several devices."""
    x = make_inputs(1, B=4, T=70, H=2, HV=4, K=16, V=16)
    rows = {name: a[:, None] for name, a in x.items()}
    cu = np.array([[0, 70], [0, 64], [0, 3], [0, 1]], np.int32)
    mesh = jax.make_mesh((4, 2), ("b", "h"), axis_types=(AxisType.Auto,) * 2)
    specs = {name: P("b", None, None, "h") for name in x} | {"initial_state": P("b", None, "h")}
    placed = {name: jax.device_put(a, NamedSharding(mesh, specs[name])) for name, a in rows.items()}
    placed_cu = jax.device_put(cu, NamedSharding(mesh, P("b")))

    def run(x, cu):
        def loss(x):
            call = jax.vmap(lambda x, cu: delta_rule_triton(Inputs(**x), cu, FP8, 0.2, compute_capability=90))
            return sum(jnp.sum(a**2) for a in call(x, cu))

        return jax.grad(loss)(x)

    whole = jax.jit(run)(rows, cu)
    seen.clear()
    compiled = jax.jit(run).lower(placed, placed_cu).compile()
    assert (1, 70, 1, 2) in seen
    assert not collectives(compiled)
    got = compiled(placed, placed_cu)
    for a, c in zip(jax.tree.leaves(got), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(a, c, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"q": P(), "k": P()}, (4, 70, 2, 4)),  # more devices than key heads
        ({"q": P("x"), "v": P(None, None, "x")}, (2, 70, 2, 4)),  # one axis twice
        ({"q": P(None, None, None, "y")}, (4, 70, 2, 4)),  # something else is cut
    ],
)
def test_operands_that_are_cut_otherwise_are_moved(changes, wanted, stand_in):
    """Never an error and never wrong: what cannot stay cut is gathered first."""
    x = make_inputs(1, B=4, T=70, H=2, HV=4, K=16, V=16)
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    heads = {name: P(None, None, "y") for name in ("v", "g", "beta")} | {"initial_state": P(None, "y")}
    specs = (dict.fromkeys(x, P()) | heads if "k" in changes else dict.fromkeys(x, P())) | changes
    placed = {name: jax.device_put(a, NamedSharding(mesh, specs[name])) for name, a in x.items()}

    def run(x):
        return delta_rule_triton(Inputs(**x), None, FP8, 0.2, compute_capability=90)

    whole = jax.jit(run)(x)
    got = jax.jit(run)(placed)
    assert set(seen) == {(4, 70, 2, 4), wanted}
    for a, c in zip(got, whole, strict=True):
        np.testing.assert_allclose(a, c, rtol=1e-5, atol=1e-6)


def test_shard_map_over_batch_and_heads_has_the_right_types():
    """Each device launches on its shard; what is the same on all of them has its gradients summed."""
    inputs = as_dict(shapes(B=4, H=2, HV=4))
    specs = {name: P("b", None, "h") for name in inputs} | {"initial_state": P("b", "h"), "q": P(None, None, "h")}
    inputs["q"] = jax.ShapeDtypeStruct((1, *inputs["q"].shape[1:]), inputs["q"].dtype)
    mesh = jax.make_mesh((4, 2), ("b", "h"), axis_types=(AxisType.Auto,) * 2)
    with compile_for(90):
        run = jax.shard_map(jax.grad(op_loss), mesh=mesh, in_specs=(specs,), out_specs=specs)
        jaxpr, gradients = jax.make_jaxpr(run, return_shape=True)(inputs)
    assert {name: x.shape for name, x in gradients.items()} == {name: x.shape for name, x in inputs.items()}
    assert kernel_names(jaxpr.jaxpr) == [*FORWARD, *BACKWARD, "group_sum", "group_sum"]
    assert "psum" in str(jaxpr)


@pytest.mark.parametrize("gate", ["gdn", "kda"])
def test_explicit_mesh_launches_on_shards(gate):
    """Where the types say how operands are cut, the op is a shard_map, and its results are cut in the same way."""
    mesh = jax.make_mesh((4, 2), ("b", "h"), axis_types=(AxisType.Explicit,) * 2)
    with compile_for(90), jax.set_mesh(mesh):
        x = make_inputs(1, gate=gate, B=4, T=70, H=2, HV=4, K=16, V=16)
        specs = {name: P("b", None, "h") for name in x} | {"initial_state": P("b", "h")}
        placed = {name: jax.device_put(a, specs[name]) for name, a in x.items()}
        jaxpr, gradients = jax.make_jaxpr(jax.grad(op_loss), return_shape=True)(placed)
        assert "shard_map" in str(jaxpr)
        assert {name: g.sharding.spec[:3] for name, g in gradients.items()} == {
            name: tuple(jax.typeof(a).sharding.spec)[:3] for name, a in placed.items()
        }
        with pytest.raises(ValueError, match="only batch and heads can be cut"):
            op_loss(placed | {"v": jax.device_put(x["v"], P("b", None, None, "h"))})
        with pytest.raises(ValueError, match="cut by different mesh axes, 'b' and 'h'"):
            op_loss(placed | {"beta": jax.device_put(x["beta"], P("h"))})


# ------------------------------------------------------------------ lowering


@pytest.mark.skipif(importlib.util.find_spec("jax_cuda13_plugin") is None, reason="jax-cuda13-plugin is not installed")
def test_a_jitted_step_lowers_and_exports_for_cuda_without_a_gpu():
    script = pathlib.Path(__file__).with_name("cuda_lowering.py")
    done = subprocess.run(
        [sys.executable, str(script)], env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.split() == ["lowered", "exported"] * 2
