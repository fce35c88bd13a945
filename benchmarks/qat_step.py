"""Tokens per second of a training step of a whole model: plain, with rounding inside (QAT), and on the xla backend.

    python3 benchmarks/qat_step.py                 # one NVIDIA GPU, about three minutes on an H200
    python3 benchmarks/qat_step.py --smoke         # a tiny model, on a CPU too: does it run?

A decoder of 12 Gated DeltaNet or KDA layers, 1024 wide, 8 heads of 128, in bfloat16 with float32 parameters, AdamW,
random tokens, 8 x 2048 a step, layers scanned; the step is `jlaqat.make_train_step`'s, jitted and donated. A row is
timed over blocks of queued steps: the median, least and most. Every row has a process of its own; they compile side by
side, then each is alone on the GPU while it is timed. Compile time is that of a first call, kernels included where
Triton's cache does not have them, with the processes that `compiling` counts at work. `program MB` is what XLA plans
for the step (arguments and temporaries), `peak MB` the process's high-water mark.

Writes one JSON object a row to --out (default $OUT, else benchmarks/results; qat_step.json) and prints a table.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import device_time
import jax
import numpy as np
import optax
from flax import nnx
from rich.console import Console
from rich.table import Table

import jlaqat

BLOCK_S = 3.0
RECIPES: dict[str, str | None] = {"plain": None, "state+w fp8": "state_w_fp8", "state fp8": "state_fp8"}
DEFAULT_ROWS = "plain:triton,state+w fp8:triton,plain:xla,state+w fp8:xla"


@dataclasses.dataclass(frozen=True)
class Size:
    layers: int = 12
    hidden: int = 1024
    heads: int = 8
    head_dim: int = 128
    vocab: int = 32_000
    batch: int = 8
    tokens: int = 2048
    queued: int = 8  # steps a block, fewer where they would take longer than block_s
    blocks: int = 3
    block_s: float = BLOCK_S
    remat: bool = False  # layers are computed again in the backward


SMOKE = Size(layers=2, hidden=32, heads=2, head_dim=16, vocab=64, batch=2, tokens=70, queued=2, blocks=2)


def measure(size: Size, gate: str, quant: str, backend: str, time_after: float = 0.0) -> dict[str, Any]:
    """A row: speed, memory, compile time and the losses, which tell whether two backends train alike."""
    compiled, state, batch, found = prepare(size, gate, quant, backend)
    time.sleep(max(0.0, time_after - time.time()))
    with device_time.gpu_lock(exclusive=True):
        return found | timed(size, compiled, state, batch)


def prepare(size: Size, gate: str, quant: str, backend: str) -> tuple[Any, Any, Any, dict[str, Any]]:
    """The compiled step, its state and batch, and what is known of them."""
    config = jlaqat.ModelConfig(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        num_layers=size.layers,
        pattern=(gate,),
        num_heads=size.heads,
        head_dim=size.head_dim,
        dtype="bfloat16",
        scan_layers=True,
        remat=size.remat,
        backend=backend,
    )
    model = jlaqat.DecoderLM(config, rngs=nnx.Rngs(0))
    recipe = RECIPES[quant]
    if recipe is not None:
        jlaqat.quantize(model, jlaqat.load_recipe(recipe))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4))
    state = jlaqat.create_train_state(model, optimizer)
    step = jlaqat.make_train_step(model, optimizer)
    parameters = jlaqat.count_params(model)["total"]
    del model
    tokens = np.random.default_rng(0).integers(0, size.vocab, (size.batch, size.tokens + 1), dtype=np.int32)
    batch = jax.device_put({"inputs": tokens[:, :-1], "targets": tokens[:, 1:]})

    began = time.perf_counter()
    lowered = jax.jit(step, donate_argnums=0).lower(state, batch)
    lowered_s = time.perf_counter() - began
    compiled = lowered.compile()
    found = {
        "compile_s": round(time.perf_counter() - began, 1),
        "lower_s": round(lowered_s, 1),
        "parameters": parameters,
    }
    return compiled, state, batch, found


def timed(size: Size, compiled: Any, state: Any, batch: Any) -> dict[str, Any]:
    losses = []
    for _ in range(2):
        start = time.perf_counter()
        state, metrics = compiled(state, batch)
        losses.append(float(metrics["loss"]))
    queued = min(size.queued, max(1, int(size.block_s / (time.perf_counter() - start))))
    times = []
    for _ in range(size.blocks):
        start = time.perf_counter()
        for _ in range(queued):
            state, metrics = compiled(state, batch)
        losses.append(float(metrics["loss"]))  # waits for the block
        times.append((time.perf_counter() - start) / queued)
    if not np.isfinite(losses).all():
        raise FloatingPointError(f"losses {losses}")
    memory, stats = compiled.memory_analysis(), jax.devices()[0].memory_stats() or {}
    per_step = size.batch * size.tokens
    return {
        "tokens_per_s": round(per_step / statistics.median(times)),
        "tokens_per_s_min": round(per_step / max(times)),
        "tokens_per_s_max": round(per_step / min(times)),
        "steps": size.blocks * queued,
        "ms": round(1e3 * statistics.median(times), 2),
        "program_mb": round((memory.argument_size_in_bytes + memory.temp_size_in_bytes) / 1e6) if memory else None,
        "peak_mb": round(stats["peak_bytes_in_use"] / 1e6) if "peak_bytes_in_use" in stats else None,
        "losses": [round(x, 5) for x in losses],
    }


def row(size: Size, gate: str, quant: str, backend: str, time_after: float) -> dict[str, Any]:
    found: dict[str, Any] = {"model": gate, "quant": quant, "backend": backend}
    try:
        found |= measure(size, gate, quant, backend, time_after)
    except Exception as error:  # a row that runs out of memory says so, and the others still run
        found["error"] = f"{type(error).__name__}: {str(error)[:300]}"
    versions = {name: importlib.metadata.version(name) for name in ("jax", "flax", "optax")}
    if jax.default_backend() == "gpu":
        import triton

        versions["triton"] = triton.__version__
    about = {"machine": jax.devices()[0].device_kind, "date": str(datetime.date.today()), "versions": versions}
    return found | {"dtype": "bfloat16", **dataclasses.asdict(size), **about}


def rows(settings: list[tuple[str, str, str]], arguments: list[str], jobs: int):
    """Rows as they come, each from a process of its own, `jobs` at once."""
    waiting, going = list(settings), []
    while waiting or going:
        while waiting and len(going) < jobs:
            command = [sys.executable, __file__, "--row", ":".join(waiting.pop(0)), *arguments]
            going.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        for process in [process for process in going if process.poll() is not None]:
            going.remove(process)
            printed = process.communicate()[0].splitlines()
            if printed:  # a process that died has said why
                yield json.loads(printed[-1]) | {"compiling": min(jobs, len(settings))}
        time.sleep(0.1)


def table(found: list[dict[str, Any]]) -> Table:
    shown = Table(title="Training step", header_style="bold")
    names = (
        "model",
        "quant",
        "backend",
        "tokens/s",
        "ms a step",
        "of plain",
        "compile s",
        "program MB",
        "peak MB",
        "loss",
    )
    for name in names:
        shown.add_column(name, justify="left" if name in names[:3] else "right")
    plain = {
        row["model"]: row.get("tokens_per_s") for row in found if row["quant"] == "plain" and row["backend"] != "xla"
    }
    for row in found:
        head = [row["model"], row["quant"], row["backend"]]
        if "error" in row:
            shown.add_row(*head, row["error"][:60])
            continue
        share = f"{row['tokens_per_s'] / plain[row['model']]:.2f}" if plain.get(row["model"]) else "–"
        memory = [f"{row[key]:,}" if row[key] is not None else "–" for key in ("program_mb", "peak_mb")]
        shown.add_row(
            *head, f"{row['tokens_per_s']:,}", f"{row['ms']:.1f}", share, f"{row['compile_s']:.1f}", *memory,
            f"{row['losses'][-1]:.4f}",
        )  # fmt: skip
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder or .json file; rows are appended")
    parser.add_argument("--gates", default="gdn,kda", help="of gdn, kda")
    parser.add_argument(
        "--rows",
        help="quant:backend pairs, of plain, state fp8, state+w fp8 and of triton, xla "
        f"(default: {DEFAULT_ROWS}; with --smoke the xla rows)",
    )
    parser.add_argument("--smoke", action="store_true", help="a tiny model and few steps, written nowhere unless --out")
    parser.add_argument("--batch", type=int, help="sequences a step")
    parser.add_argument("--tokens", type=int, help="tokens a sequence")
    parser.add_argument("--remat", action="store_true", help="compute layers again in the backward")
    parser.add_argument("--jobs", type=int, default=8, help="rows that compile at once")
    parser.add_argument("--block-s", type=float, help=f"seconds of a timed block, about ({BLOCK_S:g})")
    parser.add_argument("--time-after", type=float, default=0.0, help="seconds in which rows are only compiled")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    args = parser.parse_args()
    size = SMOKE if args.smoke else Size()
    given = {name: value for name in ("batch", "tokens", "remat", "block_s") if (value := getattr(args, name))}
    size = dataclasses.replace(size, **given)
    if args.row:
        print(json.dumps(row(size, *args.row.split(":"), args.time_after)))
        return
    pairs = args.rows or ("plain:xla,state+w fp8:xla" if args.smoke else DEFAULT_ROWS)
    settings = [(gate, *pair.split(":")) for gate in args.gates.split(",") for pair in pairs.split(",")]
    unknown = [quant for _, quant, _ in settings if quant not in RECIPES]
    if unknown:
        parser.error(f"--rows: {unknown[0]!r} is not one of {', '.join(RECIPES)}")
    out = args.out or (None if args.smoke else Path(os.environ.get("OUT", Path(__file__).parent / "results")))
    path = out if out is None or out.suffix == ".json" else out / "qat_step.json"
    arguments = ["--smoke"] * args.smoke + [f"--{k.replace('_', '-')}={v}" for k, v in given.items() if k != "remat"]
    arguments += ["--remat"] * args.remat + [f"--time-after={time.time() + args.time_after}"]
    found: list[dict[str, Any]] = []
    earlier = json.loads(path.read_text()) if path is not None and path.exists() else []
    for new in rows(settings, arguments, args.jobs):
        print(json.dumps(new), flush=True)
        found.append(new)
        if path is not None:  # after each row: a run that is cut short keeps what it measured
            kept = [old for old in earlier if not any(same(old, one) for one in found)]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("[\n" + ",\n".join(" " + json.dumps(one) for one in kept + found) + "\n]\n")
    order = {setting: i for i, setting in enumerate(settings)}
    Console(width=140).print(table(sorted(found, key=lambda r: order[r["model"], r["quant"], r["backend"]])))


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether two rows measured the same thing."""
    return all(a.get(name) == b.get(name) for name in ("model", "quant", "backend", "batch", "tokens", "remat"))


if __name__ == "__main__":
    main()
