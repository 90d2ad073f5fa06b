"""The limit: plain kernels that only move as many bytes as an operator must.

They read and write arrays of the data's size from end to end. The fastest of them is as fast as the memory (or, for
small data, the caches) lets any kernel be that does as many reads and writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numba
import numpy as np
from numba.core import cgutils, types
from numba.extending import intrinsic

from normgrad.bench.contenders.contender import Contender, Role
from normgrad.bench.contenders.tensors import as_torch
from normgrad.bench.workload import Traffic, Workload
from normgrad.cpu import pool
from normgrad.threads import get_num_threads

_BLOCK = 1 << 15  # words that a thread takes at a time: 256 KB of each array
_TAKEN, _DONE, _SUM = range(3)


@intrinsic  # type: ignore[untyped-decorator]
def _fetch_add(context: Any, counters: Any, position: Any, amount: Any) -> Any:
    """Add to a counter that other threads add to as well; what it was before."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        array_type, *_ = signature.args
        array = context.make_array(array_type)(context, builder, values[0])
        address = cgutils.get_item_pointer(context, builder, array_type, array, [values[1]])
        amount = context.cast(builder, values[2], signature.args[2], types.uint64)
        return builder.atomic_rmw("add", address, amount, "seq_cst")

    return types.uint64(counters, types.intp, types.uint64), generate


def _compiled(function: Callable[..., None]) -> Any:
    return numba.njit(nogil=True, error_model="numpy")(function)


@_compiled
def _wait(counters: np.ndarray, blocks: int) -> None:
    while _fetch_add(counters, _DONE, 0) < blocks:
        pass


@_compiled
def _add(counters: np.ndarray, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    blocks = -(-a.size // _BLOCK)
    while True:
        block = int(_fetch_add(counters, _TAKEN, 1))
        if block >= blocks:
            break
        for i in range(block * _BLOCK, min(a.size, (block + 1) * _BLOCK)):
            c[i] = a[i] + b[i]
        _fetch_add(counters, _DONE, 1)
    _wait(counters, blocks)


@_compiled
def _copy(counters: np.ndarray, a: np.ndarray, c: np.ndarray) -> None:
    blocks = -(-a.size // _BLOCK)
    while True:
        block = int(_fetch_add(counters, _TAKEN, 1))
        if block >= blocks:
            break
        for i in range(block * _BLOCK, min(a.size, (block + 1) * _BLOCK)):
            c[i] = a[i]
        _fetch_add(counters, _DONE, 1)
    _wait(counters, blocks)


@_compiled
def _read(counters: np.ndarray, a: np.ndarray) -> None:
    blocks = -(-a.size // _BLOCK)
    while True:
        block = int(_fetch_add(counters, _TAKEN, 1))
        if block >= blocks:
            break
        total = np.uint64(0)
        for i in range(block * _BLOCK, min(a.size, (block + 1) * _BLOCK)):
            total += a[i]
        _fetch_add(counters, _SUM, total)
        _fetch_add(counters, _DONE, 1)
    _wait(counters, blocks)


@_compiled
def _read_two(counters: np.ndarray, a: np.ndarray, b: np.ndarray) -> None:
    blocks = -(-a.size // _BLOCK)
    while True:
        block = int(_fetch_add(counters, _TAKEN, 1))
        if block >= blocks:
            break
        total = np.uint64(0)
        for i in range(block * _BLOCK, min(a.size, (block + 1) * _BLOCK)):
            total += a[i] ^ b[i]
        _fetch_add(counters, _SUM, total)
        _fetch_add(counters, _DONE, 1)
    _wait(counters, blocks)


_KERNELS = {Traffic(2, 1): _add, Traffic(1, 1): _copy, Traffic(1, 0): _read, Traffic(2, 0): _read_two}


def on_threads(function: Callable[..., None], arrays: list[np.ndarray]) -> None:
    """Run a kernel on normgrad's threads, or on this one alone where there is little to share."""
    counters = np.zeros(3, np.uint64)
    if arrays[0].size > _BLOCK and get_num_threads() > 1:
        pool.run(function, pool.slots(), counters, *arrays)
    else:
        function(counters, *arrays)


def as_words(nbytes: int) -> np.ndarray:
    """An array of so many bytes in words of eight, the last of which may reach beyond."""
    return np.ones(-(-nbytes // 8), np.uint64)


class Streaming:
    """Kernels of our own in Numba, on normgrad's threads; whatever the dtype, they move words."""

    name = "Numba stream"

    def prepare(self, work: Workload) -> Iterable[Contender]:
        """One kernel, compiled."""
        traffic = work.traffic
        arrays = [as_words(work.case.nbytes) for _ in range(traffic.reads + traffic.writes)]
        function = _KERNELS[traffic]
        function(np.zeros(3, np.uint64), *arrays)
        yield Contender(self.name, Role.LIMIT, partial(on_threads, function, arrays))


class NumpyStreaming:
    """NumPy's own loops, on one thread."""

    name = "NumPy stream"

    def prepare(self, work: Workload) -> Iterable[Contender]:
        """An addition, a copy or sums."""
        traffic = work.traffic
        a, b, c = (as_words(work.case.nbytes).view(np.float32) for _ in range(3))
        run: Callable[[], Any] = {
            Traffic(2, 1): partial(np.add, a, b, out=c),
            Traffic(1, 1): partial(np.copyto, c, a),
            Traffic(1, 0): partial(np.max, a),
            Traffic(2, 0): partial(np.dot, a, b),
        }[traffic]
        yield Contender(self.name, Role.LIMIT, run)


class TorchStreaming:
    """PyTorch's own element-wise operators, on its threads or its device."""

    name = "PyTorch stream"

    def __init__(self, device: str = "cpu") -> None:
        self._device = device

    def prepare(self, work: Workload) -> Iterable[Contender]:
        """An addition, a copy or sums."""
        import torch

        words = as_words(work.case.nbytes).view(np.float32)
        a, b, c = (as_torch(words, self._device).clone() for _ in range(3))
        run: Callable[[], Any] = {
            Traffic(2, 1): partial(torch.add, a, b, out=c),
            Traffic(1, 1): partial(c.copy_, a),
            Traffic(1, 0): partial(torch.sum, a),
            Traffic(2, 0): partial(torch.dot, a, b),
        }[work.traffic]
        yield Contender(self.name, Role.LIMIT, run)
