"""The launches that only KDA has; `pipeline` puts them in order with those that GDN shares."""

from __future__ import annotations

from typing import Any

from jlaqat.kernels import chunk_backward_kda, intra_chunk_kda
from jlaqat.kernels.call import Call, Residuals, power_of_two
from jlaqat.kernels.launch import UNUSED, Buffer, Launch, dtype_name
from jlaqat.kernels.tuning import Knobs
from jlaqat.spec import CHUNK_SIZE

GATE_BLOCK = 64  # channels of a product that sums gates: the forward and the backward share it


def _warps(base: int, width: int) -> int:
    """Twice the warps for twice the columns past 128."""
    return base * max(1, width // 128)


def _most_registers(call: Call, knobs: Knobs) -> int | None:
    """The tuned limit, which more than 4 warps or wider numbers would only turn into spills."""
    narrow = call.dtype != "float32" and call.sizes[4] <= 128
    return knobs.registers if narrow else None


def _channel_stages(call: Call, wanted: int, bk: int, bv: int) -> int:
    """Pipeline stages: all but one hold rows of do, y and v' and blocks of two states in shared memory."""
    size = 4 if call.dtype == "float32" else 2
    loads, kept = (3 * CHUNK_SIZE + 2 * bk) * bv * size, 4 * CHUNK_SIZE * CHUNK_SIZE * size
    return max(1, min(wanted, 1 + (call.options.shared_memory - kept) // loads))


def intra_forward(call: Call, p_chunks: Any, save_x: bool) -> dict[str, Any]:
    """p_qg, p_kg, p_decay, p_p, p_w, p_u and, with save_x, p_x."""
    _, _, _, hv, k, v = call.sizes
    knobs, bk = call.tuning.kda_pairs, power_of_two(k)
    q, key, beta = call.inputs.q, call.inputs.k, call.inputs.beta
    pairs = Launch(
        kernel=intra_chunk_kda.kda_pairs_kernel,
        grid=call.slots * hv,
        inputs={"p_q": q, "p_k": key, "p_g": call.inputs.g, "p_beta": beta, "p_chunks": p_chunks},
        outputs={
            "p_gsum": call.gate_sums(),
            "p_a": call.by_row(hv, CHUNK_SIZE, "float32"),
            "p_p": call.by_row(hv, CHUNK_SIZE),
        },
        constants={
            **call.dims("scale", "T", "NT", "H", "HV", "K", "BT", "IS_PACKED", "PRECISION", "APART"),
            "BK": call.width(knobs.bk, k),
            "BKG": call.width(GATE_BLOCK, k),
        },
        num_warps=knobs.warps,
        num_stages=knobs.stages,
        max_registers=_most_registers(call, knobs),
    )
    out = call.run(pairs)
    knobs = call.tuning.kda_wy
    wy = Launch(
        kernel=intra_chunk_kda.kda_wy_kernel,
        grid=call.slots * hv,
        inputs={
            "p_q": q,
            "p_k": key,
            "p_v": call.inputs.v,
            "p_gsum": out["p_gsum"],
            "p_beta": beta,
            "p_a": out["p_a"],
            "p_chunks": p_chunks,
        },
        outputs={
            **_decayed(call),
            "p_x": call.by_row(hv, CHUNK_SIZE) if save_x else UNUSED,
            "p_w": call.by_row(hv, k),
            "p_u": call.by_row(hv, v),
        },
        constants={
            **call.dims("scale", "T", "NT", "H", "HV", "K", "V", "BT", "IS_PACKED"),
            **call.dims("W_FORMAT", "HARDWARE_FP8", "PRECISION", "MERGE_PRECISION"),
            "BK": bk,
            "BV": call.width(knobs.bv, v),
            "SAVE_X": save_x,
        },
        num_warps=_warps(knobs.warps, bk),
        num_stages=knobs.stages,
        max_registers=_most_registers(call, knobs),
    )
    return {"p_gsum": out["p_gsum"], "p_p": out["p_p"], **call.run(wy)}


def _decayed(call: Call) -> dict[str, Buffer]:
    _, _, _, hv, k, _ = call.sizes
    return {
        "p_decay": Buffer((call.slots, hv, k), "float32"),
        "p_qg": call.by_row(hv, k),
        "p_kg": call.by_row(hv, k),
    }


def recompute(call: Call, residuals: Residuals, h: Any, h_scale: Any, p_chunks: Any) -> dict[str, Any]:
    """p_gsum, p_decay, p_qg, p_kg, p_w and p_u; where the states h are known, p_v_new and p_v_plain too."""
    _, _, _, hv, k, v = call.sizes
    bk, knobs = power_of_two(k), call.tuning.kda_recompute
    known = h is not None
    plain = known and call.options.quant.w is not None
    launch = Launch(
        kernel=intra_chunk_kda.kda_recompute_kernel,
        grid=call.slots * hv,
        inputs={
            "p_q": call.inputs.q,
            "p_k": call.inputs.k,
            "p_v": call.inputs.v,
            "p_g": call.inputs.g,
            "p_beta": call.inputs.beta,
            "p_x": residuals.x,
            "p_h": h if known else residuals.x,
            "p_h_scale": h_scale if known else residuals.x,
            "p_chunks": p_chunks,
        },
        outputs={
            "p_gsum": call.gate_sums(),
            **_decayed(call),
            "p_w": call.by_row(hv, k),
            "p_u": call.by_row(hv, v),
            "p_v_plain": call.by_row(hv, v) if plain else UNUSED,
        },
        constants={
            **call.dims("scale", "T", "NT", "H", "HV", "K", "V", "BT", "IS_PACKED"),
            **call.dims("STATE_FORMAT", "TILE_V", "W_FORMAT", "HARDWARE_FP8", "PRECISION"),
            "BK": bk,
            "BKG": call.width(GATE_BLOCK, k),
            "BV": call.width(knobs.bv, v),
            "HAS_STATES": known,
        },
        num_warps=_warps(knobs.warps, bk),
        num_stages=knobs.stages,
        max_registers=_most_registers(call, knobs),
    )
    out = call.run(launch)
    if known:
        out |= {"p_v_new": out["p_u"], "p_v_plain": out["p_v_plain"] if plain else out["p_u"]}
    return out


def chunk_backward(
    call: Call, residuals: Residuals, saved: dict[str, Any], scan: dict[str, Any], do: Any, p_chunks: Any
) -> dict[str, Any]:
    """p_dq and p_dk (one a value head), p_dv, p_dg and p_dbeta."""
    _, _, _, hv, k, v = call.sizes
    knobs = call.tuning.kda_scores
    beta = call.inputs.beta
    scores = Launch(
        kernel=chunk_backward_kda.kda_scores_backward_kernel,
        grid=call.slots * hv,
        inputs={
            "p_v": call.inputs.v,
            "p_beta": beta,
            "p_x": residuals.x,
            "p_v_new": saved["p_v_new"],
            "p_v_plain": saved["p_v_plain"],
            "p_dv_new": scan["p_dv_new"],
            "p_do": do,
            "p_chunks": p_chunks,
        },
        outputs={
            "p_y": call.by_row(hv, v),
            "p_da": call.by_row(hv, CHUNK_SIZE),
            "p_dp": call.by_row(hv, CHUNK_SIZE),
            "p_dp_diagonal": Buffer((call.rows, hv), "float32"),
            "p_dv": call.by_row(hv, v),
            "p_dbeta_v": Buffer((call.rows, hv), "float32"),
        },
        constants={
            **call.dims("scale", "T", "NT", "HV", "V", "BT", "IS_PACKED", "PRECISION"),
            "BV": call.width(knobs.bv, v),
        },
        num_warps=knobs.warps,
        num_stages=knobs.stages,
        max_registers=_most_registers(call, knobs),
    )
    out = call.run(scores)
    knobs = call.tuning.kda_channels
    bk, bv = call.width(knobs.bk, k), call.width(knobs.bv, v)
    blocks = -(-k // bk)
    channels = Launch(
        kernel=chunk_backward_kda.kda_channels_backward_kernel,
        grid=call.slots * hv * blocks,
        inputs={
            "p_q": call.inputs.q,
            "p_k": call.inputs.k,
            "p_gsum": saved["p_gsum"],
            "p_beta": beta,
            "p_h": saved["p_h"],
            "p_h_scale": saved["p_h_scale"],
            "p_dh": scan["p_dh"],
            "p_v_new": saved["p_v_new"],
            "p_do": do,
            "p_y": out["p_y"],
            "p_da": out["p_da"],
            "p_dp": out["p_dp"],
            "p_dp_diagonal": out["p_dp_diagonal"],
            "p_chunks": p_chunks,
        },
        outputs={
            "p_dq": call.by_row(hv, k),
            "p_dk": call.by_row(hv, k),
            "p_dg": call.gate_sums(),
            "p_dbeta_k": Buffer((blocks, call.rows, hv), "float32"),
        },
        constants={
            **call.dims("scale", "T", "NT", "H", "HV", "K", "V", "BT", "IS_PACKED"),
            **call.dims("STATE_FORMAT", "TILE_V", "HARDWARE_FP8", "PRECISION", "APART"),
            "ROWS": call.rows,
            "BK": bk,
            "BV": bv,
        },
        num_warps=knobs.warps,
        num_stages=_channel_stages(call, knobs.stages, bk, bv),
        max_registers=_most_registers(call, knobs),
    )
    out |= call.run(channels)
    dbeta = Launch(
        kernel=chunk_backward_kda.kda_dbeta_kernel,
        grid=-(-call.rows * hv // 1024),
        inputs={"p_dbeta_v": out["p_dbeta_v"], "p_dbeta_k": out["p_dbeta_k"]},
        outputs={"p_dbeta": Buffer((call.rows, hv), dtype_name(beta))},
        constants={"N": call.rows * hv, "BLOCKS": blocks, "BLOCK": 1024},
    )
    return out | call.run(dbeta)
