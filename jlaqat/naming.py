"""Dotted names for the leaves of any pytree, the ones that tables, masks, sharding rules and checkpoints share."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from typing import Any

import jax


def path_parts(path: tuple[Any, ...]) -> tuple[str, ...]:
    """A key path of `jax.tree_util` as words: `layers[0]["bias"].value` gives ("layers", "0", "bias").

    The `.value` that `nnx.Variable` adds below every leaf says nothing and is left out.
    """
    words = []
    for key in path:
        for attribute in ("key", "name", "idx"):
            if hasattr(key, attribute):
                words.append(str(getattr(key, attribute)))
                break
        else:
            words.append(str(key))
    return tuple(words[:-1] if len(words) > 1 and words[-1] == "value" else words)


def named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves of `tree` by dotted name, in the order of `jax.tree.leaves`: {"layers.0.mixer.q_proj.kernel": …}."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    named = {".".join(path_parts(path)): leaf for path, leaf in leaves}
    if len(named) != len(leaves):
        raise ValueError("two leaves share a dotted name; rename one of the modules or attributes that hold them.")
    return named


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether the glob (fnmatch, case-sensitive) of any pattern covers the whole dotted name."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
