"""Decode policies in a quant_cfg, in layers and models, in training, checkpoints and generation."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jlaqat
from jlaqat import DataConfig, DecodeCarry, DecodePolicy, QuantConfigError, QuantSpec, quantizer
from jlaqat.decode_policy import PRESETS
from jlaqat.decode_rules import fields_of
from jlaqat.quantizers import apply_quantizer_metadata, quantizer_metadata
from jlaqat.testing import assert_close
from jlaqat.train_step import batch_weights, forward, split_packed

CONFIG = jlaqat.ModelConfig(
    vocab_size=16, hidden_size=16, num_layers=2, pattern=("gdn", "kda"), num_heads=1, num_v_heads=2, head_dim=32
)
INT8 = {"quantizer_name": "*state_quantizer", "cfg": {"num_bits": "int8", "narrow_range": True, "key_row": 32}}
REPLAY = {"mode": "replay", "window": 3, "ring_dtype": "bfloat16"}


@pytest.fixture(scope="module")
def plain():
    return jlaqat.DecoderLM(CONFIG, rngs=nnx.Rngs(0))


@pytest.fixture
def model(plain):
    return nnx.clone(plain)


@pytest.fixture
def one_layer():
    """A model that compiles in half the time."""
    config = dataclasses.replace(CONFIG, num_layers=1, pattern=("kda",))
    return jlaqat.DecoderLM(config, rngs=nnx.Rngs(0))


def quantized(model, *rules):
    return jlaqat.quantize(model, [INT8, *rules])


def policies(model):
    return [q.policy for name, q in jlaqat.find_quantizers(model).items() if "state" in name]


# ---- what is kept for a gradient -------------------------------------------------------------------------------------


def test_a_model_says_how_many_states_its_gradient_keeps(monkeypatch):
    """The op is told, in every layer, and no bit of the gradient changes."""
    told, decode = [], quantizer.delta_rule_decode
    monkeypatch.setattr(
        quantizer, "delta_rule_decode", lambda *a, **k: told.append(k["checkpoint_every"]) or decode(*a, **k)
    )
    tokens = jnp.arange(14).reshape(2, 7) % 16

    def gradient(every):
        config = dataclasses.replace(CONFIG, checkpoint_every=every)
        model = quantized(jlaqat.DecoderLM(config, rngs=nnx.Rngs(0)), {"module_name": "*", "cfg": {"mode": "token"}})
        return nnx.grad(lambda model: model(tokens, prefix_lengths=2).sum())(model)

    kept, all_kept = gradient(64), gradient(1)
    assert told == [64, 64, 1, 1]
    for a, b in zip(jax.tree.leaves(kept), jax.tree.leaves(all_kept), strict=True):
        assert np.array_equal(a, b)
    with pytest.raises(ValueError, match="checkpoint_every=0 must be a positive integer"):
        jlaqat.DecoderLM(dataclasses.replace(CONFIG, checkpoint_every=0), rngs=nnx.Rngs(0))


# ---- rules -----------------------------------------------------------------------------------------------------------


def test_the_last_rule_that_matches_wins_whole(model):
    everywhere = {"module_name": "*", "cfg": {"mode": "replay", "window": 16, "readout": "stored"}}
    quantized(model, everywhere, {"module_name": "layers.1.*", "cfg": {"mode": "replay"}})
    spec = QuantSpec.int8(granularity="key_row")
    assert policies(model) == [
        DecodePolicy(state=spec, mode="replay", window=16, readout="stored"),
        DecodePolicy(state=spec, mode="replay"),
    ]
    quantized(model, everywhere, {"module_name": "layers.1.*", "enable": False})
    assert policies(model)[1] is None
    jlaqat.quantize(model, [{"module_name": "*", "cfg": {"decay_log_step": 0.01, "error_feedback": True}}])
    assert policies(model) == [DecodePolicy(decay_log_step=0.01)] * 2, "without a format its state is not rounded"
    jlaqat.quantize(model, [])
    assert policies(model) == [None, None]


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        ({"module_name": "blocks.*", "cfg": {}}, "no module matches; nearest: 'layers.1.mixer', 'layers.0.mixer'"),
        ({"module_name": "*", "cfg": {"windov": 4}}, "unknown field windov=4; did you mean window?"),
        ({"module_name": "*", "cfg": {"state": "int8"}}, "the format is the state quantizer's"),
        ({"module_name": "*", "cfg": {"preset": "serving"}}, "start from a recipe: decode_modelopt"),
        ({"module_name": "*", "cfg": {"window": 4}}, "quant_cfg[1] '*': window=4 belongs to mode='replay'"),
        ({"module_name": "*"}, "cfg=None must be the fields of a policy"),
        ({"module_name": "*", "cfg": {}, "enable": False}, "enable=False takes the policy away"),
        (
            {"module_name": "*", "cfg": {}, "enable": "no"},
            "quant_cfg[1] '*': enable='no' must be true or false: false takes the policy away; to give one, write cfg",
        ),
        ({"module_name": "*", "quantizer_name": "*", "cfg": {}}, "a rule is about modules; write two entries"),
        ({"module_name": "", "cfg": {}}, "must be a glob over module names"),
    ],
)
def test_rules_that_cannot_work_change_nothing(model, rule, says):
    quantized(model, {"module_name": "*", "cfg": REPLAY})
    before = quantizer_metadata(model)
    with pytest.raises(QuantConfigError, match=says.replace("[", r"\[").replace("*", r"\*").replace("(", r"\(")):
        quantized(model, rule)
    assert quantizer_metadata(model) == before


def test_formats_and_policies_are_checked_together(model):
    hadamard = {"num_bits": 8, "narrow_range": True, "key_row": 32, "rounding": "half_away"}
    hadamard |= {"scale_dtype": "float16", "basis": "hadamard32"}
    entry = {"quantizer_name": "*state_quantizer", "cfg": hadamard}
    with pytest.raises(QuantConfigError, match="for decoding only"):
        jlaqat.quantize(model, [entry])
    jlaqat.quantize(model, [entry, {"module_name": "*", "cfg": {}}])
    assert policies(model)[0] == DecodePolicy(state=QuantSpec.int8_hadamard32())
    with pytest.raises(QuantConfigError, match="needs a state format for chunks"):
        jlaqat.quantize(model, [entry, {"module_name": "*", "cfg": {"prefill_state_qdq": True}}])
    cadence = {"quantizer_name": "*state_quantizer", "cfg": {"num_bits": "e4m3", "cadence": 1}}
    with pytest.raises(QuantConfigError, match="leave cadence out"):
        jlaqat.quantize(model, [cadence, {"module_name": "*", "cfg": {}}])


@pytest.mark.parametrize("name", PRESETS)
def test_a_recipe_for_every_preset(model, name):
    jlaqat.quantize(model, jlaqat.load_recipe(f"decode_{name}"))
    assert policies(model) == [PRESETS[name].policy] * 2
    assert all(DecodePolicy(state=p.state, **fields_of(p)) == p for p in policies(model))


def test_summary_lists_policies(model):
    assert "decode policy" not in jlaqat.summary(quantized(model))
    text = jlaqat.summary(quantized(model, {"module_name": "layers.0.*", "cfg": REPLAY}))
    (line,) = (line for line in text.splitlines() if line.startswith("layers.0.mixer "))
    assert "int8, key_row×32, every 3 tokens by replay, ring_dtype bfloat16" in line
    assert line.endswith("quant_cfg[1] 'layers.0.*'")
    rows = jlaqat.quantizer_table(model)
    assert [bool(row["decode"]) for row in rows] == [True, False, False, False]


def test_metadata_keeps_policies(model, plain):
    quantized(model, {"module_name": "layers.1.*", "cfg": REPLAY})
    saved = json.loads(json.dumps(quantizer_metadata(model)))
    assert saved["policies"] == {"layers.1.mixer": {"cfg": REPLAY, "source": "quant_cfg[1] 'layers.1.*'"}}
    other = nnx.clone(plain)
    apply_quantizer_metadata(other, saved)
    assert policies(other) == policies(model) and quantizer_metadata(other) == quantizer_metadata(model)
    older = {"format_version": 1, "quantizers": saved["quantizers"]}
    apply_quantizer_metadata(other, older)
    assert policies(other) == [None, None]
    with pytest.raises(QuantConfigError, match="policies of modules that the model has not: blocks.7"):
        apply_quantizer_metadata(other, {**saved, "policies": {"blocks.7": saved["policies"]["layers.1.mixer"]}})


def test_checkpoints_keep_policies_and_refuse_others(model, plain, tmp_path):
    from jlaqat.checkpoint_quantizers import recreate_quantizers
    from jlaqat.checkpoint_tree import CheckpointMismatchError, tree_of
    from jlaqat.quantizers import QuantizerVariable

    quantized(model, {"module_name": "*", "cfg": REPLAY})
    saved, arrays = quantizer_metadata(model), tree_of(nnx.state(model, QuantizerVariable))
    other = quantized(nnx.clone(plain), {"module_name": "*", "cfg": {**REPLAY, "window": 4}})
    with pytest.raises(CheckpointMismatchError, match="layers.0.mixer decode policy"):
        recreate_quantizers(other, saved, arrays, mode="match", where="here")
    recreate_quantizers(other, saved, arrays, mode="checkpoint", where="here")
    assert policies(other) == policies(model)


# ---- layers and models -----------------------------------------------------------------------------------------------


def run(model, tokens, **bounds):
    return nnx.jit(lambda model, tokens, bounds: model(tokens, **bounds))(model, tokens, bounds)


def test_a_model_with_policies_must_know_its_prefixes(model):
    quantized(model, {"module_name": "*", "cfg": REPLAY})
    with pytest.raises(ValueError, match=r"quant_cfg\[1\] '\*' set a decode policy.*pass prefix_lengths"):
        jax.eval_shape(model, np.zeros((2, 12), np.int32))


@pytest.mark.slow
@pytest.mark.usefixtures("compile_quickly")
def test_a_model_decodes_after_its_prefixes(one_layer):
    model = one_layer
    tokens = np.random.default_rng(0).integers(0, 16, (2, 12)).astype(np.int32)
    quantized(model, {"module_name": "*", "cfg": REPLAY})
    prefix = np.array([8, 5], np.int32)
    exact = run(model, tokens, prefix_lengths=np.array([12, 12], np.int32))
    logits = run(model, tokens, prefix_lengths=prefix)
    assert_close(logits[0, :8], exact[0, :8], 1e-5, "inside the prefix")
    difference = np.abs(logits - exact).max(-1)
    assert (difference[0, 8:] > 1e-6).all() and (difference[1, 5:] > 1e-6).all() and difference.max() < 0.1

    packed = run(model, tokens.reshape(1, 24), cu_seqlens=np.array([0, 12, 24], np.int32), prefix_lengths=prefix)
    assert_close(packed.reshape(2, 12, 16), logits, 1e-5, "packed")


@pytest.mark.usefixtures("compile_quickly")
def test_what_training_emulates_is_what_generation_does(one_layer):
    """The prompt as a prefix and every token after it by itself, from a cache of codes: the whole sequence's logits."""
    model = one_layer
    quantized(model, {"module_name": "*", "cfg": REPLAY})
    tokens = np.random.default_rng(1).integers(0, 16, (2, 13)).astype(np.int32)
    whole = run(model, tokens, prefix_lengths=np.array([6, 6], np.int32))

    prompt = nnx.jit(lambda model, tokens: model.decode(tokens, model.init_cache(2), prefix_lengths=6))
    step = nnx.jit(lambda model, token, cache: model.decode(token, cache))
    logits, cache = prompt(model, tokens[:, :6])
    outputs, caches = [logits], [cache]
    for t in range(6, 13):
        logits, cache = step(model, tokens[:, t : t + 1], cache)
        outputs.append(logits)
        caches.append(cache)
    logits = jnp.concatenate(outputs, axis=1)
    assert_close(logits, whole, 1e-5, "logits")
    states = [cache[0].state for cache in caches]
    assert all(isinstance(s, DecodeCarry) and s.values.dtype == jnp.int8 for s in states)
    assert all(s.ring_r.dtype == jnp.bfloat16 and s.ring_r.shape == (2, 3, 2, 32) for s in states)
    assert [int(s.position[0]) for s in states] == list(range(6, 14))
    assert [int(s.cursor[0]) for s in states] == [0, 1, 2, 0, 1, 2, 0, 1]


