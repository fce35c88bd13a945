"""What a decoder keeps between calls: codes and scales of the state, the ring of replay, counters. And how it is read.

`Memory` is what the recurrence works on, in float32; `DecodeCarry` is the same thing as it lies in memory between
calls. `pack` and `unpack` go between them without changing a bit of what the next token sees.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jlaqat.decode_policy import DecodePolicy
from jlaqat.pairs import product
from jlaqat.rounding import CODE_DTYPES, dequantize_codes, fake_quantize, quantize_codes, straight_through
from jlaqat.sites import Place, state_bits
from jlaqat.spec import FORMATS, QuantArrays, QuantConfigError, QuantSpec

Array = jax.Array
HADAMARD = 32
_FACTOR = QuantSpec.fp8(granularity="row")
_CAST_DTYPES = {"bfloat16": jnp.bfloat16, "float16": jnp.float16}


class Stored(NamedTuple):
    """A rounded state as it is kept."""

    values: Array  # [..., HV, K, V]: codes (int8, FP8), a 16-bit float, or float32 where there are no codes
    scale: Array | None  # one a group (see `jlaqat.rounding.quantize_codes`); None for casts and float32


class Ring(NamedTuple):
    """The updates since the last checkpoint, in order; entries from `cursor` on hold nothing."""

    k: Array  # [N, L, HV, K]
    r: Array  # [N, L, HV, V]
    g: Array  # [N, L, HV, 1 or K], log decay


class Memory(NamedTuple):
    """What the recurrence carries from token to token, a row a sequence. The state is rotated where the policy says."""

    S: Array  # [N, HV, K, V], the state that the next token sees
    stored: Stored  # what is kept of it: the state itself, or the checkpoint of replay
    ring: Ring | None
    residual: Array | None  # [N, HV, K, V] float32, what the last rounding lost (error feedback)
    position: Array  # [N] int32, tokens so far
    cursor: Array  # [N] int32, updates since the last checkpoint


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeCarry:
    """The memory of a decoder between two calls; a pytree whose leaves lead with the sequence.

    Pass it back unchanged: another policy, or other heads or dimensions, raise. No gradient flows through it.
    """

    values: Array  # [N, HV, K, V], codes of the state (rotated under int8_hadamard32), or float32: policy.keeps_codes
    scale: Array | None  # scales of the codes, one a group; None for casts and float32
    ring_k: Array | None  # [N, L, H, K] in float32, bfloat16 or E4M3; None without replay, as all of the ring
    ring_k_scale: Array | None  # [N, L, H] under factor_qdq
    ring_r: Array | None  # [N, L, HV, V], as ring_k
    ring_r_scale: Array | None  # [N, L, HV, ceil(V / block_v)] under factor_qdq
    ring_g: Array | None  # [N, L, HV] or [N, L, HV, K] float32
    residual: Array | None  # [N, HV, K, V] float32, with error feedback
    position: Array  # [N] int32, tokens so far, prefix included
    cursor: Array  # [N] int32, entries of the ring in use
    policy: DecodePolicy = dataclasses.field(metadata={"static": True})  # the signature that the next call must share

    @property
    def started(self) -> Array:
        """[N] bool: the sequence has seen a token."""
        return self.position > 0

    def state(self) -> Array:
        """The state that the next token sees, [N, HV, K, V] float32, unrotated; no gradient."""
        S = unpack(self, self.policy, jnp.float32).S
        return rotate(S) if self.policy.rotated else S


# ---- the stored state ------------------------------------------------------------------------------------------------


def encode(x: Array, policy: DecodePolicy, place: Place, arrays: QuantArrays) -> Stored:
    """x [b, HV, K, V] rounded as the policy's state says, as it is kept."""
    spec = policy.state
    if spec is None:
        return Stored(x, None)
    bits = state_bits(x, place, spec, arrays)
    if not policy.keeps_codes or spec.granularity == "none":
        rounded = fake_quantize(x, spec, site="state", random_bits=bits)
        if not policy.keeps_codes:
            return Stored(rounded, None)
        dtype: Any = _CAST_DTYPES.get(spec.format) or CODE_DTYPES[spec.format]
        return Stored(rounded.astype(jnp.float32).astype(dtype), None)
    values, scale = quantize_codes(x, spec, site="state", random_bits=bits)
    return Stored(values, scale.astype(spec.scale_dtype))


