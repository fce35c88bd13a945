"""The text of a PTX kernel as a list of instructions."""

from __future__ import annotations

import re
from typing import NamedTuple


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
        for statement in " ".join(line for line in lines if not line.startswith(".")).split(";"):
            statement = statement.strip()
            while found := re.match(r"[{}\s]*(\$?\w+):\s*|[{}]\s*", statement):
                if found[1]:
                    self.labels[found[1]] = len(self.instructions)
                statement = statement[found.end() :]
            if statement and not statement.startswith("."):
                self.instructions.append(_parse(statement))


def _parse(statement: str) -> Instruction:
    found = re.fullmatch(r"(?:@(!?)(%\w+)\s+)?([\w.:]+)\s*(.*)", statement, re.DOTALL)
    if found is None:
        raise NotImplementedError(f"not an instruction: {statement}")
    negation, predicate, name, operands = found.groups()
    parts = tuple(re.findall(r"\{.*?\}|\[.*?\]|[^,\s]+", operands))
    return Instruction(statement, predicate, negation == "!", tuple(name.split(".")), parts)
