"""How a run gives up its machine: SIGTERM, as schedulers send it, ends it after the step at hand, with a checkpoint.

One process: a Python handler notes the signal, and a second signal ends the process at once. Several processes
(`jax.distributed`): JAX's preemption service catches the signal in whichever process gets it and agrees on one step for
all, because a checkpoint is written by all of them together.
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from types import FrameType, TracebackType

import jax
from jax.experimental import multihost_utils

_HEARD = b"jlaqat: SIGTERM: the step at hand is finished and saved, then the run stops; a second one stops it now.\n"


class Preempted(Exception):
    """SIGTERM stopped a run, and nothing is lost: started again with the same arguments, it goes on from there.

    step: updates applied. checkpoint: their directory; None where the signal came before the first update.
    """

    def __init__(self, step: int, checkpoint: Path | None) -> None:
        self.step, self.checkpoint = step, checkpoint
        saved = "nothing was to be saved yet" if checkpoint is None else f"saved as {checkpoint}"
        super().__init__(
            f"SIGTERM stopped the run after step {step}, {saved}. Start it again with the same config and directory to "
            "go on from there."
        )


class StopSignal:
    """A context in which SIGTERM asks a run to stop; outside it, the signal does what it did before.

    A handler that the program has set itself stays, and then nothing here hears the signal; neither does it in a thread
    other than the main one, where Python allows no handlers.
    """

    def __init__(self) -> None:
        self._heard, self._listens = False, False

    def __enter__(self) -> StopSignal:
        main = threading.current_thread() is threading.main_thread()
        if main and jax.process_count() == 1 and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._hear)
            self._listens = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._listens:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def asks(self, step: int) -> bool:
        """Whether to stop after `step`. Every process of a run must ask at every step, and gets the same answer."""
        if jax.process_count() > 1:
            return jax.config.jax_enable_preemption_service and multihost_utils.reached_preemption_sync_point(step)
        return self._heard

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._heard = True
        signal.signal(number, signal.SIG_DFL)
        os.write(2, _HEARD)  # not print: the signal may have come in the middle of one
