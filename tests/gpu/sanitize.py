"""compute-sanitizer's memcheck and racecheck on a small run of every kernel.

    python3 tests/gpu/sanitize.py [--runs gdn-fp8,kda-fp8] [--tools memcheck,racecheck] [--log FOLDER]

Calls of two or three chunks run in processes of their own: first without a tool, which compiles, then under each.
Prints a table of kernels with the errors that a report names, and each process's own summary. Exit status 1 if there is
an error, if a kernel of jlaqat.kernels was launched by no run, or if memcheck misses the error that the run "planted"
makes on purpose.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
SETTINGS = ("plain", "fp8", "int8", "split", "portable", "hopper", "hopperplain")
X_IN_P = ("gdn-xinp", "gdn-xinphopper")
RUNS = (*(f"{gate}-{setting}" for gate in ("gdn", "kda") for setting in SETTINGS), *X_IN_P, "decode", "replay")
PLANTED = "planted"
LAUNCHED = "launched: "
# Failed calls of the driver are no error of a kernel: Triton's loader asks for shared memory that the tool has taken.
SANITIZER = ("compute-sanitizer", "--report-api-errors", "no", "--print-limit", "50")
SUMMARY = re.compile(r"(ERROR SUMMARY: \d+ error|RACECHECK SUMMARY: \d+ hazards? displayed \(\d+ error).*")


def run_here(name: str) -> None:
    """Launches the kernels of one run and prints their names."""
    import torch

    from jlaqat.torch_bridge.run import torch_run

    if name == PLANTED:
        return planted()
    device = "cuda" if torch.cuda.is_available() else "cpu"  # through the interpreter: to try this script
    launched = launch_all(name, torch_run, device)
    if device == "cuda":
        torch.cuda.synchronize()
    print(LAUNCHED + " ".join(sorted(launched)))


def launch_all(name: str, run, device: str) -> set[str]:
    """Names, as module.kernel, of what a run launches through `run`."""
    launched: set[str] = set()

    def record(launch):
        launched.add(f"{launch.kernel.fn.__module__.split('.')[-1]}.{launch.name}")
        return run(launch)

    {"decode": decode, "replay": replay}.get(name, functools.partial(chunks, name=name))(record, device)
    return launched


def chunks(run, device: str, name: str) -> None:
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
    sizes = dict(b=1, t=170 if packed else 130, h=1, hv=2, dk=128, dv=128)
    given = oracle.make_inputs(1, **sizes, kda=gate == "kda", n=3 if packed else None)
    inputs = cast([x.to(device) for x in given], torch.bfloat16, lengths)
    out = pipeline.forward(run, inputs, options)
    do, dfinal = torch.ones_like(out.o), torch.ones_like(out.final_state)
    pipeline.backward(run, inputs, out.residuals, do, dfinal, options)


def decoding_calls(device: str, count: int = 5, dtype: str = "bfloat16"):
    """(tokens, kept state, options) of `count` tokens of two sequences: GDN with E4M3 tiles, KDA with INT8 rows."""
    import kernel_oracle as oracle
    import torch
    from kernel_checks import hardware_fp8
    from recurrent_oracle import entering_state

    from jlaqat.kernels import recurrent_pipeline as pipeline
    from jlaqat.spec import QuantSpec

    for kda, spec in ((False, QuantSpec.fp8()), (True, QuantSpec.int8(granularity="key_row"))):
        inputs = oracle.make_inputs(3, b=2, t=count, h=1, hv=2, dk=128, dv=128, kda=kda)
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


def decode(run, device: str) -> None:
    """The recurrence, forward and backward; and a segment, two sequences in a row, with gradients put in place.

    In bfloat16 over two blocks of the backward, and in float32, whose backward goes token by token.
    """
    import torch

    from jlaqat.kernels import recurrent_pipeline as pipeline

    for tokens, state, options in (*decoding_calls(device, 18), *decoding_calls(device, 5, "float32")):
        out = pipeline.forward(run, tokens, state, options, stride=1)
        do, d_leaving = torch.ones_like(out.o), torch.ones(state.values.shape, device=device)
        pipeline.backward(run, tokens, state, out.saved, do, d_leaving, options)

        one_row = pipeline.Tokens(*(x[:1].contiguous() for x in tokens))
        first, count = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 2], [1, 3]))
        segment = {"bounds": pipeline.Bounds(first, count), "most": 3}
        state, options, counters = drawn(one_row, state, options)
        out = pipeline.forward(run, one_row, state, options, counters=counters, stride=1, **segment)
        into = pipeline.Gradients(*(torch.zeros(x.shape, device=device) for x in one_row), None)
        do = torch.ones_like(one_row.v)
        pipeline.backward(run, one_row, state, out.saved, do, d_leaving, options, into=into, **segment)


def replay(run, device: str) -> None:
    """Decoding by replay: many tokens forward and backward, and the same ones step by step; then with a coded ring."""
    import replay_oracle as oracle
    import torch

    from jlaqat.kernels import recurrent_pipeline
    from jlaqat.kernels import replay_pipeline as pipeline

    def check(tokens, state, ring, options, counters=None):
        out = pipeline.forward(run, tokens, state, ring, options, counters=counters, save=True)
        do, d_leaving = torch.ones_like(out.o), torch.ones(state.values.shape, device=device)
        pipeline.backward(run, tokens, state, ring, out, do, d_leaving, options)
        oracle.step_by_step(tokens, state, ring, options, run, counters)

    for tokens, state, options in decoding_calls(device):
        check(tokens, state, oracle.make_ring(tokens, 3, [1, 2], torch.bfloat16), options)
        width = recurrent_pipeline.Call(tokens, options).width
        tokens = oracle.with_key_codes(pipeline.Tokens(*tokens))
        state, options, counters = drawn(tokens, state, options)
        check(tokens, state, oracle.make_ring(tokens, 3, [1, 2], oracle.CODED, width), options, counters)


def planted() -> None:
    """Writes 4 KB past the end of an array."""
    import torch
    from planted_error import write_past_the_end_kernel

    x = torch.zeros(1024, device="cuda")
    write_past_the_end_kernel[(1,)](x, 1024)
    torch.cuda.synchronize()
    print(LAUNCHED)


def start(name: str, tool: str | None, log: Path) -> tuple[subprocess.Popen, Path]:
    command = [sys.executable, __file__, "--here", name]
    if tool is not None:
        command = [*SANITIZER, "--tool", tool, *command]
    path = log / f"{name}-{tool or 'compile'}.txt"
    # Every array is an allocation of its own, so that memcheck sees where it ends.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "JAX_PLATFORMS": "cpu"}
    with path.open("w") as f:
        return subprocess.Popen(command, stdout=f, stderr=subprocess.STDOUT, env=environment), path


def reports_of(runs: list[str], tools: list[str], log: Path) -> dict[tuple[str, str], str]:
    """What each tool printed of each run: all compile side by side, then all runs of a tool go side by side."""
    reports = {}
    for tool in (None, *tools):
        names = [*runs, PLANTED] if tool == "memcheck" else runs
        started = [(name, *start(name, tool, log)) for name in names]
        for name, process, path in started:
            process.wait()
            if tool is not None:
                reports[name, tool] = path.read_text()
    return reports


def is_clean(tool: str, text: str) -> bool:
    summary = SUMMARY.search(text)
    if summary is None:
        return False
    numbers = [int(number) for number in re.findall(r"\d+", summary.group(0))]
    return numbers[1 if tool == "racecheck" else 0] == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", default=",".join(RUNS))
    parser.add_argument("--tools", default="memcheck,racecheck")
    parser.add_argument("--log", type=Path, help="folder for what the tools print")
    parser.add_argument("--here", help=argparse.SUPPRESS)
    args = parser.parse_args()
    sys.path[:0] = [str(TESTS), str(TESTS.parent / "benchmarks")]
    if args.here:
        run_here(args.here)
        return 0
    from counters import kernel_names

    log = args.log or Path(tempfile.mkdtemp())
    log.mkdir(parents=True, exist_ok=True)
    runs, tools = args.runs.split(","), args.tools.split(",")
    kernels: set[str] = set()
    errors: collections.Counter = collections.Counter()
    failures = []
    for (name, tool), text in reports_of(runs, tools, log).items():
        summary, launched = SUMMARY.search(text), re.search(f"^{LAUNCHED}(.*)$", text, re.M)
        print(f"{tool:10} {name:10} {summary.group(0) if summary else 'no summary'}", flush=True)
        if name == PLANTED:
            if is_clean(tool, text) or "write_past_the_end_kernel" not in text:
                failures.append(f"{tool} did not find the error on purpose")
            continue
        if not is_clean(tool, text) or launched is None:
            failures.append(f"{tool} {name}")
        kernels |= set(launched.group(1).split()) if launched else set()
        errors.update((kernel, tool) for kernel in re.findall(r"\bat (\w+_kernel)\b", text))
    print(f"{'kernel':48}" + "".join(f"{tool:>12}" for tool in tools))
    for kernel in sorted(kernels):
        counts = (errors[kernel.split(".")[1], tool] for tool in tools)
        print(f"{kernel:48}" + "".join(f"{count:12}" for count in counts))
    missed = sorted(set(kernel_names()) - kernels) if set(runs) == set(RUNS) else []
    if missed:
        failures.append(f"launched by no run: {', '.join(missed)}")
    print("; ".join(failures) or f"no error in {len(kernels)} kernels", f"(reports in {log})")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
