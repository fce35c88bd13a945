"""Replay through its kernels as far as one can tell without a GPU; tests/gpu/test_replay.py has the values."""

import functools
import os
import re
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

from kernel_launches import kernel_names

import jlaqat
from jlaqat import DecodePolicy, QuantArrays, QuantSpec, backends
from jlaqat.testing import make_inputs

REPLAY = DecodePolicy(state=QuantSpec.fp8(block_v=16), mode="replay", window=3, ring_dtype="bfloat16")
ALL = DecodePolicy(  # that the kernels have in replay
    state=QuantSpec.fp8(block_v=16, rounding="stochastic", seed=3),
    mode="replay",
    window=3,
    factor_qdq=True,
    error_feedback=True,
)
pytestmark = pytest.mark.usefixtures("compile_quickly")


def operands(gate="gdn", T=5, B=2, H=1, HV=2):
    x = make_inputs(0, gate=gate, B=B, T=T, H=H, HV=HV, K=16, V=16)
    x["state"] = x.pop("initial_state")
    return {name: jnp.asarray(a) for name, a in x.items()}


def steps(x, carry, quant=REPLAY):
    """A scan of steps, the carry handed on."""

    def step(carry, row):
        o, carry = jlaqat.delta_rule_step(*row, carry, quant=quant)
        return carry, o

    return jax.lax.scan(step, carry, [jnp.moveaxis(x[name], 1, 0) for name in ("q", "k", "v", "g", "beta")])


def loss(x, quant=REPLAY, **settings):
    o, carry = jlaqat.delta_rule_decode(**x, quant=quant, **settings)
    return jnp.sum(o**2), (o, carry)


def test_what_is_launched():
    """A step is one launch in place, a gradient one of each direction, a batch of calls the same."""
    x = jax.eval_shape(operands)
    stacked = {name: jax.ShapeDtypeStruct((3, *a.shape), a.dtype) for name, a in x.items()}
    gradient = jax.grad(functools.partial(loss, backend="triton"), has_aux=True)
    sums = ["group_sum"] * 2
    with jlaqat.compile_for(90):
        carry = jax.eval_shape(functools.partial(loss, backend="triton"), x)[1][1]
        assert kernel_names(jax.make_jaxpr(steps)(x, carry).jaxpr) == ["replay_step", "replay_flush"]
        assert kernel_names(jax.make_jaxpr(loss)(x).jaxpr) == ["replay_forward"]
        of_all = jax.vmap(jax.grad(functools.partial(loss, quant=ALL, backend="triton"), has_aux=True))
        for run, inputs in ((gradient, x), (jax.vmap(gradient), stacked), (of_all, stacked)):
            assert kernel_names(jax.make_jaxpr(run)(inputs).jaxpr) == ["replay_forward", "replay_backward", *sums]
    assert carry.values.dtype == jnp.float8_e4m3fn and carry.ring_k.shape == (2, 3, 1, 16)
    assert carry.ring_r.dtype == jnp.bfloat16


def test_what_is_changed_in_place_is_not_fused_with_stacking_it():
    """XLA would leave it out of the stack, or launch twice (seen on an H200, and in the program that XLA compiles)."""
    x = jax.eval_shape(operands)
    with jlaqat.compile_for(90):
        carry = jax.eval_shape(functools.partial(loss, backend="triton"), x)[1][1]
        text = str(jax.make_jaxpr(steps)(x, carry))
    found = re.findall("triton_kernel_call|optimization_barrier", text)
    assert found[:4] == ["triton_kernel_call", "optimization_barrier"] * 2


def test_a_prefix_leaves_an_empty_ring_to_the_kernels():
    x = jax.eval_shape(functools.partial(operands, T=70))
    with jlaqat.compile_for(90):
        names = kernel_names(jax.make_jaxpr(functools.partial(loss, prefix_lengths=64))(x).jaxpr)
    assert names.count("replay_forward") == 1 and "chunk_state_forward" in names


