"""Gated DeltaNet and Kimi Delta Attention as Flax NNX modules: one base (`jlaqat.delta_layer`), two gates.

Parameters, initialisation and options are those of FLA's layers of the same names (arXiv 2412.06464, arXiv 2510.26692);
`jlaqat.weights` carries weights to and from them. D hidden size, H key heads, HV value heads, K = head_dim,
V = head_dim·expand_v.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jlaqat.delta_layer import DeltaCache as DeltaCache
from jlaqat.delta_layer import DeltaLayer
from jlaqat.spec import CHUNK_SIZE

Array = jax.Array

A_MAX = 16.0  # decay rates are drawn up to 16 (Mamba2's range, kept by GDN and KDA)
DT_MIN, DT_MAX, DT_FLOOR = 1e-3, 0.1, 1e-4


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


class GatedDeltaNet(DeltaLayer):
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
      checkpoint_every: under a decode policy, see `jlaqat.delta_rule_decode`.
      backend: of the delta rule, see `jlaqat.delta_rule`.
      rngs: stream "params".

    Called, it takes and gives x in `dtype`, with cu_seqlens or mask (`SequenceModule.__call__`); `decode` goes on token
    by token. Raises ValueError for sizes that do not fit together.
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
        checkpoint_every: int = CHUNK_SIZE,
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
            checkpoint_every=checkpoint_every,
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


class KimiDeltaAttention(DeltaLayer):
    """Kimi Delta Attention (arXiv 2510.26692): the delta rule with one decay a key channel. x [B, T, D] → [B, T, D].

    a = f_proj(x) [HV, K] through a bottleneck of width V; g = −e^{A_log}·softplus(a + dt_bias), or where `lower_bound`
    is set lower_bound·sigmoid(e^{A_log}·(a + dt_bias)); output RMSNorm × sigmoid(g_proj(x)).

    Args: those of `GatedDeltaNet`, without output_gate_activation, and
      safe_gate: decays start at e^{A_log} = 1; needs `lower_bound` (FLA's flag of the same name).
      lower_bound: smallest log decay of a token, in [−5, 0); None leaves it unbounded.

    Raises ValueError for sizes that do not fit together and a bound outside [−5, 0).
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
        checkpoint_every: int = CHUNK_SIZE,
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
            checkpoint_every=checkpoint_every,
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
