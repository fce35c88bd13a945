"""Decoding under a policy: against its definition, against itself cut into calls, against plain decoding and FLA."""

import dataclasses
import functools
import pathlib
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jlaqat
from jlaqat import DecodePolicy, QuantArrays, QuantSpec
from jlaqat.spec import DeltaQuant
from jlaqat.testing import assert_close

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from tiny_decodes import decode, operands

pytestmark = pytest.mark.usefixtures("strict_promotion")
FACTORS = DecodePolicy(state=QuantSpec.fp8(), mode="replay", window=4, factor_qdq=True, readout="stored")
HADAMARD = DecodePolicy(state=QuantSpec.int8_hadamard32(), decay_log_step=1 / 64)
FEEDBACK = DecodePolicy(state=QuantSpec.int8(rounding="stochastic"), error_feedback=True, readout="stored")
slow = pytest.mark.slow


@functools.partial(jax.jit, static_argnames="quant")
def step(x, state, quant):
    return jlaqat.delta_rule_step(**x, state=state, quant=quant)


def defined(x, state, quant, **settings):
    return jlaqat.delta_rule_decode(**x, state=state, quant=quant, backend="reference", **settings)


def assert_same_bits(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
        assert x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes()


# ---- against the definition ------------------------------------------------------------------------------------------

PRESETS = {
    "serving": DecodePolicy.preset("serving", window=5),
    "hadamard": HADAMARD,
    "modelopt_int8": DecodePolicy.preset("modelopt_int8"),
    "vllm_fp16_sr": DecodePolicy.preset("vllm_fp16_sr"),
    "feedback": FEEDBACK,
    "reencode": dataclasses.replace(FACTORS, encoding="reencode"),
    **{
        name: pytest.param(policy, marks=slow)
        for name, policy in {
            "off": DecodePolicy(),
            "factors": FACTORS,
            "modelopt": DecodePolicy.preset("modelopt"),
            "flashinfer_cast": DecodePolicy.preset("flashinfer_cast"),
            "vllm_int8": DecodePolicy.preset("vllm_int8"),
            "vllm_fp8": DecodePolicy.preset("vllm_fp8", rounding="stochastic"),
            "sglang_fp8": DecodePolicy.preset("sglang_fp8"),
            "sglang_replay": DecodePolicy.preset("sglang_replay", window=3),
            "tpu_bf16": DecodePolicy.preset("tpu_bf16"),
            "head": DecodePolicy(state=QuantSpec.int4(granularity="head"), quantize_initial=False),
            "nvfp4": DecodePolicy(state=QuantSpec.nvfp4()),
        }.items()
    },
}


@pytest.mark.usefixtures("x64", "compile_quickly")
@pytest.mark.parametrize("policy", PRESETS.values(), ids=PRESETS)
def test_the_scan_is_the_definition(policy):
    x, state = operands(1, B=2, T=13, gate="kda", dtype=np.float64)
    prefix = None if policy == HADAMARD else np.array([0, 5], np.int32)
    o, carry = decode(x, state, policy, prefix_lengths=prefix)
    o_defined, carry_defined = defined(x, state, policy, prefix_lengths=prefix)
    assert_close(o, o_defined, 1e-12, "o")
    assert_close(carry.state(), carry_defined.state(), 1e-6, "state")  # of states in float32
    for field in ("position", "cursor"):
        assert np.array_equal(getattr(carry, field), getattr(carry_defined, field)), field


@pytest.mark.usefixtures("x64", "compile_quickly")
@pytest.mark.parametrize("gate", ["gdn", pytest.param("kda", marks=slow)])
@pytest.mark.parametrize("mode", ["token", pytest.param("replay", marks=slow)])
def test_the_scan_is_the_definition_after_prefixes_rounded_in_chunks(gate, mode):
    """One prefix of more than a chunk, which is rounded at its boundary, one of less and none."""
    x, state = operands(14, B=3, T=71, gate=gate, dtype=np.float64)
    policy = DecodePolicy(state=QuantSpec.int8(), mode=mode, prefill_state_qdq=True)
    prefix = np.array([68, 60, 0], np.int32)
    o, carry = decode(x, state, policy, prefix_lengths=prefix)
    o_defined, carry_defined = defined(x, state, policy, prefix_lengths=prefix)
    assert_close(o, o_defined, 1e-12, "o")
    assert_close(carry.state(), carry_defined.state(), 1e-6, "state")
    plain = decode(x, state, dataclasses.replace(policy, prefill_state_qdq=False), prefix_lengths=prefix)[0]
    assert not np.allclose(o[0, 64:], plain[0, 64:], rtol=1e-6)  # the boundary's rounding shows


PACKED = dict(cu_seqlens=np.array([0, 6, 6, 13], np.int32))
PACKED_PREFIX = dict(PACKED, prefix_lengths=np.array([2, 0, 3], np.int32))
BATCH_PREFIX = dict(prefix_lengths=np.array([0, 3], np.int32))


@pytest.mark.usefixtures("x64", "compile_quickly")
@pytest.mark.parametrize(
    ("policy", "bounds"),
    [
        (FACTORS, PACKED),
        pytest.param(dataclasses.replace(HADAMARD, error_feedback=True), BATCH_PREFIX, marks=slow),
        pytest.param(FEEDBACK, PACKED_PREFIX, marks=slow),
        pytest.param(DecodePolicy.preset("serving", window=3), BATCH_PREFIX, marks=slow),
    ],
    ids=["factors", "hadamard-prefix", "feedback-packed-prefix", "serving-prefix"],
)
def test_gradients_are_those_of_the_definition(policy, bounds):
    if "cu_seqlens" in bounds:
        x, state = operands(2, T=14, num_sequences=3, gate="gdn", dtype=np.float64)
    else:
        x, state = operands(2, B=2, T=7, gate="kda", dtype=np.float64)
    do = np.random.default_rng(0).normal(size=x["v"].shape)

    def gradients(run):
        def loss(x, state):
            o, _ = run(x, state, policy, **bounds)
            return (o * do).sum(), o

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(x, state)

    (got, o), (wanted, o_defined) = gradients(decode), gradients(defined)
    assert_close(o, o_defined, 1e-12, "o")
    for name in x:
        assert_close(got[0][name], wanted[0][name], 1e-12, f"d{name}")
    assert_close(got[1], wanted[1], 1e-12, "d state")


# ---- bits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "gate"),
    [(FEEDBACK, "gdn"), (DecodePolicy.preset("serving", window=4), "kda"), pytest.param(FACTORS, "gdn", marks=slow)],
    ids=["token", "replay", "factors"],
)
def test_a_decode_cut_anywhere_has_the_bits_of_the_whole(policy, gate):
    T = 11
    x, state = operands(3, B=2, T=T, gate=gate)
    start = jlaqat.delta_rule_decode(**{n: a[:, :0] for n, a in x.items()}, state=state, quant=policy)[1]
    o, carry = decode(x, start, policy, lengths=np.array([T, T - 2], np.int32))
    assert np.array_equal(carry.position, [T, T - 2]) and not np.any(o[1, T - 2 :])

    for cut in (1, 4, 7, 10):
        o_head, between = decode(x, start, policy, lengths=np.array([cut, cut - 1], np.int32))
        rest = np.array([T - cut, T - 2 - (cut - 1)], np.int32)
        shifted = {n: np.stack([np.roll(a[0], -cut, axis=0), np.roll(a[1], 1 - cut, axis=0)]) for n, a in x.items()}
        o_tail, end = decode(shifted, between, policy, lengths=rest)
        assert_same_bits(end, carry)
        for b, begun in enumerate((cut, cut - 1)):
            assert np.array_equal(np.concatenate([o_head[b, :begun], o_tail[b, : rest[b]]]), o[b, : begun + rest[b]])

    walked = start
    for t in range(T - 2):
        o_t, walked = step({n: a[:, t] for n, a in x.items()}, walked, policy)
        assert np.array_equal(o_t, o[:, t])
    assert_same_bits(jax.tree.map(lambda a: a[1], walked), jax.tree.map(lambda a: a[1], carry))


