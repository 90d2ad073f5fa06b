"""A full report on someone's results: pass or fail, where the errors are, and what they look like."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from normgrad.contract.arrays import NotAnArray, as_view
from normgrad.contract.dtypes import listed
from normgrad.contract.parameters import Call, Role, Tensor
from normgrad.contract.products import Product, parse_product
from normgrad.operators import OPERATORS
from normgrad.oracle.float64 import Array
from normgrad.testing.anatomy import Anatomy, anatomy
from normgrad.testing.clusters import Cluster, clusters, explained
from normgrad.testing.comparison import Report, measure, report_of
from normgrad.testing.expected import checked, exact_results, magnitudes, results_of
from normgrad.testing.layout import Layout, layout_of
from normgrad.testing.measured import Measured
from normgrad.testing.other_calls import other_calls
from normgrad.testing.standards import STRICT, find
from normgrad.testing.terms import Magnitude
from normgrad.testing.wrong_values import is_explained, wrong_values

_QUANTILES = (0.5, 0.9, 0.99, 0.999, 1.0)


@dataclass(frozen=True)
class Element:
    """One element of a result: where it is, how wrong, and what it is made of.

    Attributes
    ----------
    index : tuple of int
        Its index in the result.
    actual, exact : float
        The result, and the exact value.
    ulps : float
        The signed error in ulp of the dtype; NaN where there is no distance.
    share : float
        The error as a fraction of the bound.
    inputs, terms : dict
        The inputs at its position, and the terms that the formula adds up.
    total : float
        T, the sum of the absolute values of all terms.
    underflow : float
        U, the underflow allowance: 2⁻¹²⁶·U of the bound is for products and quotients below 2⁻¹²⁶.
    """

    index: tuple[int, ...]
    actual: float
    exact: float
    ulps: float
    share: float
    inputs: dict[str, float]
    terms: dict[str, float]
    total: float
    underflow: float


@dataclass(frozen=True)
class Errors:
    """The errors of one result as a whole.

    Attributes
    ----------
    quantiles : dict
        Absolute errors in ulp by the share of elements below.
    rounded : float
        The share of elements that are the exact value rounded once.
    largest_share : float
        The largest error as a fraction of the bound, whatever the standard.
    worst : list of Element
        The elements with the largest such fraction.
    clusters : list of Cluster
        Where the elements beyond the bound are, and what they are.
    """

    quantiles: dict[str, float]
    rounded: float
    largest_share: float
    worst: list[Element]
    clusters: list[Cluster]


@dataclass(frozen=True)
class OutputJudgement:
    """The verdict on one output. ``measured`` and ``errors`` are None where the result cannot be measured."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    report: Report
    measured: Measured | None = field(default=None, repr=False)
    errors: Errors | None = None

    @property
    def passed(self) -> bool:
        return self.report.passed

    @property
    def verdict(self) -> str:
        """``pass`` or ``FAIL``."""
        return "pass" if self.passed else "FAIL"

    def __repr__(self) -> str:
        layout = f" {self.dtype} {self.shape}" if self.dtype else ""
        return f"<OutputJudgement of {self.name}{layout}: {self.verdict}; {self.report.text}>"


@dataclass(frozen=True)
class Judgement:
    """The verdict on the results of one call; true where all results pass.

    Attributes
    ----------
    operator, standard : str
        The operator's name, and the standard's.
    outputs : list of OutputJudgement
        For each requested output its ``name``, whether it ``passed``, the ``report``, and the ``errors`` with their
        patterns and worst elements.
    """

    operator: str
    standard: str
    outputs: list[OutputJudgement]

    @property
    def passed(self) -> bool:
        return all(output.passed for output in self.outputs)

    def __bool__(self) -> bool:
        return self.passed

    def __repr__(self) -> str:
        verdicts = ", ".join(f"{output.name} {output.verdict}" for output in self.outputs)
        return f"<Judgement of {self.operator} by {self.standard}: {verdicts or 'no output is requested'}>"

    def __str__(self) -> str:
        lines = [f"{self.operator}, standard {self.standard}"]
        for output in self.outputs:
            lines.append(f"  {output.verdict}  {output.name}: {output.report.text}")
            lines += [
                f"    {cluster.kind}: {cluster.text}" for cluster in (output.errors.clusters if output.errors else ())
            ]
        return "\n".join(lines)

    def without_arrays(self) -> Judgement:
        """The same without what is as large as the results."""
        return replace(self, outputs=[replace(output, measured=None) for output in self.outputs])

    def as_json(self) -> dict[str, Any]:
        """All of it in plain values; NaN and Inf as text."""
        return {
            "operator": self.operator,
            "standard": self.standard,
            "passed": self.passed,
            "outputs": [
                {
                    "name": output.name,
                    "dtype": output.dtype,
                    "shape": list(output.shape),
                    **_plain({k: v for k, v in asdict(output.report).items() if k != "standard"}),
                    "errors": _plain(asdict(output.errors)) if output.errors else None,
                }
                for output in self.outputs
            ],
        }


