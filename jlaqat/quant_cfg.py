"""quant_cfg: from an ordered list of entries over quantizer names to one setting per quantizer. Imports no arrays.

An entry is `{quantizer_name: glob, cfg?: {...}, enable?: bool}`, or `{module_name: glob, cfg: {...}}` for the decode
policy of modules (see `decode_rules`). Names are full dotted paths, matched with fnmatch; later entries win; `cfg`
replaces the whole setting and enables, `enable` alone toggles. The list mirrors NVIDIA Model Optimizer's, so that its
users' recipes carry over; where this one is stricter, the message says what to write instead.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

from jlaqat.decode_rules import Fields, build_policy, is_rule, plan_rules
from jlaqat.quant_fields import boolean, known_keys, parse_cfg
from jlaqat.spec import DeltaQuant, QuantConfigError, QuantSpec

HANDLES: dict[str, str] = {
    "gdn_state_quantizer": "state",
    "gdn_w_quantizer": "w",
    "kda_state_quantizer": "state",
    "kda_w_quantizer": "w",
}
"""Attribute names of linear attention's quantizers and the site each rounds."""

PREFILL_SITES = (
    "key_interaction",
    "wy_value",
    "wy_key",
    "state_read",
    "state_update",
    "output_state",
    "output_score",
    "output_value",
)
"""Products of the chunked prefill whose operands have handles in Model Optimizer; not in this version."""