@pytest.mark.parametrize("readout", ["working", pytest.param("stored", marks=slow)])
def test_replay_of_one_update_is_token_mode(readout):
    x, state = operands(4, B=2, T=9)
    token = DecodePolicy(state=QuantSpec.int8(), readout=readout)
    o, carry = decode(x, state, token)
    o_replay, carry_replay = decode(x, state, dataclasses.replace(token, mode="replay", window=1))
    assert_same_bits((o, carry.values, carry.scale), (o_replay, carry_replay.values, carry_replay.scale))


@slow
def test_encoding_again_changes_no_bit():
    x, state = operands(5, B=1, T=7)
    results = [defined(x, state, dataclasses.replace(FACTORS, encoding=encoding)) for encoding in ("once", "reencode")]
    assert_same_bits(results[0][0], results[1][0])
    assert_same_bits(*(jax.tree.leaves(carry) for _, carry in results))


def test_token_mode_is_the_recurrence_that_rounds_every_token():
    x, state = operands(6, B=2, T=20)
    spec, arrays = QuantSpec.float16(rounding="stochastic", seed=5), QuantArrays(step=3, layer=2)
    o, carry = decode(x, state, DecodePolicy(state=spec), quant_arrays=arrays)
    quant = DeltaQuant(state=dataclasses.replace(spec, cadence=1))
    recurrent = jax.jit(functools.partial(jlaqat.delta_rule_recurrent, quant=quant, quant_arrays=arrays))
    o_recurrent, final_state = recurrent(**x, initial_state=state)
    assert_close(o, o_recurrent, 1e-5, "o")  # equal draws: others would differ by 3e-4
    assert_close(carry.state(), final_state, 1e-5, "state")