def decode(stored: Stored, policy: DecodePolicy, dtype: Any) -> Array:
    """The state that `stored` stands for, in `dtype`."""
    if stored.scale is None:
        return stored.values.astype(jnp.float32).astype(dtype) if policy.keeps_codes else stored.values.astype(dtype)
    assert policy.state is not None
    return dequantize_codes(stored.values, stored.scale.astype(jnp.float32), policy.state, site="state").astype(dtype)


def write(
    W: Array, residual: Array | None, policy: DecodePolicy, place: Place, arrays: QuantArrays
) -> tuple[Array, Stored, Array | None]:
    """(the state after a rounding, gradient straight through; what is kept of it; what was lost)."""
    x = W if residual is None else W + residual
    exact = jax.lax.stop_gradient(x)
    stored = encode(exact, policy, place, arrays)
    rounded = decode(stored, policy, W.dtype)
    if residual is not None:
        residual = exact - product(1.0, rounded)  # a select: code·scale must be rounded before it is subtracted
    return straight_through(x, rounded), stored, residual


def rotate(x: Array) -> Array:
    """x under Sylvester's orthonormal 32-point Hadamard transform, over groups of its last axis. Its own inverse."""
    shape, half = x.shape, 1
    while half < HADAMARD:
        pairs = x.reshape(*shape[:-1], -1, 2, half)
        left, right = pairs[..., 0, :], pairs[..., 1, :]
        x = jnp.stack((left + right, left - right), axis=-2).reshape(shape)
        half *= 2
    return product(HADAMARD**-0.5, x)


# ---- the ring --------------------------------------------------------------------------------------------------------


def round_keys(k: Array, policy: DecodePolicy) -> Array:
    """k [..., H, K] as the ring keeps it, gradient straight through."""
    return _round_factor(k, policy, k.shape[-1])


def key_codes(k: Array) -> tuple[Array, Array]:
    """(E4M3 codes, a scale a key [..., H]) of keys [..., H, K] as a ring under factor_qdq keeps them."""
    return quantize_codes(k, _FACTOR, site="w")


def round_updates(r: Array, policy: DecodePolicy) -> Array:
    """r [..., HV, V] as the ring keeps it, gradient straight through."""
    return _round_factor(r, policy, policy.factor_block)


def _round_factor(x: Array, policy: DecodePolicy, block: int) -> Array:
    if policy.ring_dtype == "bfloat16":
        rows = x[..., None, :]  # a cast knows no axes; fake_quantize wants two
        return fake_quantize(rows, QuantSpec.bfloat16(), site="w")[..., 0, :]
    if not policy.factor_qdq:
        return x
    return _join(fake_quantize(_split(x, block), _FACTOR, site="w"), x.shape[-1])


def _pack_factor(x: Array, policy: DecodePolicy, block: int) -> tuple[Array, Array | None]:
    """(values, scales) of factors that are rounded already."""
    if not policy.factor_qdq:
        return x.astype(jnp.bfloat16) if policy.ring_dtype == "bfloat16" else x, None
    codes, scale = quantize_codes(_split(x, block), _FACTOR, site="w")
    return _join(codes, x.shape[-1]), scale


def _unpack_factor(values: Array, scale: Array | None, block: int, dtype: Any) -> Array:
    if scale is None:
        return values.astype(dtype)
    rows = dequantize_codes(_split(values, block), scale, _FACTOR, site="w")
    return _join(rows, values.shape[-1]).astype(dtype)


