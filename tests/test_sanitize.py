"""tests/gpu/sanitizer_process.py: what it reads in reports of compute-sanitizer, and processes that are stopped."""

import pathlib
import sys
import time

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent / "gpu"))
import sanitizer_process as process

BEGIN = "========= COMPUTE-SANITIZER\n"
TWO = "launch: replay.replay_step_kernel 4\nlaunch: chunk_output.group_sum_kernel 2\n"
ALL = TWO + "launched: all\n"
NONE = {"memcheck": "========= ERROR SUMMARY: 0 errors\n"}
# compute-sanitizer prints its last line behind whatever the program printed last.
NONE["racecheck"] = "See refleaks.html========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
WRITE = """\
========= Invalid __global__ write of size 16 bytes
=========     at {kernel}+0x110 in some.py:13
=========     by thread (96,0,0) in block (0,0,0)
"""
RACE = "========= Error: Race reported between Write access at replay_step_kernel+0x150 in some.py:9\n"
KERNELS = ["chunk_output.group_sum_kernel", "replay.replay_step_kernel"]


def row_of(tool, text, code=0, run="replay-gdn-plain"):
    return {"tool": tool, "run": run} | process.read_report(BEGIN + text, tool, code)


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_clean(tool):
    row = row_of(tool, ALL + NONE[tool])
    assert (row["state"], row["launches"], row["kernels"], row["last"]) == ("clean", 2, KERNELS, None)
    assert process.failures_of([row], process.kernel_rows(KERNELS, [row], [tool]), all_runs=True) == []


@pytest.mark.parametrize(
    "text, code",
    [
        (ALL, 0),  # the tool said nothing
        (TWO + NONE["memcheck"], 0),  # not all was launched
        (ALL + NONE["memcheck"], 1),
        ("========= Error: Device not supported\n", 1),
    ],
)
def test_failed(text, code):
    row = row_of("memcheck", text, code)
    assert row["state"] == "failed" and row["said"]
    assert process.failures_of([row], [], all_runs=False) == ["memcheck replay-gdn-plain: failed"]


@pytest.mark.parametrize(
    "tool, report, errors",
    [
        ("memcheck", WRITE.format(kernel="replay_step_kernel") * 2 + "========= ERROR SUMMARY: 2 errors\n", 2),
        ("racecheck", RACE + "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n", 1),
        ("racecheck", RACE, 1),  # stopped before its summary
        ("memcheck", "========= ERROR SUMMARY: 1 error\n", 0),  # of no kernel
    ],
)
def test_errors(tool, report, errors):
    row = row_of(tool, ALL + report)
    table = process.kernel_rows(KERNELS, [row], [tool])
    assert row["state"] == "errors"
    assert [line[tool] for line in table] == [
        {"runs": 1, "clean": 0, "errors": 0},
        {"runs": 1, "clean": 0, "errors": errors},
    ]
    assert process.failures_of([row], table, all_runs=True) == [f"{tool} replay-gdn-plain: errors"]


def test_time_over():
    row = row_of("memcheck", TWO, code=None)
    assert (row["state"], row["kernels"], row["last"]) == ("time over", KERNELS[1:], KERNELS[0])
    table = process.kernel_rows(KERNELS, [row], ["memcheck"])
    assert process.failures_of([row], table, all_runs=True) == [
        "memcheck replay-gdn-plain: time over",
        f"under memcheck launched by no run: {KERNELS[0]}",
    ]


def test_planted_error_must_be_found():
    found = WRITE.format(kernel=process.PLANTED_KERNEL) + "========= ERROR SUMMARY: 128 errors\n"
    elsewhere = WRITE.format(kernel="another_kernel") + "========= ERROR SUMMARY: 1 error\n"
    for text, failures in ((found, 0), (elsewhere, 1), (ALL + NONE["memcheck"], 1)):
        row = row_of("memcheck", text, 6, process.PLANTED)
        assert len(process.failures_of([row], [], all_runs=False)) == failures


def test_only_options_that_help_lists():
    usage = "  --tool arg\n  --port arg (=49152)\n  --kernel-regex arg\n"
    command = process.tool_command("racecheck", ["b_kernel", "a_kernel"], 2, process.known_options(usage))
    named = ["--kernel-regex", "kns=a_kernel", "--kernel-regex", "kns=b_kernel"]
    assert command == ["compute-sanitizer", "--tool", "racecheck", "--port", "49192", *named]


def test_parts_side_by_side_and_stopped_at_their_limit(tmp_path):
    quick = process.Part("memcheck", "quick", ["sh", "-c", "echo launched: all; echo ERROR SUMMARY: 0 errors"])
    slow = process.Part("memcheck", "slow", ["sh", "-c", "echo launch: a.b_kernel 1; sleep 60 & wait"])
    began = time.monotonic()
    rows = {row["run"]: row for row in process.run_parts([slow, quick, slow], tmp_path, jobs=3, seconds=0.5)}
    assert time.monotonic() - began < 10
    assert rows["quick"]["state"] == "clean" and rows["slow"]["state"] == "time over"
    assert rows["slow"]["last"] == "a.b_kernel" and (tmp_path / "memcheck-slow.txt").exists()
