"""The kernels of jlaqat from PyTorch, differentiable, with FLA's argument names: the launches of the JAX path.

    import torch
    from jlaqat import DecodePolicy, DeltaQuant, QuantSpec
    from jlaqat.torch_bridge import chunk_delta_rule, delta_rule_decode, delta_rule_step

    device = "cuda" if torch.cuda.is_available() else "cpu"  # the CPU: in a process started with TRITON_INTERPRET=1
    B, T, H, HV, K, V = 2, 6, 1, 2, 16, 32
    q, k = (torch.nn.functional.normalize(torch.randn(B, T, H, K, device=device), dim=-1) for _ in "qk")
    v = torch.randn(B, T, HV, V, device=device, requires_grad=True)
    g = -0.1 * torch.rand(B, T, HV, device=device)  # log decay; [B, T, HV, K] for KDA
    beta = torch.rand(B, T, HV, device=device)

    # Training, chunk by chunk (FLA: chunk_gated_delta_rule, chunk_kda), the state rounded every 64 tokens.
    o, final_state = chunk_delta_rule(q, k, v, g, beta, quant=DeltaQuant(state=QuantSpec.fp8(block_v=32)))

    # Training as a decoder runs it (FLA: fused_recurrent_gated_delta_rule, fused_recurrent_kda), and serving.
    policy = DecodePolicy.preset("vllm_int8")
    o, carry = delta_rule_decode(q, k, v, g, beta, quant=policy, output_final_state=True)
    o.square().mean().backward()  # straight through every rounding

    with torch.no_grad():
        _, served = delta_rule_decode(
            *(x[:, :4] for x in (q, k, v, g, beta)), quant=policy, output_final_state=True
        )
        for t in range(4, T):
            out, served = delta_rule_step(*(x[:, t] for x in (q, k, v, g, beta)), served, quant=policy, inplace=True)
    assert served.values.dtype == torch.int8 and torch.equal(served.values, carry.values)  # the bits of training

Imports PyTorch and Triton at the first use of a name. docs/parity.md says how PyTorch and JAX share a GPU.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jlaqat.torch_bridge.autograd import chunk_delta_rule as chunk_delta_rule
    from jlaqat.torch_bridge.decode import delta_rule_decode as delta_rule_decode
    from jlaqat.torch_bridge.decode import delta_rule_step as delta_rule_step
    from jlaqat.torch_bridge.decode_carry import DecodeCarry as DecodeCarry

_MODULES = {
    "chunk_delta_rule": "autograd",
    "delta_rule_decode": "decode",
    "delta_rule_step": "decode",
    "DecodeCarry": "decode_carry",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'jlaqat.torch_bridge' has no attribute {name!r}")
    return getattr(importlib.import_module(f"jlaqat.torch_bridge.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
