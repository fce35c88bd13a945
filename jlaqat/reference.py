"""The delta rule as it is defined, for reading and for tests: token by token, chunk by chunk, and its backward by hand.

Nothing here is shared with the fast implementations but the rounding itself. Heads are repeated, pairs are summed one
by one ([C, C, K] exponents for KDA), packed sequences are cut out one after another, so `cu_seqlens` must be
concrete. The dtype of the computation is float32, or float64 for float64 inputs, with matrix products at full
precision.

Source of the maths: arXiv 2412.06464 (GDN), arXiv 2510.26692 (KDA); the steps are numbered as in docs/delta_rule.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jlaqat import sites
from jlaqat.spec import CHUNK_SIZE, MIN_LOG_DECAY, DeltaQuant, QuantArrays

Array = jax.Array
NO_QUANT, NO_ARRAYS = DeltaQuant(), QuantArrays()


class Replay(NamedTuple):
    """Rounded values of another implementation, used in place of rounding. Gradients pass straight through as ever.

    A code that flips at a tie grows with the recurrence; replaying what an implementation rounded to takes flips out
    of a comparison, so that tight bounds hold. One entry a sequence when packed, else one entry for the batch.
    """

    states: list[Array]  # [B, HV, chunks + 1, K, V] each: the initial state, then the state after every chunk
    w: list[Array]  # [B, HV, T, K] each


class Operands(NamedTuple):
    """One batch of sequences, heads before tokens and repeated for their value heads."""

    q: Array  # [B, HV, T, K]
    k: Array  # [B, HV, T, K]
    v: Array  # [B, HV, T, V]
    g: Array  # [B, HV, T, 1 or K]
    beta: Array  # [B, HV, T, 1]


class Chunk(NamedTuple):
    """What the forward of one chunk computed; n rows."""

    x: Operands
    S: Array  # [B, HV, K, V] entering
    G: Array  # [B, HV, n, 1 or K]
    E: Array  # [B, HV, n, n, 1 or K], e^(G_i − G_j) for i ≥ j, else 0
    P: Array  # [B, HV, n, n]
    X: Array  # [B, HV, n, n]
    u: Array  # [B, HV, n, V]
    w: Array  # [B, HV, n, K] rounded
    v_new: Array  # [B, HV, n, V]


class Rounding(NamedTuple):
    """How one batch of sequences rounds: by the call's quantizers, or by replay."""

    quant: DeltaQuant
    arrays: QuantArrays
    first_sequence: int
    states: Array | None = None  # [B, HV, chunks + 1, K, V]
    w: Array | None = None  # [B, HV, T, K]

    def state(self, S: Array, index: int | Array) -> Array:
        """S [B, HV, K, V] rounded for the index-th time, the initial state being number 0."""
        if self.states is not None:
            return S + jax.lax.stop_gradient(self.states[:, :, index].astype(S.dtype) - S)
        return _round_state(S, self._place(S.shape[0], index), self.quant, self.arrays)

    def factor(self, w: Array, position: int) -> Array:
        """w [B, HV, n, K] of the chunk whose first token is `position`, rounded."""
        if self.w is not None:
            return w + jax.lax.stop_gradient(self.w[:, :, position : position + w.shape[2]].astype(w.dtype) - w)
        return _round_w(w, self._place(w.shape[0], position), self.quant, self.arrays)

    def _place(self, batch: int, index: int | Array) -> sites.Place:
        sequence = self.first_sequence + jnp.arange(batch, dtype=jnp.int32)
        return sites.Place(sequence, jnp.broadcast_to(jnp.asarray(index, jnp.int32), (batch,)))


def delta_rule_tokens(
    q, k, v, g, beta, *, scale=None, initial_state=None, cu_seqlens=None, quant=NO_QUANT, quant_arrays=NO_ARRAYS
) -> tuple[Array, Array]:
    """The definition, one token after another; arguments and results as `jlaqat.delta_rule`, quant.w must be None.

    The state is rounded on entry, after every `quant.state.cadence` tokens and at the end.
    """
    operands, S0, scale = _prepare(q, k, v, g, beta, scale, initial_state, cu_seqlens)
    cadence = quant.state.cadence if quant.state is not None else CHUNK_SIZE
    outputs, finals = [], []
    for x, S, rounding, _ in _sequences(operands, S0, cu_seqlens, quant, quant_arrays, None):
        length = x.k.shape[2]

        def token(S, row, rounding=rounding, length=length):
            t, (q, k, v, g, beta) = row
            S = jnp.exp(g)[..., None] * S
            r = v - _einsum("bhkv,bhk->bhv", S, k)
            S = S + k[..., None] * (beta * r)[..., None, :]
            o = scale * _einsum("bhkv,bhk->bhv", S, q)
            index = (t + cadence) // cadence
            due = ((t + 1) % cadence == 0) | (t + 1 == length)
            return jnp.where(due, rounding.state(S, index), S), o

        rows = jax.tree.map(lambda a: jnp.moveaxis(a, 2, 0), x)
        S, o = jax.lax.scan(token, rounding.state(S, 0), (jnp.arange(length, dtype=jnp.int32), rows))
        outputs.append(jnp.moveaxis(o, 0, 1))
        finals.append(S)
    return _join(outputs, finals, v, cu_seqlens)


