"""What a run leaves to look at: a JSONL file, TensorBoard events, a progress bar. Written by process 0 alone."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

logger = logging.getLogger("jlaqat")

# Differ from run to run by nature: not compared when a step is computed a second time.
_TIMINGS = ("tokens_per_second", "seconds")


class JsonlLog:
    """An append-only file of one JSON object a line, each with `kind` and `step`, no pair of them twice.

    After a kill, steps since the last checkpoint are computed again: their lines are there and are not written again.
    A line cut short by the kill is removed first. Should a repeated step come out different (changed code, another
    machine), that is said once, and the first line stays.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lines: dict[tuple[str, int], dict[str, Any]] = {}
        self._warned = False
        self._drop_partial_line()
        self._file = self.path.open("a", encoding="utf-8")

    def _drop_partial_line(self) -> None:
        if not self.path.exists():
            return
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:
            os.truncate(self.path, len(whole))
        for number, line in enumerate(whole.decode(errors="replace").splitlines(), 1):
            try:
                record = json.loads(line)
                self._lines[record["kind"], record["step"]] = record
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(
                    f"{self.path}, line {number} is no record of a run: {line[:60]!r}. Remove the line, or move the "
                    "file away."
                ) from error

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> bool:
        """Appends a line unless (kind, step) has one; whether it did."""
        record = {"kind": kind, "step": step, **{k: _jsonable(v) for k, v in values.items()}}
        known = self._lines.get((kind, step))
        if known is None:
            self._lines[kind, step] = record
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
            return True
        differing = [k for k in record if k not in _TIMINGS and k in known and known[k] != record[k]]
        if differing and not self._warned:
            self._warned = True
            logger.warning(
                "step %d (%s) was logged before with other values (%s: %r then, %r now); %s keeps the first.",
                step, kind, differing[0], known[differing[0]], record[differing[0]], self.path,
            )  # fmt: skip
        return False

    def close(self) -> None:
        self._file.close()


def read_jsonl(path: str | Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The records of a log, of one kind or all, in the order of the file; a line cut short at the end is left out."""
    content = Path(path).read_text(encoding="utf-8")
    records = [json.loads(line) for line in content[: content.rfind("\n") + 1].splitlines()]
    return [r for r in records if kind is None or r["kind"] == kind]


def _jsonable(value: Any) -> Any:
    """JSON has no NaN: non-finite numbers are written as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {k: _jsonable(v) for k, v in value.items()}
    return value


class TrainLog:
    """The logs of one run in `directory`: `metrics.jsonl`, `tensorboard/`, and a progress bar on a terminal.

    start: the step that the run goes on from; what TensorBoard has from after it is superseded. A process other than 0
    gives `active=False`, and every call does nothing.
    """

    def __init__(
        self,
        directory: Path,
        *,
        total: int,
        start: int = 0,
        jsonl: bool = True,
        tensorboard: bool = True,
        progress: bool = True,
        active: bool = True,
    ) -> None:
        self._jsonl = JsonlLog(directory / "metrics.jsonl") if active and jsonl else None
        self._board = _summary_writer(directory / "tensorboard", start) if active and tensorboard else None
        self._bar: Progress | None = None
        if active and progress and sys.stderr.isatty():  # in a file or a pipe a bar is noise
            self._bar = Progress(
                TextColumn("[bold]{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
                TextColumn("{task.fields[words]}"), console=Console(stderr=True),
            )  # fmt: skip
            self._task = self._bar.add_task("train", total=total, completed=start, words="")

    def __enter__(self) -> TrainLog:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self._board is not None:
            self._board.close()
        if self._jsonl is not None:
            self._jsonl.close()

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """One record: `kind` is "train", "eval" or "quantizers"; values are numbers, or mappings of numbers."""
        if self._jsonl is not None:
            self._jsonl.write(kind, step, values)
        if self._board is not None:
            for name, value in _flat(kind, values):
                self._board.add_scalar(name, value, step)

    def advance(self, step: int, words: str) -> None:
        """Moves the bar to `step`."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step, words=words)


def _flat(prefix: str, values: Mapping[str, Any]) -> list[tuple[str, float]]:
    out: list[tuple[str, float]] = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            out += _flat(f"{prefix}/{name}", value)
        elif isinstance(value, (int, float)):
            out.append((f"{prefix}/{name}", float(value)))
    return out


def _summary_writer(directory: Path, start: int) -> Any:
    from tensorboardX import SummaryWriter  # slow to import, and not every run wants it

    return SummaryWriter(str(directory), flush_secs=10, purge_step=start + 1 if start else None)
