"""`jlaqat parity`: the same call in JAX, through the PyTorch bridge and in FLA, each against the float64 reference.

Every side gets the same bits, cotangents included, and gives o, the final state and every gradient. The PyTorch sides
run in processes of their own: Triton's interpreter changes Triton for a whole process, and a GPU's memory is shared.
Bounds: docs/delta_rule.md.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from flax import nnx

from jlaqat import ops, reference
from jlaqat.parity_files import OPERANDS, Bits, Case, as_bits, read_arrays, write_arrays, write_case
from jlaqat.quantizers import Quantizer, find_quantizers, quantize
from jlaqat.recipes import load_recipe
from jlaqat.spec import DeltaQuant
from jlaqat.testing import error_ratio, make_inputs

RESULTS = ("o", "final_state", *(f"d{name}" for name in OPERANDS))
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
# Bounds of an error ratio: forward, gradients, gradients of g and beta.
EXACT = {"float32": (1e-5, 1e-4, 1e-4), "float16": (0.005, 0.008, 0.02), "bfloat16": (0.005, 0.008, 0.02)}
STRONG_WRITES = (0.01, 0.015, 0.02)  # bfloat16 with beta above 1; of gradients dq, dk and dv alone
ROUNDED = (0.03, 0.05, 0.05)  # end to end, where codes may fall to either side of a tie


class ParityError(ValueError):
    """A call that parity cannot make; the message names the reason and the remedy."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParityConfig:
    """One comparison.

    Fields (all keyword-only):
      gate: "gdn" or "kda".
      batch, tokens, heads, value_heads, key_dim, value_dim: sizes; None means as many value heads as heads, V = K.
      lengths: lengths of packed sequences, instead of batch and tokens; 0 is allowed.
      dtype: of q, k and v; None takes bfloat16 on a GPU and float32 on a CPU.
      quant: a recipe's name or path, or "none". Dynamic scales only.
      seed, max_beta, decay: of the inputs; decay is the least and most −g.
      backend: of the JAX side.
      fla: compare FLA too, where nothing is rounded.
    """

    gate: str = "gdn"
    batch: int = 1
    tokens: int = 128
    heads: int = 2
    value_heads: int | None = None
    key_dim: int = 64
    value_dim: int | None = None
    lengths: tuple[int, ...] = ()
    dtype: str | None = None
    quant: str = "none"
    seed: int = 0
    max_beta: float = 1.0
    decay: tuple[float, float] = (0.02, 0.5)
    backend: str = "auto"
    fla: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One result: error ratios by side, the bound, and whether JAX and the bridge have the same bits."""

    name: str
    bound: float
    errors: dict[str, float]
    equal_bits: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What `compare` found.

    sides: what stands behind "jax", "bridge" and "fla" here. missing: why a side gave nothing. binding: whether the
    bounds decide; rounded calls have none for long sequences that hardly decay. passed: JAX and the bridge are within
    the bounds, and on a GPU with the Triton kernels on both sides give equal bits.
    """

    rows: list[Row]
    sides: dict[str, str]
    missing: dict[str, str]
    binding: bool
    same_kernels: bool
    dtype: str

    @property
    def passed(self) -> bool:
        if self.missing.keys() & {"jax", "bridge"}:
            return False
        return not any(self.fails(row, side) for row in self.rows for side in ("jax", "bridge")) and not (
            self.same_kernels and not all(row.equal_bits for row in self.rows)
        )

    def fails(self, row: Row, side: str) -> bool:
        """NaN fails always."""
        error = row.errors.get(side)
        if error is None:
            return False
        return not error <= row.bound if self.binding else error != error


def check_torch() -> None:
    """Raises ParityError unless what the PyTorch sides import is installed."""
    for package in ("torch", "triton"):
        if importlib.util.find_spec(package) is None:
            raise ParityError(
                f"parity compares with PyTorch and the package {package} is not installed. "
                "Install it with: pip install jlaqat[torch]"
            )


