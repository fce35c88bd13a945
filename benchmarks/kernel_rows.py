"""Rows of the kernels' benchmark: what a row is, which ones there are and in which order, and the JSON they go to."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

QUANTS = ("plain", "state fp8", "state+w fp8", "state int8")
GATES = ("gdn", "kda")
PASSES = ("fwd", "fwd+bwd")
BACKENDS = ("triton", "jla", "fla", "xla")
# Peers round nothing. Ours first with state and w rounded, and without: what targets compare.
COMPARED = {"triton": ("state+w fp8", "plain"), "jla": ("plain",), "fla": ("plain",), "xla": ("state+w fp8",)}
TARGET_SHAPES = ("8x4096x16", "1x8192x16")
OTHER_SHAPES = ("1x32768x32", "1x8192x16g32", "8x4096x16x64", "4x4096x8x256")
SWEEP = tuple(f"1x{1024 << i}x16" for i in range(8))  # 1k to 128k tokens
FIELDS = ("gate", "quant", "pass", "shape", "backend", "dtype")  # they identify a row


class Sizes(NamedTuple):
    b: int
    t: int
    h: int
    hv: int
    d: int


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

    def text(self) -> str:
        return "\t".join(dataclasses.astuple(self))

    @staticmethod
    def parse(text: str) -> Row:
        return Row(*text.split("\t"))


def rows_of(shapes: Iterable[str], quants: dict[str, tuple[str, ...]], passes: Iterable[str]) -> list[Row]:
    return [
        Row(backend, gate, shape, quant, direction)
        for backend, chosen in quants.items()
        for shape in shapes
        for gate in GATES
        for quant in chosen
        for direction in passes
    ]


ALL_SHAPES = TARGET_SHAPES + OTHER_SHAPES
XLA = {"xla": ("plain", "state+w fp8")}
KERNELS = {backend: quants for backend, quants in COMPARED.items() if backend != "xla"}
# The most wanted first.
STAGES = {
    "targets": rows_of(TARGET_SHAPES, COMPARED, PASSES),
    "shapes": rows_of(OTHER_SHAPES, KERNELS, PASSES),
    "sweep": rows_of(SWEEP, KERNELS, PASSES[1:]),
    "settings": rows_of(ALL_SHAPES, {"triton": QUANTS}, PASSES),
    "xla": rows_of(ALL_SHAPES, XLA, PASSES) + rows_of(SWEEP, {"xla": COMPARED["xla"]}, PASSES[1:]),
}


def load(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text()) if path.exists() else []


def identity(row: dict[str, Any]) -> tuple[str, ...]:
    return tuple(row[name] for name in FIELDS)


def append(path: Path, row: dict[str, Any], names: Iterable[str] = FIELDS) -> None:
    """Adds a row, in the place of an older one that is alike in the fields `names`. Call it under the lock."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [r for r in load(path) if any(r[name] != row[name] for name in names)] + [row]
    temporary = path.with_suffix(".part")
    temporary.write_text("[\n" + ",\n".join(" " + json.dumps(r) for r in rows) + "\n]\n")
    temporary.replace(path)  # a run that is cut short keeps what it measured