def delta_rule_chunks(
    q,
    k,
    v,
    g,
    beta,
    *,
    scale=None,
    initial_state=None,
    cu_seqlens=None,
    quant=NO_QUANT,
    quant_arrays=NO_ARRAYS,
    replay: Replay | None = None,
) -> tuple[Array, Array]:
    """Chunk by chunk, rounding at both sites; arguments and results as `jlaqat.delta_rule`."""
    operands, S0, scale = _prepare(q, k, v, g, beta, scale, initial_state, cu_seqlens)
    outputs, finals = [], []
    for x, S, rounding, _ in _sequences(operands, S0, cu_seqlens, quant, quant_arrays, replay):
        o, S, _ = _sequence_forward(x, S, scale, rounding)
        outputs.append(jnp.moveaxis(o, 2, 1))
        finals.append(S)
    return _join(outputs, finals, v, cu_seqlens)


def delta_rule_chunks_backward(
    do,
    d_final,
    q,
    k,
    v,
    g,
    beta,
    *,
    scale=None,
    initial_state=None,
    cu_seqlens=None,
    quant=NO_QUANT,
    quant_arrays=NO_ARRAYS,
    replay: Replay | None = None,
) -> tuple[Array, ...]:
    """(dq, dk, dv, dg, dbeta, d_initial_state) by the formulas, straight-through at every rounding.

    do [B, T, HV, V] and d_final [N, HV, K, V] are the cotangents of o and of the final state.
    """
    operands, S0, scale = _prepare(q, k, v, g, beta, scale, initial_state, cu_seqlens)
    gradients = Operands(*(jnp.zeros_like(a) for a in operands))
    d_initials = []
    do = jnp.moveaxis(do.astype(operands.v.dtype), 1, 2)
    for n, (x, S, rounding, rows) in enumerate(_sequences(operands, S0, cu_seqlens, quant, quant_arrays, replay)):
        _, _, chunks = _sequence_forward(x, S, scale, rounding)
        dS = d_final if cu_seqlens is None else d_final[n : n + 1]
        position = rows.stop
        parts: list[Operands] = []
        for chunk in reversed(chunks):
            position -= chunk.u.shape[2]
            dx, dS = chunk_backward(chunk, do[:, :, position : position + chunk.u.shape[2]], dS, scale)
            parts.insert(0, dx)
        d_initials.append(dS)
        if parts:
            joined = Operands(*(jnp.concatenate(field, axis=2) for field in zip(*parts)))
            gradients = Operands(*(a.at[:, :, rows].set(b) for a, b in zip(gradients, joined)))
    dq, dk, dv, dg, dbeta = (jnp.moveaxis(a, 2, 1) for a in gradients)
    heads = q.shape[2]
    dq, dk = (a.reshape(*a.shape[:2], heads, -1, a.shape[-1]).sum(3) for a in (dq, dk))
    return dq, dk, dv, dg if g.ndim == 4 else dg[..., 0], dbeta[..., 0], jnp.concatenate(d_initials)


def chunk_forward(x: Operands, S: Array, scale: float, rounding: Rounding, position: int) -> tuple[Array, Array, Chunk]:
    """(o [B, HV, n, V], the state after the chunk before its rounding, what the backward needs)."""
    G, E, P, X, u, w = intra_chunk(x, scale)
    w = rounding.factor(w, position)
    o, S_next, v_new = through_chunk(x, S, G, P, u, w, scale)
    return o, S_next, Chunk(x, S, G, E, P, X, u, w, v_new)


