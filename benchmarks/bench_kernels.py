"""Times the delta rule, forward and forward + backward, on one GPU: our Triton and XLA backends, and jla, through JAX.

    python3 benchmarks/bench_kernels.py --out benchmarks/results/h200.json [--backends triton,jla] [--shapes 8x4096x16]

Every row: 20 calls queued, then waited for, per call; the median, least and most of 7 such blocks. Inputs and
cotangents are random, bfloat16, K = V = 128 unless the shape says BxTxHxD.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib.metadata
import json
import os
import statistics
import time

import jax
import jax.numpy as jnp

from jlaqat.chunked import Inputs, delta_rule_chunked
from jlaqat.spec import DeltaQuant, QuantArrays, QuantSpec
from jlaqat.triton_backend import delta_rule_triton

QUANTS = {
    "plain": DeltaQuant(),
    "state fp8": DeltaQuant(state=QuantSpec.fp8()),
    "state+w fp8": DeltaQuant(state=QuantSpec.fp8(), w=QuantSpec.fp8()),
    "state int8": DeltaQuant(state=QuantSpec.int8()),
}
QUEUED, BLOCKS = 20, 7


def make_inputs(shape: str, gate: str, dtype=jnp.bfloat16) -> Inputs:
    """Random inputs of a shape BxTxH or BxTxHxD; H may be "16g32" for grouped value heads."""
    sizes = shape.split("x")
    b, t, d = int(sizes[0]), int(sizes[1]), int(sizes[3]) if len(sizes) > 3 else 128
    h, _, hv = sizes[2].partition("g")
    h, hv = int(h), int(hv or h)
    keys = jax.random.split(jax.random.key(0), 5)

    def unit(x):
        return x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6)

    @jax.jit
    def make():
        q, k = (unit(jax.random.normal(key, (b, t, h, d))).astype(dtype) for key in keys[:2])
        v = jax.random.normal(keys[2], (b, t, hv, d)).astype(dtype)
        g = -0.05 * jnp.abs(jax.random.normal(keys[3], (b, t, hv, d) if gate == "kda" else (b, t, hv)))
        beta = jax.nn.sigmoid(jax.random.normal(keys[4], (b, t, hv))).astype(dtype)
        return Inputs(q, k, v, g, beta, None)

    return make()


def operation(backend: str, gate: str, quant: DeltaQuant, scale: float):
    """(o, final state or None) of `Inputs`."""
    if backend == "triton":
        return lambda x: delta_rule_triton(x, None, quant, scale)
    if backend == "xla":
        return lambda x: delta_rule_chunked(x, None, quant, QuantArrays(), scale)
    import jla.ops

    kind = {"gdn": "gated_deltanet", "kda": "kda"}[gate]
    return lambda x: jla.ops.linear_attention(kind, *x[:3], impl="mosaic_gpu", g=x.g, beta=x.beta, scale=scale)


def measure(function, *args) -> dict[str, float]:
    began = time.perf_counter()
    compiled = jax.jit(function).lower(*args).compile()
    compile_s = time.perf_counter() - began
    jax.block_until_ready(compiled(*args))
    times = []
    for _ in range(BLOCKS):
        start = time.perf_counter()
        for _ in range(QUEUED):
            out = compiled(*args)
        jax.block_until_ready(out)
        times.append((time.perf_counter() - start) / QUEUED * 1e3)
    memory = compiled.memory_analysis()
    return {
        "ms": round(statistics.median(times), 4),
        "ms_min": round(min(times), 4),
        "ms_max": round(max(times), 4),
        "compile_s": round(compile_s, 2),
        "temporary_bytes": memory.temp_size_in_bytes if memory else None,
    }


def versions() -> dict[str, str]:
    found = {}
    for name in ("jax", "jax-triton", "triton", "jax-linear-attention"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            import triton

            found[name] = triton.__version__ if name == "triton" else "absent"
    return found


def rows(args):
    for shape in args.shapes.split(","):
        for gate in args.gates.split(","):
            inputs = make_inputs(shape, gate)
            do = jax.random.normal(jax.random.key(1), inputs.v.shape).astype(inputs.v.dtype)
            for backend in args.backends.split(","):
                for quant in args.quants.split(",") if backend != "jla" else ["plain"]:
                    op = operation(backend, gate, QUANTS[quant], inputs.q.shape[-1] ** -0.5)

                    def both(x, do, op=op):
                        o, pull = jax.vjp(lambda x: op(x)[0], x)
                        return o, pull(do)

                    for label, call in (
                        ("fwd", functools.partial(measure, op, inputs)),
                        ("fwd+bwd", functools.partial(measure, both, inputs, do)),
                    ):
                        row = dict(gate=gate, quant=quant, shape=shape, backend=backend, dtype="bfloat16")
                        row["pass"] = label
                        try:
                            row |= call()
                        except Exception as error:  # a peer that refuses a shape is a row that says so
                            row["error"] = f"{type(error).__name__}: {str(error)[:200]}"
                        print(*(f"{k}={v}" for k, v in row.items() if k != "dtype"), flush=True)
                        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="JSON file; rows are appended")
    parser.add_argument("--backends", default="triton,jla")
    parser.add_argument("--shapes", default="8x4096x16,1x8192x16")
    parser.add_argument("--gates", default="gdn,kda")
    parser.add_argument("--quants", default=",".join(QUANTS))
    args = parser.parse_args()
    about = {"machine": jax.devices()[0].device_kind, "date": str(datetime.date.today()), "versions": versions()}
    found = []
    if os.path.exists(args.out):
        with open(args.out) as f:
            found = json.load(f)
    for row in rows(args):
        found.append(row | about)
        with open(args.out, "w") as f:  # after each row: a run that is cut short keeps what it measured
            json.dump(found, f, indent=1)


if __name__ == "__main__":
    main()
