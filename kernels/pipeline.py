"""The order of launches, written once for every runner: forward, and backward with what the forward kept.

    out = forward(run, Inputs(q, k, v, g, beta), options)
    gradients = backward(run, Inputs(q, k, v, g, beta), out.residuals, do, dfinal, options)

`run` executes a Launch: torch_bridge.run, triton_backend (JAX), kernels.aot (compiles only). Arrays are those of the
runner's framework, contiguous. Shapes and the maths: docs/kernels.md.
"""

from __future__ import annotations

from typing import Any

from jlaqat.kernels import chunk_output, chunk_state, chunks, pipeline_gdn, pipeline_hopper, pipeline_kda
from jlaqat.kernels.call import Call, Gradients, Inputs, Options, Output, Residuals, power_of_two
from jlaqat.kernels.launch import UNUSED, Buffer, Launch, Run


def _warps(base: int, width: int) -> int:
    """Twice the warps for twice the columns past 128, so that a thread's share of a tile stays the same."""
    return base * max(1, width // 128)


def _tables(call: Call) -> tuple[Any, Any]:
    """Chunk and sequence tables of a packed call; the tensor itself (unread) otherwise."""
    if not call.is_packed:
        return call.inputs.beta, call.inputs.beta
    launch = Launch(
        kernel=chunks.chunk_index_kernel,
        grid=call.slots + call.n_sequences + 1,
        inputs={"p_cu_seqlens": call.inputs.cu_seqlens},
        outputs={
            "p_chunks": Buffer((call.slots, 3), "int32"),
            "p_sequences": Buffer((call.n_sequences + 1, 3), "int32"),
        },
        constants={
            **call.dims("T", "N", "BT"),
            "SLOTS": call.slots,
            "BLOCK": min(1024, power_of_two(call.n_sequences + 1)),
        },
    )
    out = call.run(launch)
    return out["p_chunks"], out["p_sequences"]


def _scan_inputs(x: dict[str, Any], p_sequences: Any) -> dict[str, Any]:
    """What a scan reads in either direction, out of the results of the launches before it."""
    return {
        "p_q": x["p_qg"],
        "p_k": x["p_kg"],
        "p_w": x["p_w"],
        "p_w_scale": x.get("p_w_scale", x["p_w"]),
        "p_p": x["p_p"],
        "p_g": x["p_gate"],
        "p_sequences": p_sequences,
    }


def _scan_forward(
    call: Call, intra: dict[str, Any], p_sequences: Any, *, write_o: bool, save_h: bool, save_v: bool
) -> dict[str, Any]:
    """intra: p_qg, p_kg (q and k themselves for GDN), p_w, p_w_scale, p_u, p_p and p_gate (G, or e^(G_L) for KDA)."""
    initial = call.inputs.initial_state
    inputs = _scan_inputs(intra, p_sequences) | {
        "p_u": intra["p_u"],
        "p_initial": initial if initial is not None else intra["p_gate"],
    }
    if pipeline_hopper.takes_state(call, write_o=write_o, save_h=save_h, save_v=save_v):
        return pipeline_hopper.scan_forward(call, inputs)
    _, _, _, hv, k, v = call.sizes
    width, bk = call.state_width, power_of_two(k)
    knobs = call.tuning.state
    rounded = call.state_format != "none"
    tiles = -(-v // call.tile_v)
    launch = Launch(
        kernel=chunk_state.chunk_state_forward_kernel,
        grid=(call.n_sequences + call.is_packed) * hv * -(-v // width),
        inputs=inputs,
        outputs={
            "p_o": call.by_row(hv, v) if write_o else UNUSED,
            "p_final": call.sequence_states(),
            "p_h": call.states("uint8" if rounded else call.dtype) if save_h else UNUSED,
            "p_h_scale": Buffer((call.slots, hv, tiles), "float32") if save_h and rounded else UNUSED,
            "p_v_new": call.by_row(hv, v) if save_v else UNUSED,
        },
        constants={
            **call.dims("scale", "T", "NT", "N", "HK", "HV", "K", "V", "BT", "IS_KDA", "IS_PACKED", "WHOLE"),
            **call.dims("STATE_FORMAT", "HARDWARE_FP8", "PRECISION"),
            "W_FORMAT": call.w_format,
            "P_WIDTH": inputs["p_p"].shape[-1],
            "BK": bk,
            "BV": width,
            "HAS_INITIAL": initial is not None,
            "WRITE_O": write_o,
            "SAVE_H": save_h,
            "SAVE_V": save_v,
        },
        num_warps=_warps(knobs.warps, bk * width // 64),
        num_stages=call.scan_stages(knobs.stages, width),
    )
    return call.run(launch)


def _output_forward(call: Call, intra: dict[str, Any], scan: dict[str, Any], p_chunks: Any) -> Any:
    _, _, _, hv, k, v = call.sizes
    knobs = call.tuning.output
    bk, bv = power_of_two(k), call.width(knobs.bv, v)
    launch = Launch(
        kernel=chunk_output.chunk_output_forward_kernel,
        grid=call.slots * hv * -(-v // bv),
        inputs={
            "p_q": intra["p_qg"],
            "p_p": intra["p_p"],
            "p_g": intra["p_gate"],
            "p_h": scan["p_h"],
            "p_h_scale": scan["p_h_scale"],
            "p_v_new": scan["p_v_new"],
            "p_chunks": p_chunks,
        },
        outputs={"p_o": call.by_row(hv, v)},
        constants={
            **call.dims("scale", "T", "NT", "HK", "HV", "K", "V", "BT", "IS_KDA", "IS_PACKED"),
            **call.dims("STATE_FORMAT", "TILE_V", "HARDWARE_FP8", "PRECISION"),
            "P_WIDTH": intra["p_p"].shape[-1],
            "BK": bk,
            "BV": bv,
        },
        num_warps=_warps(knobs.warps, bk),
        num_stages=knobs.stages,
    )
    return call.run(launch)["p_o"]


def forward(run: Run, inputs: Inputs, options: Options, *, with_residuals: bool = True) -> Output:
    """o, the final state and, with_residuals, what `backward` needs.

    Raises ValueError for shapes and dtypes that do not fit together, and UnsupportedByKernels for what only other
    backends do.
    """
    call = Call(run, inputs, options)
    b, t, _, hv, _, v = call.sizes
    p_chunks, p_sequences = _tables(call)
    intra = (pipeline_kda if call.is_kda else pipeline_gdn).intra_forward(call, p_chunks, with_residuals)
    intra["p_gate"] = intra["p_decay"] if call.is_kda else intra["p_gsum"]
    split = call.tuning.split_output
    keep = with_residuals and options.save_states and call.state_format != "none"
    scan = _scan_forward(call, intra, p_sequences, write_o=not split, save_h=split or keep, save_v=split)
    o = _output_forward(call, intra, scan, p_chunks) if split else scan["p_o"]
    residuals = None
    if with_residuals:
        residuals = Residuals(
            x=intra["p_x"],
            p=intra["p_p"],
            g_sum=None if call.is_kda else intra["p_gsum"],
            h=scan["p_h"] if keep else None,
            h_scale=scan["p_h_scale"] if keep else None,
            w=intra["p_w"] if keep and call.w_format != "none" else None,
            w_scale=intra["p_w_scale"] if keep and call.w_format != "none" else None,
        )
    return Output(o.reshape(b, t, hv, v), scan["p_final"], residuals)


def _saved(call: Call, residuals: Residuals, p_chunks: Any, p_sequences: Any) -> dict[str, Any]:
    """GDN: what the backward reads; p_h and p_h_scale as saved, or from another scan forward."""
    known = residuals.h is not None
    out = pipeline_gdn.recompute(call, residuals, p_chunks, with_u=not known)
    if known:
        return out | {"p_h": residuals.h, "p_h_scale": residuals.h_scale}
    scan = _scan_forward(call, out, p_sequences, write_o=False, save_h=True, save_v=False)
    return out | {name: scan[name] for name in ("p_h", "p_h_scale")}


def _saved_kda(call: Call, residuals: Residuals, p_chunks: Any, p_sequences: Any) -> dict[str, Any]:
    """The same for KDA, with p_v_new and p_v_plain."""
    h, h_scale = residuals.h, residuals.h_scale
    out = pipeline_kda.recompute(call, residuals, h, h_scale, p_chunks)
    out |= {"p_gate": out["p_decay"], "p_p": residuals.p}
    if h is None:
        scan = _scan_forward(call, out, p_sequences, write_o=False, save_h=True, save_v=True)
        h, h_scale = scan["p_h"], scan["p_h_scale"]
        if call.options.quant.w is None:
            out |= {"p_v_new": scan["p_v_new"], "p_v_plain": scan["p_v_new"]}
        else:
            out |= pipeline_kda.recompute(call, residuals, h, h_scale, p_chunks)
    return out | {"p_h": h, "p_h_scale": h_scale}


def _scan_backward(call: Call, saved: dict[str, Any], do: Any, dfinal: Any, p_sequences: Any) -> dict[str, Any]:
    _, _, _, hv, k, v = call.sizes
    inputs = _scan_inputs(saved, p_sequences) | {"p_do": do, "p_dfinal": dfinal}
    outputs = {
        "p_dh": call.states(call.dtype),
        "p_dv_new": call.by_row(hv, v),
        "p_dinitial": call.sequence_states(),
    }
    if pipeline_hopper.takes_reverse(call):
        return pipeline_hopper.scan_backward(call, inputs, outputs)
    knobs = call.tuning.reverse
    w_format = call.w_format
    if w_format != "none" and call.tuning.decode_w:
        w_format, inputs["p_w"] = "none", pipeline_gdn.decode_w(call, saved)
    bk, width = power_of_two(k), call.width(knobs.bv, v)
    launch = Launch(
        kernel=chunk_state.chunk_state_backward_kernel,
        grid=call.n_sequences * hv * -(-v // width),
        inputs=inputs,
        outputs=outputs,
        constants={
            **call.dims("scale", "T", "NT", "HK", "HV", "K", "V", "BT", "IS_KDA", "IS_PACKED", "WHOLE"),
            **call.dims("HARDWARE_FP8", "PRECISION"),
            "W_FORMAT": w_format,
            "P_WIDTH": inputs["p_p"].shape[-1],
            "BK": bk,
            "BV": width,
        },
        num_warps=_warps(knobs.warps, bk * width // 64),
        num_stages=call.scan_stages(knobs.stages, width),
    )
    return call.run(launch)


def _sum_groups(call: Call, x: Any) -> Any:
    """[rows, HV, K] summed over the value heads of each q/k head."""
    _, _, h, hv, k, _ = call.sizes
    if h == hv:
        return x
    block = 32
    launch = Launch(
        kernel=chunk_output.group_sum_kernel,
        grid=-(-call.rows // block) * h,
        inputs={"p_x": x},
        outputs={"p_y": call.by_row(h, k)},
        constants={"ROWS": call.rows, **call.dims("H", "HV", "K"), "BLOCK": block, "BK": power_of_two(k)},
    )
    return call.run(launch)["p_y"]


def backward(run: Run, inputs: Inputs, residuals: Residuals, do: Any, dfinal: Any, options: Options) -> Gradients:
    """Gradients of everything, straight through every rounding.

    do: [B, T, HV, V] in v's dtype. dfinal: [N, HV, K, V] float32, zeros where the final state is not used.
    """
    call = Call(run, inputs, options)
    b, t, h, hv, k, v = call.sizes
    p_chunks, p_sequences = _tables(call)
    saved = (_saved_kda if call.is_kda else _saved)(call, residuals, p_chunks, p_sequences)
    scan = _scan_backward(call, saved, do, dfinal, p_sequences)
    gate = pipeline_kda if call.is_kda else pipeline_gdn
    chunk = gate.chunk_backward(call, residuals, saved, scan, do, p_chunks)
    return Gradients(
        q=_sum_groups(call, chunk["p_dq"]).reshape(b, t, h, k),
        k=_sum_groups(call, chunk["p_dk"]).reshape(b, t, h, k),
        v=chunk["p_dv"].reshape(b, t, hv, v),
        g=chunk["p_dg"].reshape(inputs.g.shape),
        beta=chunk["p_dbeta"].reshape(b, t, hv),
        initial_state=scan["p_dinitial"],
    )
