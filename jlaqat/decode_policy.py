"""When a decoder rounds its state and what it reads: `DecodePolicy`, and presets for what serving engines do.

A `QuantSpec` says how a state is rounded; a policy says when, token by token: D = e^g, R = D·S, r = β(v − Rᵀk),
W = R + k rᵀ, and then the policy decides what becomes of W. Frozen, hashable, standard library only. What each field
means in the recurrence: docs/decode.md.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from typing import Any

from jlaqat.spec import CHUNK_SIZE, DeltaQuant, QuantConfigError, QuantSpec, fit_to_site

MODES = ("token", "replay", "handoff")
MAX_WINDOW, DEFAULT_WINDOW = 64, 8
CODE_FORMATS = ("e4m3", "e5m2", "int8", "int4", "bfloat16", "float16")
"""Formats whose rounded states are kept as codes (and scales); the others keep float32 values."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodePolicy:
    """How a decoder keeps the recurrent state. `DecodePolicy()` rounds nothing.

    Fields (all keyword-only):
      state: how the state is rounded, a QuantSpec with dynamic scales; None keeps it in float32.
      mode: when it is rounded. "token": after every token's write. "replay": a checkpoint and a ring of the updates
        (k, r, g) since are kept; after `window` updates the state is rebuilt, rounded once and becomes the checkpoint.
        "handoff": at the hand-off alone, float32 from there on.
      window: updates between two roundings, 1 to 64; replay only (8 unless given).
      ring_dtype: what the ring keeps k and r in, "float32" or "bfloat16"; g is float32. Replay only.
      factor_qdq: the ring keeps k and r in E4M3 instead, a scale per key and per `block_v` values of r. Replay only.
      encoding: ring entries are encoded "once", when they enter, or are encoded again at every token ("reencode"):
        the same bits, since both roundings leave what they rounded alone. Replay only.
      readout: what a token's output reads. "working": W, before it is rounded. "stored": what the next token will see.
      quantize_initial: the state is rounded once when it is handed over: an initial state, and the state that a prefix
        leaves. Where False, the carry between calls holds float32 values.
      prefill_state_qdq: inside a prefix the state is rounded at chunk boundaries, as `DeltaQuant(state=...)` does.
      decay_log_step: the grid that g is rounded to, ties to even, with an identity gradient; None leaves g as it is.
        Decoded tokens only.
      error_feedback: what a rounding lost is added before the next one: x = W + e is rounded, e becomes x − Q(x).

    Raises QuantConfigError for a combination that has no meaning.
    """

    state: QuantSpec | None = None
    mode: str = "token"
    window: int | None = None
    ring_dtype: str = "float32"
    factor_qdq: bool = False
    encoding: str = "once"
    readout: str = "working"
    quantize_initial: bool = True
    prefill_state_qdq: bool = False
    decay_log_step: float | None = None
    error_feedback: bool = False

    def __post_init__(self) -> None:
        for field, allowed in _CHOICES.items():
            if getattr(self, field) not in allowed:
                listed = ", ".join(map(repr, allowed))
                raise QuantConfigError(f"{field}={getattr(self, field)!r} is not supported; choose one of {listed}.")
        for field in ("factor_qdq", "quantize_initial", "prefill_state_qdq", "error_feedback"):
            if type(getattr(self, field)) is not bool:
                raise QuantConfigError(f"{field}={getattr(self, field)!r} must be True or False.")
        self._check_replay()
        if self.state is not None:
            self._check_state(self.state)
        self._check_together()

    def _check_replay(self) -> None:
        if self.mode != "replay":
            for field in _REPLAY_FIELDS:
                if getattr(self, field) != _DEFAULTS[field]:
                    raise QuantConfigError(
                        f"{field}={getattr(self, field)!r} belongs to mode='replay', but mode is {self.mode!r}; "
                        f"set mode='replay' or leave {field} out."
                    )
            return
        window = DEFAULT_WINDOW if self.window is None else self.window
        if type(window) is not int or not 1 <= window <= MAX_WINDOW:
            raise QuantConfigError(f"window={window!r} is out of range; give an integer from 1 to {MAX_WINDOW}.")
        object.__setattr__(self, "window", window)
        if self.factor_qdq and self.ring_dtype != "float32":
            raise QuantConfigError(
                f"factor_qdq=True keeps ring entries in E4M3, so ring_dtype={self.ring_dtype!r} has no meaning beside "
                "it; keep one of them."
            )

    def _check_state(self, spec: QuantSpec) -> None:
        spec = fit_to_site(spec, "state")
        object.__setattr__(self, "state", spec)
        if spec.scale != "dynamic":
            raise QuantConfigError(f"state has scale={spec.scale!r}; a decode policy takes dynamic scales only.")
        if spec.cadence != CHUNK_SIZE:
            raise QuantConfigError(
                f"state has cadence={spec.cadence}, but a policy says itself when to round: leave cadence out, and use "
                "mode='token' for every token or mode='replay' with a window."
            )
        if spec.basis == "hadamard32" and spec.granularity == "tile" and spec.block_v < 32:
            raise QuantConfigError(
                f"basis='hadamard32' mixes 32 values, but block_v={spec.block_v} gives fewer a scale; use block_v=32 "
                "or more, or granularity='key_row'."
            )

    def _check_together(self) -> None:
        if self.decay_log_step is not None:
            step = self.decay_log_step
            if isinstance(step, bool) or not isinstance(step, (int, float)) or not 0 < step < math.inf:
                raise QuantConfigError(
                    f"decay_log_step={step!r} must be a positive finite number, such as 1/256, or None."
                )
        if self.state is None:
            for field in ("prefill_state_qdq", "error_feedback"):
                if getattr(self, field):
                    raise QuantConfigError(f"{field}=True rounds with the state's format, but state is None; give one.")
        if self.mode == "handoff" and (self.state is None or not self.quantize_initial or self.error_feedback):
            raise QuantConfigError(
                "mode='handoff' rounds the state once, when it is handed over: it needs a state format and "
                f"quantize_initial=True, and no error_feedback (state={self.state and self.state.describe()!r}, "
                f"quantize_initial={self.quantize_initial}, error_feedback={self.error_feedback})."
            )
        if self.prefill_state_qdq:
            if self.state is not None and self.state.format == "nvfp4":
                raise QuantConfigError(
                    "prefill_state_qdq=True with format 'nvfp4' would round twice at the hand-off, which changes NVFP4 "
                    "states; use prefill_state_qdq=False."
                )
            try:
                DeltaQuant(state=self.state)
            except QuantConfigError as error:
                raise QuantConfigError(f"prefill_state_qdq=True needs a state format for chunks: {error}") from error

    @property
    def enabled(self) -> bool:
        """Whether anything differs from plain float32 decoding."""
        return dataclasses.replace(self, prefill_state_qdq=False) != DecodePolicy()

    @property
    def keeps_codes(self) -> bool:
        """Whether the carry between calls holds codes of the format; else it holds float32 values."""
        always_rounded = self.mode != "handoff" and self.quantize_initial
        return self.state is not None and always_rounded and self.state.format in CODE_FORMATS

    @property
    def rotated(self) -> bool:
        """Whether the state is held under the Hadamard transform."""
        return self.state is not None and self.state.basis == "hadamard32"

    @property
    def ring_length(self) -> int:
        """Entries of the ring; 0 without one."""
        return self.window or 0

    @property
    def factor_block(self) -> int:
        """Values of r that share a scale under factor_qdq."""
        return self.state.block_v if self.state is not None else 64

    @property
    def signature(self) -> DecodePolicy:
        """What two calls must share to be parts of one decode: the policy, but for what happens inside a prefix."""
        return dataclasses.replace(self, prefill_state_qdq=False)

    def describe(self) -> str:
        """One line for tables: when the state is rounded, then what differs from the defaults."""
        every = {
            "token": "every token",
            "replay": f"every {self.window} tokens by replay",
            "handoff": "at the hand-off",
        }
        words = [f"{self.state.describe() if self.state else 'float32'}, {every[self.mode]}"]
        words += [
            f"{field} {getattr(self, field)}"
            for field, default in _DEFAULTS.items()
            if field not in ("state", "mode", "window") and getattr(self, field) != default
        ]
        return ", ".join(words)

    def differences(self, other: DecodePolicy) -> str:
        """'field: mine against theirs' of every field that differs."""
        fields = [field for field in _DEFAULTS if getattr(self, field) != getattr(other, field)]
        return "; ".join(f"{field}: {getattr(self, field)!r} against {getattr(other, field)!r}" for field in fields)

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> DecodePolicy:
        """The policy of a preset (`PRESETS` lists them with their sources), with fields replaced.

        Overrides are fields of the policy, or of its state's QuantSpec: `preset("vllm_int8", rounding="stochastic")`.
        Raises QuantConfigError for an unknown name or field, with the nearest ones.
        """
        if name not in PRESETS:
            near = difflib.get_close_matches(name, PRESETS, n=3, cutoff=0.4) or list(PRESETS)
            raise QuantConfigError(f"preset {name!r} is unknown; choose {' or '.join(map(repr, near))}.")
        policy = PRESETS[name].policy
        own = {key: value for key, value in overrides.items() if key in _DEFAULTS}
        spec = {key: value for key, value in overrides.items() if key not in own}
        unknown = [key for key in spec if key not in _SPEC_FIELDS]
        if unknown:
            near = difflib.get_close_matches(unknown[0], [*_DEFAULTS, *_SPEC_FIELDS], n=3, cutoff=0.4)
            raise QuantConfigError(
                f"preset {name!r}: {unknown[0]} is no field of a policy or its state"
                + (f"; did you mean {' or '.join(near)}?" if near else ".")
            )
        if own.get("mode", policy.mode) != "replay":
            own = {field: _DEFAULTS[field] for field in _REPLAY_FIELDS} | own
        policy = dataclasses.replace(policy, **own)
        if spec:
            if policy.state is None:
                raise QuantConfigError(
                    f"preset {name!r} has no state format, so {next(iter(spec))} has no place in it."
                )
            policy = dataclasses.replace(policy, state=dataclasses.replace(policy.state, **spec))
        return policy


