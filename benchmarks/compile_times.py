"""Time of a first jitted call's compilation, each in a process of its own with no cache on disk.

    python3 benchmarks/compile_times.py --jobs 5 [--out FILE]        about a minute on 16 cores

From a traceable function to a program that can run (`jax.jit(...).lower(...).compile()`), imports and the start of the
GPU not counted; for FLA its first call, launch parameters known. `compiling` in a row: processes at work at the same
time; keep it well below the number of cores.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kernel_rows import PASSES, TARGET_SHAPES, Row, rows_of

QUANTS = {"triton": ("plain", "state+w fp8"), "jla": ("plain",), "fla": ("plain",), "xla": ("state+w fp8",)}


def compile_here(row: Row) -> None:
    import kernel_calls

    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        call = kernel_calls.prepare(row)
    print(json.dumps({"compile_s": round(call.compile_s, 1), "versions": kernel_calls.version_of(*call.packages)}))


def compile_elsewhere(row: Row) -> dict:
    environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    command = [sys.executable, __file__, "--row", row.text()]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["no message"])[-1][:200]}
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "compile_h200.json")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row:
        return compile_here(Row.parse(args.row))
    rows = rows_of(TARGET_SHAPES[:1], QUANTS, PASSES)
    found = []
    with ThreadPoolExecutor(args.jobs) as pool:
        for row, result in zip(rows, pool.map(compile_elsewhere, rows)):
            about = {"compiling": args.jobs, "cores": os.cpu_count(), "date": str(datetime.date.today())}
            found.append(row.fields() | result | about)
            print(*row.fields().values(), result.get("compile_s", result.get("error")), flush=True)
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text("[\n" + ",\n".join(" " + json.dumps(r) for r in found) + "\n]\n")


if __name__ == "__main__":
    main()
