"""Runs the kernel pipeline and the float64 oracle on the same inputs, on the CPU (interpreter) or a GPU.

Imports Triton, so TRITON_INTERPRET must be set, or not, before this is imported.
"""

import dataclasses

import kernel_oracle as oracle
import torch

from jlaqat.kernels import pipeline
from jlaqat.kernels.call import Inputs, Options, converts_to_e4m3
from jlaqat.torch_bridge.run import poisoned_run

# RMS(x - ref) / RMS(ref), by output and by the inputs' dtype: the contract's bounds.
FORWARD = {torch.float32: 1e-5, torch.float16: 0.005, torch.bfloat16: 0.005}
GRADIENT = {torch.float32: 1e-4, torch.float16: 0.008, torch.bfloat16: 0.008}
GATE_GRADIENT = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.02}
BOUNDS = {"o": FORWARD, "final_state": FORWARD, "dg": GATE_GRADIENT, "dbeta": GATE_GRADIENT}
# bfloat16 with beta above 1; what is not named keeps its bound.
STRONG_WRITES = {"o": 0.01, "final_state": 0.01, "dq": 0.015, "dk": 0.015, "dv": 0.015}


def hardware_fp8():
    """Whether the GPU here, if there is one, converts to E4M3 as the contract says."""
    if not torch.cuda.is_available():
        return False
    major, minor = torch.cuda.get_device_capability()
    return converts_to_e4m3(10 * major + minor)


def cast(inputs, dtype, cu_seqlens=None):
    """The oracle's float64 inputs as the kernels take them."""
    q, k, v, g, beta, state = inputs
    return Inputs(
        *(x.to(dtype).contiguous() for x in (q, k, v)),
        g.float().contiguous(),
        beta.to(dtype).contiguous(),
        None if state is None else state.float().contiguous(),
        cu_seqlens,
    )


def rounded_states(residuals, counts, final, spec):
    """The implementation's own states, sequence by sequence, for the oracle to replay."""
    codes = residuals.h
    values = codes.view(torch.int8) if spec.format == "int8" else codes.view(torch.float8_e4m3fn)
    scale = residuals.h_scale.repeat_interleave(spec.block_v, -1)[..., : codes.shape[-1]]
    states = (values.float() * scale[:, :, None]).double()
    out, first = [], 0
    for n, count in enumerate(counts):
        out.append(torch.cat([states[first : first + count], final[n : n + 1].double()]))
        first += count
    return out


def run_kernels(given, options, seed=7):
    """(Output, Gradients, do, dfinal) with random cotangents."""
    out = pipeline.forward(poisoned_run, given, options)
    gen = torch.Generator(device=given.q.device).manual_seed(seed)
    do = torch.randn(out.o.shape, generator=gen, device=given.q.device).to(given.v.dtype)
    dfinal = torch.randn(out.final_state.shape, generator=gen, device=given.q.device) * 0.3
    return out, pipeline.backward(poisoned_run, given, out.residuals, do, dfinal, options), do, dfinal


def run_both(inputs, quant, dtype, *, cu_seqlens=None, save_states=True, hardware_fp8=False, tuning=None, **more):
    """{name: (kernel's, oracle's)} for o, the final state and every gradient.

    Saved states are replayed: the oracle is given the kernel's rounded states, so that a code that fell to the other
    side of a tie does not hide other errors. The final state is then the kernel's own and compares as equal.
    """
    given = cast(inputs, dtype, cu_seqlens)
    options = Options(
        scale=given.q.shape[-1] ** -0.5,
        quant=quant,
        save_states=save_states,
        hardware_fp8=hardware_fp8,
        tuning=tuning,
        **more,
    )
    out, grads, do, dfinal = run_kernels(given, options)
    names = ["q", "k", "v", "g", "beta"] + (["initial_state"] if given.initial_state is not None else [])
    leaves = [getattr(given, name).double().requires_grad_() for name in names]
    replay = None
    if quant.state and save_states:
        lengths = [given.q.shape[1]] * given.q.shape[0] if cu_seqlens is None else cu_seqlens.diff().tolist()
        counts = [-(-n // 64) for n in lengths]
        replay = rounded_states(out.residuals, counts, out.final_state, quant.state)
    ref_o, ref_final = oracle.delta_rule(
        *leaves[:5],
        scale=options.scale,
        initial_state=leaves[5] if len(leaves) > 5 else None,
        cu_seqlens=cu_seqlens,
        quant=quant,
        replay=replay,
    )
    ref_grads = torch.autograd.grad([ref_o, ref_final], leaves, [do.double(), dfinal.double()])
    pairs = {"o": (out.o, ref_o.detach()), "final_state": (out.final_state, ref_final.detach())}
    return pairs | {f"d{n}": (getattr(grads, n), r) for n, r in zip(names, ref_grads, strict=True)}


def check_x_in_p(given, options):
    """X where P is zero changes no bit of any result. Returns the residuals with X apart and with X in P's array."""
    kept, results = [], []
    for x_in_p in (False, True):
        tuning = options.tuning._replace(x_in_p=x_in_p)
        out, gradients, *_ = run_kernels(given, dataclasses.replace(options, tuning=tuning))
        kept.append(out.residuals)
        results.append({"o": out.o, "final_state": out.final_state} | gradients._asdict())
    for name, x in results[1].items():
        assert torch.isfinite(x).all(), name
        assert torch.equal(x.view(torch.uint8), results[0][name].view(torch.uint8)), name
    assert kept[0].x is not None and kept[1].x is None
    return kept


def bound_of(name, dtype, strong_writes=False):
    """strong_writes: whether beta goes above 1."""
    if strong_writes and dtype == torch.bfloat16 and name in STRONG_WRITES:
        return STRONG_WRITES[name]
    return BOUNDS.get(name, GRADIENT)[dtype]


def check(pairs, dtype, *, strong_writes=False):
    """Every error ratio within the contract's bound; NaN fails."""
    ratios = {name: oracle.error_ratio(*pair) for name, pair in pairs.items()}
    limits = {name: bound_of(name, dtype, strong_writes) for name in ratios}
    bad = {name: (ratios[name], limits[name]) for name in ratios if not ratios[name] <= limits[name]}
    assert not bad, f"error ratio, bound: {bad}; all: {ratios}"
    return ratios
