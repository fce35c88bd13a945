"""The xla backend against the float64 oracle: outputs, final states and every gradient, rounded and not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jlaqat
from jlaqat import chunked, reference
from jlaqat.rounding import fake_quantize
from jlaqat.spec import DeltaQuant, QuantArrays, QuantSpec
from jlaqat.testing import assert_close, error_ratio, make_inputs

pytestmark = pytest.mark.usefixtures("strict_promotion", "compile_quickly")
CU_SEQLENS = np.array([0, 0, 64, 70, 70, 134], np.int32)  # empty, whole, partial, empty, whole; 6 tokens beyond
SIZES = dict(H=1, HV=2, K=12, V=20)
BATCH, PACKED = dict(B=2, T=75, **SIZES), dict(T=140, num_sequences=5, **SIZES)
NO_QUANT, NO_ARRAYS = DeltaQuant(), QuantArrays()
GRADIENTS = {"q": 1e-4, "k": 1e-4, "v": 1e-4, "g": 1e-4, "beta": 1e-4, "initial_state": 1e-4}
GRADIENTS_16 = {"q": 0.008, "k": 0.008, "v": 0.008, "g": 0.02, "beta": 0.02, "initial_state": 0.008}


def cotangents_of(x):
    rng = np.random.default_rng(8)
    do = rng.normal(size=x["v"].shape).astype(np.float32)
    return do, rng.normal(size=x["initial_state"].shape).astype(np.float32)


@functools.partial(jax.jit, static_argnames=("op", "quant"))
def results_and_gradients(x, cotangents, cu_seqlens, op=jlaqat.delta_rule, quant=NO_QUANT, arrays=NO_ARRAYS):
    def call(x):
        return op(**x, cu_seqlens=cu_seqlens, quant=quant, quant_arrays=arrays)

    results, pullback = jax.vjp(call, x)
    return results, pullback(jax.tree.map(lambda d, r: d.astype(r.dtype), cotangents, results))[0]


def compare(got, wanted, forward_bound, gradient_bounds):
    (o, final_state), gradients = got
    assert_close(o, wanted[0], forward_bound, "o")
    assert_close(final_state, wanted[1], forward_bound, "final_state")
    for name, bound in gradient_bounds.items():
        assert_close(gradients[name], wanted[2][name], bound, f"d{name}")


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("gate", "layout"),
    [
        ("gdn", "packed"),
        ("kda", "batch"),
        pytest.param("gdn", "batch", marks=slow),
        pytest.param("kda", "packed", marks=slow),
    ],
)
def test_float32(gate, layout):
    sizes, cu = (BATCH, None) if layout == "batch" else (PACKED, CU_SEQLENS)
    x = make_inputs(1, gate=gate, correlation=0.5, max_beta=2.0, **sizes)
    cotangents = cotangents_of(x)
    got = results_and_gradients(x, cotangents, cu)
    compare(got, reference.oracle(x, *cotangents, cu_seqlens=cu), 1e-5, GRADIENTS)
    if layout == "packed":
        assert not np.any(got[0][0][:, CU_SEQLENS[-1] :])
        for name in ("q", "k", "v", "g", "beta"):
            assert not np.any(got[1][name][:, CU_SEQLENS[-1] :]), name
        # What stands beyond the sequences reaches nothing, not even as NaN.
        poisoned = {n: a if n == "initial_state" else a.copy() for n, a in x.items()}
        for name in ("q", "k", "v", "g", "beta"):
            poisoned[name][:, CU_SEQLENS[-1] :] = np.nan
        again = results_and_gradients(poisoned, cotangents, cu)
        assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(got)))


def test_traced_cu_seqlens_serve_other_lengths_without_compiling_again():
    x = make_inputs(1, gate="gdn", correlation=0.5, max_beta=2.0, **PACKED)
    cotangents = cotangents_of(x)
    results_and_gradients(x, cotangents, CU_SEQLENS)
    compiled = results_and_gradients._cache_size()
    cu = np.array([0, 65, 65, 66, 139, 140], np.int32)
    got = results_and_gradients(x, cotangents, cu)
    assert results_and_gradients._cache_size() == compiled
    compare(got, reference.oracle(x, *cotangents, cu_seqlens=cu), 1e-5, GRADIENTS)


@pytest.mark.parametrize("bad", [[1, 2, 3, 4, 5, 6], [0, 9, 8, 70, 70, 134], [0, 1, 2, 3, 4, 141]])
def test_traced_cu_seqlens_that_break_the_rules_give_nan(bad):
    x = make_inputs(1, gate="gdn", correlation=0.5, max_beta=2.0, **PACKED)
    (o, final_state), _ = results_and_gradients(x, cotangents_of(x), np.array(bad, np.int32))
    assert np.isnan(o).all() and np.isnan(final_state).all()


@pytest.mark.parametrize(
    ("gate", "dtype"),
    [
        ("gdn", jnp.bfloat16),
        pytest.param("kda", jnp.bfloat16, marks=slow),
        pytest.param("gdn", jnp.float16, marks=slow),
    ],
)
def test_16_bit_inputs(gate, dtype):
    x = make_inputs(2, gate=gate, dtype=dtype, **BATCH)
    cotangents = cotangents_of(x)
    (o, final_state), gradients = got = results_and_gradients(x, cotangents, None)
    assert o.dtype == gradients["q"].dtype == gradients["v"].dtype == dtype
    assert final_state.dtype == gradients["g"].dtype == jnp.float32
    compare(got, reference.oracle(x, *cotangents), 0.005, GRADIENTS_16)


@pytest.mark.parametrize("gate", ["gdn", pytest.param("kda", marks=slow)])
def test_float64(gate, x64):
    x = make_inputs(2, gate=gate, dtype=np.float64, correlation=0.5, max_beta=2.0, **BATCH)
    cotangents = tuple(d.astype(np.float64) for d in cotangents_of(x))
    got = results_and_gradients(x, cotangents, None)
    assert got[0][0].dtype == got[0][1].dtype == jnp.float64
    compare(got, reference.oracle(x, *cotangents), 1e-13, dict.fromkeys(GRADIENTS, 1e-13))


@functools.partial(jax.jit, static_argnames="quant")
def rounded_results(x, cotangents, cu_seqlens, quant, arrays):
    """Results and gradients, and the states and w that the xla backend rounded to on its way."""
    got = results_and_gradients(x, cotangents, cu_seqlens, quant=quant, arrays=arrays)
    inputs = chunked.Inputs(**x)
    _, residuals = chunked.forward(quant, inputs.k.shape[-1] ** -0.5, inputs, cu_seqlens, arrays)
    layout, _ = chunked.layout_of(inputs, cu_seqlens)
    chunks = chunked.chunk_operands(inputs, layout)
    decayed = chunked.decay_operands(chunks, 1.0)
    w = chunked.wy_factors(residuals.X, decayed, chunks, layout, quant, arrays)[1]
    return got, (residuals.states, w, layout.sequence)


def replay_of(got, recorded, cu_seqlens):
    """What `rounded_results` recorded, as the reference takes it."""
    (o, final), (states, w, sequence) = got[0], map(np.asarray, recorded)
    if cu_seqlens is None:
        w = np.moveaxis(w, 0, 2).reshape(*w.shape[1:3], -1, w.shape[-1])
        return reference.Replay([np.stack([*states, final], axis=2)], [w[:, :, : o.shape[1]]])
    replay = reference.Replay([], [])
    for n, length in enumerate(np.diff(cu_seqlens)):
        mine = np.flatnonzero(sequence[:, 0] == n)
        # A sequence without tokens has no chunk: all it rounds is its initial state, which comes out as the final one.
        replay.states.append(np.stack([*states[mine, 0], final[n]], axis=1)[None])
        own = np.moveaxis(w[mine, 0], 0, 1).reshape(w.shape[2], -1, w.shape[-1])
        replay.w.append(own[None, :, :length])
    return replay


def static_arrays(quant, x):
    """amax a third of what occurs, so that clipping happens."""
    state = jnp.full((2, -(-x["v"].shape[-1] // quant.state.block_v)), 0.5) if quant.state else None
    return QuantArrays(state_amax=state, w_amax=jnp.full((2,), 0.3) if quant.w else None)


FP8, INT8 = QuantSpec.fp8, QuantSpec.int8
QUANTS = [
    ("gdn", "batch", DeltaQuant(state=FP8(block_v=16), w=FP8())),
    ("gdn", "packed", DeltaQuant(state=INT8(granularity="key_row"))),
    pytest.param("kda", "packed", DeltaQuant(state=FP8(block_v=16), w=FP8()), marks=slow),
    pytest.param(
        "gdn",
        "batch",
        DeltaQuant(state=QuantSpec.nvfp4(rounding="stochastic"), w=FP8(rounding="stochastic")),
        marks=slow,
    ),
]


@pytest.mark.parametrize(("gate", "layout", "quant"), QUANTS, ids=lambda p: p if isinstance(p, str) else p.state.format)
def test_rounded_with_replayed_states(gate, layout, quant):
    """With the values this backend rounded to, the reference agrees within the unrounded bounds, gradients included."""
    sizes, cu = (BATCH, None) if layout == "batch" else (PACKED, CU_SEQLENS)
    x = make_inputs(5, gate=gate, **sizes)
    cotangents, arrays = cotangents_of(x), QuantArrays(step=jnp.uint32(3), layer=jnp.uint32(1))
    got, recorded = rounded_results(jax.tree.map(jnp.asarray, x), cotangents, cu, quant, arrays)
    replay = replay_of(got, recorded, cu)
    compare(got, reference.oracle(x, *cotangents, cu_seqlens=cu, quant=quant, replay=replay), 1e-5, GRADIENTS)
    plain = reference.oracle(x, *cotangents, cu_seqlens=cu)
    assert error_ratio(got[0][1], plain[1]) > 1e-3, "nothing was rounded"
    # End to end, with rounding of its own, the reference stays within the looser bounds.
    o, final_state = reference.delta_rule_chunks(
        **jax.tree.map(jnp.asarray, x), cu_seqlens=cu, quant=quant, quant_arrays=arrays
    )
    assert_close(got[0][0], o, 0.03, "o")
    assert_close(got[0][1], final_state, 0.03, "final_state")
    if cu is not None:
        initial = fake_quantize(jnp.asarray(x["initial_state"]), quant.state, site="state")
        assert np.array_equal(got[0][1][0], initial[0]), "an empty sequence returns its rounded initial state"


def test_static_scales_clip_values_and_gradients():
    """gradient="clip" against automatic differentiation of the reference with the same rounding."""
    quant = DeltaQuant(state=FP8(scale="static", gradient="clip", block_v=16), w=FP8(scale="static", gradient="clip"))
    x = make_inputs(6, gate="gdn", **BATCH)
    arrays, cotangents = static_arrays(quant, x), cotangents_of(x)
    got = results_and_gradients(x, cotangents, None, quant=quant, arrays=arrays)
    wanted = results_and_gradients(x, cotangents, None, op=reference.delta_rule_chunks, quant=quant, arrays=arrays)
    compare(got, (*wanted[0], wanted[1]), 0.01, dict.fromkeys(GRADIENTS, 0.03))
    straight = DeltaQuant(state=FP8(scale="static", block_v=16), w=FP8(scale="static"))
    other = jax.jit(lambda x: reference.delta_rule_chunks(**x, quant=straight, quant_arrays=arrays))(x)
    assert_close(got[0][1], other[1], 0.01)
    amax_gradient = jax.jit(jax.grad(lambda a: jlaqat.delta_rule(**x, quant=quant, quant_arrays=a)[0].sum()))
    leaves = jax.tree.leaves(amax_gradient(arrays._replace(step=0.0, layer=0.0, sequence_offset=0.0, head_offset=0.0)))
    assert not any(np.any(leaf) for leaf in leaves), "no gradient flows to scales"


def test_rounding_again_what_a_call_returned_is_free():
    """Cut at a chunk boundary, two calls chained through the state are one call, bit for bit."""
    quant = DeltaQuant(state=FP8(block_v=16), w=FP8())
    x = make_inputs(7, B=2, T=128, gate="kda", **SIZES)
    rows = {name: a for name, a in x.items() if name != "initial_state"}
    run = jax.jit(functools.partial(jlaqat.delta_rule, quant=quant))
    o, final_state = run(**x)
    first, state = run(**{n: a[:, :64] for n, a in rows.items()}, initial_state=x["initial_state"])
    second, state = run(**{n: a[:, 64:] for n, a in rows.items()}, initial_state=state)
    assert np.array_equal(o, np.concatenate([first, second], axis=1)) and np.array_equal(final_state, state)


@pytest.mark.parametrize("gate", ["gdn", "kda"])
def test_a_prefix_gives_the_same_bits(gate):
    x = make_inputs(9, gate=gate, **BATCH)
    run = jax.jit(jlaqat.delta_rule)
    o, _ = run(**x)
    changed = {name: a.copy() for name, a in x.items()}
    for name in ("q", "k", "v", "g", "beta"):
        changed[name][:, 40:] *= 0.5
    assert np.array_equal(run(**changed)[0][:, :40], o[:, :40])


@pytest.mark.parametrize(
    ("gate", "layout", "spec"),
    [
        pytest.param("gdn", "packed", FP8(cadence=1, block_v=16), marks=slow),
        ("kda", "batch", INT8(cadence=16)),
        ("gdn", "batch", None),
    ],
    ids=lambda p: p if isinstance(p, str) else str(p and p.cadence),
)
def test_recurrent(gate, layout, spec):
    short = dict(T=72, num_sequences=3, **SIZES)  # each sequence costs the reference a compilation
    sizes, cu = (BATCH, None) if layout == "batch" else (short, np.array([0, 0, 20, 70], np.int32))
    quant = DeltaQuant(state=spec)
    x = make_inputs(5, gate=gate, **sizes)
    cotangents = cotangents_of(x)
    got = results_and_gradients(x, cotangents, cu, op=jlaqat.delta_rule_recurrent, quant=quant)
    if spec is None:
        compare(got, reference.oracle(x, *cotangents), 1e-5, GRADIENTS)
        return
    by_token = functools.partial(reference.delta_rule_tokens, cu_seqlens=cu, quant=quant)
    (o, final_state), pullback = jax.jit(lambda x: jax.vjp(lambda x: by_token(**x), x))(x)
    wanted = o, final_state, pullback(tuple(map(jnp.asarray, cotangents)))[0]
    compare(got, wanted, 1e-5, GRADIENTS)
    # delta_rule hands states with a cadence of their own to the token scan.
    same = jax.jit(functools.partial(jlaqat.delta_rule, quant=quant))(**x, cu_seqlens=cu)
    assert_close(same[0], got[0][0], 1e-6)


@slow
def test_recurrent_with_stochastic_rounding_and_clipping():
    """The same bits again in the backward's second run of a segment, or the clip mask would differ from autodiff's."""
    spec = FP8(cadence=16, rounding="stochastic", scale="static", gradient="clip", block_v=16, seed=5)
    quant = DeltaQuant(state=spec)
    x = make_inputs(5, gate="gdn", **BATCH)
    cotangents, arrays = cotangents_of(x), static_arrays(quant, x)
    got = results_and_gradients(x, cotangents, None, op=jlaqat.delta_rule_recurrent, quant=quant, arrays=arrays)
    wanted = results_and_gradients(x, cotangents, None, op=reference.delta_rule_tokens, quant=quant, arrays=arrays)
    compare(got, (*wanted[0], wanted[1]), 1e-5, GRADIENTS)


@pytest.mark.parametrize("cadence", [pytest.param(1, marks=slow), 64])
def test_observe_counts_every_rounding_and_no_padding(cadence):
    quant = DeltaQuant(state=FP8(block_v=16, cadence=cadence), w=FP8() if cadence == 64 else None)
    x = make_inputs(5, gate="gdn", **PACKED)
    run = jax.jit(lambda x, cu: jlaqat.delta_rule_observe(**x, cu_seqlens=cu, quant=quant))
    o, final_state, stats = run(x, CU_SEQLENS)
    plain = jax.jit(lambda x, cu: jlaqat.delta_rule(**x, cu_seqlens=cu, quant=quant))(x, CU_SEQLENS)
    assert_close(o, plain[0], 1e-6)
    assert_close(final_state, plain[1], 1e-6)
    roundings = 5 + (3 if cadence == 64 else 134)  # initial states, then chunks or tokens
    assert stats["state"].count.tolist() == [roundings * 12 * 20] * 2
    assert stats["state"].amax.max() >= np.abs(final_state).max()
    noise = stats["state"].squared_error / stats["state"].squares
    assert np.all((noise > 1e-4) & (noise < 2e-3))  # E4M3: 3 bits of mantissa
    if cadence == 64:
        assert stats["w"].count.tolist() == [134 * 12] * 2
    else:
        assert stats["w"] is None


def test_steps_continue_a_call():
    x = make_inputs(5, gate="kda", **BATCH)
    wanted_o, wanted_state, _ = reference.oracle(x, *cotangents_of(x))
    rows = {name: a for name, a in x.items() if name != "initial_state"}
    start = {n: a[:, :70] for n, a in rows.items()}
    _, state = jax.jit(jlaqat.delta_rule)(**start, initial_state=x["initial_state"])
    step = jax.jit(jlaqat.delta_rule_step)
    for t in range(70, 75):
        o, state = step(*(a[:, t] for a in rows.values()), state)
        assert_close(o, wanted_o[:, t], 1e-5)
    assert_close(state, wanted_state, 1e-5)


@pytest.mark.parametrize("cadence", [1, 64])
@pytest.mark.parametrize("cu", [None, [0, 0]])
def test_no_tokens(cu, cadence):
    quant = DeltaQuant(state=FP8(block_v=16, cadence=cadence))
    x = make_inputs(5, T=0, gate="kda", **SIZES)
    op = functools.partial(jlaqat.delta_rule, cu_seqlens=cu, quant=quant)
    (o, final_state), pullback = jax.vjp(lambda x: op(**x), x)
    assert o.shape == (1, 0, 2, 20)
    assert np.array_equal(final_state, fake_quantize(jnp.asarray(x["initial_state"]), quant.state, site="state"))
    gradients = pullback((o, jnp.ones_like(final_state)))[0]
    assert np.all(gradients["initial_state"] == 1) and gradients["q"].shape == (1, 0, 1, 12)
    _, _, stats = jlaqat.delta_rule_observe(**x, cu_seqlens=cu, quant=quant)
    assert stats["state"].count.tolist() == [12 * 20] * 2 and stats["w"] is None


@pytest.mark.parametrize(
    ("gate", "layout", "quant"),
    [
        ("gdn", "batch", DeltaQuant(state=FP8(block_v=16, scale="static", gradient="clip"))),
        pytest.param("gdn", "packed", DeltaQuant(state=INT8(), w=FP8()), marks=slow),
        pytest.param("kda", "batch", DeltaQuant(state=INT8(rounding="stochastic"), w=FP8()), marks=slow),
    ],
)
def test_blocks_change_no_bit(gate, layout, quant, monkeypatch):
    """One block, and blocks of two chunks of which the last holds an empty one, forward and backward."""
    packed = layout == "packed"
    x = make_inputs(9, gate=gate, **(PACKED if packed else BATCH | {"T": 150}))
    cu_seqlens, cotangents = CU_SEQLENS if packed else None, cotangents_of(x)
    arrays = static_arrays(quant, x) if quant.state.scale == "static" else NO_ARRAYS
    results = []
    for count in (1, 2):
        b, heads = (1 if packed else 2), x["v"].shape[2]
        monkeypatch.setattr(chunked, "BLOCK_MATRICES", b * heads * (100 if count == 1 else 2))
        blocks = chunked.layout_of(chunked.Inputs(**x), cu_seqlens)[1].valid.shape
        assert blocks[0] == 1 if count == 1 else blocks[0] > 1 and blocks[1] == 2
        run = jax.jit(results_and_gradients.__wrapped__, static_argnames=("op", "quant"))
        results.append(run(x, cotangents, cu_seqlens, quant=quant, arrays=arrays))
    for a, b in zip(*map(jax.tree.leaves, results)):
        assert np.array_equal(a, b)


def test_residuals_hold_states_at_chunk_boundaries_only():
    x = make_inputs(5, T=256, gate="kda", **SIZES)
    inputs = chunked.Inputs(**{name: jnp.asarray(a) for name, a in x.items()})
    shapes = jax.eval_shape(lambda i: chunked.forward(DeltaQuant(), 1.0, i, None, QuantArrays())[1], inputs)
    assert shapes.states.shape == (4, 1, 2, 12, 20)
    beyond_inputs = sum(np.prod(a.shape) for a in jax.tree.leaves((shapes.P, shapes.X, shapes.states)))
    assert beyond_inputs == 256 * 2 * (64 + 64) + 4 * 2 * 12 * 20
