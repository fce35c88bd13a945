"""SM90's matrix instructions for the PTX emulator: wgmma on shared memory, and the fences that it needs.

    with matrix_units(late=False):
        EmulatedRun(90)(launch)

A product is done where it is issued, or with `late` where it is waited for: what overwrites an operand meanwhile then
shows. Its reads take part in the search for races, each warp of a group reading the whole operands, and operands must
not have been written since the last fence.proxy.async (asynchronous copies write when they arrive).

Not modelled: which warp a fence is for, wgmma.fence, the order of a warp group's products. Only what Triton makes for
16-bit operands: float32 sums, swizzled operands in either order (PTX ISA, "Asynchronous Warpgroup Level
Matrix Instructions").
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import ptx_emulator
import ptx_numbers as numbers
from ptx_emulator import LANES, Program
from ptx_kernel import TYPES, Instruction
from ptx_memory import KEYS, Memory

GROUP = 4 * LANES  # threads that issue a product together
DEPTH = 16  # of a product
SWIZZLES = {1: 128, 2: 64, 3: 32}  # bytes, by a descriptor's last bits


class FencedMemory(Memory):
    """Memory that knows which bytes were written since the last fence.proxy.async."""

    def __init__(self, size: int, name: str):
        super().__init__(size, name)
        self.unfenced = np.zeros(size, bool)

    def store(self, address: np.ndarray, values: np.ndarray, keys: np.ndarray, text: str) -> None:
        super().store(address, values, keys, text)
        self.unfenced[address[:, None] + np.arange(values.shape[1])] = True


class Wgmma:
    """The instructions, with the products that are yet to be waited for."""

    def __init__(self, late: bool):
        self.late = late
        self.groups: list[list[Instruction]] = [[]]

    def execute(self, program: Program, i: Instruction, active: np.ndarray) -> None:
        match i.name[1]:
            case "fence":
                pass
            case "mma_async" if self.late:
                self.groups[-1].append(i)
            case "mma_async":
                multiply(program, i, active)
            case "commit_group":
                self.groups.append([])
            case "wait_group":
                kept = len(self.groups) - 1 - int(i.operands[0])
                done, self.groups = self.groups[: max(0, kept)], self.groups[max(0, kept) :]
                for product in (product for group in done for product in group):
                    multiply(program, product, active)
            case _:
                raise ptx_emulator._unknown(i)


def multiply(program: Program, i: Instruction, active: np.ndarray) -> None:
    """d = a b^T + d for each group of warps; a [64, 16] from registers or memory, b [n, 16] from memory."""
    shape, sums, kind, also = i.name[4:8]
    targets, others = ptx_emulator._list(i.operands[0]), i.operands[1:3]
    in_registers = others[0].startswith("{")
    scale, *signs_and_orders = i.operands[3:]
    transposed = [int(x) for x in signs_and_orders[2:]]
    if sums != "f32" or kind != also or signs_and_orders[:2] != ["1", "1"] or not active.all():
        raise ptx_emulator._unknown(i)
    columns = int(shape.removeprefix("m64n").removesuffix(f"k{DEPTH}"))
    adds = program.read(scale, TYPES["pred"]) if scale.startswith("%") else np.bool_(int(scale))
    old = np.stack([program.read(target, TYPES["f32"]) for target in targets], 1)
    result = np.where(np.reshape(adds, (-1, 1)), old, 0).astype(np.float64)
    for start in range(0, program.threads, GROUP):
        threads = slice(start, start + GROUP)
        read = functools.partial(operand, program, i, start // LANES)
        if in_registers:
            parts = [program.read(part, TYPES["u32"])[threads] for part in ptx_emulator._list(others[0])]
            a = from_registers(np.stack(parts, 1))
        else:
            a = read(others[0], 64, transposed[0])
        b = read(others[1], columns, transposed[-1])
        product = numbers.decode(a, kind).astype(np.float64) @ numbers.decode(b, kind).astype(np.float64).T
        row, column = places(np.arange(len(targets)))
        result[threads] += product[row, column]
    for j, target in enumerate(targets):
        program.write(target, result[:, j].astype(np.float32), active)


def places(number: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Row and column [128 threads, numbers] of a thread's numbers in a tile of 64 rows."""
    thread = np.arange(GROUP)[:, None]
    row = thread // LANES * 16 + thread % LANES // 4 + 8 * (number // 2 % 2)
    return row, number // 4 * 8 + thread % 4 * 2 + number % 2


