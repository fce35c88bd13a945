"""The two ceilings that floors are counted from: bytes a second of a large copy, and rate of a large bfloat16 product.

    python3 benchmarks/ceilings.py [--out benchmarks/results/ceilings_h200.json]       one GPU, 5 s

Copy: 4 GB from one array to another, bytes read and bytes written both counted. Product: 8192 x 8192 x 8192 of random
numbers (zeros run faster), through cuBLAS. The best of 20, from events on the device.
"""

from __future__ import annotations

import argparse
import datetime
import json
from pathlib import Path

import device_time


def best_ms(call, repeats: int = 20) -> float:
    import torch

    times = []
    for _ in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return min(times[3:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "ceilings_h200.json")
    args = parser.parse_args()
    import torch

    with device_time.gpu_lock(exclusive=True):
        source = torch.randn(2 << 30, dtype=torch.bfloat16, device="cuda")
        target = torch.empty_like(source)
        copy_ms = best_ms(lambda: target.copy_(source))
        n = 8192
        a, b, out = source[: n * n].view(n, n), source[n * n : 2 * n * n].view(n, n), target[: n * n].view(n, n)
        product_ms = best_ms(lambda: torch.matmul(a, b, out=out))
    found = {
        "copy_tb_per_s": round(2 * source.nbytes / copy_ms / 1e9, 3),
        "bf16_tflop_per_s": round(2 * n**3 / product_ms / 1e9, 1),
        "machine": torch.cuda.get_device_name(),
        "date": str(datetime.date.today()),
        "versions": {"torch": torch.__version__},
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(found)


if __name__ == "__main__":
    main()
