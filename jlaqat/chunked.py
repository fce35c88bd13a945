"""The xla backend: the delta rule chunk by chunk, on any device, with a hand-written backward.

One `custom_vjp` serves both gates. What is quadratic in a chunk (A, its inverse X, P) and what depends on no state
(w, u) is formed for all chunks at once; a scan carries the state; the backward scans the other way. Memory grows
linearly in T: states are kept at chunk boundaries only, beside P and X; w, u and v' are formed again, from the same
operands by the same products, so rounding inside the backward falls as it fell in the forward.

Formulas, names and the places that round: docs/delta_rule.md. In chunk space arrays are [n, b, heads, chunk, ...], see
`packing`. Everything is computed in float32 (float64 for float64 inputs) with matrix products at full precision.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jlaqat import sites
from jlaqat.packing import Layout, States, from_chunks, make_layout, to_chunks
from jlaqat.pairs import (
    lower,
    matmul,
    pair_products,
    pair_products_backward,
    per_key_head,
    per_value_head,
    product,
    strictly_lower,
    total,
    total_rows,
    unit_lower_inverse,
)
from jlaqat.shards import vary_over, varying_axes
from jlaqat.spec import DeltaQuant, QuantArrays

Array = jax.Array


class Inputs(NamedTuple):
    """The differentiable operands of a call, as the caller gave them."""

    q: Array  # [B, T, H, K]
    k: Array  # [B, T, H, K]
    v: Array  # [B, T, HV, V]
    g: Array  # [B, T, HV] or [B, T, HV, K], log decay
    beta: Array  # [B, T, HV]
    initial_state: Array | None  # [N, HV, K, V]


class Residuals(NamedTuple):
    """What the backward keeps from the forward. The rest is recomputed."""

    inputs: Inputs
    cu_seqlens: Array | None  # [N + 1]
    arrays: QuantArrays
    P: Array  # [n, b, HV, C, C]
    X: Array  # [n, b, HV, C, C], (I + A)⁻¹
    states: Array  # [n, b, HV, K, V], the (rounded) state entering each chunk


class Chunks(NamedTuple):
    """A call's operands in chunk space, in the dtype of the computation."""

    q: Array  # [n, b, H, C, K]
    k: Array  # [n, b, H, C, K]
    v: Array  # [n, b, HV, C, V]
    G: Array  # [n, b, HV, C, 1 or K], cumulative log decay inside the chunk
    beta: Array  # [n, b, HV, C]


class Decayed(NamedTuple):
    """Operands under decay, per value head: what meets the state."""

    q: Array  # [n, b, HV, C, K], scale·q⊙e^G
    k: Array  # [n, b, HV, C, K], k⊙e^(G_L − G)
    k_w: Array  # [n, b, HV, C, K], β⊙e^G⊙k: X times this is w
    last: Array  # [n, b, HV, 1 or K, 1], e^(G_L)


def delta_rule_chunked(inputs: Inputs, cu_seqlens: Array | None, quant: DeltaQuant, arrays: QuantArrays, scale: float):
    """(o [B, T, HV, V] in v's dtype, final_state [N, HV, K, V]). Arguments are taken as valid: see `ops.delta_rule`."""
    if inputs.k.shape[1] == 0:
        return no_tokens(inputs, cu_seqlens, quant, arrays)
    return _delta_rule(quant, scale, inputs, cu_seqlens, arrays)