@pytest.mark.usefixtures("compile_quickly")
def test_generate_keeps_codes(one_layer):
    model = one_layer
    prompt = np.random.default_rng(2).integers(0, 16, (2, 5)).astype(np.int32)
    quantized(model)
    with pytest.raises(NotImplementedError, match="Give the module a decode policy"):
        jlaqat.generate(model, prompt, 2, temperature=0)
    quantized(model, {"module_name": "*", "cfg": REPLAY})
    mask = np.array([[True] * 5, [False] * 2 + [True] * 3])
    tokens = jlaqat.generate(model, prompt, 6, temperature=0, prompt_mask=mask)
    # Greedy: each token is the likeliest one after the prompt and the tokens before it, as training sees them.
    sequence = jnp.concatenate([prompt[1, 2:], tokens[1]])[None]
    logits = run(model, sequence, prefix_lengths=np.array([3], np.int32))
    assert np.array_equal(jnp.argmax(logits[0, 2:-1], -1), tokens[1])


def test_a_cache_of_another_policy_is_refused(model):
    quantized(model, {"module_name": "*", "cfg": REPLAY})
    mixer = model.layers[0].mixer
    cache, x = mixer.init_cache(1), jnp.zeros((1, 1, 16))
    quantized(model, {"module_name": "*", "cfg": {}})
    with pytest.raises(QuantConfigError, match="another policy"):
        mixer.decode(x, cache)
    jlaqat.quantize(model, [])
    with pytest.raises(ValueError, match="a decode policy that the layer has no more"):
        mixer.decode(x, cache)


