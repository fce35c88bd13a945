"""What the xla backend of decoding keeps for a gradient."""

import jax
import jax.numpy as jnp
import pytest

import jlaqat
from jlaqat import DecodePolicy, QuantSpec


@pytest.mark.usefixtures("compile_quickly")
@pytest.mark.parametrize(
    "policy",
    [DecodePolicy(state=QuantSpec.int8()), pytest.param(DecodePolicy.preset("serving"), marks=pytest.mark.slow)],
    ids=["token", "replay"],
)
def test_memory_of_a_gradient_grows_with_segments(policy):
    """Temporaries of XLA's plan, for a token more: some rows of operands and a 64th of a state, not a state."""
    K = V = 64

    def bytes_for(T, every):
        rows, gates = jax.ShapeDtypeStruct((1, T, 1, K), jnp.float32), jax.ShapeDtypeStruct((1, T, 1), jnp.float32)
        state = jax.ShapeDtypeStruct((1, 1, K, V), jnp.float32)

        def loss(x, state):
            o, _ = jlaqat.delta_rule_decode(**x, state=state, quant=policy, backend="xla", checkpoint_every=every)
            return (o**2).sum()

        x = dict(q=rows, k=rows, v=rows, g=gates, beta=gates)
        compiled = jax.jit(jax.grad(loss)).lower(x, state).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    def a_token(every):
        return (bytes_for(4096, every) - bytes_for(1024, every)) / (4096 - 1024)

    assert 4 * K * V / 64 < a_token(64) < 4 * (K * V / 64 + 6 * K)
    assert a_token(1) > 4 * K * V  # the measure sees states
