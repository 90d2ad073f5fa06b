"""Every mistake that a LayerNorm call can hold, and its answer."""

from __future__ import annotations

import pytest

from support.dtypes import BF16, F16
from support.refusals import WANTED, Row, a, check_refused, dtype_row, null_row

BACKWARD = [
    *(null_row(name) for name in ("grad_out", "input", "normalized_shape", "mean", "rstd", "output_mask")),
    *(null_row(name, WANTED) for name in ("grad_input", "grad_weight", "grad_bias")),
    Row({"output_mask": (True, True)}, "output_mask", "has 2 elements, and must have 3"),
    Row({"output_mask": (True,) * 4}, "output_mask", "has 4 elements, and must have 3"),
    Row({"output_mask": ()}, "output_mask", "has 0 elements, and must have 3"),
    Row({"output_mask": True}, "output_mask", "is True, and must be 3 booleans"),
    Row({"output_mask": ("a", 1, 1)}, "output_mask", "an element is 'a', and must be True or False"),
    # dtypes
    dtype_row("grad_out", a(3, 4, dtype="float64"), "is float64, and must be float32, float16 or bfloat16"),
    dtype_row("grad_out", a(3, 4, dtype="int32"), "is int32, and must be float32, float16 or bfloat16"),
    dtype_row("input", a(3, 4, dtype=F16), r"is float16, and must be float32 \(grad_out's dtype\)"),
    dtype_row("mean", a(3, 1, dtype=F16), r"is float16, and must be float32 \(not narrower than input\)"),
    dtype_row("mean", a(3, 1, dtype="float64"), "is float64, and must be float32"),
    dtype_row("rstd", a(3, 1), r"is float32, and must be float16 \(mean's dtype\)", F16),
    dtype_row(
        "weight", a(4, dtype=BF16), r"is bfloat16, and must be float16 or float32 \(input's dtype or float32\)", F16
    ),
    dtype_row("weight", a(4, dtype=F16), "is float16, and must be float32"),
    dtype_row("bias", a(4), r"is float32, and must be bfloat16 \(weight's dtype\)", BF16),
    dtype_row("grad_input", a(3, 4, dtype=F16), r"is float16, and must be float32 \(input's dtype\)"),
    dtype_row("grad_weight", a(4), r"is float32, and must be float16 \(weight's dtype\)", F16),
    dtype_row("grad_bias", a(4, dtype=F16), r"is float16, and must be float32 \(weight's dtype\)"),
    Row(
        {"weight": None, "bias": None, "grad_weight": a(4)}, "grad_weight", "must be float16 .input's dtype", dtype=F16
    ),
    Row({"weight": None, "bias": a(4, dtype=BF16)}, "bias", "must be float16 or float32", dtype=F16),
    # attributes
    Row({"normalized_shape": []}, "normalized_shape", r"is \(\), and must have 1 to 2 elements"),
    Row({"normalized_shape": [1, 3, 4]}, "normalized_shape", r"is \(1, 3, 4\), and must have 1 to 2 elements"),
    Row({"normalized_shape": [3]}, "normalized_shape", r"must equal the last dimensions of input.*\(3, 4\)"),
    Row({"normalized_shape": [4, 3]}, "normalized_shape", "must equal the last dimensions of input"),
    Row({"normalized_shape": [-4]}, "normalized_shape", "is -4, and must not be negative"),
    Row({"normalized_shape": [4.0]}, "normalized_shape", "is 4.0, and must be an integer"),
    Row(
        {"normalized_shape": "{}"},
        "normalized_shape",
        "is '{}': an element is '{', and must be an integer",
        label="braces",
    ),
    # shapes
    Row({"grad_out": a(*[1] * 7, 3, 4)}, "grad_out", "has 9 dimensions .*and must have 1 to 8"),
    Row({"grad_out": a(2, 4)}, "input", r"has the shape \(3, 4\), and must have \(2, 4\) \(grad_out's shape\)"),
    Row({"grad_out": a()}, "grad_out", r"has 0 dimensions \(shape \(\)\), and must have 1 to 8"),
    Row({"input": a(2, 4)}, "input", r"has the shape \(2, 4\), and must have \(3, 4\)"),
    Row({"mean": a(4, 1)}, "mean", r"has 4 elements \(shape \(4, 1\)\), and must have 3 \(one per row of input\)"),
    Row({"mean": a(*[1] * 8, 3)}, "mean", "has 9 dimensions"),
    Row({"rstd": a(3)}, "rstd", r"has the shape \(3,\), and must have \(3, 1\) \(mean's shape\)"),
    Row({"weight": a(1, 4)}, "weight", r"has the shape \(1, 4\), and must have \(4,\) \(normalized_shape\)"),
    Row({"bias": a(5)}, "bias", r"has the shape \(5,\), and must have \(4,\)"),
    Row({"grad_input": a(4, 3)}, "grad_input", r"has the shape \(4, 3\), and must have \(3, 4\) \(input's shape\)"),
    Row({"grad_weight": a(3, 4)}, "grad_weight", r"must have \(4,\)"),
    Row({"grad_bias": a(3)}, "grad_bias", r"must have \(4,\)"),
]

FORWARD = [
    null_row("input"),
    null_row("normalized_shape"),
    null_row("output", WANTED),
    dtype_row("input", a(3, 4, dtype="float64"), "is float64, and must be float32, float16 or bfloat16"),
    dtype_row("weight", a(4, dtype=BF16), "is bfloat16, and must be float16 or float32", F16),
    dtype_row("bias", a(4), "is float32, and must be float16 .weight's dtype", F16),
    dtype_row("output", a(3, 4), "is float32, and must be float16 .input's dtype", F16),
    dtype_row("mean", a(3, 1, dtype=F16), "is float16, and must be float32 .not narrower than input"),
    dtype_row("rstd", a(3, 1), "is float32, and must be bfloat16 .mean's dtype", BF16),
    Row({"normalized_shape": [5]}, "normalized_shape", "must equal the last dimensions of input"),
    Row({"eps": "x"}, "eps", "is 'x', and must be a real number"),
    Row({"eps": None}, "eps", "is None, and must be a real number"),
    Row({"input": a(*[1] * 7, 3, 4)}, "input", "has 9 dimensions"),
    Row({"weight": a(4, 1)}, "weight", r"must have \(4,\)"),
    Row({"bias": a(4, 1)}, "bias", r"must have \(4,\)"),
    Row({"output": a(4, 3)}, "output", r"must have \(3, 4\)"),
    Row({"mean": a(4)}, "mean", "has 4 elements .*must have 3"),
    Row({"rstd": a(2)}, "rstd", "has 2 elements .*must have 3"),
]


@pytest.mark.parametrize("row", BACKWARD, ids=str)
def test_layer_norm_backward(row: Row) -> None:
    check_refused("layer_norm_backward", row)


@pytest.mark.parametrize("row", FORWARD, ids=str)
def test_layer_norm(row: Row) -> None:
    check_refused("layer_norm", row)
