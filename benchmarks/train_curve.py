"""Loss curves of `jlaqat train` with rounded states and w: do the kernels train as the xla backend does?

    python3 benchmarks/train_curve.py --jobs 2                        # eight runs, two at a time
    python3 benchmarks/train_curve.py --runs "xla float32"            # one of them; what the file has of others stays
    python3 benchmarks/train_curve.py --limit 200                     # seconds; then runs count as far as they came
    python3 benchmarks/train_curve.py --smoke                         # on a CPU: does it run? Kernels are left out

Each run is the command line's own with the configs train/gdn_1024_fp8 and train/kda_1024_fp8 (12 layers, 1024 wide), at
half of their length, on the text files in --text (this repository's docs): the same data in the same order. Runs of a
gate differ in the backend of the recurrence alone (triton, xla; bfloat16), and, for a scale of what a difference means,
in the activations' dtype (xla, float32) and in the seed of the weights (xla, seed 1). The distance between two curves
is the mean absolute difference of their losses, smoothed over 20 steps, after the warm-up, as far as both go.

Writes losses and distances to benchmarks/results/train_curve_h200.json and a plot beside it.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
SMOOTH = 20
RUNS = {
    "triton bf16": dict(backend="triton", dtype="bfloat16", seed=0),
    "xla bf16": dict(backend="xla", dtype="bfloat16", seed=0),
    "xla float32": dict(backend="xla", dtype="float32", seed=0),
    "xla bf16, seed 1": dict(backend="xla", dtype="bfloat16", seed=1),
    "triton bf16, seed 1": dict(backend="triton", dtype="bfloat16", seed=1),
}
REFERENCE = "xla bf16"


def overrides(run: dict[str, Any], text: str, steps: int, smoke: bool) -> list[str]:
    values = {
        "model.backend": run["backend"],
        "model.dtype": run["dtype"],
        "data.paths": f"[{text}]",
        "data.seq_len": 70 if smoke else 1024,
        "seed": run["seed"],
        "steps": steps,
        "optimizer.warmup_steps": steps // 10,
        "logging": "{every: 1, quantizers_every: 0, tensorboard: false, progress: false}",
        "evaluation": "{every: 0, batches: 4}",
        "checkpoint.every": 0,
    }
    if smoke:
        size = {"hidden_size": 32, "num_layers": 1, "num_heads": 1, "head_dim": 16}
        values |= {f"model.{name}": value for name, value in size.items()} | {"data.batch_size": 2}
    return [f"{name}={value}" for name, value in values.items()]


def start(gate: str, run: dict[str, Any], folder: Path, args: argparse.Namespace) -> subprocess.Popen:
    command = [sys.executable, "-m", "jlaqat.cli", "train", "--config", f"train/{gate}_1024_fp8"]
    command += ["--directory", str(folder), *overrides(run, args.text, args.steps, args.smoke)]
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    with folder.with_suffix(".log").open("w") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)


@functools.cache
def about() -> dict[str, Any]:
    """What the runs ran on, asked of a process of its own: this one leaves the GPU to them."""
    code = "import jax; print(jax.devices()[0].device_kind)"
    machine = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    versions = {name: importlib.metadata.version(name) for name in ("jax", "flax", "optax")}
    return {"machine": machine, "date": str(datetime.date.today()), "versions": versions}


def losses_of(folder: Path) -> list[float]:
    """Of each step so far."""
    path = folder / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    whole = text[: text.rfind("\n") + 1]  # a line may be half written
    lines = [json.loads(line) for line in whole.splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "train"]


def held_out(folder: Path) -> float | None:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return next((line["loss"] for line in reversed(lines) if line["kind"] == "eval"), None)


def smoothed(losses: list[float]) -> list[float]:
    return [sum(losses[max(0, i - SMOOTH + 1) : i + 1]) / min(i + 1, SMOOTH) for i in range(len(losses))]


def distance(a: list[float], b: list[float]) -> float | None:
    """Mean absolute difference of two smoothed curves after the first tenth."""
    pairs = list(zip(smoothed(a), smoothed(b)))
    pairs = pairs[len(pairs) // 10 + SMOOTH :]
    return sum(abs(x - y) for x, y in pairs) / len(pairs) if pairs else None


def run_all(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows as the runs end."""
    names = ["xla bf16", "xla bf16, seed 1"] if args.smoke else args.runs or list(RUNS)
    waiting, going = [(gate, name) for gate in args.gates.split(",") for name in names], []
    end = time.monotonic() + args.limit
    with tempfile.TemporaryDirectory() as root:
        while waiting or going:
            if time.monotonic() > end:
                waiting.clear()
                for *_, process, _ in going:
                    process.kill()
                    process.wait()
            while waiting and len(going) < args.jobs:
                gate, name = waiting.pop(0)
                folder = Path(root) / f"{gate}-{name}".replace(" ", "-").replace(",", "")
                going.append((gate, name, folder, start(gate, RUNS[name], folder, args), time.monotonic()))
            for job in [job for job in going if job[3].poll() is not None]:
                going.remove(job)
                gate, name, folder, process, began = job
                log, losses = folder.with_suffix(".log").read_text(), losses_of(folder)
                if process.returncode and time.monotonic() <= end:
                    raise RuntimeError(f"{gate}, {name} ended with status {process.returncode}:\n{log[-2000:]}")
                if process.returncode and len(losses) <= 2 * SMOOTH:
                    print(f"{gate}, {name}: {len(losses)} steps when the time was up; too few. Its log ends:")
                    print(log[-400:], flush=True)
                    continue
                row = {"gate": gate, "run": name, **RUNS[name], "quant": "state+w fp8", "steps": len(losses)}
                row |= about()
                ended = None if process.returncode else held_out(folder)
                row |= {"held_out": ended, "seconds": round(time.monotonic() - began, 1)}
                yield row | {"losses": [round(x, 5) for x in losses]}
                print(gate, name, f"last {losses[-1]:.4f}, held out {row['held_out']}", flush=True)
            time.sleep(0.2)


