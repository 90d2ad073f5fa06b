"""Define the standards by name: how far a result may be from the exact values before it is called wrong.

With a the result and g the exact value in float64:

``strict``
    every element ``|a − g| ≤ ½·ulp(g) + 8·2⁻²⁴·T + 2⁻¹²⁶·U``, T the sum of the absolute values of the terms of its
    formula, U the underflow allowance of its products and quotients.
``cann``
    at least 99 % of the elements ``|a − g| ≤ atol + rtol·|g|``, and the largest ``|a − g|`` at most ``max(limit,
    32·ulp(g))``.
``cann-mere``
    with ``e = |a − g|/(|g| + 10⁻⁷)``, ``mean e < T`` and ``max e < 10·T``.
``cann-double``
    of max e, mean e and the root mean square of ``a − g``, each at most so many times that of another implementation.
``torch``
    every element ``|a − g'| ≤ atol + rtol·|g'|``, g' being g rounded to the dtype; PyTorch's default tolerances.
``bitwise``
    every element has the bits of g rounded to the dtype, or of a second result where one is given.

All but ``bitwise`` treat NaN and Inf alike: see :attr:`normgrad.testing.measured.Measured.is_right_special`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from normgrad.testing.measured import Array, Measured, percent, ulp

STRICT = "strict"

T = TypeVar("T")


@dataclass(frozen=True)
class Tolerances:
    """Relative and absolute, and how large a single error may be."""

    relative: float
    absolute: float
    largest: float = float("inf")


@dataclass(frozen=True)
class Level:
    """How many times another implementation's errors are allowed."""

    largest: float
    mean: float
    rms: float


CANN = {
    "float16": Tolerances(2.0**-9, 2.0**-9, 0.1),
    "bfloat16": Tolerances(2.0**-6, 2.0**-6, 1.0),
    "float32": Tolerances(2.0**-10, 2.0**-16, 0.01),
}
CANN_SHARE = 0.99
CANN_ULPS = 32
MERE = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-13}
MERE_FLOOR = 1e-7
MERE_LARGEST = 10
LEVELS = {"L0": Level(10, 2, 2), "L1": Level(5, 1.5, 1.5), "L2": Level(2, 1.2, 1.2)}
TORCH = {
    "float16": Tolerances(1e-3, 1e-5),
    "bfloat16": Tolerances(1.6e-2, 1e-5),
    "float32": Tolerances(1.3e-6, 1e-5),
    "float64": Tolerances(1e-7, 1e-7),
}


@dataclass(frozen=True)
class Verdict:
    """What a standard says of a result.

    Attributes
    ----------
    passed : bool
        Whether the result is good enough.
    share : array
        Per element the error as a fraction of what the standard allows it; above 1 where the element is wrong.
    text : str
        Why, in a few words.
    figures : dict
        The numbers that the verdict hangs on, by name.
    """

    passed: bool
    share: Array
    text: str
    figures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Reference:
    """What a result may be compared with beside the exact values."""

    baseline: Measured | None = None
    level: str = "L1"


def strict(measured: Measured, reference: Reference) -> Verdict:
    """The bound of the contract."""
    share = measured.share_of_bound
    return Verdict(bool(np.all(share <= 1)), share, _within(measured, share, "the bound"))


def cann(measured: Measured, reference: Reference) -> Verdict:
    """A share of the elements within a tolerance, and no error beyond a limit."""
    tolerances = _of_dtype(CANN, measured, "cann")
    share = measured.share_of(tolerances.absolute + tolerances.relative * np.abs(measured.exact))
    good = float(np.mean(share <= 1)) if share.size else 1.0
    error = np.where(measured.regular, measured.error, 0.0)
    largest = float(np.max(error, initial=0.0))
    worst = int(np.argmax(error)) if error.size else 0
    allowed = (
        max(tolerances.largest, CANN_ULPS * float(ulp(measured.exact.flat[worst], measured.dtype)))
        if error.size
        else 0.0
    )
    text = f"{percent(good)} of the elements within the tolerance (99 % needed); the largest error is {largest:.3g}, "
    text += f"and may be {allowed:.3g}{_misplaced_text(measured)}"
    passed = good >= CANN_SHARE and largest <= allowed and not measured.misplaced
    return Verdict(passed, share, text, {"good": good, "largest": largest, "allowed": allowed})


def cann_mere(measured: Measured, reference: Reference) -> Verdict:
    """Bounds on the mean and the largest relative error."""
    threshold = _of_dtype(MERE, measured, "cann-mere")
    relative = _relative(measured)
    mean, largest = float(np.mean(relative)) if relative.size else 0.0, float(np.max(relative, initial=0.0))
    text = f"the mean relative error is {mean:.3g} (must be below {threshold:.3g}), "
    text += f"the largest {largest:.3g} (below {MERE_LARGEST * threshold:.3g}){_misplaced_text(measured)}"
    share = measured.share_of(MERE_LARGEST * threshold * (np.abs(measured.exact) + MERE_FLOOR))
    passed = mean < threshold and largest < MERE_LARGEST * threshold and not measured.misplaced
    return Verdict(passed, share, text, {"mean": mean, "largest": largest, "threshold": threshold})


