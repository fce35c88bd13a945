"""The plots of docs/performance.md."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from kernel_rows import COMPARED, GATES, SWEEP, TARGET_SHAPES
from report_data import COLUMNS, NAMES, ROUNDED, Results, shown_shape

BOTH = "fwd+bwd"
COLOURS = {
    ROUNDED: "tab:blue",
    ("triton", "plain"): "tab:cyan",
    ("jla", "plain"): "tab:orange",
    ("fla", "plain"): "tab:green",
    ("xla", "state+w fp8"): "tab:grey",
}


def draw(results: Results, folder: Path) -> None:
    """Writes performance_time.png and performance_floors.png; a plot without data is not written."""
    time_against_tokens(results, folder / "performance_time.png")
    distance_to_floors(results, folder / "performance_floors.png")


def time_against_tokens(results: Results, path: Path) -> None:
    figure, axes = plt.subplots(1, len(GATES), figsize=(11, 4.2), sharey=True)
    drawn = False
    for axis, gate in zip(axes, GATES):
        for backend, quants in COMPARED.items():
            for quant in quants:
                points = [(int(s.split("x")[1]), results.ms(gate, BOTH, s, backend, quant)) for s in SWEEP]
                points = [(t, ms) for t, ms in points if ms is not None]
                if len(points) > 1:
                    drawn = True
                    colour, label = COLOURS[backend, quant], COLUMNS[backend, quant]
                    axis.plot(*zip(*points), marker="o", ms=4, color=colour, label=label)
        floors = [(int(s.split("x")[1]), results.floors(gate, BOTH, s)) for s in SWEEP]
        if all(floor for _, floor in floors):
            axis.plot([t for t, _ in floors], [f.ms for _, f in floors], "k:", label="floor")
        axis.set(title=f"{NAMES[gate]}, forward + backward, 1×T×16", xlabel="T", xscale="log", yscale="log")
        axis.set_xticks([1024 << i for i in range(8)], [f"{1 << i}k" for i in range(8)])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("device time, ms")
    if drawn:
        axes[0].legend()
    _save(figure, path, drawn)


def distance_to_floors(results: Results, path: Path) -> None:
    figure, axes = plt.subplots(len(TARGET_SHAPES), 2 * len(GATES), figsize=(12, 6), sharey=True)
    shown = {column: colour for column, colour in COLOURS.items() if column[0] != "xla"}
    drawn = False
    panels = [(gate, direction) for gate in GATES for direction in ("fwd", BOTH)]
    for line, shape in zip(axes, TARGET_SHAPES):
        for axis, (gate, direction) in zip(line, panels):
            floor = results.floors(gate, direction, shape)
            values = [results.least(gate, direction, shape, *column) for column in shown]
            if floor is None or not any(values):
                continue
            drawn = True
            for i, (value, colour) in enumerate(zip(values, shown.values())):
                axis.barh(i, (value or 0.0) / floor.ms, color=colour)
                axis.text((value or 0.0) / floor.ms, i, f" {value:.2f} ms" if value else " –", va="center", fontsize=8)
            axis.axvline(floor.memory_ms / floor.ms, color="k", ls="--", label="memory floor")
            axis.axvline(floor.matrix_ms / floor.ms, color="tab:red", ls=":", label="matrix floor")
            axis.set_title(f"{NAMES[gate]} {direction}, {shown_shape(shape)}", fontsize=9)
            axis.set_xlim(0, 1.3 * max(v for v in values if v) / floor.ms)
            axis.set_yticks(range(len(shown)), [COLUMNS[column] for column in shown], fontsize=8)
    axes[0, 0].invert_yaxis()
    if drawn:
        figure.legend(*axes[0, 0].get_legend_handles_labels(), fontsize=8, loc="lower right")
    figure.supxlabel("time over the larger floor")
    _save(figure, path, drawn)


def _save(figure: plt.Figure, path: Path, drawn: bool) -> None:
    figure.tight_layout()
    if drawn:
        figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)
