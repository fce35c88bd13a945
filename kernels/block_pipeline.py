"""Launches of a backward of token mode by blocks of 16 tokens (`gradient_blocks.py`, `token_blocks.py`)."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from jlaqat.kernels import gradient_blocks, token_blocks
from jlaqat.kernels.call import power_of_two
from jlaqat.kernels.launch import UNUSED, Buffer, Launch, Run, dtype_name

if TYPE_CHECKING:
    from jlaqat.kernels.recurrent_pipeline import Call, State

BLOCK = gradient_blocks.BLOCK
WIDTH, KEYS = 64, 64  # columns of a program, and keys of one that has a block's states
REGISTERS = 168  # three such programs fit a multiprocessor, for a few registers that spill
SOLVED_KEYS = 32  # of KDA at a time


def takes(call: Call) -> bool:
    """Whether gradients are computed by blocks: codes and bfloat16 tokens are what matrix units multiply exactly."""
    return call.coded and all(dtype_name(x) == "bfloat16" for x in (call.tokens.q, call.tokens.k, call.tokens.v))


def whole_blocks(tokens: int) -> int:
    """How long segments of at least so many tokens are, 1 meaning that every state is kept.

    A sequence has the same blocks whatever its segments are, and its gradients the same bits.
    """
    return 1 if tokens == 1 else -(-tokens // BLOCK) * BLOCK


def launch(
    run: Run, call: Call, state: State, saved: State, do: Any, d_leaving: Any, dv: str
) -> tuple[Call, dict[str, Any]]:
    """(the call, its programs having columns of their own; what they write) for `recurrent_gradients.gather`.

    Arguments are those of `recurrent_pipeline.backward`. dv: the dtype of that gradient.
    """
    kept = call
    call = call._replace(options=dataclasses.replace(call.options, state=None, width=WIDTH), columns=None)
    _, t, h, hv, k, v = call.sizes
    n, blocks, is_kda = call.sequences, -(-call.length // BLOCK), len(call.tokens.g.shape) == 4
    inputs, ragged = call.ragged()
    given = {**call.inputs(state), **inputs}
    entering = {name: given.pop(name) for name in ("p_values", "p_scale")}
    del given["p_v"]
    all_keys = max(power_of_two(k), 16)
    sizes = {"scale": float(call.options.scale), "T": t, **ragged, "BLOCKS": blocks, "H": h, "HV": hv, "K": k}
    sizes["IS_KDA"] = is_kda
    of_columns = {**sizes, "V": v, "BV": max(call.width, 16), "LENGTH": call.length, "OWN_ROWS": call.most is not None}
    solved = run(
        Launch(
            kernel=gradient_blocks.solve_blocks_kernel,
            grid=n * blocks * hv,
            inputs=given,
            outputs={"p_solved": Buffer((n, blocks, hv, 2, BLOCK, BLOCK), "float32")},
            constants={**sizes, "BK": min(all_keys, SOLVED_KEYS if is_kda else 128)},
            num_warps=1,
            num_stages=1,
            fp_fusion=False,
        )
    )["p_solved"]
    parts = call.parts(dv)
    states_width = min(of_columns["BV"], 64 if all_keys <= 128 else 32)  # a program has all keys of them in registers
    states = run(
        Launch(
            kernel=gradient_blocks.gradient_states_kernel,
            grid=n * hv * -(-v // states_width),
            inputs={**given, "p_solved": solved, "p_do": do, "p_ds": d_leaving},
            outputs={
                "p_dv": parts["p_dv"],
                "p_du": Buffer(parts["p_dv"].shape, "float32"),
                "p_g_last": Buffer((n, blocks, hv, k, v), "float32"),
                "p_ds_in": parts["p_ds_in"],
            },
            constants={**of_columns, "BK": all_keys, "BV": states_width, "STAGES": 3 if all_keys <= 128 else 1},
            num_warps=4,
            num_stages=1,
            fp_fusion=False,
        )
    )
    keys = min(all_keys, KEYS)
    programs_k = -(-k // keys)
    programs = blocks * call.programs * programs_k
    if not is_kda:
        parts["p_dg"] = Buffer((*call.rows, hv * call.programs_v * programs_k), "float32")
    of_tokens = run(
        Launch(
            kernel=token_blocks.token_blocks_kernel,
            grid=programs,
            inputs={
                **given,
                **entering,
                "p_saved": saved.values,
                "p_saved_scale": saved.scale,
                "p_error": saved.error,
                "p_do": do,
                "p_du": states["p_du"],
                "p_g_last": states["p_g_last"],
            },
            outputs={
                "p_rows": Buffer((programs, 2, BLOCK, BLOCK), "float32") if is_kda else UNUSED,
                **{name: parts[name] for name in ("p_dq", "p_dk", "p_dg", "p_dbeta")},
            },
            constants={
                **of_columns,
                "BK": keys,
                "FORMAT": kept.format,
                "GRANULARITY": kept.granularity,
                "READ_STORED": kept.options.read_stored,
                "HARDWARE_FP8": kept.options.hardware_fp8,
                "GROUP": kept.group or 1,
                "WARPS": keys // 16,
                "STAGES": 4,
            },
            num_warps=keys // 16,
            num_stages=1,
            fp_fusion=False,
            max_registers=REGISTERS,
        )
    )
    return call, {**of_tokens, "p_dv": states["p_dv"], "p_ds_in": states["p_ds_in"]}
