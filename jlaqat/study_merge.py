"""One study from several: `merge_studies` joins the records of a factorial that ran in parts, one process each.

    jlaqat study --config study/decode_recall --directory runs/a 'formats=[int8]'
    jlaqat study --config study/decode_recall --directory runs/b 'formats=[nvfp4]'
    jlaqat study-merge runs/a runs/b --directory runs/both

Every part trains its own float32 and control models, so parts belong together only if those are the same models: same
config (but for what says which settings there are), code, versions, seeds, tokens, and scores to the last bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jlaqat.recipes import load_config, to_dict
from jlaqat.study import RECORD_VERSION, load_record, prepare_directory, save_record
from jlaqat.study_config import StudyConfig

Record = dict[str, Any]

AXES = ("formats", "roundings", "cadences", "error_feedback", "policies")
"""The fields of a StudyConfig that parts may differ in."""


def merge_studies(parts: Sequence[str | Path], directory: str | Path, *, other_versions: bool = False) -> Record:
    """Writes study.json and study.png of the whole study under `directory`; returns the record.

    parts: directories of studies or their study.json, two or more. Checkpoints stay where they are. The record's
    `parts` says what each part ran, where, under which versions and for how long.
    other_versions: parts may have run under other versions of Python and packages. Their float32 models must still
    score the same, to the last bit.

    Raises ValueError, before anything is written, if the parts do not belong together (naming a difference), if a
    setting is in two of them, if the settings are not all of formats × roundings × cadences × error_feedback (naming
    those missing), or if `directory` holds something else than a study; FileNotFoundError for a part without a record.
    """
    paths = [Path(part) for part in parts]
    if len(paths) < 2:
        raise ValueError(f"{len(paths)} parts given; merging takes two or more.")
    records = [load_record(path) for path in paths]
    for path, record in zip(paths[1:], records[1:]):
        _check_same(paths[0], records[0], path, record, but=("versions",) if other_versions else ())
    config = _whole_config([load_config(StudyConfig, record["config"]) for record in records])
    record = _join(config, paths, records)
    directory = Path(directory)
    prepare_directory(directory, config)
    save_record(record, directory)
    return record


# ------------------------------------------------------------------ do they belong together?


def _identity(record: Record) -> Record:
    """What parts must share, by the name that an error calls it."""
    whole = load_config(StudyConfig, record["config"])  # through the class, so that defaults count as given
    identity = {f"config.{k}": v for k, v in to_dict(whole).items() if k not in AXES}
    identity |= {f"data.{k}": v for k, v in record["data"].items()}
    identity |= {key: record[key] for key in ("score", "seeds", "model", "code_sha256", "versions")}
    for arm in ("float32", "control", "control_float32"):
        for training in record["training"]:
            if training["arm"] == arm:
                identity[f"tokens of the {arm} training"] = training["token_sha256"]
                identity[f"updates of the {arm} training"] = training["updates"]
                identity[f"loss of the {arm} training"] = training["loss"]
        for score in record["scores"]:
            if score["arm"] == arm and score["setting"] is None:
                identity[f"scores of arm {arm}"] = score["scores"]
                identity[f"curve of arm {arm}"] = score["curve"]
    identity["tokens of QAT"] = sorted({tuple(t["token_sha256"]) for t in record["training"] if t["arm"] == "qat"})
    return identity


def _check_same(first_path: Path, first: Record, path: Path, record: Record, *, but: tuple[str, ...]) -> None:
    mine, theirs = _identity(first), _identity(record)
    for name in sorted((mine.keys() | theirs.keys()) - set(but)):
        if mine.get(name) != theirs.get(name):
            raise ValueError(
                f"{path} and {first_path} differ in {name}: {theirs.get(name)!r} against {mine.get(name)!r}. Parts of "
                f"a study share everything but {', '.join(AXES)}; run them again with the same code, config and kind "
                "of machine."
            )


def _whole_config(configs: Sequence[StudyConfig]) -> StudyConfig:
    """The config whose settings are those of all parts, each axis in the order in which the parts bring its values."""
    axes: dict[str, Any] = {name: tuple(dict.fromkeys(x for c in configs for x in getattr(c, name))) for name in AXES}
    return dataclasses.replace(configs[0], **axes)


# ------------------------------------------------------------------ the whole record


def _join(config: StudyConfig, paths: Sequence[Path], records: Sequence[Record]) -> Record:
    homes: dict[str, tuple[Path, Record]] = {}
    for path, record in zip(paths, records):
        for setting in record["settings"]:
            if setting["name"] in homes:
                raise ValueError(
                    f"setting {setting['name']} is in {homes[setting['name']][0]} and in {path}; give each once."
                )
            homes[setting["name"]] = path, record
    names = [setting.name for setting in config.settings]
    missing = [name for name in names if name not in homes]
    if missing:
        raise ValueError(
            f"{len(missing)} of {len(names)} settings are in no part: {', '.join(missing)}. Run them, in parts of "
            "their own, or leave out the parts that bring their format, rounding, cadence or error feedback."
        )

    def rows(field: str, key: str = "setting") -> list[Any]:
        """The entries of `field` that belong to a setting, in the order of the settings."""
        return [row for name in names for row in homes[name][1][field] if row[key] == name]

    first = records[0]
    restores = []
    for row in rows("restore"):
        home = homes[row["setting"]][0]
        home = home.parent if home.suffix == ".json" else home
        restores.append({**row, "checkpoints": [f"{home.name}/{name}" for name in row["checkpoints"]]})
    return {
        "record_version": RECORD_VERSION,
        **{key: first[key] for key in ("score", "seeds", "data", "model", "code_sha256", "versions", "machine")},
        "settings": rows("settings", "name"),
        "scores": [s for s in first["scores"] if s["setting"] is None] + rows("scores"),
        "recovery": rows("recovery"),
        "training": [t for t in first["training"] if t["setting"] is None] + rows("training"),
        "restore": restores,
        "config": to_dict(config),
        "seconds": sum(r["seconds"] for r in records),
        "seconds_scoring": sum(r["seconds_scoring"] for r in records),
        "peak_memory_bytes": max(r["peak_memory_bytes"] for r in records),
        "parts": [_part_entry(record) for record in records],
    }


def _part_entry(record: Record) -> Record:
    return {
        "settings": [setting["name"] for setting in record["settings"]],
        **{key: record[key] for key in ("machine", "versions", "seconds", "seconds_scoring", "peak_memory_bytes")},
    }
