"""Sampling from a `DecoderLM`: the prompt at once, then a token at a time through the cache, in one jitted call."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jlaqat.checks import is_traced
from jlaqat.model import Cache, DecoderLM

Array = jax.Array


def generate(
    model: DecoderLM,
    prompt: Array,
    max_new_tokens: int,
    *,
    prompt_mask: Array | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    stop_token: int | None = None,
    rng: Array | None = None,
) -> Array:
    """`max_new_tokens` tokens after each prompt, int32 [B, max_new_tokens].

    Args:
      model: with a vocabulary. Quantizers may be enabled where a layer has a decode policy: the prompt then runs as the
        prefix, and the state is kept as the policy does, in codes and scales, from the hand-off on.
      prompt: int [B, T], T ≥ 1.
      max_new_tokens: ≥ 1.
      prompt_mask: [B, T], True at real tokens, of which each row has one at least, where prompts differ in length;
        padding may stand on either side.
      temperature: of the softmax; 0 takes the likeliest token.
      top_k: draws among the k likeliest only.
      stop_token: a sequence that draws it repeats it to the end.
      rng: a JAX key; needed unless temperature is 0.

    Compiled once for each model structure, prompt shape and set of options. Raises ValueError for options that do not
    fit, NotImplementedError while a quantizer is enabled in a layer without a decode policy (see `DecoderLM.decode`).
    """
    prompt = jnp.asarray(prompt)
    if model.config.vocab_size is None:
        raise ValueError(
            "generate samples tokens, but this model maps vectors to vectors; call model.decode step by step."
        )
    if prompt.ndim != 2 or prompt.shape[1] < 1:
        raise ValueError(f"prompt has shape {prompt.shape}; give tokens [batch, length] with length at least 1.")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens} must be at least 1.")
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature={temperature} must be finite and not negative; 0 takes the likeliest token.")
    if top_k is not None and not 1 <= top_k <= model.config.vocab_size:
        raise ValueError(f"top_k={top_k} is outside [1, vocab_size={model.config.vocab_size}]; None draws among all.")
    if prompt_mask is not None and not is_traced(prompt_mask) and not np.asarray(prompt_mask).any(axis=-1).all():
        raise ValueError("prompt_mask leaves a prompt without a token; mark at least one in each row.")
    if rng is None:
        if temperature > 0:
            raise ValueError(
                f"temperature={temperature} draws at random: pass rng=jax.random.key(seed), or temperature=0."
            )
        rng = jax.random.key(0)  # not read
    graph, state = nnx.split(model)
    stop = -1 if stop_token is None else stop_token  # no token is negative
    scalars = jnp.float32(temperature), jnp.int32(stop)
    return _generate(graph, state, prompt, prompt_mask, rng, *scalars, max_new_tokens, temperature == 0, top_k)


@functools.partial(jax.jit, static_argnames=("graph", "max_new_tokens", "greedy", "top_k"))
def _generate(
    graph: nnx.GraphDef,
    state: nnx.State,
    prompt: Array,
    prompt_mask: Array | None,
    rng: Array,
    temperature: Array,
    stop_token: Array,
    max_new_tokens: int,
    greedy: bool,
    top_k: int | None,
) -> Array:
    def draw(logits: Array, key: Array) -> Array:
        """Tokens [B] from logits [B, vocab_size]."""
        if greedy:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        if top_k is not None:
            least = jax.lax.top_k(logits, top_k)[0][:, -1:]
            logits = jnp.where(logits < least, -jnp.inf, logits)
        return jax.random.categorical(key, logits / temperature, axis=-1).astype(jnp.int32)

    model = nnx.merge(graph, state)
    batch, length = prompt.shape
    cache = model.init_cache(batch, length + max_new_tokens)
    prefix = length if prompt_mask is None else prompt_mask.astype(bool).sum(axis=1, dtype=jnp.int32)
    logits, cache = model.decode(prompt, cache, mask=prompt_mask, prefix_lengths=prefix)
    last = jnp.full((batch,), length - 1) if prompt_mask is None else _last_true(prompt_mask.astype(bool))
    logits = jnp.take_along_axis(logits, last[:, None, None], axis=1)[:, 0]

    def step(carry: tuple[Array, Cache], key: Array) -> tuple[tuple[Array, Cache], Array]:
        token, cache = carry
        logits, cache = model.decode(token[:, None], cache)
        token = jnp.where(token == stop_token, token, draw(logits[:, 0], key))
        return (token, cache), token

    keys = jax.random.split(rng, max_new_tokens)
    first = draw(logits, keys[0])
    _, rest = jax.lax.scan(step, (first, cache), keys[1:])
    return jnp.concatenate([first[:, None], rest.T], axis=1)


def _last_true(mask: Array) -> Array:
    """Index of the last True in each row of mask [B, T]: [B]."""
    return mask.shape[1] - 1 - jnp.argmax(mask[:, ::-1], axis=1)
