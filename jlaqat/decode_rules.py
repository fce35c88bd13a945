"""Decode policies by module: entries `{module_name: glob, cfg: {...}}` of a quant_cfg. Imports no arrays.

The fields of cfg are those of `DecodePolicy` but `state`: what format the state has is said by the module's state
quantizer, when it is rounded by the rule. Entries stand in the same ordered list as those over quantizers; the last
entry that matches a module decides alone, nothing is merged.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jlaqat.decode_policy import PRESETS, DecodePolicy
from jlaqat.quant_fields import known_keys
from jlaqat.spec import QuantConfigError, QuantSpec

Fields = tuple[tuple[str, Any], ...]
"""A policy's fields but `state`, as a rule gives them: hashable, so that a model's structure can hold them."""

FIELDS = tuple(f.name for f in dataclasses.fields(DecodePolicy) if f.name != "state")
_FORMAT = "the format is the state quantizer's: set it with quantizer_name and cfg."
_HINTS = {
    "state": _FORMAT,
    "num_bits": _FORMAT,
    "preset": "write the fields out, or start from a recipe: " + ", ".join(f"decode_{name}" for name in PRESETS) + ".",
    "replay": "write window, factor_qdq and encoding beside mode: replay.",
    "state_codec": "the format is the state quantizer's: basis: hadamard32 there, with rounding and scale_dtype.",
    "backend": "choose it in the model's config or the call.",
}


@dataclasses.dataclass(frozen=True)
class Rule:
    """What a quant_cfg says about one module's decoding: a policy's fields (None: no policy), and which entry did."""

    fields: Fields | None = None
    source: str | None = None


def is_rule(entry: Any) -> bool:
    return isinstance(entry, Mapping) and "module_name" in entry


def plan_rules(quant_cfg: Iterable[Any], modules: Sequence[str]) -> dict[str, Rule]:
    """The rule of every module (the owners of state quantizers, by dotted name) after all entries, in order.

    Raises QuantConfigError for an entry that matches nothing, with the nearest names, or says nothing usable.
    """
    rules = dict.fromkeys(modules, Rule())
    for index, entry in enumerate(quant_cfg):
        if not is_rule(entry):
            continue
        pattern, fields = _read(entry, f"quant_cfg[{index}]")
        source = f"quant_cfg[{index}] {pattern!r}"
        found = [name for name in modules if fnmatch.fnmatchcase(name, pattern)]
        if not found:
            near = difflib.get_close_matches(pattern, modules, n=4, cutoff=0.0)
            listed = ", ".join(map(repr, near)) or "none: the model has no linear attention with quantizers"
            raise QuantConfigError(f"{source}: no module matches; nearest: {listed}.")
        rules |= {name: Rule(fields, source) for name in found}
    return rules


def _read(entry: Mapping[str, Any], where: str) -> tuple[str, Fields | None]:
    hints = {"quantizer_name": "a rule is about modules; write two entries.", "decode": "write the fields under cfg."}
    known_keys(entry, ("module_name", "cfg", "enable"), hints, where)
    pattern, cfg = entry["module_name"], entry.get("cfg")
    if not isinstance(pattern, str) or not pattern:
        raise QuantConfigError(
            f"{where}: module_name={pattern!r} must be a glob over module names, such as 'layers.*.mixer'."
        )
    where = f"{where} {pattern!r}"
    enable = entry.get("enable", True)
    if type(enable) is not bool:
        raise QuantConfigError(
            f"{where}: enable={enable!r} must be true or false: false takes the policy away; to give one, write cfg "
            "and leave enable out."
        )
    if not enable:
        if cfg is not None:
            raise QuantConfigError(f"{where}: enable=False takes the policy away, but cfg gives one; keep one of them.")
        return pattern, None
    if not isinstance(cfg, Mapping):
        raise QuantConfigError(
            f"{where}: cfg={cfg!r} must be the fields of a policy, such as {{mode: replay, window: 16}}; {{}} rounds "
            "after every token, enable: false takes a policy away."
        )
    known_keys(cfg, FIELDS, _HINTS, where)
    try:
        build_policy(tuple(cfg.items()), QuantSpec.fp8())  # the fields by themselves; with its own format later
    except QuantConfigError as error:
        raise QuantConfigError(f"{where}: {error}") from error
    return pattern, tuple(sorted(cfg.items()))


def build_policy(fields: Fields, state: QuantSpec | None) -> DecodePolicy:
    """The policy of a rule for a module whose state quantizer rounds as `state` says.

    None stands for a disabled quantizer: the state stays in float32, and fields that need a format are left out.
    """
    given = dict(fields)
    if state is None:
        given = {name: value for name, value in given.items() if name not in ("prefill_state_qdq", "error_feedback")}
        if given.get("mode") == "handoff":
            del given["mode"]
    return DecodePolicy(state=state, **given)


def fields_of(policy: DecodePolicy) -> dict[str, Any]:
    """The fields that a rule must give for this policy: those that differ from their defaults."""
    defaults = DecodePolicy()
    return {name: getattr(policy, name) for name in FIELDS if getattr(policy, name) != getattr(defaults, name)}
