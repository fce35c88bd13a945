"""The decoder on meshes of explicit axes: batches that are cut, parameters that are whole or gathered where used."""

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jlaqat.testing import assert_close

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from kernel_launches import collectives
from tiny_models import make, tokens

pytestmark = pytest.mark.usefixtures("compile_quickly")
EXPLICIT, MIXED = (AxisType.Explicit,) * 2, (AxisType.Explicit, AxisType.Auto)
slow = pytest.mark.slow


def mesh_of(axis_types):
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=axis_types)


@pytest.mark.parametrize(
    ("kind", "axis_types", "fsdp"),
    [
        ("gdn", EXPLICIT, False),
        ("kda", MIXED, True),
        pytest.param("attention", EXPLICIT, False, marks=slow),
    ],
)
def test_values_and_gradients_are_those_of_one_device(kind, axis_types, fsdp):
    graph, params, rest = nnx.split(make(num_layers=1, pattern=(kind,)), nnx.Param, ...)
    x, labels = tokens(8), tokens(8, seed=1)

    def step(params, x, labels, gather=lambda params: params):
        """Logits and gradients."""

        def loss(params):
            logits = nnx.merge(graph, gather(params), rest)(x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), logits

        grads, logits = jax.grad(loss, has_aux=True)(params)
        return logits, grads

    def gathered(params, x, labels):
        return step(params, x, labels, lambda params: jax.sharding.reshard(params, P()))

    logits, grads = jax.jit(step)(params, x, labels)
    mesh = mesh_of(axis_types)
    rows, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    where = jax.tree.map(lambda p: rows if fsdp and p.shape[0] % 4 == 0 else whole, params)
    with jax.set_mesh(mesh):
        placed = jax.device_put(params, where), *jax.device_put((x, labels), rows)
        program = jax.jit(gathered if fsdp else step).lower(*placed).compile()
        cut_logits, cut_grads = program(*placed)
    if not fsdp:
        assert collectives(program) == ["all-reduce"]
    assert cut_logits.sharding.spec == P("data", None, None)
    assert_close(cut_logits, logits, 1e-5, "logits")
    wanted = jax.tree_util.tree_leaves_with_path(grads)
    for (path, grad), got, cut in zip(wanted, jax.tree.leaves(cut_grads), jax.tree.leaves(where), strict=True):
        assert np.any(np.asarray(grad) != 0), path
        assert_close(got, grad, 1e-4, jax.tree_util.keystr(path))
        assert got.sharding.is_equivalent_to(cut, grad.ndim), path


@pytest.mark.parametrize("kind", ["attention", pytest.param("gdn", marks=slow), pytest.param("kda", marks=slow)])
def test_decoding_from_a_cut_cache_is_that_of_one_device(kind):
    model = make(num_layers=1, pattern=(kind,))
    graph, state = nnx.split(model)
    x, mask = tokens(8, 6), np.ones((8, 5), bool)
    mask[2, :3] = mask[5, 4:] = False
    cache = model.init_cache(8, 7)

    @jax.jit
    def decode(state, x, mask, cache):
        model = nnx.merge(graph, state)
        y, cache = model.decode(x[:, :5], cache, mask=mask)
        y_next, cache = model.decode(x[:, 5:], cache)
        return jnp.concatenate([y, y_next], axis=1), cache

    y, after = decode(state, x, mask, cache)
    mesh = mesh_of(EXPLICIT)
    with jax.set_mesh(mesh):
        cut = jax.device_put((x, mask, cache), NamedSharding(mesh, P("data")))
        placed = jax.device_put(state, NamedSharding(mesh, P()))
        program = decode.lower(placed, *cut).compile()
        assert not collectives(program)
        y_cut, after_cut = program(placed, *cut)
    assert y_cut.sharding.spec == P("data", None, None)
    assert_close(y_cut, y, 1e-5, "logits")
    assert jax.tree.structure(after_cut) == jax.tree.structure(after)
    for a, b in zip(jax.tree.leaves(after_cut), jax.tree.leaves(after)):
        assert a.sharding.spec[0] == "data"
        assert_close(a, b, 1e-5, "cache")