def judge(
    operator: str,
    arguments: Mapping[str, Any],
    actual: Mapping[str, Any],
    *,
    standard: str = STRICT,
    baseline: Mapping[str, Any] | None = None,
    level: str = "L1",
    product: Product | str | None = None,
    worst: int = 5,
) -> Judgement:
    """Judge the results of a call against the oracle on the same inputs.

    Parameters
    ----------
    operator : str
        The operator's name.
    arguments : mapping
        The call's arguments by parameter name, arrays as the operators take them. Tensors on a GPU are copied.
    actual : mapping
        The results by name; running statistics, which move in place, under their own.
    standard, level : str
        As :func:`normgrad.testing.compare` takes them.
    baseline : mapping, optional
        The results of another implementation by name.
    product : Product or str, optional
        Check the call as this product's documents do.
    worst : int
        How many of the worst elements to describe.

    Returns
    -------
    Judgement
        The verdict; ``print`` shows it in words.

    Raises
    ------
    ContractError
        Where the call itself breaks a rule.
    ValueError
        For an operator, result, product, standard or level that is not known, or a baseline that is needed and absent.

    Examples
    --------
    >>> import numpy as np
    >>> from normgrad.testing import judge
    >>> x = np.array([[0, 4], [2, 8]], np.float32)
    >>> results = {"mean": np.array([1, 6], np.float32), "invstd": np.array([1, 0.7], np.float32)}
    >>> judgement = judge("batch_norm_stats", {"input": x, "eps": 0.0}, results)
    >>> [(output.name, output.passed) for output in judgement.outputs]
    [('mean', True), ('invstd', False)]
    """
    find(standard, level)
    if operator not in OPERATORS:
        raise ValueError(f"unknown operator {operator!r}; known are {', '.join(OPERATORS)}")
    if worst < 0:
        raise ValueError(f"worst is {worst}, and must be 0 or more")
    op = OPERATORS[operator]
    results = [tensor.name for tensor in op.signature.tensors if tensor.is_written]
    if unknown := [name for name in actual if name not in results]:
        raise ValueError(f"{', '.join(unknown)}: no result of {operator}, whose results are {', '.join(results)}")
    call = checked(op, arguments, None if product is None else parse_product(product))
    exact, sizes = exact_results(op, call), magnitudes(op, call)
    anatomies = anatomy(operator, {**call.arguments, **call.attributes})
    outputs: list[OutputJudgement] = []
    unexplained: dict[str, Measured] = {}
    for tensor in results_of(op, call):
        given = [actual.get(tensor.name)] if baseline is None else [actual.get(tensor.name), baseline.get(tensor.name)]
        refused = [text for text in (_refusal(tensor, call, array) for array in given) if text]
        if refused:
            outputs.append(_unmeasured(tensor.name, given[0], refused[0], standard))
            continue
        measured = [_measured(array, exact[tensor.name], sizes[tensor.name]) for array in given]
        report = report_of(measured[0], standard, measured[1] if baseline is not None else None, level)
        layout = layout_of({**call.arguments, **call.attributes}, measured[0].exact.size)
        errors = errors_of(measured[0], layout, anatomies[tensor.name], worst)
        if errors.clusters and (source := _exchanged(given[0], tensor.name, exact, sizes)):
            errors.clusters.append(Cluster("copy", f"the result is that of {source}, another output"))
        elif errors.clusters and not is_explained(errors.clusters):
            unexplained[tensor.name] = measured[0]
        shape = measured[0].exact.shape
        outputs.append(OutputJudgement(tensor.name, measured[0].dtype, shape, report, measured[0], errors))
    causes = other_calls(op, call, unexplained)
    for output in outputs:
        if output.errors is not None and output.name in causes:
            output.errors.clusters.append(causes[output.name])
    return Judgement(operator, standard, outputs)