_REPLAY_FIELDS = ("window", "ring_dtype", "factor_qdq", "encoding")
_CHOICES = {
    "mode": MODES,
    "ring_dtype": ("float32", "bfloat16"),
    "encoding": ("once", "reencode"),
    "readout": ("working", "stored"),
}
_DEFAULTS = {f.name: f.default for f in dataclasses.fields(DecodePolicy)}
_SPEC_FIELDS = tuple(f.name for f in dataclasses.fields(QuantSpec))


@dataclasses.dataclass(frozen=True)
class Preset:
    """A policy, where the behaviour was seen, and what to know about it."""

    policy: DecodePolicy
    source: str
    note: str


# What engines do is taken from public threads; the names are ours. Of what a thread leaves open, the note says what
# was chosen here.
PRESETS: dict[str, Preset] = {
    "modelopt": Preset(
        DecodePolicy(state=QuantSpec.fp8(), readout="stored"),
        "NVIDIA Model Optimizer, linear-attention decode policy (its defaults)",
        "E4M3, a scale per full K × 64 values, rounded at the hand-off and after every write; outputs read the result.",
    ),
    "modelopt_int8": Preset(
        DecodePolicy(state=QuantSpec.int8(granularity="key_row"), readout="stored"),
        "NVIDIA Model Optimizer, the later revision of its linear-attention decode policy",
        "INT8, a scale per key row × 32 values. mode='replay' rounds at every refresh instead; "
        "state=QuantSpec.int8_hadamard32() is its rotated codec.",
    ),
    "serving": Preset(
        DecodePolicy(state=QuantSpec.int8(granularity="key_row"), mode="replay", ring_dtype="bfloat16"),
        "what replaying engines have in common (SGLang PR 28451, vLLM PR 52962)",
        "INT8 per key row × 32 values (format='e4m3' for FP8), a bfloat16 ring of 8, a fresh prefix without rounding.",
    ),
    "vllm_fp16_sr": Preset(
        DecodePolicy(state=QuantSpec.float16(rounding="stochastic")),
        "vLLM PR 35753 (merged)",
        "float16 with stochastic rounding after every token. The engine's Philox counters are its own: the same "
        "distribution, other draws.",
    ),
    "vllm_int8": Preset(
        DecodePolicy(state=QuantSpec.int8(granularity="value_row")),
        "vLLM PR 40012, PR 52962 (open)",
        "INT8, a float32 scale amax/127 per value row over K, every token; rounding='stochastic' is the PRs' option.",
    ),
    "vllm_fp8": Preset(
        DecodePolicy(state=QuantSpec.fp8(granularity="value_row")),
        "vLLM PR 40012, PR 52962 (open)",
        "E4M3, a float32 scale amax/448 per value row over K, every token; rounding='stochastic' is the PRs' option.",
    ),
    "sglang_fp8": Preset(
        DecodePolicy(state=QuantSpec.fp8(block_v=32, limit=240.0)),
        "SGLang issue 40706 (a request)",
        "E4M3, a scale amax/240 per head and 32 value rows over K, every token.",
    ),
    "sglang_replay": Preset(
        DecodePolicy(state=QuantSpec.bfloat16(), mode="replay", window=16, ring_dtype="bfloat16"),
        "SGLang PR 28451, PR 28695 (merged)",
        "The state is written at the flush only, after 16 tokens; a bfloat16 ring of k and r, float32 g. bfloat16 "
        "state; state=None for its float32 state.",
    ),
    "flashinfer_cast": Preset(
        DecodePolicy(state=QuantSpec.fp8(granularity="none"), mode="handoff"),
        "FlashInfer's GDN prefill",
        "A plain cast of the state that prefill hands over, without a scale; saturating. format='e5m2' for E5M2, "
        "state=QuantSpec.bfloat16() or .float16() for the others.",
    ),
    "tpu_bf16": Preset(
        DecodePolicy(state=QuantSpec.bfloat16()),
        "tpu-inference PR 2482",
        "bfloat16, nearest, every token.",
    ),
}
