"""Whether views share memory, against a count of every byte they hold."""

from __future__ import annotations

import itertools
import time
from operator import mul

import pytest
from hypothesis import given
from hypothesis import strategies as st

from normgrad.contract.dtypes import FLOAT16, FLOAT32, UINT8, DType
from normgrad.contract.overlap import overlap, overlaps_itself
from normgrad.contract.view import Memory, View

_MIDDLE = 1_000_000


def _view(offset: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: DType = FLOAT32) -> View:
    return View(_MIDDLE + offset, shape, strides, dtype, Memory(0, 2 * _MIDDLE))


@st.composite
def views(draw: st.DrawFn, dtype: DType | None = None) -> View:
    """A view of a few elements with any strides, at any byte."""
    rank = draw(st.integers(0, 4))
    shape = tuple(draw(st.lists(st.integers(0, 5), min_size=rank, max_size=rank)))
    strides = tuple(draw(st.lists(st.integers(-30, 30), min_size=rank, max_size=rank)))
    itemsize = dtype or draw(st.sampled_from((UINT8, FLOAT16, FLOAT32)))
    return _view(draw(st.integers(-200, 200)), shape, strides, itemsize)


def _starts(view: View) -> list[int]:
    """The address of every element."""
    indices = itertools.product(*map(range, view.shape))
    return [view.address + view.dtype.itemsize * sum(map(mul, index, view.strides)) for index in indices]


def _bytes(view: View) -> set[int]:
    return {start + byte for start in _starts(view) for byte in range(view.dtype.itemsize)}


@given(views())
def test_a_view_overlaps_itself_where_two_elements_have_one_place(view: View) -> None:
    starts = _starts(view)
    assert overlaps_itself(view) == (len(set(starts)) < len(starts))


@given(views(), views())
def test_two_views_overlap_where_they_have_a_byte_in_common(a: View, b: View) -> None:
    assert overlap(a, b) == bool(_bytes(a) & _bytes(b))
    assert overlap(b, a) == overlap(a, b)


@given(views())
def test_the_reach_holds_every_byte_and_none_besides_at_its_ends(view: View) -> None:
    held = _bytes(view)
    if held:
        assert (view.reach.address, view.reach.end) == (min(held), max(held) + 1)
    else:
        assert view.reach.nbytes == 0


@pytest.mark.parametrize(
    ("shape", "strides", "expected"),
    [
        ((1000, 1000, 1000), (1_000_000, 1000, 1), False),
        ((1000, 1000, 1000), (1, 1000, 1_000_000), False),
        ((1000, 1000, 1000), (-1_000_000, 1000, -1), False),
        ((1000, 1000, 1000), (1_000_000, 999, 1), True),
        ((2**20, 2**20), (2**20 - 1, 1), True),
        ((2**40,), (0,), True),
        ((2**40, 1), (1, 0), False),
        ((3, 2), (2, 3), False),  # interleaved: 0 3 2 5 4 7
        ((4, 2), (2, 3), False),
        ((4, 3), (2, 3), True),  # 3·2 = 2·3
        ((2, 3, 0), (0, 0, 0), False),
    ],
)
def test_large_and_interleaved_views(shape: tuple[int, ...], strides: tuple[int, ...], expected: bool) -> None:
    assert overlaps_itself(_view(0, shape, strides)) is expected


def test_columns_of_one_matrix_do_not_overlap() -> None:
    even = _view(0, (1000, 500), (1000, 2))
    odd = _view(4, (1000, 500), (1000, 2))
    assert not overlap(even, odd)
    assert overlap(even, _view(2, (1000, 500), (1000, 2)))


def test_a_layout_made_to_be_hard_is_answered_soon() -> None:
    """Finding out may take long in general; then the answer is yes, which is safe."""
    strides = tuple(10_000_019 + 7919 * k * k for k in range(8))
    started = time.monotonic()
    overlaps_itself(_view(0, (50,) * 8, strides))
    assert time.monotonic() - started < 5
