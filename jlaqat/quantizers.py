"""The quantizers of a model: set, toggle, calibrate, freeze, summarise, save and strip them. The public face.

    jlaqat.quantize(model, jlaqat.load_recipe("state_fp8"))  # then train as before: states are rounded in the kernel
    print(jlaqat.summary(model))

What a quantizer is: `jlaqat.quantizer`. What the entries of a quant_cfg mean: `jlaqat.quant_cfg`, docs/quantizers.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jlaqat.calibration import calibrate as calibrate
from jlaqat.calibration import finish_calibration as finish_calibration
from jlaqat.calibration import freeze as freeze
from jlaqat.calibration import observe as observe
from jlaqat.calibration import quantizer_metrics as quantizer_metrics
from jlaqat.quant_cfg import HANDLES as HANDLES
from jlaqat.quant_cfg import Setting, check_pairs, plan
from jlaqat.quantizer import Quantizer as Quantizer
from jlaqat.quantizer import QuantizerVariable as QuantizerVariable
from jlaqat.quantizer import find_quantizers as find_quantizers
from jlaqat.quantizer import matching, number_layers, stacked_layers, walk
from jlaqat.quantizer import quantized_decode as quantized_decode
from jlaqat.quantizer import quantized_delta_rule as quantized_delta_rule
from jlaqat.quantizer_report import apply_quantizer_metadata as apply_quantizer_metadata
from jlaqat.quantizer_report import quantizer_metadata as quantizer_metadata
from jlaqat.quantizer_report import quantizer_table as quantizer_table
from jlaqat.quantizer_report import summary as summary
from jlaqat.spec import QuantConfigError


def quantize[M: nnx.Module](model: M, quant_cfg: Sequence[Mapping[str, Any]]) -> M:
    """Set the quantizers of `model` by an ordered list of entries, in place; returns the model.

    Entries are `{quantizer_name: glob, cfg?: {...}, enable?: bool}`, and `{module_name: glob, cfg: {...}}` for decode
    policies; docs/quantizers.md and docs/decode.md explain the fields. Every
    quantizer starts disabled and unset, so the list alone decides: a second call with another list replaces the
    settings (calibrated scales survive where a setting does not change), and `[]` disables everything. The list of a
    recipe: `load_recipe(name)`.

    Raises QuantConfigError, before anything is changed, for a pattern that matches nothing, an unknown field or a
    setting that cannot work; the message names the entry, the field, the value and the fix.
    """
    quantizers = find_quantizers(model)
    settings = plan(quant_cfg, {name: x.site for name, x in quantizers.items()}, stacked_layers(quantizers))
    for name, quantizer in quantizers.items():
        quantizer.configure(settings[name])
    number_layers(quantizers)
    return model


def enable_quantizer(model: nnx.Module, pattern: str) -> list[str]:
    """Enable the quantizers that match the glob and have a setting; returns their names.

    Raises QuantConfigError if none matches, none of them has a setting, or two of one layer cannot work together.
    """
    caller = "enable_quantizer"
    matched = matching(model, pattern, caller)
    chosen = {name: x for name, x in matched.items() if x.spec is not None}
    if not chosen:
        names = ", ".join(matched)
        raise QuantConfigError(
            f"{caller} {pattern!r}: {names} never had a setting; call jlaqat.quantize(model, quant_cfg)."
        )
    everything = find_quantizers(model)
    after = {
        name: Setting(spec=x.spec, enabled=x.enabled or name in chosen, decode=x.decode)
        for name, x in everything.items()
    }
    check_pairs(after, {name: x.site for name, x in everything.items()})
    for quantizer in chosen.values():
        quantizer.enabled, quantizer.source = True, f"{caller} {pattern!r}"
    return list(chosen)


def disable_quantizer(model: nnx.Module, pattern: str) -> list[str]:
    """Disable the quantizers that match the glob; settings and scales stay. Returns their names.

    Raises QuantConfigError if none matches.
    """
    matched = matching(model, pattern, "disable_quantizer")
    for quantizer in matched.values():
        quantizer.enabled, quantizer.source = False, f"disable_quantizer {pattern!r}"
        quantizer.stop_observing()
    return list(matched)


def strip_quantizers[M: nnx.Module](model: M) -> M:
    """Remove every quantizer handle (the attributes become None), in place; returns the model.

    What is left is a plain model with plain weights and the plain kernel, bit-equal to a model never quantized.
    """
    for path, _ in walk(model):
        owner: Any = model
        for part in path[:-1]:
            owner = owner[part] if isinstance(part, int) else getattr(owner, part)
        setattr(owner, str(path[-1]), None)
    return model


def set_step(model: nnx.Module, step: int | jax.Array) -> None:
    """Set the training step that keys stochastic rounding, in every quantizer, in place. `step` may be traced."""
    for _, quantizer in walk(model):
        counter = quantizer.counter.get_value()
        quantizer.counter.set_value(counter.at[..., 0].set(jnp.asarray(step).astype(jnp.uint32)))
