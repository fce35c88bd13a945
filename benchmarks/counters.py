"""Hardware counters of every kernel of a forward and a backward: what holds a kernel above its floors.

    python3 benchmarks/counters.py [--gates gdn,kda] [--shapes 8x4096x16,1x8192x16] [--quants "state+w fp8"]

Runs Nsight Compute (ncu, clocks left alone) on each call through PyTorch and writes a row a kernel to --out: time,
registers, loads and stores of spills, how often a scheduler issues, its warps and what they wait for (in warps, on
average, an issued instruction), the shares of memory and tensor-core rates, bytes moved. About 15 s a call.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import device_time

RESULTS = Path(__file__).parent / "results" / "counters_h200.json"
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
STALLS = (
    "barrier",
    "branch_resolving",
    "dispatch_stall",
    "gmma",
    "lg_throttle",
    "long_scoreboard",
    "math_pipe_throttle",
    "mio_throttle",
    "no_instruction",
    "not_selected",
    "selected",
    "short_scoreboard",
    "wait",
)
# our name: (ncu's, factor)
METRICS = {
    "ms": ("gpu__time_duration.sum", 1e-6),
    "registers": ("launch__registers_per_thread", 1),
    "shared_kb": ("launch__shared_mem_per_block", 1e-3),
    "threads": ("launch__block_size", 1),
    "programs": ("launch__grid_size", 1),
    "warps_a_scheduler": ("smsp__warps_active.avg.per_cycle_active", 1),
    "issued_a_cycle": ("smsp__inst_issued.avg.per_cycle_active", 1),
    "tensor_percent": ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed", 1),
    "dram_percent": ("dram__throughput.avg.pct_of_peak_sustained_elapsed", 1),
    "read_mb": ("dram__bytes_read.sum", 1e-6),
    "written_mb": ("dram__bytes_write.sum", 1e-6),
    "spill_loads": ("smsp__inst_executed_op_local_ld.sum", 1),
    "spill_stores": ("smsp__inst_executed_op_local_st.sum", 1),
    "instructions": ("smsp__inst_executed.sum", 1),
}


def run_here(gate: str, shape: str, quant: str) -> None:
    """One forward and one backward, nothing else."""
    import kernel_calls
    import torch

    from jlaqat.kernels import pipeline
    from jlaqat.kernels.call import Inputs, options_for
    from jlaqat.torch_bridge.run import torch_run

    x, do = kernel_calls.make_torch_inputs(shape, gate)
    inputs = Inputs(*(tensor.detach() for tensor in x))
    major, minor = torch.cuda.get_device_capability()
    options = options_for(10 * major + minor, scale=inputs.q.shape[-1] ** -0.5, quant=kernel_calls.quantizers(quant))
    out = pipeline.forward(torch_run, inputs, options)
    pipeline.backward(torch_run, inputs, out.residuals, do, torch.zeros_like(out.final_state), options)
    torch.cuda.synchronize()


def kernel_names() -> list[str]:
    """Every kernel that jlaqat.kernels can launch, as module.name."""
    import importlib
    import pkgutil

    import triton

    import jlaqat.kernels as package

    names = set()
    for found in pkgutil.iter_modules(package.__path__):
        module = vars(importlib.import_module(f"jlaqat.kernels.{found.name}"))
        kernels = (n for n, x in module.items() if isinstance(x, triton.JITFunction) and n.endswith("_kernel"))
        names |= {f"{found.name}.{name}" for name in kernels}
    return sorted(names)


def count(gate: str, shape: str, quant: str) -> list[dict]:
    names = [metric for metric, _ in METRICS.values()] + [STALL.format(stall) for stall in STALLS]
    with tempfile.NamedTemporaryFile(suffix=".csv") as log:
        command = ["ncu", "--clock-control", "none", "--csv", "--page", "raw", "--print-units", "base"]
        command += ["--log-file", log.name, "--metrics", ",".join(names)]
        command += ["--kernel-name", f"regex:^({'|'.join(sorted({name.split('.')[1] for name in kernel_names()}))})$"]
        command += [sys.executable, __file__, "--here", gate, shape, quant]
        done = subprocess.run(command, capture_output=True, text=True)
        text = Path(log.name).read_text()
    lines = [line for line in text.splitlines() if line.startswith('"')]
    if done.returncode or len(lines) < 3:
        raise RuntimeError(f"ncu: {text[-600:]} {done.stderr[-600:]}")
    header, _, *values = csv.reader(lines)
    return [row(dict(zip(header, line, strict=True))) for line in values]


def row(found: dict[str, str]) -> dict:
    def number(name: str) -> float | None:
        text = found.get(name, "").replace(",", "")
        return float(text) if text and text != "n/a" else None

    out: dict = {"kernel": found["Kernel Name"].removesuffix("_kernel")}
    for name, (metric, factor) in METRICS.items():
        value = number(metric)
        out[name] = None if value is None else round(value * factor, 4)
    waits = {stall: number(STALL.format(stall)) for stall in STALLS}
    longest = sorted(((v, k) for k, v in waits.items() if v), reverse=True)
    return out | {"waits": {k: round(v, 2) for v, k in longest[:6]}}


def main() -> None:
    if sys.argv[1:2] == ["--here"]:
        return run_here(*sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="JSON file, written anew")
    parser.add_argument("--gates", default="gdn,kda")
    parser.add_argument("--shapes", default="8x4096x16,1x8192x16")
    parser.add_argument("--quants", default="state+w fp8")
    args = parser.parse_args()
    import torch
    import triton

    about = {
        "machine": torch.cuda.get_device_name(),
        "date": str(datetime.date.today()),
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
    }
    rows: list[dict] = []
    for shape, gate, quant in itertools.product(*(x.split(",") for x in (args.shapes, args.gates, args.quants))):
        with device_time.gpu_lock(exclusive=False):  # counting does not mind others, but they would mind it
            counted = count(gate, shape, quant)
        for found in counted:
            rows.append({"gate": gate, "quant": quant, "shape": shape} | found | about)
            shown = {k: v for k, v in found.items() if k != "kernel"}
            print(gate, shape, found["kernel"], *(f"{k}={v}" for k, v in shown.items()), flush=True)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text("[\n" + ",\n".join(" " + json.dumps(r) for r in rows) + "\n]\n")


if __name__ == "__main__":
    main()
