"""The kernels as a PyTorch function, with FLA's argument names: the same Launches that the JAX path runs."""

from __future__ import annotations

import torch

from jlaqat.kernels import pipeline
from jlaqat.kernels.call import Inputs, Options, options_for
from jlaqat.spec import DeltaQuant
from jlaqat.torch_bridge.run import torch_run


def chunk_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    *,
    quant: DeltaQuant = DeltaQuant(),  # noqa: B008 (frozen)
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gated DeltaNet (g [B, T, HV]) or Kimi Delta Attention (g [B, T, HV, K]) with rounding inside; differentiable.

    The counterpart of FLA's chunk_gated_delta_rule and chunk_kda, of whose other arguments it has none: q and k come
    normalised (use_qk_l2norm_in_kernel), and the final state is always returned (output_final_state).

    Args:
      q, k: [B, T, H, K], float32, bfloat16 or float16; normalise them beforehand. v: [B, T, HV, V] in the same dtype.
      g: log decay, ≤ 0; taken in float32. beta: [B, T, HV]. scale: of q, K^−½ unless given.
      initial_state: [N, HV, K, V], zeros unless given. cu_seqlens: [N + 1], packed sequences (then B = 1).
      quant: what is rounded; gradients pass straight through.

    Returns (o [B, T, HV, V] in v's dtype, final_state [N, HV, K, V] float32), always both.

    Runs on CUDA, and on the CPU in a process started with TRITON_INTERPRET=1. Raises ValueError for shapes and dtypes,
    and kernels.call.UnsupportedByKernels for what the kernels do not do.
    """
    if cu_seqlens is not None:
        # What the kernels read must lie inside the tensors even where cu_seqlens breaks the rules.
        cu_seqlens = cu_seqlens.to(torch.int32).cummax(0).values.to(torch.int32).clamp(0, q.shape[1]).contiguous()
    options = _options(q, q.shape[-1] ** -0.5 if scale is None else float(scale), quant)
    return _ChunkDeltaRule.apply(q, k, v, g, beta, initial_state, cu_seqlens, options)


def _options(q: torch.Tensor, scale: float, quant: DeltaQuant) -> Options:
    if q.device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(q.device)
        return options_for(10 * major + minor, scale=scale, quant=quant)
    return Options(scale=scale, quant=quant)


class _ChunkDeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, g, beta, initial_state, cu_seqlens, options):
        ctx.dtypes = [None if x is None else x.dtype for x in (q, k, v, g, beta, initial_state)]
        state = None if initial_state is None else initial_state.float().contiguous()
        inputs = Inputs(*(x.contiguous() for x in (q, k, v, g.float(), beta)), state, cu_seqlens)
        needed = any(ctx.needs_input_grad)
        o, final_state, residuals = pipeline.forward(torch_run, inputs, options, with_residuals=needed)
        if needed:
            ctx.save_for_backward(*inputs, *residuals)
            ctx.options = options
        return o, final_state

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do, dfinal):
        saved = ctx.saved_tensors
        inputs, residuals = Inputs(*saved[:7]), pipeline.Residuals(*saved[7:])
        do, dfinal = do.to(inputs.v.dtype).contiguous(), dfinal.float().contiguous()
        gradients = pipeline.backward(torch_run, inputs, residuals, do, dfinal, ctx.options)
        given = (None if dtype is None else d.to(dtype) for d, dtype in zip(gradients, ctx.dtypes, strict=True))
        return *given, None, None
