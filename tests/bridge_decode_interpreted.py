"""Decoding from PyTorch through Triton's interpreter. Run by test_bridge_decode.py in a process of its own.

The JAX path runs here as well, its launches called back into the same interpreter, so that the bits of both can be
compared without a GPU.
"""

import os
import sys
import textwrap

sys.path.insert(0, os.path.dirname(__file__))
os.environ["TRITON_INTERPRET"] = "1"

import bridge_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from bridge_oracle import ARRAYS, CASES, GRADIENTS, JAX_ARRAYS, OPERANDS, Case, fields, to_torch

import jlaqat
from jlaqat import DecodePolicy, QuantArrays, QuantConfigError, QuantSpec, torch_bridge
from jlaqat.kernels.call import UnsupportedByKernels
from jlaqat.testing import assert_close, make_inputs
from jlaqat.torch_bridge import autograd, delta_rule_decode, delta_rule_step
from jlaqat.torch_bridge import run as bridge_run

torch_run = bridge_run.torch_run


def poisoned(launch):
    return torch_run(launch, poison=True)


@pytest.fixture(autouse=True)
def through_the_interpreter(monkeypatch):
    monkeypatch.setattr("jlaqat.kernel_calls.Target.run", oracle.called_back(poisoned))
    monkeypatch.setattr(bridge_run, "torch_run", poisoned)
    monkeypatch.setattr(autograd, "torch_run", poisoned)


FAST = ("int8", "drawn", "replay drawn", "factors", "replay prefix")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in FAST else pytest.mark.slow) for n in CASES])
def test_the_bits_of_the_jax_path(name):
    """Outputs, carry and every gradient."""
    case = CASES[name]
    x, do = oracle.operands(case)
    given = x, do, case.policy(16), case.bounds, case.every
    tensors = oracle.through_torch(*given, "cpu")
    # SM80 rounds to E4M3 by arithmetic, as the bridge does here; prefixes have the launch parameters of SM90.
    with jlaqat.compile_for(90 if "prefix" in name else 80):
        arrays = oracle.through_jax(*given)
    oracle.assert_equal_bits(tensors, arrays, case.gradients)


def tokens_of(x, device="cpu"):
    return [to_torch(x[name], device) for name in OPERANDS]


@pytest.mark.parametrize("name", ["drawn", "replay drawn", pytest.param("factors", marks=pytest.mark.slow)])
def test_steps_have_the_bits_of_one_call(name):
    """In place and not; a backward that kept what a step overwrote says so."""
    policy, case = CASES[name].policy(16), Case(None, CASES[name].gate)
    x, _ = oracle.operands(case, T=4)
    tokens, state = tokens_of(x), to_torch(x["state"], "cpu")
    settings = dict(quant=policy, quant_arrays=ARRAYS)
    o, end = delta_rule_decode(*tokens, None, state, True, **settings)
    _, carry = delta_rule_decode(*(a[:, :2] for a in tokens), None, state, True, **settings)
    kept = {key: oracle.as_bytes(a).copy() for key, a in fields(carry).items()}
    v = tokens[2].clone().requires_grad_()
    graph, _ = delta_rule_decode(*tokens[:2], v, *tokens[3:], None, carry, **settings)
    row = [a[:, 2] for a in tokens]
    out, after = delta_rule_step(*row, carry, **settings)
    assert torch.equal(out, o[:, 2])
    assert all(np.array_equal(a, oracle.as_bytes(fields(carry)[key])) for key, a in kept.items())
    _, in_place = delta_rule_step(*row, carry, **settings, inplace=True)
    oracle.assert_equal_bits(fields(in_place), fields(after))
    with torch.inference_mode():
        out, after = delta_rule_step(*(a[:, 3] for a in tokens), in_place, **settings, inplace=True)
    assert torch.equal(out, o[:, 3])
    oracle.assert_equal_bits(fields(after), fields(end))
    if policy.mode == "replay":
        assert after.ring_r.data_ptr() == carry.ring_r.data_ptr()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            graph.sum().backward()


