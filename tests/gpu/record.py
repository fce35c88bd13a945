"""What tests/gpu has passed, test by test, for a machine whose time ends before the tests do.

    python3 -m pytest tests/gpu -n 8 --record gpu_tests.jsonl

With the same file again, tests that have passed on these sources are left out. A line a test, written as it ends, so
that a run killed at its limit loses only the tests in flight; failures are also printed at once. `sources` is a hash of
the code that a test may run (jlaqat, kernels, torch_bridge and the tests).
"""

import contextlib
import datetime
import hashlib
import json
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def sources():
    """Sixteen hex digits that change with any file of the package, its kernels' tables or its tests."""
    digest = hashlib.sha256()
    for folder in ("jlaqat", "kernels", "torch_bridge", "tests"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".json"):
                digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


class Record:
    """A pytest plugin that reads the file and, in one process of a run, appends to it."""

    def __init__(self, path, device, writes):
        self.path, self.device, self.writes, self.sources = pathlib.Path(path), device, writes, sources()

    def passed(self):
        """Names of the tests that passed on these sources."""
        rows = []
        for line in self.path.read_text().splitlines() if self.path.exists() else []:
            with contextlib.suppress(ValueError):  # a line that a killed run left half written: its test runs again
                rows.append(json.loads(line))
        last = {row["test"]: row["outcome"] for row in rows if row["sources"] == self.sources}
        return {test for test, outcome in last.items() if outcome == "passed"}

    def _cut_off(self):
        """Whether the file ends in the middle of a line."""
        text = self.path.read_bytes() if self.path.exists() else b""
        return bool(text) and not text.endswith(b"\n")

    def pytest_collection_modifyitems(self, config, items):
        passed = self.passed()
        done = [item for item in items if item.nodeid in passed]
        config.hook.pytest_deselected(items=done)
        items[:] = [item for item in items if item.nodeid not in passed]

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report):
        if not self.writes or (report.when != "call" and report.outcome == "passed"):
            return
        row = {
            "test": report.nodeid,
            "outcome": report.outcome,
            "seconds": round(report.duration, 1),
            "sources": self.sources,
            "device": self.device,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }
        if report.failed:
            row["failure"] = str(report.longrepr)[-4000:]
            print(f"\nFAILED {report.nodeid}\n{row['failure']}", flush=True)
        with self.path.open("a") as f:
            f.write("\n" * self._cut_off() + json.dumps(row) + "\n")
