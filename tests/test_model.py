"""The decoder: configuration, scan and remat against the plain loop, packing, decoding, training."""

import functools
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jlaqat.generation import generate
from jlaqat.model import ModelConfig, count_params
from jlaqat.quantizers import Quantizer, QuantizerVariable, disable_quantizer, quantize
from jlaqat.testing import assert_close
from jlaqat.weights import fla_state_dict, load_fla_state_dict

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from tiny_models import QUICK, SIZES, T, apply, make, tokens

pytestmark = pytest.mark.usefixtures("compile_quickly")

DOCS = pathlib.Path(__file__).resolve().parents[1] / "docs"
STATE_FP8 = {"quantizer_name": "*state_quantizer", "cfg": {"num_bits": "e4m3", "type": "dynamic", "axis": [0, 1]}}


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK)
def _decode(graph, state, x, cache, mask):
    return nnx.merge(graph, state).decode(x, cache, mask=mask)


def decode(model, x, cache, mask=None):
    return _decode(*nnx.split(model), x, cache, mask)


@pytest.fixture(scope="module")
def hybrid():
    return make(num_layers=3, pattern=("gdn", "kda", "attention"))


# ── configuration ──


def test_pattern_repeats_to_the_number_of_layers():
    config = ModelConfig(vocab_size=2, num_layers=6, pattern=["gdn", "gdn", "gdn", "attention"])
    assert config.layer_kinds == ("gdn", "gdn", "gdn", "attention", "gdn", "gdn")
    assert hash(config) == hash(ModelConfig(vocab_size=2, num_layers=6, pattern=("gdn", "gdn", "gdn", "attention")))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pattern": ("gdn", "mamba")}, "pattern=.*mamba.* must name one or more of 'gdn', 'kda', 'attention'"),
        ({"pattern": ()}, "pattern="),
        ({"dtype": "float8"}, "dtype='float8' is not supported; choose one of 'float32'"),
        ({"param_dtype": "int8"}, "param_dtype='int8'"),
        ({"vocab_size": None}, "give vocab_size for tokens, or both input_size and output_size"),
        ({"input_size": 3}, "give vocab_size for tokens, or both"),
        ({"input_size": 3, "output_size": 3}, "give vocab_size for tokens, or both"),
        ({"vocab_size": None, "input_size": 3}, "give vocab_size for tokens, or both"),
        ({"vocab_size": None, "input_size": 3, "output_size": 1, "tie_embeddings": True}, "needs a vocabulary"),
        ({"num_layers": 0}, "num_layers=0 must be at least 1"),
        ({"num_layers": 3, "pattern": ("gdn", "kda"), "scan_layers": True}, "num_layers=3 is no multiple.*2 layers"),
        ({"pattern": ("attention",), "attention_head_dim": None, "num_attention_heads": 5}, "into 5 attention heads"),
    ],
)
def test_configurations_that_cannot_work(options, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**SIZES | options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_kv_heads": 3}, "num_heads=2 is not a multiple of num_kv_heads=3"),
        ({"attention_head_dim": 11}, "head_dim=11 is odd"),
    ],
)
def test_attention_that_cannot_work(options, message):
    with pytest.raises(ValueError, match=message):
        make(pattern=("attention",), **options)


def test_names_and_parameter_counts():
    model = nnx.eval_shape(lambda: make(num_layers=3, pattern=("gdn", "kda", "attention")))
    counts = count_params(model, depth=3)
    assert counts["embed.embedding"] == counts["lm_head.kernel"] == 17 * 24
    assert counts["layers.0.mlp"] == 3 * 24 * 32 and counts["norm.scale"] == 24
    assert counts["layers.2.mixer"] == 2 * 24 * 24 + 2 * 24 * 12
    # q, k, v, g, o projections; a, b; convolutions of width 4; A_log, dt_bias; norm
    assert counts["layers.0.mixer"] == 2 * 24 * 16 + 3 * 24 * 48 + 2 * 24 * 4 + 4 * (16 + 16 + 48) + 4 + 4 + 12
    assert counts["total"] == sum(v for k, v in counts.items() if k != "total") == count_params(model)["total"]


