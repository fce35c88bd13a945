"""How much faster the chunked delta rule is than plain-JAX alternatives, and how it grows with T. CPU, float32.

    python benchmarks/cpu_delta_rule.py            # about five minutes on 2 cores; writes results/cpu_delta_rule.json

Forward and backward (gradients of q, k, v, g, beta) at B1 T4096 H4 K=V=64. Compared in one process, interleaved, so
that all meet the same machine; but the token scan runs on one core and chunks on all, so measure on an idle one:

- token scan: the gradient of a `lax.scan` over tokens, the definition written down;
- naive chunks: the gradient of a `lax.scan` over chunks of 64 with the WY form, as one would write it (GDN).

Aims on 2 idle cores: 5 times faster than the token scan for GDN, 3 times for KDA, not slower than naive chunks.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# LAPACK's threads (naive chunks solve triangles with it) spin while they wait, and slow down whatever runs next.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax
import jax.numpy as jnp
import numpy as np

import jlaqat
from jlaqat.testing import make_inputs

HIGHEST = jax.lax.Precision.HIGHEST
NAMES = ("q", "k", "v", "g", "beta")


def einsum(subscripts, *operands):
    return jnp.einsum(subscripts, *operands, precision=HIGHEST)


def token_scan(q, k, v, g, beta):
    """The definition. g [B, T, H] or [B, T, H, K]."""

    def token(S, row):
        q, k, v, g, beta = row
        S = S * jnp.exp(g if g.ndim == 3 else g[..., None])[..., None]
        error = v - einsum("bhk,bhkv->bhv", k, S)
        S = S + k[..., None] * (beta[..., None] * error)[..., None, :]
        return S, einsum("bhk,bhkv->bhv", q, S) * q.shape[-1] ** -0.5

    rows = tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v, g, beta))
    start = jnp.zeros((k.shape[0], *k.shape[2:], v.shape[-1]))
    S, o = jax.lax.scan(token, start, rows)
    return jnp.moveaxis(o, 0, 1), S


def naive_chunks(q, k, v, g, beta, size=64):
    """GDN in chunks as plain JAX under automatic differentiation. T a multiple of 64."""

    def cut(x):
        x = x.reshape(x.shape[0], -1, size, *x.shape[2:])
        return jnp.moveaxis(jnp.moveaxis(x, 1, 0), 3, 2)  # [n, B, H, size, ...]

    below = jnp.tril(jnp.ones((size, size), bool))

    def chunk(S, rows):
        q, k, v, g, beta = rows
        G = jnp.cumsum(g, axis=-1)
        E = jnp.exp(jnp.where(below, G[..., :, None] - G[..., None, :], -jnp.inf))
        A = jnp.tril(beta[..., None] * einsum("bhik,bhjk->bhij", k, k) * E, -1)
        decay = jnp.exp(G)[..., None]
        values = jnp.concatenate([beta[..., None] * v, beta[..., None] * decay * k], axis=-1)
        solved = jax.scipy.linalg.solve_triangular(A + jnp.eye(size), values, lower=True, unit_diagonal=True)
        u, w = solved[..., : v.shape[-1]], solved[..., v.shape[-1] :]
        v_new = u - einsum("bhik,bhkv->bhiv", w, S)
        o = einsum("bhik,bhkv->bhiv", q * decay, S)
        o = o + einsum("bhij,bhjv->bhiv", einsum("bhik,bhjk->bhij", q, k) * E, v_new)
        to_last = jnp.exp(G[..., -1:] - G)[..., None]
        S = decay[..., -1:, :] * S + einsum("bhik,bhiv->bhkv", k * to_last, v_new)
        return S, o * q.shape[-1] ** -0.5

    start = jnp.zeros((k.shape[0], *k.shape[2:], v.shape[-1]))
    S, o = jax.lax.scan(chunk, start, tuple(map(cut, (q, k, v, g, beta))))
    return jnp.moveaxis(jnp.moveaxis(o, 2, 3), 0, 1).reshape(v.shape), S


def gradient_of(function):
    def loss(*operands):
        o, S = function(*operands)
        return (o**2).sum() + (S**2).sum()

    return jax.grad(loss, argnums=range(5))


def operands(gate, T):
    x = make_inputs(0, T=T, H=4, K=64, gate=gate, decay=(0.001, 0.1))
    return tuple(jnp.asarray(x[name]) for name in NAMES)


def seconds(compiled, x):
    start = time.perf_counter()
    jax.block_until_ready(compiled(*x))
    return time.perf_counter() - start


def compare(gate, repeats):
    """Medians and ratios at T 4096; every round runs all implementations, one after another."""
    functions = {"jlaqat": jlaqat.delta_rule, "token_scan": token_scan}
    if gate == "gdn":
        functions["naive_chunks"] = naive_chunks
    x = operands(gate, 4096)
    compiled = {name: jax.jit(gradient_of(f)).lower(*x).compile() for name, f in functions.items()}
    gradients = {name: jax.block_until_ready(c(*x)) for name, c in compiled.items()}
    for name in functions:
        for a, b in zip(gradients[name], gradients["token_scan"]):
            assert np.allclose(a, b, rtol=1e-3, atol=1e-4), name
    times = {name: [] for name in functions}
    for _ in range(repeats):
        for name, c in compiled.items():
            times[name].append(seconds(c, x))
    result = {"milliseconds_median": {name: 1e3 * statistics.median(t) for name, t in times.items()}}
    result["milliseconds_least"] = {name: 1e3 * min(t) for name, t in times.items()}
    for name in functions:
        if name != "jlaqat":
            ratios = [b / a for a, b in zip(times["jlaqat"], times[name])]
            result[f"faster_than_{name}"] = statistics.median(ratios)
    return result


def growth(gate, lengths, repeats):
    """Time and compiled memory of forward and backward by T, and their growth beside linear (1 is linear)."""
    table = []
    compiled = {}
    for T in lengths:
        x = operands(gate, T)
        compiled[T] = jax.jit(gradient_of(jlaqat.delta_rule)).lower(*x).compile(), x
        jax.block_until_ready(compiled[T][0](*x))
    times = {T: [] for T in lengths}
    for _ in range(repeats):
        for T, (c, x) in compiled.items():
            times[T].append(seconds(c, x))
    for T, (c, _) in compiled.items():
        memory = c.memory_analysis()
        used = memory.temp_size_in_bytes + memory.argument_size_in_bytes + memory.output_size_in_bytes
        table.append({"T": T, "milliseconds_least": 1e3 * min(times[T]), "megabytes": used / 1e6})
    first, last = table[0], table[-1]
    factor = last["T"] / first["T"]
    return {
        "table": table,
        "time_over_linear": last["milliseconds_least"] / first["milliseconds_least"] / factor,
        "memory_over_linear": last["megabytes"] / first["megabytes"] / factor,
    }


def machine():
    with open("/proc/cpuinfo") as f:
        model = next((line.split(":")[1].strip() for line in f if line.startswith("model name")), platform.machine())
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "numpy": np.__version__,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384, 32768])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "cpu_delta_rule.json")
    arguments = parser.parse_args()
    report = {"machine": machine(), "shape": "B1 T4096 H4 K=V=64, float32, forward and backward"}
    for gate in ("gdn", "kda"):
        report[gate] = compare(gate, arguments.repeats)
        report[gate]["growth"] = growth(gate, arguments.lengths, max(3, arguments.repeats // 2))
        print(gate, json.dumps(report[gate], indent=2), flush=True)
    report["machine"]["load_average_after"] = os.getloadavg()
    arguments.out.parent.mkdir(exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
