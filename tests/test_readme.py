"""README.md and the pages: their Python runs, their links and names lead somewhere, their numbers are the records'.

Pages with tests of their own: quantizers, rounding, decode, training, layers, performance.
"""

import importlib
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest

import jlaqat

ROOT = pathlib.Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def anchors(page):
    """What a page's headings are called in links, as GitHub forms it."""
    prose = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", prose, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_and_every_name_leads_somewhere(page):
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        target, _, anchor = link.partition("#")
        file = page.parent / target if target else page
        assert link.startswith("http") or file.exists(), f"{page.name} links to {link}"
        assert link.startswith("http") or not anchor or anchor in anchors(file), f"{page.name}: no heading for {link}"
    for file in re.findall(
        r"`((?:jlaqat|tests|kernels|benchmarks|configs|docs|scripts|torch_bridge)/[\w./*-]+)`", text
    ):
        assert list(ROOT.glob(file.rstrip("/"))), f"{page.name} names {file}"
    for name in re.findall(r"`jlaqat\.([a-zA-Z_.]+[a-zA-Z_])", text):
        found = jlaqat
        for i, part in enumerate(parts := name.split(".")):
            if not hasattr(found, part):
                importlib.import_module(".".join(["jlaqat", *parts[: i + 1]]))
            found = getattr(found, part)


def test_public_names_have_docstrings_of_their_own():
    assert "delta_rule" in jlaqat.__all__ and "train" in jlaqat.__all__ and "importlib" not in jlaqat.__all__
    for name in jlaqat.__all__:
        assert vars(getattr(jlaqat, name)).get("__doc__") or getattr(jlaqat, name).__doc__, name


def test_the_table_of_the_demo_is_the_record():
    record = json.loads((ROOT / "benchmarks/results/study_demo.json").read_text())
    means = {(s["setting"], s["arm"]): s["mean"] for s in record["scores"]}
    rows = [re.findall(r"(?<!\w)\.\d+", line) for line in TEXT.splitlines() if re.match(r"\| \w+, every", line)]
    for shown, setting in zip(rows, ("nvfp4-1", "e4m3-1", "nvfp4-64"), strict=True):
        arms = [means[None, "float32"], *(means[setting, arm] for arm in ("ptq", "qat", "control"))]
        assert len(shown) == 4
        for text, mean in zip(shown, arms):
            assert abs(float(text) - mean) <= 0.5001 * 10.0 ** -(len(text) - 1), (setting, text, mean)


@pytest.mark.parametrize("page", ["data.md", "study.md", pytest.param("delta_rule.md", marks=pytest.mark.slow)])
def test_the_pages_python_runs(page):
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, page, "exec"), {})


def test_every_page_is_linked_from_the_readme():
    pages = {p.name for p in (ROOT / "docs").glob("*.md")}
    assert pages == {name for name in pages if f"(docs/{name})" in TEXT}


@pytest.mark.slow
def test_the_python_blocks_run():
    train, operation = re.findall(r"^```python\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)
    namespace: dict = {}
    exec(compile(train, "README.md", "exec"), namespace)
    assert jnp.isfinite(namespace["step"](namespace["model"], namespace["optimizer"], namespace["tokens"]))
    q = k = jnp.ones((1, 70, 2, 16)) / 4
    namespace |= {
        "q": q,
        "k": k,
        "v": jnp.ones((1, 70, 2, 32)),
        "g": -jnp.ones((1, 70, 2)),
        "beta": jnp.ones((1, 70, 2)) / 2,
    }
    exec(compile(operation, "README.md", "exec"), namespace)
    assert namespace["final_state"].shape == (1, 2, 16, 32) and jax.numpy.isfinite(namespace["o"]).all()