def compare(config: ParityConfig) -> Report:
    """Runs all sides. Raises ParityError, or ValueError for sizes that cannot be, before any work."""
    check_torch()
    on_gpu = jax.default_backend() == "gpu"
    config = dataclasses.replace(config, dtype=config.dtype or ("bfloat16" if on_gpu else "float32"))
    case = _case(config)
    _check(config, case, on_gpu)
    x, cotangents, cu_seqlens = _inputs(config)
    quant = DeltaQuant(state=case.state, w=case.w)
    from jlaqat.triton_backend import why_not

    triton = config.backend in ("auto", "triton") and why_not(ops.Inputs(**x), quant) is None
    sides = {
        "jax": "triton" if triton else "xla" if config.backend == "auto" else config.backend,
        "bridge": "CUDA" if on_gpu else "interpreter",
        "fla": ("chunk_kda" if config.gate == "kda" else "chunk_gated_delta_rule") if on_gpu else "naive",
    }
    found: dict[str, dict[str, Bits]] = {"jax": _run_jax(x, cotangents, cu_seqlens, quant, config.backend)}
    missing: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="jlaqat-parity-") as folder:
        _write(Path(folder), case, x, cotangents, cu_seqlens)
        for side in ("bridge", "fla"):
            if side == "fla" and (why := _no_fla(config, case)):
                missing[side] = why
                continue
            result = _run_torch(Path(folder), side, on_gpu)
            if isinstance(result, str):
                missing[side] = result
            else:
                found[side] = result
    do, dfinal = cotangents
    o, final_state, gradients = reference.oracle(x, do, dfinal, cu_seqlens=cu_seqlens, quant=quant)
    wanted = {"o": o, "final_state": final_state} | {f"d{name}": gradients[name] for name in OPERANDS}
    rows = []
    for name in RESULTS:
        errors = {side: error_ratio(_values(found[side][name]), wanted[name]) for side in found}
        equal = "bridge" in found and _same(found["jax"][name], found["bridge"][name])
        rows.append(Row(name=name, bound=_bound(name, config, case), errors=errors, equal_bits=equal))
    return Report(
        rows=rows,
        sides=sides,
        missing=missing,
        binding=_binding(config, case),
        same_kernels=on_gpu and triton,
        dtype=str(config.dtype),
    )


# ------------------------------------------------------------------ the case


def _case(config: ParityConfig) -> Case:
    """The recipe, read as a layer reads it."""
    if config.gate not in ("gdn", "kda"):
        raise ParityError(f"gate={config.gate!r} is unknown; choose 'gdn' or 'kda'.")
    if config.quant == "none":
        return Case(gate=config.gate)
    sizes = {"key_dim": config.key_dim, "value_dim": config.value_dim or config.key_dim}
    layer = nnx.Module()  # with the names that recipes know
    for site in ("state", "w"):
        quantizer = Quantizer(site, num_heads=config.value_heads or config.heads, **sizes)
        setattr(layer, f"{config.gate}_{site}_quantizer", quantizer)
    quantize(layer, load_recipe(config.quant))
    sites = {q.site: q for q in find_quantizers(layer).values() if q.enabled}
    static = [site for site, q in sites.items() if q.static]
    if static:
        raise ParityError(
            f"quant={config.quant!r} has a static scale ({', '.join(static)}), which has to be calibrated; "
            "choose a recipe with dynamic scales, such as state_w_fp8."
        )
    if not sites:
        raise ParityError(f"quant={config.quant!r} rounds nothing in a {config.gate} layer; give another, or 'none'.")
    return Case(gate=config.gate, **{site: q.rounding() for site, q in sites.items()})


def _check(config: ParityConfig, case: Case, on_gpu: bool) -> None:
    from jlaqat.kernels.call import UnsupportedByKernels, check_supported

    if config.dtype not in DTYPES:
        raise ParityError(f"dtype={config.dtype!r} is unknown; choose one of {', '.join(map(repr, DTYPES))}.")
    if config.dtype == "bfloat16" and not on_gpu:
        raise ParityError(
            "dtype='bfloat16' needs a GPU: on a CPU the kernels run in Triton's interpreter, whose bfloat16 products "
            "are wrong. Use 'float32' or 'float16'."
        )
    if min(config.batch, config.tokens, config.heads, config.key_dim, config.value_dim or 1) < 1:
        raise ParityError("batch, tokens, heads, key_dim and value_dim must be at least 1.")
    if min(config.lengths, default=0) < 0 or (config.lengths and not sum(config.lengths)):
        raise ParityError(f"lengths={config.lengths} must be at least 0, and not all 0.")
    try:
        check_supported(DeltaQuant(state=case.state, w=case.w))
    except UnsupportedByKernels as reason:
        raise ParityError(f"quant={config.quant!r}: {reason} Parity compares the kernels.") from None