def cann_double(measured: Measured, reference: Reference) -> Verdict:
    """Errors against those of a second implementation on the same inputs."""
    if reference.baseline is None:
        raise ValueError("the standard cann-double needs the results of a second implementation: a baseline")
    level = LEVELS[reference.level]
    # Of the second implementation no error is asked that rounding alone makes: only one of a wider dtype has less.
    rounding = Measured(measured.narrowed, measured.exact, measured.magnitude)
    ours, theirs, least = (_sizes(of) for of in (measured, reference.baseline, rounding))
    floor = np.maximum(theirs, least)
    with np.errstate(all="ignore"):
        ratios = np.where(ours == floor, 1.0, ours / floor)
    ratios = np.where(ours == 0, 0.0, ratios)
    most = np.array((level.largest, level.mean, level.rms))
    names = ("largest", "mean", "rms")
    text = ", ".join(f"{name} {ratio:.3g} (at most {m:g})" for name, ratio, m in zip(names, ratios, most, strict=True))
    text = f"errors over the baseline's at {reference.level}: {text}{_misplaced_text(measured)}"
    allowed = level.largest * floor[0] * (np.abs(measured.exact) + MERE_FLOOR)
    share = measured.share_of(np.where(allowed > 0, allowed, np.finfo(np.float64).tiny))
    passed = bool(np.all(ratios <= most)) and not measured.misplaced
    return Verdict(passed, share, text, dict(zip(names, map(float, ratios), strict=True)))


def torch(measured: Measured, reference: Reference) -> Verdict:
    """PyTorch's ``assert_close`` with its defaults, but NaN equals NaN where the exact values have it."""
    tolerances = TORCH[measured.dtype]
    with np.errstate(all="ignore"):
        error = np.abs(measured.actual - measured.nearest)
        share = measured.share_of(tolerances.absolute + tolerances.relative * np.abs(measured.nearest), error)
    return Verdict(bool(np.all(share <= 1)), share, _within(measured, share, "PyTorch's tolerance"))


def bitwise(measured: Measured, reference: Reference) -> Verdict:
    """The very bits; one NaN is as good as another."""
    expected = measured.narrowed if reference.baseline is None else reference.baseline.result
    result = measured.result
    if expected.dtype != result.dtype:
        raise ValueError(f"the bits of {result.dtype} and {expected.dtype} cannot be the same")
    bits = f"u{result.dtype.itemsize}"
    same = np.ascontiguousarray(result).view(bits) == np.ascontiguousarray(expected).view(bits)
    same |= np.isnan(measured.actual) & np.isnan(expected.astype(np.float64))
    source = "the exact values, rounded" if reference.baseline is None else "the baseline"
    share = np.where(same, 0.0, np.inf)
    text = f"{int(np.count_nonzero(same))} of {same.size} elements have the bits of {source}"
    return Verdict(bool(np.all(same)), share, text)


Standard = Callable[[Measured, Reference], Verdict]

#: Every standard by name.
STANDARDS: dict[str, Standard] = {
    STRICT: strict,
    "cann": cann,
    "cann-mere": cann_mere,
    "cann-double": cann_double,
    "bitwise": bitwise,
    "torch": torch,
}


def find(name: str, level: str) -> Standard:
    """The standard of that name; ValueError lists the names there are."""
    if name not in STANDARDS:
        raise ValueError(f"unknown standard {name!r}; known are {', '.join(STANDARDS)}")
    if level not in LEVELS:
        raise ValueError(f"unknown level {level!r}; known are {', '.join(LEVELS)}")
    return STANDARDS[name]


def _of_dtype(table: Mapping[str, T], measured: Measured, standard: str) -> T:
    if measured.dtype not in table:
        raise ValueError(f"the standard {standard} is for {', '.join(table)}, and the result is {measured.dtype}")
    return table[measured.dtype]


def _within(measured: Measured, share: Array, what: str) -> str:
    finite = share[np.isfinite(share)]
    text = f"{np.count_nonzero(share <= 1)} of {share.size} elements within {what}{_misplaced_text(measured)}"
    if measured.misplaced and not finite.size:
        return text
    which = "worst finite error" if measured.misplaced else "worst error"
    return f"{text}; the {which} is {np.max(finite, initial=0.0):.3g} of it"


def _misplaced_text(measured: Measured) -> str:
    return f"; {measured.misplaced}" if measured.misplaced else ""


def _relative(measured: Measured) -> Array:
    """e, where there is a distance."""
    error, exact = measured.error[measured.regular], measured.exact[measured.regular]
    return np.asarray(error / (np.abs(exact) + MERE_FLOOR))


def _sizes(measured: Measured) -> Array:
    """Largest and mean relative error, and the root mean square of the error itself."""
    relative, error = _relative(measured), measured.error[measured.regular]
    if not error.size:
        return np.zeros(3)
    return np.array((np.max(relative), np.mean(relative), np.sqrt(np.mean(error**2))))
