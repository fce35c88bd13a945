"""Decoding on a GPU where sequences start and end where they like: their bits alone, and JAX's transformations."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from spans_oracle import Case, both_directions, check_bits_alone

import jlaqat
from jlaqat import DecodePolicy, QuantSpec
from jlaqat.kernel_calls import device_capability, target_of
from jlaqat.kernels.recurrent_pipeline import Options
from jlaqat.testing import assert_close, make_inputs

SPECS = {
    "float32": None,
    "e4m3-tile": QuantSpec.fp8(),
    "int8-key_row": QuantSpec.int8(granularity="key_row"),
    "drawn": QuantSpec.fp8(rounding="stochastic", seed=3),
}
# Lengths repeat: a sequence of another length alone is another program to compile.
CASES = {
    "batch": Case(
        None,
        dict(start=[2, 0, 150, 12], stop=[140, 3, 150, 150]),
        [(0, 2, 140), (1, 0, 3), (2, 150, 150), (3, 12, 150)],
    ),
    "packed": Case(
        [0, 70, 70, 139, 150], dict(start=[1, 0, 0, 8]), [(0, 1, 70), (0, 70, 70), (0, 70, 139), (0, 147, 150)]
    ),
    "stacked": Case([0, 65, 130, 0, 65, 65], {}, [(0, 0, 65), (0, 65, 130), (1, 0, 65), (1, 65, 65)]),
}
RUNS = [("float32", "packed", False), ("e4m3-tile", "batch", True), ("int8-key_row", "stacked", True)]
RUNS += [("drawn", "packed", True), ("e4m3-tile", "packed", False), ("drawn", "batch", False)]


@pytest.mark.parametrize(("spec", "name", "kda"), RUNS)
def test_a_sequence_has_the_bits_that_it_has_alone(spec, name, kda):
    options = Options(scale=0.3, state=SPECS[spec], read_stored=kda, hardware_fp8=device_capability() >= 89)
    run = jax.jit(functools.partial(both_directions, target_of(portable=False).run, options), static_argnums=5)
    feedback, sizes = spec != "float32" and name == "stacked", dict(T=150, H=2, HV=4, K=128, V=128)
    check_bits_alone(run, options, CASES[name], every=64, kda=kda, feedback=feedback, **sizes)


@pytest.mark.parametrize("kda", [False, True], ids=["gdn", "kda"])
@pytest.mark.parametrize("spec", ["e4m3-tile", "int8-key_row", "value_row", "float16", "float32"])
def test_states_that_are_kept_change_no_bit(spec, kda):
    """Every state, one every 64 tokens, one every 100: outputs, carry and gradients, all tokens at once."""
    specs = SPECS | {"value_row": QuantSpec.fp8(granularity="value_row"), "float16": QuantSpec.float16()}
    policy = DecodePolicy(state=specs[spec], readout="stored" if kda else "working")
    x = make_inputs(1, gate="kda" if kda else "gdn", B=2, T=150, H=2, HV=4, K=128, V=128)
    x = {key: jnp.asarray(a, jnp.float32 if key in ("g", "initial_state") else jnp.bfloat16) for key, a in x.items()}

    def gradient(every):
        bounds = {"checkpoint_every": every}
        return jax.jit(jax.grad(lambda x: loss(x, bounds, "triton", policy), has_aux=True))(x)

    first, *others = (gradient(every) for every in (64, 1, 100))
    for other in others:
        for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(other), strict=True):
            assert np.array_equal(a, b)


FP8 = DecodePolicy(state=QuantSpec.fp8())
BOUNDS = {
    "lengths": dict(prefix_lengths=[0, 64, 3], lengths=[130, 66, 3]),
    "packed": dict(prefix_lengths=[1, 0, 60], cu_seqlens=[0, 70, 70, 130]),
}


def call(x, bounds, backend, quant=FP8):
    x = {"state" if name == "initial_state" else name: a for name, a in x.items()}
    return jlaqat.delta_rule_decode(**x, quant=quant, backend=backend, **bounds)


def loss(x, bounds, backend, quant):
    o, carry = call(x, bounds, backend, quant)
    weights = jnp.cos(jnp.arange(o.size, dtype=jnp.float32)).reshape(o.shape)
    return (o * weights).sum(), (o, carry)


def operands(name, gate="gdn"):
    x = make_inputs(1, gate=gate, B=3, T=130, H=2, HV=4, K=64, V=64)
    return {key: jnp.asarray(a if name == "lengths" or key == "initial_state" else a[:1]) for key, a in x.items()}


@pytest.mark.parametrize("gate", ["gdn", "kda"])
@pytest.mark.parametrize("name", BOUNDS)
def test_values_near_the_xla_backend_s(name, gate):
    """With prefixes; bounds traced. Unrounded, so that no code falls to the other side of a tie."""
    x = operands(name, gate)
    bounds = {key: jnp.asarray(value, jnp.int32) for key, value in BOUNDS[name].items()}
    gradient = jax.jit(jax.grad(loss, has_aux=True), static_argnums=(2, 3))
    got, (o, carry) = gradient(x, bounds, "triton", DecodePolicy())
    wanted, (o_xla, carry_xla) = gradient(x, bounds, "xla", DecodePolicy())
    assert np.array_equal(carry.position, carry_xla.position)
    assert_close(o, o_xla, 1e-3, "o")  # prefixes run in TF32
    assert_close(carry.state(), carry_xla.state(), 1e-3, "state")
    for key in x:
        assert_close(got[key], wanted[key], 2e-3, key)


@pytest.mark.parametrize("name", BOUNDS)
def test_vmap_has_the_bits_of_calls_one_by_one(name):
    """Folded into one launch, gradients included; and "auto" under jit takes the same kernels."""
    x = operands(name)
    stacked = {key: jnp.stack([a, 0.5 * a]) for key, a in x.items()}
    bounds = {key: jnp.asarray(value, jnp.int32) for key, value in BOUNDS[name].items() if key != "prefix_lengths"}
    gradient = jax.grad(lambda x, bounds: loss(x, bounds, "auto", FP8), has_aux=True)
    got = jax.jit(jax.vmap(gradient, in_axes=(0, None)))(stacked, bounds)
    for i in range(2):
        one = jax.jit(gradient)({key: a[i] for key, a in stacked.items()}, bounds)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(one), strict=True):
            assert np.array_equal(a[i], b)


@pytest.mark.parametrize(
    "spec",
    [QuantSpec.fp8(rounding="stochastic"), QuantSpec.int8(granularity="key_row", rounding="stochastic")]
    + [QuantSpec.float16(rounding="stochastic"), QuantSpec.bfloat16(rounding="stochastic")],
    ids=lambda spec: spec.format,
)
def test_stochastic_rounding_draws_what_the_xla_backend_draws(spec):
    """After three tokens codes differ only where sums in another order do; steps have the call's bits."""
    x = {key: jnp.asarray(a) for key, a in make_inputs(1, B=2, T=3, H=2, HV=4, K=64, V=64).items()}
    arrays = jlaqat.QuantArrays(step=jnp.uint32(2**32 - 2), layer=3)
    policy = DecodePolicy(state=spec, error_feedback=spec.format == "int8")
    run = jax.jit(lambda x, backend: call(x, {"quant_arrays": arrays}, backend, policy), static_argnums=1)
    (o, carry), (_, wanted) = run(x, "triton"), run(x, "xla")
    drawn, reference = (np.asarray(c.values.astype(jnp.float32)) for c in (carry, wanted))
    assert (drawn != reference).mean() < 0.01
    nearest = DecodePolicy(state=dataclasses.replace(spec, rounding="nearest"))
    other = jax.jit(lambda x: call(x, {}, "triton", nearest))(x)[1]
    assert (drawn != np.asarray(other.values.astype(jnp.float32))).mean() > 0.1
    step = jax.jit(lambda row, carry: jlaqat.delta_rule_step(*row, carry, quant=policy, quant_arrays=arrays))
    empty = {key: a if key == "initial_state" else a[:, :0] for key, a in x.items()}
    state = call(empty, {"quant_arrays": arrays}, "triton", policy)[1]
    for t in range(3):
        row_o, state = step([x[key][:, t] for key in ("q", "k", "v", "g", "beta")], state)
        assert np.array_equal(row_o, o[:, t])
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(carry), strict=True):
        assert np.array_equal(a, b)