@pytest.mark.parametrize("name", ["replay", pytest.param("drawn", marks=pytest.mark.slow)])
def test_the_next_turn_of_a_dialogue_has_the_bits_of_the_jax_path(name):
    """A prefix after decoded tokens, for one sequence of two; and what a carry's state is."""
    policy = DecodePolicy(state=QuantSpec.int8(block_v=16), mode="replay", window=3)
    if name == "drawn":
        policy = DecodePolicy(state=QuantSpec.int8(block_v=16, rounding="stochastic"), error_feedback=True)
    x, _ = oracle.operands(Case(None))
    state, rows = x.pop("state"), {key: jnp.asarray(a) for key, a in x.items()}
    settings = dict(quant=policy, quant_arrays=JAX_ARRAYS, backend="triton")
    with jlaqat.compile_for(90):
        first = jlaqat.delta_rule_decode(**{key: a[:, :2] for key, a in rows.items()}, state=state, **settings)[1]
        rest = {key: a[:, 2:] for key, a in rows.items()}
        o, end = jlaqat.delta_rule_decode(**rest, state=first, prefix_lengths=np.array([2, 0]), **settings)
    carry = oracle.carry_to_torch(first, "cpu")
    assert_close(carry.state(), first.state(), 1e-6, "state")
    settings = dict(quant=policy, quant_arrays=ARRAYS, prefix_lengths=[2, 0])
    got, after = delta_rule_decode(*(a[:, 2:] for a in tokens_of(x)), None, carry, True, **settings)
    if name == "drawn":
        oracle.assert_equal_bits({"o": got, **fields(after)}, {"o": o, **fields(end)})
    else:  # the state before the prefix is the ring's sums, in PyTorch's order
        assert_close(got, o, 1e-5, "o")
        assert_close(after.state(), end.state(), 1e-3, "state")
        assert after.position.tolist() == end.position.tolist() == [7, 7]
        assert after.cursor.tolist() == end.cursor.tolist() == [0, 1]


@pytest.mark.parametrize("name", ["rotated", "factors"])
def test_a_carry_s_state_is_jax_s(name):
    policy = CASES[name].policy(16)
    x, _ = oracle.operands(CASES[name], T=4)
    wanted = jlaqat.delta_rule_decode(**{key: jnp.asarray(a) for key, a in x.items()}, quant=policy, backend="xla")[1]
    assert_close(oracle.carry_to_torch(wanted, "cpu").state(), wanted.state(), 1e-6, "state")


# ------------------------------------------------------------------ against float64


PAIRS = [("token", "gdn"), ("replay", "kda"), ("token", "kda"), ("replay", "gdn")]


@pytest.mark.parametrize(("mode", "gate"), [*PAIRS[:2], *(pytest.param(*p, marks=pytest.mark.slow) for p in PAIRS[2:])])
def test_values_and_gradients_in_float64(mode, gate):
    """Unrounded, and INT8 within the bounds of what is rounded end to end; the definition by itself, autodiff's."""
    x = make_inputs(3, gate=gate, B=1, T=6, H=1, HV=2, K=12, V=40, dtype=np.float64)
    do = np.random.default_rng(0).normal(size=x["v"].shape)
    window = {"window": 4} if mode == "replay" else {}
    for spec, bound, gradient_bound in ((None, 1e-5, 1e-4), (QuantSpec.int8(granularity="key_row"), 0.03, 0.05)):
        policy = DecodePolicy(state=spec, mode=mode, readout="stored" if gate == "kda" else "working", **window)
        leaves = {key: torch.from_numpy(a).float().requires_grad_() for key, a in x.items()}
        o, _ = delta_rule_decode(**leaves, quant=policy, checkpoint_every=4)
        got = torch.autograd.grad(o, list(leaves.values()), torch.from_numpy(do).float())
        with jax.enable_x64(True):

            def reference(x, policy=policy):
                given = {"state" if key == "initial_state" else key: a for key, a in x.items()}
                return jlaqat.delta_rule_decode(**given, quant=policy, backend="reference")[0]

            wanted, pull = jax.vjp(reference, {key: jnp.asarray(a) for key, a in x.items()})
            gradients = pull(jnp.asarray(do))[0]
        assert_close(o.detach(), wanted, bound, "o")
        for key, d in zip(leaves, got, strict=True):
            assert_close(d, gradients[key], gradient_bound, f"d{key}")


