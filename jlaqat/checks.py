"""What a delta rule call must look like, checked before any work. Every message names what was given and the remedy."""

from __future__ import annotations

import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jlaqat.decode_policy import DecodePolicy
from jlaqat.spec import CHUNK_SIZE, DeltaQuant, QuantArrays, QuantConfigError, amax_shape

DTYPES = ("float32", "bfloat16", "float16", "float64")
BACKENDS = ("auto", "xla", "recurrent", "reference", "triton")


def check_checkpoint_every(every: Any) -> None:
    """Raises ValueError unless it is a positive integer."""
    if isinstance(every, bool) or not isinstance(every, numbers.Integral) or every < 1:
        raise ValueError(
            f"checkpoint_every={every!r} must be a positive integer, the tokens between two states that are kept for a "
            f"gradient; give 1 to keep every state, or leave it at {CHUNK_SIZE}."
        )


def check_backend(backend: str) -> None:
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown; choose one of {', '.join(map(repr, BACKENDS))}.")


def describe(x: Any) -> str:
    """dtype[shape] of an array."""
    return f"{x.dtype.name}{list(x.shape)}"


def is_traced(x: Any) -> bool:
    return isinstance(x, jax.core.Tracer)


def check_operands(q: Any, k: Any, v: Any, g: Any, beta: Any) -> None:
    """Ranks, shapes, head grouping and dtypes of the five operands, tokens included."""
    for name, x, layout in (("q", q, "[B, T, H, K]"), ("k", k, "[B, T, H, K]"), ("v", v, "[B, T, HV, V]")):
        if x.ndim != 4:
            raise ValueError(f"{name} is {describe(x)}; it must be {layout}. Add the missing axes (B = 1 when packed).")
        if x.dtype.name not in DTYPES:
            raise ValueError(
                f"{name} is {describe(x)}; q, k and v must be one of {', '.join(DTYPES)}. Cast them first."
            )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}; they must share one dtype. Cast them first."
        )
    if q.shape != k.shape:
        raise ValueError(f"q is {describe(q)} and k is {describe(k)}; both must be the same [B, T, H, K].")
    (B, T, H, K), (HV, V) = k.shape, v.shape[2:]
    if v.shape[:2] != (B, T):
        raise ValueError(f"v is {describe(v)} but k is {describe(k)}; batch and tokens [B, T] must agree.")
    if B < 1:
        raise ValueError(f"k is {describe(k)}; a batch must have at least one sequence (B ≥ 1). Skip empty batches.")
    if min(H, K, HV, V) < 1:
        raise ValueError(f"k is {describe(k)} and v is {describe(v)}; heads and head dimensions must be at least 1.")
    if HV % H:
        raise ValueError(
            f"v has HV={HV} heads and k has H={H}; HV must be a multiple of H: each key head serves HV/H value heads."
        )
    check_gates(g, beta, (B, T, HV), K, "[B, T, HV]")


def check_gates(g: Any, beta: Any, rows: tuple[int, ...], K: int, layout: str) -> None:
    """g [*rows] or [*rows, K], beta [*rows], both floating point."""
    for name, x in (("g", g), ("beta", beta)):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"{name} is {describe(x)}; it must be floating point (float32 is best). Cast it first.")
    if g.shape not in (rows, (*rows, K)):
        raise ValueError(
            f"g is {describe(g)}; it must be {layout} = {list(rows)} (GDN, a gate a value head) or {list((*rows, K))} "
            "(KDA, a gate a key channel)."
        )
    if beta.shape != rows:
        raise ValueError(f"beta is {describe(beta)}; it must be {layout} = {list(rows)}.")


