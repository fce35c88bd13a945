"""GDN's own launches; `pipeline` puts them in order with those that KDA shares."""

from __future__ import annotations

from typing import Any

from jlaqat.kernels import chunk_backward as chunk_kernels
from jlaqat.kernels import chunks, intra_chunk, pipeline_hopper
from jlaqat.kernels.call import Call, Residuals, power_of_two
from jlaqat.kernels.launch import UNUSED, Buffer, Launch, dtype_name
from jlaqat.spec import CHUNK_SIZE


def _w_buffers(call: Call) -> dict[str, Buffer]:
    """w, and where it is rounded its codes and a scale a row."""
    _, _, _, hv, k, _ = call.sizes
    if call.w_format == "none":
        return {"p_w": call.by_row(hv, k), "p_w_scale": UNUSED}
    return {"p_w": call.by_row(hv, k, "uint8"), "p_w_scale": Buffer((call.rows, hv), "float32")}


def intra_forward(call: Call, p_chunks: Any, save_x: bool) -> dict[str, Any]:
    """p_gsum, p_p, p_w, p_w_scale, p_u and, with save_x, p_x: None where p_p holds it."""
    _, _, _, hv, k, v = call.sizes
    knobs = call.tuning.intra
    x_in_p = save_x and call.tuning.x_in_p
    alone = save_x and not x_in_p
    p_width = CHUNK_SIZE + chunks.SIDE.value if x_in_p else CHUNK_SIZE
    launch = Launch(
        kernel=intra_chunk.intra_chunk_forward_kernel,
        grid=call.slots * hv,
        inputs={
            "p_q": call.inputs.q,
            "p_k": call.inputs.k,
            "p_v": call.inputs.v,
            "p_g": call.inputs.g,
            "p_beta": call.inputs.beta,
            "p_chunks": p_chunks,
        },
        outputs={
            "p_gsum": call.gate_sums(),
            "p_x": call.by_row(hv, CHUNK_SIZE) if alone else UNUSED,
            "p_p": call.by_row(hv, p_width),
            **_w_buffers(call),
            "p_u": call.by_row(hv, v),
        },
        constants={
            **call.dims("scale", "T", "NT", "H", "HV", "K", "V", "BT", "IS_PACKED", "WHOLE"),
            **call.dims("W_FORMAT", "HARDWARE_FP8", "PRECISION", "MERGE_PRECISION"),
            "BK": power_of_two(k),
            "BV": call.width(knobs.bv, v),
            "SAVE_X": alone,
            "P_WIDTH": p_width,
        },
        num_warps=knobs.warps * max(1, power_of_two(k) // 128),
        num_stages=knobs.stages,
        max_registers=knobs.registers if call.dtype != "float32" and k <= 128 else None,  # else it would only spill
    )
    out = call.run(launch) | {"p_qg": call.inputs.q, "p_kg": call.inputs.k}
    return out | {"p_x": None} if x_in_p else out


def recompute(call: Call, residuals: Residuals, p_chunks: Any, *, with_u: bool) -> dict[str, Any]:
    """What the scans read besides the states, as the forward had it: w is made again where it was not saved."""
    out = {
        "p_qg": call.inputs.q,
        "p_kg": call.inputs.k,
        "p_gsum": residuals.g_sum,
        "p_gate": residuals.g_sum,
        "p_p": residuals.p,
        "p_w": residuals.w,
        "p_w_scale": residuals.w_scale,
    }
    if residuals.w is not None and not with_u:
        return out
    _, _, _, hv, k, v = call.sizes
    knobs = call.tuning.recompute
    launch = Launch(
        kernel=intra_chunk.wy_recompute_kernel,
        grid=call.slots * hv,
        inputs={
            "p_k": call.inputs.k,
            "p_v": call.inputs.v,
            "p_gsum": residuals.g_sum,
            "p_beta": call.inputs.beta,
            "p_x": residuals.x_holder,
            "p_chunks": p_chunks,
        },
        outputs={**_w_buffers(call), "p_u": call.by_row(hv, v) if with_u else UNUSED},
        constants={
            **call.dims("T", "NT", "H", "HV", "K", "V", "BT", "IS_PACKED", "WHOLE"),
            **call.dims("W_FORMAT", "HARDWARE_FP8", "PRECISION"),
            "BK": power_of_two(k),
            "BV": call.width(knobs.bv, v),
            "WITH_U": with_u,
            "X_WIDTH": residuals.x_holder.shape[-1],
        },
        num_warps=knobs.warps * max(1, power_of_two(k) // 128),
        num_stages=knobs.stages,
    )
    return out | call.run(launch)


def decode_w(call: Call, saved: dict[str, Any]) -> Any:
    """w as values: where several programs of the reverse scan share a head, each would decode all of it."""
    _, _, _, hv, k, _ = call.sizes
    launch = Launch(
        kernel=intra_chunk.decode_w_kernel,
        grid=-(-call.rows * hv // CHUNK_SIZE),
        inputs={"p_w": saved["p_w"], "p_w_scale": saved["p_w_scale"]},
        outputs={"p_y": call.by_row(hv, k)},
        constants={
            "ROWS": call.rows * hv,
            **call.dims("K", "BT", "W_FORMAT", "HARDWARE_FP8"),
            "BK": power_of_two(k),
        },
    )
    return call.run(launch)["p_y"]


def chunk_backward(
    call: Call, residuals: Residuals, saved: dict[str, Any], scan: dict[str, Any], do: Any, p_chunks: Any
) -> dict[str, Any]:
    """p_dq and p_dk (one a value head), p_dv, p_dbeta and p_dg."""
    _, _, _, hv, k, v = call.sizes
    inputs = {
        "p_q": call.inputs.q,
        "p_k": call.inputs.k,
        "p_v": call.inputs.v,
        "p_gsum": saved["p_gsum"],
        "p_beta": call.inputs.beta,
        "p_x": residuals.x_holder,
        "p_w_scale": saved["p_w_scale"],
        "p_h": saved["p_h"],
        "p_h_scale": saved["p_h_scale"],
        "p_dh": scan["p_dh"],
        "p_dv_new": scan["p_dv_new"],
        "p_do": do,
        "p_chunks": p_chunks,
    }
    outputs = {
        "p_dq": call.by_row(hv, k),
        "p_dk": call.by_row(hv, k),
        "p_dv": call.by_row(hv, v),
        "p_dbeta": Buffer((call.rows, hv), dtype_name(call.inputs.beta)),
        "p_dg": call.gate_sums(),
    }
    if pipeline_hopper.takes_chunk(call):
        return pipeline_hopper.chunk_backward(call, inputs, outputs, saved["p_w"])
    knobs = call.tuning.chunk_backward
    bv = call.width(knobs.bv if call.dtype != "float32" else 64, v)
    scratch = call.by_row(hv, v) if v > bv else UNUSED
    launch = Launch(
        kernel=chunk_kernels.chunk_backward_kernel,
        grid=call.slots * hv,
        inputs=inputs,
        outputs=outputs | {"p_v_new": scratch, "p_y": scratch},
        constants={
            **call.dims("scale", "T", "NT", "H", "HV", "K", "V", "BT", "IS_PACKED"),
            **call.dims("STATE_FORMAT", "TILE_V", "HARDWARE_FP8", "PRECISION"),
            "W_FORMAT": call.w_format,
            "X_WIDTH": residuals.x_holder.shape[-1],
            "BK": call.width(knobs.bk, k),
            "BV": bv,
        },
        num_warps=knobs.warps,
        num_stages=knobs.stages,
        max_registers=knobs.registers,
    )
    return call.run(launch)
