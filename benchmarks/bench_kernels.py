"""Times the delta rule, forward and forward + backward, on one GPU: ours, jla and FLA, as docs/performance.md shows it.

    python3 benchmarks/bench_kernels.py --jobs 12                        # everything
    python3 benchmarks/bench_kernels.py --stages targets --gates gdn     # a part; rows that are there are skipped
    python3 benchmarks/bench_kernels.py --shapes 2x4096x8 --quants plain # other shapes: BxTxH, BxTxHxD, BxTx16g32xD

`ms` is device time by the profiler: the time in which a kernel, copy or fill of the call runs, of 15 queued calls the
median, least and most. `queued_ms` is the host's clock over 20 queued calls. Rows go to --out one by one; a run that is
cut short, or has a --budget, is called again and takes the rest. How long a call takes to compile: first_call.py.

With --jobs, processes compile side by side and time one at a time, alone on the GPU but for what XLA tries out while it
compiles. With --time-after, they only compile at first: other work may then use the GPU. With --without-gpu 90 Triton
compiles our kernels for SM90 on any machine, for a GPU machine to take the cache (without_gpu.py); nothing is timed.

Needs jax-triton, jax-linear-attention (jla) and, for FLA, torch and fla-core; launch parameters of FLA come from
benchmarks/fla_configs (fla_configs.py), since its own search takes minutes. A call that a backend refuses is a row with
the error.
"""

from __future__ import annotations

import argparse
import datetime
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path

import device_time
import fla_configs
import kernel_calls
import kernel_rows
from kernel_rows import Row

RESULTS = Path(__file__).parent / "results" / "performance_h200.json"
HELD = 5  # rows that a process compiles ahead


def planned(args: argparse.Namespace, stage: str | None) -> list[Row]:
    """The rows of a stage, or of --shapes, that were asked for, without those that are there."""
    if stage is None:
        quants = kernel_rows.COMPARED | kernel_rows.XLA | {"triton": kernel_rows.QUANTS}
        rows = kernel_rows.rows_of(args.shapes.split(","), quants, kernel_rows.PASSES)
    else:
        rows = kernel_rows.STAGES[stage]
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
        if all(getattr(row, name) in chosen.split(",") for name, chosen in kept.items())
        and kernel_rows.identity(row.fields()) not in present
    ]


def work(out: Path, time_after: float, deadline: float) -> None:
    """One process: asks for rows, compiles them, and times them once it is time to. Clocks are time.time()."""
    held: list[tuple[Row, object]] = []
    more = True
    while more or held:
        if more and time.time() < time_after and len(held) < HELD or not held:
            row = ask()
            more = row is not None
            if row is not None:
                held.append((row, prepare(row)))
            continue
        if time.time() < time_after:
            time.sleep(max(0.0, time_after - time.time()))
        row, call = held.pop(0)
        with device_time.gpu_lock(exclusive=True):
            if time.time() > deadline:
                return
            try:
                if isinstance(call, Exception):
                    raise call
                found = call.measure() | {"versions": kernel_calls.version_of(*call.packages)}
            except Exception as error:
                found = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
            about = {"machine": machine_name(row.backend), "date": str(datetime.date.today())}
            kernel_rows.append(out, row.fields() | found | about)
        shown = {k: v for k, v in found.items() if k in ("ms", "ms_min", "ms_max", "queued_ms", "error")}
        print(*row.fields().values(), *(f"{k}={v}" for k, v in shown.items()), file=sys.stderr, flush=True)


def ask() -> Row | None:
    """The next row from the process that hands them out; None if there is none."""
    print("next", flush=True)
    line = sys.stdin.readline().strip("\n")
    return Row.parse(line) if line else None


def prepare(row: Row) -> object:
    """The compiled call, or why there is none."""
    try:
        return kernel_calls.prepare(row)
    except Exception as error:  # a peer that refuses a shape is a row that says so
        return error


def machine_name(backend: str) -> str:
    if backend == "fla":
        import torch

        return torch.cuda.get_device_name()
    import jax

    return jax.devices()[0].device_kind


def run_in_processes(rows: list[Row], args: argparse.Namespace, time_after: float, deadline: float) -> None:
    """Hands rows to processes as they ask: FLA's to one of their own, as PyTorch keeps memory."""
    waiting: dict[bool, queue.SimpleQueue[Row]] = {True: queue.SimpleQueue(), False: queue.SimpleQueue()}
    for row in rows:
        waiting[row.backend == "fla"].put(row)
    counts = {is_fla: min(queued.qsize(), 1 if is_fla else args.jobs) for is_fla, queued in waiting.items()}
    command = [sys.executable, __file__, "--worker", "--out", str(args.out)]
    command += ["--clock", str(time_after), str(deadline), *["--search-fla"] * args.search_fla]

    def serve(queued: queue.SimpleQueue[Row]) -> None:
        environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | os.environ  # processes share the GPU
        worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        assert worker.stdin is not None and worker.stdout is not None
        for line in worker.stdout:
            if line != "next\n":
                print(line, end="")
                continue
            late = time.time() > deadline or queued.empty()
            try:
                text = "" if late else queued.get_nowait().text()
            except queue.Empty:
                text = ""
            worker.stdin.write(text + "\n")
            worker.stdin.flush()
        worker.wait()

    threads = [threading.Thread(target=serve, args=(waiting[f],)) for f, count in counts.items() for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="JSON file; rows are added to it")
    parser.add_argument(
        "--stages", default=",".join(kernel_rows.STAGES), help=f"of {', '.join(kernel_rows.STAGES)}; the order counts"
    )
    parser.add_argument("--shapes", help="these shapes instead of the stages'")
    parser.add_argument("--backends", default=",".join(kernel_rows.BACKENDS))
    parser.add_argument("--gates", default=",".join(kernel_rows.GATES))
    parser.add_argument("--quants", default=",".join(kernel_rows.QUANTS))
    parser.add_argument("--passes", default=",".join(kernel_rows.PASSES))
    parser.add_argument("--again", action="store_true", help="measure rows that are there too, and replace them")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile side by side")
    parser.add_argument("--budget", type=float, default=3600, help="seconds; what does not fit is left out")
    parser.add_argument("--time-after", type=float, default=0, help="seconds in which rows are only compiled")
    parser.add_argument(
        "--search-fla", action="store_true", help="FLA searches; see fla_configs.py. With --backends fla"
    )
    parser.add_argument("--without-gpu", type=int, default=0, metavar="90", help="compile only, for this GPU")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--clock", type=float, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        if args.search_fla:
            fla_configs.search_quickly()
        work(args.out, *args.clock)
        return fla_configs.save() if args.search_fla else None
    began = time.time()
    rows: dict[Row, None] = {}
    for stage in [None] if args.shapes else args.stages.split(","):
        rows |= dict.fromkeys(planned(args, stage))
    print(f"{len(rows)} rows", flush=True)
    if args.without_gpu:
        for row in rows:
            if row.backend == "triton":
                kernel_calls.lower_without_gpu(row, args.without_gpu)
        return
    run_in_processes(list(rows), args, began + args.time_after, began + args.budget)
    present = set(map(kernel_rows.identity, kernel_rows.load(args.out)))
    missing = sum(kernel_rows.identity(row.fields()) not in present for row in rows)
    print(f"{args.out}: {missing} of {len(rows)} rows are missing")


if __name__ == "__main__":
    main()
