"""Where the wrong elements of a result are: in some rows, samples or channels, at the end of rows, in one lane.

Rounding errors are scattered. Those of a wrong index, a missing mask or a lost piece of work are not, and where they
are tells what went wrong.

A pattern is a set of elements that a few words describe: rows 20–39, the last 3 elements of rows. It is reported where
all wrong elements are in the set, or the text says how many are, and chance does not explain it. Chance puts m of n
wrong elements into a set that holds the share p of all elements with a probability of at most exp(−n·KL(m/n ‖ p))
(Chernoff's bound). Multiplied by the number of sets of that form, this is the measure of a pattern: the one with the
smallest product explains most in the fewest words. The search goes on inside its set: the last 3 elements of rows 5–7
are two patterns.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from normgrad.testing.layout import Layout
from normgrad.testing.measured import percent

#: The logarithm of a probability: a claim that chance makes true more often than this is none.
CHANCE = math.log(1e-3)

_MOST_OF = 0.9  # of the wrong elements, for a pattern that does not hold for all of them
_WHOLE = 0.9  # of a set's elements, from which on a set that holds more than half of all elements is a pattern too
_BLOCKS = tuple(2**k for k in range(1, 11))
_MOST_NAMED = 6

#: The kinds of patterns that say where wrong elements are; all others say what they are.
WHERE = frozenset(
    "everywhere row column sample group channel position element tail block single scattered".split()  # noqa: SIM905
)


@dataclass(frozen=True)
class Cluster:
    """A pattern of wrong elements.

    Attributes
    ----------
    kind : str
        Where they are: ``everywhere``, ``row``, ``column``, ``sample``, ``group``, ``channel``, ``position``,
        ``element``, ``tail``, ``block``, ``single`` or ``scattered``. What they are: ``special``, ``zero``,
        ``constant``, ``sign``, ``factor``, ``offset``, ``term``, ``statistic``, ``sum``, ``rounded``,
        ``swap``, ``shift``, ``copy`` or ``transposed``.
    text : str
        The pattern in words; everything is counted from 0.
    """

    kind: str
    text: str


@dataclass(frozen=True)
class Division:
    """A division of the elements into numbered classes: rows, samples, channels."""

    noun: str
    classes: int
    of: Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class _Segments:
    """Pieces of one length that a kernel goes through from its first element to its last: rows, planes, the result."""

    noun: str
    length: int
    offset: Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class _Pattern:
    """A pattern, how likely it is by chance (a logarithm), and whether elements are in its set."""

    chance: float
    cluster: Cluster
    holds: Callable[[np.ndarray], np.ndarray]


def divisions(layout: Layout, size: int) -> list[Division]:
    """The divisions of a flattened result into more than one class; of a vector its elements."""
    rows = -(-size // layout.row_length)
    if not layout.channels:
        every = [Division("element", size, lambda index: index)]
    elif layout.row_is == "row":
        every = [Division("row", rows, layout.row), Division("column", layout.channels, layout.channel)]
    else:
        samples = -(-size // (layout.channels * layout.positions))
        every = [
            Division("sample", samples, layout.sample),
            Division(layout.channel_is, layout.channels, layout.channel),
            Division("position", layout.positions, layout.position),
        ]
        if layout.groups != layout.channels:
            every.append(Division("group", layout.groups, layout.group))
        if samples > 1 and layout.groups > 1:
            every.append(Division("row", rows, layout.row))
    return [division for division in every if division.classes > 1]


def clusters(is_wrong: np.ndarray, layout: Layout) -> list[Cluster]:
    """Where the wrong elements of a result are; nothing where no element is wrong."""
    shape, is_wrong = is_wrong.shape, np.ravel(is_wrong)
    wrong = np.flatnonzero(is_wrong)
    if not wrong.size:
        return []
    found, described = _patterns(wrong, is_wrong.size, layout)
    if not found:
        found, described = [_without_pattern(wrong, is_wrong.size, shape, layout)], wrong.size
    if sum(extent > 1 for extent in shape) > 1:  # as GroupNorm's statistics have a sample and a group
        flat = ", counted in the flattened result"
        found = [replace(one, text=one.text + flat) if one.kind == "element" else one for one in found]
    found = explained(found, layout)
    if wrong.size <= _MOST_NAMED and described != wrong.size:
        found[-1] = replace(found[-1], text=f"{found[-1].text}; the wrong elements are {_indices(wrong, shape)}")
    return found


def explained(found: list[Cluster], layout: Layout) -> list[Cluster]:
    """The same patterns; the first that names a row says what a row is, where that is not a row of a matrix."""
    named = [n for n, one in enumerate(found) if re.search(r"\brows?\b", one.text)]
    note = f" (a row is a {layout.row_is} of a sample)"
    if layout.row_is == "row" or not named or found[named[0]].text.endswith(note):
        return found
    first = found[named[0]]
    return [*found[: named[0]], replace(first, text=first.text + note), *found[named[0] + 1 :]]


def _without_pattern(wrong: np.ndarray, size: int, shape: tuple[int, ...], layout: Layout) -> Cluster:
    if wrong.size == size > 1:
        return Cluster("everywhere", f"all {size} elements are wrong")
    if wrong.size == 1:
        return Cluster("single", f"1 wrong element, at {_indices(wrong, shape)}")
    if whole := _whole_classes(wrong, size, layout):
        return whole
    if 2 * wrong.size <= size and wrong.size == size - wrong[0]:  # chance could make it, but it is worth a look
        return Cluster("tail", f"in {_last(wrong.size, size)} elements{_left_over(wrong.size, size)}")
    if layout.row_length == size:
        period, others = _period(wrong, size), size - wrong.size
        is_most = 4 * others < size and others <= _MOST_NAMED
        if period is not None or is_most or wrong[-1] - wrong[0] + 1 == wrong.size:
            return Cluster("element", f"in {_named('element', wrong, size, period)}")
    if wrong.size <= _MOST_NAMED:
        return Cluster("scattered", f"{wrong.size} wrong elements, at {_indices(wrong, shape)}")
    if 2 * wrong.size > size:
        return Cluster("everywhere", f"{percent(wrong.size / size, 1)} of the elements are wrong")
    return Cluster("scattered", f"{wrong.size} wrong elements; no pattern found")


def _whole_classes(wrong: np.ndarray, size: int, layout: Layout) -> Cluster | None:
    """Rows, samples or channels next to each other that are wrong as a whole, and nothing else."""
    for division in divisions(layout, size):
        hit = np.flatnonzero(np.bincount(division.of(wrong)))
        is_whole = division.classes < size and hit.size * size == wrong.size * division.classes
        if is_whole and hit[-1] - hit[0] + 1 == hit.size:
            return Cluster(division.noun, f"in {_named(division.noun, hit, division.classes)}")
    return None


def _patterns(wrong: np.ndarray, size: int, layout: Layout) -> tuple[list[Cluster], int]:
    """The best pattern, the best one inside its set, and so on; and how many elements they leave."""
    found: list[Cluster] = []
    inside = np.arange(size)
    segments = _segments(layout, size)
    while wrong.size > 1:
        of = f"of the {wrong.size} wrong elements" if inside.size == size else f"of these {wrong.size} elements"
        candidates = [*_tails(wrong, inside, segments, of), *_sets(wrong, inside, layout, size, of)]
        # Blocks of several rows only where nothing else will do: rows that repeat say the same in fewer words.
        rows = [segment.length for segment in segments if segment.length < size]
        in_blocks = list(_blocks(wrong, inside, segments))
        candidates += [pattern for block, pattern in in_blocks if all(block % row for row in rows)]
        if all(pattern.chance > CHANCE for pattern in candidates):
            candidates = [pattern for _, pattern in in_blocks]
        # Rounded, so that of two that are equally likely it is the first.
        best = min(candidates, key=lambda pattern: round(pattern.chance, 6), default=None)
        if best is None or best.chance > CHANCE:
            break
        found.append(best.cluster)
        wrong, inside = wrong[best.holds(wrong)], inside[best.holds(inside)]
    return found, inside.size


def _segments(layout: Layout, size: int) -> list[_Segments]:
    planes = _Segments("positions (HxW) of channels", layout.positions, layout.position)
    rows = _Segments(f"elements of {layout.row_is}s", layout.row_length, layout.offset)
    result = _Segments("elements of the result", size, lambda index: index)
    by_length = {segments.length: segments for segments in (rows, planes, result) if segments.length > 1}
    return sorted(by_length.values(), key=lambda segments: segments.length)


def _sets(wrong: np.ndarray, inside: np.ndarray, layout: Layout, size: int, of: str) -> Iterator[_Pattern]:
    """The classes of a division that hold the wrong elements, and those that hold most of them."""
    for division in divisions(layout, size):
        of_wrong = np.bincount(division.of(wrong), minlength=division.classes)
        of_all = np.bincount(division.of(inside), minlength=division.classes)
        available = int(np.count_nonzero(of_all))
        hit = np.flatnonzero(of_wrong)
        order = hit[np.argsort(-of_wrong[hit], kind="stable")]
        most = order[: int(np.searchsorted(np.cumsum(of_wrong[order]), _MOST_OF * wrong.size)) + 1]
        for chosen in (hit, np.sort(most)):
            found = int(np.sum(of_wrong[chosen]))
            evidence = _evidence(found, wrong.size, int(np.sum(of_all[chosen])), inside.size)
            is_named_twice = division.noun == "row" and layout.row_is != "row" and _is_product(chosen, layout.groups)
            if evidence is None or is_named_twice:
                continue
            period = _period(chosen, division.classes) if available == division.classes else None
            chance = _choices(chosen, division.classes, available, period) - evidence
            some = "" if found == wrong.size else f"{found} {of} are "
            text = f"{some}in {_named(division.noun, chosen, division.classes, period)}"
            yield _Pattern(chance, Cluster(division.noun, text), _in_classes(division, chosen))


def _is_product(rows: np.ndarray, groups: int) -> bool:
    """Whether these are some groups of some samples, which samples and groups describe in better words."""
    sample, group = np.divmod(rows, groups)
    return np.unique(sample).size * np.unique(group).size == rows.size


def _tails(wrong: np.ndarray, inside: np.ndarray, every: Sequence[_Segments], of: str) -> Iterator[_Pattern]:
    """The end of rows or planes that holds the wrong elements, or most of them."""
    for segments in every:
        offsets, of_all = np.sort(segments.offset(wrong)), segments.offset(inside)
        for first in dict.fromkeys((int(offsets[0]), int(offsets[int((1 - _MOST_OF) * wrong.size)]))):
            found = int(np.count_nonzero(offsets >= first))
            evidence = _evidence(found, wrong.size, int(np.count_nonzero(of_all >= first)), inside.size)
            tail = segments.length - first
            if evidence is None or offsets[-1] != segments.length - 1 or 2 * tail > segments.length:
                continue
            some = "" if found == wrong.size else f"{found} {of} are "
            text = f"{some}in {_last(tail, segments.length)} {segments.noun}"
            cluster = Cluster("tail", text + _left_over(tail, segments.length))
            yield _Pattern(math.log(segments.length) - evidence, cluster, _from_offset(segments, first))


def _left_over(tail: int, length: int) -> str:
    """The blocks that would leave such a tail over."""
    blocks = [block for block in _BLOCKS if length % block == tail]
    if not blocks:
        return ""
    return f", the remainder after blocks of {blocks[0]}{f' to {blocks[-1]}' if len(blocks) > 1 else ''}"


def _last(tail: int, length: int) -> str:
    return f"the last {f'{tail} ' if tail > 1 else ''}of the {length}"


def _blocks(wrong: np.ndarray, inside: np.ndarray, every: Sequence[_Segments]) -> Iterator[tuple[int, _Pattern]]:
    """The sizes of blocks, powers of two, and the offsets in every such block that hold the wrong elements."""
    for segments in every:
        counts = [np.bincount(segments.offset(index) % _BLOCKS[-1], minlength=_BLOCKS[-1]) for index in (wrong, inside)]
        for block in reversed(_BLOCKS):
            if counts[0].size > block:
                counts = [of_lane[:block] + of_lane[block:] for of_lane in counts]
            in_lane, all_in_lane = counts
            lanes = np.flatnonzero(in_lane)
            elements = int(np.sum(all_in_lane[lanes]))
            evidence = _evidence(wrong.size, wrong.size, elements, inside.size)
            is_whole = np.min(in_lane[lanes] / all_in_lane[lanes]) >= _WHOLE
            if evidence is None or not is_whole or 4 * block > segments.length:
                continue
            blocks = "every block" if wrong.size == elements else f"{percent(wrong.size / elements, 1)} of the blocks"
            text = f"at {_named('position', lanes)} of {blocks} of {block} {segments.noun}"
            chance = math.log(len(_BLOCKS)) + _ways(block, lanes.size) - evidence
            yield block, _Pattern(chance, Cluster("block", text), _in_lanes(segments, block, lanes))


def _evidence(found: int, wrong: int, elements: int, of: int) -> float | None:
    """How far a set that holds so many of the wrong elements is from chance; None where it is no pattern at all."""
    share, expected = found / wrong, elements / of
    if elements == of or share <= expected or (2 * elements > of and found < _WHOLE * elements):
        return None
    rest = (1 - share) * math.log((1 - share) / (1 - expected)) if share < 1 else 0.0
    return wrong * (share * math.log(share / expected) + rest)


def _choices(chosen: np.ndarray, classes: int, available: int, period: int | None) -> float:
    """The logarithm of the number of sets like this one: all of its size, all intervals, or all that repeat."""
    choices = _ways(available, chosen.size)
    if chosen[-1] - chosen[0] + 1 == chosen.size:
        at_an_end = chosen[0] == 0 or chosen[-1] == classes - 1
        choices = min(choices, math.log(2 * available) if at_an_end else 2 * math.log(available))
    if period is not None:
        repeated = int(np.count_nonzero(chosen < period))
        choices = min(choices, math.log(available) + _ways(period, repeated))
    return choices


def _ways(of: int, size: int) -> float:
    return math.lgamma(of + 1) - math.lgamma(size + 1) - math.lgamma(of - size + 1)


def _period(chosen: np.ndarray, classes: int) -> int | None:
    """The smallest period with which the chosen classes repeat over all classes, at least three times."""
    is_chosen = np.zeros(classes, bool)
    is_chosen[chosen] = True
    for period in chosen[1:65] - chosen[0]:
        if 3 * period > classes:
            return None
        if np.array_equal(is_chosen[period:], is_chosen[:-period]):
            return int(period)
    return None


def _in_classes(division: Division, chosen: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    is_chosen = np.zeros(division.classes, bool)
    is_chosen[chosen] = True
    return lambda index: is_chosen[division.of(index)]


def _from_offset(segments: _Segments, first: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda index: segments.offset(index) >= first


def _in_lanes(segments: _Segments, block: int, lanes: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    is_chosen = np.zeros(block, bool)
    is_chosen[lanes] = True
    return lambda index: is_chosen[segments.offset(index) % block]


def _named(noun: str, numbers: np.ndarray, of: int | None = None, period: int | None = None) -> str:
    """``3 of 64 rows: 5–7``; what repeats is named once, and of many the first and the last."""
    if of is None:
        return f"{_plural(noun, numbers)} {_runs(numbers)}"
    if numbers.size == 1:
        return f"{noun} {numbers[0]} of {of}"
    head = f"{numbers.size} of {of} {noun}s: "
    if period is not None:
        repeated = numbers[numbers < period]
        return f"{head}{_plural(noun, repeated)} {_runs(repeated)} of every {period}"
    if 4 * numbers.size > 3 * of:
        others = np.setdiff1d(np.arange(of), numbers)
        return f"{head}all but {_plural(noun, others)} {_runs(others)}"
    return f"{head}{_runs(numbers)}"


def _plural(noun: str, numbers: np.ndarray) -> str:
    return noun if numbers.size == 1 else f"{noun}s"


def _runs(numbers: np.ndarray) -> str:
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1)
    texts = [str(run[0]) if run.size == 1 else f"{run[0]}–{run[-1]}" for run in runs]
    if len(texts) > _MOST_NAMED:
        texts = [*texts[: _MOST_NAMED - 1], "…", texts[-1]]
    return ", ".join(texts)


def _indices(wrong: np.ndarray, shape: tuple[int, ...]) -> str:
    texts = [str(tuple(int(i) for i in np.unravel_index(index, shape))) for index in wrong]
    return f"{', '.join(texts[:-1])} and {texts[-1]}" if len(texts) > 1 else texts[0]
