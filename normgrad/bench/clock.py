"""Timing: all contenders in turn, round after round, so that whatever else the machine does meets all of them."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

Run = Callable[[], Any]

#: How long the calls of one contender in one round take together, at least: far more than reading the clock takes.
BATCH = 5e-4
#: How long the processor rests before a contender's turn: OpenMP's threads keep a core busy for several milliseconds
#: after their work, and whoever came next would share it with them.
REST = 0.02
#: How long calls that are not timed go on after it: threads that slept take several calls to find their cores again.
WARM_UP = 0.01
FEWEST_ROUNDS, _MOST_ROUNDS = 5, 300
_MOST_CALLS = 10_000


@dataclass(frozen=True)
class Timing:
    """Seconds per call."""

    median: float
    fastest: float
    rounds: int
    calls: int


class Clock(Protocol):
    """A way to time calls."""

    def __call__(self, run: Run, calls: int) -> float:
        """Seconds per call, over so many calls, the contender's own data as warm as it gets."""


def wall_clock(run: Run, calls: int) -> float:
    """Time on the host, after a rest; calls that are not timed leave caches and threads as a loop of calls would."""
    time.sleep(REST)
    start = time.perf_counter()
    run()
    while time.perf_counter() - start < WARM_UP:
        run()
    return _in_a_row(run, calls)


def _in_a_row(run: Run, calls: int) -> float:
    repeat = range(calls)
    start = time.perf_counter()
    for _ in repeat:
        run()
    return (time.perf_counter() - start) / calls


class DeviceClock:
    """Time on a CUDA device between two events around each call, with nothing of the data in the L2 cache."""

    def __init__(self) -> None:
        import torch

        self._cuda = torch.cuda
        device = torch.device("cuda")
        size = torch.cuda.get_device_properties(device).L2_cache_size
        # Read, not written: lines to be written back would fall into the time of the call.
        self._eviction = torch.ones(max(4 * size, 1 << 26) // 4, device=device)
        self._scratch = torch.empty((), device=device)
        self._torch = torch

    def __call__(self, run: Run, calls: int) -> float:
        pairs = []
        for _ in range(calls):
            self._torch.sum(self._eviction, dim=0, out=self._scratch)
            # The host gets ahead meanwhile, and the time is that of the device alone.
            self._cuda._sleep(400_000)
            start, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            pairs.append((start, end))
        self._cuda.synchronize()
        return statistics.median(start.elapsed_time(end) for start, end in pairs) / 1e3


def measure(
    runs: Mapping[str, Run],
    budget: float,
    clock: Clock = wall_clock,
    batch: float = BATCH,
    fewest: int = FEWEST_ROUNDS,
) -> dict[str, Timing]:
    """Time several functions in turn.

    Parameters
    ----------
    runs : mapping of str to function
        What to time, by name.
    budget : float
        About how many seconds to spend on all of them together.
    clock : Clock
        How a call is timed.
    batch : float
        How many seconds one contender's calls in a round should take at least.
    fewest : int
        How many rounds are made whatever they take.
    """
    calls: dict[str, int] = {}
    round_time = 0.0
    with _no_collection():
        for name, run in runs.items():
            # How many calls fill a round need not be known exactly: no rest before those that tell it.
            calls[name], seconds = _calls_to_fill(run, batch, _in_a_row if clock is wall_clock else clock)
            round_time += (calls[name] + 1) * seconds + (REST + WARM_UP if clock is wall_clock else 0.0)
        rounds = max(fewest, min(_MOST_ROUNDS, int(budget / round_time))) if runs else 0
        seconds_of: dict[str, list[float]] = {name: [] for name in runs}
        for order in _orders(list(runs), rounds):
            for name in order:
                seconds_of[name].append(clock(runs[name], calls[name]))
    return {
        name: Timing(statistics.median(times), min(times), rounds, calls[name]) for name, times in seconds_of.items()
    }


def _calls_to_fill(run: Run, batch: float, clock: Clock) -> tuple[int, float]:
    """How many calls take so long, and how long one takes."""
    calls = 1
    while True:
        seconds = clock(run, calls)
        if seconds * calls >= batch / 2 or calls >= _MOST_CALLS:
            break
        calls = min(_MOST_CALLS, calls * 4)
    return max(1, min(_MOST_CALLS, round(batch / max(seconds, 1e-9)))), seconds


def _orders(names: Sequence[str], rounds: int) -> Iterator[list[str]]:
    """Every round starts with the next contender: none has the same neighbour before it each time."""
    for number in range(rounds):
        first = number % len(names)
        order = [*names[first:], *names[:first]]
        yield order if number // len(names) % 2 == 0 else order[::-1]


@contextmanager
def _no_collection() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