def check_cu_seqlens(cu_seqlens: Any, k: Any) -> None:
    """int [N + 1], from 0, never decreasing, at most T. Values are checked unless traced (see `ops.delta_rule`)."""
    B, T = k.shape[:2]
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2 or not jnp.issubdtype(cu_seqlens.dtype, jnp.integer):
        raise ValueError(
            f"cu_seqlens is {describe(cu_seqlens)}; it must be int32[N + 1] with N ≥ 1 sequences: the first "
            "token of each, then the end of the last."
        )
    if B != 1:
        raise ValueError(
            f"cu_seqlens was given with B={B}; packed sequences need B = 1. Concatenate the rows along T, or leave "
            "cu_seqlens out for a batch of equally long sequences."
        )
    if is_traced(cu_seqlens):
        return
    values = np.asarray(cu_seqlens)
    if values[0] != 0:
        raise ValueError(f"cu_seqlens starts at {values[0]}; it must start at 0. Slice the operands instead.")
    falls = np.flatnonzero(np.diff(values) < 0)
    if falls.size:
        n = falls[0]
        raise ValueError(
            f"cu_seqlens decreases from {values[n]} to {values[n + 1]} at index {n + 1}; it must never decrease. "
            "Give the offsets of consecutive sequences, their lengths summed up."
        )
    if values[-1] > T:
        raise ValueError(f"cu_seqlens ends at {values[-1]}, past the T={T} tokens of k; it must end at T or before.")


def check_initial_state(initial_state: Any, shape: tuple[int, ...]) -> None:
    if initial_state.shape != shape or not jnp.issubdtype(initial_state.dtype, jnp.floating):
        raise ValueError(
            f"initial_state is {describe(initial_state)}; it must be floating point [N, HV, K, V] = {list(shape)}, "
            "one state for each sequence (N = B, or len(cu_seqlens) − 1 when packed)."
        )


def check_quant(quant: Any, arrays: Any, k: Any, v: Any) -> None:
    """Types, and a static scale of the right shape wherever a quantizer asks for one."""
    if not isinstance(quant, DeltaQuant):
        raise QuantConfigError(
            f"quant={quant!r} is a {type(quant).__name__}; give a DeltaQuant, such as "
            "DeltaQuant(state=QuantSpec.fp8()), or leave it out."
        )
    if not isinstance(arrays, QuantArrays):
        raise QuantConfigError(f"quant_arrays is a {type(arrays).__name__}; give a QuantArrays or leave it out.")
    for site, spec, amax in (("state", quant.state, arrays.state_amax), ("w", quant.w, arrays.w_amax)):
        static = spec is not None and spec.scale == "static"
        if amax is None:
            if static:
                raise QuantConfigError(
                    f"The {site} quantizer has scale='static' but quant_arrays.{site}_amax is missing; calibrate "
                    "first and pass it, or use scale='dynamic'."
                )
            continue
        if not static:
            raise QuantConfigError(
                f"quant_arrays.{site}_amax was given but the {site} quantizer is "
                f"{spec.describe() if spec else 'off'}, which reads none; set scale='static' or leave the amax out."
            )
        assert spec is not None
        wanted = amax_shape(spec, site, num_heads=v.shape[2], key_dim=k.shape[3], value_dim=v.shape[3])
        if jnp.shape(amax) != wanted:
            raise QuantConfigError(
                f"quant_arrays.{site}_amax has shape {list(jnp.shape(amax))}; {spec.describe()} with "
                f"{v.shape[2]} value heads needs {list(wanted)}."
            )


def check_token_axis(quant: DeltaQuant | DecodePolicy, **operands: Any) -> None:
    """Refuse a rounded state over a token axis that visibly lies on several devices.

    Visible are concrete arrays and, under jit, meshes of explicit axes. Inside shard_map a shard cannot be told from a
    whole, and under jit with automatic axes XLA gathers the tokens, so that the result is right.
    """
    if quant.state is None:
        return
    for name, x in operands.items():
        if is_traced(x):
            spec: tuple = getattr(jax.typeof(x).sharding, "spec", None) or ()
            split = len(spec) > 1 and spec[1] is not None
        else:
            split = isinstance(x, jax.Array) and x.sharding.shard_shape(x.shape)[1] != x.shape[1]
        if split:
            sharding = jax.typeof(x).sharding if is_traced(x) else x.sharding
            raise ValueError(
                f"{name} {describe(x)} is sharded along its tokens (axis 1, {sharding}) while the state is rounded "
                f"({quant.state.describe()}). A sequence can be split only where its state is linear in the past; "
                f"a rounded one is not. Shard batch and heads instead, or use {type(quant).__name__}(state=None)."
            )


def check_scale(scale: Any, K: int) -> float:
    if scale is None:
        return float(K**-0.5)
    if not isinstance(scale, numbers.Real) or not math.isfinite(scale):
        raise ValueError(
            f"scale={scale!r} must be a finite Python number, static under jit; multiply q by an array instead."
        )
    return float(scale)
