"""Plain calls to break by hand, and the check of what comes of it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import normgrad
from normgrad.contract.status import Status
from support.dtypes import NUMPY

NULLPTR, INVALID, NO_KERNEL = 161001, 161002, 561003
OUTPUTS = {
    "layer_norm_backward": ("grad_input", "grad_weight", "grad_bias"),
    "group_norm_backward": ("grad_input", "grad_weight", "grad_bias"),
    "batch_norm_elemt_backward": ("grad_input",),
    "layer_norm": ("output", "mean", "rstd"),
    "group_norm": ("output", "mean", "rstd"),
    "batch_norm_stats": ("mean", "invstd"),
    "batch_norm_gather_stats_with_counts": ("mean_all", "invstd_all"),
    "batch_norm_elemt": ("output",),
    "batch_norm_reduce_backward": ("sum_dy", "sum_dy_xmu", "grad_weight", "grad_bias"),
}


def a(*shape: int, dtype: str = "float32") -> np.ndarray:
    """An array of ones."""
    return np.ones(shape, NUMPY[dtype])


def base_call(operator: str, dtype: str = "float32") -> dict[str, Any]:
    """A valid call with every tensor there: LayerNorm on (3, 4), GroupNorm on (2, 6, 5) in 3 groups, BatchNorm on
    (4, 3, 5) over 2 ranks. Tensors and outputs by name.
    """

    def t(*shape: int) -> np.ndarray:
        return a(*shape, dtype=dtype)

    sizes = {"N": 2, "C": 6, "HxW": 5, "group": 3}
    mask = {"output_mask": (True, True, True)}
    vectors = {name: t(3) for name in ("mean", "invstd", "weight")}
    calls: dict[str, dict[str, Any]] = {
        "layer_norm_backward": {
            "grad_out": t(3, 4),
            "input": t(3, 4),
            "normalized_shape": [4],
            "mean": t(3, 1),
            "rstd": t(3, 1),
            "weight": t(4),
            "bias": t(4),
            **mask,
            "grad_input": t(3, 4),
            "grad_weight": t(4),
            "grad_bias": t(4),
        },
        "group_norm_backward": {
            "grad_out": t(2, 6, 5),
            "input": t(2, 6, 5),
            "mean": t(2, 3),
            "rstd": t(2, 3),
            "weight": t(6),
            **sizes,
            **mask,
            "grad_input": t(2, 6, 5),
            "grad_weight": t(6),
            "grad_bias": t(6),
        },
        "batch_norm_elemt_backward": {
            "grad_out": t(4, 3, 5),
            "input": t(4, 3, 5),
            **vectors,
            "sum_dy": t(3),
            "sum_dy_xmu": t(3),
            "counter": a(2, dtype="int32"),
            "grad_input": t(4, 3, 5),
        },
        "layer_norm": {
            "input": t(3, 4),
            "normalized_shape": [4],
            "weight": t(4),
            "bias": t(4),
            "eps": 1e-5,
            "output": t(3, 4),
            "mean": t(3, 1),
            "rstd": t(3, 1),
        },
        "group_norm": {
            "input": t(2, 6, 5),
            "weight": t(6),
            "bias": t(6),
            **sizes,
            "eps": 1e-5,
            "output": t(2, 6, 5),
            "mean": t(2, 3),
            "rstd": t(2, 3),
        },
        "batch_norm_stats": {"input": t(4, 3, 5), "eps": 1e-5, "mean": t(3), "invstd": t(3)},
        "batch_norm_gather_stats_with_counts": {
            "input": t(4, 3, 5),
            "mean": t(2, 3),
            "invstd": t(2, 3),
            "running_mean": t(3),
            "running_var": t(3),
            "momentum": 0.1,
            "eps": 1e-5,
            "counts": a(2, dtype="int32"),
            "mean_all": t(3),
            "invstd_all": t(3),
        },
        "batch_norm_elemt": {"input": t(4, 3, 5), **vectors, "bias": t(3), "eps": 1e-5, "output": t(4, 3, 5)},
        "batch_norm_reduce_backward": {
            "grad_out": t(4, 3, 5),
            "input": t(4, 3, 5),
            **vectors,
            "input_g": True,
            "weight_g": True,
            "bias_g": True,
            "sum_dy": t(3),
            "sum_dy_xmu": t(3),
            "grad_weight": t(3),
            "grad_bias": t(3),
        },
    }
    return calls[operator]


def planned(operator: str, call: dict[str, Any]) -> normgrad.Plan:
    """The plan of a call whose outputs stand among its arguments."""
    arguments = dict(call)
    # LayerNorm's and BatchNorm's statistics are outputs of the forward pass and inputs of the backward pass.
    out = tuple(arguments.pop(name) for name in OUTPUTS[operator])
    return getattr(normgrad, operator).plan(**arguments, out=out)


@dataclass(frozen=True)
class Row:
    """One mistake: what is changed in a valid call, and the answer: status, parameter, and words of the text."""

    changes: dict[str, Any]
    parameter: str | None
    words: str
    status: int = INVALID
    dtype: str = "float32"  # of every tensor in the call before the changes
    product: str | None = None
    label: str = field(default="")

    def __str__(self) -> str:
        return self.label or ",".join(self.changes) or str(self.product)


NULL = "is null, and must be given"
WANTED = "is null, and is a requested output"


def null_row(name: str, words: str = NULL) -> Row:
    """An argument that is not given."""
    return Row({name: None}, name, words, NULLPTR, label=f"{name} null")


def dtype_row(name: str, array: np.ndarray, words: str, dtype: str = "float32") -> Row:
    """A tensor of another dtype than the rest of the call."""
    return Row({name: array}, name, words, dtype=dtype, label=f"{name} {array.dtype} beside {dtype}")


def check_refused(operator: str, row: Row) -> None:
    """The call with the row's changes is refused as the row says, whether planned or called."""
    call = base_call(operator, row.dtype)
    planned(operator, call)  # the call is right before it is broken
    call.update(row.changes)
    arrays = [value for value in call.values() if isinstance(value, np.ndarray)]
    before = [array.tobytes() for array in arrays]
    with normgrad.use_product(row.product), pytest.raises(normgrad.ContractError) as caught:
        planned(operator, call)
    check_error(caught.value, operator, row.status, row.parameter, row.words)
    assert [array.tobytes() for array in arrays] == before


def check_error(error: normgrad.ContractError, operator: str, status: int, parameter: str | None, words: str) -> None:
    """Status, its name, operator, parameter and text are all as they must be."""
    assert isinstance(error, ValueError)
    assert (error.status, error.operator, error.parameter) == (status, operator, parameter), str(error)
    assert error.status_name == Status(status).name
    text = str(error)
    assert text.startswith(f"{operator}: {parameter or ''}"), text
    assert re.search(words, text), f"{words!r} is not in {text!r}"
    assert not re.search(r"{\w+}", text), "a parameter is left unnamed"
