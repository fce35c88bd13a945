"""Arrays of more than 2^31 elements, where an offset of 32 bits goes astray: the same bits as of a few sequences alone.

Outputs are full of NaN beforehand and hold none afterwards. A test takes up to 65 GB of the GPU, one at a time.
"""

import fcntl
import gc
import os
import pathlib
import tempfile

import pytest
import torch
from kernel_checks import hardware_fp8
from recurrent_oracle import SPECS

from jlaqat.kernel_calls import device_capability
from jlaqat.kernels import pipeline, recurrent_gradients, recurrent_pipeline, replay_pipeline
from jlaqat.kernels.call import Inputs, options_for
from jlaqat.kernels.recurrent_pipeline import Bounds
from jlaqat.kernels.tuning import choose
from jlaqat.spec import DeltaQuant, QuantSpec
from jlaqat.torch_bridge.run import poisoned_run

DEVICE, DTYPE = "cuda", torch.bfloat16
LARGE = 2**31
AHEAD = bool(os.environ.get("JLAQAT_COMPILE_AHEAD"))  # compile_ahead.py: what is compiled depends on no batch
PLAIN = DeltaQuant()
FP8 = DeltaQuant(state=QuantSpec.fp8(), w=QuantSpec.fp8())
FP8_16 = DeltaQuant(state=QuantSpec.fp8(block_v=16), w=QuantSpec.fp8())


def sequences(count):
    return 6 if AHEAD else count


