"""The JAX path of the kernels on a GPU: the same bits as the PyTorch runner, and the transformations around it."""

import functools

import jax
import jax.numpy as jnp
import kernel_oracle as oracle
import numpy as np
import pytest
import torch
from kernel_checks import cast, run_kernels
from kernel_launches import launched

import jlaqat
from jlaqat.chunked import Inputs
from jlaqat.kernel_calls import device_capability
from jlaqat.kernels.call import Options
from jlaqat.kernels.tuning import choose
from jlaqat.spec import DeltaQuant, QuantSpec
from jlaqat.testing import make_inputs
from jlaqat.triton_backend import delta_rule_triton, why_not

PLAIN = DeltaQuant()
FP8 = DeltaQuant(state=QuantSpec.fp8(), w=QuantSpec.fp8())


def to_jax(x):
    if x.dtype == torch.bfloat16:
        return jnp.asarray(x.view(torch.int16).cpu().numpy()).view(jnp.bfloat16)
    return jnp.asarray(x.cpu().numpy())


def same(x, y):
    """x (JAX) and y (torch) hold the same bits."""
    return np.array_equal(np.asarray(x.astype(jnp.float32)), y.float().cpu().numpy())


@pytest.mark.parametrize("kda", [False, True], ids=["gdn", "kda"])
def test_jax_and_torch_give_the_same_bits(kda):
    given = cast(oracle.make_inputs(1, b=2, t=150, h=2, hv=4, dk=64, dv=64, kda=kda, device="cuda"), torch.bfloat16)
    options = Options(scale=0.125, quant=FP8, hardware_fp8=device_capability() >= 89)
    out, grads, do, dfinal = run_kernels(given, options)
    inputs = Inputs(*(to_jax(x) for x in given[:6]))
    assert why_not(inputs, FP8) is None

    @jax.jit
    def both(inputs, do, dfinal):
        primal, pull = jax.vjp(lambda x: delta_rule_triton(x, None, FP8, 0.125), inputs)
        return primal, pull((do, dfinal))[0]

    (o, final), gradients = both(inputs, to_jax(do), to_jax(dfinal))
    assert same(o, out.o) and same(final, out.final_state)
    for name in Inputs._fields:
        assert same(getattr(gradients, name), getattr(grads, name)), name


def test_vmap_scan_and_checkpoint():
    """A batch of calls equals calls one by one; a remat'd scan over layers gives the plain loop's gradients."""
    given = cast(oracle.make_inputs(2, b=2, t=70, h=2, hv=2, dk=32, dv=32, kda=False, device="cuda"), torch.bfloat16)
    inputs = Inputs(*(to_jax(x) for x in given[:6]))
    quant = DeltaQuant(state=QuantSpec.fp8(block_v=32))

    def loss(inputs):
        o, final = delta_rule_triton(inputs, None, quant, 0.2)
        return jnp.sum(o.astype(jnp.float32) ** 2) + jnp.sum(final)

    stacked = jax.tree.map(lambda x: jnp.stack([x, x * 0.5]), inputs)
    batched = jax.jit(jax.vmap(jax.grad(loss)))(stacked)
    for i in range(2):
        one = jax.jit(jax.grad(loss))(jax.tree.map(lambda x, i=i: x[i], stacked))
        for x, y in zip(one, batched, strict=True):
            assert jnp.array_equal(x, y[i])

    def layers(v, remat):
        def layer(v, _):
            o, _ = delta_rule_triton(inputs._replace(v=v), None, quant, 0.2)
            return o, None

        return jnp.sum(jax.lax.scan(jax.checkpoint(layer) if remat else layer, v, length=3)[0].astype(jnp.float32) ** 2)

    plain, remat = (jax.jit(jax.grad(lambda v, r=r: layers(v, r)))(inputs.v) for r in (False, True))
    assert jnp.array_equal(plain, remat)
    assert jnp.isfinite(plain.astype(jnp.float32)).all()


# (gate, quant): a call's launches, those of them that a layer under checkpoint runs again, and the backward's.
LAUNCHES = {
    "gdn-fp8": (
        ["intra_chunk_forward", "chunk_state_forward"],
        ["intra_chunk_forward", "chunk_state_forward"],
        ["decode_w", "chunk_state_backward", "chunk_backward"],
    ),
    "gdn-plain": (  # whose states are formed again by the backward in any case
        ["intra_chunk_forward", "chunk_state_forward"],
        ["intra_chunk_forward"],
        ["wy_recompute", "chunk_state_forward", "chunk_state_backward", "chunk_backward"],
    ),
    "kda-fp8": (
        ["kda_pairs", "kda_wy", "chunk_state_forward"],
        ["kda_pairs", "kda_wy", "chunk_state_forward"],
        ["kda_recompute", "chunk_state_backward", "kda_scores_backward", "kda_channels_backward", "kda_dbeta"],
    ),
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_nothing_is_computed_twice_that_was_not_asked_for(name):
    """Launches in the optimised programs of one layer and of a scan over layers, with and without checkpoint."""
    gate, quant = name.partition("-")[0], FP8 if name.endswith("fp8") else PLAIN
    forward, again, backward = LAUNCHES[name]
    if not choose(device_capability(), gate, quant.state is not None, "few").decode_w:
        backward = [kernel for kernel in backward if kernel != "decode_w"]
    x = jax.tree.map(jnp.asarray, make_inputs(25, gate=gate, B=2, T=128, H=2, K=64, dtype=jnp.bfloat16))

    def layer(x):
        return jlaqat.delta_rule(**x, quant=quant)[0]  # "auto": lowering leaves nothing of the choice

    def one(x, body):
        return jnp.sum(body(x).astype(jnp.float32) ** 2)

    def scan(x, body):
        v, _ = jax.lax.scan(lambda v, _: (body(x | {"v": v}), None), x["v"], length=3)
        return jnp.sum(v.astype(jnp.float32) ** 2)

    def compiled(loss, body):
        return jax.jit(jax.grad(functools.partial(loss, body=body))).lower(x).compile()

    assert sorted(launched(jax.jit(layer).lower(x).compile())) == sorted(forward)
    for loss in (one, scan):
        plain, checkpointed = compiled(loss, layer), compiled(loss, jax.checkpoint(layer))
        assert sorted(launched(plain)) == sorted(forward + backward), loss.__name__
        assert sorted(launched(checkpointed)) == sorted(forward + again + backward), loss.__name__
        assert "conditional" not in plain.as_text() + checkpointed.as_text()
        for a, b in zip(jax.tree.leaves(plain(x)), jax.tree.leaves(checkpointed(x)), strict=True):
            assert jnp.isfinite(a.astype(jnp.float32)).all() and jnp.array_equal(a, b)
