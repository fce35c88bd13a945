"""Launch parameters by kernel, from tables that `benchmarks/tune_kernels.py` writes: tuned/sm90.json and so on.

A table has a set of parameters for each gate, for calls that round the state and calls that do not, and for two classes
of shapes: "many", whose state scan has at least one program a multiprocessor, and "few". Nothing is tuned while a
program runs: an architecture without a table takes the defaults of `Tuning`.
"""

from __future__ import annotations

import functools
import json
import pathlib
from typing import Any, NamedTuple

FOLDER = pathlib.Path(__file__).parent / "tuned"
ENOUGH_PROGRAMS = 132  # multiprocessors of an H100 or H200


class Knobs(NamedTuple):
    """Launch parameters of one kernel: they change its speed, and no bit of a rounded state."""

    warps: int = 4
    stages: int = 2
    bk: int = 64  # columns over K of an inner block, where a kernel cuts K
    bv: int = 64  # columns over V of an inner block; of a program, in the scans
    registers: int | None = None  # a thread may take: fewer leave room for more programs


class Tuning(NamedTuple):
    """Launch parameters by kernel.

    decode_w: a rounded w goes to the reverse scan as values rather than codes, which each of its programs would decode.
    x_in_p: GDN's backward finds X where P is zero (chunks.py): 84 MB of both instead of 134 at 8x4096x16 in 16 bits.
    split_output: states and v' go to memory, and a second kernel forms the output.
    hopper_state, hopper_reverse, hopper_chunk: parameters of the kernels for SM90 that take the places of `state`,
      `reverse` and `chunk_backward` where they serve; None leaves the place to those. Their `bk` means nothing.
    """

    intra: Knobs = Knobs(8, 1)
    recompute: Knobs = Knobs(8, 1)
    state: Knobs = Knobs(4, 2)  # where the state is rounded, bv is the recipe's block_v instead
    reverse: Knobs = Knobs(4, 2, bv=32)
    output: Knobs = Knobs()
    chunk_backward: Knobs = Knobs(4, 1, bk=32, bv=128)
    decode_w: bool = False
    split_output: bool = False
    x_in_p: bool = False
    hopper_state: Knobs | None = None
    hopper_reverse: Knobs | None = None
    hopper_chunk: Knobs | None = None
    kda_pairs: Knobs = Knobs(4, 1, bk=32)
    kda_wy: Knobs = Knobs(4, 1, bv=128)
    kda_recompute: Knobs = Knobs(4, 1, bv=128)
    kda_scores: Knobs = Knobs(4, 1, bv=128)
    kda_channels: Knobs = Knobs(4, 3, bk=32)


def shape_class(programs: int) -> str:
    """programs: sequences x value heads x 64-wide tiles over V."""
    return "many" if programs >= ENOUGH_PROGRAMS else "few"


@functools.cache
def choose(architecture: int, gate: str, rounded: bool, size: str) -> Tuning:
    """The tuned parameters of a gate ("gdn", "kda") and a shape class, or the defaults."""
    path = FOLDER / f"sm{architecture}.json"
    if not path.exists():
        return Tuning()
    table = json.loads(path.read_text())["tunings"]
    chosen = table[gate]["rounded" if rounded else "plain"][size]
    by_kernel: dict[str, Any] = {name: Knobs(*x) if isinstance(x, list) else x for name, x in chosen.items()}
    return Tuning(**by_kernel)
