"""Misuse raises before any work, and the message names what was given, what is allowed and the remedy."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import jlaqat
from jlaqat.spec import DeltaQuant, QuantArrays, QuantConfigError, QuantSpec
from jlaqat.testing import make_inputs

X = make_inputs(0, B=2, T=5, H=2, HV=4, K=8, V=6)
ONE = make_inputs(0, B=1, T=5, H=2, HV=4, K=8, V=6, num_sequences=2)
STATIC = DeltaQuant(state=QuantSpec.fp8(scale="static"))

CASES = {
    "rank": (X | {"q": X["q"][0]}, {}, r"q is float32\[5, 2, 8\]; it must be \[B, T, H, K\]"),
    "integer q": (X | {"q": X["q"].astype(np.int32)}, {}, r"q is int32.*one of float32, bfloat16, float16, float64"),
    "mixed dtypes": (
        X | {"v": jnp.asarray(X["v"], jnp.bfloat16)},
        {},
        "float32, float32 and bfloat16.*share one dtype",
    ),
    "q and k": (X | {"q": X["q"][..., :4]}, {}, r"q is float32\[2, 5, 2, 4\] and k is float32\[2, 5, 2, 8\]"),
    "empty batch": (
        X | {k: v[:0] for k, v in X.items()},
        {},
        r"k is float32\[0, 5, 2, 8\]; a batch must have at least",
    ),
    "tokens": (X | {"v": X["v"][:, :4]}, {}, r"v is float32\[2, 4, 4, 6\] but k is"),
    "grouping": (X | {"v": X["v"][:, :, :3]}, {}, "HV=3 heads and k has H=2; HV must be a multiple of H"),
    "g": (
        X | {"g": X["g"][..., None]},
        {},
        r"g is float32\[2, 5, 4, 1\]; it must be .* = \[2, 5, 4\] .*\[2, 5, 4, 8\]",
    ),
    "beta": (X | {"beta": X["beta"][:, :, :2]}, {}, r"beta is float32\[2, 5, 2\]; it must be .* = \[2, 5, 4\]"),
    "integer g": (X | {"g": X["g"].astype(np.int32)}, {}, "g is int32.*floating point"),
    "state": (X | {"initial_state": X["initial_state"][:1]}, {}, r"\[1, 4, 8, 6\]; it must be .* = \[2, 4, 8, 6\]"),
    "cu rank": (
        ONE,
        {"cu_seqlens": np.zeros((1, 2), np.int32)},
        r"cu_seqlens is int32\[1, 2\]; it must be int32\[N \+ 1\]",
    ),
    "cu dtype": (ONE, {"cu_seqlens": np.array([0.0, 5.0], np.float32)}, r"cu_seqlens is float32\[2\]"),
    "cu with batch": (X, {"cu_seqlens": [0, 2, 5]}, "B=2; packed sequences need B = 1"),
    "cu start": (ONE, {"cu_seqlens": [1, 2, 5]}, "starts at 1; it must start at 0"),
    "cu falls": (ONE, {"cu_seqlens": [0, 4, 3]}, "decreases from 4 to 3 at index 2"),
    "cu end": (ONE, {"cu_seqlens": [0, 4, 6]}, "ends at 6, past the T=5 tokens"),
    "packed state": (
        X | {k: v[:1] for k, v in X.items()},
        {"cu_seqlens": [0, 2, 5]},
        r"= \[2, 4, 8, 6\].*len\(cu_seqlens\)",
    ),
    "backend": (
        X,
        {"backend": "cuda"},
        "backend='cuda' is unknown; choose one of 'auto', 'xla', 'recurrent', 'reference', 'triton'",
    ),
    "scale": (X, {"scale": "big"}, "scale='big' must be a finite Python number"),
    "scale nan": (X, {"scale": float("nan")}, "scale=nan must be a finite Python number"),
    "quant type": (X, {"quant": QuantSpec.fp8()}, "is a QuantSpec; give a DeltaQuant"),
    "quant dict": (X, {"quant": {"state": "fp8"}}, "is a dict; give a DeltaQuant"),
    "arrays type": (X, {"quant_arrays": {"step": 1}}, "quant_arrays is a dict; give a QuantArrays"),
    "amax missing": (X, {"quant": STATIC}, "state_amax is missing; calibrate first"),
    "amax shape": (
        X,
        {"quant": STATIC, "quant_arrays": QuantArrays(state_amax=np.ones(3, np.float32))},
        r"shape \[3\]; e4m3.*needs \[4, 1\]",
    ),
    "amax unread": (
        X,
        {
            "quant": DeltaQuant(state=QuantSpec.fp8()),
            "quant_arrays": QuantArrays(state_amax=np.ones((4, 1), np.float32)),
        },
        "state_amax was given but the state quantizer is e4m3.*reads none",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_misuse(case):
    operands, settings, message = CASES[case]
    with pytest.raises(ValueError, match=f"(?s){message}"):
        jlaqat.delta_rule(**operands, **settings)
    if "backend" not in settings:  # under jit too, since none of it needs values but those of a concrete cu_seqlens
        with pytest.raises(ValueError, match=f"(?s){message}"):
            jax.jit(lambda x: jlaqat.delta_rule(**x, **settings))(operands)


def test_quantizer_errors_are_config_errors():
    for settings in ({"quant": STATIC}, {"quant": 1}, {"quant_arrays": 1}):
        with pytest.raises(QuantConfigError):
            jlaqat.delta_rule(**X, **settings)
    with pytest.raises(QuantConfigError, match="cannot be rounded beside a state with cadence=1"):
        DeltaQuant(state=QuantSpec.fp8(cadence=1), w=QuantSpec.fp8())
    with pytest.raises(QuantConfigError, match="w belongs to chunks"):
        jlaqat.delta_rule_recurrent(**X, quant=DeltaQuant(w=QuantSpec.fp8()))


def test_backends_that_cannot_serve():
    with pytest.raises(NotImplementedError, match="backend='triton' cannot serve this call.*Use backend='xla'"):
        jlaqat.delta_rule(**X, backend="triton")
    with pytest.raises(NotImplementedError, match="must not be traced; use backend='xla'"):
        jax.jit(lambda x, cu: jlaqat.delta_rule(**x, cu_seqlens=cu, backend="reference"))(ONE, np.array([0, 2, 5]))
    with pytest.raises(NotImplementedError, match="gathers no statistics"):
        jlaqat.delta_rule_observe(**X, backend="reference")


def test_a_layer_refuses_an_unknown_backend_when_it_is_made():
    config = jlaqat.ModelConfig(vocab_size=8, hidden_size=8, num_layers=1, num_heads=1, head_dim=8, backend="trition")
    with pytest.raises(ValueError, match="backend='trition' is unknown; choose one of .*'triton'"):
        jlaqat.DecoderLM(config, rngs=nnx.Rngs(0))


def test_auto_says_once_what_it_chose(caplog):
    from jlaqat import backends

    backends._say_once.cache_clear()
    with caplog.at_level("INFO", logger="jlaqat"):
        for _ in range(2):
            jax.eval_shape(lambda x: jlaqat.delta_rule(**x), X)
    assert [r.message for r in caplog.records] == ["backend='auto' runs delta_rule on 'xla' (plain JAX)"]


def test_a_rounded_state_refuses_tokens_on_several_devices():
    x = make_inputs(0, T=8, H=2, K=8)
    quant = DeltaQuant(state=QuantSpec.fp8())
    mesh = jax.make_mesh((4,), ("t",), axis_types=(jax.sharding.AxisType.Auto,))
    k = jax.device_put(x["k"], NamedSharding(mesh, PartitionSpec(None, "t")))
    with pytest.raises(
        ValueError, match=r"k float32\[1, 8, 2, 8\] is sharded along its tokens.*DeltaQuant\(state=None\)"
    ):
        jlaqat.delta_rule(**x | {"k": k}, quant=quant)
    explicit = jax.make_mesh((4,), ("t",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(explicit):
        v = jax.device_put(x["v"], PartitionSpec(None, "t"))
        with pytest.raises(ValueError, match="v .* is sharded along its tokens"):
            jax.jit(lambda x: jlaqat.delta_rule(**x, quant=quant))(x | {"v": v})


def test_a_step_refuses_a_token_axis():
    operands = [X[n] for n in ("q", "k", "v", "g", "beta", "initial_state")]
    with pytest.raises(ValueError, match=r"q is float32\[2, 5, 2, 8\]; a step takes \[B, H, K\]"):
        jlaqat.delta_rule_step(*operands)
    with pytest.raises(ValueError, match="initial_state is"):
        jlaqat.delta_rule_step(*(a[:, 0] for a in operands[:5]), operands[5][:1])


@pytest.mark.slow
def test_the_worked_example_of_the_docs_runs():
    text = (Path(__file__).parents[1] / "docs" / "delta_rule.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(examples) == 1
    names: dict = {}
    exec(examples[0], names)
    assert np.isfinite(names["gradient"]).all() and np.any(names["gradient"])
