"""Timing: all implementations in turn, round after round, so that whatever else the machine does meets all of them."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

Run = Callable[[], Any]
Key = TypeVar("Key", bound=Hashable)

#: How long the calls of one implementation in one round take together, at least: far more than reading the clock takes.
BATCH = 5e-4
#: How long the processor rests before an implementation's turn: OpenMP's threads keep a core busy for several ms
#: after their work, and whoever came next would share it with them.
REST = 0.02
#: How long calls that are not timed go on after it: threads that slept take several calls to find their cores again.
WARM_UP = 0.01
FEWEST_ROUNDS, _MOST_ROUNDS = 5, 300
_MOST_CALLS = 10_000
_WARM_CALLS = 8


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
        """Seconds per call, over so many calls, the implementation's own data as warm as it gets."""


def wall_clock(run: Run, calls: int) -> float:
    """Time on the host, after a rest; calls that are not timed leave caches and threads as a loop of calls would."""
    _rest(run)
    return _in_a_row(run, calls)


def _rest(run: Run) -> None:
    """Let other libraries' threads go to sleep, and the function's own find their cores again."""
    time.sleep(REST)
    start = time.perf_counter()
    run()
    while time.perf_counter() - start < WARM_UP:
        run()


def _once_warm(run: Run, calls: int) -> float:
    """Time on the host after calls that are not timed, which leave the function's own data in the caches.

    One is not enough: a last-level cache keeps lines that were used often before lines that were read once.
    """
    for _ in range(_WARM_CALLS):
        run()
    return _in_a_row(run, calls)


def _in_a_row(run: Run, calls: int) -> float:
    repeat = range(calls)
    start = time.perf_counter()
    for _ in repeat:
        run()
    return (time.perf_counter() - start) / calls


class DeviceClock:
    """Time on a CUDA device between two events around each call.

    ``cold``: nothing of the data is in the L2 cache before a call.
    """

    def __init__(self, cold: bool = True) -> None:
        import torch

        self._cuda = torch.cuda
        device = torch.device("cuda")
        size = torch.cuda.get_device_properties(device).L2_cache_size if cold else 0
        # Read, not written: lines to be written back would fall into the time of the call.
        self._eviction = torch.ones(max(4 * size, 1 << 26) // 4 if cold else 1, device=device)
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


def host_clock(run: Run, calls: int) -> float:
    """Time on the host of calls on a CUDA device that has nothing else to do."""
    import torch

    total = 0.0
    for _ in range(calls):
        torch.cuda.synchronize()
        total += _in_a_row(run, 1)
    return total / calls


def captured(run: Run, calls: int) -> Run:
    """Return the replay of a CUDA graph of so many calls."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(calls):
            run()
    return graph.replay


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
        How many seconds one implementation's calls in a round should take at least.
    fewest : int
        How many rounds are made whatever they take.
    """
    calls: dict[str, int] = {}
    round_time = 0.0
    with no_collection():
        for name, run in runs.items():
            # How many calls fill a round need not be known exactly: no rest before those that tell it.
            calls[name], seconds = _calls_to_fill(run, batch, _in_a_row if clock is wall_clock else clock)
            round_time += (calls[name] + 1) * seconds + (REST + WARM_UP if clock is wall_clock else 0.0)
        rounds = max(fewest, min(_MOST_ROUNDS, int(budget / round_time))) if runs else 0
        seconds_of: dict[str, list[float]] = {name: [] for name in runs}
        for number in range(rounds):
            for name in _order(list(runs), number):
                seconds_of[name].append(clock(runs[name], calls[name]))
    return {
        name: Timing(statistics.median(times), min(times), rounds, calls[name]) for name, times in seconds_of.items()
    }


def rounds_of_blocks(
    blocks: Sequence[Mapping[Key, Run]], rounds: int, clock: Clock | None = None
) -> dict[Key, list[float]]:
    """Time functions in turn and return the seconds per call of every round.

    What is timed side by side is best compared round by round: a machine that is slow for a while is slow for both.

    Parameters
    ----------
    blocks : sequence of mappings from key to function
        What to time. The functions of a block use the same threads, so that there is a rest before a block alone, and
        neighbours in a block are timed right after each other.
    rounds : int
        How often.
    clock : Clock, optional
        The device's clock; by default the functions are timed on the host.
    """
    times: dict[Key, list[float]] = {key: [] for block in blocks for key in block}
    with no_collection():
        calls = {
            key: 1 if clock else _calls_to_fill(run, BATCH, _in_a_row)[0]
            for block in blocks
            for key, run in block.items()
        }
        for number in range(rounds):
            for block in blocks[:: -1 if number % 2 else 1]:
                order = _order(list(block), number)
                if clock is None:
                    _rest(block[order[0]])
                for key in order:
                    times[key].append((clock or _once_warm)(block[key], calls[key]))
    return times


def median_ratio(seconds: Sequence[float] | None, others: Sequence[float] | None) -> float | None:
    """Return the median of the rounds' ratios; None where either was not timed."""
    if not seconds or not others:
        return None
    return statistics.median(a / b for a, b in zip(seconds, others, strict=True))


def _calls_to_fill(run: Run, batch: float, clock: Clock) -> tuple[int, float]:
    """How many calls take so long, and how long one takes."""
    calls = 1
    while True:
        seconds = clock(run, calls)
        if seconds * calls >= batch / 2 or calls >= _MOST_CALLS:
            break
        calls = min(_MOST_CALLS, calls * 4)
    return max(1, min(_MOST_CALLS, round(batch / max(seconds, 1e-9)))), seconds


def turns(names: Sequence[Key], rounds: int) -> Iterator[Key]:
    """Yield every name once a round, in an order that changes from round to round."""
    for number in range(rounds):
        yield from _order(names, number)


def _order(names: Sequence[Key], number: int) -> list[Key]:
    """Return the order of a round: it starts with the next name each time, and every other round goes backwards."""
    first = number % max(1, len(names))
    order = [*names[first:], *names[:first]]
    return order[::-1] if number % 2 else order


@contextmanager
def no_collection() -> Iterator[None]:
    """Collect garbage now, and not during the block."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
