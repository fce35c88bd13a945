"""The Triton backend where there is no GPU: what it says, what it would launch, and how it falls into shards.

tests/cuda_lowering.py, in its own process, lowers and exports for CUDA.
"""

import functools
import importlib.util
import os
import pathlib
import subprocess
import sys
import types

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

pytest.importorskip("triton")
pytest.importorskip("jax_triton")

import jlaqat
from jlaqat import backends, triton_backend
from jlaqat.chunked import Inputs
from jlaqat.kernels import pipeline
from jlaqat.kernels.call import Gradients, Output, Residuals
from jlaqat.spec import DeltaQuant, QuantSpec
from jlaqat.testing import make_inputs
from jlaqat.triton_backend import compile_for, delta_rule_triton, why_not

FP8 = DeltaQuant(state=QuantSpec.fp8(block_v=16), w=QuantSpec.fp8())


def shapes(B=2, T=100, H=1, HV=2, K=32, V=16, dtype=jnp.bfloat16):
    def array(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, dtype)

    return Inputs(
        array(B, T, H, K),
        array(B, T, H, K),
        array(B, T, HV, V),
        array(B, T, HV, dtype=jnp.float32),
        array(B, T, HV),
        array(B, HV, K, V, dtype=jnp.float32),
    )


def test_why_not_names_what_stands_in_the_way():
    assert "JAX runs on 'cpu'" in str(why_not(shapes(), FP8))
    assert why_not(shapes(), FP8, compute_capability=90) is None
    assert "SM75" in str(why_not(shapes(), FP8, compute_capability=75))
    assert "K=8" in str(why_not(shapes(K=8), FP8, compute_capability=90))
    assert "float64" in str(why_not(shapes(dtype="float64"), FP8, compute_capability=90))
    stochastic = DeltaQuant(state=QuantSpec.fp8(rounding="stochastic"))
    assert "rounding='stochastic'" in str(why_not(shapes(), stochastic, compute_capability=90))


@pytest.mark.parametrize(
    ("device", "capability"),
    [({"compute_capability": "9.0"}, 90), ({"compute_capability": "12.1"}, 121), ({"compute_capability": "gfx942"}, 0)]
    + [({}, 0)],
)
def test_compute_capability_of_devices_nvidia_s_and_others(device, capability, monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: [types.SimpleNamespace(**device)])
    assert triton_backend.device_capability.__wrapped__() == capability