# By the step ring k, r and g, and the scales of k and r; by the flush values and scale, and what its rounding lost.
@pytest.mark.parametrize(("quant", "changed"), [(REPLAY, [3, 2]), (ALL, [5, 3])], ids=["nearest", "all"])
def test_a_step_changes_the_state_in_place(quant, changed):
    """What the launches read and give back is one buffer, so that a donated carry is not copied."""
    x = operands()
    with jlaqat.compile_for(90):
        carry = jax.eval_shape(functools.partial(loss, quant=quant, backend="triton"), x)[1][1]
        step = jax.jit(lambda carry, row: jlaqat.delta_rule_step(*row, carry, quant=quant), donate_argnums=0)
        row = [x[name][:, 0] for name in ("q", "k", "v", "g", "beta")]
        text = step.trace(carry, row).lower(lowering_platforms=("cuda",)).as_text()
    step, flush = (line for line in text.splitlines() if "@triton_kernel_call_ffi" in line)
    aliases = [line.count("#stablehlo.output_operand_alias<") for line in (step, flush)]
    assert aliases == changed


@pytest.mark.parametrize(
    ("gate", "quant"),
    [("gdn", ALL), *(pytest.param(g, REPLAY, marks=pytest.mark.slow) for g in ("gdn", "kda"))],
    ids=["gdn-all", "gdn", "kda"],
)
def test_auto_traced_for_a_gpu_still_runs_where_there_is_none(gate, quant):
    """Traced for a GPU and lowered for the CPU, "auto" has the xla backend's bits, gradients and carries."""
    x = operands(gate)
    arrays = QuantArrays(step=jnp.uint32(9), layer=2)

    def run(x, backend):
        settings = dict(quant=quant, quant_arrays=arrays, backend=backend)
        gradient, (o, carry) = jax.grad(functools.partial(loss, **settings), has_aux=True)(x)
        return gradient, o, steps(x, carry, quant)

    wanted = jax.jit(run, static_argnums=1)(x, "xla")
    with jlaqat.compile_for(90):
        got = jax.tree.map(np.asarray, jax.jit(run, static_argnums=1)(x, "auto"))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize(("gate", "quant"), [("gdn", ALL), ("kda", REPLAY)], ids=["gdn-all", "kda"])
def test_what_the_kernels_keep_fits_the_rule(gate, quant):
    """Lowered for CUDA on 8 devices: Shardy takes the rule of either direction, for checkpoints and rings too."""
    mesh = jax.make_mesh((4, 2), ("b", "h"), axis_types=(AxisType.Auto,) * 2)
    x = jax.eval_shape(functools.partial(operands, gate, B=4, H=2, HV=4))
    specs = {name: P("b", None, "h") for name in x} | {"state": P("b", "h")}
    placed = {
        name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, specs[name])) for name, a in x.items()
    }
    with jlaqat.compile_for(90):
        gradient = jax.jit(jax.grad(functools.partial(loss, quant=quant, backend="triton"), has_aux=True))
        text = gradient.trace(placed).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@CustomSPMDPartitioning") == 2
    assert text.count("sdy.sharding_rule") == 2


def test_explicit_mesh_types():
    """Shards of batch and heads; counters stay what they are, so that a scan of steps can hand the carry on."""
    mesh = jax.make_mesh((2, 2), ("b", "h"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:4])
    x = operands(H=2, HV=4)
    with jlaqat.compile_for(90), jax.set_mesh(mesh):
        specs = {name: P("b", None, "h") for name in x} | {"state": P("b", "h")}
        placed = {name: jax.device_put(a, specs[name]) for name, a in x.items()}
        run = jax.grad(functools.partial(loss, backend="triton"), has_aux=True)
        _, (o, carry) = jax.eval_shape(run, placed)
    assert tuple(o.sharding.spec)[:3] == ("b", None, "h") == tuple(carry.ring_r.sharding.spec)[:3]
    assert tuple(carry.cursor.sharding.spec) == ("b",)


def test_auto_takes_the_kernels_and_says_so(caplog):
    backends._say_once.cache_clear()
    with jlaqat.compile_for(90), caplog.at_level("INFO", logger="jlaqat"):
        jaxpr = jax.make_jaxpr(loss)(jax.eval_shape(operands))
    assert kernel_names(jaxpr.jaxpr) != []
    assert "'auto' runs delta_rule_decode on 'triton'" in caplog.text