def _refusal(tensor: Tensor, call: Call, array: Any) -> str | None:
    """Why an array cannot be this result of the call; None where it can."""
    if array is None:
        return "is missing"
    try:
        view = as_view(array)
    except NotAnArray as problem:
        return str(problem)
    allowed = (call.views[tensor.name].dtype,) if tensor.role is Role.IN_PLACE else tensor.dtype(call).allowed
    if view.dtype not in allowed:
        return f"is {view.dtype}, and must be {listed(allowed)}"
    assert tensor.shape is not None
    extent = tensor.shape(call)
    if not extent.holds(view.shape, view.numel):
        right = extent.shape if extent.elements is None else f"{extent.elements} elements"
        return f"has the shape {view.shape}, and must have {right}"
    return None


def _unmeasured(name: str, array: Any, text: str, standard: str) -> OutputJudgement:
    try:
        dtype, shape = as_view(array).dtype.name, as_view(array).shape
    except NotAnArray:
        dtype, shape = "", ()
    return OutputJudgement(name, dtype, shape, Report(False, 0, math.inf, (), text, standard))


def _measured(array: Any, exact: Array, magnitude: Magnitude) -> Measured:
    """A result beside the exact values, which take its shape where only the number of elements is ruled."""
    shape = as_view(array).shape
    return measure(array, exact.reshape(shape), magnitude.reshaped(shape))


def _exchanged(array: Any, name: str, exact: Mapping[str, Array], magnitudes: Mapping[str, Magnitude]) -> str | None:
    """Another output of the call that the array is the correct result of."""
    size = exact[name].size
    for other, values in exact.items():
        if other != name and values.size == size > 1:
            measured = _measured(array, values, magnitudes[other])
            if np.all(measured.share_of_bound <= 1):
                return other
    return None


def errors_of(measured: Measured, layout: Layout, parts: Anatomy, worst: int) -> Errors:
    """The errors of a result as a whole, and so many of the worst elements."""
    share = np.ravel(measured.share_of_bound)
    ulps = np.abs(np.ravel(measured.ulps))
    finite = ulps[np.isfinite(ulps)]
    same = (measured.actual == measured.nearest) | (np.isnan(measured.actual) & np.isnan(measured.nearest))
    order = _largest(share, worst)
    return Errors(
        dict(zip((f"{100 * q:g} %" for q in _QUANTILES), _quantiles(finite), strict=True)),
        float(np.mean(same)) if same.size else 1.0,
        float(np.max(share, initial=0.0)),
        [_element(measured, parts, int(index)) for index in order],
        explained([*clusters(~(measured.share_of_bound <= 1), layout), *wrong_values(measured, layout, parts)], layout),
    )


def _quantiles(values: Array) -> list[float]:
    return [float(value) for value in np.quantile(values, _QUANTILES)] if values.size else [0.0] * len(_QUANTILES)


def _largest(values: Array, count: int) -> np.ndarray:
    """The indices of the largest values, the largest first and the first of equal ones first."""
    first = values.size - min(count, values.size)
    if first == values.size:
        return np.array([], np.int64)
    candidates = np.flatnonzero(values >= np.partition(values, first)[first])
    return candidates[np.argsort(-values[candidates], kind="stable")][:count]


def _element(measured: Measured, parts: Anatomy, position: int) -> Element:
    index = tuple(int(i) for i in np.unravel_index(position, measured.exact.shape))
    inputs, terms = (
        {name: float(value) for name, (value,) in values.items()} for values in parts.at(np.array([position]))
    )
    scales = (measured.magnitude.total, measured.magnitude.underflow)
    return Element(
        index,
        float(measured.actual[index]),
        float(measured.exact[index]),
        float(measured.ulps[index]),
        float(measured.share_of_bound[index]),
        inputs,
        terms,
        *(float(np.broadcast_to(scale, measured.exact.shape)[index]) for scale in scales),
    )


def _plain(value: Any) -> Any:
    """Values that JSON has."""
    match value:
        case dict():
            return {key: _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case float() if not math.isfinite(value):
            return str(value)
    return value
