"""One named quantizer, the call that layers make through theirs, and how a model's quantizers are found and numbered.

A layer owns its handles from construction, disabled (`gdn_state_quantizer`, `gdn_w_quantizer`, `kda_…`); a quantizer's
name is its dotted path in the model. A setting is static structure, so that a jitted step is compiled for it; static
scales, counters and statistics are `QuantizerVariable`s, a type that optimizers and checkpoints can tell apart.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.errors import TraceContextError

from jlaqat import ops
from jlaqat.decode import delta_rule_decode
from jlaqat.decode_carry import DecodeCarry
from jlaqat.decode_policy import DecodePolicy
from jlaqat.decode_rules import Fields, build_policy
from jlaqat.quant_cfg import Setting, match
from jlaqat.rounding import SiteStats, empty_stats, merge_stats
from jlaqat.spec import CHUNK_SIZE, DeltaQuant, QuantArrays, QuantSpec, amax_shape

Array = jax.Array


class QuantizerVariable(nnx.Variable):
    """An array that belongs to a quantizer: static scales, counters, statistics. Never trained."""


@dataclasses.dataclass(frozen=True)
class Label:
    """A quantizer's name, for messages. All labels are equal: layers that differ in theirs alone are still stacked."""

    text: str = dataclasses.field(compare=False)


class Quantizer(nnx.Module):
    """One named quantizer. It holds its setting and arrays; the rounding happens inside `quantized_delta_rule`.

    Static attributes, fixed by the owner: `site` ("state" or "w"), `num_heads` (value heads), `key_dim`, `value_dim`.
    Set by `quantize` and friends: `spec` (None: never configured), `enabled`, `source` (the quant_cfg entry that set
    it), `label` (its name in that model), `frozen` (calibration leaves its scales alone), `observing`; on state
    quantizers `decode` and `decode_source` (the module's decode policy without its format, and the entry that set it;
    see `policy`).
    Variables (in stacked layers, under `nnx.vmap` and `nnx.scan`, each has leading layer dimensions):
      counter: uint32 [2], (step, layer): keys of stochastic rounding.
      amax: float32, static scales in the shape of `amax_shape`; None until calibrated.
      stats: SiteStats while observing, else None.
    """

    def __init__(self, site: str, *, num_heads: int, key_dim: int, value_dim: int):
        if site not in ("state", "w"):
            raise ValueError(f"site={site!r} is not one of 'state', 'w'.")
        self.site, self.num_heads, self.key_dim, self.value_dim = site, num_heads, key_dim, value_dim
        self.spec: QuantSpec | None = None
        self.enabled, self.observing, self.frozen = False, False, False
        self.source: str | None = None
        self.label = Label(f"the {site} quantizer")
        self.decode: Fields | None = None
        self.decode_source: str | None = None
        self.counter = QuantizerVariable(jnp.zeros((2,), jnp.uint32))
        self.amax: QuantizerVariable | None = nnx.data(None)
        self.stats: QuantizerVariable | None = nnx.data(None)

    @property
    def stack(self) -> tuple[int, ...]:
        """Layers that share this handle in stacked layers; () for a handle of its own."""
        return tuple(self.counter.shape[:-1])

    @property
    def static(self) -> bool:
        """Whether the setting asks for calibrated scales."""
        return self.spec is not None and self.spec.scale == "static"

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """Shape of amax for the present setting, layer dimensions of a stack in front."""
        return (*self.stack, *amax_shape(self._spec(), self.site, **self._dims()))

    def configure(self, setting: Setting) -> None:
        """Apply a setting. Static scales are kept where the setting stays the same, and dropped where it changes."""
        if setting.spec != self.spec:
            self.amax, self.frozen = None, False
        self.spec, self.enabled, self.source = setting.spec, setting.enabled, setting.source
        self.decode, self.decode_source = setting.decode, setting.decode_source
        self.stop_observing()

    @property
    def policy(self) -> DecodePolicy | None:
        """The module's decode policy, with the format of this state quantizer; None where no rule gave one."""
        return None if self.decode is None else build_policy(self.decode, self.spec if self.enabled else None)

    def rounding(self) -> QuantSpec:
        """The spec to round with now. Raises ValueError for a static scale that was never calibrated."""
        spec = self._spec()
        if self.stack:
            raise ValueError(f"{self.label.text}, of {self.stack} stacked layers, was called; scan over the layers.")
        if not self.static or self.amax is not None:
            return spec
        if self.observing:  # the first calibration: round as dynamic scales would
            return dataclasses.replace(spec, scale="dynamic", gradient="identity")
        raise ValueError(
            f"{self.label.text}, set by {self.source}, has a static scale that was never calibrated; call "
            "jlaqat.calibrate(model, forward, batches), or give type: dynamic."
        )

    def start_observing(self) -> None:
        """Gather statistics at every call from now on, from nothing."""
        empty = empty_stats(self._spec(), self.site, **self._dims())
        empty = jax.tree.map(lambda x: jnp.zeros((*self.stack, *x.shape), x.dtype), empty)
        self.observing, self.stats = True, QuantizerVariable(empty)

    def add_stats(self, stats: SiteStats) -> None:
        """Add the statistics of one call to those gathered so far.

        Raises NotImplementedError inside a transformation that the model was only closed over by, such as shard_map.
        """
        assert self.stats is not None
        try:
            self.stats.set_value(merge_stats(self.stats.get_value(), stats))
        except TraceContextError as error:
            raise NotImplementedError(
                f"{self.label.text} gathers statistics, but was called inside a transformation (shard_map, scan, "
                "checkpoint, …) that the model came into from outside, where nothing can be written to it. While "
                "calibrating or measuring, call the model outside of it: on sharded batches and parameters under jit."
            ) from error

    def stop_observing(self) -> None:
        self.observing, self.stats = False, None

    def _spec(self) -> QuantSpec:
        if self.spec is None:
            raise ValueError(f"the {self.site} quantizer has no setting; call jlaqat.quantize(model, quant_cfg).")
        return self.spec

    def _dims(self) -> dict[str, int]:
        return {"num_heads": self.num_heads, "key_dim": self.key_dim, "value_dim": self.value_dim}


