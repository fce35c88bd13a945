"""A study's record as a table for the terminal and as a plot. Reads the record alone, so it works on committed JSON."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

_COLOURS = {"float32": "#555555", "ptq": "#c44e52", "qat": "#2a7f62", "control": "#dd8a2f"}
_TITLES = {"float32": "float32", "ptq": "PTQ", "qat": "QAT", "control": "control"}
_MAX_COLUMNS = 6
"""Settings that the plot has room for side by side; more are drawn as a grid."""


class Gain(NamedTuple):
    """What QAT scores better than the control, seed by seed; above 0 is better whichever way the score counts."""

    mean: float
    std: float | None  # of the differences over seeds, n − 1; None with one seed
    clear: bool  # |mean| above twice std: with three seeds a paired t-test's p < 0.075
    share: float | None  # of what the rounding costs the control; None where that is less than seeds differ by


def gain_over_control(record: dict[str, Any], setting: str) -> Gain:
    """How far QAT and control, trained on the same tokens and scored with the same rounding, differ in `setting`."""
    sign = 1 if record["score"]["lower_is_better"] else -1
    control, qat, floor = (_score(record, arm, setting)["scores"] for arm in ("control", "qat", "control_float32"))
    mean, std, clear = _paired(control, qat)
    cost, _, costs = _paired(control, floor)
    costs = costs and abs(cost) > statistics.stdev(floor)
    return Gain(sign * mean, std, clear, mean / cost if costs else None)


def _paired(first: list[float], second: list[float]) -> tuple[float, float | None, bool]:
    """(mean, std, clear) of the seeds' differences; one seed makes nothing clear."""
    differences = [a - b for a, b in zip(first, second)]
    mean = statistics.fmean(differences)
    std = statistics.stdev(differences) if len(differences) > 1 else None
    return mean, std, std is not None and abs(mean) > 2 * std


def _score(record: dict[str, Any], arm: str, setting: str | None) -> dict[str, Any]:
    wanted = None if arm in ("float32", "control_float32") else setting
    return next(s for s in record["scores"] if s["arm"] == arm and s["setting"] == wanted)


def _number(value: float) -> str:
    return f"{value:.4f}" if value == 0 or abs(value) >= 5e-5 else f"{value:.1e}"


def _cell(score: dict[str, Any]) -> str:
    """ "mean ± std" of an entry with these two keys."""
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
            "won back: share of rounding's cost, (PTQ − arm)/(PTQ − float32); –: cost within the spread over seeds\n"
            "QAT over control: how much better, mean ± std of the seeds' differences; ~: within twice that std;\n"
            "of its cost: as a share of what rounding costs the control; –: cost less than seeds differ by"
            + (f"\n* only scored: QAT was trained for cadence {scored[0]}" if scored else "")
        ),
        title_justify="left",
        caption_justify="left",
    )
    for title in (
        "state rounded",
        *_TITLES.values(),
        "QAT\nwon back",
        "control\nwon back",
        "QAT over\ncontrol",
        "of its\ncost",
    ):
        table.add_column(title, justify="left" if title == "state rounded" else "right", no_wrap=True)
    for setting, shares in zip(record["settings"], record["recovery"]):
        title = setting["title"]
        if setting["cadence"] != setting["trained_cadence"]:
            title += " *"
        cells = [_cell(_score(record, arm, setting["name"])) for arm in _TITLES]
        won = ["–" if shares[arm] is None else f"{shares[arm]:.0%}" for arm in ("qat", "control")]
        gain = gain_over_control(record, setting["name"])
        over = ("" if gain.clear else "~ ") + _cell({"mean": gain.mean, "std": gain.std})
        table.add_row(title, *cells, *won, over, "–" if gain.share is None else f"{gain.share:.0%}")
    return table


def print_report(record: dict[str, Any], directory: Path | None = None, console: Console | None = None) -> None:
    """The table, what it took, the restore check, and where the files are."""
    # In a file or a pipe, rich would fold the table into 80 columns.
    console = console or (Console() if sys.stdout.isatty() else Console(width=190))
    floor = _score(record, "control_float32", None)
    training = record["training"]
    lines = [
        f"control without rounding: {_cell(floor)} (what {record['config']['finetune_steps']} more updates alone do)",
        f"{sum(t['updates'] for t in training)} updates a seed in all; {sum(t['seconds'] for t in training):.0f} s "
        f"training, {sum(t['compile_seconds'] for t in training):.0f} s compiling, {record['seconds']:.0f} s in all, "
        f"peak memory {record['peak_memory_bytes'] / 2**30:.1f} GiB; {record['model']['parameters']:,} parameters",
    ]
    if parts := record.get("parts"):
        where = sorted({part["machine"]["processor"] for part in parts})
        mixed = any(part.get("versions") != parts[0].get("versions") for part in parts)
        lines.append(
            f"merged from {len(parts)} parts, each with its own float32 training; on {', '.join(where)}"
            + (", under different versions of packages (the record's parts say which)" if mixed else "")
        )
    many = len(record["restore"]) > _MAX_COLUMNS and all(restore["equal"] for restore in record["restore"])
    if many:
        lines.append(f"{len(record['restore'])} QAT models restored, every seed: scores equal to the last bit")
    for restore in () if many else record["restore"]:
        same = "equal to the last bit" if restore["equal"] else "NOT equal to the scores before saving"
        values = ", ".join(_number(x) for x in restore["scores"])
        lines.append(f"restored from checkpoints/{restore['setting']}: {values}: {same}")
    if directory is not None:
        lines.append(f"written: {directory}/study.json, study.png, checkpoints/")
    console.print(Group(study_table(record), *(Text(line) for line in lines)))


