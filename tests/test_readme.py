"""README.md is run: its Python blocks in order, and its links."""

import pathlib
import re

import jax
import jax.numpy as jnp
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_link_leads_somewhere():
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
            assert target.startswith("http") or (page.parent / target).exists(), f"{page.name} links to {target}"


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