# ---- plain decoding --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gate", ["gdn", "kda"])
def test_without_a_policy_it_is_flas_recurrence(gate):
    torch = pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no GPU
        from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule
        from fla.ops.kda.naive import naive_recurrent_kda
    x, state = operands(7, B=2, T=40, H=2, gate=gate)
    o, carry = decode(x, state, DecodePolicy())
    naive = naive_recurrent_gated_delta_rule if gate == "gdn" else naive_recurrent_kda
    o_fla, state_fla = naive(
        **{n: torch.tensor(a) for n, a in x.items()}, initial_state=torch.tensor(state), output_final_state=True
    )
    assert_close(o, o_fla.numpy(), 1e-6, "o")
    assert_close(carry.state(), state_fla.numpy(), 1e-6, "state")
    if gate == "kda":
        o_recurrent, final_state = jlaqat.delta_rule_recurrent(**x, initial_state=state)
        assert_close(o, o_recurrent, 1e-6, "o")
        assert_close(carry.state(), final_state, 1e-6, "state")


# ---- prefixes, packing, padding --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("compile_quickly")
def test_packed_sequences_are_sequences_by_themselves():
    cu, prefix = np.array([0, 10, 10, 20], np.int32), np.array([4, 0, 0], np.int32)
    policy = DecodePolicy.preset("serving", window=3)
    x, state = operands(8, T=23, num_sequences=3)
    for name in x:
        x[name][:, 20:] = np.nan  # beyond the sequences
    o, carry = decode(x, state, policy, cu_seqlens=cu, prefix_lengths=prefix)
    assert not np.any(o[:, 20:])
    for n, (start, stop) in enumerate(zip(cu[:-1], cu[1:])):
        if stop == start:
            alone = jlaqat.delta_rule_decode(
                **{k: a[:, :0] for k, a in x.items()}, state=state[n : n + 1], quant=policy
            )
        else:
            part = {k: a[:, start:stop] for k, a in x.items()}
            alone = decode(part, state[n : n + 1], policy, prefix_lengths=prefix[n : n + 1])
        assert_close(o[:, start:stop], alone[0], 1e-6, f"o of sequence {n}")
        assert_close(carry.state()[n : n + 1], alone[1].state(), 1e-6, f"state of sequence {n}")
    assert np.array_equal(carry.position, [10, 0, 10]) and np.array_equal(carry.cursor, [0, 0, 1])


