"""Whether wrong elements keep together: by row, by channel, at the end of rows, or at one place of every block.

Rounding errors are scattered. Those of a wrong index, a missing mask or a lost piece of work are not, and where they
are tells what went wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from normgrad.testing.layout import Layout

_MOST_OF = 0.9  # of the wrong elements, for which a pattern has to account
_EVERYWHERE = 0.5  # of all elements
_FEWEST = 4  # wrong elements, below which the end of a row and a block say nothing
_SHORTEST_ROW = 8
_LONGEST_BLOCK = 1024
_MOST_NAMED = 6


@dataclass(frozen=True)
class Cluster:
    """A pattern of wrong elements.

    Attributes
    ----------
    kind : str
        ``everywhere``, ``row``, ``channel``, ``tail``, ``block`` or ``scattered``.
    text : str
        The pattern in words.
    """

    kind: str
    text: str


def clusters(is_wrong: np.ndarray, layout: Layout) -> list[Cluster]:
    """The patterns of the wrong elements of a flattened result; none where nothing is wrong."""
    wrong = np.flatnonzero(is_wrong)
    if not wrong.size:
        return []
    if wrong.size > _EVERYWHERE * is_wrong.size and is_wrong.size >= _SHORTEST_ROW:
        share = f"{100 * wrong.size / is_wrong.size:.3g} %"
        return [Cluster("everywhere", f"{share} of the elements are wrong, all over: a wrong formula or constant")]
    found = list(_patterns(wrong, is_wrong.size, layout))
    return found or [Cluster("scattered", f"{wrong.size} wrong elements, in no pattern")]


def _patterns(wrong: np.ndarray, size: int, layout: Layout) -> Iterator[Cluster]:
    rows = -(-size // layout.row_length)
    few = _few_of(layout.row(wrong), rows)
    if few is not None:
        yield Cluster("row", f"in {_named('row', few, rows)}")
    tail = _tail(layout.position(wrong), layout.row_length)
    if tail:
        yield Cluster("tail", _tail_text(tail, layout.row_length))
        return
    block = _block(layout.position(wrong), layout.row_length)
    if block is not None:
        yield block
        return
    few = _few_of(layout.channel(wrong), layout.channels) if layout.channels else None
    if few is not None:
        yield Cluster("channel", f"in {_named('channel', few, layout.channels)}")


def _few_of(labels: np.ndarray, classes: int) -> np.ndarray | None:
    """The few classes that hold most of the elements; None where chance would have them spread as wide."""
    if classes < 2 or labels.size < 2:
        return None
    names, counts = np.unique(labels, return_counts=True)
    order = np.argsort(-counts, kind="stable")
    needed = int(np.searchsorted(np.cumsum(counts[order]), _MOST_OF * labels.size)) + 1
    by_chance = classes * -np.expm1(labels.size * np.log1p(-1 / classes))
    return np.sort(names[order[:needed]]) if needed <= by_chance / 2 else None


def _tail(positions: np.ndarray, length: int) -> int:
    """How many elements at the end of rows hold most of those wrong; 0 where they are not a short end."""
    if positions.size < _FEWEST or length < _SHORTEST_ROW:
        return 0
    ordered = np.sort(positions)
    tail = length - int(ordered[int((1 - _MOST_OF) * ordered.size)])
    return tail if tail <= length / 4 and np.unique(positions).size > 1 else 0


def _tail_text(tail: int, length: int) -> str:
    text = f"in the last {tail} of the {length} elements of rows"
    blocks = [str(2**k) for k in range(1, 11) if tail <= length % 2**k < 2 * tail]
    if blocks:
        text += f", where blocks of {blocks[0]}{f' to {blocks[-1]}' if blocks[1:] else ''} leave some over"
    return text


def _block(positions: np.ndarray, length: int) -> Cluster | None:
    """The places in blocks of a power of two that hold most of those wrong, for the block where they are fewest."""
    if positions.size < _FEWEST:
        return None
    best: tuple[float, int, np.ndarray] | None = None
    block = 4
    while block <= min(_LONGEST_BLOCK, length // 4):
        touched = np.unique(positions // block).size
        few = _few_of(positions % block, block) if 2 * touched >= length // block else None
        if few is not None and 4 * few.size <= block and (best is None or few.size / block < best[0]):
            best = (few.size / block, block, few)
        block *= 2
    if best is None:
        return None
    return Cluster("block", f"at {_named('place', best[2], best[1])} of every block of {best[1]} elements of a row")


def _named(what: str, numbers: np.ndarray, of: int) -> str:
    """``rows 3, 5–7 of 64``, with no more than a few named."""
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1)
    texts = [str(run[0]) if run.size == 1 else f"{run[0]}–{run[-1]}" for run in runs]
    if len(texts) > _MOST_NAMED:
        texts = [*texts[:_MOST_NAMED], "…"]
    label = what if numbers.size == 1 else f"{what}s"
    amount = "" if numbers.size == 1 else f"{numbers.size} "
    return f"{amount}{label} {', '.join(texts)} of {of}"
