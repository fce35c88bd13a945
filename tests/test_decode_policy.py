"""DecodePolicy: what it accepts, what it refuses and how it says so, presets and their names."""

import dataclasses
import re

import pytest

from jlaqat.decode_policy import PRESETS, DecodePolicy
from jlaqat.spec import DeltaQuant, QuantConfigError, QuantSpec

FP8 = QuantSpec.fp8()


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (dict(mode="chunk"), "mode='chunk' is not supported; choose one of 'token', 'replay', 'handoff'"),
        (dict(readout="exact"), "readout='exact'"),
        (dict(encoding="twice", mode="replay"), "encoding='twice'"),
        (dict(window=8), "window=8 belongs to mode='replay'"),
        (dict(ring_dtype="bfloat16"), "ring_dtype='bfloat16' belongs to mode='replay'"),
        (dict(factor_qdq=True), "factor_qdq=True belongs to mode='replay'"),
        (dict(encoding="reencode"), "encoding='reencode' belongs to mode='replay'"),
        (dict(mode="replay", window=0), "window=0 is out of range; give an integer from 1 to 64"),
        (dict(mode="replay", window=65), "window=65"),
        (dict(mode="replay", window=True), "window=True"),
        (dict(mode="replay", factor_qdq=True, ring_dtype="bfloat16"), "factor_qdq=True keeps ring entries in E4M3"),
        (dict(mode="replay", ring_dtype="float16"), "ring_dtype='float16'"),
        (dict(quantize_initial=1), "quantize_initial=1 must be True or False"),
        (dict(state="fp8"), "is not a QuantSpec"),
        (dict(state=QuantSpec.fp8(scale="static")), "dynamic scales only"),
        (dict(state=QuantSpec.fp8(cadence=1)), "leave cadence out"),
        (dict(state=QuantSpec.fp8(granularity="row")), "granularity of the state quantizer='row'"),
        (dict(decay_log_step=0.0), "decay_log_step=0.0 must be a positive finite number"),
        (dict(decay_log_step=float("inf")), "decay_log_step=inf"),
        (dict(prefill_state_qdq=True), "prefill_state_qdq=True rounds with the state's format, but state is None"),
        (dict(error_feedback=True), "error_feedback=True rounds with the state's format, but state is None"),
        (dict(mode="handoff"), "mode='handoff' rounds the state once"),
        (dict(mode="handoff", state=FP8, quantize_initial=False), "quantize_initial=False"),
        (dict(mode="handoff", state=FP8, error_feedback=True), "error_feedback=True"),
        (dict(state=QuantSpec.int8_hadamard32(), prefill_state_qdq=True), "needs a state format for chunks"),
        (dict(state=QuantSpec.nvfp4(), prefill_state_qdq=True), "round twice at the hand-off"),
        (dict(state=QuantSpec.int8(basis="hadamard32", block_v=16)), "mixes 32 values, but block_v=16"),
    ],
)
def test_refusals_name_the_field_and_the_remedy(fields, says):
    with pytest.raises(QuantConfigError, match=re.escape(says)):
        DecodePolicy(**fields)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (dict(format="e4m3", rounding="half_away"), "rounding='half_away' is for integers"),
        (dict(format="int8", granularity="none"), "integers need a scale"),
        (dict(format="e4m3", limit=500.0), "limit=500.0 does not fit"),
        (dict(format="e4m3", limit=240.0, granularity="none"), "limit=240.0 does not fit"),
        (dict(format="bfloat16", scale_dtype="float16"), "has no float32 scale"),
        (dict(format="int8", limit=100.0, scale="static"), "takes no limit"),
    ],
)
def test_state_formats_refuse_what_has_no_meaning(fields, says):
    with pytest.raises(QuantConfigError, match=re.escape(says)):
        QuantSpec(**fields)


@pytest.mark.parametrize(
    "spec",
    [
        QuantSpec.int8_hadamard32(),
        QuantSpec.fp8(limit=240.0),
        QuantSpec.fp8(granularity="none"),
        QuantSpec.int8(rounding="half_away"),
        QuantSpec.int8(scale_dtype="float16"),
    ],
)
def test_chunked_kernels_refuse_what_only_decoding_does(spec):
    assert spec.decode_only and DecodePolicy(state=spec).state == dataclasses.replace(
        spec, granularity=spec.granularity or "tile"
    )
    with pytest.raises(QuantConfigError, match="for decoding only"):
        DeltaQuant(state=spec)


