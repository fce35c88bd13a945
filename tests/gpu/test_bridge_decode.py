"""Decoding through PyTorch on a GPU: the bits of the JAX path, values and gradients, a call at once and by steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from bridge_oracle import (
    ARRAYS,
    CASES,
    JAX_ARRAYS,
    OPERANDS,
    as_bytes,
    assert_equal_bits,
    carry_to_torch,
    fields,
    operands,
    stretched,
    through_jax,
    through_torch,
    to_torch,
)

import jlaqat
from jlaqat import DecodePolicy, QuantSpec
from jlaqat.torch_bridge import delta_rule_decode, delta_rule_step
from jlaqat.torch_bridge.decode_carry import copied

SIZES = dict(T=140, H=2, HV=4, K=128, V=128)


@pytest.mark.parametrize("name", CASES)
def test_the_bits_of_the_jax_path(name):
    """Segments of 64 tokens and others, packed and padded sequences, prefixes; outputs, carry and every gradient."""
    case = stretched(CASES[name], 20)
    x, do = operands(case, **SIZES)
    given = x, do, case.policy(64), case.bounds, case.every
    assert_equal_bits(through_torch(*given, "cuda"), through_jax(*given), case.gradients)


STEPS = {
    "float32": DecodePolicy(),
    "fp8": DecodePolicy(state=QuantSpec.fp8()),
    "drawn": DecodePolicy(state=QuantSpec.int8(block_v=32, rounding="stochastic"), error_feedback=True),
    "replay": DecodePolicy(state=QuantSpec.fp8(), mode="replay", window=4),
    "factors": DecodePolicy(state=QuantSpec.fp8(), mode="replay", window=4, factor_qdq=True),
}


@pytest.mark.parametrize("name", STEPS)
def test_steps_have_the_bits_of_jax(name):
    """A prompt decoded by JAX, and its carry gone on with by PyTorch token by token, against one call of JAX's."""
    policy, T, start = STEPS[name], 10, 4
    x, _ = operands(CASES["fp8"], **SIZES | {"T": T})
    settings = dict(quant=policy, quant_arrays=JAX_ARRAYS, backend="triton")
    decode = jax.jit(lambda x, state: jlaqat.delta_rule_decode(**x, state=state, **settings))
    rows = {key: jnp.asarray(x[key]) for key in OPERANDS}
    o, wanted = decode(rows, x["state"])
    carry = carry_to_torch(decode({key: a[:, :start] for key, a in rows.items()}, x["state"])[1], "cuda")
    tokens = [to_torch(x[key], "cuda") for key in OPERANDS]
    for t in range(start, T):
        row = [a[:, t] for a in tokens]
        if t == start:  # not in place: the carry stays as it is
            before = {key: as_bytes(a).copy() for key, a in fields(carry).items()}
            delta_rule_step(*row, carry, quant=policy, quant_arrays=ARRAYS)
            assert all(np.array_equal(a, as_bytes(fields(carry)[key])) for key, a in before.items())
        out, after = delta_rule_step(*row, carry, quant=policy, quant_arrays=ARRAYS, inplace=True)
        if policy.mode == "replay":
            assert after.ring_r.data_ptr() == carry.ring_r.data_ptr()
        carry = after
        assert np.array_equal(as_bytes(out), as_bytes(o[:, t]))
    assert_equal_bits(fields(carry), fields(wanted))


@pytest.mark.parametrize("mode", ["token", "replay"])
def test_a_step_in_a_cuda_graph(mode):
    """What a server does: a step captured once and replayed, its inputs copied in, its carry out."""
    policy = DecodePolicy(state=QuantSpec.fp8(), mode=mode)
    x, _ = operands(CASES["fp8"], **SIZES | {"T": 6})
    tokens, state = [to_torch(x[key], "cuda") for key in OPERANDS], to_torch(x["state"], "cuda")
    with torch.no_grad():
        start = delta_rule_decode(*(a[:, :3] for a in tokens), None, state, True, quant=policy)[1]
        row, carry = [a[:, 3].clone() for a in tokens], start
        delta_rule_step(*row, copied(start), quant=policy, inplace=True)  # compiled before it is captured
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            out, after = delta_rule_step(*row, carry, quant=policy, inplace=True)
            for key, a in fields(after).items():
                if a.data_ptr() != fields(carry)[key].data_ptr():
                    fields(carry)[key].copy_(a)
        wanted, end = delta_rule_decode(*tokens, None, state, True, quant=policy)
        for t in range(3, 6):
            for a, b in zip(row, tokens, strict=True):
                a.copy_(b[:, t])
            graph.replay()
            assert torch.equal(out, wanted[:, t])
    assert np.array_equal(as_bytes(carry.values), as_bytes(end.values))
    assert torch.equal(carry.position, end.position) and torch.equal(carry.cursor, end.cursor)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_tensors_on_another_device_than_the_current():
    """Values and gradients of the second GPU are those of the first."""
    case = stretched(CASES["drawn"], 20)
    x, do = operands(case, **SIZES)
    given = x, do, case.policy(64), case.bounds, case.every
    first, second = (through_torch(*given, device) for device in ("cuda:0", "cuda:1"))
    assert second["o"].device.index == 1
    assert all(np.array_equal(as_bytes(a), as_bytes(second[key])) for key, a in first.items())
