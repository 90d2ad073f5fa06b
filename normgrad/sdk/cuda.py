"""NVIDIA GPUs as the devices: memory, streams and events are PyTorch's, copies are the CUDA driver's."""

from __future__ import annotations

import ctypes
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from normgrad.contract.plan import Plan
from normgrad.contract.view import Memory
from normgrad.cuda.devices import DRIVER
from normgrad.sdk import native
from normgrad.sdk.native import BadAddress

_POLL = 0.0005  # seconds between looks at a stream that is waited for with a time limit


class _Driver:
    """The functions of the CUDA driver that PyTorch has no name for. They act in the thread's current context."""

    def __init__(self) -> None:
        # At the end of the process PyTorch and the driver go before the program's last calls.
        self.closed = False
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()
        self._kept: list[Any] = []
        self._library = ctypes.CDLL(DRIVER)
        self._contexts = [self._context(index) for index in range(torch.cuda.device_count())]

    def _context(self, index: int) -> ctypes.c_void_p:
        """The context of a GPU that PyTorch works in, too."""
        context = ctypes.c_void_p()
        torch.cuda.synchronize(index)  # PyTorch makes it
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ctypes.c_int(index))
        return context

    def enter(self, index: int) -> None:
        """Make a GPU the thread's. PyTorch leaves a new thread without a context where the GPU is the default one."""
        self.refuse_if_closed()
        self._call("cuCtxSetCurrent", self._contexts[index])

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        self._call("cuMemcpyAsync", _word(to), _word(source), _word(nbytes), ctypes.c_void_p(stream))

    def fill(self, to: int, value: int, nbytes: int, stream: int) -> None:
        byte = ctypes.c_ubyte(value & 0xFF)
        self._call("cuMemsetD8Async", _word(to), byte, _word(nbytes), ctypes.c_void_p(stream))

    def close(self) -> None:
        """Leave the GPUs alone from now on, and keep what PyTorch would have to end."""
        self.closed = True
        self._kept = list(self.users)

    def refuse_if_closed(self) -> None:
        if self.closed:
            raise RuntimeError("the process is ending, and the GPU can no longer be used")

    def _call(self, name: str, *arguments: Any) -> None:
        result = getattr(self._library, name)(*arguments)
        if result:
            raise RuntimeError(f"{name} failed with CUDA error {result}")


def _word(value: int) -> ctypes.c_uint64:
    return ctypes.c_uint64(value)


@contextmanager
def _staging(nbytes: int) -> Iterator[int]:
    """Memory of the host for bytes on their way: the driver would fault on a bad address, the kernel reports it."""
    buffer = ctypes.create_string_buffer(nbytes)
    yield ctypes.addressof(buffer)
    del buffer


class CudaMark:
    """A point in a stream's work."""

    def __init__(self, driver: _Driver, stream: Any) -> None:
        driver.users.add(self)
        self._driver = driver
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record(stream)

    def query(self) -> bool:
        return self._driver.closed or bool(self.event.query())

    def wait(self) -> None:
        if self._driver.closed:
            return
        self.event.synchronize()

    def milliseconds_since(self, earlier: CudaMark) -> float:
        self._driver.refuse_if_closed()
        return float(earlier.event.elapsed_time(self.event))


