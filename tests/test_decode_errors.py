"""What decoding under a policy refuses: calls before any work, carries of another decode, lengths out of range."""

import dataclasses
import functools
import pathlib
import sys

import jax
import numpy as np
import pytest

import jlaqat
from jlaqat import DecodePolicy, QuantArrays, QuantSpec

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from tiny_decodes import decode, operands

pytestmark = pytest.mark.usefixtures("strict_promotion")


def test_refusals_come_before_any_work():
    x, state = operands(15, B=2, T=4)
    call = functools.partial(jlaqat.delta_rule_decode, **x, state=state)
    with pytest.raises(ValueError, match="give a DecodePolicy"):
        call(quant=QuantSpec.fp8())
    with pytest.raises(ValueError, match=r"prefix_lengths\[1\]=5 is out of range; sequence 1 has 4 tokens"):
        call(prefix_lengths=np.array([0, 5]))
    with pytest.raises(ValueError, match=r"prefix_lengths\[0\]=3 is out of range; sequence 0 has 2 tokens"):
        call(prefix_lengths=np.array([3, 3]), lengths=np.array([2, 4]))
    with pytest.raises(ValueError, match=r"lengths\[0\]=-1"):
        call(lengths=np.array([-1, 4]))
    with pytest.raises(ValueError, match="one length for each of the N=2 sequences"):
        call(prefix_lengths=np.array([1, 1, 1]))
    with pytest.raises(ValueError, match="lengths and cu_seqlens were both given"):
        packed = {n: a[:1] for n, a in x.items()}
        jlaqat.delta_rule_decode(**packed, cu_seqlens=np.array([0, 4]), lengths=np.array([4]))
    with pytest.raises(ValueError, match="dynamic scales; leave it out"):
        call(quant_arrays=QuantArrays(state_amax=np.ones(2)))
    with pytest.raises(NotImplementedError, match="backend='triton' cannot serve this call"):
        call(backend="triton")
    with pytest.raises(ValueError, match="V=20 is no multiple of 32"):
        jlaqat.delta_rule_decode(
            **operands(15, B=2, T=4, V=20)[0], quant=DecodePolicy(state=QuantSpec.int8_hadamard32())
        )
    with pytest.raises(NotImplementedError, match="must not be traced"):
        jax.jit(lambda n: call(backend="reference", prefix_lengths=n))(np.array([1, 1]))


@pytest.mark.parametrize("every", [0, -64, True, 1.0, None, "all"])
def test_checkpoint_every_must_be_a_positive_integer(every):
    x, state = operands(5, B=1, T=2)
    with pytest.raises(ValueError, match="checkpoint_every=.*positive integer"):
        jlaqat.delta_rule_decode(**x, state=state, checkpoint_every=every)


def test_carries_of_another_decode_are_refused():
    x, state = operands(14, B=2, T=1)
    policy = DecodePolicy.preset("serving")
    carry = decode(x, state, policy)[1]
    call = functools.partial(jlaqat.delta_rule_decode, state=carry)
    with pytest.raises(ValueError, match="another policy .window: 8 against 4.*carry.state"):
        call(**x, quant=dataclasses.replace(policy, window=4))
    other = dataclasses.replace(policy, prefill_state_qdq=True)  # concerns prefixes alone
    assert jax.eval_shape(lambda: call(**x, quant=other)[0]).shape == (2, 1, 2, 32)
    with pytest.raises(ValueError, match=r"the carry holds states \[2, 2, 8, 32\]"):
        call(**operands(14, B=1, T=1)[0], quant=policy)
    with pytest.raises(ValueError, match="the carry's ring has 1 key heads"):
        call(**operands(14, B=2, T=1, H=2)[0], quant=policy)
    with pytest.raises(ValueError, match="the carry's ring has .* gates"):
        call(**operands(14, B=2, T=1, gate="kda")[0], quant=policy)
    with pytest.raises(ValueError, match="quant is None; pass the policy that made it"):
        jlaqat.delta_rule_step(**{n: a[:, 0] for n, a in x.items()}, state=carry)


def test_traced_lengths_that_break_the_rules_give_nan():
    x, state = operands(16, B=2, T=4)
    o, carry = decode(x, state, DecodePolicy(), prefix_lengths=np.array([1, 5], np.int32))
    assert np.isnan(o).all() and np.isnan(carry.state()).all()
