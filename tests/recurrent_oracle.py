"""What the recurrence kernels must compute, in torch float64; for the interpreter and for GPUs."""

import jax.numpy as jnp
import numpy as np
import torch

from jlaqat.kernels import recurrent_pipeline as pipeline
from jlaqat.rounding import fake_quantize, quantize_codes
from jlaqat.spec import QuantSpec

# The forms in which the kernels keep a state; and those that the interpreter, which is slow, is given.
SPECS = {
    "float32": None,
    "e4m3-tile": QuantSpec.fp8(),
    "int8-tile": QuantSpec.int8(block_v=32),
    "int8-key_row": QuantSpec.int8(granularity="key_row"),
    "e4m3-value_row": QuantSpec.fp8(granularity="value_row"),
    "bfloat16": QuantSpec.bfloat16(),
    "float16": QuantSpec.float16(),
}
SMALL_SPECS = {
    "float32": None,
    "e4m3-tile": QuantSpec.fp8(block_v=16),
    "int8-key_row": QuantSpec.int8(granularity="key_row"),
    "e4m3-value_row": QuantSpec.fp8(granularity="value_row"),
    "float16": QuantSpec.float16(),
}


def entering_state(state, options):
    """State [N, HV, K, V] float32 as the kernels keep it, rounded by jlaqat.rounding."""
    spec = options.state
    if spec is None:
        return pipeline.State(state, None)
    x = jnp.asarray(state.cpu().numpy())
    if spec.format in ("bfloat16", "float16"):
        rounded = torch.from_numpy(np.array(fake_quantize(x, spec, site="state")))
        return pipeline.State(rounded.to(getattr(torch, spec.format)).to(state.device), None)
    codes, scale = quantize_codes(x, spec, site="state")
    codes = torch.from_numpy(np.array(codes).view(np.uint8)).to(state.device)
    return pipeline.State(codes, torch.from_numpy(np.array(scale)).to(state.device))


def decoded(kept, options, v):
    """float32 values of kept states."""
    spec = options.state
    if kept.scale is None:
        return kept.values.float()
    codes = kept.values.view(torch.int8 if spec.format == "int8" else torch.float8_e4m3fn).float()
    scale = kept.scale
    if spec.granularity == "tile":
        scale = scale.repeat_interleave(spec.block_v, -1)[..., None, :v]
    elif spec.granularity == "key_row":
        scale = scale.repeat_interleave(32, -1)[..., :v]
    else:
        scale = scale[..., None, :]
    return codes * scale


def at_slot(saved, slot):
    """The states of a slot of what a forward saved."""
    return pipeline.State(*(None if x is None else x[:, slot].contiguous() for x in saved))


def step_by_step(tokens, state, options, run):
    """(o, last state, states after each token) of calls of one token."""
    outputs, states = [], []
    for t in range(tokens.q.shape[1]):
        out = pipeline.forward(run, pipeline.Tokens(*(x[:, t : t + 1].contiguous() for x in tokens)), state, options)
        outputs.append(out.o)
        states.append(state := out.state)
    return torch.cat(outputs, 1), state, states


def definition(q, k, v, g, beta, S, states, scale, read_stored):
    """(o, the unrounded states after each token) in float64; `states` replace each token's state, straight through."""
    outputs, written = [], []
    group = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(group, 2) for x in (q, k))
    for t in range(q.shape[1]):
        decay = g[:, t, ..., None, None].exp() if g.ndim == 3 else g[:, t, ..., None].exp()
        R = decay * S
        r = beta[:, t, ..., None] * (v[:, t] - torch.einsum("nhkv,nhk->nhv", R, k[:, t]))
        W = R + k[:, t, ..., None] * r[..., None, :]
        written.append(W)
        S = W + (states[:, t] - W).detach()
        outputs.append(scale * torch.einsum("nhkv,nhk->nhv", S if read_stored else W, q[:, t]))
    return torch.stack(outputs, 1), torch.stack(written, 1), S


def ratio(x, ref):
    return ((x.double() - ref.double()).square().mean().sqrt() / (ref.double().square().mean().sqrt() + 1e-30)).item()


def check_call(tokens, state, options, run, *, bound, gradient_bound):
    """Forward, the rounding of every token, and every gradient."""
    v = tokens.v.shape[3]
    entering = entering_state(state, options)
    out = pipeline.forward(run, tokens, entering, options, stride=1)
    states = decoded(out.saved, options, v)
    last = out.saved.values[:, -1]
    assert torch.equal(out.state.values.view(torch.uint8), last.view(torch.uint8)), "the last state is the last saved"

    exact = [x.detach().double().requires_grad_() for x in (*tokens, decoded(entering, options, v))]
    o, written, final = definition(*exact, states.double(), options.scale, options.read_stored)
    results = {"o": (out.o, o, bound)}
    if options.state is None:
        results["states"] = (states, written, bound)
    else:
        assert_codes_round(out.saved, written.detach().float(), options)
    gen = torch.Generator(device=state.device).manual_seed(5)
    do = torch.randn(o.shape, generator=gen, device=state.device).to(tokens.v.dtype)
    d_leaving = torch.randn(final.shape, generator=gen, device=state.device)
    got = pipeline.backward(run, tokens, entering, out.saved, do, d_leaving, options)
    wanted = torch.autograd.grad((o * do.double()).sum() + (final * d_leaving.double()).sum(), exact)
    for name, x, ref in zip(pipeline.Gradients._fields, got, wanted, strict=True):
        assert x.shape == ref.shape, name
        results[f"d{name}"] = (x, ref, gradient_bound)
    for name, (x, ref, limit) in results.items():
        assert ratio(x, ref) <= limit, (name, ratio(x, ref), limit)


def assert_codes_round(saved, written, options):
    """The kernel's states against jlaqat.rounding of float64's: equal but where a last bit turned a tie."""
    wanted = entering_state(written, options)
    differ = (wanted.values.view(torch.uint8) != saved.values.view(torch.uint8)).float().mean().item()
    assert differ < 0.01, differ
    if saved.scale is not None:
        torch.testing.assert_close(wanted.scale, saved.scale, rtol=1e-5, atol=0)
