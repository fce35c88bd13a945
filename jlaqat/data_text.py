"""Real text and token files as documents, cut into rows of `seq_len` tokens, packed or one document a row.

A document is one file (or, in a token file with `separator`, the stretch between two separators). Rows are planned
once, as (document, start, stop) pieces, and read on demand: any row can be made at any time, by any process.
"""

from __future__ import annotations

import glob
import hashlib
import os
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from jlaqat.data import DataConfig

STDLIB = "stdlib"
"""As a path: the Python standard library's own sources, real text that every machine has."""

_STDLIB_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class DataConfigError(ValueError):
    """A data setting that cannot work; the message names what was given, what is allowed and the remedy."""


class Document(NamedTuple):
    """Tokens of one document: a view of an array or memory map."""

    name: str  # path relative to the root it was found under, with "#i" for the i-th document of a token file
    tokens: np.ndarray  # [n], integer


class Piece(NamedTuple):
    """Part of a document inside a row."""

    document: int
    start: int
    stop: int


# ------------------------------------------------------------------ files


def stdlib_files() -> list[tuple[str, Path]]:
    """(name, path) of the standard library's *.py in sorted order, tests left out (distributions strip them)."""
    root = Path(sysconfig.get_path("stdlib"))
    found = [p.relative_to(root) for p in root.rglob("*.py") if not _STDLIB_LEFT_OUT & set(p.relative_to(root).parts)]
    return [(p.as_posix(), root / p) for p in sorted(found)]


def find_files(paths: Sequence[str], pattern: str) -> list[tuple[str, Path]]:
    """(name, path) of every file that `paths` name: files, folders (searched for `pattern`), globs, or "stdlib".

    Sorted by name within each path, so the order does not depend on the file system. Raises FileNotFoundError.
    """
    files: list[tuple[str, Path]] = []
    for given in paths:
        if given == STDLIB:
            files += stdlib_files()
            continue
        path = Path(given).expanduser()
        if path.is_dir():
            hits = sorted(p for p in path.rglob(pattern) if p.is_file())
            files += [(p.relative_to(path).as_posix(), p) for p in hits]
        elif path.is_file():
            hits = [path]
            files.append((path.name, path))
        else:
            hits = sorted(Path(p) for p in glob.glob(str(path), recursive=True) if os.path.isfile(p))
            files += [(p.as_posix(), p) for p in hits]
        if not hits:
            what = (
                f"no file matches pattern {pattern!r} in the folder"
                if path.is_dir()
                else "no such file, folder or match of a glob"
            )
            raise FileNotFoundError(
                f"data.paths: {given!r}: {what} (working directory {os.getcwd()}); "
                f"give files, folders, globs or {STDLIB!r}."
            )
    return files


def held_out(names: Sequence[str], fraction: float) -> set[int]:
    """Indices of the files kept for evaluation: those whose hashed names sort first, one at the least.

    Hashes keep a file on its side of the split when files are added before or after it.
    """
    count = min(len(names) - 1, max(1, round(len(names) * fraction)))
    ranked = sorted(range(len(names)), key=lambda i: hashlib.sha256(names[i].encode()).digest())
    return set(ranked[:count])


