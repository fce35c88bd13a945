"""From tokens to chunks and back: [B, T, H, ...] arrays, whole or packed, to and from [n, b, H, chunk, ...]. T ≥ 1.

n is the axis the state travels along and b the sequences that travel side by side: a batch has n = ceil(T / 64), b = B;
packed sequences have b = 1 and n bounded by `max_chunks`, each sequence starting a chunk of its own. Slots that hold no
token are zeros, which the delta rule leaves without effect: k = 0 writes nothing and g = 0 does not decay.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jlaqat.sites import Place
from jlaqat.spec import CHUNK_SIZE


class Layout(NamedTuple):
    """Where every chunk of a call comes from. All arrays are int32 except `valid`."""

    valid: jax.Array  # [n, b, chunk] bool: the slot holds a token
    position: jax.Array  # [n, b] first token of the chunk, counted from the start of its sequence
    sequence: jax.Array  # [n, b] sequence of the chunk; packed: N for chunks that hold nothing
    source: jax.Array | None = None  # packed: [n, chunk] token of each slot, T where none
    slot: jax.Array | None = None  # packed: [T] slot of each token, n * chunk where none

    @property
    def packed(self) -> bool:
        return self.source is not None

    @property
    def holds(self) -> jax.Array:
        """[n, b] bool: the chunk holds a token. Its first slot then does."""
        return self.valid[..., 0]

    @property
    def state_place(self) -> Place:
        """The place of the state after each chunk."""
        return Place(self.sequence, self.position // CHUNK_SIZE + 1)

    @property
    def w_place(self) -> Place:
        return Place(self.sequence, self.position)


def max_chunks(num_tokens: int, num_sequences: int) -> int:
    """The most chunks that `num_sequences` packed sequences can need: every one may end in a partial chunk."""
    filled = min(num_sequences, num_tokens)
    return (num_tokens + (CHUNK_SIZE - 1) * filled) // CHUNK_SIZE


def num_chunks(num_tokens: int, cu_seqlens: jax.Array | None) -> int:
    """n of a call: known before anything is traced."""
    if cu_seqlens is None:
        return -(-num_tokens // CHUNK_SIZE)
    return max_chunks(num_tokens, cu_seqlens.shape[0] - 1)


def batch_layout(batch: int, num_tokens: int, multiple: int = 1) -> Layout:
    """The layout of `batch` sequences of `num_tokens` tokens each; n a multiple of `multiple`."""
    n = _round_up(num_chunks(num_tokens, None), multiple)
    position = np.arange(n, dtype=np.int32)[:, None] * CHUNK_SIZE
    valid = position[..., None] + np.arange(CHUNK_SIZE) < num_tokens
    return Layout(
        valid=jnp.asarray(np.broadcast_to(valid, (n, batch, CHUNK_SIZE))),
        position=jnp.asarray(np.broadcast_to(position, (n, batch))),
        sequence=jnp.asarray(np.broadcast_to(np.arange(batch, dtype=np.int32), (n, batch))),
    )


def packed_layout(cu_seqlens: jax.Array, num_tokens: int, multiple: int = 1) -> Layout:
    """The layout of packed sequences: cu_seqlens int [N + 1] may be traced, its length and `num_tokens` are static."""
    cu = cu_seqlens.astype(jnp.int32)
    num_sequences = cu.shape[0] - 1
    lengths = cu[1:] - cu[:-1]
    last = jnp.cumsum((lengths + CHUNK_SIZE - 1) // CHUNK_SIZE, dtype=jnp.int32)  # one past each sequence's last chunk
    first = jnp.concatenate([jnp.zeros(1, jnp.int32), last])  # [N + 1]

    n = _round_up(num_chunks(num_tokens, cu_seqlens), multiple)
    chunk = jnp.arange(n, dtype=jnp.int32)
    sequence = jnp.searchsorted(last, chunk, side="right").astype(jnp.int32)  # N past the last chunk
    owner = jnp.minimum(sequence, num_sequences - 1)
    position = (chunk - first[owner]) * CHUNK_SIZE
    token = (cu[owner] + position)[:, None] + jnp.arange(CHUNK_SIZE, dtype=jnp.int32)[None, :]
    valid = (sequence < num_sequences)[:, None] & (token < cu[owner + 1][:, None])

    t = jnp.arange(num_tokens, dtype=jnp.int32)
    holder = jnp.searchsorted(cu[1:], t, side="right").astype(jnp.int32)
    inside = holder < num_sequences
    holder = jnp.minimum(holder, num_sequences - 1)
    slot = first[holder] * CHUNK_SIZE + (t - cu[holder])
    return Layout(
        valid=valid[:, None],
        position=position[:, None],
        sequence=sequence[:, None],
        source=jnp.where(valid, token, num_tokens),
        slot=jnp.where(inside, slot, n * CHUNK_SIZE),
    )


def make_layout(batch: int, num_tokens: int, cu_seqlens: jax.Array | None, multiple: int = 1) -> Layout:
    """The layout of a call, with empty chunks at its end where n would be no multiple of `multiple`."""
    if cu_seqlens is None:
        return batch_layout(batch, num_tokens, multiple)
    return packed_layout(cu_seqlens, num_tokens, multiple)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def in_blocks(tree: Any, size: int) -> Any:
    """[n, ...] → [n / size, size, ...] for every array of a tree (a `Layout`, say)."""
    return jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), tree)


def from_blocks(tree: Any) -> Any:
    """The inverse of `in_blocks`."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)


