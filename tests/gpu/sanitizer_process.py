"""compute-sanitizer as a process: its options, parts side by side with a time limit each, and what a report says.

A part prints `launch: NAME` before it launches a kernel, waits for the kernel, and ends with `launched: all`, so that
what it did before its time was over is known. Imports neither torch nor triton.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

PROGRAM = "compute-sanitizer"
LAUNCH = "launch: "
LAUNCHED = "launched: "
PLANTED, PLANTED_KERNEL = "planted", "write_past_the_end_kernel"  # the run with an error on purpose
SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error.*|RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) error.*")
FIRST_PORT = 49152
# Every array is an allocation of its own, so that memcheck sees where it ends. A core runs several parts.
ENVIRONMENT = {
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    "JAX_PLATFORMS": "cpu",
    "OMP_NUM_THREADS": "1",
    "CUDA_MODULE_LOADING": "LAZY",
}


@dataclasses.dataclass(frozen=True)
class Part:
    """A run, and the tool it goes under; without one it only compiles."""

    tool: str | None
    name: str
    command: Sequence[str]

    @property
    def label(self) -> str:
        return f"{self.tool or 'compile'}-{self.name}"


def said_by_program(option: str) -> str:
    done = subprocess.run([PROGRAM, option], capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr


def known_options(usage: str) -> set[str]:
    """Names, without hyphens before them, that compute-sanitizer's --help lists: versions differ."""
    return set(re.findall(r"--([a-z][\w-]*)", usage))


def tool_command(tool: str, kernels: Iterable[str], index: int, known: set[str]) -> list[str]:
    """compute-sanitizer with those of its options that it knows, for a part with an index of its own.

    kernels: names of those to look into. PyTorch's are many and large, and are left as they are.
    """
    options = {
        # Calls of the driver that fail are no error: Triton's loader asks for memory that the tool has taken.
        "report-api-errors": "no",
        "print-limit": "50",
        "show-backtrace": "device",  # a host's goes through all of Python and takes long
        "target-processes": "application-only",  # not ptxas
        "launch-timeout": "120",  # seconds until the program is there; many start side by side
        "port": str(FIRST_PORT + 20 * index),  # or parts that start at once meet at one
    }
    if tool == "racecheck":
        options["racecheck-num-workers"] = "2"
    command = [PROGRAM, "--tool", tool]
    for option, value in options.items():
        command += [f"--{option}", value] if option in known else []
    select = next((x for x in ("kernel-name", "kernel-regex") if x in known), None)
    for kernel in sorted(set(kernels)) if select else []:
        command += [f"--{select}", f"kns={kernel}"]
    return command


def read_report(text: str, tool: str | None, code: int | None) -> dict:
    """What a part printed, as a row. code: its exit status, None if its time was over.

    state: "clean" only if all was launched, the program ended well, and the tool's summary counts no error; "errors" if
    the tool reported any, even without a summary; else "time over" or "failed". kernels: those that came through.
    """
    launches = re.findall(rf"^{LAUNCH}([\w.]+)", text, re.M)
    ended = re.search(rf"^{LAUNCHED}", text, re.M) is not None
    found = SUMMARY.search(text)
    errors = int(found.group(1) or found.group(2)) if found else None
    errors_at = collections.Counter(re.findall(r"^=========.*\bat (\w+_kernel)\b", text, re.M))
    if errors or errors_at:
        state = "errors"
    elif code is None:
        state = "time over"
    else:
        state = "clean" if ended and code == 0 and (errors == 0 or tool is None) else "failed"
    row: dict = {"state": state, "exit_status": code, "launches": len(launches)}
    row |= {"summary": found.group(0) if found else None, "errors_at": dict(errors_at)}
    # Each launch is waited for: all but the last came through.
    row |= {
        "kernels": sorted(set(launches if ended else launches[:-1])),
        "last": None if ended else (launches or [None])[-1],
    }
    if state != "clean":
        lines = [line for line in text.splitlines() if line.strip()]
        reported = [line for line in lines if line.startswith("=========") and PROGRAM.upper() not in line]
        row["said"] = reported[:6] + lines[-3:]
    return row


def start(part: Part, log: Path) -> tuple[subprocess.Popen, Path]:
    path = log / f"{part.label}.txt"
    with path.open("w") as f:
        process = subprocess.Popen(
            part.command, stdout=f, stderr=subprocess.STDOUT, env=os.environ | ENVIRONMENT, start_new_session=True
        )
    return process, path


def stop(process: subprocess.Popen) -> None:
    """The tool and the program under it, which are a group of their own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_parts(parts: Iterable[Part], log: Path, jobs: int, seconds: float) -> Iterator[dict]:
    """A row as each part ends, at most `jobs` at once; one that takes longer than `seconds` is stopped."""
    waiting = collections.deque(parts)
    going: list[tuple[Part, subprocess.Popen, Path, float]] = []
    try:
        while waiting or going:
            while waiting and len(going) < jobs:
                part = waiting.popleft()
                going.append((part, *start(part, log), time.monotonic()))
            time.sleep(0.1)
            for job in list(going):
                part, process, path, began = job
                code, took = process.poll(), time.monotonic() - began
                if code is None and took < seconds:
                    continue
                stop(process)
                going.remove(job)
                report = read_report(path.read_text(errors="replace"), part.tool, code)
                yield {"tool": part.tool, "run": part.name, "seconds": round(took, 1)} | report
    finally:
        for _, process, *_ in going:
            stop(process)


def kernel_rows(kernels: Iterable[str], rows: Sequence[dict], tools: Iterable[str]) -> list[dict]:
    """By kernel, as module.name, and tool: in how many runs it came through, how many of them were clean, errors there.

    A tool knows the name alone: its errors count for a kernel in the runs that launched it.
    """
    table = []
    for kernel in kernels:
        line: dict = {"kernel": kernel}
        for tool in tools:
            ran = [row for row in rows if row["tool"] == tool and kernel in (*row["kernels"], row["last"])]
            line[tool] = {
                "runs": sum(kernel in row["kernels"] for row in ran),
                "clean": sum(row["state"] == "clean" for row in ran),
                "errors": sum(row["errors_at"].get(kernel.split(".")[1], 0) for row in ran),
            }
        table.append(line)
    return table


def failures_of(rows: Sequence[dict], table: Sequence[dict], all_runs: bool) -> list[str]:
    """What is wrong. all_runs: under each tool, each kernel must have come through in one."""
    failures = []
    for row in rows:
        if row["run"] != PLANTED and row["state"] != "clean":
            failures.append(f"{row['tool']} {row['run']}: {row['state']}")
        if row["run"] == PLANTED and PLANTED_KERNEL not in row["errors_at"]:
            failures.append(f"{row['tool']} did not find the error on purpose")
    for tool in sorted({row["tool"] for row in rows}) if all_runs else []:
        missed = [line["kernel"] for line in table if not line[tool]["runs"]]
        failures += [f"under {tool} launched by no run: {', '.join(missed)}"] if missed else []
    return failures
