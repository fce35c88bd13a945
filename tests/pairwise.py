"""Few variants in which every two values of different axes meet, where all combinations would be too many."""

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Variant = dict[str, Any]


def pairwise(
    axes: Mapping[str, Sequence[Any]],
    impossible: Callable[[Variant], bool],
    cost: Callable[[Variant], float],
    *,
    seed: int,
    candidates: int = 40,
) -> list[Variant]:
    """Values by axis, the same ones each time. impossible: whether values of some axes, by name, exclude each other.

    Greedy: of some random variants, each grown around a pair that is still missing, the one with most such pairs for
    its cost. Seeds differ in how many variants it takes.
    """
    rng = random.Random(seed)
    pairs = ({a: x, b: y} for a, b in itertools.combinations(axes, 2) for x in axes[a] for y in axes[b])
    missing = {_key(pair) for pair in pairs if not impossible(pair)}
    variants = []
    while missing:
        starts = sorted(missing, key=repr)
        grown = [_grow(dict(rng.choice(starts)), axes, impossible, missing, rng) for _ in range(candidates)]
        variants.append(max(grown, key=lambda variant: len(_pairs(variant) & missing) / cost(variant)))
        missing -= _pairs(variants[-1])
    return variants


def _key(pair: Variant) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(pair.items()))


def _pairs(variant: Variant) -> set[tuple[tuple[str, Any], ...]]:
    return set(itertools.combinations(sorted(variant.items()), 2))


def _grow(chosen: Variant, axes, impossible, missing, rng) -> Variant:
    """The other axes' values in a random order of axes, each with the most missing pairs among those chosen so far."""
    others = [name for name in axes if name not in chosen]
    for name in rng.sample(others, len(others)):
        values = [x for x in axes[name] if not impossible({**chosen, name: x})]
        rng.shuffle(values)
        gains = [sum(_key({a: y, name: x}) in missing for a, y in chosen.items()) for x in values]
        chosen[name] = values[gains.index(max(gains))]
    return {name: chosen[name] for name in axes}
