"""Launches of the kernels for SM90, in the places of those of `pipeline` and `pipeline_gdn` where they serve."""

from __future__ import annotations

from typing import Any

from jlaqat.kernels import hopper_chunk, hopper_scan
from jlaqat.kernels.call import Call, Residuals
from jlaqat.kernels.launch import Buffer, Launch, dtype_name

STATE_BLOCK = 64  # columns of a program of the forward scan


def takes_state(call: Call, *, write_o: bool, save_h: bool, save_v: bool) -> bool:
    """Whether the forward scan has a kernel here: an unrounded state, V in blocks of 64, o and nothing else wanted."""
    served = call.on_hopper and call.tuning.hopper_state is not None and call.sizes[5] % STATE_BLOCK == 0
    return served and call.state_format == "none" and (write_o, save_h, save_v) == (True, False, False)


def takes_reverse(call: Call) -> bool:
    """Whether the backward scan has one: V in blocks of the width it is tuned for."""
    knobs = call.tuning.hopper_reverse
    return call.on_hopper and knobs is not None and call.sizes[5] % knobs.bv == 0


def takes_chunk(call: Call) -> bool:
    """Whether the gradients inside a chunk have one: V = 128."""
    return call.on_hopper and call.sizes[5] == 128 and call.tuning.hopper_chunk is not None


def scan_forward(call: Call, intra: dict[str, Any], p_sequences: Any) -> dict[str, Any]:
    """As `pipeline._scan_forward`, of an unrounded state: p_o and p_final."""
    _, _, _, hv, _, v = call.sizes
    knobs = call.tuning.hopper_state
    assert knobs is not None
    initial = call.inputs.initial_state
    launch = Launch(
        kernel=hopper_scan.chunk_state_forward_kernel,
        grid=(call.n_sequences + call.is_packed) * hv * (v // STATE_BLOCK),
        inputs={
            "p_q": intra["p_qg"],
            "p_k": intra["p_kg"],
            "p_w": intra["p_w"],
            "p_w_scale": intra.get("p_w_scale", intra["p_w"]),
            "p_u": intra["p_u"],
            "p_p": intra["p_p"],
            "p_g": intra["p_gate"],
            "p_initial": initial if initial is not None else intra["p_gate"],
            "p_sequences": p_sequences,
        },
        outputs={"p_o": call.by_row(hv, v), "p_final": call.sequence_states()},
        constants={
            **call.dims("scale", "T", "NT", "N", "HK", "HV", "V", "IS_KDA", "IS_PACKED"),
            "W_FORMAT": call.w_format,
            "HAS_INITIAL": initial is not None,
            "STAGES": knobs.stages,
        },
        num_warps=knobs.warps,
        max_registers=knobs.registers,
    )
    return call.run(launch)


def scan_backward(call: Call, saved: dict[str, Any], do: Any, dfinal: Any, p_sequences: Any) -> dict[str, Any]:
    """As `pipeline._scan_backward`."""
    _, _, _, hv, _, v = call.sizes
    knobs = call.tuning.hopper_reverse
    assert knobs is not None
    launch = Launch(
        kernel=hopper_scan.chunk_state_backward_kernel,
        grid=call.n_sequences * hv * (v // knobs.bv),
        inputs={
            "p_q": saved["p_qg"],
            "p_k": saved["p_kg"],
            "p_w": saved["p_w"],
            "p_w_scale": saved.get("p_w_scale", saved["p_w"]),
            "p_p": saved["p_p"],
            "p_g": saved["p_gate"],
            "p_do": do,
            "p_dfinal": dfinal,
            "p_sequences": p_sequences,
        },
        outputs={
            "p_dh": call.states(call.dtype),
            "p_dv_new": call.by_row(hv, v),
            "p_dinitial": call.sequence_states(),
        },
        constants={
            **call.dims("scale", "T", "NT", "HK", "HV", "V", "IS_KDA", "IS_PACKED"),
            "W_FORMAT": call.w_format,
            "BV": knobs.bv,
            "STAGES": knobs.stages,
        },
        num_warps=knobs.warps,
        max_registers=knobs.registers,
    )
    return call.run(launch)


def chunk_backward(
    call: Call, residuals: Residuals, saved: dict[str, Any], scan: dict[str, Any], do: Any, p_chunks: Any
) -> dict[str, Any]:
    """As `pipeline_gdn.chunk_backward`."""
    _, _, _, hv, k, v = call.sizes
    knobs = call.tuning.hopper_chunk
    assert knobs is not None
    launch = Launch(
        kernel=hopper_chunk.chunk_backward_kernel,
        grid=call.slots * hv,
        inputs={
            "p_q": call.inputs.q,
            "p_k": call.inputs.k,
            "p_v": call.inputs.v,
            "p_gsum": saved["p_gsum"],
            "p_beta": call.inputs.beta,
            "p_x": residuals.x,
            "p_w": saved["p_w"],
            "p_w_scale": saved["p_w_scale"],
            "p_h": saved["p_h"],
            "p_h_scale": saved["p_h_scale"],
            "p_dh": scan["p_dh"],
            "p_dv_new": scan["p_dv_new"],
            "p_do": do,
            "p_chunks": p_chunks,
        },
        outputs={
            "p_dq": call.by_row(hv, k),
            "p_dk": call.by_row(hv, k),
            "p_dv": call.by_row(hv, v),
            "p_dbeta": Buffer((call.rows, hv), dtype_name(call.inputs.beta)),
            "p_dg": call.gate_sums(),
        },
        constants={
            **call.dims("scale", "T", "NT", "H", "HV", "IS_PACKED", "STATE_FORMAT", "TILE_V"),
            "W_FORMAT": call.w_format,
        },
        num_warps=knobs.warps,
        max_registers=knobs.registers,
    )
    return call.run(launch)
