"""Stack bytes a thread (spills and local arrays) of the chunked kernels, as they are tuned for SM90, K = V = 128.

    python tests/spills.py        writes spills_sm90.json for the Triton that is installed; the numbers of others stay

test_spills.py holds each kernel to its own number.
"""

import json
import pathlib

from jlaqat.kernels.aot import compile_pipeline
from jlaqat.kernels.call import triton_version
from jlaqat.spec import DeltaQuant, QuantSpec

BUDGETS = pathlib.Path(__file__).parent / "spills_sm90.json"
QUANTS = {"plain": DeltaQuant(), "fp8": DeltaQuant(state=QuantSpec.fp8(), w=QuantSpec.fp8())}
BATCHES = {"few": 1, "many": 8}  # of 16 heads: the two classes of the table
# gate, rounding, class of the table, kernels written for SM90 (the table names some for GDN)
CASES = [
    (gate, quant, size, hopper)
    for gate in ("gdn", "kda")
    for quant in QUANTS
    for size in BATCHES
    for hopper in ((False, True) if gate == "gdn" else (False,))
]


def name_of(case):
    gate, quant, size, hopper = case
    return f"{gate}-{quant}-{size}" + ("-hopper" if hopper else "")


def stacks(case):
    """{kernel: bytes}, the most of the launches that share a kernel."""
    gate, quant, size, hopper = case
    sizes = dict(key_dim=128, value_dim=128, heads=(16, 16), batch=BATCHES[size], hopper=hopper)
    most: dict[str, int] = {}
    for kernel in compile_pipeline(90, gate, "bfloat16", QUANTS[quant], **sizes):
        most[kernel.name] = max(most.get(kernel.name, 0), kernel.stack)
    return most


def version():
    return ".".join(map(str, triton_version()))


if __name__ == "__main__":
    recorded = json.loads(BUDGETS.read_text()) if BUDGETS.exists() else {}
    recorded[version()] = {name_of(case): stacks(case) for case in CASES}
    BUDGETS.write_text(json.dumps(dict(sorted(recorded.items())), indent=1) + "\n")