def kernel_names(jaxpr) -> list[str]:
    """Names of the Triton launches in a jaxpr, those of inner jaxprs included, in order."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "triton_kernel_call":
            found.append(equation.params["name"].removesuffix("_kernel"))
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            found += kernel_names(inner)
    return found


FORWARD = ["intra_chunk_forward", "chunk_state_forward"]
BACKWARD = ["decode_w", "chunk_state_backward", "chunk_backward"]


def loss(inputs, quant=FP8):
    o, final_state = delta_rule_triton(inputs, None, quant, 0.2, compute_capability=90)
    return jnp.sum(o.astype(jnp.float32) ** 2) + jnp.sum(final_state)


def test_launches_of_a_gradient():
    """Rounded states and w are saved: one scan a direction. Else both are made again. HV > H adds two group sums."""
    names = kernel_names(jax.make_jaxpr(jax.grad(loss))(shapes()).jaxpr)
    assert names == [*FORWARD, *BACKWARD, "group_sum", "group_sum"]
    plain = kernel_names(jax.make_jaxpr(jax.grad(lambda x: loss(x, DeltaQuant())))(shapes(HV=1)).jaxpr)
    assert plain == [*FORWARD, "wy_recompute", "chunk_state_forward", *BACKWARD[1:]]
    assert kernel_names(jax.make_jaxpr(loss)(shapes()).jaxpr) == FORWARD


def test_vmap_folds_into_the_batch():
    """One launch of each kernel for a batch of calls, and gradients of the right shapes; shared operands are summed."""
    inputs = shapes()
    batched = Inputs(*(jax.ShapeDtypeStruct((3, *x.shape), x.dtype) for x in inputs))
    gradient = jax.grad(lambda x, g: jnp.sum(jax.vmap(lambda x: loss(x._replace(g=g)))(x)), argnums=(0, 1))
    jaxpr, shape = jax.make_jaxpr(gradient, return_shape=True)(batched, inputs.g)
    assert kernel_names(jaxpr.jaxpr) == [*FORWARD, *BACKWARD, "group_sum", "group_sum"]
    assert [x.shape for x in shape[0]] == [x.shape for x in batched]
    assert shape[1].shape == inputs.g.shape


def test_vmap_over_packed_calls_is_a_loop():
    """Shared and mapped operands, cu_seqlens of each call's own; a vmap of that is a longer loop."""
    inputs = Inputs(*(jax.ShapeDtypeStruct((3, *x.shape), x.dtype) for x in shapes(B=1)))

    def call(x, v, cu_seqlens):
        return delta_rule_triton(x._replace(v=v), cu_seqlens, FP8, 0.2, compute_capability=90)[0]

    mapped = jax.vmap(call, in_axes=(None, 0, 0))
    cu_seqlens = jax.ShapeDtypeStruct((3, 2), jnp.int32)
    jaxpr, o = jax.make_jaxpr(mapped, return_shape=True)(shapes(B=1), inputs.v, cu_seqlens)
    assert o.shape == inputs.v.shape
    assert kernel_names(jaxpr.jaxpr) == ["chunk_index", *FORWARD]
    twice = jax.ShapeDtypeStruct((2, *inputs.v.shape), inputs.v.dtype)
    jaxpr, o = jax.make_jaxpr(jax.vmap(mapped, in_axes=(None, 0, None)), return_shape=True)(
        shapes(B=1), twice, cu_seqlens
    )
    assert o.shape == twice.shape
    assert kernel_names(jaxpr.jaxpr) == ["chunk_index", *FORWARD]


def op_loss(x, **settings):
    o, final_state = jlaqat.delta_rule(**x, quant=FP8, **settings)
    return jnp.sum(o.astype(jnp.float32) ** 2) + jnp.sum(final_state)


def as_dict(inputs):
    return dict(inputs._asdict())


def test_launches_of_layers_in_a_scan_with_checkpoint():
    """A recomputed layer runs its forward kernels twice and its backward ones once, whatever the depth."""

    def layers(x, body):
        v, _ = jax.lax.scan(lambda v, _: (body(v, x), None), x["v"], length=5)
        return jnp.sum(v.astype(jnp.float32))

    def layer(v, x):
        return jlaqat.delta_rule(**x | {"v": v}, quant=FP8, backend="triton")[0]

    def names(body):
        return kernel_names(jax.make_jaxpr(jax.grad(lambda x: layers(x, body)))(as_dict(shapes(HV=1, V=32))).jaxpr)

    with compile_for(90):
        assert names(layer) == [*FORWARD, *BACKWARD]
        assert names(jax.checkpoint(layer)) == [*FORWARD, *FORWARD, *BACKWARD]


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


# ------------------------------------------------------------------ which backend


def test_auto_takes_triton_and_still_runs_where_there_is_no_gpu(caplog):
    """Traced for a GPU and lowered for the CPU, "auto" gives the xla backend's results and gradients."""
    x = make_inputs(1, T=70, H=1, HV=2, K=16, V=16)
    run = functools.partial(jax.value_and_grad(op_loss), x)
    wanted = jax.jit(functools.partial(run, backend="xla"))()
    backends._say_once.cache_clear()
    with compile_for(90), caplog.at_level("INFO", logger="jlaqat"):
        jaxpr = jax.make_jaxpr(run)()
        got = jax.jit(run)()
        got = jax.tree.map(np.asarray, got)
    assert kernel_names(jaxpr.jaxpr) == [*FORWARD, *BACKWARD, "group_sum", "group_sum"]
    assert [r.message for r in caplog.records] == ["backend='auto' runs delta_rule on 'triton' (kernels for SM90)"]
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert np.array_equal(a, b)


