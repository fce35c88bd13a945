"""Causal softmax attention with rotary positions and grouped key/value heads: the full-attention layers of a hybrid."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jlaqat.blocks import SequenceModule, TokenLayout, linear

Array = jax.Array


class KVCache(NamedTuple):
    """Keys and values of the tokens so far, in rows of a fixed length."""

    k: Array  # [B, max_length, HKV, head_dim], rotated
    v: Array  # [B, max_length, HKV, head_dim]
    length: Array  # [B] int32: rows in use


def rotary(x: Array, positions: Array, theta: float) -> Array:
    """Rotary position embedding (arXiv 2104.09864): the first half of x turns against the second, as in Llama.

    x [B, T, heads, head_dim], positions [1 or B, T] int32; angles in float32; x's dtype.
    """
    half = x.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions[..., None, None].astype(jnp.float32) * frequencies  # [1 or B, T, 1, half]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    x1, x2 = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).astype(x.dtype)


class Attention(SequenceModule):
    """Causal softmax attention. x [B, T, D] → [B, T, D]; q_proj, k_proj, v_proj, o_proj without biases.

    Args:
      hidden_size: D.
      num_heads: query heads.
      num_kv_heads: key and value heads, a divisor of num_heads; None means num_heads.
      head_dim: even, for the rotation.
      rope_theta: base of the rotary frequencies.
      initializer_range, dtype, param_dtype, rngs: as in `GatedDeltaNet`.

    Raises ValueError for head counts that do not divide and an odd head_dim.
    """

    kind = "attention"

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int,
        rope_theta: float = 10000.0,
        initializer_range: float | None = None,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads % num_kv_heads:
            raise ValueError(
                f"num_heads={num_heads} is not a multiple of num_kv_heads={num_kv_heads}; choose a divisor."
            )
        if head_dim % 2:
            raise ValueError(f"head_dim={head_dim} is odd, but rotary positions turn pairs of features; make it even.")
        self.hidden_size, self.head_dim = hidden_size, head_dim
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.rope_theta = rope_theta
        self.dtype = dtype

        options: dict[str, Any] = {"initializer_range": initializer_range, "dtype": dtype, "param_dtype": param_dtype}
        self.q_proj = linear(hidden_size, num_heads * head_dim, rngs=rngs, **options)
        self.k_proj = linear(hidden_size, num_kv_heads * head_dim, rngs=rngs, **options)
        self.v_proj = linear(hidden_size, num_kv_heads * head_dim, rngs=rngs, **options)
        self.o_proj = linear(num_heads * head_dim, hidden_size, rngs=rngs, **options)

    def mix(self, x: Array, layout: TokenLayout) -> Array:
        # Padding is a suffix, so causality alone keeps it from being read.
        q, k, v = self._project(x, layout.positions)
        mask = None
        if layout.segments is not None:
            mask = (layout.segments[:, :, None] == layout.segments[:, None, :])[:, None]  # [1, 1, T, T]
        return self._output(jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True))

    def init_cache(self, batch: int, max_length: int | None = None) -> KVCache:
        """An empty cache with room for `max_length` tokens a sequence. Raises ValueError without it."""
        if max_length is None:
            raise ValueError("attention keeps every token: pass max_length, prompt and new tokens, to size its cache.")
        shape = (batch, max_length, self.num_kv_heads, self.head_dim)
        return KVCache(jnp.zeros(shape, self.dtype), jnp.zeros(shape, self.dtype), jnp.zeros((batch,), jnp.int32))

    def extend(self, x: Array, cache: KVCache, layout: TokenLayout) -> tuple[Array, KVCache]:
        """`decode` with the layout worked out. A sequence that outgrows its cache gives NaN from there on: traced
        lengths cannot raise, and wrong numbers must not pass for right ones."""
        length = x.shape[1]
        positions = cache.length[:, None] + jnp.arange(length, dtype=jnp.int32)[None]  # [B, T]
        q, k, v = self._project(x, positions)
        # Padding is written too, past the new length: unread until real tokens take its place. Mapped over sequences,
        # which on a mesh are written where they lie.
        write = jax.vmap(lambda kept, at, new: kept.at[at].set(new.astype(kept.dtype), mode="drop"))
        k_all, v_all = write(cache.k, positions, k), write(cache.v, positions, v)
        slots = jnp.arange(cache.k.shape[1], dtype=jnp.int32)
        mask = (slots <= positions[..., None])[:, None]  # [B, 1, T, max_length]
        y = self._output(jax.nn.dot_product_attention(q, k_all, v_all, mask=mask))
        y = jnp.where((positions < cache.k.shape[1])[..., None], y, jnp.nan)
        used = length if layout.valid is None else layout.valid.sum(axis=1, dtype=jnp.int32)
        return y, KVCache(k_all, v_all, cache.length + used)

    def check_decode(self) -> None:
        """Nothing here rounds."""

    def _project(self, x: Array, positions: Array) -> tuple[Array, Array, Array]:
        """q [B, T, heads, head_dim] and k rotated, v as projected."""
        batch, length = x.shape[:2]
        q = self.q_proj(x).reshape(batch, length, self.num_heads, self.head_dim)
        k = self.k_proj(x).reshape(batch, length, self.num_kv_heads, self.head_dim)
        v = self.v_proj(x).reshape(batch, length, self.num_kv_heads, self.head_dim)
        return rotary(q, positions, self.rope_theta), rotary(k, positions, self.rope_theta), v

    def _output(self, o: Array) -> Array:
        return self.o_proj(o.reshape(*o.shape[:2], self.num_heads * self.head_dim))

    def _check_input(self, x: Array) -> None:
        if x.ndim != 3 or x.shape[-1] != self.hidden_size:
            raise ValueError(f"x has shape {x.shape}; Attention takes [batch, tokens, hidden_size={self.hidden_size}].")
