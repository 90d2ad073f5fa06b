"""Find what the wrong elements of a result are: NaN, zero, off by a constant, rounded too early, another's value.

A claim, such as "twice the exact value", is made where it is true of every wrong element within its error bound, and
where chance does not explain it. Each element allows an interval of constants (the ratio of its value to the exact one,
give or take the error bound). A constant in all intervals explains them all; the narrower these are beside the distance
of the constant from that of a correct result (1 for a ratio, 0 for a difference), the less it can be chance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np

from normgrad.contract.dtypes import BFLOAT16, numpy_dtype
from normgrad.reference import rounded
from normgrad.testing.anatomy import Anatomy
from normgrad.testing.clusters import CHANCE, WHERE, Cluster, Division, divisions
from normgrad.testing.layout import Layout
from normgrad.testing.lost_terms import lost_terms
from normgrad.testing.measured import Array, Measured, ulp
from normgrad.testing.moved import moved
from normgrad.testing.row_values import wrong_row_values

_NARROW = {"float16": np.dtype(np.float16), "bfloat16": numpy_dtype(BFLOAT16)}
_LONGEST_DECIMAL = 17
_TRIED = 1000  # wrong elements that a claim is tried on, before it is tried on all
_FEW_BITS = 4  # of the significand: a number with no more is no sign of narrow arithmetic
_FEWEST_TRUNCATED = 10  # errors that are all toward 0: fewer may be so by chance


def wrong_values(measured: Measured, layout: Layout, parts: Anatomy) -> list[Cluster]:
    """Return what the elements beyond the bound are; where some are wrongly NaN or Inf, also what the others are.

    The first claim that holds is returned. Where there is none, and no NaN or Inf, the elements may be others' values.
    """
    is_misplaced = np.ravel(measured.is_misplaced)
    wrong = np.flatnonzero(~(np.ravel(measured.share_of_bound) <= 1) & ~is_misplaced)
    found = [Cluster("special", measured.misplaced)] if np.any(is_misplaced) else []
    values = _Values(measured, wrong)
    if not wrong.size or not np.all(np.isfinite(values.allowed)):
        return found
    if wrong.size > 1:
        those = f"the other {wrong.size}" if found else "all of them"
        with np.errstate(all="ignore"):  # what overflows is in no interval
            claim = (
                _eps(values, parts, wrong, those)
                or _statistic(values, parts, wrong, those)
                or _constant(values, those)
                or _of_the_formula(measured, wrong, parts, those)
                or _of_the_sum(measured, wrong, parts)
                or _of_row_values(measured, wrong, parts)
                or _constants(values, _divisions(measured, layout), "the others" if found else "they")
            )
        if claim:
            return [*found, claim]
    return found or moved(measured, wrong, _divisions(measured, layout), layout)


def is_explained(found: Sequence[Cluster]) -> bool:
    """Return whether a pattern says what all wrong elements are, by one rule."""
    return any(cluster.kind not in WHERE and not cluster.text.startswith("in each") for cluster in found)


class _Values:
    """The wrong elements: their values, the exact ones, and how far from a value that explains them they may be."""

    def __init__(self, measured: Measured, wrong: np.ndarray) -> None:
        self.index, self.dtype, self.result_dtype = wrong, measured.dtype, measured.result.dtype
        self.actual, self.exact = np.ravel(measured.actual)[wrong], np.ravel(measured.exact)[wrong]
        limit, rounding = np.ravel(measured.limit)[wrong], ulp(self.actual, measured.dtype)
        # What is left of an error once a constant is taken out: the bound, and the rounding of the wrong value.
        self.limit, self.rounding, self.allowed = limit, rounding, limit + rounding
        with np.errstate(all="ignore"):
            self.ratio = self.actual / self.exact
            # How far the ratio may be from a factor that explains it. A factor above 1 also multiplies an error that
            # was within the bound before.
            self.width = (limit * np.maximum(np.abs(self.ratio), 1) + rounding) / np.abs(self.exact)


def _divisions(measured: Measured, layout: Layout) -> list[Division]:
    return [division for division in divisions(layout, measured.exact.size) if division.noun != "position"]


def _constant(values: _Values, those: str) -> Cluster | None:
    """Return one rule by which all wrong values come from the exact ones."""
    actual, exact, allowed = values.actual, values.exact, values.allowed
    if not np.any(actual):
        return Cluster("zero", f"{those} are 0")
    if np.all(actual == actual[0]) and np.any(exact != exact[0]):
        return Cluster("constant", f"{those} are {actual[0]:.9g}")
    if np.all(np.abs(actual) == np.abs(actual[0])) and np.any(np.abs(exact) != np.abs(exact[0])):  # a clipped result
        return Cluster("constant", f"{those} are {np.abs(actual[0]):.9g} or −{np.abs(actual[0]):.9g}")
    factor = _factor(values)
    if factor == "-1":
        return Cluster("sign", f"{those} have the wrong sign")
    if factor:
        return Cluster("factor", f"{those} are {factor} times the exact value")
    offset = _common(actual - exact - allowed, actual - exact + allowed)
    if offset and is_beyond_chance(np.abs(float(offset)) / allowed):
        return Cluster("offset", f"{those} are {offset.lstrip('-')} too {'small' if offset[0] == '-' else 'large'}")
    if values.dtype in _NARROW:
        # How far values are off towards 0, and the bound without the half ulp that it has for rounding to nearest.
        lost, rest = np.sign(exact) * (exact - actual), values.limit - 0.5 * ulp(exact, values.dtype)
        if exact.size >= _FEWEST_TRUNCATED and np.all((lost > 0) & (lost <= ulp(exact, values.dtype) + rest)):
            return Cluster(
                "rounded", f"{those} are the exact value truncated to {values.dtype}, and it must be rounded"
            )
    for narrow, dtype in _NARROW.items() if values.dtype == "float32" else ():
        if not np.all(rounded(actual, dtype) == actual):
            continue
        if np.all(np.abs(actual - exact) <= 0.5 * ulp(exact, narrow) + allowed):
            return Cluster("rounded", f"{those} are the exact value rounded to {narrow}")
        lost = np.sign(exact) * (exact - actual)
        if np.all((lost >= -allowed) & (lost <= ulp(exact, narrow) + allowed)):
            return Cluster("rounded", f"{those} are the exact value truncated to {narrow}")
    narrow = _computed_in(values)
    return Cluster("rounded", f"{those} are values of {narrow}, but not the nearest ones") if narrow else None


def _computed_in(values: _Values) -> str:
    """Return the 16-bit dtype that float32 results have no more digits than; empty where that may be so by chance."""
    actual, exact = values.actual, values.exact
    fraction, _ = np.frexp(actual)
    has_digits = np.mod(fraction, 2.0**-_FEW_BITS) != 0  # not as 1, 2 and 96 have
    for narrow in ("bfloat16", "float16") if values.dtype == "float32" else ():
        dtype = _NARROW[narrow]
        is_of_exact = rounded(exact, dtype) == exact
        if np.all(rounded(actual, dtype) == actual) and 2 * np.count_nonzero(has_digits & ~is_of_exact) > actual.size:
            return narrow
    return ""


def _of_the_formula(measured: Measured, wrong: np.ndarray, parts: Anatomy, those: str) -> Cluster | None:
    """Return the claim of an input in place of the result, or of a wrong term; tried on some elements before all."""
    claim = None
    for some in (wrong[:: -(-wrong.size // _TRIED)], wrong):
        values, (inputs, terms) = _Values(measured, some), parts.at(some)
        claim = _input(values, inputs, those) or _term(values, terms, those)
        if claim is None:
            return None
    return claim


def _of_the_sum(measured: Measured, wrong: np.ndarray, parts: Anatomy) -> Cluster | None:
    """Return the terms that sums lack or have twice; looked for where no result is wrongly NaN or Inf."""
    if parts.summands is None or np.any(measured.is_misplaced):
        return None
    limit = np.ravel(measured.limit + ulp(measured.actual, measured.dtype))
    lost = lost_terms(parts.summands, np.ravel(measured.actual), np.ravel(measured.exact), limit, wrong)
    return Cluster("sum", f"all of them {lost}") if lost else None


def _of_row_values(measured: Measured, wrong: np.ndarray, parts: Anatomy) -> Cluster | None:
    """Return the sums or statistics of rows that are wrong; looked for where no result is wrongly NaN or Inf."""
    if parts.row_length < 2 or np.any(measured.is_misplaced):
        return None
    error, allowed = np.ravel(measured.actual - measured.exact), measured.limit + ulp(measured.actual, measured.dtype)
    return wrong_row_values(parts.row_values(), parts.row_length, error, np.ravel(allowed), wrong)


def _input(values: _Values, inputs: Mapping[str, Array], those: str) -> Cluster | None:
    """Return the input of the call that is in place of the result."""
    for name, given in inputs.items():
        if np.any(given != given[0]) and np.array_equal(rounded(given, values.result_dtype), values.actual):
            return Cluster("copy", f"{those} equal the {name} that the call was given")
    return None


def _term(values: _Values, terms: Mapping[str, Array], those: str) -> Cluster | None:
    """Return the formula's terms, all but one at most, that are missing, have the wrong sign or another factor."""
    if not terms or not np.all(np.abs(sum(terms.values()) - values.exact) <= values.allowed):
        return None  # the exact results are not the sums of these terms: no claim can be made
    error = values.actual - values.exact
    for count in range(1, len(terms)):
        for names in combinations(terms, count):
            term = sum(terms[name] for name in names)
            ratio = 1 + error / term
            width = (values.limit * np.maximum(np.abs(ratio), 1) + values.rounding) / np.abs(term)
            times = _common(ratio - width, ratio + width)
            if not times or not is_beyond_chance(abs(float(times) - 1) / width):
                continue
            what = f"the term{'s' if count > 1 else ''} {' and '.join(names)}"
            if times == "0":
                return Cluster("term", f"{those} lack {what}")
            how = f"{times} times" if float(times).is_integer() else f"multiplied by {times}"
            return Cluster("term", f"{those} have {what} {'with the wrong sign' if times == '-1' else how}")
    return None


