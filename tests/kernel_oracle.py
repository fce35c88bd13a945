"""The contract in float64 PyTorch, chunk by chunk, gradients by autograd: what the kernels are held against.

Deliberately naive, and independent of the kernels' hand-written backward. `replay` feeds it the rounded states that an
implementation produced, so that a code flipped at a tie does not hide other errors.
"""

import torch


def fake_quantize(x, amax, fmt):
    """Quantize-dequantize in float32, straight-through; amax broadcasts against x."""
    maximum = {"e4m3": 448.0, "int8": 127.0}[fmt]
    x32 = x.detach().float()
    s = amax.detach().float() / maximum
    s = torch.where(s < torch.finfo(torch.float32).tiny, torch.ones_like(s), s)
    y = x32 * (1.0 / s)
    y = torch.round(y) if fmt == "int8" else y.to(torch.float8_e4m3fn).float()
    return (y * s).to(x.dtype) + (x - x.detach())


def quantize_state(s, spec):
    """[..., K, V], one scale a tile of block_v columns."""
    parts = s.split(spec.block_v, dim=-1)
    return torch.cat([fake_quantize(p, p.detach().abs().amax((-2, -1), keepdim=True), spec.format) for p in parts], -1)


def delta_rule(q, k, v, g, beta, *, scale, initial_state=None, cu_seqlens=None, quant, replay=None, chunk=64):
    """(o, final_state); all float64. replay: list over sequences of [chunks + 1, HV, K, V], states after rounding."""
    b, t, h, dk = q.shape
    hv, dv = v.shape[2:]
    q, k = (x.repeat_interleave(hv // h, 2) for x in (q, k))
    if g.dim() == 3:
        g = g[..., None].expand(b, t, hv, dk)
    if cu_seqlens is None:
        spans = [(i, 0, t) for i in range(b)]
    else:
        ends = cu_seqlens.tolist()
        spans = [(0, ends[i], ends[i + 1]) for i in range(len(ends) - 1)]
    outputs, finals = [], []
    for n, (i, start, end) in enumerate(spans):
        s = initial_state[n] if initial_state is not None else torch.zeros(hv, dk, dv, dtype=q.dtype, device=q.device)
        states = None if replay is None else replay[n]
        if quant.state:
            s = quantize_state(s, quant.state) if states is None else states[0] + (s - s.detach())
        rows = []
        for c, begin in enumerate(range(start, end, chunk)):
            at = slice(begin, min(begin + chunk, end))
            args = (x[i, at].transpose(0, 1) for x in (q, k, v, g, beta))
            o, s = _chunk(*args, s, scale, quant.w)
            if quant.state:
                s = quantize_state(s, quant.state) if states is None else states[c + 1] + (s - s.detach())
            rows.append(o.transpose(0, 1))
        outputs.append(torch.cat(rows) if rows else q.new_zeros(0, hv, dv))
        finals.append(s)
    if cu_seqlens is None:
        return torch.stack(outputs), torch.stack(finals)
    tail = q.new_zeros(t - spans[-1][2], hv, dv)
    return torch.cat([*outputs, tail])[None], torch.stack(finals)


def _chunk(q, k, v, g, beta, s, scale, w_spec):
    """One chunk of all heads: q, k, g [H, n, K], v [H, n, V], beta [H, n], s [H, K, V]."""
    n = q.shape[1]
    gs = g.cumsum(1)
    lower = torch.ones(n, n, dtype=torch.bool, device=q.device).tril()
    e = (gs[:, :, None] - gs[:, None]).masked_fill(~lower[..., None], 0).exp() * lower[..., None]
    a = beta[..., None] * torch.einsum("hik,hjk,hijk->hij", k, k, e).tril(-1)
    p = scale * torch.einsum("hik,hjk,hijk->hij", q, k, e)
    x = torch.linalg.inv(torch.eye(n, dtype=q.dtype, device=q.device) + a)
    u = x @ (beta[..., None] * v)
    w = x @ (beta[..., None] * gs.exp() * k)
    if w_spec:
        w = fake_quantize(w, w.detach().abs().amax(-1, keepdim=True), w_spec.format)
    v_new = u - w @ s
    o = scale * (q * gs.exp()) @ s + p @ v_new
    last = gs[:, -1:]
    return o, last.exp().transpose(1, 2) * s + (k * (last - gs).exp()).transpose(1, 2) @ v_new


def make_inputs(seed, *, b, t, h, hv, dk, dv, kda, g_mean=-0.05, beta_max=1.0, device="cpu", initial=True, n=None):
    """float64 inputs of one call; keys normalised."""
    gen = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=gen, dtype=torch.float64, device=device)

    q, k = normal(b, t, h, dk), normal(b, t, h, dk)
    k = k * (k.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
    q = q * (q.square().sum(-1, keepdim=True) + 1e-6).rsqrt() * dk**0.5
    g = g_mean * (normal(b, t, hv, dk) if kda else normal(b, t, hv)).abs() * 1.2533
    beta = beta_max * torch.sigmoid(normal(b, t, hv))
    state = normal(b if n is None else n, hv, dk, dv) * 0.3 if initial else None
    return q, k, normal(b, t, hv, dv), g, beta, state


def x_in_p(p, x):
    """A chunk's P and X, [n, 64] each, as one array [n, 80], see kernels/chunks.py; NaN where nothing lies."""
    out = torch.full((len(p), 80), float("nan"), dtype=p.dtype)
    for i in range(4):
        rows = slice(16 * i, 16 * i + 16)
        out[rows, : 16 * i + 16] = p[rows, : 16 * i + 16]
        out[rows, 64:] = x[rows, rows]
        for j in range(i):
            block = x[rows, 16 * j : 16 * j + 16]
            out[16 * j : 16 * j + len(block), rows] = block
    return out


def error_ratio(x, ref):
    """RMS(x - ref) / RMS(ref); NaN where x is not finite."""
    x, ref = x.double(), ref.double()
    return ((x - ref).square().mean().sqrt() / (ref.square().mean().sqrt() + 1e-30)).item()
