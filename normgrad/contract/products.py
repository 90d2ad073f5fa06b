"""Ascend products: what each supports, how it is named, and which one calls are checked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from types import TracebackType

from normgrad.contract.dtypes import BFLOAT16, FLOATS, DType
from normgrad.contract.status import shown
from normgrad.environment import variable


class Family(Enum):
    """The operators that a product has or lacks together: each of the norms' passes, and all steps of BatchNorm."""

    LAYER_NORM = "LayerNorm"
    LAYER_NORM_BACKWARD = "LayerNorm backward"
    GROUP_NORM = "GroupNorm"
    GROUP_NORM_BACKWARD = "GroupNorm backward"
    BATCH_NORM = "BatchNorm"


@dataclass(frozen=True, slots=True)
class Support:
    """One row of the product table."""

    label: str
    soc_prefixes: tuple[str, ...]
    families: frozenset[Family]
    bfloat16: bool
    soc_names: tuple[str, ...] = ()  # names taken only when they match to the last letter
    mixed_group_norm: bool = False  # GroupNorm takes float32 statistics beside 16-bit data


_ALL = frozenset(Family)


class Product(Enum):
    """A product of the Ascend family, for whose documents a call can be checked."""

    ASCEND_950 = Support("Ascend 950", ("Ascend950",), _ALL, bfloat16=True, mixed_group_norm=True)
    ATLAS_A3 = Support("Atlas A3", ("Ascend910_93",), _ALL, bfloat16=True)
    ATLAS_A2 = Support("Atlas A2", ("Ascend910B1", "Ascend910B2", "Ascend910B3", "Ascend910B4"), _ALL, bfloat16=True)
    ATLAS_200I_500_A2 = Support("Atlas 200I/500 A2", ("Ascend310B",), frozenset({Family.LAYER_NORM}), bfloat16=False)
    ATLAS_INFERENCE = Support(
        "Atlas inference",
        ("Ascend310P",),
        frozenset({Family.LAYER_NORM_BACKWARD, Family.GROUP_NORM}),
        bfloat16=False,
    )
    ATLAS_TRAINING = Support(
        "Atlas training", ("Ascend910A", "Ascend910Pro"), _ALL, bfloat16=False, soc_names=("Ascend910B",)
    )

    @property
    def label(self) -> str:
        """The product's name as users write it, such as ``Atlas A2``."""
        return self.value.label

    def __repr__(self) -> str:
        return f"<Product.{self.name}: {self.label!r}>"

    def has(self, family: Family) -> bool:
        """Whether the product has the operators of a family."""
        return family in self.value.families

    @property
    def floats(self) -> tuple[DType, ...]:
        """The floating-point dtypes that the product computes with."""
        return tuple(dtype for dtype in FLOATS if dtype != BFLOAT16 or self.value.bfloat16)

    def is_soc(self, name: str) -> bool:
        """Whether a SoC name belongs to the product."""
        return name in self.value.soc_names or name.startswith(self.value.soc_prefixes)


def parse_product(name: Product | str) -> Product:
    """The product that a member, a label in any case or a SoC name stands for.

    Examples
    --------
    >>> parse_product("atlas a2"), parse_product("Ascend910B3"), parse_product("Ascend910B")
    (<Product.ATLAS_A2...>, <Product.ATLAS_A2...>, <Product.ATLAS_TRAINING...>)
    """
    if isinstance(name, Product):
        return name
    if isinstance(name, str):
        wanted = name.strip()
        for product in Product:
            if wanted.casefold() == product.label.casefold() or product.is_soc(wanted):
                return product
    raise ValueError(f"unknown product {shown(name)}; known are {', '.join(_known_names())}")


def _known_names() -> Iterator[str]:
    for product in Product:
        socs = [f"{prefix}*" for prefix in product.value.soc_prefixes] + list(product.value.soc_names)
        yield f"{product.label!r} (SoC {', '.join(socs)})"


ENVIRONMENT = "NORMGRAD_PRODUCT"
_environment = variable(ENVIRONMENT)
_choices: list[use_product] = []  # those in force, the last one rules


def current_product() -> Product | None:
    """The product that calls without ``product=`` are checked for, or None."""
    if _choices:
        return _choices[-1].product
    name = _environment()
    return parse_product(name) if name else None


class use_product:
    """Check calls as a product's documents do: from now on, or until the end of a ``with`` block.

    The choice holds for the whole process. None stands for no product, whatever the environment variable
    ``NORMGRAD_PRODUCT`` says.

    Examples
    --------
    >>> with use_product("Atlas A2"):
    ...     current_product().label
    'Atlas A2'
    """

    def __init__(self, product: Product | str | None) -> None:
        self.product = None if product is None else parse_product(product)
        self._was_entered = False
        self._blocks: list[use_product] = []  # the choices that end with them, the innermost block's last
        _choices.append(self)

    def __repr__(self) -> str:
        return f"<use_product: {self.product.label if self.product else 'none'}>"

    def __enter__(self) -> Product | None:
        # The first block ends the choice that is in force since the call, each later one a choice of its own.
        self._blocks.append(use_product(self.product) if self._was_entered else self)
        self._was_entered = True
        return self.product

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # By identity, not by position: blocks of several threads may end in any order.
        _choices.remove(self._blocks.pop())
