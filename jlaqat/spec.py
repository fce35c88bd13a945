"""What is rounded, where and how: frozen, hashable descriptions. Standard library only: anything may import it.

`QuantSpec` describes one quantizer; `DeltaQuant` gathers the quantizers of one `delta_rule` call and checks that each
fits its site. Both are static under `jax.jit`; what changes between steps (static scales, the counters of stochastic
rounding) travels in `QuantArrays`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

CHUNK_SIZE = 64
"""Tokens in a chunk: the distance between two state roundings of the chunked kernels."""

MIN_LOG_DECAY = -88.0
"""Log decays below count as this: e^-88 = 6e-39 is less than a normal float32, nothing beside what a token writes, and
a sum that held -1e9 would have no digits for the rest."""

BLOCK_V_CHOICES = (16, 32, 64, 128)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """A number format: its largest magnitude and how values are laid out around its scale."""

    max: float  # largest magnitude of the scaled format; inf for plain casts
    kind: str  # "float", "int", "cast"
    exponent_bits: int = 0
    mantissa_bits: int = 0
    block: int = 0  # elements that share a block scale along the contraction; 0: granularity decides
    study: bool = False  # accepted for experiments, shown as experimental by `summary`


FORMATS: dict[str, Format] = {
    "e4m3": Format(max=448.0, kind="float", exponent_bits=4, mantissa_bits=3),
    "e5m2": Format(max=57344.0, kind="float", exponent_bits=5, mantissa_bits=2, study=True),
    "int8": Format(max=127.0, kind="int"),
    "int4": Format(max=7.0, kind="int", study=True),
    "nvfp4": Format(max=6.0, kind="float", exponent_bits=2, mantissa_bits=1, block=16, study=True),
    "mxfp8": Format(max=448.0, kind="float", exponent_bits=4, mantissa_bits=3, block=32, study=True),
    "mxfp4": Format(max=6.0, kind="float", exponent_bits=2, mantissa_bits=1, block=32, study=True),
    "bfloat16": Format(max=float("inf"), kind="cast", study=True),
    "float16": Format(max=float("inf"), kind="cast", study=True),
}

# Granularities of the formats whose scale is not part of the format, by site. The first is the site's default.
GRANULARITIES: dict[str, tuple[str, ...]] = {
    "state": ("tile", "value_row", "key_row", "head", "none"),
    "w": ("row",),
}
KEY_ROW_BLOCK = 32
"""Values that share a scale in a key row (granularity "key_row")."""


class QuantConfigError(ValueError):
    """A quantizer setting that cannot work; the message names the field, the value and the remedy."""


def _choice(field: str, value: object, allowed: Any, remedy: str = "") -> None:
    if value not in allowed:
        listed = ", ".join(repr(a) for a in allowed)
        raise QuantConfigError(
            f"{field}={value!r} is not supported; choose one of {listed}." + (f" {remedy}" if remedy else "")
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantSpec:
    """How one tensor is quantize-dequantized. Build it with a constructor: `QuantSpec.fp8(block_v=32)`.

    Fields (all keyword-only):
      format: a key of `FORMATS`.
      granularity: which elements share a scale; None means the site's default. For a state [K, V]: "tile" (full K ×
        `block_v` columns), "value_row" (one value column over K), "key_row" (one key row × 32 values), "head" (all of
        it). For W [tokens, K]: "row" (one token over K). NVFP4 and MX carry their own blocks: "block". Casts: "none",
        which E4M3 and E5M2 take too: a plain cast without a scale, saturating (decode only).
      block_v: columns of a state tile; part of the arithmetic, never tuned. Only read for granularity "tile".
      rounding: "nearest" (ties to even), "stochastic" (neighbour drawn with probability by distance, from
        counter-based bits, so that remat, sharding and backend change no bit), or for integers "half_away" (nearest,
        ties away from zero; decode only).
      seed: key of the stochastic bits.
      scale: "dynamic" (amax of the tensor at hand) or "static" (a calibrated amax, given in `QuantArrays`).
      gradient: "identity" (straight-through everywhere) or "clip" (zero outside a static scale's range).
      cadence: state only; tokens between two roundings. 64 rounds at chunk boundaries; 1 and 16 run token by token.
      limit: the magnitude that amax is scaled to; None means the format's largest. Decode only, as are:
      scale_dtype: what scales are stored in, "float32" or "float16" (rounded to it, at least 6e-8; codes are still
        found with the float32 scale).
      basis: "identity", or "hadamard32": the state is held, and rounded, under a 32-point orthonormal Hadamard
        transform over its values.

    Raises QuantConfigError for a combination that has no meaning.
    """

    format: str
    granularity: str | None = None
    block_v: int = 64
    rounding: str = "nearest"
    seed: int = 0
    scale: str = "dynamic"
    gradient: str = "identity"
    cadence: int = CHUNK_SIZE
    limit: float | None = None
    scale_dtype: str = "float32"
    basis: str = "identity"

    def __post_init__(self) -> None:
        _choice("format", self.format, tuple(FORMATS))
        own = self.own_granularity
        if own is not None:
            if self.granularity not in (None, own):
                raise QuantConfigError(
                    f"granularity={self.granularity!r} does not fit format {self.format!r}, whose own is {own!r}: "
                    "leave granularity out."
                )
            object.__setattr__(self, "granularity", own)
        else:
            _choice("granularity", self.granularity, (None, "tile", "value_row", "key_row", "head", "none", "row"))
        _choice("block_v", self.block_v, BLOCK_V_CHOICES)
        _choice("rounding", self.rounding, ("nearest", "half_away", "stochastic"))
        _choice("scale", self.scale, ("dynamic", "static"))
        _choice("gradient", self.gradient, ("identity", "clip"))
        _choice("cadence", self.cadence, (1, 16, CHUNK_SIZE))
        if not 0 <= self.seed < 2**32:
            raise QuantConfigError(f"seed={self.seed} is out of range; give an integer in [0, 2**32).")
        if self.scale == "static" and own is not None:
            raise QuantConfigError(
                f"scale='static' does not apply to format {self.format!r}: its scales are part of it; "
                "use scale='dynamic'."
            )
        if self.gradient == "clip" and self.scale != "static":
            raise QuantConfigError(
                "gradient='clip' needs scale='static': a dynamic scale never clips; use gradient='identity'."
            )
        self._check_decode_fields()

    def _check_decode_fields(self) -> None:
        """The fields that only a decode policy reads."""
        _choice("scale_dtype", self.scale_dtype, ("float32", "float16"))
        _choice("basis", self.basis, ("identity", "hadamard32"))
        kind, own = FORMATS[self.format].kind, self.own_granularity
        if self.granularity == "none" and kind == "int":
            raise QuantConfigError(
                f"granularity='none' does not fit format {self.format!r}: integers need a scale; leave it out."
            )
        if self.rounding == "half_away" and kind != "int":
            raise QuantConfigError(f"rounding='half_away' is for integers, not {self.format!r}; use 'nearest'.")
        scaled = own is None and self.granularity != "none"
        if self.limit is not None and not (scaled and 0 < self.limit <= self.max):
            raise QuantConfigError(
                f"limit={self.limit!r} does not fit format {self.format!r} with granularity {self.granularity!r}; "
                f"give a number in (0, {self.max:g}] where a float32 scale is computed, or None."
            )
        if (self.limit is not None or self.granularity == "none" or self.scale_dtype != "float32") and (
            self.scale == "static"
        ):
            raise QuantConfigError("scale='static' takes no limit, granularity='none' or scale_dtype; leave them out.")
        if self.scale_dtype != "float32" and not scaled:
            raise QuantConfigError(
                f"scale_dtype={self.scale_dtype!r} does not fit format {self.format!r} with granularity "
                f"{self.granularity!r}, which has no float32 scale; leave it out."
            )

    @property
    def decode_only(self) -> bool:
        """True for settings that a `DecodePolicy` takes and chunked kernels do not."""
        unscaled = self.granularity == "none" and self.own_granularity is None
        return (
            unscaled
            or self.limit is not None
            or self.rounding == "half_away"
            or self.scale_dtype != "float32"
            or self.basis != "identity"
        )

    @property
    def own_granularity(self) -> str | None:
        """The granularity that the format itself fixes ("block" or "none"), or None where it is a choice."""
        fmt = FORMATS[self.format]
        return "none" if fmt.kind == "cast" else "block" if fmt.block else None

    @property
    def max(self) -> float:
        """M: the largest magnitude of the scaled format."""
        return FORMATS[self.format].max

    @property
    def experimental(self) -> bool:
        """True for settings outside the kernels' contract: study formats, other granularities, cadences, rounding."""
        default = self.granularity in (None, "tile", "row")
        usual = default and self.cadence == CHUNK_SIZE and self.rounding == "nearest" and not self.decode_only
        return FORMATS[self.format].study or not usual

    def describe(self) -> str:
        """One line for tables: format, granularity and whatever differs from the defaults."""
        words = [self.format]
        if self.granularity == "tile":
            words.append(f"tile K×{self.block_v}")
        elif self.granularity == "key_row":
            words.append(f"key_row×{KEY_ROW_BLOCK}")
        elif self.granularity not in (None, "none"):
            words.append(self.granularity if self.granularity != "block" else f"block {FORMATS[self.format].block}")
        words += [
            f"{name} {getattr(self, name)}"
            for name in ("rounding", "scale", "gradient")
            if getattr(self, name) != _DEFAULTS[name]
        ]
        if self.cadence != CHUNK_SIZE:
            words.append(f"every {self.cadence} token{'s' if self.cadence > 1 else ''}")
        if self.granularity == "none" and self.own_granularity is None:
            words.append("no scale")
        if self.limit is not None:
            words.append(f"amax to {self.limit:g}")
        if self.scale_dtype != "float32":
            words.append(f"{self.scale_dtype} scales")
        if self.basis != "identity":
            words.append(self.basis)
        return ", ".join(words)

    @classmethod
    def fp8(cls, **overrides: Any) -> QuantSpec:
        """FP8 E4M3 with a float32 scale."""
        return cls(**{"format": "e4m3", **overrides})

    @classmethod
    def fp8_e5m2(cls, **overrides: Any) -> QuantSpec:
        """FP8 E5M2 with a float32 scale (study)."""
        return cls(**{"format": "e5m2", **overrides})

    @classmethod
    def int8(cls, **overrides: Any) -> QuantSpec:
        """Signed narrow-range INT8 (±127) with a float32 scale."""
        return cls(**{"format": "int8", **overrides})

    @classmethod
    def int4(cls, **overrides: Any) -> QuantSpec:
        """Signed narrow-range INT4 (±7) with a float32 scale (study)."""
        return cls(**{"format": "int4", **overrides})

    @classmethod
    def int8_hadamard32(cls, **overrides: Any) -> QuantSpec:
        """INT8 under a Hadamard transform over 32 values, a float16 scale per key row × 32, ties away (decode only)."""
        own = {"granularity": "key_row", "rounding": "half_away", "scale_dtype": "float16", "basis": "hadamard32"}
        return cls(**{"format": "int8", **own, **overrides})

    @classmethod
    def nvfp4(cls, **overrides: Any) -> QuantSpec:
        """NVFP4: E2M1 in blocks of 16 along the contraction, E4M3 block scales, a float32 tensor scale (study)."""
        return cls(**{"format": "nvfp4", **overrides})

    @classmethod
    def mxfp8(cls, **overrides: Any) -> QuantSpec:
        """MXFP8: E4M3 in blocks of 32 along the contraction with power-of-two block scales (study)."""
        return cls(**{"format": "mxfp8", **overrides})

    @classmethod
    def mxfp4(cls, **overrides: Any) -> QuantSpec:
        """MXFP4: E2M1 in blocks of 32 along the contraction with power-of-two block scales (study)."""
        return cls(**{"format": "mxfp4", **overrides})

    @classmethod
    def bfloat16(cls, **overrides: Any) -> QuantSpec:
        """A plain cast to bfloat16 and back (study)."""
        return cls(**{"format": "bfloat16", **overrides})

    @classmethod
    def float16(cls, **overrides: Any) -> QuantSpec:
        """A plain cast to float16 and back (study)."""
        return cls(**{"format": "float16", **overrides})


_DEFAULTS = {f.name: f.default for f in dataclasses.fields(QuantSpec)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaQuant:
    """The quantizers of one `delta_rule` call: `DeltaQuant()` is the plain, unquantized path.

    state: rounds the recurrent state at every chunk boundary (or every `cadence` tokens), first and last included.
    w: rounds the WY factor w = X(β⊙e^G⊙k), one scale a token and head.
    A site's default granularity is filled in, so that equal settings compare and hash equal. Raises QuantConfigError.
    """

    state: QuantSpec | None = None
    w: QuantSpec | None = None

    def __post_init__(self) -> None:
        for site in ("state", "w"):
            spec = getattr(self, site)
            if spec is not None:
                object.__setattr__(self, site, fit_to_site(spec, site))
                if spec.decode_only:
                    raise QuantConfigError(
                        f"{site}=({spec.describe()}) is for decoding only: chunks round with float32 scales at the "
                        "format's own limit. Give it to a DecodePolicy, or leave out what differs."
                    )
        if self.w is not None and self.state is not None and self.state.cadence != CHUNK_SIZE:
            raise QuantConfigError(
                f"w is formed per chunk, so it cannot be rounded beside a state with cadence={self.state.cadence}; "
                f"use cadence={CHUNK_SIZE} or w=None."
            )

    @property
    def enabled(self) -> bool:
        return self.state is not None or self.w is not None


def fit_to_site(spec: QuantSpec, site: str) -> QuantSpec:
    """`spec` with the site's default granularity filled in. Raises QuantConfigError where the site refuses it."""
    if not isinstance(spec, QuantSpec):
        raise QuantConfigError(
            f"{site}={spec!r} is not a QuantSpec; build one with QuantSpec.fp8(), QuantSpec.int8(), …"
        )
    _choice("site", site, tuple(GRANULARITIES))
    if spec.own_granularity is None:
        granularity = spec.granularity or GRANULARITIES[site][0]
        _choice(f"granularity of the {site} quantizer", granularity, GRANULARITIES[site])
        spec = dataclasses.replace(spec, granularity=granularity)
    if site == "w":
        if spec.format == "nvfp4":
            raise QuantConfigError(
                "format='nvfp4' is refused for w: its tensor amax would span chunks; "
                "use QuantSpec.fp8() or QuantSpec.mxfp4()."
            )
        if spec.cadence != CHUNK_SIZE:
            raise QuantConfigError(
                f"cadence={spec.cadence} applies to states; w is rounded once per chunk of {CHUNK_SIZE}."
            )
    return spec


class QuantArrays(NamedTuple):
    """The traced side of a call's quantizers; a pytree. Every field may be left at its default.

    state_amax: float32, static scales of the state, by granularity: tile [HV, ceil(V/block_v)], value_row [HV, V],
      key_row [HV, K, ceil(V/32)], head [HV].
    w_amax: float32 [HV], static scale of w, one a value head.
    step, layer: uint32 scalars that key stochastic rounding together with the seed, the sequence and the head.
    sequence_offset, head_offset: uint32 scalars added to the local indices, so that a shard of batch or heads
      (under `shard_map`) draws the bits it would draw in the whole.
    """

    state_amax: Any = None
    w_amax: Any = None
    step: Any = 0
    layer: Any = 0
    sequence_offset: Any = 0
    head_offset: Any = 0


def amax_shape(spec: QuantSpec, site: str, *, num_heads: int, key_dim: int, value_dim: int) -> tuple[int, ...]:
    """Shape of a static amax (see `QuantArrays`) for `spec` at `site`; num_heads counts value heads."""
    if site == "w" or spec.granularity == "head":
        return (num_heads,)
    return {
        "tile": (num_heads, -(-value_dim // spec.block_v)),
        "value_row": (num_heads, value_dim),
        "key_row": (num_heads, key_dim, -(-value_dim // KEY_ROW_BLOCK)),
    }.get(str(spec.granularity), ())