def _eps(values: _Values, parts: Anatomy, wrong: np.ndarray, those: str) -> Cluster | None:
    """Return another eps, of one digit, for which all results are correct: they are 1/√(variance + eps)."""
    if "eps" not in parts.terms:
        return None
    _, terms = parts.at(wrong)
    variance = sum(term for name, term in terms.items() if name != "eps")
    low, high = (1 / (values.actual + side * values.allowed) ** 2 - variance for side in (1, -1))
    eps = _common(low, high)
    if not eps or float(eps) < 0 or float(f"{float(eps):.0e}") != float(eps):
        return None
    if not is_beyond_chance(2 * np.abs(float(eps) - terms["eps"]) / (high - low)):
        return None
    most = float(np.min(high))
    if eps == "0" and most > 0:  # the result cannot tell it from others as small
        power = 10.0 ** math.floor(math.log10(most))
        return Cluster("term", f"{those} are correct for an eps of {math.floor(most / power) * power:g} or less")
    return Cluster("term", f"{those} are correct for an eps of {float(eps):g}")


def _statistic(values: _Values, parts: Anatomy, wrong: np.ndarray, those: str) -> Cluster | None:
    """Return the statistic that is in place of 1/√(variance + eps): the variance, a root, or with N − 1 for N."""
    if "eps" not in parts.terms or not np.any(values.actual):
        return None
    _, terms = parts.at(wrong)
    variance = sum(term for name, term in terms.items() if name != "eps")
    for lost, remark in ((0, ""), (1, ", with a variance that is divided by N − 1")):
        if parts.count <= lost:
            continue
        other = variance * (parts.count / (parts.count - lost))
        for name, statistic in (
            ("the variance", other),
            ("variance + eps", other + terms["eps"]),
            ("√variance", np.sqrt(other)),
            ("√(variance + eps)", np.sqrt(other + terms["eps"])),
            ("1/√(variance + eps)", 1 / np.sqrt(other + terms["eps"])),
            ("1/(√variance + eps)", 1 / (np.sqrt(other) + terms["eps"])),
        ):
            # A variance has twice the relative error of its root.
            width = 2 * values.limit / values.exact * statistic + values.rounding
            is_near = np.all(np.abs(values.actual - statistic) <= width)
            if is_near and is_beyond_chance(np.abs(statistic - values.exact) / width):
                return Cluster("statistic", f"{those} are {name}{remark}")
    return None


