"""`delta_rule_decode` through its kernels under JAX's transformations: shards, vmap, scan, other platforms.

The kernels need a GPU; where values matter a stand-in takes their place that has their shapes and independence, and
that XLA does not see into. tests/cuda_lowering.py lowers and exports the real ones.
"""

import functools
import os
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

from kernel_launches import collectives, kernel_names

import jlaqat
from jlaqat import DecodePolicy, QuantSpec, decode_triton
from jlaqat.kernel_calls import compile_for
from jlaqat.kernels import recurrent_pipeline as pipeline
from jlaqat.testing import make_inputs

FP8 = DecodePolicy(state=QuantSpec.fp8(block_v=16))
FLOAT32 = DecodePolicy()
pytestmark = pytest.mark.usefixtures("compile_quickly")
BACKWARD = ["recurrent_forward", "recurrent_backward", "group_sum", "group_sum"]


def operands(gate="gdn", B=2, T=5, H=1, HV=2, K=16, V=16):
    x = make_inputs(0, gate=gate, B=B, T=T, H=H, HV=HV, K=K, V=V)
    return {name: jnp.asarray(a) for name, a in x.items()}


def decode(x, quant=FP8, **settings):
    x = {"state" if name == "initial_state" else name: a for name, a in x.items()}
    return jlaqat.delta_rule_decode(**x, quant=quant, **settings)


def loss(x, **settings):
    o, carry = decode(x, **settings)
    return jnp.sum(o**2) + jnp.sum(carry.state())


def window(x, bounds, most):
    """[B, T, ...] → [N, most, ...], what sequences may have of it."""
    if bounds is None or most is None:
        return x
    row = jnp.arange(bounds.first.shape[0]) // (bounds.first.shape[0] // x.shape[0])
    here = bounds.first[:, None] + jnp.arange(most)
    x = x[row[:, None], jnp.minimum(here, x.shape[1] - 1)]
    inside = jnp.arange(most) < bounds.count[:, None]
    return jnp.where(inside.reshape(*inside.shape, *(1,) * (x.ndim - 2)), x, 0)


