"""What `jlaqat parity` shows and writes, and how it reads sizes."""

from __future__ import annotations

import dataclasses
import json
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from jlaqat.parity import ParityConfig, ParityError, Report

SIDES = {"jax": "JAX", "bridge": "PyTorch", "fla": "FLA"}


def table(report: Report, title: str) -> Table:
    shown = Table(title=title, title_justify="left")
    shown.add_column("", no_wrap=True)
    for side, name in SIDES.items():
        shown.add_column(f"{name}\n{report.sides[side]}", justify="right")
    shown.add_column("bound", justify="right")
    shown.add_column("equal bits\nJAX, PyTorch", justify="right")
    for row in report.rows:
        cells = []
        for side in SIDES:
            error = row.errors.get(side)
            text = "–" if error is None else f"{error:.1e}"
            cells.append(f"[bold red]{text} ✗[/]" if report.fails(row, side) else text)
        bound = f"{row.bound:.0e}" if report.binding else f"({row.bound:.0e})"
        equal = "–" if not report.same_kernels else "yes" if row.equal_bits else "[bold red]no ✗[/]"
        shown.add_row(row.name, *cells, bound, equal)
    return shown


def print_report(report: Report, title: str, console: Console | None = None) -> None:
    console = console or Console()
    console.print(table(report, title))
    for side, why in report.missing.items():
        console.print(f"{SIDES[side]}: {why}", markup=False)
    if not report.binding:
        console.print("Rounded, longer than 128 tokens and hardly decaying: the bounds are for orientation only.")


def to_json(report: Report, config: ParityConfig) -> dict[str, Any]:
    versions = {}
    for name in ("jax", "jax-triton", "torch", "triton", "fla-core"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "absent"
    return {
        "config": dataclasses.asdict(dataclasses.replace(config, dtype=report.dtype)),
        "sides": report.sides,
        "missing": report.missing,
        "binding": report.binding,
        "passed": report.passed,
        "rows": [dataclasses.asdict(row) for row in report.rows],
        "machine": f"{jax.devices()[0].device_kind}, {platform.machine()}",
        "versions": versions,
    }


def write_json(path: Path, report: Report, config: ParityConfig) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(to_json(report, config), indent=1) + "\n")


def parse_shape(shape: str) -> dict[str, int]:
    """Sizes by their names in ParityConfig: BxTxHxK, or BxTxHxKxV; with H as 4g8 for 4 key and 8 value heads.

    Raises ParityError for anything else.
    """
    words: Sequence[str] = shape.lower().split("x")
    heads, _, value_heads = words[2].partition("g") if len(words) > 2 else ("", "", "")
    given = {"batch": words[0], "tokens": words[1] if len(words) > 1 else "", "heads": heads}
    given |= dict(zip(("key_dim", "value_dim"), words[3:])) | ({"value_heads": value_heads} if value_heads else {})
    if len(words) not in (4, 5) or not all(size.isdecimal() for size in given.values()):
        raise ParityError(f"shape={shape!r} must be BxTxHxK or BxTxHxKxV, such as 2x128x4x64; H as 4g8 has HV = 8.")
    return {name: int(size) for name, size in given.items()}
