"""The delta rule as an operation: `delta_rule` and its relatives, their checks and the choice of a backend."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jlaqat import checks, reference
from jlaqat.backends import choose
from jlaqat.chunked import Inputs, delta_rule_chunked
from jlaqat.observe import observe
from jlaqat.op_shards import OperandLayouts, on_shards
from jlaqat.recurrent import delta_rule_by_token
from jlaqat.rounding import SiteStats
from jlaqat.shards import all_varying_axes, vary_over
from jlaqat.spec import CHUNK_SIZE, DeltaQuant, QuantArrays, QuantConfigError
from jlaqat.triton_backend import delta_rule_triton

Array = jax.Array


def delta_rule(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    *,
    scale: float | None = None,
    initial_state: Array | None = None,
    cu_seqlens: Array | None = None,
    quant: DeltaQuant = DeltaQuant(),  # noqa: B008 (frozen)
    quant_arrays: QuantArrays | None = None,
    backend: str = "auto",
) -> tuple[Array, Array]:
    """Gated DeltaNet or Kimi Delta Attention over whole sequences, with rounding inside the recurrence.

    Every token decays the state, corrects it towards v, and reads it:
    S ← Diag(e^g)·S; S ← S + k (β (v − Sᵀk))ᵀ; o = scale·Sᵀq. The work is done in chunks of 64 tokens.

    Args:
      q, k: [B, T, H, K], B ≥ 1, T ≥ 0, in one of float32, bfloat16, float16, float64 (under x64). Normalise k (and q)
        beforehand.
      v: [B, T, HV, V] in the same dtype; HV a multiple of H, and value head hv reads key head hv // (HV/H).
      g: log decay, natural log, ≤ 0, float32. [B, T, HV]: one gate a value head (GDN);
        [B, T, HV, K]: one a key channel (KDA). Below -88 it counts as -88: -1e9 or -inf leave 6e-39 of a state.
      beta: [B, T, HV] write strength in (0, 1), or (0, 2).
      scale: of q; a Python number, K^−½ unless given.
      initial_state: [N, HV, K, V], zeros unless given; N sequences: B, or len(cu_seqlens) − 1.
      cu_seqlens: int32 [N + 1], packed sequences along T (then B = 1): sequence n starts at token cu_seqlens[n]. It
        starts at 0, never decreases and ends at T or before; tokens past its end give o = 0 and have zero gradients.
      quant: what is rounded (static under jit). The state is rounded on entry, after every chunk and at the end, w once
        a token; gradients pass straight through. A state cadence of 1 or 16 runs `delta_rule_recurrent`.
      quant_arrays: static scales and the counters of stochastic rounding; no gradient flows to them.
      backend: "triton" (NVIDIA GPUs from SM80 on), "xla" (any device), "recurrent" (plain JAX as well, token by token
        whatever the cadence: quicker than chunks where many sequences have small states), "reference" (slow, for
        tests), or "auto": triton where it can, else xla. The logger "jlaqat" says once which, and why not triton on a
        GPU. What "auto" traces on a machine with a GPU runs as xla where it is lowered for another platform.

    Returns (o [B, T, HV, V] in v's dtype, final_state [N, HV, K, V] in float32, float64 for float64 inputs).

    Raises ValueError (QuantConfigError for quantizer settings, NotImplementedError for a backend that cannot run here)
    before any work. The values of a `cu_seqlens` traced under jit cannot raise: where they break the rules, o and the
    final state are NaN throughout.

    Source of the maths: arXiv 2412.06464 and arXiv 2510.26692; docs/delta_rule.md says what rounds where.
    """
    inputs, cu_seqlens, arrays, scale = _prepare(
        q, k, v, g, beta, scale, initial_state, cu_seqlens, quant, quant_arrays
    )
    by_token = backend == "recurrent" or (quant.state is not None and quant.state.cadence != CHUNK_SIZE)
    backend = choose(backend, inputs, quant)
    if by_token:
        _check_no_w(quant, f"backend={backend!r}")
    if backend == "reference":
        _check_concrete(cu_seqlens)
        settings = dict(
            scale=scale, initial_state=inputs.initial_state, cu_seqlens=cu_seqlens, quant=quant, quant_arrays=arrays
        )
        define = reference.delta_rule_tokens if by_token else reference.delta_rule_chunks
        return define(*inputs[:5], **settings)

    def run(inputs: Inputs, cu_seqlens: Array | None, arrays: QuantArrays):
        if backend in ("triton", "triton or xla"):
            return delta_rule_triton(inputs, cu_seqlens, quant, scale, portable=backend != "triton")
        return (delta_rule_by_token if by_token else delta_rule_chunked)(inputs, cu_seqlens, quant, arrays, scale)

    return _poison(_on_shards(run, inputs, cu_seqlens, arrays), cu_seqlens, inputs.k.shape[1])


def delta_rule_recurrent(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    *,
    scale: float | None = None,
    initial_state: Array | None = None,
    cu_seqlens: Array | None = None,
    quant: DeltaQuant = DeltaQuant(),  # noqa: B008 (frozen)
    quant_arrays: QuantArrays | None = None,
    backend: str = "auto",
) -> tuple[Array, Array]:
    """`delta_rule` token by token: the state is rounded every `quant.state.cadence` (1, 16 or 64) tokens.

    Arguments, results and errors are those of `delta_rule`. The state is also rounded on entry and at the end of a
    sequence; outputs read it before it is rounded. With cadence 64 rounding falls where `delta_rule` rounds, and they
    agree up to the order of sums. quant.w must be None: w exists only chunk by chunk. The gradient is straight-through
    and its memory grows with T / 64 states. Runs on the xla backend (and "reference").
    """
    inputs, cu_seqlens, arrays, scale = _prepare(
        q, k, v, g, beta, scale, initial_state, cu_seqlens, quant, quant_arrays
    )
    _check_no_w(quant, "delta_rule_recurrent")
    if choose(backend, inputs, quant, by_token=True) == "reference":
        _check_concrete(cu_seqlens)
        settings = dict(scale=scale, initial_state=inputs.initial_state, cu_seqlens=cu_seqlens)
        return reference.delta_rule_tokens(*inputs[:5], **settings, quant=quant, quant_arrays=arrays)

    def run(inputs: Inputs, cu_seqlens: Array | None, arrays: QuantArrays):
        return delta_rule_by_token(inputs, cu_seqlens, quant, arrays, scale)

    return _poison(_on_shards(run, inputs, cu_seqlens, arrays), cu_seqlens, inputs.k.shape[1])


def delta_rule_observe(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    *,
    scale: float | None = None,
    initial_state: Array | None = None,
    cu_seqlens: Array | None = None,
    quant: DeltaQuant = DeltaQuant(),  # noqa: B008 (frozen)
    quant_arrays: QuantArrays | None = None,
    backend: str = "auto",
) -> tuple[Array, Array, dict[str, SiteStats | None]]:
    """`delta_rule` with statistics of what its quantizers saw and did, for calibration and metrics. Forward only.

    Arguments and errors are those of `delta_rule`; it runs on the xla backend, for "auto" and "triton" too: statistics
    are of the same arithmetic.

    Returns (o, final_state, {"state": SiteStats or None, "w": SiteStats or None}). Every rounding of the call enters:
    the initial state's where one is given, each chunk's (or each `cadence` tokens'), each token's of w, but no padding.
    """
    inputs, cu_seqlens, arrays, scale = _prepare(
        q, k, v, g, beta, scale, initial_state, cu_seqlens, quant, quant_arrays
    )
    checks.check_backend(backend)
    if backend == "reference":
        raise NotImplementedError("backend='reference' gathers no statistics; use backend='xla' or 'auto'.")
    o, final_state, stats = observe(jax.lax.stop_gradient(inputs), cu_seqlens, quant, arrays, scale)
    return *_poison((o, final_state), cu_seqlens, inputs.k.shape[1]), stats


def _prepare(q, k, v, g, beta, scale, initial_state, cu_seqlens, quant, quant_arrays):
    """Operands as arrays, checked."""
    q, k, v, g, beta = (x if isinstance(x, jax.Array) else jnp.asarray(x) for x in (q, k, v, g, beta))
    checks.check_operands(q, k, v, g, beta)
    if cu_seqlens is not None:
        # Concrete values stay numpy, or under jit their check would see a tracer.
        cu_seqlens = cu_seqlens if checks.is_traced(cu_seqlens) else np.asarray(cu_seqlens)
        checks.check_cu_seqlens(cu_seqlens, k)
    sequences = k.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if initial_state is not None:
        initial_state = jnp.asarray(initial_state)
        checks.check_initial_state(initial_state, (sequences, v.shape[2], k.shape[3], v.shape[3]))
    arrays = QuantArrays() if quant_arrays is None else quant_arrays
    checks.check_quant(quant, arrays, k, v)
    checks.check_token_axis(quant, q=q, k=k, v=v, g=g, beta=beta)
    inputs = Inputs(*_same_shards(q, k, v, g, beta, initial_state))
    return inputs, cu_seqlens, arrays, checks.check_scale(scale, k.shape[3])


def _check_no_w(quant: DeltaQuant, what: str) -> None:
    if quant.w is not None:
        raise QuantConfigError(
            f"quant.w ({quant.w.describe()}) does not apply to {what}: w belongs to chunks. Use delta_rule with "
            "backend='xla', or w=None."
        )


def _check_concrete(cu_seqlens: Array | None) -> None:
    if cu_seqlens is not None and checks.is_traced(cu_seqlens):
        raise NotImplementedError(
            "backend='reference' cuts packed sequences in Python, so cu_seqlens must not be traced; "
            "use backend='xla' under jit."
        )


def _same_shards(*arrays: Array | None) -> list[Any]:
    """Inside shard_map: operands that vary over the same mesh axes, so that a custom gradient has the types it must."""
    axes = all_varying_axes(arrays)
    return [x if x is None else vary_over(x, axes) for x in arrays]


def _on_shards(run: Any, inputs: Inputs, cu_seqlens: Array | None, arrays: QuantArrays) -> tuple[Array, Array]:
    """`run(inputs, cu_seqlens, arrays)`, on shards where a mesh of explicit axes asks for that."""

    def local(inputs: Inputs, arrays: QuantArrays, cu_seqlens: Array | None) -> tuple[Array, Array]:
        return run(inputs, cu_seqlens, arrays)

    def layouts(of: OperandLayouts) -> Any:
        return None if cu_seqlens is None else "sequences", lambda results: (of.o, of.state)

    cu_seqlens = None if cu_seqlens is None else jnp.asarray(cu_seqlens)
    return on_shards(local, inputs, arrays, cu_seqlens, packed=cu_seqlens is not None, layouts=layouts)


def _poison(result: tuple[Array, Array], cu_seqlens: Array | None, num_tokens: int) -> tuple[Array, Array]:
    """NaN everywhere if a traced cu_seqlens breaks the rules: nothing can raise there, and nothing may look right."""
    if cu_seqlens is None or not checks.is_traced(cu_seqlens):
        return result
    sound = (cu_seqlens[0] == 0) & jnp.all(cu_seqlens[1:] >= cu_seqlens[:-1]) & (cu_seqlens[-1] <= num_tokens)
    o, final_state = result
    return jnp.where(sound, o, jnp.asarray(jnp.nan, o.dtype)), jnp.where(
        sound, final_state, jnp.asarray(jnp.nan, final_state.dtype)
    )
