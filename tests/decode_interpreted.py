"""Spans of tokens through Triton's interpreter, with JAX around it. Run by test_kernels_interpret.py in a process.

A launch leaves JAX for the interpreter and comes back, so everything runs eagerly. Segments have 3 tokens here, not 64.
"""

import functools
import os
import sys

sys.path.insert(0, os.path.dirname(__file__))
os.environ["TRITON_INTERPRET"] = "1"

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from spans_oracle import Case, both_directions, check_bits_alone

from jlaqat import QuantSpec, decode_triton
from jlaqat.kernels.recurrent_pipeline import Options
from jlaqat.torch_bridge.run import poisoned_run


def run(launch):
    """A Launch of JAX arrays; its outputs are full of NaN beforehand."""
    inputs = {name: torch.from_numpy(np.array(x)) for name, x in launch.inputs.items()}
    outputs = poisoned_run(type(launch)(**{**vars(launch), "inputs": inputs}))
    return {name: jnp.asarray(x.numpy()) for name, x in outputs.items()}


TILE, KEY_ROW = QuantSpec.fp8(block_v=16), QuantSpec.int8(granularity="key_row")
CASES = {
    "batch": (1, TILE, False, Case(None, dict(start=[2, 0, 7], stop=[6, 1, 7]), [(0, 2, 6), (1, 0, 1), (2, 7, 7)])),
    "packed": (2, KEY_ROW, True, Case([0, 5, 5, 7], dict(start=[1, 0, 1]), [(0, 1, 5), (0, 5, 5), (0, 6, 7)])),
    "stacked": (1, TILE, False, Case([0, 4, 7, 0, 1, 1], {}, [(0, 0, 4), (0, 4, 7), (1, 0, 1), (1, 1, 1)])),
}


@pytest.mark.parametrize("name", CASES)
def test_a_sequence_has_the_bits_that_it_has_alone(name, monkeypatch):
    monkeypatch.setattr(decode_triton, "CHUNK_SIZE", 3)
    heads, spec, kda, case = CASES[name]
    options = Options(scale=0.3, state=spec, read_stored=kda)
    with jax.disable_jit():
        call = functools.partial(both_directions, run, options)
        check_bits_alone(call, options, case, kda=kda, T=7, H=1, HV=heads, K=5, V=16)
