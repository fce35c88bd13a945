"""What the kernels of replay must compute, in torch float64; for the interpreter and for GPUs."""

import contextlib

import jax.numpy as jnp
import numpy as np
import recurrent_oracle
import torch
from recurrent_oracle import decoded, ratio

from jlaqat.kernels import replay_pipeline as pipeline
from jlaqat.kernels.recurrent_pipeline import Bounds, Gradients, State
from jlaqat.kernels.replay_pipeline import Tokens
from jlaqat.rounding import quantize_codes
from jlaqat.spec import QuantSpec

CODED = torch.uint8  # the dtype of a ring under factor_qdq


def factor_codes(x, block):
    """(E4M3 codes as bytes, a scale for `block` values) of x [..., V], by jlaqat.rounding."""
    groups = -(-x.shape[-1] // block)
    rows = torch.nn.functional.pad(x.float(), (0, groups * block - x.shape[-1])).reshape(*x.shape[:-1], groups, block)
    codes, scale = quantize_codes(jnp.asarray(rows.cpu().numpy()), QuantSpec.fp8(granularity="row"), site="w")
    codes = torch.from_numpy(np.array(codes).view(np.uint8)).reshape(*x.shape[:-1], -1)[..., : x.shape[-1]]
    return codes.contiguous().to(x.device), torch.from_numpy(np.array(scale)).to(x.device)


def factor_values(codes, scale):
    """What codes [..., V] stand for, float32; scale [..., groups]."""
    values = codes.view(torch.float8_e4m3fn).float()
    block = -(-values.shape[-1] // scale.shape[-1])
    if scale.shape[-1] > 1:  # groups are full but for the last
        block = 1 << (block - 1).bit_length()
    return values * scale.repeat_interleave(block, -1)[..., : values.shape[-1]]


def with_key_codes(tokens):
    """The tokens, k rounded to codes."""
    codes, scale = factor_codes(tokens.k, tokens.k.shape[-1])
    return tokens._replace(k=codes, k_scale=scale[..., 0].contiguous())


def values_of(tokens):
    """q, k, v, g and beta as they count."""
    q, k, v, g, beta, scale = tokens
    return q, k if scale is None else factor_values(k, scale[..., None]), v, g, beta


def entries_of(ring):
    """k, r and g of a ring, float64."""
    k, r = ring.k, ring.r
    if ring.coded:
        k, r = factor_values(k, ring.k_scale[..., None]), factor_values(r, ring.r_scale)
    return k.double(), r.double(), ring.g.double()


def make_ring(tokens, length, cursors, dtype=torch.float32, block=None):
    """A ring of which each sequence has filled `cursors`; what lies behind them is NaN. block: of CODED r."""
    n, _, h, k = tokens.q.shape
    hv, v = tokens.v.shape[2:]
    gen = torch.Generator(device=tokens.q.device).manual_seed(7)

    def entries(*shape):
        x = torch.randn(n, length, *shape, generator=gen, device=tokens.q.device)
        for i, cursor in enumerate(cursors):
            x[i, cursor:] = float("nan")
        return x

    g = -0.1 * entries(*tokens.g.shape[2:]).abs()
    cursor = torch.tensor(cursors, dtype=torch.int32, device=tokens.q.device)
    keys, updates = k**-0.5 * entries(h, k), entries(hv, v)
    if dtype != CODED:
        return pipeline.Ring(keys.to(dtype), updates.to(dtype), g, cursor)
    (k, k_scale), (r, r_scale) = factor_codes(keys, k), factor_codes(updates, block)
    return pipeline.Ring(k, r, g, cursor, k_scale[..., 0].contiguous(), r_scale)


def cut(tokens, start, stop):
    return Tokens(*(None if x is None else x[:, start:stop].contiguous() for x in tokens))


def with_lost(state):
    """The state as if its last rounding had lost something."""
    gen = torch.Generator(device=state.values.device).manual_seed(9)
    lost = torch.randn(state.values.shape, generator=gen, device=state.values.device)
    return state._replace(lost=0.01 * lost)


def make_counters(tokens, sequences):
    """What stochastic rounding draws by: other numbers for every state."""
    heads = tokens.v.shape[2]
    counters = torch.arange(sequences * heads * 4, dtype=torch.int32, device=tokens.q.device)
    return counters.reshape(sequences, heads, 4)


def after(counters, tokens):
    """Counters when so many tokens have come since."""
    if counters is None:
        return None
    return counters + torch.tensor([tokens, 0, 0, 0], dtype=torch.int32, device=counters.device)


def step_by_step(tokens, state, ring, options, run, counters=None):
    """(o, state, ring) after calls of one token, which change copies in place."""
    state, ring = (type(x)(*(None if a is None else a.clone() for a in x)) for x in (state, ring))
    outputs = []
    for t in range(tokens.q.shape[1]):
        out = pipeline.step(run, cut(tokens, t, t + 1), state, ring, options, counters=after(counters, t))
        assert out.state.values.data_ptr() == state.values.data_ptr() and out.ring.r.data_ptr() == ring.r.data_ptr()
        state, ring = out.state, out.ring
        outputs.append(out.o)
    return torch.cat(outputs, 1), state, ring


def difference(x, wanted):
    """How x differs, for a message: in how many elements, where first and where most."""
    x, wanted = x.detach().double(), wanted.detach().double()
    differ = (x == wanted).logical_not().nonzero()  # NaN differs from everything
    if not len(differ):
        return "equal"
    largest = (x - wanted).abs().nan_to_num(nan=torch.inf).argmax()
    largest = [int(i) for i in torch.unravel_index(largest, x.shape)]
    places = [
        f"{word} at {i}: {x[tuple(i)].item():.9g}, not {wanted[tuple(i)].item():.9g}"
        for word, i in (("first", differ[0].tolist()), ("most", largest))
    ]
    return f"{len(differ)} of {x.numel()} differ in shape {list(x.shape)}; {'; '.join(places)}"


def assert_equal(name, x, wanted):
    """Equal bits; the message says where they are not."""
    assert torch.equal(x, wanted), f"{name}: {difference(x, wanted)}"


def assert_same(state, ring, other_state, other_ring):
    """Equal bits of checkpoints, cursors and the entries in use."""
    assert_equal("bytes of values", state.values.view(torch.uint8), other_state.values.view(torch.uint8))
    if state.scale is not None:
        assert_equal("scales", state.scale, other_state.scale)
    if state.lost is not None:
        assert_equal("lost", state.lost, other_state.lost)
    assert_equal("cursor", ring.cursor, other_ring.cursor)
    for n, cursor in enumerate(ring.cursor.tolist()):
        for name, x, y in zip(ring._fields, ring, other_ring):
            if name != "cursor" and x is not None:
                assert_equal(f"ring.{name} of sequence {n}", x[n, :cursor], y[n, :cursor])


def replayed(checkpoint, ring):
    """The states [N, HV, K, V] that ring and checkpoint stand for, in float64."""
    states = []
    for n, cursor in enumerate(ring.cursor.tolist()):
        S = checkpoint[n].double()
        k, r, g = (x[n] for x in entries_of(ring))
        k = k.repeat_interleave(r.shape[1] // k.shape[1], 1)
        for i in range(cursor):
            decay = g[i].exp()[..., None] if g.ndim == 3 else g[i].exp()[:, None, None]
            S = decay * S + k[i][..., None] * r[i][:, None, :]
        states.append(S)
    return torch.stack(states)


def definition(q, k, v, g, beta, S, r_kept, saved, cursors, length, scale, read_stored):
    """(o, written states, r, S) in float64. What was rounded is replaced by r_kept and saved, straight through."""
    outputs, updates, written = [], [], []
    group = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(group, 2) for x in (q, k))
    for t in range(q.shape[1]):
        decay = g[:, t, ..., None, None].exp() if g.ndim == 3 else g[:, t, ..., None].exp()
        R = decay * S
        r = beta[:, t, ..., None] * (v[:, t] - torch.einsum("nhkv,nhk->nhv", R, k[:, t]))
        updates.append(r)
        r = r + (r_kept[:, t] - r).detach()
        W = R + k[:, t, ..., None] * r[..., None, :]
        rows = []
        for n, cursor in enumerate(cursors):
            due = (cursor + t + 1) % length == 0
            row = W[n] + (saved[n, (cursor + t) // length] - W[n]).detach() if due else W[n]
            rows.append(row)
        S = torch.stack(rows)
        written.append(W)
        outputs.append(scale * torch.einsum("nhkv,nhk->nhv", S if read_stored else W, q[:, t]))
    return torch.stack(outputs, 1), torch.stack(written, 1), torch.stack(updates, 1), S


def check_bits_alone(tokens, state, ring, options, run, bounds, counters=None):
    """Sequences that share the one row of `tokens`, as bounds say, against the same sequences alone. bounds: lists."""
    first, count = bounds
    device = tokens.q.device
    which = Bounds(*(torch.tensor(x, dtype=torch.int32, device=device) for x in bounds))
    together = pipeline.forward(run, tokens, state, ring, options, bounds=which, counters=counters, save=True)
    do, ds = torch.randn_like(tokens.v), torch.randn(state.values.shape, device=device)
    gradients = pipeline.backward(run, tokens, state, ring, together, do, ds, options, bounds=which)
    for n, (start, length) in enumerate(zip(first, count)):

        def own(tree, n=n):
            return type(tree)(*(None if x is None else x[n : n + 1].contiguous() for x in tree))

        if length == 0:
            assert_same(own(together.state), own(together.ring), own(state), own(ring))
            assert_equal("dstate", gradients.state[n], ds[n])
            continue
        rows = slice(start, start + length)
        given = cut(tokens, start, start + length), own(state), own(ring)
        mine = None if counters is None else counters[n : n + 1].contiguous()
        alone = pipeline.forward(run, *given, options, counters=mine, save=True)
        assert_equal(f"o of sequence {n}", together.o[:, rows], alone.o)
        assert_same(own(together.state), own(together.ring), alone.state, alone.ring)
        wanted = pipeline.backward(run, *given, alone, do[:, rows].contiguous(), ds[n : n + 1].contiguous(), options)
        for name, x, y in zip(Gradients._fields[:5], gradients, wanted):
            assert_equal(f"d{name} of sequence {n}", x[:, rows], y)
        assert_equal(f"dstate of sequence {n}", gradients.state[n], wanted.state[0])


def with_feedback(written, saved, lost):
    """(what was rounded [1, flushes, ...], what the last rounding lost) in float64, from what entered lost."""
    rounded, lost = [], lost.double()
    for x, kept in zip(written.unbind(1), saved.unbind(1)):
        rounded.append(x + lost)
        lost = x + lost - kept
    return torch.stack(rounded, 1) if rounded else written, lost


def lost_bound(rounded, lost, bound):
    """The relative error of what is lost where that of what was rounded is `bound`; none where nothing was rounded."""
    return (bound * rounded.square().mean().sqrt() / lost.square().mean().sqrt()).item() if rounded.numel() else 0.0


def check_call(tokens, state, ring, options, run, *, bound, gradient_bound, counters=None):
    """Forward, every rounding to nearest, and every gradient, of a call from kept states and a ring. Returns Output."""
    v, length, cursors = tokens.v.shape[3], ring.k.shape[1], ring.cursor.tolist()
    out = pipeline.forward(run, tokens, state, ring, options, counters=counters, save=True)
    saved = decoded(out.saved, options, v)
    exact = [x.detach().double().requires_grad_() for x in values_of(tokens)]
    exact.append(replayed(decoded(state, options, v), ring).requires_grad_())
    r_kept = factor_values(out.r, out.r_scale) if ring.coded else out.r
    kept = r_kept.double(), saved.double()
    o, written, r, final = definition(*exact, *kept, cursors, length, options.scale, options.read_stored)
    ring_bound = 0.05 if ring.coded else bound if ring.r.dtype == torch.float32 else 0.004
    results = {"o": (out.o, o, bound), "r": (r_kept, r, ring_bound)}
    if ring.coded:
        rounded = factor_values(*factor_codes(r.detach(), pipeline.Call(tokens, options).width))
        with said_about(f"r: {difference(r_kept, rounded)}"):
            assert torch.isclose(r_kept, rounded, rtol=1e-5, atol=0).double().mean() > 0.99
    results["state"] = (replayed(decoded(out.state, options, v), out.ring), final, bound)
    checked = options.state is not None and options.state.rounding == "nearest"
    for n, cursor in enumerate(cursors):
        due = [t for t in range(tokens.q.shape[1]) if (cursor + t + 1) % length == 0]
        rounded = written[n : n + 1, due].detach()
        if state.lost is not None:
            rounded, lost = with_feedback(rounded, saved[n : n + 1, : len(due)].double(), state.lost[n : n + 1])
            results[f"lost by sequence {n}"] = (out.state.lost[n : n + 1], lost, lost_bound(rounded, lost, bound))
        if checked and due:
            kept = State(*(None if x is None else x[n : n + 1, : len(due)] for x in out.saved))
            codes = difference(kept.values, recurrent_oracle.entering_state(rounded.float(), options).values)
            with said_about(f"checkpoints of sequence {n}: {codes}"):
                recurrent_oracle.assert_codes_round(kept, rounded.float(), options)
        expected = (cursor + tokens.q.shape[1]) % length
        assert out.ring.cursor[n].item() == expected

    gen = torch.Generator(device=tokens.q.device).manual_seed(5)
    do = torch.randn(o.shape, generator=gen, device=o.device).to(tokens.v.dtype)
    d_leaving = torch.randn(final.shape, generator=gen, device=o.device)
    got = pipeline.backward(run, tokens, state, ring, out, do, d_leaving, options)
    wanted = torch.autograd.grad((o * do.double()).sum() + (final * d_leaving.double()).sum(), exact)
    for name, x, ref in zip(Gradients._fields, got, wanted, strict=True):
        assert x.shape == ref.shape, name
        results[f"d{name}"] = (x, ref, gradient_bound)
    assert_within(results)
    return out


@contextlib.contextmanager
def said_about(subject):
    """Puts the subject before the message of an assertion inside."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{subject}\n{error}") from error


def assert_within(results):
    """Errors of {name: (array, reference, bound)}, relative RMS. The message has all of them."""
    errors = {name: (ratio(x, ref), limit) for name, (x, ref, limit) in results.items()}
    wrong = [name for name, (error, limit) in errors.items() if not error <= limit]
    lines = [f"{name}: error {error:.3g}, bound {limit:g}" for name, (error, limit) in errors.items()]
    lines += [f"{name}: {difference(*results[name][:2])}" for name in wrong]
    assert not wrong, "\n".join(lines)