def test_statistics_leave_policies_out(model):
    tokens = np.zeros((1, 4), np.int32)
    quantized(model, {"module_name": "layers.1.*", "cfg": {}})
    seen = jax.eval_shape(lambda: jlaqat.quantizer_metrics(model, lambda model: model(tokens, prefix_lengths=4)))
    assert list(seen) == ["layers.0.mixer.gdn_state_quantizer"]


# ---- training --------------------------------------------------------------------------------------------------------


def test_batches_say_where_decoding_starts():
    config = DataConfig(task="state_tracking", batch_size=2, seq_len=8, prefix=5, suffix_loss=True)
    batch = next(iter(jlaqat.make_dataset(config)))
    assert batch["prefix_lengths"].tolist() == [5, 5] and batch["prefix_lengths"].dtype == np.int32
    assert np.array_equal(batch["weights"], np.broadcast_to(np.arange(8) >= 5, (2, 8)))
    with pytest.raises(ValueError, match="suffix_loss=True needs to know"):
        DataConfig(suffix_loss=True)
    with pytest.raises(ValueError, match="prefix=9 is out of range; give 0 to seq_len=8"):
        DataConfig(task="state_tracking", seq_len=8, prefix=9)


def test_packed_batches_say_it_for_each_document(tmp_path):
    for i, size in enumerate((3, 4, 30)):
        (tmp_path / f"{i}.txt").write_text("abcdefghij" * size)
    config = DataConfig(task="text", paths=(str(tmp_path),), batch_size=2, seq_len=32, packing=True, max_documents=3)
    config = jlaqat.load_config(DataConfig, {**jlaqat.recipes.to_dict(config), "prefix": 7, "suffix_loss": True})
    batch = next(iter(jlaqat.make_dataset(config)))
    bounds, prefix = batch["cu_seqlens"], batch["prefix_lengths"]
    assert np.array_equal(prefix, np.minimum(np.diff(bounds), 7))
    for start, length in zip(bounds[:-1], prefix):
        assert not batch["weights"][0, start : start + length].any()
    assert batch["weights"].any()
    rows = split_packed(batch, 2)
    assert np.array_equal(rows["prefix_lengths"], prefix.reshape(2, 3))