def test_tied_embeddings_have_no_head():
    model = nnx.eval_shape(lambda: make(num_layers=1, tie_embeddings=True))
    assert "lm_head" not in count_params(model)


# ── against another implementation ──


def test_attention_layers_equal_llama(hybrid):
    """A model of attention layers alone is Llama: RMSNorm, SwiGLU, rotary positions, grouped heads, same weights."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=17,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=12,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    llama = transformers.LlamaForCausalLM(config)
    names = (("model.embed_tokens", "model.embeddings"), ("input_layernorm", "attn_norm"))
    names += (("post_attention_layernorm", "mlp_norm"), ("self_attn", "attn"))
    weights = {}
    for name, parameter in llama.named_parameters():
        with torch.no_grad():
            parameter.mul_(3.0)  # away from a uniform softmax
        for theirs, ours in names:
            name = name.replace(theirs, ours)
        weights[name] = parameter.detach().numpy()
    model = make(num_layers=2, pattern=("attention",))
    load_fla_state_dict(model, weights)
    x = tokens(2, 20)
    expected = llama(torch.tensor(np.asarray(x)).long()).logits.detach().numpy()
    assert_close(apply(model, x), expected, 1e-5, "logits")
    assert set(fla_state_dict(model)) == set(weights)


def test_tied_head_of_a_state_dict_is_accepted_where_it_is_the_embedding():
    model = make(num_layers=1, pattern=("attention",), tie_embeddings=True)
    state = fla_state_dict(model)
    load_fla_state_dict(model, state | {"lm_head.weight": state["model.embeddings.weight"]})
    with pytest.raises(ValueError, match="not a parameter of this DecoderLM: lm_head.weight"):
        load_fla_state_dict(model, state | {"lm_head.weight": state["model.embeddings.weight"] + 1})


# ── packing, padding, decoding ──


def test_packed_sequences_equal_separate_ones(hybrid):
    x = tokens()
    alone = apply(hybrid, x)
    assert alone.dtype == jnp.float32
    packed = apply(hybrid, x.reshape(1, -1), cu_seqlens=jnp.array([0, T, T, 2 * T]))
    assert_close(packed.reshape(alone.shape), alone, 1e-5, "packed")
    with pytest.raises(ValueError, match="mask and cu_seqlens were both given"):
        hybrid(x[:1], cu_seqlens=jnp.array([0, T]), mask=jnp.ones((1, T)))


@pytest.mark.slow  # the fast test below pads as well, through the cache
def test_padded_sequences_equal_separate_ones(hybrid):
    x = tokens()
    alone = apply(hybrid, x)
    mask = np.ones((2, T), bool)
    mask[0, :6] = mask[1, 50:] = mask[1, 10:13] = False
    padded = jnp.zeros_like(x).at[0, 6:].set(x[0, : T - 6]).at[1, mask[1]].set(x[1, :47])
    y = apply(hybrid, padded, mask=mask)
    assert_close(y[0, 6:], alone[0, : T - 6], 1e-5, "left-padded")
    assert_close(y[1][mask[1]], alone[1, :47], 1e-5, "right-padded, with a hole")
    assert not np.asarray(y)[~mask].any()


def test_prompt_and_steps_equal_the_whole(hybrid):
    x = tokens()
    whole = apply(hybrid, x)
    lengths = (T - 3, 2)
    mask = np.zeros((2, T), bool)
    mask[0, : lengths[0]] = mask[1, -lengths[1] :] = True
    prompt = jnp.where(mask, x, 0).at[1, -lengths[1] :].set(x[1, : lengths[1]])
    y, cache = decode(hybrid, prompt, hybrid.init_cache(2, T), mask=mask)
    for row, length in enumerate(lengths):
        assert_close(y[row][mask[row]], whole[row, :length], 1e-5, f"prompt {row}")
    for t in range(3):
        y, cache = decode(hybrid, jnp.stack([x[row, n + t] for row, n in enumerate(lengths)])[:, None], cache)
        for row, length in enumerate(lengths):
            assert_close(y[row, 0], whole[row, length + t], 1e-5, f"token {t} after prompt {row}")
    # The first sequence has filled its rows of the attention cache; one token more is NaN, not a wrong number.
    y, _ = decode(hybrid, x[:, :1], cache)
    assert np.isnan(np.asarray(y[0])).all() and np.isfinite(np.asarray(y[1])).all()


def test_sequences_without_tokens(hybrid):
    assert apply(hybrid, tokens(length=0)).shape == (2, 0, 17)


def test_attention_cache_needs_a_size(hybrid):
    with pytest.raises(ValueError, match="pass max_length"):
        hybrid.init_cache(2)


def test_decoding_with_an_enabled_quantizer_is_refused():
    model = quantize(make(num_layers=1), [STATE_FP8])
    with pytest.raises(
        NotImplementedError, match=r"layers\.0\.mixer\.gdn_state_quantizer is enabled.*strip_quantizers"
    ):
        model.decode(tokens(), model.init_cache(2))
    with pytest.raises(NotImplementedError, match=r"gdn_state_quantizer is enabled"):
        generate(model, tokens(), 2, temperature=0)


# ── scan, remat, training ──


def loss_of(graph, rest, x):
    """Mean negative log-likelihood of the next token, as a function of the parameters."""

    def loss(params):
        logits = nnx.merge(graph, params, rest)(x)
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], x[:, 1:]).mean()

    return loss


def test_scan_equals_the_loop_with_rounded_states():
    """Two repetitions of a delta layer, their first rounded state read in the second chunk."""
    x = tokens()
    loop, scanned = (quantize(make(num_layers=2, scan_layers=scan), [STATE_FP8]) for scan in (False, True))
    assert_close(apply(scanned, x), apply(loop, x), 1e-5, "logits")


@pytest.mark.parametrize("kind", ["attention", pytest.param("gdn", marks=pytest.mark.slow)])
def test_scan_and_remat_equal_the_loop_and_train(kind):
    """Values and gradients; then a few steps of optax lower the loss."""
    x = tokens()
    options = {"num_layers": 2, "pattern": (kind,)}
    loop, scanned = make(**options), make(**options, scan_layers=True, remat=True)
    graph, params, rest = nnx.split(loop, nnx.Param, ...)
    value, grads = jax.jit(jax.value_and_grad(loss_of(graph, rest, x)), compiler_options=QUICK)(params)
    fast = loss_of(nnx.graphdef(scanned), rest, x)
    optimizer = optax.adam(1e-2)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def step(params, state):
        value, grads = jax.value_and_grad(fast)(params)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, value, grads

    trained, state, fast_value, fast_grads = step(params, optimizer.init(params))
    assert_close(fast_value, value, 1e-6, "loss")
    flat, fast_flat = nnx.to_flat_state(grads), dict(nnx.to_flat_state(fast_grads))
    assert len(flat) == len(fast_flat)
    for path, grad in flat:
        assert np.any(np.asarray(grad.get_value()) != 0), path
        assert_close(fast_flat[path].get_value(), grad.get_value(), 1e-4, str(path))
    for _ in range(10):
        trained, state, fast_value, _ = step(trained, state)
    assert fast_value < 0.9 * value


def test_scanned_layers_are_grouped_by_their_quantizers(monkeypatch):
    """Repetitions whose quantizers are set alike share a scan; the others get their own."""
    model = make(num_layers=5, scan_layers=True)
    lengths = []

    def spy(body, init, xs, *args, **options):
        lengths.append(jax.tree.leaves(xs)[0].shape[0])
        return init, None

    monkeypatch.setattr(jax.lax, "scan", spy)
    model(tokens())
    quantize(model, [STATE_FP8])
    disable_quantizer(model, "layers.0.*")
    disable_quantizer(model, "layers.4.*")
    model(tokens())
    assert lengths == [5, 1, 3, 1]


@pytest.mark.slow
@pytest.mark.parametrize("pattern", [("gdn", "attention"), ("kda",)])
def test_scan_and_remat_each_equal_the_loop(pattern):
    x = tokens()
    results = []
    for extra in ({}, {"scan_layers": True}, {"remat": True}):
        graph, params, rest = nnx.split(make(num_layers=4, pattern=pattern, **extra), nnx.Param, ...)
        results.append(jax.jit(jax.value_and_grad(loss_of(graph, rest, x)), compiler_options=QUICK)(params))
    for value, grads in results[1:]:
        assert_close(value, results[0][0], 1e-6, "loss")
        for (path, a), (_, b) in zip(nnx.to_flat_state(grads), nnx.to_flat_state(results[0][1]), strict=True):
            assert_close(a.get_value(), b.get_value(), 1e-4, str(path))


@pytest.mark.slow
def test_quantized_scan_and_remat_equal_the_loop():
    """Stochastic rounding included: its bits depend on the layer's number, not on how layers run."""
    cfg = [{"quantizer_name": "*state_quantizer", "cfg": STATE_FP8["cfg"] | {"rounding": "stochastic", "seed": 3}}]
    options = {"num_layers": 2}
    x = tokens()
    results = []
    for extra in ({}, {"scan_layers": True, "remat": True}):
        model = quantize(make(**options, **extra), cfg)
        graph, params, rest = nnx.split(model, nnx.Param, ...)
        results.append(jax.jit(jax.value_and_grad(loss_of(graph, rest, x)), compiler_options=QUICK)(params))
    for value, grads in results[1:]:
        assert_close(value, results[0][0], 1e-6, "loss")
        for (path, a), (_, b) in zip(nnx.to_flat_state(grads), nnx.to_flat_state(results[0][1]), strict=True):
            assert_close(a.get_value(), b.get_value(), 1e-3, str(path))


