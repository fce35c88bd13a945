"""What a decode from PyTorch must be called with: the JAX path's own checks on tensors' shapes, dtypes and lengths."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import triton

from jlaqat import checks, decode_checks, decode_triton
from jlaqat.decode_carry import check_carry, check_rotation
from jlaqat.decode_policy import DecodePolicy
from jlaqat.decode_replay_triton import replay_options
from jlaqat.decode_triton import options_of
from jlaqat.kernel_calls import MINIMUM_CAPABILITY, Target
from jlaqat.kernels.call import UnsupportedByKernels
from jlaqat.kernels.launch import dtype_name
from jlaqat.kernels.recurrent_pipeline import Options
from jlaqat.spec import QuantArrays, QuantConfigError
from jlaqat.torch_bridge.decode_carry import DecodeCarry

Lengths = int | Sequence[int] | np.ndarray | torch.Tensor | None


class Described(NamedTuple):
    """What `jlaqat.checks` asks of an array."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)


class Call(NamedTuple):
    """A decode, checked."""

    tokens: decode_checks.Tokens  # numpy
    arrays: QuantArrays
    options: Options
    count: int  # sequences

    @property
    def packed(self) -> bool:
        return self.tokens.cu_seqlens is not None


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor | DecodeCarry | None,
    policy: DecodePolicy,
    prefix_lengths: Lengths,
    lengths: Lengths,
    cu_seqlens: Lengths,
    scale: float | None,
    quant_arrays: QuantArrays | None,
    checkpoint_every: int,
) -> Call:
    """Raises as `delta_rule_decode` says, before anything is launched."""
    if not isinstance(policy, DecodePolicy):
        raise QuantConfigError(
            f"quant={policy!r:.80} is a {type(policy).__name__}; give a DecodePolicy, such as "
            "DecodePolicy.preset('serving') or DecodePolicy(state=QuantSpec.fp8())."
        )
    operands = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    for name, x in operands.items():
        if not isinstance(x, torch.Tensor):
            raise ValueError(f"{name} is a {type(x).__name__}; give a torch.Tensor (jlaqat itself takes JAX arrays).")
    described = {name: _describe(x) for name, x in operands.items()}
    checks.check_operands(*described.values())
    (B, T, H, K), (HV, V) = k.shape, v.shape[2:]
    cu = _values("cu_seqlens", cu_seqlens)
    if cu is not None:
        checks.check_cu_seqlens(cu, described["k"])
        cu = cu.astype(np.int32)
    count = B if cu is None else len(cu) - 1
    check_rotation(policy, V)
    if isinstance(state, DecodeCarry):
        check_carry(state, policy, (count, HV, K, V), H, g)
        operands["initial_state"] = state.values
    elif isinstance(state, torch.Tensor):
        checks.check_initial_state(_describe(state), (count, HV, K, V))
        operands["initial_state"] = state
    elif state is not None:
        raise ValueError(
            f"initial_state is a {type(state).__name__}; give a torch.Tensor [N, HV, K, V] = {[count, HV, K, V]}, or "
            "the DecodeCarry that an earlier call of the bridge returned."
        )
    for name, x in operands.items():
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device} and q on {q.device}; move them to one device.")
    checks.check_checkpoint_every(checkpoint_every)
    options = _options(policy, q, checks.check_scale(scale, K))
    tokens = _tokens(prefix_lengths, lengths, cu, count, T)
    return Call(tokens, _arrays(quant_arrays), options, count)


def _describe(x: torch.Tensor) -> Described:
    name = dtype_name(x)
    return Described(tuple(x.shape), np.dtype(name))  # ml_dtypes, which JAX brings, knows bfloat16


def _values(name: str, x: Lengths) -> Any:
    """Values on the host; from a GPU that waits for it."""
    if isinstance(x, torch.Tensor):
        return x.detach().cpu().numpy()
    return x if x is None or isinstance(x, numbers.Integral) else np.asarray(x)


def _tokens(prefix: Lengths, lengths: Lengths, cu: np.ndarray | None, count: int, T: int) -> decode_checks.Tokens:
    prefix, lengths = _values("prefix_lengths", prefix), _values("lengths", lengths)
    if cu is None or lengths is not None:  # both: an error
        return decode_checks.make_tokens(prefix, lengths, cu, count, T)
    tokens = decode_checks.make_tokens(prefix, cu[1:] - cu[:-1], None, count, T)
    reach = 0 if tokens.prefix is None else T
    return tokens._replace(cu_seqlens=cu, skipped=0, reach=reach)


def _arrays(arrays: QuantArrays | None) -> QuantArrays:
    arrays = QuantArrays() if arrays is None else arrays
    if not isinstance(arrays, QuantArrays):
        raise QuantConfigError(f"quant_arrays is a {type(arrays).__name__}; give a QuantArrays or leave it out.")
    for name in ("state_amax", "w_amax"):
        if getattr(arrays, name) is not None:
            raise QuantConfigError(
                f"quant_arrays.{name} was given, but the kernels have dynamic scales only; leave it out."
            )
    return arrays


def _options(policy: DecodePolicy, q: torch.Tensor, scale: float) -> Options:
    """Those of the JAX path on this machine. Raises UnsupportedByKernels for what the kernels do not take."""
    capability = _capability(q.device)
    reason = decode_triton.not_taken(policy, int(q.shape[3]), _describe(q).dtype)
    if capability < MINIMUM_CAPABILITY:
        reason = f"the GPU is SM{capability} and the kernels need SM{MINIMUM_CAPABILITY} or newer"
    if reason is not None:
        raise UnsupportedByKernels(
            f"quant=({policy.describe()}): {reason}. PyTorch decodes by kernels alone: choose what they take, or use "
            "jlaqat.delta_rule_decode (JAX) with backend='xla'."
        )
    target = Target(capability, ahead_of_time=False, portable=False)
    return (replay_options if policy.mode == "replay" else options_of)(target, policy, scale)


def _capability(device: torch.device) -> int:
    """90 for SM90; the oldest that is served where the interpreter runs."""
    if triton.knobs.runtime.interpret:
        return MINIMUM_CAPABILITY
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"q is on {device} and there is no NVIDIA GPU: the kernels run on CUDA, or on the CPU through Triton's "
            "interpreter in a process started with TRITON_INTERPRET=1."
        )
    major, minor = torch.cuda.get_device_capability(device if device.type == "cuda" else None)
    return 10 * major + minor
