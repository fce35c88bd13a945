"""Inputs that broke other implementations, by the number of the public report: one test a case, on every backend.

Layers and models own cases 12 and 15; the GPU suite runs the large ones whole (1, 4, 7, 8).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jlaqat
from jlaqat import reference
from jlaqat.rounding import fake_quantize
from jlaqat.spec import DeltaQuant, QuantSpec
from jlaqat.testing import assert_close, error_ratio, make_inputs

pytestmark = pytest.mark.usefixtures("compile_quickly")

BACKENDS = ["reference", "xla"]
GATES = ["gdn", "kda"]
GRADIENTS = ("q", "k", "v", "g", "beta", "initial_state")
over_backends = pytest.mark.parametrize("backend", BACKENDS)
over_gates = pytest.mark.parametrize("gate", GATES)


def _results_and_gradients(x, cotangents, backend, cu_seqlens=None, quant=DeltaQuant()):  # noqa: B008
    call = functools.partial(jlaqat.delta_rule, cu_seqlens=cu_seqlens, quant=quant, backend=backend)
    results, pullback = jax.vjp(lambda x: call(**x), x)
    return results, pullback(jax.tree.map(lambda d, r: d.astype(r.dtype), cotangents, results))[0]


_jitted = jax.jit(_results_and_gradients, static_argnames=("backend", "quant"))


def run(x, backend, cu_seqlens=None):
    """Results, gradients and what the oracle says, with cotangents on both results."""
    rng = np.random.default_rng(1)
    do = rng.normal(size=x["v"].shape).astype(np.float32)
    d_final = rng.normal(size=x["initial_state"].shape).astype(np.float32)
    if backend == "reference":  # eagerly: it cuts packed sequences in Python
        got = _results_and_gradients(
            jax.tree.map(jnp.asarray, x), (jnp.asarray(do), jnp.asarray(d_final)), backend, cu_seqlens
        )
    else:
        got = _jitted(x, (do, d_final), backend, cu_seqlens)
    return got, reference.oracle(x, do, d_final, cu_seqlens=cu_seqlens)


def check(x, backend, cu_seqlens=None, forward=1e-5, gradients=1e-4, gates=None):
    got, wanted = run(x, backend, cu_seqlens)
    assert_close(got[0][0], wanted[0], forward, "o")
    assert_close(got[0][1], wanted[1], forward, "final_state")
    for name in GRADIENTS:
        bound = (gates or gradients) if name in ("g", "beta") else gradients
        # Under a decay of e^-50 dg is 1e-22 beside gradients of 1: less than the oracle's own rounding.
        assert_close(got[1][name], wanted[2][name], bound, f"d{name}", floor=1e-7)
    return got


SMALL = dict(T=75, H=1, HV=2, K=12, V=8)  # shared, so that most cases reuse one compilation a gate


@over_backends
@over_gates
def test_case_1_2_no_decay_at_all(gate, backend):
    check(make_inputs(1, gate=gate, decay=(0.0, 0.0), **SMALL), backend)


def test_case_3_odd_sizes():
    """K = 60, V ≠ K. The xla backend pads tokens only; test_ops.py poisons what lies beyond."""
    check(make_inputs(3, T=70, H=1, K=60, V=100), "xla")


@over_backends
def test_case_4_many_short_sequences(backend):
    count = 300 if backend == "xla" else 20
    x = make_inputs(4, T=4 * count, H=1, K=4, num_sequences=count)
    cu = np.arange(0, 4 * count + 1, 4, dtype=np.int32)
    rows = {name: a.reshape(count, 4, *a.shape[2:]) for name, a in x.items() if name != "initial_state"}
    op = jlaqat.delta_rule if backend == "reference" else jax.jit(jlaqat.delta_rule, static_argnames="backend")
    o, final_state = op(**x, cu_seqlens=cu, backend=backend)
    wanted = reference.delta_rule_chunks(
        **jax.tree.map(jnp.asarray, rows), initial_state=jnp.asarray(x["initial_state"])
    )
    assert_close(o.reshape(wanted[0].shape), wanted[0], 1e-5)
    assert_close(final_state, wanted[1], 1e-5)


@over_backends
@over_gates
@pytest.mark.parametrize("rate", [50.0, 20.0])
def test_case_5_strong_decay(gate, backend, rate):
    """−50 and −20 a token, with a partial chunk: nothing overflows, nothing is inf·0."""
    check(make_inputs(5, gate=gate, decay=(rate, rate), **SMALL), backend)


@over_backends
@over_gates
def test_case_5_decay_of_every_size_in_one_chunk(gate, backend):
    check(make_inputs(5, gate=gate, decay=(1e-4, 60.0), **SMALL), backend)


@over_backends
@over_gates
@pytest.mark.parametrize("reset", [-1e4, -1e30, -np.inf])
def test_gates_that_reset_the_state_leave_later_gates_their_digits(gate, backend, reset):
    """A sum of log decays that holds -1e30 has no room for -0.1: outputs were off by twice their size."""
    x = make_inputs(5, gate=gate, decay=(0.01, 1.0), **SMALL)
    x["g"][:, [3, 40, 41, 70]] = reset
    (o, final_state), _ = check(x, backend)
    with jax.enable_x64(True):
        wanted = reference.delta_rule_tokens(**{name: jnp.asarray(a, jnp.float64) for name, a in x.items()})
        wanted = jax.tree.map(np.asarray, wanted)
    assert_close(o, wanted[0], 1e-5, "o")
    assert_close(final_state, wanted[1], 1e-5, "final_state")


@over_backends
def test_case_6_kda_with_grouped_heads(backend):
    assert SMALL["HV"] == 2 * SMALL["H"]
    check(make_inputs(6, gate="kda", **SMALL), backend)


@pytest.mark.slow
@over_gates
def test_case_7_wide_heads(gate):
    check(make_inputs(7, gate=gate, T=70, H=1, K=256, V=512), "xla")


@over_gates
def test_case_8_runs_are_bit_equal(gate):
    x = make_inputs(8, gate=gate, **SMALL)
    first, *others = (jax.tree.leaves(_jitted(x, (x["v"], x["initial_state"]), "xla", None)) for _ in range(10))
    assert all(np.array_equal(a, b) for other in others for a, b in zip(other, first))


@over_backends
def test_case_9_short_sequences_have_gradients(backend):
    for length in (1, 64) if backend == "xla" else (64,):
        check(make_inputs(9, **SMALL | {"T": length}), backend)


@over_backends
@over_gates
def test_case_10_gradient_of_strong_gates(gate, backend):
    """dg is a small difference of sums when g ≈ −10."""
    check(make_inputs(10, gate=gate, decay=(9.0, 11.0), **SMALL), backend, gates=1e-3)


@over_backends
def test_case_11_kda_at_its_lower_bound(backend):
    check(make_inputs(11, gate="kda", decay=(5.0, 5.0), **SMALL), backend)


@over_backends
def test_case_13_sequences_of_no_tokens(backend):
    cu = np.array([0, 0, 64, 64, 75], np.int32)
    x = make_inputs(13, num_sequences=4, **SMALL)
    check(x, backend, cu)
    quant = DeltaQuant(state=QuantSpec.fp8())
    _, final_state = jlaqat.delta_rule(**x, cu_seqlens=cu, quant=quant, backend=backend)
    rounded = fake_quantize(jnp.asarray(x["initial_state"]), quant.state, site="state")
    assert np.array_equal(final_state[0], rounded[0]) and np.array_equal(final_state[2], rounded[2])


@over_backends
@over_gates
def test_case_14_decay_of_1e_12_a_step(gate, backend):
    rate = -np.log(1e-12)
    check(make_inputs(14, gate=gate, decay=(rate, rate), **SMALL), backend)


@over_backends
@over_gates
def test_case_16_beta_up_to_2_with_correlated_keys(gate, backend):
    check(make_inputs(16, gate=gate, correlation=0.9, max_beta=2.0, decay=(1e-3, 1e-2), **SMALL), backend)


def test_case_16_16_bit_types_and_transposed_inputs():
    x = make_inputs(16, dtype=np.float16, correlation=0.5, max_beta=2.0, **SMALL)
    x["v"] = np.asfortranarray(x["v"])
    (results, gradients), wanted = run(x, "xla")
    for got, exact in zip(results, wanted[:2], strict=True):
        assert_close(got, exact, 0.005)
    for name in GRADIENTS:
        assert_close(gradients[name], wanted[2][name], 0.02 if name in ("g", "beta") else 0.008, f"d{name}")
    turned = {n: jnp.swapaxes(jnp.asarray(a), 1, 2) for n, a in x.items() if n != "initial_state"}

    @jax.jit
    def from_heads_first(turned, initial_state):
        rows = {name: jnp.swapaxes(a, 1, 2) for name, a in turned.items()}
        return jlaqat.delta_rule(**rows, initial_state=initial_state)

    assert_close(from_heads_first(turned, x["initial_state"])[0], wanted[0], 0.005)


@pytest.mark.parametrize("backend", [*BACKENDS, "step"])
def test_case_17_one_token_by_hand(backend):
    """K = V = 1: S 2 → decayed to 1; error 3 − 1·0.5 = 2.5; write 0.8·2.5·0.5 = 1 → S 2; o = 0.5·2·4."""
    q, k, v, g, beta, S = 4.0, 0.5, 3.0, np.log(0.5), 0.8, 2.0
    shapes = [(1, 1, 1)] * 3 + [(1, 1)] * 2
    operands = [jnp.full(shape, a, jnp.float32) for shape, a in zip(shapes, (q, k, v, g, beta))]
    state = jnp.full((1, 1, 1, 1), S, jnp.float32)
    if backend == "step":
        o, state = jlaqat.delta_rule_step(*operands, state, scale=0.5)
    else:
        rows = [a[:, None] for a in operands]
        o, state = jlaqat.delta_rule(*rows, scale=0.5, initial_state=state, backend=backend)
    assert np.allclose(state, 2.0, rtol=1e-6) and np.allclose(o, 4.0, rtol=1e-6)


def drift(tokens, quant, every):
    """Relative error of the state against float32 after each `every` tokens."""
    x = make_inputs(18, T=tokens, H=2, K=16, decay=(1e-3, 1e-2))
    errors, states = [], {}
    run = jax.jit(lambda quant, **x: jlaqat.delta_rule_recurrent(**x, quant=quant), static_argnames="quant")
    for start in range(0, tokens, every):
        rows = {name: a[:, start : start + every] for name, a in x.items() if name != "initial_state"}
        for q in (DeltaQuant(), quant):
            _, states[q] = run(q, **rows, initial_state=states.get(q, jnp.zeros((1, 2, 16, 16))))
        errors.append(error_ratio(states[quant], states[DeltaQuant()]))
    return errors


def test_case_18_drift_of_a_low_precision_state():
    """Errors of per-token rounding settle instead of growing without end: the decay forgets them."""
    errors = drift(512, DeltaQuant(state=QuantSpec.int8(cadence=1)), 64)
    assert all(0 < e < 0.5 for e in errors)
    assert max(errors[4:]) < 3 * max(errors[:4])


@pytest.mark.slow
@pytest.mark.parametrize("spec", [QuantSpec.fp8(cadence=1), QuantSpec.int8(cadence=1), QuantSpec.int8(cadence=16)])
def test_case_18_drift_over_4000_tokens(spec, record_property):
    errors = drift(4096, DeltaQuant(state=spec), 512)
    record_property("drift", errors)
    print(spec.describe(), [f"{e:.3f}" for e in errors])
    assert all(0 < e < 1 for e in errors)
    assert max(errors[4:]) < 2 * max(errors[:4])


@pytest.mark.parametrize("backend", [pytest.param("reference", marks=pytest.mark.slow), "xla"])
@pytest.mark.parametrize("gate", ["gdn", pytest.param("kda", marks=pytest.mark.slow)])
def test_case_19_lengths_that_fit_nothing(gate, backend):
    """T a multiple of neither 64 nor 16, and more sequences than chunks of 64 tokens."""
    cu = np.array([0, 3, 20, 23, 40, 57, 74], np.int32)
    check(make_inputs(19, gate=gate, num_sequences=6, **SMALL), backend, cu)


# Case 20, devices against one: tests/test_ops_transforms.py::test_shard_map_over_batch_and_heads_changes_no_bit.
