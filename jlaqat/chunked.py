"""The xla backend: the delta rule chunk by chunk, on any device, with a hand-written backward.

One `custom_vjp` serves both gates. Chunks are taken in blocks: what is quadratic in a chunk (A, its inverse X, P) and
what depends on no state (w, u) is formed for a block at once; a scan over its chunks carries the state; the backward
goes the other way. Memory grows linearly in T: states are kept at chunk boundaries only, beside P and X; w, u and v'
are formed again, from the same operands by the same products, so rounding inside the backward falls as in the forward.

Formulas, names and the places that round: docs/delta_rule.md. In chunk space arrays are [n, b, heads, chunk, ...], see
`packing`. Everything is computed in float32 (float64 for float64 inputs) with matrix products at full precision.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jlaqat import sites
from jlaqat.arithmetic import materialize, traced_for_cpu
from jlaqat.packing import (
    Layout,
    States,
    fill_chunks,
    from_blocks,
    from_rows,
    in_blocks,
    make_layout,
    num_chunks,
    to_chunks,
)
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
from jlaqat.spec import MIN_LOG_DECAY, DeltaQuant, QuantArrays

Array = jax.Array
BLOCK_MATRICES = 16  # [64, 64] matrices of a block on CPUs, counted over sequences, heads and chunks: a core's cache


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
    return _delta_rule(quant, scale, bound_decay(inputs), cu_seqlens, arrays)


def bound_decay(inputs: Inputs) -> Inputs:
    """g from `MIN_LOG_DECAY` up. Below it decay forgets everything (and has no gradient), which sums must outlive."""
    return inputs._replace(g=jnp.maximum(inputs.g, jnp.asarray(MIN_LOG_DECAY, inputs.g.dtype)))


def no_tokens(inputs: Inputs, cu_seqlens: Array | None, quant: DeltaQuant, arrays: QuantArrays):
    """No outputs, and the initial states, rounded."""
    return jnp.zeros_like(inputs.v), initial_states(inputs, num_sequences(inputs, cu_seqlens), quant, arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _delta_rule(quant: DeltaQuant, scale: float, inputs: Inputs, cu_seqlens: Array | None, arrays: QuantArrays):
    return forward(quant, scale, inputs, cu_seqlens, arrays)[0]


def forward(quant: DeltaQuant, scale: float, inputs: Inputs, cu_seqlens: Array | None, arrays: QuantArrays):
    """((o, final_state), Residuals)."""
    layout, blocks = layout_of(inputs, cu_seqlens)
    operands = fill_operands(inputs, layout)
    states = States(layout.packed)

    def block(carry, layout):
        chunks = chunk_operands(operands, layout)
        A, P = pair_products(chunks.q, chunks.k, chunks.G, chunks.beta, scale)
        X = unit_lower_inverse(A)
        decayed = decay_operands(chunks, scale)
        u, w, _ = wy_factors(X, decayed, chunks, layout, quant, arrays)

        def step(carry, chunk):
            place, holds, decayed, P, u, w = chunk
            S = states.read(carry, place.sequence)
            v_new = u - matmul("...ck,...kv->...cv", w, S)
            o = matmul("...ck,...kv->...cv", decayed.q, S) + matmul("...cj,...jv->...cv", P, v_new)
            S_next = sites.round_state(update_state(S, decayed, v_new), place, quant, arrays)
            return states.write(carry, jnp.where(holds, S_next, S), place.sequence), (o, S)

        carry, (o, S) = jax.lax.scan(step, carry, (layout.state_place, _per_state(layout.holds), decayed, P, u, w))
        return carry, (to_rows(o, inputs.v), P, X, S)

    initial = initial_states(inputs, num_sequences(inputs, cu_seqlens), quant, arrays)
    carry, (o, *kept) = scan_blocks(block, states.start(initial), blocks)
    o = from_rows(from_blocks(o), layout, inputs.v.shape[1])
    return (o, states.finish(carry)), Residuals(inputs, cu_seqlens, arrays, *from_blocks(kept))


def backward(quant: DeltaQuant, scale: float, residuals: Residuals, cotangents: tuple[Array, Array]):
    """Gradients of `Inputs`; nothing for cu_seqlens and the quantizers' arrays. Straight-through at every rounding."""
    inputs, cu_seqlens, arrays, *kept = residuals
    layout, blocks = layout_of(inputs, cu_seqlens)
    operands = fill_operands(inputs, layout)
    do = fill_chunks(cotangents[0], layout)
    states = States(layout.packed)

    def block(carry, part):
        layout, P, X, S = part
        chunks = chunk_operands(operands, layout)
        do_chunks = to_chunks(do, layout).astype(chunks.v.dtype)
        carry, gradients = _block_backward(carry, states, chunks, do_chunks, P, X, S, layout, quant, arrays, scale)
        return carry, tuple(to_rows(x, like) for x, like in zip(gradients, inputs[:5]))

    start = states.start(cotangents[1].astype(kept[-1].dtype))
    carry, gradients = scan_blocks(block, start, (blocks, *in_blocks(kept, blocks.valid.shape[1])), reverse=True)
    dq, dk, dv, dg, dbeta = (from_rows(x, layout, inputs.k.shape[1]) for x in from_blocks(gradients))
    d_initial = None
    if inputs.initial_state is not None:
        initial, d_initial = inputs.initial_state.astype(carry.dtype), states.finish(carry)
        d_initial = sites.state_gradient(initial, d_initial, sites.initial_place(initial.shape[0]), quant, arrays)
        d_initial = d_initial.astype(inputs.initial_state.dtype)
    return Inputs(dq, dk, dv, dg, dbeta, d_initial), None, None


