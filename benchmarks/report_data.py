"""The benchmarks' JSON, by row, for the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from floors import Floors, floors
from kernel_rows import GATES, PASSES, TARGET_SHAPES

DASH = "–"
NAMES = {"gdn": "GDN", "kda": "KDA"}
# (backend, quant) in the order of columns, and what they are called.
COLUMNS = {
    ("triton", "plain"): "ours, plain",
    ("triton", "state fp8"): "ours, state FP8",
    ("triton", "state+w fp8"): "ours, state + w FP8",
    ("triton", "state int8"): "ours, state INT8",
    ("xla", "plain"): "xla backend, plain",
    ("xla", "state+w fp8"): "xla backend, state + w FP8",
    ("jla", "plain"): "jla, plain",
    ("fla", "plain"): "FLA, plain",
}
ROUNDED = ("triton", "state+w fp8")


class Results:
    """What was measured. `row` and `ms` find a measurement, None where there is none."""

    def __init__(self, folder: Path) -> None:
        self.rows = _load(folder / "performance_h200.json") or []
        self.ceilings = _load(folder / "ceilings_h200.json")
        self.counters = _load(folder / "counters_h200.json") or []
        self.steps = _load(folder / "qat_step_h200.json") or []
        self.curves = _load(folder / "train_curve_h200.json") or []
        self.first_calls = _load(folder / "first_call_h200.json") or []
        self._by_name = {(r["gate"], r["pass"], r["shape"], r["backend"], r["quant"]): r for r in self.rows}

    def row(self, gate: str, direction: str, shape: str, backend: str, quant: str) -> dict[str, Any] | None:
        return self._by_name.get((gate, direction, shape, backend, quant))

    def ms(self, gate: str, direction: str, shape: str, backend: str, quant: str) -> float | None:
        return (self.row(gate, direction, shape, backend, quant) or {}).get("ms")

    def least(self, gate: str, direction: str, shape: str, backend: str, quant: str) -> float | None:
        """The quickest of the profiled calls, which work of others on the GPU disturbs least."""
        return (self.row(gate, direction, shape, backend, quant) or {}).get("ms_min")

    def refused(self, gate: str, direction: str, shape: str, backend: str, quant: str) -> bool:
        return "error" in (self.row(gate, direction, shape, backend, quant) or {})

    def floors(self, gate: str, direction: str, shape: str) -> Floors | None:
        if self.ceilings is None:
            return None
        return floors(gate, shape, direction, self.ceilings["copy_tb_per_s"], self.ceilings["bf16_tflop_per_s"])

    def targets(self) -> list[tuple[str, str, str]]:
        """(gate, direction, shape) of what the targets are about."""
        return [(gate, direction, shape) for gate in GATES for direction in PASSES for shape in TARGET_SHAPES]


def _load(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


def number(value: float | None, digits: int = 3) -> str:
    return DASH if value is None else f"{value:.{digits}f}"


def ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a / b


def shown_shape(shape: str) -> str:
    """8×4096×16, with the head size where it is not 128, and "HV 32" where value heads are more."""
    sizes = shape.split("x")
    h, _, hv = sizes[2].partition("g")
    text = "×".join([*sizes[:2], h])
    text += f", HV {hv}" if hv else ""
    return text + (f", D {sizes[3]}" if len(sizes) > 3 else "")


def table(header: list[str], lines: list[list[str]], *, left: int = 1) -> str:
    """A Markdown table; the first `left` columns are text."""
    rule = ["---"] * left + ["---:"] * (len(header) - left)
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, rule, *lines])
