"""Patterns of values: what training produces beside random normal data.

A pattern changes one tensor of a workload. ``normgrad bench --data`` times every operator on each of them, since the
speed of a kernel must not depend on the values. A *row* is what shares statistics: a row of LayerNorm, a sample's
group of GroupNorm, a channel of BatchNorm.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import numpy as np

from normgrad.bench.tensors import like

#: The exponents of ten that gradients are scaled by.
GRADIENT_SCALES = (-3, -6, -9, -12, -16, -20, -30)
#: Which elements are outliers, and their value: within float16's range.
OUTLIER_STEP, OUTLIER = 997, 3e4
#: Of normal elements 99 % are smaller than this in magnitude.
_LARGEST_PERCENT = 2.5758293
_CONSTANT = 1.0


@dataclass(frozen=True)
class Values:
    """The elements of a tensor, for a pattern to change in place; float32, whatever the tensor's dtype.

    Attributes
    ----------
    data : array
        The elements in the tensor's own shape.
    by_row : array
        The same memory, rows first.
    row_axes : int
        How many of the first axes of ``by_row`` index the rows.
    """

    data: Any
    by_row: Any
    row_axes: int

    def per_row(self, factors: Factors) -> Any:
        """Return one factor per row, in a shape that broadcasts against ``by_row``."""
        shape = tuple(self.by_row.shape)
        rows, rest = shape[: self.row_axes], shape[self.row_axes :]
        return like(factors(rows).astype(np.float32).reshape(*rows, *(1 for _ in rest)), self.data)


Change = Callable[[Values], None]
Factors = Callable[[tuple[int, ...]], np.ndarray]  # of the shape of the row indices: a factor for each row


class Target(Enum):
    """Which tensor a pattern changes."""

    GRAD_OUT = "grad_out"
    INPUT = "input"
    #: ``grad_out`` of a backward operator, ``input`` of a forward one.
    EITHER = "either"


@dataclass(frozen=True)
class Pattern:
    """A change of one tensor.

    Attributes
    ----------
    name : str
        What the change does, for tables.
    target : Target
        The tensor that it changes.
    change : function or None
        The change itself; None leaves normal data as it is.
    """

    name: str
    target: Target = Target.EITHER
    change: Change | None = None

    def tensor(self, has_grad_out: bool) -> str | None:
        """Return which tensor of an operator is changed; None where the operator does not take it."""
        if self.target is Target.INPUT:
            return "input"
        if has_grad_out:
            return "grad_out"
        return "input" if self.target is Target.EITHER else None


def _scale(factor: float, values: Values) -> None:
    data = values.data
    data *= factor


def _shift(offset: float, values: Values) -> None:
    data = values.data
    data += offset


def _scale_rows(factors: Factors, values: Values) -> None:
    rows = values.by_row
    rows *= values.per_row(factors)
    rows += 0.0  # −0, which a zero factor makes of negative elements, becomes 0


def _keep_largest(values: Values) -> None:
    data = values.data
    data *= abs(data) > _LARGEST_PERCENT
    data += 0.0


def _relu(values: Values) -> None:
    values.data[...] = values.data.clip(min=0.0)


def _set_rows(factors: Factors, values: Values) -> None:
    """Where a row's factor is 0, set all its elements to one value."""
    rows, per_row = values.by_row, values.per_row(factors)
    rows *= per_row
    rows += (1 - per_row) * _CONSTANT


def _set_every(step: int, value: float, values: Values) -> None:
    """Set every so many elements, counted in the order of the indices."""
    shape = tuple(values.data.shape)
    values.data[np.unravel_index(np.arange(0, math.prod(shape), step), shape)] = value


def _set_one(value: float, values: Values) -> None:
    """Set the element in the middle, whose row and column every verification looks at."""
    values.data[tuple(size // 2 for size in values.data.shape)] = value


def _middle_row(shape: tuple[int, ...]) -> np.ndarray:
    """The row of the middle element."""
    factors = np.zeros(shape)
    factors[tuple(size // 2 for size in shape)] = 1
    return factors


def _even_rows(shape: tuple[int, ...]) -> np.ndarray:
    return 1.0 - np.arange(math.prod(shape)) % 2


def _from_1_to_1e_12(shape: tuple[int, ...]) -> np.ndarray:
    return np.logspace(0, -12, math.prod(shape))


NORMAL = Pattern("normal")

PATTERNS = (
    *(Pattern(f"× 1e{power}", Target.GRAD_OUT, partial(_scale, 10.0**power)) for power in GRADIENT_SCALES),
    Pattern("all zero", change=partial(_scale_rows, np.zeros)),
    Pattern("all rows zero but one", change=partial(_scale_rows, _middle_row)),
    Pattern("every other row zero", change=partial(_scale_rows, _even_rows)),
    Pattern("99 % zeros", change=_keep_largest),
    Pattern("ReLU of normal", change=_relu),
    Pattern("rows scaled from 1 to 1e-12", change=partial(_scale_rows, _from_1_to_1e_12)),
    Pattern("one NaN", Target.GRAD_OUT, partial(_set_one, math.nan)),
    Pattern("one Inf", Target.GRAD_OUT, partial(_set_one, math.inf)),
    Pattern("× 1e-4", Target.INPUT, partial(_scale, 1e-4)),
    Pattern("× 1e4", Target.INPUT, partial(_scale, 1e4)),
    Pattern("+ 100", Target.INPUT, partial(_shift, 100.0)),
    Pattern("every other row constant", Target.INPUT, partial(_set_rows, _even_rows)),
    Pattern(f"every {OUTLIER_STEP}th element {OUTLIER:.0f}", Target.INPUT, partial(_set_every, OUTLIER_STEP, OUTLIER)),
    Pattern("one NaN", Target.INPUT, partial(_set_one, math.nan)),
    Pattern("one Inf", Target.INPUT, partial(_set_one, math.inf)),
)
