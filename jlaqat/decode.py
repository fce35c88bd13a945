"""Decoding with a state that is rounded token by token: `delta_rule_decode` for many tokens, `delta_rule_step` for one.

Both keep to a `DecodePolicy` and pass a `DecodeCarry` from call to call. A sequence may start with a prefix, which runs
chunk by chunk as `delta_rule` does; its state is handed over, and the tokens after it are decoded.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jlaqat import backends, checks, ops
from jlaqat.chunked import Inputs, computation_dtype
from jlaqat.decode_carry import (
    DecodeCarry,
    Memory,
    Stored,
    empty_ring,
    pack,
    rotate,
    round_keys,
    unpack,
    write,
)
from jlaqat.decode_checks import Lengths, Tokens, poison, prepare
from jlaqat.decode_policy import DecodePolicy
from jlaqat.decode_reference import decode_reference
from jlaqat.decode_replay_triton import decode_replay
from jlaqat.decode_scan import Span, decode_scan, make_rows, token
from jlaqat.decode_triton import decode_triton
from jlaqat.decode_triton import why_not as decode_triton_why_not
from jlaqat.op_shards import OperandLayouts, on_shards
from jlaqat.rounding import div_rn, straight_through
from jlaqat.shards import all_varying_axes, vary_over
from jlaqat.sites import Place
from jlaqat.spec import CHUNK_SIZE, DeltaQuant, QuantArrays, QuantSpec

Array = jax.Array


def delta_rule_decode(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    state: Array | DecodeCarry | None = None,
    *,
    quant: DecodePolicy = DecodePolicy(),  # noqa: B008 (frozen)
    prefix_lengths: Lengths = None,
    lengths: Lengths = None,
    cu_seqlens: Array | None = None,
    scale: float | None = None,
    w: QuantSpec | None = None,
    quant_arrays: QuantArrays | None = None,
    checkpoint_every: int = CHUNK_SIZE,
    backend: str = "auto",
) -> tuple[Array, DecodeCarry]:
    """Gated DeltaNet or Kimi Delta Attention as a decoder runs it: token by token, the state kept as `quant` says.

    A token decays the state, R = Diag(e^g)·S, and writes W = R + k (β (v − Rᵀk))ᵀ; the policy says when W is rounded
    and what o = scale·Sᵀq reads. Gradients pass straight through every rounding, to all operands and a float `state`.

    Args:
      q, k: [B, T, H, K] in one of float32, bfloat16, float16, float64 (under x64). Normalise k (and q) beforehand.
      v: [B, T, HV, V] in the same dtype; HV a multiple of H, and value head hv reads key head hv // (HV/H).
      g: log decay, natural log, ≤ 0, float32. [B, T, HV] (GDN) or [B, T, HV, K] (KDA). beta: [B, T, HV].
      state: [N, HV, K, V] floating point, zeros where None: it is handed over to the decoder, and so rounded once
        (quantize_initial). Or the carry of the call before, under the same policy, from which no gradient flows.
      quant: the policy, static under jit.
      prefix_lengths: tokens at the start of each sequence that run chunk by chunk, in float32 (rounded at chunk
        boundaries with prefill_state_qdq), before the hand-off. int32 [N], or one int for all; N sequences: B, or
        len(cu_seqlens) − 1. Values may be traced; known ones let the rest of the tokens be skipped.
      lengths: int32 [B], tokens of each sequence of a padded batch; the padding after them gives o = 0. Not with
        cu_seqlens.
      cu_seqlens: int32 [N + 1], packed sequences along T (then B = 1), as in `delta_rule`.
      scale: of q; a Python number, K^−½ unless given.
      w: rounds the WY factor inside prefixes, as `DeltaQuant.w`.
      quant_arrays: step, layer and offsets that key stochastic rounding; a static w_amax.
      checkpoint_every: decoded tokens between two states that are kept for a gradient, which runs those between them
        again: memory against time, and no bit of any result. 1 keeps every state and runs nothing twice. Kernels
        count in blocks of 16 tokens, up; "xla" keeps one every 64 tokens, or all; replay by kernels has its
        checkpoints for it, whatever this says.
      backend: "xla" (any device), "triton" (NVIDIA GPUs; see `decode_triton.why_not` for what it takes), "reference"
        (slow, for tests), or "auto": "triton" where it can. A prefix runs on the backend of that name.

    Returns (o [B, T, HV, V] in v's dtype, the carry). Cutting a decode into calls at any token changes no bit; where a
    prefix is cut, each part is handed over, and so rounded, by itself. A call without tokens writes nothing. A prefix
    after decoded tokens (the next turn of a dialogue) starts from the state as it stands.

    Raises ValueError (QuantConfigError for policies, NotImplementedError for a backend that cannot run this) before any
    work. Where traced lengths or cu_seqlens break the rules, everything returned is NaN.

    Source of the maths: arXiv 2412.06464, arXiv 2510.26692; docs/decode.md says what rounds where, and who does it.
    """
    checks.check_checkpoint_every(checkpoint_every)
    inputs, tokens, arrays, scale = prepare(
        q, k, v, g, beta, state, quant, prefix_lengths, lengths, cu_seqlens, scale, quant_arrays
    )
    if state is None and quant.state is not None:  # or XLA rounds zeros when it compiles, for seconds
        inputs = inputs._replace(initial_state=jax.lax.optimization_barrier(inputs.initial_state))
    by_kernels = _by_kernels(backend, quant, inputs)
    if backend == "reference":
        return decode_reference(inputs, state, quant, tokens, arrays, scale, w)

    def run(inputs: Inputs, arrays: QuantArrays, tokens: Tokens, carry: DecodeCarry | None):
        memory = None if carry is None else unpack(carry, quant, computation_dtype(inputs.v))
        o_prefix, inside, memory = _prefill(inputs, memory, tokens, quant, arrays, scale, w, backend)
        carry = carry if tokens.prefix is None else None  # otherwise a prefix made another memory of it
        o, memory, carry = _decode(inputs, memory, tokens, quant, arrays, scale, by_kernels, checkpoint_every, carry)
        if inside is not None:
            o = jnp.where(inside[..., None, None], o_prefix, o)
        return o.astype(inputs.v.dtype), _pack(memory, quant, inputs) if carry is None else carry

    carry = state if isinstance(state, DecodeCarry) else None
    result = _on_shards(run, inputs, arrays, tokens, carry, lambda of, carry: of.carry(carry))
    return poison(result, tokens, inputs.k.shape[1])


def delta_rule_step(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    state: Array | DecodeCarry,
    *,
    scale: float | None = None,
    quant: DecodePolicy | None = None,
    quant_arrays: QuantArrays | None = None,
) -> tuple[Array, Any]:
    """One token of the delta rule: what decoding repeats.

    Args:
      q, k: [B, H, K]. v: [B, HV, V]. g: [B, HV] (GDN) or [B, HV, K] (KDA), log decay. beta: [B, HV].
      state: [B, HV, K, V]; with a policy also the carry of the step before.
      scale: of q, K^−½ unless given. quant: the policy; None is plain float32. quant_arrays: see `delta_rule_decode`.

    Returns (o [B, HV, V] in v's dtype, the new state): a DecodeCarry with a policy, else an array in float32 (float64
    for float64 inputs). The bits are those of `delta_rule_decode` over the same tokens.

    Raises ValueError as `delta_rule` does.
    """
    q, k, v, g, beta = map(jnp.asarray, (q, k, v, g, beta))
    for name, x, layout in (("q", q, "[B, H, K]"), ("k", k, "[B, H, K]"), ("v", v, "[B, HV, V]")):
        if x.ndim != 3:
            raise ValueError(f"{name} is {checks.describe(x)}; a step takes {layout}, without a token axis.")
    if g.ndim not in (2, 3) or beta.ndim != 2:
        raise ValueError(
            f"g is {checks.describe(g)} and beta {checks.describe(beta)}; a step takes g [B, HV] or [B, HV, K] "
            "and beta [B, HV]."
        )
    q, k, v, g, beta = (x[:, None] for x in (q, k, v, g, beta))
    if quant is not None:
        o, carry = delta_rule_decode(q, k, v, g, beta, state, quant=quant, scale=scale, quant_arrays=quant_arrays)
        return o[:, 0], carry
    if isinstance(state, DecodeCarry):
        raise ValueError("state is a DecodeCarry, but quant is None; pass the policy that made it: quant=carry.policy.")
    plain = DecodePolicy()
    inputs, tokens, arrays, scale = prepare(q, k, v, g, beta, state, plain, None, None, None, scale, quant_arrays)
    by_kernels = _by_kernels("auto", plain, inputs)

    def run(inputs: Inputs, arrays: QuantArrays, tokens: Tokens, carry: None):
        memory = _hand_over(inputs.initial_state, None, None, inputs, plain, arrays)
        o, memory, _ = _decode(inputs, memory, tokens, plain, arrays, scale, by_kernels)
        return o.astype(inputs.v.dtype), memory.S

    o, S = _on_shards(run, inputs, arrays, tokens, None, lambda of, state: of.state)
    return o[:, 0], S


def fresh_carry(policy: DecodePolicy, state: Array, num_key_heads: int, *, gate_per_channel: bool) -> DecodeCarry:
    """The carry of a decoder that is handed `state` [N, HV, K, V] and has seen no token. Raises ValueError as a call.

    num_key_heads is H; gate_per_channel: KDA's gates rather than GDN's.
    """
    (n, heads, K, V), H = state.shape, num_key_heads
    k, v, beta = (jnp.zeros((n, 0, *shape), state.dtype) for shape in ((H, K), (heads, V), (heads,)))
    g = jnp.zeros((n, 0, heads, K), state.dtype) if gate_per_channel else beta
    return delta_rule_decode(k, k, v, g, beta, state, quant=policy)[1]


def _on_shards(run: Any, inputs: Inputs, arrays: QuantArrays, tokens: Tokens, carry: DecodeCarry | None, state: Any):
    """`run(inputs, arrays, tokens, carry) -> (o, a state)`, on shards where a mesh of explicit axes asks for that.

    state: from OperandLayouts and the shapes of what is returned of states to its layouts.
    """

    def local(inputs: Inputs, arrays: QuantArrays, more: Any):
        (cu_seqlens, prefix, lengths), carry = more
        return run(inputs, arrays, tokens._replace(cu_seqlens=cu_seqlens, prefix=prefix, lengths=lengths), carry)

    def layouts(of: OperandLayouts):
        bounds = [None if x is None else word for x, word in zip(tokens.bounds, ("sequences", of.row, of.row))]
        of_carry = None if carry is None else of.carry(carry)
        return (tuple(bounds), of_carry), lambda results: (of.o, state(of, results[1]))

    packed = tokens.cu_seqlens is not None
    return on_shards(local, inputs, arrays, (tokens.bounds, carry), packed=packed, layouts=layouts)


# ---- phases ----------------------------------------------------------------------------------------------------------


def _prefill(inputs: Inputs, memory: Memory | None, tokens: Tokens, quant, arrays, scale: float, w, backend: str):
    """(o of the prefixes, which tokens they are [B, T] or None, the memory that the first decoded tokens see)."""
    if tokens.prefix is None or inputs.k.shape[1] == 0:
        if memory is None:
            memory = _hand_over(inputs.initial_state, None, None, inputs, quant, arrays)
        return None, None, memory
    T = inputs.k.shape[1]
    stop = tokens.reach
    inside = _inside(tokens, inputs.k.shape[0], T)
    before = inputs.initial_state if memory is None else _unrotated(memory.S, quant)
    operands = [_only(inside[:, :stop], x[:, :stop]) for x in inputs[:5]]
    o, after = ops.delta_rule(
        *operands,
        scale=scale,
        initial_state=before,
        cu_seqlens=tokens.cu_seqlens,
        quant=DeltaQuant(state=quant.state if quant.prefill_state_qdq else None, w=w),
        quant_arrays=arrays,
        backend=backend,
    )
    o = jnp.pad(o, ((0, 0), (0, T - stop), (0, 0), (0, 0)))
    prefix = jnp.asarray(tokens.prefix)
    has_prefix = (prefix > 0)[:, None, None, None]
    if before is None:
        before = jnp.zeros_like(after)
    S = jnp.where(has_prefix, after, before)
    if memory is None:
        return o, inside, _hand_over(S, None, prefix, inputs, quant, arrays)
    fresh = _hand_over(S, memory.residual, memory.position + prefix, inputs, quant, arrays)

    def pick(new: Array, old: Array) -> Array:
        return jnp.where(has_prefix.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

    return o, inside, jax.tree.map(pick, fresh, memory)


def _hand_over(S, residual, position, inputs: Inputs, quant: DecodePolicy, arrays: QuantArrays) -> Memory:
    """The memory of a decoder that is given states S [N, HV, K, V] (None: zeros) after `position` tokens."""
    count = inputs.k.shape[0] if position is None else position.shape[0]
    if S is None:
        S = jnp.zeros((count, inputs.v.shape[2], inputs.k.shape[3], inputs.v.shape[3]), computation_dtype(inputs.v))
    S = S.astype(computation_dtype(inputs.v))
    S = rotate(S) if quant.rotated else S
    if position is None:
        position = jnp.zeros(S.shape[0], jnp.int32)
    if residual is None and quant.error_feedback:
        residual = jnp.zeros_like(S)
    stored = Stored(S, None)
    if quant.state is not None and quant.quantize_initial:
        sequence = jnp.arange(S.shape[0], dtype=jnp.int32)
        S, stored, residual = write(S, residual, quant, Place(sequence, position), arrays)
    ring = empty_ring(quant, S, 1 if inputs.g.ndim == 3 else inputs.k.shape[3])
    return Memory(S, stored, ring, residual, position, jnp.zeros_like(position))


def _decode(
    inputs: Inputs,
    memory: Memory,
    tokens: Tokens,
    quant: DecodePolicy,
    arrays: QuantArrays,
    scale: float,
    by_kernels: str | None,
    checkpoint_every: int = CHUNK_SIZE,
    carry: DecodeCarry | None = None,
):
    """(o [B, T, HV, V], 0 where nothing is decoded; the memory after the last token; its carry where kernels made one).

    carry: what memory was unpacked from, if it has not changed since.
    """
    T, dtype = inputs.k.shape[1], computation_dtype(inputs.v)
    skipped = tokens.skipped
    if skipped >= T:
        return jnp.zeros(inputs.v.shape, dtype), memory, carry
    q, k, v, g, beta = (x[:, skipped:] for x in inputs[:5])
    if not by_kernels or quant.mode != "token" or quant.rotated:  # others read tokens in their own dtype
        q, k, v, beta = (x.astype(dtype) for x in (q, k, v, beta))
    k, g = round_keys(k, quant), round_decay(g.astype(dtype), quant)
    v = rotate(v) if quant.rotated else v
    span = _span(tokens)
    q, k, v, g, beta, memory = _same_shards((q, k, v, g, beta), memory, span, arrays)
    before, carry = carry, None
    if by_kernels and quant.mode == "replay":
        before = _pack(memory, quant, inputs) if before is None else before
        operands = Inputs(q, k, v, g, beta, memory.S)
        o, carry = decode_replay(quant, scale, operands, before, span, arrays, portable=by_kernels != "triton")
    elif by_kernels:
        operands, how = Inputs(q, k, v, g, beta, memory.S), {"portable": by_kernels != "triton"}
        o, memory = decode_triton(quant, scale, operands, memory, span, arrays, every=checkpoint_every, **how)
    elif T - skipped == 1 and tokens.cu_seqlens is None:
        active, sequence = jnp.ones(k.shape[0], bool), jnp.arange(k.shape[0], dtype=jnp.int32)
        if tokens.prefix is not None:
            active = active & (jnp.asarray(tokens.prefix) <= skipped)
        if tokens.lengths is not None:
            active = active & (jnp.asarray(tokens.lengths) > skipped)
        row = make_rows((x[:, 0] for x in (q, k, v, g, beta)), scale)
        memory, o, _ = token(memory, row, active, sequence, quant, arrays)
        o = o[:, None]
    else:
        operands, keep_all = Inputs(q, k, v, g, beta, memory.S), checkpoint_every == 1
        o, memory = decode_scan(quant, scale, operands, memory, span, arrays, keep_all)
    o = rotate(o) if quant.rotated else o
    return jnp.pad(o, ((0, 0), (skipped, 0), (0, 0), (0, 0))), memory, carry


def _pack(memory: Memory, quant: DecodePolicy, inputs: Inputs) -> DecodeCarry:
    return pack(memory, quant, inputs.k.shape[2], inputs.g.ndim == 4)


def _same_shards(operands: tuple[Array, ...], memory: Memory, span: Span, arrays: QuantArrays) -> tuple[Any, ...]:
    """Inside shard_map: operands and memory vary over the same mesh axes, counters over those that cut sequences."""
    axes = all_varying_axes(operands, memory, span, arrays)
    counters = all_varying_axes(memory.position, memory.cursor, span)
    operands, lifted = jax.tree.map(lambda x: vary_over(x, axes), (operands, memory))
    position, cursor = (vary_over(x, counters) for x in (memory.position, memory.cursor))
    return *operands, lifted._replace(position=position, cursor=cursor)


def _span(tokens: Tokens) -> Span:
    """The decoded tokens, counted from the first that is not skipped on."""
    start, stop = tokens.prefix, tokens.lengths
    if tokens.skipped == tokens.reach:
        start = None  # all start with the first
    start, stop = (None if x is None else jnp.asarray(x) - tokens.skipped for x in (start, stop))
    cu_seqlens = None if tokens.cu_seqlens is None else jnp.asarray(tokens.cu_seqlens)
    return Span(cu_seqlens, start, None if cu_seqlens is not None else stop)


def round_decay(g: Array, quant: DecodePolicy) -> Array:
    """g on the policy's grid, ties to even, with an identity gradient."""
    if quant.decay_log_step is None:
        return g
    exact, step = jax.lax.stop_gradient(g).astype(jnp.float32), float(quant.decay_log_step)
    return straight_through(g, (jnp.round(div_rn(exact, step)) * jnp.float32(step)).astype(g.dtype))


def _unrotated(S: Array, quant: DecodePolicy) -> Array:
    return rotate(S) if quant.rotated else S


def _only(inside: Array, x: Array) -> Array:
    """x [B, T, ...] where inside [B, T], else 0: tokens that neither write nor decay."""
    return jnp.where(inside.reshape(*inside.shape, *(1,) * (x.ndim - 2)), x, jnp.zeros((), x.dtype))


def _inside(tokens: Tokens, B: int, T: int) -> Array:
    """[B, T] bool: the token belongs to a prefix."""
    index, prefix = jnp.arange(T, dtype=jnp.int32), jnp.asarray(tokens.prefix)
    if tokens.cu_seqlens is None:
        return index[None] < prefix[:, None]
    cu = jnp.asarray(tokens.cu_seqlens)
    sequence = jnp.searchsorted(cu[1:], index, side="right").astype(jnp.int32)
    known = sequence < prefix.shape[0]
    sequence = jnp.minimum(sequence, prefix.shape[0] - 1)
    return (known & (index - cu[sequence] < prefix[sequence]))[None]


def _by_kernels(backend: str, quant: DecodePolicy, inputs: Inputs) -> str | None:
    """Whether the Triton kernels decode this call: "triton", "triton or xla" as the platform has it, or None.

    Raises NotImplementedError where "triton" was asked for and cannot.
    """
    checks.check_backend(backend)
    if backend not in ("auto", "triton"):
        return None
    reason = decode_triton_why_not(quant, inputs.k.shape[3], inputs.v.dtype)
    if backend == "triton" and reason is not None:
        raise NotImplementedError(
            f"backend='triton' cannot serve this call: {reason}. Use backend='xla', or 'auto', which runs prefixes on "
            "the fastest backend that can."
        )
    backends.say_choice("delta_rule_decode", backend, reason)
    if reason is not None:
        return None
    return "triton" if backend == "triton" else "triton or xla"
