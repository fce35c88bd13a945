"""What the quantizers of a call see and do: statistics of every rounding, beside its results. Forward only."""

from __future__ import annotations

import jax

from jlaqat import chunked, recurrent, sites
from jlaqat.chunked import Inputs
from jlaqat.pairs import matmul
from jlaqat.rounding import SiteStats, empty_stats, merge_stats, site_stats
from jlaqat.spec import CHUNK_SIZE, DeltaQuant, QuantArrays

Array = jax.Array


Stats = dict[str, SiteStats | None]


def observe(
    inputs: Inputs, cu_seqlens: Array | None, quant: DeltaQuant, arrays: QuantArrays, scale: float
) -> tuple[Array, Array, Stats]:
    """(o, final_state, {"state": …, "w": …}); None for a site that does not round."""
    if inputs.k.shape[1] == 0:
        o, final_state = chunked.no_tokens(inputs, cu_seqlens, quant, arrays)
        return o, final_state, _initial_stats(inputs, quant, arrays)
    if quant.state is not None and quant.state.cadence != CHUNK_SIZE:
        initial = _initial_stats(inputs, quant, arrays)["state"]
        (o, final_state), _, stats = recurrent.run(quant, scale, inputs, cu_seqlens, arrays, initial)
        return o, final_state, {"state": stats, "w": None}
    (o, final_state), residuals = chunked.forward(quant, scale, chunked.bound_decay(inputs), cu_seqlens, arrays)
    before, after = _initial_stats(inputs, quant, arrays), _chunk_stats(residuals, quant, scale)
    return o, final_state, {site: _merge(before[site], after[site]) for site in before}


def _merge(a: SiteStats | None, b: SiteStats | None) -> SiteStats | None:
    return None if a is None or b is None else merge_stats(a, b)


def _initial_stats(inputs: Inputs, quant: DeltaQuant, arrays: QuantArrays) -> Stats:
    """Of what is rounded before the first token: the initial states, where they are given."""
    sizes = dict(num_heads=inputs.v.shape[2], key_dim=inputs.k.shape[3], value_dim=inputs.v.shape[3])
    stats: Stats = {
        "state": None if quant.state is None else empty_stats(quant.state, "state", **sizes),
        "w": None if quant.w is None else empty_stats(quant.w, "w", **sizes),
    }
    S = inputs.initial_state
    if quant.state is not None and S is not None:
        rounded = sites.round_state(S, sites.initial_place(S.shape[0]), quant, arrays)
        stats["state"] = site_stats(S, quant.state, rounded, site="state", amax=arrays.state_amax)
    return stats


def _chunk_stats(residuals: chunked.Residuals, quant: DeltaQuant, scale: float) -> Stats:
    """Of the states after every chunk and of w, formed again from a forward's residuals."""
    inputs, cu_seqlens, arrays, _, X, S = residuals
    layout, _ = chunked.layout_of(inputs, cu_seqlens)
    chunks = chunked.chunk_operands(inputs, layout)
    decayed = chunked.decay_operands(chunks, scale)
    u, w, w_exact = chunked.wy_factors(X, decayed, chunks, layout, quant, arrays)
    stats: Stats = {"state": None, "w": None}
    if quant.state is not None:
        S = chunked.update_state(S, decayed, u - matmul("...ck,...kv->...cv", w, S))
        rounded = sites.round_state(S, layout.state_place, quant, arrays)
        holds = layout.valid.any(-1)[..., None, None, None]
        stats["state"] = site_stats(S, quant.state, rounded, site="state", amax=arrays.state_amax, where=holds)
    if quant.w is not None:
        holds = layout.valid[:, :, None, :, None]
        stats["w"] = site_stats(w_exact, quant.w, w, site="w", amax=arrays.w_amax, where=holds)
    return stats
