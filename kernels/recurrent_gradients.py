"""Gradients from what the programs of a backward of the recurrence wrote: sums over a head's parts, in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from jlaqat.kernels import chunk_output, recurrent
from jlaqat.kernels.call import power_of_two
from jlaqat.kernels.launch import Buffer, Launch, Run

if TYPE_CHECKING:
    from jlaqat.kernels import recurrent_pipeline


class Gradients(NamedTuple):
    """Tokens lie as in the operands, or (a segment's) in rows of a sequence's own, [N, length] instead of [B, T].

    Rows of tokens that no sequence has are not written. float32, or in the tokens' dtypes, see `backward`.
    """

    q: Any  # [B, T, H, K]
    k: Any  # [B, T, H, K]
    v: Any  # [B, T, HV, V]
    g: Any  # as g, float32
    beta: Any  # [B, T, HV]
    state: Any  # [N, HV, K, V] float32


def gather(
    run: Run,
    call: recurrent_pipeline.Call,
    out: dict[str, Any],
    into: Gradients | None = None,
    dtypes: tuple[str, ...] = ("float32",) * 5,
) -> Gradients:
    """Gradients from what the programs of a backward wrote, in these dtypes where they are sums of parts."""
    if into is not None:
        names = ("p_dq", "p_dk", "p_dv", "p_dg", "p_dbeta")
        q, k, v, g, beta = (_place(run, call, out[name], x) for name, x in zip(names, into))
        return Gradients(q, k, v, g, beta, out["p_ds_in"])
    _, _, h, hv, k, _ = call.sizes
    n, t = call.rows
    gates = (n, t, *call.tokens.g.shape[2:])

    def whole(x: Any, heads: int, width: int, shape: tuple[int, ...], dtype: str) -> Any:
        return _sum_parts(run, x, n * t, int(x.shape[2]), heads, width, dtype).reshape(shape)

    q, key, _, g, beta = dtypes
    return Gradients(
        q=whole(out["p_dq"], h, k, (n, t, h, k), q),
        k=whole(out["p_dk"], h, k, (n, t, h, k), key),
        v=out["p_dv"],
        g=whole(out["p_dg"], hv, k if len(gates) == 4 else 1, gates, g),
        beta=whole(out["p_dbeta"], hv, 1, (n, t, hv), beta),
        state=out["p_ds_in"],
    )


def _place(run: Run, call: recurrent_pipeline.Call, x: Any, into: Any) -> Any:
    """[N, length, parts, ...] in the rows of [B, T, heads, ...] that `call.bounds` say, in place."""
    heads, width, block = int(into.shape[2]), int(into.shape[3]) if len(into.shape) == 4 else 1, 16
    inputs, constants = call.ragged()
    launch = Launch(
        kernel=recurrent.place_rows_kernel,
        grid=call.sequences * -(-call.length // block) * heads,
        inputs={"p_x": x, **inputs, "p_y": into},
        outputs={},
        in_place=("p_y",),
        constants={
            "T": call.sizes[1],
            "PER_ROW": constants["PER_ROW"],
            "LENGTH": call.length,
            "HEADS": heads,
            "PARTS": int(x.shape[2]),
            "W": width,
            "BLOCK": block,
            "BW": power_of_two(width),
        },
    )
    return run(launch)["p_y"]


def _sum_parts(run: Run, x: Any, rows: int, parts: int, heads: int, width: int, dtype: str) -> Any:
    """[rows, parts, width] → [rows, heads, width]: sums over the programs and value heads of each head."""
    if parts == heads:
        return x
    block = 32
    launch = Launch(
        kernel=chunk_output.group_sum_kernel,
        grid=-(-rows // block) * heads,
        inputs={"p_x": x},
        outputs={"p_y": Buffer((rows, heads, width), dtype)},
        constants={"ROWS": rows, "H": heads, "HV": parts, "K": width, "BLOCK": block, "BK": power_of_two(width)},
    )
    return run(launch)["p_y"]