def add_distances(rows: list[dict[str, Any]]) -> None:
    """`distance`: of each curve from the gate's xla curve in bfloat16, if that is there."""
    references = {row["gate"]: row["losses"] for row in rows if row["run"] == REFERENCE}
    for row in rows:
        reference = references.get(row["gate"])
        apart = None if reference is None else distance(row["losses"], reference)
        row["distance"] = None if apart is None else round(apart, 5)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    gates = list(dict.fromkeys(row["gate"] for row in rows))
    figure, axes = plt.subplots(1, len(gates), figsize=(5.5 * len(gates), 4), sharey=True, squeeze=False)
    styles = {"triton bf16": dict(lw=3, alpha=0.5), "xla float32": dict(ls="--"), "xla bf16, seed 1": dict(ls=":")}
    for axis, gate in zip(axes[0], gates):
        for row in (row for row in rows if row["gate"] == gate):
            axis.plot(smoothed(row["losses"]), label=row["run"], **styles.get(row["run"], {}))
        axis.set(title=f"{gate}, state + w FP8", xlabel="step")
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel(f"training loss, nats a byte (mean of {SMOOTH} steps)")
    axes[0, 0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "train_curve_h200.json")
    parser.add_argument("--gates", default="gdn,kda")
    parser.add_argument("--runs", action="append", choices=list(RUNS), help="repeat for several; all unless given")
    parser.add_argument("--text", default=str(RESULTS.parents[1] / "docs"), help="folder of text files")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument(
        "--limit", type=float, default=float("inf"), help="seconds; what runs then is stopped, and counts"
    )
    parser.add_argument("--smoke", action="store_true", help="a tiny model, on xla, written nowhere")
    args = parser.parse_args()
    if args.smoke:
        args.steps = min(args.steps, 60)
    rows = json.loads(args.out.read_text()) if args.out.exists() and not args.smoke else []
    for new in run_all(args):
        rows = [row for row in rows if (row["gate"], row["run"]) != (new["gate"], new["run"])] + [new]
        rows.sort(key=lambda row: (row["gate"], list(RUNS).index(row["run"])))
        add_distances(rows)
        if not args.smoke:  # after each run: what is cut short keeps what it has
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text("[\n" + ",\n".join(" " + json.dumps(row) for row in rows) + "\n]\n")
    for row in rows:
        print(f"{row['gate']:4} {row['run']:18} on {row['machine']}, distance from {REFERENCE}: {row['distance']}")
    if not args.smoke:
        plot(rows, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
