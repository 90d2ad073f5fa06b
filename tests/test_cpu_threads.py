"""The kernels on the CPU with their threads: same bits with any number of them, after fork, and with many callers."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import normgrad
from support.dtypes import FLOATS, NUMPY
from support.processes import run_python

THREADS = (1, 2, 3, 8)


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("NORMGRAD_BACKEND", "cpu")
    before = normgrad.get_num_threads()
    yield
    normgrad.set_num_threads(before)


def _data(dtype: str, *shape: int, seed: int, channels_last: bool = False) -> np.ndarray:
    values = np.random.default_rng(seed).normal(0.5, 2.0, shape).astype(NUMPY[dtype])
    return np.moveaxis(np.ascontiguousarray(np.moveaxis(values, 1, -1)), -1, 1) if channels_last else values


def _everything(dtype: str, channels_last: bool, shape: tuple[int, int, int], groups: int) -> list[Any]:
    """What the operators make of one batch, large enough for several threads."""
    samples, channels, places = shape
    x, dy = (_data(dtype, *shape, seed=seed, channels_last=channels_last) for seed in (1, 2))
    weight, bias = _data("float32", channels, seed=3), _data("float32", channels, seed=4)
    output, mean, rstd = normgrad.group_norm(x, weight, bias, *shape, groups)
    gradients = normgrad.group_norm_backward(dy, x, mean, rstd, weight, *shape, groups)
    channel_mean, invstd = normgrad.batch_norm_stats(x)
    normal = normgrad.batch_norm_elemt(x, weight, bias, channel_mean, invstd)
    sums = normgrad.batch_norm_reduce_backward(dy, x, channel_mean, invstd, weight)
    count = np.array([samples * places], np.int32)
    elemt = normgrad.batch_norm_elemt_backward(dy, x, channel_mean, invstd, weight, sums[0], sums[1], count)
    row_mean, row_rstd = np.zeros((*shape[:2], 1), np.float32), np.ones((*shape[:2], 1), np.float32)
    rows = normgrad.layer_norm_backward(dy, x, [places], row_mean, row_rstd)
    return [
        *rows,
        *normgrad.layer_norm(x, [places]),
        output,
        mean,
        rstd,
        *gradients,
        channel_mean,
        invstd,
        normal,
        *sums,
        elemt,
    ]


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("shape", "groups"), [((5, 24, 2100), 8), ((2, 6, 20000), 2), ((40, 96, 49), 1), ((901, 30, 10), 30)]
)
def test_same_bits_with_any_number_of_threads(
    dtype: str, channels_last: bool, shape: tuple[int, int, int], groups: int
) -> None:
    bits = []
    for threads in THREADS:
        normgrad.set_num_threads(threads)
        bits.append([result.tobytes() for result in _everything(dtype, channels_last, shape, groups)])
    assert all(these == bits[0] for these in bits)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_sample_has_the_same_bits_in_any_batch(dtype: str, channels_last: bool) -> None:
    shape, groups = (19, 20, 2500), 4
    x, dy = (_data(dtype, *shape, seed=seed, channels_last=channels_last) for seed in (1, 2))
    weight = _data("float32", 20, seed=3)

    def call(part: slice) -> list[np.ndarray]:
        size = (len(x[part]), *shape[1:])
        output, mean, rstd = normgrad.group_norm(x[part], weight, None, *size, groups)
        return [output, normgrad.group_norm_backward(dy[part], x[part], mean, rstd, weight, *size, groups)[0]]

    whole = call(slice(None))
    for part in (slice(0, 1), slice(4, 6), slice(3, None, 5)):
        assert [result.tobytes() for result in call(part)] == [result[part].tobytes() for result in whole], part


def _call() -> tuple[Callable[[], bytes], bytes]:
    """A call that several threads share, and its bits."""
    x = _data("float32", 16, 32, 1024, seed=1)
    statistics = np.ones((16, 4), np.float32)

    def call() -> bytes:
        gradients = normgrad.group_norm_backward(x, x, statistics, statistics, None, 16, 32, 1024, 4)
        return b"".join(gradient.tobytes() for gradient in gradients)

    return call, call()


def test_many_python_threads_at_once() -> None:
    normgrad.set_num_threads(3)
    call, expected = _call()
    wrong: list[int] = []

    def work(number: int) -> None:
        if any(call() != expected for _ in range(10)):
            wrong.append(number)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(12)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=60)
        assert not worker.is_alive()
    assert not wrong
    started = [thread for thread in threading.enumerate() if thread.name == "normgrad-worker"]
    assert len(started) <= max(THREADS) - 1, "however many callers there are, the worker threads are the same few"


def test_beside_the_threads_of_torch() -> None:
    normgrad.set_num_threads(2)
    call, expected = _call()
    tensor = torch.ones(1 << 20)
    for _ in range(20):
        torch.add(tensor, tensor)
        assert call() == expected


_FORK = """
import os, sys
import numpy as np
import normgrad
normgrad.set_num_threads(3)
x = np.random.default_rng(0).normal(size=(16, 32, 1024)).astype(np.float32)
statistics = np.ones((16, 4), np.float32)
def call():
    return normgrad.group_norm_backward(x, x, statistics, statistics, None, 16, 32, 1024, 4)[0].tobytes()