@pytest.fixture(autouse=True)
def whole_gpu():
    if not AHEAD and torch.cuda.get_device_properties(0).total_memory < 90e9:
        pytest.skip("needs a GPU of 90 GB")
    with (pathlib.Path(tempfile.gettempdir()) / "jlaqat_large_arrays.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        torch.cuda.empty_cache()
        yield
        gc.collect()
        torch.cuda.empty_cache()


def normal(*shape, dtype=DTYPE):
    return torch.randn(*shape, device=DEVICE, dtype=dtype)


def part_of(tree, start, stop):
    """Rows start..stop of every array of a tuple."""
    return type(tree)(*(None if x is None else x[start:stop] for x in tree))


def places(count):
    """Where two sequences are compared: first, in the middle and last."""
    return {0, count // 2, count - 2}


def assert_finite(name, x):
    if x.is_floating_point():
        for part in x.flatten().split(1 << 28):
            assert torch.isfinite(part).all(), name


def assert_equal(found, wanted, where):
    """{name: array} of equal bits."""
    assert found.keys() == wanted.keys()
    for name, x in found.items():
        x, y = (a.contiguous().view(torch.uint8) for a in (x, wanted[name]))
        assert torch.equal(x, y), f"{name}, {where}: {(x != y).sum().item()} bytes of {x.numel()} differ"


def named(**trees):
    """Arrays of tuples by names of their own."""
    return {
        f"{tree}.{field}": x
        for tree, arrays in trees.items()
        for field, x in arrays._asdict().items()
        if isinstance(x, torch.Tensor)
    }


# ------------------------------------------------------------------ chunks

# name: (gate is KDA, sizes, quant, sequences are packed). Of more than 2^31 elements:
CHUNKED = {
    "gdn-fp8": (False, dict(b=514, t=4096, h=8, hv=16, k=64, v=64), FP8, False),  # v, P, X, states, dq by value head …
    "gdn-plain": (False, dict(b=258, t=4096, h=16, hv=16, k=128, v=128), PLAIN, False),  # all but P, X; states 2^32
    "kda-fp8": (True, dict(b=258, t=4096, h=16, hv=16, k=128, v=16), FP8_16, True),  # q, k, w, g and its sums
    "kda-pairs": (True, dict(b=514, t=4096, h=16, hv=16, k=16, v=16), FP8_16, False),  # A, P, X and their gradients
}


def chunked_inputs(kda, packed, b, t, h, hv, k, v):
    key, value = normal(b, t, h, k).mul_(k**-0.5), normal(b, t, hv, v)
    g = torch.rand(b, t, hv, *([k] if kda else []), device=DEVICE).mul_(-0.1)
    beta = torch.rand(b, t, hv, device=DEVICE, dtype=DTYPE)
    tokens = (key, key, value, g, beta)
    if packed:
        tokens = (x.reshape(1, b * t, *x.shape[2:]) for x in tokens)
    return Inputs(*tokens, normal(b, hv, k, v, dtype=torch.float32).mul_(0.3), bounds_of(b, t) if packed else None)


def bounds_of(count, length):
    return torch.arange(0, count * length + 1, length, dtype=torch.int32, device=DEVICE)


def two_sequences(given, n, length):
    if given.cu_seqlens is None:
        return part_of(given, n, n + 2)
    tokens = (x[:, n * length : (n + 2) * length] for x in given[:5])
    return Inputs(*tokens, given.initial_state[n : n + 2], bounds_of(2, length))


def results_of_two(results, n, length, packed):
    """Outputs and gradients of sequences n and n + 1; states are a row a sequence in any case."""
    states = ("final_state", "dinitial_state")
    return {
        name: x[:, n * length : (n + 2) * length] if packed and name not in states else x[n : n + 2]
        for name, x in results.items()
    }


def forward_and_backward(given, options):
    """o, the final state and all gradients; the cotangents are v and the initial state."""
    o, final_state, residuals = pipeline.forward(poisoned_run, given, options)
    gradients = pipeline.backward(poisoned_run, given, residuals, given.v, given.initial_state, options)
    return {"o": o, "final_state": final_state} | {f"d{name}": x for name, x in gradients._asdict().items()}


@pytest.mark.parametrize("name", CHUNKED)
def test_chunks(name):
    kda, sizes, quant, packed = CHUNKED[name]
    count, length = sequences(sizes["b"]), sizes["t"]
    capability = device_capability()
    tuning = choose(capability, "kda" if kda else "gdn", quant.state is not None, "many")  # for a few sequences too
    options = options_for(capability, scale=sizes["k"] ** -0.5, quant=quant, tuning=tuning)
    given = chunked_inputs(kda, packed, **sizes | {"b": count})
    assert count * length * sizes["hv"] * max(64, sizes["k"]) > LARGE
    results = forward_and_backward(given, options)
    for field, x in results.items():
        assert_finite(field, x)
    for n in places(count):
        alone = forward_and_backward(two_sequences(given, n, length), options)
        assert_equal(results_of_two(results, n, length, packed), alone, f"sequences {n} and {n + 1}")


# ------------------------------------------------------------------ decoding

STATES = dict(b=4100, h=8, hv=32, k=128, v=128)


def decode_tokens(kda, t, b, h, hv, k, v):
    g = torch.rand(b, t, hv, *([k] if kda else []), device=DEVICE).mul_(-0.1)
    beta = torch.rand(b, t, hv, device=DEVICE, dtype=DTYPE)
    keys = normal(b, t, h, k), normal(b, t, h, k).mul_(k**-0.5)
    return recurrent_pipeline.Tokens(*keys, normal(b, t, hv, v), g, beta)


def entering_states(tokens, options, feedback):
    """Any codes and scales: drawn, since rounding so many values takes longer than the test."""
    count = tokens.q.shape[0]
    values, scale = recurrent_pipeline.Call(tokens, options).kept(count)
    lost = normal(*values.shape, dtype=torch.float32).mul_(0.01) if feedback else None
    if values.dtype != "uint8":
        return recurrent_pipeline.State(normal(*values.shape, dtype=getattr(torch, values.dtype)), None, lost)
    codes = torch.randint(0, 120, values.shape, dtype=torch.uint8, device=DEVICE)  # below E4M3's NaN
    return recurrent_pipeline.State(codes, torch.rand(scale.shape, device=DEVICE).mul_(0.01), lost)


def decode(tokens, state, d_leaving, options):
    out = recurrent_pipeline.forward(poisoned_run, tokens, state, options, stride=1)
    do = tokens.v
    gradients = recurrent_pipeline.backward(poisoned_run, tokens, state, out.saved, do, d_leaving, options)
    return {"o": out.o} | named(state=out.state, saved=out.saved, d=gradients)


@pytest.mark.parametrize(
    ("spec", "kda", "feedback"),
    [("e4m3-tile", False, False), ("float32", True, False), ("int8-key_row", False, True)],
    ids=["gdn-fp8", "kda-float32", "gdn-int8-feedback"],
)
def test_decoding(spec, kda, feedback):
    count = sequences(STATES["b"])
    tokens = decode_tokens(kda, 2, **STATES | {"b": count})
    options = recurrent_pipeline.Options(scale=0.1, state=SPECS[spec], hardware_fp8=hardware_fp8())
    state = entering_states(tokens, options, feedback)
    assert state.values.numel() > LARGE
    # A gradient of as many elements: values themselves where they are float32.
    d_leaving = state.values if spec == "float32" else normal(*state.values.shape, dtype=torch.float32)
    results = decode(tokens, state, d_leaving, options)
    for field, x in results.items():
        assert_finite(field, x)
    for n in places(count):
        given = (part_of(x, n, n + 2) for x in (tokens, state))
        alone = decode(*given, d_leaving[n : n + 2], options)
        assert_equal({field: x[n : n + 2] for field, x in results.items()}, alone, f"sequences {n} and {n + 1}")


def replay(tokens, state, ring, d_leaving, options):
    """A call with gradients; and its first token as a step, which changes copies in place."""
    out = replay_pipeline.forward(poisoned_run, tokens, state, ring, options, save=True)
    gradients = replay_pipeline.backward(poisoned_run, tokens, state, ring, out, tokens.v, d_leaving, options)
    first = replay_pipeline.Tokens(*(None if x is None else x[:, :1].contiguous() for x in tokens))
    copies = (type(x)(*(None if a is None else a.clone() for a in x)) for x in (state, ring))
    step = replay_pipeline.step(poisoned_run, first, *copies, options)
    assert torch.equal(step.o, out.o[:, :1])
    found = named(state=out.state, ring=out.ring, saved=out.saved, d=gradients, stepped=step.state, entries=step.ring)
    return {"o": out.o, "r": out.r} | found


@pytest.mark.parametrize("kda", [False, True], ids=["gdn", "kda"])
def test_replay(kda):
    count, length = sequences(STATES["b"]), 2
    tokens = decode_tokens(kda, 3, **STATES | {"b": count})
    options = recurrent_pipeline.Options(scale=0.1, state=SPECS["e4m3-tile"], hardware_fp8=hardware_fp8())
    state = entering_states(tokens, options, False)
    assert state.values.numel() > LARGE
    tokens = replay_pipeline.Tokens(*tokens)
    kept = [x[:, :length].contiguous() for x in (tokens.k, tokens.v, tokens.g)]
    ring = replay_pipeline.Ring(*kept, torch.arange(count, dtype=torch.int32, device=DEVICE) % length)
    d_leaving = normal(*state.values.shape, dtype=torch.float32)
    results = replay(tokens, state, ring, d_leaving, options)
    for field, x in results.items():
        if not field.startswith("saved."):  # where a sequence did not come to a window's end nothing is written
            assert_finite(field, x)
    for n in places(count):
        given = [part_of(x, n, n + 2) for x in (tokens, state, ring)]
        alone = replay(*given, d_leaving[n : n + 2], options)
        assert_equal({field: x[n : n + 2] for field, x in results.items()}, alone, f"sequences {n} and {n + 1}")


def test_gradients_of_segments_find_their_places():
    """Parts of a head are added, one after another, in rows that bounds say; the last sequence's from far behind."""
    count, length, heads, parts, width = 5, 64 if AHEAD else 32768, 16, 128, 128
    tokens = recurrent_pipeline.Tokens(*[torch.empty(1, count * length, heads, width, device=DEVICE, dtype=DTYPE)] * 5)
    numbers = torch.arange(count, dtype=torch.int32, device=DEVICE)
    bounds = Bounds(numbers * length, torch.full_like(numbers, length))
    call = recurrent_pipeline.Call(
        tokens, recurrent_pipeline.Options(scale=1.0), bounds, length, recurrent_pipeline.BACKWARD_WIDTH
    )
    x = normal(count, length, parts, width, dtype=torch.float32)
    assert x.numel() > LARGE
    into = torch.full((1, count * length, heads, width), float("nan"), device=DEVICE)
    placed = recurrent_gradients._place(poisoned_run, call, x, into)
    for n in range(count):
        wanted = torch.zeros(length, heads, width, device=DEVICE)
        for i in range(parts // heads):
            wanted += x[n, :, i :: parts // heads]
        assert torch.equal(placed[0, n * length : (n + 1) * length], wanted), n
