"""Finds E4M3 values that a loop decodes before it has written them, in machine code: ptxas 12.8 and 12.9 miscompile so.

Those two (Triton 3.7 and 3.9 take them for SM90) go wrong where a loop rounds numbers to E4M3, stores the bytes, and
also reads the rounded values: half of the values are then those of the turn before. 13.1 and 13.4 do not. Kernels here
that would meet it convert twice (`kept_state._to_code`); on an H200 the one conversion had given NaN and wrong states.

A kernel decodes (F2FP…UNPACK_B) only what it loaded or rounded. So a register that is decoded in a loop, and that the
loop itself writes, has to be written before it is decoded.
"""

import re
import subprocess
import tempfile

import triton

LABEL = re.compile(r"\s*(\.L_x_\d+):")
INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?);")
BRANCH = re.compile(r"BRA.*`\((\.L_x_\d+)\)")
DECODED = re.compile(r"UNPACK_B\s+R\d+,\s*R(\d+)")
WRITTEN = re.compile(r"([\w.]+)\s+(?:U?PT?\d*,\s*)*R(\d+)")


def disassemble(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def written_by(instruction: str) -> range:
    """Numbers of the registers that an instruction writes."""
    found = WRITTEN.match(re.sub(r"^@!?U?P\w+\s+", "", instruction))
    if not found or found[1].startswith(("ST", "RED", "BRA")):
        return range(0)
    name, first = found[1], int(found[2])
    wide = (
        4
        if ".128" in name or name.endswith(".4")
        else 2
        if ".64" in name or "WIDE" in name or name.endswith(".2")
        else 1
    )
    return range(first, first + wide)


def stale(text: str) -> list[str]:
    """Instructions of nvdisasm's `text` that decode what their loop writes only later."""
    instructions: list[str] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if found := LABEL.match(line):
            labels[found[1]] = len(instructions)
        elif found := INSTRUCTION.match(line):
            instructions.append(found[1].strip())
    wrong = []
    for end, instruction in enumerate(instructions):
        found = BRANCH.search(instruction)
        if not found or labels.get(found[1], end + 1) > end:
            continue
        start = labels[found[1]]
        for at in range(start, end):
            if decoded := DECODED.search(instructions[at]):
                writers = [i for i in range(start, end + 1) if int(decoded[1]) in written_by(instructions[i])]
                if writers and writers[0] >= at:
                    wrong.append(instructions[at])
    return wrong
