"""One kernel launch as data, so that JAX, PyTorch, the interpreter and the ahead-of-time compiler run the same list.

`pipeline` builds `Launch`es; a runner (`run(launch) -> {output name: array}`) executes one. A runner needs only a few
lines, since every operand travels by the name of its kernel parameter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Buffer(NamedTuple):
    """An array that a kernel writes: its shape and the name of its dtype ("float32", "bfloat16", "uint8", …)."""

    shape: tuple[int, ...]
    dtype: str


# A launch writes every output it names, but kernels have parameters that a variant leaves alone; they get this.
UNUSED = Buffer((1,), "float32")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """`kernel[grid]` over named operands.

    kernel: a function decorated with triton.jit.
    grid: number of programs. One axis only: axes y and z stop at 65,535.
    inputs: arrays of the runner's framework, by parameter name.
    outputs: `Buffer`s by parameter name; the runner allocates them.
    in_place: names of inputs that the kernel changes; the runner returns them with the outputs. A framework whose
      arrays do not change copies what is still read elsewhere.
    constants: numbers, strings and flags by parameter name, constexpr or not.
    num_warps, num_stages: launch parameters of Triton's compiler. fp_fusion: it may contract a·b + c into one rounding.
    max_registers: registers a thread at most, where more programs a multiprocessor are worth some spills.

    Raises TypeError where the names are not exactly the kernel's parameters: jax-triton takes a misspelt operand for a
    compile-time constant and reports, if anything, a count.
    """

    kernel: Any
    grid: int
    inputs: Mapping[str, Any]
    outputs: Mapping[str, Buffer]
    constants: Mapping[str, Any]
    in_place: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 2
    fp_fusion: bool = True
    max_registers: int | None = None

    def __post_init__(self) -> None:
        given = [*self.inputs, *self.outputs, *self.constants]
        expected = list(self.kernel.arg_names)
        missing = [name for name in expected if name not in given]
        unknown = [name for name in given if name not in expected]
        unknown += [name for name in self.in_place if name not in self.inputs]
        twice = sorted({name for name in given if given.count(name) > 1})
        if missing or unknown or twice:
            raise TypeError(
                f"{self.name}: operands do not match the kernel's parameters; "
                f"missing {missing}, unknown {unknown}, given twice {twice}. Parameters: {expected}."
            )
        # jax-triton returns outputs in the kernel's order.
        ordered = {name: self.outputs[name] for name in expected if name in self.outputs}
        object.__setattr__(self, "outputs", ordered)

    @property
    def operands(self) -> list[str]:
        """What the kernel is given and the compiler does not know: inputs and plain numbers, in the kernel's order."""
        known = {p.name for p in self.kernel.params if p.is_constexpr}
        return [name for name in self.kernel.arg_names if name not in known and name not in self.outputs]

    @property
    def compiler_options(self) -> dict[str, Any]:
        """Options of Triton's compiler besides warps and stages."""
        limit = {} if self.max_registers is None else {"maxnreg": self.max_registers}
        return {"enable_fp_fusion": self.fp_fusion, **limit}

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__


Run = Callable[[Launch], dict[str, Any]]
"""Executes one Launch and returns its outputs by name."""


def dtype_name(array: Any) -> str:
    """The dtype's bare name, for torch, JAX, numpy and `Buffer` alike."""
    return str(array.dtype).removeprefix("torch.")
