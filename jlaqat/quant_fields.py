"""The fields of one quant_cfg `cfg`: spellings of formats and granularities, to a `QuantSpec`. Imports only `spec`.

Every refusal is a QuantConfigError that names the field, the value given and what to write instead.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jlaqat.spec import CHUNK_SIZE, KEY_ROW_BLOCK, QuantConfigError, QuantSpec, fit_to_site

_CFG_KEYS = (
    "num_bits", "type", "axis", "block_sizes", "narrow_range", "enable", "block_v",
    "tile", "key_row", "value_row", "head", "unscaled", "rounding", "seed", "gradient", "cadence",
    "limit", "scale_dtype", "basis",
)  # fmt: skip
_CFG_HINTS = {
    "unsigned": "states and W are signed; leave it out.",
    "fake_quant": "training always emulates; leave it out.",
    "calibrator": "choose with jlaqat.calibrate(model, forward, batches, method='max' | 'percentile' | 'mse').",
    "format": "name the format with num_bits.",
    "granularity": "write tile, key_row, value_row, head, unscaled, axis or block_sizes.",
    "scale": "write type: dynamic or type: static.",
}
# Spellings of num_bits; (8, 7) and (5, 10) are the casts' exponent and mantissa bits. e2m1 needs block_sizes besides.
_NUM_BITS: dict[Any, str] = {
    8: "int8", 4: "int4", (4, 3): "e4m3", (5, 2): "e5m2", (2, 1): "e2m1", (8, 7): "bfloat16", (5, 10): "float16",
    "int8": "int8", "int4": "int4", "e4m3": "e4m3", "fp8": "e4m3", "e5m2": "e5m2", "e2m1": "e2m1",
    "bfloat16": "bfloat16", "bf16": "bfloat16", "float16": "float16", "fp16": "float16",
}  # fmt: skip
_NUM_BITS_LISTED = (
    "8 or int8, (4, 3) or e4m3, and for studies 4 or int4, (5, 2) or e5m2, (2, 1) or e2m1, bfloat16, float16"
)
_SCALE_BITS: dict[Any, tuple[int, int]] = {(4, 3): (4, 3), (8, 0): (8, 0), "e4m3": (4, 3), "e8m0": (8, 0)}
# (element, block, scale bits) → the format that carries its own blocks.
_BLOCK_FORMATS: dict[tuple[Any, ...], str] = {
    ("e2m1", 16, (4, 3)): "nvfp4",
    ("e2m1", 32, (8, 0)): "mxfp4",
    ("e4m3", 32, (8, 0)): "mxfp8",
}
_BLOCKS_LISTED = (
    "num_bits e2m1 with {-1: 16, scale_bits: (4, 3)} (NVFP4), e2m1 with {-1: 32, scale_bits: (8, 0)} (MXFP4), "
    "e4m3 with {-1: 32, scale_bits: (8, 0)} (MXFP8)"
)
_AXIS = {"state": (0, 1), "w": (0, 1, 2)}
_GRANULARITIES = ("tile", "key_row", "value_row", "head", "unscaled")


def parse_cfg(cfg: Mapping[str, Any], site: str, enable: bool | None = None) -> tuple[QuantSpec, bool]:
    """(setting, enabled) that one `cfg` gives a quantizer at `site`; fields left out take their defaults.

    `enable` is the entry's own, beside cfg. Raises QuantConfigError naming the field, the value and the fix.
    """
    known_keys(cfg, _CFG_KEYS, _CFG_HINTS, "cfg")
    if "enable" in cfg:
        inner = boolean("enable", cfg["enable"])
        if enable is not None and enable != inner:
            _refuse(f"cfg.enable={inner} and the entry's enable={enable} disagree; keep one of them.")
        enable = inner
    fmt = _format(cfg, site)
    fields: dict[str, Any] = {"format": fmt, **_granularity(cfg, site, fmt), "scale": cfg.get("type", "dynamic")}
    if fields["scale"] not in ("dynamic", "static"):
        _refuse(
            f"type={cfg['type']!r} is not supported; choose dynamic (the tensor's own amax) or static (calibrated)."
        )
    for key in ("rounding", "gradient", "scale_dtype", "basis"):
        if key in cfg:
            fields[key] = cfg[key]
    if cfg.get("limit") is not None:
        if isinstance(cfg["limit"], bool) or not isinstance(cfg["limit"], (int, float)):
            _refuse(f"limit={cfg['limit']!r} must be a number, the magnitude that amax is scaled to.")
        fields["limit"] = float(cfg["limit"])
    for key, allowed in (("seed", "in [0, 2**32)"), ("cadence", f"one of 1, 16, {CHUNK_SIZE}")):
        if key in cfg:
            fields[key] = integer(key, cfg[key], allowed)
    return fit_to_site(QuantSpec(**fields), site), True if enable is None else enable


def _refuse(message: str) -> NoReturn:
    raise QuantConfigError(message)


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value.lower() if isinstance(value, str) else value


# ── formats ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _format(cfg: Mapping[str, Any], site: str) -> str:
    """The format that num_bits, narrow_range and block_sizes spell together."""
    if "num_bits" not in cfg:
        _refuse(f"num_bits is missing; give one of {_NUM_BITS_LISTED}.")
    bits, key = cfg["num_bits"], _hashable(cfg["num_bits"])
    if isinstance(key, bool) or not isinstance(key, (int, str, tuple)) or key not in _NUM_BITS:
        _refuse(f"num_bits={bits!r} is not supported; choose one of {_NUM_BITS_LISTED}.")
    element = _NUM_BITS[key]
    _check_narrow(element, bits, boolean("narrow_range", cfg.get("narrow_range", False)), site)
    blocks = cfg.get("block_sizes")
    if blocks is None:
        if element == "e2m1":
            _refuse(f"num_bits={bits!r} needs block scales; give block_sizes: {_BLOCKS_LISTED}.")
        return element
    if "axis" in cfg:
        _refuse(f"axis={cfg['axis']!r} and block_sizes={blocks!r} exclude each other; keep one of them.")
    return _block_format(element, bits, blocks)


def _check_narrow(element: str, bits: Any, narrow: bool, site: str) -> None:
    if element not in ("int8", "int4"):
        if narrow:
            _refuse(f"narrow_range={narrow} applies to integers, not to num_bits={bits!r}; leave it out.")
        return
    if site == "w" and element == "int8":
        _refuse(f"num_bits={bits!r} is not supported for W; use e4m3 with axis (0, 1, 2).")
    if not narrow:
        _refuse(
            f"num_bits={bits!r} with narrow_range={narrow} is not supported: the lowest code has no positive mirror, "
            "so rounding would be asymmetric; add narrow_range: true."
        )


def _block_format(element: str, bits: Any, blocks: Any) -> str:
    shown = f"block_sizes={blocks!r} with num_bits={bits!r}"
    if not isinstance(blocks, Mapping):
        _refuse(f"{shown} must be {{axis: size, type: dynamic, scale_bits: (e, m)}}; choose {_BLOCKS_LISTED}.")
    if blocks.get("type", "dynamic") != "dynamic":
        _refuse(f"{shown}: type={blocks['type']!r} is not supported; block scales are dynamic.")
    sizes = {str(key): size for key, size in blocks.items() if key not in ("type", "scale_bits")}
    given = _hashable(blocks.get("scale_bits"))
    scale_bits = _SCALE_BITS.get(given) if isinstance(given, (str, tuple)) else None
    fmt = _BLOCK_FORMATS.get((element, sizes.get("-1"), scale_bits)) if set(sizes) == {"-1"} else None
    if fmt is None:
        advice = f" For float32 scales per key row × {KEY_ROW_BLOCK} values write key_row: {KEY_ROW_BLOCK}."
        _refuse(
            f"{shown} is not supported (-1 is the contraction axis); choose {_BLOCKS_LISTED}."
            + (advice if given is None else "")
        )
    return fmt


# ── granularities ──────────────────────────────────────────────────────────────────────────────────────────────────


def _granularity(cfg: Mapping[str, Any], site: str, fmt: str) -> dict[str, Any]:
    """The fields granularity and block_v that axis, block_v and the spelled-out granularities give; {} for defaults."""
    chosen = [key for key in _GRANULARITIES if cfg.get(key) not in (None, False)]
    own = QuantSpec(format=fmt).own_granularity
    for key in (*chosen, *(key for key in ("axis", "block_v") if key in cfg)):
        if own is not None:
            reason = "a plain cast has no scale" if own == "none" else "the format has its own blocks"
            _refuse(f"{key}={cfg[key]!r} does not apply to {fmt}: {reason}; leave it out.")
        if site == "w" and key != "axis":
            _refuse(f"{key}={cfg[key]!r} applies to states; W has a scale per token and head: write axis (0, 1, 2).")
    if len(chosen) > 1:
        _refuse(f"{' and '.join(f'{key}={cfg[key]!r}' for key in chosen)} exclude each other; keep one of them.")
    _check_axis(cfg, site, chosen)
    block_v = cfg.get("block_v")
    if chosen in ([], ["tile"]):
        if chosen:
            block_v = _tile_block_v(cfg["tile"], block_v)
        found = {"granularity": "tile"} if chosen else {}
        return found if block_v is None else {**found, "block_v": integer("block_v", block_v, "16, 32, 64 or 128")}
    key, value = chosen[0], cfg[chosen[0]]
    if block_v is not None:
        _refuse(f"block_v={block_v!r} belongs to tiles, not to {key}; leave one of them out.")
    if value is not True and not (key == "key_row" and value == KEY_ROW_BLOCK):
        _refuse(f"{key}={value!r} is not supported; write {key}: {KEY_ROW_BLOCK if key == 'key_row' else 'true'}.")
    return {"granularity": "none" if key == "unscaled" else key}


def _check_axis(cfg: Mapping[str, Any], site: str, chosen: Sequence[str]) -> None:
    if "axis" not in cfg:
        return
    axis = cfg["axis"]
    if not isinstance(axis, (list, tuple)) or tuple(axis) != _AXIS[site]:
        what = "states" if site == "state" else "W"
        _refuse(
            f"axis={axis!r} is not supported for {what}; write axis {_AXIS[site]}: the axes with scales of their own."
        )
    if chosen and chosen[0] != "tile":
        _refuse(f"axis={axis!r} and {chosen[0]}={cfg[chosen[0]]!r} exclude each other; keep one of them.")


def _tile_block_v(tile: Any, block_v: Any) -> Any:
    if tile is True:
        return block_v
    if not isinstance(tile, Mapping) or set(tile) != {"block_v"}:
        _refuse(f"tile={tile!r} is not supported; write tile: {{block_v: 64}}.")
    if block_v not in (None, tile["block_v"]):
        _refuse(f"block_v={block_v!r} and tile={tile!r} disagree; keep one of them.")
    return tile["block_v"]


# ── values ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def integer(field: str, value: Any, allowed: str) -> int:
    if type(value) is not int:
        _refuse(f"{field}={value!r} must be an integer, {allowed}.")
    return value


def boolean(field: str, value: Any) -> bool:
    if type(value) is not bool:
        _refuse(f"{field}={value!r} must be true or false.")
    return value


def known_keys(given: Mapping[str, Any], known: Sequence[str], hints: Mapping[str, str], where: str) -> None:
    for key in given:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=2, cutoff=0.5)
            hint = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(known)}."
            _refuse(f"{where}: unknown field {key}={given[key]!r}; {hints.get(str(key), hint)}")
