"""A CPU emulator for the PTX that Triton compiles: what the interpreter cannot show, without a GPU.

The interpreter runs a kernel's Python; this runs what the compiler made of it: hardware conversions (E4M3, bfloat16
pairs), layouts in registers, shuffles, shared memory and barriers, sums in their compiled order.

    kernel = Kernel(text)
    races = run_program(kernel, arguments, program, memory, shared_bytes=…, warps=…)

One program at a time, all its threads in lock step, an instruction each. Accesses of one byte by two warps, one of
them a store, without a barrier in between are races and are reported, whatever the order that lock step gave them.

What is not modelled, and so cannot be found here:

- What ptxas makes of PTX: SASS, registers, spills, the order of instructions and contraction of mul and add there.
- Order within a warp. Lanes of a warp see each other's stores at once.
- Branches that threads of one program take differently: they are an error. Programs of one grid side by side.
- Timing. A cp.async arrives when it is waited for (its target is NaN until then), its group never earlier.
- Approximations bit for bit. ex2.approx is rounded to nearest, rcp.approx as `reciprocal` says; mma rounds a sum once,
  where tensor cores drop bits on the way.
- wgmma, calls, atomics: instructions that the kernels tested here do not have. One that is met is named by a
  NotImplementedError.

Semantics: PTX ISA, "Instruction Set"; fragments of mma, ldmatrix and stmatrix as figured there.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import ptx_numbers as numbers
from ptx_kernel import REGISTERS, TYPES, Instruction, Kernel
from ptx_memory import KEYS, POISON, Memory

LANES = 32


class Program:
    """One program of a grid while it runs: registers of all its threads, shared memory, what it has yet to copy."""

    def __init__(self, kernel: Kernel, arguments: list, program: int, memory: Memory, shared: Memory, warps: int):
        self.kernel, self.arguments = kernel, arguments
        self.threads = LANES * warps
        thread = np.arange(self.threads)
        self.warp, self.lane = thread // LANES, thread % LANES
        self.spaces = {"global": memory, "shared": shared}
        self.registers: dict[str, np.ndarray] = {
            "%tid.x": thread.astype(np.uint32),
            "%ctaid.x": np.full(self.threads, program, np.uint32),
            "global_smem": np.zeros(self.threads, np.uint32),
        }
        self.reciprocal = "nearest"
        self.epoch = 0
        self.next = 0  # instruction
        self.copies: list[list[tuple[Any, ...]]] = [[]]  # of cp.async, by group; the last is open

    def run(self) -> None:
        everyone = np.ones(self.threads, bool)
        while (instruction := self.kernel.instructions[self.next]).name[0] != "ret":
            self.next += 1
            active = everyone
            if instruction.predicate:
                active = self.read(instruction.predicate, TYPES["pred"]) != instruction.negated
            self.execute(instruction, active)

    def read(self, operand: str, dtype: np.dtype) -> np.ndarray:
        """A register, a number or a symbol, as a type: [threads]."""
        if operand not in self.registers:
            self.registers[operand] = self._unwritten(operand)
        raw = self.registers[operand]
        if dtype.kind == "b":
            return raw != 0
        return raw.astype(f"u{dtype.itemsize}", copy=False).view(dtype)

    def _unwritten(self, operand: str) -> np.ndarray:
        for prefix, dtype in REGISTERS:
            if re.fullmatch(rf"{prefix}\w+", operand):
                return np.full(self.threads, (1 << 64) - 1, np.uint64).astype(dtype)
        if not re.fullmatch(r"-?\d\w*", operand):
            raise NotImplementedError(f"an operand that the emulator does not know: {operand}")
        value = int(operand[2:], 16) if operand.startswith("0f") else int(operand.rstrip("U"), 0)
        return np.full(self.threads, value & (1 << 64) - 1, np.uint64)

    def write(self, operand: str, values: np.ndarray, active: np.ndarray) -> None:
        if operand == "_":
            return
        old = self.read(operand, next(dtype for prefix, dtype in REGISTERS if operand.startswith(prefix)))
        if values.dtype.kind == "f":
            values = np.ascontiguousarray(values, np.float32).view(np.uint32)
        values = values.astype(old.dtype, copy=False)  # extends the sign of what has one
        self.registers[operand] = values if active.all() else np.where(active, values, old)

    def execute(self, i: Instruction, active: np.ndarray) -> None:
        if i.name[0] in METHODS:
            METHODS[i.name[0]](self, i, active)
        else:
            self.write(i.operands[0], self._arithmetic(i), active)

    def _arithmetic(self, i: Instruction) -> np.ndarray:
        name, kind = i.name[0], TYPES.get(i.name[-1])
        if not {"rz", "rm", "rp", "sat"}.isdisjoint(i.name) or ("ftz" in i.name and name not in ("rcp", "ex2")):
            raise _unknown(i)
        if kind is None:
            name_of_format = i.name[-1].removesuffix("x2")
            if name not in numbers.HALVES or name_of_format not in numbers.FORMATS:
                raise _unknown(i)
            whole = TYPES["u32" if i.name[-1].endswith("x2") else "u16"]
            return numbers.HALVES[name](name_of_format, *(self.read(x, whole) for x in i.operands[1:]))
        if "wide" in i.name:  # factors of half the width, products and sums of the whole
            wide = np.dtype(f"{kind.kind}{2 * kind.itemsize}")
            product = self.read(i.operands[1], kind).astype(wide) * self.read(i.operands[2], kind).astype(wide)
            return product + self.read(i.operands[3], wide) if name == "mad" else product
        values = [self.read(operand, kind) for operand in i.operands[1:]]
        match name:
            case "mul" if "hi" in i.name:
                wide = np.dtype(f"{kind.kind}{2 * kind.itemsize}")
                return values[0].astype(wide) * values[1].astype(wide) >> 8 * kind.itemsize
            case "mad":
                return values[0] * values[1] + values[2]
            case "fma":
                return numbers.fma(*values)
            case "div" if kind.kind in "fi":
                return numbers.divide(*values)
            case "rcp":
                return self._reciprocal(values[0], exact="approx" not in i.name)
            case "max" | "min" if "NaN" in i.name:
                return (np.maximum if name == "max" else np.minimum)(*values)
            case "shl" | "shr":
                bits = self.read(i.operands[2], TYPES["u32"])
                return (numbers.shift_left if name == "shl" else numbers.shift_right)(values[0], bits)
            case "bfe":
                start, length = (self.read(operand, TYPES["u32"]) for operand in i.operands[2:])
                return numbers.extract_bits(values[0], start, length)
        table: dict[str, Any] = numbers.UNARY if len(values) == 1 else numbers.BINARY
        if name not in table:
            raise _unknown(i)
        return table[name](*values)

    def _reciprocal(self, x: np.ndarray, exact: bool) -> np.ndarray:
        if exact:
            return (1 / x.astype(np.float64)).astype(np.float32)
        return numbers.flush(numbers.neighbour(1 / numbers.flush(x).astype(np.float64), self.reciprocal))

    def _branch(self, i: Instruction, active: np.ndarray) -> None:
        if active.any() and not active.all():
            raise NotImplementedError(f"threads of a program part here: {i.text}")
        if active.all():
            self.next = self.kernel.labels[i.operands[0]]

    def _barrier(self, i: Instruction, active: np.ndarray) -> None:
        if i.name == ("bar", "warp", "sync"):
            return
        if i.name != ("bar", "sync") or i.operands != ("0",) or not active.all():
            raise _unknown(i)
        self.epoch += 1

    def _compare(self, i: Instruction, active: np.ndarray) -> None:
        kind = TYPES[i.name[-1]]
        a, b = (self.read(operand, kind) for operand in i.operands[1:3])
        unordered = (a != a) | (b != b)
        comparison, or_unordered = i.name[1], False
        if kind.kind == "f" and comparison.endswith("u"):
            comparison, or_unordered = comparison[:-1], True
        if comparison in ("nan", "num"):
            result = unordered == (comparison == "nan")
        elif comparison in numbers.COMPARISONS and len(i.operands) == 3:
            result = numbers.COMPARISONS[comparison](a, b) & ~unordered | (unordered & or_unordered)
        else:
            raise _unknown(i)
        self.write(i.operands[0], result, active)

    def _select(self, i: Instruction, active: np.ndarray) -> None:
        a, b = (self.read(operand, TYPES[i.name[-1]]) for operand in i.operands[1:3])
        self.write(i.operands[0], np.where(self.read(i.operands[3], TYPES["pred"]), a, b), active)

    def _move(self, i: Instruction, active: np.ndarray) -> None:
        kind = TYPES[i.name[-1]]
        target, source = i.operands
        if source.startswith("{"):  # the first is the lowest
            parts = _list(source)
            size = np.dtype(f"u{kind.itemsize // len(parts)}")
            whole = np.stack([self.read(part, size) for part in parts], 1).view(f"u{kind.itemsize}")[:, 0]
            self.write(target, whole, active)
        elif target.startswith("{"):
            parts = _list(target)
            halves = self.read(source, kind)[:, None].view(f"u{kind.itemsize // len(parts)}")
            for j, part in enumerate(parts):
                self.write(part, halves[:, j], active)
        else:
            self.write(target, self.read(source, kind), active)

    def _permute(self, i: Instruction, active: np.ndarray) -> None:
        a, b, choice = (self.read(operand, TYPES["u32"]) for operand in i.operands[1:])
        if len(i.name) != 2:  # a mode
            raise _unknown(i)
        source = np.stack([a, b], 1).view(np.uint8)
        selector = choice[:, None] >> np.arange(0, 16, 4, dtype=np.uint32) & 15
        chosen = np.take_along_axis(source, (selector & 7).astype(np.int64), 1)
        signs = np.where(chosen >= 128, 255, 0).astype(np.uint8)  # what the selector's highest bit asks for
        self.write(i.operands[0], np.where(selector >= 8, signs, chosen).view(np.uint32)[:, 0], active)

    def _convert(self, i: Instruction, active: np.ndarray) -> None:
        target, source = i.name[-2:]
        if target.endswith("x2") and source == "f32":
            high, low = (numbers.encode(self.read(x, TYPES["f32"]), target[:-2]) for x in i.operands[1:])
            result = high << (8 if target == "e4m3x2" else 16) | low
        elif {target, source} == {"f16x2", "e4m3x2"}:
            wide = source == "f16x2"
            pair = self.read(i.operands[1], TYPES["u32" if wide else "u16"])
            parts = (pair & 0xFFFF, pair >> 16) if wide else (pair & 0xFF, pair >> 8)
            low, high = (numbers.encode(numbers.decode(x, source[:-2]), target[:-2]) for x in parts)
            result = high << (8 if wide else 16) | low
        elif source in numbers.FORMATS or target in numbers.FORMATS:
            x = self.read(i.operands[1], TYPES["f32" if source == "f32" else "u16"])
            x = x if source == "f32" else numbers.decode(x, source)
            if i.name[1] not in ("rn", "rz", "f32") or target not in ("f32", *numbers.FORMATS):
                raise _unknown(i)
            result = x if target == "f32" else numbers.encode(x, target, truncated=i.name[1] == "rz")
        elif source in TYPES and target in TYPES:
            x, kind = self.read(i.operands[1], TYPES[source]), TYPES[target]
            rounding = next((numbers.ROUNDINGS[part] for part in i.name if part in numbers.ROUNDINGS), None)
            if source == "f32":
                if rounding is None:
                    raise _unknown(i)
                x = rounding(numbers.flush(x) if "ftz" in i.name else x)
                if kind.kind != "f":  # saturates, NaN becomes 0
                    limits = np.iinfo(kind)
                    x = np.clip(np.nan_to_num(x.astype(np.float64)), limits.min, limits.max)
            result = x.astype(kind)
        else:
            raise _unknown(i)
        self.write(i.operands[0], result, active)

    def _load(self, i: Instruction, active: np.ndarray) -> None:
        targets, kind = _list(i.operands[0]), TYPES[i.name[-1]]
        if i.name[1] == "param":
            found = re.search(r"_param_(\d+)\]", i.operands[1])
            assert found
            number = int(found[1])
            value = self.arguments[number] if number < len(self.arguments) else 0  # Triton's own scratch: none
            raw = np.float32(value).view(np.uint32) if isinstance(value, float) else value & (1 << 64) - 1
            return self.write(targets[0], np.full(self.threads, raw, np.uint64), active)
        width = len(targets) * kind.itemsize
        loaded = self._space(i).load(self._address(i.operands[1])[active], width, self._keys(active), i.text)
        values = np.zeros((self.threads, len(targets)), kind)
        values[active] = loaded.view(kind)
        for j, target in enumerate(targets):
            self.write(target, values[:, j], active)

    def _store(self, i: Instruction, active: np.ndarray) -> None:
        kind = TYPES[i.name[-1]]
        values = np.stack([self.read(operand, kind)[active] for operand in _list(i.operands[1])], 1)
        address = self._address(i.operands[0])[active]
        self._space(i).store(address, values.view(np.uint8), self._keys(active), i.text)

    def _space(self, i: Instruction) -> Memory:
        spaces = [part.split("::")[0] for part in i.name if part.split("::")[0] in self.spaces]
        if len(spaces) != 1:
            raise _unknown(i)
        return self.spaces[spaces[0]]

    def _keys(self, active: np.ndarray) -> np.ndarray:
        return KEYS * self.epoch + self.warp[active]

    def _address(self, operand: str) -> np.ndarray:
        base, _, offset = operand.strip("[]").replace(" ", "").partition("+")
        return self.read(base, TYPES["u64"]).astype(np.int64) + int(offset or "0", 0)

    def _matrix(self, i: Instruction, active: np.ndarray) -> None:
        """ldmatrix and stmatrix: 8x8 matrices of 16 bits, whose row r of the j-th lies where lane 8j + r points.

        A lane holds two neighbours of row lane / 4; transposed, of column lane / 4.
        """
        load = i.name[0] == "ldmatrix"
        if "m8n8" not in i.name or i.name[-1] != "b16" or not active.all():
            raise _unknown(i)
        registers, pointer = i.operands if load else i.operands[::-1]
        rows = self._address(pointer).reshape(-1, LANES)
        shared, keys = self.spaces["shared"], self._keys(active)
        for j, register in enumerate(_list(registers)):
            halves = self.read(register, TYPES["u32"]).copy().view(np.uint16).reshape(-1, 2)
            for half in range(2):
                row, column = self.lane // 4, 2 * (self.lane % 4) + half
                if "trans" in i.name:
                    row, column = column, row
                address = rows[self.warp, 8 * j + row] + 2 * column
                if load:
                    halves[:, half] = shared.load(address, 2, keys, i.text).view(np.uint16)[:, 0]
                else:
                    shared.store(address, halves[:, half : half + 1].copy().view(np.uint8), keys, i.text)
            if load:
                self.write(register, halves.view(np.uint32)[:, 0], active)

    def _multiply(self, i: Instruction, active: np.ndarray) -> None:
        if i.name[3:] not in (("m16n8k16", "row", "col", "f32", kind, kind, "f32") for kind in ("bf16", "f16")):
            raise _unknown(i)
        a, b = (np.stack([self.read(x, TYPES["u32"]) for x in _list(operand)], 1) for operand in i.operands[1:3])
        product = numbers.matrix_product(a, b, i.name[-2])
        product += np.stack([self.read(x, TYPES["f32"]) for x in _list(i.operands[3])], 1)
        for j, target in enumerate(_list(i.operands[0])):
            self.write(target, product[:, j].astype(np.float32), active)

    def _shuffle(self, i: Instruction, active: np.ndarray) -> None:
        lanes, bits = self.lane.reshape(-1, LANES), self.read(i.operands[2], TYPES["s32"]).reshape(-1, LANES)
        modes = {"bfly": lanes ^ bits, "up": lanes - bits, "down": lanes + bits, "idx": bits % LANES}
        whole_warp = "0" if i.name[2] == "up" else "31"
        if i.name[2] not in modes or i.operands[3] != whole_warp or not active.all():
            raise _unknown(i)
        source = modes[i.name[2]]
        source = np.where((source >= 0) & (source < LANES), source, lanes)
        values = np.take_along_axis(self.read(i.operands[1], TYPES["u32"]).reshape(-1, LANES), source, 1)
        self.write(i.operands[0], values.ravel(), active)

    def _reduce(self, i: Instruction, active: np.ndarray) -> None:
        x = self.read(i.operands[1], TYPES[i.name[-1]]).reshape(-1, LANES)
        kinds = {"max": x.max, "min": x.min, "add": x.sum}
        if i.name[2] not in kinds or not active.all():
            raise _unknown(i)
        self.write(i.operands[0], kinds[i.name[2]](axis=1).repeat(LANES), active)

    def _copy(self, i: Instruction, active: np.ndarray) -> None:
        """cp.async: reads at once; what it writes is NaN until its group is waited for."""
        shared, keys = self.spaces["shared"], self._keys(active)
        match i.name[2]:
            case "commit_group":
                self.copies.append([])
            case "wait_group" | "wait_all":
                pending = int(i.operands[0]) if i.operands else 0
                done, self.copies = self.copies[: -1 - pending], self.copies[max(0, len(self.copies) - 1 - pending) :]
                if i.name[2] == "wait_all":
                    done, self.copies = done + self.copies, [[]]
                for address, values in (copy for group in done for copy in group):
                    shared.bytes[address] = values
            case "ca" | "cg":
                width = int(i.operands[2], 0)
                taken = self.read(i.operands[3], TYPES["u32"]) if len(i.operands) > 3 else np.full(self.threads, width)
                target = self._address(i.operands[0])[active]
                values = np.zeros((self.threads, width), np.uint8)  # what is not taken is 0
                reads = active & (taken > 0)
                source = self._address(i.operands[1])[reads]
                values[reads] = self.spaces["global"].load(source, width, self._keys(reads), i.text)
                values[np.arange(width) >= taken[:, None]] = 0
                shared.store(target, np.full((len(target), width), POISON, np.uint8), keys, i.text)
                self.copies[-1].append((target[:, None] + np.arange(width), values[active]))
            case _:
                raise _unknown(i)


METHODS: dict[str, Callable[[Program, Instruction, np.ndarray], None]] = {
    "bar": Program._barrier,
    "bra": Program._branch,
    "cp": Program._copy,
    "cvt": Program._convert,
    "ld": Program._load,
    "ldmatrix": Program._matrix,
    "mma": Program._multiply,
    "mov": Program._move,
    "prmt": Program._permute,
    "redux": Program._reduce,
    "selp": Program._select,
    "setp": Program._compare,
    "shfl": Program._shuffle,
    "st": Program._store,
    "stmatrix": Program._matrix,
}


def _list(operand: str) -> list[str]:
    return [part.strip() for part in operand.strip("{}").split(",")]


def _unknown(i: Instruction) -> NotImplementedError:
    return NotImplementedError(f"an instruction that the emulator does not know: {i.text}")


def run_program(
    kernel: Kernel,
    arguments: list[int | float],
    program: int,
    memory: Memory,
    *,
    shared_bytes: int,
    warps: int,
    reciprocal: str = "nearest",
) -> set[str]:
    """Runs one program on global memory, which it changes, and returns its races.

    arguments: by position; a pointer is an offset in `memory`. reciprocal: what rcp.approx gives, the "nearest" float32
    or the next one "below" or "above".
    """
    memory.forget()
    shared = Memory(shared_bytes, "shared")
    running = Program(kernel, arguments, program, memory, shared, warps)
    running.reciprocal = reciprocal
    with np.errstate(all="ignore"):
        running.run()
    return memory.races | shared.races
