"""Lowers and exports a jitted training step through the Triton kernels for an NVIDIA GPU that is not there.

Run by test_triton_backend.py in its own process, since every kernel is compiled (to PTX, by Triton). Needs
jax-cuda13-plugin, which describes launches to XLA, and flatbuffers for the export.
"""

import re

import jax
import jax.numpy as jnp
from jax import export

import jlaqat
from jlaqat import DecodePolicy
from jlaqat.spec import DeltaQuant, QuantSpec

POLICY = DecodePolicy(state=QuantSpec.fp8(block_v=16))
FP8 = DeltaQuant(state=QuantSpec.fp8(block_v=16), w=QuantSpec.fp8())
LAUNCH = "triton_kernel_call_ffi"
B, T, H, HV, K, V = 2, 100, 1, 2, 16, 16


def step(x):
    """One descent step on v, donated."""

    def loss(v):
        o, final_state = jlaqat.delta_rule(**x | {"v": v}, quant=FP8)
        return jnp.sum(o.astype(jnp.float32) ** 2) + jnp.sum(final_state)

    return x | {"v": x["v"] - 0.1 * jax.grad(loss)(x["v"])}


def decode_step(x):
    """The same through the decoding kernels, and a token more."""

    def loss(v):
        inputs = {"state" if name == "initial_state" else name: a for name, a in (x | {"v": v}).items()}
        o, carry = jlaqat.delta_rule_decode(**inputs, quant=POLICY)
        return jnp.sum(o.astype(jnp.float32) ** 2), carry

    dv, carry = jax.grad(loss, has_aux=True)(x["v"])
    o, carry = jlaqat.delta_rule_step(*(x[name][:, 0] for name in ("q", "k", "v", "g", "beta")), carry, quant=POLICY)
    return x | {"v": x["v"] - 0.1 * dv}, o, jax.tree.leaves(carry)


def operands():
    def array(*shape, dtype="bfloat16"):
        return jax.ShapeDtypeStruct(shape, dtype)

    heads = dict(q=array(B, T, H, K), k=array(B, T, H, K), v=array(B, T, HV, V), beta=array(B, T, HV))
    gate, state = array(B, T, HV, dtype="float32"), array(B, HV, K, V, dtype="float32")
    return heads | {"g": gate, "initial_state": state}


def check(step, launches, aliased):
    jitted = jax.jit(step, donate_argnums=0)
    text = jitted.trace(operands()).lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall(f"@{LAUNCH}", text)) == launches, text
    # Every operand is handed on or replaced, and v's buffer takes the new v.
    assert text.count("tf.aliasing_output") == aliased, text
    print("lowered")

    allowed = export.DisabledSafetyCheck.custom_call(LAUNCH)
    exported = export.export(jitted, platforms=("cuda",), disabled_checks=[allowed])(operands())
    again = export.deserialize(exported.serialize())
    assert again.platforms == ("cuda",) and LAUNCH in str(again.mlir_module())
    assert [x.shape for x in again.out_avals] == [x.shape for x in jax.tree.leaves(jax.eval_shape(step, operands()))]
    for_cpu = export.export(jitted, platforms=("cpu",))(operands())
    assert LAUNCH not in str(for_cpu.mlir_module())
    print("exported")


with jlaqat.compile_for(90):
    check(step, launches=7, aliased=6)  # forward 2, backward 3; q's and k's group sums are two more, of one kernel
    check(decode_step, launches=11, aliased=6)  # forward; a segment again, three backward, five placed; the step
