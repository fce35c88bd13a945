"""Gated DeltaNet and Kimi Delta Attention as Flax NNX modules: one base, two gates.

Parameters, initialisation and options are those of FLA's layers of the same names (arXiv 2412.06464, arXiv 2510.26692);
`jlaqat.weights` carries weights to and from them. D hidden size, H key heads, HV value heads, K = head_dim,
V = head_dim·expand_v.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jlaqat.blocks import RMSNorm, SequenceModule, ShortConvolution, TokenLayout, l2_normalize, linear
from jlaqat.checks import check_backend
from jlaqat.decode import delta_rule_step, fresh_carry
from jlaqat.decode_carry import DecodeCarry
from jlaqat.decode_policy import DecodePolicy
from jlaqat.ops import delta_rule
from jlaqat.quantizers import Quantizer, quantized_decode, quantized_delta_rule

Array = jax.Array

A_MAX = 16.0  # decay rates are drawn up to 16 (Mamba2's range, kept by GDN and KDA)
DT_MIN, DT_MAX, DT_FLOOR = 1e-3, 0.1, 1e-4


class DeltaCache(NamedTuple):
    """What a delta layer remembers between tokens: a fixed size, whatever came before."""

    state: Array | DecodeCarry  # [B, HV, K, V] float32; under a decode policy its codes, scales and ring
    q_tail: Array  # [B, conv_size - 1, H·K]: the convolution's last inputs; 0 rows without a convolution
    k_tail: Array  # [B, conv_size - 1, H·K]
    v_tail: Array  # [B, conv_size - 1, HV·V]


def init_decay_rate(key: Array, num_heads: int, low: float) -> Array:
    """A_log [num_heads] = log U(low, 16), drawn in float32 whatever the model's dtype, and never from 0.

    In bfloat16, U(0, 16) hits 0 every few hundred draws and its log is −inf for good; the draw here is from (low, 16].
    """
    u = 1.0 - jax.random.uniform(key, (num_heads,), jnp.float32)  # (0, 1]
    return jnp.log(low + (A_MAX - low) * u)


def init_dt_bias(key: Array, size: int) -> Array:
    """dt_bias [size], float32: the inverse softplus of time steps that are log-uniform in [1e-3, 0.1]."""
    u = jax.random.uniform(key, (size,), jnp.float32)
    dt = jnp.maximum(jnp.exp(math.log(DT_MIN) + u * (math.log(DT_MAX) - math.log(DT_MIN))), DT_FLOOR)
    return dt + jnp.log(-jnp.expm1(-dt))


def softplus_gate(a: Array, a_log: Array, dt_bias: Array) -> Array:
    """Log decay −e^{a_log}·softplus(a + dt_bias), float32, ≤ 0. The arguments broadcast."""
    return -jnp.exp(a_log) * jax.nn.softplus(a.astype(jnp.float32) + dt_bias)


def bounded_gate(a: Array, a_log: Array, dt_bias: Array, lower_bound: float) -> Array:
    """Log decay lower_bound·sigmoid(e^{a_log}·(a + dt_bias)), float32, in (lower_bound, 0). The arguments broadcast."""
    return lower_bound * jax.nn.sigmoid(jnp.exp(a_log) * (a.astype(jnp.float32) + dt_bias))


class _DeltaLayer(SequenceModule):
    """What the two layers share. A subclass names its kind and defines `_log_decay` and `_output_gate`."""

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
        self.hidden_size = hidden_size
        self.num_heads, self.num_v_heads = num_heads, num_v_heads
        self.head_k_dim, self.head_v_dim = head_dim, round(value_dim)
        self.use_gate, self.use_short_conv = use_gate, use_short_conv
        self.conv_size = conv_size
        self.allow_neg_eigval = allow_neg_eigval
        self.initializer_range = initializer_range
        self.dtype, self.param_dtype = dtype, param_dtype
        self.backend = backend

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
                    f"{self.kind}_{site}_quantizer is enabled ({setting}), but nothing says when a decoder rounds: "
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
        return self.o_proj(self.o_norm(o, gate).reshape(*o.shape[:2], -1))

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


class GatedDeltaNet(_DeltaLayer):
    """Gated DeltaNet (arXiv 2412.06464): the delta rule with one decay a value head. x [B, T, D] → [B, T, D].

    g = −e^{A_log}·softplus(a_proj(x) + dt_bias); output RMSNorm × SiLU(g_proj(x)).

    Args:
      hidden_size: D.
      expand_v: V = head_dim·expand_v.
      head_dim: K.
      num_heads: H, heads of q and k.
      num_v_heads: HV, a multiple of H (grouped value heads); None means H.
      use_gate: the output gate; without it the output norm stands alone.
      use_short_conv: convolutions on q, k and v; without them SiLU alone.
      conv_size, conv_bias: width and bias of the convolutions.
      allow_neg_eigval: beta in (0, 2) instead of (0, 1) (arXiv 2411.12537).
      output_gate_activation: "silu" (alias "swish") or "sigmoid".
      norm_eps: of the output norm.
      initializer_range: std of projections and convolutions; None draws them as torch does.
      dtype, param_dtype: of the computation and of the parameters; A_log and dt_bias are always float32.
      backend: of the delta rule, see `jlaqat.delta_rule`.
      rngs: stream "params".
    """

    kind = "gdn"

    def __init__(
        self,
        hidden_size: int = 2048,
        *,
        expand_v: float = 2.0,
        head_dim: int = 256,
        num_heads: int = 6,
        num_v_heads: int | None = None,
        use_gate: bool = True,
        use_short_conv: bool = True,
        conv_size: int = 4,
        conv_bias: bool = False,
        allow_neg_eigval: bool = False,
        output_gate_activation: str = "silu",
        norm_eps: float = 1e-5,
        initializer_range: float | None = None,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        backend: str = "auto",
        rngs: nnx.Rngs,
    ):
        super().__init__(
            hidden_size,
            expand_v=expand_v,
            head_dim=head_dim,
            num_heads=num_heads,
            num_v_heads=num_v_heads,
            use_gate=use_gate,
            use_short_conv=use_short_conv,
            conv_size=conv_size,
            conv_bias=conv_bias,
            allow_neg_eigval=allow_neg_eigval,
            gate_activation=output_gate_activation,
            norm_eps=norm_eps,
            initializer_range=initializer_range,
            dtype=dtype,
            param_dtype=param_dtype,
            backend=backend,
            rngs=rngs,
        )
        self.a_proj = self._linear(hidden_size, self.num_v_heads, rngs=rngs)
        self.A_log = nnx.Param(init_decay_rate(rngs.params(), self.num_v_heads, low=0.0))
        self.dt_bias = nnx.Param(init_dt_bias(rngs.params(), self.num_v_heads))
        if use_gate:
            self.g_proj = self._linear(hidden_size, self.num_v_heads * self.head_v_dim, rngs=rngs)

    def _log_decay(self, x: Array) -> Array:
        return softplus_gate(self.a_proj(x), self.A_log[...], self.dt_bias[...])

    def _output_gate(self, x: Array) -> Array:
        return self.g_proj(x)


class KimiDeltaAttention(_DeltaLayer):
    """Kimi Delta Attention (arXiv 2510.26692): the delta rule with one decay a key channel. x [B, T, D] → [B, T, D].

    a = f_proj(x) [HV, K] through a bottleneck of width V; g = −e^{A_log}·softplus(a + dt_bias), or where `lower_bound`
    is set lower_bound·sigmoid(e^{A_log}·(a + dt_bias)); output RMSNorm × sigmoid(g_proj(x)).

    Args: those of `GatedDeltaNet`, without output_gate_activation, and
      safe_gate: decays start at e^{A_log} = 1; needs `lower_bound` (FLA's flag of the same name).
      lower_bound: smallest log decay of a token, in [−5, 0); None leaves it unbounded.
    """

    kind = "kda"

    def __init__(
        self,
        hidden_size: int = 2048,
        *,
        expand_v: float = 1.0,
        head_dim: int = 128,
        num_heads: int = 16,
        num_v_heads: int | None = None,
        use_gate: bool = True,
        use_short_conv: bool = True,
        conv_size: int = 4,
        conv_bias: bool = False,
        allow_neg_eigval: bool = False,
        safe_gate: bool = False,
        lower_bound: float | None = None,
        norm_eps: float = 1e-5,
        initializer_range: float | None = None,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        backend: str = "auto",
        rngs: nnx.Rngs,
    ):
        if lower_bound is not None and not -5.0 <= lower_bound < 0.0:
            raise ValueError(f"lower_bound={lower_bound} is outside [-5, 0); e.g. -5.0, or None for an unbounded gate.")
        if safe_gate and lower_bound is None:
            raise ValueError("safe_gate=True needs a bound: set lower_bound in [-5, 0), e.g. -5.0.")
        super().__init__(
            hidden_size,
            expand_v=expand_v,
            head_dim=head_dim,
            num_heads=num_heads,
            num_v_heads=num_v_heads,
            use_gate=use_gate,
            use_short_conv=use_short_conv,
            conv_size=conv_size,
            conv_bias=conv_bias,
            allow_neg_eigval=allow_neg_eigval,
            gate_activation="sigmoid",
            norm_eps=norm_eps,
            initializer_range=initializer_range,
            dtype=dtype,
            param_dtype=param_dtype,
            backend=backend,
            rngs=rngs,
        )
        self.lower_bound = lower_bound
        gate_size, value_size = self.num_v_heads * head_dim, self.num_v_heads * self.head_v_dim
        self.f_proj = nnx.List(
            [self._linear(hidden_size, self.head_v_dim, rngs=rngs), self._linear(self.head_v_dim, gate_size, rngs=rngs)]
        )
        a_log = init_decay_rate(rngs.params(), self.num_v_heads, low=1.0)
        self.A_log = nnx.Param(jnp.zeros_like(a_log) if safe_gate else a_log)
        self.dt_bias = nnx.Param(init_dt_bias(rngs.params(), gate_size))
        if use_gate:
            self.g_proj = nnx.List(
                [
                    self._linear(hidden_size, self.head_v_dim, rngs=rngs),
                    self._linear(self.head_v_dim, value_size, use_bias=True, rngs=rngs),
                ]
            )

    def _log_decay(self, x: Array) -> Array:
        a = self.f_proj[1](self.f_proj[0](x)).reshape(*x.shape[:2], self.num_v_heads, self.head_k_dim)
        a_log = self.A_log[...][:, None]
        dt_bias = self.dt_bias[...].reshape(self.num_v_heads, self.head_k_dim)
        if self.lower_bound is None:
            return softplus_gate(a, a_log, dt_bias)
        return bounded_gate(a, a_log, dt_bias, self.lower_bound)

    def _output_gate(self, x: Array) -> Array:
        return self.g_proj[1](self.g_proj[0](x))
