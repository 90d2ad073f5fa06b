"""The memory that the program has allocated: what lies where, and whether it is still there."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable
from weakref import finalize


class Allocation:
    """A block of memory. It goes back when it is freed and no work uses it any more."""

    def __init__(self, address: int, nbytes: int, device: str | None, release: Callable[[int], None]) -> None:
        self.address = address
        self.nbytes = nbytes
        self.device = device  # its name as views carry it; None for memory of the host
        finalize(self, release, address).atexit = False  # a process that ends gives back everything

    @property
    def end(self) -> int:
        return self.address + self.nbytes


class Table:
    """The live allocations, by address."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._starts: list[int] = []
        self._blocks: dict[int, Allocation] = {}

    def add(self, block: Allocation) -> None:
        with self._lock:
            self._starts.insert(bisect_right(self._starts, block.address), block.address)
            self._blocks[block.address] = block

    def remove(self, address: int, *, on_device: bool) -> Allocation | None:
        """Take out the block that starts at an address, where there is one of that sort."""
        with self._lock:
            block = self._blocks.get(address)
            if block is None or (block.device is not None) is not on_device:
                return None
            del self._blocks[address]
            del self._starts[bisect_right(self._starts, address) - 1]
            return block

    def touching(self, address: int, nbytes: int) -> Allocation | None:
        """The last block that has a byte in a range."""
        with self._lock:
            index = bisect_right(self._starts, address + max(nbytes, 1) - 1) - 1
            block = self._blocks[self._starts[index]] if index >= 0 else None
        return block if block is not None and address < block.end else None

    def holding(self, address: int, nbytes: int) -> Allocation | None:
        """The block on the device that holds a range, whole."""
        block = self.touching(address, nbytes)
        if block is None or block.device is None or not block.address <= address <= address + nbytes <= block.end:
            return None
        return block


table = Table()
