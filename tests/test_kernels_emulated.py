"""The decoding kernels as the PTX for SM90 that Triton makes of them, emulated, against the float64 oracles.

What the interpreter cannot: bfloat16, hardware E4M3, layouts of registers, barriers. Races fail every test here.
"""

import dataclasses
import pathlib
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import kernel_oracle
import recurrent_oracle
import replay_oracle
import torch
from emulated_run import EmulatedRun, emulated_run
from ptx_wgmma import matrix_units
from recurrent_oracle import SPECS

from jlaqat.kernels import recurrent_pipeline, replay_pipeline
from jlaqat.kernels.call import converts_to_e4m3
from jlaqat.kernels.recurrent_pipeline import Options
from jlaqat.kernels.replay_pipeline import Tokens

BOUNDS = dict(bound=0.005, gradient_bound=0.008)  # bfloat16's, spec/delta_rule.md
# On SM89 Triton before 3.9 takes float32 to E4M3 through float16, truncated: just above a tie becomes the tie.
DRAWN = dict(rounding="stochastic", seed=3)
BY_BLOCKS = ("solve_blocks_kernel", "gradient_states_kernel", "token_blocks_kernel")
on_sm89 = EmulatedRun(89)


def with_blocks_on_sm89(launch):
    """Gradients by blocks take wgmma's operands from registers on SM90, which the emulator does not know."""
    return (on_sm89 if launch.name in BY_BLOCKS else emulated_run)(launch)


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


def inputs(kda, dtype=torch.bfloat16, **sizes):
    """(q, k, v, g, beta, state), one head; q, k, v and beta in dtype."""
    shapes = dict(b=1, t=3, h=1, hv=1, dk=128, dv=64) | sizes
    q, k, v, g, beta, state = kernel_oracle.make_inputs(3, kda=kda, **shapes)
    return q.to(dtype), k.to(dtype), v.to(dtype), g.float(), beta.to(dtype), state.float()


@pytest.mark.parametrize(
    ("gate", "name", "stored"),
    [
        ("gdn", "e4m3-tile", False),
        ("kda", "int8-key_row", True),
        ("gdn", "bfloat16", True),
        slow("gdn", "int8-key_row", False),
        slow("gdn", "int8-tile", True),
        slow("gdn", "e4m3-value_row", False),
        slow("gdn", "float32", False),
        slow("kda", "e4m3-tile", True),
        slow("kda", "bfloat16", False),
        slow("kda", "float16", True),
    ],
    ids=str,
)
def test_tokens_forward_and_backward(gate, name, stored):
    *tokens, state = inputs(gate == "kda")
    options = Options(scale=0.1, state=SPECS[name], read_stored=stored, hardware_fp8=True)
    recurrent_oracle.check_call(recurrent_pipeline.Tokens(*tokens), state, options, with_blocks_on_sm89, **BOUNDS)


@pytest.mark.parametrize(
    ("gate", "name"),
    [("gdn", "e4m3-tile"), slow("kda", "int8-key_row"), slow("gdn", "bfloat16"), slow("kda", "float32")],
)
def test_a_token_at_a_time_gives_the_same_bits(gate, name):
    *tokens, state = inputs(gate == "kda")
    tokens, options = recurrent_pipeline.Tokens(*tokens), Options(scale=0.1, state=SPECS[name], hardware_fp8=True)
    entering = recurrent_oracle.entering_state(state, options)
    whole = recurrent_pipeline.forward(emulated_run, tokens, entering, options)
    o, last, _ = recurrent_oracle.step_by_step(tokens, entering, options, emulated_run)
    assert torch.equal(o, whole.o)
    assert torch.equal(last.values.view(torch.uint8), whole.state.values.view(torch.uint8))
    assert last.scale is None or torch.equal(last.scale, whole.state.scale)