def stand_in_forward(run, tokens, state, options, *, bounds=None, counters=None, stride=None, most=None):
    """What the pipeline returns, from a few jnp operations."""
    q, k, v, g, beta = tokens
    (B, t, h, _), hv = q.shape, v.shape[2]
    seen.append((*q.shape[:3], hv))
    decay = jnp.exp(g if g.ndim == 4 else g[..., None])
    o = v * (jnp.repeat(q * k, hv // h, 2) * decay).sum(-1)[..., None] * beta[..., None]
    N = state.values.shape[0]
    o = o + state.values.astype(jnp.float32).sum(-2).reshape(B, N // B, 1, hv, -1).sum(1)
    scale = (
        None if state.scale is None else state.scale * (1 + window(decay, bounds, most or t).mean((1, 3)))[..., None]
    )
    after = pipeline.State(state.values, scale, None if state.lost is None else 2 * state.lost)
    saved = None
    if stride and most is None and bounds is not None:
        saved = pipeline.State(*(a if a is None else jnp.repeat(a[:: N // B, None], -(-t // stride), 1) for a in after))
    elif stride:
        saved = pipeline.State(*(a if a is None else jnp.repeat(a[:, None], (most or t) // stride, 1) for a in after))
    return pipeline.Output(o, after, saved)


def stand_in_backward(run, tokens, state, saved, do, d_leaving, options, *, bounds=None, most=None, into=None):
    (B, t, h, K), hv = tokens.q.shape, tokens.v.shape[2]
    seen.append((*tokens.q.shape[:3], hv))
    q, k, v, g, beta, do = (window(x, bounds, most) for x in (*tokens, do))
    kept = saved.values.astype(jnp.float32).sum(-1)  # [n, t, hv, K]
    by_head = kept.reshape(*kept.shape[:2], h, hv // h, K).sum(3)
    do = do.sum(-1)
    dg = g * do.reshape(do.shape + (1,) * (g.ndim - 3))
    gradients = [q * by_head, k * by_head, v * do[..., None], dg, beta * do]
    if into is not None:
        row = jnp.arange(bounds.first.shape[0]) // (bounds.first.shape[0] // B)
        here = bounds.first[:, None] + jnp.arange(most)
        here = jnp.where(jnp.arange(most) < bounds.count[:, None], here, t)
        gradients = [x.at[row[:, None], here].set(y, mode="drop") for x, y in zip(into, gradients)]
    return pipeline.Gradients(*gradients, 2 * d_leaving)


seen: list[tuple[int, ...]] = []


@pytest.fixture
def stand_in(monkeypatch):
    """The stand-in for the kernels, and no trace of it afterwards."""
    monkeypatch.setattr(pipeline, "forward", stand_in_forward)
    monkeypatch.setattr(pipeline, "backward", stand_in_backward)

    def clear():
        decode_triton._forward.cache_clear()
        decode_triton._backward.cache_clear()
        seen.clear()

    clear()
    with compile_for(90):
        yield
    clear()


# ------------------------------------------------------------------ shards


DRAWN = DecodePolicy(state=QuantSpec.fp8(block_v=16, rounding="stochastic"), error_feedback=True)


@pytest.mark.parametrize(
    ("gate", "T", "lengths", "quant"), [("gdn", 5, None, FP8), ("kda", 70, [70, 3, 0, 64], DRAWN)], ids=["gdn", "kda"]
)
def test_jit_with_sharded_operands_launches_on_shards(gate, T, lengths, quant, stand_in):
    """Both directions stay on batch and heads as they lie, through the hand-over and the carry."""
    x = operands(gate, B=4, T=T, H=2, HV=4)
    lengths = None if lengths is None else np.array(lengths)
    mesh = jax.make_mesh((4, 2), ("b", "h"), axis_types=(AxisType.Auto,) * 2)
    specs = {name: P("b", None, "h") for name in x} | {"initial_state": P("b", "h")}
    placed = {name: jax.device_put(a, NamedSharding(mesh, specs[name])) for name, a in x.items()}

    def run(x):
        def local(x):
            o, carry = decode(x, quant=quant, backend="triton", lengths=lengths)
            return jnp.sum(o**2), (o, carry)

        return jax.grad(local, has_aux=True)(x)

    whole = jax.jit(run)(x)
    assert set(seen) == {(4, T, 2, 4)}
    seen.clear()
    compiled = jax.jit(run).lower(placed).compile()
    assert (1, T, 1, 2) in seen
    assert not collectives(compiled)
    got = compiled(placed)
    for a, c in zip(jax.tree.leaves(got), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(c, np.float32), rtol=1e-5, atol=1e-6)
    o, carry = got[1]
    assert tuple(o.sharding.spec)[:3] == ("b", None, "h") and tuple(carry.values.sharding.spec)[:2] == ("b", "h")


@pytest.mark.parametrize("gate", ["gdn", "kda"])
@pytest.mark.parametrize(
    "quant",
    [FLOAT32, FP8, DecodePolicy(state=QuantSpec.int8(granularity="key_row"))],
    ids=["float32", "tile", "key_row"],
)
def test_what_the_kernels_keep_fits_the_rule(gate, quant):
    """The real pipeline, lowered for CUDA on 8 devices: Shardy takes the rule of either direction."""
    mesh = jax.make_mesh((4, 2), ("b", "h"), axis_types=(AxisType.Auto,) * 2)
    x = jax.eval_shape(functools.partial(operands, gate, B=4, T=70, H=2, HV=4))
    specs = {name: P("b", None, "h") for name in x} | {"initial_state": P("b", "h")}
    placed = {
        name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, specs[name])) for name, a in x.items()
    }
    with compile_for(90):
        gradient = jax.jit(jax.grad(functools.partial(loss, quant=quant, backend="triton")))
        text = gradient.trace(placed).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@CustomSPMDPartitioning") == 2
    assert text.count("sdy.sharding_rule") == 2


def test_rows_of_packed_tokens_stay_on_their_devices(stand_in):
    """Data parallelism over packed rows: a vmap over rows that lie on several devices, in one launch."""
    x = operands(B=4, T=70, H=2, HV=4)
    rows = {name: a[:, None] for name, a in x.items()} | {"initial_state": jnp.stack([x["initial_state"][:2]] * 4)}
    cu = np.array([[0, 70, 70], [0, 64, 70], [0, 3, 5], [0, 0, 1]], np.int32)
    mesh = jax.make_mesh((4, 2), ("b", "h"), axis_types=(AxisType.Auto,) * 2)
    specs = {name: P("b", None, None, "h") for name in x} | {"initial_state": P("b", None, "h")}
    placed = {name: jax.device_put(a, NamedSharding(mesh, specs[name])) for name, a in rows.items()}

    def run(x, cu):
        return jax.grad(lambda x: jax.vmap(lambda x, cu: loss(x, cu_seqlens=cu, backend="triton"))(x, cu).sum())(x)

    whole = jax.jit(run)(rows, cu)
    assert (4, 70, 2, 4) in seen
    seen.clear()
    compiled = jax.jit(run).lower(placed, jax.device_put(cu, NamedSharding(mesh, P("b")))).compile()
    assert (1, 70, 1, 2) in seen and not collectives(compiled)
    got = compiled(placed, cu)
    for a, c in zip(jax.tree.leaves(got), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(a, c, rtol=1e-5, atol=1e-6)


def test_operands_that_are_cut_otherwise_are_moved(stand_in):
    """Never an error and never wrong: key dimensions on several devices are gathered first."""
    x = operands(B=4, H=2, HV=4)
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    placed = x | {"q": jax.device_put(x["q"], NamedSharding(mesh, P("x", None, None, "y")))}
    run = jax.jit(functools.partial(decode, backend="triton"))
    whole, got = run(x)[0], run(placed)[0]
    np.testing.assert_allclose(got, whole, rtol=1e-5, atol=1e-6)


def test_shard_map_over_batch_and_heads_has_the_right_types():
    """Each device launches on its shard; what is the same on all of them has its gradients summed."""
    x = jax.eval_shape(functools.partial(operands, B=4, H=2, HV=4))
    specs = {name: P("b", None, "h") for name in x} | {"initial_state": P("b", "h"), "q": P(None, None, "h")}
    x["q"] = jax.ShapeDtypeStruct((1, *x["q"].shape[1:]), x["q"].dtype)
    mesh = jax.make_mesh((4, 2), ("b", "h"), axis_types=(AxisType.Auto,) * 2)
    with compile_for(90):
        run = jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=(specs,), out_specs=specs)
        jaxpr, gradients = jax.make_jaxpr(run, return_shape=True)(x)
    assert {name: a.shape for name, a in gradients.items()} == {name: a.shape for name, a in x.items()}
    assert kernel_names(jaxpr.jaxpr) == ["recurrent_forward", *BACKWARD]
    assert "psum" in str(jaxpr)


EXPLICIT = (AxisType.Explicit,) * 2


@pytest.mark.parametrize("backend", ["triton", "xla"])
def test_explicit_mesh_runs_on_shards(backend):
    """Where types say how operands are cut, the call is a shard_map, and its results are cut in the same way."""
    mesh = jax.make_mesh((4, 2), ("b", "h"), axis_types=EXPLICIT)
    x = operands(B=4, T=3, H=2, HV=4)

    def run(x):
        o, carry = decode(x, backend=backend)
        return jnp.sum(o**2), (o, carry)

    with compile_for(90), jax.set_mesh(mesh):
        specs = {name: P("b", None, "h") for name in x} | {"initial_state": P("b", "h")}
        placed = {name: jax.device_put(a, specs[name]) for name, a in x.items()}
        jaxpr, shapes = jax.make_jaxpr(jax.grad(run, has_aux=True), return_shape=True)(placed)
        gradients, (o, carry) = shapes
        assert "shard_map" in str(jaxpr)
        assert tuple(o.sharding.spec)[:3] == ("b", None, "h") and tuple(carry.values.sharding.spec)[:2] == ("b", "h")
        assert {name: g.sharding.spec[:3] for name, g in gradients.items()} == {
            name: jax.typeof(a).sharding.spec[:3] for name, a in placed.items()
        }
        with pytest.raises(ValueError, match="only batch and heads can be cut"):
            decode(placed | {"v": jax.device_put(x["v"], P("b", None, None, "h"))}, backend=backend)


@pytest.mark.slow
@pytest.mark.parametrize("quant", [FP8, DecodePolicy.preset("serving", window=2)], ids=["token", "replay"])
def test_explicit_mesh_changes_no_bit(quant):
    """With a prefix of its own for each sequence, and a carry that goes from one sharded call to the next."""
    mesh = jax.make_mesh((2, 2), ("b", "h"), axis_types=EXPLICIT, devices=jax.devices()[:4])
    x = operands(B=2, T=3, H=2, HV=4, V=32)

    def run(x):
        o, carry = decode(x, quant=quant, backend="xla")
        rows = {name: a[:, :2] for name, a in x.items()} | {"initial_state": carry}
        o_next, carry = decode(rows, quant=quant, backend="xla", prefix_lengths=np.array([0, 1], np.int32))
        return jnp.sum(o_next**2), (o, o_next, carry)

    gradient = jax.jit(jax.grad(run, has_aux=True))
    wanted, results = gradient(x)
    with jax.set_mesh(mesh):
        specs = {name: P("b", None, "h") for name in x} | {"initial_state": P("b", "h")}
        got = jax.tree.map(np.asarray, gradient({name: jax.device_put(a, specs[name]) for name, a in x.items()}))
    for a, b in zip(jax.tree.leaves(got[1]), jax.tree.leaves(results), strict=True):
        assert np.array_equal(a, b)
    for name, a in wanted.items():  # sums over keys, which XLA orders by shape
        np.testing.assert_allclose(got[0][name], a, rtol=1e-4, atol=1e-6)


def test_explicit_mesh_needs_no_mesh_context():
    """Operands alone say how they are cut, under jit and not, without jax.set_mesh."""
    mesh = jax.make_mesh((2, 2), ("b", "h"), axis_types=EXPLICIT, devices=jax.devices()[:4])
    x, quant = operands(B=2, T=3, H=2, HV=4, V=32), DecodePolicy.preset("vllm_int8")
    specs = {name: P("b", None, "h") for name in x} | {"initial_state": P("b", "h")}
    placed = {name: jax.device_put(a, NamedSharding(mesh, specs[name])) for name, a in x.items()}
    run = functools.partial(decode, quant=quant, backend="xla")
    wanted, carry = jax.jit(run)(x)
    for call in (run, jax.jit(run)):
        o, cut = call(placed)
        assert np.array_equal(o, wanted) and np.array_equal(cut.values, carry.values)
        assert o.sharding.spec[:3] == ("b", None, "h")


# ------------------------------------------------------------------ transformations


def test_vmap_folds_into_the_batch():
    """One launch for a batch of calls; what they share has its gradients summed."""
    x = jax.eval_shape(operands)
    stacked = {name: jax.ShapeDtypeStruct((3, *a.shape), a.dtype) for name, a in x.items()}
    gradient = jax.grad(lambda x, g: jnp.sum(jax.vmap(lambda x: loss(x | {"g": g}))(x)), argnums=(0, 1))
    with compile_for(90):
        jaxpr, shapes = jax.make_jaxpr(gradient, return_shape=True)(stacked, x["g"])
    assert kernel_names(jaxpr.jaxpr) == ["recurrent_forward", *BACKWARD]
    assert {name: a.shape for name, a in shapes[0].items()} == {name: a.shape for name, a in stacked.items()}
    assert shapes[1].shape == x["g"].shape


@pytest.mark.slow
def test_vmap_of_a_call_has_its_values(stand_in):
    x = operands(T=70)
    stacked = {name: jnp.stack([a, a[::-1]]) for name, a in x.items()}
    gradient = jax.value_and_grad(functools.partial(loss, backend="triton"))
    got = jax.jit(jax.vmap(gradient))(stacked)
    assert (4, 70, 1, 2) in seen
    wanted = [jax.jit(gradient)({name: a[i] for name, a in stacked.items()}) for i in range(2)]
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(jax.tree.map(lambda *leaves: jnp.stack(leaves), *wanted))):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_launches_of_layers_in_a_scan_with_checkpoint():
    """A recomputed layer runs its forward once more and its segments once each way, whatever the depth."""

    def layers(x, body):
        v, _ = jax.lax.scan(lambda v, _: (body(v, x), None), x["v"], length=5)
        return jnp.sum(v)

    def layer(v, x):
        return decode(x | {"v": v}, backend="triton")[0]

    x = jax.eval_shape(functools.partial(operands, T=70, HV=1))
    for body, forwards in ((layer, 1), (jax.checkpoint(layer), 2)):
        with compile_for(90):
            names = kernel_names(jax.make_jaxpr(jax.grad(lambda x, body=body: layers(x, body)))(x).jaxpr)
        assert names == ["recurrent_forward"] * forwards + BACKWARD[:2] + ["place_rows"] * 5


# ------------------------------------------------------------------ other platforms


def test_auto_traced_for_a_gpu_still_runs_where_there_is_none():
    """Traced for a GPU and lowered for the CPU, "auto" has the xla backend's bits, codes and gradients."""
    x = operands(T=70)
    lengths = np.array([70, 66])

    def run(x, backend):
        def local(x):
            o, carry = decode(x, backend=backend, lengths=lengths)
            return jnp.sum(o**2) + jnp.sum(carry.state()), carry

        return jax.grad(local, has_aux=True)(x)

    wanted = jax.jit(run, static_argnums=1)(x, "xla")
    with compile_for(90):
        assert kernel_names(jax.make_jaxpr(run, static_argnums=1)(x, "auto").jaxpr)[:2] == ["recurrent_forward"] * 2
        got = jax.tree.map(np.asarray, jax.jit(run, static_argnums=1)(x, "auto"))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert np.array_equal(a, b)


@pytest.mark.slow
def test_stacked_packed_rows_where_there_is_no_gpu():
    """vmap folds packed rows; lowered for the CPU they have the bits of calls one by one, random ones included."""
    x = operands(B=4, T=5)
    rows = {name: a.reshape(2, 2, *a.shape[1:])[:, :1] for name, a in x.items() if name != "initial_state"}
    rows["initial_state"] = x["initial_state"].reshape(2, 2, *x["initial_state"].shape[1:])
    cu, prefix = np.array([[0, 2, 5], [0, 0, 3]], np.int32), np.array([[1, 0], [0, 2]], np.int32)

    def run(x, cu, prefix):
        arrays = jlaqat.QuantArrays(step=3, layer=2, sequence_offset=9)
        o, carry = decode(x, quant=DRAWN, cu_seqlens=cu, prefix_lengths=prefix, quant_arrays=arrays)
        return jnp.sum(o**2), (o, carry)

    gradient = jax.grad(run, has_aux=True)
    wanted = [jax.jit(gradient)({name: a[i] for name, a in rows.items()}, cu[i], prefix[i]) for i in range(2)]
    with compile_for(90):
        got = jax.tree.map(np.asarray, jax.jit(jax.vmap(gradient))(rows, cu, prefix))
    for i, one in enumerate(wanted):
        for a, b in zip(jax.tree.leaves(got[1]), jax.tree.leaves(one[1]), strict=True):
            assert np.array_equal(a[i], b)
        for name in one[0]:
            np.testing.assert_allclose(got[0][name][i], one[0][name], rtol=1e-4, atol=1e-6)