def _constants(values: _Values, every: Sequence[Division], those: str) -> Cluster | None:
    """Return a factor or offset that each row, sample or channel has one of.

    Such a result lacks a statistic or a weight, or has a wrong one.
    """
    error = values.actual - values.exact
    for division in sorted(every, key=lambda division: division.classes):
        order = np.argsort(division.of(values.index), kind="stable")
        starts = np.flatnonzero(np.diff(division.of(values.index)[order], prepend=-1))
        if _one_each(values.ratio[order], values.width[order], starts, 1):
            return Cluster("factor", f"in each {division.noun} {those} are one constant times the exact value")
        if _one_each(error[order], values.allowed[order], starts, 0):
            return Cluster("offset", f"in each {division.noun} {those} are too large or too small by one constant")
    return None


def _one_each(middle: Array, width: Array, starts: np.ndarray, neutral: float) -> bool:
    """Return whether the intervals of every class have a value in common that is not there by chance.

    Intervals are middle ± width; a class begins at each of ``starts``. ``neutral`` is the value of a correct result.
    """
    least, most = np.maximum.reduceat(middle - width, starts), np.minimum.reduceat(middle + width, starts)
    if not np.all(least <= most):  # nor where a ratio is NaN
        return False
    sizes = np.diff(starts, append=middle.size)
    evidence = np.log(np.maximum(np.repeat(np.abs((least + most) / 2 - neutral), sizes) / width, 1))
    return bool(np.sum(np.maximum.reduceat(evidence, starts)) - np.sum(evidence) < CHANCE)


