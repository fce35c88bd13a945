"""What the processes of `jlaqat parity` hand each other: a case as JSON and arrays as raw bits. NumPy only."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jlaqat.spec import QuantSpec

OPERANDS = ("q", "k", "v", "g", "beta", "initial_state")
Bits = tuple[np.ndarray, str]
"""An array viewed as integers, and the name of its dtype, which NumPy may not know (bfloat16)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """What a call rounds, and which gate it has. The arrays say the rest."""

    gate: str
    state: QuantSpec | None = None
    w: QuantSpec | None = None


def write_case(folder: Path, case: Case) -> None:
    (folder / "case.json").write_text(json.dumps(dataclasses.asdict(case)))


def read_case(folder: Path) -> Case:
    tree: dict[str, Any] = json.loads((folder / "case.json").read_text())
    state, w = (None if tree[site] is None else QuantSpec(**tree[site]) for site in ("state", "w"))
    return Case(gate=tree["gate"], state=state, w=w)


def as_bits(a: Any) -> Bits:
    """A NumPy or JAX array, whatever its dtype."""
    a = np.ascontiguousarray(a)
    integers = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}[a.dtype.itemsize]
    return a.view(integers), a.dtype.name


def write_arrays(path: Path, arrays: Mapping[str, Bits]) -> None:
    # "o:bfloat16" → its bits. ":" keeps names and dtypes apart: neither has one.
    named: dict[str, Any] = {f"{name}:{dtype}": bits for name, (bits, dtype) in arrays.items()}
    np.savez(path, **named)


def read_arrays(path: Path) -> dict[str, Bits]:
    with np.load(path) as file:
        return {key.partition(":")[0]: (file[key], key.partition(":")[2]) for key in file.files}