def fill_chunks(x: jax.Array, layout: Layout) -> jax.Array:
    """[B, T, ...] with T filled up to whole chunks by zeros. Packed rows stay: `to_chunks` gathers them."""
    padding = 0 if layout.packed else max(0, layout.valid.shape[0] * CHUNK_SIZE - x.shape[1])
    return jnp.pad(x, ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2)) if padding else x


def to_chunks(x: jax.Array, layout: Layout) -> jax.Array:
    """[B, T, H, ...] → [n, b, H, chunk, ...], zeros where a slot holds no token.

    `layout` may be a block of consecutive chunks of a call, of whose tokens x (after `fill_chunks`) has all.
    """
    n = layout.valid.shape[0]
    if layout.source is not None:
        x = jnp.take(x[0], layout.source, axis=0, mode="fill", fill_value=0)[:, None]
    else:
        x = fill_chunks(x, layout)
        if x.shape[1] > n * CHUNK_SIZE:
            x = jax.lax.dynamic_slice_in_dim(x, layout.position[0, 0], n * CHUNK_SIZE, axis=1)
        x = x.reshape(x.shape[0], n, CHUNK_SIZE, *x.shape[2:]).swapaxes(0, 1)
    return jnp.moveaxis(x, 3, 2)


def from_chunks(x: jax.Array, layout: Layout, num_tokens: int) -> jax.Array:
    """[n, b, H, chunk, ...] → [B, T, H, ...]; zeros for tokens past the last sequence."""
    return from_rows(jnp.moveaxis(x, 2, 3), layout, num_tokens)


def from_rows(x: jax.Array, layout: Layout, num_tokens: int) -> jax.Array:
    """[n, b, chunk, H, ...] → [B, T, H, ...]; zeros for tokens past the last sequence."""
    if layout.slot is not None:
        x = x.reshape(-1, *x.shape[3:])
        return jnp.take(x, layout.slot, axis=0, mode="fill", fill_value=0)[None]
    x = x.swapaxes(0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :num_tokens]


class States:
    """The states a scan over chunks carries, read and written by sequence.

    A batch carries [B, HV, K, V] and reads all of it. Packed sequences carry [N + 1, HV, K, V]: a chunk reads and
    writes the row of its sequence, and chunks that hold nothing use the spare last row. Other shapes may stand for
    [HV, K, V], and `jax.tree.map` carries several arrays.
    """

    def __init__(self, packed: bool):
        self.packed = packed

    def start(self, states: jax.Array) -> jax.Array:
        return jnp.pad(states, ((0, 1),) + ((0, 0),) * (states.ndim - 1)) if self.packed else states

    def read(self, carry: jax.Array, sequence: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(carry, sequence[0], 1) if self.packed else carry

    def write(self, carry: jax.Array, state: jax.Array, sequence: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(carry, state, sequence[0], 0) if self.packed else state

    def finish(self, carry: jax.Array) -> jax.Array:
        return carry[:-1] if self.packed else carry
