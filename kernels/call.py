"""One call of the pipeline: what goes in and comes out, the options, the checks, and the sizes its launches share."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from jlaqat.kernels.launch import Buffer, Run, dtype_name
from jlaqat.kernels.tuning import Tuning, choose, shape_class
from jlaqat.spec import CHUNK_SIZE, DeltaQuant

MAX_DIM = 256
SHARED_MEMORY = {
    80: 163,
    86: 99,
    87: 163,
    89: 99,
    90: 227,
    100: 227,
    103: 227,
    120: 99,
}  # KiB a program, by architecture
TENSOR_MEMORY = range(100, 110)  # architectures that have it: there Triton takes products in inlined functions only
HOPPER_TRITON = (3, 9)  # jax-triton on Triton 3.7 fails to lower the forward scan (TritonGPURemoveLayoutConversions)
STATE_FORMATS = ("e4m3", "int8")
W_FORMATS = ("e4m3",)


class UnsupportedByKernels(NotImplementedError):
    """A call that the kernels cannot serve; the message names the reason and the remedy."""


class Inputs(NamedTuple):
    """One call. cu_seqlens is given for packed sequences (then B = 1), initial_state may be None."""

    q: Any  # [B, T, H, K]
    k: Any  # [B, T, H, K]
    v: Any  # [B, T, HV, V]
    g: Any  # [B, T, HV] or [B, T, HV, K] float32, log decay
    beta: Any  # [B, T, HV]
    initial_state: Any = None  # [N, HV, K, V] float32
    cu_seqlens: Any = None  # [N + 1] int32


class Residuals(NamedTuple):
    """What the backward reads besides the inputs."""

    x: Any  # [B*T, HV, 64] in q's dtype, the chunk inverses, or None where they lie in p
    p: Any  # [B*T, HV, 64] in q's dtype, the scores; [B*T, HV, 80] with the inverses (chunks.py)
    g_sum: Any  # GDN: [B*T, HV] float32, G; None for KDA, whose sums are formed again
    h: Any  # [SLOTS, HV, K, V] uint8, codes of the rounded states that enter the chunks, or None
    h_scale: Any  # [SLOTS, HV, ceil(V / block_v)] float32, or None
    w: Any = None  # GDN: [B*T, HV, K] uint8, codes of a rounded w, or None
    w_scale: Any = None  # [B*T, HV] float32, or None

    @property
    def x_holder(self) -> Any:
        """The array to load the inverses from."""
        return self.p if self.x is None else self.x


class Output(NamedTuple):
    o: Any  # [B, T, HV, V] in v's dtype
    final_state: Any  # [N, HV, K, V] float32
    residuals: Residuals | None


class Gradients(NamedTuple):
    q: Any
    k: Any
    v: Any
    g: Any
    beta: Any
    initial_state: Any  # [N, HV, K, V] float32, whether or not one was given


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How a call runs.

    scale: on q.
    quant: what is rounded. The kernels take E4M3 and INT8 states by tile and E4M3 w by row, dynamic scales, to nearest.
    hardware_fp8: use the hardware's E4M3 conversion (`call.converts_to_e4m3`); the arithmetic one gives the same bits.
    architecture, shared_memory: 90 for SM90, which names the table of launch parameters, and the bytes that a program
      may take there: deeper pipelines than fit are cut. `options_for` fills in all of these and the next.
    hopper: use the kernels written for SM90 (pipeline_hopper.py) where they serve and the table names them.
    save_states: keep rounded states as codes for the backward (1 byte an element), or walk the chunks again there.
    tuning: launch parameters; None takes them from the architecture's table.
    merge_precision: of the products that join the inverse's blocks: "tf32", "tf32x3", "ieee" or, GDN only, "float16".
      None takes "tf32x3" for float32 inputs and for 16-bit ones, which hold the inverse less exactly than that,
      "float16" (GDN) or "tf32" (KDA). With "float16" an element of A (beta_i e^(G_i - G_j) k_i.k_j of rows i > j) or of
      its inverse beyond 65,504 in magnitude is infinite, and nearly all of that chunk's inverse becomes NaN.
    """

    scale: float
    quant: DeltaQuant = DeltaQuant()
    hardware_fp8: bool = False
    architecture: int = 90
    shared_memory: int = 227 * 1024
    hopper: bool = False
    save_states: bool = True
    merge_precision: str | None = None
    tuning: Tuning | None = None