def _inputs(config: ParityConfig) -> tuple[dict[str, Any], tuple[np.ndarray, np.ndarray], np.ndarray | None]:
    """Operands, cotangents of o and of the final state, and cu_seqlens."""
    packed = bool(config.lengths)
    cu_seqlens = np.concatenate([[0], np.cumsum(config.lengths)]).astype(np.int32) if packed else None
    x = make_inputs(
        config.seed,
        B=1 if packed else config.batch,
        T=sum(config.lengths) if packed else config.tokens,
        H=config.heads,
        HV=config.value_heads,
        K=config.key_dim,
        V=config.value_dim,
        gate=config.gate,
        num_sequences=len(config.lengths) if packed else None,
        max_beta=config.max_beta,
        decay=config.decay,
        dtype=DTYPES[str(config.dtype)],
    )
    rng = np.random.default_rng(config.seed + 1)
    do = rng.normal(size=x["v"].shape).astype(x["v"].dtype)
    return x, (do, rng.normal(size=x["initial_state"].shape).astype(np.float32)), cu_seqlens


def _bound(name: str, config: ParityConfig, case: Case) -> float:
    forward, gradient, gate = EXACT[str(config.dtype)]
    if case.state or case.w:
        forward, gradient, gate = ROUNDED
    elif config.dtype == "bfloat16" and config.max_beta > 1:
        forward, gradient, gate = STRONG_WRITES
        gradient = gradient if name in ("dq", "dk", "dv") else EXACT["bfloat16"][1]
    return forward if name in ("o", "final_state") else gate if name in ("dg", "dbeta") else gradient


def _binding(config: ParityConfig, case: Case) -> bool:
    """Rounded end to end, errors grow with T unless the state decays (docs/delta_rule.md)."""
    longest = max(config.lengths, default=config.tokens)
    return not (case.state or case.w) or longest <= 128 or config.decay[0] >= 0.02


def _no_fla(config: ParityConfig, case: Case) -> str:
    if not config.fla:
        return "not asked for"
    if case.state or case.w:
        return "does not round"
    return "" if importlib.util.find_spec("fla") else "not installed (pip install jlaqat[torch])"


# ------------------------------------------------------------------ the sides


@functools.partial(jax.jit, static_argnames=("quant", "backend"))
def _jax_side(x, cotangents, cu_seqlens, quant, backend):
    def call(x):
        return ops.delta_rule(**x, cu_seqlens=cu_seqlens, quant=quant, backend=backend)

    results, pullback = jax.vjp(call, x)
    return results, pullback(cotangents)[0]


def _run_jax(x, cotangents, cu_seqlens, quant: DeltaQuant, backend: str) -> dict[str, Bits]:
    (o, final_state), gradients = _jax_side(x, cotangents, cu_seqlens, quant, backend)
    found = {"o": o, "final_state": final_state} | {f"d{name}": gradients[name] for name in OPERANDS}
    return {name: as_bits(a) for name, a in found.items()}


def _write(folder: Path, case: Case, x, cotangents, cu_seqlens) -> None:
    arrays = x | {"do": cotangents[0], "dfinal": cotangents[1]}
    if cu_seqlens is not None:
        arrays["cu_seqlens"] = cu_seqlens
    write_case(folder, case)
    write_arrays(folder / "inputs.npz", {name: as_bits(a) for name, a in arrays.items()})


def _run_torch(folder: Path, side: str, on_gpu: bool) -> dict[str, Bits] | str:
    """The side's results, or why there are none."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"CUDA_VISIBLE_DEVICES": environment.get("CUDA_VISIBLE_DEVICES", "0") if on_gpu else ""}
    if side == "bridge" and not on_gpu:
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "jlaqat.torch_bridge.parity", str(folder), side]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode == 0:
        return read_arrays(folder / f"{side}.npz")
    error = folder / f"{side}.error"
    return error.read_text() if error.exists() else (done.stderr.strip().splitlines() or ["no output"])[-1]


def _values(bits: Bits) -> np.ndarray:
    array, dtype = bits
    return array.view(DTYPES.get(dtype, dtype)).astype(np.float64)


def _same(a: Bits, b: Bits) -> bool:
    return a[1] == b[1] and np.array_equal(a[0], b[0])
