"""Data pipelines: deterministic, resumable, sharded by process. NumPy and grain only; no accelerator is touched.

    config = DataConfig(task="regression", batch_size=16, seq_len=128)
    batches = iter(make_dataset(config))
    batch = next(batches)             # {"inputs", "targets", "weights"}, and "cu_seqlens" when packed
    position = batches.get_state()    # JSON; set_state(position) brings back the exact same next batch

Batch i of a config is a pure function of (config, i), so a run can stop anywhere and go on elsewhere. Synthetic tasks
live in `data_synthetic`, files in `data_text`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import grain
import numpy as np

from jlaqat.data_synthetic import TASKS, SyntheticSource, permutation_tables
from jlaqat.data_text import DataConfigError as DataConfigError
from jlaqat.data_text import RowSource, concatenate_packed, text_provenance

FILE_TASKS = ("text", "tokens")
CONTINUOUS_TASKS = ("regression", "slow_writes")

Batch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What to read or make, and in which batches. Raises DataConfigError naming the field, the value and the remedy."""

    # "regression", "recall", "state_tracking", "slow_writes" (made here), "text" (bytes of files), "tokens" (ids).
    task: str = "regression"
    # Sequences in a batch, all processes together. When packed: rows of seq_len tokens, laid end to end in one axis.
    batch_size: int = 16
    seq_len: int = 128
    # Keys what synthetic tasks draw and the order in which rows of files come.
    seed: int = 0
    # "train" or "eval": sequences or files that the other split never sees.
    split: str = "train"
    # text, tokens: fill rows with several documents, bounded by cu_seqlens of static length.
    packing: bool = False
    # When packing: the most documents in a row of seq_len tokens, its padding included.
    max_documents: int = 16
    # regression: dimension of x.
    input_dim: int = 16
    # regression: noise on the y that the model reads; slow_writes: noise of the samples.
    noise: float = 0.0
    # recall, slow_writes: keys. recall also: times each key is bound, and how many values there are.
    num_pairs: int = 32
    num_rounds: int = 2
    num_values: int = 32
    # Synthetic tasks: share of the sequence, at its end, whose targets count; 1 is all of it.
    tail: float = 1.0
    # state_tracking: items to permute (2 is parity, 3 is S3, 5 is S5), by "swaps" or by "all" permutations.
    num_items: int = 3
    moves: str = "swaps"
    # text, tokens: files, folders, globs, or "stdlib" (the Python standard library's sources).
    paths: tuple[str, ...] = ()
    # What to look for in folders.
    pattern: str = "*"
    # tokens: ids run from 0 to vocab_size − 1 (text has 256 bytes); dtype of raw .bin files; id that ends a document
    # (−1: none, a file is one document).
    vocab_size: int = 256
    token_dtype: str = "uint16"
    separator: int = -1
    # text, tokens: share of the files (of a single file: of its tokens, at the end) kept for split "eval".
    eval_fraction: float = 0.1
    # Tokens at the start of each sequence (packed: document) that come before decoding starts: batches then hold
    # prefix_lengths, which layers with a decode policy read. null: they hold none.
    prefix: int | None = None
    # Weights are 0 inside the prefix: only what is decoded counts.
    suffix_loss: bool = False
    # Threads that make batches ahead; 0 makes each batch when it is asked for. Changes no batch.
    num_threads: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "paths", tuple(self.paths))
        _choice("task", self.task, (*TASKS, *FILE_TASKS))
        _choice("split", self.split, ("train", "eval"))
        _choice("moves", self.moves, ("swaps", "all"))
        for field, low, high in _RANGES:
            value = getattr(self, field)
            if not low <= value <= high:
                raise DataConfigError(f"{field}={value} is out of range; give a value from {low} to {high}.")
        if self.prefix is not None and not 0 <= self.prefix <= self.seq_len:
            raise DataConfigError(f"prefix={self.prefix} is out of range; give 0 to seq_len={self.seq_len}, or null.")
        if self.suffix_loss and self.prefix is None:
            raise DataConfigError("suffix_loss=True needs to know where the suffix starts; set prefix, a token count.")
        if self.task in FILE_TASKS and not self.paths:
            raise DataConfigError(
                f"paths is empty, but task={self.task!r} reads files; give files, folders, globs or 'stdlib'."
            )
        if self.task == "text" and self.vocab_size != 256:
            raise DataConfigError(
                f"vocab_size={self.vocab_size} does not apply to task='text', of 256 bytes; leave it at 256."
            )
        if self.task == "tokens" and "stdlib" in self.paths:
            raise DataConfigError("paths: 'stdlib' is text, not token files; use task='text'.")
        if self.tail != 1.0 and self.task in FILE_TASKS:
            raise DataConfigError(
                f"tail={self.tail} applies to synthetic tasks; every token of task={self.task!r} counts."
            )
        if self.packing and self.task not in FILE_TASKS:
            raise DataConfigError(
                f"packing=True applies to task='text' or 'tokens'; sequences of task={self.task!r} are all full."
            )
        try:
            integer = np.dtype(self.token_dtype).kind in "iu"
        except TypeError:
            integer = False
        if not integer:
            raise DataConfigError(f"token_dtype={self.token_dtype!r} is no integer dtype; use uint16, uint32 or int32.")
        needed = 2 * self.num_pairs * (self.num_rounds + 1)
        if self.task == "recall" and self.seq_len < needed:
            raise DataConfigError(
                f"seq_len={self.seq_len} is too short for recall: num_pairs={self.num_pairs} and "
                f"num_rounds={self.num_rounds} need 2·num_pairs·(num_rounds + 1) = {needed} tokens; "
                "raise seq_len or lower num_pairs."
            )


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("batch_size", 1, math.inf),
    ("seq_len", 1, math.inf),
    ("seed", 0, 2**62),
    ("max_documents", 2, math.inf),
    ("input_dim", 1, math.inf),
    ("noise", 0, math.inf),
    ("num_pairs", 1, math.inf),
    ("num_rounds", 1, math.inf),
    ("num_values", 1, math.inf),
    ("num_items", 2, 6),
    ("tail", 0, 1),
    ("vocab_size", 1, 2**31 - 1),
    ("separator", -1, 2**31 - 1),
    ("eval_fraction", 0, 0.9),
    ("num_threads", 0, 64),
)