expected = call()
assert call() == expected
children = []
for _ in range(3):
    child = os.fork()
    if child == 0:
        os._exit(0 if all(call() == expected for _ in range(5)) else 1)
    children.append(child)
assert call() == expected
print([os.waitpid(child, 0)[1] for child in children])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_children_made_by_fork_compute() -> None:
    assert run_python(_FORK, NORMGRAD_BACKEND="cpu").strip() == "[0, 0, 0]"


_LATE = """
import os
import ml_dtypes, numpy as np
import normgrad
from normgrad.cpu.prepare.launch import Step

seen, call = set(), Step.call

def call_again(step, descriptor, address):
    call(step, descriptor, address)
    if step._shared:
        seen.add(step._kernel.name)
        for at, *_ in (*step._fills, *step._scratch):
            descriptor[at] = 64 if descriptor[at] else 0  # no memory is there
        assert step.load()(address) == 0

Step.call = call_again
normgrad.set_num_threads(8)
for shape, groups in (((5, 24, 1200), 8), ((1, 6, 24000), 2), ((32, 96, 49), 1)):
    samples, channels, places = shape
    rows = np.random.default_rng(0).normal(size=shape).astype(os.environ["DTYPE"])
    columns = np.moveaxis(np.ascontiguousarray(np.moveaxis(rows, 1, -1)), -1, 1)
    weight, count = np.ones(channels, np.float32), np.array([samples * places], np.int32)
    for x in (rows, columns, rows[::-1, :, ::-1]):
        print(shape, x.strides, flush=True)
        _, mean, rstd = normgrad.group_norm(x, weight, weight, *shape, groups)
        normgrad.group_norm_backward(x, x, mean, rstd, weight, *shape, groups)
        mean, invstd = normgrad.batch_norm_stats(x)
        normgrad.batch_norm_elemt(x, weight, weight, mean, invstd)
        sums = normgrad.batch_norm_reduce_backward(x, x, mean, invstd, weight)
        normgrad.batch_norm_elemt_backward(x, x, mean, invstd, weight, *sums[:2], count)
        for normal in ([places], [channels, places]):
            _, mean, rstd = normgrad.layer_norm(x, normal, np.ones(normal, np.float32), None)
            normgrad.layer_norm_backward(x, x, normal, mean, rstd, np.ones(normal, np.float32))
print(len(seen))
"""


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_thread_that_comes_late_touches_no_memory(dtype: str) -> None:
    """The workspace may be another call's by then, and the tensors gone."""
    kernels = 9  # eight operators (one never shares its work) and the copy of what is awkwardly strided
    assert run_python(_LATE, NORMGRAD_BACKEND="cpu", DTYPE=dtype).split()[-1] == str(kernels)


_WITHOUT_THREADS = """
import numpy as np, threading
import normgrad
def start(thread):
    raise RuntimeError("can't start new thread")
usual, threading.Thread.start = threading.Thread.start, start
x = np.random.default_rng(1).normal(size=(1024, 1024)).astype(np.float32)
alone = [normgrad.layer_norm(x, [1024])[0] for _ in range(2)]
threading.Thread.start = usual
assert all((each == normgrad.layer_norm(x, [1024])[0]).all() for each in alone)
print(sum(thread.name == "normgrad-worker" for thread in threading.enumerate()))
"""


def test_a_large_call_in_the_middle_of_another() -> None:
    """As a signal handler or a finalizer makes it, while the thread posts a job to a worker or starts the workers."""
    printed = run_python(
        """
import faulthandler
import numpy as np, normgrad
from normgrad.cpu.threads import pool
faulthandler.dump_traceback_later(60, exit=True)
normgrad.set_num_threads(2)
x = np.random.default_rng(0).normal(size=(600, 1024)).astype(np.float32)
with pool._starting:
    first = normgrad.layer_norm(x, [1024])
normgrad.layer_norm(x, [1024])
with pool._workers[0]._posting:
    second = normgrad.layer_norm(x, [1024])
print(all(np.array_equal(*pair) for pair in zip(first, second)))
"""
    )
    assert printed == "True\n"


def test_a_large_call_where_no_thread_can_start() -> None:
    """It runs on the caller's thread, and later calls have help again."""
    assert run_python(_WITHOUT_THREADS, NORMGRAD_NUM_THREADS="3", NORMGRAD_BACKEND="cpu") == "2\n"
