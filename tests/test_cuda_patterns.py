"""The GPU's kernels keep the bound on what training produces: tiny, zero, sparse and special values; as interpreted."""

from __future__ import annotations

import pytest

from normgrad.bench.cases import CHANNELS_LAST, Case
from support.interpreted import backend as backend
from support.interpreted import needs_interpreter, run_with_interpreter, without_interpreter
from support.patterns import failures

pytest.importorskip("triton")
pytest.importorskip("torch")

CASES = [
    Case(operator, shape, dtype, layout, group)
    for dtype in ("float32", "bfloat16")
    for operator, shape, layout, group in (
        ("layer_norm_backward", (5, 96), "contiguous", 0),
        ("layer_norm", (5, 96), "contiguous", 0),
        ("group_norm_backward", (3, 4, 4, 4), "contiguous", 2),
        ("group_norm_backward", (3, 6, 5, 5), "contiguous", 2),
        ("group_norm_backward", (3, 4, 4, 4), CHANNELS_LAST, 2),
        ("group_norm", (3, 4, 4, 4), "contiguous", 2),
        ("batch_norm_reduce_backward", (3, 4, 7, 1), "contiguous", 0),
        ("batch_norm_elemt_backward", (3, 4, 7, 1), "contiguous", 0),
    )
]


@without_interpreter
def test_this_file_passes_with_the_interpreter_on() -> None:
    run_with_interpreter(__file__)


@needs_interpreter
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_pattern_of_values_keeps_the_bound(case: Case) -> None:
    assert not failures(case)