class CudaStream:
    """A CUDA stream."""

    def __init__(self, driver: _Driver, index: int) -> None:
        driver.users.add(self)
        self._driver = driver
        self._index = index
        self._device = torch.device("cuda", index)
        self._error: BadAddress | None = None
        with torch.cuda.device(self._device):
            self._stream = torch.cuda.Stream(self._device)

    def run(self, plan: Plan, workspace: Memory) -> None:
        self._driver.refuse_if_closed()
        with torch.cuda.stream(self._stream):
            plan.run(workspace)

    def copy(self, to: int, source: int, nbytes: int, sides: tuple[bool, bool], kept: Any) -> None:
        """Copy in order; one from or to memory that the library does not know is over when this returns."""
        try:
            self.copy_now(to, source, nbytes, sides)
        except BadAddress as error:  # an error of the work: synchronise tells it
            self._error = self._error or error

    def copy_now(self, to: int, source: int, nbytes: int, sides: tuple[bool, bool]) -> None:
        """The same, with its own error at once."""
        if all(sides):
            self._copy_known(to, source, nbytes)
            return
        to_known, source_known = sides
        with _staging(nbytes) as staged:
            if not source_known:
                native.copy(staged, source, nbytes)
                source = staged
            self._put(to if to_known else staged, source, nbytes)
            self._stream.synchronize()
            if not to_known:
                native.copy(to, staged, nbytes)

    def _copy_known(self, to: int, source: int, nbytes: int) -> None:
        if abs(to - source) >= nbytes:
            self._put(to, source, nbytes)
            return
        with torch.cuda.stream(self._stream):  # the driver copies in no order that could be counted on
            between = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            self._put(between.data_ptr(), source, nbytes)
            self._put(to, between.data_ptr(), nbytes)

    def _put(self, to: int, source: int, nbytes: int) -> None:
        self._driver.enter(self._index)
        self._driver.copy(to, source, nbytes, self._stream.cuda_stream)

    def fill(self, to: int, value: int, nbytes: int, on_device: bool, kept: Any) -> None:
        if not on_device:
            if not self._driver.closed:
                self._stream.synchronize()
            native.fill(to, value, nbytes)
            return
        self._driver.enter(self._index)
        self._driver.fill(to, value, nbytes, self._stream.cuda_stream)

    def record(self) -> CudaMark:
        self._driver.refuse_if_closed()
        return CudaMark(self._driver, self._stream)

    def wait_for(self, mark: CudaMark) -> None:
        self._driver.refuse_if_closed()
        self._stream.wait_event(mark.event)

    def query(self) -> bool:
        return self._driver.closed or bool(self._stream.query())

    def synchronize(self, timeout: float | None = None) -> None:
        if self._driver.closed:  # after all work
            return
        if timeout is None:
            self._stream.synchronize()
        else:
            self._wait(timeout)
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _wait(self, timeout: float) -> None:
        end = time.monotonic() + timeout
        while not self._stream.query():
            if time.monotonic() >= end:
                raise TimeoutError(f"the stream was still at work after {timeout} s")
            time.sleep(_POLL)


class CudaDevices:
    """Every GPU that PyTorch sees."""

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError("PyTorch sees no CUDA GPU")
        self._driver = _Driver()
        # One for each GPU, for copies that no stream orders.
        self._streams = [CudaStream(self._driver, index) for index in range(torch.cuda.device_count())]

    def count(self) -> int:
        return len(self._streams)

    def device_name(self, index: int) -> str:
        return f"cuda:{index}"

    def allocate(self, nbytes: int, index: int) -> int:
        self._driver.refuse_if_closed()
        if nbytes > self.memory_info(index)[1]:  # PyTorch's own arithmetic may overflow
            return 0
        try:
            return int(torch.cuda.caching_allocator_alloc(nbytes, index))
        except torch.cuda.OutOfMemoryError:
            return 0

    def release(self, address: int) -> None:
        if self._driver.closed:
            return
        for index in range(self.count()):
            torch.cuda.synchronize(index)  # work may still use the memory, on any stream
        torch.cuda.caching_allocator_delete(address)

    def stream(self, index: int) -> CudaStream:
        self._driver.refuse_if_closed()
        return CudaStream(self._driver, index)

    def copy(self, to: int, source: int, nbytes: int, sides: tuple[bool, bool]) -> None:
        stream = self._streams[0]
        stream.copy_now(to, source, nbytes, sides)
        stream.synchronize()

    def fill(self, to: int, value: int, nbytes: int, on_device: bool) -> None:
        stream = self._streams[0]
        stream.fill(to, value, nbytes, on_device, kept=None)
        stream.synchronize()

    def memory_info(self, index: int) -> tuple[int, int]:
        """Free and total bytes."""
        self._driver.refuse_if_closed()
        free, total = torch.cuda.mem_get_info(index)
        return int(free), int(total)

    def close(self) -> None:
        """The process ends, after all work: what the program still frees goes with the process."""
        self._driver.close()
