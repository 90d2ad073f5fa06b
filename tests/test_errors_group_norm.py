"""Every mistake that a GroupNorm call can hold, and its answer."""

from __future__ import annotations

import pytest

from support.dtypes import BF16, F16
from support.refusals import WANTED, Row, a, check_refused, dtype_row, null_row

SIZES = [
    *(Row({name: -1}, name, "is -1, and must not be negative", label=f"{name} -1") for name in ("N", "C", "HxW")),
    *(
        Row({name: 1.5}, name, "is 1.5, and must be an integer", label=f"{name} 1.5")
        for name in ("N", "C", "HxW", "group")
    ),
    *(
        Row({name: None}, name, "is None, and must be an integer", label=f"{name} None")
        for name in ("N", "C", "HxW", "group")
    ),
    Row({"N": 2**63}, "N", "is 9223372036854775808, and must fit in a signed 64-bit integer"),
    Row({"group": 0}, "group", "is 0, and must be greater than 0", label="group 0"),
    Row({"group": -3}, "group", "is -3, and must be greater than 0", label="group -3"),
    Row({"group": 4}, "group", "is 4, and must divide C = 6", label="group 4"),
    Row({"group": 7}, "group", "is 7, and must divide C = 6", label="group above C"),
    Row(
        {"N": 2**32, "C": 2**16, "HxW": 2**16, "group": 1},
        "N",
        r"makes N·C·HxW = 4294967296·65536·65536, and the product must fit in a signed 64-bit integer",
        label="2^64 elements, which would wrap to 0",
    ),
    Row({"N": 2**31, "C": 2**16, "HxW": 2**16, "group": 1}, "N", "must fit", label="2^63 elements"),
    Row({"N": 2**62, "C": 6, "HxW": 0}, "N", "must fit", label="overflow beside a 0"),
]

BACKWARD = [
    *(null_row(name) for name in ("grad_out", "input", "mean", "rstd", "output_mask")),
    *(null_row(name, WANTED) for name in ("grad_input", "grad_weight", "grad_bias")),
    Row({"output_mask": (True, True)}, "output_mask", "has 2 elements, and must have 3"),
    Row({"output_mask": (True,) * 4}, "output_mask", "has 4 elements, and must have 3"),
    dtype_row("grad_out", a(2, 6, 5, dtype="float64"), "is float64, and must be float32, float16 or bfloat16"),
    dtype_row("input", a(2, 6, 5, dtype=F16), r"is float16, and must be float32 \(grad_out's dtype\)"),
    dtype_row(
        "mean", a(2, 3, dtype=BF16), "is bfloat16, and must be float16 or float32 .grad_out's dtype or float32", F16
    ),
    dtype_row("mean", a(2, 3, dtype=F16), "is float16, and must be float32"),
    dtype_row("rstd", a(2, 3), r"is float32, and must be float16 \(mean's dtype\)", F16),
    dtype_row("weight", a(6), "is float32, and must be float16 .mean's dtype or grad_out's", F16),
    dtype_row("weight", a(6, dtype="int32"), "is int32, and must be float32"),
    dtype_row("grad_input", a(2, 6, 5, dtype=F16), r"is float16, and must be float32 \(grad_out's dtype\)"),
    dtype_row("grad_weight", a(6), r"is float32, and must be float16 \(weight's dtype\)", F16),
    dtype_row("grad_bias", a(6, dtype=F16), r"is float16, and must be float32 \(weight's dtype\)"),
    Row({"weight": None, "grad_weight": a(6)}, "grad_weight", r"must be float16 \(mean's dtype\)", dtype=F16),
    *SIZES,
    Row({"grad_out": a(2, 6, 4)}, "grad_out", r"has 48 elements \(shape \(2, 6, 4\)\), and must have 60 \(N·C·HxW\)"),
    Row({"grad_out": a(*[1] * 8, 60)}, "grad_out", "has 9 dimensions .*and must have 0 to 8"),
    Row({"input": a(61)}, "input", "has 61 elements .*and must have 60"),
    Row({"mean": a(2, 2)}, "mean", r"has 4 elements \(shape \(2, 2\)\), and must have 6 \(N·group\)"),
    Row({"rstd": a()}, "rstd", "has 1 element .*and must have 6"),
    Row({"weight": a(5)}, "weight", r"has 5 elements \(shape \(5,\)\), and must have 6 \(C\)"),
    Row({"grad_input": a(60)}, "grad_input", r"has the shape \(60,\), and must have \(2, 6, 5\) \(input's shape\)"),
    Row({"grad_weight": a(2, 3)}, "grad_weight", r"has the shape \(2, 3\), and must have \(6,\) \(weight's shape\)"),
    Row({"grad_bias": a(1, 6)}, "grad_bias", r"has the shape \(1, 6\), and must have \(6,\) \(weight's shape\)"),
    Row({"weight": None, "grad_weight": a(6, 1)}, "grad_weight", r"must have \(6,\) \(C\)"),
]

FORWARD = [
    null_row("input"),
    *(null_row(name, WANTED) for name in ("output", "mean", "rstd")),
    dtype_row("input", a(2, 6, 5, dtype="int32"), "is int32, and must be float32, float16 or bfloat16"),
    dtype_row("weight", a(6, dtype=BF16), "is bfloat16, and must be float16 or float32", F16),
    dtype_row("bias", a(6), r"is float32, and must be float16 \(weight's dtype\)", F16),
    dtype_row("output", a(2, 6, 5), "is float32, and must be float16", F16),
    dtype_row("mean", a(2, 3, dtype=F16), "is float16, and must be float32"),
    dtype_row("rstd", a(2, 3), "is float32, and must be float16 .mean's dtype", F16),
    *SIZES,
    Row({"eps": "x"}, "eps", "is 'x', and must be a real number"),
    Row({"input": a(59)}, "input", "has 59 elements .*and must have 60"),
    Row({"weight": a(7)}, "weight", "has 7 elements .*and must have 6"),
    Row({"bias": a(7)}, "bias", "has 7 elements .*and must have 6"),
    Row({"output": a(60)}, "output", r"must have \(2, 6, 5\)"),
    Row({"mean": a(7)}, "mean", "has 7 elements .*and must have 6"),
    Row({"rstd": a(7)}, "rstd", "has 7 elements .*and must have 6"),
]


@pytest.mark.parametrize("row", BACKWARD, ids=str)
def test_group_norm_backward(row: Row) -> None:
    check_refused("group_norm_backward", row)


@pytest.mark.parametrize("row", FORWARD, ids=str)
def test_group_norm(row: Row) -> None:
    check_refused("group_norm", row)