def _factor(values: _Values) -> str:
    """Return the factor that all exact values are multiplied by, as text; empty where there is none."""
    has_size = values.exact != 0
    if not np.all(np.abs(values.actual[~has_size]) <= values.allowed[~has_size]) or np.count_nonzero(has_size) < 2:
        return ""
    ratio, width = values.ratio[has_size], values.width[has_size]
    factor = _common(ratio - width, ratio + width)
    return factor if factor and is_beyond_chance(abs(float(factor) - 1) / width) else ""


def _common(low: Array, high: Array) -> str:
    """Return the shortest decimal number that is in every interval, as text; empty where there is none."""
    least, most = float(np.max(low)), float(np.min(high))
    if not least <= most:
        return ""
    if least <= 0 <= most:
        return "0"
    for digits in range(1, _LONGEST_DECIMAL + 1):
        text = f"{(least + most) / 2:.{digits}g}"
        if least <= float(text) <= most:
            is_short = 1e-4 <= abs(float(text)) < 1e7
            return np.format_float_positional(float(text), trim="-") if is_short else text
    return ""


def is_beyond_chance(precision: Array) -> bool:
    """Return whether intervals do not meet by chance; ``precision``: the deviation as a multiple of each one's width.

    An interval of width w happens to include a constant at a distance d with a probability of about w/d. The largest
    multiple is left out: its interval, the narrowest, is the one that gave the constant.
    """
    return bool(-np.sum(np.log(np.maximum(np.sort(precision)[:-1], 1))) < CHANCE)
