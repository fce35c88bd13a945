"""Launches of decoding by replay: a token in place, tokens forward, and backward. Shapes and maths: docs/decode.md.

    out = step(run, Tokens(q, k, v, g, beta), state, ring, options)        changes state and ring where it can
    out = forward(run, Tokens(...), state, ring, options, save=True)
    gradients = backward(run, Tokens(...), state, ring, out, do, d_leaving, options)

`step` and `forward` give the same bits, however a sequence is cut into calls. `forward` saves a checkpoint a window and
every token's r, and the backward builds the state before each token from them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from jlaqat.kernels import recurrent_pipeline, replay, replay_backward, replay_flush
from jlaqat.kernels.call import UnsupportedByKernels, power_of_two
from jlaqat.kernels.launch import UNUSED, Buffer, Launch, Run, dtype_name
from jlaqat.kernels.recurrent_pipeline import Bounds, Gradients, Options, State, gather

BLOCK = 8  # entries of the ring that a token reads at a time
WIDEST = 128  # columns of a step's program
# Programs of a flush, at most, and their registers a thread: 512 of four warps run at once on an H200. A flush of KDA
# by tiles and by key rows took 1 to 2 % longer with 1024 programs, and with 1024 and 168 registers 2 to 11 %.
FLUSHES, FLUSH_REGISTERS = 512, 128
# (quarters of a checkpoint that a step asks for before it reads the ring, registers a thread). Of codes the fastest on
# an H200 of 80, 96, 112 and 128 registers for GDN, of 96 and 112 for KDA by key rows; values want more.
STEP_OF_CODES, STEP_OF_VALUES = (4, 96), (4, 128)
# By (format, granularity), for KDA with a ring of values: half the checkpoint later, and so more programs at once,
# took 6 % off a window by tiles. INT8 by key rows was 11 % slower so.
STEPS_OF_KDA = {("e4m3", "tile"): (2, 80)}


class Tokens(NamedTuple):
    """Operands as `recurrent_pipeline.Tokens` has them, k as the ring keeps it."""

    q: Any  # [B, T, H, K]
    k: Any  # [B, T, H, K]
    v: Any  # [B, T, HV, V]
    g: Any  # [B, T, HV] or [B, T, HV, K] float32, log decay
    beta: Any  # [B, T, HV]
    k_scale: Any | None = None  # [B, T, H] float32, of codes


class Ring(NamedTuple):
    """The updates since the checkpoint, L of them at most; entries from the cursor on hold nothing."""

    k: Any  # [N, L, H, K] float32, bfloat16 or uint8, codes of E4M3
    r: Any  # [N, L, HV, V], likewise
    g: Any  # [N, L, HV] or [N, L, HV, K] float32, log decay
    cursor: Any  # [N] int32, below L
    k_scale: Any | None = None  # [N, L, H] float32, of codes
    r_scale: Any | None = None  # [N, L, HV, ceil(V / width)] float32, likewise, with `Options.width`

    @property
    def coded(self) -> bool:
        return dtype_name(self.k) == "uint8"


class Output(NamedTuple):
    o: Any  # [B, T, HV, V] in v's dtype
    state: State  # the checkpoints after the last token
    ring: Ring  # and what came since
    r: Any | None = None  # [B, T, HV, V] in the ring's dtype, every token's update; `step` leaves it out
    r_scale: Any | None = None  # [B, T, HV, ceil(V / width)] float32, of codes
    saved: State | None = None  # [N, ceil(T / L), ...], the checkpoints in the order in which they were made, or at a
    # window of 1 in float32, which is token mode, what that saves, and no r


class Call(recurrent_pipeline.Call):
    """Sizes and constants of the launches."""

    def constants_of(self, ring: Ring) -> dict[str, Any]:
        """Of all launches; a program rounds VECTOR codes beside one another a thread."""
        vector = self.options.vector or min(self.width, 8)
        return {**self.constants(), "LENGTH": ring.k.shape[1], "VECTOR": vector}

    def constants_of_joining(self, ring: Ring, width: int, warps: int) -> dict[str, int]:
        """How a token reads: a warp has a row's columns, READ_VECTOR a thread, and as many rows and channels of keys to
        add up by itself as the depths say."""
        rows, at_once = power_of_two(self.sizes[4]), {"bfloat16": 8, "uint8": 16}.get(dtype_name(ring.k), 4)
        groups = min(warps, rows // 4, BLOCK)
        if len(self.tokens.g.shape) == 4:  # keys lie as their log decays do, which are float32
            at_once = min(at_once, 4)
        channels = max(1, min(at_once, BLOCK * rows // (32 * warps)))
        depths = {"ROW_DEPTH": rows // groups, "ENTRY_DEPTH": BLOCK // groups, "KEY_DEPTH": channels}
        reading = {"BL": BLOCK, "GROUPS": groups, "READ_VECTOR": max(1, min(16, width // 32))}
        return reading | {name: n.bit_length() - 1 for name, n in depths.items()}

    def joining_resources(self, ring: Ring) -> tuple[int, int]:
        """(quarters of the checkpoint that a step asks for first, registers a thread): no bit depends on them."""
        usual = STEP_OF_CODES if self.coded else STEP_OF_VALUES
        if len(self.tokens.g.shape) == 3 or ring.coded:
            return usual
        return STEPS_OF_KDA.get((self.format, self.granularity), usual)

    def joining_width(self, ring: Ring) -> int:
        """Columns of a step's program: many, since they share what it reads of the ring; with codes, one scale's."""
        if ring.coded:
            return self.width
        return max(self.width, min(WIDEST if self.coded else WIDEST // 2, power_of_two(self.sizes[5])))

    def of_rounding(self, state: State, counters: Any | None) -> tuple[dict[str, Any], dict[str, Any]]:
        """Inputs and constants of stochastic rounding and error feedback."""
        if self.drawn != (counters is not None):
            word = "" if self.drawn else "not "
            raise ValueError(f"rounding is {word}stochastic; give counters there, and only there.")
        seed = self.options.state.seed if self.drawn and self.options.state else 0
        given = {"p_counters": counters, "p_lost": state.lost}
        given = {name: self.tokens.beta if x is None else x for name, x in given.items()}
        return given, {"DRAWN": self.drawn, "SEED": seed, "FEEDBACK": state.lost is not None}

    def forward_warps(self, state: State) -> int:
        """Of a step and a forward alike: what is drawn, or was lost, is another state to hold."""
        return self.warps(states=2 if self.drawn or state.lost is not None else 1)

    def warps(self, states: int = 1) -> int:
        """As many as the states want, and the block of the ring beside them."""
        ring = 2 * BLOCK * power_of_two(self.sizes[4]) // (32 * 16)
        return self.options.warps or max(ring, super().warps(states))

    @property
    def rows(self) -> tuple[int, int]:
        """The tokens of a backward lie as those of the call."""
        return self.sizes[:2]


def step(
    run: Run,
    tokens: Tokens | recurrent_pipeline.Tokens,
    state: State,
    ring: Ring,
    options: Options,
    *,
    counters: Any | None = None,
) -> Output:
    """One token (T = 1). State and ring of the result are those given, changed in place, where arrays can change.

    counters: as `forward` takes them.

    Raises UnsupportedByKernels for what `recurrent_pipeline.why_not` names, before any launch; the others likewise.
    """
    tokens = Tokens(*tokens)
    call = _call(tokens, ring, options)
    if call.sizes[1] != 1:
        raise ValueError(f"a step takes one token and q has T={call.sizes[1]}; call forward.")
    if _is_token_mode(ring):
        taken = recurrent_pipeline.forward(run, call.tokens, state, options, counters=counters)
        return Output(taken.o, taken.state, ring)
    rounding = call.of_rounding(state, counters)
    o, ring_after = _join(run, call, tokens, state, ring)
    return _flush(run, call, tokens, state, ring_after, ring.cursor, o, rounding)


def _join(run: Run, call: Call, tokens: Tokens, state: State, ring: Ring) -> tuple[Any, Ring]:
    """(o, the ring with the token in it): nothing is rounded."""
    width, warps = call.joining_width(ring), call.forward_warps(state)
    constants = call.constants_of(ring) | call.constants_of_joining(ring, width, warps)
    constants["VECTOR"] = constants.pop("READ_VECTOR")
    early, registers = call.joining_resources(ring)
    constants |= {"BV": width, "SHARED_BY": call.width, "EARLY": early}
    scales = ("p_ring_k_scale", "p_ring_r_scale") if ring.coded else ()
    launch = Launch(
        kernel=replay.replay_step_kernel,
        grid=call.sequences * int(call.sizes[3]) * -(-call.sizes[5] // width),
        inputs={**call.inputs(state), **_pointers(tokens, ring)},
        outputs={
            "p_o": Buffer(tuple(tokens.v.shape), dtype_name(tokens.v)),
            "p_cursor_out": Buffer(tuple(ring.cursor.shape), "int32"),
        },
        in_place=("p_ring_k", "p_ring_r", "p_ring_g", *scales),
        constants={name: x for name, x in constants.items() if name not in ("T", "READ_STORED")},
        num_warps=warps,
        num_stages=1,
        fp_fusion=False,
        max_registers=registers,
    )
    out = run(launch)
    entries = Ring(*(out.get(_pointer(name), x) for name, x in zip(Ring._fields, ring)))
    return out["p_o"], entries._replace(cursor=out["p_cursor_out"])


def _flush(
    run: Run,
    call: Call,
    tokens: Tokens,
    state: State,
    ring: Ring,
    cursor: Any,
    o: Any,
    rounding: tuple[dict[str, Any], dict[str, Any]],
) -> Output:
    """The checkpoints after the token: new ones where it filled its ring.

    ring: with the token in it; cursor: [N] int32, before the token; rounding: of `Call.of_rounding`.
    """
    given_to_round, rounding_constants = rounding
    n, hv = call.sequences, int(call.sizes[3])
    heads = next((d for d in range(1, hv) if hv % d == 0 and n * hv // d <= FLUSHES), hv)
    unread = ("p_k", "p_k_scale", "p_v", "p_g", "p_beta", "T")
    given = {**call.inputs(state), **_pointers(tokens, ring), **given_to_round, "p_cursor": cursor, "p_o": o}
    constants = {**call.constants_of(ring), **rounding_constants, "HEADS": heads}
    present = {"p_scale": call.coded, "p_lost": state.lost is not None, "p_o": call.options.read_stored}
    launch = Launch(
        kernel=replay_flush.replay_flush_kernel,
        grid=n * hv // heads,
        inputs={name: x for name, x in given.items() if name not in unread},
        outputs={},
        in_place=("p_values", *(name for name in present if present[name])),
        constants={name: x for name, x in constants.items() if name not in unread},
        num_warps=call.forward_warps(state),
        num_stages=1,
        fp_fusion=False,
        max_registers=FLUSH_REGISTERS,
    )
    out = run(launch)
    return Output(out.get("p_o", o), State(out["p_values"], out.get("p_scale"), out.get("p_lost")), ring)


def forward(
    run: Run,
    tokens: Tokens | recurrent_pipeline.Tokens,
    state: State,
    ring: Ring,
    options: Options,
    *,
    bounds: Bounds | None = None,
    counters: Any | None = None,
    save: bool = False,
) -> Output:
    """The tokens in order; bounds say which a sequence has. tokens.k has the ring's dtype.

    Where the state has `lost`, that is added before its next rounding.

    counters: for stochastic rounding, as `recurrent_pipeline.forward` takes them; the tokens of a sequence are counted,
      also those that round nothing.
    save: keep what `backward` needs.
    """
    tokens = Tokens(*tokens)
    call = _call(tokens, ring, options, bounds)
    n, length, feedback = call.sequences, ring.k.shape[1], state.lost is not None
    if _is_token_mode(ring):
        given, stride = (run, call.tokens, state, options), 1 if save else None
        taken = recurrent_pipeline.forward(*given, bounds=bounds, counters=counters, stride=stride)
        return Output(taken.o, taken.state, ring, saved=taken.saved)
    slots, warps = -(-call.sizes[1] // length) if save else 0, call.forward_warps(state)
    values, scales = call.kept(n)
    saved, saved_scales = call.kept(n, slots) if slots else (UNUSED, UNUSED)
    inputs, constants = call.ragged()
    rounding, rounding_constants = call.of_rounding(state, counters)
    launch = Launch(
        kernel=replay.replay_forward_kernel,
        grid=call.programs,
        inputs={**call.inputs(state), **_pointers(tokens, ring), **rounding, **inputs},
        outputs={
            "p_o": Buffer(tuple(tokens.v.shape), dtype_name(tokens.v)),
            "p_r": Buffer(tuple(tokens.v.shape), dtype_name(ring.r)),
            "p_r_scale": Buffer((*tokens.v.shape[:3], call.programs_v), "float32") if ring.coded else UNUSED,
            "p_values_out": values,
            "p_scale_out": scales,
            **{f"{_pointer(name)}_out": _buffer(x) for name, x in zip(Ring._fields, ring)},
            "p_saved": saved,
            "p_saved_scale": saved_scales,
            "p_lost_out": Buffer(tuple(values.shape), "float32") if feedback else UNUSED,
        },
        constants={
            **call.constants_of(ring),
            **call.constants_of_joining(ring, call.width, warps),
            **constants,
            **rounding_constants,
            "SLOTS": slots,
            "SAVE": slots > 0,
        },
        num_warps=warps,
        num_stages=1,
        fp_fusion=False,
    )
    out = run(launch)
    return Output(
        out["p_o"],
        call.state_of(out["p_values_out"], out["p_scale_out"], out["p_lost_out"] if feedback else None),
        Ring(*(None if x is None else out[f"{_pointer(name)}_out"] for name, x in zip(Ring._fields, ring))),
        out["p_r"],
        out["p_r_scale"] if ring.coded else None,
        call.state_of(out["p_saved"], out["p_saved_scale"]) if slots else None,
    )


def backward(
    run: Run,
    tokens: Tokens | recurrent_pipeline.Tokens,
    state: State,
    ring: Ring,
    out: Output,
    do: Any,
    d_leaving: Any,
    options: Options,
    *,
    bounds: Bounds | None = None,
) -> Gradients:
    """Gradients of the tokens and of the entering states, straight through every rounding; none flows to a ring.

    tokens, state, ring, bounds: as `forward` got them; out: what it returned with `save`. do: [B, T, HV, V]; d_leaving:
    [N, HV, K, V] float32, of the states that the next token would find. Gradients of tokens lie as the tokens do and
    are not written where no sequence has one.
    """
    tokens = Tokens(*tokens)
    call = _call(tokens, ring, options, bounds)
    if out.saved is None:
        raise ValueError("out.saved is None: the backward starts from checkpoints, so call forward with save=True.")
    if _is_token_mode(ring):
        return recurrent_pipeline.backward(run, call.tokens, state, out.saved, do, d_leaving, options, bounds=bounds)
    inputs, constants = call.ragged()
    launch = Launch(
        kernel=replay_backward.replay_backward_kernel,
        grid=call.programs,
        inputs={
            **call.inputs(state),
            **_pointers(tokens, ring),
            **inputs,
            "p_r": out.r,
            "p_r_scale": tokens.beta if out.r_scale is None else out.r_scale,
            "p_saved": out.saved.values,
            "p_saved_scale": tokens.beta if out.saved.scale is None else out.saved.scale,
            "p_do": do,
            "p_ds": d_leaving,
        },
        outputs=call.parts(),
        constants={
            **call.constants_of(ring),
            **constants,
            "SLOTS": out.saved.values.shape[1],
            "VECTOR": min(call.vector(backward=True), call.width),
        },
        num_warps=call.warps(states=2),
        num_stages=1,
        fp_fusion=False,
    )
    return gather(run, call, run(launch))


def _is_token_mode(ring: Ring) -> bool:
    """A window of 1 whose factors are not rounded: the ring never holds anything, and the recurrence's kernels run."""
    return ring.k.shape[1] == 1 and dtype_name(ring.k) == dtype_name(ring.r) == "float32"


