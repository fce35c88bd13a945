"""delta_rule under jit, vmap, scan, checkpoint, donation, shard_map and sharded operands: forward and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jlaqat
from jlaqat.spec import DeltaQuant, QuantArrays, QuantSpec
from jlaqat.testing import assert_close, make_inputs

pytestmark = pytest.mark.usefixtures("compile_quickly")
QUANT = DeltaQuant(state=QuantSpec.fp8(block_v=16), w=QuantSpec.fp8())
STOCHASTIC = DeltaQuant(state=QuantSpec.fp8(rounding="stochastic", seed=7), w=QuantSpec.fp8(rounding="stochastic"))
SIZES = dict(B=4, T=70, H=2, HV=4, K=8, V=8)


def loss(x, quant=QUANT, arrays=QuantArrays(), op=jlaqat.delta_rule, **settings):  # noqa: B008
    o, final_state = op(**x, quant=quant, quant_arrays=arrays, **settings)
    return (o**2).sum() + (final_state**2).sum(), (o, final_state)


def value_and_gradients(x, **settings):
    return jax.value_and_grad(functools.partial(loss, **settings), has_aux=True)(x)


@functools.cache
def plain(gate="gdn", quant=QUANT):
    """The untransformed call that the others must reproduce."""
    x = make_inputs(1, gate=gate, **SIZES)
    return x, jax.jit(functools.partial(value_and_gradients, quant=quant))(x)


def assert_same(got, wanted):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert np.array_equal(a, b), np.abs(np.asarray(a) - np.asarray(b)).max()


def test_vmap_over_calls_is_a_larger_batch():
    x, ((_, results), gradients) = plain()
    calls = {name: a.reshape(2, 2, *a.shape[1:]) for name, a in x.items()}
    (_, mapped), mapped_gradients = jax.jit(jax.vmap(value_and_gradients))(calls)
    got = jax.tree.map(lambda a: a.reshape(4, *a.shape[2:]), (mapped, mapped_gradients))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves((results, gradients)), strict=True):
        assert_close(a, b, 1e-6)


@pytest.mark.slow
def test_vmap_over_packed_calls():
    """cu_seqlens may differ from call to call."""
    x = make_inputs(2, T=70, H=1, K=8, num_sequences=2)
    cu = np.array([[0, 64, 70], [0, 3, 66]], np.int32)
    run = jax.jit(jax.vmap(lambda x, cu: value_and_gradients(x, cu_seqlens=cu), in_axes=(None, 0)))
    one = jax.jit(lambda x, cu: value_and_gradients(x, cu_seqlens=cu))
    got = run(x, cu)
    for i in range(2):
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(one(x, cu[i])), strict=True):
            assert_close(a[i], b, 1e-6)


def test_checkpoint_draws_the_same_bits_again():
    x, wanted = plain(quant=STOCHASTIC)
    run = jax.checkpoint(functools.partial(loss, quant=STOCHASTIC))
    assert_same(jax.jit(jax.value_and_grad(run, has_aux=True))(x), wanted)


@pytest.mark.slow
def test_scan_over_layers_with_checkpoint_is_the_loop():
    """Two layers, in a scan with remat and unrolled: stochastic rounding draws the same bits in both."""
    x, _ = plain()
    weights = jnp.asarray([0.9, 1.1])

    def layer(v, parts):
        weight, index = parts
        operands = x | {"v": v * weight}
        o, _ = jlaqat.delta_rule(
            **operands, quant=STOCHASTIC, quant_arrays=QuantArrays(step=jnp.uint32(4), layer=index)
        )
        return v + o, None

    def scanned(weights, body):
        v, _ = jax.lax.scan(body, jnp.asarray(x["v"]), (weights, jnp.arange(2, dtype=jnp.uint32)))
        return (v**2).sum(), v

    def unrolled(weights):
        v = jnp.asarray(x["v"])
        for i in range(2):
            v, _ = layer(v, (weights[i], jnp.uint32(i)))
        return (v**2).sum(), v

    (_, wanted), gradient = jax.jit(jax.value_and_grad(unrolled, has_aux=True))(weights)
    run = jax.jit(jax.value_and_grad(functools.partial(scanned, body=jax.checkpoint(layer)), has_aux=True))
    (_, got), got_gradient = run(weights)
    assert_close(got, wanted, 1e-6)
    assert_close(got_gradient, gradient, 1e-5)


def test_donated_operands():
    x, (_, gradients) = plain()
    operands = jax.tree.map(jnp.array, x)
    update = jax.jit(lambda x: jax.tree.map(jnp.add, x, value_and_gradients(x)[1]), donate_argnums=0)
    got = update(operands)
    assert operands["v"].is_deleted()
    for name in x:
        assert_close(got[name], x[name] + gradients[name], 1e-6)


SHARDED = {"q": P("b", None, "h"), "k": P("b", None, "h"), "v": P("b", None, "h"), "g": P("b", None, "h")}
SHARDED |= {"beta": P("b", None, "h"), "initial_state": P("b", "h")}
RESULTS = (P("b", None, "h"), P("b", "h"))


def mesh():
    return jax.make_mesh((4, 2), ("b", "h"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


@pytest.mark.parametrize("gate", ["gdn", pytest.param("kda", marks=pytest.mark.slow)])
def test_shard_map_over_batch_and_heads_changes_no_bit(gate):
    x, ((_, results), gradients) = plain(gate)

    @functools.partial(jax.shard_map, mesh=mesh(), in_specs=(SHARDED,), out_specs=(RESULTS, SHARDED))
    def run(x):
        (_, results), gradients = value_and_gradients(x)
        return results, gradients

    assert_same(jax.jit(run)(x), (results, gradients))


def test_shard_map_draws_the_whole_batch_s_random_bits():
    """With its offsets a shard rounds as it would in the whole; and gradients of what is shared are summed."""
    x, whole = plain(quant=STOCHASTIC)

    @functools.partial(
        jax.shard_map, mesh=mesh(), in_specs=(SHARDED | {"g": P(None, None, None)},), out_specs=(RESULTS, SHARDED)
    )
    def run(x):
        b, h = jax.lax.axis_index("b"), jax.lax.axis_index("h")
        g = x["g"]  # whole on every device: sliced here, so that its gradient crosses devices
        arrays = QuantArrays(sequence_offset=b, head_offset=2 * h)

        def local(x, g):
            g = jax.lax.dynamic_slice(g, (b, 0, 2 * h), (1, g.shape[1], 2))
            return loss(x | {"g": g}, quant=STOCHASTIC, arrays=arrays)

        rest = {name: a for name, a in x.items() if name != "g"}
        (_, results), (gradients, dg) = jax.value_and_grad(local, argnums=(0, 1), has_aux=True)(rest, g)
        dg = jax.lax.dynamic_slice(jax.lax.pcast(dg, ("b", "h"), to="varying"), (b, 0, 2 * h), (1, g.shape[1], 2))
        return results, gradients | {"g": dg}

    results, gradients = jax.jit(run)(x)
    assert_same((results, gradients), (whole[0][1], whole[1]))


def test_shared_operands_inside_shard_map():
    """q and k the same on every device of an axis over which v differs."""
    x, ((_, results), gradients) = plain()
    shared = SHARDED | {"q": P(None, None, "h"), "k": P(None, None, "h")}
    same = x | {"q": x["q"][:1], "k": x["k"][:1]}

    @functools.partial(jax.shard_map, mesh=mesh(), in_specs=(shared,), out_specs=shared)
    def run(x):
        return jax.grad(lambda x: jax.lax.psum(loss(x)[0], ("b", "h")))(x)

    got = jax.jit(run)(same)
    spread = same | {name: np.broadcast_to(same[name], x[name].shape) for name in ("q", "k")}
    _, wanted = jax.jit(value_and_gradients)(spread)
    assert_close(got["q"][0], wanted["q"].sum(0), 1e-5)
    assert_close(got["k"][0], wanted["k"].sum(0), 1e-5)
    assert_close(got["v"], wanted["v"], 1e-6)


def test_jit_with_sharded_operands_communicates_nothing():
    """Batch and heads sharded outside: XLA splits the op without gathering operands, and the bits are the same."""
    x, ((_, results), gradients) = plain()
    placed = {name: jax.device_put(a, NamedSharding(mesh(), SHARDED[name])) for name, a in x.items()}

    def run(x):
        (_, results), gradients = value_and_gradients(x)
        return results, gradients

    compiled = jax.jit(run).lower(placed).compile()
    text = compiled.as_text()
    assert not [op for op in ("all-gather", "all-reduce", "all-to-all", "collective-permute") if op in text]
    got = compiled(placed)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves((results, gradients)), strict=True):
        assert_close(a, b, 1e-6)
    assert got[0][0].sharding.spec == SHARDED["v"]


def test_recurrent_under_vmap_and_checkpoint():
    x, _ = plain()
    settings = dict(op=jlaqat.delta_rule_recurrent, quant=DeltaQuant(state=QuantSpec.int8(cadence=1)))
    wanted = jax.jit(functools.partial(value_and_gradients, **settings))(x)
    calls = {name: a.reshape(2, 2, *a.shape[1:]) for name, a in x.items()}

    def call(x):
        run = jax.checkpoint(functools.partial(loss, **settings))
        return jax.value_and_grad(run, has_aux=True)(x)

    (_, results), gradients = jax.jit(jax.vmap(call))(calls)
    got = jax.tree.map(lambda a: a.reshape(4, *a.shape[2:]), (results, gradients))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves((wanted[0][1], wanted[1])), strict=True):
        assert_close(a, b, 1e-6)


def test_runs_are_bit_equal():
    """Case 8's property at a small size."""
    x, first = plain()
    run = jax.jit(value_and_gradients)
    for _ in range(5):
        assert_same(run(x), first)