@pytest.mark.parametrize("inside", [False, pytest.param(True, marks=slow)])
def test_a_prefix_runs_in_chunks_and_is_handed_over_once(inside):
    policy = DecodePolicy(state=QuantSpec.fp8(), prefill_state_qdq=inside)
    x, state = operands(9, B=2, T=72)
    o, carry = decode(x, state, policy, settings=(("prefix_lengths", 70),))
    head, tail = ({n: a[:, cut] for n, a in x.items()} for cut in (slice(70), slice(70, None)))
    quant = DeltaQuant(state=policy.state if inside else None)
    o_prefix, after = jax.jit(functools.partial(jlaqat.delta_rule, quant=quant))(**head, initial_state=state)
    assert np.array_equal(o[:, :70], o_prefix)
    o_rest, end = decode(tail, after, policy)
    assert np.array_equal(o[:, 70:], o_rest) and np.array_equal(end.values, carry.values)


@slow
def test_a_second_prefix_starts_from_the_state_as_it_stands():
    policy = DecodePolicy.preset("serving", window=4)
    x, state = operands(10, B=2, T=6)
    _, first = decode(x, state, policy)
    assert first.cursor.tolist() == [2, 2]
    o, second = decode(x, first, policy, prefix_lengths=np.array([5, 0], np.int32))
    o_turn, after = decode(x, first.state(), policy, prefix_lengths=np.array([5, 0], np.int32))
    assert_close(o[0], o_turn[0], 1e-6, "o")
    assert_close(second.state()[0], after.state()[0], 1e-6, "state")
    assert second.position.tolist() == [12, 12] and second.cursor.tolist() == [1, 0]


# ---- what is kept for a gradient -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "bounds"),
    [
        (FEEDBACK, {"prefix_lengths": np.array([2, 0, 1]), "cu_seqlens": np.array([0, 70, 70, 76])}),
        (DecodePolicy.preset("serving", window=3), {}),
    ],
    ids=["packed", "replay"],
)
def test_states_that_are_kept_change_no_bit(policy, bounds):
    if bounds:
        x, state = operands(5, T=76, num_sequences=3, gate="kda")
    else:
        x, state = operands(5, B=2, T=70)

    def gradient(every):
        def loss(x, state):
            o, carry = decode(x, state, policy, settings=(("checkpoint_every", every),), **bounds)
            return (o**2).sum() + carry.state().sum(), (o, carry)

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(x, state)

    assert_same_bits(gradient(1), gradient(64))


# ---- transformations -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("compile_quickly")
@pytest.mark.parametrize("way", ["remat and scan over layers", pytest.param("vmap", marks=slow)])
def test_transformations_change_nothing(way):
    policy = DecodePolicy(state=QuantSpec.int8(rounding="stochastic"), mode="replay", window=3)
    x, state = operands(11, B=2, T=8)
    layers = {n: np.stack([a, a[:, ::-1]]) for n, a in x.items()}

    def layer(x, step):
        arrays = QuantArrays(step=step)
        return jlaqat.delta_rule_decode(**x, state=state, quant=policy, quant_arrays=arrays)[0]

    def one_by_one(layers, steps):
        return jnp.stack([layer({n: a[i] for n, a in layers.items()}, steps[i]) for i in range(2)])

    def scanned(layers, steps):
        return jax.lax.scan(lambda c, part: (c, jax.checkpoint(layer)(*part)), 0, (layers, steps))[1]

    def gradients(f):
        steps = jnp.arange(2, dtype=jnp.uint32)
        return jax.jit(jax.value_and_grad(lambda layers: (f(layers, steps) ** 2).sum()))(layers)

    plain = gradients(one_by_one)
    if way == "vmap":
        mapped = gradients(jax.vmap(layer))
        assert_close(mapped[0], plain[0], 1e-6)
        for name in x:
            assert_close(mapped[1][name], plain[1][name], 1e-5, f"d{name}")
    else:
        assert_same_bits(gradients(scanned), plain)


