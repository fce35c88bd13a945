"""What Gated DeltaNet and Kimi Delta Attention share: projections, convolutions, the delta rule, output norm and cache.

D hidden size, H key heads, HV value heads, K = head_dim, V = head_dim·expand_v. The gates are in `jlaqat.layers`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jlaqat.blocks import RMSNorm, SequenceModule, ShortConvolution, TokenLayout, l2_normalize, linear
from jlaqat.checks import check_backend, check_checkpoint_every
from jlaqat.decode import delta_rule_step, fresh_carry
from jlaqat.decode_carry import DecodeCarry
from jlaqat.decode_policy import DecodePolicy
from jlaqat.ops import delta_rule
from jlaqat.quantizers import Quantizer, quantized_decode, quantized_delta_rule

Array = jax.Array


class DeltaCache(NamedTuple):
    """What a delta layer remembers between tokens: a fixed size, whatever came before."""

    state: Array | DecodeCarry  # [B, HV, K, V] float32; under a decode policy its codes, scales and ring
    q_tail: Array  # [B, conv_size - 1, H·K]: the convolution's last inputs; 0 rows without a convolution
    k_tail: Array  # [B, conv_size - 1, H·K]
    v_tail: Array  # [B, conv_size - 1, HV·V]


class DeltaLayer(SequenceModule):
    """x [B, T, D] → [B, T, D]. A subclass names its kind and defines `_log_decay` and `_output_gate`."""

    kind: str  # "gdn" or "kda": prefix of the quantizers' names

    def __init__(
        self,
        hidden_size: int,
        *,
        expand_v: float,
        head_dim: int,
        num_heads: int,
        num_v_heads: int | None,
        use_gate: bool,
        use_short_conv: bool,
        conv_size: int,
        conv_bias: bool,
        allow_neg_eigval: bool,
        gate_activation: str,
        norm_eps: float,
        initializer_range: float | None,
        dtype: DTypeLike,
        param_dtype: DTypeLike,
        checkpoint_every: int,
        backend: str,
        rngs: nnx.Rngs,
    ):
        num_v_heads = num_heads if num_v_heads is None else num_v_heads
        if min(hidden_size, num_heads, num_v_heads, head_dim) < 1:
            raise ValueError(
                f"hidden_size={hidden_size}, num_heads={num_heads}, num_v_heads={num_v_heads} and head_dim={head_dim} "
                f"must all be positive."
            )
        if num_v_heads % num_heads:
            raise ValueError(
                f"num_v_heads={num_v_heads} is not a multiple of num_heads={num_heads}, but every key head serves "
                f"equally many value heads; choose a multiple."
            )
        value_dim = head_dim * expand_v
        if round(value_dim) < 1 or not math.isclose(value_dim, round(value_dim), rel_tol=1e-5):
            raise ValueError(
                f"head_dim={head_dim} × expand_v={expand_v} = {value_dim:g} is no positive whole number; "
                f"change expand_v."
            )
        check_backend(backend)
        check_checkpoint_every(checkpoint_every)
        self.hidden_size = hidden_size
        self.num_heads, self.num_v_heads = num_heads, num_v_heads
        self.head_k_dim, self.head_v_dim = head_dim, round(value_dim)
        self.use_gate, self.use_short_conv = use_gate, use_short_conv
        self.conv_size = conv_size
        self.allow_neg_eigval = allow_neg_eigval
        self.initializer_range = initializer_range
        self.dtype, self.param_dtype = dtype, param_dtype
        self.checkpoint_every, self.backend = checkpoint_every, backend

        key_size, value_size = num_heads * head_dim, num_v_heads * self.head_v_dim
        self.q_proj = self._linear(hidden_size, key_size, rngs=rngs)
        self.k_proj = self._linear(hidden_size, key_size, rngs=rngs)
        self.v_proj = self._linear(hidden_size, value_size, rngs=rngs)
        self.b_proj = self._linear(hidden_size, num_v_heads, rngs=rngs)
        self.o_proj = self._linear(value_size, hidden_size, rngs=rngs)
        if use_short_conv:
            self.q_conv1d = self._conv(key_size, conv_bias, rngs)
            self.k_conv1d = self._conv(key_size, conv_bias, rngs)
            self.v_conv1d = self._conv(value_size, conv_bias, rngs)
        self.o_norm = RMSNorm(
            self.head_v_dim, eps=norm_eps, activation=gate_activation if use_gate else None, param_dtype=param_dtype
        )
        for site in ("state", "w"):
            quantizer = Quantizer(site, num_heads=num_v_heads, key_dim=head_dim, value_dim=self.head_v_dim)
            setattr(self, f"{self.kind}_{site}_quantizer", quantizer)

    def mix(self, x: Array, layout: TokenLayout) -> Array:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.use_short_conv:
            q, k, v = self.q_conv1d(q, layout), self.k_conv1d(k, layout), self.v_conv1d(v, layout)
        else:
            q, k, v = jax.nn.silu(q), jax.nn.silu(k), jax.nn.silu(v)
        q, k, v = self._heads(q, k, v)
        g, beta = self._gates(x, layout)
        quantizers = self._quantizer("state"), self._quantizer("w")
        o, _ = quantized_delta_rule(
            *quantizers,
            q,
            k,
            v,
            g,
            beta,
            cu_seqlens=layout.cu_seqlens,
            prefix_lengths=layout.prefix_lengths,
            lengths=layout.lengths,
            checkpoint_every=self.checkpoint_every,
            backend=self.backend,
        )
        return self._output(o, x)

    def init_cache(self, batch: int, max_length: int | None = None) -> DeltaCache:
        """An empty cache for `batch` sequences. max_length is read by attention only: a state does not grow."""
        tail = self.conv_size - 1 if self.use_short_conv else 0
        key_size, value_size = self.num_heads * self.head_k_dim, self.num_v_heads * self.head_v_dim
        zeros = jnp.zeros((batch, self.num_v_heads, self.head_k_dim, self.head_v_dim), jnp.float32)
        policy = self._policy()
        per_channel = self.kind == "kda"
        return DeltaCache(
            state=zeros if policy is None else fresh_carry(policy, zeros, self.num_heads, gate_per_channel=per_channel),
            q_tail=jnp.zeros((batch, tail, key_size), self.dtype),
            k_tail=jnp.zeros((batch, tail, key_size), self.dtype),
            v_tail=jnp.zeros((batch, tail, value_size), self.dtype),
        )

    def extend(self, x: Array, cache: DeltaCache, layout: TokenLayout) -> tuple[Array, DeltaCache]:
        self.check_decode()
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.use_short_conv:
            q, q_tail = self.q_conv1d.extend(q, cache.q_tail, layout)
            k, k_tail = self.k_conv1d.extend(k, cache.k_tail, layout)
            v, v_tail = self.v_conv1d.extend(v, cache.v_tail, layout)
        else:
            q, k, v = jax.nn.silu(q), jax.nn.silu(k), jax.nn.silu(v)
            q_tail, k_tail, v_tail = cache.q_tail, cache.k_tail, cache.v_tail
        q, k, v = self._heads(q, k, v)
        g, beta = self._gates(x, layout)
        state: Array | DecodeCarry
        quantizers = self._quantizer("state"), self._quantizer("w")
        if self._policy() is not None:
            phases: dict[str, Any] = {"prefix_lengths": layout.prefix_lengths, "lengths": layout.lengths}
            o, state = quantized_decode(*quantizers, q, k, v, g, beta, cache.state, **phases, backend=self.backend)
        elif isinstance(cache.state, DecodeCarry):
            raise ValueError("the cache was made under a decode policy that the layer has no more; call init_cache.")
        elif x.shape[1] == 1:
            o, state = delta_rule_step(q[:, 0], k[:, 0], v[:, 0], g[:, 0], beta[:, 0], cache.state)
            o = o[:, None]
        else:
            o, state = delta_rule(q, k, v, g, beta, initial_state=cache.state, backend=self.backend)
        return self._output(o, x), DeltaCache(state, q_tail, k_tail, v_tail)

    def check_decode(self) -> None:
        """Raises NotImplementedError where decoding would leave out a rounding that training had."""
        if self._policy() is not None:
            return
        for site in ("state", "w"):
            quantizer = self._quantizer(site)
            if quantizer is not None and quantizer.enabled:
                setting = quantizer.spec.describe() if quantizer.spec is not None else "no setting"
                raise NotImplementedError(
                    f"{quantizer.label.text} is enabled ({setting}), but nothing says when a decoder rounds: "
                    f"token by token is another function than chunk by chunk. Give the module a decode policy (an "
                    f"entry {{module_name: …, cfg: {{…}}}} of the quant_cfg). To decode without rounding, call "
                    f"disable_quantizer(model, '*') or strip_quantizers(model) first; to score with rounding, call the "
                    f"model on whole sequences."
                )

    def _log_decay(self, x: Array) -> Array:
        """Log decay of x [B, T, D]: [B, T, HV] (GDN) or [B, T, HV, K] (KDA), float32."""
        raise NotImplementedError

    def _output_gate(self, x: Array) -> Array:
        """Input of the output gate, [B, T, HV·V]."""
        raise NotImplementedError

    def _gates(self, x: Array, layout: TokenLayout) -> tuple[Array, Array]:
        """(g, beta), float32; at padding 0 and 0, which leaves the state as it is, bit for bit."""
        g = self._log_decay(x)
        beta = jax.nn.sigmoid(self.b_proj(x).astype(jnp.float32))
        if self.allow_neg_eigval:
            beta = 2.0 * beta
        if layout.valid is not None:
            beta = jnp.where(layout.valid[..., None], beta, 0.0)
            g = jnp.where(layout.valid.reshape(*layout.valid.shape, *(1,) * (g.ndim - 2)), g, 0.0)
        return g, beta

    def _heads(self, q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
        """Features to heads: q, k [B, T, H, K], L2-normalised; v [B, T, HV, V]."""
        batch, length = q.shape[:2]
        q = l2_normalize(q.reshape(batch, length, self.num_heads, self.head_k_dim))
        k = l2_normalize(k.reshape(batch, length, self.num_heads, self.head_k_dim))
        return q, k, v.reshape(batch, length, self.num_v_heads, self.head_v_dim)

    def _output(self, o: Array, x: Array) -> Array:
        """o [B, T, HV, V] normalised by head, gated by x, and projected: [B, T, D]."""
        gate = self._output_gate(x).reshape(o.shape) if self.use_gate else None
        o = self.o_norm(o, gate)
        return self.o_proj(o.reshape(*o.shape[:2], self.num_v_heads * self.head_v_dim))

    def _quantizer(self, site: str) -> Quantizer | None:
        return getattr(self, f"{self.kind}_{site}_quantizer")

    def _policy(self) -> DecodePolicy | None:
        """How the layer decodes; None where no rule says so."""
        quantizer = self._quantizer("state")
        return None if quantizer is None else quantizer.policy

    def _linear(self, in_features: int, out_features: int, *, use_bias: bool = False, rngs: nnx.Rngs) -> nnx.Linear:
        return linear(
            in_features,
            out_features,
            use_bias=use_bias,
            initializer_range=self.initializer_range,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            rngs=rngs,
        )

    def _conv(self, dim: int, use_bias: bool, rngs: nnx.Rngs) -> ShortConvolution:
        return ShortConvolution(
            dim,
            self.conv_size,
            use_bias=use_bias,
            initializer_range=self.initializer_range,
            param_dtype=self.param_dtype,
            rngs=rngs,
        )

    def _check_input(self, x: Array) -> None:
        if x.ndim != 3 or x.shape[-1] != self.hidden_size:
            name = type(self).__name__
            raise ValueError(f"x has shape {x.shape}; {name} takes [batch, tokens, hidden_size={self.hidden_size}].")
