"""Launches of the recurrence: tokens forward, and backward over a segment. Shapes and the maths: docs/decode.md.

    out = forward(run, Tokens(q, k, v, g, beta), state, options, stride=1)
    gradients = backward(run, Tokens(...), state, out.saved, do, d_leaving, options)

The backward wants the states after every token (`stride=1`). Where those take too much memory a caller goes through
long sequences in segments: a forward that saves a state every so many tokens, then, from the last segment to the first,
a forward again from the saved state (the same kernel, the same bits) and the backward. `Bounds` say which tokens a
sequence or a segment has.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from jlaqat.kernels import block_pipeline, recurrent
from jlaqat.kernels.call import UnsupportedByKernels, power_of_two
from jlaqat.kernels.launch import UNUSED, Buffer, Launch, Run, dtype_name
from jlaqat.kernels.recurrent_gradients import Gradients, gather
from jlaqat.spec import QuantSpec, fit_to_site

KEY_ROW = 32  # values that share a scale under "key_row"
BACKWARD_WIDTH = 32  # columns of a backward's program at most: nothing is rounded there, and four fit a multiprocessor
COLUMNS = 4  # of them side by side in a thread
NEVER = 1 << 30


class Tokens(NamedTuple):
    """Operands, T ≥ 1: a sequence a row, or N as `Bounds` say. k and g as the policy keeps them."""

    q: Any  # [B, T, H, K]
    k: Any  # [B, T, H, K]
    v: Any  # [B, T, HV, V]
    g: Any  # [B, T, HV] or [B, T, HV, K] float32, log decay
    beta: Any  # [B, T, HV]


class Bounds(NamedTuple):
    """Which tokens N sequences have, N / B of them a row of the operands: the first N / B lie in row 0, and so on.

    A row's sequences lie apart and in order; 0 ≤ first and first + count ≤ T. Sequences may have no tokens.
    """

    first: Any  # [N] int32, in the sequence's row
    count: Any  # [N] int32


class State(NamedTuple):
    """States as they are kept: [N, HV, K, V], or with slots in between.

    values: uint8 codes (E4M3's bits, or INT8 in two's complement), bfloat16, float16 or float32.
    scale: float32 [..., HV, ceil(V / block_v)] (tile), [..., HV, K, ceil(V / 32)] (key_row), [..., HV, V] (value_row);
      None where values are no codes.
    """

    values: Any
    scale: Any | None
    lost: Any | None = None  # float32 [..., HV, K, V], with error feedback: what the last rounding lost
    error: Any | None = None  # float32 [B, T, HV, V], with the states after every token: v - Rᵀk of each


class Output(NamedTuple):
    o: Any  # [B, T, HV, V] in v's dtype; not written where no sequence has a token
    state: State  # after the last token; what entered where there is none
    saved: State | None  # after every `stride` tokens, see `forward`; where that is 1 with `error`, otherwise `lost`


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How a call runs.

    scale: on q. state: how the state is rounded after every token, None for float32.
    read_stored: outputs read the state after its rounding, not before.
    hardware_fp8: use the hardware's E4M3 conversion (`call.converts_to_e4m3`); the arithmetic one gives the same bits.
    width, warps, vector: columns and warps of one program, and codes that a thread loads at once; None takes what was
      fastest (`benchmarks/bench_decode.py`). Tiles and key rows leave no choice of width. Forward calls whose bits must
      agree need the same ones, as sums go over other layouts otherwise.
    """

    scale: float
    state: QuantSpec | None = None
    read_stored: bool = False
    hardware_fp8: bool = False
    width: int | None = None
    warps: int | None = None
    vector: int | None = None

    def __post_init__(self) -> None:
        if self.state is not None:
            object.__setattr__(self, "state", fit_to_site(self.state, "state"))


def why_not(spec: QuantSpec | None, key_dim: int, *, draws: bool = False) -> str | None:
    """The reason why the kernels cannot keep a state so, as the end of a sentence; None where they can.

    draws: the launches draw bits for stochastic rounding.
    """
    if key_dim > 256:
        return f"K is {key_dim} and the kernels hold at most 256 key channels"
    if spec is None:
        return None
    spec = fit_to_site(spec, "state")
    if spec.format not in ("e4m3", "int8", "bfloat16", "float16"):
        return f"the kernels decode with E4M3, INT8, bfloat16 and float16 states, not {spec.format!r}"
    plain = QuantSpec(format=spec.format)
    roundings = (plain.rounding, "stochastic") if draws else (plain.rounding,)
    if spec.rounding not in roundings or spec.scale != "dynamic" or spec.limit or spec.scale_dtype != "float32":
        how = "to nearest or stochastically" if draws else "to nearest"
        return f"the kernels round {how} with dynamic float32 scales to the format's maximum, not {spec.describe()}"
    if spec.format in ("e4m3", "int8") and spec.granularity not in ("tile", "key_row", "value_row"):
        return f"the kernels scale states by tile, key_row or value_row, not {spec.granularity!r}"
    return None