def _split(x: Array, block: int) -> Array:
    """[..., V] → [..., ceil(V / block), block], zeros at the end."""
    count = -(-x.shape[-1] // block)
    padding = count * block - x.shape[-1]
    if padding:
        x = jnp.concatenate([x, jnp.zeros((*x.shape[:-1], padding), x.dtype)], axis=-1)
    return x.reshape(*x.shape[:-1], count, block)


def _join(x: Array, size: int) -> Array:
    return x.reshape(*x.shape[:-2], -1)[..., :size]


def empty_ring(policy: DecodePolicy, S: Array, gate_dim: int) -> Ring | None:
    """A ring without entries for states S [N, HV, K, V]; gate_dim is 1 (GDN) or K (KDA)."""
    if policy.mode != "replay":
        return None
    (n, heads, K, V), L = S.shape, policy.ring_length
    return Ring(*(jnp.zeros((n, L, heads, size), S.dtype) for size in (K, V, gate_dim)))


def replayed(checkpoint: Array, ring: Ring, cursor: Array) -> Array:
    """The state after the first `cursor` [N] updates of the ring, one after another, from the checkpoint."""

    def update(i: Array, S: Array) -> Array:
        k, r, g = (jax.lax.dynamic_index_in_dim(x, i, axis=1, keepdims=False) for x in ring)
        S_next = product(jnp.exp(g)[..., None], S) + product(k[..., None], r[..., None, :])
        return jnp.where((i < cursor)[:, None, None, None], S_next, S)

    return jax.lax.fori_loop(0, jnp.max(cursor, initial=0), update, checkpoint)


# ---- between calls ---------------------------------------------------------------------------------------------------


def pack(memory: Memory, policy: DecodePolicy, num_key_heads: int, gate_per_channel: bool) -> DecodeCarry:
    """Memory as it lies between calls. Keys are kept once for the value heads that share them."""
    memory = jax.lax.stop_gradient(memory)
    ring: dict[str, Any] = dict.fromkeys(("ring_k", "ring_k_scale", "ring_r", "ring_r_scale", "ring_g"))
    if memory.ring is not None:
        k, r, g = memory.ring
        k = k[:, :, :: k.shape[2] // num_key_heads]
        ring["ring_k"], ring["ring_k_scale"] = _pack_factor(k, policy, k.shape[-1])
        ring["ring_r"], ring["ring_r_scale"] = _pack_factor(r, policy, policy.factor_block)
        ring["ring_g"] = g if gate_per_channel else g[..., 0]
        if policy.factor_qdq:
            ring["ring_k_scale"] = ring["ring_k_scale"][..., 0]
    kept = memory.S if policy.mode == "handoff" else memory.stored.values
    return DecodeCarry(
        values=kept,
        scale=memory.stored.scale,
        **ring,
        residual=memory.residual,
        position=memory.position,
        cursor=memory.cursor,
        policy=policy.signature,
    )


def unpack(carry: DecodeCarry, policy: DecodePolicy, dtype: Any) -> Memory:
    """The memory that `pack` was given, bit for bit, in `dtype`."""
    carry = jax.lax.stop_gradient(carry)
    stored = Stored(carry.values, carry.scale)
    S, ring = decode(stored, policy, dtype), None
    if carry.ring_k is not None:
        assert carry.ring_r is not None and carry.ring_g is not None
        k_scale = None if carry.ring_k_scale is None else carry.ring_k_scale[..., None]
        k = _unpack_factor(carry.ring_k, k_scale, carry.ring_k.shape[-1], dtype)
        r = _unpack_factor(carry.ring_r, carry.ring_r_scale, policy.factor_block, dtype)
        g = carry.ring_g.astype(dtype)
        ring = Ring(jnp.repeat(k, r.shape[2] // k.shape[2], axis=2), r, g if g.ndim == 4 else g[..., None])
        S = replayed(S, ring, carry.cursor)
    return Memory(S, stored, ring, carry.residual, carry.position, carry.cursor)


def check_carry(carry: DecodeCarry, policy: DecodePolicy, shape: tuple[int, ...], num_key_heads: int, g: Array) -> None:
    """Whether a call with states of `shape` [N, HV, K, V] can go on from the carry. Raises ValueError if not."""
    if carry.policy != policy.signature:
        raise QuantConfigError(
            f"the carry was made under another policy ({carry.policy.differences(policy.signature)}); go on with its "
            "own, or start anew from carry.state()."
        )
    if carry.values.shape != shape:
        raise ValueError(
            f"the carry holds states {list(carry.values.shape)}, but this call has [N, HV, K, V] = {list(shape)}; "
            "pass the carry of the same sequences and heads."
        )
    if carry.ring_k is not None:
        assert carry.ring_g is not None
        gates = (shape[0], policy.ring_length, *g.shape[2:])
        if carry.ring_k.shape[2] != num_key_heads or carry.ring_g.shape != gates:
            raise ValueError(
                f"the carry's ring has {carry.ring_k.shape[2]} key heads and gates {list(carry.ring_g.shape)}, but "
                f"this call has {num_key_heads} key heads and gates {list(gates)}; pass the carry of the same layer."
            )


def check_rotation(policy: DecodePolicy, V: int) -> None:
    if policy.rotated and V % HADAMARD:
        raise QuantConfigError(
            f"basis='hadamard32' transforms groups of {HADAMARD} values, but V={V} is no multiple of {HADAMARD}; use "
            "QuantSpec.int8(granularity='key_row'), or change the head dimension."
        )


def storage_bits(policy: DecodePolicy) -> int:
    """Bits an element of the state takes between calls, scales aside."""
    if not policy.keeps_codes:
        return 32
    assert policy.state is not None
    return 16 if FORMATS[policy.state.format].kind == "cast" else 8
