"""docs/rounding.md: its code runs, in order, as a reader would type it, and its tables agree with the code."""

import pathlib
import re

import pytest

from jlaqat.spec import FORMATS, QuantSpec

TEXT = (pathlib.Path(__file__).parents[1] / "docs" / "rounding.md").read_text()


def test_code_blocks_run():
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert len(blocks) == 4
    namespace = {}
    for block in blocks:
        exec(compile(block, "docs/rounding.md", "exec"), namespace)


@pytest.mark.parametrize("fmt", FORMATS)
def test_format_table_names_every_format(fmt):
    constructor = {"e4m3": "fp8", "e5m2": "fp8_e5m2"}.get(fmt, fmt)
    row = next(line for line in TEXT.splitlines() if line.startswith("|") and f".{constructor}()" in line)
    assert getattr(QuantSpec, constructor)().format == fmt
    if FORMATS[fmt].kind != "cast":
        assert row.split("|")[3].strip() == f"{FORMATS[fmt].max:.0f}"
