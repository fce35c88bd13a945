"""The wheel and the source archive, tried from outside the repository; and the set-up script's choice of Python."""

import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]


def run(*command, **kwargs):
    done = subprocess.run(command, capture_output=True, text=True, **kwargs)
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> pathlib.Path:
    """A wheel built through the source archive, from a copy of the files that git knows."""
    work = tmp_path_factory.mktemp("build")
    source = work / "source"
    listed = run("git", "ls-files", "-co", "--exclude-standard", cwd=ROOT).splitlines()
    for name in listed:
        if (ROOT / name).is_symlink() or (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name, follow_symlinks=False)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(work / "dist"), str(source))
    (built,) = (work / "dist").glob("*.whl")
    return built


def test_wheel_brings_exactly_one_top_level_name(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {n.split("/")[0] for n in names if ".dist-info/" not in n} == {"jlaqat"}
    assert "jlaqat/py.typed" in names and "jlaqat/spec.py" in names
    for folder, pattern in (
        ("configs", "*.yaml"),
        ("kernels", "*.py"),
        ("kernels", "tuned/*.json"),
        ("torch_bridge", "*.py"),
    ):
        wanted = {f"jlaqat/{folder}/{p.relative_to(ROOT / folder)}" for p in (ROOT / folder).rglob(pattern)}
        assert wanted and wanted <= set(names), f"missing from the wheel: {wanted - set(names)}"


def test_wheel_works_outside_the_repository(wheel, tmp_path):
    site = tmp_path / "site"
    run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(site), str(wheel))
    code = (
        "import jlaqat, pathlib, jlaqat.cli, jlaqat.recipes; print(pathlib.Path(jlaqat.__file__).parent);"
        "print(len(jlaqat.recipes.load_recipe('state_fp8')))"
    )
    env = {**os.environ, "PYTHONPATH": str(site), "JAX_PLATFORMS": "cpu"}
    location, entries = run(sys.executable, "-P", "-c", code, cwd=tmp_path, env=env).split()
    assert pathlib.Path(location) == site / "jlaqat", "the editable install was tested instead of the wheel"
    assert int(entries) >= 1


def fake_python(folder: pathlib.Path, name: str, body: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{body}\n")
    (folder / name).chmod(0o755)


def setup_in(tmp_path, path: str, **env):
    """scripts/setup.sh in a bare copy with its own PATH and HOME; the project file is empty, so pip fails early."""
    project = tmp_path / "project"
    (project / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts/setup.sh", project / "scripts/setup.sh")
    for name in ("pyproject.toml", "constraints.txt"):
        (project / name).write_text("")
    env = {"PATH": path, "HOME": str(tmp_path), "PYENV_ROOT": str(tmp_path / "none"), **env}
    return subprocess.run(["bash", "scripts/setup.sh"], cwd=project, env=env, capture_output=True, text=True)


def tools_only(tmp_path) -> str:
    """A PATH with the shell's tools and no Python."""
    folder = tmp_path / "tools"
    folder.mkdir()
    for tool in ("bash", "cat", "cksum", "dirname", "rm", "grep", "tail", "env"):
        (folder / tool).symlink_to(shutil.which(tool))
    return str(folder)


def test_setup_without_a_python_says_so_once(tmp_path):
    # Absolute places that the script also tries may hold a Python on this machine: then this test has nothing to show.
    if any(pathlib.Path("/usr/local/bin").glob("python3.1[2-9]")) or any(
        pathlib.Path("/opt").glob("*/bin/python3.1[2-9]")
    ):
        pytest.skip("this machine has a Python >= 3.12 in a place that the script tries by absolute path")
    done = setup_in(tmp_path, tools_only(tmp_path))
    assert done.returncode == 1
    assert "no usable Python 3.12 or newer" in done.stderr and "JLAQAT_PYTHON=" in done.stderr
    assert "Traceback" not in done.stderr


def test_setup_passes_over_a_shim_that_fails(tmp_path):
    bin_ = tmp_path / "bin"
    fake_python(bin_, "python3.12", 'echo "pyenv: python3.12: command not found" >&2; exit 127')
    fake_python(bin_, "python3.13", f'exec "{sys.executable}" "$@"')
    done = setup_in(tmp_path, f"{bin_}:{tools_only(tmp_path)}")
    assert f"({bin_}/python3.13)" in done.stdout, done.stdout + done.stderr


def test_setup_refuses_a_named_python_that_does_not_run(tmp_path):
    done = setup_in(tmp_path, tools_only(tmp_path), JLAQAT_PYTHON="/nowhere/python3.12")
    assert done.returncode == 1 and "JLAQAT_PYTHON=/nowhere/python3.12" in done.stderr
