"""The vocabulary of rules that the operators' tables are written in."""

from __future__ import annotations

import itertools
import math
import numbers
import operator
from collections.abc import Callable, Mapping, Set
from typing import Any

import numpy as np

from normgrad.contract.dtypes import FLOAT32, FLOATS, DType
from normgrad.contract.parameters import Broken, Call, DtypeRule, Dtypes, Extent, ShapeRule
from normgrad.contract.status import let_signals_through, quote, shown, shown_error
from normgrad.contract.view import Shape

INT64_MAX = 2**63 - 1

# Dtypes. Texts name other parameters as {name}.


def floats(call: Call) -> Dtypes:
    """float32, float16 or bfloat16, as far as the product has them."""
    if call.product is None:
        return Dtypes(FLOATS)
    return Dtypes(call.product.floats, f"on {call.product.label}")


def one_of(*dtypes: DType) -> DtypeRule:
    """One of the dtypes named."""
    return lambda call: Dtypes(dtypes)


def dtype_of(name: str, *more: DType) -> DtypeRule:
    """The dtype of another parameter, or one of those named besides."""

    def rule(call: Call) -> Dtypes:
        dtype = call.views[name].dtype
        why = " or ".join([f"{{{name}}}'s dtype", *map(str, more)])
        return Dtypes((dtype, *(d for d in more if d != dtype)), why)

    return rule


def dtype_of_given(name: str, otherwise: DtypeRule) -> DtypeRule:
    """The dtype of another parameter where that one is given, or else what a second rule says."""
    given = dtype_of(name)
    return lambda call: given(call) if name in call.views else otherwise(call)


def preferring_float32(rule: DtypeRule) -> DtypeRule:
    """The same dtypes, but float32 where the library makes the array."""

    def reordered(call: Call) -> Dtypes:
        found = rule(call)
        rest = tuple(dtype for dtype in found.allowed if dtype != FLOAT32)
        return Dtypes((FLOAT32, *rest), found.why) if len(rest) < len(found.allowed) else found

    return reordered


def preferring(name: str, rule: DtypeRule) -> DtypeRule:
    """The same dtypes, but another parameter's where the library makes the array and that one is given."""

    def reordered(call: Call) -> Dtypes:
        found = rule(call)
        liked = call.dtype(name)
        if liked not in found.allowed:
            return found
        return Dtypes((liked, *(dtype for dtype in found.allowed if dtype != liked)), found.why)

    return reordered


def not_narrower_than(name: str) -> DtypeRule:
    """A dtype of at least as many bits as another parameter's, its own dtype preferred."""

    def rule(call: Call) -> Dtypes:
        least = call.views[name].dtype
        allowed = (d for d in floats(call).allowed if d.itemsize >= least.itemsize and d != least)
        return Dtypes((least, *allowed), f"not narrower than {{{name}}}")

    return rule


# Shapes


def shape_of(name: str) -> ShapeRule:
    """The shape of another parameter."""
    return lambda call: Extent(call.shape(name), why=f"{{{name}}}'s shape")


def shape_is(shape: Callable[[Call], Shape], why: str) -> ShapeRule:
    """The shape that a function of the call gives."""
    return lambda call: Extent(shape(call), why=why)


def elements(count: Callable[[Call], int], why: str, preferred: Callable[[Call], Shape] | None = None) -> ShapeRule:
    """Any shape with so many elements; ``preferred`` is that of an array that the library allocates."""
    return lambda call: Extent(preferred(call) if preferred else None, count(call), why)


# Which outputs are wanted


def masked(index: int) -> Callable[[Call], bool]:
    """Wanted where ``output_mask`` says so at this index."""
    return lambda call: bool(call.attributes["output_mask"][index])


def flagged(name: str) -> Callable[[Call], bool]:
    """Wanted where this flag is set."""
    return lambda call: bool(call.attributes[name])


# Attributes


def integer(value: Any) -> int:
    """An integer that fits in 64 bits."""
    try:
        number = operator.index(value)
    except Exception as error:  # of the user's __index__ any
        let_signals_through(error)
        raise Broken(f"is {quote(shown(value))}, and must be an integer") from None
    if not -INT64_MAX - 1 <= number <= INT64_MAX:
        raise Broken(f"is {shown(number)}, and must fit in a signed 64-bit integer")
    return number


def size(value: Any) -> int:
    """An integer that counts something: not negative."""
    number = integer(value)
    if number < 0:
        raise Broken(f"is {number}, and must not be negative")
    return number


def positive(value: Any) -> int:
    """An integer above zero."""
    number = integer(value)
    if number <= 0:
        raise Broken(f"is {number}, and must be greater than 0")
    return number


def real(value: Any) -> float:
    """A real number; an array without axes, as ``np.load`` returns it, counts as its element."""
    try:
        if isinstance(value, np.ndarray) and value.ndim == 0:
            value = value.item()
        if isinstance(value, numbers.Real):
            return float(value)
    except Exception as error:  # OverflowError, or any of the user's __float__
        let_signals_through(error)
        raise Broken(f"is {quote(shown(value))}, and must be a real number within float64's range") from None
    raise Broken(f"is {quote(shown(value))}, and must be a real number")


def flag(value: Any) -> bool:
    """True or false, or 1 or 0."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if isinstance(value, numbers.Integral):
        number = integer(value)
        if number in (0, 1):
            return bool(number)
    raise Broken(f"is {quote(shown(value))}, and must be True or False")


_MOST_ITEMS = 64  # that are read of a list, far more than any parameter takes: an iterable may be endless


def items_of(value: Any) -> tuple[Any, ...]:
    """The items of a list in order; TypeError where the value is no list."""
    if isinstance(value, Set | Mapping):
        raise Broken(f"is {quote(shown(value))}, and must be a list or tuple, which has its elements in order")
    try:
        items = tuple(itertools.islice(value, _MOST_ITEMS + 1))
    except TypeError:
        raise
    except Exception as error:
        let_signals_through(error)
        raise Broken(f"cannot be read: {quote(shown_error(error))}") from None
    if len(items) > _MOST_ITEMS:
        raise Broken(f"has more than {_MOST_ITEMS} elements, and no list of the contract is so long")
    return items


def sizes(value: Any) -> Shape:
    """A list of sizes; a single one stands for a list of one."""
    try:
        items = items_of(value)
    except TypeError:
        items = (value,)
    try:
        return tuple([size(item) for item in items])
    except Broken as broken:
        raise Broken(f"is {quote(shown(value))}: an element {broken}") from None


def product_of(factors: dict[str, int]) -> int:
    """The product of sizes. One that overflows 64 bits is refused even where another size is 0."""
    if math.prod(max(factor, 1) for factor in factors.values()) > INT64_MAX:
        names = "·".join(f"{{{name}}}" for name in factors)
        values = "·".join(map(str, factors.values()))
        raise Broken(f"makes {names} = {values}, and the product must fit in a signed 64-bit integer")
    return math.prod(factors.values())
