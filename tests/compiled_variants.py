"""What the kernels are compiled for without a GPU: axes of the chunked kernels and of decoding, and pairwise sets.

In each set every value of an axis meets every value of every other one, but for decoding's pairs that are impossible.
"""

import dataclasses

from pairwise import pairwise

from jlaqat.kernels.tuning import Tuning
from jlaqat.spec import DeltaQuant, QuantSpec

ARCHITECTURES = (80, 89, 90, 100, 120)

CHUNKED = {
    "architecture": ARCHITECTURES,
    "gate": ("gdn", "kda"),
    "dtype": ("bfloat16", "float16", "float32"),
    "state": ("plain", "e4m3", "int8"),
    "w": ("plain", "e4m3"),
    "packed": (False, True),
    "grouped": (False, True),
    "sizes": ("whole", "odd", "one_token"),
    "tuning": ("default", "x_in_p", "split"),
}

# K, V and tokens. Sizes of one are constants to Triton, and whole chunks mask nothing.
SIZES = {"whole": (32, 16, 4096), "odd": (20, 28, 4100), "one_token": (16, 32, 1)}
TUNINGS = {
    "default": None,
    "x_in_p": Tuning(x_in_p=True),
    "split": Tuning(split_output=True, decode_w=True),
}
STATES = {
    "plain": None,
    "e4m3": QuantSpec.fp8(block_v=16),
    "int8": QuantSpec.int8(block_v=32),
}

DECODING = {
    "architecture": ARCHITECTURES,
    "mode": ("token", "replay"),
    "gate": ("gdn", "kda"),
    "dtype": ("bfloat16", "float16", "float32"),
    "state": ("float32", "float16", "tile", "key_row", "value_row"),
    "rounding": ("nearest", "stochastic"),
    "feedback": (False, True),
    "packed": (False, True),
    "grouped": (False, True),
}
DECODED = {
    "float16": QuantSpec.float16(),
    "tile": QuantSpec.fp8(block_v=32),
    "key_row": QuantSpec.int8(granularity="key_row"),
    "value_row": QuantSpec.fp8(granularity="value_row"),
}


def decoding_cannot(chosen):
    """A float32 state is not rounded."""
    rounds = chosen.get("rounding") == "stochastic" or chosen.get("feedback", False)
    return chosen.get("state") == "float32" and rounds


def chunked_quant(variant):
    return DeltaQuant(state=STATES[variant["state"]], w=QuantSpec.fp8() if variant["w"] == "e4m3" else None)


def decoded_state(variant):
    """The QuantSpec of a state, None for float32."""
    if variant["state"] == "float32":
        return None
    return dataclasses.replace(DECODED[variant["state"]], rounding=variant["rounding"])


def name_of(variant):
    """As a test is called: values, and the names of flags that are on."""
    return "-".join(name if x is True else str(x) for name, x in variant.items() if x is not False)


def seconds_of_chunks(variant):
    """About what compiling takes."""
    return {"gdn": 3, "kda": 5}[variant["gate"]] * (2 if variant["dtype"] == "float32" else 1)


def seconds_of_decoding(variant):
    return {"token": 1.6, "replay": 4.5}[variant["mode"]]


CHUNKED_VARIANTS = pairwise(CHUNKED, lambda chosen: False, seconds_of_chunks, seed=86)
DECODING_VARIANTS = pairwise(DECODING, decoding_cannot, seconds_of_decoding, seed=1)