def _block_backward(d_leaving, states, chunks: Chunks, do, P, X, S, layout: Layout, quant, arrays, scale):
    """The gradient of the states entering a block of chunks, and those of its q, k, v, g and beta in chunk space."""
    q, k, v, G, beta = chunks
    decayed = decay_operands(chunks, scale)
    u, w, w_exact = wy_factors(X, decayed, chunks, layout, quant, arrays)
    v_new = u - matmul("...ck,...kv->...cv", w, S)

    d_entering, dv_new, dS = _reverse_scan(d_leaving, states, do, S, P, w, v_new, decayed, layout, quant, arrays)

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
    return d_entering, (dq, dk, beta[..., None] * y, dg, dbeta)


_delta_rule.defvjp(forward, backward)


def _reverse_scan(d_leaving, states, do, S, P, w, v_new, decayed: Decayed, layout: Layout, quant, arrays):
    """The gradient of the states entering the block, dv' of every token, dS of the state leaving every chunk."""
    clips = quant.state is not None and quant.state.gradient == "clip"
    dv_local = matmul("...ji,...jv->...iv", P, do)
    dS_local = matmul("...ck,...cv->...kv", decayed.q, do)

    def step(carry, chunk):
        place, holds, dv_local, dS_local, decayed, w, leaving = chunk
        dS = states.read(carry, place.sequence)
        if clips:
            S, v_new = leaving
            clipped = sites.state_gradient(update_state(S, decayed, v_new), dS, place, quant, arrays)
            dS = jnp.where(holds, clipped, dS)
        dv_new = dv_local + matmul("...ck,...kv->...cv", decayed.k, dS)
        dS_previous = product(decayed.last, dS) + dS_local - matmul("...ck,...cv->...kv", w, dv_new)
        return states.write(carry, dS_previous, place.sequence), (dv_new, dS)

    holds, leaving = _per_state(layout.holds), (S, v_new) if clips else None
    scanned = (layout.state_place, holds, dv_local, dS_local, decayed, w, leaving)
    carry, (dv_new, dS) = jax.lax.scan(step, d_leaving, scanned, reverse=True)
    return carry, dv_new, dS


def _per_state(holds: Array) -> Array:
    """[n, b] beside states [n, b, HV, K, V]."""
    return holds[..., None, None, None]


def layout_of(inputs: Inputs, cu_seqlens: Array | None) -> tuple[Layout, Layout]:
    """Where each chunk of a call comes from, and the same in blocks [n / m, m, ...].

    On CPUs a block is what one core's cache holds, since pages touched for the first time cost more there than the
    arithmetic on them; elsewhere it is the whole call. No bit depends on it.
    """
    (B, T), heads = inputs.k.shape[:2], inputs.v.shape[2]
    n, b = num_chunks(T, cu_seqlens), B  # packed sequences have B = 1
    size = max(1, BLOCK_MATRICES // (b * heads)) if traced_for_cpu() else n
    size = -(-n // -(-n // size))  # blocks of like sizes
    layout = make_layout(B, T, cu_seqlens, multiple=size)
    return layout, in_blocks(layout._replace(slot=None), size)


def scan_blocks(block, carry, blocks: Any, reverse: bool = False):
    """`lax.scan` over blocks; a single one without a loop, which compiles quicker."""
    if jax.tree.leaves(blocks)[0].shape[0] > 1:
        return jax.lax.scan(block, carry, blocks, reverse=reverse)
    carry, y = block(carry, jax.tree.map(lambda x: x[0], blocks))
    return carry, jax.tree.map(lambda x: x[None], y)


def fill_operands(inputs: Inputs, layout: Layout) -> Inputs:
    """Operands with tokens filled up to whole chunks."""
    q, k, v, g, beta = (fill_chunks(x, layout) for x in inputs[:5])
    return Inputs(q, k, v, g, beta, None)


def to_rows(x: Array, like: Any) -> Array:
    """Chunk space to rows [n, b, chunk, H, ...] in the dtype of `like`, which may lack x's last axis, of size 1."""
    x = jnp.moveaxis(x, 2, 3).astype(like.dtype)
    return x if x.ndim == like.ndim + 1 else x[..., 0]


def computation_dtype(v: Array) -> Any:
    return jnp.float64 if v.dtype == jnp.float64 else jnp.float32


def chunk_operands(inputs: Inputs, layout: Layout) -> Chunks:
    """Inputs in chunk space, with g summed up inside each chunk."""
    dtype = computation_dtype(inputs.v)
    q, k, v, g, beta = (to_chunks(x, layout).astype(dtype) for x in inputs[:5])
    g = g if inputs.g.ndim == 4 else g[..., None]
    return Chunks(*materialize(q, k, v, jnp.cumsum(g, axis=-2), beta))


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
