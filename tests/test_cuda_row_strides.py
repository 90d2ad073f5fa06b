"""LayerNorm on a GPU reads and writes rows with any outer strides in place; in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from support.interpreted import backend as backend
from support.interpreted import (
    check_call,
    needs_interpreter,
    random_data,
    random_rstd,
    run_with_interpreter,
    without_interpreter,
)

pytest.importorskip("triton")
pytest.importorskip("torch")

from normgrad.contract.dtypes import FLOAT32
from normgrad.contract.view import contiguous_strides
from normgrad.cuda.launch import Given
from normgrad.cuda.operands import Operand, merge_rows

SHAPE = (2, 3, 4)  # of the outer dimensions
ORDERS = [(0, 1, 2), (1, 0, 2), (2, 1, 0), (0, 2, 1)]  # of these dimensions in memory


@without_interpreter
def test_this_file_passes_with_the_interpreter_on() -> None:
    run_with_interpreter(__file__)


def _ordered(data: np.ndarray, order: tuple[int, ...]) -> np.ndarray:
    """Return the same elements with the outer dimensions in another order in memory."""
    axes = (*order, 3)
    return np.ascontiguousarray(data.transpose(axes)).transpose(np.argsort(axes))


@needs_interpreter
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("dtype", "columns"), [(np.float32, 7), (np.float32, 300), (ml_dtypes.bfloat16, 96)])
@pytest.mark.parametrize("order", ORDERS)
def test_rows_with_any_strides(dtype: Any, columns: int, order: tuple[int, ...]) -> None:
    shape = (*SHAPE, columns)
    x, dy = _ordered(random_data(shape, dtype, 1), order), random_data(shape, dtype, 2)
    weight, bias = random_data((columns,), dtype, 3), random_data((columns,), dtype, 4)
    statistics = random_data((*SHAPE, 1), np.float32, 5), random_rstd((*SHAPE, 1), 6)
    target = _ordered(np.empty(shape, dtype), ORDERS[2])
    vectors = np.empty(columns, dtype), np.empty(columns, dtype)
    check_call("layer_norm", x, [columns], weight, bias, out=(target, None, None))
    check_call("layer_norm_backward", dy, x, [columns], *statistics, weight, bias, out=(target, *vectors))


def _columns_outermost(data: np.ndarray) -> np.ndarray:
    """Return the same elements with the columns outside the last two outer dimensions, as in NCHW data seen as NHWC."""
    return np.ascontiguousarray(data.transpose(0, 3, 1, 2)).transpose(0, 2, 3, 1)


def _every_other_column(data: np.ndarray) -> np.ndarray:
    return np.repeat(data, 2, axis=-1)[..., ::2]


@needs_interpreter
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("columns", [1, 70])
@pytest.mark.parametrize("layout", [_columns_outermost, _every_other_column])
def test_rows_with_strided_columns(dtype: Any, columns: int, layout: Any) -> None:
    shape = (2, 3, 5, columns)
    x, dy = layout(random_data(shape, dtype, 1)), layout(random_data(shape, dtype, 2))
    weight, bias = random_data((columns,), dtype, 3), random_data((columns,), dtype, 4)
    statistics = random_data((*shape[:-1], 1), np.float32, 5), random_rstd((*shape[:-1], 1), 6)
    target = layout(np.empty(shape, dtype))
    vectors = np.empty(columns, dtype), np.empty(columns, dtype)
    check_call("layer_norm", x, [columns], weight, bias, out=(target, None, None))
    check_call("layer_norm_backward", dy, x, [columns], *statistics, weight, bias, out=(target, *vectors))
    check_call("layer_norm_backward", dy, x, [columns], *statistics, weight, bias, out=(x, *vectors))


def _operand(strides: tuple[int, ...]) -> Operand:
    return Operand(Given("input", FLOAT32, True), strides)


def test_outer_dimensions_are_merged_where_all_tensors_allow_it() -> None:
    sizes = (128, 197, 768)
    dense, swapped = _operand(contiguous_strides(sizes)), _operand((768, 128 * 768, 1))
    absent = Operand(None, (1, 1, 1))
    grid, operands = merge_rows(sizes, [dense, dense, absent])
    assert grid == (128 * 197,)
    assert [operand.strides for operand in operands[:2]] == [(768, 1)] * 2
    grid, operands = merge_rows(sizes, [dense, swapped, absent])
    assert grid == (128, 197)
    assert [operand.strides for operand in operands[:2]] == [dense.strides, swapped.strides]


def test_dimensions_of_size_one_are_left_out() -> None:
    grid, (operand,) = merge_rows((1, 6, 1, 5), [_operand((7, 10, 3, 1))])
    assert (grid, operand.strides) == ((6,), (10, 1))
    grid, (operand,) = merge_rows((1, 5), [_operand((7, 1))])
    assert (grid, operand.strides) == ((1,), (5, 1))