def hash_files(files: Sequence[tuple[str, Path]]) -> str:
    """SHA-256 over names, sizes and contents, in order."""
    digest = hashlib.sha256()
    for name, path in files:
        data = path.read_bytes()
        digest.update(f"{name}\0{len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()


# ------------------------------------------------------------------ documents


def read_tokens(path: Path, config: DataConfig) -> np.ndarray:
    """Tokens of one file, memory-mapped where the format allows it. Raises DataConfigError if it is no token file."""
    if config.task == "text":
        return np.fromfile(path, np.uint8)
    if path.suffix == ".npy":
        tokens = np.load(path, mmap_mode="r")
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise DataConfigError(
                f"{path}: {tokens.dtype} array of shape {tokens.shape}; a token file holds a 1-D integer array."
            )
    elif path.suffix == ".bin":
        dtype = np.dtype(config.token_dtype)
        if path.stat().st_size % dtype.itemsize:
            raise DataConfigError(
                f"{path}: {path.stat().st_size} bytes is no whole number of {dtype} tokens of {dtype.itemsize} bytes; "
                "set data.token_dtype."
            )
        tokens = np.memmap(path, dtype, "r") if path.stat().st_size else np.zeros(0, dtype)
    else:
        raise DataConfigError(
            f"{path}: unknown token file type {path.suffix!r}; use .npy or .bin (raw, with data.token_dtype)."
        )
    return tokens


def check_vocabulary(name: str, tokens: np.ndarray, vocab_size: int) -> None:
    """Raises DataConfigError at the first token id outside [0, vocab_size); reads a piece at a time."""
    for start in range(0, len(tokens), 1 << 22):
        part = tokens[start : start + (1 << 22)]
        bad = np.flatnonzero((part < 0) | (part >= vocab_size))
        if bad.size:
            raise DataConfigError(
                f"{name}: token id {int(part[bad[0]])} at position {start + int(bad[0])} is outside the vocabulary "
                f"[0, {vocab_size}); raise data.vocab_size or check data.token_dtype."
            )


def load_documents(config: DataConfig) -> list[Document]:
    """The documents of `config.split`, empty ones left out. Raises FileNotFoundError and DataConfigError.

    Several files are split by file (see `held_out`); a single one by position, its last `eval_fraction` held out.
    """
    files = find_files(config.paths, config.pattern)
    streams = [(name, read_tokens(path, config)) for name, path in files]
    streams = [(name, tokens) for name, tokens in streams if len(tokens)]
    if not streams:
        raise DataConfigError(
            f"data.paths={list(config.paths)}: the {len(files)} files found hold no tokens; give files with content."
        )
    evaluating = config.split == "eval"
    if len(streams) > 1:
        kept = held_out([name for name, _ in streams], config.eval_fraction)
        streams = [s for i, s in enumerate(streams) if (i in kept) == evaluating]
    else:
        name, tokens = streams[0]
        cut = len(tokens) - max(1, round(len(tokens) * config.eval_fraction))
        streams = [(name, tokens[cut:] if evaluating else tokens[:cut])]
    if config.task == "tokens":
        for name, tokens in streams:
            check_vocabulary(name, tokens, config.vocab_size)
    documents = [d for name, tokens in streams for d in _split_documents(name, tokens, config)]
    # A document of one token predicts nothing.
    return [d for d in documents if len(d.tokens) > 1]


def _split_documents(name: str, tokens: np.ndarray, config: DataConfig) -> list[Document]:
    if config.task == "text" or config.separator < 0:
        return [Document(name, tokens)]
    ends = np.flatnonzero(np.asarray(tokens) == config.separator) + 1  # the separator ends its document
    bounds = [0, *ends.tolist(), len(tokens)]
    return [Document(f"{name}#{i}", tokens[a:b]) for i, (a, b) in enumerate(zip(bounds, bounds[1:])) if b > a]


# ------------------------------------------------------------------ rows


def plan_windows(documents: Sequence[Document], seq_len: int) -> list[list[Piece]]:
    """One piece a row: every document cut into stretches of at most seq_len tokens."""
    return [
        [Piece(d, start, min(start + seq_len, len(doc.tokens)))]
        for d, doc in enumerate(documents)
        for start in range(0, len(doc.tokens) - 1, seq_len)
    ]


def plan_packed(documents: Sequence[Document], seq_len: int, max_documents: int, seed: int) -> list[list[Piece]]:
    """Rows filled with documents in a shuffled order, one after the other; one that does not fit is cut and goes on in
    the next row, as a sequence of its own. A row of `max_documents` pieces is closed early (and padded)."""
    rows: list[list[Piece]] = []
    row: list[Piece] = []
    room = seq_len
    for d in np.random.Generator(np.random.Philox(seed)).permutation(len(documents)).tolist():
        start, length = 0, len(documents[d].tokens)
        while length - start > 1:
            take = min(room, length - start)
            row.append(Piece(d, start, start + take))
            start, room = start + take, room - take
            # Padding is a sequence too, so an unfilled row keeps one place for it.
            if room == 0 or len(row) == max_documents - 1:
                rows.append(row)
                row, room = [], seq_len
    return [*rows, row] if row else rows


class RowSource:
    """Random access to the rows of a split: inputs, targets int32 [T], weights float32 [T]; packed rows add cu_seqlens.

    targets[t] is the token after inputs[t] in its document; at a document's last token there is none, and the weight is
    0, as in padding. cu_seqlens int32 [max_documents + 1]: bounds of the pieces, then the row's end repeated.
    """

    def __init__(self, config: DataConfig):
        self.config = config
        self.documents = load_documents(config)
        T = config.seq_len
        longest = max((len(d.tokens) for d in self.documents), default=0)
        total = sum(len(d.tokens) for d in self.documents)
        limit = total if config.packing else longest
        if limit < T:
            raise DataConfigError(
                f"data.seq_len={T} is too long: the {config.split} split holds {total} tokens in {len(self.documents)} "
                f"documents, the longest of {longest}; use a seq_len of at most {limit}, or more data"
                + ("." if config.packing else ", or data.packing=true.")
            )
        if config.packing:
            self.rows = plan_packed(self.documents, T, config.max_documents, config.seed)
        else:
            self.rows = plan_windows(self.documents, T)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        T, pieces = self.config.seq_len, self.rows[int(index)]
        inputs, targets, weights = np.zeros(T, np.int32), np.zeros(T, np.int32), np.zeros(T, np.float32)
        bounds = [0]
        for document, start, stop in pieces:
            at, tokens = bounds[-1], self.documents[document].tokens
            following = tokens[start + 1 : stop + 1]  # one shorter at the document's end
            inputs[at : at + stop - start] = tokens[start:stop]
            targets[at : at + len(following)] = following
            weights[at : at + len(following)] = 1.0
            bounds.append(at + stop - start)
        row = {"inputs": inputs, "targets": targets, "weights": weights}
        if self.config.packing:
            bounds += [T] * (self.config.max_documents + 1 - len(bounds))
            row["cu_seqlens"] = np.array(bounds, np.int32)
        return row


def concatenate_packed(rows: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """A packed batch: rows end to end in one sequence axis, [1, rows·T], cu_seqlens shifted to match."""
    T = len(rows[0]["inputs"])
    batch = {name: np.concatenate([r[name] for r in rows])[None] for name in ("inputs", "targets", "weights")}
    shifted = [r["cu_seqlens"][1:] + i * T for i, r in enumerate(rows)]
    batch["cu_seqlens"] = np.concatenate([np.zeros(1, np.int32), *shifted]).astype(np.int32)
    return batch


def text_provenance(config: DataConfig) -> dict:
    """What was read, for records: files, bytes, their SHA-256; for the standard library also the Python version."""
    files = find_files(config.paths, config.pattern)
    record: dict = {"files": len(files), "bytes": sum(p.stat().st_size for _, p in files), "sha256": hash_files(files)}
    if STDLIB in config.paths:
        record["python"] = sys.version.split()[0]
    return record
