"""What a kernel costs by itself: nanoseconds for 32 elements on one thread and on two, nothing else being timed.

    python benchmarks/cpu_kernels.py group_norm_backward 8x256x7x7 --group 1 --layout channels_last

Sizes that stay in a core's caches show the arithmetic, larger ones the memory. The fastest round counts: what else a
machine does only ever makes a kernel slower.
"""

from __future__ import annotations

import argparse
import math

import normgrad
from normgrad.bench.cases import CHANNELS_LAST, CONTIGUOUS, DTYPES, Case
from normgrad.bench.clock import measure
from normgrad.bench.implementations.ours import Normgrad
from normgrad.bench.memory import keep_freed_memory
from normgrad.bench.workload import Workload, workload

_BUDGET = 0.5  # seconds for each number of threads


def main() -> None:
    """Measure every dtype of every shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operator", choices=sorted(normgrad.operators.OPERATORS))
    parser.add_argument("shapes", nargs="+", metavar="AxBx…")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--layout", choices=(CONTIGUOUS, CHANNELS_LAST), default=CONTIGUOUS)
    parser.add_argument("--group", type=int, default=0, help="groups, for GroupNorm")
    options = parser.parse_args()
    keep_freed_memory()
    for text in options.shapes:
        shape = tuple(int(size) for size in text.split("x"))
        for dtype in options.dtypes:
            work = workload(Case(options.operator, shape, dtype, options.layout, options.group))
            print(f"{work.case}: {_line(work)}", flush=True)


def _line(work: Workload) -> str:
    parts = []
    for threads in (1, 2):
        normgrad.set_num_threads(threads)
        seconds = measure({"": next(iter(Normgrad().prepare(work))).run}, _BUDGET)[""].fastest
        each = seconds * threads * 32 / math.prod(work.case.shape)
        parts.append(
            f"{threads} thread{'s' * (threads > 1)} {seconds * 1e6:.1f} µs, {each * 1e9:.1f} ns for 32 on each"
        )
    return "; ".join(parts)


if __name__ == "__main__":
    main()
