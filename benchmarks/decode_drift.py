"""How far a decoder with a low-precision state drifts from float32 over 4,000 tokens, by policy: a JSON and a plot.

    python benchmarks/decode_drift.py        # under 3 minutes of one core; writes benchmarks/results/decode_drift.*

Two kinds of input, both for one Gated DeltaNet layer with 2 heads of K = V = 64 and L2-normalised random q and k:
  "forgets": decay −g log-uniform in [0.002, 0.2] a token and β in (0, 1), as trained layers have them;
  "slow writes": no decay and β = 0.01: writes smaller than half a step of the format.
Recorded: RMS of the outputs' error over RMS of float32's outputs, in windows of 100 tokens, and of the final state.
"""

import argparse
import json
import os
import pathlib
import platform
import time

import jax
import jax.numpy as jnp
import numpy as np

from jlaqat import DecodePolicy, QuantSpec, delta_rule_decode
from jlaqat.testing import make_inputs

RESULTS = pathlib.Path(__file__).parent / "results"
TOKENS, WINDOW = 4000, 100
POLICIES = {
    "float16": DecodePolicy(state=QuantSpec.float16()),
    "float16, stochastic (vllm_fp16_sr)": DecodePolicy.preset("vllm_fp16_sr"),
    "bfloat16 (tpu_bf16)": DecodePolicy.preset("tpu_bf16"),
    "bfloat16, replay 16 (sglang_replay)": DecodePolicy.preset("sglang_replay"),
    "E4M3, value rows (vllm_fp8)": DecodePolicy.preset("vllm_fp8"),
    "E4M3, value rows, stochastic": DecodePolicy.preset("vllm_fp8", rounding="stochastic"),
    "E4M3, tile 32, amax to 240 (sglang_fp8)": DecodePolicy.preset("sglang_fp8"),
    "E4M3, tile 64, stored readout (modelopt)": DecodePolicy.preset("modelopt"),
    "E5M2, tile 64": DecodePolicy(state=QuantSpec(format="e5m2")),
    "INT8, tile 64": DecodePolicy(state=QuantSpec.int8()),
    "INT8, value rows (vllm_int8)": DecodePolicy.preset("vllm_int8"),
    "INT8, value rows, stochastic": DecodePolicy.preset("vllm_int8", rounding="stochastic"),
    "INT8, value rows, error feedback": DecodePolicy.preset("vllm_int8", error_feedback=True),
    "INT8, key rows × 32, stored readout (modelopt_int8)": DecodePolicy.preset("modelopt_int8"),
    "INT8, key rows × 32, replay 8 (serving)": DecodePolicy.preset("serving"),
    "INT8, Hadamard 32": DecodePolicy(state=QuantSpec.int8_hadamard32()),
    "INT8, head": DecodePolicy(state=QuantSpec.int8(granularity="head")),
    "INT4, key rows × 32": DecodePolicy(state=QuantSpec.int4(granularity="key_row")),
    "INT4, key rows × 32, stochastic": DecodePolicy(state=QuantSpec.int4(granularity="key_row", rounding="stochastic")),
    "NVFP4": DecodePolicy(state=QuantSpec.nvfp4()),
    "E4M3, cast at the hand-off (flashinfer_cast)": DecodePolicy.preset("flashinfer_cast"),
}


def inputs(kind: str) -> dict[str, np.ndarray]:
    x = make_inputs(0, T=TOKENS, H=2, K=64, decay=(0.002, 0.2) if kind == "forgets" else (0.0, 0.0))
    x["state"] = x.pop("initial_state")
    if kind == "slow writes":
        x["beta"] = np.full_like(x["beta"], 0.01)
    return x


def relative(x: np.ndarray, exact: np.ndarray, axes) -> np.ndarray:
    return np.sqrt(((x - exact) ** 2).mean(axes) / (exact**2).mean(axes))


def drift(policy: DecodePolicy, xs: list[dict], exact: list[tuple]) -> list[dict]:
    run = jax.jit(lambda x: delta_rule_decode(**x, quant=policy))
    curves = []
    for x, (o_exact, state_exact) in zip(xs, exact):
        o, carry = run(x)
        windows = [np.asarray(a, np.float64).reshape(-1, WINDOW, *a.shape[2:]) for a in (o, o_exact)]
        final = relative(np.asarray(carry.state(), np.float64), np.asarray(state_exact, np.float64), None)
        curve = relative(*windows, axes=(1, 2, 3))
        curves.append({"outputs": [float(f"{e:.4g}") for e in curve], "final_state": float(f"{final:.4g}")})
    return curves


def machine() -> dict:
    with open("/proc/cpuinfo") as f:
        model = next((line.split(":")[1].strip() for line in f if line.startswith("model name")), platform.machine())
    return {"cpu": model, "cores": os.cpu_count(), "python": platform.python_version(), "jax": jax.__version__}


def plot(report: dict, path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(report["kinds"]), figsize=(15, 6), sharey=True)
    colours = [*plt.get_cmap("tab20").colors, *plt.get_cmap("tab20b").colors]
    assert len(report["policies"]) <= len(colours)
    middle = [WINDOW * (i + 0.5) for i in range(TOKENS // WINDOW)]
    for axis, kind in zip(axes, report["kinds"]):
        for colour, (name, curves) in zip(colours, report["policies"].items()):
            errors = np.maximum(curves[kind]["outputs"], 1e-6)
            style = "--" if "stochastic" in name or "feedback" in name else "-"
            axis.semilogy(middle, errors, style, color=colour, label=name, linewidth=1.4)
        axis.set_title(kind)
        axis.set_xlabel("token")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("error of the outputs, relative to float32")
    axes[-1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1.01, 0.5))
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--output", type=pathlib.Path, default=RESULTS / "decode_drift.json", help="the plot goes beside"
    )
    arguments = parser.parse_args()
    start, cpu = time.time(), time.process_time()
    kinds = ("forgets", "slow writes")
    xs = [jax.tree.map(jnp.asarray, inputs(kind)) for kind in kinds]
    plain = jax.jit(lambda x: delta_rule_decode(**x))
    exact = [(o, carry.state()) for o, carry in map(plain, xs)]
    report: dict = {
        "machine": machine(),
        "shape": f"B1 T{TOKENS} H2 K=V=64, GDN, float32, xla backend",
        "window": WINDOW,
        "kinds": list(kinds),
        "policies": {},
    }
    for name, policy in POLICIES.items():
        curves = dict(zip(kinds, drift(policy, xs, exact)))
        report["policies"][name] = {"policy": policy.describe(), **curves}
        ends = ", ".join(f"{kind} {curves[kind]['outputs'][-1]:.2g}" for kind in kinds)
        print(f"{name}: {ends} ({time.time() - start:.0f} s)", flush=True)
    report["seconds"] = {"wall": round(time.time() - start), "cpu": round(time.process_time() - cpu)}
    arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    plot(report, arguments.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
