"""How threads share the work of a kernel: by counters in its descriptor.

All threads call the kernel with the same descriptor. Each phase has two counters. A thread takes items until none is
left, then says how many it has done and waits until all are. Which thread takes an item has no influence on the
result. A thread that comes late, when the workspace may be another call's, takes nothing and writes nothing.
"""

import sys

from numba.core import types

from normgrad.cpu.compile.jit import device
from normgrad.cpu.intrinsics.memory import fetch_add, load_acquire

_FROM_ABOVE = 1 << 32  # items taken from above are counted in the upper half of a counter
_SPINS_BEFORE_YIELD = 2000  # some microseconds
_yield_name = "SwitchToThread" if sys.platform == "win32" else "sched_yield"
_yield_to_others = types.ExternalFunction(_yield_name, types.int32())


@device
def take(phase, items, slot):
    """Take one of the items of a phase: return its index, or `items` if none is left.

    Even slots take them from below and odd ones from above. With two threads each has one half of the data, which is
    the half that it has in its cache from PyTorch's operators, and from the call before.
    """
    taken = fetch_add(phase.taken, _FROM_ABOVE if slot & 1 else 1)
    below, above = taken & (_FROM_ABOVE - 1), taken >> 32
    if below + above >= items:
        return items
    return items - 1 - above if slot & 1 else below


@device
def take_next(phase):
    """Take the items of a phase in order: return the index of the next one."""
    return fetch_add(phase.taken, 1)


@device
def is_first(phase):
    """Return whether this thread is the first to enter a phase, and so does what is done once."""
    return fetch_add(phase.taken, 1) == 0


@device
def finish_phase(phase, done, items):
    """Add what this thread has done, and wait until all items of the phase are done."""
    fetch_add(phase.done, done)
    wait_until(phase.done, items)


@device
def wait_until(counter, value):
    """Return once a counter has reached a value. Spin first: the other threads are nearly done."""
    spins = 0
    while load_acquire(counter) < value:
        spins += 1
        if spins > _SPINS_BEFORE_YIELD:
            _yield_to_others()
