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
_yield_to_others = types.ExternalFunction("SwitchToThread" if sys.platform == "win32" else "sched_yield", types.int32())


@device
def _take(phase, items, slot):
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
def items_of(phase, items, per_take, slot):
    """Yield the items of a phase that this thread takes, `per_take` at once; wait at the end until all are done."""
    takes, done = (items + per_take - 1) // per_take, 0
    taken = _take(phase, takes, slot)
    while taken < takes:
        for item in range(taken * per_take, min(items, (taken + 1) * per_take)):  # noqa: UP028 - unknown to Numba
            yield item
        done += 1
        taken = _take(phase, takes, slot)
    _finish_phase(phase, done, takes)


@device
def items_in_order(phase, items):
    """As `items_of`, in order and one at a time: few items, or the one of what a single thread does for all."""
    done = 0
    item = fetch_add(phase.taken, 1)
    while item < items:
        yield item
        done += 1
        item = fetch_add(phase.taken, 1)
    _finish_phase(phase, done, items)


@device
def _finish_phase(phase, done, items):
    """Add what this thread has done, and wait until all items of the phase are done.

    Spin first: the other threads are nearly done.
    """
    fetch_add(phase.done, done)
    spins = 0
    while load_acquire(phase.done) < items:
        spins += 1
        if spins > _SPINS_BEFORE_YIELD:
            _yield_to_others()