def test_a_plain_step_has_gradients_through_its_state():
    """Two steps, a loss of the last state alone, grouped heads, against autograd in float64."""
    x, _ = oracle.operands(Case(None), T=2, V=16)
    leaves = [to_torch(x[name], "cpu").requires_grad_() for name in (*OPERANDS, "state")]
    *tokens, S = leaves
    for t in range(2):
        o, S = delta_rule_step(*(a[:, t] for a in tokens), S)
    weights = torch.randn(S.shape, generator=torch.Generator().manual_seed(0))
    got = torch.autograd.grad((S * weights).sum() + o.sum(), leaves)
    exact = [a.detach().double().requires_grad_() for a in leaves]
    q, k, v, g, beta, S = exact
    for t in range(2):
        R = g[:, t, :, None, None].exp() * S
        keys, queries = (a[:, t].repeat_interleave(2, 1) for a in (k, q))
        r = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", R, keys))
        S = R + keys[..., None] * r[..., None, :]
        o = 16**-0.5 * torch.einsum("bhkv,bhk->bhv", S, queries)
    wanted = torch.autograd.grad((S * weights).sum() + o.sum(), exact)
    for name, a, b in zip(GRADIENTS, got, wanted, strict=True):
        assert_close(a, b, 1e-4, name)


# ------------------------------------------------------------------ calls


def test_calls_without_tokens_and_of_prefixes_alone():
    x, _ = oracle.operands(Case(None), T=3)
    tokens, state = tokens_of(x), to_torch(x["state"], "cpu").requires_grad_()
    policy = DecodePolicy(state=QuantSpec.int8(block_v=16))
    o, carry = delta_rule_decode(*(a[:, :0] for a in tokens), None, state, True, quant=policy)
    assert o.shape == (2, 0, 2, 32) and carry.position.tolist() == [0, 0]
    codes, scale = jlaqat.rounding.quantize_codes(jnp.asarray(x["state"]), policy.state, site="state")
    assert np.array_equal(carry.values, codes) and np.array_equal(carry.scale, scale)
    o, carry = delta_rule_decode(*tokens, None, state, True, quant=policy, prefix_lengths=3)
    wanted, final_state = torch_bridge.chunk_delta_rule(*tokens, initial_state=state)
    assert torch.equal(o, wanted) and o.requires_grad and carry.position.tolist() == [3, 3]
    assert_close(carry.state(), final_state.detach(), 0.02, "state")
    assert delta_rule_decode(*tokens, quant=policy)[1] is None


def test_an_unrounded_state_is_not_changed_under_its_owner():
    """Steps of replay write in place, and a float32 state that was handed over is not theirs."""
    x, _ = oracle.operands(Case(None), T=2)
    tokens, state = tokens_of(x), to_torch(x["state"], "cpu")
    policy, before = DecodePolicy(mode="replay", window=1), state.clone()
    _, carry = delta_rule_step(*(a[:, 0] for a in tokens), state, quant=policy)
    delta_rule_step(*(a[:, 1] for a in tokens), carry, quant=policy, inplace=True)
    assert torch.equal(state, before)


