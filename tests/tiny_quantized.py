"""A tiny model that owns the quantizer handles and calls `quantized_delta_rule`: what the quantizers' tests need."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jlaqat.quantizers import Quantizer, quantized_delta_rule

HV, K, V, D, T = 2, 16, 32, 12, 70  # two chunks, the second one partial
HANDLES = ("gdn_state_quantizer", "gdn_w_quantizer", "kda_state_quantizer", "kda_w_quantizer")


class Mixer(nnx.Module):
    """One linear-attention layer, [B, T, D] → [B, T, D]: projections, gates by a fixed rule, the delta rule."""

    def __init__(self, kind: str, seed: int):
        draw = np.random.default_rng(seed)
        self.kind = kind
        self.qkv = nnx.Param(jnp.asarray(draw.standard_normal((D, 2 * K + HV * V)) / D**0.5, jnp.float32))
        self.out = nnx.Param(jnp.asarray(draw.standard_normal((HV * V, D)) / (HV * V) ** 0.5, jnp.float32))
        for site in ("state", "w"):
            setattr(self, f"{kind}_{site}_quantizer", Quantizer(site, num_heads=HV, key_dim=K, value_dim=V))

    def __call__(self, x):
        B, T, _ = x.shape
        q, k, v = jnp.split(x @ self.qkv[...], (K, 2 * K), axis=-1)
        q, k = (a / jnp.linalg.norm(a + 1e-6, axis=-1, keepdims=True) for a in (q, k))
        q, k, v = q[:, :, None], k[:, :, None], v.reshape(B, T, HV, V)
        gate = (HV,) if self.kind == "gdn" else (HV, K)
        g, beta = jnp.full((B, T, *gate), -0.05, jnp.float32), jnp.full((B, T, HV), 0.6, jnp.float32)
        handles = (getattr(self, f"{self.kind}_{site}_quantizer") for site in ("state", "w"))
        o, _ = quantized_delta_rule(*handles, q, k, v, g, beta, prefix_lengths=T - 6, backend="xla")
        return x + o.reshape(B, T, HV * V) @ self.out[...]


class Unrolled(nnx.Module):
    """`layers.{i}.mixer`, of the given kinds."""

    def __init__(self, *kinds: str, seed: int = 0):
        self.layers = nnx.List([nnx.Dict(mixer=Mixer(kind, seed + i)) for i, kind in enumerate(kinds)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer.mixer(x)
        return x


class Stacked(nnx.Module):
    """Layers of one kind as one module with stacked arrays, run by nnx.scan: `layers.gdn_state_quantizer`."""

    def __init__(self, layers: int, kind: str = "gdn", seed: int = 0):
        graphdef, *_ = nnx.split(Mixer(kind, seed))
        states = [nnx.state(Mixer(kind, seed + i)) for i in range(layers)]
        self.layers = nnx.merge(graphdef, jax.tree.map(lambda *leaves: jnp.stack(leaves), *states))

    def __call__(self, x):
        return nnx.scan(lambda layer, x: layer(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.layers, x)


def batch(seed: int = 0, size: int = 1):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((size, T, D)), jnp.float32)


@nnx.jit
def run(model, x):
    return model(x)


def program(model) -> str:
    """What XLA is given for `model(x)` under jit, quantizers' counters as constants. Equal programs give equal bits."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    return jax.jit(lambda params, x: nnx.merge(graphdef, params, rest)(x)).lower(shapes, batch()).as_text()
