"""Memory of the PTX emulator: bytes, and races between the warps of a program."""

from __future__ import annotations

import numpy as np

POISON = 0xFF  # fills what was never written: NaN in every float format
KEYS = 64  # who accessed a byte: KEYS * epoch + warp, an epoch being what lies between two barriers
SEVERAL = KEYS - 1  # in place of a warp: more than one read the byte


class Memory:
    """Bytes, and who read and wrote each of them since the last barrier."""

    def __init__(self, size: int, name: str):
        self.bytes = np.full(size, POISON, np.uint8)
        self.races: set[str] = set()
        self._name = name
        self._writer, self._reader = np.empty((2, size), np.int64)
        self.forget()

    def forget(self) -> None:
        """What came before does not race with what comes."""
        self._writer[:] = self._reader[:] = -1

    def load(self, address: np.ndarray, width: int, keys: np.ndarray, text: str) -> np.ndarray:
        """Bytes [threads, width]; keys: KEYS * epoch + warp of each thread."""
        at, keys = self._places(address, width, text), keys[:, None]
        epoch = keys - keys % KEYS
        self._report((self._writer[at] >= epoch) & (self._writer[at] != keys), "read after write", text)
        several = (self._reader[at] >= epoch) & (self._reader[at] != keys)
        self._reader[at] = keys
        several |= self._reader[at] != keys  # by this very instruction
        self._reader[at[several]] = np.broadcast_to(epoch + SEVERAL, at.shape)[several]
        return self.bytes[at]

    def store(self, address: np.ndarray, values: np.ndarray, keys: np.ndarray, text: str) -> None:
        """values [threads, width] bytes. Storing what already lies there is no race: copies of a value are common."""
        at, keys = self._places(address, values.shape[1], text), keys[:, None]
        epoch = keys - keys % KEYS
        self._report((self._reader[at] >= epoch) & (self._reader[at] != keys), "write after read", text)
        others = (self._writer[at] >= epoch) & (self._writer[at] != keys)
        self._report(others & (self.bytes[at] != values), "write after write", text)
        self.bytes[at] = values
        self._report(self.bytes[at] != values, "two threads write one byte", text)
        self._writer[at] = keys

    def _places(self, address: np.ndarray, width: int, text: str) -> np.ndarray:
        at = address[:, None] + np.arange(width)
        if at.size and (at.min() < 0 or at.max() >= len(self.bytes)):
            raise IndexError(
                f"{self._name} memory has {len(self.bytes)} bytes, and {text} reaches {at.min()}-{at.max()}"
            )
        if at.size and (address % width).any():
            raise IndexError(f"an address is not aligned to {width} bytes: {text}")
        return at

    def _report(self, wrong: np.ndarray, kind: str, text: str) -> None:
        if wrong.any():
            self.races.add(f"{kind} in {self._name} memory: {text}")