def _choice(field: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise DataConfigError(f"{field}={value!r} is not supported; choose one of {', '.join(map(repr, allowed))}.")


class Sizes(NamedTuple):
    """What a model for this data must have; 0 where it does not apply."""

    vocab_size: int  # token tasks: ids in and out
    input_size: int  # continuous tasks: width of `inputs`
    output_size: int  # continuous tasks: width of `targets`


def data_sizes(config: DataConfig) -> Sizes:
    """The model's ends: vocab_size for token tasks, input_size and output_size for continuous ones."""
    if config.task == "regression":
        return Sizes(0, 2 * config.input_dim + 1, 1)
    if config.task == "slow_writes":
        return Sizes(0, config.num_pairs + 1, 1)
    if config.task == "recall":
        return Sizes(config.num_pairs + config.num_values + 1, 0, 0)
    if config.task == "state_tracking":
        classes, moves = permutation_tables(config.num_items, config.moves)[0].shape
        return Sizes(max(classes, moves), 0, 0)
    return Sizes(config.vocab_size, 0, 0)


def check_model_sizes(
    config: DataConfig,
    *,
    vocab_size: int | None = None,
    input_size: int | None = None,
    output_size: int | None = None,
    section: str = "data",
) -> None:
    """Raises DataConfigError if a model of these sizes does not fit the data (the config's `section`); a larger
    vocabulary does."""
    sizes = data_sizes(config)
    if sizes.vocab_size:
        if (vocab_size or 0) < sizes.vocab_size:
            raise DataConfigError(
                f"model.vocab_size={vocab_size} does not fit {section}.task={config.task!r}, whose token ids run from "
                f"0 to {sizes.vocab_size - 1}; set model.vocab_size={sizes.vocab_size} or more."
            )
    elif (input_size, output_size) != (sizes.input_size, sizes.output_size):
        raise DataConfigError(
            f"model.input_size={input_size}, model.output_size={output_size} do not fit {section}.task="
            f"{config.task!r}; set model.input_size={sizes.input_size} and model.output_size={sizes.output_size}."
        )


def loss_kind(config: DataConfig) -> str:
    """ "squared_error" for continuous targets, "cross_entropy" for token ids."""
    return "squared_error" if config.task in CONTINUOUS_TASKS else "cross_entropy"


class _BatchSource:
    """One process's share of every global batch: contiguous rows, so that the processes' batches, concatenated, are the
    batch that a single process would read. Whole batches, since grain's cost per element exceeds that of a sequence."""

    def __init__(self, rows: Sequence[Batch], config: DataConfig, process_index: int, process_count: int):
        self.rows, self.batch_size = rows, config.batch_size
        self.local = config.batch_size // process_count
        self.offset = process_index * self.local
        self.collate = concatenate_packed if config.packing else _stack
        self.prefix, self.suffix_loss = config.prefix, config.suffix_loss

    def __len__(self) -> int:
        return len(self.rows) // self.batch_size

    def __getitem__(self, index: int) -> Batch:
        start = int(index) * self.batch_size + self.offset
        batch = self.collate([self.rows[i] for i in range(start, start + self.local)])
        return batch if self.prefix is None else _with_prefix(batch, self.prefix, self.suffix_loss)


def _stack(rows: Sequence[Batch]) -> Batch:
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def _with_prefix(batch: Batch, prefix: int, suffix_loss: bool) -> Batch:
    """The batch with prefix_lengths int32 [N], at most `prefix` each, and where asked weights of 0 inside prefixes."""
    rows, T = batch["weights"].shape
    bounds = batch.get("cu_seqlens")
    lengths = np.full(rows, T) if bounds is None else np.diff(bounds)
    batch = {**batch, "prefix_lengths": np.minimum(lengths, prefix).astype(np.int32)}
    if suffix_loss:
        position = np.concatenate([np.arange(n) for n in lengths]).reshape(rows, T)
        batch["weights"] = np.where(position < prefix, 0, batch["weights"]).astype(np.float32)
    return batch


def make_dataset(config: DataConfig, *, process_index: int = 0, process_count: int = 1) -> grain.IterDataset:
    """Endless batches of `config` for one process of `process_count`, as a grain IterDataset.

    A batch is a dict of NumPy arrays, B = batch_size / process_count:
      inputs: int32 [B, T] tokens, or float32 [B, T, input_size].
      targets: int32 [B, T], or float32 [B, T, output_size]: what the model should say at each position.
      weights: float32 [B, T]: 0 where nothing is asked (padding, the last token of a document).
      cu_seqlens: when packed, int32 [B·max_documents + 1]; the other arrays are then [1, B·T]. Equal neighbours are
        empty sequences, so the length is static; padding is a sequence of its own.
      prefix_lengths: where config.prefix is set, int32 [B], or one for each packed sequence.
    `iter(dataset)` has get_state() and set_state(state), JSON, exact to the batch. Rows of files come in a new order
    every epoch.

    Raises DataConfigError, or FileNotFoundError for a path that is not there.
    """
    if not 0 <= process_index < process_count:
        raise DataConfigError(
            f"process_index={process_index} is out of range; with process_count={process_count}, "
            f"give 0 to {process_count - 1}."
        )
    if config.batch_size % process_count:
        raise DataConfigError(
            f"data.batch_size={config.batch_size} does not divide over process_count={process_count} processes; "
            f"use a multiple of {process_count}."
        )
    if config.task in FILE_TASKS:
        rows = grain.MapDataset.source(RowSource(config)).seed(config.seed).shuffle().repeat()
    else:
        rows = SyntheticSource(config)
    batches = grain.MapDataset.source(_BatchSource(rows, config, process_index, process_count))
    buffer = 4 * config.num_threads
    return batches.to_iter_dataset(grain.ReadOptions(num_threads=config.num_threads, prefetch_buffer_size=buffer))


# ------------------------------------------------------------------ records


class TokenHash:
    """SHA-256 of the batches given to `update`, over names, dtypes, shapes and bytes: equal hashes, equal tokens."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self.tokens = 0
        """Positions with a weight above 0 so far."""

    def update(self, batch: Mapping[str, Any]) -> None:
        for name in sorted(batch):
            array = np.ascontiguousarray(batch[name])
            self._digest.update(f"{name}\0{array.dtype}\0{array.shape}\0".encode())
            self._digest.update(array.tobytes())
        self.tokens += int(np.count_nonzero(batch["weights"]))

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def token_hash(batches: Iterable[Mapping[str, Any]]) -> str:
    """SHA-256 of `batches` in order (see `TokenHash`)."""
    total = TokenHash()
    for batch in batches:
        total.update(batch)
    return total.hexdigest()


def provenance(config: DataConfig) -> dict:
    """Where the data come from, for records: files, bytes and SHA-256 of what is read (synthetic: the seed)."""
    return text_provenance(config) if config.task in FILE_TASKS else {"synthetic": config.task, "seed": config.seed}


def source_hash(config: DataConfig) -> str:
    """SHA-256 of the files read (names, sizes, contents), or of the config for synthetic tasks."""
    if config.task in FILE_TASKS:
        return provenance(config)["sha256"]
    return hashlib.sha256(repr(dataclasses.replace(config, num_threads=0)).encode()).hexdigest()
