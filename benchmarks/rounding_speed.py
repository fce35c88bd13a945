"""Elements a second of `fake_quantize` by format, beside a copy: `python benchmarks/rounding_speed.py [--size 8]`.

Prints one JSON object: the machine, the shape, and for each setting the best of `--repeats` runs in million elements a
second, compiled. Run it on an idle machine: the figures are for memory-bound loops of one to two milliseconds.
"""

import argparse
import json
import platform
import time

import jax
import jax.numpy as jnp

from jlaqat import QuantSpec
from jlaqat.rounding import fake_quantize, random_bits

SETTINGS = {
    "e4m3 tile": ("state", QuantSpec.fp8()),
    "e4m3 value_row": ("state", QuantSpec.fp8(granularity="value_row")),
    "int8 tile": ("state", QuantSpec.int8()),
    "int8 key_row": ("state", QuantSpec.int8(granularity="key_row")),
    "nvfp4": ("state", QuantSpec.nvfp4()),
    "mxfp8": ("state", QuantSpec.mxfp8()),
    "bfloat16": ("state", QuantSpec.bfloat16()),
    "float16": ("state", QuantSpec.float16()),
    "e4m3 row": ("w", QuantSpec.fp8()),
    "e4m3 tile stochastic": ("state", QuantSpec.fp8(rounding="stochastic")),
}


def rounding(site, spec):
    def run(x):
        bits = None
        if spec.rounding == "stochastic":
            heads = jnp.arange(x.shape[0], dtype=jnp.uint32)
            bits = random_bits(x.shape[-2:], seed=0, step=0, layer=0, sequence=0, head=heads, round_index=0)
        return fake_quantize(x, spec, site=site, random_bits=bits)

    return run


def million_elements_a_second(f, x, repeats):
    f = jax.jit(f)
    f(x).block_until_ready()
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        f(x).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return round(x.size / best / 1e6)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=8, help="heads of a [128, 128] state")
    parser.add_argument("--repeats", type=int, default=100)
    args = parser.parse_args()
    x = jax.random.normal(jax.random.key(0), (args.size, 128, 128))
    speeds = {"copy": million_elements_a_second(lambda x: x + 1, x, args.repeats)}
    for name, (site, spec) in SETTINGS.items():
        speeds[name] = million_elements_a_second(rounding(site, spec), x, args.repeats)
    device = jax.devices()[0]
    machine = f"{device.device_kind} {platform.processor() or platform.machine()}"
    print(json.dumps({"machine": machine, "shape": x.shape, "million_elements_a_second": speeds}, indent=2))


if __name__ == "__main__":
    main()
