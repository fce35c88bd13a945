"""Small decoders, and how tests of models and of generation run them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jlaqat.model import DecoderLM, ModelConfig

T = 70  # a whole chunk and a part of one
QUICK = {"xla_backend_optimization_level": 0}  # compiling is what these tests spend their time on
SIZES = {
    "vocab_size": 17,
    "hidden_size": 24,
    "intermediate_size": 32,
    "head_dim": 8,
    "num_heads": 2,
    "num_v_heads": 4,
    "expand_v": 1.5,
    "num_attention_heads": 2,
    "num_kv_heads": 1,
    "attention_head_dim": 12,
}


def make(**options):
    return DecoderLM(ModelConfig(**SIZES | options), rngs=nnx.Rngs(0))


def tokens(batch=2, length=T, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, 17, (batch, length)), jnp.int32)


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK)
def _apply(graph, state, x, cu_seqlens, mask):
    return nnx.merge(graph, state)(x, cu_seqlens=cu_seqlens, mask=mask)


def apply(model, x, cu_seqlens=None, mask=None):
    return _apply(*nnx.split(model), x, cu_seqlens, mask)