_ENTRY_KEYS = ("quantizer_name", "cfg", "enable")
_ENTRY_HINTS = {
    "parent_class": "quantizers are matched by name alone; write the path into quantizer_name.",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """What a quant_cfg says about one quantizer: how it rounds (None: never set), whether it does, who said so.

    A state quantizer holds its module's decode policy besides (without the format, which is spec), and who set that.
    """

    spec: QuantSpec | None = None
    enabled: bool = False
    source: str | None = None
    decode: Fields | None = None
    decode_source: str | None = None


def plan(
    quant_cfg: Sequence[Mapping[str, Any]], sites: Mapping[str, str], stacked: Mapping[str, int] | None = None
) -> dict[str, Setting]:
    """The setting of every quantizer in `sites` (name → "state" | "w") after all entries, in order.

    `stacked` gives, for handles of stacked layers, how many layers share the handle; it only sharpens a message.
    Raises QuantConfigError; nothing is applied here, so a failed call leaves the model as it was.
    """
    if isinstance(quant_cfg, (str, Mapping)) or not isinstance(quant_cfg, Sequence):
        raise QuantConfigError(
            f"quant_cfg={quant_cfg!r:.80} must be a list of entries {{quantizer_name, cfg, enable}}; "
            "for a recipe's name call jlaqat.load_recipe(name)."
        )
    settings = dict.fromkeys(sites, Setting())
    for index, entry in enumerate(quant_cfg):
        if is_rule(entry):
            continue
        pattern, cfg, enable = _read_entry(entry, f"quant_cfg[{index}]")
        source = f"quant_cfg[{index}] {pattern!r}"
        for name in match(pattern, list(sites), source, stacked):
            settings[name] = _apply(settings[name], cfg, enable, name, sites[name], source)
    modules = {name: name.rpartition(".")[0] for name, site in sites.items() if site == "state"}
    rules = plan_rules(quant_cfg, list(dict.fromkeys(modules.values())))
    for name, module in modules.items():
        rule = rules[module]
        settings[name] = dataclasses.replace(settings[name], decode=rule.fields, decode_source=rule.source)
    check_pairs(settings, sites)
    return settings


def _apply(
    old: Setting, cfg: Mapping[str, Any] | None, enable: bool | None, name: str, site: str, source: str
) -> Setting:
    if cfg is None:
        if enable and old.spec is None:
            raise QuantConfigError(
                f"{source}: enable=True, but {name} has no setting yet; give cfg here or in an earlier entry."
            )
        return dataclasses.replace(old, enabled=bool(enable), source=source)
    try:
        spec, enabled = parse_cfg(cfg, site, enable)
    except QuantConfigError as error:
        raise QuantConfigError(f"{source}, for {name}: {error}") from error
    return Setting(spec=spec, enabled=enabled, source=source)


def _read_entry(entry: Any, where: str) -> tuple[str, Mapping[str, Any] | None, bool | None]:
    if not isinstance(entry, Mapping):
        raise QuantConfigError(
            f"{where}={entry!r} is no entry; write {{quantizer_name: glob, cfg: {{...}}}} or "
            "{quantizer_name: glob, enable: true}."
        )
    known_keys(entry, _ENTRY_KEYS, _ENTRY_HINTS, where)
    pattern, cfg, enable = entry.get("quantizer_name"), entry.get("cfg"), entry.get("enable")
    if not isinstance(pattern, str) or not pattern:
        raise QuantConfigError(
            f"{where}: quantizer_name={pattern!r} must be a glob over quantizer names, such as '*gdn_state_quantizer'."
        )
    where = f"{where} {pattern!r}"
    if cfg is None and enable is None:
        raise QuantConfigError(f"{where} says nothing; give cfg (a setting) or enable (true or false).")
    if cfg is not None and not isinstance(cfg, Mapping):
        raise QuantConfigError(f"{where}: cfg={cfg!r} must be fields and values, such as {{num_bits: e4m3}}.")
    return pattern, cfg, None if enable is None else boolean(f"{where}: enable", enable)


def check_pairs(settings: Mapping[str, Setting], sites: Mapping[str, str]) -> None:
    """Refuse enabled settings of one layer that cannot work together (W beside a state rounded token by token)."""
    layers: dict[str, dict[str, str]] = {}
    for name, site in sites.items():
        layers.setdefault(name.removesuffix(f"_{site}_quantizer"), {})[site] = name
    for pair in layers.values():
        specs = {site: settings[name].spec for site, name in pair.items() if settings[name].enabled}
        decode = settings[pair["state"]].decode if "state" in pair else None
        try:
            if decode is not None:
                build_policy(decode, specs.pop("state", None))
            DeltaQuant(**specs)
        except QuantConfigError as error:
            raise QuantConfigError(f"{' and '.join(pair.values())}: {error}") from error


# ── names ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def match(pattern: str, names: Sequence[str], source: str, stacked: Mapping[str, int] | None = None) -> list[str]:
    """Names that the glob matches, at least one. Raises QuantConfigError saying what else could have been meant."""
    if not names:
        raise QuantConfigError(
            f"{source}: the model has no quantizers: it holds no linear attention, or strip_quantizers removed them "
            "(build a new model and load the weights to quantize again)."
        )
    found = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
    if found:
        return found
    if "linear_attn_sites" in pattern or any(fnmatch.fnmatchcase(site, pattern) for site in _prefill_names(names)):
        raise QuantConfigError(
            f"{source}: the operands of the prefill products (linear_attn_sites.<site>.lhs_quantizer and "
            f".rhs_quantizer) are not in this version; there are {', '.join(HANDLES)}."
        )
    for name, layers in (stacked or {}).items():
        if any(fnmatch.fnmatchcase(single, pattern) for single in _unrolled_names(name, layers)):
            raise QuantConfigError(
                f"{source}: the pattern picks single layers, but {name} is one quantizer for {layers} stacked layers, "
                "which share its setting; unroll the layers for settings that differ."
            )
    raise QuantConfigError(f"{source}: no quantizer matches; nearest: {', '.join(_nearest(pattern, names))}.")


def _prefill_names(names: Sequence[str]) -> list[str]:
    """Names that the prefill sites of the same layers would have."""
    owners = dict.fromkeys(name.rpartition(".")[0] for name in names)
    sides = [f"{site}.{side}_quantizer" for site in PREFILL_SITES for side in ("lhs", "rhs")]
    return [f"{owner}.linear_attn_sites.{side}" for owner in owners for side in sides]


def _unrolled_names(name: str, layers: int) -> list[str]:
    """Names that the layers behind a stacked handle could have if unrolled: an index inserted somewhere."""
    parts = name.split(".")
    return [".".join([*parts[:at], str(i), *parts[at:]]) for i in range(layers) for at in range(1, len(parts))]


def _nearest(pattern: str, names: Sequence[str], count: int = 4) -> list[str]:
    """What is most like the pattern. Names repeat in every layer, so they are shown as globs over the layers."""
    globs = dict.fromkeys(".".join("*" if part.isdigit() else part for part in name.split(".")) for name in names)

    def likeness(glob: str) -> float:
        handle, wanted = glob.rpartition(".")[2], pattern.rpartition(".")[2].strip("*")
        whole = difflib.SequenceMatcher(None, pattern, glob).ratio()
        return whole + difflib.SequenceMatcher(None, wanted, handle).ratio()

    return [repr(glob) for glob in sorted(globs, key=likeness, reverse=True)[:count]]
