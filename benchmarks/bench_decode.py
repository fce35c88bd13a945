"""Times decoding with a rounded state on one GPU: a step, and training over a suffix of 512 tokens.

    python3 benchmarks/bench_decode.py --out benchmarks/results/decode_h200.json

Steps (B128 H32 K=V=128, bfloat16 tokens, one token a sequence) and the forward over 512 tokens (B8 H16) are replayed
from a CUDA graph of 20 calls, per call, so that no launch overhead is in them; FLA's fused recurrent kernels likewise
(over 512 tokens its calls are queued). Replay's steps go through a window of 16 and are averaged. States are larger
than the caches. Training (B8 H16 T512) runs through JAX, 10 calls queued (2 of the xla backend), per call: forward, and
forward + backward with a state kept every 64 tokens and with every state kept.

    python3 benchmarks/bench_decode.py --out … --parts training --training-modes token     # appends to what is there
    python3 benchmarks/bench_decode.py --without-gpu 90      # compile only, for a GPU machine's cache (without_gpu.py)
"""

from __future__ import annotations

import argparse
import collections
import datetime
import functools
import itertools
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import torch

from jlaqat import DecodePolicy, QuantSpec
from jlaqat.kernels import recurrent_pipeline as pipeline
from jlaqat.kernels import replay_pipeline
from jlaqat.kernels.recurrent_pipeline import State, Tokens
from jlaqat.torch_bridge.run import torch_run

RESULTS = Path(__file__).parent / "results" / "decode_h200.json"
SPECS = {
    "float32": None,
    "float16": QuantSpec.float16(),
    "e4m3 tile 64": QuantSpec.fp8(),
    "e4m3 tile 32": QuantSpec.fp8(block_v=32),
    "int8 tile 32": QuantSpec.int8(block_v=32),
    "int8 key_row": QuantSpec.int8(granularity="key_row"),
    "e4m3 value_row": QuantSpec.fp8(granularity="value_row"),
}
STEPS = 20
WINDOW = 16  # of replay
WARPS = [1, 2, 4, 8]  # tried beside the defaults
GATES = ["gdn", "kda"]
MODES = ["token", "replay"]  # of training
BACKENDS = ["triton", "xla"]


def queued_milliseconds(call, repeats: int = 5) -> float:
    """Median of `STEPS` queued calls, per call."""
    call()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(STEPS):
            call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / STEPS * 1e3)
    return statistics.median(times)


def milliseconds(call, repeats: int = 7) -> float:
    """Median of replays of a CUDA graph of `STEPS` calls, per call."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(STEPS):
            call()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / STEPS)
    return statistics.median(times)


def tokens(b: int, t: int, h: int, d: int, kda: bool) -> Tokens:
    gen = torch.Generator(device="cuda").manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=gen, device="cuda")

    q, k = (torch.nn.functional.normalize(normal(b, t, h, d), dim=-1).bfloat16() for _ in range(2))
    g = -0.05 * (normal(b, t, h, d) if kda else normal(b, t, h)).abs()
    return Tokens(q, k, normal(b, t, h, d).bfloat16(), g, normal(b, t, h).sigmoid().bfloat16())


def kept_states(spec: QuantSpec | None, n: int, h: int, d: int) -> State:
    """Random codes and scales (or values) of states."""
    if spec is None or spec.format in ("bfloat16", "float16"):
        dtype = torch.float32 if spec is None else getattr(torch, spec.format)
        return State(torch.randn(n, h, d, d, device="cuda").to(dtype), None)
    values = torch.randint(0, 120, (n, h, d, d), device="cuda", dtype=torch.uint8)
    groups = {"key_row": (d, d // 32), "value_row": (d,)}.get(str(spec.granularity), (d // spec.block_v,))
    return State(values, torch.full((n, h, *groups), 0.01, device="cuda"))


def kernel_rows(what: str, b: int, t: int, h: int, d: int, backward: bool = False):
    """One kernel alone, with the best warps and width; and FLA's forward."""
    for gate in GATES:
        x = tokens(b, t, h, d, gate == "kda")
        for name, spec in SPECS.items():
            state, timed = kept_states(spec, b, h, d), []
            fixed = name.split()[1:2] in (["tile"], ["key_row"])
            widths = (None,) if fixed else (16, 32, 64)
            for warps, width in [(None, None), *itertools.product(WARPS, widths)]:
                options = pipeline.Options(scale=d**-0.5, state=spec, hardware_fp8=True, width=width, warps=warps)

                call = functools.partial(pipeline.forward, torch_run, x, state, options)
                if backward:
                    saved = pipeline.forward(torch_run, x, state, options, stride=1).saved
                    do, ds = torch.randn_like(x.v), torch.randn(b, h, d, d, device="cuda")
                    call = functools.partial(pipeline.backward, torch_run, x, state, saved, do, ds, options)
                timed.append((milliseconds(call, 5), warps, width))
            best, warps, width = min(timed, key=lambda row: row[0])
            row = dict(what=what, gate=gate, state=name, ms=timed[0][0])
            yield row | dict(ms_best=best, best_warps=warps, best_width=width)
            print("   ", *(f"{ms:.4f}@{warps}w{width}" for ms, warps, width in timed), flush=True)
        if not backward:
            yield dict(what=what, gate=gate, state="FLA float32") | fla_row(x, b, h, d, gate == "kda")


