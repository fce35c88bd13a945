"""A model's quantizers as a table to read, as rows to test, and as JSON that a checkpoint keeps and restores."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jlaqat.quant_cfg import HANDLES, Setting, check_pairs
from jlaqat.quantizer import Quantizer, QuantizerVariable, find_quantizers, number_layers, stacked_layers
from jlaqat.spec import QuantConfigError, QuantSpec

FORMAT_VERSION = 2
READABLE_VERSIONS = (1, 2)  # 1 had no policies
ALIASES: dict[str, str] = {}
"""Quantizers that were renamed: old → new, of a whole dotted name or of a handle (its last part). Checkpoints written
under the old name load under the new one; add a line here with every rename."""


def quantizer_table(model: nnx.Module) -> list[dict[str, Any]]:
    """One row per quantizer, disabled ones too, in order of the layers. All values are JSON-able.

    Keys: name, enabled, setting (one line, or None), source (which entry set it), site, spec (fields, or None),
    experimental (no serving kernel runs it), linear_attention (False: a handle that is not linear attention's), scale
    (None for dynamic, else {"min", "max"} with None before calibration), frozen, observing, layers (behind the handle),
    decode (the module's decode policy in one line, on state quantizers; or None), decode_source (which entry set it).
    """
    quantizers = find_quantizers(model)
    stacks = stacked_layers(quantizers)
    return [
        {
            "name": name,
            "enabled": quantizer.enabled,
            "setting": quantizer.spec.describe() if quantizer.spec else None,
            "source": quantizer.source,
            "site": quantizer.site,
            "spec": dataclasses.asdict(quantizer.spec) if quantizer.spec else None,
            "experimental": bool(quantizer.spec and quantizer.spec.experimental),
            "linear_attention": name.rpartition(".")[2] in HANDLES,
            "scale": _scale_range(quantizer),
            "frozen": quantizer.frozen,
            "observing": quantizer.observing,
            "layers": stacks.get(name, 1),
            "decode": quantizer.policy.describe() if quantizer.policy else None,
            "decode_source": quantizer.decode_source,
        }
        for name, quantizer in quantizers.items()
    ]


def summary(model: nnx.Module) -> str:
    """The quantizers of `model` as a table: name, on or off, setting, which entry set it, scale, notes.

    A dry run of a recipe: quantize, then print this. Below the table: the decode policy of each module that has one,
    how many quantizers are on, what a wildcard turned on outside linear attention, and which static scales are still to
    be calibrated.
    """
    rows = quantizer_table(model)
    if not rows:
        return "The model has no quantizers."
    cells = [("quantizer", "on", "setting", "set by", "scale", "notes")]
    for row in rows:
        state = "on" if row["enabled"] else "off"
        setting = (row["setting"] or "–").replace(", scale static", "")  # the scale has a column of its own
        cells.append((row["name"], state, setting, row["source"] or "–", _scale_text(row), _notes(row)))
    lines = _columns(cells)
    policies = [
        (row["name"].rpartition(".")[0] or "(the model)", row["decode"], row["decode_source"])
        for row in rows
        if row["decode"] is not None
    ]
    if policies:
        lines += ["", *_columns([("module", "decode policy", "set by"), *policies])]
    return "\n".join([*lines, "", *_remarks(rows)])


def _columns(cells: Sequence[Sequence[str]]) -> list[str]:
    """Lines with the cells of each column below one another."""
    widths = [max(map(len, column)) for column in zip(*cells)]
    return ["  ".join(text.ljust(width) for text, width in zip(line, widths)).rstrip() for line in cells]


def _scale_range(quantizer: Quantizer) -> dict[str, float | None] | None:
    if not quantizer.static:
        return None
    value = None if quantizer.amax is None else quantizer.amax.get_value()
    if value is None or isinstance(value, (jax.core.Tracer, jax.ShapeDtypeStruct)):
        return {"min": None, "max": None}
    return {"min": float(np.min(value)), "max": float(np.max(value))}


def _scale_text(row: Mapping[str, Any]) -> str:
    if row["spec"] is None:
        return "–"
    if row["scale"] is None:
        return "dynamic"
    low, high = row["scale"]["min"], row["scale"]["max"]
    if low is None:
        return "static, not calibrated"
    return f"static, amax {low:.4g}" + ("" if low == high else f" to {high:.4g}")


def _notes(row: Mapping[str, Any]) -> str:
    notes = {
        "outside linear attention": not row["linear_attention"],
        "experimental": row["experimental"],
        "frozen": row["frozen"],
        "observing": row["observing"],
        f"{row['layers']} layers": row["layers"] > 1,
    }
    return ", ".join(note for note, holds in notes.items() if holds)


def _remarks(rows: list[dict[str, Any]]) -> list[str]:
    on = [row for row in rows if row["enabled"]]
    lines = [f"{len(on)} of {len(rows)} quantizers on, {sum(row['experimental'] for row in on)} of them experimental."]
    outside: dict[str, list[str]] = {}
    for row in on:
        if not row["linear_attention"]:
            outside.setdefault(row["source"], []).append(row["name"])
    lines += [
        f"WARNING: {source} turns on {len(names)} outside linear attention: {', '.join(names)}."
        for source, names in outside.items()
    ]
    uncalibrated = [row["name"] for row in on if row["scale"] and row["scale"]["min"] is None]
    if uncalibrated:
        lines.append(f"To calibrate before use: {', '.join(uncalibrated)}.")
    return lines


# ── checkpoints ────────────────────────────────────────────────────────────────────────────────────────────────────


def quantizer_metadata(model: nnx.Module) -> dict[str, Any]:
    """What a checkpoint must know, beside the arrays, to rebuild the quantizers of `model`: JSON-able.

    {"format_version": 2, "quantizers": {name: {site, num_heads, key_dim, value_dim, stack, spec, enabled, source,
    frozen, observing, calibrated}}, "policies": {module: {"cfg": fields of its decode policy, "source"}}}. The arrays
    are those of `nnx.state(model, QuantizerVariable)`.
    """
    quantizers = find_quantizers(model)
    return {
        "format_version": FORMAT_VERSION,
        "quantizers": {
            name: {
                **_dimensions(quantizer),
                "spec": dataclasses.asdict(quantizer.spec) if quantizer.spec else None,
                "enabled": quantizer.enabled,
                "source": quantizer.source,
                "frozen": quantizer.frozen,
                "observing": quantizer.observing,
                "calibrated": quantizer.amax is not None,
            }
            for name, quantizer in quantizers.items()
        },
        "policies": {
            name.rpartition(".")[0]: {"cfg": dict(quantizer.decode), "source": quantizer.decode_source}
            for name, quantizer in quantizers.items()
            if quantizer.decode is not None
        },
    }


def apply_quantizer_metadata(
    model: nnx.Module, metadata: Mapping[str, Any], *, aliases: Mapping[str, str] | None = None
) -> None:
    """Rebuild the quantizers of `model` as `quantizer_metadata` saw them; their arrays are loaded after this.

    Every saved quantizer must exist in the model with the same dimensions, under its name or the one `aliases`
    (default `ALIASES`) gives it. A quantizer that the checkpoint does not know counts as new to this version and stays
    as it is, if it is disabled. Static scales come out as zeros and statistics as empty, for the arrays to fill.
    Abstract models (`nnx.eval_shape`) work as well.

    Raises QuantConfigError, before anything is changed, listing what only the checkpoint has, what only the model has
    and what differs; and for a format version that this jlaqat does not know.
    """
    saved = _saved(metadata, ALIASES if aliases is None else aliases)
    quantizers = find_quantizers(model)
    _compare(saved, quantizers)
    settings = {}
    for name in quantizers:
        entry = saved.get(name, {"spec": None, "enabled": False, "source": None})
        try:
            spec = None if entry["spec"] is None else QuantSpec(**entry["spec"])
        except (TypeError, QuantConfigError) as error:
            raise QuantConfigError(f"checkpoint quantizers: the setting of {name} does not load: {error}") from error
        settings[name] = Setting(spec=spec, enabled=entry["enabled"], source=entry["source"])
    _add_policies(settings, metadata.get("policies", {}), quantizers)
    check_pairs(settings, {name: quantizer.site for name, quantizer in quantizers.items()})
    for name in saved:
        _restore(quantizers[name], settings[name], saved[name])
    number_layers(quantizers)


def _add_policies(
    settings: dict[str, Setting], policies: Mapping[str, Any], quantizers: Mapping[str, Quantizer]
) -> None:
    """Saved decode policies, into the settings of their modules' state quantizers."""
    modules = {name.rpartition(".")[0]: name for name, x in quantizers.items() if x.site == "state"}
    missing = [module for module in policies if module not in modules]
    if missing:
        raise QuantConfigError(
            f"the checkpoint has decode policies of modules that the model has not: {', '.join(missing)} (the model's "
            f"are {', '.join(modules) or 'none'}). Build the model as it was saved."
        )
    for module, entry in policies.items():
        fields, name = tuple(sorted(entry["cfg"].items())), modules[module]
        settings[name] = dataclasses.replace(settings[name], decode=fields, decode_source=entry["source"])


def _saved(metadata: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, Mapping[str, Any]]:
    """Saved entries by their present names."""
    version = metadata.get("format_version")
    if version not in READABLE_VERSIONS:
        raise QuantConfigError(
            f"checkpoint quantizers: format_version={version!r}, but this jlaqat reads {FORMAT_VERSION} and older; "
            "load it with the version that wrote it, or a newer one."
        )
    saved: dict[str, Mapping[str, Any]] = {}
    for old, entry in metadata["quantizers"].items():
        owner, dot, handle = old.rpartition(".")
        name = aliases.get(old, owner + dot + aliases.get(handle, handle))
        if name in saved:
            raise QuantConfigError(
                f"checkpoint quantizers: two of them are now {name}, one is {old}; mend the aliases."
            )
        saved[name] = entry
    return saved


def _compare(saved: Mapping[str, Mapping[str, Any]], quantizers: Mapping[str, Quantizer]) -> None:
    """Refuse sets of quantizers that differ in more than new, disabled ones."""
    only_saved = [f"{name} ({_state(entry)})" for name, entry in saved.items() if name not in quantizers]
    only_model = [f"{name} (enabled)" for name, x in quantizers.items() if name not in saved and x.enabled]
    differing = [
        f"{name} ({key}: checkpoint {saved[name].get(key)}, model {value})"
        for name, quantizer in quantizers.items()
        if name in saved
        for key, value in _dimensions(quantizer).items()
        if saved[name].get(key) != value
    ]
    parts = {"only in the checkpoint": only_saved, "only in the model": only_model, "different": differing}
    if any(parts.values()):
        listed = "; ".join(f"{what}: {', '.join(names) or 'none'}" for what, names in parts.items())
        raise QuantConfigError(
            f"the checkpoint's quantizers are not the model's: {listed}. Build the model as it was saved, "
            "disable what the checkpoint does not know, or add renamed quantizers to ALIASES."
        )


def _state(entry: Mapping[str, Any]) -> str:
    return "enabled" if entry.get("enabled") else "disabled"


def _dimensions(quantizer: Quantizer) -> dict[str, Any]:
    return {
        "site": quantizer.site,
        "num_heads": quantizer.num_heads,
        "key_dim": quantizer.key_dim,
        "value_dim": quantizer.value_dim,
        "stack": list(quantizer.stack),
    }


def _restore(quantizer: Quantizer, setting: Setting, entry: Mapping[str, Any]) -> None:
    quantizer.configure(setting)
    quantizer.frozen = entry["frozen"]
    abstract = isinstance(quantizer.counter.get_value(), jax.ShapeDtypeStruct)

    def blank(shape: tuple[int, ...]) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.float32) if abstract else jnp.zeros(shape, jnp.float32)

    quantizer.amax = QuantizerVariable(blank(quantizer.scale_shape)) if entry["calibrated"] else None
    if entry["observing"]:
        quantizer.start_observing()
        assert quantizer.stats is not None
        quantizer.stats.set_value(jax.tree.map(lambda x: blank(x.shape), quantizer.stats.get_value()))
