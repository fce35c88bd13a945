"""A small model to save and restore, and what tests of checkpoints and exports compare."""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx

from jlaqat.checkpoint import Checkpointer
from jlaqat.layers import GatedDeltaNet
from jlaqat.naming import named_leaves
from jlaqat.quantizers import quantize

FP8 = [{"quantizer_name": "*state_quantizer", "cfg": {"num_bits": "e4m3"}}]


class Model(nnx.Module):
    """Two layers with their quantizers, a dropout stream, and parameters of two dtypes. Never called."""

    def __init__(self, seed=0, width=8, quant=()):
        rngs = nnx.Rngs(seed)
        self.layers = nnx.List([GatedDeltaNet(width, head_dim=4, num_heads=2, rngs=rngs) for _ in range(2)])
        self.head = nnx.Linear(width, 3, rngs=rngs, param_dtype=jnp.bfloat16)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        if quant:
            quantize(self, quant)


class Wider(Model):
    def __init__(self):
        super().__init__()
        self.head = nnx.Linear(8, 5, use_bias=False, rngs=nnx.Rngs(0))
        self.extra = nnx.Linear(2, 2, rngs=nnx.Rngs(0))


def values(model):
    """Every array of a model by name, keys as words."""
    state = nnx.split(model)[1]
    leaves = named_leaves(state).items()
    return {
        n: np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x) for n, x in leaves
    }


def assert_same(a, b, *, names=None):
    assert list(a) == list(b)
    for name in names or a:
        assert a[name].dtype == b[name].dtype, name
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def saved(tmp_path, model, **given):
    with Checkpointer(tmp_path / "ck") as checkpointer:
        checkpointer.save(1, model, **given)
    return tmp_path / "ck"


def read_plain(path):
    """What anybody reads with Orbax alone, as NumPy arrays."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        tree = reader.metadata(path).item_metadata.tree
        args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        return reader.restore(path, args=ocp.args.PyTreeRestore(restore_args=args))


def restore(path, model, **options):
    with Checkpointer(path, read_only=True) as checkpointer:
        return checkpointer.restore(model, **options)
