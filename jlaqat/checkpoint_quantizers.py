"""Quantizers on restore: whether a checkpoint's are the model's, what is done where not, and which arrays to read."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

from flax import nnx

from jlaqat.checkpoint_tree import CheckpointMismatchError, compare, describe, tree_of
from jlaqat.quantizer_report import ALIASES
from jlaqat.quantizers import QuantizerVariable, apply_quantizer_metadata, find_quantizers, quantizer_metadata
from jlaqat.spec import QuantConfigError, QuantSpec

logger = logging.getLogger("jlaqat")

MODES = ("match", "checkpoint", "model")


def recreate_quantizers(
    model: nnx.Module, saved: Mapping[str, Any], arrays: Mapping[str, Any], *, mode: str, where: str
) -> tuple[dict[str, str], str]:
    """Brings the settings of the model's quantizers to the checkpoint's as `mode` says (see `Checkpointer.restore`).

    saved: the checkpoint's `quantizer_metadata`; arrays: the arrays saved in its item `quantizers`, by name.
    Returns the arrays to read (name in the model → name in the checkpoint) and a sentence on what was done. Raises
    CheckpointMismatchError, before anything is changed, listing both sides.
    """
    if mode not in MODES:
        raise ValueError(f"quantizers={mode!r} is unknown; choose one of {', '.join(map(repr, MODES))}.")
    present = {name: _present_name(name) for name in saved["quantizers"]}
    theirs = {present[name]: entry for name, entry in saved["quantizers"].items()}
    ours = quantizer_metadata(model)
    if mode == "model":
        return {}, "the checkpoint's quantizers were left unread, as asked."
    on = _enabled(theirs, saved.get("policies", {}))
    if mode == "match" and not on:
        if words := _filled_in(model):
            logger.warning("%s: %s", where, words)
            return {}, words
        if not ours["quantizers"]:
            return {}, "neither side has quantizers."
    wanted = _enabled(ours["quantizers"], ours["policies"])
    if mode == "match" and (lines := compare("quantizers that are on", on, wanted)):
        remedy = (
            '  Set the model\'s quantizers as in the checkpoint, restore with quantizers="checkpoint" to take its '
            "or with quantizers=\"model\" to keep the model's and leave the checkpoint's unread. A training run goes "
            "on with the quant that it had; for another, start a new directory with init_from."
        )
        raise CheckpointMismatchError("\n".join([f"the quantizers of {where} are not the model's:", *lines, remedy]))
    try:
        apply_quantizer_metadata(model, saved)
    except QuantConfigError as error:
        raise CheckpointMismatchError(f'{where}: {error} Or restore with quantizers="model".') from error
    return _names_to_read(
        model, present, arrays, where
    ), f"{len(_enabled(theirs, {}))} quantizers on, as in the checkpoint."


def _present_name(name: str) -> str:
    owner, dot, handle = name.rpartition(".")
    return ALIASES.get(name, owner + dot + ALIASES.get(handle, handle))


def _enabled(entries: Mapping[str, Mapping[str, Any]], policies: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Name → setting in words, of the quantizers that are on and of the modules that have a decode policy."""
    on = {name: _words(entry["spec"]) for name, entry in entries.items() if entry["enabled"]}
    return on | {f"{module} decode policy": f"({dict(entry['cfg'])})" for module, entry in policies.items()}


def _words(spec: Mapping[str, Any] | None) -> str:
    if spec is None:
        return "no setting"
    try:
        return f"({QuantSpec(**spec).describe()})"
    except (TypeError, QuantConfigError):  # written by another version; apply_quantizer_metadata will say what is wrong
        return f"({spec})"


def _filled_in(model: nnx.Module) -> str:
    """What to say of quantizers that an unquantized checkpoint leaves as the model has them; empty if none is on."""
    on = {name: q for name, q in find_quantizers(model).items() if q.enabled}
    if not on:
        return ""
    words = f"the checkpoint has no quantizer on; {len(on)} of the model are filled in as they are set."
    missing = [name for name, q in on.items() if q.static and q.amax is None]
    if missing:
        words += f" Static scales not calibrated yet, call jlaqat.calibrate: {', '.join(missing)}."
    return words


def _names_to_read(
    model: nnx.Module, present: Mapping[str, str], arrays: Mapping[str, Any], where: str
) -> dict[str, str]:
    """Every array of a quantizer that the checkpoint knows: name in the model → name in the checkpoint.

    present: the checkpoint's quantizers, name there → name now.
    """
    known = set(present.values())
    wanted = {n: x for n, x in tree_of(nnx.state(model, QuantizerVariable)).items() if _owner(n, known)}
    sources = {}
    for name in arrays:
        owner = _owner(name, present)
        sources[present.get(owner, owner) + name[len(owner) :]] = name
    saved = describe({name: arrays[source] for name, source in sources.items()})
    if lines := compare("quantizers", saved, describe(wanted)):
        raise CheckpointMismatchError("\n".join([f"{where} has other quantizer arrays than it describes:", *lines]))
    return {name: sources[name] for name in wanted}


def _owner(array: str, quantizers: Collection[str]) -> str:
    """The quantizer that an array belongs to (the prefix of its name that is one), or ""."""
    words = array.split(".")
    prefixes = (".".join(words[:n]) for n in range(len(words) - 1, 0, -1))
    return next((prefix for prefix in prefixes if prefix in quantizers), "")