def test_policies_are_values():
    policy = DecodePolicy(state=FP8, mode="replay")
    assert policy.window == 8 and policy == DecodePolicy(state=FP8, mode="replay", window=8)
    assert hash(policy) == hash(DecodePolicy(state=QuantSpec.fp8(granularity="tile"), mode="replay"))
    assert policy.signature == dataclasses.replace(policy, prefill_state_qdq=True).signature
    assert not DecodePolicy().enabled and policy.enabled and DecodePolicy(decay_log_step=0.5).enabled
    assert "window: 8 against 4" in policy.differences(dataclasses.replace(policy, window=4))


def test_codes_are_kept_where_every_state_that_is_kept_was_rounded():
    assert DecodePolicy(state=FP8).keeps_codes and DecodePolicy.preset("serving").keeps_codes
    for policy in (
        DecodePolicy(),
        DecodePolicy(state=FP8, quantize_initial=False),
        DecodePolicy(state=QuantSpec.nvfp4()),
        DecodePolicy.preset("flashinfer_cast"),
    ):
        assert not policy.keeps_codes


def test_presets():
    # Format, granularity, limit, rounding, mode, window and readout, as the threads that `PRESETS` names describe them.
    table = {
        "modelopt": ("e4m3", "tile", None, "nearest", "token", None, "stored"),
        "modelopt_int8": ("int8", "key_row", None, "nearest", "token", None, "stored"),
        "serving": ("int8", "key_row", None, "nearest", "replay", 8, "working"),
        "vllm_fp16_sr": ("float16", "none", None, "stochastic", "token", None, "working"),
        "vllm_int8": ("int8", "value_row", None, "nearest", "token", None, "working"),
        "vllm_fp8": ("e4m3", "value_row", None, "nearest", "token", None, "working"),
        "sglang_fp8": ("e4m3", "tile", 240.0, "nearest", "token", None, "working"),
        "sglang_replay": ("bfloat16", "none", None, "nearest", "replay", 16, "working"),
        "flashinfer_cast": ("e4m3", "none", None, "nearest", "handoff", None, "working"),
        "tpu_bf16": ("bfloat16", "none", None, "nearest", "token", None, "working"),
    }
    assert set(table) == set(PRESETS)
    for name, row in table.items():
        policy = DecodePolicy.preset(name)
        spec = policy.state
        got = (spec.format, spec.granularity, spec.limit, spec.rounding, policy.mode, policy.window, policy.readout)
        assert got == row, name
        assert PRESETS[name].source and PRESETS[name].note
        assert not policy.prefill_state_qdq
    assert DecodePolicy.preset("sglang_fp8").state.block_v == 32
    assert DecodePolicy.preset("sglang_replay").ring_dtype == "bfloat16"


def test_presets_take_overrides():
    policy = DecodePolicy.preset("vllm_int8", rounding="stochastic", seed=3, readout="stored")
    assert (policy.state.rounding, policy.state.seed, policy.readout) == ("stochastic", 3, "stored")
    token = DecodePolicy.preset("serving", mode="token", format="e4m3")
    assert (token.mode, token.window, token.ring_dtype, token.state.format) == ("token", None, "float32", "e4m3")
    assert DecodePolicy.preset("sglang_replay", state=None).state is None
    with pytest.raises(QuantConfigError, match="choose 'vllm_int8'"):
        DecodePolicy.preset("vllm_int4")
    with pytest.raises(QuantConfigError, match="roundin is no field of a policy or its state; did you mean rounding"):
        DecodePolicy.preset("vllm_int8", roundin="stochastic")
    with pytest.raises(QuantConfigError, match="no state format, so block_v has no place"):
        DecodePolicy.preset("sglang_replay", state=None, block_v=32)


def test_describe_names_what_differs():
    assert DecodePolicy().describe() == "float32, every token"
    assert DecodePolicy.preset("serving", readout="stored").describe() == (
        "int8, key_row×32, every 8 tokens by replay, ring_dtype bfloat16, readout stored"
    )
    assert DecodePolicy(state=QuantSpec.int8_hadamard32()).describe() == (
        "int8, key_row×32, rounding half_away, float16 scales, hadamard32, every token"
    )
