"""Merging the parts of a study gives the whole record back, and refuses parts that do not belong together."""

import copy
import dataclasses
import json
from pathlib import Path

import pytest

from jlaqat import cli, study_report
from jlaqat.data import DataConfig
from jlaqat.optim import OptimizerConfig
from jlaqat.study import StudyConfig, load_record, run_study
from jlaqat.study_head import HeadConfig
from jlaqat.study_merge import merge_studies

DEMO = load_record(Path(__file__).parents[1] / "benchmarks/results/study_demo.json")


def part_of(record, formats):
    """The record of the study that only has these formats, as `run_study` would have written it."""
    part = copy.deepcopy(record)
    names = {s["name"] for s in record["settings"] if s["format"] in formats}
    for field in ("scores", "training", "recovery", "restore"):
        part[field] = [row for row in part[field] if row["setting"] in names | {None}]
    part["settings"] = [s for s in part["settings"] if s["name"] in names]
    part["config"]["formats"] = list(formats)
    return part


@pytest.fixture
def parts(tmp_path):
    """Directories of the demo's two halves, and a way to change the second's record."""
    homes = [tmp_path / "nvfp4", tmp_path / "e4m3"]
    for home in homes:
        home.mkdir()
        (home / "study.json").write_text(json.dumps(part_of(DEMO, [home.name])))

    def change(edit):
        record = load_record(homes[1])
        edit(record)
        (homes[1] / "study.json").write_text(json.dumps(record))

    return homes, change


def test_parts_make_the_whole(parts, tmp_path, capsys):
    homes, _ = parts
    assert cli.main(["study-merge", *map(str, homes), "--directory", str(tmp_path / "whole")]) == 0
    whole = load_record(tmp_path / "whole")
    for field in ("settings", "scores", "recovery", "training", "data", "seeds", "code_sha256"):
        assert whole[field] == DEMO[field], field
    assert whole["config"]["formats"] == ["nvfp4", "e4m3"] and whole["config"]["cadences"] == [1]
    assert [p["settings"] for p in whole["parts"]] == [["nvfp4-1", "nvfp4-64"], ["e4m3-1", "e4m3-64"]]
    assert whole["parts"][0]["machine"] == DEMO["machine"] and whole["seconds"] == 2 * DEMO["seconds"]
    assert whole["restore"][1]["checkpoints"][0] == "e4m3/checkpoints/e4m3-1/seed0"
    assert (tmp_path / "whole/study.png").read_bytes().startswith(b"\x89PNG")
    text = capsys.readouterr().out
    assert "FP8 every token" in text and "NVFP4 every token" in text and "2 parts" in text


def test_many_settings_are_drawn_as_a_grid(tmp_path, monkeypatch):
    drawn = []
    grid = study_report._draw_grid
    monkeypatch.setattr(study_report, "_draw_grid", lambda *args: drawn.append(grid(*args)) or drawn[0])
    study_report.draw_plot(DEMO, tmp_path / "few.png")
    assert not drawn
    monkeypatch.setattr(study_report, "_MAX_COLUMNS", 3)
    study_report.draw_plot(DEMO, tmp_path / "many.png")
    nvfp4, e4m3 = drawn[0].axes
    assert [a.get_title() for a in (nvfp4, e4m3)] == ["NVFP4, nearest", "E4M3, nearest"]
    means = {line.get_label(): list(line.get_ydata()) for line in nvfp4.lines}
    expected = [s["mean"] for s in DEMO["scores"] if s["arm"] == "qat" and s["setting"].startswith("nvfp4")]
    assert means["QAT"] == expected
    assert (tmp_path / "many.png").read_bytes().startswith(b"\x89PNG")


def paired_record(control, qat, floor, lower_is_better=True):
    arms = [("control", "int8-1", control), ("qat", "int8-1", qat), ("control_float32", None, floor)]
    return {
        "score": {"lower_is_better": lower_is_better},
        "scores": [{"arm": arm, "setting": setting, "scores": scores} for arm, setting, scores in arms],
    }


@pytest.mark.parametrize("lower_is_better", [True, False])
def test_gain_over_control_is_of_pairs(lower_is_better):
    """Seeds that differ a lot, but each by about the same between the arms, leave no doubt about the difference."""
    record = paired_record([1.0, 2.0, 5.0], [0.5, 1.5, 4.4], [0.0, 1.0, 4.0], lower_is_better)
    gain = study_report.gain_over_control(record, "int8-1")
    assert gain.mean == pytest.approx((1 if lower_is_better else -1) * 1.6 / 3)
    assert gain.std == pytest.approx(0.1 / 3**0.5) and gain.clear
    assert gain.share is None  # the rounding costs 1, but seeds are further apart than that
    assert not study_report.gain_over_control(paired_record([1.0, 2.0], [0.5, 2.5], [0.0, 0.0]), "int8-1").clear


def test_gain_over_control_is_a_share_of_its_cost():
    gain = study_report.gain_over_control(paired_record([1.0, 1.1, 1.2], [0.6, 0.7, 0.8], [0.0, 0.1, 0.2]), "int8-1")
    assert gain.share == pytest.approx(0.4)
    accuracy = paired_record([0.5, 0.6], [0.6, 0.7], [0.7, 0.8], lower_is_better=False)
    assert study_report.gain_over_control(accuracy, "int8-1").share == pytest.approx(0.5)