def draw_plot(record: dict[str, Any], path: str | Path) -> None:
    """PNG: scores by arm with every seed's dot; then loss along the sequence, a panel for each setting trained for.

    Of more than a few settings, scores alone: a panel for each way to round, formats across, cadences along its x axis.
    """
    import matplotlib  # here, because it takes half a second and only the plot needs it

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    if len(record["settings"]) > _MAX_COLUMNS:
        figure = _draw_grid(plt, record)
        figure.savefig(path, dpi=110)
        plt.close(figure)
        return
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
    axis.legend(fontsize=8, frameon=False, loc="upper right")


def _draw_curves(axis: Any, record: dict[str, Any], setting: dict[str, Any]) -> None:
    for arm, title in _TITLES.items():
        curve = _score(record, arm, setting["name"])["curve"]
        axis.plot(range(1, len(curve) + 1), curve, color=_COLOURS[arm], label=title, linewidth=1.2)
    axis.set_yscale("log")
    axis.set_xlabel("token")
    axis.set_ylabel("held-out loss")
    axis.set_title(setting["title"], fontsize=10)
    axis.legend(fontsize=8, frameon=False, loc="upper right")


def _draw_grid(plt: Any, record: dict[str, Any]) -> Any:
    """A figure of all scores: formats (and policies) across, rounding and error feedback down, cadences along x."""
    columns = list(dict.fromkeys(_column(s) for s in record["settings"]))
    rows = list(dict.fromkeys(_row(s) for s in record["settings"]))
    cadences = sorted({s["cadence"] for s in record["settings"]})
    figure, axes = plt.subplots(
        len(rows),
        len(columns),
        figsize=(1.2 + 3.0 * len(columns), 1.0 + 2.3 * len(rows)),
        layout="constrained",
        sharex=True,
        sharey=True,
        squeeze=False,
    )
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            axis = axes[i, j]
            members = [s for s in record["settings"] if (_row(s), _column(s)) == (row, column)]
            if members:
                _draw_cadences(axis, record, members, cadences)
            axis.set_title(f"{column}, {row}", fontsize=9)
    for axis in axes[-1]:
        axis.set_xticks(range(len(cadences)), [str(c) for c in cadences])
        axis.set_xlabel("tokens between two roundings", fontsize=8)
    if record["score"]["name"] == "mse":
        axes[0, 0].set_yscale("log")
    axes[0, 0].legend(fontsize=7, frameon=False, loc="upper right")
    figure.supylabel(f"held-out {score_title(record)}", fontsize=9)
    name = record["config"]["data"]["task"]
    figure.suptitle(f"{name}: mean of {len(record['seeds'])} seeds, and each seed's dot", fontsize=10)
    return figure


def _draw_cadences(axis: Any, record: dict[str, Any], members: list[dict[str, Any]], cadences: list[int]) -> None:
    for k, (arm, title) in enumerate(_TITLES.items()):
        x = [cadences.index(s["cadence"]) + (k - 1.5) * 0.12 for s in members]
        scores = [_score(record, arm, s["name"]) for s in members]
        axis.plot(x, [s["mean"] for s in scores], "_", color=_COLOURS[arm], markersize=9, label=title)
        for at, score in zip(x, scores):
            axis.plot([at] * len(score["scores"]), score["scores"], "o", color=_COLOURS[arm], markersize=2.5)
    floor = _score(record, "control_float32", None)["mean"]
    axis.axhline(floor, color=_COLOURS["control"], linewidth=0.8, linestyle=":", label="control, not rounded")
    axis.tick_params(labelsize=7)


def _column(setting: dict[str, Any]) -> str:
    return setting.get("policy") or setting["format"].upper()


def _row(setting: dict[str, Any]) -> str:
    return setting["rounding"] + (", error feedback" if setting.get("error_feedback") else "")
