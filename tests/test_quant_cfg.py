"""quant_cfg: every field and spelling, what is refused and with which words, and how entries find quantizers."""

import pytest

from jlaqat.quant_cfg import HANDLES, PREFILL_SITES, plan
from jlaqat.quant_fields import parse_cfg
from jlaqat.spec import QuantConfigError, QuantSpec

SITES = {f"layers.{i}.mixer.{handle}": site for i in range(12) for handle, site in HANDLES.items()}
STATE, W = "layers.3.mixer.gdn_state_quantizer", "layers.3.mixer.gdn_w_quantizer"
NVFP4 = {"num_bits": (2, 1), "block_sizes": {-1: 16, "type": "dynamic", "scale_bits": (4, 3)}}
E4M3 = {"num_bits": "e4m3"}


@pytest.mark.parametrize(
    ("cfg", "spec"),
    [
        ({"num_bits": (4, 3)}, QuantSpec.fp8(granularity="tile")),
        ({"num_bits": [4, 3], "axis": [0, 1]}, QuantSpec.fp8(granularity="tile")),
        ({"num_bits": "E4M3", "axis": (0, 1), "type": "dynamic"}, QuantSpec.fp8(granularity="tile")),
        ({"num_bits": "fp8", "block_v": 32}, QuantSpec.fp8(granularity="tile", block_v=32)),
        ({**E4M3, "tile": {"block_v": 128}, "axis": [0, 1]}, QuantSpec.fp8(granularity="tile", block_v=128)),
        ({**E4M3, "tile": True}, QuantSpec.fp8(granularity="tile")),
        ({**E4M3, "type": "static"}, QuantSpec.fp8(granularity="tile", scale="static")),
        (
            {**E4M3, "type": "static", "gradient": "clip"},
            QuantSpec.fp8(granularity="tile", scale="static", gradient="clip"),
        ),
        ({**E4M3, "cadence": 16}, QuantSpec.fp8(granularity="tile", cadence=16)),
        ({**E4M3, "narrow_range": False, "key_row": False}, QuantSpec.fp8(granularity="tile")),
        ({"num_bits": 8, "narrow_range": True}, QuantSpec.int8(granularity="tile")),
        ({"num_bits": "int8", "narrow_range": True, "key_row": 32}, QuantSpec.int8(granularity="key_row")),
        ({"num_bits": "int8", "narrow_range": True, "value_row": True}, QuantSpec.int8(granularity="value_row")),
        ({"num_bits": 8, "narrow_range": True, "head": True}, QuantSpec.int8(granularity="head")),
        ({"num_bits": 4, "narrow_range": True}, QuantSpec.int4(granularity="tile")),
        (
            {"num_bits": "int4", "narrow_range": True, "rounding": "stochastic", "seed": 7},
            QuantSpec.int4(granularity="tile", rounding="stochastic", seed=7),
        ),
        ({"num_bits": (5, 2)}, QuantSpec.fp8_e5m2(granularity="tile")),
        (NVFP4, QuantSpec.nvfp4()),
        (
            {"num_bits": "e2m1", "block_sizes": {"-1": 16, "scale_bits": "e4m3"}, "cadence": 1},
            QuantSpec.nvfp4(cadence=1),
        ),
        ({"num_bits": "e2m1", "block_sizes": {-1: 32, "scale_bits": [8, 0]}}, QuantSpec.mxfp4()),
        ({"num_bits": (4, 3), "block_sizes": {-1: 32, "scale_bits": "e8m0"}}, QuantSpec.mxfp8()),
        ({"num_bits": "bf16"}, QuantSpec.bfloat16()),
        ({"num_bits": (5, 10), "rounding": "stochastic"}, QuantSpec.float16(rounding="stochastic")),
    ],
)
def test_state_settings(cfg, spec):
    assert parse_cfg(cfg, "state") == (spec, True)


@pytest.mark.parametrize(
    ("cfg", "spec"),
    [
        ({"num_bits": (4, 3), "axis": (0, 1, 2)}, QuantSpec.fp8(granularity="row")),
        (E4M3, QuantSpec.fp8(granularity="row")),
        ({"num_bits": "e5m2", "axis": [0, 1, 2]}, QuantSpec.fp8_e5m2(granularity="row")),
        ({"num_bits": 4, "narrow_range": True}, QuantSpec.int4(granularity="row")),
        ({"num_bits": "e2m1", "block_sizes": {-1: 32, "scale_bits": (8, 0)}}, QuantSpec.mxfp4()),
    ],
)
def test_w_settings(cfg, spec):
    assert parse_cfg(cfg, "w") == (spec, True)


