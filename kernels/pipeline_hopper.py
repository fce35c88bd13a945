"""Launches of the kernels for SM90, in the places of those of `pipeline` and `pipeline_gdn` where they serve."""

from __future__ import annotations

from typing import Any

from jlaqat.kernels import hopper_chunk, hopper_scan
from jlaqat.kernels.call import Call
from jlaqat.kernels.launch import Buffer, Launch

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


# Operands are those that the launch in Triton would have: whoever builds them hands them on.


def scan_forward(call: Call, inputs: dict[str, Any]) -> dict[str, Any]:
    """p_o and p_final of an unrounded state; inputs: those of `pipeline._scan_forward`."""
    _, _, _, hv, _, v = call.sizes
    knobs = call.tuning.hopper_state
    assert knobs is not None
    launch = Launch(
        kernel=hopper_scan.chunk_state_forward_kernel,
        grid=(call.n_sequences + call.is_packed) * hv * (v // STATE_BLOCK),
        inputs=inputs,
        outputs={"p_o": call.by_row(hv, v), "p_final": call.sequence_states()},
        constants={
            **call.dims("scale", "T", "NT", "N", "HK", "HV", "V", "IS_KDA", "IS_PACKED"),
            "W_FORMAT": call.w_format,
            "P_WIDTH": inputs["p_p"].shape[-1],
            "HAS_INITIAL": call.inputs.initial_state is not None,
            "STAGES": knobs.stages,
        },
        num_warps=knobs.warps,
        max_registers=knobs.registers,
    )
    return call.run(launch)


def scan_backward(call: Call, inputs: dict[str, Any], outputs: dict[str, Buffer]) -> dict[str, Any]:
    """Results and operands are those of `pipeline._scan_backward`."""
    _, _, _, hv, _, v = call.sizes
    knobs = call.tuning.hopper_reverse
    assert knobs is not None
    launch = Launch(
        kernel=hopper_scan.chunk_state_backward_kernel,
        grid=call.n_sequences * hv * (v // knobs.bv),
        inputs=inputs,
        outputs=outputs,
        constants={
            **call.dims("scale", "T", "NT", "HK", "HV", "V", "IS_KDA", "IS_PACKED"),
            "W_FORMAT": call.w_format,
            "P_WIDTH": inputs["p_p"].shape[-1],
            "BV": knobs.bv,
            "STAGES": knobs.stages,
        },
        num_warps=knobs.warps,
        max_registers=knobs.registers,
    )
    return call.run(launch)


def chunk_backward(call: Call, inputs: dict[str, Any], outputs: dict[str, Buffer], p_w: Any) -> dict[str, Any]:
    """Results and operands are those of `pipeline_gdn.chunk_backward`; and w as it was saved, values or codes."""
    knobs = call.tuning.hopper_chunk
    assert knobs is not None
    launch = Launch(
        kernel=hopper_chunk.chunk_backward_kernel,
        grid=call.slots * call.sizes[3],
        inputs=inputs | {"p_w": p_w},
        outputs=outputs,
        constants={
            **call.dims("scale", "T", "NT", "H", "HV", "IS_PACKED", "STATE_FORMAT", "TILE_V"),
            "W_FORMAT": call.w_format,
            "X_WIDTH": inputs["p_x"].shape[-1],
        },
        num_warps=knobs.warps,
        max_registers=knobs.registers,
    )
    return call.run(launch)
