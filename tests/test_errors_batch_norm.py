"""Every mistake that a call of BatchNorm's steps can hold, and its answer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from normgrad.contract.arrays import as_view
from normgrad.contract.formats import Format
from support.dtypes import BF16
from support.refusals import NULL, WANTED, Row, a, check_refused, null_row

_FLOATS = "is float64, and must be float32, float16 or bfloat16"


def _nulls(*names: str, words: str = NULL) -> list[Row]:
    return [null_row(name, words) for name in names]


def _float64(shape: tuple[int, ...], *names: str) -> list[Row]:
    return [Row({name: a(*shape, dtype="float64")}, name, _FLOATS, label=f"{name} float64") for name in names]


def _vectors(*names: str) -> list[Row]:
    """What one value per channel must be."""
    per_channel = r"has the shape \(4,\), and must have \(3,\) \(one per channel of input\)"
    return [
        *_float64((3,), *names),
        *(Row({name: a(4)}, name, per_channel, label=f"{name} too long") for name in names),
        *(Row({name: a(3, 1)}, name, "has 2 dimensions .*and must have 1", label=f"{name} rank 2") for name in names),
        *(Row({name: a()}, name, "has 0 dimensions .*and must have 1", label=f"{name} rank 0") for name in names),
    ]


def _formats(*names: str) -> list[Row]:
    blocked = replace(as_view(a(4, 3, 5)), format=Format.NC1HWC0)
    return [
        Row({name: blocked}, name, "has the format NC1HWC0, and must have one of ND, NCHW", label=f"{name} format")
        for name in names
    ]


def _data(first: str) -> list[Row]:
    return [
        *_float64((4, 3, 5), first),
        *_formats(first),
        Row({first: a(3)}, first, r"has 1 dimension \(shape \(3,\)\), and must have 2 to 8"),
        Row({first: a(4, 3, *[1] * 7)}, first, "has 9 dimensions"),
        Row({first: a(4, 0, 5)}, first, r"has the shape \(4, 0, 5\), and must have at least one channel"),
    ]


_COUNTS = "is bfloat16, and must be int32, float16 or float32"

ELEMT_BACKWARD = [
    *_nulls("grad_out", "input", "mean", "invstd", "sum_dy", "sum_dy_xmu", "counter"),
    *_nulls("grad_input", words=WANTED),
    *_data("grad_out"),
    *_float64((4, 3, 5), "input", "grad_input"),
    *_formats("input", "grad_input"),
    Row({"input": a(4, 3)}, "input", r"has the shape \(4, 3\), and must have \(4, 3, 5\) \(grad_out's shape\)"),
    Row({"grad_input": a(4, 3, 4)}, "grad_input", r"has the shape \(4, 3, 4\), and must have \(4, 3, 5\)"),
    *_vectors("mean", "invstd", "weight", "sum_dy", "sum_dy_xmu"),
    Row({"counter": a(2, dtype=BF16)}, "counter", _COUNTS),
    Row({"counter": a(2, dtype="int64")}, "counter", "is int64, and must be int32, float16 or float32"),
    Row({"counter": a(*[1] * 9)}, "counter", "has 9 dimensions .*and must have 0 to 8"),
]

STATS = [
    *_nulls("input"),
    *_nulls("mean", "invstd", words=WANTED),
    *_data("input"),
    *_vectors("mean", "invstd"),
    Row({"eps": "x"}, "eps", "is 'x', and must be a real number"),
]

GATHER = [
    *_nulls("input", "mean", "invstd", "counts"),
    *_nulls("mean_all", "invstd_all", words=WANTED),
    *_data("input"),
    *_float64((2, 3), "mean", "invstd"),
    Row({"mean": a(2, 4)}, "mean", r"has the shape \(2, 4\), and must have \(2, 3\) \(ranks × channels of input\)"),
    Row({"mean": a(3)}, "mean", "has 1 dimension .*and must have 2"),
    Row({"invstd": a(3, 3)}, "invstd", r"has the shape \(3, 3\), and must have \(2, 3\) \(mean's shape\)"),
    *_vectors("running_mean", "running_var", "mean_all", "invstd_all"),
    Row({"momentum": "x"}, "momentum", "is 'x', and must be a real number"),
    Row({"momentum": None}, "momentum", "is None, and must be a real number"),
    Row({"eps": 1j}, "eps", "is 1j, and must be a real number"),
    Row({"counts": a(2, dtype=BF16)}, "counts", _COUNTS),
    Row({"counts": a(3)}, "counts", r"has 3 elements \(shape \(3,\)\), and must have 2 \(one per rank"),
]

ELEMT = [
    *_nulls("input", "mean", "invstd"),
    *_nulls("output", words=WANTED),
    *_data("input"),
    *_vectors("weight", "bias", "mean", "invstd"),
    *_float64((4, 3, 5), "output"),
    Row({"output": a(4, 3)}, "output", r"has the shape \(4, 3\), and must have \(4, 3, 5\) \(input's shape\)"),
    Row({"eps": "x"}, "eps", "is 'x', and must be a real number"),
]

REDUCE = [
    *_nulls("grad_out", "input", "mean", "invstd"),
    *_nulls("sum_dy", "sum_dy_xmu", "grad_weight", "grad_bias", words=WANTED),
    *_data("grad_out"),
    Row({"input": a(4, 3, 1)}, "input", r"has the shape \(4, 3, 1\), and must have \(4, 3, 5\) \(grad_out's shape\)"),
    *_vectors("mean", "invstd", "weight", "sum_dy", "sum_dy_xmu", "grad_weight", "grad_bias"),
    *(
        Row({name: "yes"}, name, "is 'yes', and must be True or False", label=f"{name} text")
        for name in ("input_g", "weight_g", "bias_g")
    ),
]


@pytest.mark.parametrize("row", ELEMT_BACKWARD, ids=str)
def test_batch_norm_elemt_backward(row: Row) -> None:
    check_refused("batch_norm_elemt_backward", row)


@pytest.mark.parametrize("row", STATS, ids=str)
def test_batch_norm_stats(row: Row) -> None:
    check_refused("batch_norm_stats", row)


@pytest.mark.parametrize("row", GATHER, ids=str)
def test_batch_norm_gather_stats_with_counts(row: Row) -> None:
    check_refused("batch_norm_gather_stats_with_counts", row)


@pytest.mark.parametrize("row", ELEMT, ids=str)
def test_batch_norm_elemt(row: Row) -> None:
    check_refused("batch_norm_elemt", row)


@pytest.mark.parametrize("row", REDUCE, ids=str)
def test_batch_norm_reduce_backward(row: Row) -> None:
    check_refused("batch_norm_reduce_backward", row)
