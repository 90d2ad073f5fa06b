"""What an operator's parameters are: the columns of the contract's tables.

A tensor's dtype rule and shape rule are functions of the call that say what is expected. The same rule checks
an array that was given and tells how to make one that was not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from normgrad.contract.dtypes import DType
from normgrad.contract.products import Product
from normgrad.contract.view import Shape, View


class Role(Enum):
    """What a call does with a tensor."""

    INPUT = "input"
    OUTPUT = "output"
    IN_PLACE = "in place"


@dataclass(frozen=True, slots=True)
class Dtypes:
    """The dtypes that are allowed, the preferred one first, and why (for the message)."""

    allowed: tuple[DType, ...]
    why: str = ""


@dataclass(frozen=True, slots=True)
class Extent:
    """The shape that is required, or only its number of elements where any shape will do, and why."""

    shape: Shape | None = None
    elements: int | None = None
    why: str = ""

    def holds(self, shape: Shape, numel: int) -> bool:
        return shape == self.shape if self.elements is None else numel == self.elements


class Broken(Exception):
    """A rule that does not hold; the text says what was given and what would be right."""


@dataclass(slots=True)
class Call:
    """One call while it is checked: arguments as given, and what of them is known to be sound."""

    arguments: Mapping[str, Any]
    product: Product | None
    views: dict[str, View] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)

    def dtype(self, name: str) -> DType | None:
        view = self.views.get(name)
        return None if view is None else view.dtype

    def shape(self, name: str) -> Shape:
        return self.views[name].shape


DtypeRule = Callable[[Call], Dtypes]
ShapeRule = Callable[[Call], Extent]


def always(call: Call) -> bool:
    """Wanted in every call."""
    return True


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor parameter. ``c_name`` is its name in the C interface.

    An optional output is one that a plan may leave out.
    """

    name: str
    c_name: str
    dtype: DtypeRule
    ranks: tuple[int, int]
    shape: ShapeRule | None = None
    role: Role = Role.INPUT
    optional: bool = False
    wanted: Callable[[Call], bool] = always

    @property
    def is_written(self) -> bool:
        return self.role is not Role.INPUT


@dataclass(frozen=True, slots=True)
class Attribute:
    """A parameter that is no tensor. ``read`` turns the argument into its value, or raises :class:`Broken`.

    ``follows`` holds the rules that speak of other parameters too, checked once every attribute is read.
    """

    name: str
    c_name: str
    read: Callable[[Any], Any]
    follows: Callable[[Call], None] | None = None
    nullable: bool = False  # None is a null pointer rather than a wrong value


@dataclass(frozen=True, slots=True)
class Mask:
    """Flags that choose the outputs, one per output."""

    name: str
    c_name: str
    length: int


Parameter = Tensor | Attribute | Mask