@dataclasses.dataclass(frozen=True)
class Call:
    """Sizes and constants that several launches share."""

    run: Run
    inputs: Inputs
    options: Options

    def __post_init__(self) -> None:
        self._check()

    @property
    def is_kda(self) -> bool:
        return len(self.inputs.g.shape) == 4

    @property
    def is_packed(self) -> bool:
        return self.inputs.cu_seqlens is not None

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int]:
        """B, T, H, HV, K, V"""
        b, t, h, k = self.inputs.q.shape
        return b, t, h, self.inputs.v.shape[2], k, self.inputs.v.shape[3]

    @property
    def dtype(self) -> str:
        return dtype_name(self.inputs.q)

    @property
    def rows(self) -> int:
        return self.inputs.q.shape[0] * self.inputs.q.shape[1]

    @property
    def n_sequences(self) -> int:
        return self.inputs.cu_seqlens.shape[0] - 1 if self.is_packed else self.inputs.q.shape[0]

    @property
    def chunks_per_sequence(self) -> int:
        return -(-self.inputs.q.shape[1] // CHUNK_SIZE)

    @property
    def slots(self) -> int:
        """Chunks, or for packed sequences a bound on them."""
        extra = self.n_sequences if self.is_packed else 0
        return self.inputs.q.shape[0] * self.chunks_per_sequence + extra

    @property
    def state_format(self) -> str:
        return self.options.quant.state.format if self.options.quant.state else "none"

    @property
    def w_format(self) -> str:
        """Format of w in memory: codes where GDN rounds it, "none" for values."""
        return self.options.quant.w.format if self.options.quant.w and not self.is_kda else "none"

    @property
    def merge_precision(self) -> str:
        if self.options.merge_precision is not None or self.dtype == "float32":
            return self.options.merge_precision or "tf32x3"
        return "tf32" if self.is_kda else "float16"

    @property
    def tile_v(self) -> int:
        return self.options.quant.state.block_v if self.options.quant.state else power_of_two(self.sizes[5])

    @property
    def tuning(self) -> Tuning:
        if self.options.tuning is not None:
            return self.options.tuning
        _, _, _, hv, _, v = self.sizes
        size = shape_class(self.n_sequences * hv * -(-v // 64))
        gate = "kda" if self.is_kda else "gdn"
        return choose(self.options.architecture, gate, self.state_format != "none", size)

    @property
    def on_hopper(self) -> bool:
        """Whether kernels for SM90 serve: 128 key channels, and 16 bits an element, which fill the matrix units."""
        return self.options.hopper and self.sizes[4] == 128 and self.dtype != "float32"

    @property
    def state_width(self) -> int:
        """Columns of one program of the state scan: the recipe's tile where the state is rounded."""
        return self.tile_v if self.options.quant.state else self.width(self.tuning.state.bv, self.sizes[5])

    def width(self, wanted: int, size: int) -> int:
        """`wanted` columns, or fewer where `size` needs no more."""
        return min(wanted, power_of_two(size))

    def scan_stages(self, wanted: int, width: int) -> int:
        """Pipeline stages of a scan: each holds tiles of q, k, w, P and a column block of u in shared memory."""
        bk, size = power_of_two(self.sizes[4]), 4 if self.dtype == "float32" else 2
        loads = CHUNK_SIZE * (3 * bk + CHUNK_SIZE + width) * size
        kept = bk * width * size + CHUNK_SIZE * width * size
        return max(1, min(wanted, (self.options.shared_memory - kept) // loads))

    def dims(self, *names: str) -> dict[str, Any]:
        """The constants `names` out of those every kernel may ask for."""
        _, t, h, hv, k, v = self.sizes
        known = {
            "scale": float(self.options.scale),
            "T": t,
            "NT": self.chunks_per_sequence,
            "N": self.n_sequences,
            "H": h,
            "HK": hv if self.is_kda else h,  # heads of the scan's q and k
            "HV": hv,
            "K": k,
            "V": v,
            "BT": CHUNK_SIZE,
            "IS_KDA": self.is_kda,
            "IS_PACKED": self.is_packed,
            "WHOLE": not self.is_packed and t % CHUNK_SIZE == 0,  # no chunk ends early: nothing to mask
            "STATE_FORMAT": self.state_format,
            "TILE_V": self.tile_v,
            "W_FORMAT": self.options.quant.w.format if self.options.quant.w else "none",
            "HARDWARE_FP8": self.options.hardware_fp8,
            "PRECISION": "tf32x3" if self.dtype == "float32" else "tf32",
            "MERGE_PRECISION": self.merge_precision,
            "APART": self.options.architecture not in TENSOR_MEMORY,  # KDA's rare way is not inlined
        }
        return {name: known[name] for name in names}

    def by_row(self, heads: int, width: int, dtype: str | None = None) -> Buffer:
        return Buffer((self.rows, heads, width), dtype or self.dtype)

    def states(self, dtype: str) -> Buffer:
        _, _, _, hv, k, v = self.sizes
        return Buffer((self.slots, hv, k, v), dtype)

    def sequence_states(self) -> Buffer:
        _, _, _, hv, k, v = self.sizes
        return Buffer((self.n_sequences, hv, k, v), "float32")

    def gate_sums(self) -> Buffer:
        _, _, _, hv, k, _ = self.sizes
        return Buffer((self.rows, hv, k) if self.is_kda else (self.rows, hv), "float32")

    def _check(self) -> None:
        q, k, v, g, beta, initial, _ = self.inputs
        check_supported(self.options.quant)
        b, t, h, hv, key_dim, value_dim = self.sizes
        if not b * t:
            raise UnsupportedByKernels(f"q has B={b}, T={t}: there is nothing to launch; use backend='xla'.")
        if not (16 <= key_dim <= MAX_DIM and value_dim >= 16):
            raise UnsupportedByKernels(
                f"K={key_dim}, V={value_dim}: the kernels take K from 16 to {MAX_DIM} and V from 16; use backend='xla'."
            )
        shapes = {
            "k": (k, (b, t, h, key_dim)),
            "v": (v, (b, t, hv, value_dim)),
            "g": (g, (b, t, hv, key_dim) if self.is_kda else (b, t, hv)),
            "beta": (beta, (b, t, hv)),
        }
        if initial is not None:
            shapes["initial_state"] = (initial, (self.n_sequences, hv, key_dim, value_dim))
        for name, (array, shape) in shapes.items():
            if tuple(array.shape) != shape:
                raise ValueError(f"{name} has shape {tuple(array.shape)}, and q and v ask for {shape}.")
        if hv % h:
            raise ValueError(f"v has {hv} heads, which is not a multiple of the {h} heads of q and k.")
        if self.is_packed and b != 1:
            raise ValueError(f"cu_seqlens packs sequences into one row, so B must be 1, and q has B={b}.")
        if self.dtype not in ("float32", "bfloat16", "float16"):
            raise UnsupportedByKernels(
                f"dtype {self.dtype}: the kernels take float32, bfloat16 and float16; use 'xla'."
            )
        if dtype_name(k) != self.dtype or dtype_name(v) != self.dtype:
            raise ValueError(f"q, k and v must share a dtype; given {self.dtype}, {dtype_name(k)}, {dtype_name(v)}.")
        if dtype_name(g) != "float32":
            raise ValueError(f"g must be float32, given {dtype_name(g)}: sums of log decays need it.")


def check_supported(quant: DeltaQuant) -> None:
    """Raises UnsupportedByKernels, with the reason, for quantizers that only the XLA backend has."""
    for site, spec, formats, granularity in (
        ("state", quant.state, STATE_FORMATS, "tile"),
        ("w", quant.w, W_FORMATS, "row"),
    ):
        if spec is None:
            continue
        asked = {
            "format": (spec.format, formats),
            "granularity": (spec.granularity, (granularity,)),
            "rounding": (spec.rounding, ("nearest",)),
            "scale": (spec.scale, ("dynamic",)),
            "cadence": (spec.cadence, (CHUNK_SIZE,)),
        }
        for field, (value, allowed) in asked.items():
            if value not in allowed:
                listed = ", ".join(repr(a) for a in allowed)
                raise UnsupportedByKernels(
                    f"the Triton kernels do not round {site} with {field}={value!r} (they take {listed}); "
                    "use backend='xla', which does."
                )


def options_for(capability: int, **fields: Any) -> Options:
    """Options of an architecture, 90 for SM90."""
    given = {
        "hardware_fp8": converts_to_e4m3(capability),
        "architecture": capability,
        "shared_memory": SHARED_MEMORY.get(capability, 99) * 1024,
        "hopper": capability == 90 and triton_version() >= HOPPER_TRITON,
    }
    return Options(**given | fields)


def converts_to_e4m3(capability: int) -> bool:
    """Whether the hardware's conversion of float32 to E4M3 gives the contract's bits there, as Triton compiles it.

    From SM89 on, but for SM89 with Triton before 3.9, which goes through float16, cut off: just above a tie that rounds
    down (tests/test_kernels_emulated.py).
    """
    return capability >= 90 or (capability == 89 and triton_version() >= (3, 9))


def triton_version() -> tuple[int, int]:
    import triton

    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


def power_of_two(n: int) -> int:
    return max(16, 1 << (n - 1).bit_length())
