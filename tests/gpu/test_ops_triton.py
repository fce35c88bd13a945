"""`jlaqat.delta_rule` on an NVIDIA GPU through the Triton kernels: the reported cases, transformations, equal bits.

The cases are those of tests/test_cases.py, by the numbers of the public reports, whole and in 16 bits. Every result and
gradient is held against the float64 reference. JAX_PLATFORMS=cuda pytest tests/gpu -n 8 runs them in parallel.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jlaqat
from jlaqat import backends, reference
from jlaqat.naming import named_leaves
from jlaqat.rounding import fake_quantize
from jlaqat.spec import DeltaQuant, QuantSpec
from jlaqat.testing import assert_close, error_ratio, make_inputs

PLAIN = DeltaQuant()
STATE = DeltaQuant(state=QuantSpec.fp8())
FP8 = DeltaQuant(state=QuantSpec.fp8(), w=QuantSpec.fp8())
INT8 = DeltaQuant(state=QuantSpec.int8())
BF16, FP16, FP32 = jnp.bfloat16, np.float16, np.float32
BOUNDS = {  # forward, gradients, gradients of the gates
    BF16: (0.005, 0.008, 0.02),
    FP16: (0.005, 0.008, 0.02),
    FP32: (1e-5, 1e-4, 1e-4),
}
STRONG_WRITES = (0.01, 0.015, 0.02)  # bfloat16 with beta above 1
OPERANDS = ("q", "k", "v", "g", "beta", "initial_state")
over_gates = pytest.mark.parametrize("gate", ["gdn", "kda"])


def cotangents_of(x):
    rng = np.random.default_rng(1)
    do = rng.normal(size=x["v"].shape).astype(x["v"].dtype)
    return do, rng.normal(size=x["initial_state"].shape).astype(np.float32)


@functools.partial(jax.jit, static_argnames=("quant", "backend"))
def results_and_gradients(x, cotangents, cu_seqlens=None, quant=PLAIN, backend="triton"):
    def call(x):
        return jlaqat.delta_rule(**x, cu_seqlens=cu_seqlens, quant=quant, backend=backend)

    results, pullback = jax.vjp(call, x)
    return results, pullback(cotangents)[0]


def oracle(x, cotangents, cu_seqlens=None):
    """The float64 reference, on the CPU: its many small operations compile faster there."""
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        return reference.oracle(x, *cotangents, cu_seqlens=cu_seqlens)


def check(x, cu_seqlens=None, strong_writes=False):
    """Unrounded results and gradients within the contract's bounds of the reference. strong_writes: beta above 1."""
    cotangents = cotangents_of(x)
    (o, final_state), gradients = results_and_gradients(x, cotangents, cu_seqlens)
    wanted = oracle(x, cotangents, cu_seqlens)
    dtype = next(d for d in (BF16, FP16, FP32) if x["v"].dtype == d)
    forward, backward, gates = STRONG_WRITES if strong_writes and dtype == BF16 else BOUNDS[dtype]
    bounds = {"g": gates, "beta": gates, "initial_state": BOUNDS[dtype][1]}
    assert_close(o, wanted[0], forward, "o")
    assert_close(final_state, wanted[1], forward, "final_state")
    for name in OPERANDS:
        # Under a decay of e^-50 a gradient is 1e-22 beside others of 1: less than the rounding of its terms.
        assert_close(gradients[name], wanted[2][name], bounds.get(name, backward), f"d{name}", floor=1e-6)
    return o, final_state, gradients


def inputs(seed, **changes):
    return make_inputs(seed, **dict(B=2, T=192, H=2, K=64, dtype=BF16) | changes)


# ------------------------------------------------------------------ reported cases


@over_gates
@pytest.mark.parametrize("size", [64, 100])
@pytest.mark.parametrize("decay", [(0.02, 0.5), (0.0, 0.0)], ids=["decay", "no decay"])
def test_cases_1_and_2(gate, size, decay):
    check(inputs(1, gate=gate, T=1024, H=4, K=size, decay=decay))


