"""One decode through JAX and through PyTorch, for the interpreter and for GPUs: which calls, and equal bits of both."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

import jlaqat
from jlaqat import DecodePolicy, QuantArrays, QuantSpec
from jlaqat.kernels.launch import dtype_name
from jlaqat.testing import assert_close, make_inputs
from jlaqat.torch_bridge import DecodeCarry, delta_rule_decode

OPERANDS = ("q", "k", "v", "g", "beta")
GRADIENTS = tuple(f"d{name}" for name in (*OPERANDS, "state"))
ARRAYS = QuantArrays(step=2**32 - 2, layer=3, sequence_offset=7, head_offset=5)  # for PyTorch
JAX_ARRAYS = ARRAYS._replace(step=np.uint32(ARRAYS.step))


class Case(NamedTuple):
    """A call. block: values that share a scale in a tile."""

    policy: Any  # from block to DecodePolicy
    gate: str = "gdn"
    bounds: dict[str, Any] = {}
    every: int = 64
    dtype: str = "float32"
    gradients: float = 0.0  # how near they are, relatively; 0: equal bits


CASES = {
    "fp8": Case(lambda block: DecodePolicy(state=QuantSpec.fp8(block_v=block)), dtype="bfloat16"),
    "int8": Case(lambda _: DecodePolicy.preset("modelopt_int8"), "kda", every=2),
    "float32": Case(lambda _: DecodePolicy(), every=1, dtype="float16"),
    "drawn": Case(
        lambda block: DecodePolicy(
            state=QuantSpec.fp8(block_v=block, rounding="stochastic", seed=5),
            error_feedback=True,
            decay_log_step=1 / 64,
        ),
        bounds=dict(cu_seqlens=[0, 4, 4, 6]),  # the last token is nobody's
        every=3,
    ),
    "float16": Case(lambda _: DecodePolicy.preset("vllm_fp16_sr"), "kda", dict(lengths=[4, 0]), every=3),
    "rotated": Case(  # XLA contracts products and sums of the transform's gradient
        lambda _: DecodePolicy(state=QuantSpec.fp8(granularity="value_row", basis="hadamard32")), gradients=1e-6
    ),
    "replay": Case(lambda _: DecodePolicy.preset("serving", window=3), dtype="bfloat16"),
    "replay float32": Case(lambda _: DecodePolicy(mode="replay", window=2), "kda", dict(lengths=[7, 4])),
    "replay drawn": Case(
        lambda block: DecodePolicy(
            state=QuantSpec.fp8(block_v=block, rounding="stochastic"), mode="replay", window=3, error_feedback=True
        ),
        "kda",
        dict(cu_seqlens=[0, 5, 5, 7]),
    ),
    "factors": Case(
        lambda block: DecodePolicy(
            state=QuantSpec.fp8(block_v=block), mode="replay", window=3, factor_qdq=True, readout="stored"
        ),
        bounds=dict(lengths=[7, 4]),
    ),
    "prefix": Case(
        lambda block: DecodePolicy(state=QuantSpec.int8(block_v=block), prefill_state_qdq=True),
        bounds=dict(prefix_lengths=[3, 2], lengths=[7, 5]),
    ),
    "replay prefix": Case(
        lambda block: DecodePolicy(state=QuantSpec.int8(block_v=block), mode="replay", window=2, error_feedback=True),
        bounds=dict(prefix_lengths=[0, 2], cu_seqlens=[0, 3, 7]),
    ),
}


def stretched(case, by):
    """The case over `by` times the tokens."""
    bounds = {name: [by * x for x in values] for name, values in case.bounds.items()}
    return case._replace(bounds=bounds, every=case.every if case.every == 1 else by * case.every)


def operands(case, **sizes):
    """(q, k, v, g, beta and state by name, the cotangent of o), as numpy has them."""
    cu = case.bounds.get("cu_seqlens")
    B, count = (2, None) if cu is None else (1, len(cu) - 1)
    sizes = dict(T=7, H=1, HV=2, K=16, V=32) | sizes
    x = make_inputs(2, gate=case.gate, B=B, num_sequences=count, dtype=jnp.dtype(case.dtype), **sizes)
    x["beta"] = x["beta"].astype(x["v"].dtype)
    x["state"] = x.pop("initial_state")
    do = np.random.default_rng(1).normal(size=x["v"].shape).astype(x["v"].dtype)
    return x, do


def to_torch(a, device):
    """A tensor of its own with an array's bits."""
    a = np.array(a)
    integers = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}[a.dtype.itemsize]
    return torch.from_numpy(a.view(integers)).view(getattr(torch, a.dtype.name)).to(device)