@pytest.mark.parametrize("site", ["state", "w"])
@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        ({}, r"num_bits is missing; give one of 8 or int8, \(4, 3\) or e4m3"),
        ({"num_bits": 16}, r"num_bits=16 is not supported; choose one of"),
        ({"num_bits": True}, r"num_bits=True is not supported"),
        ({"num_bits": "fp4"}, r"num_bits='fp4' is not supported"),
        ({"num_bits": None}, r"num_bits=None is not supported"),
        ({"num_bits": 4}, r"num_bits=4 with narrow_range=False.*add narrow_range: true"),
        (
            {**E4M3, "narrow_range": True},
            r"narrow_range=True applies to integers, not to num_bits='e4m3'; leave it out",
        ),
        ({"num_bits": "e2m1"}, r"num_bits='e2m1' needs block scales; give block_sizes"),
        (
            {"num_bits": "e2m1", "block_sizes": {-1: 32, "scale_bits": (4, 3)}},
            r"block_sizes=.* is not supported.*choose .*-1: 16",
        ),
        (
            {"num_bits": "e2m1", "block_sizes": {-2: 16, "scale_bits": (4, 3)}},
            r"block_sizes=.* is not supported \(-1 is the contraction axis\)",
        ),
        (
            {"num_bits": "e2m1", "block_sizes": {-1: 16, "type": "static", "scale_bits": (4, 3)}},
            r"type='static' is not supported; block scales are dynamic",
        ),
        ({"num_bits": "e2m1", "block_sizes": 16}, r"block_sizes=16 .* must be \{axis: size"),
        (
            {"num_bits": 8, "narrow_range": True, "block_sizes": {-1: 32}},
            r"block_sizes=.* is not supported.*write key_row: 32|num_bits=8 is not supported for W",
        ),
        ({**NVFP4, "axis": (0, 1)}, r"axis=\(0, 1\) and block_sizes=.* exclude each other"),
        ({**E4M3, "axis": 0}, r"axis=0 is not supported for"),
        ({**E4M3, "axis": None}, r"axis=None is not supported for"),
        ({**E4M3, "type": "staic"}, r"type='staic' is not supported; choose dynamic"),
        ({**E4M3, "rounding": "floor"}, r"rounding='floor' .* choose one of 'nearest', 'half_away', 'stochastic'"),
        ({**E4M3, "gradient": "clip"}, r"gradient='clip' needs scale='static'"),
        ({**E4M3, "gradient": "zero"}, r"gradient='zero' is not supported"),
        ({**E4M3, "seed": 0.5}, r"seed=0\.5 must be an integer"),
        ({**E4M3, "seed": -1}, r"seed=-1 is out of range"),
        ({**E4M3, "enable": 1}, r"enable=1 must be true or false"),
        ({**E4M3, "narow_range": True}, r"unknown field narow_range=True; did you mean narrow_range"),
        ({**E4M3, "unsigned": False}, r"unknown field unsigned=False; states and W are signed"),
        ({**E4M3, "calibrator": "max"}, r"unknown field calibrator='max'; choose with jlaqat\.calibrate"),
        ({"num_bits": "bf16", "axis": (0, 1)}, r"axis=\(0, 1\) does not apply to bfloat16: a plain cast has no scale"),
        ({"num_bits": "bf16", "type": "static"}, r"scale='static' does not apply to format 'bfloat16'"),
    ],
)
def test_refusals_name_field_value_and_fix(site, cfg, message):
    with pytest.raises(QuantConfigError, match=message):
        parse_cfg(cfg, site)


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        ({"num_bits": 8}, r"num_bits=8 with narrow_range=False is not supported.*add narrow_range: true"),
        ({**E4M3, "axis": (0, 1, 2)}, r"axis=\(0, 1, 2\) is not supported for states; write axis \(0, 1\)"),
        ({**E4M3, "block_v": 48}, r"block_v=48 is not supported; choose one of 16, 32, 64, 128"),
        ({**E4M3, "block_v": "64"}, r"block_v='64' must be an integer, 16, 32, 64 or 128"),
        ({**E4M3, "tile": 64}, r"tile=64 is not supported; write tile: \{block_v: 64\}"),
        ({**E4M3, "tile": {"block_v": 64}, "block_v": 32}, r"block_v=32 and tile=.* disagree"),
        ({**E4M3, "tile": True, "head": True}, r"tile=True and head=True exclude each other"),
        ({**E4M3, "axis": (0, 1), "head": True}, r"axis=\(0, 1\) and head=True exclude each other"),
        ({**E4M3, "value_row": True, "block_v": 64}, r"block_v=64 belongs to tiles, not to value_row"),
        ({**E4M3, "key_row": 16}, r"key_row=16 is not supported; write key_row: 32"),
        ({**E4M3, "value_row": 1}, r"value_row=1 is not supported; write value_row: true"),
        ({**NVFP4, "block_v": 64}, r"block_v=64 does not apply to nvfp4: the format has its own blocks"),
        ({**E4M3, "cadence": 8}, r"cadence=8 is not supported; choose one of 1, 16, 64"),
        ({**E4M3, "cadence": "1"}, r"cadence='1' must be an integer, one of 1, 16, 64"),
    ],
)
def test_refusals_of_states(cfg, message):
    with pytest.raises(QuantConfigError, match=message):
        parse_cfg(cfg, "state")


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        ({"num_bits": 8, "narrow_range": True}, r"num_bits=8 is not supported for W; use e4m3 with axis \(0, 1, 2\)"),
        ({**E4M3, "axis": (0, 1)}, r"axis=\(0, 1\) is not supported for W; write axis \(0, 1, 2\)"),
        ({**E4M3, "block_v": 64}, r"block_v=64 applies to states; W has a scale per token and head"),
        ({**E4M3, "value_row": True}, r"value_row=True applies to states"),
        ({**E4M3, "cadence": 1}, r"cadence=1 applies to states"),
        (NVFP4, r"format='nvfp4' is refused for w"),
    ],
)
def test_refusals_of_w(cfg, message):
    with pytest.raises(QuantConfigError, match=message):
        parse_cfg(cfg, "w")