def test_auto_on_a_gpu_says_once_why_it_does_not_take_triton(caplog, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr("jlaqat.triton_backend.device_capability", lambda: 90)
    backends._say_once.cache_clear()
    x = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), make_inputs(1, T=5, K=8))
    stochastic = DeltaQuant(state=QuantSpec.fp8(rounding="stochastic"))
    with caplog.at_level("INFO", logger="jlaqat"):
        for _ in range(2):
            assert backends.choose("auto", Inputs(**x), FP8) == "xla"
            assert backends.choose("auto", shapes(), stochastic) == "xla"
            assert backends.choose("auto", shapes(), FP8) == "triton or xla"
            assert backends.choose("auto", shapes(), FP8, by_token=True) == "xla"
    messages = [r.message for r in caplog.records]
    assert len(messages) == 4
    assert "not on 'triton': K=8" in messages[0] and "rounding='stochastic'" in messages[1]
    assert "runs delta_rule on 'triton'" in messages[2] and "token by token" in messages[3]
    assert [r.levelname for r in caplog.records] == ["WARNING", "WARNING", "INFO", "WARNING"]


def test_triton_by_name_raises_before_any_work():
    with compile_for(90):
        with pytest.raises(NotImplementedError, match="cannot serve this call: K=8.*use backend='xla'"):
            jax.eval_shape(lambda x: jlaqat.delta_rule(**x, backend="triton"), make_inputs(1, T=5, K=8))
        with pytest.raises(NotImplementedError, match="not token by token. Use backend='xla'"):
            jlaqat.delta_rule_recurrent(**make_inputs(1, T=5, K=16), backend="triton")
        with pytest.raises(NotImplementedError, match="cadence=1"):
            quant = DeltaQuant(state=QuantSpec.fp8(cadence=1))
            jlaqat.delta_rule(**make_inputs(1, T=5, K=16), quant=quant, backend="triton")
    with compile_for(75), pytest.raises(NotImplementedError, match="the GPU is SM75.*SM80 or newer"):
        jlaqat.delta_rule(**make_inputs(1, T=5, K=16), backend="triton")


def test_a_layer_takes_the_backend_and_its_statistics_come_from_xla():
    """calibration and metrics run on the xla backend whatever the layer's backend is."""
    from flax import nnx

    with compile_for(90):
        layer = jlaqat.GatedDeltaNet(32, head_dim=16, num_heads=2, expand_v=1.0, backend="triton", rngs=nnx.Rngs(0))
        jlaqat.quantize(layer, jlaqat.load_recipe("state_w_fp8"))
        x = jnp.ones((1, 20, 32))
        graph, state = nnx.split(layer)
        jaxpr = jax.make_jaxpr(jax.grad(lambda x: jnp.sum(nnx.merge(graph, state)(x))))(x)
        assert kernel_names(jaxpr.jaxpr) == [*FORWARD, *BACKWARD]
        observe = functools.partial(
            jlaqat.delta_rule_observe, quant=DeltaQuant(state=QuantSpec.fp8()), backend="triton"
        )
        jaxpr, (_, _, stats) = jax.make_jaxpr(lambda x: observe(**x), return_shape=True)(make_inputs(1, T=5, K=16))
    assert stats["state"].count.shape == (2,) and kernel_names(jaxpr.jaxpr) == []


# ------------------------------------------------------------------ shards


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
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute")


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
    text = compiled.as_text()
    assert not [name for name in COLLECTIVES if name in text]
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
    assert not [name for name in COLLECTIVES if name in compiled.as_text()]
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
    assert done.stdout.split() == ["lowered", "exported"]
