"""For tests of calls that launch kernels: small calls of the delta rule, and what a program of launches is made of."""

import re
import zlib

import jax
import jax.extend
import jax.numpy as jnp

import jlaqat
from jlaqat.chunked import Inputs
from jlaqat.spec import DeltaQuant, QuantSpec

FP8 = DeltaQuant(state=QuantSpec.fp8(block_v=16), w=QuantSpec.fp8())
FORWARD = ["intra_chunk_forward", "chunk_state_forward"]
BACKWARD = ["decode_w", "chunk_state_backward", "chunk_backward"]
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute")


def kernel_names(jaxpr) -> list[str]:
    """Names of the Triton launches in a jaxpr, those of inner jaxprs included, in order."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "triton_kernel_call":
            found.append(equation.params["name"].removesuffix("_kernel"))
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            found += kernel_names(inner)
    return found


def launched(compiled) -> list[str]:
    """Names of the Triton launches in a compiled program for CUDA, in the order of its text.

    A launch's operand there is jax-triton's description of it, compressed and escaped; the kernel's name ends it.
    """
    found = []
    for escaped in re.findall(r'"triton_kernel_call_ffi".*?opaque = "((?:[^"\\]|\\.)*)"', compiled.as_text()):
        description = re.sub(
            rb"\\([0-9A-F]{2}|.)",
            lambda part: bytes.fromhex(part[1].decode()) if len(part[1]) == 2 else part[1],
            escaped.encode("latin1"),
        )
        name = re.search(rb"(\w+)_kernel$", zlib.decompress(description))
        assert name, "a launch without a name"
        found.append(name[1].decode())
    assert len(found) == compiled.as_text().count('custom_call_target="triton_kernel_call_ffi"')
    return found


def collectives(compiled) -> list[str]:
    """Kinds of communication between devices in a compiled program."""
    text = compiled.as_text()
    return [name for name in COLLECTIVES if name in text]


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


def op_loss(x, **settings):
    o, final_state = jlaqat.delta_rule(**x, quant=FP8, **settings)
    return jnp.sum(o.astype(jnp.float32) ** 2) + jnp.sum(final_state)


def as_dict(inputs):
    return dict(inputs._asdict())