FP8 = DecodePolicy(state=QuantSpec.fp8(block_v=16))
REFUSED = {
    "a format": (dict(quant=DecodePolicy(state=QuantSpec.nvfp4())), UnsupportedByKernels, "nvfp4.*choose what they"),
    "a limit": (dict(quant=DecodePolicy.preset("sglang_fp8")), UnsupportedByKernels, "amax to 240.*backend='xla'"),
    "handoff": (dict(quant=DecodePolicy.preset("flashinfer_cast")), UnsupportedByKernels, "not in mode='handoff'"),
    "factors": (
        dict(quant=DecodePolicy.preset("serving", ring_dtype="float32", factor_qdq=True)),
        UnsupportedByKernels,
        "scale r by 32 values",
    ),
    "initial": (dict(quant=DecodePolicy(state=FP8.state, quantize_initial=False)), UnsupportedByKernels, "rounded"),
    "a prefix": (
        dict(quant=DecodePolicy(state=QuantSpec.int8(granularity="key_row"), prefill_state_qdq=True), prefix_lengths=2),
        UnsupportedByKernels,
        "granularity='key_row'",
    ),
    "no policy": (dict(quant=QuantSpec.fp8()), QuantConfigError, "give a DecodePolicy"),
    "amax": (dict(quant_arrays=QuantArrays(w_amax=torch.ones(2))), QuantConfigError, "w_amax was given"),
    "arrays": (dict(quant_arrays={"step": 1}), QuantConfigError, "give a QuantArrays"),
    "rotated": (
        {"quant": CASES["rotated"].policy(16), "v": torch.zeros(2, 3, 2, 16)},
        QuantConfigError,
        "V=16 is no multiple of 32",
    ),
    "every": (dict(checkpoint_every=0), ValueError, "positive integer"),
    "both": (dict(lengths=[3, 3], cu_seqlens=[0, 3]), ValueError, "were both given|packed sequences need B = 1"),
    "cu_seqlens": (dict(cu_seqlens=torch.tensor([0, 3])), ValueError, "packed sequences need B = 1"),
    "lengths": (dict(lengths=torch.tensor([3, 4])), ValueError, r"lengths\[1\]=4 is out of range"),
    "prefix": (dict(prefix_lengths=[3, 3], lengths=[3, 2]), ValueError, r"prefix_lengths\[1\]=3 is out of range"),
    "state": (dict(initial_state=torch.zeros(2, 2, 16, 16)), ValueError, r"must be .* = \[2, 2, 16, 32\]"),
    "a state of JAX": (dict(initial_state=jnp.zeros((2, 2, 16, 32))), ValueError, "give a torch.Tensor"),
    "scale": (dict(scale=float("nan")), ValueError, "finite Python number"),
    "device": (dict(beta=torch.zeros(2, 3, 2, device="meta")), ValueError, "beta is on meta and q on cpu"),
    "float64": (
        {
            name: torch.zeros(2, 3, heads, size).double()
            for name, heads, size in (("q", 1, 16), ("k", 1, 16), ("v", 2, 32))
        },
        UnsupportedByKernels,
        "float32 and the inputs are float64",
    ),
    "dtypes": (dict(q=torch.zeros(2, 3, 1, 16).half()), ValueError, "must share one dtype"),
    "numpy": (dict(q=np.zeros((2, 3, 1, 16))), ValueError, "q is a ndarray; give a torch.Tensor"),
    "gates": (dict(g=torch.zeros(2, 3, 2, 32)), ValueError, "g is float32.2, 3, 2, 32."),
    "K": (
        dict(q=torch.zeros(2, 3, 1, 272), k=torch.zeros(2, 3, 1, 272)),
        UnsupportedByKernels,
        "K is 272 and the kernels hold at most 256",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_before_any_launch(name, monkeypatch):
    def launched(launch):
        raise AssertionError(f"{launch.name} was launched")

    monkeypatch.setattr(bridge_run, "torch_run", launched)
    monkeypatch.setattr(autograd, "torch_run", launched)
    x, _ = oracle.operands(Case(None), T=3)
    del x["state"]
    change, error, message = REFUSED[name]
    given = {key: to_torch(a, "cpu") for key, a in x.items()} | {"quant": FP8} | change
    with pytest.raises(error, match=message):
        delta_rule_decode(**given)


def test_steps_refuse_what_is_no_step():
    x, _ = oracle.operands(Case(None), T=2)
    tokens, state = tokens_of(x), to_torch(x["state"], "cpu")
    with pytest.raises(ValueError, match=r"q is float32\[2, 2, 1, 16\]; a step takes a torch.Tensor \[B, H, K\]"):
        delta_rule_step(*tokens, state)
    row = [a[:, 0] for a in tokens]
    _, carry = delta_rule_decode(*(a[:, :0] for a in tokens), None, state, True, quant=FP8)
    with pytest.raises(ValueError, match="pass the policy that made it"):
        delta_rule_step(*row, carry)
    with pytest.raises(QuantConfigError, match="made under another policy"):
        delta_rule_step(*row, carry, quant=DecodePolicy.preset("vllm_int8"))
    with pytest.raises(ValueError, match="the carry holds states"):
        delta_rule_step(*(a[:1] for a in row), carry, quant=FP8)


def test_the_docstring_s_example_runs():
    text = torch_bridge.__doc__
    exec(textwrap.dedent(text[text.index("    import torch") : text.index("Imports PyTorch")]), {})
