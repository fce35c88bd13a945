"""Times every kernel of the pipeline under a set of launch parameters, on one GPU.

    python3 benchmarks/tune_kernels.py $OUT/tune.json [--gates gdn,kda]     about 3 minutes on 16 cores and an H200
    python3 benchmarks/tune_kernels.py $OUT/x_in_p.json --x-in-p            the table's, X apart and where P is zero
    python3 benchmarks/tune_kernels.py --without-gpu 90 [--x-in-p]          compiles alone, for a GPU machine's cache

Processes first compile the variants side by side (Triton's cache on disk is shared), then one process times them,
kernel by kernel, from CUDA graphs. The table printed last has the best parameters for each kernel and shape, and is
written where the package reads it, but for `x_in_p`: that trades time for memory, so it stays as the table has it.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import itertools
import json
import multiprocessing
import sys
import time
from typing import NamedTuple

import torch
import triton
import without_gpu

from jlaqat.kernels import pipeline
from jlaqat.kernels.call import Inputs, Options
from jlaqat.kernels.tuning import FOLDER, Knobs, Tuning, choose, shape_class
from jlaqat.spec import DeltaQuant, QuantSpec
from jlaqat.torch_bridge.run import torch_run

QUANTS = {
    "plain": DeltaQuant(),
    "state+w fp8": DeltaQuant(state=QuantSpec.fp8(), w=QuantSpec.fp8()),
}
SHAPES = [(1, 8192, 16), (8, 4096, 16)]
CHOICES: dict[str, list] = {
    "intra": [
        Knobs(4, 1, bv=128, registers=128),
        Knobs(4, 1, registers=128),
        Knobs(4, 1, bv=128, registers=96),
        Knobs(4, 1, bv=128, registers=112),
        Knobs(4, 1, bv=128, registers=168),
    ],
    "recompute": [Knobs(4, 2, bv=128), Knobs(4, 2), Knobs(4, 1, bv=128), Knobs(8, 1, bv=128)],
    "state": [Knobs(4, 2), Knobs(4, 3), Knobs(4, 3, bv=32), Knobs(4, 3, bv=16)],
    "reverse": [Knobs(4, 2), Knobs(4, 3), Knobs(4, 3, bv=16), Knobs(4, 3, bv=32), Knobs(4, 2, bv=32)],
    "decode_w": [False, True, True, True, True],  # goes with reverse
    "chunk_backward": [Knobs(4, 1, 32, 128), Knobs(4, 1, 64, 128), Knobs(4, 1), Knobs(4, 1, 32, 64)],
    "kda_pairs": [Knobs(4, 2, 32, 64, 168), Knobs(4, 1, 32, 64, 168), Knobs(4, 1, 16, 64, 128), Knobs(4, 1, 32)],
    "kda_wy": [Knobs(4, 1, 64, 128, 168), Knobs(4, 1, bv=128), Knobs(4, 1)],
    "kda_recompute": [Knobs(4, 1, bv=128), Knobs(4, 2), Knobs(4, 1)],
    "kda_scores": [Knobs(4, 1, bv=128), Knobs(4, 2), Knobs(4, 1)],
    "kda_channels": [Knobs(4, 3, 32), Knobs(4, 2, 32), Knobs(4, 1, 32, 128), Knobs(4, 1, 32)],
}
HOPPER_CHOICES: dict[str, list] = {  # on SM90, where they take the places of kernels above
    "hopper_state": [Knobs(4, 3), Knobs(4, 2)],
    "hopper_reverse": [Knobs(8, 2, bv=128), Knobs(4, 3)],
    "hopper_chunk": [Knobs(8, registers=128)],
}


def tunings() -> list[Tuning]:
    """Variant i takes every kernel's i-th choice: kernels do not depend on each other's."""

    def variants(choices: dict[str, list]) -> list[Tuning]:
        longest = max(map(len, choices.values()))
        return [Tuning(**{k: c[i % len(c)] for k, c in choices.items()}) for i in range(longest)]

    return variants(CHOICES) + (variants(HOPPER_CHOICES) if on_hopper() else [])


class Job(NamedTuple):
    """Kernels to time, all of one forward and one backward."""

    gate: str
    quant: str
    tuning: Tuning
    shapes: list[tuple[int, int, int]] = SHAPES


def jobs_of_variants(gates: list[str]) -> list[Job]:
    jobs = [Job(gate, quant, tuning) for tuning, gate, quant in itertools.product(tunings(), gates, QUANTS)]
    return jobs + [Job(gate, "state+w fp8", tunings()[0]._replace(split_output=True)) for gate in gates]


def jobs_of_x_in_p() -> list[Job]:
    jobs = []
    for shape, quant, x_in_p in itertools.product(SHAPES, QUANTS, (False, True)):
        b, _, h = shape
        tuned = choose(capability(), "gdn", QUANTS[quant].state is not None, shape_class(b * h * 2))
        jobs.append(Job("gdn", quant, tuned._replace(x_in_p=x_in_p), [shape]))
    return jobs


def capability() -> int:
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def on_hopper() -> bool:
    return capability() == 90


def make_inputs(b, t, h, kda, hv=None, dim=128) -> Inputs:
    hv = hv or h
    gen = torch.Generator("cuda").manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=gen, device="cuda")

    def unit(x):
        return torch.nn.functional.normalize(x, dim=-1)

    g = -0.05 * (normal(b, t, hv, dim) if kda else normal(b, t, hv)).abs()
    beta = torch.sigmoid(normal(b, t, hv))
    q, k, v = unit(normal(b, t, h, dim)), unit(normal(b, t, h, dim)), normal(b, t, hv, dim)
    return Inputs(q.bfloat16(), k.bfloat16(), v.bfloat16(), g, beta.bfloat16())


class Recorder:
    """Runs launches and remembers them."""

    def __init__(self):
        self.launches = []

    def __call__(self, launch):
        outputs = torch_run(launch)
        self.launches.append((launch, dict(outputs)))
        return outputs


def run_once(run, inputs, quant, tuning):
    options = Options(scale=128**-0.5, quant=quant, hardware_fp8=True, tuning=tuning, hopper=on_hopper())
    out = pipeline.forward(run, inputs, options)
    do, dfinal = torch.randn_like(out.o), torch.zeros_like(out.final_state)
    return out, pipeline.backward(run, inputs, out.residuals, do, dfinal, options)


def compile_variant(job: Job) -> str | None:
    try:  # grids and batch sizes change no kernel; the heads do
        run_once(torch_run, make_inputs(1, 1024, 16, job.gate == "kda"), QUANTS[job.quant], job.tuning)
        torch.cuda.synchronize()
        return None
    except Exception as error:  # a variant that does not fit the GPU is left out of the table
        return f"{type(error).__name__}: {str(error)[:200]}"


def time_launch(launch, outputs, repeats=5):
    """Milliseconds, the best of a few replays of a CUDA graph with `repeats` launches."""
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages} | launch.compiler_options

    def go():
        launch.kernel[(launch.grid,)](**launch.inputs, **outputs, **launch.constants, **options)

    go()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            go()
    best = float("inf")
    for _ in range(4):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end) / repeats)
    return best


KERNELS = {  # kernel: its name in Tuning
    "intra_chunk_forward": "intra",
    "wy_recompute": "recompute",
    "chunk_state_forward": "state",
    "chunk_state_backward": "reverse",
    "chunk_backward": "chunk_backward",
    "kda_pairs": "kda_pairs",
    "kda_wy": "kda_wy",
    "kda_recompute": "kda_recompute",
    "kda_scores_backward": "kda_scores",
    "kda_channels_backward": "kda_channels",
}
HOPPER_KERNELS = {
    "chunk_state_forward": "hopper_state",
    "chunk_state_backward": "hopper_reverse",
    "chunk_backward": "hopper_chunk",
}
TOLD = ("BK", "BV", "STAGES", "WRITE_O", "W_FORMAT")  # constants that tell variants of a kernel apart


def best_tunings(rows: list[dict]) -> dict:
    """{gate: {"plain" or "rounded": {shape class: {kernel: knobs}}}}, the fastest of each."""
    table: dict = {}
    decoding = {(r["shape"], r["gate"], r["quant"]): r["ms"] for r in rows if r["kernel"] == "decode_w"}

    def cost(row) -> float:
        """Milliseconds, with those of decoding w where the reverse scan asks for its values."""
        key = (row["shape"], row["gate"], row["quant"])
        decoded = row["kernel"] == "chunk_state_backward" and row["W_FORMAT"] == "none"
        return row["ms"] + (decoding.get(key, 0.0) if decoded else 0.0)

    for row in sorted(rows, key=lambda r: -cost(r)):  # the fastest comes last and stays
        b, t, h = map(int, row["shape"].split("x"))
        rounded = "plain" if row["quant"] == "plain" else "rounded"
        kernels = table.setdefault(row["gate"], {}).setdefault(rounded, {}).setdefault(shape_class(b * h * 2), {})
        if row["kernel"] not in KERNELS or not row.get("WRITE_O", True):
            continue
        knobs = [row["warps"], row.get("STAGES", row["stages"]), row.get("BK", 64), row.get("BV", 64), row["registers"]]
        if row["hopper"]:
            kernels[HOPPER_KERNELS[row["kernel"]]] = knobs
            continue
        kernels[KERNELS[row["kernel"]]] = knobs
        if row["kernel"] in HOPPER_KERNELS:
            kernels[HOPPER_KERNELS[row["kernel"]]] = None
        if row["kernel"] == "chunk_state_backward":
            kernels["decode_w"] = row["W_FORMAT"] == "none" and row["quant"] != "plain" and row["gate"] == "gdn"
    return table


def told(row: dict) -> str:
    """Milliseconds and the parameters: warps, stages, columns over K and V, registers."""
    knobs = (row["warps"], row.get("STAGES", row["stages"]), row.get("BK"), row.get("BV"), row["registers"])
    hopper = ",hopper" if row["hopper"] else ""
    codes = "" if row.get("W_FORMAT", "none") == "none" else ",codes"
    return f"{row['ms']:.3f} ({','.join(map(str, knobs))}{hopper}{codes}{'' if row.get('WRITE_O', True) else ',split'})"


def compile_jobs(jobs: list[Job]) -> list[Job]:
    """Those that compile and fit."""
    with concurrent.futures.ProcessPoolExecutor(15, multiprocessing.get_context("spawn")) as pool:
        errors = list(pool.map(compile_variant, jobs))
    for job, error in zip(jobs, errors, strict=True):
        if error:
            print("left out:", job[:2], error)
    return [job for job, error in zip(jobs, errors, strict=True) if not error]


def time_jobs(jobs: list[Job]) -> list[dict]:
    """A row for each kernel and shape that differs from those before in anything but its time."""
    rows, seen = [], set()
    for shape, job in itertools.product(SHAPES, jobs):
        if shape not in job.shapes:
            continue
        b, t, h = shape
        recorder = Recorder()
        run_once(recorder, make_inputs(b, t, h, job.gate == "kda"), QUANTS[job.quant], job.tuning)
        for launch, outputs in recorder.launches:
            row = {
                "shape": f"{b}x{t}x{h}",
                "gate": job.gate,
                "quant": job.quant,
                "kernel": launch.name.removesuffix("_kernel"),
                "hopper": "hopper" in launch.kernel.fn.__module__,
                "warps": launch.num_warps,
                "stages": launch.num_stages,
                "registers": launch.max_registers,
                "x_in_p": job.tuning.x_in_p,
                **{n: launch.constants[n] for n in TOLD if n in launch.constants},
            }
            if (key := tuple(row.values())) not in seen:
                seen.add(key)
                rows.append(row | {"ms": round(time_launch(launch, outputs), 4)})
        del recorder
    return rows


def write_table(about: dict, rows: list[dict]) -> None:
    FOLDER.mkdir(exist_ok=True)
    table = FOLDER / f"sm{capability()}.json"
    kept = json.loads(table.read_text())["tunings"] if table.exists() else {}
    best = best_tunings(rows)
    for gate, rounded, size in itertools.product(best, ("plain", "rounded"), ("many", "few")):
        before = kept.get(gate, {}).get(rounded, {}).get(size, {})
        if "x_in_p" in before:
            best[gate][rounded][size]["x_in_p"] = before["x_in_p"]
    table.write_text(json.dumps({**about, "tunings": kept | best}, indent=1) + "\n")


def print_x_in_p(rows: list[dict]) -> None:
    """Milliseconds, kernel by kernel, with X apart and with X where P is zero, and their sums."""
    groups: dict = collections.defaultdict(lambda: {False: 0.0, True: 0.0})
    for row in rows:
        for kernel in (row["kernel"], "sum"):
            groups[row["shape"], row["quant"], kernel][row["x_in_p"]] += row["ms"]
    print("shape, quant, kernel | x apart | x in p")
    for name, ms in sorted(groups.items(), key=lambda x: (*x[0][:2], x[0][2] == "sum", x[0][2])):
        print(*name, "|", f"{ms[False]:.3f} | {ms[True]:.3f}")


def compile_without_gpu(capability: int, gates: list[str], x_in_p: bool) -> None:
    without_gpu.pretend(capability)
    for job in jobs_of_x_in_p() if x_in_p else jobs_of_variants(gates):
        if error := compile_variant(job):
            print("left out:", job[:2], error)


def main(path: str, gates: list[str], x_in_p: bool) -> None:
    began = time.time()
    jobs = compile_jobs(jobs_of_x_in_p() if x_in_p else jobs_of_variants(gates))
    print(f"compiled in {time.time() - began:.0f} s", flush=True)
    rows = time_jobs(jobs)
    about = {"machine": torch.cuda.get_device_name(), "triton": triton.__version__, "torch": torch.__version__}
    with open(path, "w") as f:
        json.dump({**about, "rows": rows}, f, indent=1)
    if x_in_p:
        print_x_in_p(rows)
    else:
        write_table(about, rows)
        groups = collections.defaultdict(list)
        for row in rows:
            groups[row["shape"], row["gate"], row["quant"], row["kernel"]].append(row)
        for name, group in groups.items():
            print(*name, "|", *map(told, sorted(group, key=lambda r: r["ms"])))
    print(f"{time.time() - began:.0f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", nargs="?", help="JSON file for the measurements")
    parser.add_argument("--gates", default="gdn,kda")
    parser.add_argument("--x-in-p", action="store_true", help="time both settings of x_in_p, leave the table alone")
    parser.add_argument("--without-gpu", type=int, default=0, metavar="90", help="compile only, for this GPU")
    arguments = parser.parse_args()
    if arguments.without_gpu:
        compile_without_gpu(arguments.without_gpu, arguments.gates.split(","), arguments.x_in_p)
        sys.exit()
    if arguments.path is None:
        parser.error("name a JSON file for the measurements")
    main(arguments.path, arguments.gates.split(","), arguments.x_in_p)
