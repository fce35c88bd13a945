"""Imports point one way (docs/architecture.md): a module imports only what stands below it."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]

# Each layer may import the layers before it, and modules of one layer each other unless FORBIDDEN says otherwise.
LAYERS: list[set[str]] = [
    {"spec"},
    {"rounding", "recipes", "testing", "naming"},
    {"reference", "chunked"},
    {"triton_backend"},
    {"ops"},
    {"quantizers"},
    {"layers", "checkpoint", "data"},
    {"model"},
    {"training"},
    {"study"},
    {"cli"},
]
# A module split over several files keeps the rank of the one it was split from.
PART_OF: dict[str, str] = {
    "quant_fields": "quantizers",
    "quant_cfg": "quantizers",
    "decode_rules": "quantizers",
    "quantizer": "quantizers",
    "calibration": "quantizers",
    "quantizer_report": "quantizers",
    "blocks": "layers",
    "delta_layer": "layers",
    "attention": "layers",
    "weights": "layers",
    "generation": "model",
    **dict.fromkeys(("data_synthetic", "data_text"), "data"),
    **dict.fromkeys(("study_arms", "study_config", "study_head", "study_merge", "study_report"), "study"),
    "cli_summary": "cli",
    **dict.fromkeys(("parity", "parity_report"), "cli"),
    "parity_files": "spec",
    **dict.fromkeys(("packing", "pairs", "recurrent", "shards", "sites"), "chunked"),
    "compile_cache": "triton_backend",
    "kernel_calls": "triton_backend",
    **dict.fromkeys(("checks", "observe", "backends", "op_shards"), "ops"),
    **dict.fromkeys(("decode", "decode_checks", "decode_counters", "decode_replay_triton", "decode_triton"), "ops"),
    **dict.fromkeys(("decode_carry", "decode_scan", "decode_reference"), "chunked"),
    "decode_policy": "spec",
    "arithmetic": "rounding",
    "philox": "rounding",
    "scales": "rounding",
    "statistics": "rounding",
    **dict.fromkeys(("checkpoint_quantizers", "checkpoint_tree", "export"), "checkpoint"),
    **dict.fromkeys(
        ("diagnosis", "evaluation", "optim", "preemption", "sharding", "train_config", "train_log", "train_step"),
        "training",
    ),
}
FORBIDDEN = {
    ("recipes", "rounding"),
    ("data", "quantizers"),
    ("data", "ops"),
    ("checkpoint", "layers"),
    ("checkpoint", "data"),
}


def modules() -> dict[str, pathlib.Path]:
    return {p.stem: p for p in sorted((ROOT / "jlaqat").glob("*.py")) if p.stem not in ("__init__", "__main__")}


def imported(path: pathlib.Path) -> set[str]:
    """Names of jlaqat modules that a file imports, inside functions included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "jlaqat":
            parts = node.module.split(".")
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("jlaqat.")}
    return found


def rank(name: str) -> int:
    name = PART_OF.get(name, name)
    for i, layer in enumerate(LAYERS):
        if name in layer:
            return i
    raise AssertionError(
        f"jlaqat/{name}.py has no place in the import order; add it to LAYERS or PART_OF in {__file__}."
    )


@pytest.mark.parametrize("name", modules())
def test_module_imports_only_what_stands_below(name):
    mine = rank(name)
    for other in imported(modules()[name]) & set(modules()):
        assert rank(other) <= mine, f"{name} imports {other}, which stands above it"
        pair = (PART_OF.get(name, name), PART_OF.get(other, other))
        assert pair not in FORBIDDEN, f"{pair[0]} must not import {pair[1]}"


@pytest.mark.parametrize("folder", ["kernels", "torch_bridge"])
def test_linked_folders_keep_to_their_frameworks(folder):
    """kernels import no framework, the bridge no JAX; and kernels shadows no package of its name, as PyPI has one."""
    assert not (ROOT / "kernels" / "__init__.py").exists(), (
        "an __init__.py would shadow PyPI's package in the working directory"
    )
    banned = {"jax", "flax", "torch"} if folder == "kernels" else {"jax", "flax"}
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = (
                [a.name for a in node.names] if isinstance(node, ast.Import)
                else [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            )  # fmt: skip
            roots = {n.split(".")[0] for n in names}
            if folder == "torch_bridge" and path.name == "parity.py":
                continue  # the one file that sets both frameworks side by side
            assert not roots & banned, f"{path.relative_to(ROOT)} imports {roots & banned}"


def test_nothing_imports_the_bridge():
    for name, path in modules().items():
        if name != "cli":  # `jlaqat parity` starts it
            assert "torch_bridge" not in imported(path), f"{name} imports torch_bridge"


def test_spec_needs_only_the_standard_library():
    code = (
        "import sys, importlib.util as u; s = u.spec_from_file_location('spec', 'jlaqat/spec.py');"
        "m = u.module_from_spec(s); sys.modules['spec'] = m; s.loader.exec_module(m);"
        "print('jax' in sys.modules, 'numpy' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert out.split() == ["False", "False"]
