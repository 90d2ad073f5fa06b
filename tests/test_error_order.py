"""Calls with two mistakes: the one that is looked for first is the one reported."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

import normgrad
from normgrad.contract.arrays import as_view
from normgrad.contract.formats import Format
from support.refusals import INVALID, NO_KERNEL, NULLPTR, OUTPUTS, a, base_call, planned


@dataclass(frozen=True)
class Mistake:
    """A mistake of one phase."""

    phase: str
    parameter: str | None
    value: Any = None
    status: int = INVALID
    more: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.phase

    @property
    def changes(self) -> dict[str, Any]:
        return self.more if self.parameter is None else {self.parameter: self.value, **self.more}


def _blocked(*shape: int) -> Any:
    return replace(as_view(a(*shape)), format=Format.FRACTAL_NZ)


def _read_only(*shape: int) -> np.ndarray:
    array = a(*shape)
    array.flags.writeable = False
    return array


_LACKING = Mistake("product", None, status=NO_KERNEL)
_MASK = Mistake("mask length", "output_mask", (True, True))

#: In the order in which they must be found.
PHASES = {
    "layer_norm_backward": [
        Mistake("null input", "rstd", None, NULLPTR),
        _MASK,
        Mistake("null output", "grad_bias", None, NULLPTR),
        _LACKING,
        Mistake("dtype", "weight", a(4, dtype="float64")),
        Mistake("attribute", "normalized_shape", [5]),
        Mistake("format", "input", _blocked(3, 4)),
        Mistake("shape", "mean", a(4, 1)),
        Mistake("memory", "grad_input", _read_only(3, 4)),
    ],
    "group_norm_backward": [
        Mistake("null input", "rstd", None, NULLPTR),
        _MASK,
        Mistake("null output", "grad_bias", None, NULLPTR),
        _LACKING,
        Mistake("dtype", "weight", a(6, dtype="float64")),
        Mistake("attribute", "group", 4),
        Mistake("format", "input", _blocked(2, 6, 5)),
        Mistake("shape", "mean", a(7)),
        Mistake("memory", "grad_input", _read_only(2, 6, 5)),
    ],
    "batch_norm_elemt_backward": [
        Mistake("null input", "counter", None, NULLPTR),
        Mistake("null output", "grad_input", None, NULLPTR),
        _LACKING,
        Mistake("dtype", "sum_dy_xmu", a(3, dtype="float64")),
        Mistake("format", "weight", _blocked(3)),
        Mistake("shape", "mean", a(4)),
        Mistake("memory", "grad_out", np.lib.stride_tricks.as_strided(a(59), (4, 3, 5), (60, 20, 4))),
    ],
    "layer_norm": [
        Mistake("null input", "normalized_shape", None, NULLPTR),
        Mistake("null output", "output", None, NULLPTR),
        _LACKING,
        Mistake("dtype", "bias", a(4, dtype="float64")),
        Mistake("attribute", "eps", "x"),
        Mistake("format", "weight", _blocked(4)),
        Mistake("shape", "mean", a(4)),
        Mistake("memory", "rstd", _read_only(3, 1)),
    ],
    "batch_norm_gather_stats_with_counts": [
        Mistake("null input", "counts", None, NULLPTR),
        Mistake("null output", "invstd_all", None, NULLPTR),
        _LACKING,
        Mistake("dtype", "running_var", a(3, dtype="float64")),
        Mistake("attribute", "momentum", "x"),
        Mistake("format", "invstd", _blocked(2, 3)),
        Mistake("shape", "mean", a(2, 4)),
        Mistake("memory", "running_mean", _read_only(3)),
    ],
    "batch_norm_reduce_backward": [
        Mistake("null input", "invstd", None, NULLPTR),
        Mistake("flag", "weight_g", "x"),
        Mistake("null output", "grad_bias", None, NULLPTR),
        _LACKING,
        Mistake("dtype", "sum_dy", a(3, dtype="float64")),
        Mistake("format", "input", _blocked(4, 3, 5)),
        Mistake("shape", "mean", a(4)),
        Mistake("memory", "grad_weight", _read_only(3)),
    ],
}

_PAIRS = [
    pytest.param(operator, *pair, id=f"{operator}-{pair[0]}-{pair[1]}")
    for operator, phases in PHASES.items()
    for pair in itertools.combinations(phases, 2)
]


def _refused(operator: str, changes: dict[str, Any], product: str | None = None) -> normgrad.ContractError:
    with normgrad.use_product(product), pytest.raises(normgrad.ContractError) as caught:
        planned(operator, {**base_call(operator), **changes})
    return caught.value


@pytest.mark.parametrize(("operator", "first", "second"), _PAIRS)
def test_the_earlier_phase_is_reported(operator: str, first: Mistake, second: Mistake) -> None:
    lacking = "Atlas inference" if operator == "layer_norm" else "Atlas 200I/500 A2"
    product = lacking if _LACKING in (first, second) else None
    error = _refused(operator, {**second.changes, **first.changes}, product)
    assert (error.status, error.parameter) == (first.status, first.parameter), str(error)


#: Tensors in the C order: those that must be there, and all of them.
_REQUIRED = {
    "layer_norm_backward": ["grad_out", "input", "mean", "rstd"],
    "group_norm_backward": ["grad_out", "input", "mean", "rstd"],
    "batch_norm_elemt_backward": ["grad_out", "input", "mean", "invstd", "sum_dy", "sum_dy_xmu", "counter"],
    "batch_norm_gather_stats_with_counts": ["input", "mean", "invstd", "counts"],
    "batch_norm_elemt": ["input", "mean", "invstd"],
    "batch_norm_reduce_backward": ["grad_out", "input", "mean", "invstd"],
}
_ALL_TENSORS = {
    "layer_norm_backward": "grad_out input mean rstd weight bias grad_input grad_weight grad_bias",
    "group_norm_backward": "grad_out input mean rstd weight grad_input grad_weight grad_bias",
    "batch_norm_elemt_backward": "grad_out input mean invstd weight sum_dy sum_dy_xmu counter grad_input",
    "layer_norm": "input weight bias output mean rstd",
    "group_norm": "input weight bias output mean rstd",
    "batch_norm_stats": "input mean invstd",
    "batch_norm_gather_stats_with_counts": "input mean invstd running_mean running_var counts mean_all invstd_all",
    "batch_norm_elemt": "input weight bias mean invstd output",
    "batch_norm_reduce_backward": "grad_out input mean invstd weight sum_dy sum_dy_xmu grad_weight grad_bias",
}


@pytest.mark.parametrize("operator", _REQUIRED)
def test_of_two_nulls_the_first_parameter_is_reported(operator: str) -> None:
    for first, second in itertools.combinations(_REQUIRED[operator], 2):
        error = _refused(operator, {first: None, second: None})
        assert (error.status, error.parameter) == (NULLPTR, first)


@pytest.mark.parametrize("operator", ["layer_norm_backward", "group_norm_backward", "batch_norm_reduce_backward"])
def test_of_two_null_outputs_the_first_is_reported(operator: str) -> None:
    for first, second in itertools.combinations(OUTPUTS[operator], 2):
        error = _refused(operator, {first: None, second: None})
        assert (error.status, error.parameter) == (NULLPTR, first)


@pytest.mark.parametrize("operator", _ALL_TENSORS)
def test_of_two_wrong_dtypes_the_first_parameter_is_reported(operator: str) -> None:
    shapes = {name: value.shape for name, value in base_call(operator).items() if isinstance(value, np.ndarray)}
    for first, second in itertools.combinations(_ALL_TENSORS[operator].split(), 2):
        wrong = {name: np.ones(shapes[name], np.float64) for name in (first, second)}
        assert _refused(operator, wrong).parameter == first


@pytest.mark.parametrize("operator", _ALL_TENSORS)
def test_of_two_wrong_formats_the_first_parameter_is_reported(operator: str) -> None:
    views = {name: as_view(value) for name, value in base_call(operator).items() if isinstance(value, np.ndarray)}
    for first, second in itertools.combinations(_ALL_TENSORS[operator].split(), 2):
        wrong = {name: replace(views[name], format=Format.NC1HWC0) for name in (first, second)}
        assert _refused(operator, wrong).parameter == first


@pytest.mark.parametrize("operator", _ALL_TENSORS)
def test_of_two_wrong_shapes_the_first_parameter_is_reported(operator: str) -> None:
    call = base_call(operator)
    for first, second in itertools.combinations(_ALL_TENSORS[operator].split(), 2):
        wrong = {name: np.ones((1,) * 9, call[name].dtype) for name in (first, second)}
        if "normalized_shape" in call and "input" in wrong:
            wrong["input"] = np.ones((1,) * 8 + (4,), np.float32)  # the attribute is checked against input before
        assert _refused(operator, wrong).parameter == first


def test_attributes_are_read_in_the_c_order() -> None:
    for first, second in itertools.combinations(("N", "C", "HxW", "group"), 2):
        assert _refused("group_norm_backward", {first: -1, second: -1}).parameter == first
    assert _refused("group_norm", {"group": 0, "eps": "x"}).parameter == "group"
    assert _refused("batch_norm_gather_stats_with_counts", {"momentum": "x", "eps": "x"}).parameter == "momentum"