@over_gates
@pytest.mark.parametrize(("K", "V"), [(60, 128), (100, 64)])
def test_case_3_what_lies_beyond_has_no_effect(gate, K, V):
    """Tokens past the last sequence are the padding that this interface has; 1e30 there reaches nothing."""
    cu = np.array([0, 70, 150], np.int32)
    x = inputs(3, gate=gate, B=1, K=K, V=V, num_sequences=2)
    got = check(x, cu)
    poisoned = {name: np.array(a) for name, a in x.items()}
    for name in ("q", "k", "v", "g", "beta"):
        poisoned[name][:, 150:] = -1e30 if name == "g" else 1e30
    (o, final_state), gradients = results_and_gradients(poisoned, cotangents_of(x), cu)
    for a, b in zip(jax.tree.leaves((o, final_state, gradients)), jax.tree.leaves(got), strict=True):
        assert jnp.array_equal(a, b)
    assert not jnp.any(o[:, 150:])


def test_case_4_more_sequences_than_a_grid_has_rows():
    count, length = 2050, 16
    x = make_inputs(4, T=count * length, H=32, K=16, num_sequences=count, dtype=BF16)
    cu = np.arange(0, count * length + 1, length, dtype=np.int32)
    batch = {n: a if n == "initial_state" else a.reshape(count, length, *a.shape[2:]) for n, a in x.items()}
    o, final_state = jax.jit(lambda x: jlaqat.delta_rule(**x, cu_seqlens=cu, quant=STATE, backend="triton"))(x)
    same, same_state = jax.jit(lambda x: jlaqat.delta_rule(**x, quant=STATE, backend="triton"))(batch)
    assert jnp.array_equal(o.reshape(same.shape), same) and jnp.array_equal(final_state, same_state)
    plain, plain_state = jax.jit(lambda x: jlaqat.delta_rule(**x, backend="triton"))(batch)
    xla, xla_state = jax.jit(lambda x: jlaqat.delta_rule(**x, backend="xla"))(batch)
    assert_close(plain, xla, 0.005)
    assert_close(plain_state, xla_state, 0.005)


@over_gates
@pytest.mark.parametrize(("rate", "T"), [(50.0, 192), (0.0, 192), (20.0, 75), (5.0, 64)])
def test_cases_5_and_11_strong_decay(gate, rate, T):
    results = check(inputs(5, gate=gate, T=T, HV=4, decay=(rate, rate)))
    assert all(jnp.isfinite(a.astype(jnp.float32)).all() for a in jax.tree.leaves(results))


def test_case_6_kda_with_grouped_heads():
    check(inputs(6, gate="kda", H=4, HV=8))


@over_gates
@pytest.mark.parametrize(("K", "V"), [(128, 512), (256, 256)])
def test_case_7_wide_heads(gate, K, V):
    check(inputs(7, gate=gate, B=1, K=K, V=V))


@over_gates
def test_case_8_thirty_runs_are_bit_equal(gate):
    """1,024 chunk-heads."""
    x = jax.tree.map(jnp.asarray, make_inputs(8, gate=gate, B=4, T=2048, H=8, K=64, dtype=BF16))
    cotangents = jax.tree.map(jnp.asarray, cotangents_of(x))
    first = results_and_gradients(x, cotangents, quant=FP8)
    same = jax.jit(
        lambda a, b: jnp.stack([jnp.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b))])
    )
    assert all(jnp.isfinite(a.astype(jnp.float32)).all() for a in jax.tree.leaves(first))
    for _ in range(29):
        assert same(results_and_gradients(x, cotangents, quant=FP8), first).all()


@over_gates
@pytest.mark.parametrize("T", [1, 17, 64])
def test_case_9_short_sequences_have_gradients(gate, T):
    check(inputs(9, gate=gate, T=T))


@over_gates
def test_case_10_gradient_of_strong_gates(gate):
    check(inputs(10, gate=gate, B=1, T=4096, decay=(9.0, 11.0)))


