"""Times the delta rule, forward and forward + backward, on one GPU: ours, jla and FLA, as docs/performance.md shows it.

    python3 benchmarks/bench_kernels.py --jobs 14                        # everything: targets, matrix, sweep over T
    python3 benchmarks/bench_kernels.py --stages targets --gates gdn     # a part; rows that are there are skipped
    python3 benchmarks/bench_kernels.py --shapes 2x4096x8 --quants plain # other shapes: BxTxH, BxTxHxD, BxTx16g32xD

`ms` is device time by the profiler: the time in which a kernel, copy or fill of the call runs, of 15 queued calls the
median, least and most. `queued_ms` is the host's clock over 20 queued calls. Rows go to --out one by one; a run that is
cut short, or has a --budget, is called again and takes the rest. With --jobs, processes compile side by side and wait
for each other before they time, one at a time, alone on the GPU.

Needs jax-triton, jax-linear-attention (jla) and, for FLA, torch and fla-core; launch parameters of FLA come from
benchmarks/fla_configs (fla_configs.py), since its own search takes minutes. A call that a backend refuses is a row with
the error.
"""

from __future__ import annotations

import argparse
import datetime
import os
import subprocess
import sys
import time
from pathlib import Path

import device_time
import kernel_rows
from kernel_rows import Row

RESULTS = Path(__file__).parent / "results" / "performance_h200.json"
GPU_BYTES = 140e9
COMPILE_SHARE = 0.6  # of the budget


def planned(args: argparse.Namespace, stage: str | None, done: set[Row]) -> list[Row]:
    """The rows of a stage, or of --shapes, that were asked for, without those that are there."""
    if stage is None:
        quants = {backend: kernel_rows.QUANTS_OF[backend] for backend in kernel_rows.BACKENDS}
        rows = kernel_rows.rows_of(args.shapes.split(","), quants, kernel_rows.PASSES)
    else:
        rows = kernel_rows.STAGES[stage]()
    kept = {
        "backend": args.backends,
        "gate": args.gates,
        "quant": args.quants,
        "direction": args.passes,
    }
    present = set() if args.again else set(map(kernel_rows.identity, kernel_rows.load(args.out)))
    return [
        row
        for row in rows
        if row not in done
        and all(getattr(row, name) in chosen.split(",") for name, chosen in kept.items())
        and kernel_rows.identity(row.fields()) not in present
    ]


def measure(rows: list[Row], out: Path, deadline: float) -> None:
    """Compiles all rows, then times them, in this process. Rows that come too late are left for another run."""
    import kernel_calls

    began, prepared = time.monotonic(), []
    with device_time.gpu_lock(exclusive=False):
        for row in rows:
            if time.monotonic() - began > COMPILE_SHARE * (deadline - began):
                break
            try:
                prepared.append((row, kernel_calls.prepare(row)))
            except Exception as error:  # a peer that refuses a shape is a row that says so
                prepared.append((row, error))
    about = {"machine": machine_name(rows[0].backend), "date": str(datetime.date.today())}
    for row, call in prepared:
        with device_time.gpu_lock(exclusive=True):
            if time.monotonic() > deadline:
                break
            try:
                if isinstance(call, Exception):
                    raise call
                found = call.measure() | {"versions": kernel_calls.version_of(*call.packages)}
            except Exception as error:
                found = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
            row_found = row.fields() | found | about
            kernel_rows.append(out, row_found)
        shown = {k: v for k, v in row_found.items() if k in ("ms", "ms_min", "queued_ms", "error")}
        print(*row.fields().values(), *(f"{k}={v}" for k, v in shown.items()), flush=True)


def machine_name(backend: str) -> str:
    if backend == "fla":
        import torch

        return torch.cuda.get_device_name()
    import jax

    return jax.devices()[0].device_kind


def run_in_processes(rows: list[Row], args: argparse.Namespace, deadline: float) -> None:
    shares = kernel_rows.spread(rows, args.jobs)
    workers = []
    for share in shares:
        # Memory is set aside as JAX does for its users, who have one process.
        fraction = min(0.4, max(0.03, max(row.memory for row in share) / GPU_BYTES))
        memory = {"XLA_PYTHON_CLIENT_PREALLOCATE": "true", "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{fraction:.3f}"}
        command = [sys.executable, __file__, "--worker", "--out", str(args.out)]
        command += ["--budget", str(max(1.0, deadline - time.monotonic()))]
        worker = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, env=os.environ | memory)
        assert worker.stdin is not None
        worker.stdin.write("\n".join(row.text() for row in share))
        worker.stdin.close()
        workers.append(worker)
    for worker in workers:
        worker.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="JSON file; rows are added to it")
    parser.add_argument("--stages", default=",".join(kernel_rows.STAGES), help="of targets, matrix, sweep")
    parser.add_argument("--shapes", help="these shapes instead of the stages'")
    parser.add_argument("--backends", default=",".join(kernel_rows.BACKENDS))
    parser.add_argument("--gates", default=",".join(kernel_rows.GATES))
    parser.add_argument("--quants", default=",".join(kernel_rows.QUANTS))
    parser.add_argument("--passes", default=",".join(kernel_rows.PASSES))
    parser.add_argument("--again", action="store_true", help="measure rows that are there too, and replace them")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile side by side")
    parser.add_argument("--budget", type=float, default=3600, help="seconds; what does not fit is left out")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    deadline = time.monotonic() + args.budget
    if args.worker:
        return measure([Row.parse(line) for line in sys.stdin.read().splitlines()], args.out, deadline)
    done: set[Row] = set()
    for stage in [None] if args.shapes else args.stages.split(","):
        rows = planned(args, stage, done)
        print(f"{stage or args.shapes}: {len(rows)} rows", flush=True)
        if rows:
            run_in_processes(rows, args, deadline)
        done.update(rows)  # with --again, the targets are not measured once more as rows of the matrix
    present = set(map(kernel_rows.identity, kernel_rows.load(args.out)))
    missing = sum(kernel_rows.identity(row.fields()) not in present for row in done)
    print(f"{args.out}: {missing} of {len(done)} rows are still missing")


if __name__ == "__main__":
    main()
