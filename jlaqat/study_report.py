"""A study's record as a table for the terminal and as a plot. Reads the record alone, so it works on committed JSON."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

_COLOURS = {"float32": "#555555", "ptq": "#c44e52", "qat": "#2a7f62", "control": "#dd8a2f"}
_TITLES = {"float32": "float32", "ptq": "PTQ", "qat": "QAT", "control": "control"}


def _score(record: dict[str, Any], arm: str, setting: str | None) -> dict[str, Any]:
    wanted = None if arm in ("float32", "control_float32") else setting
    return next(s for s in record["scores"] if s["arm"] == arm and s["setting"] == wanted)


def _number(value: float) -> str:
    return f"{value:.4f}" if value == 0 or abs(value) >= 5e-5 else f"{value:.1e}"


def _cell(score: dict[str, Any]) -> str:
    std = "" if score["std"] is None else f" ± {_number(score['std']) if score['std'] else '0'}"
    return _number(score["mean"]) + std


def score_title(record: dict[str, Any]) -> str:
    """What the numbers are: "tail MSE (last 25%)", "accuracy"."""
    tail = record["config"]["score_tail"]
    names = {"mse": "MSE", "accuracy": "accuracy", "loss": "loss (nats a token)"}
    name = names[record["score"]["name"]]
    return name if tail == 1 else f"tail {name} (last {tail:.0%} of the sequence)"


def study_table(record: dict[str, Any]) -> Table:
    """Settings down, arms across: mean ± standard deviation over seeds, and the share of rounding's cost won back."""
    better = "lower" if record["score"]["lower_is_better"] else "higher"
    config, count = record["config"], len(record["seeds"])
    scored = [s["trained_cadence"] for s in record["settings"] if s["cadence"] != s["trained_cadence"]]
    table = Table(
        title=(
            f"{config['data']['task']}: held-out {score_title(record)}, {better} is better; "
            f"mean ± std of {count} seed{'s' if count > 1 else ''}"
        ),
        caption=(
            "won back: share of rounding's cost, (PTQ − arm)/(PTQ − float32); –: cost within the spread over seeds"
            + (f"\n* only scored: QAT was trained for cadence {scored[0]}" if scored else "")
        ),
        title_justify="left",
        caption_justify="left",
    )
    for title in ("state rounded", *_TITLES.values(), "QAT\nwon back", "control\nwon back"):
        table.add_column(title, justify="left" if title == "state rounded" else "right", no_wrap=True)
    for setting, shares in zip(record["settings"], record["recovery"]):
        title = setting["title"]
        if setting["cadence"] != setting["trained_cadence"]:
            title += " *"
        cells = [_cell(_score(record, arm, setting["name"])) for arm in _TITLES]
        won = ["–" if shares[arm] is None else f"{shares[arm]:.0%}" for arm in ("qat", "control")]
        table.add_row(title, *cells, *won)
    return table


def print_report(record: dict[str, Any], directory: Path | None = None, console: Console | None = None) -> None:
    """The table, what it took, the restore check, and where the files are."""
    # In a file or a pipe, rich would fold the table into 80 columns.
    console = console or (Console() if sys.stdout.isatty() else Console(width=124))
    floor = _score(record, "control_float32", None)
    training = record["training"]
    lines = [
        f"control without rounding: {_cell(floor)} (what {record['config']['finetune_steps']} more updates alone do)",
        f"{sum(t['updates'] for t in training)} updates a seed in all; {sum(t['seconds'] for t in training):.0f} s "
        f"training, {sum(t['compile_seconds'] for t in training):.0f} s compiling, {record['seconds']:.0f} s in all, "
        f"peak memory {record['peak_memory_bytes'] / 2**30:.1f} GiB; {record['model']['parameters']:,} parameters",
    ]
    for restore in record["restore"]:
        same = "equal to the last bit" if restore["equal"] else "NOT equal to the scores before saving"
        values = ", ".join(_number(x) for x in restore["scores"])
        lines.append(f"restored from checkpoints/{restore['setting']}: {values}: {same}")
    if directory is not None:
        lines.append(f"written: {directory}/study.json, study.png, checkpoints/")
    console.print(Group(study_table(record), *(Text(line) for line in lines)))


def draw_plot(record: dict[str, Any], path: str | Path) -> None:
    """PNG: scores by arm with every seed's dot; then loss along the sequence, a panel for each setting trained for."""
    import matplotlib  # here, because it takes half a second and only the plot needs it

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    trained = [s for s in record["settings"] if s["cadence"] == s["trained_cadence"]]
    figure, axes = plt.subplots(
        1, 1 + len(trained), figsize=(3 + 1.6 * len(record["settings"]) + 3.6 * len(trained), 4.2), layout="constrained"
    )
    axes = axes if hasattr(axes, "__len__") else [axes]
    _draw_scores(axes[0], record)
    for axis, setting in zip(axes[1:], trained):
        _draw_curves(axis, record, setting)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw_scores(axis: Any, record: dict[str, Any]) -> None:
    for i, setting in enumerate(record["settings"]):
        for j, (arm, title) in enumerate(_TITLES.items()):
            score = _score(record, arm, setting["name"])
            x = i + (j - 1.5) * 0.2
            axis.bar(x, score["mean"], width=0.18, color=_COLOURS[arm], label=title if i == 0 else None)
            axis.plot([x] * len(score["scores"]), score["scores"], "o", color="black", markersize=2.5)
    names = [s["title"].replace(" every", "\nevery") for s in record["settings"]]
    axis.set_xticks(range(len(names)), names, fontsize=8)
    axis.set_ylabel(score_title(record))
    if record["score"]["name"] == "mse":
        axis.set_yscale("log")
    axis.set_title(f"{record['config']['data']['task']}, {len(record['seeds'])} seeds", fontsize=10)
    axis.legend(fontsize=8, frameon=False)


def _draw_curves(axis: Any, record: dict[str, Any], setting: dict[str, Any]) -> None:
    for arm, title in _TITLES.items():
        curve = _score(record, arm, setting["name"])["curve"]
        axis.plot(range(1, len(curve) + 1), curve, color=_COLOURS[arm], label=title, linewidth=1.2)
    axis.set_yscale("log")
    axis.set_xlabel("token")
    axis.set_ylabel("held-out loss")
    axis.set_title(setting["title"], fontsize=10)
    axis.legend(fontsize=8, frameon=False)
