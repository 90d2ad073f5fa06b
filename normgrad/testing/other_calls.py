"""Results that are correct for another call: without an argument or a statistic, or with 1 − momentum."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np

from normgrad.contract.arrays import as_view
from normgrad.contract.dtypes import numpy_dtype
from normgrad.contract.parameters import Role
from normgrad.contract.status import ContractError
from normgrad.operators import Operator
from normgrad.oracle.float64 import Array
from normgrad.testing.clusters import Cluster
from normgrad.testing.comparison import measure
from normgrad.testing.expected import checked, exact_results, magnitudes
from normgrad.testing.measured import Measured
from normgrad.testing.terms import Magnitude
from normgrad.testing.wrong_values import is_beyond_chance

_MOST_ELEMENTS = 1 << 22  # each other call takes as long as the oracle itself: on 10⁷ elements seconds, and 1 GB
_MOMENTUM = "momentum"
_NEUTRAL = {"mean": 0, "rstd": 1, "invstd": 1}  # statistics that change nothing


class OtherCalls:
    """The exact results of calls that differ from a given one in one argument, computed when they are first needed."""

    def __init__(self, operator: Operator, arguments: Mapping[str, Any]) -> None:
        self._operator, self._arguments = operator, arguments

    def causes(self, name: str, measured: Measured) -> Iterator[Cluster]:
        """Yield the calls for which all wrong elements of an output are correct."""
        wrong = ~(measured.share_of_bound <= 1)
        if np.count_nonzero(wrong) < 2 or math.prod(np.shape(self._arguments["input"])) > _MOST_ELEMENTS:
            return
        for change, exact, sizes in self._results:
            if name not in exact:
                continue
            shape = measured.exact.shape
            other = measure(measured.result, exact[name].reshape(shape), sizes[name].reshaped(shape))
            if not np.all(other.share_of_bound[wrong] <= 1):
                continue
            # A result that differs little between the two calls is correct for both, and shows nothing.
            with np.errstate(all="ignore"):
                precision = np.abs(other.exact - measured.exact)[wrong] / other.limit[wrong]
            if is_beyond_chance(precision):
                yield Cluster("term", f"all of them are correct for a call {change}")

    @cached_property
    def _results(self) -> list[tuple[str, dict[str, Array], dict[str, Magnitude]]]:
        """Return for each call what is different, its exact results, and the sizes of their terms."""
        found = []
        for change, arguments in self._changed():
            try:
                call = checked(self._operator, arguments, None)
            except ContractError:  # an argument that the call cannot be without
                continue
            found.append((change, exact_results(self._operator, call), magnitudes(self._operator, call)))
        return found

    def _changed(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield what is different in each call, and its arguments."""
        given = dict(self._arguments)
        inputs = [tensor for tensor in self._operator.signature.tensors if tensor.role is Role.INPUT]
        for tensor in inputs:
            name = tensor.name
            if tensor.optional and given.get(name) is not None:
                yield f"without {name}", {**given, name: None}
            elif name in _NEUTRAL:
                value, article = _NEUTRAL[name], "a" if name == "mean" else "an"
                view = as_view(given[name])
                neutral = np.full(view.shape, value, numpy_dtype(view.dtype))
                yield f"with {article} {name} of {value}", {**given, name: neutral}
        if _MOMENTUM in given:
            other = 1 - float(given[_MOMENTUM])
            yield f"with a {_MOMENTUM} of {other:g}", {**given, _MOMENTUM: other}
