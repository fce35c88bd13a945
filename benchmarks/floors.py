"""The least time that a call could take: bytes over the rate of a copy, operations over the rate of a matrix product.

Bytes: every input of a direction read once, every output written once. Forward: q, k, v, g, beta in; o and the final
state out. Backward: the same inputs and do in; dq, dk, dv, dg, dbeta out. What a forward keeps for its backward is not
counted: a perfect implementation would keep nothing and form nothing twice.

Operations: of the dense matrix products of the chunked form (chunks of C = 64), a value head and chunk. Forward: A, the
scores P and w (2 C^2 K each), u and P v' (2 C^2 V each), w S, q S and k^T v' (2 C K V each). Backward: twice the
forward, as each product has two gradients. The inverse, products that a form repeats, and KDA's levels are not counted.
"""

from __future__ import annotations

from typing import NamedTuple

from kernel_rows import parse_shape

CHUNK = 64


class Floors(NamedTuple):
    memory_ms: float
    matrix_ms: float

    @property
    def ms(self) -> float:
        return max(self)


def floors(gate: str, shape: str, direction: str, copy_tb_per_s: float, bf16_tflop_per_s: float) -> Floors:
    """direction: "fwd" or "fwd+bwd"."""
    both = direction == "fwd+bwd"
    moved, operations = bytes_moved(gate, shape, backward=False), forward_operations(shape)
    if both:
        moved, operations = moved + bytes_moved(gate, shape, backward=True), 3 * operations
    return Floors(moved / copy_tb_per_s / 1e9, operations / bf16_tflop_per_s / 1e9)


def bytes_moved(gate: str, shape: str, *, backward: bool) -> int:
    b, t, h, hv, d = parse_shape(shape)
    tokens, keys = b * t, 2 * 2 * b * t * h * d  # q and k in bfloat16
    gates = tokens * hv * (4 * (d if gate == "kda" else 1) + 2)  # g in float32, beta in bfloat16
    values = 2 * tokens * hv * d
    inputs = keys + values + gates
    if backward:
        return inputs + values + inputs  # do, and gradients as large as what they are of
    return inputs + values + 4 * b * hv * d * d


def forward_operations(shape: str) -> int:
    b, t, _, hv, d = parse_shape(shape)
    chunks = b * hv * -(-t // CHUNK)
    return chunks * (5 * 2 * CHUNK * CHUNK * d + 3 * 2 * CHUNK * d * d)
