"""What `delta_rule_decode` must be called with, checked before any work: operands, state or carry, and lengths."""

from __future__ import annotations

import numbers
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jlaqat import checks
from jlaqat.chunked import Inputs, computation_dtype
from jlaqat.decode_carry import DecodeCarry, check_carry, check_rotation
from jlaqat.decode_policy import DecodePolicy
from jlaqat.spec import QuantArrays, QuantConfigError

Array = jax.Array
Lengths = int | np.ndarray | Array | None


class Tokens(NamedTuple):
    """Which tokens of a call are prefix and which are decoded. Numpy where the values are known."""

    cu_seqlens: Any  # [N + 1] or None
    prefix: Any  # [N] int32 or None: no sequence has one
    lengths: Any  # [N] int32 or None: a batch without padding
    skipped: int  # tokens at the start of every row that are known to be prefix
    reach: int  # tokens of a row that prefixes may reach into

    @property
    def bounds(self) -> tuple[Any, Any, Any]:
        """cu_seqlens, prefix and lengths."""
        return self[:3]


def prepare(q, k, v, g, beta, state, quant, prefix_lengths, lengths, cu_seqlens, scale, quant_arrays):
    """(Inputs, Tokens, QuantArrays, scale), checked."""
    if not isinstance(quant, DecodePolicy):
        raise QuantConfigError(
            f"quant={quant!r:.80} is a {type(quant).__name__}; give a DecodePolicy, such as "
            "DecodePolicy.preset('serving') or DecodePolicy(state=QuantSpec.fp8())."
        )
    q, k, v, g, beta = map(jnp.asarray, (q, k, v, g, beta))
    checks.check_operands(q, k, v, g, beta)
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens if checks.is_traced(cu_seqlens) else np.asarray(cu_seqlens)
        checks.check_cu_seqlens(cu_seqlens, k)
        cu_seqlens = cu_seqlens.astype(np.int32)
    (B, T, H, K), (HV, V) = k.shape, v.shape[2:]
    count = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    check_rotation(quant, V)
    initial_state = None
    if isinstance(state, DecodeCarry):
        check_carry(state, quant, (count, HV, K, V), H, g)
    elif state is not None:
        initial_state = jnp.asarray(state)
        checks.check_initial_state(initial_state, (count, HV, K, V))
        initial_state = initial_state.astype(computation_dtype(v))
    elif cu_seqlens is not None or count:
        initial_state = jnp.zeros((count, HV, K, V), computation_dtype(v))
    arrays = QuantArrays() if quant_arrays is None else quant_arrays
    if not isinstance(arrays, QuantArrays):
        raise QuantConfigError(f"quant_arrays is a {type(arrays).__name__}; give a QuantArrays or leave it out.")
    if arrays.state_amax is not None:
        raise QuantConfigError(
            "quant_arrays.state_amax was given, but a decode policy has dynamic scales; leave it out."
        )
    checks.check_token_axis(quant, q=q, k=k, v=v, g=g, beta=beta)
    tokens = make_tokens(prefix_lengths, lengths, cu_seqlens, count, T)
    return Inputs(q, k, v, g, beta, initial_state), tokens, arrays, checks.check_scale(scale, K)


def make_tokens(prefix_lengths: Lengths, lengths: Lengths, cu_seqlens: Any, count: int, T: int) -> Tokens:
    """Of `count` sequences in rows of T tokens. Raises ValueError for known lengths that do not fit."""
    if lengths is not None and cu_seqlens is not None:
        raise ValueError(
            "lengths and cu_seqlens were both given and may contradict each other; give cu_seqlens for packed "
            "sequences, or lengths for a padded batch."
        )
    prefix = _per_sequence("prefix_lengths", prefix_lengths, count)
    if isinstance(prefix, np.ndarray) and not prefix.any():
        _check_range("prefix_lengths", prefix, T)
        prefix = None
    bounds = _per_sequence("lengths", lengths, count)
    if isinstance(bounds, np.ndarray):
        _check_range("lengths", bounds, T)
    if cu_seqlens is not None:
        bounds = cu_seqlens[1:] - cu_seqlens[:-1]
    if isinstance(prefix, np.ndarray):
        _check_range("prefix_lengths", prefix, bounds if isinstance(bounds, np.ndarray) else T)
    if bounds is not None and prefix is not None and not (isinstance(prefix, np.ndarray) and cu_seqlens is None):
        prefix = jnp.minimum(jnp.asarray(prefix), jnp.asarray(bounds))
    skipped, reach = (0, T) if prefix is not None else (0, 0)
    if isinstance(prefix, np.ndarray) and cu_seqlens is None and count:
        skipped, reach = int(prefix.min()), int(prefix.max())
    return Tokens(cu_seqlens, prefix, bounds, skipped, reach)


def _per_sequence(name: str, x: Lengths, count: int) -> Any:
    """x as int32 [N], numpy unless traced."""
    if x is None:
        return None
    if isinstance(x, numbers.Integral):
        return np.full(count, int(x), np.int32)
    x = x if isinstance(x, jax.core.Tracer) else np.asarray(x)
    if x.shape != (count,) or not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(
            f"{name} is {checks.describe(x)}; it must be an integer, or int32 [N] with one length for each of the "
            f"N={count} sequences."
        )
    return x.astype(np.int32)


def _check_range(name: str, x: np.ndarray, most: Any) -> None:
    outside = np.flatnonzero((x < 0) | (x > most))
    if outside.size:
        n = outside[0]
        limit = int(np.broadcast_to(most, x.shape)[n])
        raise ValueError(f"{name}[{n}]={x[n]} is out of range; sequence {n} has {limit} tokens, so give 0 to {limit}.")


def poison(result: tuple[Array, DecodeCarry], tokens: Tokens, T: int) -> tuple[Array, DecodeCarry]:
    """NaN everywhere if traced bounds break the rules: nothing can raise there, and nothing may look right."""
    sound = [jnp.all((x >= 0) & (x <= T)) for x in (tokens.prefix, tokens.lengths) if checks.is_traced(x)]
    cu = tokens.cu_seqlens
    if cu is not None and checks.is_traced(cu):
        sound.append((cu[0] == 0) & (cu[-1] <= T))
    if not sound:
        return result
    right = jnp.all(jnp.stack(sound))

    def mark(x: Array) -> Array:
        return jnp.where(right, x, jnp.asarray(jnp.nan, x.dtype)) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(mark, result)
