"""Tokens per second of a training step of a whole model: plain, with rounding inside (QAT), and on the xla backend.

    python3 benchmarks/qat_step.py                 # one NVIDIA GPU, under three minutes on an H200
    python3 benchmarks/qat_step.py --smoke         # a tiny model, on a CPU too: does it run?

A decoder of 12 Gated DeltaNet or KDA layers, 1024 wide, 8 heads of 128, in bfloat16 with float32 parameters, AdamW,
random tokens, 8 x 2048 a step, layers scanned; the step is `jlaqat.make_train_step`'s, jitted and donated. A row is
timed over blocks of queued steps: the median, least and most. Compile time is that of the first call, kernels included.
`program MB` is what XLA plans for the step (arguments and temporaries), `peak MB` the process's high-water mark so far:
rows run from small to large, so it is a row's own where it grew.

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
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from rich.console import Console
from rich.table import Table

import jlaqat

BLOCK_S = 3.0
RECIPES: dict[str, str | None] = {"plain": None, "state+w fp8": "state_w_fp8", "state fp8": "state_fp8"}


@dataclasses.dataclass(frozen=True)
class Size:
    layers: int = 12
    hidden: int = 1024
    heads: int = 8
    head_dim: int = 128
    vocab: int = 32_000
    batch: int = 8
    tokens: int = 2048
    queued: int = 8  # steps a block, fewer where they would take longer than BLOCK_S
    blocks: int = 3


SMOKE = Size(layers=2, hidden=32, heads=2, head_dim=16, vocab=64, batch=2, tokens=70, queued=2, blocks=2)


def measure(size: Size, gate: str, quant: str, backend: str) -> dict[str, Any]:
    """A row: speed, memory, compile time and the losses, which tell whether two backends train alike."""
    config = jlaqat.ModelConfig(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        num_layers=size.layers,
        pattern=(gate,),
        num_heads=size.heads,
        head_dim=size.head_dim,
        dtype="bfloat16",
        scan_layers=True,
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
    compile_s = time.perf_counter() - began
    losses = []
    for _ in range(2):
        start = time.perf_counter()
        state, metrics = compiled(state, batch)
        losses.append(float(metrics["loss"]))
    queued = min(size.queued, max(1, int(BLOCK_S / (time.perf_counter() - start))))
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
        "compile_s": round(compile_s, 1),
        "lower_s": round(lowered_s, 1),
        "program_mb": round((memory.argument_size_in_bytes + memory.temp_size_in_bytes) / 1e6) if memory else None,
        "peak_mb": round(stats["peak_bytes_in_use"] / 1e6) if "peak_bytes_in_use" in stats else None,
        "parameters": parameters,
        "losses": [round(x, 5) for x in losses],
    }


def rows(size: Size, gates: list[str], settings: list[tuple[str, str]], about: dict[str, Any]):
    for gate in gates:
        for quant, backend in settings:
            row: dict[str, Any] = {"model": gate, "quant": quant, "backend": backend}
            try:
                row |= measure(size, gate, quant, backend)
            except Exception as error:  # a row that runs out of memory says so, and the others still run
                row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
            print(json.dumps(row), flush=True)
            yield row | {"dtype": "bfloat16", **dataclasses.asdict(size), **about}


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
        "(default: plain:triton,state+w fp8:triton,state+w fp8:xla; without a GPU the xla rows)",
    )
    parser.add_argument("--smoke", action="store_true", help="a tiny model and few steps, written nowhere unless --out")
    parser.add_argument("--batch", type=int, help="sequences a step")
    parser.add_argument("--tokens", type=int, help="tokens a sequence")
    args = parser.parse_args()
    size = SMOKE if args.smoke else Size()
    size = dataclasses.replace(size, **{n: getattr(args, n) for n in ("batch", "tokens") if getattr(args, n)})
    on_gpu = jax.default_backend() == "gpu"
    pairs = args.rows or ("plain:triton,state+w fp8:triton,state+w fp8:xla" if on_gpu else "plain:xla,state+w fp8:xla")
    settings = [(quant, backend) for quant, _, backend in (pair.partition(":") for pair in pairs.split(","))]
    unknown = [quant for quant, _ in settings if quant not in RECIPES]
    if unknown:
        parser.error(f"--rows: {unknown[0]!r} is not one of {', '.join(RECIPES)}")
    out = args.out or (None if args.smoke else Path(os.environ.get("OUT", Path(__file__).parent / "results")))
    path = out if out is None or out.suffix == ".json" else out / "qat_step.json"
    about = {
        "machine": jax.devices()[0].device_kind,
        "date": str(datetime.date.today()),
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "flax", "optax")},
    }
    if on_gpu:
        import triton

        about["versions"]["triton"] = triton.__version__
    found: list[dict[str, Any]] = []
    earlier = json.loads(path.read_text()) if path is not None and path.exists() else []
    for row in rows(size, args.gates.split(","), settings, about):
        found.append(row)
        if path is not None:  # after each row: a run that is cut short keeps what it measured
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(earlier + found, indent=1) + "\n")
    Console(width=140).print(table(found))


if __name__ == "__main__":
    main()