@over_gates
@pytest.mark.parametrize("quant", [STATE, INT8], ids=["fp8", "int8"])
def test_case_13_sequences_of_no_tokens(gate, quant):
    cu = np.array([0, 0, 64, 64, 130], np.int32)
    x = inputs(13, gate=gate, B=1, num_sequences=4)
    check(x, cu)
    (_, final_state), _ = results_and_gradients(x, cotangents_of(x), cu, quant=quant)
    rounded = fake_quantize(jnp.asarray(x["initial_state"]), quant.state, site="state")
    assert jnp.array_equal(final_state[0], rounded[0]) and jnp.array_equal(final_state[2], rounded[2])


@over_gates
def test_case_14_decay_of_1e_12_a_step(gate):
    rate = -np.log(1e-12)
    check(inputs(14, gate=gate, decay=(rate, rate)))


@over_gates
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bfloat16", "float16"])
def test_case_16_beta_up_to_2_and_transposed_inputs(gate, dtype):
    x = inputs(16, gate=gate, dtype=dtype, max_beta=2.0, correlation=0.5)
    o, final_state, _ = check(x, strong_writes=True)
    turned = {n: jnp.swapaxes(jnp.asarray(a), 1, 2) for n, a in x.items() if n != "initial_state"}

    @jax.jit
    def from_heads_first(turned, state):
        rows = {name: jnp.swapaxes(a, 1, 2) for name, a in turned.items()}
        return jlaqat.delta_rule(**rows, initial_state=state, backend="triton")

    again, again_state = from_heads_first(turned, x["initial_state"])
    assert jnp.array_equal(again, o) and jnp.array_equal(again_state, final_state)


def test_case_17_one_token_by_hand():
    """One channel of 16: S 2 → decayed to 1; error 3 − 1·0.5 = 2.5; write 0.8·2.5·0.5 = 1 → S 2; o = 0.5·2·4."""
    one = np.eye(1, 16, dtype=np.float32)[None, None]  # [1, 1, 1, 16]
    gate = np.ones((1, 1, 1), np.float32)
    state = np.zeros((1, 1, 16, 16), np.float32)
    state[0, 0, 0, 0] = 2.0
    o, final_state = jlaqat.delta_rule(
        *(4 * one, 0.5 * one, 3 * one, np.log(0.5) * gate, 0.8 * gate), scale=0.5, initial_state=state, backend="triton"
    )
    assert np.allclose(o[0, 0, 0], 4 * one[0, 0, 0], rtol=1e-5, atol=1e-6)
    assert np.allclose(final_state, state, rtol=1e-5, atol=1e-6)


@over_gates
def test_case_19_lengths_that_fit_nothing(gate):
    check(inputs(19, gate=gate, B=1, T=75, HV=4, num_sequences=6), np.array([0, 3, 20, 23, 40, 57, 74], np.int32))


@over_gates
@pytest.mark.skipif(jax.device_count() < 2, reason="one GPU")
def test_case_20_two_devices_and_one(gate):
    x = inputs(20, gate=gate)
    cotangents = cotangents_of(x)
    mesh = jax.make_mesh((2,), ("h",), axis_types=(jax.sharding.AxisType.Auto,))
    P = jax.sharding.PartitionSpec
    specs = {name: P(None, None, "h") for name in x} | {"initial_state": P(None, "h")}
    cut = (specs["v"], specs["initial_state"])
    run = functools.partial(results_and_gradients, quant=FP8)
    wanted = run(x, cotangents)
    mapped = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=(specs, cut), out_specs=(cut, specs)))(x, cotangents)
    placed = jax.device_put((x, cotangents), jax.tree.map(lambda s: jax.sharding.NamedSharding(mesh, s), (specs, cut)))
    compiled = results_and_gradients.lower(*placed, quant=FP8).compile()
    assert "all-gather" not in compiled.as_text()
    for got in (mapped, compiled(*placed)):
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
            assert np.array_equal(a, b)


# ------------------------------------------------------------------ dtypes and rounding


@over_gates
def test_float32_inputs(gate):
    check(inputs(21, gate=gate, T=130, dtype=FP32))