def quantized_delta_rule(
    state_quantizer: Quantizer | None,
    w_quantizer: Quantizer | None,
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    *,
    scale: float | None = None,
    initial_state: Array | None = None,
    cu_seqlens: Array | None = None,
    prefix_lengths: Any = None,
    lengths: Array | None = None,
    checkpoint_every: int = CHUNK_SIZE,
    backend: str = "auto",
) -> tuple[Array, Array | None]:
    """`jlaqat.delta_rule` with the rounding that a layer's quantizers ask for; returns (o, final_state).

    Arguments, shapes and errors as `jlaqat.delta_rule`. With both quantizers disabled or None this is the plain call,
    bit for bit. While a quantizer observes, its statistics are updated as a side effect (forward only).

    Where a rule gave the module a decode policy this is `jlaqat.delta_rule_decode` instead, which needs prefix_lengths
    (and takes `lengths` and `checkpoint_every`; without a policy all three are left unread); final_state is then None.

    Raises ValueError naming the quantizer and its quant_cfg entry where a static scale or prefix_lengths are missing.
    """
    if state_quantizer is not None and state_quantizer.policy is not None:
        if prefix_lengths is None:
            raise ValueError(
                f"{state_quantizer.label.text}: {state_quantizer.decode_source} set a decode policy, which needs to "
                "know where decoding starts; pass prefix_lengths (in a training config: data.prefix), the tokens of "
                "each sequence that run chunk by chunk, 0 to decode all of them."
            )
        o, _ = quantized_decode(
            state_quantizer,
            w_quantizer,
            q,
            k,
            v,
            g,
            beta,
            initial_state,
            scale=scale,
            cu_seqlens=cu_seqlens,
            prefix_lengths=prefix_lengths,
            lengths=lengths,
            checkpoint_every=checkpoint_every,
            backend=backend,
        )
        return o, None
    pair = {"state": state_quantizer, "w": w_quantizer}
    active = {site: x for site, x in pair.items() if x is not None and x.enabled}
    options: dict[str, Any] = {
        "scale": scale,
        "initial_state": initial_state,
        "cu_seqlens": cu_seqlens,
        "backend": backend,
    }
    if not active:
        return ops.delta_rule(q, k, v, g, beta, **options)
    options["quant"] = DeltaQuant(**{site: x.rounding() for site, x in active.items()})
    options["quant_arrays"] = _quant_arrays(active)
    if not any(x.observing for x in active.values()):
        return ops.delta_rule(q, k, v, g, beta, **options)
    o, final_state, stats = ops.delta_rule_observe(q, k, v, g, beta, **options)
    for site, quantizer in active.items():
        seen = stats[site]
        if quantizer.observing and seen is not None:
            quantizer.add_stats(seen)
    return o, final_state


