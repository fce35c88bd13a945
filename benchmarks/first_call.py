"""Seconds from a function to the first result of its first jitted call, kernels compiled in that process or before it.

    python3 benchmarks/first_call.py                     # one NVIDIA GPU, alone on the machine; about four minutes
    python3 benchmarks/first_call.py --without-gpu 90    # what needs no GPU: tracing, and Triton's part of compiling

Forward + backward at 8x4096x16, plain and with state + w FP8. Every row is a process of its own, with Triton's cache
("empty") or with the one that the process before has left ("warm", see jlaqat.compile_cache); JAX's own cache is off.
`lower_s` is tracing and what Triton compiles (to PTX), `compile_s` XLA's part, `run_s` the first run, in which PTX
becomes machine code; importing jlaqat and starting JAX, before them, is not counted.

Adds rows to --out and prints them.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import kernel_calls
import kernel_rows
from kernel_rows import GATES, TARGET_SHAPES, Row

RESULTS = Path(__file__).parent / "results" / "first_call_h200.json"
QUANTS = ("plain", "state+w fp8")


def measure(gate: str, quant: str, capability: int) -> dict[str, float]:
    """In a new process. capability: of the GPU that is not there, or 0."""
    import jax

    row = Row("triton", gate, TARGET_SHAPES[0], quant, "fwd+bwd")
    jax.devices()
    if capability:
        start = time.perf_counter()
        kernel_calls.lower_without_gpu(row, capability)
        return {"lower_s": time.perf_counter() - start}
    inputs = jax.jit(lambda: kernel_calls.make_jax_inputs(row.shape, row.gate))()
    jax.block_until_ready(inputs)
    clock = [time.perf_counter()]
    function, _ = kernel_calls.jax_function(row)
    lowered = jax.jit(function).lower(*inputs)
    clock.append(time.perf_counter())
    compiled = lowered.compile()
    clock.append(time.perf_counter())
    jax.block_until_ready(compiled(*inputs))
    clock.append(time.perf_counter())
    seconds = {name: b - a for name, a, b in zip(("lower_s", "compile_s", "run_s"), clock, clock[1:])}
    return seconds | {"seconds": clock[-1] - clock[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--gates", default=",".join(GATES))
    parser.add_argument("--without-gpu", type=int, default=0, metavar="90", help="lower only, for this GPU")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        found = measure(*args.worker, args.without_gpu)
        print(json.dumps({name: round(value, 2) for name, value in found.items()}))
        return
    for gate in args.gates.split(","):
        for quant in QUANTS:
            with tempfile.TemporaryDirectory() as home:
                for cache in ("empty", "warm"):
                    command = [sys.executable, __file__, "--worker", gate, quant]
                    command += ["--without-gpu", str(args.without_gpu)]
                    environment = os.environ | {"TRITON_HOME": home}
                    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
                    about = {"gate": gate, "quant": quant, "pass": "fwd+bwd", "shape": TARGET_SHAPES[0], "cache": cache}
                    row = about | json.loads(done.stdout.splitlines()[-1])
                    row |= {"versions": kernel_calls.version_of("jax", "jax-triton"), "machine": machine()}
                    row["date"] = str(datetime.date.today())
                    kernel_rows.append(args.out, row, about)
                    print(*row.values(), flush=True)


def machine() -> str:
    """The GPU, or the processor where there is none."""
    if shutil.which("nvidia-smi"):
        found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
        return found.split(" (")[0].partition(": ")[2]
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next(line.partition(": ")[2] for line in lines if line.startswith("model name"))
    return f"{model}, {os.cpu_count()} threads"


if __name__ == "__main__":
    main()
