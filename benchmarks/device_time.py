"""Time on the device as the profiler sees it, for JAX and for PyTorch, and the lock that keeps a GPU quiet meanwhile.

A call's device time is the time during which at least one of its kernels, copies or fills runs: launch overhead and
gaps between kernels do not count, whichever framework launched them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import glob
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

LOCK = os.path.join(tempfile.gettempdir(), "jlaqat-benchmark-gpu.lock")
PROFILED, QUEUED, BLOCKS = 15, 20, 3
BLOCK_MS = 250  # slow calls are repeated less often


class Event(NamedTuple):
    """Something that ran on the device."""

    name: str
    start: float  # ns
    end: float  # ns


@dataclasses.dataclass(frozen=True)
class DeviceTime:
    """Milliseconds a call: median, least and most of the profiled calls, and the mean of each kernel."""

    ms: float
    ms_min: float
    ms_max: float
    kernels: dict[str, float]


@contextlib.contextmanager
def gpu_lock(*, exclusive: bool) -> Iterator[None]:
    """Exclusive for timing; shared for what may run beside its like but would disturb whoever times."""
    with open(LOCK, "w") as f:
        fcntl.flock(f, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        yield


def busy_ns(events: list[Event]) -> float:
    """Length of the union of the events' intervals."""
    total, until = 0.0, float("-inf")
    for event in sorted(events, key=lambda e: e.start):
        total += max(0.0, event.end - max(event.start, until))
        until = max(until, event.end)
    return total


def per_call(events: list[Event], calls: int) -> DeviceTime:
    """Splits the events of `calls` equal calls, which ran one after the other, into calls.

    Raises RuntimeError if there are none, or if their number is no multiple of the calls: then some were lost.
    """
    if not events or len(events) % calls:
        raise RuntimeError(f"the profiler saw {len(events)} events of {calls} equal calls")
    ordered = sorted(events, key=lambda e: e.start)
    each = len(events) // calls
    times = [busy_ns(ordered[i * each : (i + 1) * each]) / 1e6 for i in range(calls)]
    kernels: dict[str, float] = {}
    for event in events:
        kernels[event.name] = kernels.get(event.name, 0.0) + (event.end - event.start) / 1e6 / calls
    slowest_first = sorted(kernels.items(), key=lambda item: -item[1])
    return DeviceTime(
        ms=round(statistics.median(times), 4),
        ms_min=round(min(times), 4),
        ms_max=round(max(times), 4),
        kernels={name: round(ms, 4) for name, ms in slowest_first},
    )


def repeats(call: Callable[[], Any], wait: Callable[[Any], Any], most: int) -> int:
    """How often to repeat a call: at most `most` times, less if that takes long. Warms up, too."""
    wait(call())
    start = time.perf_counter()
    wait((call(), call())[1])
    each_ms = (time.perf_counter() - start) / 2 * 1e3
    return max(3, min(most, int(BLOCK_MS / each_ms)))


def profile_jax(call: Callable[[], Any]) -> DeviceTime:
    """Device time of `call()`, which returns JAX arrays of work that is queued."""
    import jax

    calls = repeats(call, jax.block_until_ready, PROFILED)
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = options.host_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            for _ in range(calls):
                out = call()
            jax.block_until_ready(out)
        (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        return per_call(jax_events(jax.profiler.ProfileData.from_file(path)), calls)


def jax_events(profile: Any) -> list[Event]:
    """What ran on the streams of GPUs, out of a jax.profiler.ProfileData."""
    return [
        Event(event.name, event.start_ns, event.start_ns + event.duration_ns)
        for plane in profile.planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    ]


def profile_torch(call: Callable[[], Any]) -> DeviceTime:
    """Device time of `call()`, which queues work on the current CUDA stream."""
    import torch
    from torch.autograd import DeviceType

    calls = repeats(call, lambda _: torch.cuda.synchronize(), PROFILED)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profiler:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    events = [
        Event(e.name, 1e3 * e.time_range.start, 1e3 * e.time_range.end)
        for e in profiler.events()
        if e.device_type == DeviceType.CUDA
    ]
    return per_call(events, calls)


def queued_ms(call: Callable[[], Any], wait: Callable[[Any], Any]) -> float:
    """Milliseconds a call by the host's clock, `QUEUED` calls queued and then waited for; the median of some blocks."""
    calls = repeats(call, wait, QUEUED)
    times = []
    for _ in range(BLOCKS):
        start = time.perf_counter()
        for _ in range(calls):
            out = call()
        wait(out)
        times.append((time.perf_counter() - start) / calls * 1e3)
    return round(statistics.median(times), 4)
