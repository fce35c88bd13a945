"""The calls that the kernels' benchmark times: ours and jla's through JAX, FLA's through PyTorch.

A call is compiled first (`JaxCall(row)`, `FlaCall(row)`) and measured later (`call.measure()`), so that compiling may
happen beside other processes and timing alone. Inputs are random, bfloat16, unit q and k, log decays of -0.04 on
average, beta a sigmoid.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
from pathlib import Path
from typing import Any

import device_time
from kernel_rows import Row, parse_shape

FLA_CONFIGS = Path(__file__).parent / "fla_configs"
DECAY = -0.05


def version_of(*names: str) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "absent"
    import triton  # unpacked on the GPU machine, where another version's metadata lies about

    return found | {"triton": triton.__version__}


def measured(time: device_time.DeviceTime, queued_ms: float, memory: dict[str, Any]) -> dict[str, Any]:
    return {
        "ms": time.ms,
        "ms_min": time.ms_min,
        "ms_max": time.ms_max,
        "queued_ms": queued_ms,
        "memory": memory,
        "kernels": dict(list(time.kernels.items())[:12]),
    }


# ------------------------------------------------------------------ JAX


def quantizers(name: str) -> Any:
    from jlaqat.spec import DeltaQuant, QuantSpec

    return {
        "plain": DeltaQuant(),
        "state fp8": DeltaQuant(state=QuantSpec.fp8()),
        "state+w fp8": DeltaQuant(state=QuantSpec.fp8(), w=QuantSpec.fp8()),
        "state int8": DeltaQuant(state=QuantSpec.int8()),
    }[name]


def make_jax_inputs(shape: str, gate: str) -> Any:
    """(Inputs, cotangent of o), traceable."""
    import jax
    import jax.numpy as jnp

    from jlaqat.chunked import Inputs

    b, t, h, hv, d = parse_shape(shape)
    keys = jax.random.split(jax.random.key(0), 6)

    def unit(x: Any) -> Any:
        return x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6)

    q, k = (unit(jax.random.normal(key, (b, t, h, d))).astype("bfloat16") for key in keys[:2])
    v, do = (jax.random.normal(key, (b, t, hv, d)).astype("bfloat16") for key in keys[2:4])
    g = DECAY * jnp.abs(jax.random.normal(keys[4], (b, t, hv, d) if gate == "kda" else (b, t, hv)))
    beta = jax.nn.sigmoid(jax.random.normal(keys[5], (b, t, hv))).astype("bfloat16")
    return Inputs(q, k, v, g, beta, None), do


def jax_operation(row: Row) -> Any:
    """(o, final state or None) of `Inputs`."""
    from jlaqat.chunked import delta_rule_chunked
    from jlaqat.spec import QuantArrays
    from jlaqat.triton_backend import delta_rule_triton

    scale, quant = parse_shape(row.shape).d ** -0.5, quantizers(row.quant)
    if row.backend == "triton":
        return lambda x: delta_rule_triton(x, None, quant, scale)
    if row.backend == "xla":
        return lambda x: delta_rule_chunked(x, None, quant, QuantArrays(), scale)
    import jla.ops

    kind = {"gdn": "gated_deltanet", "kda": "kda"}[row.gate]
    return lambda x: jla.ops.linear_attention(kind, *x[:3], impl="mosaic_gpu", g=x.g, beta=x.beta, scale=scale)


def residual_bytes(operation: Any, inputs: Any) -> int:
    """Bytes that a forward keeps for its backward, inputs and outputs not counted."""
    import jax

    jaxpr = jax.make_jaxpr(lambda x: jax.vjp(lambda x: operation(x)[0], x))(inputs).jaxpr
    free = {*map(id, jaxpr.invars), id(jaxpr.outvars[0])}
    kept = {id(v): v.aval for v in jaxpr.outvars[1:] if not hasattr(v, "val") and id(v) not in free}
    return sum(aval.size * aval.dtype.itemsize for aval in kept.values())


def jax_function(row: Row) -> tuple[Any, Any]:
    """What a row on a JAX backend times, as a function of `make_jax_inputs`, and the shapes of those."""
    import jax

    operation = jax_operation(row)

    def forward(x: Any, do: Any) -> Any:
        return operation(x)

    def both(x: Any, do: Any) -> Any:
        o, pull = jax.vjp(lambda x: operation(x)[0], x)
        return o, pull(do)

    shapes = jax.eval_shape(functools.partial(make_jax_inputs, row.shape, row.gate))
    return both if row.direction == "fwd+bwd" else forward, shapes


def lower_without_gpu(row: Row, capability: int) -> None:
    """Has Triton compile the kernels of a row on the triton backend, which stay in its cache on disk."""
    import jax

    import jlaqat

    with jlaqat.compile_for(capability):
        function, shapes = jax_function(row)
        jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",))


class JaxCall:
    """One row on one of the JAX backends, compiled."""

    packages = ("jax", "jax-triton", "jax-linear-attention")

    def __init__(self, row: Row) -> None:
        import jax

        function, shapes = jax_function(row)
        self.compiled = jax.jit(function).lower(*shapes).compile()
        self.make = jax.jit(functools.partial(make_jax_inputs, row.shape, row.gate)).lower().compile()
        backward = row.direction == "fwd+bwd"
        self.residual_bytes = residual_bytes(jax_operation(row), shapes[0]) if backward else None

    def measure(self) -> dict[str, Any]:
        import jax

        inputs = self.make()
        call = functools.partial(self.compiled, *inputs)
        profiled = device_time.profile_jax(call)
        queued = device_time.queued_ms(call, jax.block_until_ready)
        plan = self.compiled.memory_analysis()
        peak = plan.argument_size_in_bytes + plan.output_size_in_bytes + plan.temp_size_in_bytes
        return measured(profiled, queued, memory_row(peak, self.residual_bytes))


def memory_row(peak_bytes: int, residual: int | None) -> dict[str, float | None]:
    """peak: inputs, outputs and temporaries; residual: kept between forward and backward."""
    return {
        "peak_mb": round(peak_bytes / 1e6, 1),
        "residual_mb": None if residual is None else round(residual / 1e6, 1),
    }


# ------------------------------------------------------------------ FLA


def make_torch_inputs(shape: str, gate: str) -> tuple[list[Any], Any]:
    """([q, k, v, g, beta], cotangent of o) on the GPU, inputs with gradients."""
    import torch

    b, t, h, hv, d = parse_shape(shape)
    gen = torch.Generator("cuda").manual_seed(0)

    def normal(*sizes: int) -> Any:
        return torch.randn(*sizes, generator=gen, device="cuda")

    q, k = (torch.nn.functional.normalize(normal(b, t, h, d), dim=-1).bfloat16() for _ in range(2))
    v, do = normal(b, t, hv, d).bfloat16(), normal(b, t, hv, d).bfloat16()
    g = DECAY * (normal(b, t, hv, d) if gate == "kda" else normal(b, t, hv)).abs()
    beta = normal(b, t, hv).sigmoid().bfloat16()
    return [x.requires_grad_() for x in (q, k, v, g, beta)], do


def fla_operation(gate: str) -> Any:
    """o of (q, k, v, g, beta). KDA with `safe_gate`, which is quicker and may be set for decays above -5."""
    if gate == "kda":
        from fla.ops.kda import chunk_kda

        return lambda x: chunk_kda(*x, safe_gate=True)[0]
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return lambda x: chunk_gated_delta_rule(*x)[0]


def use_fla_configs() -> None:
    """FLA takes what `fla_configs.py` found fastest, for sizes not searched the nearest. Call before importing it."""
    os.environ.setdefault("FLA_CONFIG_DIR", str(FLA_CONFIGS))
    os.environ.setdefault("FLA_CACHE_MODE", "fuzzy")
    os.environ.setdefault("FLA_CACHE_RESULTS", "0")


class FlaCall:
    """One row of FLA: run once, which compiles it."""

    packages = ("torch", "fla-core")

    def __init__(self, row: Row) -> None:
        use_fla_configs()
        import torch

        self.row, self.operation = row, fla_operation(row.gate)
        x, do = make_torch_inputs(row.shape, row.gate)
        self.run(x, do)
        torch.cuda.synchronize()
        self.residual_bytes = self._residual_bytes(x) if row.direction == "fwd+bwd" else None
        del x, do
        torch.cuda.empty_cache()

    def run(self, x: list[Any], do: Any) -> Any:
        import torch

        if self.row.direction == "fwd":
            with torch.no_grad():
                return self.operation(x)
        o = self.operation(x)
        return torch.autograd.grad(o, x, do)

    def _residual_bytes(self, x: list[Any]) -> int:
        import torch

        kept: dict[int, int] = {}

        def pack(tensor: Any) -> Any:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            o = self.operation(x)
        free = {tensor.untyped_storage().data_ptr() for tensor in (*x, o)}
        return sum(size for pointer, size in kept.items() if pointer not in free)

    def measure(self) -> dict[str, Any]:
        import torch

        x, do = make_torch_inputs(self.row.shape, self.row.gate)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        call = functools.partial(self.run, x, do)
        profiled = device_time.profile_torch(call)
        peak = torch.cuda.max_memory_allocated()
        queued = device_time.queued_ms(call, lambda _: torch.cuda.synchronize())
        del call, x, do
        torch.cuda.empty_cache()
        return measured(profiled, queued, memory_row(peak, self.residual_bytes))


def prepare(row: Row) -> JaxCall | FlaCall:
    return FlaCall(row) if row.backend == "fla" else JaxCall(row)
