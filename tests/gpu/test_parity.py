"""`jlaqat parity` on a GPU: within the bounds, and the same bits. Without FLA, which tunes itself for minutes."""

import pytest

from jlaqat.parity import ParityConfig, compare


@pytest.mark.parametrize(
    "config",
    [
        ParityConfig(fla=False, batch=2, tokens=200, value_heads=4),
        ParityConfig(fla=False, gate="kda", quant="state_w_fp8", lengths=(0, 64, 5, 100)),
    ],
    ids=["gdn-plain", "kda-fp8-packed"],
)
def test_within_the_bounds_and_equal_bits(config):
    report = compare(config)
    assert report.sides["jax"] == "triton" and report.dtype == "bfloat16" and report.same_kernels
    assert report.passed, (report.rows, report.missing)
    assert all(row.equal_bits for row in report.rows)
