"""Which threads hold which elements of the tensors in compiled code, read from Triton's GPU dialect (TTGIR).

The kernels rely on layouts that Triton chooses and does not promise: reductions over lanes that are adjacent, and
values that all sending threads hold. ``launch.compiled`` calls ``check_layouts`` for every kernel before it is loaded,
and a kernel that fails is never launched.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

#: The instruction by which the CTAs of a cluster send partial sums.
SEND = "st.async"

#: Linear layout: the step along each dimension that each bit of the register's, lane's or warp's index makes.
Bases = dict[str, list[list[int]]]


class UnexpectedLayout(Exception):
    """A compiled kernel whose layouts are not as the kernel needs them; the text says what was found."""


def check_layouts(asm: Mapping[str, str]) -> None:
    """Raise UnexpectedLayout where compiled code has layouts that the kernels do not work with, or cannot be read."""
    code = asm.get("ttgir")
    if code is None:
        raise UnexpectedLayout(
            "Triton keeps no TTGIR of its kernels (TRITON_STORE_BINARY_ONLY), so it cannot be checked"
        )
    try:
        found = [
            f"a reduction over separated threads, {problem}" for problem in reductions_over_separated_threads(code)
        ]
        if SEND in code:
            found += [f"a value that not all senders hold, {text}" for text in values_not_held_by_all_senders(code)]
    except (LookupError, ValueError) as error:
        raise UnexpectedLayout(f"the layouts of a kernel cannot be read ({type(error).__name__}: {error})") from error
    if found:
        raise UnexpectedLayout(found[0])


def _named_layouts(code: str) -> dict[str, str]:
    return dict(re.findall(r"^(#\w+) = (#ttg\..*)$", code, re.M))


def _integers(text: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", text)]


def _blocked(text: str, shape: list[int]) -> Bases:
    fields = {name: _integers(values) for name, values in re.findall(r"(\w+) = \[([^\]]*)\]", text)}
    reached = [1] * len(shape)
    bases: Bases = {}
    for level, field in (("register", "sizePerThread"), ("lane", "threadsPerWarp"), ("warp", "warpsPerCTA")):
        bases[level] = []
        for dimension in fields["order"]:
            for _ in range(fields[field][dimension].bit_length() - 1):
                step = reached[dimension] if reached[dimension] < shape[dimension] else 0
                bases[level].append([step if axis == dimension else 0 for axis in range(len(shape))])
                reached[dimension] *= 2
    return bases


def _bases(layout: str, shape: list[int], named: dict[str, str]) -> Bases:
    layout = named.get(layout, layout)
    if sliced := re.fullmatch(r"#ttg\.slice<\{dim = (\d+), parent = (.*)\}>", layout):
        dimension = int(sliced[1])
        parent = _bases(sliced[2], [*shape[:dimension], 1, *shape[dimension:]], named)
        return {level: [[*b[:dimension], *b[dimension + 1 :]] for b in bases] for level, bases in parent.items()}
    if layout.startswith("#ttg.linear"):
        found = {level: re.search(level + r" = (\[\]|\[\[.*?\]\])", layout) for level in ("register", "lane", "warp")}
        return {
            level: [_integers(basis) for basis in re.findall(r"\[([^\[\]]+)\]", match[1])]
            for level, match in found.items()
            if match
        }
    if not layout.startswith("#ttg.blocked"):
        raise ValueError(f"unknown layout {layout}")
    return _blocked(layout, shape)


def _are_separated(bases: list[list[int]], axis: int) -> bool:
    """Return whether the bits that step along an axis are not consecutive, or one steps along another axis as well."""
    along = [bit for bit, basis in enumerate(bases) if basis[axis]]
    gaps = bool(along) and along[-1] - along[0] + 1 > len(along)
    return gaps or any(sum(map(bool, bases[bit])) > 1 for bit in along)


_AXIS = r'"tt\.reduce"\([^)]*\) <\{axis = (\d+) : i32[^}]*\}>'
_TENSOR = r"\}\)(?: \{[^}]*\})? : \(tensor<((?:\d+x)+)\w+, ([^\n]*?)>[,)]"
_REDUCE = re.compile(f"{_AXIS}.*?{_TENSOR}", re.S)


def reductions(code: str) -> Iterator[tuple[int, str, Bases]]:
    """Yield axis, sizes and layout of every reduction."""
    named = _named_layouts(code)
    found = list(_REDUCE.finditer(code))
    if len(found) != code.count('"tt.reduce"'):
        raise ValueError("a reduction in an unknown form")
    for axis, sizes, layout in (match.groups() for match in found):
        yield int(axis), sizes, _bases(layout, _integers(sizes), named)


def reductions_over_separated_threads(code: str) -> Iterator[str]:
    """Yield the reductions whose threads along the axis are not adjacent: Triton 3.6 reduces over the wrong lanes."""
    for axis, sizes, bases in reductions(code):
        if _are_separated(bases["lane"], axis) or _are_separated(bases["warp"], axis):
            yield f"axis {axis} of {sizes}: {bases}"


def values_not_held_by_all_senders(code: str) -> Iterator[str]:
    """Yield operands of sending instructions whose elements the threads do not hold as they must.

    Of [rows], every thread must hold every element. Of [rows, warps], every lane its warp's elements, and no warp
    another's.
    """
    named = _named_layouts(code)
    lines = [line for line in code.splitlines() if "elementwise_inline_asm" in line and SEND in line]
    if not lines:
        raise ValueError("a sending instruction in an unknown form")
    for sizes, layout in re.findall(r"tensor<((?:\d+x)+)\w+, ([^\n]*?)>(?:,| ->)", "\n".join(lines)):
        shape = _integers(sizes)
        bases = _bases(layout, shape, named)
        steps = sorted(step for basis in bases["warp"] for step in basis)
        own = [2**bit for bit in range(shape[1].bit_length() - 1)] if len(shape) > 1 else []
        mixed = any(basis[0] for basis in bases["warp"])
        if any(any(basis) for basis in bases["lane"]) or mixed or [step for step in steps if step] != own:
            yield f"{sizes}: {bases}"
