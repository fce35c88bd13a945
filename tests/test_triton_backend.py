"""The Triton backend where there is no GPU: what it says and what it would launch. Shards: test_triton_shards.py."""

import functools
import importlib.util
import os
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton")
pytest.importorskip("jax_triton")

sys.path.insert(0, os.path.dirname(__file__))

from compiled_variants import ARCHITECTURES
from kernel_launches import BACKWARD, FORWARD, FP8, as_dict, kernel_names, op_loss, shapes

import jlaqat
from jlaqat import backends, kernel_calls
from jlaqat.chunked import Inputs
from jlaqat.kernel_calls import compile_for
from jlaqat.spec import DeltaQuant, QuantSpec
from jlaqat.testing import make_inputs
from jlaqat.triton_backend import delta_rule_triton, why_not


def test_why_not_names_what_stands_in_the_way():
    assert "JAX runs on 'cpu'" in str(why_not(shapes(), FP8))
    for architecture in ARCHITECTURES:
        assert why_not(shapes(), FP8, compute_capability=architecture) is None
    assert "SM75" in str(why_not(shapes(), FP8, compute_capability=75))
    assert "K=8" in str(why_not(shapes(K=8), FP8, compute_capability=90))
    assert "float64" in str(why_not(shapes(dtype="float64"), FP8, compute_capability=90))
    stochastic = DeltaQuant(state=QuantSpec.fp8(rounding="stochastic"))
    assert "rounding='stochastic'" in str(why_not(shapes(), stochastic, compute_capability=90))


@pytest.mark.skipif(importlib.util.find_spec("jax_cuda13_plugin") is None, reason="jax-cuda13-plugin is not installed")
@pytest.mark.parametrize("gate", ["gdn", "kda"])
@pytest.mark.parametrize("architecture", [100, 120])
def test_auto_lowers_rounded_states_for_blackwell(architecture, gate):
    """Every kernel of a gradient is compiled there by Triton, though no such GPU is here."""
    x = shapes(B=1, T=64, HV=1)
    if gate == "kda":
        x = x._replace(g=jax.ShapeDtypeStruct(x.k.shape, jnp.float32))
    with compile_for(architecture):
        traced = jax.jit(jax.grad(op_loss)).trace(as_dict(x))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@triton_kernel_call_ffi") == len(kernel_names(traced.jaxpr.jaxpr)) > 0


@pytest.mark.parametrize(
    ("device", "capability"),
    [({"compute_capability": "9.0"}, 90), ({"compute_capability": "12.1"}, 121), ({"compute_capability": "gfx942"}, 0)]
    + [({}, 0)],
)
def test_compute_capability_of_devices_nvidia_s_and_others(device, capability, monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: [types.SimpleNamespace(**device)])
    assert kernel_calls.device_capability.__wrapped__() == capability


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
    monkeypatch.setattr("jlaqat.kernel_calls.device_capability", lambda: 90)
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