@pytest.mark.parametrize("capability", [89, 90])
def test_the_hardware_conversion_serves_where_it_gives_the_bits_of_the_arithmetic_one(capability):
    """Not on SM89 with Triton before 3.9, which rounds twice."""
    *tokens, state = inputs(False)
    tokens, run, results = recurrent_pipeline.Tokens(*tokens), EmulatedRun(capability), []
    for hardware in (True, False):
        options = Options(scale=0.1, state=SPECS["e4m3-tile"], hardware_fp8=hardware)
        entering = recurrent_oracle.entering_state(state, options)
        results.append(recurrent_pipeline.forward(run, tokens, entering, options))
    equal = torch.equal(results[0].o, results[1].o)
    equal &= torch.equal(results[0].state.values, results[1].state.values)
    assert equal == converts_to_e4m3(capability)


def replay_call(gate, name, window, settings):
    """(tokens, state, ring, options): sequences that stand at the start, early and at the end of their windows."""
    big, coded = "big" in settings, "codes" in settings
    sizes = dict(b=3, t=40, dv=128) if big else dict(b=2, t=5)
    q, k, v, g, beta, state = inputs(gate == "kda", **sizes)
    tokens = Tokens(q, k.float() if coded else k, v, g, beta)
    tokens = replay_oracle.with_key_codes(tokens) if coded else tokens
    width = 64 if coded else None
    options = Options(scale=0.1, state=SPECS[name], read_stored="stored" in settings, hardware_fp8=True, width=width)
    state = recurrent_oracle.entering_state(state, options)
    state = replay_oracle.with_lost(state) if "feedback" in settings else state
    if "drawn" in settings:
        options = dataclasses.replace(options, state=dataclasses.replace(options.state, **DRAWN))
    cursors = [0, min(2, window - 1), window - 1][-len(q) :]
    ring_dtype = replay_oracle.CODED if coded else torch.bfloat16
    return tokens, state, replay_oracle.make_ring(tokens, window, cursors, ring_dtype, width), options


@pytest.mark.parametrize(
    ("gate", "name", "window", "settings"),
    [
        ("gdn", "e4m3-tile", 3, ""),
        slow("kda", "e4m3-tile", 4, "stored"),
        slow("gdn", "int8-key_row", 4, "feedback"),
        slow("kda", "int8-key_row", 4, "stored drawn feedback"),
        slow("gdn", "e4m3-value_row", 17, "stored"),  # two blocks of the ring
        slow("kda", "e4m3-tile", 4, "drawn"),
        slow("gdn", "e4m3-tile", 4, "codes feedback"),
        slow("kda", "e4m3-value_row", 3, "codes stored"),
        slow("gdn", "bfloat16", 4, "stored"),
        slow("kda", "float32", 4, ""),
        slow("gdn", "e4m3-tile", 16, "big"),  # as the GPU test has it
    ],
    ids=str,
)
def test_replay_forward_gradients_steps_and_cuts(gate, name, window, settings):
    with matrix_units():  # of a flush
        check_replay(gate, name, window, settings)


def check_replay(gate, name, window, settings):
    tokens, state, ring, options = replay_call(gate, name, window, settings)
    counters = replay_oracle.make_counters(tokens, len(ring.cursor)) if "drawn" in settings else None
    given = tokens, state, ring, options, emulated_run
    whole = replay_oracle.check_call(*given, **BOUNDS, counters=counters)
    o, last, entries = replay_oracle.step_by_step(*given, counters)
    replay_oracle.assert_equal("o of steps", o, whole.o)
    replay_oracle.assert_same(last, entries, whole.state, whole.ring)
    cut, end = 2, tokens.q.shape[1]
    parts, at = [], (state, ring)
    for start, stop in ((0, cut), (cut, end)):
        more = {"counters": replay_oracle.after(counters, start)}
        part = replay_pipeline.forward(emulated_run, replay_oracle.cut(tokens, start, stop), *at, options, **more)
        parts.append(part.o)
        at = (part.state, part.ring)
    replay_oracle.assert_equal("o of two calls", torch.cat(parts, 1), whole.o)
    replay_oracle.assert_same(*at, whole.state, whole.ring)
