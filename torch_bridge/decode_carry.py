"""What a decoder keeps between two calls, as PyTorch has it, and how a state is handed over to one.

The carry is `jlaqat.DecodeCarry` with tensors in its fields: codes and scales, the ring of replay, counters. Kernels
read the same memory, codes as bytes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from jlaqat import decode_carry
from jlaqat.decode_policy import DecodePolicy
from jlaqat.kernels import recurrent_pipeline, replay_pipeline
from jlaqat.kernels.recurrent_pipeline import KEY_ROW, Options, State
from jlaqat.kernels.replay_pipeline import Ring
from jlaqat.spec import QuantArrays, QuantSpec
from jlaqat.torch_bridge import run

CODE_DTYPES = {"e4m3": torch.float8_e4m3fn, "int8": torch.int8}
E4M3_MAX = 448.0
HADAMARD = decode_carry.HADAMARD


@dataclasses.dataclass(frozen=True)
class DecodeCarry(decode_carry.DecodeCarry):
    """The memory of a decoder between two calls: `jlaqat.DecodeCarry`, whose fields hold tensors here.

    Pass it back unchanged: another policy, or other heads or dimensions, raise. No gradient flows through it. A step
    with `inplace=True` consumes the carry that it is given.
    """

    def state(self) -> torch.Tensor:
        """The state that the next token sees, [N, HV, K, V] float32; no gradient."""
        S = self.held()
        return rotate(S) if self.policy.rotated else S

    def held(self) -> torch.Tensor:
        """`state` as the policy holds it: under the Hadamard transform where it says so."""
        S = decode(State(self.values, self.scale), self.policy.state)
        if self.ring_k is None:
            return S
        k, r = self.ring_k.float(), self.ring_r.float()
        if self.ring_k_scale is not None:
            k = k * self.ring_k_scale[..., None]
            r = r * _spread(self.ring_r_scale, self.policy.factor_block, r.shape[-1])
        k = k.repeat_interleave(r.shape[2] // k.shape[2], 2)
        decay = self.ring_g.exp()[..., None] if self.ring_g.ndim == 4 else self.ring_g.exp()[..., None, None]
        for i in range(k.shape[1]):
            updated = decay[:, i] * S + k[:, i, ..., None] * r[:, i, ..., None, :]
            S = torch.where((i < self.cursor)[:, None, None, None], updated, S)
        return S


def decode(kept: State, spec: QuantSpec | None) -> torch.Tensor:
    """What kept states stand for, float32."""
    values = kept.values.float()
    if kept.scale is None or spec is None:
        return values
    V = values.shape[-1]
    if spec.granularity == "tile":
        return values * _spread(kept.scale, spec.block_v, V)[..., None, :]
    if spec.granularity == "key_row":
        return values * _spread(kept.scale, KEY_ROW, V)
    return values * kept.scale[..., None, :]


def _spread(scale: torch.Tensor, block: int, size: int) -> torch.Tensor:
    return scale.repeat_interleave(block, -1)[..., :size]


def rotate(x: torch.Tensor) -> torch.Tensor:
    """x under the orthonormal 32-point Hadamard transform, over groups of its last axis, as `jlaqat` has it."""
    shape, half = x.shape, 1
    while half < HADAMARD:
        pairs = x.reshape(*shape[:-1], -1, 2, half)
        left, right = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack((left + right, left - right), -2).reshape(shape)
        half *= 2
    return x * HADAMARD**-0.5


# ---- handing a state over --------------------------------------------------------------------------------------------


def hand_over(
    policy: DecodePolicy,
    options: Options,
    S: torch.Tensor,
    key_heads: int,
    kda: bool,
    arrays: QuantArrays,
    *,
    given: bool = True,
    position: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> DecodeCarry:
    """The carry of a decoder that is handed states S [N, HV, K, V] float32 after `position` [N] tokens.

    given: False says that S is zeros, which need no rounding. residual: what earlier roundings lost.
    """
    n, heads, K, V = S.shape
    position = S.new_zeros(n, dtype=torch.int32) if position is None else position
    if policy.state is None:
        S = S.detach().contiguous()
        state = State(S.clone() if policy.mode == "replay" else S, None)  # steps of replay write into it
    else:
        state = _rounded(policy, options, S if residual is None else S + residual, given, position, arrays)
    length, ring = policy.ring_length, {}
    if policy.mode == "replay":
        coded = policy.factor_qdq
        dtype = torch.float8_e4m3fn if coded else getattr(torch, policy.ring_dtype)
        blocks = -(-V // policy.factor_block)
        ring = {
            "ring_k": S.new_zeros((n, length, key_heads, K), dtype=dtype),
            "ring_k_scale": S.new_ones((n, length, key_heads)) if coded else None,
            "ring_r": S.new_zeros((n, length, heads, V), dtype=dtype),
            "ring_r_scale": S.new_ones((n, length, heads, blocks)) if coded else None,
            "ring_g": S.new_zeros((n, length, heads, K) if kda else (n, length, heads)),
        }
    return carry_of(policy, state, ring, position, torch.zeros_like(position))


def _rounded(
    policy: DecodePolicy,
    options: Options,
    S: torch.Tensor,
    given: bool,
    position: torch.Tensor,
    arrays: QuantArrays,
) -> State:
    """S rounded as after a token. The kernel does it, given a state of zeros whose last rounding lost S."""
    n, heads, K, V = S.shape
    q, v, beta = (S.new_zeros((n, 1, *shape)) for shape in ((1, K), (heads, V), (heads,)))
    nothing = recurrent_pipeline.Tokens(q, q, v, beta, beta)
    values, scale = recurrent_pipeline.Call(nothing, options).kept(n)
    zeros = S.new_zeros(values.shape, dtype=getattr(torch, values.dtype))
    state = State(zeros, S.new_ones(scale.shape) if values.dtype == "uint8" else None, S.contiguous())
    if given and n:
        # A token's rounding has the number after the token's; this one comes before all tokens.
        counters = counters_of(policy, position - 1, heads, arrays)
        state = recurrent_pipeline.forward(run.torch_run, nothing, state, options, counters=counters).state
    return state if policy.error_feedback else state._replace(lost=None)


def counters_of(policy: DecodePolicy, position: torch.Tensor, heads: int, arrays: QuantArrays) -> torch.Tensor | None:
    """int32 [N, HV, 4], as `jlaqat.decode_counters.counters_of` has them: what stochastic rounding draws by."""
    if policy.state is None or policy.state.rounding != "stochastic":
        return None
    device, count = position.device, position.shape[0]

    def word(x: Any) -> torch.Tensor:
        if not isinstance(x, torch.Tensor):  # filled in where it is read: a copy from the host would wait
            x = torch.full((), int(x), dtype=torch.int64, device=device)
        return x.to(torch.int64) & 0xFFFFFFFF

    head = torch.arange(heads, device=device) + word(arrays.head_offset)
    sequence = torch.arange(count, device=device) + word(arrays.sequence_offset)
    layer_and_head = (word(arrays.layer) << 16) ^ word(head)
    words = (position[:, None], layer_and_head[None, :], sequence[:, None], word(arrays.step).reshape(1, 1))
    return torch.stack([word(x).to(torch.int32).expand(count, heads) for x in words], -1)


# ---- as the kernels read it ------------------------------------------------------------------------------------------


def as_bytes(x: torch.Tensor | None) -> torch.Tensor | None:
    """Codes as uint8; anything else as it is. The same memory."""
    return x.view(torch.uint8) if x is not None and x.element_size() == 1 else x


def kept_of(carry: DecodeCarry) -> tuple[State, Ring | None]:
    """States and ring as the kernels take them, in the carry's memory."""
    state = State(as_bytes(carry.values), carry.scale, carry.residual)
    if carry.ring_k is None:
        return state, None
    k, r = as_bytes(carry.ring_k), as_bytes(carry.ring_r)
    return state, Ring(k, r, carry.ring_g, carry.cursor, carry.ring_k_scale, carry.ring_r_scale)


