"""tests/gpu/record.py: runs of GPU tests that are cut short and taken up again."""

import json
import pathlib
import subprocess
import sys

GPU_TESTS = pathlib.Path(__file__).parent / "gpu"
CONFTEST = f"""
import sys
sys.path.insert(0, {str(GPU_TESTS)!r})
import record

def pytest_configure(config):
    config.pluginmanager.register(record.Record("record.jsonl", "a device", writes=not hasattr(config, "workerinput")))
"""
TESTS = """
import pytest

@pytest.mark.parametrize("i", range(4))
def test_it(i):
    assert i != 2, "two is wrong"

@pytest.mark.skip
def test_skipped():
    pass
"""


def run(folder, *options):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", ".", *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout


def rows(folder):
    return [json.loads(line) for line in (folder / "record.jsonl").read_text().splitlines()]


def test_what_passed_is_not_run_again_and_failures_say_why(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_some.py").write_text(TESTS)
    first = run(tmp_path, "-n", "2")
    assert "1 failed, 3 passed, 1 skipped" in first
    outcomes = {row["test"].partition("::")[2]: row["outcome"] for row in rows(tmp_path)}
    wanted = {f"test_it[{i}]": "failed" if i == 2 else "passed" for i in range(4)} | {"test_skipped": "skipped"}
    assert outcomes == wanted
    (failed,) = (row for row in rows(tmp_path) if row["outcome"] == "failed")
    assert "two is wrong" in failed["failure"] and failed["device"] == "a device"

    again = run(tmp_path)
    assert "1 failed, 1 skipped, 3 deselected" in again

    with (tmp_path / "record.jsonl").open("a") as f:
        f.write('{"test": "cut off by')  # as a run that is killed leaves it
    assert "1 failed, 1 skipped, 3 deselected" in run(tmp_path)
    assert "1 failed, 1 skipped, 3 deselected" in run(tmp_path)
    whole = [line for line in (tmp_path / "record.jsonl").read_text().splitlines() if "cut off by" not in line]

    other = [row | {"sources": "of other code"} for row in map(json.loads, whole)]
    (tmp_path / "record.jsonl").write_text("".join(json.dumps(row) + "\n" for row in other))
    assert "1 failed, 3 passed, 1 skipped" in run(tmp_path)