# ── entries ──


def test_everything_starts_disabled():
    assert not any(s.enabled or s.spec or s.source for s in plan([], SITES).values())


def test_names_are_full_paths_and_later_entries_win():
    settings = plan(
        [
            {"quantizer_name": "*gdn_state_quantizer", "cfg": E4M3},
            {"quantizer_name": "layers.1?.*gdn_state*", "cfg": {"num_bits": 8, "narrow_range": True}},
            {"quantizer_name": "layers.3.mixer.gdn_state_quantizer", "enable": False},
        ],
        SITES,
    )
    formats = {name: s.spec.format for name, s in settings.items() if s.spec}
    assert set(formats) == {n for n in SITES if "gdn_state" in n}
    assert {n for n, f in formats.items() if f == "int8"} == {f"layers.{i}.mixer.gdn_state_quantizer" for i in (10, 11)}
    assert not settings[STATE].enabled and settings[STATE].source == f"quant_cfg[2] '{STATE}'"
    assert settings["layers.2.mixer.gdn_state_quantizer"].source == "quant_cfg[0] '*gdn_state_quantizer'"
    with pytest.raises(QuantConfigError, match="no quantizer matches"):
        plan([{"quantizer_name": "gdn_state_quantizer", "cfg": E4M3}], SITES)  # not a full path


def test_cfg_replaces_the_whole_setting_and_enables():
    first = {"num_bits": "e4m3", "block_v": 32, "rounding": "stochastic", "type": "static"}
    entries = [{"cfg": first}, {"enable": False}, {"cfg": E4M3}]
    settings = plan([{"quantizer_name": STATE, **entry} for entry in entries], SITES)
    assert settings[STATE].enabled and settings[STATE].spec == QuantSpec.fp8(granularity="tile")


def test_enable_alone_only_toggles():
    off, on = {"quantizer_name": "*w_quantizer", "enable": False}, {"quantizer_name": W, "enable": True}
    settings = plan([{"quantizer_name": "*w_quantizer", "cfg": {"num_bits": "e5m2"}}, off, on], SITES)
    assert [n for n, s in settings.items() if s.enabled] == [W]
    assert all(s.spec == QuantSpec.fp8_e5m2(granularity="row") for n, s in settings.items() if SITES[n] == "w")
    with pytest.raises(QuantConfigError, match=f"enable=True, but {W} has no setting yet; give cfg"):
        plan([on], SITES)


