"""Activations and results of two dtypes on a GPU, as under autocast; in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from normgrad.operators.mixed import MIXED
from support.interpreted import backend as backend
from support.interpreted import (
    check_call,
    needs_interpreter,
    random_channels,
    random_data,
    random_rstd,
    run_with_interpreter,
    without_interpreter,
)

pytest.importorskip("triton")
pytest.importorskip("torch")

# Of the activations, and of the output and its gradient.
DTYPES = [(np.float16, np.float32), (ml_dtypes.bfloat16, np.float32), (np.float32, ml_dtypes.bfloat16)]
# N, C, HxW, group: groups that are rows, tiny groups, one group in several CTAs, odd positions.
GROUPS = [(5, 8, 25, 4), (2, 12, 50, 4), (2, 4, 196, 2), (1, 3, 197, 1), (9, 6, 1, 2)]


@without_interpreter
def test_this_file_passes_with_the_interpreter_on() -> None:
    run_with_interpreter(__file__)


def _check(operator: str, *args: Any, out: Any = None) -> tuple[Any, ...]:
    return check_call(operator, *args, out=out, run=MIXED[operator])


@needs_interpreter
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("dtype", "output_dtype"), DTYPES)
@pytest.mark.parametrize("shape", [(6, 300), (3, 97), (20, 17), (9, 1)])
def test_layer_norm(dtype: Any, output_dtype: Any, shape: tuple[int, int]) -> None:
    _, N = shape
    x, dy = random_data(shape, dtype, 1), random_data(shape, output_dtype, 2)
    weight, bias = random_data((N,), np.float32, 3), random_data((N,), np.float32, 4)
    statistics = np.empty((shape[0], 1), np.float32), np.empty((shape[0], 1), np.float32)
    out = np.empty(shape, output_dtype), *statistics
    _, mean, rstd = _check("layer_norm", x, [N], weight, bias, out=out)
    grad_input, grad_weight, grad_bias = _check("layer_norm_backward", dy, x, [N], mean, rstd, weight, bias)
    assert grad_input.dtype == dtype
    assert grad_weight.dtype == grad_bias.dtype == np.float32
    _check("layer_norm_backward", dy, x, [N], mean, rstd, None, None, [True, False, False])


@needs_interpreter
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("dtype", "output_dtype"), DTYPES)
@pytest.mark.parametrize("sizes", GROUPS)
@pytest.mark.parametrize("channels_last", [False, True])
def test_group_norm(dtype: Any, output_dtype: Any, sizes: tuple[int, int, int, int], channels_last: bool) -> None:
    N, C, HxW, group = sizes
    x = random_channels((N, C, HxW), dtype, channels_last, 1)
    dy = random_channels((N, C, HxW), output_dtype, channels_last, 2)
    weight, bias = random_data((C,), np.float32, 3), random_data((C,), np.float32, 4)
    statistics = np.empty((N, group), np.float32), np.empty((N, group), np.float32)
    _, mean, rstd = _check("group_norm", x, weight, bias, *sizes, out=(np.empty_like(dy), *statistics))
    grad_input, grad_weight, grad_bias = _check("group_norm_backward", dy, x, mean, rstd, weight, *sizes)
    assert grad_input.dtype == dtype
    assert grad_weight.dtype == grad_bias.dtype == np.float32
    _check("group_norm_backward", dy, x, mean, rstd, None, *sizes, [False, True, True])


@needs_interpreter
@pytest.mark.usefixtures("poisoned")
def test_gradients_in_another_memory_order() -> None:
    """PyTorch may pass gradients in channels_last beside contiguous data, and the other way round."""
    sizes = (3, 12, 50, 4)
    statistics = random_data((3, 4), np.float32, 3), random_rstd((3, 4), 4)
    for order in (False, True):
        x = random_channels(sizes[:3], ml_dtypes.bfloat16, order, 1)
        dy = random_channels(sizes[:3], np.float32, not order, 2)
        _check("group_norm_backward", dy, x, *statistics, random_data((12,), np.float32, 5), *sizes)
