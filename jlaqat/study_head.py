"""One Gated DeltaNet head with nothing around it: the smallest model of the study, linear but for the delta rule.

q, k, v and both gates are linear in the input, and so is the output in what the head reads: no convolution, SiLU,
normalisation of the output, residual or MLP. What a state's rounding costs, and what training can do about it, then
shows undisturbed. Of tokens, the input is the one-hot pair of the token before and this one, so that a value can be
written under the key that came before it. `GatedDeltaNet` and `DecoderLM` are the layers to build models from.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import variance_scaling

from jlaqat.blocks import l2_normalize
from jlaqat.layers import softplus_gate
from jlaqat.quantizers import Quantizer, quantized_delta_rule


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """Sizes of a `DeltaHead`. Raises ValueError for a size below 1, and unless it is either tokens or vectors."""

    # Tokens in, logits out: a vocabulary. Vectors in and out: input_size and output_size instead.
    vocab_size: int | None = None
    input_size: int | None = None
    output_size: int | None = None
    # K and V: the state is K × V.
    key_dim: int = 32
    value_dim: int = 32
    # β in (0, 2) instead of (0, 1).
    allow_neg_eigval: bool = False
    # Of the delta rule, see `jlaqat.delta_rule`.
    backend: str = "auto"

    def __post_init__(self) -> None:
        vectors = (self.input_size is not None, self.output_size is not None)
        if any(vectors) != all(vectors) or (self.vocab_size is None) != all(vectors):
            raise ValueError(
                f"head.vocab_size={self.vocab_size}, input_size={self.input_size}, output_size={self.output_size}: "
                "give vocab_size for tokens, or both input_size and output_size for vectors."
            )
        for field in ("vocab_size", "input_size", "output_size", "key_dim", "value_dim"):
            size = getattr(self, field)
            if size is not None and size < 1:
                raise ValueError(f"head.{field}={size} must be at least 1.")

    @property
    def features(self) -> int:
        """Length of what the projections read."""
        return 2 * self.vocab_size if self.vocab_size is not None else self.input_size or 0


class DeltaHead(nnx.Module):
    """x [B, T, input_size] → [B, T, output_size], float32: the delta rule on L2-normalised q and k, read with scale 1.
    With a vocabulary: int32 [B, T] → logits [B, T, vocab_size].

    g = −e^{A_log}·softplus(a_proj(x) + dt_bias), β = sigmoid(b_proj(x)) (doubled where negative eigenvalues are
    allowed), as in Gated DeltaNet (arXiv 2412.06464). Quantizers: `gdn_state_quantizer`, `gdn_w_quantizer`.
    """

    def __init__(self, config: HeadConfig, *, rngs: nnx.Rngs):
        def project(inputs: int, outputs: int, variance: float = 1.0) -> nnx.Linear:
            init = variance_scaling(variance, "fan_in", "normal")
            return nnx.Linear(inputs, outputs, use_bias=False, kernel_init=init, rngs=rngs)

        self.config = config
        inputs, outputs = config.features, config.vocab_size or config.output_size or 0
        self.q_proj = project(inputs, config.key_dim)
        self.k_proj = project(inputs, config.key_dim)
        self.v_proj = project(inputs, config.value_dim)
        # Gates start nearly constant: β at its middle, a decay of softplus(−4) = 0.018 a token.
        self.a_proj = project(inputs, 1, 0.01)
        self.b_proj = project(inputs, 1, 0.01)
        self.A_log = nnx.Param(jnp.zeros((1,), jnp.float32))
        self.dt_bias = nnx.Param(jnp.full((1,), -4.0, jnp.float32))
        self.o_proj = project(config.value_dim, outputs)
        sizes = {"num_heads": 1, "key_dim": config.key_dim, "value_dim": config.value_dim}
        self.gdn_state_quantizer = Quantizer("state", **sizes)
        self.gdn_w_quantizer = Quantizer("w", **sizes)

    def __call__(
        self,
        x: jax.Array,
        *,
        cu_seqlens: jax.Array | None = None,
        prefix_lengths: jax.Array | int | None = None,
    ) -> jax.Array:
        vocabulary = self.config.vocab_size
        if vocabulary is not None:
            x = _pairs(x, vocabulary)
        elif x.ndim != 3 or x.shape[-1] != self.config.input_size:
            raise ValueError(
                f"x has shape {x.shape}; a head takes [batch, tokens, input_size={self.config.input_size}]."
            )
        q, k, v = (project(x)[:, :, None] for project in (self.q_proj, self.k_proj, self.v_proj))  # [B, T, 1, K or V]
        beta = jax.nn.sigmoid(self.b_proj(x)) * (2.0 if self.config.allow_neg_eigval else 1.0)
        o, _ = quantized_delta_rule(
            self.gdn_state_quantizer,
            self.gdn_w_quantizer,
            l2_normalize(q),
            l2_normalize(k),
            v,
            softplus_gate(self.a_proj(x), self.A_log[...], self.dt_bias[...]),
            beta,
            scale=1.0,
            cu_seqlens=cu_seqlens,
            prefix_lengths=prefix_lengths,
            backend=self.config.backend,
        )
        return self.o_proj(o[:, :, 0])


def _pairs(tokens: jax.Array, vocabulary: int) -> jax.Array:
    """tokens int32 [B, T] → float32 [B, T, 2·vocabulary]: one-hot of the token before (first: zeros) and of this."""
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"x is {tokens.dtype} {tokens.shape}; a head with vocab_size takes integers [batch, tokens].")
    hot = jax.nn.one_hot(tokens, vocabulary, dtype=jnp.float32)
    return jnp.concatenate([jnp.pad(hot, ((0, 0), (1, 0), (0, 0)))[:, :-1], hot], axis=-1)