@pytest.mark.parametrize("gate", ["gdn", pytest.param("kda", marks=pytest.mark.slow)])
def test_packed_heads_on_several_devices_communicate_nothing(gate):
    """Packed sequences: heads are what can be cut."""
    x = make_inputs(3, gate=gate, T=70, H=2, HV=4, K=8, V=8, num_sequences=3)
    specs = {name: P(None, None, "h") for name in x} | {"initial_state": P(None, "h")}
    two = jax.make_mesh((2,), ("h",), axis_types=(jax.sharding.AxisType.Auto,))
    placed = {name: jax.device_put(a, NamedSharding(two, specs[name])) for name, a in x.items()}
    cu = np.array([0, 3, 66, 70], np.int32)
    run = jax.jit(lambda x: value_and_gradients(x, cu_seqlens=cu)[1])
    compiled = run.lower(placed).compile()
    assert not [op for op in ("all-gather", "all-to-all", "collective-permute") if op in compiled.as_text()]
    wanted = run(x)
    for name, d in compiled(placed).items():
        assert_close(d, wanted[name], 1e-6)


@pytest.mark.parametrize("gate", ["gdn", pytest.param("kda", marks=pytest.mark.slow)])
def test_explicit_mesh_is_a_shard_map(gate):
    """Where the types say how operands are cut: the whole's bits, stochastic ones included, and no communication."""
    x, wanted = plain(gate, STOCHASTIC)
    explicit = jax.make_mesh((4, 2), ("b", "h"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)

    def run(x):
        (_, results), gradients = value_and_gradients(x, quant=STOCHASTIC)
        return results, gradients

    with jax.set_mesh(explicit):
        placed = {name: jax.device_put(a, SHARDED[name]) for name, a in x.items()}
        compiled = jax.jit(run).lower(placed).compile()
        got = compiled(placed)
    assert not [op for op in ("all-gather", "all-reduce", "all-to-all") if op in compiled.as_text()]
    assert_same(got, (wanted[0][1], wanted[1]))
    assert got[0][0].sharding.spec[:3] == ("b", None, "h")


def test_explicit_mesh_needs_no_mesh_context():
    """Operands alone say how they are cut, under jit and not, without jax.set_mesh."""
    x, wanted = plain("gdn", STOCHASTIC)
    explicit = jax.make_mesh((4, 2), ("b", "h"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    placed = {name: jax.device_put(a, NamedSharding(explicit, SHARDED[name])) for name, a in x.items()}
    (_, results), gradients = jax.jit(lambda x: value_and_gradients(x, quant=STOCHASTIC))(placed)
    assert_same((results, gradients), (wanted[0][1], wanted[1]))
    o, _ = jlaqat.delta_rule(**placed, quant=STOCHASTIC)
    assert_close(o, wanted[0][1][0], 1e-6)
    assert results[0].sharding.spec[:3] == o.sharding.spec[:3] == ("b", None, "h")
