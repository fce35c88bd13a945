"""Times KDA's own kernels under launch parameters, register limits and gates of three strengths, on one GPU.

    python3 benchmarks/tune_kda.py $OUT/tune_kda.json       about 1 minute on 16 cores and an H200

`tune_kernels.py` writes the table of launch parameters; this tries more of them, among them limits of registers, and
says what strong gates cost. To be read beside docs/kernels.md.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import json
import multiprocessing

import torch
import triton
from tune_kernels import QUANTS, Recorder, make_inputs, run_once, time_launch

from jlaqat.kernels.tuning import Knobs, Tuning
from jlaqat.torch_bridge.run import torch_run

# (warps, stages, bk, bv, most registers a thread or None); kernels do not depend on each other's.
CHOICES = {
    "pairs": [
        (4, 2, 32, 64, 168),
        (4, 1, 32, 64, 168),
        (4, 1, 16, 64, 128),
        (4, 1, 32, 64, None),
        (4, 1, 64, 64, None),
    ],
    "wy": [(4, 1, 64, 128, 168), (4, 1, 64, 64, 168), (4, 1, 64, 128, None), (4, 1, 64, 128, 128)],
    "recompute": [(4, 1, 64, 128, None), (4, 2, 64, 64, 168), (4, 1, 64, 64, 168), (4, 1, 64, 128, 168)],
    "scores": [(4, 1, 64, 128, None), (4, 2, 64, 64, None), (4, 1, 64, 64, 168)],
    "channels": [
        (4, 3, 32, 64, None),
        (4, 2, 32, 64, None),
        (4, 1, 32, 128, None),
        (4, 1, 32, 64, None),
        (4, 1, 32, 64, 168),
        (8, 1, 64, 64, None),
        (4, 2, 64, 64, None),
    ],
}
# (B, T, H), how much the gates of `make_inputs`, -0.04 on average, are multiplied by.
CASES = [((8, 4096, 16), 1), ((1, 8192, 16), 1), ((8, 4096, 16), 20), ((8, 4096, 16), 60), ((8, 4096, 16), 160)]


def variants() -> list[Tuning]:
    found = []
    for i in range(max(map(len, CHOICES.values()))):
        chosen = {name: choices[i % len(choices)] for name, choices in CHOICES.items()}
        found.append(Tuning(state=Knobs(4, 3), **{f"kda_{name}": Knobs(*c) for name, c in chosen.items()}))
    return found


def compile_variant(variant):
    run_once(torch_run, make_inputs(1, 1024, 16, True), QUANTS["state+w fp8"], variant)
    torch.cuda.synchronize()


def main(path: str) -> None:
    with concurrent.futures.ProcessPoolExecutor(12, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_variant, variants()))
    groups = collections.defaultdict(dict)
    for (b, t, h), factor in CASES:
        inputs = make_inputs(b, t, h, True)
        inputs = inputs._replace(g=inputs.g * factor)
        for variant in variants():
            recorder = Recorder()
            run_once(recorder, inputs, QUANTS["state+w fp8"], variant)
            for launch, outputs in recorder.launches:
                blocks = tuple(launch.constants.get(name) for name in ("BK", "BV"))
                key = (launch.num_warps, launch.num_stages, *blocks, launch.max_registers)
                group = groups[f"{b}x{t}x{h}", factor, launch.name.removesuffix("_kernel")]
                if key not in group:
                    group[key] = round(time_launch(launch, outputs), 4)
            del recorder
    names = ("warps", "stages", "BK", "BV", "registers")
    rows = []
    for (shape, factor, kernel), group in groups.items():
        best = sorted(group.items(), key=lambda item: item[1])
        print(shape, f"gates x{factor}", kernel, "|", *(f"{ms:.3f} {key}" for key, ms in best))
        where = {"shape": shape, "gates": factor, "kernel": kernel}
        rows += [{**where, **dict(zip(names, key, strict=True)), "ms": ms} for key, ms in best]
    about = {"machine": torch.cuda.get_device_name(), "triton": triton.__version__, "torch": torch.__version__}
    with open(path, "w") as f:
        json.dump({**about, "quant": "state+w fp8", "rows": rows}, f, indent=1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", help="JSON file for the measurements")
    main(parser.parse_args().path)
