"""The limit: plain kernels that only move as many bytes as an operator must.

They read and write arrays of the data's size from end to end. The fastest of them is as fast as the memory (or, for
small data, the caches) lets any kernel be that does as many reads and writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from normgrad.bench.implementations.implementation import Implementation, Role
from normgrad.bench.implementations.stream_fields import BLOCK, Words
from normgrad.bench.tensors import as_torch
from normgrad.bench.workload import Traffic, Workload
from normgrad.contract.arrays import numpy_address
from normgrad.cpu.compile.kernel_lookup import Kernel
from normgrad.cpu.descriptors import layout, pack
from normgrad.cpu.threads import pool
from normgrad.threads import get_num_threads

_MODULE = "normgrad.bench.implementations.stream_kernels"
_KERNELS = {
    Traffic(2, 1): Kernel(_MODULE, "add"),
    Traffic(1, 1): Kernel(_MODULE, "copy"),
    Traffic(1, 0): Kernel(_MODULE, "read"),
    Traffic(2, 0): Kernel(_MODULE, "read_two"),
}
_TOTAL = layout(Words)["total"].offset


class Stream:
    """A kernel that goes through arrays once, on normgrad's threads or on this one alone where there is little."""

    def __init__(self, traffic: Traffic, arrays: Sequence[np.ndarray]) -> None:
        self._entry = _KERNELS[traffic].entry(())
        self._arrays = arrays
        a, b, c = (*map(numpy_address, arrays), 0, 0)[:3]
        self._descriptor, _ = pack(Words(arrays[0].size, a, b, c))

    def __call__(self) -> int:
        """Once through; the sum of what was read."""
        descriptor = self._descriptor[:]
        address, _ = descriptor.buffer_info()
        if self._arrays[0].size > BLOCK and get_num_threads() > 1:
            pool.run(self._entry, pool.slots(), address, self._arrays[0].size, kept=(descriptor, self._arrays))
        else:
            self._entry(address)
        return descriptor[_TOTAL]


def as_words(nbytes: int) -> np.ndarray:
    """An array of so many bytes in words of eight, the last of which may reach beyond."""
    # Ordinary numbers as float32, too: an addition of subnormal ones can take many times as long.
    return np.full(-(-nbytes // 8), 0x3F80_0000_3F80_0000, np.uint64)


class Streaming:
    """Kernels of our own in Numba, on normgrad's threads; whatever the dtype, they move words."""

    name = "Numba stream"

    def prepare(self, work: Workload) -> Iterable[Implementation]:
        """One kernel, compiled."""
        traffic = work.traffic
        arrays = [as_words(work.case.nbytes) for _ in range(traffic.reads + traffic.writes)]
        yield Implementation(self.name, Role.LIMIT, Stream(traffic, arrays))


class NumpyStreaming:
    """NumPy's own loops, on one thread."""

    name = "NumPy stream"

    def prepare(self, work: Workload) -> Iterable[Implementation]:
        """An addition, a copy or sums."""
        traffic = work.traffic
        a, b, c = (as_words(work.case.nbytes).view(np.float32) for _ in range(3))
        run: Callable[[], Any] = {
            Traffic(2, 1): partial(np.add, a, b, out=c),
            Traffic(1, 1): partial(np.copyto, c, a),
            Traffic(1, 0): partial(np.max, a),
            Traffic(2, 0): partial(np.dot, a, b),
        }[traffic]
        yield Implementation(self.name, Role.LIMIT, run)


class DeviceCopy:
    """A device-to-device copy of as many bytes as the operator reads and writes together."""

    name = "copy"

    def prepare(self, work: Workload) -> Iterable[Implementation]:
        """One copy, of half of the bytes."""
        import torch

        half = work.case.nbytes * (work.traffic.reads + work.traffic.writes) // 2
        source, target = (torch.ones(half, dtype=torch.uint8, device=work.device) for _ in range(2))
        yield Implementation(self.name, Role.LIMIT, partial(target.copy_, source))


class TorchStreaming:
    """PyTorch's own element-wise operators, on its threads."""

    name = "PyTorch stream"

    def prepare(self, work: Workload) -> Iterable[Implementation]:
        """An addition, a copy or sums."""
        import torch

        words = as_words(work.case.nbytes).view(np.float32)
        a, b, c = (as_torch(words, work.device).clone() for _ in range(3))
        run: Callable[[], Any] = {
            Traffic(2, 1): partial(torch.add, a, b, out=c),
            Traffic(1, 1): partial(c.copy_, a),
            Traffic(1, 0): partial(torch.sum, a),
            Traffic(2, 0): partial(torch.dot, a, b),
        }[work.traffic]
        yield Implementation(self.name, Role.LIMIT, run)
