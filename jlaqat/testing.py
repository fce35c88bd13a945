"""Inputs, an error measure and an assertion for tests of the delta rule. numpy only."""

from __future__ import annotations

from typing import Any

import numpy as np


def make_inputs(
    seed: int = 0,
    *,
    B: int = 1,
    T: int,
    H: int = 2,
    HV: int | None = None,
    K: int = 16,
    V: int | None = None,
    gate: str = "gdn",
    num_sequences: int | None = None,
    correlation: float = 0.0,
    decay: tuple[float, float] = (0.02, 0.5),
    max_beta: float = 1.0,
    dtype: Any = np.float32,
) -> dict[str, np.ndarray]:
    """Random operands of one `delta_rule` call by name: q, k, v, g, beta, initial_state.

    Args:
      seed: same seed and arguments, same arrays.
      B, T, H, HV, K, V: sizes; HV defaults to H, V to K.
      gate: "gdn" (g [B, T, HV]) or "kda" (g [B, T, HV, K]).
      num_sequences: rows of the initial state; B unless packed.
      correlation: in [0, 1]: how much of every key is one direction shared by its head. Near 1, (I + A)⁻¹ is hard.
      decay: (least, most) −g; drawn log-uniformly, or g = −least exactly where both are equal.
      max_beta: beta is uniform in (0, max_beta); 2 for negative eigenvalues.
      dtype: of q, k and v. g, beta and the state are float32 (float64 where dtype is).

    Keys and queries are L2-normalised.
    """
    if gate not in ("gdn", "kda"):
        raise ValueError(f"gate={gate!r} is unknown; choose 'gdn' or 'kda'.")
    rng = np.random.default_rng(seed)
    HV, V = HV or H, V or K
    wide = np.float64 if dtype == np.float64 else np.float32

    def unit(x: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)

    shared = unit(rng.normal(size=(1, 1, H, K)))
    k = unit((1 - correlation) * unit(rng.normal(size=(B, T, H, K))) + correlation * shared)
    q = unit(rng.normal(size=(B, T, H, K)))
    least, most = decay
    uniform = rng.uniform(size=(B, T, HV) if gate == "gdn" else (B, T, HV, K))
    g = -(least * (most / least) ** uniform) if most > least else np.full(uniform.shape, -least)
    return {
        "q": q.astype(dtype),
        "k": k.astype(dtype),
        "v": rng.normal(size=(B, T, HV, V)).astype(dtype),
        "g": g.astype(wide),
        "beta": (max_beta * rng.uniform(0.02, 1, size=(B, T, HV))).astype(wide),
        "initial_state": (0.3 * rng.normal(size=(num_sequences or B, HV, K, V))).astype(wide),
    }


def error_ratio(x: Any, reference: Any) -> float:
    """RMS(x − reference) / RMS(reference) in float64; NaN if either holds NaN. A zero reference gives RMS(x)."""
    x, reference = np.asarray(x, np.float64), np.asarray(reference, np.float64)
    if x.shape != reference.shape:
        raise ValueError(f"Shapes {list(x.shape)} and {list(reference.shape)} differ.")
    if x.size == 0:
        return 0.0
    norm = np.sqrt(np.mean(reference**2))
    error = np.sqrt(np.mean((x - reference) ** 2))
    return float(error / norm if norm > 0 else error)


def assert_close(x: Any, reference: Any, bound: float, name: str = "x", *, floor: float = 0.0) -> None:
    """Raise AssertionError unless error_ratio(x, reference) ≤ bound. NaN never passes.

    floor: an RMS error that passes whatever the ratio, for references that are rounding noise themselves.
    """
    ratio = error_ratio(x, reference)
    if floor and np.sqrt(np.mean((np.asarray(x, np.float64) - np.asarray(reference, np.float64)) ** 2)) <= floor:
        return
    if not ratio <= bound:
        raise AssertionError(f"{name}: error ratio {ratio:.3g} is above {bound:.3g}.")
