"""Finds FLA's launch parameters once, so that its rows of the benchmark need no search of minutes.

    python3 benchmarks/fla_configs.py --jobs 14 [--shapes 8x4096x16,8x4096x16x64] [--gates gdn,kda]

Processes compile FLA's configurations side by side, each its share of them (Triton's cache on disk is shared). Then one
process per gate and shape runs FLA's own search, whose compiling is done. What it chose goes to benchmarks/fla_configs,
in the format that FLA reads (FLA_CONFIG_DIR), where sequence lengths are not part of the key.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import device_time
from kernel_rows import GATES, Row

FOLDER = Path(__file__).parent / "fla_configs"
# FLA's keys hold numbers of heads and head sizes. Where no entry fits, the first of the file serves: other numbers of
# heads take what was found for 16.
SHAPES = ("8x4096x16", "8x4096x16x64", "4x4096x8x256")


def search(gate: str, shape: str, shard: int, shards: int) -> None:
    """Runs forward and backward. shards > 1: compiles its share of the configurations and launches no kernel."""
    os.environ["FLA_CACHE_MODE"], os.environ["FLA_CACHE_RESULTS"] = "disabled", "0"
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction
    from triton.testing import do_bench

    bench, launch, counter = Autotuner._bench, JITFunction.run, itertools.count()

    def timed(self: Any, *args: Any, config: Any, **meta: Any) -> list[float]:
        if shards == 1:
            self.do_bench = functools.partial(do_bench, warmup=10, rep=40)
        elif next(counter) % shards == shard:
            self.do_bench = lambda kernel_call, quantiles: [kernel_call() and 1.0] * 3
        else:
            return [float("inf")] * 3
        return bench(self, *args, config=config, **meta)

    def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **meta: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=True, **meta)

    Autotuner._bench = timed
    if shards > 1:
        JITFunction.run = compiled
    import kernel_calls

    row = Row("fla", gate, shape, "plain", "fwd+bwd")
    if shards > 1:
        kernel_calls.FlaCall(row)
        return
    kernel_calls.fla_operation(gate)  # imports
    with device_time.gpu_lock(exclusive=True):
        kernel_calls.FlaCall(row)
    save()


def save() -> None:
    """Adds what this process's tuners chose to the files of their kernels."""
    import triton
    from fla.ops.utils.cache import AutotuneKey, CachedAutotuner

    FOLDER.mkdir(exist_ok=True)
    for tuner in (x for x in gc.get_objects() if isinstance(x, CachedAutotuner)):
        if not tuner.cache:
            continue
        path = FOLDER / f"{tuner.kernel_name}.json"
        known = json.loads(path.read_text()) if path.exists() else {"autotune_entries": {}}
        for key, config in tuner.cache.items():
            chosen = {
                "kwargs": config.kwargs,
                "num_warps": config.num_warps,
                "num_stages": config.num_stages,
                "num_ctas": config.num_ctas,
                "maxnreg": config.maxnreg,
            }
            entry = {"autotune_key": AutotuneKey.normalize_autotune_key(key), "config": chosen}
            known["autotune_entries"][AutotuneKey.key_hash(key)] = entry
        head = {"kernel_name": tuner.kernel_name, "triton_version": triton.__version__}
        path.write_text(json.dumps(head | known, indent=1) + "\n")


def run(jobs: list[tuple[str, str, int, int]]) -> None:
    workers = [
        subprocess.Popen([sys.executable, __file__, "--worker", gate, shape, str(shard), str(shards)])
        for gate, shape, shard, shards in jobs
    ]
    for worker in workers:
        worker.wait()


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        gate, shape, shard, shards = sys.argv[2:]
        return search(gate, shape, int(shard), int(shards))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gates", default=",".join(GATES))
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--part", choices=("compile", "search"), help="one of the two parts alone")
    args = parser.parse_args()
    wanted = [(gate, shape) for shape in args.shapes.split(",") for gate in args.gates.split(",")]
    shards = max(2, args.jobs // len(wanted))
    start = time.monotonic()
    if args.part != "search":
        run([(gate, shape, shard, shards) for gate, shape in wanted for shard in range(shards)])
        print(f"compiled after {time.monotonic() - start:.0f} s", flush=True)
    for gate, shape in wanted if args.part != "compile" else []:
        run([(gate, shape, 0, 1)])
        print(f"{gate} {shape}: searched after {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