@pytest.mark.parametrize(
    "edit,words",
    [
        (lambda r: r["config"].update(steps=900), r"differ in config.steps: 900 against 800"),
        (lambda r: r.update(code_sha256="f" * 64), "differ in code_sha256"),
        (lambda r: r.update(seeds=[3, 4, 5]), "differ in seeds"),
        (lambda r: r["versions"].update(jax="0.0.1"), "differ in versions"),
        (lambda r: r["data"].update(eval_token_sha256="0"), "differ in data.eval_token_sha256"),
        (lambda r: r["scores"][0]["scores"].__setitem__(0, 0.1), "differ in scores of arm float32"),
        (lambda r: r["scores"][1]["scores"].__setitem__(2, 0.1), "differ in scores of arm control_float32"),
        (lambda r: r["scores"][0]["curve"].__setitem__(5, 0.1), "differ in curve of arm float32"),
        (lambda r: r["training"][0]["loss"].__setitem__(3, 0.1), "differ in loss of the float32 training"),
        (lambda r: r["training"][1]["token_sha256"].__setitem__(0, "0"), "differ in tokens of the control training"),
        (lambda r: r["training"][2]["token_sha256"].__setitem__(0, "0"), "differ in tokens of QAT"),
    ],
)
def test_parts_of_different_studies_are_refused(parts, tmp_path, edit, words):
    homes, change = parts
    change(edit)
    with pytest.raises(ValueError, match=words):
        merge_studies(homes, tmp_path / "whole")
    assert not (tmp_path / "whole").exists()


def test_other_versions_are_taken_where_asked_and_recorded(parts, tmp_path):
    homes, change = parts
    change(lambda r: r["versions"].update(flax="0.0.1"))
    whole = merge_studies(homes, tmp_path / "whole", other_versions=True)
    assert [p["versions"]["flax"] for p in whole["parts"]] == [DEMO["versions"]["flax"], "0.0.1"]
    change(lambda r: r["scores"][0]["scores"].__setitem__(0, 0.1))
    with pytest.raises(ValueError, match="differ in scores of arm float32"):
        merge_studies(homes, tmp_path / "whole", other_versions=True)


def test_a_setting_given_twice_is_refused(parts, tmp_path):
    homes, _ = parts
    with pytest.raises(ValueError, match=r"setting nvfp4-1 is in .*nvfp4 and in .*nvfp4; give each once"):
        merge_studies([homes[0], *homes], tmp_path / "whole")
    with pytest.raises(ValueError, match="1 parts given; merging takes two or more"):
        merge_studies(homes[:1], tmp_path / "whole")


def test_missing_settings_are_named(parts, tmp_path):
    homes, change = parts
    change(lambda r: r["config"].update(roundings=["nearest", "stochastic"]))
    with pytest.raises(
        ValueError, match=r"4 of 8 settings are in no part: nvfp4-stochastic-1, nvfp4-stochastic-64, e4m3"
    ):
        merge_studies(homes, tmp_path / "whole")


def test_a_directory_of_something_else_is_left_alone(parts, tmp_path, capsys):
    homes, _ = parts
    home = tmp_path / "mine"
    home.mkdir()
    (home / "thesis.txt").write_text("precious")
    assert cli.main(["study-merge", *map(str, homes), "--directory", str(home)]) == 2
    assert "no study.yaml" in capsys.readouterr().err and sorted(home.iterdir()) == [home / "thesis.txt"]


@pytest.mark.slow
@pytest.mark.usefixtures("compile_quickly")
def test_parts_that_really_ran_are_merged(tmp_path, monkeypatch):
    """Two processes' worth of work: their float32 models come out equal to the bit, so the parts fit."""
    monkeypatch.setattr("jlaqat.study.code_hash", lambda: "0" * 64)  # whoever edits the package now changes no part
    config = StudyConfig(
        head=HeadConfig(vocab_size=9, key_dim=16, value_dim=16, backend="recurrent"),
        data=DataConfig(task="recall", num_pairs=4, num_values=4, num_rounds=1, seq_len=16, batch_size=2, prefix=0),
        steps=3,
        finetune_steps=2,
        seeds=2,
        formats=("int8", "nvfp4"),
        eval_batches=1,
        eval_batch_size=4,
        optimizer=OptimizerConfig(learning_rate=1e-2),
        finetune_optimizer=OptimizerConfig(learning_rate=1e-2),
    )
    homes = []
    for name in config.formats:
        homes.append(tmp_path / name)
        run_study(dataclasses.replace(config, formats=(name,)), homes[-1])
    whole = merge_studies(homes, tmp_path / "whole")
    assert [s["name"] for s in whole["settings"]] == ["int8-1", "nvfp4-1"] == [s.name for s in config.settings]
    assert whole["scores"][2:] == [s for home in homes for s in load_record(home)["scores"][2:]]
    for restore in whole["restore"]:  # where the record says, the checkpoints are
        assert restore["equal"] and all((tmp_path / path).is_dir() for path in restore["checkpoints"])
