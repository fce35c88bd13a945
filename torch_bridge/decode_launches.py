"""What the decoding kernels are launched with from PyTorch: either direction of either mode, on contiguous tensors.

As `jlaqat.decode_triton` and `decode_replay_triton` launch them: the same launches, and so the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from jlaqat.kernels import recurrent_pipeline, replay_pipeline
from jlaqat.kernels.block_pipeline import whole_blocks
from jlaqat.kernels.recurrent_pipeline import Bounds, Gradients, Options, State, Tokens
from jlaqat.kernels.replay_pipeline import Ring
from jlaqat.torch_bridge import run


class Span(NamedTuple):
    """Which tokens are decoded."""

    bounds: Bounds  # on the device
    inside: torch.Tensor  # [B, T] bool: some sequence has the token
    most: int  # tokens that a sequence has at most


def make_span(first: np.ndarray, count: np.ndarray, batch: int, num_tokens: int, device: torch.device) -> Span:
    """first, count: int arrays [N], see `Bounds`."""
    marks = np.zeros((batch, num_tokens + 1), np.int32)
    row = np.arange(len(first)) // (len(first) // batch)
    np.add.at(marks, (row, first), 1)
    np.add.at(marks, (row, first + count), -1)
    inside = torch.from_numpy(marks.cumsum(1)[:, :num_tokens] > 0)
    bounds = Bounds(*(torch.as_tensor(x, dtype=torch.int32).to(device) for x in (first, count)))
    return Span(bounds, inside.to(device), int(count.max(initial=0)))


def _only(span: Span | None, x: torch.Tensor) -> torch.Tensor:
    """x [B, T, ...] where some sequence has the token, else 0: there the kernels write nothing."""
    if span is None:
        return x
    return torch.where(span.inside.reshape(*span.inside.shape, *[1] * (x.ndim - 2)), x, 0)


# ---- mode "token" ----------------------------------------------------------------------------------------------------


def token_forward(
    options: Options,
    tokens: Tokens,
    state: State,
    span: Span | None,
    counters: torch.Tensor | None,
    every: int | None,
) -> tuple[torch.Tensor, State, State | None]:
    """(o, the last states, those after every so many tokens or None)."""
    T, every = tokens.q.shape[1], every and whole_blocks(every)
    stride = every if every == 1 or (every and every < T) else None
    bounds = None if span is None else span.bounds
    out = recurrent_pipeline.forward(
        run.torch_run, tokens, state, options, bounds=bounds, counters=counters, stride=stride
    )
    return _only(span, out.o), out.state, out.saved


def token_backward(
    options: Options,
    tokens: Tokens,
    state: State,
    span: Span | None,
    counters: torch.Tensor | None,
    saved: State | None,
    do: torch.Tensor,
    dS: torch.Tensor,
    every: int,
) -> Gradients:
    """saved: what the forward saved with this `every`.

    Segments of at most so many tokens of every sequence, last first: run again from a saved state, then reversed.
    """
    T, every = tokens.q.shape[1], whole_blocks(every)
    if every > 1 and span is None and every >= T:
        given = (run.torch_run, tokens, state, options)
        saved, every = recurrent_pipeline.forward(*given, counters=counters, stride=1).saved, 1
    if every == 1:
        assert saved is not None
        bounds = None if span is None else span.bounds
        out = recurrent_pipeline.backward(run.torch_run, tokens, state, saved, do, dS, options, bounds=bounds)
        return Gradients(*(_only(span, x) for x in out[:5]), out.state)
    gradients = [torch.zeros(x.shape, dtype=torch.float32, device=do.device) for x in tokens]
    most = min(every, T)
    for done, window, entering in _segments(state, span, saved, do.shape[0], T, most):
        which = {"bounds": window, "most": most}
        words = None if counters is None else torch.cat([counters[..., :1] + done, counters[..., 1:]], -1)
        again = recurrent_pipeline.forward(run.torch_run, tokens, entering, options, counters=words, stride=1, **which)
        assert again.saved is not None
        into = Gradients(*gradients, None)
        given = (run.torch_run, tokens, entering, again.saved, do, dS, options)
        *gradients, dS = recurrent_pipeline.backward(*given, into=into, **which)
    return Gradients(*gradients, dS)


def _segments(
    state: State, span: Span | None, saved: State | None, B: int, T: int, most: int
) -> Iterator[tuple[int, Bounds, State]]:
    """Last first: tokens of a sequence before the segment, which tokens it has, and the states that enter it."""
    N, device = state.values.shape[0], state.values.device
    if span is None:
        bounds = Bounds(*(torch.full((N,), x, dtype=torch.int32, device=device) for x in (0, T)))
    else:
        bounds = span.bounds
    row = torch.arange(N, device=device) // (N // B)

    def entering(segment: int) -> State:
        if segment == 0 or saved is None:  # without saved states there is one segment
            return state
        slots = saved.values.shape[1]
        slot = ((bounds.first.long() + most - 1) // most + segment - 1).clamp(0, slots - 1)
        # A sequence that has no token in this segment takes any state, and leaves it alone.
        return State(*(None if x is None else x.flatten(0, 1)[row * slots + slot] for x in saved))

    for segment in reversed(range(-(-(T if span is None else span.most) // most))):
        done = most * segment
        yield done, Bounds(bounds.first + done, (bounds.count - done).clamp(0, most)), entering(segment)


# ---- mode "replay" ---------------------------------------------------------------------------------------------------


def replay_forward(
    options: Options,
    tokens: replay_pipeline.Tokens,
    state: State,
    ring: Ring,
    span: Span | None,
    counters: torch.Tensor | None,
    save: bool,
) -> replay_pipeline.Output:
    """Of a step, which changes state and ring in place, where that is all; otherwise of a forward that may save."""
    if not save and span is None and tokens.q.shape[1] == 1:
        out = replay_pipeline.step(run.torch_run, tokens, state, ring, options, counters=counters)
        changed = [x for x in (*state, *ring) if x is not None and x is not ring.cursor and not x.is_inference()]
        torch.autograd.graph.increment_version(changed)  # a backward that saved them then says so
        return out
    bounds = None if span is None else span.bounds
    given = (run.torch_run, tokens, state, ring, options)
    out = replay_pipeline.forward(*given, bounds=bounds, counters=counters, save=save)
    return out._replace(o=_only(span, out.o))


def replay_backward(
    options: Options,
    tokens: replay_pipeline.Tokens,
    state: State,
    ring: Ring,
    span: Span | None,
    saved: tuple[torch.Tensor, torch.Tensor | None, State],
    do: torch.Tensor,
) -> Gradients:
    """saved: r, r_scale and checkpoints of the forward."""
    out = replay_pipeline.Output(do, state, ring, *saved)
    d_leaving = torch.zeros(state.values.shape, dtype=torch.float32, device=do.device)
    bounds = None if span is None else span.bounds
    given = (run.torch_run, tokens, state, ring, out, do, d_leaving, options)
    gradients = replay_pipeline.backward(*given, bounds=bounds)
    return Gradients(*(_only(span, x) for x in gradients[:5]), gradients.state)
