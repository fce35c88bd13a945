"""compute-sanitizer's memcheck and racecheck on a small run of every kernel.

    python3 tests/gpu/sanitize.py [--runs gdn-fp8,replay] [--tools memcheck,racecheck] [--jobs 15] [--seconds 300]
        [--log FOLDER] [--out FILE.json] [--compiled]
    python3 tests/gpu/sanitize.py --without-gpu 90      # only compiles, see benchmarks/without_gpu.py

Calls of two or three chunks or a few tokens run in processes of their own, side by side, each with a time limit:
first without a tool, which compiles (not with --compiled), then under each. Prints a line as each ends, and a table of
kernels with the errors that reports name. --log gets what the tools printed, and rows.jsonl, a line a process; --out
all rows in one JSON. Exit status 1 if there is an error, if time was over, if under a tool a kernel of jlaqat.kernels
was launched by no run, or if memcheck misses the error that the run "planted" makes on purpose.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import sanitizer_process as process
from sanitizer_process import LAUNCH, LAUNCHED, PLANTED, PLANTED_KERNEL

TESTS = Path(__file__).resolve().parents[1]
GATES = ("gdn", "kda")
SETTINGS = ("hopper", "hopperplain", "fp8", "plain", "int8", "split", "portable")
# What takes longest comes first.
RUNS = (
    *(f"replay-{gate}-{ring}" for gate in GATES for ring in ("plain", "coded")),
    *("gdn-xinphopper", "gdn-xinp"),
    *(f"{gate}-{setting}" for setting in SETTINGS for gate in GATES),
    *(f"decode-{gate}-{part}" for gate in GATES for part in ("whole", "segment")),
)


def heads_under(tool: str, name: str) -> int:
    """Value heads. For racecheck one: heads share no shared memory. Decoding launches what sums over heads."""
    return 1 if tool == "racecheck" and not name.startswith("decode") else 2


def name_of(launch) -> str:
    return f"{launch.kernel.fn.__module__.split('.')[-1]}.{launch.name}"


def run_here(name: str, heads: list[int], without_gpu: int) -> None:
    """Launches the kernels of one run, with each number of heads, waits for each launch and prints its name."""
    import torch

    if without_gpu:
        from without_gpu import pretend

        pretend(without_gpu)
    from jlaqat.torch_bridge.run import torch_run

    device = "cuda" if torch.cuda.is_available() else "cpu"  # through the interpreter: to try this script

    def told(launch):
        print(LAUNCH + name_of(launch), launch.grid, flush=True)
        outputs = torch_run(launch)
        if device == "cuda":
            torch.cuda.synchronize()
        return outputs

    if name == PLANTED:
        planted()
    else:
        for count in heads:
            launch_all(name, told, device, count)
    print(LAUNCHED + "all", flush=True)


def launch_all(name: str, run, device: str, heads: int = 2) -> set[str]:
    """Names, as module.kernel, of what a run launches through `run`."""
    launched: set[str] = set()

    def record(launch):
        launched.add(name_of(launch))
        return run(launch)

    kind, *rest = name.split("-")
    if kind in GATES:
        chunks(record, device, name, heads)
    else:
        {"decode": decode, "replay": replay}[kind](record, device, *rest, heads)
    return launched


def chunks(run, device: str, name: str, heads: int = 2) -> None:
    """Forward and backward over three chunks, the last one short.

    Settings: plain and fp8 (state and w) as users have them; int8 packed, with an empty sequence and rows past the end;
    split: states not saved, outputs in a kernel of their own; portable: no kernel for SM90; hopper and hopperplain: all
    of those that take such a state; xinp and xinphopper: portable and hopper with X where P is zero.
    """
    import kernel_oracle as oracle
    import torch
    import triton
    from kernel_checks import cast

    from jlaqat.kernels import pipeline
    from jlaqat.kernels.call import options_for
    from jlaqat.kernels.tuning import Knobs, Tuning
    from jlaqat.spec import DeltaQuant, QuantSpec

    gate, setting = name.split("-")
    fp8 = DeltaQuant(state=QuantSpec.fp8(), w=QuantSpec.fp8())
    plain, int8 = DeltaQuant(), DeltaQuant(state=QuantSpec.int8(block_v=32))
    quant = {"plain": plain, "hopperplain": plain, "int8": int8}.get(setting, fp8)
    for_sm90 = dict(hopper_state=Knobs(4, 3), hopper_reverse=Knobs(4, 3), hopper_chunk=Knobs(8, 2, registers=128))
    more = {
        "split": dict(save_states=False, tuning=Tuning(split_output=True)),
        "hopper": dict(tuning=Tuning(**for_sm90)),
        "hopperplain": dict(tuning=Tuning(**for_sm90)),
        "xinp": dict(tuning=Tuning(x_in_p=True)),
        "xinphopper": dict(tuning=Tuning(**for_sm90, x_in_p=True)),
    }
    major, minor = torch.cuda.get_device_capability() if device == "cuda" else (9, 0)
    options = options_for(10 * major + minor, scale=0.1, quant=quant, **more.get(setting, {}))
    if setting in ("portable", "xinp") or triton.knobs.runtime.interpret:  # Gluon's have no interpreter
        options = dataclasses.replace(options, hopper=False)
    packed = setting == "int8"
    lengths = torch.tensor([0, 70, 70, 150], dtype=torch.int32, device=device) if packed else None
    sizes = dict(b=1, t=170 if packed else 130, h=1, hv=heads, dk=128, dv=128)
    given = oracle.make_inputs(1, **sizes, kda=gate == "kda", n=3 if packed else None)
    inputs = cast([x.to(device) for x in given], torch.bfloat16, lengths)
    out = pipeline.forward(run, inputs, options)
    do, dfinal = torch.ones_like(out.o), torch.ones_like(out.final_state)
    pipeline.backward(run, inputs, out.residuals, do, dfinal, options)


def decoding_calls(device: str, count: int = 5, dtype: str = "bfloat16", heads: int = 2):
    """(tokens, kept state, options) of `count` tokens of two sequences: GDN with E4M3 tiles, KDA with INT8 rows."""
    import kernel_oracle as oracle
    import torch
    from kernel_checks import hardware_fp8
    from recurrent_oracle import entering_state

    from jlaqat.kernels import recurrent_pipeline as pipeline
    from jlaqat.spec import QuantSpec

    for kda, spec in ((False, QuantSpec.fp8()), (True, QuantSpec.int8(granularity="key_row"))):
        inputs = oracle.make_inputs(3, b=2, t=count, h=1, hv=heads, dk=128, dv=128, kda=kda)
        q, k, v, g, beta, state = (x.float().to(device) for x in inputs)
        q, k, v, beta = (x.to(getattr(torch, dtype)) for x in (q, k, v, beta))
        tokens = pipeline.Tokens(q, k, v, g, beta)
        options = pipeline.Options(scale=0.1, state=spec, hardware_fp8=device == "cuda" and hardware_fp8())
        yield tokens, entering_state(state, options), options


def drawn(tokens, state, options):
    """(state, options, counters): the same call with error feedback, its roundings stochastic."""
    import replay_oracle as oracle

    spec = dataclasses.replace(options.state, rounding="stochastic", seed=3)
    counters = oracle.make_counters(tokens, len(state.values))
    return oracle.with_lost(state), dataclasses.replace(options, state=spec), counters


def decode(run, device: str, gate: str, part: str, heads: int = 2) -> None:
    """The recurrence, forward and backward; or a segment, two sequences in a row, with gradients put in place.

    In bfloat16 over two blocks of the backward, and in float32, whose backward goes token by token.
    """
    import torch

    from jlaqat.kernels import recurrent_pipeline as pipeline

    for count, dtype in ((18, "bfloat16"), (5, "float32")):
        tokens, state, options = dict(zip(GATES, decoding_calls(device, count, dtype, heads)))[gate]
        d_leaving = torch.ones(state.values.shape, device=device)
        if part == "whole":
            out = pipeline.forward(run, tokens, state, options, stride=1)
            pipeline.backward(run, tokens, state, out.saved, torch.ones_like(out.o), d_leaving, options)
            continue
        one_row = pipeline.Tokens(*(x[:1].contiguous() for x in tokens))
        first, counts = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 2], [1, 3]))
        segment = {"bounds": pipeline.Bounds(first, counts), "most": 3}
        state, options, counters = drawn(one_row, state, options)
        out = pipeline.forward(run, one_row, state, options, counters=counters, stride=1, **segment)
        into = pipeline.Gradients(*(torch.zeros(x.shape, device=device) for x in one_row), None)
        do = torch.ones_like(one_row.v)
        pipeline.backward(run, one_row, state, out.saved, do, d_leaving, options, into=into, **segment)


def replay(run, device: str, gate: str, ring: str, heads: int = 2) -> None:
    """Decoding by replay: many tokens forward and backward, and the same step by step; its ring plain or coded."""
    import replay_oracle as oracle
    import torch

    from jlaqat.kernels import recurrent_pipeline
    from jlaqat.kernels import replay_pipeline as pipeline

    tokens, state, options = dict(zip(GATES, decoding_calls(device, heads=heads)))[gate]
    counters = None
    if ring == "plain":
        entries = oracle.make_ring(tokens, 3, [1, 2], torch.bfloat16)
    else:
        width = recurrent_pipeline.Call(tokens, options).width
        tokens = oracle.with_key_codes(pipeline.Tokens(*tokens))
        state, options, counters = drawn(tokens, state, options)
        entries = oracle.make_ring(tokens, 3, [1, 2], oracle.CODED, width)
    out = pipeline.forward(run, tokens, state, entries, options, counters=counters, save=True)
    do, d_leaving = torch.ones_like(out.o), torch.ones(state.values.shape, device=device)
    pipeline.backward(run, tokens, state, entries, out, do, d_leaving, options)
    oracle.step_by_step(tokens, state, entries, options, run, counters)


def planted() -> None:
    """Writes 4 KB past the end of an array."""
    import torch
    from planted_error import write_past_the_end_kernel

    x = torch.zeros(1024, device="cuda")
    write_past_the_end_kernel[(1,)](x, 1024)
    torch.cuda.synchronize()


def chosen(runs: str) -> list[str]:
    """Runs by name, or by what names begin with up to a hyphen: "replay-kda" is two. Raises ValueError for others."""
    asked = runs.split(",") if runs else RUNS
    for name in asked:
        if not any(f"{run}-".startswith(f"{name}-") for run in RUNS):
            raise ValueError(f"--runs {name}: no such run; there are {', '.join(RUNS)}.")
    return [run for run in RUNS if any(f"{run}-".startswith(f"{name}-") for name in asked)]


def compiling(runs: list[str], tools: list[str], without_gpu: int) -> list[process.Part]:
    """Each run with all numbers of heads that the tools see, and no tool."""
    parts = []
    for name in runs:
        heads = ",".join(map(str, sorted({heads_under(tool, name) for tool in tools})))
        here = [sys.executable, __file__, "--here", name, "--heads", heads, "--without-gpu", str(without_gpu)]
        parts.append(process.Part(None, name, here))
    return parts


def under_tools(runs: list[str], tools: list[str], kernels: list[str]) -> list[process.Part]:
    names = [name.split(".")[1] for name in kernels] + [PLANTED_KERNEL]
    known = process.known_options(process.said_by_program("--help"))
    pairs = [("memcheck", PLANTED)] if "memcheck" in tools else []
    pairs += [(tool, name) for name in runs for tool in tools]
    parts = []
    for i, (tool, name) in enumerate(pairs):
        here = [sys.executable, __file__, "--here", name, "--heads", str(heads_under(tool, name))]
        parts.append(process.Part(tool, name, [*process.tool_command(tool, names, i, known), *here]))
    return parts


def run_all(parts: list[process.Part], log: Path, args: argparse.Namespace) -> list[dict]:
    """Rows of all parts, each printed and written to rows.jsonl as it ends."""
    rows = []
    for row in process.run_parts(parts, log, args.jobs, args.seconds):
        rows.append(row)
        with (log / "rows.jsonl").open("a") as f:
            f.write(json.dumps(row) + "\n")
        says = row["summary"] or row["last"] or ""
        print(
            f"{row['tool'] or 'compile':9} {row['run']:18} {row['state']:9} {row['seconds']:6.1f} s"
            f" {row['launches']:3} launches  {says}",
            flush=True,
        )
    return rows


def machine() -> dict:
    import torch
    import triton

    version = re.search(r"Version ([\d.]+)", process.said_by_program("--version"))
    versions = {"torch": torch.__version__, "triton": triton.__version__, "compute-sanitizer": version and version[1]}
    return {"machine": torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU", "versions": versions}


def print_table(table: list[dict], rows: list[dict], tools: list[str]) -> None:
    print(f"{'kernel':48}" + "".join(f"{tool + ': runs, clean, errors':>34}" for tool in tools))
    for line in table:
        cells = ([line[tool][key] for key in ("runs", "clean", "errors")] for tool in tools)
        print(f"{line['kernel']:48}" + "".join(f"{f'{a}, {b}, {c}':>34}" for a, b, c in cells))
    for row in rows:
        if row["state"] != "clean" and row["run"] != PLANTED:
            print(row["tool"], row["run"], row["state"], *(line[:160] for line in row["said"]), sep="\n    ")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", default="", help="names, or how they begin: gdn,replay-kda; without it, all")
    parser.add_argument("--tools", default="memcheck,racecheck")
    parser.add_argument("--jobs", type=int, default=min(15, os.cpu_count() or 1), help="processes at once")
    parser.add_argument("--seconds", type=float, default=300, help="time limit of each process")
    parser.add_argument("--log", type=Path, help="folder for what the tools print")
    parser.add_argument("--out", type=Path, help="JSON with a row for each run under a tool and for each kernel")
    parser.add_argument("--compiled", action="store_true", help="Triton's cache has all kernels: compile none first")
    parser.add_argument("--without-gpu", type=int, default=0, metavar="90", help="only compile, for this capability")
    parser.add_argument("--here", help=argparse.SUPPRESS)
    parser.add_argument("--heads", default="2", help=argparse.SUPPRESS)
    args = parser.parse_args()
    try:
        args.runs = chosen(args.runs)
    except ValueError as error:
        parser.error(str(error))
    args.tools = args.tools.split(",")
    if not (args.here or args.without_gpu or shutil.which(process.PROGRAM)):
        parser.error(f"{process.PROGRAM} is not on PATH; CUDA has it in its bin folder.")
    return args


def main() -> int:
    args = parsed()
    sys.path[:0] = [str(TESTS), str(TESTS.parent / "benchmarks")]
    if args.here:
        run_here(args.here, [int(count) for count in args.heads.split(",")], args.without_gpu)
        return 0
    from counters import kernel_names

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that parts end with this process
    log = args.log or Path(tempfile.mkdtemp())
    log.mkdir(parents=True, exist_ok=True)
    (log / "rows.jsonl").write_text("")
    compiled = [] if args.compiled else run_all(compiling(args.runs, args.tools, args.without_gpu), log, args)
    if args.without_gpu:
        return int(any(row["state"] != "clean" for row in compiled))
    kernels = kernel_names()
    rows = run_all(under_tools(args.runs, args.tools, kernels), log, args)
    table = process.kernel_rows(kernels, rows, args.tools)
    failures = process.failures_of(rows, table, all_runs=args.runs == list(RUNS))
    print_table(table, rows, args.tools)
    if args.out:
        result = machine() | {"failures": failures, "runs": rows, "kernels": table}
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    launched = sum(any(line[tool]["runs"] for tool in args.tools) for line in table)
    print("; ".join(failures) or f"no error in {launched} kernels", f"(reports in {log})")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
