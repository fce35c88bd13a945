"""The parts that decoder layers share: token layout, projections, RMSNorm, short convolution, SwiGLU.

Modules hold parameters in `param_dtype` and compute in `dtype`; inside, norms, convolutions and gates are float32.
Kernels are [in, out] (Flax order); `jlaqat.weights` maps them to FLA's torch names and layouts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn import initializers
from jax.typing import DTypeLike

from jlaqat.checks import check_cu_seqlens

Array = jax.Array

GATE_ACTIVATIONS = {"silu": jax.nn.silu, "swish": jax.nn.silu, "sigmoid": jax.nn.sigmoid}


class TokenLayout(NamedTuple):
    """Which tokens belong together: worked out once a forward pass by `token_layout`, read by every layer."""

    positions: Array  # [1, T] int32: index of a token inside its own sequence
    segments: Array | None = None  # [1, T] int32: sequence of a packed token; None when not packed
    cu_seqlens: Array | None = None  # [N + 1] int32: bounds of the packed sequences
    valid: Array | None = None  # [B, T] bool: False at padding, which is always a suffix; None where there is none
    # Tokens of each sequence that run as a prefix, before decoding: [N] int32, or one int. Read under decode policies.
    prefix_lengths: Array | int | None = None

    @property
    def lengths(self) -> Array | None:
        """[B] int32, tokens of each row without its padding; None where there is none."""
        return None if self.valid is None else self.valid.sum(axis=1, dtype=jnp.int32)


def token_layout(x: Array, cu_seqlens: Array | None = None) -> TokenLayout:
    """Layout of x [B, T, ...]: each row is a sequence, or x is packed.

    Packed (`cu_seqlens` [N + 1]: starts at 0, never decreases, B = 1), positions restart in every sequence. Tokens past
    the last bound form a sequence of their own, so nothing leaks from or into them. Raises ValueError for bounds that
    break these rules (where they are traced, `delta_rule` makes its result NaN).
    """
    index = jnp.arange(x.shape[1], dtype=jnp.int32)
    if cu_seqlens is None:
        return TokenLayout(positions=index[None])
    cu_seqlens = jnp.asarray(cu_seqlens)
    check_cu_seqlens(cu_seqlens, x)
    cu_seqlens = cu_seqlens.astype(jnp.int32)
    segments = jnp.searchsorted(cu_seqlens, index, side="right").astype(jnp.int32) - 1
    return TokenLayout(positions=(index - cu_seqlens[segments])[None], segments=segments[None], cu_seqlens=cu_seqlens)


class Compaction(NamedTuple):
    """How `compaction` moves a padded batch: real tokens to the front of each row, in order, and back."""

    order: Array  # [B, T] int32: source of each token
    inverse: Array  # [B, T] int32
    lengths: Array  # [B] int32: real tokens a row

    @property
    def valid(self) -> Array:
        """[B, T] bool: True at the real tokens of the compacted rows."""
        return jnp.arange(self.order.shape[1], dtype=jnp.int32)[None] < self.lengths[:, None]

    def apply(self, x: Array) -> Array:
        """x [B, T, ...] with real tokens first and zeros after them (so that NaN in padding cannot spread)."""
        moved = jnp.take_along_axis(x, _trailing(self.order, x.ndim), axis=1)
        return jnp.where(_trailing(self.valid, x.ndim), moved, jnp.zeros((), x.dtype))

    def undo(self, y: Array) -> Array:
        """y [B, T, ...] back in the order of the batch, zeros at the padding."""
        kept = jnp.where(_trailing(self.valid, y.ndim), y, jnp.zeros((), y.dtype))
        return jnp.take_along_axis(kept, _trailing(self.inverse, y.ndim), axis=1)


def compaction(mask: Array, x: Array, cu_seqlens: Array | None = None) -> Compaction:
    """Moves that make padding a suffix. mask [B, T], True (or 1) at real tokens, anywhere in the row.

    Chunks then start at a row's first real token however it is padded, so padding moves no state rounding. Raises
    ValueError for a wrong shape, and for a mask beside cu_seqlens: two descriptions of the same thing.
    """
    if cu_seqlens is not None:
        raise ValueError(
            "mask and cu_seqlens were both given and may contradict each other; pass cu_seqlens for packed sequences, "
            "or mask for a padded batch."
        )
    mask = jnp.asarray(mask)
    if mask.shape != x.shape[:2]:
        raise ValueError(f"mask has shape {mask.shape}; give one value a token, {x.shape[:2]}, True at real tokens.")
    mask = mask.astype(bool)
    order = jnp.argsort(~mask, axis=1, stable=True)
    return Compaction(order=order, inverse=jnp.argsort(order, axis=1), lengths=mask.sum(axis=1, dtype=jnp.int32))


def _trailing(a: Array, ndim: int) -> Array:
    """a [B, T] with axes of size 1 appended up to rank `ndim`."""
    return a.reshape(*a.shape, *(1,) * (ndim - a.ndim))


class SequenceModule(nnx.Module):
    """A module over whole sequences (`__call__`) or over their next tokens (`decode`), packed or padded.

    A subclass defines `mix` and `extend`, which take a `TokenLayout` (worked out once for all layers of a model) and
    find padding, if any, at the end of each row; and `_check_input`.
    """

    def __call__(
        self,
        x: Array,
        *,
        cu_seqlens: Array | None = None,
        mask: Array | None = None,
        prefix_lengths: Array | int | None = None,
    ) -> Array:
        """The outputs at every token of whole sequences.

        Args:
          x: [B, T, hidden_size]; for a model int tokens [B, T], or [B, T, input_size].
          cu_seqlens: int [N + 1], bounds of N sequences packed along T (then B = 1): starts at 0, never decreases.
            Nothing passes from one sequence to the next.
          mask: [B, T], True at the real tokens of a padded batch, padding anywhere. Padding is skipped, and outputs
            there are 0.
          prefix_lengths: int [N], or one int: the (real) tokens at the start of each sequence that run as a prefix, in
            chunks, before the rest is decoded token by token. Needed by layers with a decode policy, which are slow at
            decoded tokens; all others leave it unread.

        Returns [B, T, hidden_size] in the layer's dtype; for a model float32 [B, T, vocab_size or output_size].
        Raises ValueError for shapes that do not fit, and for a mask beside cu_seqlens.
        """
        self._check_input(x)
        if mask is None:
            return self.mix(x, token_layout(x, cu_seqlens)._replace(prefix_lengths=prefix_lengths))
        moves = compaction(mask, x, cu_seqlens)
        x = moves.apply(x)
        layout = token_layout(x)._replace(valid=moves.valid, prefix_lengths=prefix_lengths)
        return moves.undo(self.mix(x, layout))

    def decode(
        self, x: Array, cache: Any, *, mask: Array | None = None, prefix_lengths: Array | int | None = None
    ) -> tuple[Array, Any]:
        """The outputs at the next T ≥ 1 tokens of each sequence, a prompt or a single step, and the new cache.

        x, mask and the outputs: as in `__call__`; cache: from `init_cache` or the call before. However a sequence is
        split into calls, its outputs equal `__call__`'s on the whole, up to float32 rounding.

        Layers with a decode policy run the first prefix_lengths tokens of each sequence in chunks (a prompt: all of
        them) and decode the others, all of them where prefix_lengths is None; between calls they keep the state as the
        policy does, in codes.

        Raises NotImplementedError while a quantizer is enabled in a layer without a decode policy, ValueError for
        shapes that do not fit.
        """
        self._check_input(x)
        if mask is None:
            return self.extend(x, cache, token_layout(x)._replace(prefix_lengths=prefix_lengths))
        moves = compaction(mask, x)
        x = moves.apply(x)
        layout = token_layout(x)._replace(valid=moves.valid, prefix_lengths=prefix_lengths)
        y, cache = self.extend(x, cache, layout)
        return moves.undo(y), cache

    def mix(self, x: Array, layout: TokenLayout) -> Array:
        """`__call__` with the layout worked out."""
        raise NotImplementedError

    def extend(self, x: Array, cache: Any, layout: TokenLayout) -> tuple[Array, Any]:
        """`decode` with the layout worked out."""
        raise NotImplementedError

    def _check_input(self, x: Array) -> None:
        """Raises ValueError for a shape or dtype that the module does not take."""
        raise NotImplementedError


def kernel_init(initializer_range: float | None) -> initializers.Initializer:
    """Initialiser of projections and convolutions: normal with std `initializer_range`, or where None
    uniform ±1/√fan_in (what torch's Linear and Conv1d draw, hence FLA's layers outside a model)."""
    if initializer_range is None:
        return initializers.variance_scaling(1 / 3, "fan_in", "uniform")
    return initializers.normal(initializer_range)


def linear(
    in_features: int,
    out_features: int,
    *,
    use_bias: bool = False,
    initializer_range: float | None = None,
    dtype: DTypeLike = jnp.float32,
    param_dtype: DTypeLike = jnp.float32,
    rngs: nnx.Rngs,
) -> nnx.Linear:
    """An `nnx.Linear` initialised as `kernel_init` says; a bias starts uniform where the kernel does, else at 0."""
    bound = in_features**-0.5

    def bias_init(key, shape, dtype=jnp.float32, out_sharding=None):
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return nnx.Linear(
        in_features,
        out_features,
        use_bias=use_bias,
        kernel_init=kernel_init(initializer_range),
        bias_init=bias_init if initializer_range is None else initializers.zeros,
        dtype=dtype,
        param_dtype=param_dtype,
        rngs=rngs,
    )


def l2_normalize(x: Array, eps: float = 1e-6) -> Array:
    """x·rsqrt(Σx² + eps) over the last axis, computed in float32, in x's dtype."""
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.sum(x32 * x32, axis=-1, keepdims=True) + eps)).astype(x.dtype)


