"""Generation against what training emulates, bit by bit, on one device; for the CPU and for GPUs.

Training sees a sequence at once and generation a token at a time, so a model's projections may differ in last bits
(they are products of other sizes). What is compared is what a decode policy is about: the tokens of every layer's delta
rule are noted while `generate` runs, and one call over all of them, as training makes it, must give the same bits.
"""

import contextlib
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import io_callback

import jlaqat
from jlaqat import quantizer

CONFIG = jlaqat.ModelConfig(
    vocab_size=16, hidden_size=16, num_layers=2, pattern=("gdn", "kda"), num_heads=1, num_v_heads=2, head_dim=32
)
POLICIES = {
    "token": [
        {
            "quantizer_name": "*state_quantizer",
            "cfg": {"num_bits": "e4m3", "axis": [0, 1], "block_v": 32, "rounding": "stochastic", "seed": 3},
        },
        {"module_name": "*", "cfg": {"mode": "token", "error_feedback": True}},
    ],
    "replay": [
        {"quantizer_name": "*state_quantizer", "cfg": {"num_bits": "int8", "narrow_range": True, "key_row": 32}},
        {"module_name": "*", "cfg": {"mode": "replay", "window": 3, "ring_dtype": "bfloat16", "readout": "stored"}},
    ],
}
PROMPT = np.random.default_rng(2).integers(0, 16, (2, 5)).astype(np.int32)
MASK = np.array([[True] * 5, [False] * 2 + [True] * 3])
LENGTHS = MASK.sum(axis=1).astype(np.int32)
NEW = 9


class Call(NamedTuple):
    """One delta rule that ran, as NumPy arrays; the carry as {field: bytes}."""

    operands: tuple[Any, ...]  # q, k, v, g, beta
    arrays: Any  # its QuantArrays
    entering: dict[str, Any]
    o: Any
    leaving: dict[str, Any]


def check_generation(policy, backend, monkeypatch):
    """Both gates, greedy, from two prompts of unequal length. backend: of the layers, and of what training emulates."""
    config = dataclasses.replace(CONFIG, backend=backend)
    model = jlaqat.quantize(jlaqat.DecoderLM(config, rngs=nnx.Rngs(0)), POLICIES[policy])
    with noted(monkeypatch) as (calls, options):
        new = jlaqat.generate(model, PROMPT, NEW, temperature=0, prompt_mask=MASK)
    layers = config.num_layers
    assert len(calls) == layers * NEW  # a prompt, and every new token but the last
    for layer, kind in enumerate(config.pattern):
        check_layer(f"{kind}, ", calls[layer::layers], options[layer])
    check_tokens(model, np.asarray(new))


@contextlib.contextmanager
def noted(monkeypatch):
    """Inside: ([every delta rule of a layer, as it runs], [the settings of every one that is traced])."""
    calls, traced, decode = [], [], quantizer.delta_rule_decode

    def note(*call):
        calls.append(Call(*jax.tree.map(np.array, call)))

    def noting(q, k, v, g, beta, state, **options):
        traced.append({name: options[name] for name in ("quant", "w", "backend")})
        operands = jax.lax.optimization_barrier((q, k, v, g, beta))  # computed once, for the call and for the note
        o, carry = jax.lax.optimization_barrier(decode(*operands, state, **options))
        io_callback(note, None, operands, options["quant_arrays"], fields(state), o, fields(carry), ordered=True)
        return o, carry

    jax.clear_caches()  # what is traced now takes notes, and nothing else shall
    with monkeypatch.context() as patch:
        patch.setattr(quantizer, "delta_rule_decode", noting)
        yield calls, traced
        jax.effects_barrier()
    jax.clear_caches()


def fields(carry):
    """{name: array} of a carry, codes as bytes, without what lies past the ring's cursor, which may be anything."""
    found = {name: x for name, x in vars(carry).items() if name != "policy" and x is not None}
    for name, x in found.items():
        if x.dtype.itemsize == 1:
            found[name] = x = jax.lax.bitcast_convert_type(x, jnp.uint8)
        if name.startswith("ring"):
            used = jnp.arange(x.shape[1]) < carry.cursor[:, None]
            found[name] = jnp.where(used.reshape(*used.shape, *(1,) * (x.ndim - 2)), x, jnp.zeros((), x.dtype))
    return found


def check_layer(said, calls, options):
    """Outputs of every token, and the memory after the last, of one call over all; no step lost any of its memory."""
    for before, after in zip(calls, calls[1:]):
        assert_same(f"{said}between calls: ", after.entering, before.leaving)
    first, *steps = calls
    operands = tuple(joined(*rows) for rows in zip(*(call.operands for call in calls)))

    @jax.jit
    def emulated(operands, prefix, arrays):
        def call(operands):
            bounds = {"prefix_lengths": prefix, "lengths": prefix + len(steps)}
            return jlaqat.delta_rule_decode(*operands, **bounds, quant_arrays=arrays, **options)

        o, _, carry = jax.vjp(call, operands, has_aux=True)  # the forward of a gradient
        return o, fields(carry)

    o, carry = emulated(operands, LENGTHS, first.arrays)
    assert_same(said, {"o": joined(*(call.o for call in calls)), **calls[-1].leaving}, {"o": o, **carry})
    assert all(np.isfinite(x.astype(np.float32)).all() and x.any() for x in (first.o, *(call.o for call in steps)))


def joined(prompt, *steps):
    """[B, T, ...]: a row's prompt without the padding after it, then its steps; zeros at the end."""
    steps = np.concatenate(steps, axis=1)
    whole = np.zeros((len(steps), max(LENGTHS) + steps.shape[1], *steps.shape[2:]), steps.dtype)
    for row, (x, y, length) in enumerate(zip(prompt, steps, LENGTHS)):
        whole[row, : length + len(y)] = np.concatenate([x[:length], y])
    return whole


def assert_same(said, found, wanted):
    assert found.keys() == wanted.keys()
    for name, x in found.items():
        x, y = np.asarray(x), np.asarray(wanted[name])
        assert x.dtype == y.dtype and x.tobytes() == y.tobytes(), f"{said}{name}: {(x != y).sum()} of {x.size} differ"


def check_tokens(model, new):
    """Each new token is the likeliest after those before it in training's eyes too, or as likely but for rounding."""
    prompt = np.zeros_like(PROMPT)
    for row, length in enumerate(LENGTHS):
        prompt[row, :length] = PROMPT[row][MASK[row]]
    text = joined(prompt, new)
    mask = np.arange(text.shape[1]) < LENGTHS[:, None] + NEW
    logits = nnx.jit(lambda model: model(text, mask=mask, prefix_lengths=LENGTHS))(model)
    before = LENGTHS[:, None] - 1 + np.arange(NEW)
    logits = np.take_along_axis(np.asarray(logits), before[..., None], axis=1)
    chosen = np.take_along_axis(logits, new[..., None], axis=2)[..., 0]
    assert (logits.max(axis=2) - chosen <= 0.05 * logits.std()).all()
    assert len(set(new.ravel().tolist())) > 2  # not one token over and over