def _pointer(name: str) -> str:
    """The kernels' parameter for a field of the ring."""
    return "p_cursor" if name == "cursor" else f"p_ring_{name}"


def _pointers(tokens: Tokens, ring: Ring) -> dict[str, Any]:
    """The ring, and what lies beside the tokens; any array stands for scales that there are not."""
    given = {_pointer(name): x for name, x in zip(Ring._fields, ring)} | {"p_k_scale": tokens.k_scale}
    return {name: ring.g if x is None else x for name, x in given.items()}


def _buffer(x: Any | None) -> Buffer:
    return UNUSED if x is None else Buffer(tuple(x.shape), dtype_name(x))


def _call(tokens: Tokens, ring: Ring, options: Options, bounds: Bounds | None = None) -> Call:
    call = Call(recurrent_pipeline.Tokens(*tokens[:5]), options, bounds)
    reason = recurrent_pipeline.why_not(options.state, call.sizes[4], draws=True)
    if reason:
        raise UnsupportedByKernels(f"{reason}; use backend='xla'.")
    n, length = call.sequences, ring.k.shape[1]
    _, _, h, hv, k, v = call.sizes
    gates = tuple(tokens.g.shape[3:])
    wanted = {"k": (n, length, h, k), "r": (n, length, hv, v), "g": (n, length, hv, *gates), "cursor": (n,)}
    if ring.coded != (tokens.k_scale is not None):
        raise ValueError("k and the ring are kept in codes together: give tokens.k_scale with codes, and only there.")
    if ring.coded:
        wanted |= {"k_scale": (n, length, h), "r_scale": (n, length, hv, call.programs_v)}
    if dtype_name(tokens.k) != dtype_name(ring.k):  # a long call reads entries from either
        raise ValueError(
            f"k is {dtype_name(tokens.k)} and the ring {dtype_name(ring.k)}: give k in the ring's dtype, by which it "
            "lies in registers and is summed."
        )
    for name, x in zip(Ring._fields, ring):
        shape = None if x is None else tuple(x.shape)
        if shape != wanted.get(name):
            raise ValueError(f"ring.{name} has shape {shape}, and the tokens ask for {wanted.get(name)}.")
    return call
