"""Sampling from a model: greedy against repeated forward passes, the distribution, and what cannot work."""

import functools
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jlaqat.generation import generate

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from generation_oracle import check_generation
from tiny_models import QUICK, apply, make, tokens

pytestmark = pytest.mark.usefixtures("compile_quickly")


def test_generation_equals_repeated_forward_passes():
    """Greedy, from two prompts of unequal length; one stops."""
    model = make(num_layers=2, pattern=("gdn", "attention"))
    prompt, mask = tokens(2, 5), np.array([[True] * 5, [False] * 2 + [True] * 3])
    graph, state = nnx.split(model)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def greedy(state, stop_token):
        model = nnx.merge(graph, state)
        return generate(model, prompt, 4, prompt_mask=mask, temperature=0, stop_token=stop_token)

    new = greedy(state, -1)
    assert new.shape == (2, 4) and new.dtype == jnp.int32
    text = jnp.zeros((2, 9), jnp.int32)
    for row in range(2):
        text = text.at[row, : mask[row].sum() + 4].set(jnp.concatenate([prompt[row][mask[row]], new[row]]))
    logits = apply(model, text)
    for row, length in enumerate(mask.sum(axis=1)):
        expected = jnp.argmax(logits[row, length - 1 : length + 3], axis=-1)
        np.testing.assert_array_equal(new[row], expected)
    assert len(set(np.asarray(new).ravel().tolist())) > 2  # not one token over and over
    stop = int(new[0, 1])
    stopped = greedy(state, stop)
    np.testing.assert_array_equal(stopped[0, 1:], [stop] * 3)


@pytest.mark.parametrize("policy", ["token", pytest.param("replay", marks=pytest.mark.slow)])
def test_compressed_states_have_the_bits_that_training_emulates(policy, monkeypatch):
    check_generation(policy, "xla", monkeypatch)


def test_sampling():
    model = make(num_layers=1, pattern=("attention",))
    prompt = jnp.zeros((200, 1), jnp.int32)
    logits = np.asarray(apply(model, prompt[:1])[0, 0], np.float64)
    drawn = np.asarray(generate(model, prompt, 1, temperature=0.7, top_k=3, rng=jax.random.key(0)))[:, 0]
    best = np.argsort(logits)[-3:]
    assert set(drawn) == set(best)
    p = np.exp(logits[best] / 0.7)
    counts = np.array([(drawn == token).sum() for token in best])
    assert np.abs(counts / 200 - p / p.sum()).max() < 0.15
    again = generate(model, prompt, 1, temperature=0.7, top_k=3, rng=jax.random.key(0))
    np.testing.assert_array_equal(again[:, 0], drawn)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 1.0}, "pass rng"),
        ({"temperature": -1.0}, "must be finite and not negative"),
        ({"temperature": float("nan"), "rng": jax.random.key(0)}, "temperature=nan must be finite"),
        ({"prompt_mask": jnp.zeros((2, 12), bool).at[0].set(True), "temperature": 0.0}, "a prompt without a token"),
        ({"top_k": 18}, r"top_k=18 is outside \[1, vocab_size=17\]"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 must be at least 1"),
        ({"prompt": jnp.zeros((3,), jnp.int32)}, r"prompt has shape \(3,\)"),
    ],
)
def test_generation_that_cannot_work(options, message):
    with pytest.raises(ValueError, match=message):
        generate(make(num_layers=1), **{"prompt": tokens(), "max_new_tokens": 2} | options)