def no_tokens(inputs: Inputs, cu_seqlens: Array | None, quant: DeltaQuant, arrays: QuantArrays):
    """No outputs, and the initial states, rounded."""
    return jnp.zeros_like(inputs.v), initial_states(inputs, num_sequences(inputs, cu_seqlens), quant, arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _delta_rule(quant: DeltaQuant, scale: float, inputs: Inputs, cu_seqlens: Array | None, arrays: QuantArrays):
    return forward(quant, scale, inputs, cu_seqlens, arrays)[0]


def forward(quant: DeltaQuant, scale: float, inputs: Inputs, cu_seqlens: Array | None, arrays: QuantArrays):
    """((o, final_state), Residuals)."""
    layout = make_layout(inputs.k.shape[0], inputs.k.shape[1], cu_seqlens)
    chunks = chunk_operands(inputs, layout)
    A, P = pair_products(chunks.q, chunks.k, chunks.G, chunks.beta, scale)
    X = unit_lower_inverse(A)
    decayed = decay_operands(chunks, scale)
    u, w, _ = wy_factors(X, decayed, chunks, layout, quant, arrays)
    states = States(layout.packed)

    def step(carry, chunk):
        place, decayed, P, u, w = chunk
        S = states.read(carry, place.sequence)
        v_new = u - matmul("bhck,bhkv->bhcv", w, S)
        o = matmul("bhck,bhkv->bhcv", decayed.q, S) + matmul("bhcj,bhjv->bhcv", P, v_new)
        S_next = sites.round_state(update_state(S, decayed, v_new), place, quant, arrays)
        return states.write(carry, S_next, place.sequence), (o, S)

    scanned = (layout.state_place, decayed, P, u, w)
    initial = initial_states(inputs, num_sequences(inputs, cu_seqlens), quant, arrays)
    carry, (o, entering) = jax.lax.scan(step, states.start(initial), scanned)
    o = from_chunks(o, layout, inputs.v.shape[1]).astype(inputs.v.dtype)
    return (o, states.finish(carry)), Residuals(inputs, cu_seqlens, arrays, P, X, entering)


def backward(quant: DeltaQuant, scale: float, residuals: Residuals, cotangents: tuple[Array, Array]):
    """Gradients of `Inputs`; nothing for cu_seqlens and the quantizers' arrays. Straight-through at every rounding."""
    inputs, cu_seqlens, arrays, P, X, S = residuals
    layout = make_layout(inputs.k.shape[0], inputs.k.shape[1], cu_seqlens)
    chunks = chunk_operands(inputs, layout)
    q, k, v, G, beta = chunks
    decayed = decay_operands(chunks, scale)
    u, w, w_exact = wy_factors(X, decayed, chunks, layout, quant, arrays)
    v_new = u - matmul("...ck,...kv->...cv", w, S)
    do = to_chunks(cotangents[0].astype(v.dtype), layout)

    dv_new, dS, d_initial = _reverse_scan(cotangents[1], do, S, P, w, v_new, decayed, layout, quant, arrays)

    dq_d = matmul("...cv,...kv->...ck", do, S)
    dk_d = matmul("...cv,...kv->...ck", v_new, dS)
    dw = sites.w_gradient(w_exact, -matmul("...cv,...kv->...ck", dv_new, S), layout.w_place, quant, arrays)
    # dA = −Xᵀ dX Xᵀ with dX = dw k_wᵀ + du (βv)ᵀ, where X k_w = w (before rounding) and X βv = u.
    z, y = matmul("...ji,...jk->...ik", X, dw), matmul("...ji,...jv->...iv", X, dv_new)
    dA = -strictly_lower(matmul("...ik,...jk->...ij", z, w_exact) + matmul("...iv,...jv->...ij", y, u))
    dP = lower(matmul("...iv,...jv->...ij", do, v_new))
    dq, dk, dG, dbeta = pair_products_backward(q, k, G, beta, scale, dA, dP)

    decay = jnp.exp(G)
    heads, value_heads = k.shape[-3], v.shape[-3]
    k_z = product(per_value_head(k, value_heads) * decay, z)
    dbeta = dbeta + total(product(y, v)) + total(k_z)
    dq = dq + per_key_head(product(scale * decay, dq_d), heads)
    dk_from_states = product(jnp.exp(G[..., -1:, :] - G), dk_d) + product(beta[..., None] * decay, z)
    dk = dk + per_key_head(dk_from_states, heads)
    k_flow = product(decayed.k, dk_d)
    at_last = total(product(decayed.last * S, dS)) + total_rows(k_flow)  # [..., K]
    flow = product(decayed.q, dq_d) - k_flow + product(beta[..., None], k_z)
    if G.shape[-1] == 1:
        flow, at_last = total(flow)[..., None], total(at_last[..., None, :])
    dG = (dG + flow).at[..., -1, :].add(at_last)
    dg = jax.lax.cumsum(dG, axis=dG.ndim - 2, reverse=True)

    def restore(x: Array, like: Array) -> Array:
        return from_chunks(x, layout, like.shape[1]).astype(like.dtype)

    if inputs.initial_state is not None:
        initial = inputs.initial_state.astype(d_initial.dtype)
        d_initial = sites.state_gradient(initial, d_initial, sites.initial_place(initial.shape[0]), quant, arrays)
        d_initial = d_initial.astype(inputs.initial_state.dtype)
    gradients = Inputs(
        q=restore(dq, inputs.q),
        k=restore(dk, inputs.k),
        v=restore(beta[..., None] * y, inputs.v),
        g=restore(dg if inputs.g.ndim == 4 else dg[..., 0], inputs.g),
        beta=restore(dbeta, inputs.beta),
        initial_state=d_initial if inputs.initial_state is not None else None,
    )
    return gradients, None, None


_delta_rule.defvjp(forward, backward)


def _reverse_scan(d_final, do, S, P, w, v_new, decayed, layout: Layout, quant: DeltaQuant, arrays: QuantArrays):
    """dv' of every token, dS of the state leaving every chunk (before rounding), the initial state's gradient."""
    states = States(layout.packed)
    clips = quant.state is not None and quant.state.gradient == "clip"
    dv_local = matmul("...ji,...jv->...iv", P, do)
    dS_local = matmul("...ck,...cv->...kv", decayed.q, do)

    def step(carry, chunk):
        place, dv_local, dS_local, decayed, w, leaving = chunk
        dS = states.read(carry, place.sequence)
        if clips:
            S, v_new = leaving
            dS = sites.state_gradient(update_state(S, decayed, v_new), dS, place, quant, arrays)
        dv_new = dv_local + matmul("bhck,bhkv->bhcv", decayed.k, dS)
        dS_previous = product(decayed.last, dS) + dS_local - matmul("bhck,bhcv->bhkv", w, dv_new)
        return states.write(carry, dS_previous, place.sequence), (dv_new, dS)

    scanned = (layout.state_place, dv_local, dS_local, decayed, w, (S, v_new) if clips else None)
    carry, (dv_new, dS) = jax.lax.scan(step, states.start(d_final.astype(do.dtype)), scanned, reverse=True)
    return dv_new, dS, states.finish(carry)


def computation_dtype(v: Array) -> Any:
    return jnp.float64 if v.dtype == jnp.float64 else jnp.float32


def chunk_operands(inputs: Inputs, layout: Layout) -> Chunks:
    """Inputs in chunk space, with g summed up inside each chunk."""
    dtype = computation_dtype(inputs.v)
    q, k, v, g, beta = (to_chunks(x, layout).astype(dtype) for x in inputs[:5])
    g = g if inputs.g.ndim == 4 else g[..., None]
    return Chunks(q, k, v, jnp.cumsum(g, axis=-2), beta)


def decay_operands(chunks: Chunks, scale: float) -> Decayed:
    q, k, _, G, beta = chunks
    heads, last = beta.shape[-2], G[..., -1:, :]
    decay = jnp.exp(G)
    k = per_value_head(k, heads)
    return Decayed(
        q=scale * per_value_head(q, heads) * decay,
        k=k * jnp.exp(last - G),
        k_w=beta[..., None] * decay * k,
        last=jnp.exp(last).swapaxes(-1, -2),
    )


def wy_factors(X: Array, decayed: Decayed, chunks: Chunks, layout: Layout, quant: DeltaQuant, arrays: QuantArrays):
    """u = X(β⊙v), w = X(β⊙e^G⊙k) rounded at the W site, and w before that."""
    u = matmul("...ij,...jv->...iv", X, chunks.beta[..., None] * chunks.v)
    w = matmul("...ij,...jk->...ik", X, decayed.k_w)
    return u, sites.round_w(w, layout.w_place, quant, arrays), w


def num_sequences(inputs: Inputs, cu_seqlens: Array | None) -> int:
    return inputs.k.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def initial_states(inputs: Inputs, count: int, quant: DeltaQuant, arrays: QuantArrays) -> Array:
    """[N, HV, K, V]: what the first chunks read. Absent states are zeros, which rounding leaves alone."""
    dtype = computation_dtype(inputs.v)
    if inputs.initial_state is None:
        zeros = jnp.zeros((count, inputs.v.shape[2], inputs.k.shape[3], inputs.v.shape[3]), dtype)
        return vary_over(zeros, varying_axes(inputs.v))  # as a scan's carry must
    return sites.round_state(inputs.initial_state.astype(dtype), sites.initial_place(count), quant, arrays)


def update_state(S: Array, decayed: Decayed, v_new: Array) -> Array:
    """The state after a chunk, before its rounding."""
    return product(decayed.last, S) + matmul("...ck,...cv->...kv", decayed.k, v_new)