def test_quantizer_variables_are_apart_from_parameters():
    model = nnx.eval_shape(lambda: make(num_layers=2, pattern=("gdn", "kda")))
    handles = {".".join(map(str, p)) for p, m in nnx.iter_modules(model) if isinstance(m, Quantizer)}
    assert handles == {
        f"layers.{i}.mixer.{kind}_{site}_quantizer" for i, kind in enumerate(("gdn", "kda")) for site in ("state", "w")
    }
    _, params, quantizers = nnx.split(model, nnx.Param, QuantizerVariable)  # nothing else is left over
    assert not set(dict(nnx.to_flat_state(params))) & set(dict(nnx.to_flat_state(quantizers)))


# ── continuous inputs, bfloat16, documentation ──


def test_vectors_in_and_out():
    model = make(vocab_size=None, input_size=5, output_size=2, num_layers=1)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, T, 5)), jnp.float32)
    y = apply(model, x)
    assert y.shape == (2, T, 2) and np.isfinite(np.asarray(y)).all()
    assert_close(apply(model, x.at[:, 50:].set(9.0))[:, :50], y[:, :50], 1e-6, "causality")
    with pytest.raises(ValueError, match=r"takes \[B, T, input_size=5\]"):
        model(tokens())
    with pytest.raises(ValueError, match="maps vectors to vectors"):
        generate(model, tokens(), 2, temperature=0)
    with pytest.raises(ValueError, match="takes integer tokens"):
        make(num_layers=1)(x)


def test_bfloat16_model_is_close_and_keeps_float32_parameters():
    options = {"num_layers": 1, "pattern": ("attention",), "tie_embeddings": True}
    exact, model = make(**options), make(**options, dtype="bfloat16")
    assert {v.dtype for _, v in nnx.to_flat_state(nnx.state(model, nnx.Param))} == {jnp.dtype("float32")}
    y = apply(model, tokens())
    assert y.dtype == jnp.float32
    assert_close(y, apply(exact, tokens()), 0.05, "logits")


@pytest.mark.slow
def test_documentation_examples_run():
    code = "\n".join(re.findall(r"```python\n(.*?)```", (DOCS / "layers.md").read_text(), flags=re.S))
    assert "generate(" in code
    exec(compile(code, "docs/layers.md", "exec"), {})
