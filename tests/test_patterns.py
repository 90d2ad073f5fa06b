"""Every operator keeps the bound on what training produces: tiny, zero, sparse, shifted, constant and special values.

Odd shapes, so that every kernel has tails and padded lanes; small ones, and ones that several threads share.
"""

from __future__ import annotations

import pytest

from normgrad.bench.cases import CHANNELS_LAST, CONTIGUOUS, DTYPES, GATHER, Case
from support.patterns import failures

LAYER_NORM = [(37, 16), (19, 100), (5, 1000), (301, 257), (9, 9001)]
GROUP_NORM = [((3, 12, 5, 7), 4), ((5, 6, 1, 1), 3), ((2, 64, 13, 9), 8), ((4, 6, 67, 41), 2)]
BATCH_NORM = [(6, 5, 7, 3), (33, 70, 1, 1), (3, 33, 31, 23)]

CASES = [
    *(
        Case(op, shape, dtype)
        for op in ("layer_norm_backward", "layer_norm")
        for shape in LAYER_NORM
        for dtype in DTYPES
    ),
    *(
        Case(op, shape, dtype, layout, group)
        for op in ("group_norm_backward", "group_norm")
        for shape, group in GROUP_NORM
        for dtype in DTYPES
        for layout in (CONTIGUOUS, CHANNELS_LAST)
    ),
    *(
        Case(op, shape, dtype, layout)
        for op in ("batch_norm_elemt_backward", "batch_norm_reduce_backward", "batch_norm_stats", "batch_norm_elemt")
        for shape in BATCH_NORM
        for dtype in DTYPES
        for layout in (CONTIGUOUS, CHANNELS_LAST)
    ),
    Case(GATHER, (7, 33), "float32"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_pattern_of_values_keeps_the_bound(case: Case) -> None:
    assert not failures(case)
