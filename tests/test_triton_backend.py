"""The Triton backend where there is no GPU: what it says, and what it would launch."""

import importlib.util

import jax
import jax.extend
import jax.numpy as jnp
import pytest

pytest.importorskip("triton")
pytest.importorskip("jax_triton")

from jlaqat.chunked import Inputs
from jlaqat.spec import DeltaQuant, QuantSpec
from jlaqat.triton_backend import delta_rule_triton, why_not

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
BACKWARD = ["wy_recompute", "chunk_state_backward", "chunk_output_backward", "intra_chunk_backward"]


def loss(inputs, quant=FP8):
    o, final_state = delta_rule_triton(inputs, None, quant, 0.2, compute_capability=90)
    return jnp.sum(o.astype(jnp.float32) ** 2) + jnp.sum(final_state)


def test_launches_of_a_gradient():
    """Rounded states are saved: one scan a direction. Unrounded ones are walked again. HV > H adds two group sums."""
    names = kernel_names(jax.make_jaxpr(jax.grad(loss))(shapes()).jaxpr)
    assert names == [*FORWARD, *BACKWARD, "group_sum", "group_sum"]
    plain = kernel_names(jax.make_jaxpr(jax.grad(lambda x: loss(x, DeltaQuant())))(shapes(HV=1)).jaxpr)
    assert plain == [*FORWARD, BACKWARD[0], "chunk_state_forward", *BACKWARD[1:]]
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


def test_vmap_over_packed_sequences_is_refused():
    inputs = Inputs(*(jax.ShapeDtypeStruct((3, *x.shape), x.dtype) for x in shapes(B=1)))
    cu_seqlens = jnp.array([0, 100], jnp.int32)

    def call(x):
        return delta_rule_triton(x, cu_seqlens, FP8, 0.2, compute_capability=90)

    with pytest.raises(NotImplementedError, match="cu_seqlens"):
        jax.eval_shape(jax.vmap(call), inputs)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("jax_cuda13_plugin") is None, reason="jax-cuda13-plugin is not installed")
def test_a_gradient_lowers_for_cuda():
    lowered = jax.jit(jax.grad(loss)).trace(shapes()).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("triton_kernel_call") >= 6
