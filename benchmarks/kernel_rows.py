"""Rows of the kernels' benchmark: what a row is, which ones there are and in which order, and the JSON they go to."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

QUANTS = ("plain", "state fp8", "state+w fp8", "state int8")
GATES = ("gdn", "kda")
PASSES = ("fwd", "fwd+bwd")
BACKENDS = ("triton", "jla", "fla", "xla")
QUANTS_OF = {  # the peers round nothing; our xla backend beside the two ends
    "triton": QUANTS,
    "xla": ("plain", "state+w fp8"),
    "jla": ("plain",),
    "fla": ("plain",),
}
TARGET_SHAPES = ("8x4096x16", "1x8192x16")
OTHER_SHAPES = ("1x32768x32", "1x8192x16g32", "8x4096x16x64", "4x4096x8x256")
SWEEP = tuple(f"1x{1024 << i}x16" for i in range(8))  # 1k to 128k tokens
SWEEP_QUANTS = {"triton": ("state+w fp8", "plain"), "jla": ("plain",), "fla": ("plain",), "xla": ("state+w fp8",)}
FIELDS = ("gate", "quant", "pass", "shape", "backend", "dtype")  # they identify a row


class Sizes(NamedTuple):
    b: int
    t: int
    h: int
    hv: int
    d: int

    @property
    def tensor_bytes(self) -> int:
        """Of one bfloat16 [B, T, HV, D]."""
        return 2 * self.b * self.t * self.hv * self.d


def parse_shape(shape: str) -> Sizes:
    """BxTxH or BxTxHxD (K = V = D, 128 unless given); H may be "16g32" for 32 value heads over 16."""
    parts = shape.split("x")
    h, _, hv = parts[2].partition("g")
    return Sizes(int(parts[0]), int(parts[1]), int(h), int(hv or h), int(parts[3]) if len(parts) > 3 else 128)


@dataclasses.dataclass(frozen=True, order=True)
class Row:
    """One measurement to take."""

    backend: str
    gate: str
    shape: str
    quant: str
    direction: str  # "pass" in the JSON

    def fields(self) -> dict[str, str]:
        return {
            "gate": self.gate,
            "quant": self.quant,
            "pass": self.direction,
            "shape": self.shape,
            "backend": self.backend,
            "dtype": "bfloat16",
        }

    @property
    def compile_cost(self) -> float:
        """Seconds that compiling takes, about: rows are spread over processes by it."""
        each = {"triton": 4, "jla": 5, "fla": 8, "xla": 10}[self.backend]
        return each * (1 if self.direction == "fwd" else 2.5)

    @property
    def memory(self) -> float:
        """Bytes of GPU memory that the row needs, generously."""
        factor = {"triton": 26, "jla": 30, "fla": 30, "xla": 50}[self.backend]
        return factor * parse_shape(self.shape).tensor_bytes

    def text(self) -> str:
        return "\t".join(dataclasses.astuple(self))

    @staticmethod
    def parse(text: str) -> Row:
        return Row(*text.split("\t"))


def target_rows() -> list[Row]:
    """What the targets compare: rounded and plain, jla and FLA, at the two shapes."""
    wanted = {"triton": ("state+w fp8", "plain"), "jla": ("plain",), "fla": ("plain",)}
    return rows_of(TARGET_SHAPES, wanted, PASSES)


def matrix_rows() -> list[Row]:
    return rows_of(TARGET_SHAPES + OTHER_SHAPES, QUANTS_OF, PASSES)


def sweep_rows() -> list[Row]:
    return rows_of(SWEEP, SWEEP_QUANTS, ("fwd+bwd",))


STAGES = {"targets": target_rows, "matrix": matrix_rows, "sweep": sweep_rows}


def rows_of(shapes: Iterable[str], quants: dict[str, tuple[str, ...]], passes: Iterable[str]) -> list[Row]:
    return [
        Row(backend, gate, shape, quant, direction)
        for backend, chosen in quants.items()
        for shape in shapes
        for gate in GATES
        for quant in chosen
        for direction in passes
    ]


def spread(rows: list[Row], processes: int) -> list[list[Row]]:
    """Rows by process: alike ones together, costs even, those that need much memory in few processes."""
    backends = {row.backend: sum(r.compile_cost for r in rows if r.backend == row.backend) for row in rows}
    total, shares = sum(backends.values()), []
    for backend, cost in backends.items():
        count = max(1, round(processes * cost / total))
        mine = sorted((r for r in rows if r.backend == backend), key=lambda r: (-r.memory, r))
        each = math.fsum(r.compile_cost for r in mine) / count
        parts: list[list[Row]] = [[] for _ in range(count)]
        done = 0.0
        for row in mine:
            parts[min(count - 1, int(done / each))].append(row)
            done += row.compile_cost
        shares += [part for part in parts if part]
    return shares


def load(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text()) if path.exists() else []


def identity(row: dict[str, Any]) -> tuple[str, ...]:
    return tuple(row[name] for name in FIELDS)


def append(path: Path, row: dict[str, Any]) -> None:
    """Adds a row, in the place of an older one of the same name. Call it under the lock."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [r for r in load(path) if identity(r) != identity(row)] + [row]
    temporary = path.with_suffix(".part")
    temporary.write_text("[\n" + ",\n".join(" " + json.dumps(r) for r in rows) + "\n]\n")
    temporary.replace(path)  # a run that is cut short keeps what it measured