# Jitted: run eagerly, each operation would be compiled by itself for every length.
@jax.jit
def intra_chunk(x: Operands, scale: float) -> tuple[Array, ...]:
    """Steps 1 to 3, which need no state: G, E, P, X, u and w before its rounding."""
    q, k, v, g, beta = x
    n = k.shape[2]
    G = jnp.cumsum(jnp.maximum(g, MIN_LOG_DECAY), axis=2)
    # Subtract and mask before exp: exp first gives inf·0, and e^(−G) alone overflows.
    difference = G[:, :, :, None] - G[:, :, None]
    below = jnp.broadcast_to(np.tril(np.ones((n, n), bool))[..., None], difference.shape)
    E = jnp.exp(jnp.where(below, difference, -jnp.inf))
    A = jnp.tril(beta * (k[:, :, :, None] * k[:, :, None] * E).sum(-1), -1)
    P = scale * (q[:, :, :, None] * k[:, :, None] * E).sum(-1)
    X = _inverse(A)
    u = _einsum("bhij,bhjv->bhiv", X, beta * v)
    w = _einsum("bhij,bhjk->bhik", X, beta * jnp.exp(G) * k)
    return G, E, P, X, u, w


@jax.jit
def through_chunk(x: Operands, S: Array, G: Array, P: Array, u: Array, w: Array, scale: float) -> tuple[Array, ...]:
    """Steps 4 to 6: o, the state after the chunk before its rounding, and v'."""
    q, k = x.q, x.k
    v_new = u - _einsum("bhik,bhkv->bhiv", w, S)
    o = scale * _einsum("bhik,bhkv->bhiv", q * jnp.exp(G), S) + _einsum("bhij,bhjv->bhiv", P, v_new)
    last = G[:, :, -1:]
    S_next = jnp.exp(last).swapaxes(2, 3) * S + _einsum("bhik,bhiv->bhkv", k * jnp.exp(last - G), v_new)
    return o, S_next, v_new


@jax.jit
def chunk_backward(chunk: Chunk, do: Array, dS: Array, scale: float) -> tuple[Operands, Array]:
    """Gradients of a chunk's operands and of the state that entered it. dS is the cotangent of the state leaving it."""
    (q, k, v, _, beta), S, G, E, P, X, _, w, v_new = chunk
    decay, last = jnp.exp(G), G[:, :, -1:]
    to_last = jnp.exp(last - G)
    dv_new = _einsum("bhji,bhjv->bhiv", P, do) + _einsum("bhik,bhkv->bhiv", k * to_last, dS)
    dS_previous = (
        jnp.exp(last).swapaxes(2, 3) * dS
        + scale * _einsum("bhik,bhiv->bhkv", q * decay, do)
        - _einsum("bhik,bhiv->bhkv", w, dv_new)
    )
    dP = jnp.tril(_einsum("bhiv,bhjv->bhij", do, v_new))
    dq = scale * decay * _einsum("bhiv,bhkv->bhik", do, S)
    dk = to_last * _einsum("bhiv,bhkv->bhik", v_new, dS)
    dw, du = -_einsum("bhiv,bhkv->bhik", dv_new, S), dv_new
    dX = _einsum("bhik,bhjk->bhij", dw, beta * decay * k) + _einsum("bhiv,bhjv->bhij", du, beta * v)
    dA = -jnp.tril(_einsum("bhji,bhjl,bhml->bhim", X, dX, X), -1)
    z, y = _einsum("bhji,bhjk->bhik", X, dw), _einsum("bhji,bhjv->bhiv", X, du)
    dv = beta * y
    dbeta = (y * v).sum(-1) + (z * k * decay).sum(-1)
    dG = q * dq - k * dk + beta * k * decay * z
    at_last = jnp.exp(last[:, :, 0]) * (S * dS).sum(-1) + (k * dk).sum(2)
    dG = dG.at[:, :, -1].add(at_last)
    dk = dk + beta * decay * z
    # pairs
    r = (dA[..., None] * k[:, :, None] * E).sum(3)
    c = ((scale * dP[..., None] * q[:, :, :, None] + (dA * beta)[..., None] * k[:, :, :, None]) * E).sum(2)
    d = scale * (dP[..., None] * k[:, :, None] * E).sum(3)
    dq, dk = dq + d, dk + beta * r + c
    dbeta = dbeta + (r * k).sum(-1)
    dG = dG + q * d + (beta * r - c) * k
    if G.shape[-1] == 1:
        dG = dG.sum(-1, keepdims=True)
    dg = jax.lax.cumsum(dG, axis=2, reverse=True)
    return Operands(dq, dk, dv, dg, dbeta[..., None]), dS_previous


_round_state, _round_w = (jax.jit(f, static_argnames="quant") for f in (sites.round_state, sites.round_w))