def ring_fields(ring: Ring) -> dict[str, torch.Tensor | None]:
    """A ring of the kernels as the carry names it."""
    k, r = (x.view(torch.float8_e4m3fn) if ring.coded else x for x in (ring.k, ring.r))
    scales = {"ring_k_scale": ring.k_scale, "ring_r_scale": ring.r_scale}
    return {"ring_k": k, "ring_r": r, "ring_g": ring.g, **scales}


def carry_of(
    policy: DecodePolicy, state: State, ring: dict[str, Any], position: torch.Tensor, cursor: torch.Tensor
) -> DecodeCarry:
    """The carry of what the kernels left. ring: fields of the carry, none without replay."""
    values = state.values
    if policy.state is not None and state.scale is not None:
        values = values.view(CODE_DTYPES[policy.state.format])
    fields = dict.fromkeys(("ring_k", "ring_k_scale", "ring_r", "ring_r_scale", "ring_g")) | ring
    rest = {"position": position, "cursor": cursor, "policy": policy.signature}
    return DecodeCarry(values=values, scale=state.scale, residual=state.lost, **fields, **rest)


def copied(carry: DecodeCarry) -> DecodeCarry:
    """The carry in memory of its own: a step of replay changes what it is given."""
    fields = {f.name: getattr(carry, f.name) for f in dataclasses.fields(carry)}
    return DecodeCarry(**{name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in fields.items()})


# ---- the ring's keys -------------------------------------------------------------------------------------------------


def ring_tokens(tokens: recurrent_pipeline.Tokens, policy: DecodePolicy) -> replay_pipeline.Tokens:
    """The tokens, k as the ring keeps it."""
    if not policy.factor_qdq:
        return replay_pipeline.Tokens(*tokens._replace(k=tokens.k.to(getattr(torch, policy.ring_dtype))))
    codes, scale = _key_codes(tokens.k)
    return replay_pipeline.Tokens(*tokens._replace(k=codes), k_scale=scale)


def _key_codes(k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(E4M3 codes as bytes, a scale a key [..., H]), with the bits of `jlaqat.rounding.quantize_codes`."""
    amax = k.abs().amax(-1)
    scale = amax / torch.full_like(amax, E4M3_MAX)  # by a number PyTorch would multiply with its reciprocal
    scale = torch.where(scale < torch.finfo(torch.float32).tiny, torch.ones_like(scale), scale)
    codes = (k * (torch.ones_like(scale) / scale)[..., None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8), scale


def round_decay(g: torch.Tensor, policy: DecodePolicy) -> torch.Tensor:
    """g float32 on the policy's grid, ties to even."""
    if policy.decay_log_step is None:
        return g
    step = torch.full_like(g, policy.decay_log_step)
    return torch.round(g / step) * step
