"""Decoding with a state that is rounded token by token, from PyTorch: `delta_rule_decode` and `delta_rule_step`.

`jlaqat.delta_rule_decode` on tensors: the same policies, the same kernel launches and the same carry, so that what JAX
trained and what PyTorch serves have equal bits on one GPU.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import torch

from jlaqat.decode_policy import DecodePolicy
from jlaqat.kernels.recurrent_pipeline import Options, State, Tokens
from jlaqat.kernels.replay_pipeline import Ring
from jlaqat.kernels.replay_pipeline import Tokens as RingTokens
from jlaqat.spec import CHUNK_SIZE, DeltaQuant, QuantArrays, QuantSpec
from jlaqat.torch_bridge import decode_launches as launches
from jlaqat.torch_bridge.autograd import chunk_delta_rule
from jlaqat.torch_bridge.decode_carry import (
    DecodeCarry,
    carry_of,
    copied,
    counters_of,
    hand_over,
    kept_of,
    ring_fields,
    ring_tokens,
    rotate,
    round_decay,
)
from jlaqat.torch_bridge.decode_checks import Call, Lengths, prepare

Tensor = torch.Tensor


def delta_rule_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | DecodeCarry | None = None,
    output_final_state: bool = False,
    cu_seqlens: Lengths = None,
    *,
    quant: DecodePolicy = DecodePolicy(),  # noqa: B008 (frozen)
    prefix_lengths: Lengths = None,
    lengths: Lengths = None,
    w: QuantSpec | None = None,
    quant_arrays: QuantArrays | None = None,
    checkpoint_every: int = CHUNK_SIZE,
) -> tuple[Tensor, DecodeCarry | None]:
    """Gated DeltaNet or Kimi Delta Attention token by token, the state kept as `quant` says; differentiable.

    The counterpart of FLA's fused_recurrent_gated_delta_rule and fused_recurrent_kda, with rounding: q and k come
    normalised, g as a log decay, beta after its sigmoid. Gradients pass straight through every rounding, to all five
    operands and to an `initial_state` that is a tensor.

    Args:
      q, k: [B, T, H, K], K ≤ 256, float32, bfloat16 or float16. v: [B, T, HV, V] in the same dtype; HV a multiple of H.
      g: log decay, natural log, ≤ 0, taken in float32: [B, T, HV] (GDN) or [B, T, HV, K] (KDA). beta: [B, T, HV].
      scale: of q, a Python number, K^−½ unless given.
      initial_state: [N, HV, K, V] floating point, zeros unless given: it is handed over to the decoder, and so rounded
        once. Or the carry of the call before, under the same policy, from which no gradient flows.
      output_final_state: return the carry; None otherwise, as in FLA.
      cu_seqlens: [N + 1] integers, packed sequences along T (then B = 1).
      quant: the policy, as in JAX (docs/decode.md); one that the kernels do not take is refused.
      prefix_lengths: tokens at the start of each sequence that run chunk by chunk (`chunk_delta_rule`) before the
        hand-off: [N] integers, or one for all.
      lengths: [B] integers, tokens of each sequence of a padded batch; after them o is 0. Not with cu_seqlens.
      w: rounds the WY factor inside prefixes, as `DeltaQuant.w`.
      quant_arrays: step, layer and offsets that key stochastic rounding: numbers, or integer tensors of one element.
      checkpoint_every: decoded tokens between two states that are kept for a gradient, 1 or counted in blocks of 16,
        up: memory against time, no bit of any result. Replay has its checkpoints for it, whatever this says.

    Lengths and cu_seqlens are read on the host; on a GPU that waits for it, so keep them on the CPU.

    Returns (o [B, T, HV, V] in v's dtype, a DecodeCarry or None). Cutting a decode into calls changes no bit.

    Runs on CUDA from SM80 on, and on the CPU in a process started with TRITON_INTERPRET=1. Raises, before any launch,
    ValueError for shapes, dtypes, devices and lengths, QuantConfigError for policies, kernels.call.UnsupportedByKernels
    for what the kernels do not do (a policy of `jlaqat.delta_rule_decode` that only its xla backend has), and
    RuntimeError where there is neither a GPU nor the interpreter.
    """
    settings = (prefix_lengths, lengths, cu_seqlens, scale, quant_arrays, checkpoint_every)
    call = prepare(q, k, v, g, beta, initial_state, quant, *settings)
    o, carry = _run(call, quant, q, k, v, g, beta, initial_state, w, checkpoint_every)
    return o, _detached(carry) if output_final_state else None


def delta_rule_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | DecodeCarry,
    *,
    scale: float | None = None,
    quant: DecodePolicy | None = None,
    quant_arrays: QuantArrays | None = None,
    inplace: bool = False,
) -> tuple[Tensor, Any]:
    """One token of the delta rule: what decoding repeats. The bits are those of `delta_rule_decode`.

    Args:
      q, k: [B, H, K]. v: [B, HV, V]. g: [B, HV] (GDN) or [B, HV, K] (KDA), log decay. beta: [B, HV].
      state: [B, HV, K, V]; with a policy also the carry of the step before.
      scale: of q, K^−½ unless given. quant: the policy; None is plain float32. quant_arrays: see `delta_rule_decode`.
      inplace: the step may write into the carry that it is given, which then must not be used again: in mode "replay"
        checkpoint and ring are not copied at every token. Under a gradient nothing is overwritten.

    Returns (o [B, HV, V] in v's dtype, the new state): a DecodeCarry with a policy, else a tensor in float32, through
    which gradients flow.

    Raises as `delta_rule_decode` does.
    """
    for name, x, ranks, layout in (
        ("q", q, (3,), "[B, H, K]"),
        ("k", k, (3,), "[B, H, K]"),
        ("v", v, (3,), "[B, HV, V]"),
        ("g", g, (2, 3), "[B, HV] or [B, HV, K]"),
        ("beta", beta, (2,), "[B, HV]"),
    ):
        if not isinstance(x, Tensor) or x.ndim not in ranks:
            given = f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" if isinstance(x, Tensor) else type(x)
            raise ValueError(f"{name} is {given}; a step takes a torch.Tensor {layout}, without a token axis.")
    if quant is None and isinstance(state, DecodeCarry):
        raise ValueError("state is a DecodeCarry, but quant is None; pass the policy that made it: quant=carry.policy.")
    policy = DecodePolicy() if quant is None else quant
    q, k, v, g, beta = (x[:, None] for x in (q, k, v, g, beta))
    call = prepare(q, k, v, g, beta, state, policy, None, None, None, scale, quant_arrays, CHUNK_SIZE)
    o, carry = _run(call, policy, q, k, v, g, beta, state, None, CHUNK_SIZE, inplace)
    return o[:, 0], carry.values if quant is None else _detached(carry)


def _detached(carry: DecodeCarry) -> DecodeCarry:
    return dataclasses.replace(carry, values=carry.values.detach())


# ---- phases ----------------------------------------------------------------------------------------------------------


def _run(
    call: Call,
    policy: DecodePolicy,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | DecodeCarry | None,
    w: QuantSpec | None,
    every: int,
    inplace: bool = False,
) -> tuple[Tensor, DecodeCarry]:
    """(o, the carry after the last token), of a call that is checked: prefix, hand-off, tokens."""
    (T, H), (HV, V), skipped = k.shape[1:3], v.shape[2:], call.tokens.skipped
    operands = Tokens(q, k, v, g, beta)
    carry = state if isinstance(state, DecodeCarry) else None
    if carry is not None:
        S = None
        if policy.mode == "replay" and T == 1 and not inplace:
            carry = copied(carry)  # which a step changes
    elif state is None:
        S = torch.zeros((call.count, HV, k.shape[3], V), dtype=torch.float32, device=v.device)
    else:
        S = state.float()
    o_prefix = inside = None
    if call.tokens.prefix is not None and T:
        o_prefix, inside, S, carry = _prefill(call, policy, operands, S, carry, w)
    elif carry is None:
        with torch.no_grad():
            given = state is not None
            carry = hand_over(policy, call.options, _held(S, policy), H, g.ndim == 4, call.arrays, given=given)
    if skipped < T:
        tokens = Tokens(*(x[:, skipped:] for x in operands))
        o, carry = _decode(call, policy, tokens, S, carry, every)
        o = torch.nn.functional.pad(o, (0, 0, 0, 0, skipped, 0)) if skipped else o
    else:
        o = torch.zeros_like(v)
    if inside is not None:
        o = torch.where(inside[..., None, None], o_prefix, o)
    return o, carry


def _held(S: Tensor, policy: DecodePolicy) -> Tensor:
    """The state as the policy holds it."""
    return rotate(S) if policy.rotated else S


def _prefill(
    call: Call, policy: DecodePolicy, operands: Tokens, S: Tensor | None, carry: DecodeCarry | None, w: QuantSpec | None
) -> tuple[Tensor, Tensor, Tensor, DecodeCarry]:
    """(o of the prefixes [B, T, HV, V], which tokens they are [B, T], what is handed over, the carry of that)."""
    (B, T, H), device = operands.k.shape[:3], operands.k.device
    prefix, stop, cu = np.asarray(call.tokens.prefix), call.tokens.reach, call.tokens.cu_seqlens
    begin = np.zeros(B, np.int32) if cu is None else cu[:-1]
    span = launches.make_span(begin, prefix, B, T, device)

    def within(x: Tensor) -> Tensor:
        x = x[:, :stop]
        return torch.where(span.inside[:, :stop].reshape(B, stop, *[1] * (x.ndim - 2)), x, 0)

    before = carry.state() if S is None and carry is not None else S
    o, after = chunk_delta_rule(
        *(within(x) for x in operands),
        scale=call.options.scale,
        initial_state=before,
        cu_seqlens=None if cu is None else torch.from_numpy(cu).to(device),
        quant=DeltaQuant(state=policy.state if policy.prefill_state_qdq else None, w=w),
    )
    o = torch.nn.functional.pad(o, (0, 0, 0, 0, 0, T - stop))
    count = span.bounds.count
    has_prefix = count > 0
    S = torch.where(has_prefix[:, None, None, None], after, before)
    with torch.no_grad():
        residual, position = (None, count) if carry is None else (carry.residual, carry.position + count)
        rest = {"position": position, "residual": residual}
        fresh = hand_over(policy, call.options, _held(S, policy), H, operands.g.ndim == 4, call.arrays, **rest)
        carry = fresh if carry is None else _pick(has_prefix, fresh, carry)
    return o, span.inside, S, carry


def _pick(which: Tensor, fresh: DecodeCarry, old: DecodeCarry) -> DecodeCarry:
    """Sequences of the fresh carry where `which` [N] says so, else of the old one."""

    def pick(a: Any, b: Any) -> Any:
        if not isinstance(a, Tensor):
            return a
        chosen = which.reshape(-1, *[1] * (a.ndim - 1))
        if a.dtype == torch.float8_e4m3fn:  # which torch.where does not know everywhere
            return torch.where(chosen, a.view(torch.uint8), b.view(torch.uint8)).view(a.dtype)
        return torch.where(chosen, a, b)

    fields = [f.name for f in dataclasses.fields(fresh)]
    return DecodeCarry(**{name: pick(getattr(fresh, name), getattr(old, name)) for name in fields})


def _decode(
    call: Call, policy: DecodePolicy, tokens: Tokens, S: Tensor | None, carry: DecodeCarry, every: int
) -> tuple[Tensor, DecodeCarry]:
    """(o, 0 where nothing is decoded; the carry after the last token). S: what the carry was made of, if anything."""
    q, k, v, g, beta = tokens
    T = q.shape[1]
    if policy.mode == "replay" or policy.rotated:  # as in JAX: the ring is kept beside float32 tokens
        q, k, v, beta = (x.float() for x in (q, k, v, beta))
    v = rotate(v) if policy.rotated else v
    span = _span(call, T, q.device)
    count = T if span is None else span.bounds.count
    counters = counters_of(policy, carry.position, v.shape[2], call.arrays)
    needed = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, g, beta, S))
    how = How(policy, call.options, span, counters, every, needed)
    held = None if S is None else _held(S, policy)
    o, values, scale, residual, *ring = _Decode.apply(how, carry, q, k, v, g, beta, held)
    fields = dict(zip(RING, ring, strict=True)) | {"values": values, "scale": scale, "residual": residual}
    position, cursor = carry.position + count, carry.cursor
    if policy.mode == "replay":
        cursor = (cursor + count) % policy.ring_length
    carry = dataclasses.replace(carry, position=position, cursor=cursor, **fields)
    return (rotate(o) if policy.rotated else o).to(tokens.v.dtype), carry


RING = ("ring_k", "ring_k_scale", "ring_r", "ring_r_scale", "ring_g")


def _span(call: Call, T: int, device: torch.device) -> launches.Span | None:
    """The decoded tokens, counted from the first that is not skipped on; None where every row is decoded whole."""
    cu, prefix, lengths, skipped, reach = call.tokens
    start = None if prefix is None or skipped == reach else prefix - skipped
    if cu is None and start is None and lengths is None:
        return None
    begin, stop = np.zeros(call.count, np.int32), np.full(call.count, T, np.int32)
    if cu is not None:
        begin, stop = cu[:-1], cu[1:]
    elif lengths is not None:
        stop = np.clip(lengths - skipped, 0, T)
    first = begin if start is None else np.minimum(begin + start, stop)
    return launches.make_span(first, stop - first, 1 if cu is not None else call.count, T, device)


# ---- autograd --------------------------------------------------------------------------------------------------------


class How(NamedTuple):
    policy: DecodePolicy
    options: Options
    span: launches.Span | None
    counters: Tensor | None  # see recurrent_pipeline.forward
    every: int  # tokens between two states that are kept for the backward
    needed: bool  # a gradient is


class _Decode(torch.autograd.Function):
    """(o, values, scale, residual, *ring) after the tokens, from a carry; S: what a gradient of the carry flows to."""

    @staticmethod
    def forward(ctx, how, carry, q, k, v, g, beta, S):
        ctx.dtypes = [x.dtype for x in (q, k, v, g, beta)]
        ctx.how, ctx.with_state = how, S is not None
        ctx.set_materialize_grads(False)
        tokens = Tokens(*(x.contiguous() for x in (q, k, v, round_decay(g.float(), how.policy), beta)))
        state, ring = kept_of(carry)
        if ring is None:
            every = how.every if how.needed else None
            o, after, saved = launches.token_forward(how.options, tokens, state, how.span, how.counters, every)
            entries, kept = {}, (*tokens, *state, *(saved or State(None, None)))
        else:
            tokens = ring_tokens(tokens, how.policy)
            out = launches.replay_forward(how.options, tokens, state, ring, how.span, how.counters, how.needed)
            o, after, entries = out.o, out.state, ring_fields(out.ring)
            kept = (*tokens, *state, *ring, out.r, out.r_scale, *(out.saved or State(None, None)))
        if how.needed:
            ctx.save_for_backward(*kept)
        left = carry_of(how.policy, after, entries, carry.position, carry.cursor)
        results = [left.values, left.scale, left.residual, *(getattr(left, name) for name in RING)]
        differentiable = ring is None and left.values.dtype == torch.float32  # the state itself
        ctx.mark_non_differentiable(*(x for x in results[differentiable:] if x is not None))
        return o, *results

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do, dS, *_):
        how, saved = ctx.how, ctx.saved_tensors
        if how.policy.mode == "replay":
            tokens, state, ring = RingTokens(*saved[:6]), State(*saved[6:10]), Ring(*saved[10:16])
            do = torch.zeros_like(tokens.v) if do is None else do.contiguous()
            rest = (saved[16], saved[17], State(*saved[18:]))
            gradients = launches.replay_backward(how.options, tokens, state, ring, how.span, rest, do)
        else:
            tokens, state, states = Tokens(*saved[:5]), State(*saved[5:9]), State(*saved[9:])
            do = torch.zeros_like(tokens.v) if do is None else do.contiguous()
            if dS is None:
                dS = torch.zeros(state.values.shape, dtype=torch.float32, device=do.device)
            states = None if states.values is None else states
            given = (how.options, tokens, state, how.span, how.counters, states, do, dS.contiguous(), how.every)
            gradients = launches.token_backward(*given)
        d_tokens = (d.to(dtype) for d, dtype in zip(gradients, ctx.dtypes))
        return None, None, *d_tokens, gradients.state if ctx.with_state else None