def quantized_decode(
    state_quantizer: Quantizer | None,
    w_quantizer: Quantizer | None,
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    state: Array | DecodeCarry | None,
    **options: Any,
) -> tuple[Array, DecodeCarry]:
    """`jlaqat.delta_rule_decode` under the policy of a layer's state quantizer; options are its keywords.

    An enabled w quantizer rounds W inside prefixes. Raises NotImplementedError while one of the two gathers statistics.
    """
    policy = None if state_quantizer is None else state_quantizer.policy
    assert state_quantizer is not None and policy is not None, "only modules with a policy decode under one"
    pair = {"state": state_quantizer, "w": w_quantizer}
    active = {site: x for site, x in pair.items() if x is not None and x.enabled}
    if any(x.observing for x in active.values()):
        raise NotImplementedError(
            f"{state_quantizer.label.text}: {state_quantizer.decode_source} set a decode policy, under which no "
            "statistics are gathered; calibrate and observe with a quant_cfg without module_name entries."
        )
    w = active["w"].rounding() if "w" in active else None
    return delta_rule_decode(q, k, v, g, beta, state, quant=policy, w=w, quant_arrays=_quant_arrays(active), **options)


def _quant_arrays(active: Mapping[str, Quantizer]) -> QuantArrays:
    """Static scales, and the counter if anything rounds stochastically."""
    arrays: dict[str, Any] = {f"{site}_amax": x.amax.get_value() for site, x in active.items() if x.amax is not None}
    for quantizer in active.values():
        if quantizer.spec is not None and quantizer.spec.rounding == "stochastic":
            counter = quantizer.counter.get_value()
            arrays |= {"step": counter[0], "layer": counter[1]}
    return QuantArrays(**arrays)


# ── a model's quantizers ───────────────────────────────────────────────────────────────────────────────────────────


def walk(model: nnx.Module) -> list[tuple[tuple[Any, ...], Quantizer]]:
    """(path, quantizer) of every quantizer, in order of the layers: 2 before 10."""

    def order(item: tuple[tuple[Any, ...], Quantizer]) -> list[tuple[bool, int, str]]:
        return [(not str(p).isdigit(), int(p) if str(p).isdigit() else 0, str(p)) for p in item[0]]

    return sorted(((p, m) for p, m in nnx.iter_modules(model) if isinstance(m, Quantizer)), key=order)


def find_quantizers(model: nnx.Module) -> dict[str, Quantizer]:
    """Full dotted name → quantizer, in order of the layers."""
    return {".".join(map(str, path)): quantizer for path, quantizer in walk(model)}


def stacked_layers(quantizers: Mapping[str, Quantizer]) -> dict[str, int]:
    """Name → number of layers, for handles of stacked layers."""
    return {name: int(np.prod(x.stack)) for name, x in quantizers.items() if x.stack}


def matching(model: nnx.Module, pattern: str, caller: str) -> dict[str, Quantizer]:
    """The quantizers that the glob matches, at least one. Raises QuantConfigError with the nearest names."""
    quantizers = find_quantizers(model)
    names = match(pattern, list(quantizers), f"{caller} {pattern!r}", stacked_layers(quantizers))
    return {name: quantizers[name] for name in names}


def per_layer_names(name: str, quantizer: Quantizer) -> Iterator[tuple[tuple[int, ...], str]]:
    """(index into the stack, name) of each layer behind a handle: its name, or `layers.gdn_state_quantizer[3]`."""
    for index in np.ndindex(*quantizer.stack):
        yield index, name + "".join(f"[{i}]" for i in index)


def number_layers(quantizers: Mapping[str, Quantizer]) -> None:
    """Write every layer's index into its counters, in order of execution, the same for stacked and unrolled layers.

    And every quantizer's name into its label.

    A handle of L stacked layers stands for L of them: with P such handles in the scanned unit, the one at position j
    holds the indices first + j, first + j + P, first + j + 2P, …
    """
    units: dict[tuple[str, tuple[int, ...]], dict[str, list[Quantizer]]] = {}
    for name, quantizer in quantizers.items():
        quantizer.label = Label(name)
        owner = name.removesuffix(f"_{quantizer.site}_quantizer")  # the quantizers of one layer share its index
        # Stacked layers below one attribute are scanned together; a layer of its own is a unit of one.
        unit = owner.partition(".")[0] if quantizer.stack else owner
        units.setdefault((unit, quantizer.stack), {}).setdefault(owner, []).append(quantizer)
    first = 0
    for (_, stack), owners in units.items():
        repeats = int(np.prod(stack))
        for position, members in enumerate(owners.values()):
            layer = first + position + len(owners) * np.arange(repeats).reshape(stack)
            for quantizer in members:
                counter = quantizer.counter.get_value()
                if not isinstance(counter, jax.ShapeDtypeStruct):  # an abstract model has no values to set
                    quantizer.counter.set_value(counter.at[..., 1].set(layer.astype(np.uint32)))
        first += repeats * len(owners)
