"""What the quantizers of a call see and do: statistics of every rounding, beside its results. Forward only."""

from __future__ import annotations

import jax

from jlaqat import chunked, recurrent, sites
from jlaqat.chunked import Inputs
from jlaqat.packing import make_layout
from jlaqat.rounding import SiteStats, empty_stats, merge_stats, site_stats
from jlaqat.spec import CHUNK_SIZE, DeltaQuant, QuantArrays

Array = jax.Array


def observe(
    inputs: Inputs, cu_seqlens: Array | None, quant: DeltaQuant, arrays: QuantArrays, scale: float
) -> tuple[Array, Array, dict[str, SiteStats | None]]:
    """(o, final_state, {"state": …, "w": …}); None for a site that does not round."""
    stats: dict[str, SiteStats | None] = {"state": _initial_stats(inputs, quant, arrays), "w": None}
    if quant.state is not None and quant.state.cadence != CHUNK_SIZE:
        (o, final_state), _, stats["state"] = recurrent.run(quant, scale, inputs, cu_seqlens, arrays, stats["state"])
        return o, final_state, stats

    (o, final_state), residuals = chunked.forward(quant, scale, inputs, cu_seqlens, arrays)
    layout = make_layout(inputs.k.shape[0], inputs.k.shape[1], cu_seqlens)
    chunks = chunked.chunk_operands(inputs, layout)
    decayed = chunked.decay_operands(chunks, scale)
    u, w, w_exact = chunked.wy_factors(residuals.X, decayed, chunks, layout, quant, arrays)
    if quant.state is not None:
        S = chunked.update_state(
            residuals.states, decayed, u - chunked.matmul("...ck,...kv->...cv", w, residuals.states)
        )
        rounded = sites.round_state(S, layout.state_place, quant, arrays)
        holds = layout.valid.any(-1)[..., None, None, None]
        new = site_stats(S, quant.state, rounded, site="state", amax=arrays.state_amax, where=holds)
        stats["state"] = merge_stats(stats["state"], new) if stats["state"] is not None else new
    if quant.w is not None:
        holds = layout.valid[:, :, None, :, None]
        stats["w"] = site_stats(w_exact, quant.w, w, site="w", amax=arrays.w_amax, where=holds)
    return o, final_state, stats


def _initial_stats(inputs: Inputs, quant: DeltaQuant, arrays: QuantArrays) -> SiteStats | None:
    """Of rounding the initial states; of nothing where none are given."""
    if quant.state is None:
        return None
    S = inputs.initial_state
    if S is None:
        shape = dict(num_heads=inputs.v.shape[2], key_dim=inputs.k.shape[3], value_dim=inputs.v.shape[3])
        return empty_stats(quant.state, "state", **shape)
    rounded = sites.round_state(S, sites.initial_place(S.shape[0]), quant, arrays)
    return site_stats(S, quant.state, rounded, site="state", amax=arrays.state_amax)