@over_gates
@pytest.mark.parametrize("quant", [FP8, INT8], ids=["fp8", "int8"])
def test_rounded_end_to_end(gate, quant):
    """Against the xla backend, which rounds at the same places; T = 128, where the contract has a bound."""
    x = inputs(22, gate=gate, T=128)
    cotangents = cotangents_of(x)
    got, wanted = (results_and_gradients(x, cotangents, quant=quant, backend=b) for b in ("triton", "xla"))
    for a, b in zip(got[0], wanted[0], strict=True):
        assert_close(a, b, 0.03)
    for name in OPERANDS:
        assert_close(got[1][name], wanted[1][name], 0.05, f"d{name}")


# ------------------------------------------------------------------ which backend, and transformations


def test_auto_takes_triton_and_lowers_for_the_cpu_as_xla(caplog):
    x = inputs(23, T=70)
    cotangents = cotangents_of(x)
    backends._say_once.cache_clear()
    with caplog.at_level("INFO", logger="jlaqat"):
        auto = results_and_gradients(x, cotangents, quant=FP8, backend="auto")
    assert "runs delta_rule on 'triton'" in caplog.messages[0]
    named = results_and_gradients(x, cotangents, quant=FP8)
    assert all(jnp.array_equal(a, b) for a, b in zip(jax.tree.leaves(auto), jax.tree.leaves(named), strict=True))
    assert (
        "conditional" not in results_and_gradients.lower(x, cotangents, quant=FP8, backend="auto").compile().as_text()
    )
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        on_cpu, xla = (results_and_gradients(x, cotangents, quant=FP8, backend=b) for b in ("auto", "xla"))
    assert on_cpu[0][0].device.platform == "cpu"
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(on_cpu), jax.tree.leaves(xla), strict=True))


def test_traced_cu_seqlens_that_break_the_rules_give_nan():
    x = inputs(24, B=1, num_sequences=3)
    for bad in ([1, 2, 3, 4], [0, 100, 90, 192], [0, 1, 2, 1000]):
        (o, final_state), _ = results_and_gradients(x, cotangents_of(x), np.array(bad, np.int32))
        assert jnp.isnan(o).all() and jnp.isnan(final_state).all()


def test_vmap_and_donation():
    """A mapped call is one larger call, of packed rows a loop; and a donated operand's buffer is taken."""
    x = jax.tree.map(jnp.asarray, inputs(26, T=70))
    cotangents = cotangents_of(x)
    run = functools.partial(results_and_gradients, quant=FP8)
    stacked = jax.tree.map(lambda a: jnp.stack([a, a[::-1]]), x)
    mapped = jax.vmap(lambda x: run(x, cotangents))(stacked)
    one = run(jax.tree.map(lambda a: a[1], stacked), cotangents)
    assert all(jnp.array_equal(a[1], b) for a, b in zip(jax.tree.leaves(mapped), jax.tree.leaves(one), strict=True))

    rows = jax.tree.map(lambda a: jnp.stack([a[:1], a[1:]]), x)
    rows["initial_state"] = jnp.stack([x["initial_state"], x["initial_state"][::-1]])  # two sequences a row
    cu = np.array([[0, 64, 70], [0, 3, 66]], np.int32)
    pulled = (cotangents[0][:1], cotangents[1])
    mapped = jax.vmap(lambda x, cu: run(x, pulled, cu))(rows, cu)
    for i in range(2):
        one = run(jax.tree.map(lambda a, i=i: a[i], rows), pulled, cu[i])
        assert all(jnp.array_equal(a[i], b) for a, b in zip(jax.tree.leaves(mapped), jax.tree.leaves(one), strict=True))

    update = jax.jit(
        lambda x: jax.tree.map(lambda a, d: a - d.astype(a.dtype), x, run(x, cotangents)[1]), donate_argnums=0
    )
    wanted = x["v"] - run(x, cotangents)[1]["v"]
    given = jax.tree.map(jnp.copy, x)
    got = update(given)
    assert given["v"].is_deleted() and jnp.array_equal(got["v"], wanted)


# ------------------------------------------------------------------ layers and training


