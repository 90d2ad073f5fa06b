"""Find the call for which wrong results are correct: what a kernel made of the call that it was given.

It ignored an argument, exchanged two, took another row's statistics or another channel's weight, or ignored strides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from normgrad.contract.parameters import Call, Role
from normgrad.contract.status import ContractError
from normgrad.operators import Operator
from normgrad.testing.clusters import Cluster
from normgrad.testing.comparison import measure
from normgrad.testing.expected import checked, exact_results, magnitudes
from normgrad.testing.measured import Measured
from normgrad.testing.terms import Magnitude
from normgrad.testing.wrong_values import is_beyond_chance

_MOST_ELEMENTS = 1 << 22  # each other call takes as long as the oracle itself: on 10⁷ elements seconds, and 1 GB
_TRIED = 1000  # wrong elements that another call is tried on, before it is tried on all
_MOST = 0.9  # of the wrong elements are nearer to what they are taken for
_MOMENTUM = "momentum"
_NEUTRAL = {"mean": 0, "rstd": 1, "invstd": 1}  # statistics that change nothing
_PARAMETERS = ("weight", "bias")
_DATA = ("grad_out", "input")
_DATA_OUTPUTS = ("grad_input", "output")


@dataclass(frozen=True)
class _OtherCall:
    """A call: how it differs from the given one, its arguments, and the order in which data outputs were written."""

    change: str
    arguments: dict[str, Any]
    as_written: Callable[[np.ndarray], np.ndarray] | None = None


def other_calls(operator: Operator, call: Call, unexplained: Mapping[str, Measured]) -> dict[str, Cluster]:
    """Return for outputs with wrong elements the first call for which all of these are correct, in words."""
    found: dict[str, Cluster] = {}
    names = {tensor.name for tensor in operator.signature.tensors if tensor.role is not Role.OUTPUT}
    given = {name: value for name, value in call.arguments.items() if name in names} | call.attributes
    wrong = {name: ~(measured.share_of_bound <= 1) for name, measured in unexplained.items()}
    left = [name for name, is_wrong in wrong.items() if np.count_nonzero(is_wrong) > 1]
    if math.prod(np.shape(given["input"])) > _MOST_ELEMENTS:
        return found
    for other in _other_calls(operator, given) if left else ():
        try:
            changed = checked(operator, other.arguments, None)
        except ContractError:  # an argument that the call cannot be without, or that cannot have another's place
            continue
        exact = exact_results(operator, changed)
        sizes: dict[str, Magnitude] = {}
        for name in [name for name in left if name in exact]:
            reorder = other.as_written if name in _DATA_OUTPUTS else None
            result, own, is_wrong = (
                array if reorder is None else reorder(array)
                for array in (unexplained[name].result, unexplained[name].exact, wrong[name])
            )
            values = exact[name].reshape(own.shape)
            if not _is_nearer(result[is_wrong], values[is_wrong], own[is_wrong]):
                continue
            sizes = sizes or magnitudes(operator, changed)
            theirs = measure(result, values, sizes[name].reshaped(own.shape))
            if not np.all(theirs.share_of_bound[is_wrong] <= 1):
                continue
            # A result that differs little between the two calls is correct for both, and shows nothing.
            with np.errstate(all="ignore"):
                precision = np.abs(theirs.exact - own)[is_wrong] / theirs.limit[is_wrong]
            if is_beyond_chance(precision):
                found[name] = Cluster("term", f"all of them are correct for a call {other.change}")
        left = [name for name in left if name not in found]
        if not left:
            break
    return found


def _is_nearer(result: np.ndarray, values: np.ndarray, own: np.ndarray) -> bool:
    """Return whether wrong elements may be these values, before the error scales are computed, which takes longer."""
    some = slice(None, None, -(-result.size // _TRIED))
    actual = result[some].astype(np.float64)
    with np.errstate(all="ignore"):
        error, before = np.abs(actual - values[some]), np.abs(actual - own[some])
        return bool(np.count_nonzero(~(error >= before)) >= _MOST * error.size)


def _other_calls(operator: Operator, given: dict[str, Any]) -> Iterator[_OtherCall]:
    """Yield the calls to try, the likeliest first."""
    inputs = [
        tensor
        for tensor in operator.signature.tensors
        if tensor.role is Role.INPUT and given.get(tensor.name) is not None
    ]
    for tensor in inputs:
        name = tensor.name
        if tensor.optional:
            yield _OtherCall(f"without {name}", {**given, name: None})
        elif name in _NEUTRAL:
            value, article = _NEUTRAL[name], "a" if name == "mean" else "an"
            neutral = np.full_like(given[name], value)
            yield _OtherCall(f"with {article} {name} of {value}", {**given, name: neutral})
    if _MOMENTUM in given:
        other = 1 - float(given[_MOMENTUM])
        yield _OtherCall(f"with a {_MOMENTUM} of {other:g}", {**given, _MOMENTUM: other})
    for one, two in combinations([tensor.name for tensor in inputs], 2):
        if np.shape(given[one]) == np.shape(given[two]):
            yield _OtherCall(f"with {one} and {two} exchanged", {**given, one: given[two], two: given[one]})
    if "counts" not in given:
        yield from _other_statistics(given)
        yield from _other_parameters(given)
        yield from _other_formats(given)


def _other_statistics(given: dict[str, Any]) -> Iterator[_OtherCall]:
    """Yield the calls whose rows have the statistics of another row."""
    names = [name for name in _NEUTRAL if given.get(name) is not None]
    if not names or np.size(given["mean"]) < 2:
        return
    noun = "row" if "normalized_shape" in given else "group" if "group" in given else "channel"

    def moved(which: str, index: np.ndarray) -> _OtherCall:
        return _OtherCall(f"with the {_joined(names)} of {which}", _reordered(given, names, index))

    every = np.arange(np.size(given["mean"]))
    yield moved(f"the {noun} before", np.roll(every, 1))
    yield moved(f"the {noun} after", np.roll(every, -1))
    yield moved(f"{noun} 0 in every {noun}", np.zeros_like(every))
    if noun == "group":
        yield moved("sample 0 in every sample", every % given["group"])


def _other_parameters(given: dict[str, Any]) -> Iterator[_OtherCall]:
    """Yield the calls whose channels have the weight and the bias of another channel."""
    names = [name for name in _PARAMETERS if given.get(name) is not None]
    size = np.size(given[names[0]]) if names else 0
    if size < 2:
        return
    shape = given.get("normalized_shape", ())
    heights = {math.prod(shape[:axis]) for axis in range(1, len(shape))}
    if "group" in given:
        heights |= {given["group"], size // given["group"]}
    noun, every = "column" if shape else "channel", np.arange(size)

    orders = {f"of the {noun} before": np.roll(every, 1), f"of the {noun} after": np.roll(every, -1)}
    for height in sorted(heights - {1, size}):
        orders[f"transposed as a matrix of {height}×{size // height}"] = every.reshape(height, -1).T.ravel()
    for some in dict.fromkeys((tuple(names), *((name,) for name in names))):
        for text, order in orders.items():
            yield _OtherCall(f"with the {_joined(some)} {text}", _reordered(given, some, order))


def _other_formats(given: dict[str, Any]) -> Iterator[_OtherCall]:
    """Yield the calls whose images were read, or read and written, without regard to their strides."""
    if "normalized_shape" in given:
        return
    samples, channels = np.shape(given["input"])[:2] if "group" not in given else (given["N"], given["C"])
    if channels < 2 or np.size(given["input"]) <= samples * channels:
        return

    def as_channels_last(array: np.ndarray) -> np.ndarray:
        return array.reshape(samples, -1, channels).swapaxes(1, 2).reshape(array.shape)

    def as_contiguous(array: np.ndarray) -> np.ndarray:
        return array.reshape(samples, channels, -1).swapaxes(1, 2).reshape(array.shape)

    data = [name for name in _DATA if name in given]
    result = "grad_input" if "grad_out" in given else "output"
    for memory, other, read in (
        ("contiguous", "channels_last", as_channels_last),
        ("channels_last", "contiguous", as_contiguous),
    ):
        for names in dict.fromkeys((*((name,) for name in data), tuple(data))):
            arguments = {**given, **{name: read(given[name]) for name in names}}
            yield _OtherCall(f"with the {memory} memory of {_joined(names)} read as {other}", arguments)
            if len(names) == len(data):
                every = _joined((*names, result))
                change = f"with the {memory} memory of {every} read and written as {other}"
                yield _OtherCall(change, arguments, read)


def _reordered(given: dict[str, Any], names: Sequence[str], index: np.ndarray) -> dict[str, Any]:
    """Return the arguments with the elements at these indices in some arrays."""
    return {**given, **{name: np.ravel(given[name])[index].reshape(np.shape(given[name])) for name in names}}


def _joined(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
