"""The kernels behind `delta_rule_decode` as far as one can tell without a GPU: what is launched, what is refused."""

import collections
import functools
import os
import sys

import jax
import jax.extend
import jax.numpy as jnp
import pytest

pytest.importorskip("triton")
pytest.importorskip("jax_triton")

sys.path.insert(0, os.path.dirname(__file__))

from kernel_launches import kernel_names

import jlaqat
from jlaqat import DecodePolicy, QuantSpec, decode_policy, decode_triton, kernel_calls
from jlaqat.testing import make_inputs

SIZES = dict(B=2, H=1, HV=2, K=16, V=40)
FP8 = DecodePolicy(state=QuantSpec.fp8(block_v=16))


def operands(gate, T):
    x = make_inputs(0, gate=gate, T=T, **SIZES)
    return {name: jnp.asarray(a) for name, a in x.items() if name != "initial_state"}, jnp.asarray(x["initial_state"])


def launches(jaxpr):
    """Kernel launches of a jaxpr by name, loops counted once."""
    return collections.Counter(kernel_names(jaxpr))


@pytest.mark.parametrize(("gate", "T", "policy"), [("gdn", 70, FP8), ("kda", 3, DecodePolicy())], ids=["gdn", "kda"])
def test_a_gradient_launches_a_forward_and_runs_segments_again(gate, T, policy):
    x, state = operands(gate, T)

    def loss(x, state):
        o, carry = jlaqat.delta_rule_decode(**x, state=state, quant=policy)
        return o.sum() + carry.values.astype(jnp.float32).sum()

    with jlaqat.compile_for(90):
        forward = launches(jax.make_jaxpr(loss)(x, state).jaxpr)
        both = launches(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(x, state).jaxpr)
        shapes = jax.eval_shape(jax.grad(loss, argnums=(0, 1)), x, state)
    assert forward == {"recurrent_forward": 1}
    assert both["recurrent_forward"] == 2 and both["recurrent_backward"] == 1
    assert jax.tree.map(lambda a: (a.shape, a.dtype), shapes) == jax.tree.map(lambda a: (a.shape, a.dtype), (x, state))


def test_a_gradient_with_every_state_kept_runs_nothing_twice():
    """Whatever the sequences: one launch a direction, and the sums over a head's programs."""
    x, state = operands("gdn", 70)

    def loss(x, state, **bounds):
        return jlaqat.delta_rule_decode(**x, state=state, quant=FP8, checkpoint_every=1, **bounds)[0].sum()

    for bounds in ({}, {"lengths": jnp.array([70, 3])}):
        with jlaqat.compile_for(90):
            jaxpr = jax.make_jaxpr(functools.partial(jax.grad(loss, argnums=(0, 1)), **bounds))(x, state).jaxpr
        names = kernel_names(jaxpr)
        assert names[:2] == ["recurrent_forward", "recurrent_backward"] and set(names[2:]) == {"group_sum"}
        assert "while" not in str(jaxpr)


