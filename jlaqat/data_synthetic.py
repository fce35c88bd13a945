"""Synthetic tasks that a recurrent state is made for: one function a task, one sequence a call.

Every function takes a `numpy.random.Generator` and the `DataConfig`, and returns the arrays of one sequence of
`seq_len` tokens: `inputs`, `targets`, `weights` (see `jlaqat.data`). Sequence `index` of a split is a pure function of
(seed, split, index), so any process can make any sequence at any time.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from jlaqat.data import DataConfig

Example = dict[str, np.ndarray]


def sequence_rng(seed: int, split: str, index: int) -> np.random.Generator:
    """The generator of sequence `index`: counter-based, so that nothing is drawn in order."""
    key = np.array([2 * seed + (split == "eval"), index], np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


def regression(rng: np.random.Generator, config: DataConfig) -> Example:
    """In-context linear regression: read (x, y = w·x) pairs, predict y for the next x.

    Token t holds (x_{t-1}, y_{t-1}, x_t), the pair to write and the query to answer, so a single delta-rule head solves
    the task: S is the running estimate of w, and each write is a Kaczmarz step whose error shrinks by 1 − 1/D a token.
    w ~ N(0, I/D); x is uniform on the sphere of radius √D, so that normalised keys lose nothing and y has variance 1.
    inputs float32 [T, 2D+1], targets float32 [T, 1], weights 1.
    """
    T, D = config.seq_len, config.input_dim
    w = rng.standard_normal(D) / math.sqrt(D)
    x = rng.standard_normal((T, D), np.float32)
    x *= math.sqrt(D) / np.linalg.norm(x, axis=-1, keepdims=True)
    y = x @ w
    seen = y + config.noise * rng.standard_normal(T)
    inputs = np.zeros((T, 2 * D + 1), np.float32)
    inputs[1:, :D], inputs[1:, D], inputs[:, D + 1 :] = x[:-1], seen[:-1], x
    return {"inputs": inputs, "targets": y[:, None].astype(np.float32), "weights": np.ones(T, np.float32)}


def recall(rng: np.random.Generator, config: DataConfig) -> Example:
    """Over-write recall: in each round every key is bound again to a fresh value; then each key is asked for once.

    Tokens: key value key value … (num_rounds × num_pairs pairs), then key ? key ? … (num_pairs queries), then padding.
    The target at a ? is the last value bound to the key before it; other positions weigh 0. A state narrower than
    num_pairs is overloaded. Ids: keys [0, P), values [P, P + num_values), ? = P + num_values.
    inputs, targets int32 [T]; weights float32 [T].
    """
    T, P, R = config.seq_len, config.num_pairs, config.num_rounds
    marker = P + config.num_values
    tokens, targets, weights = np.full(T, marker, np.int32), np.zeros(T, np.int32), np.zeros(T, np.float32)
    bound = np.zeros(P, np.int64)
    at = 0
    for _ in range(R):
        keys, values = rng.permutation(P), P + rng.integers(config.num_values, size=P)
        tokens[at : at + 2 * P : 2], tokens[at + 1 : at + 2 * P : 2] = keys, values
        bound[keys] = values
        at += 2 * P
    keys = rng.permutation(P)
    tokens[at : at + 2 * P : 2] = keys
    targets[at + 1 : at + 2 * P : 2] = bound[keys]
    weights[at + 1 : at + 2 * P : 2] = 1.0
    return {"inputs": tokens, "targets": targets, "weights": weights}


def permutation_tables(num_items: int, moves: str) -> tuple[np.ndarray, np.ndarray]:
    """(table, move_ids): table[c, m] is the class of permutation c followed by move m, move_ids[m] the class of move m.

    Classes number the num_items! permutations in lexicographic order (0 is the identity). moves "swaps": the identity
    and every transposition; "all": every permutation.
    """
    permutations = list(itertools.permutations(range(num_items)))
    ids = {p: i for i, p in enumerate(permutations)}
    if moves == "swaps":
        chosen = [p for p in permutations if sum(a != b for a, b in enumerate(p)) in (0, 2)]
    else:
        chosen = permutations
    table = np.array([[ids[tuple(p[i] for i in m)] for m in chosen] for p in permutations], np.int32)
    return table, np.array([ids[m] for m in chosen], np.int32)


def state_tracking(rng: np.random.Generator, config: DataConfig) -> Example:
    """Permutation tracking: tokens are moves of num_items items, the target is the arrangement after each move.

    num_items 2 is parity, 3 is S3, 5 is S5. A swap is a reflection, an eigenvalue of −1: one delta-rule layer needs
    β up to 2 (negative eigenvalues allowed) to follow it. Chance is 1/num_items!.
    inputs (move index), targets (permutation class) int32 [T]; weights 1.
    """
    table, _ = config_tables(config)
    moves = rng.integers(table.shape[1], size=config.seq_len)
    targets, state = np.empty(config.seq_len, np.int32), 0
    for t, move in enumerate(moves):
        state = table[state, move]
        targets[t] = state
    return {"inputs": moves.astype(np.int32), "targets": targets, "weights": np.ones(config.seq_len, np.float32)}


_TABLES: dict[tuple[int, str], tuple[np.ndarray, np.ndarray]] = {}


def config_tables(config: DataConfig) -> tuple[np.ndarray, np.ndarray]:
    """`permutation_tables` of a config, computed once."""
    key = (config.num_items, config.moves)
    if key not in _TABLES:
        _TABLES[key] = permutation_tables(*key)
    return _TABLES[key]


def slow_writes(rng: np.random.Generator, config: DataConfig) -> Example:
    """Slow writes: each token shows a key and a noisy sample of its mean; the target is the mean.

    Averaging noise away takes small writes (β near 1/visits), which round-to-nearest swallows once they are smaller
    than half a step of the state's format. Means ~ N(0, 1), samples = mean + noise·N(0, 1), keys one-hot of num_pairs.
    inputs float32 [T, P + 1] (key, sample), targets float32 [T, 1], weights 1.
    """
    T, P = config.seq_len, config.num_pairs
    means = rng.standard_normal(P)
    keys = rng.integers(P, size=T)
    inputs = np.zeros((T, P + 1), np.float32)
    inputs[np.arange(T), keys] = 1.0
    inputs[:, P] = means[keys] + config.noise * rng.standard_normal(T)
    targets = means[keys][:, None].astype(np.float32)
    return {"inputs": inputs, "targets": targets, "weights": np.ones(T, np.float32)}


TASKS: dict[str, Callable[[np.random.Generator, DataConfig], Example]] = {
    "regression": regression,
    "recall": recall,
    "state_tracking": state_tracking,
    "slow_writes": slow_writes,
}


class SyntheticSource:
    """Random access to the sequences of a synthetic split; longer than any run."""

    def __init__(self, config: DataConfig):
        self.config = config
        self.make = TASKS[config.task]

    def __len__(self) -> int:
        return 2**40

    def __getitem__(self, index: int) -> Example:
        config = self.config
        example = self.make(sequence_rng(config.seed, config.split, int(index)), config)
        example["weights"][: config.seq_len - round(config.seq_len * config.tail)] = 0.0
        return example
