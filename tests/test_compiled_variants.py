"""The pairwise sets of variants that are compiled without a GPU: every pair of values is in them, or is impossible."""

import itertools
import pathlib
import sys

import pytest

pytest.importorskip("triton")

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import compiled_variants as chosen

NEVER_ROUNDED = ("state", "float32")
IMPOSSIBLE = {
    "chunks": set(),
    "decoding": {(NEVER_ROUNDED, ("rounding", "stochastic")), (NEVER_ROUNDED, ("feedback", True))},
}


@pytest.mark.parametrize(
    "name, axes, variants",
    [
        ("chunks", chosen.CHUNKED, chosen.CHUNKED_VARIANTS),
        ("decoding", chosen.DECODING, chosen.DECODING_VARIANTS),
    ],
    ids=["chunks", "decoding"],
)
def test_every_pair_of_values_is_compiled_or_named_impossible(name, axes, variants):
    uncovered = set()
    for (a, xs), (b, ys) in itertools.combinations(axes.items(), 2):
        for x, y in itertools.product(xs, ys):
            if not any(variant[a] == x and variant[b] == y for variant in variants):
                uncovered.add(((a, x), (b, y)))
    assert uncovered == IMPOSSIBLE[name]
    for variant in variants:
        assert list(variant) == list(axes) and all(variant[axis] in axes[axis] for axis in axes)


def test_there_are_few_variants():
    assert len(chosen.CHUNKED_VARIANTS) + len(chosen.DECODING_VARIANTS) <= 60