@pytest.mark.parametrize("every", [1, 64])
def test_tokens_of_16_bits_are_not_copied_to_float32(every):
    """Kernels read them as they are, and o and gradients of the same dtype come back from launches."""
    x, state = operands("gdn", 70)
    x = {name: a if name == "g" else a.astype(jnp.bfloat16) for name, a in x.items()}

    def loss(x):
        o, _ = jlaqat.delta_rule_decode(**x, state=state, quant=FP8, checkpoint_every=every, backend="triton")
        return o.astype(jnp.float32).sum(), o

    def converted(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "convert_element_type":
                yield equation.invars[0].aval.dtype, equation.invars[0].aval.shape
            for inner in jax.extend.core.jaxprs_in_params(equation.params):
                yield from converted(inner)

    with jlaqat.compile_for(90):
        jaxpr = jax.make_jaxpr(jax.grad(loss, has_aux=True))(x).jaxpr
        gradients, o = jax.eval_shape(jax.grad(loss, has_aux=True), x)
    assert jax.tree.map(lambda a: a.dtype, gradients) == jax.tree.map(lambda a: a.dtype, x)
    assert o.dtype == jnp.bfloat16
    found = [shape for dtype, shape in converted(jaxpr) if dtype == jnp.bfloat16]
    assert found == [o.shape]  # the loss's own


def test_a_step_is_one_launch_and_keeps_codes():
    x, state = operands("gdn", 1)
    with jlaqat.compile_for(90):
        row = [a[:, 0] for a in x.values()]
        carry = jax.eval_shape(lambda s: jlaqat.delta_rule_decode(**x, state=s, quant=FP8)[1], state)
        jaxpr = jax.make_jaxpr(lambda c, *row: jlaqat.delta_rule_step(*row, c, quant=FP8))(carry, *row)
    assert launches(jaxpr.jaxpr) == {"recurrent_forward": 1}
    assert carry.values.dtype == jnp.float8_e4m3fn and carry.scale.shape == (2, 2, 3)


@pytest.mark.parametrize(
    ("policy", "more", "words"),
    [
        (DecodePolicy.preset("flashinfer_cast"), {}, "mode='handoff'"),
        (DecodePolicy.preset("serving", ring_dtype="float32", factor_qdq=True), {}, "not by block_v=64"),
        (DecodePolicy(state=QuantSpec.fp8(), quantize_initial=False), {}, "quantize_initial=True"),
        (DecodePolicy(state=QuantSpec.int8(rounding="half_away")), {}, "to nearest or stochastically"),
        (DecodePolicy(state=QuantSpec.nvfp4()), {}, "rounded state|nvfp4"),
    ],
)
def test_what_the_kernels_refuse(policy, more, words):
    x, state = operands("gdn", 3)
    with jlaqat.compile_for(90), pytest.raises(NotImplementedError, match=words):
        jlaqat.delta_rule_decode(**x, state=state, quant=policy, backend="triton", **more)


def test_without_a_gpu_the_reason_is_named(monkeypatch):
    monkeypatch.setattr(kernel_calls, "device_capability", lambda: 0)  # wherever the test runs
    x, state = operands("gdn", 3)
    with pytest.raises(NotImplementedError, match="needs an NVIDIA GPU.*backend='xla'"):
        jlaqat.delta_rule_decode(**x, state=state, quant=FP8, backend="triton")


def test_a_common_prefix_leaves_the_rest_to_the_kernels():
    x, state = operands("gdn", 70)

    def call(x):
        return jlaqat.delta_rule_decode(**x, state=state, quant=FP8, prefix_lengths=64)

    with jlaqat.compile_for(90):
        counts = launches(jax.make_jaxpr(call)(x).jaxpr)
    assert counts["recurrent_forward"] == 1 and counts["chunk_state_forward"] >= 1


def test_sequences_of_any_lengths_are_one_launch():
    """Prefixes of their own, padding, packed rows; what is not known before it runs too."""
    x, state = operands("kda", 70)
    both = ["recurrent_forward", "recurrent_forward", "recurrent_backward"]

    def loss(x, state, bounds):
        o, carry = jlaqat.delta_rule_decode(**x, state=state, quant=FP8, backend="triton", **bounds)
        return o.sum(), carry.position

    def names(x, state, bounds):
        with jlaqat.compile_for(90):
            jaxpr = jax.make_jaxpr(jax.grad(loss, has_aux=True))(x, state, bounds).jaxpr
        return [name for name in kernel_names(jaxpr) if name.startswith("recurrent")]

    assert names(x, state, {"prefix_lengths": jnp.array([0, 64]), "lengths": jnp.array([70, 65])}) == both
    packed = {name: a[:1] for name, a in x.items()}
    assert names(packed, state, {"cu_seqlens": jnp.array([0, 0, 70])}) == both


def test_presets_that_the_kernels_refuse():
    """`auto` decodes these on xla."""
    reasons = {
        name: decode_triton.not_taken(preset.policy, 128, jnp.bfloat16)
        for name, preset in decode_policy.PRESETS.items()
    }
    refused = {name: reason for name, reason in reasons.items() if reason}
    assert set(refused) == {"sglang_fp8", "flashinfer_cast"}
    assert refused["sglang_fp8"].endswith("to the format's maximum, not e4m3, tile K×32, amax to 240")
    assert refused["flashinfer_cast"].endswith("not in mode='handoff'")