class RMSNorm(nnx.Module):
    """x·rsqrt(mean x² + eps)·scale over the last axis [dim], times activation(gate) where a gate is given.

    Computed in float32, returned in x's dtype. `scale` [dim] starts at 1. activation: a key of `GATE_ACTIVATIONS`.
    """

    def __init__(self, dim: int, *, eps: float, activation: str | None = None, param_dtype: DTypeLike = jnp.float32):
        if activation is not None and activation not in GATE_ACTIVATIONS:
            allowed = ", ".join(map(repr, GATE_ACTIVATIONS))
            raise ValueError(f"output gate activation {activation!r} is not supported; choose one of {allowed}.")
        self.scale = nnx.Param(jnp.ones((dim,), param_dtype))
        self.eps = eps
        self.activation = activation

    def __call__(self, x: Array, gate: Array | None = None) -> Array:
        x32 = x.astype(jnp.float32)
        y = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        y = y * self.scale[...].astype(jnp.float32)
        if gate is not None:
            if self.activation is None:
                raise ValueError("this norm was built without an output gate; pass activation= to RMSNorm.")
            y = y * GATE_ACTIVATIONS[self.activation](gate.astype(jnp.float32))
        return y.astype(x.dtype)


class ShortConvolution(nnx.Module):
    """Causal depthwise convolution over time, then SiLU. kernel [size, dim]: row `size - 1` weighs the token itself.

    Uniform ±1/√size at the start (torch's Conv1d), or normal with std `initializer_range`; a bias starts at 0.
    """

    def __init__(
        self,
        dim: int,
        size: int,
        *,
        use_bias: bool = False,
        initializer_range: float | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        if size < 1:
            raise ValueError(f"conv_size={size} must be at least 1; use_short_conv=False leaves the convolution out.")
        self.kernel = nnx.Param(kernel_init(initializer_range)(rngs.params(), (size, dim), param_dtype))
        self.bias = nnx.Param(jnp.zeros((dim,), param_dtype)) if use_bias else None
        self.size = size

    def __call__(self, x: Array, layout: TokenLayout) -> Array:
        """x [B, T, dim] → [B, T, dim]; never reads across a packed sequence's start."""
        # Padded, not concatenated with zeros: on a mesh of explicit axes those would not be cut as x is.
        extended = jnp.pad(x, ((0, 0), (self.size - 1, 0), (0, 0)))
        return self._convolve(extended, None if layout.segments is None else layout.positions)

    def extend(self, x: Array, tail: Array, layout: TokenLayout) -> tuple[Array, Array]:
        """x [B, T, dim] after `tail` [B, size - 1, dim], the inputs before it → (y, the new tail)."""
        extended = jnp.concatenate([tail.astype(x.dtype), x], axis=1)
        return self._convolve(extended, None), conv_tail(extended, x.shape[1], layout)

    def _convolve(self, extended: Array, positions: Array | None) -> Array:
        bias = None if self.bias is None else self.bias[...]
        return _conv_silu(extended, self.kernel[...], bias, positions)


# Recomputed in the backward pass: autodiff would keep a float32 copy of the input for each of the kernel's rows.
@jax.checkpoint
def _conv_silu(extended: Array, kernel: Array, bias: Array | None, positions: Array | None) -> Array:
    """extended [B, size - 1 + T, dim] → [B, T, dim]; positions [1, T] mask what lies before a sequence's start."""
    size, dim = kernel.shape
    length = extended.shape[1] - (size - 1)
    y = jnp.zeros((extended.shape[0], length, dim), jnp.float32)
    for row in range(size):
        x = extended[:, row : row + length].astype(jnp.float32)
        if positions is not None and row < size - 1:
            x = jnp.where(positions[..., None] >= size - 1 - row, x, 0.0)
        y = y + x * kernel[row].astype(jnp.float32)
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    return jax.nn.silu(y).astype(extended.dtype)


def conv_tail(extended: Array, length: int, layout: TokenLayout) -> Array:
    """The last rows before padding of extended [B, tail + length, dim]: [B, tail, dim], the next call's tail."""
    size = extended.shape[1] - length
    if layout.valid is None:
        return extended[:, length:]
    rows = layout.valid.sum(axis=1, dtype=jnp.int32)[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
    return jnp.take_along_axis(extended, rows[..., None], axis=1)


class SwiGLU(nnx.Module):
    """down_proj(silu(gate_proj(x))·up_proj(x)), without biases (arXiv 2002.05202). x [..., hidden] → [..., hidden]."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        initializer_range: float | None = None,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        options: dict[str, Any] = {"initializer_range": initializer_range, "dtype": dtype, "param_dtype": param_dtype}
        self.gate_proj = linear(hidden_size, intermediate_size, rngs=rngs, **options)
        self.up_proj = linear(hidden_size, intermediate_size, rngs=rngs, **options)
        self.down_proj = linear(intermediate_size, hidden_size, rngs=rngs, **options)

    def __call__(self, x: Array) -> Array:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))
