"""docs/quantizers.md is run: its Python blocks in order, the outputs it shows, its YAML, and the recipes it lists."""

import contextlib
import io
import pathlib
import re

import pytest
import yaml

from jlaqat.quant_cfg import HANDLES, plan
from jlaqat.recipes import list_configs

ROOT = pathlib.Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docs/quantizers.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)


def run_blocks():
    """(code, what it printed, what the page shows) of each Python block, in one namespace."""
    namespace: dict = {}
    for (language, code), (after, shown) in zip(BLOCKS, [*BLOCKS[1:], ("", "")]):
        if language == "python":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(code, "docs/quantizers.md", "exec"), namespace)
            yield code, printed.getvalue(), shown if after == "text" else ""


def same(printed, shown):
    """Equal up to trailing blanks and the last digits of numbers."""
    if printed.split() == shown.split():
        return True
    words = list(zip(printed.split(), shown.split(), strict=True))
    return all(a == b or float(a) == pytest.approx(float(b), rel=0.1) for a, b in words)


@pytest.mark.slow
def test_the_page_does_what_it_shows():
    checked = 0
    for code, printed, shown in run_blocks():
        assert same(printed, shown), f"{code}\nprinted:\n{printed}"
        checked += bool(shown)
    assert checked == 6


def test_yaml_blocks_are_recipes():
    sites = {f"layers.0.mixer.{handle}": site for handle, site in HANDLES.items()}
    recipes = [yaml.safe_load(code)["quant"] for language, code in BLOCKS if language == "yaml"]
    assert recipes and all(any(s.enabled for s in plan(recipe, sites).values()) for recipe in recipes)


def test_every_packaged_recipe_is_in_the_table():
    table = TEXT[TEXT.index("| recipe | emulates") :]
    names = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    listed = set(re.findall(r"`(\w+)`", "\n".join(names)))
    packaged = {name.removeprefix("recipes/") for name in list_configs() if name.startswith("recipes/")}
    assert packaged <= listed, f"not in docs/quantizers.md: {packaged - listed}"