class Call(NamedTuple):
    """Sizes and constants of the two directions; replay has the same."""

    tokens: Tokens
    options: Options
    bounds: Bounds | None = None
    most: int | None = None  # tokens that a sequence has at most, T unless given
    columns: int | None = None  # of a program, at most

    @property
    def sequences(self) -> int:
        """N"""
        return int((self.tokens.q if self.bounds is None else self.bounds.first).shape[0])

    @property
    def length(self) -> int:
        return self.most or int(self.tokens.q.shape[1])

    @property
    def rows(self) -> tuple[int, int]:
        """How the tokens of a backward lie: as in the operands, or with `most` [N, most], a sequence's own."""
        return (self.sizes[0], self.sizes[1]) if self.most is None else (self.sequences, self.most)

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int]:
        """B, T, H, HV, K, V"""
        b, t, h, k = self.tokens.q.shape
        return b, t, h, self.tokens.v.shape[2], k, self.tokens.v.shape[3]

    @property
    def format(self) -> str:
        return "float32" if self.options.state is None else self.options.state.format

    @property
    def coded(self) -> bool:
        return self.format in ("e4m3", "int8")

    @property
    def drawn(self) -> bool:
        return self.options.state is not None and self.options.state.rounding == "stochastic"

    @property
    def granularity(self) -> str:
        return str(self.options.state.granularity) if self.coded and self.options.state else "none"

    @property
    def group(self) -> int | None:
        """Columns that share a scale, where that is decided."""
        if self.granularity == "tile" and self.options.state is not None:
            return self.options.state.block_v
        return KEY_ROW if self.granularity == "key_row" else None

    @property
    def width(self) -> int:
        """Columns of a program: those that share a scale, in a forward."""
        free = min(self.options.width or (64 if self.format == "float32" else 32), power_of_two(self.sizes[5]))
        return min(self.group or free, self.columns or NEVER)

    def vector(self, backward: bool = False) -> int:
        """Codes that a thread loads at once.

        The fewer columns it has side by side, the more rows, and the shorter a sum's way between threads; amax of key
        rows, and what a backward sums over columns, are the other way round.
        """
        plain = 4 if self.format == "float32" else 8
        narrow = {"tile": 2 if self.width >= 64 else 4, "key_row": 8, "value_row": 2}.get(self.granularity, plain)
        return self.options.vector or (16 if backward else narrow)

    def warps(self, states: int = 1) -> int:
        """By the elements that a thread holds of the `states` tiles a program works on."""
        if self.options.warps is not None:
            return self.options.warps
        share = 128 if states == 1 and self.format == "float32" else 64
        return max(1, min(16, states * power_of_two(self.sizes[4]) * self.width // (32 * share)))

    def depth(self, vector: int, warps: int) -> int:
        """How often a thread can halve its rows, as they lie in registers."""
        threads_by_columns = min(self.width // vector, 32)
        rows = power_of_two(self.sizes[4]) * max(threads_by_columns, 1) // (32 * warps)
        return max(rows, 1).bit_length() - 1

    def depths(self) -> dict[str, int]:
        """The same of a thread of a backward, and of its columns."""
        rows = self.depth(COLUMNS, self.warps(states=2))
        return {"ROWS": rows, "COLUMNS": COLUMNS.bit_length() - 1, "BESIDE": self.beside(rows, backward=True)}

    def beside(self, depth: int, *, backward: bool = False) -> int:
        """How many neighbouring keys lie side by side in a thread that has 2^depth (`key_order`): all with vectors of
        decays, and with scales by key in a forward; for GDN's tiles of E4M3 one was quicker on an H200."""
        is_kda = len(self.tokens.g.shape) == 4
        return 1 << depth if is_kda or (self.granularity == "key_row" and not backward) else 1

    @property
    def programs_v(self) -> int:
        return -(-self.sizes[5] // self.width)

    @property
    def programs(self) -> int:
        return self.sequences * int(self.sizes[3]) * self.programs_v

    def constants(self) -> dict[str, Any]:
        _, t, h, hv, k, v = self.sizes
        return {
            "scale": float(self.options.scale),
            "T": t,
            "H": h,
            "HV": hv,
            "K": k,
            "V": v,
            "BK": power_of_two(k),
            "BV": self.width,
            "IS_KDA": len(self.tokens.g.shape) == 4,
            "FORMAT": self.format,
            "GRANULARITY": self.granularity,
            "READ_STORED": self.options.read_stored,
            "HARDWARE_FP8": self.options.hardware_fp8,
            "VECTOR": self.vector(),
        }

    def ragged(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Inputs and constants that say which tokens a sequence has."""
        first, count = (self.tokens.beta,) * 2 if self.bounds is None else self.bounds
        per_row = self.sequences // max(self.sizes[0], 1)
        return {"p_first": first, "p_count": count}, {"PER_ROW": per_row, "RAGGED": self.bounds is not None}

    def inputs(self, state: State) -> dict[str, Any]:
        operands = {f"p_{name}": x for name, x in zip(Tokens._fields, self.tokens)}
        scale = self.tokens.beta if state.scale is None else state.scale
        return {**operands, "p_values": state.values, "p_scale": scale}

    def kept(self, *leading: int) -> tuple[Buffer, Buffer]:
        """Values and scales of [*leading] states."""
        _, _, _, hv, k, v = self.sizes
        dtype = "uint8" if self.coded else self.format
        scale = {"tile": (self.programs_v,), "key_row": (k, self.programs_v), "value_row": (v,)}.get(self.granularity)
        values = Buffer((*leading, hv, k, v), dtype)
        return values, Buffer((*leading, hv, *scale), "float32") if scale else UNUSED

    def parts(self, dv: str = "float32") -> dict[str, Buffer]:
        """What the programs of a backward write."""
        _, _, _, hv, k, v = self.sizes
        (n, t), parts = self.rows, hv * self.programs_v
        return {
            "p_dq": Buffer((n, t, parts, k), "float32"),
            "p_dk": Buffer((n, t, parts, k), "float32"),
            "p_dv": Buffer((n, t, hv, v), dv),
            "p_dg": Buffer((n, t, parts, *self.tokens.g.shape[3:]), "float32"),
            "p_dbeta": Buffer((n, t, parts), "float32"),
            "p_ds_in": Buffer((self.sequences, hv, k, v), "float32"),
        }

    def state_of(self, values: Any, scale: Any, lost: Any | None = None) -> State:
        return State(values, scale if self.coded else None, lost)


def forward(
    run: Run,
    tokens: Tokens,
    state: State,
    options: Options,
    *,
    bounds: Bounds | None = None,
    counters: Any | None = None,
    stride: int | None = None,
    most: int | None = None,
) -> Output:
    """The tokens in order, from `state` [N, HV, K, V]; where it has `lost`, that is added before the next rounding.

    counters: for stochastic rounding, int32 [N, HV, 4]: the roundings of the sequence before these, layer·2^16 ^ head,
      sequence and step, as `jlaqat.philox.random_bits` takes them (which says what is drawn).

    stride: save the state after every so many tokens; None saves none. Without `most` sequences share the slots of
      their row: saved is [B, ceil(T / stride), ...] (without bounds T // stride), and the state after a token that is
      saved lies at the token's number in its row // stride. most: tokens that a sequence has at most; then saved is
      [N, most // stride, ...], a sequence's own.

    Raises UnsupportedByKernels for what `why_not` names, before any launch; `backward` likewise.
    """
    call = Call(tokens, options, bounds, most)
    b, t, _, _, _, _ = call.sizes
    _check(call)
    if call.drawn != (counters is not None):
        raise ValueError(f"rounding is {'' if call.drawn else 'not '}stochastic; give counters there, and only there.")
    shared = bounds is not None and most is None
    slots = 0 if stride is None else -(-t // stride) if shared else call.length // stride
    values, scales = call.kept(call.sequences)
    places = (b if shared else call.sequences, slots)
    saved, saved_scales = call.kept(*places) if slots else (UNUSED, UNUSED)
    feedback, tile = state.lost is not None, tuple(values.shape[1:])
    save_lost = feedback and slots > 0 and stride != 1
    inputs, constants = call.ragged()
    warps = call.warps(states=2 if call.drawn or feedback else 1)
    rows = call.depth(call.vector(), warps)
    launch = Launch(
        kernel=recurrent.recurrent_forward_kernel,
        grid=call.programs,
        inputs={
            **call.inputs(state),
            **inputs,
            "p_counters": counters if call.drawn else tokens.beta,
            "p_lost": state.lost if feedback else tokens.beta,
        },
        outputs={
            "p_o": Buffer(tuple(tokens.v.shape), dtype_name(tokens.v)),
            "p_values_out": values,
            "p_scale_out": scales,
            "p_saved": saved,
            "p_saved_scale": saved_scales,
            "p_lost_out": Buffer((call.sequences, *tile), "float32") if feedback else UNUSED,
            "p_saved_lost": Buffer((*places, *tile), "float32") if save_lost else UNUSED,
            "p_error": Buffer(tuple(tokens.v.shape), "float32") if stride == 1 else UNUSED,
        },
        constants={
            **call.constants(),
            **constants,
            "SLOTS": slots,
            "STRIDE": stride if slots else 0,
            "SHARED_SLOTS": shared,
            "FEEDBACK": feedback,
            "SAVE_LOST": save_lost,
            "DRAWN": call.drawn,
            "SEED": options.state.seed if call.drawn and options.state else 0,
            # Four sums side by side (sixteen of float32, or SM89 spills) hide how long one takes from term to term.
            "ROWS": max(rows - (2 if call.format == "float32" else call.vector() < 4), 0),
            "BESIDE": call.beside(rows),
        },
        num_warps=warps,
        num_stages=1,
        fp_fusion=False,
    )
    out = run(launch)
    leaving = call.state_of(out["p_values_out"], out["p_scale_out"], out["p_lost_out"] if feedback else None)
    kept = call.state_of(out["p_saved"], out["p_saved_scale"], out["p_saved_lost"] if save_lost else None)
    if stride == 1:
        kept = kept._replace(error=out["p_error"])
    return Output(out["p_o"], leaving, kept if slots else None)


def backward(
    run: Run,
    tokens: Tokens,
    state: State,
    saved: State,
    do: Any,
    d_leaving: Any,
    options: Options,
    *,
    bounds: Bounds | None = None,
    most: int | None = None,
    into: Gradients | None = None,
) -> Gradients:
    """Gradients of the tokens and of the entering states, straight through every rounding.

    state, bounds, most: as the forward got them; saved: what it saved at `stride=1`. do: [B, T, HV, V]; d_leaving: [N,
    HV, K, V] float32. Gradients of tokens have the tokens' dtypes, or float32 where a head's need no summing up, and
    are not written for tokens that no sequence has. into: with bounds and `most`, gradients of tokens [B, T, ...],
    float32, in which those of the tokens that bounds say are written, in place, and which are returned.

    Of codes and bfloat16 tokens by blocks of 16 tokens of a sequence (`block_pipeline`): segments that are to have the
    bits of the whole are `whole_blocks` long.
    """
    call = Call(tokens, options, bounds, most, BACKWARD_WIDTH)
    _check(call)
    if saved.error is None:
        raise ValueError("saved.error is None: the backward wants what a forward saved with stride=1.")
    dtypes = tuple("float32" if into else dtype_name(x) for x in tokens)
    if block_pipeline.takes(call):
        call, out = block_pipeline.launch(run, call, state, saved, do, d_leaving, dtypes[2])
        return gather(run, call, out, into, dtypes)
    inputs, constants = call.ragged()
    given = call.inputs(state)
    del given["p_v"]
    launch = Launch(
        kernel=recurrent.recurrent_backward_kernel,
        grid=call.programs,
        inputs={
            **given,
            **inputs,
            "p_saved": saved.values,
            "p_saved_scale": tokens.beta if saved.scale is None else saved.scale,
            "p_error": saved.error,
            "p_do": do,
            "p_ds": d_leaving,
        },
        outputs=call.parts(dtypes[2]),
        constants={
            **call.constants(),
            "VECTOR": COLUMNS,
            **constants,
            "LENGTH": call.length,
            "OWN_ROWS": most is not None,
            "GROUP": call.group or call.width,
            **call.depths(),
            "STAGES": 2,
        },
        num_warps=call.warps(states=2),
        num_stages=1,
        fp_fusion=False,
        # Four programs of four warps fit a multiprocessor, for a dozen registers that spill.
        max_registers=None if options.read_stored else 128,
    )
    return gather(run, call, run(launch), into, dtypes)


def _check(call: Call) -> None:
    reason = why_not(call.options.state, call.sizes[4], draws=True)
    if reason:
        raise UnsupportedByKernels(f"{reason}; use backend='xla'.")
