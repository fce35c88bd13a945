"""Generation on a GPU: compressed states and outputs of the kernels have the bits that training emulates there."""

import pytest
from generation_oracle import POLICIES, check_generation


@pytest.mark.parametrize("policy", POLICIES)
def test_compressed_states_have_the_bits_that_training_emulates(policy, monkeypatch):
    check_generation(policy, "triton", monkeypatch)
