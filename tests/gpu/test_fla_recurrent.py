"""Decoding without rounding beside FLA's fused recurrent ops, each against float64. Only ours has a backward."""

import warnings

import jax
import jax.numpy as jnp
import kernel_oracle as oracle
import numpy as np
import pytest
import torch
from kernel_checks import check

import jlaqat
from jlaqat import DecodePolicy
from jlaqat.spec import DeltaQuant
from jlaqat.testing import make_inputs
from jlaqat.torch_bridge import delta_rule_decode as bridge_decode

# Grouped heads, columns that are no power of two, a state that the tokens start from.
SIZES = dict(B=2, T=70, H=2, HV=4, K=128, V=96)


def operands(gate, dtype):
    """(operands by name, cotangent of o) as torch CPU tensors; g and the state float32. A carry passes no gradient."""
    x = {name: torch.from_numpy(a) for name, a in make_inputs(1, gate=gate, **SIZES).items()}
    x |= {name: x[name].to(dtype) for name in ("q", "k", "v", "beta")}
    return x, torch.randn(x["v"].shape, generator=torch.Generator().manual_seed(7)).to(dtype)


def exact(x, do):
    """{name: float64} of o, the final state and every gradient."""
    leaves = [a.double().requires_grad_() for a in x.values()]
    *rows, state = leaves
    scale = SIZES["K"] ** -0.5
    o, final = oracle.delta_rule(*rows, scale=scale, initial_state=state, quant=DeltaQuant())
    gradients = torch.autograd.grad(o, leaves, do.double())
    return {"o": o.detach(), "final_state": final.detach()} | {f"d{n}": d for n, d in zip(x, gradients, strict=True)}


def fla(x, gate):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what it would rather find on the machine
        from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule
        from fla.ops.kda import fused_recurrent_kda

        op = fused_recurrent_kda if gate == "kda" else fused_recurrent_gated_delta_rule
        o, final = op(**{name: a.cuda() for name, a in x.items()}, output_final_state=True)
    return {"o": o.cpu(), "final_state": final.cpu()}


def through_jax(x, do):
    def as_jax(a):
        return jnp.asarray(a.float().numpy(), str(a.dtype).removeprefix("torch."))

    @jax.jit
    def run(x, do):
        def call(x):
            rows, state = {name: a for name, a in x.items() if name != "initial_state"}, x["initial_state"]
            o, carry = jlaqat.delta_rule_decode(**rows, state=state, quant=DecodePolicy(), backend="triton")
            return o, carry.state()

        o, vjp, final = jax.vjp(call, x, has_aux=True)
        return {"o": o, "final_state": final} | {f"d{name}": d for name, d in vjp(do)[0].items()}

    results = run({name: as_jax(a) for name, a in x.items()}, as_jax(do))
    return {name: torch.from_numpy(np.array(a.astype(jnp.float32))) for name, a in results.items()}


def through_torch(x, do):
    leaves = {name: a.cuda().requires_grad_() for name, a in x.items()}
    o, carry = bridge_decode(**leaves, output_final_state=True)
    gradients = torch.autograd.grad(o, list(leaves.values()), do.cuda())
    results = {"o": o, "final_state": carry.state()} | {f"d{n}": d for n, d in zip(leaves, gradients, strict=True)}
    return {name: a.detach().cpu() for name, a in results.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gate", ["gdn", "kda"])
def test_all_are_near_float64(gate, dtype):
    x, do = operands(gate, dtype)
    wanted = exact(x, do)
    for results in (through_jax(x, do), through_torch(x, do), fla(x, gate)):
        check({name: (a, wanted[name]) for name, a in results.items()}, dtype)
