"""Load and faults: many threads, many calls, calls that are nonsense, forks and signals.

Short by default. ``NORMGRAD_TEST_LONG=1`` is the long mode: ten minutes of threads, 100,000 hostile calls and 1,000,000
calls of one layout.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import normgrad
from normgrad.operators import OPERATORS
from support.long_mode import LONG

SECONDS = 600.0 if LONG else 1.5
HOSTILE_CALLS = 100_000 if LONG else 2_000
SAME_CALLS = 1_000_000 if LONG else 20_000
THREADS = 8
_MEGABYTE = 1 << 20


@pytest.fixture
def backend() -> str:
    """Run every test once, on the default backend."""
    return "cpu"


def _layer_norm(rows: int, columns: int, dtype: Any, strided: bool) -> Callable[[], tuple[Any, ...]]:
    rng = np.random.default_rng([rows, columns])
    x, dy = (rng.normal(size=(rows, columns * (2 if strided else 1))).astype(dtype) for _ in range(2))
    x, dy = (x[:, ::2], dy[:, ::2]) if strided else (x, dy)
    weight = rng.normal(size=columns).astype(dtype)

    def call() -> tuple[Any, ...]:
        output, mean, rstd = normgrad.layer_norm(x, [columns], weight, weight)
        return output, *normgrad.layer_norm_backward(dy, x, [columns], mean, rstd, weight)

    return call


def _batch_norm(samples: int, channels: int, positions: int) -> Callable[[], tuple[Any, ...]]:
    x = np.random.default_rng([samples, channels]).normal(size=(samples, channels, positions)).astype(np.float32)

    def call() -> tuple[Any, ...]:
        mean, invstd = normgrad.batch_norm_stats(x)
        return mean, invstd, normgrad.batch_norm_elemt(x, None, None, mean, invstd)

    return call


def _calls() -> list[Callable[[], tuple[Any, ...]]]:
    layouts = [(1, 1), (3, 8), (7, 33), (16, 300), (40, 64), (300, 1000)]
    calls = [
        _layer_norm(*sizes, dtype, strided)
        for sizes in layouts
        for dtype in (np.float32, np.float16)
        for strided in (False, True)
    ]
    return calls + [_batch_norm(2, channels, 9) for channels in range(1, 12)]


def test_threads_with_changing_layouts_have_the_bits_of_one_thread() -> None:
    calls = _calls()
    expected = [[array.tobytes() for array in call()] for call in calls]
    until, counted, wrong = time.monotonic() + SECONDS, [0] * THREADS, []

    def work(number: int) -> None:
        chosen = random.Random(number)
        while time.monotonic() < until and not wrong:
            index = chosen.randrange(len(calls))
            if [array.tobytes() for array in calls[index]()] != expected[index]:
                wrong.append(index)
            counted[number] += 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"{sum(counted)} calls in {THREADS} threads")
    assert not wrong
    assert all(counted)


class _Liar:
    """Claims to be an array, and has none of one."""

    shape, dtype, strides = (3,), np.dtype(np.float32), (4,)

    def __index__(self) -> int:
        raise RuntimeError("no number")

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("no array")


def _hostile(rng: random.Random) -> Any:
    """Return something that an argument may be, sensible or not."""
    shape = tuple(rng.choice((0, 1, 2, 3, 5)) for _ in range(rng.randrange(5)))
    dtype = rng.choice((np.float32, np.float16, np.float64, np.int32, np.complex64, np.bool_, object))
    array = np.ones(shape, dtype)
    return rng.choice(
        (
            array,
            array.T,
            array[..., ::-1] if array.ndim else array,
            np.broadcast_to(array, (2, *shape)),
            np.lib.stride_tricks.as_strided(np.ones(4, np.float32), (4, 4), (0, 4)),
            None,
            rng.randrange(-3, 9),
            10 ** rng.randrange(40),
            float("nan"),
            -0.0,
            Fraction(1, 3),
            [rng.randrange(-1, 4) for _ in range(rng.randrange(4))],
            (True, False, True),
            "abc",
            b"\x00",
            {1, 2},
            _Liar(),
            _Liar,
            np.float32(2),
            memoryview(b"12345678"),
        )
    )


def test_hostile_calls_end_in_a_result_or_a_contract_error() -> None:
    rng = random.Random(7)
    refused: list[tuple[str, str]] = []
    names = list(OPERATORS)
    for _ in range(HOSTILE_CALLS):
        operator = OPERATORS[rng.choice(names)]
        arguments = [_hostile(rng) for _ in operator.names]
        keywords = {"out": _hostile(rng)} if rng.random() < 0.2 else {}
        try:
            operator(*arguments, **keywords)
        except normgrad.ContractError as error:
            refused.append((operator.signature.name, str(error)))
    print(f"{HOSTILE_CALLS} calls, {len(refused)} refused")
    assert len(refused) > HOSTILE_CALLS // 2
    assert all(text.startswith(name) for name, text in refused)


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads /proc")
def test_memory_stays_flat() -> None:
    x, weight = np.ones((4, 8), np.float32), np.ones(8, np.float32)

    def run(count: int) -> None:
        for _ in range(count):
            normgrad.layer_norm(x, [8], weight, weight)

    def resident() -> int:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    run(2_000)
    before = resident()
    run(SAME_CALLS)
    assert resident() - before < 4 * _MEGABYTE


_IN_A_PROCESS = """
import os, signal, sys, threading, time
import numpy as np, normgrad
x, weight = np.ones((64, 512), np.float32), np.ones(512, np.float32)
expected = normgrad.layer_norm(x, [512], weight)[0].tobytes()
def call(*_):
    assert normgrad.layer_norm(x, [512], weight)[0].tobytes() == expected
"""
_FORK = """
threads = [threading.Thread(target=lambda: [call() for _ in range(300)]) for _ in range(4)]
for thread in threads: thread.start()
for _ in range(20):
    child = os.fork()
    if child == 0:
        try:
            call()
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
for thread in threads: thread.join()
"""
_SIGNALS = """
signal.signal(signal.SIGALRM, call)
signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
until = time.monotonic() + 1
while time.monotonic() < until: call()
signal.setitimer(signal.ITIMER_REAL, 0)
"""
_SHUTDOWN = """
def forever():
    while True: call()
for _ in range(4): threading.Thread(target=forever, daemon=True).start()
time.sleep(0.3)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and signals")
@pytest.mark.parametrize("faults", [_FORK, _SIGNALS, _SHUTDOWN], ids=["fork", "signals", "shutdown"])
def test_faults_during_work(faults: str) -> None:
    command = [sys.executable, "-c", _IN_A_PROCESS + faults]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