def through_jax(x, do, policy, bounds, every, backend="triton"):
    """{o, fields of the carry, gradients}."""
    fixed = {name: np.asarray(a, np.int32) for name, a in bounds.items()}

    @jax.jit
    def run(x, do):
        settings = dict(quant=policy, quant_arrays=JAX_ARRAYS, checkpoint_every=every, backend=backend, **fixed)
        o, pull, carry = jax.vjp(lambda x: jlaqat.delta_rule_decode(**x, **settings), x, has_aux=True)
        return o, carry, pull(do)[0]

    o, carry, gradients = run({name: jnp.asarray(a) for name, a in x.items()}, jnp.asarray(do))
    return {"o": o, **fields(carry), **{f"d{name}": d for name, d in gradients.items()}}


def through_torch(x, do, policy, bounds, every, device):
    """The same, of tensors."""
    leaves = {name: to_torch(a, device).requires_grad_() for name, a in x.items()}
    given = {("initial_state" if name == "state" else name): a for name, a in leaves.items()}
    settings = dict(quant=policy, quant_arrays=ARRAYS, checkpoint_every=every, output_final_state=True, **bounds)
    o, carry = delta_rule_decode(**given, **settings)
    gradients = torch.autograd.grad(o, list(leaves.values()), to_torch(do, device))
    return {"o": o.detach(), **fields(carry), **{f"d{name}": d for name, d in zip(leaves, gradients)}}


def fields(carry):
    """What a carry holds, by name."""
    found = {f.name: getattr(carry, f.name) for f in dataclasses.fields(carry)}
    return {name: x for name, x in found.items() if x is not None and name != "policy"}


def carry_to_torch(carry, device):
    """A carry of the JAX path as the bridge has it."""
    given = {f.name: getattr(carry, f.name) for f in dataclasses.fields(carry)}
    return DecodeCarry(
        **{name: x if x is None or name == "policy" else to_torch(x, device) for name, x in given.items()}
    )


def as_bytes(x):
    """An array's or a tensor's bytes, the axes but the last as they are."""
    if isinstance(x, torch.Tensor):
        return x.detach().contiguous().cpu().view(torch.uint8).numpy()
    return np.ascontiguousarray(x).view(np.uint8)


def assert_equal_bits(tensors, arrays, gradients=0.0):
    """Of what `through_torch` and `through_jax` returned; of a ring the entries in use. gradients: see `Case`."""
    assert tensors.keys() == arrays.keys()
    cursor = np.asarray(arrays["cursor"])
    for name, tensor in tensors.items():
        array = arrays[name]
        assert tuple(tensor.shape) == tuple(array.shape), name
        assert dtype_name(tensor) == dtype_name(array), name
        if name in ("o", "scale", "residual", *GRADIENTS):
            assert torch.isfinite(tensor.float()).all(), name
        if gradients and name in GRADIENTS:
            assert_close(tensor.float().cpu().numpy(), array, gradients, name)
            continue
        a, b = as_bytes(tensor), as_bytes(array)
        if name.startswith("ring"):
            used = np.arange(a.shape[1]) < cursor[:, None]
            a, b = a[used], b[used]
        assert np.array_equal(a, b), f"{name}: {(a != b).mean():.3g} of the bytes differ"


def called_back(run):
    """`kernel_calls.Target.run` by a runner of torch tensors on the CPU, which changes copies in place."""

    def target_run(self, launch):
        names = list(launch.inputs)
        shapes = {name: jax.ShapeDtypeStruct(b.shape, jnp.dtype(b.dtype)) for name, b in launch.outputs.items()}
        in_place = {name: launch.inputs[name] for name in launch.in_place}
        shapes |= {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in in_place.items()}

        def call(*arrays):
            inputs = {name: to_torch(a, "cpu").clone() for name, a in zip(names, arrays, strict=True)}
            outputs = run(type(launch)(**{**vars(launch), "inputs": inputs}))
            return {name: as_bytes(x).view(shapes[name].dtype) for name, x in outputs.items()}

        return jax.pure_callback(call, shapes, *launch.inputs.values())

    return target_run