def from_registers(words: np.ndarray) -> np.ndarray:
    """[64, 16] from four words a thread [128, 4]."""
    a = np.zeros((64, DEPTH), np.uint16)
    a[places(np.arange(8))] = np.ascontiguousarray(words).view(np.uint16)
    return a


def operand(program: Program, i: Instruction, warp: int, name: str, rows: int, transposed: int) -> np.ndarray:
    """[rows, 16] that a descriptor names, read by each of four warps from `warp` on."""
    descriptors = program.read(name, TYPES["u64"])[warp * LANES : warp * LANES + GROUP]
    descriptor = int(descriptors[0])
    start, leading, stride = ((descriptor >> bit & 0x3FFF) << 4 for bit in (0, 16, 32))
    bytes_beside = SWIZZLES.get(descriptor >> 62, 0)  # in a row of memory
    if stride != 8 * bytes_beside or bytes_beside < DEPTH * 2 or (descriptors != descriptor).any():
        raise ptx_emulator._unknown(i)
    row, depth = np.arange(rows)[:, None], np.arange(DEPTH)
    if transposed:  # memory has so many rows of the operand side by side, and then the next ones
        beside = bytes_beside // 2
        address = start + row // beside * leading + depth // 8 * stride + depth % 8 * bytes_beside + row % beside * 2
    else:
        address = start + row // 8 * stride + row % 8 * bytes_beside + depth * 2
    address = (address ^ (address >> 7 & bytes_beside // 16 - 1) << 4).ravel()
    shared: Any = program.spaces["shared"]
    if shared.unfenced[address].any():
        shared.races.add(f"no fence.proxy.async after a write: {i.text}")
    for reader in range(warp, warp + 4):
        found = shared.load(address, 2, np.full(address.size, KEYS * program.epoch + reader), i.text)
    return found.view(np.uint16).reshape(rows, DEPTH)


def fence(program: Program, i: Instruction, active: np.ndarray) -> None:
    if i.name[1:3] != ("proxy", "async"):
        raise ptx_emulator._unknown(i)
    shared: Any = program.spaces["shared"]
    shared.unfenced[:] = False


def copy(program: Program, i: Instruction, active: np.ndarray) -> None:
    """cp.async, whose bytes are written when they are waited for."""
    pending = [copied for group in program.copies for copied in group]
    program._copy(i, active)
    kept = {id(copied) for group in program.copies for copied in group}
    shared: Any = program.spaces["shared"]
    for copied in pending:
        if id(copied) not in kept:
            shared.unfenced[copied[0]] = True


def address(program: Program, name: str) -> np.ndarray:
    """As Program._address; 32 bits wrap."""
    found = _address(program, name)
    is_wide = name.strip("[ ").startswith("%rd")
    return found if is_wide else found & 0xFFFFFFFF


def subtract_halves(name: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a - b, with one rounding, of 16-bit numbers or of two in a word."""
    one = a.dtype.type({"bf16": 0x3F803F80, "f16": 0x3C003C00}[name] >> 32 - 8 * a.itemsize)
    return numbers.HALVES["fma"](name, a, np.full_like(a, one), numbers.HALVES["neg"](name, b))


_address = Program._address


@contextlib.contextmanager
def matrix_units(*, late: bool = False) -> Iterator[None]:
    """Inside, the emulator knows wgmma."""
    methods = {"wgmma": Wgmma(late).execute, "fence": fence, "cp": copy}
    with (
        mock.patch.dict(ptx_emulator.METHODS, methods),
        mock.patch.dict(numbers.HALVES, {"sub": subtract_halves}),
        mock.patch.object(ptx_emulator, "Memory", FencedMemory),
        mock.patch.object(Program, "_address", address),
    ):
        yield
