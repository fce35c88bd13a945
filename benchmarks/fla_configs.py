"""FLA's launch parameters: its own search, made short by compiling in many processes, and kept in a folder.

    python3 benchmarks/fla_configs.py --jobs 14 [--shapes 8x4096x16,1x8192x16] [--gates gdn,kda]
    python3 benchmarks/bench_kernels.py --backends fla --stages targets --search-fla

The first command compiles: a few processes a gate, each its share of the configurations, no kernel launched; Triton's
cache on disk has them all then. The second one searches (FLA times every configuration), which now takes seconds, and
writes what was chosen to benchmarks/fla_configs, in the format that FLA reads (FLA_CONFIG_DIR). Later runs need
neither: sequence lengths are not part of FLA's keys, and where no entry fits, the first of a kernel's file serves.

The first command needs no GPU if it is told for which: `--without-gpu 90` compiles for SM90 into a cache that the GPU
machine may be given (without_gpu.py), of short sequences, since lengths do not matter.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import without_gpu
from kernel_rows import GATES, TARGET_SHAPES, Row

FOLDER = Path(__file__).parent / "fla_configs"
SHORT = 1024  # tokens; as 4096 and 8192 it gives a number of chunks that 16 divides, which Triton compiles for


def no_configs() -> None:
    """FLA searches; call before importing it."""
    os.environ["FLA_CACHE_MODE"], os.environ["FLA_CACHE_RESULTS"] = "disabled", "0"


def search_quickly() -> None:
    """Every configuration is timed for 40 ms instead of 100."""
    no_configs()
    from triton.runtime.autotuner import Autotuner
    from triton.testing import do_bench

    bench = Autotuner._bench

    def quick(self: Any, *args: Any, config: Any, **meta: Any) -> list[float]:
        self.do_bench = functools.partial(do_bench, warmup=10, rep=40)
        return bench(self, *args, config=config, **meta)

    Autotuner._bench = quick


def compile_share(gate: str, shapes: list[str], shard: int, shards: int, capability: int | None) -> None:
    """Goes through forward and backward of the shapes; compiles every `shards`-th configuration, launches nothing.

    capability: of the GPU that is not there.
    """
    no_configs()
    if capability is None:
        without_gpu.launch_nothing()
    else:
        without_gpu.pretend(capability)
        shapes = [re.sub(r"x\d+x", f"x{SHORT}x", shape, count=1) for shape in shapes]
    from triton.runtime.autotuner import Autotuner

    bench, counter = Autotuner._bench, itertools.count()

    def compile_mine(self: Any, *args: Any, config: Any, **meta: Any) -> list[float]:
        if next(counter) % shards != shard:
            return [float("inf")] * 3
        self.do_bench = lambda kernel_call, quantiles: (kernel_call(), [1.0] * 3)[1]
        return bench(self, *args, config=config, **meta)

    Autotuner._bench = compile_mine
    import kernel_calls

    for shape in shapes:
        kernel_calls.FlaCall(Row("fla", gate, shape, "plain", "fwd+bwd"))


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


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        gate, shapes, shard, shards, capability = sys.argv[2:]
        return compile_share(gate, shapes.split(","), int(shard), int(shards), int(capability) or None)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gates", default=",".join(GATES))
    parser.add_argument("--shapes", default=",".join(TARGET_SHAPES))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--without-gpu", type=int, default=0, metavar="90", help="compile for this GPU, which is not here"
    )
    args = parser.parse_args()
    gates, start = args.gates.split(","), time.monotonic()
    shards = max(1, args.jobs // len(gates))
    workers = [
        subprocess.Popen(
            [sys.executable, __file__, "--worker", gate, args.shapes, *map(str, (shard, shards, args.without_gpu))]
        )
        for gate in gates
        for shard in range(shards)
    ]
    for worker in workers:
        worker.wait()
    print(f"compiled after {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