@pytest.mark.usefixtures("compile_quickly")
def test_a_train_step_goes_through_the_decoded_suffix(one_layer):
    model = one_layer
    quantized(model, {"module_name": "*", "cfg": REPLAY})
    config = DataConfig(task="state_tracking", batch_size=2, seq_len=9, prefix=5, suffix_loss=True)
    batch = next(iter(jlaqat.make_dataset(config)))
    graph, state = nnx.split(model)

    @jax.jit
    def gradients(state, batch):
        def loss(params, rest):
            logits = forward(nnx.merge(graph, params, rest), batch)
            return (jnp.square(logits).mean(-1) * batch_weights(batch)).sum()

        params, rest = nnx.split_state(state, nnx.Param, ...)
        return jax.grad(loss)(params, rest)

    found = gradients(state, batch)
    for path, leaf in nnx.to_flat_state(found):
        assert np.isfinite(leaf[...]).all() and np.any(leaf[...]), path


@pytest.mark.slow
def test_scan_over_layers_with_remat_has_the_gradients_of_the_loop():
    """Packed, with prefixes, by replay, rounded stochastically: bit for bit, every parameter.

    Without fusions: those reach across a loop's layers, and a last bit that they change may tip a code.
    """
    tokens = np.random.default_rng(3).integers(0, 16, (1, 21)).astype(np.int32)
    bounds = dict(cu_seqlens=np.array([0, 9, 9, 20], np.int32), prefix_lengths=np.array([3, 0, 4], np.int32))
    stochastic = {**INT8, "cfg": {**INT8["cfg"], "rounding": "stochastic"}}
    unfused = {"xla_disable_hlo_passes": "fusion", "xla_llvm_disable_expensive_passes": True}
    unfused["xla_backend_optimization_level"] = 0

    def gradients(**options):
        config = dataclasses.replace(CONFIG, num_layers=4, **options)
        rules = [stochastic, {"module_name": "*", "cfg": REPLAY}]
        model = jlaqat.quantize(jlaqat.DecoderLM(config, rngs=nnx.Rngs(0)), rules)
        graph, params, rest = nnx.split(model, nnx.Param, ...)

        def loss(params):
            return jnp.square(nnx.merge(graph, params, rest)(tokens, **bounds)[:, :20]).mean()

        compiled = jax.jit(jax.grad(loss)).lower(params).compile(compiler_options=unfused)
        return jax.tree.leaves_with_path(nnx.to_pure_dict(compiled(params)))

    for (path, wanted), (_, found) in zip(gradients(), gradients(scan_layers=True, remat=True), strict=True):
        name = jax.tree_util.keystr(path)
        assert np.isfinite(wanted).all() and np.any(wanted), name
        assert np.asarray(found).tobytes() == np.asarray(wanted).tobytes(), name


