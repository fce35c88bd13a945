"""The text of a PTX kernel as a list of instructions."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

TYPES = {
    **{f"{kind}{8 * size}": np.dtype(f"{code}{size}") for kind, code in ("uu", "bu", "si") for size in (1, 2, 4, 8)},
    "f32": np.dtype("f4"),
    "pred": np.dtype(bool),
}
REGISTERS = (("%rs", np.dtype("u2")), ("%rd", np.dtype("u8")), ("%r", np.dtype("u4")), ("%p", np.dtype(bool)))
PREFIXES = {".pred": "%p", ".b16": "%rs", ".b32": "%r", ".f32": "%r", ".b64": "%rd"}


class Instruction(NamedTuple):
    text: str
    predicate: str | None  # the register that says which threads take part
    negated: bool
    name: tuple[str, ...]  # between its dots
    operands: tuple[str, ...]


class Kernel:
    """The instructions of the first kernel in a PTX text, and where its labels stand among them."""

    def __init__(self, text: str):
        body = text[text.index(".visible .entry") :]
        body = body[body.index("\n{") + 2 :].split(".section")[0]  # debug information follows
        lines = [line.split("//")[0].strip() for line in body.splitlines()]
        self.instructions: list[Instruction] = []
        self.labels: dict[str, int] = {}
        local: dict[str, str] = {}  # names of registers that inline assembly declares, as the emulator knows registers
        for statement in " ".join(line for line in lines if not re.match(r"\.(?!reg)", line)).split(";"):
            statement = statement.strip()
            while found := re.match(r"[{}\s]*(\$?\w+):\s*|[{}]\s*", statement):
                if found[1]:
                    self.labels[found[1]] = len(self.instructions)
                statement = statement[found.end() :]
            if statement.startswith(".reg"):
                _, kind, *names = re.split(r"[\s,]+", statement)
                local |= {name: f"{PREFIXES[kind]}{name}" for name in names if not name.startswith("%")}
            elif statement:
                self.instructions.append(_parse(statement, local))


def _parse(statement: str, local: dict[str, str]) -> Instruction:
    found = re.fullmatch(r"(?:@(!?)(%\w+)\s+)?([\w.:]+)\s*(.*)", statement, re.DOTALL)
    if found is None:
        raise NotImplementedError(f"not an instruction: {statement}")
    negation, predicate, name, operands = found.groups()
    operands = re.sub(r"(?<![%\w])[A-Za-z_]\w*", lambda word: local.get(word[0], word[0]), operands)
    parts = tuple(re.findall(r"\{.*?\}|\[.*?\]|[^,\s]+", operands))
    return Instruction(statement, predicate, negation == "!", tuple(name.split(".")), parts)
