"""The recurrence kernels compiled ahead of time, without a GPU, for every architecture."""

import pytest

pytest.importorskip("triton")

from jlaqat.spec import QuantSpec


@pytest.mark.parametrize(
    ("architecture", "gate", "state"),
    [
        (80, "gdn", QuantSpec.fp8()),
        (89, "kda", QuantSpec.int8(granularity="key_row")),
        (90, "gdn", None),
        (90, "kda", QuantSpec.fp8()),
        (90, "gdn", QuantSpec.float16()),
        (100, "kda", QuantSpec.fp8(granularity="value_row")),
        (120, "gdn", QuantSpec.fp8()),
    ],
    ids=str,
)
def test_compiles_without_spilling(architecture, gate, state):
    from jlaqat.kernels.aot import compile_recurrent

    report = compile_recurrent(architecture, gate, "bfloat16", state, key_dim=128, value_dim=128, heads=(4, 8))
    assert {k.name for k in report} >= {"recurrent_forward", "recurrent_backward"}
    assert [k for k in report if k.stack] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "gate", "state"),
    [
        (80, "kda", QuantSpec.int8(granularity="key_row")),
        (89, "gdn", None),
        (90, "gdn", QuantSpec.fp8(rounding="stochastic")),
        (100, "kda", QuantSpec.fp8()),
        (120, "gdn", QuantSpec.fp8(granularity="value_row")),
    ],
    ids=str,
)
def test_packed_compiles_without_spilling(architecture, gate, state):
    from jlaqat.kernels.aot import compile_recurrent

    sizes = dict(key_dim=128, value_dim=128, heads=(4, 8), packed=True)
    report = compile_recurrent(architecture, gate, "bfloat16", state, **sizes)
    names = ["recurrent_forward", "recurrent_forward", "recurrent_backward", *["place_rows"] * 5]
    assert [k.name for k in report] == names
    assert [k for k in report if k.stack] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "gate", "state", "window"),
    [
        (80, "gdn", QuantSpec.fp8(), 8),
        (89, "gdn", QuantSpec.int8(granularity="key_row"), 16),
        (90, "kda", QuantSpec.fp8(), 16),
        (100, "gdn", QuantSpec.fp8(granularity="value_row"), 1),
        (120, "kda", QuantSpec.int8(granularity="key_row"), 8),
    ],
    ids=str,
)
def test_replay_compiles(architecture, gate, state, window):
    from jlaqat.kernels.aot import compile_recurrent

    sizes = dict(key_dim=128, value_dim=128, heads=(4, 8), window=window)
    report = compile_recurrent(architecture, gate, "bfloat16", state, **sizes)
    assert {k.name for k in report} >= {"replay_step", "replay_forward", "replay_backward"}
    # The step is held to 128 registers for the tokens that join the ring, and spills where it flushes; the backward
    # wants a few more than there are.
    assert [k for k in report if k.stack > (300 if architecture == 90 else 1000)] == []