# ---- studies ---------------------------------------------------------------------------------------------------------


def test_studies_have_axes_for_error_feedback_and_policies():
    from jlaqat.study_config import HeadConfig, StudyConfig

    data = DataConfig(task="regression", input_dim=4, seq_len=8, batch_size=2, prefix=4)
    sizes = HeadConfig(input_size=9, output_size=1, key_dim=4, value_dim=32)
    axes = dict(formats=["int8"], cadences=[1], score_cadences=[16], error_feedback=[False, True], policies=["serving"])
    config = StudyConfig(data=data, head=sizes, **axes)
    names = ["int8-1", "int8-feedback-1", "int8-16", "int8-feedback-16", "policy-serving"]
    assert [s.name for s in config.settings] == names
    assert [s.trained for s in config.settings] == [True, True, False, False, True]
    assert config.settings[3].trained_as == config.settings[1]
    assert config.settings[3].title == "INT8 error feedback every 16 tokens"
    feedback = DecodePolicy(state=QuantSpec.int8(), mode="replay", window=16, error_feedback=True)
    wanted = [None, dataclasses.replace(feedback, mode="token", window=None), None, feedback, PRESETS["serving"].policy]
    batch = next(iter(jlaqat.make_dataset(data)))
    for setting, policy in zip(config.settings, wanted):
        model = config.build(0, setting.quant_cfg())
        assert policies(model) == [policy]
        assert jax.eval_shape(lambda batch, model=model: forward(model, batch), batch).shape == (2, 8, 1)
    with pytest.raises(ValueError, match="set data.prefix, the tokens before decoding starts"):
        StudyConfig(data=dataclasses.replace(data, prefix=None), head=sizes, **axes)