@slow
def test_shards_of_a_batch_have_the_bits_of_the_whole():
    policy = DecodePolicy(state=QuantSpec.int8(rounding="stochastic"), mode="replay", window=2)
    x, state = operands(17, B=2, T=6)
    mesh = jax.make_mesh((2,), ("b",), axis_types=(jax.sharding.AxisType.Auto,))

    def run(x, state, first=0):
        arrays = QuantArrays(sequence_offset=first)
        o, carry = jlaqat.delta_rule_decode(**x, state=state, quant=policy, prefix_lengths=2, quant_arrays=arrays)
        return o, carry.state()

    def shard(x, state):
        return run(x, state, jax.lax.axis_index("b").astype(jnp.uint32))

    cut = jax.sharding.PartitionSpec("b")
    mapped = jax.shard_map(shard, mesh=mesh, in_specs=(cut, cut), out_specs=cut)
    whole = jax.jit(run)(x, state)
    assert_same_bits(jax.tree.map(np.asarray, jax.jit(mapped)(x, state)), jax.tree.map(np.asarray, whole))
    laid_out = jax.device_put((x, state), jax.sharding.NamedSharding(mesh, cut))
    assert_same_bits(jax.tree.map(np.asarray, jax.jit(run)(*laid_out)), jax.tree.map(np.asarray, whole))
    gradients = [jax.jit(jax.grad(lambda x, f=f: (f(x, state)[0] ** 2).sum()))(x) for f in (run, mapped)]
    for name in x:
        assert_close(gradients[1][name], gradients[0][name], 1e-6, f"d{name}")


# ---- the carry -------------------------------------------------------------------------------------------------------


def test_the_carry_is_small():
    x, state = operands(12, B=1, T=0, H=2, HV=4, K=64, V=64)
    float32 = 4 * 64 * 64 * 4

    def nbytes(policy):
        carry = jax.eval_shape(lambda: jlaqat.delta_rule_decode(**x, state=state, quant=policy)[1])
        return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(carry))

    size = {
        name: nbytes(policy)
        for name, policy in (
            ("int8", DecodePolicy.preset("modelopt_int8")),
            ("fp8", DecodePolicy.preset("modelopt")),
            ("hadamard", DecodePolicy(state=QuantSpec.int8_hadamard32())),
            ("replay", DecodePolicy.preset("serving", window=16)),
        )
    }
    assert size["fp8"] == float32 // 4 + 4 * 4 + 8  # a scale a head and tile, two counters
    assert size["int8"] == float32 // 4 + 4 * 64 * 2 * 4 + 8
    assert size["hadamard"] == float32 // 4 + 4 * 64 * 2 * 2 + 8
    assert size["replay"] == size["int8"] + 16 * (2 * 64 * 2 + 4 * 64 * 2 + 4 * 4)


def test_a_call_without_tokens_writes_nothing():
    x, state = operands(13, B=2, T=5)
    empty = {n: a[:, :0] for n, a in x.items()}
    policy = DecodePolicy.preset("serving")
    _, carry = decode(x, state, policy)
    o, same = jlaqat.delta_rule_decode(**empty, state=carry, quant=policy, prefix_lengths=0)
    assert o.shape == (2, 0, 2, 32)
    assert_same_bits(same, carry)
