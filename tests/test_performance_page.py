"""docs/performance.md is what benchmarks/report.py makes of the committed JSON; what numbers pass through before."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture(autouse=True)
def scripts_importable(monkeypatch):
    """The benchmarks are scripts beside each other, not a package."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_page_is_current():
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "report.py"), "--check"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_device_time_counts_overlap_once_and_gaps_not_at_all():
    from device_time import Event, busy_ns, per_call

    one_call = [("a", 0, 10), ("b", 5, 12), ("inside", 6, 7), ("c", 20, 30)]
    events = [
        Event(name, 1e6 * (100 * i + start), 1e6 * (100 * i + end)) for i in range(3) for name, start, end in one_call
    ]
    assert busy_ns(events[:4]) == 22e6
    found = per_call(list(reversed(events)), 3)
    assert (found.ms, found.ms_min, found.ms_max) == (22, 22, 22)
    assert found.kernels == {"a": 10, "c": 10, "b": 7, "inside": 1}
    with pytest.raises(RuntimeError, match="11 events of 3 equal calls"):
        per_call(events[:-1], 3)


def test_floors_are_those_counted_by_hand():
    from floors import floors

    # GDN forward at 8x4096x16: q, k, v, o of 134 MB each, gates of 3 MB, states of 8 MB, at 4.3 TB/s.
    found = floors("gdn", "8x4096x16", "fwd", 4.3, 790.0)
    assert found.memory_ms == pytest.approx((4 * 134.2 + 3.1 + 8.4) / 4300, rel=1e-3)
    # 8192 chunks of 5 products of 64x64x128 and 3 of 64x128x128.
    assert found.matrix_ms == pytest.approx(8192 * 2 * (5 * 64 * 64 * 128 + 3 * 64 * 128 * 128) / 790e9)
    assert found.ms == found.memory_ms
    assert floors("kda", "8x4096x16", "fwd", 4.3, 790.0).memory_ms == pytest.approx(
        found.memory_ms + 266.3 / 4300, rel=1e-3
    )
    assert floors("gdn", "1x64x1g2x64", "fwd+bwd", 1e-9, 1e9).memory_ms == pytest.approx(
        3 * (2 * 2 * 64 * 64 + 2 * 2 * 64 * 64 + 2 * 64 * 6) + 2 * 2 * (2 * 64 * 64) + 2 * 64 * 64 * 4
    )


def test_residuals_leave_out_what_is_there_anyway():
    import jax
    import jax.numpy as jnp
    from kernel_calls import residual_bytes

    x = jax.ShapeDtypeStruct((100,), jnp.float32)
    assert residual_bytes(lambda x: (x * x,), x) == 0  # the input itself
    assert residual_bytes(lambda x: (jnp.sin(x),), x) == 400  # its cosine
    assert residual_bytes(lambda x: (jnp.exp(x),), x) == 0  # the output itself


def test_stages_name_every_row_once():
    from kernel_rows import STAGES, Row, identity

    rows = list(dict.fromkeys(row for stage in STAGES.values() for row in stage))
    assert len({identity(row.fields()) for row in rows}) == len(rows)
    assert all(Row.parse(row.text()) == row for row in rows)
    assert {row.backend for row in rows} == {"triton", "jla", "fla", "xla"}
    assert {row.shape for row in STAGES["targets"]} == {"8x4096x16", "1x8192x16"}


def test_rows_that_are_there_are_not_planned_again(tmp_path):
    import argparse

    from bench_kernels import planned
    from kernel_rows import TARGET_SHAPES, append

    chosen = dict(backends="triton,jla", gates="kda", quants="plain", passes="fwd")
    asked = argparse.Namespace(shapes=None, again=False, out=tmp_path / "rows.json", **chosen)
    rows = planned(asked, "targets")
    assert [(row.backend, row.shape) for row in rows] == [(b, s) for b in ("triton", "jla") for s in TARGET_SHAPES]
    append(asked.out, rows[1].fields() | {"ms": 1.0})
    assert planned(asked, "targets") == rows[:1] + rows[2:]
    asked.again = True
    assert planned(asked, "targets") == rows


def test_a_row_replaces_its_older_self(tmp_path):
    from kernel_rows import STAGES, append, load

    path = tmp_path / "rows.json"
    first, second = (row.fields() for row in STAGES["targets"][:2])
    for row in (first | {"ms": 1.0}, second | {"ms": 2.0}, first | {"ms": 3.0}):
        append(path, row)
    assert [row["ms"] for row in load(path)] == [2.0, 3.0]