@pytest.mark.parametrize("layer", ["GatedDeltaNet", "KimiDeltaAttention"])
@pytest.mark.parametrize("recipe", [None, "state_w_fp8"], ids=["plain", "fp8"])
def test_layers(layer, recipe):
    """Forward and parameter gradients of a layer in bfloat16, against the same layer on the xla backend."""

    def run(backend):
        made = getattr(jlaqat, layer)(
            64, head_dim=32, num_heads=2, num_v_heads=4, expand_v=1.0, dtype=BF16, backend=backend, rngs=nnx.Rngs(0)
        )
        if recipe:
            jlaqat.quantize(made, jlaqat.load_recipe(recipe))
        x = jax.random.normal(jax.random.key(1), (2, 100, 64), BF16)
        graph, params, rest = nnx.split(made, nnx.Param, ...)

        @jax.jit
        def loss(params, x):
            y = nnx.merge(graph, params, rest)(x)
            return jnp.sum(y.astype(jnp.float32) ** 2), y

        (_, y), gradients = jax.value_and_grad(loss, has_aux=True)(params, x)
        return y, gradients

    (y, gradients), (wanted, wanted_gradients) = run("triton"), run("xla")
    assert_close(y, wanted, 0.04 if recipe else 0.01)
    exact = named_leaves(wanted_gradients)
    for name, d in named_leaves(gradients).items():
        # Parameters of the gates sum small differences over all tokens.
        bound = 0.05 if name.split(".")[0] in ("A_log", "dt_bias", "a_proj", "b_proj", "f_proj") else 0.03
        assert_close(d, exact[name], 3 * bound if recipe else bound, name)


def test_a_training_run_follows_the_xla_backend_s():
    """Thirty QAT steps of a small decoder from the same weights on the same tokens."""
    import optax

    tokens = np.random.default_rng(0).integers(0, 64, size=(4, 129))
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}

    def losses(backend):
        config = jlaqat.ModelConfig(
            vocab_size=64,
            hidden_size=64,
            num_layers=2,
            pattern=("gdn", "kda"),
            num_heads=2,
            head_dim=32,
            backend=backend,
        )
        model = jlaqat.DecoderLM(config, rngs=nnx.Rngs(0))
        jlaqat.quantize(model, jlaqat.load_recipe("state_w_fp8"))
        optimizer = optax.adam(3e-3)
        step, state = jlaqat.make_train_step(model, optimizer), jlaqat.create_train_state(model, optimizer)
        found = []
        for _ in range(30):
            state, metrics = step(state, batch)
            found.append(float(metrics["loss"]))
        return found

    got, wanted = losses("triton"), losses("xla")
    assert got[-1] < 0.9 * got[0]
    assert error_ratio(got, wanted) < 0.02


# ------------------------------------------------------------------ JAX and PyTorch


@over_gates
@pytest.mark.parametrize("quant", [PLAIN, FP8, INT8], ids=["plain", "fp8", "int8"])
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_jax_and_the_bridge_give_equal_bits(gate, quant, packed):
    torch = pytest.importorskip("torch")
    from jlaqat.torch_bridge.autograd import chunk_delta_rule

    def to_torch(a):
        a = np.asarray(a)
        if a.dtype == BF16:
            return torch.from_numpy(a.view(np.int16).copy()).view(torch.bfloat16).cuda()
        return torch.from_numpy(a.copy()).cuda()

    cu = np.array([0, 5, 64, 150], np.int32) if packed else None
    x = inputs(30, gate=gate, B=1 if packed else 2, T=150, HV=4, num_sequences=3 if packed else None)
    cotangents = cotangents_of(x)
    results, gradients = results_and_gradients(x, cotangents, cu, quant=quant)
    leaves = {name: to_torch(a).requires_grad_() for name, a in x.items()}
    given = chunk_delta_rule(**leaves, cu_seqlens=None if cu is None else to_torch(cu), quant=quant)
    theirs = torch.autograd.grad(given, list(leaves.values()), [to_torch(d) for d in cotangents])
    pairs = dict(zip(("o", "final_state"), zip(results, given))) | {
        f"d{name}": (gradients[name], d) for name, d in zip(leaves, theirs, strict=True)
    }
    for name, (a, b) in pairs.items():
        assert np.array_equal(np.asarray(a, np.float32), b.detach().float().cpu().numpy()), name
