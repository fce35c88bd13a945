"""docs/decode.md: its code runs, in order, as a reader would type it, and its tables agree with the code."""

import contextlib
import dataclasses
import io
import json
import pathlib
import re

import pytest

from jlaqat.decode_policy import PRESETS, DecodePolicy
from jlaqat.recipes import list_configs

ROOT = pathlib.Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "decode.md").read_text()


@pytest.mark.slow
def test_code_blocks_run():
    blocks = re.findall(r"```(\w+)\n(.*?)```", TEXT, re.DOTALL)
    assert [language for language, _ in blocks] == ["python", "python", "text"]
    namespace, printed = {}, io.StringIO()
    for _, block in blocks[:2]:
        with contextlib.redirect_stdout(printed):
            exec(compile(block, "docs/decode.md", "exec"), namespace)
    assert printed.getvalue().split() == blocks[2][1].split()


def test_every_preset_is_in_the_table_and_has_a_recipe():
    table = TEXT[TEXT.index("| preset | kept as") : TEXT.index("These emulate")]
    assert set(re.findall(r"`(\w+)`", " ".join(line.split("|")[1] for line in table.splitlines() if line))) == set(
        PRESETS
    )
    assert {f"recipes/decode_{name}" for name in PRESETS} <= set(list_configs())


def test_every_field_is_in_the_table():
    table = TEXT[TEXT.index("| field | value") : TEXT.index("- The factors k and r")]
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == {f.name for f in dataclasses.fields(DecodePolicy)}


def test_the_drift_table_is_what_was_measured():
    report = json.loads((ROOT / "benchmarks/results/decode_drift.json").read_text())
    ends = {name: {k: p[k]["outputs"][-1] for k in report["kinds"]} for name, p in report["policies"].items()}
    table = TEXT[TEXT.index("| policy | state that forgets") : TEXT.index("- Where the state forgets")]
    cells = " ".join(table.split("\n", 2)[2].replace("|", " ").replace(";", " ").split())
    for name, end in ends.items():
        if not name.startswith(("INT8, head", "E4M3, cast", "E4M3, tile 32")):
            for kind, value in end.items():
                shown = [float(number) for number in re.findall(r"(?<![\w.])\d+\.\d+", cells)]
                assert any(abs(value - number) <= 0.05 * value for number in shown), (name, kind, value)