def test_cfg_with_enable_false_configures_without_enabling():
    for entry in ({"cfg": E4M3, "enable": False}, {"cfg": {**E4M3, "enable": False}}):
        setting = plan([{"quantizer_name": STATE, **entry}], SITES)[STATE]
        assert setting.spec == QuantSpec.fp8(granularity="tile") and not setting.enabled
    with pytest.raises(QuantConfigError, match=r"cfg\.enable=False and the entry's enable=True disagree"):
        plan([{"quantizer_name": STATE, "cfg": {**E4M3, "enable": False}, "enable": True}], SITES)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("state_fp8", r"quant_cfg\[0\]='state_fp8' is no entry"),
        ({"cfg": E4M3}, r"quant_cfg\[0\]: quantizer_name=None must be a glob"),
        ({"quantizer_name": STATE}, r"says nothing; give cfg .* or enable"),
        ({"quantizer_name": STATE, "cfg": "e4m3"}, r"cfg='e4m3' must be fields and values"),
        ({"quantizer_name": STATE, "enable": "yes"}, r"enable='yes' must be true or false"),
        ({"quantizer": STATE, "cfg": E4M3}, r"unknown field quantizer=.*; did you mean quantizer_name"),
        (
            {"module_name": "*", "cfg": E4M3},
            r"unknown field num_bits='e4m3'; the format is the state quantizer's",
        ),
        (
            {"quantizer_name": STATE, "parent_class": "nn.Linear", "enable": False},
            r"unknown field parent_class=.*matched by name alone",
        ),
        (
            {"quantizer_name": "*", "cfg": {**E4M3, "axis": (0, 1)}},
            r"quant_cfg\[0\] '\*', for layers\.0\.mixer\.gdn_w_quantizer: axis=\(0, 1\)",
        ),
    ],
)
def test_entries_that_cannot_be_read(entry, message):
    with pytest.raises(QuantConfigError, match=message):
        plan([entry], SITES)


@pytest.mark.parametrize("quant_cfg", ["state_fp8", {"quantizer_name": "*", "enable": False}, None])
def test_quant_cfg_must_be_a_list(quant_cfg):
    with pytest.raises(QuantConfigError, match=r"must be a list of entries .*load_recipe"):
        plan(quant_cfg, SITES)


def test_w_beside_a_state_rounded_by_token_is_refused_with_both_names():
    cfg = [{"quantizer_name": "*w_quantizer", "cfg": E4M3}, {"quantizer_name": STATE, "cfg": {**E4M3, "cadence": 1}}]
    with pytest.raises(QuantConfigError, match=rf"{STATE} and {W}: w is formed per chunk.*cadence=1"):
        plan(cfg, SITES)
    plan([*cfg, {"quantizer_name": W, "enable": False}], SITES)


@pytest.mark.parametrize(
    "pattern",
    ["*linear_attn_sites*", "*.lhs_quantizer", "*rhs_quantizer", "*state_read*"]
    + [f"*linear_attn_sites.{site}.rhs_quantizer" for site in PREFILL_SITES],
)
def test_prefill_sites_are_said_to_be_missing(pattern):
    with pytest.raises(
        QuantConfigError, match=r"prefill products .* are not in this version; there are gdn_state_quantizer"
    ):
        plan([{"quantizer_name": pattern, "cfg": E4M3}], SITES)


def test_layers_of_a_stack_share_a_setting():
    sites = {"layers.mixer.gdn_state_quantizer": "state", "layers.mixer.gdn_w_quantizer": "w"}
    stacked = dict.fromkeys(sites, 12)
    assert plan([{"quantizer_name": "layers.*state_quantizer", "cfg": E4M3}], sites, stacked)[
        "layers.mixer.gdn_state_quantizer"
    ].enabled
    for pattern in ("layers.3.mixer.gdn_state_quantizer", "layers.[0-3].*", "*.11.mixer.gdn_w_quantizer"):
        with pytest.raises(QuantConfigError, match=r"picks single layers.*one quantizer for 12 stacked layers.*unroll"):
            plan([{"quantizer_name": pattern, "cfg": E4M3}], sites, stacked)
    with pytest.raises(QuantConfigError, match="no quantizer matches"):
        plan([{"quantizer_name": "layers.12.mixer.gdn_state_quantizer", "cfg": E4M3}], sites, stacked)