def step_rows(quick: bool):
    yield from kernel_rows("step", *((4, 1, 2, 64) if quick else (128, 1, 32, 128)))


def forward_rows(quick: bool):
    yield from kernel_rows("512 tokens", *((1, 64, 2, 64) if quick else (8, 512, 16, 128)))
    yield from kernel_rows("backward of 64 tokens", *((1, 64, 2, 64) if quick else (8, 64, 16, 128)), backward=True)
    yield from kernel_rows("backward of 512 tokens", *((1, 64, 2, 64) if quick else (8, 512, 16, 128)), backward=True)


def replay_rows(quick: bool):
    """Steps of replay with a bfloat16 ring: over a whole window, and those that join the ring or flush it alone."""
    b, h, d = (4, 2, 64) if quick else (128, 32, 128)
    for gate in GATES:
        x = tokens(b, 1, h, d, gate == "kda")
        for name in ("e4m3 tile 64", "int8 key_row", "e4m3 value_row"):
            options = replay_pipeline.Options(scale=d**-0.5, state=SPECS[name], hardware_fp8=True)
            state = kept_states(SPECS[name], b, h, d)
            entries = [torch.randn(b, WINDOW, h, d, device="cuda").mul(d**-0.5).bfloat16() for _ in range(2)]
            gates = x.g.expand(b, WINDOW, *x.g.shape[2:]).contiguous()
            ring = replay_pipeline.Ring(*entries, gates, torch.zeros(b, dtype=torch.int32, device="cuda"))

            def window(state=state, ring=ring, options=options, x=x):
                for _ in range(WINDOW):
                    ring = replay_pipeline.step(torch_run, x, state, ring, options).ring

            def at(cursor: int, state=state, ring=ring, options=options, x=x):
                ring = ring._replace(cursor=torch.full_like(ring.cursor, cursor))
                return milliseconds(lambda: replay_pipeline.step(torch_run, x, state, ring, options))

            row = dict(what=f"step, replay {WINDOW}", gate=gate, state=name, ms=milliseconds(window) / WINDOW)
            yield row | dict(ms_empty_ring=at(0), ms_half_full=at(WINDOW // 2), ms_flush=at(WINDOW - 1))


def fla_row(x: Tokens, b: int, h: int, d: int, kda: bool) -> dict:
    try:
        if kda:
            from fla.ops.kda import fused_recurrent_kda as op
        else:
            from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule as op
        state = torch.randn(b, h, d, d, device="cuda")

        def call():
            with torch.no_grad():
                return op(*x[:3], x.g, x.beta, initial_state=state, output_final_state=True)

        # Longer calls hide their launches, and inside a graph FLA reads what is not there.
        return {"ms": milliseconds(call) if x.q.shape[1] == 1 else queued_milliseconds(call)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error!s:.200}"}


def training_calls(policy: DecodePolicy):
    """(backend, tokens between kept states or None, label) of what is timed under a policy."""
    for backend in BACKENDS:
        yield backend, None, "forward"
        # Replay's kernels keep a checkpoint a window, and the xla backend would want 9 GB.
        for every in (64, 1) if backend == "triton" and policy.mode == "token" else (64,):
            yield backend, every, "forward + backward"


def training_rows(quick: bool, capability: int = 0):
    """capability: compile the kernels for this GPU, which is not there, and time nothing."""
    import jax
    import jax.numpy as jnp

    import jlaqat

    b, t, h, d = (1, 64, 2, 64) if quick else (8, 512, 16, 128)
    for gate in GATES:
        x = tokens(b, t, h, d, gate == "kda")
        x = [jnp.asarray(a.float().cpu().numpy()) for a in x]
        x = [a.astype(jnp.bfloat16) if i != 3 else a for i, a in enumerate(x)]
        replay: dict[str, Any] = dict(mode="replay", window=WINDOW, ring_dtype="bfloat16")
        modes = [{"token": {}, "replay": replay}[mode] for mode in MODES]
        for name, mode in itertools.product(("e4m3 tile 64", "int8 tile 32", "int8 key_row"), modes):
            policy = DecodePolicy(state=SPECS[name], **mode)
            for backend, every, label in training_calls(policy):

                def forward(*x, policy=policy, backend=backend, every=every):
                    kept = {} if every is None else {"checkpoint_every": every}
                    return jlaqat.delta_rule_decode(*x, quant=policy, backend=backend, **kept)[0]

                def both(*x, forward=forward):
                    return jax.grad(lambda *x: forward(*x).astype(jnp.float32).sum(), argnums=range(5))(*x)

                function = jax.jit(forward if every is None else both)
                if capability and backend == "xla":
                    continue
                if capability:
                    with jlaqat.compile_for(capability):
                        function.trace(*x).lower(lowering_platforms=("cuda",))
                    continue
                began = time.perf_counter()
                compiled = function.lower(*x).compile()
                compile_s = time.perf_counter() - began
                jax.block_until_ready(compiled(*x))
                count, times = 10 if backend == "triton" else 2, []
                for _ in range(5 if backend == "triton" else 3):
                    start = time.perf_counter()
                    for _ in range(count):
                        out = compiled(*x)
                    jax.block_until_ready(out)
                    times.append((time.perf_counter() - start) / count * 1e3)
                yield dict(
                    what=f"training, {label}",
                    mode=policy.mode,
                    gate=gate,
                    state=name,
                    backend=backend,
                    checkpoint_every=every,
                    ms=statistics.median(times),
                    compile_s=compile_s,
                    temporary_mb=compiled.memory_analysis().temp_size_in_bytes / 1e6,
                )


def compile_only(capability: int, parts: list[str], quick: bool) -> None:
    """What the parts launch on the triton backend, FLA's kernels too, for a GPU that is not there."""
    import without_gpu

    global milliseconds, queued_milliseconds

    def launched(call, repeats: int = 1) -> float:
        call()
        return 0.0

    without_gpu.pretend(capability)
    milliseconds = queued_milliseconds = launched
    for part in parts:
        rows = training_rows(quick, capability) if part == "training" else PARTS[part](quick)
        collections.deque(rows, maxlen=0)


PARTS = {"step": step_rows, "forward": forward_rows, "training": training_rows, "replay": replay_rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="JSON file; rows are added to it")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see whether everything runs")
    parser.add_argument("--parts", default="step,replay,forward,training")
    parser.add_argument("--gates", default="gdn,kda")
    parser.add_argument("--training-modes", default="token,replay")
    parser.add_argument("--backends", default="triton,xla", help="that train; an xla row takes seconds")
    parser.add_argument("--defaults", action="store_true", help="default warps and widths alone, no others beside them")
    parser.add_argument("--without-gpu", type=int, default=0, metavar="90", help="compile only, for this GPU")
    args = parser.parse_args()
    GATES[:], MODES[:] = args.gates.split(","), args.training_modes.split(",")
    BACKENDS[:] = args.backends.split(",")
    if args.defaults:
        WARPS.clear()
    if args.without_gpu:
        return compile_only(args.without_gpu, args.parts.split(","), args.quick)
    import triton

    about = {
        "machine": torch.cuda.get_device_name(),
        "date": str(datetime.date.today()),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    found = json.loads(args.out.read_text()) if args.out.exists() else []
    for part in args.parts.split(","):
        for row in PARTS[part](args.quick):
            print(*(f"{k}={round(v, 4) if isinstance(v, float) else v}" for k, v in row.items()), flush=True)
            found.append(row | about)
            with open(args.out, "w") as f:  # after each row: a run that is cut short keeps what it measured
                json.dump(found, f, indent=1)


if __name__ == "__main__":
    main()