def _sequence_forward(x: Operands, S: Array, scale: float, rounding: Rounding) -> tuple[Array, Array, list[Chunk]]:
    S = rounding.state(S, 0)
    length = x.k.shape[2]
    outputs, chunks = [jnp.zeros_like(x.v[:, :, :0])], []
    for position in range(0, length, CHUNK_SIZE):
        rows = Operands(*(a[:, :, position : position + CHUNK_SIZE] for a in x))
        o, S, chunk = chunk_forward(rows, S, scale, rounding, position)
        S = rounding.state(S, position // CHUNK_SIZE + 1)
        outputs.append(o)
        chunks.append(chunk)
    return jnp.concatenate(outputs, axis=2), S, chunks


def _inverse(A: Array) -> Array:
    """(I + A)⁻¹ by forward substitution, row by row."""
    n = A.shape[-1]
    identity = jnp.eye(n, dtype=A.dtype)

    def row(i: Array, X: Array) -> Array:
        return X.at[:, :, i].set(identity[i][None, None] - _einsum("bhj,bhjk->bhk", A[:, :, i], X))

    return jax.lax.fori_loop(0, n, row, jnp.zeros_like(A))


def _einsum(subscripts: str, *operands: Array) -> Array:
    return jnp.einsum(subscripts, *operands, precision=jax.lax.Precision.HIGHEST)


def _prepare(q, k, v, g, beta, scale, initial_state, cu_seqlens) -> tuple[Operands, Array, float]:
    dtype = jnp.float64 if v.dtype == jnp.float64 else jnp.float32
    repeat = v.shape[2] // k.shape[2]
    q, k, v, g, beta = (jnp.moveaxis(a, 1, 2).astype(dtype) for a in (q, k, v, g, beta))
    q, k = jnp.repeat(q, repeat, axis=1), jnp.repeat(k, repeat, axis=1)
    operands = Operands(q, k, v, g if g.ndim == 4 else g[..., None], beta[..., None])
    num_sequences = k.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    if initial_state is None:
        initial_state = jnp.zeros((num_sequences, v.shape[1], k.shape[-1], v.shape[-1]), dtype)
    return operands, initial_state.astype(dtype), k.shape[-1] ** -0.5 if scale is None else scale


def _sequences(
    x: Operands, S: Array, cu_seqlens, quant: DeltaQuant, arrays: QuantArrays, replay: Replay | None
) -> Iterator[tuple[Operands, Array, Rounding, slice]]:
    """(operands, initial state, rounding, rows) of the whole batch, or of each packed sequence."""
    bounds = [0, x.k.shape[2]] if cu_seqlens is None else np.asarray(cu_seqlens).tolist()
    for n, (start, stop) in enumerate(zip(bounds[:-1], bounds[1:])):
        recorded = (replay.states[n], replay.w[n]) if replay is not None else (None, None)
        rounding = Rounding(quant, arrays, n, *recorded)
        initial = S if cu_seqlens is None else S[n : n + 1]
        yield Operands(*(a[:, :, start:stop] for a in x)), initial, rounding, slice(start, stop)


def _join(outputs: list[Array], finals: list[Array], v: Array, cu_seqlens) -> tuple[Array, Array]:
    o = jnp.concatenate(outputs, axis=1)
    beyond = v.shape[1] - o.shape[1]  # rows past cu_seqlens[-1]
    o = jnp.pad(o, ((0, 0), (0, beyond), (0, 0), (0, 0)))
    return o.astype(v.dtype), jnp.concatenate(finals)


def oracle(
    operands: dict[str, np.ndarray], do: np.ndarray, d_final: np.ndarray, **settings
) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """(o, final_state, gradients by name) in float64, by chunk, with the backward by hand: what tests compare with.

    operands: q, k, v, g, beta and optionally initial_state, of any float dtype; do and d_final the cotangents of both
    results; settings as for `delta_rule_chunks`.
    """
    with jax.enable_x64(True):
        x: dict[str, Any] = {name: jnp.asarray(np.asarray(a, np.float64)) for name, a in operands.items()}
        o, final_state = delta_rule_chunks(**x, **settings)
        q, k, v, g, beta = (x.pop(name) for name in ("q", "k", "v", "g", "beta"))
        do_, d_final_ = (jnp.asarray(np.asarray(d, np.float64)) for d in (do, d_final))
        gradients = delta_rule_chunks_backward(do_, d_final_, q, k, v, g, beta, **x, **settings)
        names = ("q", "k", "v", "g", "beta", "initial_state")
        return np.asarray(o), np.asarray(final_state), dict(zip(names, map(np.asarray, gradients)))
